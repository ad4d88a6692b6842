"""Profile: a sample goes through the real engine, what took the time is named, and nothing of it is
kept."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file

from precompute.jobs.commands.measure import PACE, describe_profile
from precompute.jobs.ops import profile as profile_module
from precompute.jobs.ops.profile import profile
from precompute.store.errors import ConfigError, SourceError
from precompute.store.times import containing
from tests.fixtures import MakeProject

ROWS = [(i, float(i)) for i in range(10)]
STAGES = ["read", "prepare", "batch", "model", "check", "write"]
SLOW_SQL = "SELECT id, x FROM read_parquet('${data}/data.parquet'), (SELECT count(*) AS n FROM range(100_000_000) t(i) WHERE i % 3 = 1)"
"""Takes DuckDB some tenths of a second; the ten rows take the model some microseconds."""
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go meanwhile."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder; the bytes of a folder are none."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b""
        for p in sorted(folder.rglob("*"))
    }


def doubler(**args: Any) -> dict[str, Any]:
    return {"model": {"use": "tests.models:Doubler", "args": args}}


# ---- the figures


@pytest.mark.parametrize(("requested", "rows", "batches"), [(1, 1, 1), (9, 9, 3), (50, 10, 3)])
def test_as_many_rows_as_asked_for_go_through_every_stage(
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    requested: int,
    rows: int,
    batches: int,
) -> None:
    monkeypatch.setattr(profile_module, "WIDE_ROWS", 4)
    found = profile(make_project(ROWS), "numbers", rows=requested)
    assert (found["view"], found["rows"], found["batches"], found["rejected"]) == (
        "numbers",
        rows,
        batches,
        0,
    )
    assert list(found["stages"]) == STAGES
    assert found["stages"]["write"]["busy_s"] > 0  # Parquet was written


@pytest.mark.parametrize(
    ("bad", "rejected"),
    [({"fail_on": 3.0}, 1), ({"nan_on": 4.0}, 1), ({"fail_on": 3.0, "nan_on": 4.0}, 2)],
)
def test_rejected_rows_are_counted_and_end_nothing(
    make_project: MakeProject, bad: dict[str, float], rejected: int
) -> None:
    view = doubler(**bad) | {"max_rejected": 0.0}  # of a run
    found = profile(make_project(ROWS, view=view), "numbers", rows=10)
    assert (found["rows"], found["rejected"]) == (10, rejected)
    assert f"; {rejected} rejected\n" in describe_profile(found)


def test_time_spent_before_the_engine_starts_is_part_of_the_whole(
    make_project: MakeProject,
) -> None:
    """No stage is busy for more than all of the time."""
    found = profile(make_project(ROWS, view={"source": {"sql": SLOW_SQL}}), "numbers", rows=10)
    assert max(found["stages"], key=lambda name: found["stages"][name]["busy_s"]) == "read"
    assert 0 < found["stages"]["read"]["busy_s"] <= found["seconds"]
    assert found["rows_per_s"] <= 10 / found["stages"]["read"]["busy_s"] * 1.01


# ---- partitions


def test_a_partitioned_view_is_profiled_over_one_partition(
    make_project: MakeProject, capsys: Captured
) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    days = [today - timedelta(days=n) for n in (2, 1, 0)]
    times = [days[0]] * 2 + [days[1]] * 3 + [days[2]] * 4
    table = pa.table(
        {
            "id": range(9),
            "x": pa.array(np.arange(9.0)),
            "t": pa.array(times, pa.timestamp("us", "UTC")),
        },
    )
    view = {
        "source": {
            "sql": "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE t >= $start AND t < $end"
        },
        "partition": {"by": "day", "start": f"{days[0]:%Y-%m-%d}"},
    }
    project = make_project(table, view=view)
    assert profile(project, "numbers", rows=100)["rows"] == 3  # the latest that is over
    assert profile(project, "numbers", rows=100, partition=containing("day", days[0]))["rows"] == 2
    assert (
        project.cli("profile", "numbers", "--partition", f"{days[2]:%Y-%m-%d}T12:00", "--json") == 0
    )
    assert json.loads(capsys.readouterr().out)["rows"] == 4
    assert project.cli("profile", "numbers", "--partition", "yesterday") == 2
    assert "'yesterday'" in capsys.readouterr().err
    project = make_project(view=view | {"partition": {"by": "day", "start": f"{days[2]:%Y-%m-%d}"}})
    with pytest.raises(ConfigError, match="is not over yet"):
        profile(project, "numbers", rows=100)


# ---- the command


def test_the_command_prints_a_table_and_what_sets_the_pace(
    make_project: MakeProject, capsys: Captured
) -> None:
    assert make_project(ROWS, view=doubler(sleep_s=0.2)).cli("profile", "numbers") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].startswith("numbers: 10 rows in ")
    assert lines[0].endswith(" of loading; 0 rejected")
    assert [line.split()[0] for line in lines[2:11]] == [
        *("stage", "read", "prepare", "batch", "model", "forward", "landing", "check", "write")
    ]
    assert lines[-1].endswith(
        "% of the time is the model; the rest waits for it: `precompute tune` looks for a faster precision, and a GPU computes more."
    )


@pytest.mark.parametrize("slowest", STAGES)
def test_the_busiest_stage_is_named_with_its_share_and_its_remedy(
    make_project: MakeProject, slowest: str
) -> None:
    found = profile(make_project(ROWS), "numbers", rows=10)
    assert set(found["stages"]) == set(PACE)
    found |= {
        "seconds": 2.0,
        "stages": {name: stage | {"busy_s": 0.5} for name, stage in found["stages"].items()},
    }
    found["stages"][slowest]["busy_s"] = 1.5
    what, remedy = PACE[slowest]
    assert describe_profile(found).splitlines()[-1] == f"75% of the time is {what}; {remedy}."


def test_json_is_the_figures_and_nothing_else(make_project: MakeProject, capsys: Captured) -> None:
    project = make_project(ROWS)
    assert project.cli("profile", "numbers", "--rows", "7", "--json") == 0
    captured = capsys.readouterr()
    assert (captured.err, captured.out.count("\n")) == ("", 1)
    found = json.loads(captured.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found.keys() == profile(project, "numbers", rows=7).keys()
    assert (
        found["view"],
        found["rows"],
        found["rejected"],
        found["device"],
        found["cost_unit"],
    ) == (
        "numbers",
        7,
        0,
        "cpu",
        "rows",
    )


def test_a_source_without_rows_is_told(make_project: MakeProject, capsys: Captured) -> None:
    project = make_project(
        pa.table({"id": pa.array([], pa.int64()), "x": pa.array([], pa.float64())})
    )
    with pytest.raises(SourceError, match="view 'numbers': the source yielded no rows"):
        profile(project, "numbers", rows=5)
    assert project.cli("profile", "numbers") == 1
    assert (
        capsys.readouterr().err
        == "precompute: view 'numbers': the source yielded no rows: nothing to profile\n"
    )


# ---- the trace


def test_a_trace_holds_what_torch_did_for_a_window(
    make_project: MakeProject, tmp_path: Path
) -> None:
    args = {
        "module": "torch.nn:Linear",
        "args": {"in_features": 1, "out_features": 4},
        "weights": "${data}/linear.safetensors",
        "inputs": {"input": ["x"]},
        "outputs": {"vector": 0},
        "device": "cpu",
    }
    view = {
        "model": {"use": "torch_module", "args": args},
        "features": {"vector": {"dtype": "float32", "dim": 4}},
    }
    project, trace = make_project(ROWS, view=view), tmp_path / "trace.json"
    save_file(
        {"weight": np.ones((4, 1), np.float32), "bias": np.zeros(4, np.float32)},
        project.folder / "linear.safetensors",
    )
    trace.write_text("of last week")
    assert project.cli("profile", "numbers", "--trace", str(trace), "--replace") == 0
    assert "aten::linear" in {
        event.get("name") for event in json.loads(trace.read_text())["traceEvents"]
    }


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("nowhere/t.json", "no folder"),
        (".", "name a file that ends with .json"),
        ("project/there.json", "there is such a file"),
    ],
)
def test_a_trace_that_cannot_be_written_is_told_before_the_model_is_loaded(
    make_project: MakeProject, tmp_path: Path, capsys: Captured, where: str, why: str
) -> None:
    view = {"model": {"use": "tests.precompute.dying_models:Unloadable", "args": {"how": "raise"}}}
    path, before = tmp_path / where, files(tmp_path)
    project = make_project(ROWS, view=view)
    (project.folder / "there.json").write_text("{}")
    assert project.cli("profile", "numbers", "--trace", str(path)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"precompute: --trace {path}: {why}")
    assert captured.out == ""
    assert {name for name in files(tmp_path) if not name.startswith("project")} == set(before)


# ---- nothing is kept


def test_nothing_is_left_behind(
    make_project: MakeProject, temporary: Path, capsys: Captured
) -> None:
    project = make_project(ROWS)
    before = files(project.folder)
    assert project.cli("profile", "numbers") == 0
    assert not project.root.exists()
    assert files(project.folder) == before
    assert project.cli("run", "numbers") == 0
    before = files(project.folder)
    assert (
        make_project([(i, x + 1) for i, x in ROWS[:5]]).cli("profile", "numbers") == 0
    )  # another source than was published
    after = files(project.folder)
    assert after.pop("data.parquet") != before.pop("data.parquet")
    assert after == before
    assert files(temporary) == {}
