"""Gates: each refuses what it is there for, with the right figures and exit status 3; the old version stays live; a name accepts it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.cli import main
from jobs.config import Project
from jobs.gates import judge
from jobs.open_view import open_view
from jobs.progress import Silent
from jobs.report import Report
from jobs.run import run_view
from store.errors import GateError
from store.lookup import Lookup
from store.offline_store import OfflineStore
from store.online_url import open_online_store
from store.snapshot import Snapshot
from tests.conftest import MakeProject

HERE = "tests.jobs.test_gates"
N = 40
GOOD = {i: float(i + 1) for i in range(N)}
Captured = pytest.CaptureFixture[str]


class Vectors:
    """x → ``vector``: for x > 0 the direction of x, of length ``length``; 0 gives zeros, -1 always the same vector, -2 the opposite
    direction of the row's ``id``; ``double`` = 2x. With ``weights``, a file, a factor of both that the fingerprint does not tell.
    ``batched``: adds the number of rows in the batch."""

    def __init__(self, length: float = 1.0, version: int = 1, weights: str | None = None, batched: bool = False) -> None:
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


def view(gates: Mapping[str, float | None] | None = None, fallback: bool = False, **args: Any) -> dict[str, Any]:
    return {
        "model": {"use": f"{HERE}:Vectors", "args": args},
        "features": FEATURES,
        "gates": dict(gates or {}),
        "fallback": {"enabled": fallback, "deadline": "20s"},
    }


def call(project: Project, *command: str) -> int:
    return main(["-c", str(project.folder), *command])


def run(project: Project, **options: Any) -> Report:
    return run_view(project, "numbers", Silent(), **options)


def live(project: Project) -> tuple[int, int]:
    """(snapshot live offline, snapshot a reader is served)."""
    ref = OfflineStore(project.root).live("numbers")
    lookup = Lookup(open_online_store(project.online), project.root)
    try:
        assert ref is not None
        return ref.snapshot, lookup.row("numbers", 0)["snapshot"]
    finally:
        lookup.close()


def failed(snapshot: Snapshot) -> list[str]:
    return [gate["gate"] for gate in snapshot.gates if not gate["passed"]]


def newest(project: Project) -> Snapshot:
    store = OfflineStore(project.root)
    return store.snapshot("numbers", store.numbers("numbers")[-1])


BAD: dict[str, tuple[dict[int, float | None], dict[str, Any], float, str]] = {
    # gate: rows, the model's arguments, figure measured, what is said
    "rows": ({i: GOOD[i] for i in range(N // 2)}, {}, -0.5, "20 rows, -50.0% against the 40 of snapshot 1"),
    "rejected": (GOOD | dict.fromkeys(range(10)), {}, 0.25, "10 of 40 rows rejected"),
    "coverage": (GOOD | dict.fromkeys(range(10)), {}, 0.75, "30 of 40 source rows have a value"),
    "zero": (GOOD | {0: 0.0, 1: 0.0}, {}, 0.05, "5.0% of sampled vector are all zeros"),
    "duplicates": (dict.fromkeys(GOOD, -1.0), {}, 0.975, "97.5% of sampled vector repeat another one"),
    "drift": (dict.fromkeys(GOOD, -2.0), {}, -1.0, "mean cosine of vector to the live snapshot -1.0000, on 40 common keys"),
    "norm": (
        {i: x + 1e-9 for i, x in GOOD.items()},
        {"length": 3.0},
        2.0,
        "mean norm of vector 3, +200.0% against 1",
    ),
}
OWN = {"rejected": {"rejected": 0.2}, "coverage": {"coverage": 0.8}}
"""Limits for the gates whose default is that of ``max_rejected``, which stops the run earlier."""
OTHERS = {gate: {"rows": None, "zero": None, "norm": None, "duplicates": None, "drift": None} for gate in BAD}


def projects(make_project: MakeProject, gate: str, limit: Mapping[str, float | None]) -> Project:
    """A project with a good snapshot live and the bad rows of a gate in its source, all other gates off."""
    rows, args, _, _ = BAD[gate]
    gates = {k: v for k, v in OTHERS[gate].items() if k != gate} | dict(limit)
    run(make_project(list(GOOD.items()), view=view(gates)))
    return make_project(list(rows.items()), view=view(gates, **args))


@pytest.mark.parametrize("gate", BAD)
def test_a_gate_refuses_with_its_figures_and_the_old_version_stays(
    make_project: MakeProject, capsys: Captured, gate: str
) -> None:
    project = projects(make_project, gate, OWN.get(gate, {}))
    _, _, measured, said = BAD[gate]
    capsys.readouterr()
    assert call(project, "run", "numbers") == 3
    error = capsys.readouterr().err
    assert f"{gate}: {said} (limit " in error
    assert f"precompute publish numbers --snapshot 2 --accept {gate}" in error
    assert live(project) == (1, 1)
    snapshot = newest(project)
    assert (snapshot.number, failed(snapshot), snapshot.refused_by) == (2, [gate], [gate])
    assert snapshot.quality[gate] == pytest.approx(measured, abs=1e-6)
    report = OfflineStore(project.root).last_report("numbers")
    assert report is not None
    assert (report["status"], report["snapshot"]) == ("refused", 2)
    assert [g["gate"] for g in report["gates"] if not g["passed"]] == [gate]
    assert report["error"] in error
    # and once more: nothing changed, so nothing is computed, and it is refused again
    assert call(project, "run", "numbers", "--json") == 3
    again = json.loads(capsys.readouterr().out)
    assert (again["status"], again["snapshot"], again["counts"]["written"]) == ("refused", 2, 0)
    assert OfflineStore(project.root).numbers("numbers") == [1, 2]


@pytest.mark.parametrize("gate", [gate for gate in BAD if gate not in OWN])
def test_null_switches_a_gate_off(make_project: MakeProject, gate: str) -> None:
    project = projects(make_project, gate, {gate: None})
    assert run(project).status == "published"
    assert live(project) == (2, 2)
    snapshot = newest(project)
    assert gate not in [g["gate"] for g in snapshot.gates]
    assert gate in snapshot.quality  # it is measured all the same


@pytest.mark.parametrize(
    ("gate", "limit"),
    [
        ("rows", 0.5),
        ("rejected", 0.25),
        ("coverage", 0.75),
        ("zero", 0.05),
        ("duplicates", 0.975),
        ("drift", -1.0),
        ("norm", 2.0),
    ],
)
def test_a_limit_is_what_still_passes(make_project: MakeProject, gate: str, limit: float) -> None:
    project = projects(
        make_project, gate, {gate: limit - 1e-9 if gate == "coverage" else limit if gate == "drift" else limit + 1e-6}
    )
    assert run(project).status == "published"
    assert live(project) == (2, 2)


@pytest.mark.parametrize("gate", BAD)
def test_a_gate_is_accepted_by_name_on_the_run(make_project: MakeProject, gate: str) -> None:
    project = projects(make_project, gate, OWN.get(gate, {}))
    other = "zero" if gate != "zero" else "rows"
    assert call(project, "run", "numbers", "--accept", other) == 3
    assert live(project)[0] == 1
    assert call(project, "run", "numbers", "--accept", gate) == 0
    snapshot = newest(project)
    assert live(project) == (snapshot.number, snapshot.number)
    assert (list(snapshot.accepted), failed(snapshot), snapshot.refused_by) == ([gate], [gate], [])


@pytest.mark.parametrize("gate", ["rows", "drift"])
def test_a_gate_is_accepted_by_name_on_a_later_publish(make_project: MakeProject, gate: str) -> None:
    project = projects(make_project, gate, {})
    assert call(project, "materialize", "numbers") == 0
    assert call(project, "publish", "numbers", "--snapshot", "2") == 3
    assert live(project)[0] == 1
    assert call(project, "publish", "numbers", "--snapshot", "2", "--accept", gate) == 0
    snapshot = newest(project)
    assert live(project) == (snapshot.number, snapshot.number)
    assert list(snapshot.accepted) == [gate]
    store = OfflineStore(project.root)
    rows = [list(store.batches(store.snapshot("numbers", n))) for n in (2, snapshot.number)]
    assert rows[0] == rows[1]
    assert run(project).status == "current"  # nothing is left to be refused


def test_accepting_one_of_two_is_not_enough(make_project: MakeProject, capsys: Captured) -> None:
    off = {"duplicates": None}
    run(make_project(list(GOOD.items()), view=view(off)))
    project = make_project([(i, -2.0) for i in range(20)], view=view(off))
    assert call(project, "run", "numbers", "--accept", "rows") == 3
    error = capsys.readouterr().err
    assert "drift: " in error
    assert "rows: " not in error
    assert live(project)[0] == 1
    assert call(project, "publish", "numbers", "--snapshot", "2", "--accept", "drift", "--accept", "rows") == 0
    assert sorted(newest(project).accepted) == ["drift", "rows"]


def test_publish_by_default_takes_the_newest_that_no_gate_refused(make_project: MakeProject) -> None:
    run(make_project(list(GOOD.items()), view=view()))
    project = make_project([(i, GOOD[i]) for i in range(10)], view=view())
    run(project, command="materialize")
    report = run(project, command="publish")
    assert (report.status, report.snapshot) == ("current", 1)
    assert run(project, command="publish", accept=["rows"]).status == "published"
    assert OfflineStore(project.root).snapshot("numbers", live(project)[0]).rows == 10


def test_a_limit_that_was_changed_is_what_the_next_run_judges_by(make_project: MakeProject) -> None:
    run(make_project(list(GOOD.items()), view=view()))
    half = [(i, GOOD[i]) for i in range(20)]
    with pytest.raises(GateError):
        run(make_project(half, view=view()))
    project = make_project(half, view=view({"rows": 0.6}))  # as the operator, told of the refusal, would do
    assert run(project).status == "published"


def test_rejected_and_coverage_can_be_switched_off(make_project: MakeProject) -> None:
    project = make_project([(0, 1.0), (1, None)], view=view({"rejected": None, "coverage": None}))
    assert run(project).status == "published"
    # what max_rejected allows is their default, and null is how all gates are switched off
    assert [g["gate"] for g in newest(project).gates if g["gate"] in ("rejected", "coverage")] == []


# ---- parity


def test_parity_computes_a_sample_again_as_the_fallback_would(make_project: MakeProject, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_text("1")
    make = {"fallback": True, "weights": str(weights)}
    project = make_project(list(GOOD.items()), view=view(**make))
    run(project)
    parity = [g for g in newest(project).gates if g["gate"] == "parity"]
    assert parity == [
        {
            "gate": "parity",
            "passed": True,
            "measured": 0.0,
            "limit": 0.05,
            "message": "0 of 20 sampled rows come out differently from the fallback",
        }
    ]
    weights.write_text("1.5")  # the file changed, and the model's fingerprint does not tell: old rows stay, new ones are others
    project = make_project([*GOOD.items(), (N, 41.0)], view=view(**make))
    with pytest.raises(GateError, match=r"parity: 20 of 20 sampled rows come out differently.*--accept parity"):
        run(project)
    assert live(project)[0] == 1


def test_parity_finds_a_model_that_answers_by_the_batch(make_project: MakeProject) -> None:
    project = make_project(list(GOOD.items()), view=view(fallback=True, batched=True))
    with pytest.raises(GateError, match="parity: 20 of 20 sampled rows"):
        run(project)
    assert (
        run(make_project(list(GOOD.items()), view=view({"parity": None}, fallback=True, batched=True)), full=True).status
        == "published"
    )


def test_parity_leaves_out_rows_whose_input_changed_since(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs import materialize

    project = make_project(list(GOOD.items()), view=view(fallback=True))
    compact = materialize._snapshot

    def changed(*arguments: Any) -> Snapshot:
        ids = list(GOOD)
        pq.write_table(pa.table({"id": ids, "x": [GOOD[i] + (1 if i < 30 else 0) for i in ids]}), project.folder / "data.parquet")
        return compact(*arguments)

    monkeypatch.setattr(materialize, "_snapshot", changed)
    assert run(project).status == "published"
    (parity,) = [g for g in newest(project).gates if g["gate"] == "parity"]
    assert parity["message"] == "0 of 5 sampled rows come out differently from the fallback"


def test_parity_of_composite_and_text_keys(make_project: MakeProject) -> None:
    table = pa.table({"a": ["x/y", "50%", "p"], "id": [1, 2, 3], "x": [1.0, 2.0, 3.0]})
    project = make_project(table, view=view(fallback=True) | {"entity": ["a", "id"]})
    run(project)
    assert [g["message"][:6] for g in newest(project).gates if g["gate"] == "parity"] == ["0 of 3"]


# ---- what is not judged


def test_without_a_live_snapshot_there_is_nothing_to_compare_with(make_project: MakeProject) -> None:
    project = make_project(list(GOOD.items()), view=view())
    run(project)
    assert [g["gate"] for g in newest(project).gates] == ["rejected", "coverage", "finite", "zero", "duplicates"]


def test_another_model_is_not_judged_by_drift(make_project: MakeProject) -> None:
    run(make_project(list(GOOD.items()), view=view()))
    project = make_project([(i, -2.0) for i in GOOD], view=view(version=2))
    assert run(project).status == "published"
    assert "drift" not in newest(project).quality


def test_fewer_than_twenty_rows_make_no_statistics(make_project: MakeProject) -> None:
    run(make_project([(i, 5.0 + i) for i in range(19)], view=view()))
    project = make_project([(0, 0.0), *((i, -2.0) for i in range(1, 5))], view=view())
    assert run(project).status == "published"
    snapshot = newest(project)
    assert [g["gate"] for g in snapshot.gates] == ["rejected", "coverage", "finite"]
    assert snapshot.quality["zero"] == 0.2
    assert snapshot.quality["drift"] < 0.8


def test_half_of_a_view_that_had_enough_rows_is_told_though_less_than_twenty_are_left(make_project: MakeProject) -> None:
    run(make_project(list(GOOD.items()), view=view()))
    with pytest.raises(GateError, match=r"10 rows, -75\.0% against the 40 of snapshot 1"):
        run(make_project([(i, GOOD[i]) for i in range(10)], view=view()))


def test_what_is_live_and_damaged_holds_nobody_up(make_project: MakeProject) -> None:
    project = make_project(list(GOOD.items()), view=view())
    run(project)
    for path in (project.root / "numbers" / "data").rglob("part-*.parquet"):
        path.write_bytes(path.read_bytes()[:-1])
    project = make_project([(i, -2.0) for i in range(10)], view=view({"duplicates": None}))
    assert run(project, full=True).status == "published"


def test_a_live_part_with_a_flipped_byte_holds_nobody_up(make_project: MakeProject) -> None:
    project = make_project(list(GOOD.items()), view=view())
    run(project)
    for path in (project.root / "numbers" / "data").rglob("part-*.parquet"):
        data = bytearray(path.read_bytes())
        for at in range(40, len(data) // 2, 7):
            data[at] ^= 0xFF
        path.write_bytes(bytes(data))
    project = make_project([(i, x + 0.001) for i, x in GOOD.items()], view=view())
    assert run(project, full=True).status == "published"


# ---- other kinds of features


class Kinds:
    """One feature of each kind without a float vector; every third value null."""

    def fingerprint(self) -> str:
        return "kinds"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        x = batch.column("x").to_pylist()
        return {
            "number": pa.array([None if v % 3 == 0 else v for v in x], pa.float32()),
            "text": pa.array([None if v % 3 == 0 else str(v) for v in x]),
            "flag": pa.array([v > 1 for v in x]),
            "ids": pa.array([None if v % 3 == 0 else [1, 2] for v in x], pa.list_(pa.int64())),
            "scores": pa.array([[0.5] * (int(v) % 3) for v in x], pa.list_(pa.float32())),
            "bytes": np.zeros((len(x), 2), np.int8),
            "none": pa.nulls(len(x), pa.float64()),
        }


KINDS = {
    "model": {"use": f"{HERE}:Kinds"},
    "fallback": {"enabled": True, "deadline": "20s"},
    "features": {
        "number": {"dtype": "float32"},
        "text": {"dtype": "string"},
        "flag": {"dtype": "bool"},
        "ids": {"dtype": "int64", "max_items": 3},
        "scores": {"dtype": "float32", "max_items": 3},
        "bytes": {"dtype": "int8", "dim": 2},
        "none": {"dtype": "float64"},
    },
}


def test_scalars_lists_texts_and_nulls_are_judged_without_vectors(make_project: MakeProject) -> None:
    run(make_project(list(GOOD.items()), view=KINDS))
    project = make_project([(i, x + 1) for i, x in GOOD.items()], view=KINDS)
    assert run(project).status == "published"
    snapshot = newest(project)
    assert [g["gate"] for g in snapshot.gates] == ["rows", "rejected", "coverage", "finite", "parity"]
    assert all(g["passed"] for g in snapshot.gates)


class Two(Vectors):
    """Two vectors: ``vector`` is as it should be, ``other`` all zeros; the last one declared does not hide the first."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        good = super().compute(batch)
        return {"first": np.zeros((batch.num_rows, 2), np.float32), "vector": good["vector"]}


def test_each_vector_is_judged_and_named(make_project: MakeProject, capsys: Captured) -> None:
    features = {"first": {"dtype": "float32", "dim": 2}, "vector": {"dtype": "float32", "dim": 2}}
    project = make_project(
        list(GOOD.items()), view=view({"duplicates": None}) | {"model": {"use": f"{HERE}:Two"}, "features": features}
    )
    assert call(project, "run", "numbers") == 3
    error = capsys.readouterr().err
    assert "zero: 100.0% of sampled first are all zeros" in error
    assert error.count("--accept zero") == 1
    snapshot = newest(project)
    assert [g["passed"] for g in snapshot.gates if g["gate"] == "zero"] == [False, True]
    assert snapshot.quality["zero"] == 1.0  # the worst figure, not the last one
    assert call(project, "run", "numbers", "--accept", "zero") == 0


class AllZero(Two):
    """Two vectors, both zeros."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        zeros = np.zeros((batch.num_rows, 2), np.float32)
        return {"first": zeros, "vector": zeros}


def test_a_gate_that_two_vectors_fail_is_named_once_to_be_accepted(make_project: MakeProject, capsys: Captured) -> None:
    features = {"first": {"dtype": "float32", "dim": 2}, "vector": {"dtype": "float32", "dim": 2}}
    project = make_project(
        list(GOOD.items()), view=view({"duplicates": None}) | {"model": {"use": f"{HERE}:AllZero"}, "features": features}
    )
    assert call(project, "run", "numbers") == 3
    assert capsys.readouterr().err.count("--accept zero") == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_found_however_they_came_to_disk(make_project: MakeProject, bad: float) -> None:
    project = make_project(list(GOOD.items()), view=view())
    run(project)
    store = OfflineStore(project.root)
    snapshot = store.snapshot("numbers", 1)
    table = pa.Table.from_batches(list(store.batches(snapshot)))
    double = np.asarray(table["double"]).copy()
    double[0] = bad
    table = table.set_column(table.schema.get_field_index("double"), "double", pa.array(double))
    part = store.write_part("numbers", "other", "part-00000.parquet", table)
    config = project.view("numbers")
    with open_view(config.feature_view(), store, project.home) as opened:
        quality, verdicts = judge(config, opened, store, replace(snapshot, number=0, parts=(part,)), None)
    (verdict,) = [v for v in verdicts if v.gate == "finite"]
    assert (verdict.passed, verdict.measured, quality["finite"]) == (False, 1 / N, 1 / N)
    assert verdict.message == "2.50% of sampled rows are not finite"


def test_zero_vectors_are_compared_without_a_division(make_project: MakeProject) -> None:
    off = {"zero": None, "duplicates": None}
    run(make_project([(i, 0.0) for i in range(N)], view=view(off)))
    project = make_project([(i, 0.0) for i in range(N)], view=view(off))
    assert run(project, full=True).status == "published"
    assert newest(project).quality["drift"] == 1.0
    project = make_project(list(GOOD.items()), view=view(off))
    with pytest.raises(GateError, match="drift"):
        run(project)
    assert newest(project).quality["drift"] == 0.0


def test_manifests_and_reports_of_all_this_are_plain_json(make_project: MakeProject) -> None:
    project = make_project(list(GOOD.items()), view=view(fallback=True))
    run(project)
    snapshot = newest(project)
    for gate in snapshot.gates:
        assert [type(gate[k]) for k in ("gate", "passed", "measured", "limit", "message")] == [str, bool, float, float, str]
    assert all(type(v) is float for v in snapshot.quality.values())
