"""The schedule: what begins after what, what never runs twice at a time, and that everything ends with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from apscheduler.triggers.interval import IntervalTrigger

import jobs.schedule
from jobs.config import Project
from jobs.schedule import Scheduler, run_command
from store.offline_store import OfflineStore
from tests.conftest import MakeProject
from tests.jobs.test_serve import REPOSITORY, eventually

NEVER = "0 0 29 2 *"  # not while a test runs

Shell = dict[str, str]


class Running:
    """A scheduler running in a thread of its own, whose views run one line of shell each.

    ``log`` is the file the lines may append to, as ``$LOG``; ``said`` what was announced.
    """

    def __init__(self, project: Project, shell: Shell, folder: Path) -> None:
        self.log, self.said = folder / "log", list[str]()
        self.log.touch()
        self.scheduler = Scheduler(project, command=self._command, announce=self.said.append)
        self._shell = shell
        self._thread = threading.Thread(target=self.scheduler.run)

    def _command(self, project: Project, view: str) -> Sequence[str]:
        return ["/bin/sh", "-c", f"LOG={self.log}; VIEW={view}; {self._shell[view]}"]

    def __enter__(self) -> Running:
        self._thread.start()
        eventually(lambda: bool(self.said))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.scheduler.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def ran(self) -> list[str]:
        """The words of the log."""
        return self.log.read_text().split()

    def await_said(self, *lines: str) -> None:
        """Until each line was announced, written as a regular expression."""

        def missing() -> list[str]:
            return [line for line in lines if not any(re.fullmatch(line, said) for said in list(self.said))]

        eventually(lambda: not missing(), lambda: f"{missing()} not in {self.said}")


MakeRunning = Callable[..., Running]


@pytest.fixture
def running(make_project: MakeProject, tmp_path: Path) -> Iterator[MakeRunning]:
    """Makes a running scheduler from view → (when, shell)."""
    made: list[Running] = []

    def make(views: dict[str, tuple[str, str]]) -> Running:
        base = {"entity": ["id"], "source": {"sql": "SELECT 1 AS id, 1.0 AS x"}, "ttl": "1h"}
        base |= {"model": {"use": "tests.arithmetic:Doubler"}, "features": {"double": {"dtype": "float64"}}}
        schedule = {view: when for view, (when, _) in views.items()}
        project = make_project(
            [(1, 1.0)], project={"schedule": schedule}, views={view: base for view in views if view != "numbers"}
        )
        made.append(Running(project, {view: shell for view, (_, shell) in views.items()}, tmp_path))
        return made[-1].__enter__()

    yield make
    for one in made:
        one.stop()


NOTE = "echo $VIEW >> $LOG"


def test_it_tells_what_is_scheduled_and_runs_nothing_before_its_time(running: MakeRunning) -> None:
    schedule = running({"numbers": ("0 0 29 2 *", NOTE), "b": ("after numbers", NOTE)})
    schedule.await_said(r"numbers: next at \d{4}-02-29T00:00:00\+00:00", "b: after numbers")
    schedule.stop()
    assert (schedule.ran(), len(schedule.said)) == ([], 2)


def test_every_tick_starts_the_view_and_one_that_comes_while_it_still_runs_is_dropped(
    running: MakeRunning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.schedule, "cron_trigger", lambda line, timezone: IntervalTrigger(seconds=0.2, timezone=timezone))
    schedule = running({"numbers": (NEVER, "echo in >> $LOG; sleep 0.5; echo out >> $LOG")})
    eventually(lambda: schedule.ran().count("out") >= 2)
    assert any("still goes on" in line for line in schedule.said)
    schedule.stop()
    ran = schedule.ran()
    assert ran[: ran.count("out") * 2] == ["in", "out"] * ran.count("out")


def test_a_chain_runs_each_view_after_the_success_of_the_one_before(running: MakeRunning) -> None:
    schedule = running(
        {"c": ("after b", NOTE), "numbers": (NEVER, f"sleep 0.2; {NOTE}"), "b": ("after numbers", f"sleep 0.2; {NOTE}")}
    )
    assert schedule.scheduler.start("numbers")
    schedule.await_said(r"c: done after .*")
    assert schedule.ran() == ["numbers", "b", "c"]
    assert [line for line in schedule.said if "started" in line] == ["numbers: started", "b: started", "c: started"]


@pytest.mark.parametrize(
    ("shell", "outcome"),
    [
        ("exit 1", "failed with status 1"),
        ("exit 2", "refused: bad configuration"),
        ("exit 3", "not published: rows were rejected"),
        ("kill -9 $$", "killed by signal 9"),
        ("kill -SEGV $$", "killed by signal 11"),
    ],
)
def test_after_a_failure_nothing_follows_it_is_told_and_the_others_go_on(running: MakeRunning, shell: str, outcome: str) -> None:
    schedule = running({"numbers": (NEVER, f"{NOTE}; {shell}"), "b": ("after numbers", NOTE), "other": (NEVER, NOTE)})
    assert schedule.scheduler.start("numbers")
    schedule.await_said(rf"numbers: {outcome} after \d+\.\d s")
    assert schedule.scheduler.start("other")
    schedule.await_said("other: done after .*")
    assert schedule.ran() == ["numbers", "other"]
    assert schedule.scheduler.start("numbers")
    schedule.await_said("numbers: started")


def test_a_view_after_two_others_runs_once_when_the_last_of_them_is_done(running: MakeRunning) -> None:
    wait = "while [ ! -e $LOG.$VIEW ]; do sleep 0.05; done"
    schedule = running(
        {"numbers": (NEVER, f"{wait}; {NOTE}"), "b": (NEVER, f"{wait}; {NOTE}"), "both": ("after numbers, b", NOTE)}
    )
    assert schedule.scheduler.start("numbers")
    assert schedule.scheduler.start("b")
    Path(f"{schedule.log}.numbers").touch()
    schedule.await_said("numbers: done after .*")
    Path(f"{schedule.log}.b").touch()
    schedule.await_said("both: done after .*")
    assert schedule.ran() == ["numbers", "b", "both"]


def test_one_run_of_a_view_at_a_time_and_different_views_side_by_side(running: MakeRunning) -> None:
    schedule = running({"numbers": (NEVER, f"{NOTE}; sleep 60"), "b": (NEVER, NOTE)})
    assert [schedule.scheduler.start("numbers") for _ in range(3)] == [True, False, False]
    assert schedule.scheduler.start("b")
    schedule.await_said("b: done after .*", "numbers: the last run still goes on.*")
    eventually(lambda: sorted(schedule.ran()) == ["b", "numbers"])


def test_a_command_that_cannot_be_started_is_told_and_stops_nothing(make_project: MakeProject, tmp_path: Path) -> None:
    project = make_project([(1, 1.0)], project={"schedule": {"numbers": NEVER}})
    schedule = Running(project, {"numbers": NOTE}, tmp_path)
    schedule.scheduler.command = lambda project, view: [str(tmp_path / "no such program")]
    with schedule:
        assert not schedule.scheduler.start("numbers")
        schedule.await_said("numbers: cannot be started: .*no such program.*")
        schedule.scheduler.command = schedule._command
        assert schedule.scheduler.start("numbers")
        schedule.await_said("numbers: done after .*")


def _alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_stop_ends_what_runs_with_all_its_processes_and_begins_nothing_more(running: MakeRunning) -> None:
    schedule = running(
        {"numbers": (NEVER, "echo $$ >> $LOG; sleep 60 & echo $! >> $LOG; wait"), "b": ("after numbers", "echo b >> $LOG")}
    )
    assert schedule.scheduler.start("numbers")
    eventually(lambda: len(schedule.ran()) == 2)
    pids = [int(word) for word in schedule.ran()]
    assert all(map(_alive, pids))
    schedule.stop()
    eventually(lambda: not any(map(_alive, pids)))
    schedule.await_said("numbers: stopping", "numbers: killed by signal 15 after .*")
    assert not schedule.scheduler.start("numbers")
    assert len(schedule.ran()) == 2


def test_what_does_not_heed_sigterm_is_killed_after_the_grace(running: MakeRunning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.schedule, "STOP_GRACE_S", 0.3)
    deaf = "trap '' TERM; echo $$ >> $LOG; sleep 60 & echo $! >> $LOG; while :; do sleep 0.05; done"
    schedule = running({"numbers": (NEVER, deaf), "b": ("after numbers", NOTE)})
    assert schedule.scheduler.start("numbers")
    eventually(lambda: len(schedule.ran()) == 2)
    pids = [int(word) for word in schedule.ran()]
    schedule.stop()
    eventually(lambda: not any(map(_alive, pids)))
    schedule.await_said("numbers: killed by signal 9 after .*")


def test_a_run_that_ends_well_on_sigterm_starts_nothing_after_it(running: MakeRunning) -> None:
    schedule = running(
        {"numbers": (NEVER, "trap 'exit 0' TERM; echo in >> $LOG; while :; do sleep 0.05; done"), "b": ("after numbers", NOTE)}
    )
    assert schedule.scheduler.start("numbers")
    eventually(lambda: schedule.ran() == ["in"])
    schedule.stop()
    schedule.await_said("numbers: done after .*")
    assert schedule.ran() == ["in"]


def test_a_run_begun_in_the_moment_of_stopping_is_ended_with_the_others(make_project: MakeProject, tmp_path: Path) -> None:
    sleeper = {
        "source": {"sql": "SELECT 1 AS id, 1.0 AS x"},
        "model": {"use": "tests.arithmetic:Doubler"},
        "entity": ["id"],
        "ttl": "1h",
    }
    sleeper |= {"features": {"double": {"dtype": "float64"}}}
    project = make_project([(1, 1.0)], project={"schedule": {"numbers": NEVER, "b": "after numbers"}}, views={"b": sleeper})
    schedule = Running(project, {"numbers": NOTE, "b": "echo $$ >> $LOG; exec sleep 60"}, tmp_path)

    def announce(line: str) -> None:
        schedule.said.append(line)
        if line == "b: started":
            schedule.scheduler.stop()
            time.sleep(0.3)  # the scheduler ends meanwhile

    schedule.scheduler.announce = announce
    with schedule:
        assert schedule.scheduler.start("numbers")
        schedule.await_said("b: stopping")
    eventually(lambda: not any(_alive(int(word)) for word in schedule.ran() if word.isdigit()))


# ---- the real thing


def _spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def _command(project: Project) -> list[str]:
    return [sys.executable, "-m", "jobs.cli", "-c", str(project.folder), "schedule"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_precompute_schedule_ends_on_a_signal_with_status_0(make_project: MakeProject, number: int) -> None:
    project = make_project([(1, 1.0)], project={"schedule": {"numbers": NEVER}, "timezone": "Europe/Berlin"})
    with _spawn(_command(project)) as process:
        assert process.stdout is not None
        assert re.fullmatch(r"numbers: next at \d{4}-02-29T00:00:00\+01:00\n", process.stdout.readline())
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, "Traceback" in err) == (0, "", False)


def test_sigterm_ends_the_runs_of_a_schedule_too_within_seconds_and_the_live_snapshot_stays(make_project: MakeProject) -> None:
    model = {"use": "tests.arithmetic:Doubler", "args": {"sleep_s": 60}}
    project = make_project([(1, 1.0)], view={"model": model}, project={"schedule": {"numbers": NEVER}})
    script = (
        "import sys, threading; from jobs.config import Project; from jobs.schedule import Scheduler\n"
        "scheduler = Scheduler(Project(sys.argv[1]), announce=lambda line: print(line, flush=True))\n"
        "threading.Timer(0.1, scheduler.start, ['numbers']).start(); scheduler.run()"
    )
    with _spawn([sys.executable, "-c", script, str(project.folder)]) as process:
        store = OfflineStore(project.root)
        eventually(lambda: _locked(store.root / "numbers" / ".run.lock"))
        run = _children(process.pid)
        assert len(run) == 1
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=9)
    assert process.returncode == 0, err
    assert out.splitlines()[1:] == ["numbers: started", "numbers: stopping", out.splitlines()[3]]
    assert out.splitlines()[3].startswith("numbers: killed by signal 15 after")
    assert not _alive(run[0])
    assert store.numbers("numbers") == []
    with store.run_lock("numbers"):
        pass


def _locked(path: Path) -> bool:
    if not path.exists():
        return False
    inode = os.stat(path).st_ino
    return any(f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def test_a_run_is_precompute_run_of_that_view_with_this_python(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)], view={"index": {"on": "vector"}})
    done = subprocess.run(run_command(project, "numbers"), cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    live = OfflineStore(project.root).live("numbers")
    assert live is not None
    assert (live.snapshot, live.reason) == (1, "run")


def test_an_empty_schedule_is_refused_with_status_2(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)])
    done = subprocess.run(_command(project), cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "project.yaml: schedule: empty" in done.stderr
