"""Run: killed anywhere, twice at once, on a disk that refuses. The old rows are served until the
new ones are, and the next run heals."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from benchmarks.store_history import add_past
from precompute.jobs.run.judge.neighbours import MOST_PARTITIONS
from precompute.jobs.run.report import close_dead, reporting_run
from precompute.store.disk.lease import Lease, take
from precompute.store.disk.record import replace
from precompute.store.errors import (
    ConflictError,
    FencedError,
    ModelError,
    SourceError,
)
from precompute.store.offline.gc import SWEPT_FOLDERS
from precompute.store.offline.log import STATE_EVERY, run_lease
from precompute.store.offline.runs import Journals
from precompute.store.times import containing
from tests import REPOSITORY
from tests.fixtures import MakeProject, Prepared
from tests.scene import Scene

KEYS = (1, 2, 3, 4, 5)
OLD, NEW = [2.0, 4.0, 6.0, 8.0, 10.0], [20.0, 40.0, 60.0, 80.0, 100.0]

DYING = """
import importlib, os, signal, sys
import precompute.jobs.run.rows.chunks
from precompute.jobs.cli import main

where, when, *command = sys.argv[1:]
module, _, path = where.partition(":")
owner = importlib.import_module(module)
*owners, name = path.split(".")
for part in owners:
    owner = getattr(owner, part)
original = getattr(owner, name)

def dying(*arguments, **named):
    if when == "after":
        original(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, name, dying)
precompute.jobs.run.rows.chunks.WINDOW_ROWS, precompute.jobs.run.rows.chunks.PART_BYTES = 2, 1
sys.exit(main(command))
"""


def options(online: str = "table:./online", **args: Any) -> dict[str, Any]:
    view = {
        "index": {"on": "vector", "metric": "l2"},
        "model": {"use": "tests.models:Doubler", "args": args},
    }
    return {"project": {"online": online}, "view": view}


def rows(factor: float = 1.0) -> list[tuple[int, float]]:
    return [(key, key * factor) for key in KEYS]


def published(make_project: MakeProject) -> Scene:
    """:data:`OLD` is served."""
    project = make_project(rows(), **options())
    project.run()
    return project


def served(project: Scene) -> list[float | None]:
    """The doubles of all keys, checked to agree with the neighbours that a search gives."""
    with project.lookup() as lookup:
        table = lookup.get("numbers", KEYS)
        assert len(set(table["snapshot"].to_pylist())) == 1
        doubles: list[float | None] = table["double"].to_pylist()
        x = (doubles[2] or 0.0) / 2
        found = lookup.search("numbers", vector=[x, x + 1, x + 2, x + 3], k=1, features=["double"])
        assert [(r["key"], r["features"]["double"]) for r in found["rows"]] == [("3", doubles[2])]
        assert found["snapshot"] == table["snapshot"][0].as_py()
        return doubles


def killed(project: Scene, where: str, when: str) -> None:
    command = [
        sys.executable,
        "-c",
        DYING,
        where,
        when,
        "-c",
        str(project.folder),
        "run",
        "numbers",
    ]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert process.returncode == -9, process.stderr


# ---- kill -9


def test_a_killed_runs_report_says_running_until_the_next_run_closes_it(
    make_project: MakeProject,
) -> None:
    make_project(rows(), **options()).run()
    project = make_project(rows(10), **options())
    killed(project, "precompute.store.offline.view_store:ViewStore.commit", "before")
    dead = project.report()
    assert (dead.status, dead.error, dead.finished_at) == ("running", None, "")
    assert project.cli("publish", "numbers") == 0  # is no run, and closes none
    reports = {report.run: report for report in project.store.runs.reports()}
    assert reports[dead.run] == dead
    project.run()
    reports = {report.run: report for report in project.store.runs.reports()}
    closed = reports[dead.run]
    assert (closed.status, closed.error) == ("killed", "killed: it died without reporting why")
    assert closed.finished_at > closed.started_at
    assert project.report().status == "published"


# ---- two at once


@pytest.fixture
def running(make_project: MakeProject) -> Iterator[tuple[Scene, subprocess.Popen[str]]]:
    """A run of its own process that takes its time."""
    project = make_project(rows(), **options(sleep_s=60))
    command = [
        sys.executable,
        "-m",
        "precompute.jobs.cli",
        "-c",
        str(project.folder),
        "run",
        "numbers",
    ]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert select.select([process.stderr], [], [], 60)[0], "the run does not begin"
        assert process.stderr.readline() == "materialize numbers: 5 rows\n"
        yield project, process
    finally:
        process.kill()
        process.communicate()


def test_an_earlier_snapshot_can_be_published_while_a_run_goes_on(
    make_project: MakeProject,
) -> None:
    for factor in (1, 10):
        project = make_project(rows(factor), **options())
        project.run()
    with take(project.store.leases, run_lease(None), "a run that goes on"):
        assert project.publish(snapshot=1).snapshot == 1
    assert served(project) == OLD


LONG_QUERY = (
    "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE x > (SELECT count(*) FROM range(1000000) a, range(1000000) b "
    "WHERE (a.range * b.range) % 7 = 8)"
)
HUNG: list[dict[str, Any]] = [
    {"source": {"sql": LONG_QUERY}},
    *(
        {"model": {"use": "tests.precompute.dying_models:Hanging", "args": {"how": how, "at": at}}}
        for how, at in (("unmoved", "load"), ("in_c", "compute"))
    ),
]


WITHIN = "from precompute.jobs.run import command_process; command_process.GRACE_S = {}; import sys; from precompute.jobs.cli import main; sys.exit(main())"


@pytest.mark.parametrize("view", HUNG)
def test_a_signal_ends_whatever_it_hangs_in(
    make_project: MakeProject, tmp_path: Path, view: dict[str, Any]
) -> None:
    """A query of minutes, a model that sleeps in C, one that takes every exception: long before
    they would end."""
    project = make_project(rows(), view=view)
    # one of those that do not end by themselves is given the time that they are in earnest
    start = (
        ["-c", WITHIN.format(0.3)]
        if view.get("model", {}).get("args", {}).get("how") == "in_c"
        else ["-m", "precompute.jobs.cli"]
    )
    process = subprocess.Popen(
        [sys.executable, *start, "-c", str(project.folder), "run", "numbers"],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stderr is not None
        if "model" in view:
            assert "hangs\n" in iter(process.stderr.readline, "")
        while not list(tmp_path.glob("precompute-duckdb-*")):  # the source is open
            time.sleep(0.05)
        time.sleep(
            0.5
        )  # until it is in the middle of it; where that takes longer, it is ended before
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, "Traceback" in err) == (143, False)
    assert "ended by SIGTERM" in err
    report = project.report()
    assert (report.status, report.error) == ("killed", "ended by SIGTERM")
    assert not list(project.store.leases.glob(".lease-*.held")), (
        "another machine need not wait for its silence"
    )


MUTE = """
import time
from precompute.jobs.run import command_process as termination

termination.GRACE_S = termination.LAST_WORDS_S = 0.1
with termination.ends_on_signal(), termination.last_words(lambda: time.sleep(600)):
    while True:
        try:
            print("up", flush=True)  # inside: the signal may come before the next line is reached
            time.sleep(600)
        except BaseException:
            pass
"""


def test_a_signal_ends_a_process_whose_last_words_hang() -> None:
    """As a report does that lies on a mount which does not answer."""
    process = subprocess.Popen(
        [sys.executable, "-c", MUTE],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert err == "precompute: ended by SIGTERM, and did not end within 0.1 s\n"


@pytest.mark.usefixtures("impatient")
def test_a_run_is_reported_as_running_while_it_goes_on(
    running: tuple[Scene, subprocess.Popen[str]],
) -> None:
    project, process = running
    report = project.report()
    assert report.status == "running"
    assert report.command == "run"
    assert report.pid == process.pid
    assert report.finished_at == ""
    assert project.store.running()
    with pytest.raises(ConflictError):
        project.run()
    assert project.report() == report  # a refused run closes no report of the one that goes on


def test_a_run_whose_lease_was_taken_commits_nothing(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_project(rows(), **options()).run()
    project = make_project(rows(10), **options())
    store = project.store
    taken: list[Lease] = []
    original = Journals.add

    def overtaken(*arguments: Any) -> None:
        original(*arguments)
        taken.append(take(store.leases, run_lease(None), "the next run", force=True))

    monkeypatch.setattr(Journals, "add", overtaken)
    with pytest.raises(FencedError, match="lost its lease 'run' to the next run"):
        project.run()
    monkeypatch.undo()
    taken[0].release()
    assert (store.numbers(), project.report().status) == ([1], "failed")
    assert served(project) == OLD
    assert project.run().snapshot == 2
    assert served(project) == NEW


# ---- reports


@pytest.mark.parametrize(
    ("changed", "args", "command", "status", "error"),
    [
        ([(1, 1.0)], {}, "run", "published", None),
        ([(1, 1.0)], {}, "materialize", "committed", None),
        ([(1, 1.0), (1, 2.0)], {}, "run", "failed", "unique"),
        ([(1, 7.0), (2, 7.0), (3, 1.0)], {"fail_on": 7}, "run", "rejected", "2 rows rejected"),
        ([(1, 1.0)], {"nonsense": 1}, "run", "failed", "nonsense"),
    ],
)
def test_every_run_leaves_a_report(
    make_project: MakeProject,
    capsys: pytest.CaptureFixture[str],
    changed: Any,
    args: dict[str, Any],
    command: str,
    status: str,
    error: str | None,
) -> None:
    project = make_project(changed, **options(**args))
    code = project.cli(command, "numbers", "--json")
    assert code == {"published": 0, "committed": 0, "rejected": 3}.get(
        status, 2 if "nonsense" in args else 1
    )
    reports = list((project.root / "numbers" / "runs").iterdir())
    assert len(reports) == 1
    report = json.loads(reports[0].read_text())
    (printed,) = capsys.readouterr().out.splitlines()  # of one that failed, too
    assert json.loads(printed).items() <= report.items()
    assert report["run"] == reports[0].stem
    assert report["view"] == "numbers"
    assert report["command"] == command
    assert report["status"] == status
    assert (report["error"] is None) if error is None else (error in report["error"])
    assert report["started_at"] < report["finished_at"]
    assert report["seconds"] >= sum(report["stages_s"].values()) - 0.01 * len(report["stages_s"])
    assert report["versions"]["python"] == sys.version.split()[0]


def test_a_time_of_the_schedule_is_run_for_until_a_run_of_it_is_done(
    make_project: MakeProject,
) -> None:
    due = "2024-02-29T00:00:00Z"
    with pytest.raises(SourceError):
        make_project(
            [(1, 1.0)], view={"source": {"sql": "SELECT 1 AS id, 1.0 AS x WHERE false"}}
        ).run(due=due)
    project = make_project([(1, 1.0)])
    retried = project.run(due=due)
    assert (retried.status, retried.due) == ("published", due)
    # what a scheduler that was killed began is not begun again
    assert project.run(due=due).run == retried.run
    assert [(report.status, report.due) for report in project.store.runs.reports()] == [
        ("published", due),
        ("failed", due),
    ]


# ---- a bad source leaves what is served


def test_an_error_that_no_terminal_takes_is_escaped_in_the_report(
    make_project: MakeProject,
) -> None:
    project = make_project([(1, 1.0)])
    with pytest.raises(ModelError), reporting_run(project.store, "run") as report:
        raise ModelError("no \ud800")
    assert report.error == "no \\ud800"
    assert project.cli("history", "numbers") == 0


@pytest.mark.parametrize(
    ("changed", "args", "code"),
    [
        (pa.table({"id": pa.array([], pa.int64()), "x": pa.array([], pa.float64())}), {}, 1),
        ([(1, 1.0), (1, 2.0)], {}, 1),
        ([(1, 7.0), (2, 7.0), (3, 1.0)], {"fail_on": 7}, 3),
        ([(1, 1.0)], {"dim": 3}, 1),
    ],
)
def test_a_run_that_fails_leaves_the_old_rows(
    make_project: MakeProject,
    prepared: Prepared,
    capsys: pytest.CaptureFixture[str],
    changed: Any,
    args: dict[str, Any],
    code: int,
) -> None:
    prepared(published)
    project = make_project(changed, **options(**args))
    assert project.cli("run", "numbers") == code
    err = capsys.readouterr().err
    assert "precompute: " in err
    assert "Traceback" not in err
    assert served(project) == OLD


# ---- a disk that refuses


def blocked_by_a_file(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")


def blocked_by_a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    (path / "in the way").mkdir(parents=True)


FILES = (
    "var",
    "var/numbers",
    *(f"var/numbers/{name}" for name in ("data", "manifests", "notes", "log", "runs", "index")),
)
LEASES = ("notes/lease-run.json", "notes/lease-publish.json")
FOLDERS = tuple(f"var/numbers/{name}" for name in (*LEASES, "notes/.lock", f"log/{2:020d}.json"))
BLOCKS = [
    *((name, blocked_by_a_file) for name in (*FILES, "online", "online/numbers")),
    *(
        (name, blocked_by_a_folder)
        for name in (*FOLDERS, "online/numbers/.lock", "online/numbers/live.json")
    ),
]


@pytest.mark.parametrize(("where", "block"), BLOCKS)
def test_whatever_cannot_be_written_ends_in_a_message(
    make_project: MakeProject,
    prepared: Prepared,
    capsys: pytest.CaptureFixture[str],
    where: str,
    block: Any,
) -> None:
    prepared(published)
    project = make_project(rows(10), **options())
    block(project.folder / where)
    assert project.cli("run", "numbers") == 1
    err = capsys.readouterr().err
    assert f"{project.folder}/{where.split('/')[0]}" in err.partition("precompute: ")[2]
    if not where.startswith("online"):
        lookup = project.open_lookup()
        found = lookup.get("numbers", KEYS)["double"].to_pylist()
        lookup.close()
        assert found == OLD


@pytest.mark.parametrize(("where", "block"), [b for b in BLOCKS if "lock" not in b[0]])
@pytest.mark.parametrize("command", [["status"], ["lookup", "numbers", "1"]])
def test_whatever_cannot_be_read_ends_in_a_message(
    prepared: Prepared,
    capsys: pytest.CaptureFixture[str],
    where: str,
    block: Any,
    command: list[str],
) -> None:
    project = prepared(published)
    block(project.folder / where)
    code = project.cli(*command)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if command == ["status"]:
        assert captured.out.splitlines()[1].startswith("numbers ")
        # it looks at all of them but the reports, which are skipped
        assert code == (0 if where == "var/numbers/runs" else 1)
    else:
        assert code == (1 if where.startswith("online") else 0)
        assert captured.err.startswith("precompute: ") == (code != 0)


def test_a_full_disk_at_any_moment_ends_in_a_message(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit on a file's size stands for the disk: each larger one lets the run come further."""
    many = [(i, -float(i)) for i in range(6, 3000)]
    make_project([*rows(), *many], **options()).run()
    project = make_project([*rows(10), *((i, 1.0001 * x) for i, x in many)], **options())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    codes, messages = [], set[str]()
    for limit in (0, 300, 2_000, 20_000, 50_000, 100_000, 150_000, 10_000_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            codes.append(project.cli("run", "numbers", "--json"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        err = capsys.readouterr().err
        assert served(project) == (NEW if codes[-1] == 0 else OLD)
        if codes[-1]:
            assert "untouched" in err
            messages.add(err.partition(str(project.folder))[2].split("/")[1])
        assert not [p for p in project.folder.rglob("*") if ".tmp" in p.name]
    assert codes == [1] * 7 + [0]
    assert messages == {"var", "online"}


# ---- exit statuses


def test_rows_rejected_below_the_threshold_are_status_0_and_counted(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_project([(1, 7.0), (2, 1.0), (3, 1.0)], **options(fail_on=7))
    assert project.cli("run", "numbers") == 0
    assert "2 of 3 rows (1 rejected)" in capsys.readouterr().out


# ---- a long past


def looked_at(project: Scene, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """Files that a run read, and folders it looked through, under the view's folder."""
    seen: list[str] = []
    folder = str(project.root / "numbers")
    read_bytes, iterdir = Path.read_bytes, Path.iterdir

    def noted(path: Path) -> Path:
        if str(path).startswith(folder):
            seen.append(str(path))
        return path

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: read_bytes(noted(path)))
        patch.setattr(Path, "iterdir", lambda path: iterdir(noted(path)))
        assert project.run(**options).status in ("published", "committed")
    return seen


def test_a_run_reads_as_much_after_many_snapshots_as_after_two(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests, reports and folders: what is read is what is needed, and 64 folders to be looked
    through in turn."""
    project = make_project([(i, float(i)) for i in range(3)])
    first = project.run().snapshot
    assert first is not None
    store = project.store
    few: list[str] = []
    for past in (1, 200):
        add_past(store, store.snapshot(first), past, partitions=False)
        first = store.numbers()[-1]
        for step in (0.1, 0.2):  # the first one learns what it did not know of
            project = make_project([(i, i + past + step) for i in range(3)])
            seen = looked_at(project, monkeypatch)
        few = few or seen
    folders = {path for path in seen if Path(path).parent.name == "data"}
    assert len(folders) <= SWEPT_FOLDERS + 2
    # of the log as many events as one state is written down after
    events = {path for path in seen if Path(path).parent.name == "log"}
    assert len(events) <= STATE_EVERY + 3
    assert len(seen) - len(folders) - len(events) <= len(few)


def test_the_runs_of_many_partitions_do_not_read_all_manifests(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = {
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet') WHERE $start < $end"},
        "partition": {"by": "day", "start": "2010-01-01"},
    }
    project = make_project([(i, float(i)) for i in range(3)], view=view)
    store = project.store
    first = project.run().snapshot
    assert first is not None
    add_past(store, store.snapshot(first), 60, partitions=True)
    store.catalog()
    for day in (100, 101):
        partition = containing("day", datetime(2010, 1, 1, tzinfo=UTC) + timedelta(days=day))
        last = store.numbers()[-1]
        seen = looked_at(project, monkeypatch, command="materialize", partition=partition)
        # what was computed last says by which code, the days before what is usual; another day is
        # beside what readers have
        read = [int(Path(path).stem) for path in seen if "manifests" in path]
        days = [*range(last, last - MOST_PARTITIONS, -1)]
        assert read == [last, *days, first, first]


def test_reports_of_dead_runs_are_found_without_reading_the_others(
    make_project: MakeProject,
) -> None:
    project = make_project([(1, 1.0)])
    project.run()
    store = project.store
    ended = store.runs.last()
    assert ended is not None
    # of this process's own number, as every command of a container may have
    dead = replace(ended, run="20000101T000000.000000Z-abcdef", status="running", pid=os.getpid())
    store.runs.write(dead)
    for number in range(20):  # much later ones, of which not one is looked at
        later = f"30000101T{number:06d}.000000Z-abcdef"
        (project.root / "numbers" / "runs" / f"{later}.json").write_text("{")
    assert store.runs.unended() == [dead]
    assert close_dead(store, None, own=dead.run) == []
    assert close_dead(store, None) == [dead.run]
    assert store.runs.unended() == []
    assert list((project.root / "numbers" / "notes" / "running").iterdir()) == []
