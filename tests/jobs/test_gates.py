"""Gates in runs: each refuses what it is there for, with its sentence and exit status 3; the old
version stays live; a name accepts it; nights are kept and learned from. What lies just inside and
outside of a limit is in ``test_judgement``."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import tracemalloc
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.engine.runner import compute
from precompute.jobs.config.gates import GATES, GatesConfig
from precompute.jobs.ops.gate_history import gate_history
from precompute.jobs.run import materialize
from precompute.jobs.run.command_process import operator
from precompute.jobs.run.judge.gates import Judge
from precompute.jobs.run.judge.neighbours import neighbours_of
from precompute.jobs.run.judge.nights import nights_after, read_nights
from precompute.jobs.run.judge.verdicts import Verdicts
from precompute.jobs.run.rows import chunks, samples
from precompute.jobs.run.rows.open_view import open_view
from precompute.store.disk.record import replace
from precompute.store.errors import GateError, SnapshotError, UnreadableError
from precompute.store.offline.snapshot import ANNOUNCED, Snapshot, Verdict
from tests.fixtures import MakeProject
from tests.scene import UNJUDGED, Scene

HERE = "tests.jobs.test_gates"
N = 40
GOOD = {i: float(i + 1) for i in range(N)}
Captured = pytest.CaptureFixture[str]


class Vectors:
    """x → ``vector``: for x > 0 the direction of x, of length ``length``; 0 gives zeros, -1 always
    the same vector, -2 the opposite direction of the row's ``id``; ``double`` = 2x. With
    ``weights``, a file, a factor of both that the fingerprint does not tell. ``batched``: adds the
    number of rows in the batch."""

    def __init__(
        self,
        length: float = 1.0,
        version: int = 1,
        weights: str | None = None,
        batched: bool = False,
    ) -> None:
        self.length, self.version, self.weights, self.batched = length, version, weights, batched

    def fingerprint(self) -> str:
        return f"vectors {self.version}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        x, ids = (np.asarray(batch.column(name)).astype(np.float64) for name in ("x", "id"))
        angle = np.where(x == -2, ids + 1 + np.pi, np.where(x == -1, 0.0, x))
        vector = np.stack([np.cos(angle), np.sin(angle)], axis=1) * self.length
        vector[x == 0] = 0
        factor = 1.0 if self.weights is None else float(Path(self.weights).read_text())
        added = batch.num_rows if self.batched else 0
        return {"double": 2 * x * factor + added, "vector": vector.astype(np.float32) * factor}


FEATURES = {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 2}}


def view(
    gates: Mapping[str, Any] | None = None, fallback: bool = False, **args: Any
) -> dict[str, Any]:
    return {
        "model": {"use": f"{HERE}:Vectors", "args": args},
        "features": FEATURES,
        "gates": UNJUDGED | dict(gates or {}),
        "fallback": {"enabled": fallback, "deadline": "20s"},
    }


def live(project: Scene) -> tuple[int, int]:
    """(snapshot live offline, snapshot a reader is served)."""
    with project.lookup() as lookup:
        return project.live().snapshot, lookup.row("numbers", 0)["snapshot"]


def failed(snapshot: Snapshot) -> list[str]:
    return [verdict.gate for verdict in snapshot.failed]


AS_BEFORE = {i: x + 1e-9 for i, x in GOOD.items()}
"""Other inputs with about the same values: all rows are computed again."""
BAD: dict[str, tuple[Mapping[int, float | None], dict[str, Any], Any, str]] = {
    # gate: rows, the model's arguments, the gate's limit, what is said, as a pattern
    "rows": (
        {i: GOOD[i] for i in range(15)},
        {},
        1.0,
        r"15 rows, 0\.38 times the 40 of snapshot 1; at least 0\.40 times as many are expected, at"
        r" most 2\.50$",
    ),
    "rejected": (GOOD | dict.fromkeys(range(10)), {}, 0.2, "10 of 40 rows rejected"),
    "coverage": (GOOD | dict.fromkeys(range(10)), {}, 0.8, "30 of 40 source rows have a value"),
    "null": (
        GOOD | dict.fromkeys(range(15), 0.0),
        {},
        1.0,
        r"vector: share of zero vectors 0\.375, passes up to 0\.\d+ \(on [\d-]+ 0\); keys ",
    ),
    "constant": (
        GOOD | dict.fromkeys(range(20), -1.0),
        {},
        1.0,
        r"vector: share of one vector 0\.5, passes up to 0\.\d+ \(on [\d-]+ 0\.025\)",
    ),
    "shape": (
        AS_BEFORE,
        {"length": 3.0},
        1.0,
        r"vector: median length 3, passes from 0\.\d+ to 1\.\d+ \(on [\d-]+ 1\)",
    ),
    "computed": (
        AS_BEFORE,
        {"length": 3.0},
        1.0,
        r"vector of 40 rows computed: median length 3, passes from 0\.\d+ to 1\.\d+ \(of the live"
        r" rows 1\); keys ",
    ),
    "moved": (
        dict.fromkeys(GOOD, -2.0),
        {},
        1.0,
        r"vector: median cosine -1, passes from 0\.\d+ \(of 40 keys beside snapshot 1\)",
    ),
    "bounds": (
        GOOD | {7: 900.0},
        {},
        {"double": {"range": [0, 100]}},
        r"^double: 1800 is not within range \[0, 100\]; keys 7: 1800$",
    ),
}


def limits(gate: str, off: bool = False) -> dict[str, Any]:
    """``gates`` with one of those that judge values alone, or without."""
    limit = BAD[gate][2]
    if gate == "bounds":
        return {} if off else {"features": limit}
    return {gate: None if off else limit}


def bad_project(make_project: MakeProject, gate: str, off: bool = False) -> Scene:
    """A project with a good snapshot live and the bad rows of a gate in its source."""
    rows, args, _, _ = BAD[gate]
    own = limits(gate, off)
    make_project(list(GOOD.items()), view=view(own)).run()
    return make_project(list(rows.items()), view=view(own, **args))


@pytest.mark.parametrize("gate", BAD)
def test_a_gate_refuses_with_its_sentence_and_the_old_version_stays(
    make_project: MakeProject, capsys: Captured, gate: str
) -> None:
    project = bad_project(make_project, gate)
    capsys.readouterr()
    assert project.cli("run", "numbers") == 3
    error = capsys.readouterr().err
    assert f"{gate}: " in error
    assert re.search(BAD[gate][3], project.snapshot().failed[0].message)
    assert live(project) == (1, 1)
    snapshot = project.snapshot()
    assert (snapshot.number, failed(snapshot), project.refused_by()) == (2, [gate], [gate])
    report = project.report()
    assert (report.status, report.snapshot) == ("refused", 2)
    assert [g.gate for g in report.gates if not g.passed] == [gate]
    assert (report.error or "?") in error
    assert f"precompute publish numbers --snapshot 2 --accept {gate}. " in error
    # what an announcement is for, and what computes all rows where nothing changed
    told = f"If for some days alone: precompute run numbers --expect {gate}. "
    assert (told in error) == (gate in ANNOUNCED)
    assert "--full" not in error
    # and once more: nothing changed, so nothing is computed, and it is refused again
    assert project.cli("run", "numbers", "--json") == 3
    again = json.loads(capsys.readouterr().out)
    assert (again["status"], again["snapshot"], again["counts"]["written"]) == ("refused", 2, 0)
    said = "and run again, by --full where neither input nor fingerprint shows what was mended"
    assert said in again["error"]
    assert project.numbers() == [1, 2]


@pytest.mark.parametrize("gate", [gate for gate in BAD if gate not in ("rejected", "coverage")])
def test_null_switches_a_gate_off(make_project: MakeProject, gate: str) -> None:
    project = bad_project(make_project, gate, off=True)
    assert project.run().status == "published"
    assert live(project) == (2, 2)
    assert gate not in [g.gate for g in project.snapshot().gates]


def test_a_first_snapshot_is_judged_by_itself(make_project: MakeProject, capsys: Captured) -> None:
    """And the next one beside it."""
    same = GOOD | dict.fromkeys(range(20), -1.0)
    project = make_project(list(same.items()), view=view({"first": 1.0}))
    assert project.cli("run", "numbers") == 3
    said = r"first: vector: share of one vector 0\.5, passes up to 0\.\d+\. Beside its nights: "
    assert re.search(said, capsys.readouterr().err)
    assert project.cli("run", "numbers", "--accept", "first") == 0
    make_project([*same.items(), (N, 1.0)], view=view({"first": 1.0}))
    assert project.cli("run", "numbers") == 0
    assert [one.gate for one in project.snapshot().gates if one.gate == "first"] == []


def test_other_arguments_under_an_equal_fingerprint_are_refused(
    make_project: MakeProject,
) -> None:
    """All values double; nothing of it is switched off."""
    plain: dict[str, Any] = {"gates": {}}
    make_project(list(GOOD.items()), view=view() | plain).run()
    project = make_project(list(AS_BEFORE.items()), view=view(length=2.0) | plain)
    with pytest.raises(GateError, match="vector: median length 2, passes from 0"):
        project.run()
    assert {"shape", "computed"} <= {*failed(project.snapshot())}


def test_an_ordinary_small_view_is_published_night_after_night(make_project: MakeProject) -> None:
    """A value of one key, of few, of most; rows that come and go; all rows under other keys; few
    rows, and one."""
    plain = view() | {"gates": {}}
    rows = dict(GOOD)
    changes: list[dict[int, float]] = [
        rows,
        rows | {3: 99.0},
        rows | {3: 99.0, 4: -7.5, 5: 1e6},
        {i: x + 0.01 for i, x in rows.items()},
        {i: x for i, x in rows.items() if i > 4} | {100: 3.5, 101: 4.5},
        {1: 5.0, 2: 6.0, 3: 7.0},
        {1: 50.0, 2: 60.0, 3: 70.0},
        {9: 1.0},
        {9: 2.0},
    ]
    for n, now in enumerate(changes):
        project = make_project(list(now.items()), view=plain)
        accept = ("rows",) if n == 5 else ()
        assert project.run(accept=accept).status == "published", (n, project.report().error)


@pytest.mark.parametrize("gate", ["coverage", "null", "shape"])
def test_a_gate_is_accepted_by_name_on_the_run(make_project: MakeProject, gate: str) -> None:
    project = bad_project(make_project, gate)
    assert project.cli("run", "numbers", "--accept", "rows") == 3
    assert live(project)[0] == 1
    assert project.cli("run", "numbers", "--accept", gate) == 0
    snapshot = project.snapshot()
    assert (snapshot.number, *live(project)) == (2, 2, 2)  # and not the same rows once more
    assert (failed(snapshot), project.refused_by()) == ([gate], [])
    assert project.store.log.accepted(2) == {gate}


@pytest.mark.parametrize("gate", ["rows", "moved"])
def test_a_gate_is_accepted_by_name_on_a_later_publish(
    make_project: MakeProject, gate: str
) -> None:
    project = bad_project(make_project, gate)
    assert project.cli("materialize", "numbers") == 0
    assert project.cli("publish", "numbers", "--snapshot", "2") == 3
    assert live(project)[0] == 1
    assert project.cli("publish", "numbers", "--snapshot", "2", "--accept", gate) == 0
    assert project.report().plan == f"{gate} of snapshot 2 accepted"
    assert (project.numbers(), *live(project)) == ([1, 2], 2, 2)
    (note,) = (event for event in project.store.log.events() if event.kind == "accept")
    assert (note.snapshot, note.gates, note.reason) == (2, (gate,), "by --accept")
    assert note.by == f"publish ({operator()})"
    assert project.run().status == "current"  # nothing is left to be refused


def test_accepting_one_of_two_is_not_enough(make_project: MakeProject, capsys: Captured) -> None:
    on = {"moved": 1.0}
    make_project([(i, float(i + 1)) for i in range(100)], view=view(on)).run()
    project = make_project([(i, -2.0) for i in range(30)], view=view(on))
    assert project.cli("run", "numbers", "--accept", "rows") == 3
    error = capsys.readouterr().err
    assert "moved: " in error
    assert "rows: " not in error
    assert live(project)[0] == 1
    both = ("--accept=moved", "--accept=rows")
    assert project.cli("publish", "numbers", "--snapshot", "2", *both) == 0
    assert project.store.log.accepted(2) == {"moved", "rows"}


def test_an_acceptance_holds_in_the_next_run_while_its_gate_says_the_same(
    make_project: MakeProject,
) -> None:
    on = {"shape": 1.0, "null": 1.0}
    make_project(list(GOOD.items()), view=view(on)).run()
    rows = {i: 0.0 if i < 25 else x + 1e-9 for i, x in GOOD.items()}
    project = make_project(list(rows.items()), view=view(on, length=3.0))
    assert project.cli("run", "numbers", "--accept", "null") == 3

    def stands() -> tuple[int, tuple[str, ...], list[str]]:
        number = project.snapshot().number
        accepted = project.store.log.accepted(number)
        return number, tuple(sorted(accepted)), sorted(project.refused_by())

    for _ in range(2):
        assert project.cli("run", "numbers") == 3
        assert stands() == (2, ("null",), ["shape"])
    # a gate that says something else has to be accepted again
    more = rows | {25: 0.0}
    project = make_project(list(more.items()), view=view(on, length=3.0))
    assert project.cli("run", "numbers") == 3
    assert stands() == (3, (), ["null", "shape"])
    assert project.cli("run", "numbers", "--accept", "null", "--accept", "shape") == 0
    assert stands() == (3, ("null", "shape"), [])


def test_limits_that_are_set_since_judge_what_is_committed(make_project: MakeProject) -> None:
    """Nothing is computed again."""
    project = bad_project(make_project, "shape")
    assert project.cli("run", "numbers") == 3
    rows = list(BAD["shape"][0].items())
    wide = make_project(rows, view=view({"shape": 9.0}, length=3.0))
    assert wide.run().status == "published"
    assert (wide.snapshot().number, wide.report().counts["written"]) == (3, 0)
    one = make_project(
        rows, view=view({"shape": 9.0, "features": {"vector": {"norm": 1}}}, length=3.0)
    )
    with pytest.raises(Exception, match="norm: unknown key"):
        one.run()


def test_rejected_and_coverage_can_be_switched_off(make_project: MakeProject) -> None:
    project = make_project([(0, 1.0), (1, None)], view=view({"rejected": None, "coverage": None}))
    assert project.run().status == "published"
    # what max_rejected allows is their default, and null is how all gates are switched off
    assert [g.gate for g in project.snapshot().gates if g.gate in ("rejected", "coverage")] == []


def test_a_share_of_floats_that_is_the_limit_passes() -> None:
    verdicts = Verdicts(GatesConfig())
    for measured in (0.1, 1 - 28 / 40, 0.2):
        verdicts.at_most("rejected", measured, 0.3, "")
    verdicts.at_least("coverage", 1 - 0.9, 0.1, "")
    assert [verdict.passed for verdict in verdicts.all] == [True] * 4
    # of several the manifest has the worst
    assert verdicts.quality == {"rejected": 1 - 28 / 40, "coverage": 1 - 0.9}


# ---- parity


def test_parity_computes_a_sample_again_as_the_fallback_would(
    make_project: MakeProject, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.write_text("1")
    make: dict[str, Any] = {"fallback": True, "weights": str(weights)}
    project = make_project(list(GOOD.items()), view=view(**make))
    project.run()
    parity = [g for g in project.snapshot().gates if g.gate == "parity"]
    assert parity == [
        Verdict(
            "parity", True, 0.0, 0.05, "0 of 20 sampled rows come out differently from the fallback"
        )
    ]
    weights.write_text(
        "1.5"
    )  # the file changed, and the model's fingerprint does not tell: old rows stay, new ones are others
    project = make_project([*GOOD.items(), (N, 41.0)], view=view(**make))
    with pytest.raises(
        GateError, match=r"parity: 19 of 20 sampled rows come out differently.*--accept parity"
    ):
        project.run()
    assert live(project)[0] == 1


def test_parity_finds_a_model_that_answers_by_the_batch(make_project: MakeProject) -> None:
    project = make_project(list(GOOD.items()), view=view(fallback=True, batched=True))
    said = r"parity: 20 of 20 sampled rows come out differently from the fallback; the first, '\d+': double is off by [\d.e+]+ of its size, more than 1e-06"
    with pytest.raises(GateError, match=said):
        project.run()
    assert (
        make_project(list(GOOD.items()), view=view({"parity": None}, fallback=True, batched=True))
        .run(full=True)
        .status
        == "published"
    )


@pytest.mark.parametrize(("rows", "passes"), [(1, True), (2, False)])
def test_parity_allows_one_row_of_twenty_and_no_more(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, rows: int, passes: bool
) -> None:
    def again(*arguments: Any) -> Any:
        done = compute(*arguments)
        double = np.asarray(done.features["double"]) * np.where(
            np.arange(len(done.rows)) < rows, 1.5, 1.0
        )
        return dataclasses.replace(
            done, features=done.features.set_column(0, "double", pa.array(double))
        )

    monkeypatch.setattr("precompute.jobs.run.judge.gates.compute", again)
    project = make_project(list(GOOD.items()), view=view(fallback=True))
    assert project.cli("run", "numbers") == (0 if passes else 3)
    assert [(g.gate, g.measured) for g in project.snapshot().gates if g.gate == "parity"] == [
        ("parity", rows / 20)
    ]


def test_parity_leaves_out_rows_whose_input_changed_since(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:

    project = make_project(list(GOOD.items()), view=view(fallback=True))
    compact = materialize._draft_snapshot

    def changed(*arguments: Any) -> Snapshot:
        ids = list(GOOD)
        pq.write_table(
            pa.table({"id": ids, "x": [GOOD[i] + (1 if i < 30 else 0) for i in ids]}),
            project.folder / "data.parquet",
        )
        return compact(*arguments)

    monkeypatch.setattr(materialize, "_draft_snapshot", changed)
    assert project.run().status == "published"
    (parity,) = [g for g in project.snapshot().gates if g.gate == "parity"]
    assert parity.message == "0 of 5 sampled rows come out differently from the fallback"


def test_parity_of_composite_and_text_keys(make_project: MakeProject) -> None:
    table = pa.table({"a": ["x/y", "50%", "p"], "id": [1, 2, 3], "x": [1.0, 2.0, 3.0]})
    project = make_project(table, view=view(fallback=True) | {"entity": ["a", "id"]})
    project.run()
    assert [g.message[:6] for g in project.snapshot().gates if g.gate == "parity"] == ["0 of 3"]


# ---- what a snapshot is compared with


@pytest.mark.parametrize(("gone", "refused"), [(40, False), (60, True)])
def test_as_many_rows_under_other_keys_are_other_rows(
    make_project: MakeProject, gone: int, refused: bool
) -> None:
    """Ids that were padded with zeros, or taken from another table, look like nothing else: all
    values are as they were. The next run is refused as well."""
    rows = {i: float(i + 1) for i in range(100)}
    make_project(list(rows.items()), view=view()).run()
    moved = {i + 1000 if i < gone else i: x for i, x in rows.items()}
    for _ in range(2):
        project = make_project(list(moved.items()), view=view())
        if refused:
            with pytest.raises(
                GateError, match=f"rows: {gone}% of the keys of snapshot 1 are gone"
            ):
                project.run()
        else:
            assert project.run().status in ("published", "current")
    assert project.pointer().snapshot == (1 if refused else 2)
    assert (
        make_project(list(moved.items()), view=view({"rows": None})).run().status == "published"
        or not refused
    )


@pytest.mark.parametrize(
    ("cut", "rows"),
    [(True, dict.fromkeys(range(10), -2.0)), (False, {i: x + 0.001 for i, x in GOOD.items()})],
    ids=["a byte less", "other bytes"],
)
def test_what_is_live_and_damaged_holds_nobody_up(
    make_project: MakeProject, cut: bool, rows: dict[int, float]
) -> None:
    project = make_project(list(GOOD.items()), view=view())
    project.run()
    for path in (project.root / "numbers" / "data").rglob("part-*.parquet"):
        data = bytearray(path.read_bytes())
        data[40 : len(data) // 2 : 7] = b"\xff" * len(range(40, len(data) // 2, 7))
        path.write_bytes(data[:-1] if cut else data)
    project = make_project(list(rows.items()), view=view({"moved": 1.0}))
    assert project.run(full=True).status == "published"


def test_another_recipe_is_told_and_judged_by_itself(make_project: MakeProject) -> None:
    every: dict[str, Any] = {"gates": {}}
    make_project(list(GOOD.items()), view=view() | every).run()
    far = make_project([(i, -2.0) for i in GOOD], view=view(version=2, length=5.0) | every)
    assert far.run().status == "published"
    warned = {one.gate: one.message for one in far.snapshot().gates if one.warned}
    assert "vector of 40 rows computed: median length 5, passes from 0" in warned["computed"]
    assert "shape" not in warned  # of another recipe's nights nothing is said
    one = make_project(dict.fromkeys(GOOD, -1.0).items(), view=view(version=3) | every)
    with pytest.raises(
        GateError, match=r"first: vector: share of one vector 1, passes up to 0\.\d"
    ):
        one.run()


def test_every_gate_that_judges_is_one_that_is_configured(make_project: MakeProject) -> None:
    features = FEATURES | {"vector": {"dtype": "float32", "dim": 2, "packed": "int8"}}
    make = view(fallback=True) | {
        "features": features,
        "gates": {"features": {"double": {"range": [0, 1000]}}},
    }
    project = make_project(list(GOOD.items()), view=make)
    project.run()
    measured = {verdict.gate for verdict in project.snapshot().gates}
    project.run(full=True)
    measured |= {verdict.gate for verdict in project.snapshot().gates}
    assert measured == set(GATES) - {"accuracy", "batch", "library", "golden", "anchor", "never"}


@pytest.mark.parametrize(
    ("bad", "limit", "passed"),
    [(np.nan, 0.0, False), (np.inf, 0.9 / N, False), (-np.inf, 1 / N, True)],
)
def test_numbers_that_are_not_finite_are_found_however_they_came_to_disk(
    make_project: MakeProject, bad: float, limit: float, passed: bool
) -> None:
    project = make_project(list(GOOD.items()), view=view({"finite": limit}))
    project.run()
    store = project.store
    snapshot = store.snapshot(1)
    table = pa.Table.from_batches(list(store.batches(snapshot)))
    double = np.asarray(table["double"]).copy()
    double[0] = bad
    table = table.set_column(table.schema.get_field_index("double"), "double", pa.array(double))
    part = store.write_part("other", "part-00000.parquet", table)
    config = project.view("numbers")
    with open_view(config.feature_view(), project.offline, project.home) as opened:
        segments = (replace(snapshot.segments[0], parts=(part,)),)
        draft = replace(snapshot, number=0, segments=segments)
        verdicts = Judge(config, opened, store).measure(draft)
    assert verdicts.quality["finite"] == 1 / N
    assert [verdict for verdict in verdicts.all if verdict.gate == "finite"] == [
        Verdict("finite", passed, 1 / N, limit, "1 of 40 rows are not finite")
    ]


# ---- samples


def in_samples(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A sample beside each part, of so many rows of a snapshot, about."""
    monkeypatch.setattr(samples, "ROW_GROUP_BYTES", 0)
    monkeypatch.setattr(samples, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(samples, "WIDE_ROWS", rows)


def in_parts(monkeypatch: pytest.MonkeyPatch, rows: int = 1000) -> None:
    """A part for every window of so many rows."""
    monkeypatch.setattr(chunks, "WINDOW_ROWS", rows)
    monkeypatch.setattr(chunks, "PART_BYTES", 1)


def test_figures_of_deltas_are_those_of_a_run_in_one_go(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows came, changed and left, and however parts were cut."""
    in_parts(monkeypatch, 70)
    draw = np.random.default_rng(5)
    rows = {i: float(draw.normal()) for i in range(500)}
    for step in range(4):
        project = make_project(list(rows.items()), view=view({"rejected": None}))
        project.materialize()
        delta = project.snapshot()
        assert delta.kind == ("delta" if step else "full")
        project.materialize(full=True)
        whole = project.snapshot()
        assert whole.kind == "full"
        alone, again = (
            {name: value for name, value in of.quality.items() if ".moved." not in name}
            for of in (delta, whole)
        )
        assert alone == again
        assert len(alone) > 25
        gone = draw.choice(sorted(rows), 5, replace=False).tolist()
        rows = {i: x for i, x in rows.items() if i not in gone}
        rows |= {1000 * step + i: 0.0 for i in range(3)}
        rows |= {i: float(i) for i in draw.choice(sorted(rows), 9, replace=False).tolist()}


def test_damage_in_rows_that_were_taken_over_is_seen(make_project: MakeProject) -> None:
    own = {"features": {"double": {"range": [0, 10_000]}}}
    rows = {i: float(i + 1) for i in range(1000)} | {900: 1e6}
    make_project(list(rows.items()), view=view()).materialize()
    project = make_project(list((rows | {0: 1.5}).items()), view=view(own))
    with pytest.raises(GateError, match=r"bounds: double: 2e\+06 is not within range"):
        project.run()
    snapshot = project.snapshot()
    assert (snapshot.kind, snapshot.counts.unchanged) == ("delta", 999)


def test_a_delta_reads_no_row_of_what_it_builds_on(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch)
    in_samples(monkeypatch, 2000)
    many = {i: float(i + 1) for i in range(20_000)}
    make_project(list(many.items()), view=view({"parity": None})).run()
    project = make_project(
        list((many | {i: many[i] + 2.0 for i in range(3100, 3200)}).items()),
        view=view({"parity": None}),
    )
    read: list[str] = []
    for name in ("read_row_group", "iter_batches"):
        monkeypatch.setattr(pq.ParquetFile, name, lambda *_, name=name, **__: read.append(name))
    project.materialize()
    assert read == []
    quality = project.snapshot().quality
    # by 4 of a spread of 12,500, and a right angle and a bit
    assert quality["double.moved.quarter"] == 0
    assert quality["vector.moved.cosine50"] == 1


def test_what_is_judged_takes_bounded_memory(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feature of very many labels, one of which is long."""
    labels = [f"label {i}" for i in range(60_000)] + ["c" * 500_000]
    table = pa.table({"id": range(len(labels)), "x": np.arange(float(len(labels))), "text": labels})
    scene = make_project(
        table,
        view={
            "model": {"use": "columns"},
            "features": {"text": {"dtype": "string"}},
            "source": {"sql": "SELECT id, text FROM read_parquet('${data}/data.parquet')"},
        },
    )
    scene.run()
    config, store = scene.view("numbers"), scene.store
    with open_view(config.feature_view(), scene.offline, scene.home) as opened:
        tracemalloc.start()
        verdicts = Judge(config, opened, store).measure(store.snapshot(1))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 64 * 10**6
    assert verdicts.quality["text.distinct"] == 1


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
def test_a_run_goes_on_without_a_sample(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    in_samples(monkeypatch, 50)
    own = view({"moved": 1.0})
    make_project(list(GOOD.items()) + [(i, 1.0) for i in range(N, 400)], view=own).run()
    again = [(i, float(i + 2)) for i in range(N)] + [(i, 1.0) for i in range(N, 400)]
    project = make_project(again, view=own)
    project.materialize()
    whole = project.snapshot()
    sampled = samples.Samples(project.store).of(whole).rows.num_rows
    assert 0 < sampled < 100
    (sample,) = (part.sample for part in whole.segments[0].parts)
    assert sample is not None
    path = project.store.folder / sample.path
    path.unlink() if lost else path.write_bytes(b"x" + path.read_bytes()[1:])
    make_project([*again, (400, 1.0)], view=own).run()
    later = project.store.snapshot(3)
    assert (later.kind, len(later.segments)) == ("delta", 3)
    assert abs(samples.Samples(project.store).of(later).rows.num_rows - sampled) <= 1
    assert [verdict.gate for verdict in later.gates] == [verdict.gate for verdict in whole.gates]
    with pytest.raises(SnapshotError, match=path.name):
        project.store.check_parts(later)


# ---- what readers rely on


TEXT_KEY = "SELECT CAST(id AS VARCHAR) AS k, x FROM read_parquet('${data}/data.parquet')"
CONTRACTS: dict[str, tuple[dict[str, Any], str]] = {
    "gone": (
        {"features": {"other": {"dtype": "float64"}, "vector": FEATURES["vector"]}},
        r"feature 'double' is gone \(there are: other, vector\)",
    ),
    "type": (
        {"features": FEATURES | {"double": {"dtype": "float32"}}},
        "feature 'double' is float32, and was float64",
    ),
    "dim": (
        {"features": FEATURES | {"vector": {"dtype": "float32", "dim": 3}}},
        "feature 'vector' is a vector of 3 float32, and was a vector of 2 float32",
    ),
    "key": ({"entity": ["k"], "source": {"sql": TEXT_KEY}}, r"the key is \[k\], and was \[id\]"),
    "index": ({"index": None}, "the search was removed, and was of vector by cosine"),
    "metric": (
        {"index": {"on": "vector", "metric": "dot"}},
        "the search is of vector by dot, and was of vector by cosine",
    ),
}


class Anything(Vectors):
    """Whatever features its view declares in ``features``."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        x = np.asarray(batch.column("x")).astype(np.float64)
        one: dict[str, np.ndarray] = {
            "double": x,
            "other": x,
            "vector": np.stack([np.cos(x), np.sin(x)], axis=1).astype(np.float32),
        }
        wide: dict[str, np.ndarray] = (
            {"vector": np.stack([np.cos(x), np.sin(x), x], axis=1).astype(np.float32)}
            if self.length == 3
            else {}
        )
        return {
            name: value
            for name, value in (one | wide).items()
            if name in (self.weights or "double,vector").split(",")
        }


@pytest.mark.parametrize("change", CONTRACTS)
def test_what_readers_rely_on_is_changed_by_name_alone(
    make_project: MakeProject, change: str
) -> None:
    base = {"features": FEATURES, "index": {"on": "vector"}, "gates": UNJUDGED}

    def with_model(changed: dict[str, Any]) -> dict[str, Any]:
        features = changed["features"]
        args = {"weights": ",".join(features), "length": float(features["vector"]["dim"])}
        return changed | {"model": {"use": f"{HERE}:Anything", "args": args}}

    make_project(list(GOOD.items()), view=with_model(base)).run()
    changed, said = CONTRACTS[change]
    project = make_project(list(GOOD.items()), view=with_model(base | changed))
    with pytest.raises(
        GateError, match=f"contract: readers of numbers would break: {said}.*--accept contract"
    ):
        project.run()
    assert project.run(accept=["contract"]).status == "published"


def test_a_feature_more_breaks_nobody(make_project: MakeProject) -> None:
    def anything(*names: str) -> dict[str, Any]:
        features = {name: FEATURES.get(name, {"dtype": "float64"}) for name in names}
        return {
            "features": features,
            "model": {"use": f"{HERE}:Anything", "args": {"weights": ",".join(names)}},
        }

    make_project(list(GOOD.items()), view=anything("double", "vector")).run()
    assert (
        make_project(list(GOOD.items()), view=anything("vector", "other", "double")).run().status
        == "published"
    )


# ---- nights


MONDAY = date(2024, 1, 1)


def day(n: int) -> str:
    return (MONDAY + timedelta(days=n)).isoformat()


class Nightly:
    """One view, run once a night: ``gates`` are its own, ``x`` its rows."""

    def __init__(self, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
        self.make, self.patch, self.gates = make_project, monkeypatch, dict[str, Any]()
        self.options: dict[str, Any] = {}

    def scene(self, rows: Mapping[int, float | None], **args: Any) -> Scene:
        own = view(self.gates, **args) | {"gates": self.gates} | self.options
        return self.make(list(rows.items()), view=own, project={"retention": {"keep": 2}})

    def run(
        self, n: int, rows: Mapping[int, float | None], *, accept: tuple[str, ...] = (), **args: Any
    ) -> Snapshot:
        """Of that night; refused ones too."""
        self.patch.setattr(materialize, "utc_now", lambda: f"{day(n)}T02:00:00.000000Z")
        scene = self.scene(rows, **args)
        try:
            scene.run(accept=accept)
        except GateError:
            assert scene.report().status == "refused"
        return scene.snapshot()


@pytest.fixture
def nightly(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> Nightly:
    return Nightly(make_project, monkeypatch)


def rows_of(n: int, shift: float = 0.0) -> dict[int, float]:
    """Rows of a night: they drift a little."""
    return {i: x + 0.01 * ((7 * i * (n + 1)) % 11) + shift for i, x in GOOD.items()}


def known(scene: Scene) -> list[tuple[int, str]]:
    """(snapshot, day) of what the next run would know."""
    return [(one.number, one.day) for one in nights_after(scene.store, scene.snapshot())]


def test_nights_are_learned_and_what_is_far_from_them_is_refused(nightly: Nightly) -> None:
    for n in range(9):
        snapshot = nightly.run(n, rows_of(n))
        assert failed(snapshot) == []
        scene = nightly.scene(rows_of(n))
        before = read_nights(scene.store, snapshot)
        assert [(one.number, one.day) for one in before] == [(m + 1, day(m)) for m in range(n)]
        assert snapshot.nights is not None
        assert snapshot.nights.rows == n
        # a snapshot is as old as its manifest's file
        os.utime(scene.store.manifest_path(snapshot.number), (0, 0))
    # the snapshots of most of them are gone, what is known of them is not
    assert scene.numbers()[0] > 1
    assert scene.faults() == []
    # 0.4 of a spread, which a young view would have allowed, by values that were all the same
    far = nightly.run(9, rows_of(9, 10.0))
    assert "shape" in failed(far)
    assert "(in the 9 nights before " in (scene.report().error or "")
    # what was refused tells nothing of what is usual
    night = nightly.run(10, rows_of(10))
    assert failed(night) == []
    assert [one.number for one in read_nights(scene.store, night)] == list(range(1, 10))


def test_what_was_accepted_is_what_is_usual_from_then_on(nightly: Nightly) -> None:
    nightly.gates = dict(UNJUDGED | {"shape": 1.0})
    for n in range(8):
        nightly.run(n, rows_of(n))
    assert failed(nightly.run(8, rows_of(8, 30.0))) == ["shape"]
    assert failed(nightly.run(9, rows_of(9, 30.0), accept=("shape",))) == ["shape"]
    again = nightly.run(10, rows_of(10, 30.0))
    assert failed(again) == []
    (last,) = read_nights(nightly.scene(rows_of(10)).store, again)[-1:]
    assert last.day == day(9)
    assert "double.p50" in last.accepted
    assert "vector.norm.p50" not in last.accepted


def test_two_runs_a_day_are_one_night_and_a_clock_set_back_is_another(nightly: Nightly) -> None:
    for n, of in ((0, 0), (1, 0), (2, 1), (3, 0), (4, 2)):
        nightly.run(of, rows_of(n))
    scene = nightly.scene(rows_of(4))
    assert known(scene) == [(3, day(1)), (4, day(0)), (5, day(2))]


def test_what_was_accepted_is_compared_with_no_rows_before_it(nightly: Nightly) -> None:
    """Not by the first night after it, nor by one of the week."""
    for n in range(4):
        nightly.run(n, rows_of(n))
    far = nightly.run(4, rows_of(4, 300.0), accept=tuple(GATES))
    assert {"shape", "anchor"} <= {*failed(far)}
    for n in range(5, 8):
        assert failed(nightly.run(n, rows_of(n, 300.0))) == []


def test_by_a_clock_that_was_set_back_rows_are_computed_too(nightly: Nightly) -> None:
    nightly.gates = dict(UNJUDGED | {"computed": 1.0})
    for n, at_us in enumerate((2 * 86_400_000_000, 86_400_000_000)):
        nightly.patch.setattr(chunks, "clock_us", lambda at_us=at_us: at_us)
        night = nightly.run(n, GOOD | {i: 500.0 + i for i in range(25 * n)})
    assert failed(night) == ["computed"]
    assert "double of 25 rows computed" in night.failed[0].message


def test_what_was_announced_is_no_night_of_what_is_usual(nightly: Nightly) -> None:
    nightly.run(0, rows_of(0))
    nightly.gates = {"expect": [{"on": day(1), "reason": "a sale"}]}
    announced = nightly.run(1, rows_of(1, 100.0))
    assert (failed(announced), announced.announced) == ([], "a sale, by gates.expect")
    assert nightly.scene(rows_of(1, 100.0)).live().snapshot == 2
    back = nightly.run(2, rows_of(2, 100.0), accept=())
    # the last ordinary night is the one before
    assert "double: 75th percentile" in " ".join(one.message for one in back.failed)
    assert f"(on {day(0)} " in " ".join(one.message for one in back.failed)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
def test_nights_that_are_lost_are_known_from_the_snapshots_before(
    nightly: Nightly, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(4):
        nightly.run(n, rows_of(n))
    scene = nightly.scene(rows_of(3))
    last = scene.snapshot()
    of_all, beside = nights_after(scene.store, last), (last.nights, last.anchors[-1])
    for part in beside:
        assert part is not None
        path = scene.store.folder / part.path
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 4
        path.unlink()
        if not lost:
            path.write_bytes(data)
    assert "does without it" in scene.faults()[0].found
    assert nights_after(scene.store, last) == of_all
    after = nightly.run(4, rows_of(4))
    assert failed(after) == []
    assert "is known from the snapshots before it" in caplog.text
    # the night whose rows are lost is a night without
    assert read_nights(scene.store, after) == (*of_all[:-1], replace(of_all[-1], rows=None))
    assert (len(after.anchors), scene.faults()) == (4, [])


def test_nights_of_which_nothing_is_left_are_learned_anew(nightly: Nightly) -> None:
    for n in range(3):
        nightly.run(n, rows_of(n))
    scene = nightly.scene(rows_of(2))
    for path in scene.store.folder.rglob("nights.json"):
        path.unlink()
    there = scene.numbers()
    after = nightly.run(3, rows_of(3))
    assert [one.number for one in read_nights(scene.store, after)] == there
    assert scene.live().snapshot == after.number

    def no_answer(path: Path) -> bytes:
        raise OSError(errno.EIO, "no answer", str(path))

    nightly.patch.setattr(Path, "read_bytes", no_answer)
    # what cannot be read now is not lost
    with pytest.raises(UnreadableError, match=r"nights\.json cannot be read"):
        read_nights(scene.store, after)


def test_a_feature_of_yesterday_and_one_that_is_gone(nightly: Nightly) -> None:
    for n in range(8):
        nightly.run(n, rows_of(n))
    nightly.options = {"features": {"double": FEATURES["double"]}, "index": None}
    nightly.gates = {"contract": None}
    alone = nightly.run(8, rows_of(8))
    assert failed(alone) == []
    assert not [name for name in alone.quality if name.startswith("vector.")]
    nightly.options = {}
    both = nightly.run(9, rows_of(9))
    assert failed(both) == []
    assert "vector.common" in both.quality


def test_a_little_each_night_is_much_in_a_week(nightly: Nightly) -> None:
    """As every night: within all other limits, and away from what was there."""
    nightly.gates = dict(UNJUDGED | {"anchor": 1.0})
    for n in range(8):
        assert failed(nightly.run(n, rows_of(n))) == []
    refused = []
    for n in range(8, 15):
        grown = nightly.run(n, {i: x * 1.35 ** (n - 7) for i, x in rows_of(n).items()})
        refused += grown.failed
    assert {one.gate for one in refused} == {"anchor"}
    assert "since snapshot" in refused[0].message


def test_a_share_that_never_was_nothing(nightly: Nightly) -> None:
    nightly.gates = dict(UNJUDGED | {"never": 1.0})
    for n in range(7):
        of = {i: x if i % 2 else 0.0 for i, x in rows_of(n).items()}
        assert failed(nightly.run(n, of)) == []
    found = nightly.run(7, {i: x + 1 for i, x in rows_of(7).items()})
    assert failed(found) == ["never"]
    assert {"double.zero", "vector.zero"} <= {*found.failed[0].figures}
    assert "which it was in none of 7 nights" in found.failed[0].message


def test_partitions_are_nights_in_data_time(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed in whatever order, all within one day."""
    table = pa.table(
        {
            "id": [i for n in range(5) for i in range(N)],
            "x": [x for n in range(5) for x in rows_of(n).values()],
            "t": [datetime.fromisoformat(f"{day(n)}T05:00") for n in range(5) for _ in range(N)],
        }
    )
    sql = "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE t >= $start AND t < $end"
    project = make_project(
        table,
        view=view()
        | {
            "gates": {},
            "source": {"sql": sql},
            "partition": {"by": "day", "start": day(0)},
            "ttl": "9000d",
        },
    )
    order, numbers = (0, 3, 1, 4, 2), {}
    for n in order:
        assert project.cli("run", "numbers", "--partition", day(n)) == 0
        numbers[n] = project.snapshot().number
    assert sorted(numbers.values()) == [1, 2, 3, 4, 5]
    # as each was computed: the day before it that was there, none that comes after it
    for n, before in ((0, None), (3, 0), (1, 0), (4, 3), (2, 1)):
        snapshot = project.snapshot(numbers[n])
        assert failed(snapshot) == []
        shape = [one.message for one in snapshot.gates if one.gate == "shape"]
        assert [re.findall(r"\(on ([\d-]+)", one) for one in shape] == (
            [] if before is None else [[day(before)]]
        )
        # and is shown with the limits that judged it then
        found = {
            f"{one.feature}: {one.words} {one.value:.4g}, passes": one.passes()
            for one in gate_history(project.store, snapshot).figures
        }
        for message in shape:
            assert found[message[: message.index(" from ")]] in message
    # and as they would be judged now: all days before, the oldest first
    for n, number in numbers.items():
        known = neighbours_of(project.store, project.snapshot(number))
        assert [one.number for one in known.nights] == [numbers[m] for m in range(n)]
        assert (known.before and known.before.number) == numbers.get(n - 1)
        assert known.week is None


# ---- the models of inputs


class Times:
    """x → ``double``: x times a factor, which is its fingerprint."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def fingerprint(self) -> str:
        return f"times {self.factor}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        return {"double": np.asarray(batch.column("x")).astype(np.float64) * self.factor}


def test_another_model_of_an_input_however_far_is_another_model(make_project: MakeProject) -> None:
    """``near`` reads ``live.numbers``, and ``far`` reads ``live.near``."""
    one = {"features": {"double": {"dtype": "float64"}}, "gates": {"constant": None}}

    def scene(factor: float, moved: float = 0.0) -> Scene:
        def reads(name: str) -> dict[str, Any]:
            sql = f"SELECT id, double AS x FROM live.{name}"
            more = {"source": {"sql": sql}, "model": {"use": f"{HERE}:Times"}}
            return one | more | {"entity": ["id"], "ttl": "1h"}

        return make_project(
            [(i, float(i + 1) + moved) for i in range(400)],
            view=one | {"model": {"use": f"{HERE}:Times", "args": {"factor": factor}}},
            views={"near": reads("numbers"), "far": reads("near")},
        )

    scene(1.0).publish_all("numbers", "near", "far")
    first = scene(1.0)
    assert first.snapshot(view="numbers").input_models == {}
    assert first.snapshot(view="near").input_models == {"numbers": first.snapshot().model}
    assert first.snapshot(view="near").made_by != first.snapshot(view="near").model
    scene(1000.0).publish_all("numbers", "near", "far")
    other = scene(1000.0)
    for name in ("near", "far"):
        before, now = other.snapshot(1, name), other.snapshot(2, name)
        assert (now.model, other.live(name).snapshot) == (before.model, 2)
        assert now.made_by != before.made_by
    # by the same models of all of them the same change of all rows is refused
    moved = scene(1000.0, 10**6)
    moved.run(accept=("shape", "moved", "computed"))
    with pytest.raises(GateError, match=r"snapshot 3 is not published.* shape: "):
        moved.run("near")
