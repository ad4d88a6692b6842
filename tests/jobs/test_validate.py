"""Validate: what is wrong is found in seconds, each with its remedy, and nothing is published or
written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from precompute.jobs.setup.validate import validate
from tests.fixtures import MakeProject
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]
ROWS = [(i, float(i)) for i in range(20)]


class Reader:
    """Says that it reads ``xx``."""

    def fingerprint(self) -> str:
        return "reader"

    def reads(self) -> list[str]:
        return ["xx"]

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        return {"double": batch.column("xx")}


def wrong(project: Scene, *names: str) -> dict[str, str]:
    """Check → what was found, of those that fail."""
    return {check.check: check.found for check in validate(project, names) if not check.ok}


def test_a_view_that_would_run_passes_and_nothing_is_written(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = make_project(ROWS, view={"index": {"on": "vector"}})
    before = sorted(project.folder.rglob("*"))
    assert project.cli("validate", "numbers") == 0
    lines = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [
        "ok   numbers: configuration: key id; double float64, vector float32[4]; model tests.models:Doubler",
        "ok   numbers: source: 10 rows read: id int64, x double",
    ]
    assert lines[2].startswith("ok   numbers: model: loaded in ")
    assert ", 10 of 10 rows computed in " in lines[2]
    assert [line.split(": ")[1] for line in lines[3:]] == [
        "index",
        "contract",
        "root",
        "online store",
    ]
    assert sorted(project.folder.rglob("*")) == before
    assert project.cli("run", "numbers") == 0
    capsys.readouterr()
    assert project.cli("validate", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["ok"], {check["ok"] for check in body["checks"]}) == (True, {True})


SQL = "SELECT id, x FROM read_parquet('${data}/data.parquet')"
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], int, str, str]] = {
    "a key that is unknown": (
        {"ttll": "1h"},
        {},
        2,
        "configuration",
        "ttll: unknown key; did you mean 'ttl'",
    ),
    "a file": ({"source": {"sql": "SELECT * FROM 'nowhere.csv'"}}, {}, 1, "source", "nowhere.csv"),
    "no rows": ({"source": {"sql": f"{SQL} WHERE id < 0"}}, {}, 1, "source", "yields no rows"),
    "a column": (
        {"model": {"use": "tests.jobs.test_validate:Reader"}},
        {},
        2,
        "model",
        "reads a column 'xx'.*did you mean 'x'.*it yields: id, x",
    ),
    "a feature": (
        {"features": {"treble": {"dtype": "float64"}}},
        {},
        1,
        "model",
        "computes none of the first 10 rows.*treble",
    ),
    "online": ({}, {"online": "table:/proc/online"}, 1, "online store", "/proc/online"),
    "the root": ({}, {"root": "/proc/var"}, 1, "root", "/proc/var"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found_and_what_depends_on_it_not_tried(
    make_project: MakeProject, capsys: Captured, what: str
) -> None:
    view, settings, code, check, message = WRONG[what]
    other = {
        "entity": ["id"],
        "source": {"sql": SQL},
        "model": {"use": "tests.models:Doubler"},
        "features": {"double": {"dtype": "float64"}},
        "ttl": "1h",
    }
    project = make_project(ROWS, view=view, project=settings, views={"other": other})
    found = wrong(project, "numbers")
    assert list(found) == [check]
    assert re.search(message, found[check]), found[check]
    assert project.cli("validate", "numbers", "--json") == code
    out = capsys.readouterr().out
    assert [c["check"] for c in json.loads(out)["checks"] if not c["ok"]] == [check]


def test_a_row_that_is_rejected_is_told_and_no_mistake(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0), (2, None)])
    (model,) = (check for check in validate(project) if check.check == "model")
    assert model.ok
    assert "1 of 2 rows computed" in model.found
    assert "1 rejected (" in model.found


# ---- partitions


@pytest.mark.parametrize(
    ("days_ago", "start_days_ago", "found"),
    [
        ((1, 2), 9, "10 rows read of partition {1}: id int64, x double"),
        (
            (5, 300),
            9,
            "10 rows read of partition {5} (none in 4 newer ones that were looked at): id",
        ),
        # what ended long ago: some of all before the newest are looked at
        (range(400, 600), 600, "10 rows read of partition {406} (none in 26 newer ones that"),
        (
            (),
            600,
            "no partition has rows, of 32 that were looked at, {600} to {1} (columns: id int64",
        ),
        ((0,), 3, "no partition has rows, of 3 that were looked at, {3} to {1} (columns: id int64"),
    ],
)
def test_a_partition_is_tried_that_has_rows(
    make_project: MakeProject, days_ago: Sequence[int], start_days_ago: int, found: str
) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    named = {n: f"{today - timedelta(days=n):%Y-%m-%d}" for n in range(601)}
    rows = [(key, today - timedelta(days=n, hours=-1)) for n in days_ago for key in range(10)]
    table = pa.table(
        {
            "id": pa.array([key for key, _ in rows], pa.int64()),
            "x": pa.array([float(key) for key, _ in rows], pa.float64()),
            "t": pa.array([at for _, at in rows], pa.timestamp("us", "UTC")),
        }
    )
    sql = "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE t >= $start AND t < $end"
    partition = {"by": "day", "start": named[start_days_ago]}
    project = make_project(table, view={"source": {"sql": sql}, "partition": partition})
    checks = {check.check: check for check in validate(project)}
    assert checks["source"].found.startswith(
        re.sub(r"{(\d+)}", lambda of: named[int(of[1])], found)
    )
    has_rows = found.startswith("10 rows")
    assert checks["source"].ok == has_rows
    assert ("model" in checks) == has_rows
    if has_rows:
        assert "10 of 10 rows computed" in checks["model"].found


def test_a_partition_is_tried_whose_file_is_there(make_project: MakeProject) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    start = f"{today - timedelta(days=4):%Y-%m-%d}"
    sql = "SELECT id, x FROM read_parquet('${data}/' || strftime($start, '%Y-%m-%d') || '.parquet')"
    view = {"source": {"sql": sql}, "partition": {"by": "day", "start": start}}
    project = make_project(ROWS, view=view)
    assert re.search(r"no file.*\d\d\d\d-\d\d-\d\d\.parquet", wrong(project)["source"])
    (path,) = project.folder.parent.rglob("data.parquet")
    path.rename(path.with_stem(start))
    assert wrong(project) == {}
