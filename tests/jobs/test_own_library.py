"""A loaded model is compared with its own library: once for each fingerprint, on rows of its view,
before a row is computed; what differs is refused."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from precompute import own_library
from precompute.jobs.commands.run import describe_report
from precompute.jobs.ops.history import history
from precompute.jobs.run.judge import library
from precompute.jobs.run.shards import worker
from precompute.jobs.setup.validate import validate
from precompute.model import OwnLibrary
from precompute.own_library import Answer, ask, compared, telling_rows, without_asking
from precompute.store.disk.record import plain, replace
from precompute.store.errors import ModelError
from precompute.store.feature_view import Feature, FeatureView, LibraryCheck
from precompute.store.offline.snapshot import Snapshot
from precompute.store.times import Partition, containing
from precompute.techniques.machine import has_bf16
from tests import library_models
from tests.fixtures import PROCESSES, MakeProject
from tests.people import Made, cases, of_plugins, static_embedding, texts, view_of
from tests.scene import Scene
from tests.server import eventually

# ---- models that their libraries saved


def text_encoder(folder: Path) -> Made:
    """With prompts, and a Dense layer after its pooling."""
    from tests.precompute.sentence_models import modules, sentence_model

    dense = modules.Dense(16, 8, activation_function=torch.nn.Tanh())
    prompts = {"query": "query : ", "document": "the passage document : "}
    sentence_model(folder / "made", parts=[dense, modules.Normalize()], prompts=prompts, limit=32)
    features = {"embedding": {"dtype": "float16", "dim": 8}}
    args = {"path": "./made/saved", "device": "cpu"}
    file, by = "made/saved/model.safetensors", "sentence-transformers"
    return Made(args, features, texts(), {}, {}, file, library=by)


def cross_encoder(folder: Path) -> Made:
    """Of pairs, whose folder names what comes after the logits."""
    from tests.precompute.test_text_classifier import SIGMOID, saved

    saved(folder / "cross", num_labels=1, sentence_transformers={"activation_fn": SIGMOID})
    table = texts().append_column("other", pa.array(["a heist in the snow"] * len(texts())))
    args = {"path": "./cross", "columns": ["text", "other"], "device": "cpu"}
    features, by = {"score": {"dtype": "float32"}}, "sentence-transformers"
    return Made(args, features, table, {}, {}, "cross/model.safetensors", library=by)


def static_of_sentence_transformers(folder: Path) -> Made:
    from tests.precompute.sentence_models import SentenceTransformer, modules, tokenizer

    words = tokenizer("bert")
    rows = max(words.get_vocab().values()) + 1
    table = np.random.default_rng(0).normal(size=(rows, 6)).astype(np.float32)
    first = modules.StaticEmbedding(words.backend_tokenizer, embedding_weights=table)
    made = SentenceTransformer(modules=[first, modules.Normalize()], device="cpu")
    made.save(str(folder / "static"), create_model_card=False)
    features = {"embedding": {"dtype": "float32", "dim": 6}}
    args = {"path": "./static", "device": "cpu"}
    file, by = "static/model.safetensors", "sentence-transformers"
    return Made(args, features, texts(), {}, {}, file, library=by)


CASES: dict[str, Callable[[Path], Made]] = {
    **cases(),
    "text_encoder": text_encoder,
    "text_classifier of pairs": cross_encoder,
    "static_embedding of sentence-transformers": static_of_sentence_transformers,
}


class Libraries:
    """Asks in this process, and counts how often; a process of its own imports torch each time.
    While there is an ``error`` that is the answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error = ""

    def ask(self, own: OwnLibrary, rows: pa.RecordBatch) -> Answer:
        self.asked.append(own.name)
        if self.error:
            return Answer(error=self.error)
        module, _, function = own.by.partition(":")
        # as it goes through a pipe
        given = json.loads(json.dumps(dict(own.given)))
        predict = getattr(importlib.import_module(module), function)(**given)
        taken, made = own_library._answered(predict, rows)
        return Answer(made, tuple(taken))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    made = Libraries()
    monkeypatch.setattr(library, "ask", made.ask)
    return made


@pytest.fixture
def with_all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started have what tests' processes do without."""
    path = [entry for entry in sys.path if entry != PROCESSES]
    monkeypatch.setattr(sys, "path", path)


def project_of(make_project: MakeProject, folder: Path, case: str, **over: Any) -> Scene:
    """A view of this case's model."""
    (folder / "project").mkdir(exist_ok=True)
    made = CASES[case](folder / "project")
    view = view_of(case.partition(" ")[0], made, **over)
    return make_project(made.table, view=view)


def check_of(report: Any) -> LibraryCheck:
    assert report.library is not None
    return report.library


# ---- equal


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_equal_to_its_own_library_and_that_is_shown(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    case: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "project").mkdir()
    made = CASES[case](tmp_path / "project")
    project = make_project(made.table, view=view_of(case.partition(" ")[0], made))
    report = project.run()
    found = check_of(report)
    if not made.library:
        assert (found.said, libraries.asked) == (f"computed by {found.library} itself", [])
        return
    assert libraries.asked == [made.library]
    assert (found.verdict, found.library) == ("equal", made.library)
    assert found.said.startswith(f"equal to {made.library} {found.version} in 8 rows (")
    assert found.worst < 5e-6
    # everywhere the same words
    assert project.live_snapshot().library == found
    assert project.status()["library"] == plain(found)
    (event,) = [e for e in history(project, "numbers", 9) if e["kind"] == "snapshot"]
    assert event["library"] == plain(found)
    for command in ("history", "log", "status"):
        assert project.cli(command, *["numbers"] * (command != "status")) == 0
        assert found.said in capsys.readouterr().out, command
    assert f"  library: {found.said}" in describe_report(report).splitlines()
    (check,) = [check for check in validate(project) if check.check == "model"]
    assert check.ok
    assert f"equal to {made.library} {found.version} in " in check.found


@pytest.mark.skipif(not has_bf16(), reason="no such instructions here")
def test_the_precision_makes_no_difference(
    make_project: MakeProject, tmp_path: Path, libraries: Libraries
) -> None:
    exact = check_of(project_of(make_project, tmp_path, "text_encoder").run())
    model = {"use": "text_encoder", "args": {"path": "./made/saved", "device": "cpu"}}
    view = view_of("text_encoder", text_encoder(tmp_path / "project"))
    anything = {"cosine": 0.5, "recall_at_10": 0.0, "rows": {"bound": 9, "worst": 9, "median": 1}}
    low = make_project(view=view | {"model": {**model, "precision": "bf16"}, "accuracy": anything})
    report = low.materialize(full=True)
    # both in float32: what bfloat16 makes of it, accuracy judges
    assert check_of(report) == exact
    assert libraries.asked == ["sentence-transformers"] * 2


@pytest.mark.skipif(not has_bf16(), reason="no such instructions here")
def test_it_is_asked_in_float32_where_the_models_code_is_compared_too(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unchanged rows are computed again in the view's precision, which ends float32."""
    made = text_encoder(tmp_path / "project")
    mine = "from precompute.models.text_encoder import TextEncoder\n\nclass Mine(TextEncoder):\n"
    (tmp_path / "project/mine.py").write_text(f"{mine}    pass\n")
    anything = {"cosine": 0.5, "recall_at_10": 0.0, "rows": {"bound": 9, "worst": 9, "median": 1}}
    view = view_of("text_encoder", made) | {
        "model": {"use": "mine:Mine", "args": made.args, "precision": "bf16"},
        "accuracy": anything,
    }
    make_project(made.table, view=view).materialize()
    (tmp_path / "project/mine.py").write_text(f"{mine}    another = 1\n")
    monkeypatch.setattr(library, "version_of", lambda own: "9")
    more = pa.table({"id": [1000], "text": ["a warm film"]}, made.table.schema)
    report = make_project(pa.concat_tables([made.table, more]), view=view).materialize()
    assert [said for said in report.attention if "mine.py changed" in said]
    assert check_of(report).verdict == "equal"
    assert libraries.asked == ["sentence-transformers"] * 2


# ---- different


def other_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("precompute.models.text_encoder")
    read = module.read_sentence_folder
    monkeypatch.setattr(
        module, "read_sentence_folder", lambda of: dataclasses.replace(read(of), prompt="")
    )


def other_pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    from precompute.text import sentence_folder as module

    pooled = module._pooled
    monkeypatch.setattr(module, "_pooled", lambda _, *rest: pooled("max", *rest))


def other_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    from precompute.models import text_classifier as module

    monkeypatch.setattr(module, "_activation", lambda *_: "none")


def other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from precompute.models import static_embedding as module

    table = module._table
    monkeypatch.setattr(module, "_table", lambda *given, **more: table(*given, **more) + 0.01)


WRONG: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "prompt": ("text_encoder", other_prompt, {}),
    "pooling": ("text_encoder", other_pooling, {}),
    "activation": ("text_classifier of pairs", other_activation, {}),
    "activation of transformers": ("text_classifier", other_activation, {}),
    "table of model2vec": ("static_embedding", other_weights, {}),
    "table": ("static_embedding of sentence-transformers", other_weights, {}),
    **of_plugins("WRONG"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_differs_is_refused_before_a_row_is_computed(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: str,
) -> None:
    case, make_wrong, more = WRONG[wrong]
    make_wrong(monkeypatch)
    (tmp_path / "project").mkdir()
    made = CASES[case](tmp_path / "project")
    use = case.partition(" ")[0]
    model = {"use": use, "args": made.args | more}
    project = make_project(made.table, view=view_of(use, made, model=model))
    assert project.cli("run", "numbers") == 1
    said = capsys.readouterr().err
    feature = f"({'|'.join(made.features)})"
    assert re.search(
        rf"numbers\.yaml:\d+: model\.use: the model differs from {made.library} [\d.]+ in \d of"
        rf" \d rows, such as '\d+': {feature} .*\(.+ here, .+ there\)\. Nothing was computed\. If the"
        r" library is right, .* write a model class of your own that calls it; if this is as it"
        r" should be: precompute run numbers --accept library",
        said,
    ), said
    assert (project.numbers(), list(project.store.data.rglob("*.parquet"))) == ([], [])
    assert project.report().status == "failed"
    (check,) = [check for check in validate(project) if check.check == "model"]
    assert not check.ok
    assert check.found.startswith(f"it differs from {made.library}")
    # accepted by name, and remembered so
    asked = len(libraries.asked)
    report = project.materialize(accept=["library"])
    assert (report.status, check_of(report).accepted) == ("committed", True)
    assert len(libraries.asked) == asked + 1
    project.materialize(full=True)
    assert len(libraries.asked) == asked + 1
    assert project.snapshot().library == report.library


# ---- once


def test_it_is_asked_once_for_a_fingerprint_and_a_version(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "project").mkdir()
    made = static_embedding(tmp_path / "project")
    view = view_of("static_embedding", made)
    first = check_of(make_project(made.table, view=view).run())
    assert libraries.asked == ["model2vec"]
    # by the manifest that it builds on; nothing to do; every row
    for full in (False, False, True):
        fewer = make_project(made.table.slice(0, 35), view=view)
        assert check_of(fewer.run(full=full)) == first
    assert libraries.asked == ["model2vec"]
    # another fingerprint, and back again: by the report of an earlier run
    raw = view | {"model": {"use": "static_embedding", "args": made.args | {"normalize": False}}}
    other = make_project(view=raw).materialize()
    assert check_of(other).verdict == "equal"
    assert len(libraries.asked) == 2
    assert check_of(make_project(view=view).materialize(full=True)) == first
    assert len(libraries.asked) == 2
    # another version of the library
    monkeypatch.setattr(library, "version_of", lambda _: "9.9")
    again = check_of(make_project(view=view).materialize(full=True))
    assert (again.version, len(libraries.asked)) == ("9.9", 3)


TOO_LONG = "took longer than 300 s"


def test_what_had_no_answer_is_asked_again_once_a_run(
    make_project: MakeProject, tmp_path: Path, libraries: Libraries
) -> None:
    project = project_of(make_project, tmp_path, "static_embedding")
    for n, error in enumerate(
        (
            TOO_LONG,
            "ended its process: it was ended by signal 9 (SIGKILL), as by a system that is out of memory",
        )
    ):
        libraries.error = error
        found = check_of(project.materialize(full=True))
        assert found.verdict == "not checked"
        assert found.said.endswith(error)
        assert len(libraries.asked) == n + 1
    libraries.error = ""
    for _ in range(2):
        assert check_of(project.materialize(full=True)).verdict == "equal"
        assert len(libraries.asked) == 3


def test_a_backfill_waits_once_for_a_library_that_hangs(
    make_project: MakeProject, tmp_path: Path, libraries: Libraries
) -> None:
    project = project_of(make_project, tmp_path, "static_embedding", partition=BY_DAY, source=DAYS)
    libraries.error = TOO_LONG
    found = [
        check_of(project.materialize(partition=day(number), backfill=backfill))
        for backfill, number in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5))
    ]
    assert {check.said for check in found} == {f"not checked: model2vec {MODEL2VEC} {TOO_LONG}"}
    assert len(libraries.asked) == 2
    project.materialize(partition=day(6))
    assert len(libraries.asked) == 3


@pytest.mark.parametrize("without", ["answer", "library"])
def test_what_differs_stays_refused_without_another_answer(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    monkeypatch: pytest.MonkeyPatch,
    without: str,
) -> None:
    (tmp_path / "project").mkdir()
    made = static_embedding(tmp_path / "project")
    view = view_of("static_embedding", made)
    # a snapshot of this fingerprint from before the library was there
    with monkeypatch.context() as before:
        before.setattr(own_library, "version_of", lambda _: None)
        make_project(made.table, view=view).run()
    other_weights(monkeypatch)
    view |= {"model": {"use": "static_embedding", "args": made.args}}
    project = make_project(made.table, view=view)
    with pytest.raises(ModelError, match="differs from model2vec"):
        project.materialize(full=True)
    refused = check_of(project.report())
    assert (refused.verdict, refused.accepted) == ("differs", False)
    if without == "answer":
        libraries.error = TOO_LONG
    else:
        monkeypatch.setattr(own_library, "version_of", lambda _: None)
        monkeypatch.setattr(library, "version_of", lambda _: None)
    for _ in range(2):
        with pytest.raises(ModelError, match=re.escape(refused.said)):
            project.materialize(full=True)
        assert check_of(project.report()) == refused
    accepted = check_of(project.run(full=True, accept=["library", "moved"]))
    assert accepted == dataclasses.replace(refused, accepted=True)
    assert project.live_snapshot().library == accepted
    # nothing asks again the next night, whatever there is then
    asked = len(libraries.asked)
    if without == "answer":
        assert check_of(project.run(full=True)) == accepted
        assert len(libraries.asked) == asked


def test_another_model_is_not_held_by_what_was_refused(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "project").mkdir()
    made = static_embedding(tmp_path / "project")
    with monkeypatch.context() as wrong:
        other_weights(wrong)
        with pytest.raises(ModelError, match="differs from model2vec"):
            make_project(made.table, view=view_of("static_embedding", made)).run()
    libraries.error = TOO_LONG
    raw = {"model": {"use": "static_embedding", "args": made.args | {"normalize": False}}}
    project = make_project(view=view_of("static_embedding", made, **raw))
    assert check_of(project.run()).verdict == "not checked"


def test_a_manifest_of_before_has_no_check_and_is_read(
    make_project: MakeProject, tmp_path: Path, libraries: Libraries
) -> None:
    project = project_of(make_project, tmp_path, "static_embedding")
    project.run()
    snapshot = project.live_snapshot()
    assert Snapshot.from_bytes(snapshot.to_bytes(), "m", project.store.segment) == snapshot
    before = replace(snapshot, library=None)
    assert Snapshot.from_bytes(before.to_bytes(), "m", project.store.segment).library is None
    # where a reader of before finds what it knows
    body = json.loads(before.to_bytes())
    assert body.pop("library") is None
    own = OwnLibrary("model2vec", "m:f")
    known = [
        library.known_check(own, model, [one])
        for model, one in (
            (snapshot.model, before),
            (snapshot.model, snapshot),
            ("another", snapshot),
            (snapshot.model, project.report()),
        )
    ]
    assert known == [None, snapshot.library, None, snapshot.library]


BY_DAY = {"by": "day", "start": "2026-03-01"}
DAYS = {"sql": "SELECT * FROM read_parquet('${data}/data.parquet') WHERE $start < $end"}
MODEL2VEC = importlib.metadata.version("model2vec")


def day(number: int) -> Partition:
    """Of March 2026."""
    return containing("day", datetime(2026, 3, number, tzinfo=UTC))


def test_partitions_share_what_is_known(
    make_project: MakeProject, tmp_path: Path, libraries: Libraries
) -> None:
    project = project_of(make_project, tmp_path, "static_embedding", partition=BY_DAY, source=DAYS)
    for number in (1, 2, 3):
        assert check_of(project.materialize(partition=day(number))).verdict == "equal"
    assert libraries.asked == ["model2vec"]


def test_a_difference_is_accepted_for_all_partitions(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other_weights(monkeypatch)
    project = project_of(
        make_project,
        tmp_path,
        "static_embedding",
        partition={**BY_DAY, "serve": "all"},
        source=DAYS,
    )
    for number in (1, 2):
        with pytest.raises(ModelError, match="differs from model2vec"):
            project.run(partition=day(number))
    accepted = check_of(project.run(partition=day(1), accept=["library"]))
    assert (accepted.accepted, len(libraries.asked)) == (True, 3)
    for number in (2, 3):
        assert check_of(project.run(partition=day(number))) == accepted
    assert len(libraries.asked) == 3
    assert {project.snapshot(number).library for number in project.numbers()} == {accepted}


WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"chunk": {"column": "text", "tokens": 8, "overlap": 2, "tokenizer": "./made/saved"}},
    "a frame": {"source": {"frame": ["id", "text"]}},
    "a join": {
        "source": {
            "sql": "WITH texts AS (SELECT * FROM read_parquet('${data}/data.parquet'))"
            " SELECT texts.* FROM texts JOIN read_parquet('${data}/data.parquet') AS more USING"
            " (id) WHERE more.text IS NOT NULL OR id > 0"
        }
    },
    "a bad row is null": {"bad_rows": "null"},
}


@pytest.mark.parametrize("way", WAYS)
def test_however_rows_come_they_are_compared(
    make_project: MakeProject, tmp_path: Path, libraries: Libraries, way: str
) -> None:
    (tmp_path / "project").mkdir()
    made = text_encoder(tmp_path / "project")
    project = make_project(made.table, view=view_of("text_encoder", made, **WAYS[way]))
    given = {"frame": made.table.to_pandas()} if way == "a frame" else {}
    found = check_of(project.run(**given))
    assert found.said.startswith(f"equal to sentence-transformers {found.version} in 8 rows (")
    assert check_of(project.run(full=True, **given)) == found
    assert libraries.asked == ["sentence-transformers"]


def test_a_source_that_breaks_off_is_told_by_validate(
    make_project: MakeProject, tmp_path: Path, libraries: Libraries
) -> None:
    (tmp_path / "project").mkdir()
    made = static_embedding(tmp_path / "project")
    # beyond the rows that are looked at first
    columns = ", ".join(name for name in made.table.column_names if name != "id")
    sql = (
        "SELECT CASE WHEN id = 20 THEN error('row twenty is broken')::BIGINT ELSE id END AS id,"
        f" {columns} FROM read_parquet('${{data}}/data.parquet')"
    )
    project = make_project(made.table, view=view_of("static_embedding", made, source={"sql": sql}))
    checks = {check.check: check for check in validate(project)}
    assert checks["source"].ok
    assert not checks["model"].ok
    assert "the source has unreadable data" in checks["model"].found
    assert "row twenty is broken" in checks["model"].found
    assert libraries.asked == []
    (project.folder / "data.parquet").unlink()
    checks = {check.check: check for check in validate(project)}
    assert "there is no file" in checks["source"].found
    assert "model" not in checks


def test_a_users_own_model_and_a_model_of_ours_have_no_library(
    make_project: MakeProject, libraries: Libraries
) -> None:
    project = make_project([(i, float(i)) for i in range(9)])
    report = project.run()
    assert (report.library, project.live_snapshot().library, libraries.asked) == (None, None, [])
    assert "library" not in describe_report(report)
    assert not any("its own" in check.found for check in validate(project))


# ---- not asked, and without an answer


def test_what_is_not_installed_is_said(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = project_of(make_project, tmp_path, "text_encoder")
    monkeypatch.setattr(own_library, "version_of", lambda _: None)
    found = check_of(project.run())
    assert found.said == "not checked: sentence-transformers is not installed"
    assert (found.verdict, found.version, libraries.asked) == ("not checked", "", [])
    assert project.live_snapshot().library == found
    # once it is there it is asked
    monkeypatch.undo()
    monkeypatch.setattr(library, "ask", libraries.ask)
    assert check_of(project.materialize(full=True)).verdict == "equal"


def test_why_a_library_is_not_asked(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(3_000_000))
    own = OwnLibrary("numpy", "m:f", {}, (weights,), ("numpy",))
    assert without_asking(own, 3) is None
    assert without_asking(OwnLibrary("numpy", "m:f"), 3) is None
    found = without_asking(own, 2)
    assert found == LibraryCheck(
        "not checked",
        "numpy",
        "not checked: the model has 3 MB, and memory_mb is 2: there is no room for it once more",
    )
    for needs, why in (
        (("no_such",), "numpy is not installed"),
        (("numpy", "no_such"), "no_such, by which numpy is asked, is not installed"),
    ):
        found = without_asking(OwnLibrary("numpy", "m:f", {}, (), needs), 1)
        assert found is not None
        assert found.said == f"not checked: {why}"


X = pa.record_batch({"id": [1, 2, 3], "x": [1.0, 2.0, 3.0]})
VIEW = FeatureView(
    "numbers", ("id",), (Feature("double", "float64"), Feature("vector", "float32", 4)), 1.0, 1.0
)


def asked(function: str, rows: pa.RecordBatch = X, **given: Any) -> Answer:
    return ask(OwnLibrary("numpy", f"tests.library_models:{function}", given), rows)


def test_it_is_asked_in_a_process_of_its_own_which_says_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = asked("doubling", factor=2.0)
    assert found.features is not None
    assert (found.rows, found.error) == ((0, 1, 2), "")
    assert found.features["double"].to_pylist() == [2.0, 4.0, 6.0]
    # a row that it does not take is left out
    some = asked("doubling", X.set_column(1, "x", pa.array([1.0, -1.0, 3.0])), factor=2.0)
    assert some.rows == (0, 2)
    none = asked("doubling", X.set_column(1, "x", pa.array([-1.0] * 3)), factor=2.0)
    assert none.error == "raised ValueError: x is negative (library_models.py:29)"
    assert capfd.readouterr() == ("", "")
    assert "sentence_transformers" not in vars(library_models)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raising", "numpy 9 raised RuntimeError: no such file in 3.1 (library_models.py:36)"),
        ("sleeping", "numpy 9 took longer than 2 s"),
        ("dying", "numpy 9 ended its process: it was ended by signal 11 (SIGSEGV)"),
        (
            "killed",
            "numpy 9 ended its process: it was ended by signal 9 (SIGKILL), as by a system that is out of memory",
        ),
        ("leaving", "numpy 9 ended its process: it exited with status 0"),
        ("exiting", "numpy 9 raised SystemExit: a license is missing"),
        ("out_of_memory", "numpy 9 raised MemoryError: Unable to allocate 1.00 EiB"),
        ("nothing_of_this_name", "numpy 9 raised AttributeError: "),
    ],
)
def test_whatever_a_library_does_is_told(
    monkeypatch: pytest.MonkeyPatch, function: str, said: str
) -> None:
    monkeypatch.setattr(own_library, "LIMIT_S", 2.0 if function == "sleeping" else 60.0)
    own = OwnLibrary("numpy", f"tests.library_models:{function}")
    made = pa.record_batch({"double": [2.0], "vector": [[0.0] * 4]}, VIEW.feature_schema())
    found = compared(own, "9", VIEW, made, ask(own, X), ["1"])
    assert (found.verdict, found.version) == ("not checked", "")
    assert found.said.startswith(f"not checked: {said}"), found.said


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own means")
def test_it_ends_with_a_process_that_is_killed_while_it_is_asked(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    asking = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pyarrow as pa, sys; from precompute.model import OwnLibrary;"
            " from precompute.own_library import ask;"
            " own = OwnLibrary('numpy', 'tests.library_models:waiting', {'told': sys.argv[1]});"
            " ask(own, pa.record_batch({'id': [1]}))",
            str(told),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    eventually(told.is_file)
    pid = int(told.read_text())
    asking.kill()
    asking.wait()
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_library_in_a_process_of_its_own(
    make_project: MakeProject,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_all_installed: None,
    libraries: Libraries,
) -> None:
    monkeypatch.setattr(library, "ask", ask)
    found = check_of(project_of(make_project, tmp_path, "static_embedding").run())
    assert (found.verdict, found.rows) == ("equal", 8)


# ---- the verdict


def verdict(theirs: dict[str, Any], **over: Any) -> LibraryCheck:
    x = np.asarray(X.column("x"))
    vector = x[:, None] + np.arange(4, dtype=np.float32)
    made = pa.record_batch(
        [
            pa.array(2 * x),
            pa.FixedSizeListArray.from_arrays(pa.array(vector.ravel(), pa.float32()), 4),
        ],
        schema=VIEW.feature_schema(),
    )
    given = own_library._table({"double": 2 * x, "vector": vector} | theirs)
    rows = over.get("rows", (0, 1, 2))
    answer = Answer(given.take(pa.array(rows)), rows)
    return compared(OwnLibrary("them"), "1.2", VIEW, made, answer, ["a", "b", "c"])


def test_the_verdict_in_words() -> None:
    assert verdict({}).said == "equal to them 1.2 in 3 rows (to the bit)"
    near = verdict({"double": np.array([2.0, 4.0, 6.00002])})
    assert (near.verdict, near.said) == ("equal", "equal to them 1.2 in 3 rows (3e-6)")
    assert near.worst == pytest.approx(2e-5 / 6, rel=1e-2)
    some = verdict({}, rows=(0, 2))
    assert some.said == "equal to them 1.2 in 2 rows (to the bit); 1 more it has no value for"
    far = verdict({"double": np.array([2.0, 4.0, 6.1])})
    assert (far.verdict, far.said) == (
        "differs",
        "differs from them 1.2 in 1 of 3 rows, such as 'c': double is off by 0.016 of its size, more than 2e-05 (6 here, 6.1 there)",
    )
    assert verdict({"vector": np.ones((3, 5))}).said.startswith(
        "differs from them 1.2: its answer does not fit the view: feature 'vector' of view 'numbers': "
    )


def test_rows_that_tell_most_are_chosen() -> None:
    pool = pa.table(
        {
            "id": range(100),
            "text": [f"row {'x' * (50 if i == 40 else i % 7)} {i}" for i in range(100)],
            "kind": ["rare" if i == 63 else "often" for i in range(100)],
            "price": [None if i == 77 else float(-i if i == 9 else i) for i in range(100)],
        }
    )
    rows = telling_rows(pool, ["text", "kind", "price"], 8)
    assert len(rows) == len(set(rows)) == 8
    assert {40, 63, 77, 9, 99} <= set(rows)
    assert rows == telling_rows(pool, ["text", "kind", "price"], 8)
    assert sorted(telling_rows(pool.slice(0, 3), ["text"], 8)) == [0, 1, 2]


def test_of_shards_the_run_asks_once_and_no_worker(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from precompute.jobs.run.shards import coordinator
    from tests.jobs.test_shards import ELSEWHERE, workers

    monkeypatch.setattr(coordinator, "FEW_ROWS", 1)
    (tmp_path / "project").mkdir()
    made = static_embedding(tmp_path / "project")
    view = view_of("static_embedding", made, shards=2)
    project = make_project(made.table, view=view, project=ELSEWHERE)
    with workers(project, 2):
        report = project.run()
    assert (report.engine["shards"], check_of(report).verdict) == (2, "equal")
    assert libraries.asked == ["model2vec"]
    assert not {"check_by_library", "own_library_of", "compare_rows"} & set(vars(worker))


def test_a_gpu_computes_in_all_bits_while_it_is_compared() -> None:
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.fp32_precision for one in settings]
    for is_cuda, wanted in ((False, before), (True, ["ieee"] * 2)):
        model: Any = SimpleNamespace(device=SimpleNamespace(is_cuda=is_cuda))
        with library._exactly(model):
            assert [one.fp32_precision for one in settings] == wanted
        assert [one.fp32_precision for one in settings] == before
