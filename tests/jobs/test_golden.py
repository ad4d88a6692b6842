"""Golden rows: unchanged rows computed again among those of a run, and what they decide of a model
that changed under the same fingerprint: its code, or whatever else it gives its values by."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.jobs.run.shards import coordinator as coordinator_module
from precompute.jobs.run.shards import worker as worker_module
from precompute.jobs.run.shards.worker import work
from precompute.jobs.serve.fallback import ViewFallback
from precompute.store.errors import ConfigError, GateError
from precompute.store.offline.snapshot import Counts, Verdict
from precompute.store.times import Partition
from tests.faults.harness import small_chunks
from tests.fixtures import MakeProject
from tests.jobs.test_converted_view import LOOSE, TorchDoubler, torch_project
from tests.scene import Scene

MODEL = """
import json
from pathlib import Path
import numpy as np
import factors

HERE = Path(__file__).parent

class Times:
    def fingerprint(self):
        return "times {version}"

    def compute(self, batch):
        x = np.asarray(batch.column("x"))
        with (HERE / "seen").open("a") as seen:
            print(json.dumps(x.tolist()), file=seen)
        if (HERE / "interrupt").exists() and (x >= 160).any():
            raise KeyboardInterrupt
        off = json.loads((HERE / "off").read_text()) if (HERE / "off").exists() else {{}}
        by = np.array([off.get("all", off.get(str(int(one)), 1.0)) for one in x])
        return {{"double": x * factors.FACTOR * by}}
"""
ROWS = [(i, float(i)) for i in range(200)]
VIEW = {
    "model": {"use": "mine:Times"},
    "features": {"double": {"dtype": "float64"}},
}
EQUAL = "of 64 unchanged rows of snapshot 1 that were computed again none come out otherwise"


@pytest.fixture(autouse=True)
def _with_golden_rows(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.jobs.run.judge.golden.GOLDEN_ROWS", 64)


def write(folder: Path, factor: str = "2", version: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(MODEL.format(version=version))
    (folder / "factors.py").write_text(f"FACTOR = {factor}\n")


def day(text: str) -> Partition:
    start = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return Partition(start, start + timedelta(days=1))


@pytest.fixture
def scene(make_project: MakeProject) -> Scene:
    write(make_project(ROWS, view=VIEW).folder)
    scene = make_project(ROWS, view=VIEW)
    scene.run()
    assert {*scene.snapshot().code} == {"mine.py", "factors.py", "numpy"}
    return scene


def seen(scene: Scene) -> list[float]:
    """What the model was given since the last call of this."""
    lines = (scene.folder / "seen").read_text().splitlines()
    (scene.folder / "seen").write_text("")
    return [x for line in lines for x in json.loads(line)]


def off(scene: Scene, factors: dict[str, float]) -> Scene:
    """The values of each ``x``, or of all, are so many times as large, by a file that is no code
    and in no fingerprint."""
    (scene.folder / "off").write_text(json.dumps(factors))
    return scene.reread()


def golden(scene: Scene) -> list[Verdict]:
    return [verdict for verdict in scene.snapshot().gates if verdict.gate == "golden"]


# ---- rows that are computed again


KEYED: dict[str, tuple[list[str], Callable[[int], list[Any]]]] = {
    "integers": (["id"], lambda i: [i]),
    "texts": (["id"], lambda i: [f"Zürich/{i}%"]),
    "composite": (["id", "of"], lambda i: [i // 7, f"{i % 7}/é"]),
}


def keyed(kind: str, xs: list[float]) -> pa.Table:
    names, key = KEYED[kind]
    keys = zip(*(key(i) for i in range(len(xs))), strict=True)
    return pa.table({**dict(zip(names, map(list, keys), strict=True)), "x": xs})


@pytest.mark.parametrize("kind", KEYED)
def test_a_delta_computes_64_rows_more_and_writes_none(
    make_project: MakeProject, kind: str
) -> None:
    view = VIEW | {"entity": KEYED[kind][0]}
    xs = [float(i) for i in range(300)]
    write(make_project(view=view).folder)
    scene = make_project(keyed(kind, xs), view=view)
    scene.run()
    assert (seen(scene), golden(scene)) == (xs, [])
    xs[7] = 1000.0
    scene = make_project(keyed(kind, xs), view=view)
    report = scene.run()
    given = seen(scene)
    # in one batch with the row of the run, which is in their middle
    assert (len(given), len(set(given)), given.index(1000.0)) == (65, 65, 32)
    assert set(given) < set(xs)
    assert golden(scene) == [Verdict("golden", True, 0.0, 0.0, EQUAL)]
    snapshot = scene.snapshot()
    assert snapshot.counts == Counts(source=300, written=1, unchanged=299)
    assert (snapshot.segments[-1].rows, snapshot.rejected) == (1, None)
    assert (report.counts["written"], report.counts["rejected"]) == (1, 0)
    assert not [name for name in snapshot.quality if "golden" in name]
    assert sorted(row["double"] for row in scene.rows()) == sorted(2 * x for x in xs)
    if kind != "integers":
        return
    # the same ones each time, whatever else changes
    xs[8] = 2000.0
    scene = make_project(keyed(kind, xs), view=view)
    scene.run()
    assert len({*seen(scene)} - {2000.0} - {*given}) <= 1
    # nothing to do, and where rows only leave nothing is computed either
    assert (scene.run().status, seen(scene)) == ("current", [])
    scene = make_project(keyed(kind, xs[:-1]), view=view)
    assert (scene.run().counts["removed"], seen(scene)) == (1, [])


def test_all_rows_computed_are_compared_without_one_more(
    scene: Scene, make_project: MakeProject
) -> None:
    seen(scene)
    scene.run(full=True)
    assert (len(seen(scene)), golden(scene)[0].message) == (200, EQUAL)
    changed = [(i, x + 10 * (i % 2)) for i, x in ROWS]
    scene = make_project(changed, view=VIEW)
    scene.run(full=True)
    assert (len(seen(scene)), golden(scene)[0].message) == (200, EQUAL.replace("1 that", "2 that"))
    # that values are others is no matter where the input is
    scene = make_project([(i, x + 0.5) for i, x in changed], view=VIEW)
    scene.run(full=True)
    assert (len(seen(scene)), golden(scene)) == (200, [])
    assert off(scene, {"all": 3.0}).cli("run", "numbers", "--full") == 3
    (verdict,) = scene.report().gates
    assert (verdict.gate, verdict.passed, verdict.measured) == ("golden", False, 1.0)
    # nothing of it is taken over
    off(scene, {}).run(full=True)
    assert (scene.doubles(), scene.report().resumed) == ({i: 2 * x + 1 for i, x in changed}, 0)


def test_another_recipe_another_wish_and_a_kept_answer_have_none(
    scene: Scene, make_project: MakeProject
) -> None:
    off(scene, {"all": 3.0})
    seen(scene)
    write(scene.folder, version=2)
    scene = scene.reread()
    scene.run()
    assert (len(seen(scene)), golden(scene)) == (200, [])
    off(scene, {})
    none = VIEW | {"gates": {"golden": None}}
    scene = make_project([*ROWS, (200, 1.0)], view=none)
    scene.run()
    assert (seen(scene), golden(scene)) == ([1.0], [])
    kept = "\n    once_more, answered = '', 0\n    def judged_by(self, judge, **_):\n        return self\n"
    model = scene.folder / "mine.py"
    model.write_text(model.read_text() + kept)
    scene = make_project([*ROWS, (200, 1.0), (201, 3.0)], view=VIEW)
    report = scene.run()
    assert (seen(scene), golden(scene)) == ([3.0], [])
    assert report.attention == [
        "the code of the model changed (mine.py changed), and its fingerprint did not: no row was"
        " compared"
    ]


# ---- a model that changed under the same fingerprint


def test_values_that_are_others_are_refused_before_anything_is_written(
    scene: Scene, make_project: MakeProject
) -> None:
    live = scene.live()
    make_project([*ROWS, (200, 7.0)], view=VIEW)
    off(scene, {"all": 1.5})
    for _ in range(2):
        with pytest.raises(
            GateError,
            match=r"^view 'numbers': of 64 unchanged rows of snapshot 1 that were computed again 6[0-4]"
            r" come out otherwise; the first, '\d+': double .*\. Nothing was committed, and the live"
            r" snapshot stays\. Put back what changed since: the code of mine:Times, a file or"
            r" variable .* --accept golden --full\. .*golden: null\}$",
        ):
            scene.run()
        report = scene.report()
        assert (report.gates[0].gate, report.gates[0].passed) == ("golden", False)
        assert (scene.numbers(), scene.live(), scene.store.journals.runs()) == ([1], live, [])
        assert not list((scene.store.data / report.run).glob("part-*"))
    # put back, nothing of those runs is in the next
    off(scene, {})
    assert scene.run().resumed == 0
    assert scene.doubles() == {key: x * 2 for key, x in [*ROWS, (200, 7.0)]}
    # accepted, of all rows; from then on that is what is compared with
    off(scene, {"all": 1.5})
    assert scene.cli("run", "numbers", "--full", "--accept", "golden") == 0
    assert scene.doubles() == {key: x * 3 for key, x in [*ROWS, (200, 7.0)]}
    scene = make_project([*ROWS, (200, 8.0)], view=VIEW)
    scene.run()
    assert golden(scene)[0].passed


def test_one_row_that_comes_out_otherwise_or_not_at_all_is_refused(
    scene: Scene, make_project: MakeProject
) -> None:
    make_project([*ROWS, (200, 7.0)], view=VIEW | {"gates": {"golden": 0.05}})
    seen(scene)
    scene = scene.reread()
    scene.run()
    among = sorted({*seen(scene)} - {7.0})
    for what, factor in (("is off by 0.5 of", 1.5), ("double is not finite", float("nan"))):
        some = {str(int(x)): factor for x in among[-3:]}
        make_project([*ROWS, (200, 8.0)], view=VIEW)
        off(scene, dict([*some.items()][:1]))
        with pytest.raises(
            GateError, match=f"again 1 come out otherwise; .*'{int(among[-3])}'"
        ) as exc:
            scene.reread().run()
        assert what in str(exc.value).lower()
        # as many as the view allows
        make_project([*ROWS, (200, 9.0 + (factor > 1))], view=VIEW | {"gates": {"golden": 0.05}})
        off(scene, some)
        report = scene.reread().run()
        assert (report.status, report.counts["rejected"]) == ("published", 0)
        assert (golden(scene)[0].passed, golden(scene)[0].measured) == (True, 3 / 64)
        off(scene, {})


def test_a_killed_run_is_taken_over_without_its_golden_rows(
    scene: Scene, make_project: MakeProject
) -> None:
    """The chunks that were written have none of them, and the next run computes them all again."""
    rows = [(i, x + 0.5 * (i >= 100)) for i, x in ROWS]
    scene = make_project(rows, view=VIEW)
    (scene.folder / "interrupt").touch()
    seen(scene)
    with small_chunks(), pytest.raises(KeyboardInterrupt):
        scene.run()
    (scene.folder / "interrupt").unlink()
    first = [x for x in seen(scene) if x == int(x)]
    with small_chunks():
        report = scene.reread().run()
    again = [x for x in seen(scene) if x == int(x)]
    assert (report.resumed > 0, len(first), first) == (True, 64, again)
    assert report.counts["written"] == 100
    assert scene.doubles() == {key: x * 2 for key, x in rows}
    assert (golden(scene)[0].message, scene.cli("verify")) == (EQUAL, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_precision_is_no_other_value(
    make_project: MakeProject, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are computed in other batches each night, and stored as what came of that."""
    rows = [(i, 1 + i / 7) for i in range(300)]
    view = {"precision": precision, "accuracy": LOOSE, "gates": {"first": None}}
    scene = torch_project(make_project, rows, view=view)
    scene.run()
    scene = torch_project(make_project, [*rows, (300, 3.0)], view=view)
    scene.run()
    assert golden(scene) == [Verdict("golden", True, 0.0, 0.0, EQUAL)]
    forward = TorchDoubler.forward
    larger: Any = lambda self, x: {n: 1.2 * t for n, t in forward(self, x).items()}  # noqa: E731
    monkeypatch.setattr(TorchDoubler, "forward", larger)
    scene = torch_project(make_project, [*rows, (300, 4.0)], view=view)
    with pytest.raises(GateError, match="again 64 come out otherwise"):
        scene.run()


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_workers_of_shards_compute_them(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    monkeypatch.setattr(coordinator_module, "FEW_ROWS", 1)
    monkeypatch.setattr(worker_module, "SHARD_LOOK_S", 0.1)
    view, elsewhere = VIEW | {"shards": 3}, {"engine": {"on": "elsewhere"}}
    write(make_project(ROWS, view=VIEW).folder)
    make_project(ROWS, view=VIEW).run()
    rows = [(i, x + 0.5 * (i < 9)) for i, x in ROWS]
    scene = off(make_project(rows, view=view, project=elsewhere), {"all": factor})
    seen(scene)
    done = threading.Thread(target=lambda: work(scene, "numbers", wait_s=30))
    done.start()
    with (
        contextlib.nullcontext() if factor == 1.0 else pytest.raises(GateError, match="of 64 unch")
    ):
        scene.run()
    done.join(30)
    assert sorted(x for x in seen(scene) if x != int(x)) == [i + 0.5 for i in range(9)]
    assert (scene.report().engine["shards"], scene.store.journals.runs()) == (3, [])
    if factor == 1.0:
        assert (golden(scene)[0].message, scene.snapshot().counts.written) == (EQUAL, 9)
    assert scene.doubles() == {key: x * 2 for key, x in (rows if factor == 1.0 else ROWS)}


# ---- code that changed under the same fingerprint


def test_equal_values_are_told_and_the_run_goes_on(scene: Scene, make_project: MakeProject) -> None:
    write(scene.folder, "1 + 1")
    told = "the code of the model changed (factors.py changed), and its fingerprint did not: "
    for _ in range(2):
        report = scene.reread().run()
        assert (report.status, report.attention) == ("current", [told + "no row was computed"])
    report = make_project([*ROWS, (200, 7.0)], view=VIEW).run()
    assert (report.status, report.attention) == ("published", [told + EQUAL])
    assert scene.doubles()[200] == 14.0
    # the new snapshot has the new code
    assert make_project([*ROWS, (200, 8.0)], view=VIEW).run().attention == []


def test_other_values_are_refused_and_both_ways_out_work(
    scene: Scene, make_project: MakeProject
) -> None:
    write(scene.folder, "3")
    scene = make_project([*ROWS, (200, 7.0)], view=VIEW)
    for full in (False, True):
        with pytest.raises(
            GateError,
            match=r"of 64 unchanged rows of snapshot 1 that were computed again 6[0-4] come out"
            r" otherwise; the first, '\d+': double .*; the code of the model changed"
            r" \(factors\.py changed\), and its fingerprint did not\. Nothing was committed",
        ):
            scene.run(full=full)
    assert (scene.numbers(), scene.live().snapshot) == ([1], 1)
    # back as it was
    write(scene.folder)
    assert make_project([*ROWS, (200, 7.0)], view=VIEW).run().counts["written"] == 1
    # or another fingerprint
    write(scene.folder, "3", version=2)
    report = scene.reread().run()
    assert (report.counts["written"], report.attention) == (201, [])
    assert scene.doubles() == {key: x * 3 for key, x in [*ROWS, (200, 7.0)]}


def test_a_run_that_is_killed_while_it_compares_is_as_if_it_had_not_begun(
    scene: Scene, make_project: MakeProject
) -> None:
    """Each time; and the run after it compares, tells and commits."""
    live, flag = scene.live(), scene.folder / "kill"
    write(scene.folder, "1 + 1")
    model = scene.folder / "mine.py"
    model.write_text(
        model.read_text().replace(
            "        return {",
            f"        if __import__('os').path.exists({str(flag)!r}):\n"
            "            __import__('os').kill(__import__('os').getpid(), 9)\n        return {",
        )
    )
    command = [
        sys.executable,
        "-m",
        "precompute.jobs.cli",
        "-c",
        str(scene.folder),
        "run",
        "numbers",
    ]
    flag.touch()
    project = make_project([*ROWS, (200, 7.0)], view=VIEW)
    for _ in range(1):
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (killed.returncode, killed.stdout) == (-9, "")
        assert (project.live(), project.numbers()) == (live, [1])
        assert project.status()["last_run"]["status"] == "killed"
    flag.unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert EQUAL in done.stderr
    assert project.doubles() == {key: x * 2 for key, x in [*ROWS, (200, 7.0)]}
    assert project.cli("verify") == 0


def test_a_new_partition_is_compared_with_the_last_one(make_project: MakeProject) -> None:
    view = {
        **VIEW,
        "source": {"sql": "SELECT i AS id, i::DOUBLE AS x FROM range(80) t(i) WHERE $start < $end"},
        "partition": {"by": "day", "start": "2026-01-01"},
    }
    write(make_project(view=view).folder)
    scene = make_project(view=view)
    scene.run(partition=day("2026-01-01"))
    write(scene.folder, "2.0 * 1")
    report = scene.run(partition=day("2026-01-02"))
    assert report.attention == [
        f"the code of the model changed (factors.py changed), and its fingerprint did not: {EQUAL}"
    ]
    assert scene.run(partition=day("2026-01-03")).attention == []
    write(scene.folder, "3")
    with pytest.raises(GateError, match=r"60 come out otherwise"):
        scene.run(partition=day("2026-01-04"))


def test_a_host_with_other_code_does_not_work(
    make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "FEW_ROWS", 1)
    monkeypatch.setattr(worker_module, "SHARD_LOOK_S", 0.1)
    view = {**VIEW, "shards": 4}
    write(make_project(ROWS, view=view).folder)
    scene = make_project(ROWS, view=view)
    other = tmp_path / "other"
    write(other, "3")
    for name in ("project.yaml", "views"):
        (other / name).symlink_to(scene.home / name)
    refused: list[str | None] = []
    open_model = worker_module._open

    def opened(project: Scene, *rest: object) -> object:
        # while the run goes on, a host with older code comes by
        if not refused and project.folder != other:
            refused.append(None)
            with pytest.raises(ConfigError) as raised:
                open_model(Scene(other, {}), *rest)  # type: ignore[arg-type]
            refused[0] = str(raised.value)
        return open_model(project, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_module, "_open", opened)
    scene = make_project(ROWS, view=view, project={"engine": {"on": "elsewhere"}})
    done = threading.Thread(target=lambda: work(scene, "numbers", wait_s=30))
    done.start()
    scene.run()
    done.join(30)
    assert scene.doubles() == {key: x * 2 for key, x in ROWS}
    assert refused[0] is not None
    assert "this host's code of the model differs from that of run" in refused[0]
    assert "(factors.py changed), under the same fingerprint" in refused[0]


def test_a_server_with_other_code_says_so(
    make_project: MakeProject, caplog: pytest.LogCaptureFixture
) -> None:
    view = {**VIEW, "fallback": {"enabled": True, "deadline": "10s"}}
    write(make_project(ROWS, view=view).folder)
    scene = make_project(ROWS, view=view)
    scene.run()
    write(scene.folder, "1 + 1")
    with (
        contextlib.closing(ViewFallback(scene.offline, scene.home, memory_mb=64)) as fallback,
        scene.lookup(fallback) as lookup,
    ):
        table = lookup.get("numbers", ["999"], inputs={"999": {"x": 21.0}})
    assert (table["status"].to_pylist(), table["double"].to_pylist()) == (["computed"], [42.0])
    assert [
        record.message for record in caplog.records if "code of the model" in record.message
    ] == [
        "view 'numbers': this host's code of the model differs from what computed snapshot 1"
        " (factors.py changed), under the same fingerprint: if its values differ, so do misses from"
        " rows; the next run that computes rows compares 64 of them"
    ]
