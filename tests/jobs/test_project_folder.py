"""The project's folder: where relative paths start from, whatever the working directory, and what
may be moved without computing anything again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.cli import main
from precompute.jobs.schedule.reconciler import reconcile_command
from precompute.jobs.schedule.scheduler import run_command
from precompute.model import digest
from precompute.sources.source import Source
from precompute.store.disk.storage import identity_of
from precompute.store.errors import ConfigError, SourceError
from precompute.store.offline.view_store import OfflineStore
from precompute.store.wire.lookup_options import LookupOptions
from precompute.workers.process import ChildProcess
from tests.fixtures import MakeProject
from tests.models import Doubler
from tests.scene import Scene

RIGHT, WRONG = 1.0, 666.0
"""``x`` of the one row in the project's files, and in files of the same names in the working
directory."""


class Weighed(Doubler):
    """``double`` = x times the number in a file.

    Args:
        weights: the file.
        nested: more of them.
    """

    def __init__(self, weights: str, nested: dict[str, list[str]] | None = None) -> None:
        super().__init__(dim=0)
        self.weights, self.nested = weights, nested or {}

    def fingerprint(self) -> str:
        return digest(weights=self.weights, nested=self.nested)

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        factor = float(Path(self.weights).read_text())
        return {"double": super().compute(batch)["double"] / 2 * factor}


WEIGHED: dict[str, Any] = {
    "model": {
        "use": "tests.jobs.test_project_folder:Weighed",
        "args": {"weights": "./weights.txt"},
    },
    "features": {"double": {"dtype": "float64"}},
}


def write_files(folder: Path, x: float) -> None:
    """The same small table in every form, and the same number as a model's weights."""
    table = pa.table({"id": [1], "x": [x]})
    for name in ("data.parquet", "part-1.parquet", "sub/part-2.parquet", "day=7/part.parquet"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / name)
    (folder / "data.csv").write_text(f"id,x\n1,{x}\n")
    (folder / "data.json").write_text(json.dumps({"id": 1, "x": x}))
    (folder / "weights.txt").write_text(str(x))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, full of files of the right names that are the wrong ones."""
    folder = tmp_path / "elsewhere"
    write_files(folder, WRONG)
    (folder / "data-2.csv").write_text(f"id,x\n2,{WRONG}\n")  # and one more
    monkeypatch.chdir(folder)
    return folder


READS = {
    "from here": "SELECT * FROM read_csv('./data.csv', header = true)",
    "from above": "SELECT * FROM read_parquet('../project/data.parquet')",
    "as a table, with a name": "SELECT t.id, t.x FROM './data.parquet' AS t",
    "by its stem": "SELECT data.id, data.x FROM 'data.csv'",
    "without quotes": "SELECT * FROM data.csv",
    "a list": "SELECT id, max(x) AS x FROM read_parquet(['data.parquet', './part-1.parquet']) GROUP BY id",
    "a pattern": "SELECT id, max(x) AS x FROM read_parquet('./part-*.parquet') GROUP BY id",
    "a pattern as a table": "SELECT id, max(x) AS x FROM '**/part-2.parquet' GROUP BY id",
    "a hive": "SELECT id, x FROM read_parquet('day=*/*.parquet', hive_partitioning = true) WHERE day = 7",
    "put together": "SELECT * FROM read_csv('./da' || 'ta' || '.csv')",
    "made of a list": "SELECT * FROM read_parquet(list_transform(['data'], lambda n: n || '.parquet'))",
    "text": "SELECT 1 AS id, split_part(split_part(content, ',', 3), chr(10), 1)::DOUBLE AS x FROM read_text('data.csv')",
    "within": "WITH t AS (SELECT * FROM 'data.csv') SELECT * FROM (SELECT id, x FROM t JOIN 'data.parquet' USING (id, x))",
    "beside": "SELECT 1 AS id, (SELECT max(x) FROM 'data.csv') AS x -- 'data.csv'",
    "a table of the query's own": 'WITH "data.csv" AS (SELECT 1 AS id, 1.0::DOUBLE AS x) SELECT * FROM "data.csv"',
    "of a path": "SELECT id, x FROM glob('./data.csv') JOIN 'data.csv' ON file LIKE '%/project/data.csv'",
    "made of what is read": "SELECT * FROM read_csv((SELECT list(file) FROM glob('./data*.csv')))",
    "a variable": "SELECT * FROM read_csv('${data}/data.csv')",
}


def test_files_in_sql_start_from_the_projects_folder(
    make_project: MakeProject, elsewhere: Path
) -> None:
    """Those of the same name in the working directory are not read, nor found without."""
    for sql in ("FROM 'data.csv'", "FROM read_csv('*.csv')", "FROM data.csv"):
        with pytest.raises((SourceError, ConfigError)):
            Source(sql, ["id"], {}, folder=make_project().home)
    for how, sql in READS.items():
        project = make_project(view={"source": {"sql": sql}})
        write_files(project.folder, RIGHT)
        sql = project.view("numbers").source.sql
        with Source(sql, ["id"], {}, folder=project.home) as source:
            assert source.sample(9).select(["id", "x"]).to_pylist() == [{"id": 1, "x": RIGHT}], how
            assert source.load() == 1
            assert source.rows(["1"]).to_pylist()[0]["x"] == RIGHT
            assert source.table(sql).column("x").to_pylist() == [RIGHT]


def test_a_folder_whose_name_is_a_pattern_and_has_a_quote(tmp_path: Path, elsewhere: Path) -> None:
    folder = tmp_path / "it's [1] * new?"
    write_files(folder, RIGHT)
    for sql in ("FROM 'data.csv'", "FROM 'dat*.csv'", "FROM read_parquet(['data.parquet'])"):
        with Source(sql, ["id"], {}, folder=folder) as source:
            assert source.sample(9).to_pylist() == [{"id": 1, "x": RIGHT}]


@pytest.mark.parametrize(
    "sql",
    [
        "FROM 'data.parquet'",
        "FROM 'part-*.parquet'",
        "FROM read_csv('./da' || 'ta.csv', hive_partitioning = true)",
        "FROM read_parquet(['data.parquet', '/nowhere/b.parquet'])",
        "SELECT 1 AS id, content FROM read_text('data.csv')",
        "FROM read_csv((SELECT list(file) FROM glob('../*/data.csv')))",
    ],
)
def test_a_project_in_a_hive_partition_reads_no_column_of_it(
    tmp_path: Path, elsewhere: Path, sql: str
) -> None:
    folder = tmp_path / "id=9" / "project"
    write_files(folder, RIGHT)
    said = r"starts from the project's folder, .*/id=9/project, and DuckDB takes 'id=9' for a partition.*hive_partitioning = false"
    with pytest.raises(ConfigError, match=said):
        Source(sql, ["id"], {}, folder=folder)
    with (
        Source("SELECT 1 AS id", ["id"], {}, folder=folder) as source,
        pytest.raises(ConfigError, match=said),
    ):
        source.table(sql)


def test_a_project_in_a_hive_partition_may_read_unpartitioned_files(
    tmp_path: Path, elsewhere: Path
) -> None:
    folder, other = tmp_path / "id=9" / "project", tmp_path / "other"
    for each in (folder, other):
        write_files(each, RIGHT)
    for sql in (
        "FROM read_parquet('data.parquet', hive_partitioning = false)",
        "FROM read_csv('./dat*.csv', header = true, HIVE_PARTITIONING => FALSE)",
        "FROM read_parquet(['part-1.parquet', './day=7/part.parquet'], hive_partitioning := false) LIMIT 1",
        f"FROM '{other}/data.csv'",
    ):
        with Source(sql, ["id"], {}, folder=folder) as source:
            assert source.sample(9).to_pylist() == [{"id": 1, "x": RIGHT}]
    with Source(
        f"FROM '{folder}/data.csv'", ["id"], {}, folder=folder
    ) as source:  # as it is written: it does not move
        assert source.sample(9).to_pylist() == [{"id": 9, "x": RIGHT}]


def test_partitions_below_the_projects_folder_are_columns(tmp_path: Path, elsewhere: Path) -> None:
    write_files(tmp_path / "project", RIGHT)
    with Source("FROM 'day=*/*.parquet'", ["id", "day"], {}, folder=tmp_path / "project") as source:
        assert source.sample(9).to_pylist() == [{"id": 1, "x": RIGHT, "day": 7}]


def test_a_pattern_below_a_folder_with_a_backslash_is_refused(
    tmp_path: Path, elsewhere: Path
) -> None:
    folder = tmp_path / "a\\b [1]"
    write_files(folder, RIGHT)
    for sql in (
        "FROM 'data.csv'",
        "FROM read_parquet(['./data.parquet', 'sub/part-2.parquet']) LIMIT 1",
    ):
        with Source(sql, ["id"], {}, folder=folder) as source:
            assert source.sample(9).to_pylist() == [{"id": 1, "x": RIGHT}]
    for sql in (
        "FROM 'dat*.csv'",
        "FROM read_csv('./dat?.csv')",
        "SELECT 1 AS id FROM glob('[d]*')",
    ):
        with pytest.raises(
            ConfigError,
            match=r"no pattern can find '.*' in the project's folder, .*backslash.*name each file",
        ):
            Source(sql, ["id"], {}, folder=folder)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("FROM query('SELECT * FROM ''data.csv''')", "hides which files"),
        ("SELECT * FROM read_csv('data-' || nextval('none') || '.csv')", "write it as a value"),
    ],
)
def test_sql_whose_files_cannot_be_told_is_refused(
    make_project: MakeProject, elsewhere: Path, sql: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Source(sql, ["id"], {}, folder=make_project().home)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1 AS id, x, $start AS day FROM read_csv(strftime($start, './%Y.csv')) WHERE $end > $start",
        "SELECT 1 AS id, x FROM read_csv('./' || strftime($start, '%Y') || '.csv')",
    ],
)
def test_a_partitions_bounds_may_be_part_of_a_files_name(
    make_project: MakeProject, elsewhere: Path, sql: str
) -> None:
    partition = {"by": "month", "start": "2020-01-01"}
    project = make_project(view={"source": {"sql": sql}, "partition": partition})
    at = project.view("numbers").partition_at
    from datetime import UTC, datetime

    month = at(datetime(2021, 3, 9, tzinfo=UTC))
    assert month is not None
    (project.folder / "2021.csv").write_text("x\n1.0\n")
    with Source(sql, ["id"], {}, bounds=(month.start, month.end), folder=project.home) as source:
        assert source.sample(9).column("x").to_pylist() == [RIGHT]
        assert source.table(sql).column("x").to_pylist() == [RIGHT]


def rows_of(project: Scene, number: int) -> list[Any]:
    return [row["double"] for row in project.rows(number)]


def computed(project: Scene, key: str) -> list[Any]:
    """What the fallback answers for a key."""
    with project.answering() as lookup:
        answer = lookup.begin("numbers", [key], LookupOptions(deadline_ms=20_000))
        answer.wait()
        return [row["features"]["double"] for row in answer.rows()]


def test_a_run_and_its_workers_take_the_projects_files(
    make_project: MakeProject, elsewhere: Path
) -> None:
    project = make_project(
        view=WEIGHED | {"source": {"sql": "FROM 'data.csv'"}},
        project={"engine": {"workers": 1}, "vars": None},
    )
    write_files(project.folder, 3.0)
    assert project.run().status == "published"
    assert rows_of(project, 1) == [9.0]


def test_the_fallback_takes_the_files_of_the_project_it_serves(
    make_project: MakeProject, elsewhere: Path, tmp_path: Path
) -> None:
    """Published in one folder, served from another: the definition travels in the pointer, as it
    was written."""
    view = WEIGHED | {
        "source": {"sql": "FROM 'data.csv'"},
        "fallback": {"enabled": True, "deadline": "20s"},
    }
    project = make_project(view=view)
    write_files(project.folder, 3.0)
    project.run()
    (project.folder / "data.csv").write_text("id,x\n1,3.0\n2,5.0\n")
    assert computed(project, "2") == [15.0]
    moved = tmp_path / "moved"
    shutil.move(project.folder, moved)
    write_files(project.folder, WRONG)  # at the old place
    assert computed(Scene(moved, {}), "2") == [15.0]


def test_arguments_of_any_depth_are_paths_when_they_start_with_dot_slash(
    make_project: MakeProject, elsewhere: Path
) -> None:
    args = {
        "weights": "../project/weights.txt",
        "nested": {"files": ["./data.csv"], "texts": [".", "..", "no/such.csv", "/x y"]},
    }
    project = make_project([(1, 2.0)], view=WEIGHED | {"model": WEIGHED["model"] | {"args": args}})
    write_files(project.folder, 3.0)
    project.run()
    first = project.store.snapshot(1)
    assert first.view.definition.model.args == args  # as they are written
    (project.folder / "data.csv").write_text("other")
    assert project.run().model != first.model


def test_a_copied_or_moved_project_computes_nothing_and_commits_nothing(
    make_project: MakeProject, elsewhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = "SELECT t.* FROM read_csv('${data}/data.csv') t JOIN './data.parquet' USING (id)"
    extra = {"sql": "SELECT * FROM 'data.parquet'"}
    project = make_project(
        view={
            "source": {"sql": sql},
            "model": {"use": "tests.jobs.test_project_folder:Tabled", "args": {"table": extra}},
        }
    )
    write_files(project.folder, 3.0)
    project.run()
    for place in (tmp_path / "copy", tmp_path / "far" / "away"):
        shutil.copytree(project.folder, place)
        there = Scene(place, {})
        plan = there.plan()
        assert (plan.nothing_to_do, plan.diff.compute) == (True, 0), str(plan)
        assert there.run().status == "current"
        assert OfflineStore(there.root).view("numbers").numbers() == [1]
    for file in (project.root / "numbers" / "manifests").iterdir():
        assert str(project.folder) not in file.read_text()
    assert str(project.folder) not in json.dumps(project.pointer().view.to_json())


def test_a_key_that_would_change_with_the_projects_place_is_refused(
    tmp_path: Path, elsewhere: Path
) -> None:
    (tmp_path / "here" / "sub").mkdir(parents=True)
    (tmp_path / "here" / "sub" / "a.txt").write_text("a")
    for read in ("read_text('./sub/*.txt')", "read_text('../here/sub/a.txt')"):
        sql = f"SELECT {{}} AS id, 1 AS part, filename FROM {read}"
        with (
            Source(sql.format("filename"), ["part", "id"], {}, folder=tmp_path / "here") as source,
            pytest.raises(
                ConfigError,
                match=r"key 'id' starts with the project's folder .*parse_filename\(filename\)",
            ),
        ):
            source.load()
        for cut in ("parse_filename(filename)", "regexp_replace(filename, '^.*/sub/', '')"):
            with Source(sql.format(cut), ["id"], {}, folder=tmp_path / "here") as source:
                source.load()
                assert source.rows(["a.txt"]).num_rows == 1


class Tabled(Doubler):
    """Takes a table, too."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__()
        assert table.column("x").to_pylist() == [3.0]


def test_other_data_under_the_same_name_is_another_recipe(
    make_project: MakeProject, tmp_path: Path
) -> None:
    """A variable's value is part of what is written."""
    project = make_project([(1, 1.0)])
    project.run()
    shutil.copytree(project.folder, tmp_path / "other", ignore=shutil.ignore_patterns("var"))
    project = make_project(project={"vars": {"data": "../other"}})
    assert "source's SQL changed" in project.plan().reason


def test_every_process_runs_our_code_wherever_it_starts(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules with the names of ours, in a project's folder that is the working directory: they end
    the process that imports them, and say that it is done."""
    sql = "SELECT id, x, $start AS day FROM 'data.csv' WHERE $end > $start"
    view = {"source": {"sql": sql}, "partition": {"by": "month", "start": "2026-01-01"}}
    settings = {"engine": {"workers": 1}, "schedule": {"numbers": "0 0 1 1 *"}}
    project = make_project(view=view, project=settings)
    write_files(project.folder, 3.0)
    identity_of(project.root)
    for name in ("jobs", "store", "precompute", "demo"):
        for module in (
            "__init__",
            "__main__",
            "cli",
            "errors",
            "model",
            "workers/__init__",
            "workers/worker",
        ):
            path = project.folder / name / f"{module}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("import os; os._exit(0)")
    monkeypatch.chdir(project.folder)
    assert ChildProcess(run_command(project, "numbers", "2026-01-01T00:00:00+00:00")).wait(60)
    assert (project.report().status, rows_of(project, 1)) == ("published", [6.0])
    shutil.rmtree(project.root / "online")
    assert ChildProcess(reconcile_command(project, "numbers")).wait(60)
    assert (project.report().command, project.report().status) == ("reconcile", "published")
    day = ["--from", "2026-01-01", "--to", "2026-01-01"]
    assert main(["-c", ".", "backfill", "numbers", *day, "--json"]) == 0
    assert rows_of(project, 2) == [6.0]


def test_a_relative_notify_command_is_the_projects(
    make_project: MakeProject, elsewhere: Path
) -> None:
    project = make_project([(1, 1.0)], project={"notify": ["./tell.sh", "./received"]})
    for folder, text in ((elsewhere, "wrong"), (project.folder, '"$NOTIFY_STATUS"')):
        (folder / "tell.sh").write_text(f'#!/bin/sh\necho {text} > "$1"\n')
        (folder / "tell.sh").chmod(0o755)
    project.run()
    assert (project.folder / "received").read_text() == "published\n"
    assert not (elsewhere / "received").exists()
