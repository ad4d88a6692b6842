"""Gates: each refuses what it is there for, with the right figures and exit status 3; the old
version stays live; a name accepts it."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.engine import runner
from precompute.engine.runner import compute
from precompute.jobs.config.gates import GATES, GatesConfig
from precompute.jobs.run import materialize
from precompute.jobs.run.command_process import operator
from precompute.jobs.run.judge.gates import Judge
from precompute.jobs.run.judge.value_gates import STATISTICS, Verdicts, _labels
from precompute.jobs.run.rows import chunks, samples
from precompute.jobs.run.rows.open_view import open_view
from precompute.store.disk.record import replace
from precompute.store.errors import GateError, SnapshotError
from precompute.store.offline.row_figures import count
from precompute.store.offline.snapshot import Snapshot, Verdict
from tests.fixtures import MakeProject
from tests.scene import Scene

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
    gates: Mapping[str, float | None] | None = None, fallback: bool = False, **args: Any
) -> dict[str, Any]:
    return {
        "model": {"use": f"{HERE}:Vectors", "args": args},
        "features": FEATURES,
        "gates": dict.fromkeys(("constant", "shift", "mass", "agreement")) | dict(gates or {}),
        "fallback": {"enabled": fallback, "deadline": "20s"},
    }


def live(project: Scene) -> tuple[int, int]:
    """(snapshot live offline, snapshot a reader is served)."""
    with project.lookup() as lookup:
        return project.live().snapshot, lookup.row("numbers", 0)["snapshot"]


def failed(snapshot: Snapshot) -> list[str]:
    return [verdict.gate for verdict in snapshot.failed]


BAD: dict[str, tuple[Mapping[int, float | None], dict[str, Any], float, str]] = {
    # gate: rows, the model's arguments, figure measured, what is said
    "rows": (
        {i: GOOD[i] for i in range(N // 2)},
        {},
        -0.5,
        "20 rows, -50.0% against the 40 of snapshot 1",
    ),
    "rejected": (GOOD | dict.fromkeys(range(10)), {}, 0.25, "10 of 40 rows rejected"),
    "coverage": (GOOD | dict.fromkeys(range(10)), {}, 0.75, "30 of 40 source rows have a value"),
    "zero": (GOOD | {0: 0.0, 1: 0.0}, {}, 0.05, "2 of 40 vector are all zeros"),
    "duplicates": (
        dict.fromkeys(GOOD, -1.0),
        {},
        0.975,
        "97.5% of sampled vector repeat another one",
    ),
    "drift": (
        dict.fromkeys(GOOD, -2.0),
        {},
        -1.0,
        "mean cosine of vector to the live snapshot -1.0000, on 40 common keys",
    ),
    "moved": (
        {i: x + 0.75 * (i < 14) for i, x in GOOD.items()},
        {},
        0.35,
        "35.0% of vector lie further than 0.45 of their length from the live ones, on 40 common keys",
    ),
    "norm": (
        {i: x + 1e-9 for i, x in GOOD.items()},
        {"length": 3.0},
        2.0,
        "mean norm of vector 3, +200.0% against 1",
    ),
}
OWN = {"rejected": {"rejected": 0.2}, "coverage": {"coverage": 0.8}}
"""Limits for the gates whose default is that of ``max_rejected``, which stops the run earlier."""
OTHERS = {
    gate: dict.fromkeys(("rows", "zero", "norm", "duplicates", "drift", "moved")) for gate in BAD
}


def projects(make_project: MakeProject, gate: str, limit: Mapping[str, float | None]) -> Scene:
    """A project with a good snapshot live and the bad rows of a gate in its source, all other gates
    off."""
    rows, args, _, _ = BAD[gate]
    gates = {k: v for k, v in OTHERS[gate].items() if k != gate} | dict(limit)
    make_project(list(GOOD.items()), view=view(gates)).run()
    return make_project(list(rows.items()), view=view(gates, **args))


@pytest.mark.parametrize("gate", BAD)
def test_a_gate_refuses_with_its_figures_and_the_old_version_stays(
    make_project: MakeProject, capsys: Captured, gate: str
) -> None:
    project = projects(make_project, gate, OWN.get(gate, {}))
    _, _, measured, said = BAD[gate]
    capsys.readouterr()
    assert project.cli("run", "numbers") == 3
    error = capsys.readouterr().err
    assert f"{gate}: {said} (limit " in error
    assert f"precompute publish numbers --snapshot 2 --accept {gate}" in error
    assert live(project) == (1, 1)
    snapshot = project.snapshot()
    assert (snapshot.number, failed(snapshot), project.refused_by()) == (2, [gate], [gate])
    assert snapshot.quality[gate] == pytest.approx(measured, abs=1e-6)
    report = project.report()
    assert (report.status, report.snapshot) == ("refused", 2)
    assert [g.gate for g in report.gates if not g.passed] == [gate]
    assert (report.error or "?") in error
    # and once more: nothing changed, so nothing is computed, and it is refused again
    assert project.cli("run", "numbers", "--json") == 3
    again = json.loads(capsys.readouterr().out)
    assert (again["status"], again["snapshot"], again["counts"]["written"]) == ("refused", 2, 0)
    assert project.numbers() == [1, 2]


@pytest.mark.parametrize("gate", [gate for gate in BAD if gate not in OWN])
def test_null_switches_a_gate_off(make_project: MakeProject, gate: str) -> None:
    project = projects(make_project, gate, {gate: None})
    assert project.run().status == "published"
    assert live(project) == (2, 2)
    snapshot = project.snapshot()
    assert gate not in [g.gate for g in snapshot.gates]
    assert gate in snapshot.quality  # it is measured all the same


def first(n: int) -> dict[int, float]:
    """The first rows of many good ones."""
    return {i: float(i + 1) for i in range(n)}


def turned(n: int, by: float, rows: Mapping[int, float] = GOOD) -> dict[int, float]:
    """The rows with the vectors of the first ``n`` turned by an angle, so that their cosine to what
    they were is that angle's."""
    return {i: x + by * (i < n) for i, x in rows.items()}


A, B = 2 * np.arcsin(0.225) - 1e-3, 2 * np.arcsin(0.225) + 1e-3
"""Angles that move a vector by a little less, and a little more, than ``moved_by``."""


def test_every_gate_that_is_measured_is_one_that_is_configured(make_project: MakeProject) -> None:
    features = FEATURES | {"vector": {"dtype": "float32", "dim": 2, "packed": "int8"}}
    gates = {"rows": 0.2}
    project = make_project(
        list(GOOD.items()), view=view(fallback=True) | {"features": features, "gates": gates}
    )
    project.run()
    project.run(full=True)
    measured = {verdict.gate for verdict in project.snapshot().gates}
    assert measured == set(GATES) - {"accuracy", "batch", "golden", "library"}
    assert set(STATISTICS) < measured


def test_of_several_features_the_manifest_has_the_worst_figure() -> None:
    verdicts = Verdicts(GatesConfig(), 100)
    for measured in (0.25, 0.75, 0.5):
        verdicts.at_most("zero", measured, None, "")
        verdicts.at_least("drift", measured, None, "")
    assert verdicts.quality == {"zero": 0.75, "drift": 0.25}


def test_a_share_of_floats_that_is_the_limit_passes() -> None:
    verdicts = Verdicts(GatesConfig(), 100)
    verdicts.at_most("duplicates", 1 - 28 / 40, 0.3, "")
    verdicts.at_least("drift", 1 - 0.9, 0.1, "")
    assert [verdict.passed for verdict in verdicts.all] == [True, True]


AT_THE_LIMIT: list[
    tuple[
        str, Mapping[int, float | None], dict[str, Any], Mapping[int, float | None], dict[str, Any]
    ]
] = [
    # gate, rows and arguments of what still passes, and of what does not any more, after GOOD;
    # every limit its default, but where OWN has one
    ("rows", first(48), {}, first(49), {}),
    ("rows", first(32), {}, first(31), {}),
    ("rejected", GOOD | dict.fromkeys(range(8)), {}, GOOD | dict.fromkeys(range(9)), {}),
    ("coverage", GOOD | dict.fromkeys(range(8)), {}, GOOD | dict.fromkeys(range(9)), {}),
    (
        "zero",
        first(200) | dict.fromkeys(range(2), 0.0),
        {},
        first(200) | dict.fromkeys(range(3), 0.0),
        {},
    ),
    (
        "duplicates",
        GOOD | dict.fromkeys(range(21), -1.0),
        {},
        GOOD | dict.fromkeys(range(22), -1.0),
        {},
    ),
    ("norm", turned(40, 1e-9), {"length": 1.49}, turned(40, 1e-9), {"length": 1.51}),
    ("norm", turned(40, 1e-9), {"length": 0.51}, turned(40, 1e-9), {"length": 0.49}),
    ("drift", turned(40, np.arccos(0.81)), {}, turned(40, np.arccos(0.79)), {}),
    ("drift", turned(4, np.pi), {}, turned(5, np.pi), {}),
    ("moved", turned(8, 0.75), {}, turned(9, 0.75), {}),
    ("moved", turned(9, A), {}, turned(9, B), {}),
    ("moved", turned(8, 1e-9), {"length": 3.0}, turned(9, 1e-9), {"length": 3.0}),
    ("moved", turned(9, 1e-9), {"length": 0.56}, turned(9, 1e-9), {"length": 0.54}),
]


@pytest.mark.parametrize("passes", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize(("gate", "inside", "inside_args", "outside", "outside_args"), AT_THE_LIMIT)
def test_just_inside_a_limit_passes_and_just_outside_does_not(
    make_project: MakeProject,
    gate: str,
    inside: dict[int, float | None],
    inside_args: dict[str, Any],
    outside: dict[int, float | None],
    outside_args: dict[str, Any],
    passes: bool,
) -> None:
    gates = {k: v for k, v in OTHERS[gate].items() if k != gate} | OWN.get(gate, {})
    make_project(list(GOOD.items()), view=view(gates)).run()
    rows, args = (inside, inside_args) if passes else (outside, outside_args)
    project = make_project(list(rows.items()), view=view(gates, **args))
    assert project.cli("run", "numbers") == (0 if passes else 3)
    assert failed(project.snapshot()) == ([] if passes else [gate])


@pytest.mark.parametrize("gate", ["coverage", "zero", "norm"])
def test_a_gate_is_accepted_by_name_on_the_run(make_project: MakeProject, gate: str) -> None:
    project = projects(make_project, gate, OWN.get(gate, {}))
    other = "zero" if gate != "zero" else "rows"
    assert project.cli("run", "numbers", "--accept", other) == 3
    assert live(project)[0] == 1
    assert project.cli("run", "numbers", "--accept", gate) == 0
    snapshot = project.snapshot()
    assert (snapshot.number, *live(project)) == (2, 2, 2)  # and not the same rows once more
    assert (failed(snapshot), project.refused_by()) == ([gate], [])
    assert project.store.log.accepted(2) == {gate}


@pytest.mark.parametrize("gate", ["rows", "drift"])
def test_a_gate_is_accepted_by_name_on_a_later_publish(
    make_project: MakeProject, gate: str
) -> None:
    project = projects(make_project, gate, {})
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
    off = {"duplicates": None}
    make_project(list(GOOD.items()), view=view(off)).run()
    project = make_project([(i, -2.0) for i in range(20)], view=view(off))
    assert project.cli("run", "numbers", "--accept", "rows") == 3
    error = capsys.readouterr().err
    assert "drift: " in error
    assert "rows: " not in error
    assert live(project)[0] == 1
    assert (
        project.cli(
            "publish",
            "numbers",
            "--snapshot",
            "2",
            *(f"--accept={gate}" for gate in ("drift", "rows", "moved")),
        )
        == 0
    )
    assert project.store.log.accepted(2) == {"drift", "moved", "rows"}


def test_an_acceptance_holds_in_the_next_run_while_its_gate_says_the_same(
    make_project: MakeProject,
) -> None:
    off = {"duplicates": None, "drift": None}
    make_project(list(GOOD.items()), view=view(off)).run()
    grown = make_project([(i, float(i + 1)) for i in range(N + 5)], view=view(off))
    grown.run()
    half = [(i, GOOD[i] + 1e-9) for i in range(N // 2)]
    project = make_project(half, view=view(off, length=3.0))
    assert project.cli("run", "numbers") == 3
    assert project.cli("publish", "numbers", "--snapshot", "3", "--accept", "rows") == 3

    def stands() -> tuple[int, tuple[str, ...], list[str]]:
        number = project.snapshot().number
        accepted = project.store.log.accepted(number)
        return number, tuple(sorted(accepted)), sorted(project.refused_by())

    for _ in range(2):
        assert project.cli("run", "numbers") == 3
        assert stands() == (3, ("rows",), ["moved", "norm"])
    project = make_project(half, view=view(off | {"norm": 3.0}, length=3.0))
    assert project.cli("run", "numbers") == 3
    assert stands() == (4, ("rows",), ["moved"])
    assert (
        project.cli("publish", "numbers", "--snapshot", "1") == 0
    )  # which has other rows than what they were compared with
    assert project.cli("run", "numbers") == 3
    assert stands() == (5, (), ["moved", "rows"])
    assert project.cli("run", "numbers", "--accept", "rows", "--accept", "moved") == 0
    assert stands() == (5, ("moved", "rows"), [])


def test_rejected_and_coverage_can_be_switched_off(make_project: MakeProject) -> None:
    project = make_project([(0, 1.0), (1, None)], view=view({"rejected": None, "coverage": None}))
    assert project.run().status == "published"
    # what max_rejected allows is their default, and null is how all gates are switched off
    assert [g.gate for g in project.snapshot().gates if g.gate in ("rejected", "coverage")] == []


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


# ---- what is not judged


def test_another_model_is_not_judged_by_drift(make_project: MakeProject) -> None:
    make_project(list(GOOD.items()), view=view()).run()
    project = make_project([(i, -2.0) for i in GOOD], view=view(version=2))
    assert project.run().status == "published"
    assert "drift" not in project.snapshot().quality


def test_fewer_than_twenty_rows_make_no_statistics(make_project: MakeProject) -> None:
    make_project([(i, 5.0 + i) for i in range(19)], view=view()).run()
    project = make_project([(0, 0.0), *((i, -2.0) for i in range(1, 5))], view=view())
    assert project.run().status == "published"
    snapshot = project.snapshot()
    assert [g.gate for g in snapshot.gates] == ["rejected", "coverage", "finite", "contract"]
    assert snapshot.quality["zero"] == 0.2
    assert snapshot.quality["drift"] < 0.8


@pytest.mark.parametrize(("gone", "refused"), [(40, False), (60, True)])
def test_as_many_rows_under_other_keys_are_other_rows(
    make_project: MakeProject, gone: int, refused: bool
) -> None:
    """Ids that were padded with zeros, or taken from another table, look like nothing else: all
    values are as they were. The next run is refused as well."""
    rows = first(100)
    make_project(list(rows.items()), view=view(ALONE | {"rows": 0.2})).run()
    moved = {i + 1000 if i < gone else i: x for i, x in rows.items()}
    for _ in range(2):
        project = make_project(list(moved.items()), view=view(ALONE | {"rows": 0.2}))
        if refused:
            with pytest.raises(
                GateError, match=f"rows: {gone}% of the keys of snapshot 1 are gone"
            ):
                project.run()
        else:
            assert project.run().status in ("published", "current")
    assert project.pointer().snapshot == (1 if refused else 2)
    assert (
        make_project(list(moved.items()), view=view(ALONE | {"rows": None})).run().status
        == "published"
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
    project = make_project(list(rows.items()), view=view({"duplicates": None}))
    assert project.run(full=True).status == "published"


# ---- other kinds of features


class Two(Vectors):
    """Two vectors: ``vector`` is as it should be, ``other`` all zeros; the last one declared does
    not hide the first."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        good = super().compute(batch)
        return {"first": np.zeros((batch.num_rows, 2), np.float32), "vector": good["vector"]}


def test_each_vector_is_judged_and_named(make_project: MakeProject, capsys: Captured) -> None:
    features = {"first": {"dtype": "float32", "dim": 2}, "vector": {"dtype": "float32", "dim": 2}}
    project = make_project(
        list(GOOD.items()),
        view=view({"duplicates": None}) | {"model": {"use": f"{HERE}:Two"}, "features": features},
    )
    assert project.cli("run", "numbers") == 3
    error = capsys.readouterr().err
    assert "zero: 40 of 40 first are all zeros" in error
    assert error.count("--accept zero") == 1
    snapshot = project.snapshot()
    assert [g.passed for g in snapshot.gates if g.gate == "zero"] == [False, True]
    assert snapshot.quality["zero"] == 1.0  # the worst figure, not the last one
    assert project.cli("run", "numbers", "--accept", "zero") == 0


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
        verdicts = Judge(config, opened, store).measure(draft, None)
    assert verdicts.quality["finite"] == 1 / N
    assert [verdict for verdict in verdicts.all if verdict.gate == "finite"] == [
        Verdict("finite", passed, 1 / N, limit, "1 of 40 rows are not finite")
    ]


# ---- damage that is not where one would look first

MANY = first(20_000)
ALONE = {"rows": None, "duplicates": None, "norm": None, "drift": None, "moved": None}


def test_negated_and_longer_vectors_are_refused_by_three_gates(
    make_project: MakeProject,
) -> None:
    make_project(list(MANY.items()), view=view()).run()
    damaged = [(i, x if i < 2048 else x + np.pi) for i, x in MANY.items()]
    project = make_project(damaged, view=view(length=50.0))
    with pytest.raises(GateError, match=r"norm: .*drift: .*moved: "):
        project.run()
    quality, damage = project.snapshot().quality, 1 - 2048 / 20_000
    assert quality["norm"] == pytest.approx(damage * 49, rel=1e-6)  # of all rows
    assert (quality["moved"], quality["drift"]) == pytest.approx(
        (damage, 1 - 2 * damage), abs=0.02
    )  # of rows drawn at random
    norms = [quality[f"vector.norm.{name}"] for name in ("p01", "p10", "p50", "p90", "p99")]
    assert norms == pytest.approx([1, 1, 50, 50, 50], rel=0.02)
    drifts = [quality[f"vector.drift.{name}"] for name in ("p01", "p10", "p50", "p90", "p99")]
    assert drifts == pytest.approx([-1, -1, -1, 1, 1], abs=1e-6)


def test_a_third_of_vectors_moved_is_refused_though_the_mean_is_not(
    make_project: MakeProject,
) -> None:
    """As when a third of all texts came empty: they turn by 45 degrees, the mean cosine stays above
    its limit."""
    make_project(list(MANY.items()), view=view()).run()
    blanked = [(i, x + np.arccos(0.7) * (i % 3 == 0)) for i, x in MANY.items()]
    project = make_project(blanked, view=view())
    with pytest.raises(GateError, match=r"moved: 3\d\.\d% of vector") as refused:
        project.run()
    assert "drift: " not in str(refused.value)
    assert project.snapshot().quality["drift"] == pytest.approx(0.9, abs=0.01)


def in_samples(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A sample beside each part, of so many rows of a snapshot, about."""
    monkeypatch.setattr(samples, "ROW_GROUP_BYTES", 0)
    monkeypatch.setattr(samples, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(samples, "WIDE_ROWS", rows)


def in_parts(monkeypatch: pytest.MonkeyPatch, rows: int = 1000) -> None:
    """A part for every window of so many rows."""
    monkeypatch.setattr(chunks, "WINDOW_ROWS", rows)
    monkeypatch.setattr(chunks, "PART_BYTES", 1)


@pytest.mark.parametrize(
    "damaged", [range(19_700, 20_000), range(9_000, 9_300)], ids=["at the end", "in one part"]
)
def test_damage_in_one_part_is_seen(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, damaged: range
) -> None:
    in_parts(monkeypatch)
    project = make_project(
        list((MANY | dict.fromkeys(damaged, 0.0)).items()), view=view({"duplicates": None})
    )
    with pytest.raises(GateError, match=r"zero: 300 of 20,000 vector"):
        project.run()
    assert len(project.snapshot().parts) == 20


@pytest.mark.parametrize("changed", [1, 600], ids=["delta", "compacted"])
def test_damage_in_rows_that_were_taken_over_is_seen(
    make_project: MakeProject, changed: int
) -> None:
    rows = first(1000) | dict.fromkeys(range(900, 915), 0.0)
    make_project(list(rows.items()), view=view(ALONE | {"zero": None})).materialize()
    rows |= {i: rows[i] + 0.5 for i in range(changed)}
    project = make_project(list(rows.items()), view=view(ALONE))
    with pytest.raises(GateError, match=r"zero: 15 of 1,000 vector"):
        project.run()
    snapshot = project.snapshot()
    assert snapshot.kind == ("delta" if changed == 1 else "full")
    assert snapshot.counts.unchanged == 1000 - changed
    mended = rows | {i: float(i) for i in range(900, 910)}
    assert make_project(list(mended.items()), view=view(ALONE)).run().status == "published"
    assert project.snapshot().quality["zero"] == 0.005  # what was replaced is off the count


def test_figures_of_a_chain_are_those_of_its_rows(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows came, changed and left: as if all were counted at once."""
    in_parts(monkeypatch, 70)
    draw = np.random.default_rng(5)
    rows = {i: float(draw.normal()) for i in range(500)}
    for step in range(6):
        project = make_project(
            list(rows.items()), view=view(ALONE | {"zero": None}, length=float(step + 1))
        )
        project.materialize()
        store, snapshot = project.store, project.snapshot()
        assert snapshot.kind == ("delta" if step else "full")
        counted = count(store.batches(snapshot), snapshot.view)
        assert snapshot.figures is not None
        assert replace(snapshot.figures, vectors={}, values={}) == replace(
            counted, vectors={}, values={}
        )
        values, true_values = (figures.values["double"] for figures in (snapshot.figures, counted))
        assert values.rows == true_values.rows
        assert values.zero == true_values.zero
        assert values.buckets == true_values.buckets
        assert (values.total, values.squares) == pytest.approx(
            (true_values.total, true_values.squares)
        )
        found, true = snapshot.figures.vectors["vector"], counted.vectors["vector"]
        assert (found.rows, found.norms) == (true.rows, true.norms)
        assert found.norm_sum == pytest.approx(true.norm_sum)
        gone = draw.choice(sorted(rows), 5, replace=False).tolist()
        rows = {i: x for i, x in rows.items() if i not in gone} | {
            1000 * step + i: 0.0 for i in range(3)
        }
        rows |= {
            i: 0.0 if i % 2 else float(i)
            for i in draw.choice(sorted(rows), 9, replace=False).tolist()
        }


@pytest.mark.parametrize("left", [0, 1])
def test_zeros_among_very_many_replaced_rows_are_counted_one_by_one(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    in_samples(monkeypatch, 100)
    rows, zeros = first(4000), dict.fromkeys(range(0, 900, 100), 0.0)
    strict = view(ALONE | {"zero": 0.0})
    make_project(list((rows | zeros).items()), view=strict).run(accept=["zero"])
    mended = turned(900, 0.1, rows) | dict.fromkeys(range(left), 0.0)
    project = make_project(list(mended.items()), view=strict)
    if left:
        with pytest.raises(GateError, match="zero: 1 of 4,000 vector are all zeros"):
            project.run()
    else:
        assert project.run().status == "published"
    assert project.snapshot().kind == "delta"


class Dearest(Vectors):
    """The last rows of a window come first."""

    max_cost = 100

    def costs(self, batch: pa.RecordBatch) -> np.ndarray:
        return np.asarray(batch.column("id")) % 50 + 1


def test_zeros_are_counted_though_pieces_came_in_another_order(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "HAND_ON_S", 0.0)
    in_samples(monkeypatch, 20)
    rows = first(200) | dict.fromkeys([3, 17, 90], 0.0)
    own = view(ALONE | {"zero": None}) | {"model": {"use": f"{HERE}:Dearest"}}
    for left, now in ((3, rows), (2, rows | {17: 0.5}), (1, rows | {17: 0.5, 90: 0.5})):
        project = make_project(list(now.items()), view=own)
        project.materialize()
        figures = project.snapshot().figures
        assert figures is not None
        assert (figures.rows, figures.zeros) == (200, {"vector": left})
        assert 0 < figures.sampled < 60


def test_a_delta_reads_no_row_of_what_it_builds_on(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch)
    in_samples(monkeypatch, 2000)
    gates: dict[str, float | None] = {"duplicates": None, "parity": None}
    make_project(list(MANY.items()), view=view(gates)).run()
    project = make_project(
        list((MANY | {i: MANY[i] + 2.0 for i in range(3100, 3200)}).items()), view=view(gates)
    )
    read: list[str] = []
    for name in ("read_row_group", "iter_batches"):
        monkeypatch.setattr(pq.ParquetFile, name, lambda *_, name=name, **__: read.append(name))
    project.materialize()
    assert read == []
    quality = project.snapshot().quality
    assert quality["moved"] == pytest.approx(100 / 20_000)
    assert quality["drift"] == pytest.approx(1 - (1 - np.cos(2.0)) * 100 / 20_000)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
def test_a_run_goes_on_without_a_sample(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    in_samples(monkeypatch, 50)
    own = view({"duplicates": None})
    make_project(list(GOOD.items()) + [(i, 1.0) for i in range(N, 400)], view=own).run()
    again = [(i, float(i + 2)) for i in range(N)] + [(i, 1.0) for i in range(N, 400)]
    project = make_project(again, view=own)
    project.materialize()
    whole = project.snapshot()
    assert whole.figures is not None
    assert 0 < whole.figures.sampled < 100
    (sample,) = (part.sample for part in whole.segments[0].parts)
    assert sample is not None
    path = project.store.folder / sample.path
    path.unlink() if lost else path.write_bytes(b"x" + path.read_bytes()[1:])
    make_project([*again, (400, 1.0)], view=own).run()
    later = project.store.snapshot(3)
    assert (later.kind, len(later.segments)) == ("delta", 3)
    assert later.figures is not None
    assert abs(later.figures.sampled - whole.figures.sampled) <= 1
    assert [verdict.gate for verdict in later.gates] == [verdict.gate for verdict in whole.gates]
    with pytest.raises(SnapshotError, match=path.name):
        project.store.check_parts(later)


# ---- what became of values


SOUND = {
    "score": lambda i: float(np.sin(i * i * 7.3)),
    "label": lambda i: "abcde"[i % 5],
    "items": lambda i: [i % 7, 10 + i % 11, 30 + i % 13, 50 + i % 3],
}
"""Feature → its value in row ``i``: a number, a label, a list."""

FAULTS: dict[str, tuple[str, Any, str]] = {
    # feature, what becomes of all its values [rows], and the gate that sees it first
    "zeros": ("score", lambda values: [0.0] * len(values), "constant"),
    "nulls": (
        "score",
        lambda values: [None if i % 4 else v for i, v in enumerate(values)],
        "empty",
    ),
    "some nulls": (
        "score",
        lambda values: [v if i % 4 else None for i, v in enumerate(values)],
        "mass",
    ),
    "another sign": ("score", lambda values: [-v for v in values], "agreement"),
    "times ten": ("score", lambda values: [10 * v for v in values], "shift"),
    "an offset": ("score", lambda values: [v + 0.5 for v in values], "moved"),
    "off by one": ("score", lambda values: values[1:] + values[:1], "agreement"),
    "one label": ("label", lambda values: ["a"] * len(values), "constant"),
    "no label": ("label", lambda values: [""] * len(values), "empty"),
    "labels in another order": (
        "label",
        lambda values: ["eabcd"["abcde".index(v)] for v in values],
        "agreement",
    ),
    "two labels for one": (
        "label",
        lambda values: ["a" if v == "b" else v for v in values],
        "shift",
    ),
    "no lists": ("items", lambda values: [[] for _ in values], "empty"),
    "one list for all": ("items", lambda values: [[1, 2, 3, 4]] * len(values), "constant"),
    "lists reversed": ("items", lambda values: [v[::-1] for v in values], "agreement"),
    "lists of others": ("items", lambda values: values[1:] + values[:1], "agreement"),
    "lists cut": ("items", lambda values: [v[:2] for v in values], "shift"),
    "an item twice": ("items", lambda values: [v[:2] * 2 for v in values], "duplicates"),
}


class Values:
    """``SOUND``, or with ``fault`` what that makes of it, which the fingerprint does not tell; rows
    drift a little with each run."""

    def __init__(self, fault: str | None = None, version: int = 1) -> None:
        self.fault, self.version = fault, version

    def fingerprint(self) -> str:
        return f"values {self.version}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        ids, day = np.asarray(batch.column("id")).tolist(), float(batch.column("x")[0].as_py())
        values: dict[str, list[Any]] = {name: [of(i) for i in ids] for name, of in SOUND.items()}
        values["score"] = [
            v + 0.05 * np.cos(i * day) for i, v in zip(ids, values["score"], strict=True)
        ]
        if self.fault is not None and self.fault.endswith("labels are one"):
            others = [i for i in range(200) if SOUND["label"](i) != "b"][
                : int(self.fault.split()[0])
            ]
            values["label"] = [
                "b" if i in others else label for i, label in zip(ids, values["label"], strict=True)
            ]
        elif self.fault is not None:
            feature, become, _ = FAULTS[self.fault]
            values[feature] = become(values[feature])
        return values


def values_view(**args: Any) -> dict[str, Any]:
    features = {
        "score": {"dtype": "float32"},
        "label": {"dtype": "string"},
        "items": {"dtype": "int64", "max_items": 4},
    }
    return {"model": {"use": f"{HERE}:Values", "args": args}, "features": features}


def test_what_became_of_values_is_refused_and_what_drifts_a_little_is_not(
    make_project: MakeProject,
) -> None:
    """All at once: the model of a fault has the same fingerprint as that of the rows that are
    live."""
    for day in (1.0, 2.0):
        assert (
            make_project([(i, day) for i in range(2000)], view=values_view()).run().status
            == "published"
        )
    seen = {}
    for fault in FAULTS:
        project = make_project([(i, 3.0) for i in range(2000)], view=values_view(fault=fault))
        with pytest.raises(GateError):
            project.run(full=True)
        seen[fault] = failed(project.snapshot())
    assert {fault: gate for fault, (_, _, gate) in FAULTS.items() if gate not in seen[fault]} == {}
    assert live(project) == (2, 2)


@pytest.mark.parametrize(("changed", "passes"), [(50, True), (51, False)])
def test_a_shift_that_may_be_chance_passes(
    make_project: MakeProject, changed: int, passes: bool
) -> None:
    """Of 200 rows: 0.1, and what chance does to one view in a hundred, 0.152."""
    gates = {"gates": {"shift": 0.1} | dict.fromkeys(("agreement", "moved", "mass", "constant"))}
    make_project([(i, 1.0) for i in range(200)], view=values_view() | gates).run()
    project = make_project(
        [(i, 1.0) for i in range(200)], view=values_view(fault=f"{changed} labels are one") | gates
    )
    assert project.cli("run", "numbers", "--full") == (0 if passes else 3)
    assert failed(project.snapshot()) == ([] if passes else ["shift"])


def test_another_model_may_change_everything_and_it_is_measured(make_project: MakeProject) -> None:
    make_project([(i, 1.0) for i in range(200)], view=values_view()).run()
    project = make_project(
        [(i, 1.0) for i in range(200)], view=values_view(fault="another sign", version=2)
    )
    assert project.run().status == "published"
    assert project.snapshot().quality["agreement"] < 0
    with pytest.raises(GateError, match="constant: 100"):
        make_project(
            [(i, 1.0) for i in range(200)], view=values_view(fault="zeros", version=3)
        ).run()


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
    base = {"features": FEATURES, "index": {"on": "vector"}, "gates": {"norm": None}}

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


def test_a_view_of_one_row_may_change(make_project: MakeProject) -> None:
    """One value makes no share: whatever it is, no gate has a case."""
    for day in (1.0, 2.0, 3.0):
        assert make_project([(7, day)], view=values_view()).run().status == "published"


def test_one_long_text_makes_no_row_of_the_labels_long() -> None:
    now = ["a", "b", "c" * 500_000, *"abab" * 50]
    then = ["a", "a", "c" * 500_000, *"abab" * 50]
    tracemalloc.start()
    move = _labels(pa.chunked_array([now[:2], now[2:]]), pa.chunked_array([then]))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # as an array of texts of one length these are 400 MB
    assert peak_bytes < 10**8
    equal = 202 / 203
    chance = (101 * 102 + 101 * 100 + 1) / 203**2
    assert move.agreement == pytest.approx((equal - chance) / (1 - chance))
    assert move.moved == pytest.approx(1 - equal)
    labels = pa.chunked_array([pa.array([True, False, True, True])])
    others = pa.chunked_array([pa.array([True, False, False, True])])
    move = _labels(labels, others)
    assert move.agreement == pytest.approx(0.5)
    assert move.moved == 0.25


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
    moved.run(accept=("shift", "moved"))
    with pytest.raises(GateError, match=r"snapshot 3 is not published.* moved: 100\.0%"):
        moved.run("near")
