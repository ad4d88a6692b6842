"""Source age: a source that is frozen upstream shows, though each run that finds it unchanged makes
its rows fresh again."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from precompute.sources.source import Source
from precompute.store.offline.runs import Report
from precompute.store.times import iso
from tests.fixtures import MakeProject
from tests.jobs.test_run_all import view as doubled
from tests.scene import Scene

DAY_S = 86400.0
FILE = "SELECT * FROM read_parquet('${data}/data.parquet')"


def ago(days: float) -> datetime:
    """Of a whole second, as every file system keeps it."""
    return datetime.now(UTC).replace(microsecond=0) - timedelta(days=days)


def set_back(path: Path, at: datetime) -> None:
    os.utime(path, (at.timestamp(), at.timestamp()))


def told(
    project: Scene, report: Report, name: str = "numbers"
) -> tuple[str | None, str | None, str | None]:
    """``source_at`` as the run's report, the live snapshot's manifest and ``status`` have it."""
    store, line = project.offline, project.status(name)
    recorded = next(r for r in store.view(name).runs.reports(1) if r.run == report.run)
    return (
        recorded.source_at,
        store.view(name).snapshot(line["snapshot"]).source_at,
        line["source_at"],
    )


def test_a_file_that_nobody_writes_any_more(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)])
    frozen, written = ago(30), ago(2)
    set_back(project.folder / "data.parquet", frozen)
    first = project.run()
    assert told(project, first) == (iso(frozen), iso(frozen), iso(frozen))
    line = project.status()
    assert (line["status"], line["attention"]) == ("fresh", [])
    assert 30 * DAY_S <= line["source_age_s"] < 30.1 * DAY_S

    set_back(
        project.folder / "data.parquet", written
    )  # with the rows it had: nothing is committed, and the report tells it
    second = project.run()
    assert (second.status, second.snapshot) == ("current", 1)
    assert told(project, second) == (iso(written), iso(frozen), iso(written))
    assert 2 * DAY_S <= project.status()["source_age_s"] < 2.1 * DAY_S


@pytest.mark.parametrize(
    ("sql", "newest"),
    [
        (
            "SELECT * FROM read_csv('./in[1]/*.csv')",
            3,
        ),  # the folder is a pattern to DuckDB, which matches in1
        ("SELECT * FROM read_csv(['./b.csv', './a.csv'])", 5),
        ("SELECT * FROM './a.csv'", 5),
        ("SELECT * FROM read_csv('./' || 'b.csv')", 7),
        ("WITH a AS (FROM './b.csv') SELECT * FROM a", 7),
        ("SELECT 9 AS id, x FROM './b.csv' WHERE x IN (SELECT x FROM read_csv('./a.csv'))", 5),
        ("SELECT 9 AS id, 1.0 AS x", None),
        ("SELECT unnest(range(3)) AS id, 1.0 AS x", None),
        ("SELECT * FROM './a.csv' UNION ALL SELECT * FROM 'file:{folder}/b.csv'", 5),
    ],
)
def test_the_newest_of_the_local_files_the_sql_reads(
    make_project: MakeProject, tmp_path: Path, sql: str, newest: int | None
) -> None:
    project = make_project(
        view={"source": {"sql": sql.replace("{folder}", str(tmp_path / "project"))}}
    )
    (project.folder / "in1").mkdir()
    for number, (name, days) in enumerate(
        {"a.csv": 5, "b.csv": 7, "in1/c.csv": 3, "in1/d.csv": 4, "unread.csv": 1}.items()
    ):
        (project.folder / name).write_text(f"id,x\n{number},1.0\n")
        set_back(project.folder / name, ago(days))
    report = project.run()
    age_s = project.status()["source_age_s"]
    assert (report.source_at is None) == (age_s is None) == (newest is None)
    assert newest is None or newest * DAY_S <= age_s < (newest + 0.1) * DAY_S


def test_a_remote_file_may_be_newer_than_the_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text("id\n1\n")
    with Source("SELECT * FROM './a.csv'", ("id",), {}, folder=tmp_path) as source:
        assert source.modified_us() == (tmp_path / "a.csv").stat().st_mtime_ns // 1000
        monkeypatch.setattr(source, "_files", [*source._files, "s3://bucket/b.csv"])
        assert source.modified_us() is None


@pytest.mark.parametrize(
    ("column", "newest"),
    [
        (pa.array([date(2026, 1, 5), date(2026, 1, 2)]), "2026-01-05T00:00:00Z"),
        (pa.array([datetime(2026, 1, 2, 3, 4, 5, 6), None]), "2026-01-02T03:04:05.000006Z"),
        (
            pa.array(
                [datetime(2026, 1, 2, 3, tzinfo=UTC)] * 2, pa.timestamp("ns", "Europe/Berlin")
            ),
            "2026-01-02T03:00:00Z",
        ),
        (
            pa.array([date(9999, 12, 31), date(2026, 1, 2)]),
            "2026-01-02T00:00:00Z",
        ),  # no row was updated in the future
        (pa.array([None, None], pa.timestamp("us")), None),
    ],
)
def test_a_column_tells_it_better_than_a_file(
    make_project: MakeProject, column: pa.Array, newest: str | None
) -> None:
    rows = pa.table({"id": [1, 2], "x": [1.0, 2.0], "at": column})
    project = make_project(rows, view={"source": {"sql": FILE, "updated_at": "at"}})
    report = project.run()
    assert told(project, report) == (newest, newest, newest)
    assert project.store.snapshot(1).input_columns.keys() == {"x", "at"}


def test_times_ahead_of_the_clock_are_reported(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pa.table({"id": [1, 2], "x": [1.0, 2.0], "at": [date(9999, 12, 31), date(2026, 1, 2)]})
    project = make_project(rows, view={"source": {"sql": FILE, "updated_at": "at"}})
    warning = (
        "source.updated_at: 'at' is ahead of this clock in 1 of 2 rows, which do not count for the"
        " source's age"
    )
    assert project.cli("run", "numbers") == 0
    assert capsys.readouterr().err.endswith(f"numbers: {warning}\n")
    assert project.report().attention == [warning]
    assert project.cli("log") == 0
    assert f"  attention  {warning}\n" in capsys.readouterr().out


def test_a_view_of_another_view_is_as_old_as_what_that_one_read(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)], views={"reader": doubled("numbers")})
    frozen, written = ago(30), ago(2)
    set_back(project.folder / "data.parquet", frozen)
    project.run()
    assert told(project, project.run("reader"), "reader") == (iso(frozen),) * 3
    set_back(project.folder / "data.parquet", written)
    project.run()  # finds nothing new: only its report tells
    assert told(project, project.run("reader"), "reader") == (
        iso(written),
        iso(frozen),
        iso(written),
    )


def test_past_max_age_it_needs_attention(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)])
    set_back(project.folder / "data.parquet", ago(8))
    project.run()
    for max_age, attention in (
        ("9d", []),
        ("7d", ["its source was last modified 8 d ago, and source.max_age is 7 d"]),
    ):
        line = make_project(view={"source": {"sql": FILE, "max_age": max_age}}).status()
        assert (line["status"], line["attention"]) == ("fresh", attention)
