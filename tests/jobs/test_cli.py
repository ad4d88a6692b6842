"""The command line: the project is found, ``-c`` stands anywhere; every command, its ``--json``
report, its exit status, every refusal a JSON document too, and never a traceback; and a shell
completes."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import jsonschema_rs
import numpy as np
import pyarrow as pa
import pytest

from precompute.jobs.cli import _parser, main
from precompute.jobs.commands.rows import describe_row
from precompute.jobs.commands.run import describe_report
from precompute.jobs.commands.setup import SHELLS
from precompute.store.disk.record import FORMAT, plain, replace
from precompute.store.errors import (
    ConfigError,
    GateError,
    RejectedError,
    RequestError,
    SnapshotError,
)
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Verdict
from precompute.store.offline.view_store import OfflineStore
from precompute.store.times import shown_time
from tests import REPOSITORY
from tests.fixtures import MakeProject
from tests.models import Doubler
from tests.scene import Scene

ROWS = [(1, 1.0), (2, 2.0), (3, 30.0)]
INDEXED = {"index": {"on": "vector", "metric": "l2"}}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PRECOMPUTE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def published(make_project: MakeProject, capsys: Captured) -> Scene:
    project = make_project(ROWS, view=INDEXED)
    assert project.cli("run", "numbers") == 0
    capsys.readouterr()
    return project


class Scored(Doubler):
    """Calls its scalar ``score``."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        made = super().compute(batch)
        return {"score": made["double"], "vector": made["vector"]}


def spawned(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PRECOMPUTE_")}
    return subprocess.run(
        [sys.executable, "-m", "precompute.jobs.cli", *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=clean | environment,
    )


def report_of(capsys: Captured) -> Any:
    """What ``--json`` printed: one document, and nothing else anywhere."""
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("\n") == 1
    return json.loads(captured.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# ---- run, materialize, publish


def test_messages_name_commands_that_there_are() -> None:
    (commands,) = (set(a.choices) for a in _parser()._actions if isinstance(a.choices, dict))
    for room in ("jobs", "precompute", "store", "demo"):
        for path in (REPOSITORY / room).rglob("*.py"):
            if "tests" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named = re.findall(r"(?<!from )\bprecompute (?:-c \S+ )?([a-z]+)\b", node.value)
                    assert commands.issuperset(named), f"{path}: {node.value}"


def test_help_loads_nothing_that_takes_long() -> None:
    code = "import sys; from precompute.jobs.cli import _parser; _parser().format_help(); print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    loaded = {name.partition(".")[0] for name in printed.split()}
    slow = {"asyncio", "duckdb", "faiss", "numpy", "pandas", "pyarrow", "pydantic", "rich", "torch"}
    assert loaded & (slow | {"yaml"}) == set()


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        (["lookup", "numbers", "1"], set[str]()),
        (["snapshots", "numbers"], set[str]()),
        (["gc", "--dry-run"], set[str]()),
        (["search", "numbers", "--key", "1"], {"faiss"}),
        # it tells a view's file whose SQL is wrong
        (["status"], {"duckdb"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_that_reads_loads_what_it_needs(
    published: Scene, command: list[str], needed: set[str]
) -> None:
    code = f"""import sys; from precompute.jobs.cli import main
sys.argv[1:] = ["-c", {str(published.folder)!r}, *{command!r}]
main()
print(*sys.modules, file=sys.stderr)"""
    # with pandas, unlike other processes of tests
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PYTHONPATH": str(REPOSITORY)
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert loaded & {"duckdb", "faiss", "pandas", "torch", "transformers"} == needed


def test_run_says_what_it_did_in_four_lines(make_project: MakeProject, capsys: Captured) -> None:
    assert make_project([*ROWS, (4, None)], view=INDEXED).cli("run", "numbers") == 0
    captured = capsys.readouterr()
    assert captured.err == "materialize numbers: 4 rows\npublish numbers: 3 rows\n"
    first, second, third, fourth = captured.out.splitlines()
    assert re.fullmatch(
        r"  shown by: precompute log \d{8}T[\d.]+Z-[0-9a-f]{6} · precompute history numbers", fourth
    )
    assert first.startswith("numbers: published, snapshot 1, 3 of 4 rows (1 rejected), ")
    assert re.fullmatch(r"  engine: [\d,]+ rows/s · 1 batch · peak [\d,]+ MiB", third)
    for stage in (
        "open",
        "source",
        "model",
        "write",
        "commit",
        "check",
        "load",
        "verify",
        "index",
        "flip",
    ):
        assert f" {stage} " in second


def test_run_materialize_and_publish_report_as_json(
    make_project: MakeProject, capsys: Captured
) -> None:
    changed = [*ROWS[:2], (3, 31.0)]
    for rows, command, status, snapshot, epoch in (
        (ROWS, ["run"], "published", 1, 1),
        (ROWS, ["run"], "current", 1, 1),
        (ROWS, ["materialize"], "current", 1, None),
        (changed, ["materialize"], "committed", 2, None),
        # after the event that a run found nothing changed
        (changed, ["publish"], "published", 2, 3),
        (changed, ["publish"], "current", 2, 3),
        (changed, ["run", "--full"], "published", 3, 4),
    ):
        project = make_project(rows)
        assert project.cli(*command, "numbers", "--json") == 0
        report = report_of(capsys)
        assert (report["command"], report["status"], report["snapshot"], report["epoch"]) == (
            command[0],
            status,
            snapshot,
            epoch,
        )
        assert report == json.loads(json.dumps(plain(project.store.runs.last())))


@pytest.mark.parametrize(
    ("compiled", "more"), [(True, ""), (False, ", without its C extension: .*")]
)
def test_the_version_is_that_of_the_package(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, compiled: bool, more: str
) -> None:
    monkeypatch.setattr("precompute.store.online.kernels.COMPILED", compiled)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "version"
    ]
    told = re.escape(f"precompute {declared} (format {FORMAT})")
    assert re.fullmatch(f"{told}{more}\n", capsys.readouterr().out)


def test_a_dry_run_tells_what_would_be_computed_and_writes_nothing(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = make_project(ROWS)
    assert project.cli("materialize", "numbers", "--dry-run") == 0
    captured = capsys.readouterr()
    expected = "numbers: full: 3 of 3 rows to compute (3 new); the first snapshot\n"
    assert (captured.out, captured.err) == (expected, "")
    assert not (project.root / "numbers").exists()
    assert project.cli("run", "numbers", "--json") == 0
    capsys.readouterr()
    before = sorted(project.root.rglob("*"))
    for rows, options, kind, compute in (
        (ROWS, [], "none", 0),
        ([*ROWS, *((i, float(i)) for i in range(4, 8))], [], "full", 4),  # more than there were
        (ROWS, ["--full"], "full", 3),
    ):
        assert (
            make_project(rows).cli("materialize", "numbers", "--dry-run", "--json", *options) == 0
        )
        plan = report_of(capsys)
        assert (plan["kind"], plan["source"], plan["compute"]) == (kind, len(rows), compute)
    assert sorted(project.root.rglob("*")) == before


# ---- lookup


def test_lookup_answers_for_people_freshness_first(published: Scene, capsys: Captured) -> None:
    assert published.cli("lookup", "numbers", "2", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    head = r"2: fresh from store, \d s old of 60 min, snapshot 1, model [0-9a-f]{12}"
    assert re.fullmatch(head, lines[0])
    assert lines[1:3] == ["  double: 4", "  vector: [2, 3, 4, 5] (4)"]
    assert lines[3].startswith("1: fresh")


def test_lookup_answers_as_json(published: Scene, capsys: Captured) -> None:
    command = ["lookup", "numbers", "3", "9", "--json"]
    assert published.cli(*command) == 1  # not every key was there
    answer = report_of(capsys)
    model = OfflineStore(published.root).view("numbers").snapshot(1).model
    assert (answer["view"], answer["snapshot"], answer["model"]) == ("numbers", 1, model)
    row, missing = answer["rows"]
    assert row["features"] == {"double": 60.0, "vector": [30.0, 31.0, 32.0, 33.0]}
    assert (row["key"], row["status"], row["source"], row["ttl_s"]) == (
        "3",
        "fresh",
        "store",
        3600.0,
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z", row["computed_at"])
    assert (missing["key"], missing["status"], missing["reason"], missing["features"]) == (
        "9",
        "missing",
        "unknown_entity",
        None,
    )
    assert published.cli(*command, "--features", "vector,double") == 1
    assert list(report_of(capsys)["rows"][0]["features"]) == ["vector", "double"]


def test_lookup_of_composite_keys(make_project: MakeProject, capsys: Captured) -> None:
    table = pa.table({"a": [1, 1], "b": ["x/y", "50%"], "x": [1.0, 2.0]})
    project = make_project(table, view={"entity": ["a", "b"]})
    assert project.cli("run", "numbers", "--json") == 0
    capsys.readouterr()
    assert (
        project.cli("lookup", "numbers", "1/x%2Fy", "1/50%25", "--features", "double", "--json")
        == 0
    )
    assert [(r["key"], r["features"]["double"]) for r in report_of(capsys)["rows"]] == [
        ("1/x%2Fy", 2.0),
        ("1/50%25", 4.0),
    ]
    assert project.cli("lookup", "numbers", "1") == 2
    assert "2 part(s) (a, b), got 1" in capsys.readouterr().err


def test_lookup_with_the_fallback_runs_the_model(
    make_project: MakeProject, capsys: Captured
) -> None:
    view = {"fallback": {"enabled": True, "deadline": "30s"}}
    project = make_project(ROWS, view=view)
    assert project.cli("run", "numbers", "--json") == 0
    make_project([*ROWS, (4, 40.0)], view=view)
    capsys.readouterr()
    assert project.cli("lookup", "numbers", "4", "--json") == 1
    assert report_of(capsys)["rows"][0]["status"] == "missing"
    assert project.cli("lookup", "numbers", "4", "--fallback", "--json") == 0
    row = report_of(capsys)["rows"][0]
    assert (row["status"], row["source"], row["features"]["double"]) == (
        "computed",
        "fallback",
        80.0,
    )


# ---- search


def test_a_feature_may_be_called_score_beside_the_score_of_a_search(
    make_project: MakeProject, capsys: Captured
) -> None:
    features = {"score": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 4}}
    view = INDEXED | {"model": {"use": "tests.jobs.test_cli:Scored"}, "features": features}
    project = make_project(ROWS, view=view)
    assert project.cli("run", "numbers") == 0
    capsys.readouterr()
    assert project.cli("lookup", "numbers", "3", "--json") == 0
    assert report_of(capsys)["rows"][0]["features"]["score"] == 60.0
    with project.lookup() as lookup:
        found = lookup.search("numbers", key="1", k=1, features=["score"])["rows"][0]
        table = lookup.get("numbers", ["2"])
    assert (found["key"], found["score"], found["features"]) == ("2", 4.0, {"score": 4.0})
    assert table.column("score").to_pylist() == [4.0]


def test_search_by_key_leaves_the_key_out_and_is_narrowed(
    published: Scene, capsys: Captured
) -> None:
    assert published.cli("search", "numbers", "--key", "1", "-k", "5", "--json") == 0
    found = report_of(capsys)
    assert (found["view"], found["snapshot"], found["metric"]) == ("numbers", 1, "l2")
    assert [(r["key"], r["score"]) for r in found["rows"]] == [("2", 4.0), ("3", 3364.0)]
    assert published.cli("search", "numbers", "--key", "3", "-k", "1") == 0
    assert re.fullmatch(r"3136\.0000  2  \(fresh, \d s old\)\n", capsys.readouterr().out)
    for options, keys in (
        (["--filter", '{"double": {"gt": 4}}'], ["3"]),
        (["--only", "3", "--only", "7"], ["3"]),
        (["--exclude", "2"], ["3"]),
    ):
        assert published.cli("search", "numbers", "--key", "1", "--json", *options) == 0
        assert [row["key"] for row in report_of(capsys)["rows"]] == keys


# ---- status, schema


def test_status_before_and_after_a_run(make_project: MakeProject, capsys: Captured) -> None:
    project = make_project(ROWS, project={"schedule": {"numbers": "0 2 * * *"}})

    def table(code: int) -> list[str]:
        assert project.cli("status") == code
        due = r"\d{4}-\d\d-\d\dT\d\d:\d\dZ"
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert re.search(due, lines[1])
        return [
            re.sub(r"fresh \d+ s 60 min \d+ s", "fresh AGE 60 min AGE", re.sub(due, "DUE", line))
            for line in lines
        ]

    assert table(1) == [
        "view status age ttl source snapshot rows coverage rejected gates online last run next due schedule",
        "numbers unpublished – 60 min – – – – – – – – DUE 0 2 * * *",
        "",
        "numbers: unpublished",
    ]
    assert project.cli("run", "numbers", "--json") == 0
    capsys.readouterr()
    assert table(0)[1:] == [
        "numbers fresh AGE 60 min AGE 1 3 100.0% 0 1 night yes published DUE 0 2 * * *"
    ]
    assert project.cli("status", "--json") == 0
    assert [(row["view"], row["attention"]) for row in report_of(capsys)] == [("numbers", [])]
    make_project([(1, 1.0), (1, 2.0)], project={"schedule": {"numbers": "0 2 * * *"}})
    assert project.cli("run", "numbers") == 1
    error = capsys.readouterr().err.removeprefix("precompute: ").strip()
    assert table(1)[1:] == [
        "numbers fresh AGE 60 min AGE 1 3 100.0% 0 1 night yes failed DUE 0 2 * * *",
        "",
        "numbers: the last run failed",
        f"numbers: {error}",
    ]
    assert project.cli("status", "--json") == 1
    assert [row["attention"] for row in report_of(capsys)] == [["the last run failed"]]


def test_schema_is_json_for_people_and_programs(published: Scene, capsys: Captured) -> None:
    assert published.cli("schema", "--json") == 0
    schemas = report_of(capsys)
    assert published.cli("schema") == 0
    assert json.loads(capsys.readouterr().out) == schemas
    assert set(schemas) == {"project", "view", "service", "report", "status"}
    (report,) = published.offline.view("numbers").runs.reports(1)
    jsonschema_rs.validate(schemas["report"], plain(report))
    assert published.cli("status", "--json") == 0
    jsonschema_rs.validate(schemas["status"], report_of(capsys))
    assert main(["schema", "--json"]) == 0  # editors have no project


# ---- exit statuses


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["lookup", "numbers"],
        ["search", "numbers", "--key", "1", "--filter", "{"],
        ["run", "numbers", "--snapshot", "1"],
    ],
)
def test_bad_usage_is_status_2_with_the_usage(
    published: Scene, capsys: Captured, command: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        published.cli(*command)
    assert caught.value.code == 2
    assert "usage: precompute" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (RequestError("x"), 2),
        (RequestError("x", status=503), 1),
        (SnapshotError("x"), 1),
        (GateError("x"), 3),
        (RejectedError("x"), 3),
        (OSError(errno.EMFILE, "x"), 1),
    ],
    ids=repr,
)
def test_an_error_has_its_exit_status(
    make_project: MakeProject,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
) -> None:
    def failing(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr("precompute.jobs.ops.status.project_status", failing)
    assert make_project(ROWS).cli("status", "--json") == status
    refusal = json.loads(capsys.readouterr().out)
    assert (refusal["error"]["kind"], refusal["exit_status"]) == (type(error).__name__, status)


# ---- as a process


LOUD = """
import os
from tests.models import Doubler

class Loud(Doubler):
    def compute(self, batch):
        print("said " * 40_000)
        os.system("echo said by a library")
        return super().compute(batch)
"""


@pytest.mark.parametrize("command", ["run numbers", "run --all"])
def test_what_a_model_prints_is_no_part_of_the_document(
    make_project: MakeProject, command: str
) -> None:
    project = make_project(ROWS, view={"model": {"use": "loud:Loud"}})
    (project.folder / "loud.py").write_text(LOUD)
    process = spawned("-c", str(project.home), *command.split(), "--json")
    assert process.returncode == 0, process.stderr
    assert isinstance(json.loads(process.stdout), dict)


def test_a_run_whose_output_nobody_reads_is_published(make_project: MakeProject) -> None:
    """As under ``| head -1``, and ``2>&1 | head -1``; there is no traceback."""
    project = make_project([(i, float(i)) for i in range(5)])
    command = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(project.folder)]
    for number, stderr in ((1, subprocess.STDOUT), (2, subprocess.PIPE)):
        process = subprocess.Popen(
            [*command, "run", "numbers", "--full"],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.close()
        with process:
            assert process.stderr is None or "Traceback" not in process.stderr.read()
        assert process.returncode == 0
        assert project.report().status == "published"
        assert project.served(range(5)) == (number, [2.0 * i for i in range(5)])


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    ("full", "status", "err"),
    [
        ("stderr", 0, None),
        ("stdout", 1, "stdout cannot be written: No space left on device; what the command did"),
    ],
)
def test_a_run_whose_output_goes_to_a_full_disk_is_published(
    make_project: MakeProject, options: list[str], full: str, status: int, err: str | None
) -> None:
    project = make_project([(1, 1.0)])
    command = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(project.folder)]
    with Path("/dev/full").open("w") as disk:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: disk}
        done = subprocess.run(
            [*command, "run", "numbers", *options], cwd=REPOSITORY, text=True, **streams
        )
    assert done.returncode == status
    assert err is None or err in done.stderr
    assert "Traceback" not in f"{done.stdout}{done.stderr}"
    assert project.served([1]) == (1, [2.0])


# ---- words


def test_a_row_in_words() -> None:
    row: dict[str, Any] = {
        "key": "7",
        "status": "stale",
        "source": "store",
        "age_s": 7200.0,
        "ttl_s": 3600.0,
        "snapshot": 3,
        "model": "0123456789abcdef",
        "features": {
            "n": None,
            "f": 0.123456789,
            "v": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            "l": ["a"],
        },
    }
    assert describe_row(row).splitlines() == [
        "7: stale from store, 2 h old of 60 min, snapshot 3, model 0123456789ab",
        "  n: None",
        "  f: 0.123457",
        "  v: [1, 2, 3, 4, 5, 6, …] (7)",
        "  l: [a] (1)",
    ]
    missing = {"key": "7", "status": "missing", "reason": "expired"}
    assert describe_row(missing) == "7: missing (expired)"


def test_a_report_in_words() -> None:
    counts = {"source": 1200, "written": 100, "rejected": 0, "unchanged": 1100, "removed": 3}
    report = Report("run", "v", "run", "published", snapshot=3, counts=counts, seconds=2.0)
    report.add("open", 0.1)
    back = replace(report, command="rollback")
    assert describe_report(back).startswith("v: rolled back, snapshot 3 is live, 1,200 of 1,200")
    report = replace(
        report,
        status="refused",
        partition="2026-01-01T00:00Z/2026-01-02T00:00Z",
        resumed=40,
        gates=[
            Verdict("rows", True, 0.0, 0.2, "as before"),
            Verdict("zero", False, 0.5, 0.01, "50.0% are all zeros"),
        ],
    )
    assert describe_report(report).splitlines() == [
        "v: refused, snapshot 3, partition 2026-01-01T00:00Z/2026-01-02T00:00Z, 1,200 of 1,200 rows (1,100 unchanged, 3 removed, "
        "40 resumed), 2.0 s",
        "  seconds: open 0.10",
        "  gate zero: 50.0% are all zeros (limit 0.01)",
    ]


def test_a_log_of_json_has_the_runs_id_on_each_of_its_lines(make_project: MakeProject) -> None:
    bad = {
        "model": {"use": "tests.models:Doubler", "args": {"nan_on": 30.0}},
        "max_rejected": 0.0,
    }
    project = make_project(ROWS, view=bad)
    done = spawned("-c", str(project.home), "run", "numbers", "--full", PRECOMPUTE_LOG="json")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"at", "level", "logger", "message", "pid"} <= set.intersection(
        *(set(line) for line in lines)
    )
    run = project.offline.view("numbers").runs.reports(1)[0].run
    assert [line["message"] for line in lines if line.get("run") == run], done.stderr
    assert done.returncode == 3
    assert (lines[-1]["level"], lines[-1]["logger"]) == (
        "ERROR",
        "precompute.jobs.run.command_process",
    )
    assert "rejected" in lines[-1]["message"]
    # what is no run's is, too
    process = spawned("-c", str(project.home), "run", "--nonsense", PRECOMPUTE_LOG="json")
    messages = " ".join(json.loads(line)["message"] for line in process.stderr.splitlines())
    assert "error: no option '--nonsense'" in messages


def test_a_second_rollback_names_where_it_would_go(
    make_project: MakeProject, capsys: Captured
) -> None:
    for factor in (1.0, 10.0, 100.0):
        project = make_project([(1, factor), (2, 2 * factor)])
        project.run()
    assert project.cli("rollback", "numbers") == 0
    ref = project.live()
    capsys.readouterr()
    assert project.cli("rollback", "numbers") == 2
    assert capsys.readouterr().err == (
        "precompute: view 'numbers': snapshot 2 is live since the rollback from 3 at"
        f" {shown_time(ref.at)}. To leave it too, mark it bad and go back to snapshot 1: precompute"
        " rollback numbers --to 1; shown by: precompute history numbers\n"
    )
    assert project.live() == ref
    assert set(project.store.log.bad()) == {3}
    assert project.cli("rollback", "numbers", "--to", "1") == 0
    assert (project.live().snapshot, set(project.store.log.bad())) == (1, {2, 3})


# ---- what all commands have in common


def test_the_nearest_project_is_found(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    project = make_project(ROWS)
    assert main(["status"]) == 2
    assert "which project? There is no project.yaml here or above" in capsys.readouterr().err
    for folder in (project.folder, project.folder / "views", project.folder / "deep" / "er"):
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        assert main(["run", "numbers"]) == 0
        assert main(["lookup", "numbers", "1"]) == 0
    # what is named comes first, and the environment before what is found
    monkeypatch.setenv("PRECOMPUTE_CONFIG", "nowhere")
    assert main(["status"]) == 2
    assert main(["-c", str(project.folder), "status"]) == 0
    assert project.numbers() == [1]


def test_a_project_above_that_is_anothers_is_not_run(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    project = make_project(ROWS)
    monkeypatch.chdir(project.folder / "views")
    if os.geteuid() == 0:
        os.chown(project.folder / "project.yaml", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert main(["run", "numbers"]) == 2
    assert (
        f"project.yaml belongs to another user: if it is the one, name it, -c {project.folder}"
        in capsys.readouterr().err
    )
    # where one stands, one is meant to
    monkeypatch.chdir(project.folder)
    assert main(["run", "numbers"]) == 0


def test_the_folder_stands_before_or_after_the_command(make_project: MakeProject) -> None:
    folder = str(make_project(ROWS).folder)
    for command in (
        ["-c", folder, "run", "numbers"],
        ["run", "-c", folder, "numbers"],
        ["status", "--config", folder],
    ):
        assert main(command) == 0
    # the last one counts
    assert main(["-c", "nowhere", "status", "-c", folder]) == 0


REFUSALS = [
    (["run", "numbrs"], 2, "ConfigError", "did you mean 'numbers'"),
    (
        ["lookup", "numbers", "1"],
        1,
        "RequestError|OnlineStoreError|SnapshotError|ConfigError",
        "precompute run numbers",
    ),
    (["search", "numbers"], 2, "BadUsage", "--key --text is required"),
    (["profile", "numbers", "--rows", "0"], 2, "ConfigError", "--rows: 0: at least 1"),
    (["pin", "numbers"], 2, "ConfigError", "never published"),
    (["token", "me"], 2, "ConfigError", "serve.tokens"),
    (["serve", "--workers", "0"], 2, "ConfigError", "--workers"),
    (["explain", "numbers", ""], 1, "", ""),
    (["nonsense"], 2, "BadUsage", "no command 'nonsense' (there are: validate, run, "),
    (["rnu"], 2, "BadUsage", "no command 'rnu'; did you mean 'run'?"),
    (["run", "numbers", "--ful"], 2, "BadUsage", "no option '--ful'; did you mean '--full'?"),
    (
        ["search", "numbers", "--texxt=a b"],
        2,
        "BadUsage",
        "no option '--texxt'; did you mean '--text'?",
    ),
    (["--json", "status"], 2, "BadUsage", "no option '--json': it stands after COMMAND"),
    (["token", "me", "--scope", "reed"], 2, "BadUsage", "no scope 'reed'; did you mean 'read'?"),
    (["diff"], 2, "ConfigError", "view 'numbers': nothing of it is live"),
    (["log"], 2, "ConfigError", "no view has a run yet"),
    (["publish", "numbers", "--snapshot", "x"], 2, "BadUsage", "invalid int"),
]


@pytest.mark.parametrize(
    ("command", "code", "kind", "message"),
    REFUSALS,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_refusal_is_one_json_document(
    make_project: MakeProject,
    capsys: Captured,
    command: list[str],
    code: int,
    kind: str,
    message: str,
) -> None:
    folder = make_project(ROWS).folder
    try:
        ended = main(["-c", str(folder), *command, "--json"])
    except SystemExit as exc:
        ended = exc.code  # type: ignore[assignment]
    out = capsys.readouterr().out
    assert ended == code
    assert out.count("\n") == 1
    document = json.loads(out)
    if "error" in document and isinstance(document["error"], dict):
        assert document["exit_status"] == code
        assert document["error"]["kind"] in kind.split("|") or not kind
        assert message in document["error"]["message"]
    else:
        # a run that failed has its report
        assert message in document["error"]


# ---- completion


def test_words_are_completed(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(make_project(ROWS, views={"letters": {}}).folder)
    commands = _parser().commands
    assert commands is not None
    for words, found in (
        ([""], list(commands.shown())),
        (["pro"], ["profile"]),
        (["run", "num"], ["numbers"]),
        (["run", "numbers", ""], ["letters", "numbers"]),
        (["run", "--full", "l"], ["letters"]),
        (["run", "--re"], ["--retry-rejected"]),
        (["validate", "numbers", "l"], ["letters"]),
        (["lookup", "numbers", "1", ""], []),
        (["-c", "elsewhere", "run", ""], []),
        (["run", "-c", ""], []),
        (
            ["backfill", "numbers", "--reprocess", ""],
            ["missing", "failed", "refused", "stale", "all"],
        ),
        (["completion", "z"], ["zsh"]),
        (["--v"], ["--version"]),
        (["nonsense", "x"], []),
    ):
        assert main(["completion", "bash", "--", *words]) == 0
        assert capsys.readouterr().out.split() == found, words


@pytest.mark.parametrize("shell", SHELLS)
def test_what_a_shell_reads_completes_in_it(
    make_project: MakeProject, capsys: Captured, tmp_path: Path, shell: str
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "precompute completion " + shell in script
    if shell != "bash" or shutil.which("bash") is None:
        return
    command = tmp_path / "bin" / "precompute"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m precompute.jobs.cli "$@"\n')
    command.chmod(0o755)
    typed = f'{script}\nCOMP_WORDS=(precompute run num); COMP_CWORD=2; _precompute; echo "${{COMPREPLY[@]}}"'
    environment = os.environ | {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{REPOSITORY}",
    }
    done = subprocess.run(
        ["bash", "-c", typed],
        cwd=make_project(ROWS).folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "numbers\n"
