"""The schedule: what begins when and after what, what never runs twice, who acts, and that
everything ends with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import precompute.jobs.schedule.scheduler
from benchmarks.schedule_week import play
from precompute.jobs.config.project import Project
from precompute.jobs.config.schedule import last_fire
from precompute.jobs.schedule.due import LEADER, Ledger
from precompute.jobs.schedule.scheduler import DIED, Scheduler, run_command
from precompute.store.disk.lease import holder, is_held
from precompute.store.disk.storage import identity_of
from precompute.store.errors import ConflictError
from precompute.store.times import iso
from tests import REPOSITORY
from tests.fixtures import MakeProject
from tests.scene import Scene
from tests.server import eventually, state

RARELY = "0 0 29 2 *"  # not while a test runs
LONG_AGO = datetime(2024, 1, 1, tzinfo=UTC)
_missed = last_fire(RARELY, "UTC", LONG_AGO, datetime.now(UTC))
assert _missed is not None
LEAP_DAY = iso(_missed)
SINCE = f"due since {_missed:%Y-%m-%d} 00:00+00:00"
YEARLY = "0 0 1 1 *"

BASE: dict[str, Any] = {
    "entity": ["id"],
    "source": {"sql": "SELECT 1 AS id, 1.0 AS x"},
    "model": {"use": "tests.models:Doubler"},
    "features": {"double": {"dtype": "float64"}},
    "ttl": "1h",
}

SHELL = """
now() { date -u +%Y-%m-%dT%H:%M:%S.%6NZ; }
BEGAN=$(now); ID=$(date -u +%Y%m%dT%H%M%S.%NZ)-$$
known() {
    for p in $PARENTS; do printf '%s"%s": %s' "$comma" $p $(cat $ROOT/$p/epoch 2>/dev/null || echo 0); comma=", "; done
}
sealed() {  # JSON whose keys are in order, with its checksum
    printf '%s, "blake2b": "%s"}' "${1%?}" $(printf %s "$1" | b2sum -l 96 | cut -c 1-24)
}
report() {  # a run's report, with the status given
    mkdir -p $ROOT/$VIEW/runs $ROOT/$VIEW/notes/running
    if [ $1 = running ]; then touch $ROOT/$VIEW/notes/running/$ID; fi
    sealed "$(printf '{"command": "run", "due": "%s", "finished_at": "%s", "format": 3, "parents": {%s}, "partition": null, "pid": %s, ' \\
        $DUE $(now) "$(known)" $$; printf '"run": "%s", "started_at": "%s", "status": "%s", "untold": true, "view": "%s"}' $ID $BEGAN $1 $VIEW)" \\
        > $ROOT/$VIEW/tmp
    mv $ROOT/$VIEW/tmp $ROOT/$VIEW/runs/$ID.json
}
published() {  # that, and another live snapshot
    mkdir -p $ROOT/$VIEW/log
    echo $(($(cat $ROOT/$VIEW/epoch 2>/dev/null || echo 0) + 1)) > $ROOT/$VIEW/epoch
    N=$(cat $ROOT/$VIEW/epoch)
    sealed "$(printf '{"at": "%s", "before": %s, "format": 3, "kind": "publish", "number": %s, ' $(now) $((N - 1)) $N
        printf '"reason": "run", "segments": ["1-00000000"], "snapshot": 1, "view": "%s"}' $VIEW)" > $ROOT/$VIEW/tmp2
    mv $ROOT/$VIEW/tmp2 $ROOT/$VIEW/log/$(printf %020d $N).json
    report published
}
"""
"""What stands in for a run: a line of shell that may call ``report STATUS`` or ``published``."""


class Running:
    """A scheduler running in a thread of its own, whose views run one line of shell each.

    ``log`` is the file the lines may append to, as ``$LOG``; ``said`` what was announced.
    """

    def __init__(self, project: Scene, shell: dict[str, str], folder: Path) -> None:
        self.log, self.said = folder / "log", list[str]()
        self.log.touch()
        identity_of(project.root)
        self.project, self.store = project, project.offline
        self.scheduler = Scheduler(project, command=self._command, announce=self.said.append)
        self._shell = shell
        self._thread = threading.Thread(target=self.scheduler.run)

    def _command(self, project: Project, view: str, due: str) -> Sequence[str]:
        parents = " ".join(sorted(project.schedules()[view].parents))
        known = f"LOG={self.log}; VIEW={view}; DUE={due}; ROOT={project.root}; PARENTS='{parents}'"
        return ["/bin/sh", "-c", f"{known}{SHELL}{self._shell[view]}"]

    def start(self) -> Running:
        self._thread.start()
        eventually(lambda: bool(self.said))
        return self

    def stop(self) -> None:
        self.scheduler.stop()
        if self._thread.ident is not None:
            self._thread.join(20)
        assert not self._thread.is_alive()

    def ran(self) -> list[str]:
        """The words of the log."""
        return self.log.read_text().split()

    def make_due(self, *views: str) -> None:
        """Let the last leap day be missed by views with that line."""
        for view in views:
            Ledger(self.project, self.store).see(view, LONG_AGO)

    def statuses(self, view: str) -> list[str]:
        """Of the view's runs, the newest first."""
        return [report.status for report in self.store.view(view).runs.reports()]

    def await_said(self, *lines: str) -> None:
        """Until each line was announced, written as a regular expression."""

        def missing() -> list[str]:
            return [
                line
                for line in lines
                if not any(re.fullmatch(line, said) for said in list(self.said))
            ]

        eventually(lambda: not missing(), lambda: f"{missing()} not in {self.said}")


def telling(folder: Path) -> list[str]:
    """A ``notify`` command that notes what it is told in a folder, which :func:`told` reads."""
    line = 'echo "$NOTIFY_VIEW $NOTIFY_STATUS: $NOTIFY_ERROR" >> "$0"'
    return ["/bin/sh", "-c", line, str(folder / "told")]


def told(folder: Path) -> list[str]:
    """What was told so far."""
    path = folder / "told"
    return path.read_text().splitlines() if path.exists() else []


MakeRunning = Callable[..., Running]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute.jobs.schedule.scheduler, "TICK_S", 0.1)


@pytest.fixture
def running(make_project: MakeProject, tmp_path: Path) -> Iterator[MakeRunning]:
    """Makes a running scheduler from view → (when, shell); those of ``due`` missed the last leap
    day."""
    made: list[Running] = []

    def make(
        views: dict[str, tuple[Any, str]],
        due: Sequence[str] = (),
        start: bool = True,
        **settings: Any,
    ) -> Running:
        schedule = {view: when for view, (when, _) in views.items()}
        project = make_project(
            [(1, 1.0)],
            project={"schedule": schedule, "runs": {"retry_after": "0s"}, **settings},
            views={view: BASE for view in views if view != "numbers"},
        )
        made.append(Running(project, {view: shell for view, (_, shell) in views.items()}, tmp_path))
        made[-1].make_due(*due)
        return made[-1].start() if start else made[-1]

    yield make
    for one in made:
        one.stop()


NOTE = "echo $VIEW >> $LOG"
DONE = f"{NOTE}; published"


def test_a_chain_runs_each_view_when_the_one_before_is_live(running: MakeRunning) -> None:
    schedule = running(
        {"c": ("after b", DONE), "numbers": (RARELY, DONE), "b": ("after numbers", DONE)},
        ["numbers"],
    )
    schedule.await_said(r"c: done after .*")
    assert schedule.ran() == ["numbers", "b", "c"]
    assert [line for line in schedule.said if "started" in line] == [
        f"numbers: started ({SINCE})",
        "b: started (new: numbers)",
        "c: started (new: b)",
    ]
    assert [schedule.store.view(view).runs.reports(1)[0].due for view in ("numbers", "b", "c")] == [
        LEAP_DAY,
        *(
            ref.at
            for view in ("numbers", "b")
            if (ref := schedule.store.view(view).log.live()) is not None
        ),
    ]
    time.sleep(0.3)
    assert schedule.ran() == ["numbers", "b", "c"]


def test_times_count_from_when_a_scheduler_first_saw_a_line(
    running: MakeRunning,
) -> None:
    note = "echo $DUE | cut -c 1-4 >> $LOG; sleep 0.1; published"
    schedule = running({"numbers": ({"at": YEARLY, "catch_up": "all"}, note)}, start=False)
    schedule.scheduler.clock = lambda: datetime(2026, 6, 1, tzinfo=UTC)
    schedule.start().await_said(r"numbers: next at 2027-01-01 00:00\+00:00")
    schedule.stop()
    again = Running(schedule.project, schedule._shell, schedule.log.parent)
    again.scheduler.clock = lambda: datetime(2028, 6, 1, tzinfo=UTC)
    again.start()
    try:
        eventually(lambda: again.ran() == ["2027", "2028"], lambda: f"{again.ran()} {again.said}")
        time.sleep(0.3)
    finally:
        again.stop()
    assert again.ran() == ["2027", "2028"]


@pytest.mark.parametrize(
    ("shell", "outcome", "status"),
    [
        ("exit 1", "exited with status 1", "failed"),
        (
            "report rejected; exit 3",
            "not published: rows were rejected, or a gate refused",
            "rejected",
        ),
        ("report running; kill -SEGV $$", r"was ended by signal 11 \(SIGSEGV\)", "killed"),
    ],
)
def test_after_a_failure_nothing_follows_it_shows_and_the_others_go_on(
    running: MakeRunning, shell: str, outcome: str, status: str
) -> None:
    schedule = running(
        {
            "numbers": ({"at": RARELY, "retries": 0}, f"{NOTE}; {shell}"),
            "b": ("after numbers", DONE),
            "other": (RARELY, f"while [ ! -e $ROOT/numbers/runs ]; do sleep 0.05; done; {DONE}"),
        },
        ["numbers", "other"],
    )
    schedule.await_said(rf"numbers: {outcome} after \d+\.\d s", "other: done after .*")
    time.sleep(0.3)
    assert sorted(schedule.ran()) == ["numbers", "other"]
    (report,) = schedule.store.view("numbers").runs.reports()
    assert (report.status, report.due) == (status, LEAP_DAY)
    if "report" not in shell:
        assert report.error == f"it {outcome}, and left no report; its output shows more"


def test_each_attempt_that_leaves_no_report_counts(running: MakeRunning) -> None:
    schedule = running({"numbers": ({"at": RARELY, "retries": 1}, f"{NOTE}; exit 1")}, ["numbers"])
    eventually(lambda: schedule.statuses("numbers") == ["failed"] * 2)
    time.sleep(0.3)
    assert schedule.ran() == ["numbers"] * 2


def test_one_run_of_a_view_at_a_time_and_different_views_side_by_side(running: MakeRunning) -> None:
    views = {
        "numbers": ({"at": YEARLY, "catch_up": "all"}, f"{NOTE}; sleep 60"),
        "b": (RARELY, DONE),
        "slow": (RARELY, f"published; {NOTE}; sleep 60"),
        # waits for the last of them, though both are live
        "both": ("after b, slow", DONE),
    }
    schedule = running(views, ["numbers", "b", "slow"])
    schedule.await_said("b: done after .*", "numbers: started .*")
    eventually(lambda: "slow" in schedule.ran())
    time.sleep(0.3)
    assert sorted(schedule.ran()) == ["b", "numbers", "slow"]


def test_a_bad_configuration_is_not_tried_again_while_it_is_the_same(running: MakeRunning) -> None:
    schedule = running(
        {"numbers": (RARELY, DONE), "b": ("after numbers", f"{NOTE}; exit 2")},
        ["numbers"],
        start=False,
    )
    with (schedule.project.folder / "project.yaml").open("a") as file:
        file.write("rooot: here\n")
    schedule.start().await_said("b: refused: bad configuration after .*")
    time.sleep(0.3)
    schedule.stop()
    again = Running(schedule.project, schedule._shell, schedule.log.parent)
    again.start().await_said("b: new: numbers, its configuration cannot be used: .*")
    time.sleep(0.3)
    again.stop()
    assert again.ran() == ["numbers", "b"]


def test_a_command_that_cannot_be_started_counts_and_stops_nothing(
    running: MakeRunning, tmp_path: Path
) -> None:
    schedule = running(
        {"numbers": ({"at": RARELY, "retry_after": "1s"}, DONE)}, ["numbers"], start=False
    )
    schedule.scheduler.command = lambda project, view, due: [str(tmp_path / "no such program")]
    schedule.start().await_said(
        "numbers: cannot be started: .*no such program.*", ".*retry 1 of 3 at.*"
    )
    assert schedule.statuses("numbers") == ["failed"]
    schedule.scheduler.command = schedule._command
    schedule.await_said("numbers: done after .*")
    assert schedule.statuses("numbers") == ["published", "failed"]


def test_a_run_that_no_thread_is_left_for_begins_later(
    running: MakeRunning, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = running({"numbers": (RARELY, DONE)}, ["numbers"], start=False)
    start, failed = threading.Thread.start, list[str]()

    def none_left(thread: threading.Thread) -> None:
        if thread.name.startswith("ThreadPoolExecutor") and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    schedule.start().await_said("numbers: done after .*")
    assert (len(failed), schedule.ran(), schedule.statuses("numbers")) == (
        1,
        ["numbers"],
        ["published"],
    )


def test_a_failure_that_cannot_be_written_down_holds_the_view_off(running: MakeRunning) -> None:
    schedule = running(
        {"numbers": (RARELY, f"{NOTE}; exit 1"), "b": (RARELY, DONE)}, ["numbers", "b"], start=False
    )
    (schedule.project.root / "numbers" / "runs").touch()  # where the folder should be
    schedule.start().await_said("numbers: cannot write .*runs.*", "b: done after .*")
    time.sleep(0.3)
    assert sorted(schedule.ran()) == ["b", "numbers"]


def test_a_damaged_file_of_one_view_is_reported_once_and_others_go_on(running: MakeRunning) -> None:
    schedule = running(
        {"numbers": (RARELY, DONE), "b": ("after numbers", DONE), "c": (RARELY, DONE)},
        ["c", "numbers"],
        start=False,
    )
    path = schedule.project.root / "numbers" / "log" / f"{1:020d}.json"
    path.parent.mkdir(parents=True)
    path.write_text("{torn")
    schedule.start().await_said("b: .*1.json is damaged.*", "c: done after .*", "b: done after .*")
    assert len([line for line in schedule.said if "damaged" in line]) == 1


def _alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return state(pid) not in ("", "Z")


def test_stop_ends_all_processes_and_begins_nothing_more(running: MakeRunning) -> None:
    shell = "report running; echo $$ >> $LOG; sleep 60 & echo $! >> $LOG; wait"
    schedule = running(
        {"numbers": (RARELY, shell), "b": ("after numbers", "echo b >> $LOG")}, ["numbers"]
    )
    eventually(lambda: len(schedule.ran()) == 2)
    pids = [int(word) for word in schedule.ran()]
    assert all(map(_alive, pids))
    assert is_held(schedule.project.root / ".scheduler", LEADER)
    schedule.stop()
    eventually(lambda: not any(map(_alive, pids)))
    schedule.await_said("numbers: stopping", r"numbers: was ended after .*")
    assert len(schedule.ran()) == 2
    assert [(r.status, r.error) for r in schedule.store.view("numbers").runs.reports()] == [
        ("killed", "killed: the scheduler was stopped")
    ]
    assert not is_held(schedule.project.root / ".scheduler", LEADER)


DEAF = "trap '' TERM; report running; echo $$ >> $LOG; sleep 60 & echo $! >> $LOG; while :; do sleep 0.05; done"


def test_a_run_past_its_deadline_is_ended_with_its_children(
    running: MakeRunning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute.jobs.schedule.scheduler, "STOP_GRACE_S", 0.3)
    shell = f"if [ -e $ROOT/numbers/runs ]; then published; exit; fi; {DEAF}"
    schedule = running({"numbers": ({"at": RARELY, "deadline": "1s"}, shell)}, ["numbers"])
    eventually(lambda: len(schedule.ran()) == 2)
    pids = [int(word) for word in schedule.ran()]
    schedule.await_said(
        r"numbers: was ended \(its deadline of 1 s passed\) after .*",
        "numbers: done after .*",
    )
    eventually(lambda: not any(map(_alive, pids)))
    assert [(r.status, r.error) for r in schedule.store.view("numbers").runs.reports()] == [
        ("published", None),
        ("killed", "killed: its deadline of 1 s passed"),
    ]


def test_a_run_begun_in_the_moment_of_stopping_is_ended_with_the_others(
    running: MakeRunning,
) -> None:
    views = {"numbers": (RARELY, DONE), "b": ("after numbers", "echo $$ >> $LOG; exec sleep 60")}
    schedule = running(views, ["numbers"], start=False)

    def announce(line: str) -> None:
        schedule.said.append(line)
        if line.startswith("b: started"):
            schedule.scheduler.stop()
            time.sleep(0.3)  # the scheduler ends meanwhile

    schedule.scheduler.announce = announce
    schedule.start().await_said("b: stopping")
    schedule.stop()
    eventually(lambda: not any(_alive(int(word)) for word in schedule.ran() if word.isdigit()))


# ---- a clock that is wrong, a configuration, a root


def test_a_run_of_a_wrong_clock_is_marked_and_its_time_run_for_again(running: MakeRunning) -> None:
    schedule = running({"numbers": (RARELY, DONE)}, start=False)
    right, wrong = datetime(2026, 6, 1, tzinfo=UTC), datetime(2028, 3, 1, tzinfo=UTC)
    clock, want = [right], list[tuple[str | None, bool]]()
    schedule.scheduler.clock = lambda: clock[0]
    schedule.start().await_said("numbers: next at 2028-02-29 .*")

    def runs() -> list[tuple[str | None, bool]]:
        return [(r.due, r.ahead) for r in schedule.store.view("numbers").runs.reports()]

    for now, expected in (
        (wrong, [False]),
        (right, [True]),
        (wrong, [False, True]),
    ):
        clock[0] = now
        want[:] = [("2028-02-29T00:00:00Z", ahead) for ahead in expected]
        eventually(lambda: runs() == want, lambda: f"{runs()} {schedule.said}")
    # set right by two hours, a fixed hour comes once
    for day, hour in ((28, 22), (29, 1)):
        clock[0] = datetime(2028, 2, day, hour, tzinfo=UTC)
        time.sleep(0.3)
    assert len(runs()) == 2


def test_each_end_of_a_run_is_told_once_with_its_cause(
    running: MakeRunning, tmp_path: Path
) -> None:
    shells = {
        "done": DONE,
        "failed": "report running; exit 1",
        "killed": "kill -KILL $$",
        "vanished": "report running; kill -KILL $$",
        "refused": "exit 2",
    }
    views = {name: ({"at": RARELY, "retries": 0}, shell) for name, shell in shells.items()}
    schedule = running({"numbers": (RARELY, DONE)} | views, list(shells), notify=telling(tmp_path))
    killed = "it was ended by signal 9 (SIGKILL), as by a system that is out of memory"
    expected = [
        "done published: ",
        "failed killed: killed: it exited with status 1",
        f"killed killed: killed: {killed}",
        "refused failed: it exited with status 2, and left no report; its output shows more",
        f"vanished killed: killed: {killed}",
    ]
    eventually(lambda: sorted(told(tmp_path)) == expected, lambda: f"{told(tmp_path)}")
    time.sleep(0.3)
    schedule.stop()
    again = Running(schedule.project, schedule._shell, tmp_path).start()
    time.sleep(0.3)
    again.stop()
    assert sorted(told(tmp_path)) == expected


def test_a_configuration_broken_at_the_hour_is_run_once_it_is_mended(
    running: MakeRunning, tmp_path: Path
) -> None:
    schedule = running(
        {"numbers": (RARELY, "")}, ["numbers"], start=False, notify=telling(tmp_path)
    )
    schedule.scheduler.command = run_command
    path = schedule.project.folder / "project.yaml"
    right = path.read_bytes()
    path.write_bytes(right + b"rooot: here\n")
    schedule.start().await_said(
        "numbers: refused: bad configuration after .*",
        rf"numbers: {re.escape(SINCE)}, its configuration cannot be used: .*rooot.*",
    )
    assert schedule.statuses("numbers") == ["refused"]
    path.write_bytes(right)
    schedule.await_said("numbers: done after .*")
    assert schedule.statuses("numbers") == ["published", "refused"]
    assert [line.partition(": ")[0] for line in told(tmp_path)] == [
        "numbers refused",
        "numbers published",
    ]
    assert "rooot" in told(tmp_path)[0]


def test_a_root_that_is_not_there_is_never_begun_anew(running: MakeRunning, tmp_path: Path) -> None:
    """Before the scheduler, below it, and while a run goes on."""
    shell = f"{NOTE}; while [ ! -e $LOG.go ]; do sleep 0.05; done; {DONE}"
    schedule = running({"numbers": (RARELY, shell)}, start=False, notify=telling(tmp_path))
    root, away = schedule.project.root, tmp_path / "away"

    def unmount() -> None:
        root.rename(away)
        root.mkdir()

    def mount() -> None:
        root.rmdir()  # nothing was written there
        away.rename(root)

    unmount()
    schedule.start()
    wrong = f"standing by: {root} is not the root, or nothing was ever run there: .*"
    schedule.await_said(wrong)
    mount()
    schedule.await_said("numbers: next at .*")
    schedule.scheduler.clock = lambda: datetime(2028, 3, 1, tzinfo=UTC)
    eventually(lambda: schedule.ran() == ["numbers"])
    unmount()
    eventually(lambda: len([line for line in schedule.said if re.fullmatch(wrong, line)]) == 2)
    other = identity_of(root)
    schedule.await_said(rf"standing by: {root} is another root \({other}\) than before .*")
    for path in root.iterdir():
        path.unlink()
    mount()
    schedule.await_said("scheduler: acting now")
    (tmp_path / "log.go").touch()
    schedule.await_said("numbers: done after .*")
    eventually(lambda: len(told(tmp_path)) == 4, lambda: f"{told(tmp_path)}")
    assert [line.partition(" is ")[0] for line in told(tmp_path)] == [
        *[f" failed: standing by: {root}"] * 3,
        "numbers published: ",
    ]


def test_a_run_for_another_root_begins_nothing(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)])
    with pytest.raises(ConflictError, match="is not the root 123 that the scheduler"):
        project.run(due=LEAP_DAY, root="123")
    assert not project.root.exists()
    project.run()
    project.run(due=LEAP_DAY, root=identity_of(project.root))
    assert [r.due for r in project.store.runs.reports()] == [LEAP_DAY, None]


# ---- the process of a run


def test_a_run_has_its_deadline_from_its_first_line_on_and_leaves_nothing(tmp_path: Path) -> None:
    """Whatever became of its scheduler."""
    os.mkfifo(tmp_path / "project.yaml")  # it waits for somebody to write there
    began = f"{sys.executable} -P -m precompute.jobs.scheduled_run 1 -c {tmp_path} run v"
    with subprocess.Popen(
        ["/bin/sh", "-c", f"sleep 300 & echo $!; exec {began} --due {LEAP_DAY} --root 1"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as popen:
        assert popen.stdout is not None
        child = int(popen.stdout.readline())
        assert popen.wait(20) == -signal.SIGALRM
        eventually(lambda: not _alive(child))


# ---- the real thing


def _command(project: Scene) -> list[str]:
    return [sys.executable, "-m", "precompute.jobs.cli", "-c", str(project.folder), "schedule"]


class Process:
    """``precompute schedule``, and the lines it has said."""

    def __init__(self, project: Scene) -> None:
        identity_of(project.root)
        self.popen = subprocess.Popen(
            _command(project),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said = list[str]()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        # each line with its time; what a run prints itself has none
        self.said.extend(
            re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (?=\S)", "", line.rstrip())
            for line in self.popen.stdout
        )

    def await_said(self, line: str) -> None:
        eventually(
            lambda: any(re.fullmatch(line, said) for said in list(self.said)),
            lambda: f"{line} not in {self.said}",
        )

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; returns the exit status and stderr."""
        self.popen.send_signal(number)
        self.popen.wait(20)
        with self.popen as popen:
            assert popen.stderr is not None
            self._reader.join(20)
            return popen.returncode, popen.stderr.read()

    def kill(self) -> None:
        """End it with no time to do anything; its runs keep its output open."""
        self.popen.kill()
        self.popen.wait(20)


@pytest.fixture
def process() -> Iterator[Callable[[Scene], Process]]:
    """Starts ``precompute schedule``; whatever is left of it ends with the test."""
    made: list[Process] = []

    def make(project: Scene) -> Process:
        made.append(Process(project))
        return made[-1]

    yield make
    for one in made:
        if one.popen.stderr is not None and not one.popen.stderr.closed:
            one.popen.send_signal(signal.SIGCONT)
            one.end(signal.SIGTERM)


def test_precompute_schedule_ends_on_a_signal_with_status_0(
    make_project: MakeProject, process: Callable[[Scene], Process]
) -> None:
    project = make_project(
        [(1, 1.0)], project={"schedule": {"numbers": RARELY}, "timezone": "Europe/Berlin"}
    )
    schedule = process(project)
    schedule.await_said(r"numbers: next at \d{4}-02-29 00:00\+01:00")
    status, err = schedule.end(signal.SIGINT)
    assert (status, len(schedule.said), "Traceback" in err) == (0, 1, False)


def test_real_views_run_for_their_missed_time_and_after_each_other(
    make_project: MakeProject, process: Callable[[Scene], Process]
) -> None:
    twice = BASE | {"source": {"sql": "SELECT id, double AS x FROM live.numbers"}}
    project = make_project(
        [(1, 1.0), (2, 2.0)],
        project={"schedule": {"numbers": RARELY, "twice": "after numbers"}},
        views={"twice": twice},
    )
    store = project.offline
    Ledger(project, store).see("numbers", LONG_AGO)
    schedule = process(project)
    schedule.await_said("twice: done after .*")
    assert schedule.end(signal.SIGTERM)[0] == 0
    live, rows = project.live(), project.rows(view="twice")
    assert sorted((row["id"], row["double"]) for row in rows) == [(1, 4.0), (2, 8.0)]
    assert {
        view: [(r.status, r.due, r.parents) for r in store.view(view).runs.reports()]
        for view in ("numbers", "twice")
    } == {
        "numbers": [("published", LEAP_DAY, {})],
        "twice": [("published", live.at, {"numbers": live.epoch})],
    }


def test_a_killed_schedulers_run_goes_on_and_the_next_one_tells_its_end(
    make_project: MakeProject, process: Callable[[Scene], Process], tmp_path: Path
) -> None:
    project = make_project(
        [(1, 1.0)],
        view={"model": {"use": "tests.models:Doubler", "args": {"sleep_s": 60}}},
        project={
            "schedule": {"numbers": {"at": RARELY, "retries": 0}},
            "lease": "2s",
            "notify": telling(tmp_path),
        },
    )
    store, runs = project.offline, project.store.runs
    Ledger(project, store).see("numbers", LONG_AGO)
    first = process(project)
    eventually(lambda: [r.status for r in runs.reports()] == ["running"])
    (report,) = runs.reports()
    second = process(project)
    second.await_said("standing by: another one acts .*")
    first.kill()
    second.await_said("numbers: runs now")
    assert _alive(report.pid)
    os.killpg(report.pid, signal.SIGKILL)
    eventually(lambda: told(tmp_path) != [])
    second.end(signal.SIGTERM)
    assert [(r.run, r.status, r.error) for r in runs.reports()] == [
        (report.run, "killed", f"killed: {DIED}")
    ]
    assert told(tmp_path) == [f"numbers killed: killed: {DIED}"]
    assert not any("started (" in line for line in second.said)


def test_a_stopped_scheduler_loses_the_lead_and_stands_by_when_it_wakes(
    make_project: MakeProject, process: Callable[[Scene], Process]
) -> None:
    project = make_project(
        [(1, 1.0)],
        project={"schedule": {"numbers": RARELY, "b": "after numbers"}, "lease": "1s"},
        views={"b": BASE},
    )
    first = process(project)
    first.await_said("numbers: next at .*")
    second = process(project)
    second.await_said("standing by: .*")
    os.kill(first.popen.pid, signal.SIGSTOP)
    second.await_said("scheduler: acting now")
    os.kill(first.popen.pid, signal.SIGCONT)
    first.await_said("standing by: .* was silent .*")
    leader = holder(project.root / ".scheduler", LEADER)
    assert leader is not None
    assert leader.pid == second.popen.pid
    project.run()
    second.await_said("b: done after .*")
    assert [r.status for r in project.offline.view("b").runs.reports()] == ["published"]
    assert not any("started" in line for line in first.said)


def test_nights_with_faults_at_random_are_run_once_each_and_are_told() -> None:
    assert play(3377, nights=3)[1] == []
