"""Weeks of nights with faults at random: clocks that jump and are set right, disks that write
nothing, runs that are killed, fail or die without a word, files of the project that are broken and
mended, roots that are unmounted, schedulers that are killed, and two of
them. The schedulers, reports and leases are real, and so are the processes of the runs, which
compute nothing; the clock is a simulated one. Each night has to be run, and each end told of once;
only what a clock made that was wrong is made again.

    python -m benchmarks.schedule_week [weeks] [seed]
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.common import numbers, report, write_project
from precompute.jobs.config.project import Project
from precompute.jobs.schedule.scheduler import Scheduler
from precompute.store.disk.storage import LocalStorage, identity_of
from precompute.store.offline.runs import Report
from precompute.store.times import iso

VIEW = {
    "source": {"sql": "SELECT 1 AS id, 1.0 AS x"},
    "model": {"use": "benchmarks.store_plan:Half"},
    "features": {"half": {"dtype": "float32"}},
}
FIRST = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
RUN = """
import os, pathlib, signal, sys
from precompute.store.disk.lease import take
from precompute.store.offline.log import run_lease
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import OfflineStore
from precompute.store.times import utc_now
root, due, how, run = sys.argv[1:]
store = OfflineStore(root).view("numbers")
if how == "refused":
    sys.exit(2)
if how == "failed":
    sys.exit(1)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
with take(store.leases, run_lease(None), "a run"):
    report = Report(run, "numbers", "run", "running", due, due=due, untold=True, pid=os.getpid())
    store.runs.write(report)
    if how == "vanished":
        os.kill(os.getpid(), signal.SIGKILL)
    report.status, report.finished_at = "published", due
    store.runs.write(report)
"""
"""What stands in for a run: it ends as its last argument but one says."""


class Week:
    """A project with a nightly view, its schedulers and what befalls them.

    Args:
        folder: of its own.
        seed: of what befalls them.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._told = folder / "told"
        tell = ["/bin/sh", "-c", 'echo "$NOTIFY_RUN" >> "$0"', str(self._told)]
        schedule = {"numbers": {"at": "0 2 * * *", "retries": 20, "retry_after": "1m"}}
        self.project = write_project(
            folder / "project", {"numbers": VIEW}, schedule=schedule, notify=tell, reconcile="1d"
        )
        self.root, self._away = self.project.root, folder / "away"
        identity_of(self.root)
        self._random = random.Random(seed)
        self.now, self._wrong_by, self._ends, self._runs = FIRST, timedelta(), "", 0
        self._began = dict[str, datetime]()
        """Run → when it began in truth."""
        self._schedulers = [self._scheduler()]

    def _scheduler(self) -> Scheduler:
        return Scheduler(
            self.project, self._command, lambda _: None, lambda: self.now + self._wrong_by
        )

    def _command(self, project: Project, view: str, due: str) -> Sequence[str]:
        self._runs += 1
        run = f"{self.project.offline.view('numbers').runs.stamp()}-{self._runs:06d}"
        self._began[run] = self.now
        return [sys.executable, "-P", "-c", RUN, str(self.root), due, self._ends, run]

    def look(self, passes: timedelta = timedelta(minutes=1)) -> None:
        """Each scheduler looks, and what it begins ends; then time passes."""
        for scheduler in list(self._schedulers):
            scheduler.tick()
            jobs = scheduler._jobs
            if not jobs.running:
                jobs.start()
            limit = time.monotonic() + 60
            while jobs.get_jobs() or scheduler._running:
                assert time.monotonic() < limit, "a run does not end"
                time.sleep(0.005)
        self.now += passes

    def end(self) -> None:
        """Stop all."""
        for scheduler in self._schedulers:
            scheduler.stop()
            if scheduler._jobs.running:
                scheduler._jobs.shutdown(wait=True)
            scheduler._stand_by()

    # ---- what befalls them

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        hours = self._random.choice([-72, -23, -1, 1, 72, 24 * 365])
        self._wrong_by = timedelta(hours=hours)
        yield
        self._wrong_by = timedelta()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        self._ends = self._random.choice(["failed", "killed", "vanished"])
        yield
        self._ends = ""

    @contextlib.contextmanager
    def _broken(self) -> Iterator[None]:
        path, self._ends = self.project.folder / "project.yaml", "refused"
        right = path.read_bytes()
        path.write_bytes(right + b"rooot: here\n")
        yield
        path.write_bytes(right)
        self._ends = ""

    @contextlib.contextmanager
    def _unmounted(self) -> Iterator[None]:
        self.root.rename(self._away)
        self.root.mkdir()
        yield
        self.root.rmdir()  # fails where anything was written
        self._away.rename(self.root)

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        write, self._ends = LocalStorage.write, "failed"

        def fails(storage: LocalStorage, path: Path, data: bytes) -> None:
            raise OSError(28, os.strerror(28), str(path))

        LocalStorage.write = fails  # type: ignore[method-assign,assignment]
        yield
        LocalStorage.write, self._ends = write, ""  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _killed(self) -> Iterator[None]:
        """All schedulers are gone; as many begin anew later."""
        gone, self._schedulers = self._schedulers, []
        for scheduler in gone:
            scheduler._stand_by()
        yield
        self._schedulers = [self._scheduler() for _ in gone]

    @contextlib.contextmanager
    def _two(self) -> Iterator[None]:
        self._schedulers.append(self._scheduler())
        yield
        self._schedulers.pop(0)._stand_by()

    def night(self) -> None:
        """From noon to noon, with faults that begin and end at some hours."""
        kinds: list[Callable[[], contextlib.AbstractContextManager[None]]] = [
            self._clock,
            self._ending,
            self._broken,
            self._unmounted,
            self._full,
            self._killed,
            self._two,
        ]
        faults = [fault() for fault in self._random.sample(kinds, self._random.randint(0, 2))]
        begin, last = self.now + self._random.randint(10, 15) * HOUR, self._random.randint(1, 4)
        noon = self.now + 24 * HOUR
        while self.now < begin:
            self.look(HOUR)
        with contextlib.ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault)
            for _ in range(6 * last):
                self.look(HOUR / 6)
        while self.now < noon:
            for scheduler in self._schedulers:
                scheduler._not_before.clear()  # of the real clock, which has hardly moved
            self.look(HOUR / 2)

    def wrong(self, nights: int) -> list[str]:
        """What was not as it has to be."""
        reports: list[Report] = self.project.offline.view("numbers").runs.reports(10_000)
        finished = [r for r in reports if r.finished]
        expected = [iso((FIRST + timedelta(days=n)).replace(hour=2)) for n in range(1, nights + 1)]
        # a clock that is less than that ahead is as good as right
        ran = {r.due for r in finished if parsed(r.due) <= self._began[r.run] + 3 * HOUR}
        wrong = [f"{due}: not run" for due in expected if due not in ran]
        counted = Counter(r.due for r in finished if not r.ahead)
        wrong += [f"{due}: run {n} times" for due, n in counted.items() if n > 1]
        wrong += [
            f"{due}: not due" for due in counted if due not in expected and parsed(due) > FIRST
        ]
        told = Counter(filter(None, self._told.read_text().splitlines()))
        wrong += [f"run {r.run} told {told[r.run]} times" for r in reports if told[r.run] != 1]
        return wrong


def parsed(due: str | None) -> datetime:
    """The time that a run was for."""
    return datetime.fromisoformat(due or "")


def play(seed: int, nights: int = 7) -> tuple[int, list[str]]:
    """How many runs there were, and what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        week = Week(Path(folder), seed)
        try:
            for _ in range(nights):
                week.night()
            return week._runs, week.wrong(nights)
        finally:
            week.end()


def main() -> None:
    """Play the weeks, and report."""
    weeks, first = numbers(20, 1)
    runs, wrong = 0, list[str]()
    for seed in range(first, first + weeks):
        made, found = play(seed)
        runs, wrong = runs + made, wrong + [f"seed {seed}: {text}" for text in found]
    lines = [f"{weeks} weeks, {runs} runs, {len(wrong)} nights or ends that are wrong", *wrong]
    report("schedule_week", lines, {"weeks": weeks, "runs": runs, "wrong": wrong})


if __name__ == "__main__":
    main()
