"""Runs of views that an endpoint computes: killed, out of budget, with bad rows; and the model
behind a miss."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.run.report import engine_line
from precompute.plugins.endpoints.session import NAME
from precompute.plugins.endpoints.tests.stand_in import (
    Answer,
    StandIn,
    chat,
    embeddings,
    length_label,
    vector_of,
)
from precompute.store.errors import ModelError
from tests.scene import Scene, files_of_at_most

ROWS = 600
KEY = "sk-very-secret-0123"
VIEW = """
name: labels
entity: [id]
source: {{sql: "SELECT i AS id, 'number ' || i AS text FROM range({rows}) t(i)"}}
model:
  use: chat_endpoint
  args:
    url: {url}
    model: small
    prompt: "Label: {{text}}"
    schema: {{type: object, properties: {{label: {{enum: [long, short]}}, score: {{type: number}}}}, required: [label, score]}}
    api_key_env: STAND_IN_KEY
    limits: {{in_flight: 16}}
    budget: {{tokens: {tokens}}}
features: {{label: {{dtype: string}}, score: {{dtype: float64}}}}
ttl: 26h
max_rejected: 0.02
gates: {{constant: null, shape: null}}
fallback: {{enabled: true, deadline: 5s}}
"""

MakeLabels = Callable[..., Scene]


@pytest.fixture
def labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLabels:
    """Makes a project with a view of labels; its workers compute none of them."""
    monkeypatch.setenv("STAND_IN_KEY", KEY)

    def make(stand_in: StandIn, rows: int = ROWS, tokens: int = 10**9) -> Scene:
        (tmp_path / "views").mkdir(exist_ok=True)
        (tmp_path / "project.yaml").write_text(
            "root: ./var/root\nonline: table:./var/online\nengine: {workers: 2}\n"
        )
        (tmp_path / "views" / "labels.yaml").write_text(
            VIEW.format(url=stand_in.url, rows=rows, tokens=tokens)
        )
        return Scene(tmp_path, {})

    return make


def values(scene: Scene) -> dict[int, dict[str, Any]]:
    return {
        row["id"]: {"label": row["label"], "score": row["score"]}
        for row in scene.rows(view="labels")
    }


def expected(rows: int = ROWS) -> dict[int, dict[str, Any]]:
    return {i: length_label(f"Label: number {i}") for i in range(rows)}


def cached_answers(scene: Scene) -> int:
    """Answers in the cache."""
    file = scene.folder / "var" / "answers" / NAME
    if not file.exists():
        return 0
    connection = sqlite3.connect(file)
    try:
        return int(
            connection.execute(
                "SELECT count(*) FROM answers WHERE instr(answer, 'label') > 0"
            ).fetchone()[0]
        )
    except sqlite3.OperationalError:
        # not made yet
        return 0
    finally:
        connection.close()


def test_a_killed_run_pays_for_no_answer_twice(labels: MakeLabels) -> None:
    with StandIn(delay_s=0.04) as stand_in:
        scene = labels(stand_in)
        command = [
            sys.executable,
            "-m",
            "precompute.jobs.cli",
            "-c",
            str(scene.folder),
            "run",
            "labels",
        ]
        for wanted in (100, 300):
            run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while run.poll() is None and cached_answers(scene) < wanted:
                time.sleep(0.005)
            os.kill(run.pid, signal.SIGKILL)
            assert run.wait() == -signal.SIGKILL
            assert wanted <= cached_answers(scene) < ROWS
        before, paid = cached_answers(scene), stand_in.seen.total()
        # each of two kills lost what was in flight, and what one commit had in hand; nothing that
        # had been committed
        assert before <= paid <= before + 2 * 2 * 16
        report = scene.run("labels")
        assert (report.status, report.counts["written"]) == ("published", ROWS)
        assert values(scene) == expected()
        assert stand_in.seen.total() - paid == ROWS - before
        # what the killed ones have paid counts in the budget, once
        engine = report.engine["endpoint"]
        assert f" · requests {engine['requests']:,} · " in engine_line(report.engine)
        assert ROWS * 11 <= engine["input_tokens"] <= stand_in.seen.total() * 12
        assert sum(count - 1 for count in stand_in.seen.values()) <= 2 * 2 * 16
        # nor does anybody pay for what is computed once more
        full = scene.run("labels", full=True)
        assert full.status == "published"
        assert full.engine["endpoint"]["input_tokens"] == 0
        assert stand_in.seen.total() - paid == ROWS - before


def test_a_run_out_of_budget_says_so_and_is_taken_up_again(
    labels: MakeLabels, capfd: pytest.CaptureFixture[str]
) -> None:
    with StandIn() as stand_in:
        assert labels(stand_in, tokens=9_000).cli("run", "labels") == 1
        said = capfd.readouterr().err
        assert "the run's budget of 9,000 tokens is spent" in said
        assert "answers of this run are cached: the next one pays for none of them again" in said
        assert "Traceback" not in said
        first = stand_in.seen.total()
        assert 100 < first < ROWS
        report = labels(stand_in).run("labels")
        assert report.engine["endpoint"]["requests"] == ROWS - first
        assert report.engine["endpoint"]["from_cache"] + report.resumed == first
        scene = labels(stand_in)
        assert values(scene) == expected()
        assert set(stand_in.seen.values()) == {1}
        written = [
            path
            for path in scene.folder.rglob("*")
            if path.is_file() and KEY.encode() in path.read_bytes()
        ]
        assert written == []


VECTORS = """
name: vectors
entity: [id]
source: {{sql: "SELECT i AS id, 'number ' || i AS text FROM range(60) t(i)"}}
model: {{use: embedding_endpoint, args: {{url: {url}, model: small}}}}
features: {{embedding: {{dtype: float32, dim: 4}}}}
ttl: 26h
max_rejected: 0.5
"""
ZEROS = [0.0] * 4
BROKEN: dict[str, tuple[Callable[[int], bool], list[float]]] = {
    "of another length": (lambda row: row % 10 == 0, [1.0, 2.0]),
    "all zeros": (lambda row: row % 10 == 0, ZEROS),
    "one and the same, which a gate refuses": (lambda row: row % 3 > 0, [1.0, 2.0, 3.0, 4.0]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_broken_service_answered_is_sent_again_once_it_is_mended(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing else is."""
    is_bad, vector = BROKEN[name]
    gated = "gate" in name

    def behave(texts: list[str]) -> dict[str, Any]:
        body = embeddings(texts)
        for item in body["data"]:
            if is_bad(int(texts[item["index"]].split()[-1])):
                item["embedding"] = vector
        return body

    with StandIn(behave=lambda text, seen: Answer(behave)) as stand_in:
        (tmp_path / "views").mkdir()
        (tmp_path / "project.yaml").write_text("root: ./var/root\nonline: table:./var/online\n")
        (tmp_path / "views" / "vectors.yaml").write_text(VECTORS.format(url=stand_in.url))
        scene, bad = Scene(tmp_path, {}), {i for i in range(60) if is_bad(i)}
        assert scene.cli("run", "vectors") == (3 if gated else 0)
        assert ("first: embedding: share of one vector 0.6667" in capfd.readouterr().err) == gated
        assert stand_in.seen.total() == 60
        stand_in.behave = lambda text, seen: None
        # neither computes again what is cached
        scene.reread().cli("run", "vectors", "--full")
        assert stand_in.seen.total() == 60
        told = "and run again. A service is asked again by --full --retry-rejected for what was"
        assert (told in capfd.readouterr().err) == gated
        if vector is ZEROS:
            assert scene.cli("explain", "vectors", "0") == 0
            said = "all zeros (as answered before: run --retry-rejected sends it once more)"
            assert said in capfd.readouterr().out
        options = ["--full", "--retry-rejected"] if gated else ["--retry-rejected"]
        assert scene.reread().cli("run", "vectors", *options) == 0
        assert {row["id"]: row["embedding"] for row in scene.rows(view="vectors")} == {
            i: vector_of(f"number {i}") for i in range(60)
        }
        assert stand_in.seen == {f"number {i}": 1 + (i in bad) for i in range(60)}


def test_bad_rows_are_bad_rows_and_a_miss_is_answered(labels: MakeLabels) -> None:
    def behave(text: str, seen: int) -> Answer | None:
        return Answer(chat("{")) if text.endswith(("13", "299")) else None

    with StandIn(behave=behave) as stand_in:
        scene = labels(stand_in)
        bad = {i for i in range(ROWS) if str(i).endswith(("13", "299"))}
        report = scene.run("labels")
        assert (report.status, report.counts["rejected"]) == ("published", len(bad))
        assert values(scene) == {i: row for i, row in expected().items() if i not in bad}
        assert set(stand_in.seen.values()) == {1}
        with scene.answering() as lookup:
            answer = lookup.get("labels", [1, 13]).to_pylist()
        assert [(row["status"], row["label"], row["reason"]) for row in answer] == [
            ("fresh", "short", None),
            ("missing", None, "model_error"),
        ]
        assert stand_in.seen["Label: number 13"] == 1


def test_a_feature_that_no_answer_has_is_a_mistake_before_anything_is_sent(
    labels: MakeLabels, capfd: pytest.CaptureFixture[str]
) -> None:
    with StandIn() as stand_in:
        scene = labels(stand_in)
        path = scene.folder / "views" / "labels.yaml"
        path.write_text(
            path.read_text().replace("score: {dtype: float64}", "scores: {dtype: float64}")
        )
        assert scene.reread().cli("run", "labels") == 2
        assert re.search(
            r"labels\.yaml:\d+: features\.scores: the model's answers have no 'scores'; did you mean 'score'",
            capfd.readouterr().err,
        )
        assert stand_in.requests == []


def test_an_endpoint_that_is_down_changes_nothing_that_is_live(labels: MakeLabels) -> None:
    with StandIn() as stand_in:
        scene = labels(stand_in, rows=20)
        assert scene.run("labels").status == "published"
        stand_in.behave = lambda text, seen: Answer({"error": {"message": "no such key"}}, 401)
        with pytest.raises(ModelError, match=r"no such key.*it wants another key"):
            labels(stand_in, rows=30).run("labels")
        assert values(scene) == expected(20)


def test_an_endpoint_that_answers_nothing_is_no_rows_fault(
    labels: MakeLabels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fewer rows than show that it is down."""
    monkeypatch.setattr("precompute.plugins.endpoints.endpoint._pause_s", lambda tries: 0.0)
    with StandIn() as stand_in:
        stand_in.behave = lambda text, seen: Answer({"error": {"message": "down", "code": 502}})
        with pytest.raises(
            ModelError,
            match=r"answered none of the rows that it was sent \(.*502.*\); nothing was published",
        ):
            labels(stand_in, rows=3).run("labels")
        assert labels(stand_in, rows=3).cli("run", "labels") == 1
        stand_in.behave = lambda text, seen: None
        assert labels(stand_in, rows=3).run("labels").status == "published"


DOWN = Answer({"error": {"message": "down", "code": 502}})


@pytest.mark.parametrize(
    ("in_delta", "max_rejected"),
    [(True, "0.02"), (True, "1.0"), (False, "1.0")],
    ids=["too many", "all allowed", "all others cached"],
)
def test_an_outage_is_no_rows_fault_where_few_rows_are_sent(
    labels: MakeLabels,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    in_delta: bool,
    max_rejected: str,
) -> None:
    """However many rows may be rejected, and whatever was rejected before."""
    monkeypatch.setattr("precompute.plugins.endpoints.endpoint._pause_s", lambda tries: 0.0)

    def scene(rows: int) -> Scene:
        made, file = labels(stand_in, rows=rows), tmp_path / "rows.csv"
        if in_delta:
            file.write_text("i\n" + "".join(f"{i}\n" for i in range(rows)))
            path = tmp_path / "views" / "labels.yaml"
            text = path.read_text().replace(f"range({rows})", f"read_csv('{file}')")
            path.write_text(text.replace("max_rejected: 0.02", f"max_rejected: {max_rejected}"))
        return made.reread()

    def behave(text: str, seen: int) -> Answer | None:
        return Answer(chat("{")) if text.endswith("99") else None

    with StandIn(behave=behave) as stand_in:
        assert scene(100).run("labels").counts["rejected"] == 1
        live, before = scene(100).live("labels"), values(scene(100))
        assert set(before) == set(range(99))
        stand_in.behave = lambda text, seen: DOWN
        for _ in range(2):
            stand_in.seen.clear()
            capfd.readouterr()
            assert scene(103).cli("run", "labels") == 1
            assert re.search(
                r"labels\.yaml:7: model\.args: the service answered none of the rows that it was"
                r" sent \(.*\); nothing was published and the live snapshot stays: look at the"
                r" service, and run again\n",
                capfd.readouterr().err,
            )
            assert set(stand_in.seen) == {f"Label: number {i}" for i in (100, 101, 102)}
            assert (scene(103).live("labels"), values(scene(103))) == (live, before)
        # and where some had an answer, what had none is a bad row, of the service
        stand_in.behave = lambda text, seen: DOWN if text.endswith("102") else None
        stand_in.seen.clear()
        report = scene(103).run("labels")
        assert (report.status, report.counts["rejected"]) == ("published", 2)
        sent = {f"Label: number {i}": 5 if i == 102 else 1 for i in (100, 101, 102)}
        assert stand_in.seen == sent
        stand_in.behave = lambda text, seen: None
        assert scene(103).cli("run", "labels", "--retry-rejected") == 0
        assert values(scene(103)) == expected(103)


def test_rows_that_a_service_refused_have_a_remedy_of_their_own(
    labels: MakeLabels, capfd: pytest.CaptureFixture[str]
) -> None:
    with StandIn(
        behave=lambda text, seen: Answer(chat("{")) if text.endswith("7") else None
    ) as stand_in:
        assert labels(stand_in, rows=10).cli("run", "labels") == 3
        assert re.search(
            r"view 'labels': 1 row rejected so far, 0 allowed \(1× .*run --retry-rejected sends it"
            r" once more.*\); nothing was published .* See .*rejected\.parquet; look at the service,"
            r" then precompute run labels --retry-rejected, or raise max_rejected\n",
            capfd.readouterr().err,
        )
        stand_in.behave = lambda text, seen: None
        assert labels(stand_in, rows=10).cli("run", "labels", "--retry-rejected") == 0
        assert values(labels(stand_in, rows=10)) == expected(10)


def test_a_full_disk_costs_no_answer_that_was_paid(
    labels: MakeLabels, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither one that was cached, nor what is live; and the message says to make room."""
    with StandIn() as stand_in:
        assert labels(stand_in, rows=20).run("labels").status == "published"
        live, codes = labels(stand_in, rows=20).live("labels"), []
        for limit in (4_000, 10_000_000):
            scene = labels(stand_in, rows=24)
            with files_of_at_most(limit):
                codes.append(scene.cli("run", "labels"))
            said = capfd.readouterr().err
            if codes[-1]:
                assert "make room" in said
                assert scene.live("labels") == live
        assert codes == [1, 0]
        assert values(labels(stand_in, rows=24)) == expected(24)
        assert all(stand_in.seen[f"Label: number {i}"] == 1 for i in range(20))
