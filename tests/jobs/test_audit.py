"""The audit: rows of a run computed again, in float32 and among other rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from precompute.engine.rows import Outcome
from precompute.jobs.run.judge import audit as audit_module
from precompute.jobs.run.rows.open_view import open_view
from precompute.store.errors import GateError
from precompute.store.feature_view import Feature, FeatureView
from tests.fixtures import MakeProject
from tests.jobs.test_converted_view import (
    LOOSE,
    TorchDoubler,
    live_number,
    torch_model,
    torch_project,
)
from tests.scene import Scene

ROWS = 3000
BROKEN = 0.5
"""What is behind the decimal point of a broken row's ``x``."""


class SomeBroken(TorchDoubler):
    """The same; in bfloat16, a row whose ``x`` ends in a half is ten times as large."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x)
        if self.linear.weight.dtype != torch.bfloat16:
            return found
        off = torch.where(torch.frac(x) == BROKEN, 10.0, 1.0)
        return {name: (values * off).to(values.dtype) for name, values in found.items()}


class Alone:
    """``x`` → ``double`` = 2x, and, as ``among`` says, the mean of ``double`` in the batch added to
    it."""

    def __init__(self, among: bool = False) -> None:
        self.among = among

    def fingerprint(self) -> str:
        return f"alone {self.among}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        double = 2 * np.asarray(batch.column("x")).astype(np.float64)
        return {"double": double + double.mean() if self.among else double}


@pytest.fixture(autouse=True)
def _time_enough(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "AUDIT_LEAST_S", 60.0)


def rows_of(broken: set[int]) -> list[tuple[int, float]]:
    return [(i, 1 + i % 97 + (BROKEN if i in broken else 0.0)) for i in range(ROWS)]


def unseen(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Keys of some 60 rows that the comparison before a run does not see: it takes 100, and those
    at the ends of ``x``."""
    monkeypatch.setattr("precompute.jobs.run.judge.accuracy.CHECKED_ROWS", 100)
    project = torch_project(make_project, rows_of(set()))
    with open_view(project.view("numbers").feature_view(), project.offline, project.home) as opened:
        seen = set(opened.source.sample(100).column("id").to_pylist())
    return {i for i in range(ROWS) if i not in seen and i % 97 in (50, 60)}


def audited(project: Scene) -> list[str]:
    return [
        gate.message
        for gate in project.snapshot().gates
        if gate.gate == "accuracy" and "rows of the run" in gate.message
    ]


def test_broken_rows_that_no_sample_has_are_refused(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = unseen(make_project, monkeypatch)
    rows = rows_of(broken)
    view = {"accuracy": {"recall_at_10": 0.0}}
    model = torch_model(precision="bf16")
    model["args"]["module"] = "tests.jobs.test_audit:SomeBroken"
    project = torch_project(make_project, rows, view=view | {"model": model})
    with pytest.raises(GateError):
        project.run()
    before, audit = [gate for gate in project.snapshot().gates if gate.gate == "accuracy"]
    assert (before.passed, audit.passed, project.refused_by()) == (
        True,
        False,
        ["accuracy"],
    )
    share = f"{len(broken) / ROWS:.2%}"
    assert audit.message.startswith(
        f"bf16-eager against float32, 3,000 rows of the run: double: of 3,000 rows at most {share} are off by more than "
    )
    assert (
        f"vector: share of rows off by more than 0.0894: {len(broken) / ROWS:.5g} is above 0.001"
        in audit.message
    )
    assert "vector: worst row error " in audit.message
    # the same rows again: nothing is computed, and it stays refused until somebody accepts it
    with pytest.raises(GateError):
        project.run()
    assert project.cli("run", "numbers", "--accept", "accuracy") == 0
    assert live_number(project.offline) is not None


def test_what_is_right_is_said_of_all_rows(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "AUDITED_ROWS", 300)
    view = {"precision": "bf16", "accuracy": LOOSE}
    rows = [(i, 1 + i / 7) for i in range(ROWS)]
    project = torch_project(make_project, rows, view=view)
    assert project.run().status == "published"
    (said,) = audited(project)
    # 3 / 300
    assert (
        "300 rows of the run: double: of 3,000 rows at most 0.99% are off by more than 0.894 (95 %); worst 0.0"
        in said
    )
    assert project.report().stages_s["audit"] > 0
    project.run(full=True)
    assert audited(project) == [said]
    # of a delta, its own
    later = [(i, x + 0.1 * (i % (ROWS // 40) == 0)) for i, x in rows]
    project = torch_project(make_project, later, view=view)
    project.run()
    (said,) = audited(project)
    assert "40 rows of the run: double: of 40 rows at most 0.00% are off by" in said


def test_without_time_nothing_is_said(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "AUDIT_LEAST_S", 0.0)
    project = torch_project(
        make_project,
        [(i, 1 + i / 7) for i in range(200)],
        view={"precision": "bf16", "accuracy": LOOSE},
    )
    assert (project.run().status, audited(project)) == ("published", [])


@pytest.mark.parametrize("rows", [2, 300])
def test_a_row_that_depends_on_its_batch_is_refused(make_project: MakeProject, rows: int) -> None:
    view: dict[str, Any] = {"features": {"double": {"dtype": "float64"}}}
    data = [(i, float(i + 1)) for i in range(rows)]
    right = make_project(data, view=view | {"model": {"use": "tests.jobs.test_audit:Alone"}})
    assert right.run().status == "published"
    assert "batch" not in [gate.gate for gate in right.snapshot().gates]

    among = view | {"model": {"use": "tests.jobs.test_audit:Alone", "args": {"among": True}}}
    project = make_project(data, view=among)
    with pytest.raises(GateError):
        project.run()
    snapshot, seen = project.snapshot(), min(rows, audit_module.ALONE_ROWS)
    assert project.refused_by() == ["batch"]
    assert (
        f" of {seen} rows come out differently among other rows than in the batches of the run"
        in snapshot.gates[0].message
    )
    assert snapshot.gates[0].measured > 0.5
    with pytest.raises(GateError):
        project.run()
    # a share that is the limit passes
    for limit in (1.0, None):
        project = make_project(data, view=among | {"gates": {"parity": limit}})
        assert project.run(full=True).status == "published"


def test_of_large_rows_fewer_are_held(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "SAMPLE_BYTES", 20_000)
    monkeypatch.setattr(audit_module, "TOGETHER_BYTES", 1)
    held: list[int] = []
    draw: Callable[..., None] = audit_module.Sample.draw

    def drawing(sample: audit_module.Sample, *given: Any) -> None:
        draw(sample, *given)
        held.append(sum(map(len, sample._made)))

    monkeypatch.setattr(audit_module.Sample, "draw", drawing)
    rows = [(i, 1 + i / 7) for i in range(ROWS)]
    project = torch_project(make_project, rows, view={"precision": "bf16", "accuracy": LOOSE})
    project.run()
    assert 0 < max(held) <= 800
    assert len(audited(project)) == 1


@pytest.mark.parametrize("dtype", ["float64", "string"])
def test_parts_of_a_sample_have_the_extremes_of_their_floats(tmp_path: Path, dtype: str) -> None:
    """Nulls are none, and a view without floats has none."""
    view = FeatureView("numbers", ("id",), (Feature("value", dtype),), ttl_s=1, stale_for_s=1)
    whole = audit_module.Sample(view, 40, 4, extremes=True)
    for part in range(2):
        values: list[Any] = [None] * 6 + [100.0 * part + i for i in range(14)]
        made = pa.RecordBatch.from_pydict(
            {"value": values if dtype == "float64" else list(map(str, values))},
            schema=view.feature_schema(),
        )
        inputs = pa.record_batch({"x": pa.array(values), "input_hash": pa.array(range(20))})
        drawn = audit_module.Sample(view, 20, 4, extremes=True)
        drawn.draw(inputs, Outcome(np.arange(20), made))
        assert drawn.write(tmp_path / str(part))
        whole.add(tmp_path / str(part), 20)
    given, features = whole.extreme_rows()
    assert given.schema.names == ["x"]
    assert (given["x"].to_pylist(), features["value"].to_pylist()) == (
        ([113.0, 100.0, 13.0, 0.0, 0.0, 13.0, 100.0, 113.0],) * 2
        if dtype == "float64"
        else ([], [])
    )
