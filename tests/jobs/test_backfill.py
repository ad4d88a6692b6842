"""Backfill: what is planned and why, that slots are refilled, that nothing is computed twice, and
that a killed one goes on. Real processes; a model that waits for a file says when each goes on."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.jobs.schedule.backfill import resume_backfill, run_backfill
from precompute.jobs.schedule.backfill_plan import (
    Options,
    plan_backfill,
    range_of,
    read_backfill,
)
from precompute.store.disk.lease import take
from precompute.store.errors import ConfigError, ConflictError, SnapshotError, SourceError
from precompute.store.offline.log import Hold, run_lease
from precompute.store.offline.runs import Report
from precompute.store.offline.standing import Standing
from precompute.store.times import Partition, containing
from precompute.workers.process import ChildProcess
from tests import REPOSITORY
from tests.fixtures import MakeProject
from tests.scene import Scene
from tests.server import eventually

KEYS = (1, 2, 3)
SQL = (
    "SELECT id, x, day FROM read_parquet('${data}/data.parquet') WHERE day >= $start AND day < $end"
)
NOW = dt.datetime(2024, 3, 1, tzinfo=dt.UTC)


MODEL = '''
import signal
import time
from pathlib import Path

from tests.models import Doubler


class Gated(Doubler):
    """Leaves begun-<day> in a folder, and goes on once go-<day> or go is there; without the folder it never waits."""

    def __init__(self, path, deaf=False, pause_s=0.0, **args):
        super().__init__(**args)
        self._path, self._pause_s = Path(path), pause_s
        if deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def compute(self, batch):
        day = batch.column("day")[0].as_py().day
        time.sleep(self._pause_s)
        if self._path.is_dir():
            (self._path / f"begun-{day}").touch()
        while self._path.is_dir() and not any((self._path / name).exists() for name in (f"go-{day}", "go")):
            time.sleep(0.02)
        return super().compute(batch)


class WithTable(Doubler):
    """Knows a table, which makes it another model."""

    def __init__(self, table):
        super().__init__()
'''
"""A file beside the views, so that a run loads no more than it needs."""


def day(number: int) -> dt.date:
    return dt.date(2024, 1, number)


def part(number: int) -> str:
    return str(containing("day", dt.datetime(2024, 1, number, tzinfo=dt.UTC)))


def rows_of(number: int) -> list[tuple[int, float, dt.date]]:
    """Every day has the same keys and another x."""
    return [(key, 10.0 * number + key, day(number)) for key in KEYS]


MakeDaily = Callable[..., Scene]


@pytest.fixture
def daily(make_project: MakeProject, tmp_path: Path) -> MakeDaily:
    """Makes a project whose view ``numbers`` is partitioned by day from 2024-01-01, over ``days``
    and extra rows; ``args`` of the model. The gate is shut if ``tmp_path / "gate"`` is there."""

    def make(
        days: Sequence[int] = (),
        extra: Sequence[tuple[int, float | None, dt.date]] = (),
        view: dict[str, Any] | None = None,
        **args: Any,
    ) -> Scene:
        rows = [*(row for number in days for row in rows_of(number)), *extra]
        table = pa.table(
            {
                "id": pa.array([r[0] for r in rows], pa.int64()),
                "x": pa.array([r[1] for r in rows], pa.float64()),
                "day": pa.array([r[2] for r in rows], pa.date32()),
            }
        )
        folder = tmp_path / "project"
        folder.mkdir(exist_ok=True)
        (folder / "gated_model.py").write_text(MODEL)
        settings = {
            "source": {"sql": SQL},
            "model": {"use": "gated_model:Gated", "args": {"path": str(tmp_path / "gate"), **args}},
            "partition": {"by": "day", "column": "day", "start": "2024-01-01"},
            "max_rejected": 0.4,
        }
        return make_project(table if rows else None, view=settings | (view or {}))

    return make


class Gate:
    """The folder the model waits at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def begun(self) -> set[int]:
        return {int(path.name.partition("-")[2]) for path in self.folder.glob("begun-*")}

    def open(self, number: int | None = None) -> None:
        (self.folder / ("go" if number is None else f"go-{number}")).touch()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


class Command:
    """``precompute -c <project> …`` in a process of its own."""

    def __init__(self, project: Scene, *arguments: str) -> None:
        command = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(project.folder)]
        self.process = subprocess.Popen(
            [*command, *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def kill(self) -> None:
        self.process.kill()
        if not self.process.stdout.closed:  # type: ignore[union-attr]
            self.process.communicate(timeout=60)


@pytest.fixture
def command(gate: Gate) -> Iterator[Callable[..., Command]]:
    """Starts ``backfill numbers …``; at the end of the test everything is killed, or let go."""
    started: list[Command] = []

    def start(project: Scene, *arguments: str) -> Command:
        started.append(Command(project, *arguments))
        return started[-1]

    yield start
    gate.open()
    for one in started:
        one.kill()


Start = Callable[..., Command]


def ids(project: Scene) -> list[str]:
    return sorted(path.stem for path in (project.root / "numbers" / "backfills").glob("*.json"))


def await_begun(gate: Gate, *days: int) -> None:
    eventually(lambda: set(days) <= gate.begun(), lambda: f"{gate.begun()}", 60)


def await_free(project: Scene, *days: int) -> None:
    store = project.store
    eventually(lambda: not any(store.running(part(n)) for n in days), seconds=60)


def committed(project: Scene) -> list[str]:
    """Partition of every run that committed rows, in that order: what is compared later has another
    manifest of the same run."""
    snapshots = map(project.store.snapshot, project.store.numbers())
    return list({snapshot.run: str(snapshot.partition) for snapshot in snapshots}.values())


def live(project: Scene) -> str | None:
    store = project.store
    ref = store.log.live()
    return None if ref is None else store.snapshot(ref.snapshot).partition


def check_rows(project: Scene, *days: int) -> None:
    """Every partition's newest snapshot holds exactly its rows."""
    store = project.store
    for number in days:
        snapshot = Standing(store).newest(part(number))
        assert snapshot is not None, number
        found = {
            row["id"]: row["double"]
            for batch in store.batches(snapshot)
            for row in batch.to_pylist()
        }
        assert found == {key: 2 * x for key, x, _ in rows_of(number)}, number


def compute(project: Scene, number: int, command: str = "materialize") -> int | None:
    return project.run(command=command, partition=Partition.parse(part(number))).snapshot


def plans(
    project: Scene, first: int = 1, last: int = 6, **requested: Any
) -> list[tuple[int, str, str]]:
    found = plan_backfill(
        project, "numbers", *range_of(str(day(first)), str(day(last))), now=NOW, **requested
    )
    return [(plan.partition.start.day, plan.action, plan.why) for plan in found]


def backfill(first: int, last: int, *more: str) -> list[str]:
    """The command's arguments."""
    return ["backfill", "numbers", "--from", str(day(first)), "--to", str(day(last)), *more]


def options(first: int, last: int, **requested: Any) -> Options:
    return Options(str(day(first)), str(day(last)), **requested)


# ---- the plan


@pytest.fixture
def mixed(daily: MakeDaily) -> Iterator[Scene]:
    """Day 1 done, 2 never run, 3 failed, 4 interrupted, 5 computed by another model, 6 running, 7
    killed after an older snapshot."""
    days = (1, 2, 3, 4, 5, 6, 7)
    project = daily(days, version=1)
    compute(project, 5)
    project = daily(days, extra=[(1, -1.0, day(3))], version=2)
    compute(project, 1)
    with pytest.raises(SourceError, match="more than one row"):
        compute(project, 3)
    compute(project, 7)
    store = project.store
    for number in (4, 7):
        run = f"20990101T00000{number}.000000Z-abcdef"
        store.runs.write(Report(run, "numbers", "materialize", pid=1, partition=part(number)))
    with take(store.leases, run_lease(part(6)), "test"):
        yield project


@pytest.mark.parametrize(
    ("reprocess", "run"),
    [
        ("missing", {2, 4}),
        ("failed", {2, 3, 4, 7}),
        ("stale", {2, 3, 4, 5, 7}),
        ("all", {1, 2, 3, 4, 5, 7}),
    ],
)
def test_every_partition_is_planned_with_its_reason(
    mixed: Scene, reprocess: str, run: set[int]
) -> None:
    states = ["done", "missing", "failed", "missing", "stale-model", "running", "failed"]
    whys = {n: state.replace("-", " ") for n, state in enumerate(states, 1)}
    if reprocess == "all":
        whys[1] = "forced"
    expected = [
        (n, "wait" if n == 6 else "run" if n in run else "skip", why) for n, why in whys.items()
    ]
    assert plans(mixed, last=7, reprocess=reprocess) == expected


def again(at: str, reprocess: str) -> str:
    return (
        f"to compute it again: precompute backfill numbers --from {at}T00:00Z --to {at}T00:00Z"
        f" --reprocess {reprocess}"
    )


def test_a_dry_run_tells_reasons_and_what_takes_the_rest(
    mixed: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(mixed.root.rglob("*"))
    arguments = backfill(1, 7, "--dry-run")
    assert mixed.cli(*arguments) == 0
    lines = {
        line[:10]: line for line in capsys.readouterr().out.splitlines() if line.startswith("2024")
    }
    assert list(lines) == [str(day(n)) for n in range(1, 8)]
    assert "done: snapshot 2" in lines["2024-01-01"]
    assert "missing: no snapshot" in lines["2024-01-02"]
    assert "keys with more than one row" in lines["2024-01-03"]
    assert again("2024-01-03", "failed") in lines["2024-01-03"]
    assert "its last run was killed" in lines["2024-01-04"]
    assert again("2024-01-05", "stale") in lines["2024-01-05"]
    assert "running" in lines["2024-01-06"]
    killed = "was killed; snapshot 3 is older; " + again("2024-01-07", "failed")
    assert killed in lines["2024-01-07"]
    more = ["--json", "--reprocess", "all", "--max-active", "2", "--backwards"]
    assert mixed.cli(*arguments, *more) == 0
    found = json.loads(capsys.readouterr().out)
    assert [p["partition"] for p in found["partitions"]] == [part(n) for n in range(7, 0, -1)]
    assert (found["run"], found["skip"], found["wait"], found["rows"]) == (6, 0, 1, 18)
    assert sorted(mixed.root.rglob("*")) == before


def test_other_sql_makes_partitions_stale_changed_input_only_on_request(daily: MakeDaily) -> None:
    project = daily((1, 2))
    for number in (1, 2):
        compute(project, number)
    assert plans(project, last=2, check_inputs=True) == [(1, "skip", "done"), (2, "skip", "done")]
    project = daily((1,), extra=[(1, 0.5, day(2)), (2, 22.0, day(2)), (3, 23.0, day(2))])
    assert plans(project, last=2, reprocess="stale") == [(1, "skip", "done"), (2, "skip", "done")]
    requested = plans(project, last=2, reprocess="stale", check_inputs=True)
    assert requested == [(1, "skip", "done"), (2, "run", "stale input")]
    project = daily((1, 2), view={"source": {"sql": SQL + " AND true"}})
    assert plans(project, last=2, reprocess="stale") == [
        (1, "run", "stale recipe"),
        (2, "run", "stale recipe"),
    ]


def test_model_tables_that_depend_on_the_partition_are_read_for_each(daily: MakeDaily) -> None:
    model = {"use": "gated_model:WithTable", "args": {"table": {"sql": SQL}}}
    project = daily((1, 2), view={"model": model})
    for number in (1, 2):
        compute(project, number)
    assert plans(project, last=2) == [(1, "skip", "done"), (2, "skip", "done")]
    project = daily(
        (1,), extra=[(1, 0.5, day(2)), (2, 22.0, day(2)), (3, 23.0, day(2))], view={"model": model}
    )
    assert plans(project, last=2) == [(1, "skip", "done"), (2, "skip", "stale model")]


def test_estimates_follow_what_was_measured(daily: MakeDaily) -> None:
    project = daily((1, 2, 3), extra=[(key, 1000.0 + key, day(3)) for key in range(10, 17)])
    first, last = range_of("2024-01-01", "2024-01-06")

    def estimates() -> dict[int, tuple[Any, Any, Any]]:
        found = plan_backfill(project, "numbers", first, last, now=NOW, reprocess="all")
        return {
            plan.partition.start.day: (plan.rows, plan.seconds, plan.size_bytes) for plan in found
        }

    assert set(estimates().values()) == {(None, None, None)}
    for number in (1, 3):
        compute(project, number)
    found = estimates()
    assert [rows for rows, _, _ in found.values()] == [3, 6, 10, 6, 6, 6]
    store = project.store
    size = sum(p.size_bytes for n in (1, 2) for p in store.snapshot(n).parts)
    assert {found[n][2] for n in (2, 4)} == {-(-6 * size // 13)}
    assert 0 < found[1][1] < found[2][1] < found[3][1] < 60


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        ("2023-12-01", "2024-01-02", [1, 2]),  # the view begins on the 1st
        ("2024-01-02T23:59", "2024-01-03T00:00", [2, 3]),
        ("2024-01-30", "2024-05-01", [30, 31]),  # February has begun
    ],
)
def test_the_range_is_cut_to_what_there_is(
    daily: MakeDaily, first: str, last: str, expected: list[int]
) -> None:
    now = dt.datetime(2024, 2, 1, 12, tzinfo=dt.UTC)
    found = plan_backfill(daily((1,)), "numbers", *range_of(first, last), now=now)
    assert [plan.partition.start.day for plan in found] == expected


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        ("2024-01-03", "2024-01-02", "the end is before the beginning"),
        ("2023-01-01", "2023-12-31", "its first one begins at 2024-01-01"),
        ("2024-03-01", "2024-03-05", "is over yet.*until 2024-03-02T00:00Z"),
        ("9999-12-31", "9999-12-31", "is over yet"),
        ("yesterday", "2024-01-01", "--from: 'yesterday': write a date"),
        ("2024-01-01", "0001-01-01T00:00+09:00", "--to: '0001"),
    ],
)
def test_a_range_without_partitions_is_refused_in_words(
    daily: MakeDaily, first: str, last: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        plan_backfill(daily((1,)), "numbers", *range_of(first, last), now=NOW)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--from", "2024-01-01"], "Give --from and --to"),
        (["--from", "2024-01-01", "--to", "2024-01-02", "--max-active", "0"], "at least 1"),
        (["--resume", "x", "--from", "2024-01-01"], "--from: a resumed backfill"),
        (["--resume", "x", "--check-inputs"], "--check-inputs: a resumed"),
        (["--resume", "nothing"], "has no backfill 'nothing'"),
    ],
)
def test_bad_usage(
    daily: MakeDaily, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert daily((1,)).cli("backfill", "numbers", *arguments) == 2
    assert why in capsys.readouterr().err


# ---- the run


def test_the_oldest_comes_first_and_the_newest_goes_live(daily: MakeDaily) -> None:
    project = daily((1, 2))
    said: list[str] = []
    done = run_backfill(project, "numbers", options(1, 2), announce=said.append)
    assert (done.status, [item.state for item in done.items]) == ("done", ["done"] * 2)
    assert committed(project) == [part(1), part(2)]
    assert (live(project), done.published) == (part(2), 2)
    assert {entry.run for entry in project.store.log.publishings()} == {done.id}
    check_rows(project, 1, 2)
    lookup = project.open_lookup()
    table = lookup.get("numbers", KEYS, features=["double"])
    lookup.close()
    assert table.column("double").to_pylist() == [42.0, 44.0, 46.0]
    assert [line.split("  ")[0] for line in said[1:3]] == [f"2024-01-0{n}T00:00Z" for n in (1, 2)]
    assert "3 rows" in said[1]
    assert said[0].endswith("2 partitions, 1 at once")
    again = run_backfill(project, "numbers", options(1, 2))
    assert (again.status, again.items, len(committed(project))) == ("done", [], 2)


def test_backwards_begins_with_the_newest_and_no_publish_publishes_nothing(
    daily: MakeDaily, capsys: pytest.CaptureFixture[str]
) -> None:
    project = daily((1, 2))
    assert project.cli(*backfill(1, 2, "--backwards", "--no-publish", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["published"], found["not_published"]) == (
        "done",
        None,
        "--no-publish",
    )
    assert committed(project) == [part(2), part(1)]
    assert live(project) is None


def test_a_slot_is_refilled_as_soon_as_it_is_free(
    daily: MakeDaily, gate: Gate, command: Start
) -> None:
    project = daily((1, 2, 3))
    running = command(project, *backfill(1, 3, "--max-active", "2"))
    await_begun(gate, 1, 2)
    assert gate.begun() == {1, 2}
    gate.open(2)
    await_begun(gate, 3)  # while 1 goes on
    assert gate.begun() == {1, 2, 3}
    gate.open()
    status, _, err = running.end()
    assert (status, err) == (0, "")
    assert committed(project)[0] == part(2)
    assert sorted(committed(project)) == [part(1), part(2), part(3)]
    assert live(project) == part(3)


def test_a_failure_stops_no_other_and_is_tried_again_by_resume(
    daily: MakeDaily, capsys: pytest.CaptureFixture[str]
) -> None:
    project = daily((1, 2), extra=[(1, -1.0, day(1))])
    assert project.cli(*backfill(1, 2)) == 1
    said = capsys.readouterr().out
    assert "  2024-01-01T00:00Z  failed: view 'numbers': keys with more than one row" in said
    assert (committed(project), live(project)) == ([part(2)], part(2))
    (id,) = ids(project)
    assert f"--resume {id}" in said
    daily((1, 2))
    assert project.cli("backfill", "numbers", "--resume", id, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], [item["state"] for item in found["items"]]) == ("done", ["done"] * 2)
    assert committed(project) == [part(2), part(1)]
    assert live(project) == part(2)  # never backwards
    assert project.cli("backfill", "numbers", "--resume", id) == 0
    assert len(committed(project)) == 2


def test_what_fails_before_its_run_begins_is_reported_by_its_last_words(
    daily: MakeDaily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precompute.jobs.schedule.backfill.FIRST_GROUP", 1)
    project = daily((1, 2))

    def spoil(line: str) -> None:
        if line.startswith("2024-01-01"):
            (project.folder / "views" / "numbers.yaml").write_text("entity: 7\n")

    done = run_backfill(project, "numbers", options(1, 2), announce=spoil)
    assert [(item.state, item.run is None) for item in done.items] == [
        ("done", False),
        ("failed", True),
    ]
    error = str(done.items[1].error)
    assert error.startswith("its process exited with status 2: ")
    assert "numbers.yaml" in error
    assert "precompute: " not in error


def test_an_older_snapshot_is_not_the_outcome_of_a_run_that_never_began(
    daily: MakeDaily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes the partition's lease while this one's starts."""
    project, held = daily((1,)), contextlib.ExitStack()
    run_backfill(project, "numbers", options(1, 1))

    def taken_first(command: list[str], **options: Any) -> ChildProcess:
        monkeypatch.undo()
        held.enter_context(take(project.store.leases, run_lease(part(1)), "run"))
        return ChildProcess(command, **options)

    def announce(line: str) -> None:
        if "waits for a run" in line:
            held.close()

    monkeypatch.setattr("precompute.jobs.schedule.backfill.ChildProcess", taken_first)
    done = run_backfill(
        project, "numbers", options(1, 1, reprocess="all", full=True), announce=announce
    )
    assert project.store.runs.read(str(done.items[0].run)).backfill == done.id


def test_refused_partitions_are_not_failed_ones(
    daily: MakeDaily, capsys: pytest.CaptureFixture[str]
) -> None:
    view = {"gates": {"coverage": 1.0}}
    project = daily(
        (1, 2),
        extra=[(1, None, day(3)), (2, 32.0, day(3)), (3, 33.0, day(3))],
        view=view,
        nan_on=22.0,
        fail_on=23.0,
    )
    assert project.cli(*backfill(1, 3, "--json")) == 3
    found = json.loads(capsys.readouterr().out)
    assert [(item["state"], item["snapshot"]) for item in found["items"]] == [
        ("done", 1),
        ("refused", None),
        ("refused", 2),
    ]
    assert "2 rows rejected so far, 1 allowed" in found["items"][1]["error"]
    assert found["items"][2]["error"] == "coverage: 2 of 3 source rows have a value"
    assert (found["status"], live(project)) == ("failed", part(1))


def test_what_a_gate_refused_is_not_done_until_it_is_accepted(
    daily: MakeDaily, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor what failed, or had too many rows rejected, though a backfill leaves it as it is."""
    extra = [(1, None, day(3)), (2, 32.0, day(3)), (3, 33.0, day(3)), (1, -1.0, day(4))]
    project = daily(
        (1, 2, 4), extra=extra, view={"gates": {"coverage": 1.0}}, nan_on=22.0, fail_on=23.0
    )
    assert project.cli(*backfill(1, 4)) == 1
    assert [state for _, _, state in plans(project, last=4)] == [
        "done",
        "rejected",
        "refused",
        "failed",
    ]
    accepting = (
        "--from 2024-01-03T00:00Z --to 2024-01-03T00:00Z --reprocess refused --accept coverage"
    )
    for reprocess in ("missing", "failed", "refused"):
        capsys.readouterr()
        before = project.numbers()
        more = [] if reprocess == "missing" else ["--reprocess", reprocess]
        assert project.cli(*backfill(3, 3, *more)) == 3
        # judged again, and not computed again
        assert project.numbers() == before
        said = capsys.readouterr().out
        assert ("skipped: 1 refused" in said) == (reprocess != "refused")
        # once each: what the gate says, and what to type
        line = "  2024-01-03T00:00Z  refused: coverage: 2 of 3 source rows have a value\n"
        assert said.count(line) == said.count("coverage: ") == 1
        assert said.count("precompute backfill") == 1
        assert "of numbers: not all done (1 refused by gate coverage), " in said
        mended = accepting.removesuffix(" --accept coverage")
        assert (
            "what a gate refused is judged again, once source, model or limits are mended, by:"
            f" precompute backfill numbers {mended}; it counts as it is with --accept coverage"
            " behind that"
        ) in said
        assert "--resume" not in said
    assert project.cli(*backfill(1, 2)) == 3
    said = capsys.readouterr().out
    assert "skipped: 1 done, 1 rejected" in said
    ended = re.search(
        r"^backfill (\S+) of numbers: not all done \(1 with too many rows rejected\),", said, re.M
    )
    assert ended is not None
    assert (
        "what failed, or had too many rows rejected, is tried again, once that is mended, by:"
        f" precompute backfill numbers --resume {ended[1]}"
    ) in said
    assert "judged again" not in said
    assert project.cli(*backfill(1, 4)) == 1
    assert "skipped: 1 done, 1 rejected, 1 refused, 1 failed" in capsys.readouterr().out
    assert project.status()["partitions"]["refused"] == {part(3): ["coverage"]}
    project.cli("status")
    note = (
        "numbers: 1 partition refused by coverage (2024-01-03): `precompute backfill numbers --from"
        " 2024-01-03 --to 2024-01-03 --reprocess refused` judges these again; with --accept"
    )
    assert note in capsys.readouterr().out
    assert live(project) == part(1)
    assert project.cli("backfill", "numbers", *accepting.split()) == 0
    assert (live(project), project.refused_by()) == (part(3), [])
    assert project.status()["partitions"]["refused"] == {}
    assert project.cli(*backfill(3, 3)) == 0


def test_resumed_it_leaves_what_was_refused(daily: MakeDaily) -> None:
    extra = [(1, None, day(3)), (2, 32.0, day(3)), (3, 33.0, day(3))]
    project = daily((1,), extra=extra, view={"gates": {"coverage": 1.0}})
    run_backfill(project, "numbers", options(3, 3))
    first = run_backfill(project, "numbers", options(1, 3))
    assert [(item.partition, item.state, item.snapshot) for item in first.items] == [
        (part(1), "done", 2),
        (part(2), "done", 3),
        (part(3), "refused", 1),
    ]
    again = resume_backfill(project, "numbers", first.id)
    assert [(item.state, item.snapshot) for item in again.items] == [
        (item.state, item.snapshot) for item in first.items
    ]
    assert (again.only_refused, project.numbers()) == (True, [1, 2, 3])


WEEK = {
    # keys × what each x is beside the first day's
    1: (range(60), 1.0),
    2: (range(66), 1.1),
    3: (range(5), 1.1),  # lost
    4: (range(55), 1.1),
    5: (range(75), 1.1),
    6: (range(70), -1.1),  # turned
    7: (range(24), 1.1),  # lost
}
REFUSED = {3: ["rows"], 6: ["shape", "moved"], 7: ["rows", "shape"]}
MEASURED = {
    1: {},
    2: {"rows": 1.1, "shape": 327.25, "moved": 1.0},
    3: {"rows": 0.076},
    4: {"rows": 0.833, "shape": 309.1, "moved": 1.0},
    5: {"rows": 1.364, "shape": 342.1, "moved": 1.0},
    6: {"rows": 0.933, "shape": -257.95, "moved": -1.0},
    7: {"rows": 0.32, "shape": 257.95, "moved": 1.0},
}
"""Each beside the nearest day before that is good: the fourth beside the second."""


@pytest.mark.parametrize(
    ("had", "requested"),
    [
        (1, {"publish": False}),
        (1, {"max_active": 2, "backwards": True, "killed": True}),
        (None, {}),
    ],
    ids=["nothing goes live", "backwards and killed", "one by one, and nothing was live"],
)
def test_verdicts_do_not_depend_on_the_clock(
    daily: MakeDaily,
    monkeypatch: pytest.MonkeyPatch,
    had: int | None,
    requested: dict[str, Any],
) -> None:
    """Of what a backfill computes in any order, while what is live moves; ``had`` is the day that
    readers had before."""
    rows = [(key, times * (100 + key), day(n)) for n, (keys, times) in WEEK.items() for key in keys]
    publish, killed = requested.get("publish", True), requested.pop("killed", False)
    view = {"gates": {"first": None}, "features": {"double": {"dtype": "float64"}}}
    project = daily(extra=rows, view=view, pause_s=0.1 if publish else 0.0)
    if publish:
        # each partition in a process of its own, and what is done goes live before the next
        monkeypatch.setattr("precompute.jobs.schedule.backfill.PUBLISH_EVERY_S", 0.0)
        monkeypatch.setattr("precompute.jobs.schedule.backfill.FIRST_GROUP", 1)
        monkeypatch.setattr("precompute.jobs.schedule.backfill.GROUP_S", 0.0)
    if had is not None:
        compute(project, had, "run")
    ended = list[str]()

    def announce(line: str) -> None:
        ended.extend([line] if re.match(r"2024-01-0\d", line) else [])
        if killed and line.startswith("2024-01-02"):
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        run_backfill(project, "numbers", options(1, 7, **requested), announce=announce)
    (id,) = ids(project)
    found = resume_backfill(project, "numbers", id) if killed else read_backfill(project.store, id)
    snapshots = {n: Standing(project.store).newest(part(n)) for n in WEEK}
    verdicts = {
        n: {v.gate: round(v.measured, 3) for v in s.gates if v.gate in ("rows", "shape", "moved")}
        for n, s in snapshots.items()
        if s is not None
    }
    refused = {
        n: gates
        for n, s in snapshots.items()
        if s is not None and (gates := project.refused_by(s.number))
    }
    assert (verdicts, refused) == (MEASURED, REFUSED)
    assert [item.partition for item in found.items if item.state == "refused"] == [
        part(n) for n in refused
    ]
    assert found.count("done", "refused") == len(found.items)
    # each in its turn, whichever was computed first
    assert killed or [line[:10] for line in ended] == sorted(line[:10] for line in ended)
    if publish:
        assert live(project) == part(5)


def test_a_held_view_stays_as_it_is(daily: MakeDaily) -> None:
    project = daily((1, 2))
    compute(project, 1, "run")
    view_log = project.store.log
    held: dict[str, Any] = {"reason": "test"}
    held["held"] = Hold("2026-01-05T03:12:00Z", "rollback (ann@host)", "a bad model")
    view_log.move_live(1, expected_epoch=project.live().epoch, **held)
    done = run_backfill(project, "numbers", options(2, 2))
    assert (done.status, done.published, live(project)) == ("done", None, part(1))
    assert done.not_published == (
        "the view is held since 2026-01-05T03:12:00Z by rollback (ann@host): a bad model; snapshot"
        " 2 waits: `precompute resume numbers`"
    )


# ---- killed, cancelled, twice at once


@pytest.mark.parametrize("survivor", ["went on", "was killed too"])
def test_killed_it_goes_on_where_it_was(
    daily: MakeDaily, gate: Gate, command: Start, survivor: str
) -> None:
    project = daily((1, 2))
    forced = (
        ["--reprocess", "all", "--full"] if survivor == "went on" else []
    )  # the ledger alone tells then what is done
    first = command(project, *backfill(1, 2, *forced))
    await_begun(gate, 1)
    first.kill()
    (id,) = ids(project)
    store = project.store
    assert read_backfill(store, id).status == "running"
    if survivor == "went on":
        gate.open()
        await_free(project, 1)
    else:
        kill_runs(project, 1)
        gate.open()
    status, _, err = command(project, "backfill", "numbers", "--resume", id).end()
    assert (status, err) == (0, "")
    found = read_backfill(store, id)
    assert (found.status, found.published) == ("done", 2)
    assert [(i.partition, i.state, i.snapshot) for i in found.items] == [
        (part(n), "done", n) for n in (1, 2)
    ]
    assert committed(project) == [part(1), part(2)]
    check_rows(project, 1, 2)
    (ended,) = (
        r.finished_at
        for r in store.runs.reports()
        if r.partition == part(1) and r.status == "committed"
    )
    assert ended <= str(found.items[1].started_at)  # one at once: a survivor fills its slot


def kill_runs(project: Scene, *days: int) -> None:
    for report in project.store.runs.reports():
        if report.status == "running" and report.partition in [part(n) for n in days]:
            os.kill(report.pid, signal.SIGKILL)
    await_free(project, *days)


def test_cancelled_can_be_gone_on_with(daily: MakeDaily, gate: Gate, command: Start) -> None:
    """Whether the first was published before the signal came is the clock's to say."""
    project = daily((1, 2))
    running = command(project, *backfill(1, 2, "--json"))
    gate.open(1)
    await_begun(gate, 2)
    running.process.terminate()
    status, out, _ = running.end()
    found = json.loads(out)
    assert (status, found["status"]) == (128 + signal.SIGTERM, "cancelled")
    assert found["published"] in (None, 1)
    assert [item["state"] for item in found["items"]] == ["done", "cancelled"]
    store = project.store
    assert not store.running(part(2))
    (last, *_) = (one for one in store.runs.reports() if one.command != "publish")
    assert last.status == "killed"
    gate.open()
    resumed = resume_backfill(project, "numbers", found["id"])
    assert (resumed.status, resumed.signal, [item.state for item in resumed.items]) == (
        "done",
        None,
        ["done", "done"],
    )
    assert committed(project) == [part(1), part(2)]


def test_one_process_computes_several_partitions_with_one_model(
    daily: MakeDaily, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third one stays: by then the others are served."""
    monkeypatch.setattr("precompute.jobs.schedule.backfill.PUBLISH_EVERY_S", 0.0)
    project = daily((1, 2, 3))
    for number in (1, 2):
        gate.open(number)
    seen: list[tuple[str | None, int]] = []

    def look() -> None:
        await_begun(gate, 1, 2, 3)
        eventually(
            lambda: (
                project.store.log.live() is not None
                and project.live_snapshot().partition == part(2)
            )
        )
        reports = project.store.runs.reports()
        processes = {report.pid for report in reports if report.command == "materialize"}
        seen.append((project.live_snapshot().partition, len(processes)))
        gate.open()

    thread = threading.Thread(target=look)
    thread.start()
    done = run_backfill(project, "numbers", options(1, 3))
    thread.join()
    assert seen == [(part(2), 1)]
    assert (done.status, done.published, project.live_snapshot().partition) == ("done", 3, part(3))


def test_what_a_killed_process_had_in_hand_is_to_blame_and_nothing_else(
    daily: MakeDaily, gate: Gate
) -> None:
    project = daily((1, 2, 3, 4))
    gate.open(1)

    def kill() -> None:
        await_begun(gate, 1, 2)
        (report,) = [r for r in project.store.runs.reports() if r.partition == part(2)]
        gate.open()
        os.kill(report.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    done = run_backfill(project, "numbers", options(1, 4))
    thread.join()
    assert [item.state for item in done.items] == ["done", "failed", "done", "done"]
    assert "SIGKILL" in str(done.items[1].error)
    assert [item.state for item in resume_backfill(project, "numbers", done.id).items] == [
        "done"
    ] * 4


def test_a_run_that_is_deaf_to_sigterm_is_killed(
    daily: MakeDaily, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precompute.jobs.schedule.backfill.STOP_GRACE_S", 0.2)
    project = daily((1, 2), deaf=True)

    def cancel() -> None:
        await_begun(gate, 1, 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=cancel)
    thread.start()
    done = run_backfill(project, "numbers", options(1, 2, max_active=2))
    thread.join()
    assert (done.status, [item.state for item in done.items]) == ("cancelled", ["cancelled"] * 2)
    assert [report.status for report in project.store.runs.reports()] == ["running"] * 2
    assert plans(project, last=2) == [
        (1, "run", "missing"),
        (2, "run", "missing"),
    ]  # nobody holds them


def test_one_of_two_over_the_same_partitions_is_refused(
    daily: MakeDaily, gate: Gate, command: Start
) -> None:
    project = daily((1, 2, 3))
    running = command(project, *backfill(1, 2, "--max-active", "2"))
    await_begun(gate, 1, 2)
    (id,) = ids(project)
    with pytest.raises(
        ConflictError, match=f"backfill {id} is going on over 1 of these partitions, as 2024-01-02"
    ):
        run_backfill(project, "numbers", options(2, 3))
    with pytest.raises(ConflictError, match=f"backfill {id} of view 'numbers' is going on"):
        resume_backfill(project, "numbers", id)
    gate.open(3)
    assert run_backfill(project, "numbers", options(3, 3)).status == "done"
    assert len(ids(project)) == 2  # the refused one left nothing
    gate.open()
    assert running.end()[0] == 0
    assert sorted(committed(project)) == [part(1), part(2), part(3)]
    assert live(project) == part(3)


def test_a_partition_that_another_run_computes_is_waited_for(
    daily: MakeDaily, gate: Gate, command: Start
) -> None:
    """The other one is killed: then it is this one's."""
    project = daily((1, 2))
    other = command(project, "materialize", "numbers", "--partition", "2024-01-01")
    await_begun(gate, 1)
    gate.open(2)
    running = command(project, *backfill(1, 2, "--json"))
    eventually(lambda: committed(project) == [part(2)])  # it holds no slot meanwhile
    other.kill()
    gate.open()
    status, out, _ = running.end()
    (first, second) = json.loads(out)["items"]
    assert (status, first["state"], second["state"]) == (0, "done", "done")
    assert committed(project) == [part(2), part(1)]
    by = {report.run: report.backfill for report in project.store.runs.reports()}
    assert by[first["run"]] is not None


def test_a_damaged_file_is_refused_by_name(daily: MakeDaily) -> None:
    project = daily((1,))
    done = run_backfill(project, "numbers", options(1, 1))
    path = project.root / "numbers" / "backfills" / f"{done.id}.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(SnapshotError, match=rf"{done.id}\.json is damaged"):
        resume_backfill(project, "numbers", done.id)
    assert plans(project, last=1) == [(1, "skip", "done")]  # it takes no part in anything else
