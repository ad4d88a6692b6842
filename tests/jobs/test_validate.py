"""Validate and doctor: what is wrong is found in seconds, each with its remedy, and nothing is
published or written."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from precompute.engine import resources
from precompute.jobs.cli import main
from precompute.jobs.setup import doctor
from precompute.jobs.setup.doctor import Line, examine
from precompute.jobs.setup.validate import validate
from precompute.store.online import kernels
from precompute.store.online.online_store import ServerReport
from tests.fixtures import MakeProject
from tests.memory_store import MemoryStore
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


# ---- doctor


def lines(project: Scene | None) -> dict[str, Line]:
    return {line.check: line for line in examine(project)}


def test_a_machine_that_is_well(make_project: MakeProject, capsys: Captured) -> None:
    project = make_project(ROWS)
    found = lines(project)
    assert [line for line in found.values() if line.status == "bad"] == []
    assert {
        "versions",
        "libraries",
        "extension for lookups",
        "extension for text",
        "processor",
        "GPU",
        "limits",
        "memory",
    } < set(found)
    assert {
        "configuration",
        "disk (root)",
        "disk (online)",
        "disk (TMPDIR)",
        "online store",
        "clock",
    } < set(found)
    assert f"precompute-store {metadata.version('precompute-store')}" in found["versions"].found
    assert project.cli("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_without_a_project_the_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRECOMPUTE_CONFIG", raising=False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "there is no project.yaml here or above" in out
    assert "disk" not in out.partition("there is no")[0]
    (tmp_path / "project.yaml").write_text("rot: ./var\n")
    assert main(["doctor"]) == 1
    assert "rot: unknown key; did you mean 'root'" in capsys.readouterr().out


class _Disk(NamedTuple):
    f_bavail: int = 10
    f_frsize: int = 4096
    f_blocks: int = 10**6
    f_files: int = 10**6
    f_favail: int = 5


@pytest.fixture
def few_handles() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_handles")
def test_each_trouble_has_its_remedy(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, needs = metadata.version, metadata.requires("precompute-store")
    monkeypatch.setattr(kernels, "COMPILED", False)
    monkeypatch.setattr(os, "statvfs", lambda path: _Disk())
    monkeypatch.setattr(
        metadata,
        "version",
        lambda name: {"duckdb": "1.4.0", "xxhash": "5.0"}.get(name) or own(name),
    )
    monkeypatch.setattr(
        metadata,
        "requires",
        lambda name: [
            *(needs or ()),
            "nowhere-to-be>=1; extra == 'engine'",
            "none-such; extra == 'dev'",
        ],
    )
    monkeypatch.setattr(resources, "available_bytes", lambda: 100 * 2**20)
    found = lines(make_project(ROWS))
    for check, status, said, remedy in (
        (
            "libraries",
            "bad",
            r"duckdb is 1.4.0, and is to be .*>=1\.5\.5.*nowhere-to-be is not installed",
            "pip install 'precompute-store",
        ),
        ("extension for lookups", "slow", "0.6 ms more", "compiler"),
        ("limits", "bad", "512 file handles", "ulimit -n 1024"),
        ("memory", "bad", "0.1 GB available, memory_mb is 1,024", "lower memory_mb"),
        ("disk (root)", "bad", "0.0 GB of 4.1 GB free", "precompute gc"),
        ("inodes (root)", "bad", "5 free", "small files"),
        ("online store", "ok", "there, with all rights", ""),
    ):
        line = found[check]
        assert line.status == status, line
        assert re.search(said, line.found), line
        assert remedy in line.remedy, line
    assert "none-such" not in found["libraries"].found


def test_a_store_that_cannot_be_used(make_project: MakeProject, away: str) -> None:
    line = lines(make_project(ROWS, project={"online": away}))["online store"]
    assert (line.status, "Not a directory" in line.found) == ("bad", True)
    assert "`online` in project.yaml" in line.remedy


class _Served(MemoryStore):
    def servers(self) -> list[ServerReport]:
        return [ServerReport("Vault", "host:1", "2.0", 90.0), ServerReport("Vault", "host:2", "1")]


def test_what_a_stores_servers_say_of_themselves_is_shown(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "open_online_store", lambda _: _Served())
    told = [line for line in examine(make_project(ROWS)) if "Vault" in line.check]
    assert told == [
        Line("Vault", "ok", "host:1: 2.0"),
        Line("clock of Vault", "bad", "90.0 s ahead at host:1", told[1].remedy),
        Line("Vault", "ok", "host:2: 1"),
    ]


@pytest.mark.parametrize(("ahead_s", "status"), [(0.2, "ok"), (-5.0, "bad"), (90.0, "bad")])
def test_clocks_that_are_apart(ahead_s: float, status: str) -> None:
    line = doctor._clock_line("clock of a server", ahead_s, "at there")
    assert (line.status, bool(line.remedy)) == (status, status == "bad")


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
