"""What `plan` says of other numbers of rows, by what runs recorded of what they took."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest

from precompute.plugins.capacity import plan as capacity
from precompute.plugins.capacity.plan import SPILLED, fitted, plan
from precompute.store.errors import PrecomputeError
from precompute.store.offline.runs import Report, Usage
from tests.fixtures import MakeProject
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]
ROWS = [(i, float(i)) for i in range(40)]
MATERIALIZED = {
    *("open", "source", "plan", "read", "model", "write", "audit", "gates", "commit", "other"),
}
PUBLISHED = {"check", "load", "verify", "flip", "gc"}


# ---- the line


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1e6, 2.0), (3e6, 6.0)], (0.0, 2e-6)),
        # what is there before the first row: the more runs say so, the less is taken to grow
        ([(1e6, 3.0), (3e6, 7.0)], (0.5967, 2.1796e-6)),
        ([(1e6, 3.0), (3e6, 7.0)] * 9, (0.9301, 2.0311e-6)),
        ([(1e6, 3.0), (3e6, 3.0)] * 9, (2.8174, 6.5217e-8)),
        # past a memory limit a row takes more
        ([(1e6, 1.0), (3e6, 6.0)], (-0.6486, 1.8919e-6)),
        # nothing falls
        ([(1e6, 9.0), (4e6, 3.0)] * 9, (3.1409, 0.0)),
        # of one size: all of it is taken to grow
        ([(1e6, 3.0), (1.5e6, 4.5)], (0.0, 3e-6)),
        ([(1e6, 3.0)], (0.0, 3e-6)),
        ([(0, 0.0), (0, 0.0)], (0.0, 0.0)),
    ],
)
def test_a_line_is_found(points: list[tuple[float, float]], line: tuple[float, float]) -> None:
    found = fitted(points)
    assert (found.a, found.b) == pytest.approx(line, rel=1e-3)
    assert found.at(1e9).value == pytest.approx(found.a + found.b * 1e9)


# ---- plan, of runs that took what is known


def taken(rows: int, computed: int, loaded: int) -> dict[str, float]:
    """CPU seconds of a made-up run."""
    return {
        "source": 1e-6 * rows,
        "plan": 0.5e-6 * rows,
        "read": 0.5e-6 * computed,
        "model": 4e-6 * computed,
        "write": 1.5e-6 * computed,
        "load": 3e-6 * loaded,
    }


def noted(
    project: Scene,
    number: int,
    rows: int,
    changed: int | None = None,
    *,
    usage: dict[str, Any] | None = None,
    **fields: Any,
) -> None:
    """Write the report of a run of so many rows, of which some changed; all of a full one."""
    computed = rows if changed is None else changed
    cpu_s = taken(rows, computed, computed)
    overlapping = sum(cpu_s[stage] for stage in ("read", "model", "write"))
    used = {
        "kind": "full" if changed is None else "delta",
        "cores": 2,
        "cpu_s": cpu_s,
        "peak_bytes": 10**9,
        "written_bytes": 10 * computed,
        "source_bytes": 40 * rows,
        "loaded_rows": computed,
        "loaded_bytes": 20 * computed,
        "upper_only": changed is not None,
        "idle": 0.5,
    }
    report = Report(
        f"2026010{number}T000000.000000Z-aaaaaa",
        "numbers",
        "run",
        "published",
        model="m",
        # both cores are busy while rows are computed, one core at any other time
        seconds=sum(cpu_s.values()) - overlapping / 2,
        stages_s={"load": cpu_s["load"]},
        engine={"seconds": overlapping / 2},
        counts={"source": rows, "written": computed, "unchanged": rows - computed},
        usage=Usage(**(used | (usage or {}))),
    )
    for name, value in fields.items():
        setattr(report, name, value)
    project.store.runs.write(report)


Disk = namedtuple("Disk", "total used free")


@pytest.fixture
def project(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """With 1 TB of disk and 4 GB of memory."""
    monkeypatch.setattr(capacity, "available_bytes", lambda: 4 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**12, 0, 10**12))
    project = make_project(ROWS, project={"memory_mb": 1024})
    monkeypatch.setattr(tempfile, "tempdir", str(project.folder))
    return project


@pytest.fixture
def runs(project: Scene) -> Scene:
    """Two full runs, and two deltas of 1 %."""
    noted(project, 1, 1_000_000)
    noted(project, 2, 3_000_000)
    noted(project, 3, 1_000_000, 10_000)
    noted(project, 4, 3_000_000, 30_000)
    return project


def values(predicted: dict[str, Any]) -> dict[str, float]:
    """Its figures without their errors."""
    return {
        name: figure["value"]
        for name, figure in predicted.items()
        if isinstance(figure, dict) and "value" in figure
    }


def test_a_plan_is_what_the_runs_took_in_a_line(runs: Scene) -> None:
    planned = plan(runs, "numbers", rows=4_000_000, workers=8, price=0.8)
    assert (planned["cannot_tell"], planned["cores"], planned["device"]) == ({}, 2, "cpu")
    for kind, computed in (("full", 4_000_000), ("delta", 40_000)):
        cpu_s = taken(4_000_000, computed, computed)
        computing = sum(cpu_s[stage] for stage in ("read", "model", "write"))
        alone = sum(cpu_s.values()) - computing
        assert values(planned[kind]) == pytest.approx(
            {
                "cpu_s": sum(cpu_s.values()),
                "undivided_s": alone,
                "seconds": alone + computing / 2 / 8,
                "root_bytes": 10 * computed,
                "online_bytes": 20 * computed,
                "memory_bytes": 10**9,
                "machine_h": (alone + computing / 2) / 3600,
                "money": 0.8 * (alone + computing / 2) / 3600,
                "money_held": 0.8 * 8 * (alone + computing / 2 / 8) / 3600,
            },
            rel=0.02,
        )
        lines = {line["stage"]: line["value"] for line in planned[kind]["stages"]}
        assert lines == pytest.approx(cpu_s, rel=0.01)
        divided = {line["stage"] for line in planned[kind]["stages"] if line["divides"]}
        assert divided == {"read", "model", "write"}
    assert planned["delta"]["changed_share"] == pytest.approx(0.01)


def test_gpus_and_workers_are_counted(project: Scene) -> None:
    """Two workers of 1.5 GB, on a GPU each for a second of 500,000 rows."""
    for number, rows in ((1, 1_000_000), (2, 3_000_000)):
        gpu = {"device": "cuda", "gpu_s": rows / 5e5, "workers": 2, "worker_peak_bytes": 15 * 10**8}
        workers_cpu_s = {"model": 1e-6 * rows}
        noted(project, number, rows, usage={**gpu, "workers_cpu_s": workers_cpu_s})
    planned = plan(project, "numbers", rows=10**9, workers=4)
    assert (planned["device"], planned["workers"]) == ("cuda", 4)
    found = values(planned["full"])
    assert (found["gpu_s"], found["worker_memory_bytes"]) == pytest.approx((2000, 1.5e9), rel=0.01)
    model = next(line for line in planned["full"]["stages"] if line["stage"] == "model")
    assert model["row_s"] == pytest.approx(5e-6, rel=0.05)
    # twice the workers, half the time
    by_two = plan(project, "numbers", rows=10**9)["full"]
    divided_s = [
        p["seconds"]["value"] - p["undivided_s"]["value"] for p in (planned["full"], by_two)
    ]
    assert divided_s[0] == pytest.approx(divided_s[1] / 2)


def test_what_duckdb_will_spill_is_counted(project: Scene) -> None:
    """256 MB are DuckDB's; a row takes it 50 bytes."""
    noted(project, 1, 1_000_000, usage={"source_bytes": 5 * 10**7})
    noted(project, 2, 3_000_000, usage={"source_bytes": 15 * 10**7})
    for rows, spill_bytes, times in ((5_000_000, 0.0, 1.0), (30_000_000, 1.244e9, SPILLED)):
        full = plan(project, "numbers", rows=rows)["full"]
        assert full["spill_bytes"] == pytest.approx(spill_bytes)
        lines = {line["stage"]: line["value"] for line in full["stages"]}
        assert lines["source"] == pytest.approx(times * 1e-6 * rows)
        assert lines["write"] == pytest.approx(1.5e-6 * rows)
    # by a run that spilled, and by one that will not
    cpu_s = taken(10_000_000, 10_000_000, 10_000_000)
    cpu_s |= {stage: SPILLED * cpu_s[stage] for stage in ("source", "plan", "read")}
    held = {"source_bytes": 5 * 10**8, "spilled_bytes": 244 * 10**6, "cpu_s": cpu_s}
    noted(project, 3, 10_000_000, usage=held)
    for rows, times in ((5_000_000, 1.0), (30_000_000, SPILLED)):
        full = plan(project, "numbers", rows=rows)["full"]
        lines = {line["stage"]: line["value"] for line in full["stages"]}
        assert (full["first_spill"], lines["source"]) == (False, pytest.approx(times * 1e-6 * rows))


# ---- what does not fit


def test_what_does_not_fit_is_said_first(
    runs: Scene, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (runs.folder / "var").mkdir(exist_ok=True)
    words = ("plan", "numbers", "--rows", "1e9", "--workers", "16", "--price", "0.80")
    assert runs.cli(*words) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "numbers: 1,000,000,000 rows by 16 workers like its runs' (2 cores, cpu)"
    # 1,330, 665 and 3,000 s one after the other, and 6,165 s of two cores by 16, of an hour
    assert rest[0].startswith("  DOES NOT FIT: within the TTL: 86.5 min needed, 60 min there; ")
    assert "83.2 min of it no worker shortens" in rest[0]
    assert [line[:7] for line in rest[1:4]] == ["  fits:", "  fits:", "  break"]
    for name, short, said in (
        (
            "available_bytes",
            10**8,
            "memory: 1,000.0 MB needed, 100.0 MB there; lower memory_mb (1024 now)",
        ),
        (
            "shutil.disk_usage",
            Disk(10**12, 0, 10**9),
            "(root, table files, DuckDB's spill in TMPDIR): 69.7 GB needed, 1.0 GB there",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"precompute.plugins.capacity.plan.{name}", lambda *_, there=short: there)
            assert runs.cli(*words) == 0
        second = capsys.readouterr().out.splitlines()[1]
        assert second.startswith("  DOES NOT FIT: ")
        assert said in second


@pytest.mark.parametrize(("idle", "others"), [(0.5, None), (0.1, "33%"), (None, None)])
def test_a_crowded_machine_is_said(
    project: Scene, capsys: Captured, idle: float | None, others: str | None
) -> None:
    """Each run took 10.5 of the 18.4 CPU seconds that two cores had for each million rows."""
    for number, rows in ((1, 1_000_000), (2, 3_000_000)):
        noted(project, number, rows, usage={"idle": idle}, seconds=9.2e-6 * rows)
    assert project.cli("plan") == 0
    printed = capsys.readouterr().out
    assert ("of the machine or more in each" in printed) == (others is not None)
    assert others is None or f"others took {others} of the machine" in printed


def test_limits_say_at_how_many_rows_they_break(runs: Scene) -> None:
    planned = plan(runs, "numbers", rows=10**9)
    by = {limit["what"].partition(" ")[0]: limit for limit in planned["limits"]}
    disk = by["disk"]
    needed = (10 + 20) * 10**9 + planned["full"]["spill_bytes"]
    assert disk["needed"] == pytest.approx(needed, rel=0.01)
    assert disk["breaks_at_rows"] == pytest.approx(10**9 * 10**12 / needed, rel=0.01)
    shares = [limit["share"] for limit in planned["limits"]]
    assert shares == sorted(shares, reverse=True)
    # memory is bounded by memory_mb
    assert by["memory"]["breaks_at_rows"] is None


def test_memory_is_bounded_by_the_settings(project: Scene) -> None:
    noted(project, 1, 1_000_000, usage={"peak_bytes": 5 * 10**8})
    noted(project, 2, 3_000_000)
    memory = plan(project, "numbers", rows=10**9)["full"]["memory_bytes"]
    assert memory == {"value": 10**9 + 2**30, "error": 0.0}


def test_an_object_store_and_a_store_elsewhere_are_no_disks(
    runs: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "storage_of", lambda _: SimpleNamespace(local=False))
    monkeypatch.setattr(capacity, "table_folder", lambda _: None)
    whats = [limit["what"] for limit in plan(runs, "numbers", rows=10**9)["limits"]]
    assert sorted(whats) == ["memory", "seconds within the TTL"]


# ---- what is not known


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"rows": 1_900_000}, "there are 2, of 1,000,000 and 1,900,000 rows."),
        ({"rows": 999_999}, "there is 1, of 1,000,000 rows (left out: 1 too small)"),
        ({"status": "failed"}, "(left out: 1 failed)"),
        ({"model": "another", "number": 0}, "(left out: 1 of another model)"),
        ({"resumed": 5}, "(left out: 1 took over rows of an interrupted run)"),
        ({"changed": 30_000}, "there is 1, of 1,000,000 rows."),
        ({"usage": {"kind": "compacting"}}, "there is 1, of 1,000,000 rows."),
    ],
)
def test_what_cannot_be_told_is_not_guessed(
    project: Scene, capsys: Captured, second: dict[str, Any], why: str
) -> None:
    noted(project, 5, 1_000_000)
    noted(project, **({"number": 2, "rows": 3_000_000} | second))
    if "rows" in second and second["rows"] < 1_000_000:
        # but it took long
        with pytest.raises(PrecomputeError, match="too small"):
            plan(project, "numbers")
    assert project.cli("plan", "--rows", "1e9") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert "two full runs of at least 1,000,000 rows or 30 s are needed" in line
    assert "`precompute plan numbers_sample --rows 1000000000`" in line


def test_a_long_run_of_few_rows_tells(project: Scene) -> None:
    noted(project, 1, 1000, seconds=31.0)
    noted(project, 2, 3000, seconds=80.0)
    assert plan(project, "numbers")["rows"] == 3000


def test_long_runs_of_no_rows_tell_nothing(project: Scene) -> None:
    for number in (1, 2):
        noted(project, number, 0, seconds=31.0)
    with pytest.raises(PrecomputeError, match="left out: 2 too small"):
        plan(project, "numbers")


def test_no_run_at_all_is_said(project: Scene, capsys: Captured) -> None:
    assert project.cli("plan") == 1
    assert "there are none. For an estimate" in capsys.readouterr().err
    assert project.cli("plan", "--json") == 1
    refused = json.loads(capsys.readouterr().out)
    assert (refused["error"]["kind"], refused["exit_status"]) == ("PrecomputeError", 1)


def test_deltas_alone_are_told_alone(project: Scene, capsys: Captured) -> None:
    noted(project, 1, 1_000_000, 10_000)
    noted(project, 2, 3_000_000, 30_000)
    assert project.cli("plan") == 0
    printed = capsys.readouterr().out
    assert "full: cannot tell: two full runs" in printed
    assert "delta of 1.00%" in printed
    assert "1.00% of the rows change, as in these runs" in printed


def test_without_a_publishing_there_is_none_in_it(project: Scene, capsys: Captured) -> None:
    nothing = {"loaded_rows": 0, "loaded_bytes": 0}
    for number, rows in ((1, 1_000_000), (2, 3_000_000)):
        noted(project, number, rows, command="materialize", status="committed", usage=nothing)
    assert project.cli("plan") == 0
    printed = capsys.readouterr().out
    assert "and 0 publishings, so that publishing is not in it" in printed
    assert "loaded online" not in printed
    # publishings of their own
    for number, rows in ((3, 1_000_000), (4, 3_000_000)):
        noted(project, number, rows, command="publish", counts={}, usage={"kind": None})
    lines = {
        line["stage"]: line["value"]
        for line in plan(project, "numbers", rows=4_000_000)["full"]["stages"]
    }
    assert lines == pytest.approx(taken(4_000_000, 4_000_000, 4_000_000), rel=0.01)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--rows", "0"), "--rows: '0': a number of rows of at least 1, as 1e9"),
        (("--rows", "inf"), "--rows: 'inf': a number of rows of at least 1, as 1e9"),
        (("--workers", "0"), "--workers: 0: at least 1"),
        (("--price", "0"), "--price: 0: more than 0"),
        (("--price", "nan"), "--price: nan: more than 0"),
    ],
)
def test_mistakes_are_said(
    runs: Scene, capsys: Captured, words: tuple[str, ...], error: str
) -> None:
    assert runs.cli("plan", *words) == 2
    assert error in capsys.readouterr().err
