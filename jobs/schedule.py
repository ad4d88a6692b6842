"""Schedule: the views' cron lines and ``after`` dependencies. The seam to APScheduler, which only says when.

Each run is a process of its own (``precompute run VIEW``): a view that crashes, leaks or hangs takes nothing else with it, and is ended
with its whole process group. One run per view at a time; a tick that comes while the last run goes on is noted and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.schedulers.background import BackgroundScheduler

from jobs.config import Project, after
from jobs.cron import cron_trigger

log = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
"""How long a run may take to end after SIGTERM before it is killed. Killing is safe: nothing is visible before its manifest."""


def run_command(project: Project, view: str) -> list[str]:
    """The command line that runs a view."""
    return [sys.executable, "-m", "jobs.cli", "-c", str(project.folder), "run", view]


@dataclass(slots=True)
class Scheduler:
    """Ticks until stopped.

    Args:
        project: its schedule section counts.
        command: makes the command line of a run; tests put their own here.
        announce: told what is scheduled, begins and ends.
    """

    project: Project
    command: Callable[[Project, str], Sequence[str]] = run_command
    announce: Callable[[str], None] = log.info
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def run(self) -> None:
        """Run until :meth:`stop` is called, by SIGTERM or SIGINT too; then end the runs at hand."""
        settings = self.project.settings
        # The memory job store only: what is due is in the configuration, and every persistent job store unpickles what it reads.
        ticker = BackgroundScheduler(
            timezone=settings.timezone, job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        )
        ticker.add_listener(_trouble, EVENT_JOB_ERROR | EVENT_JOB_MISSED)
        for view, when in settings.schedule.items():
            if after(when) is None:
                ticker.add_job(self.start, cron_trigger(when, settings.timezone), args=[view], id=view)
        previous = (
            {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
            if threading.current_thread() is threading.main_thread()
            else {}
        )
        ticker.start()
        for job in ticker.get_jobs():
            self.announce(f"{job.id}: next at {job.next_run_time.isoformat()}")
        for view, when in settings.schedule.items():
            if after(when) is not None:
                self.announce(f"{view}: {when}")
        try:
            self._stopping.wait()
        finally:
            ticker.shutdown(wait=True)
            self._end_runs()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Make :meth:`run` return; safe to call from a signal handler or another thread."""
        self._stopping.set()

    def start(self, view: str) -> bool:
        """Begin a run of ``view`` unless one is going on; returns whether it began."""
        with self._lock:
            if self._stopping.is_set():
                return False
            if view in self._begun:
                self.announce(f"{view}: the last run still goes on; this tick is dropped")
                return False
            try:
                process = subprocess.Popen(
                    list(self.command(self.project, view)), stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as exc:
                self.announce(f"{view}: cannot be started: {exc}")
                return False
            self._begun.add(view)
            self._running[view] = process
            thread = threading.Thread(target=self._watch, args=(view, process), name=f"run-{view}", daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        self.announce(f"{view}: started")
        thread.start()
        return True

    def _watch(self, view: str, process: subprocess.Popen[bytes]) -> None:
        started = time.monotonic()
        status = process.wait()
        with self._lock:
            self._running.pop(view, None)
            self._begun.discard(view)
        self.announce(f"{view}: {_outcome(status)} after {time.monotonic() - started:.1f} s")
        if status == 0:
            for child in self._children(view):
                self.start(child)

    def _children(self, view: str) -> list[str]:
        """Views that run after ``view``, unless another of their parents is running and will start them itself."""
        with self._lock:
            running = set(self._begun)
        ready = []
        for name, when in self.project.settings.schedule.items():
            parents = after(when) or []
            if view in parents and not running.intersection(parents):
                ready.append(name)
        return ready

    def _end_runs(self) -> None:
        with self._lock:
            processes = dict(self._running)
        for view, process in processes.items():
            self.announce(f"{view}: stopping")
            _signal_group(process, signal.SIGTERM)
        limit = time.monotonic() + STOP_GRACE_S
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
        for thread in self._threads:
            thread.join(timeout=5)

    def _on_signal(self, number: int, _: object) -> None:
        self._stopping.set()


def _outcome(status: int) -> str:
    if status == 0:
        return "done"
    if status < 0:
        return f"killed by signal {-status}"
    return {2: "refused: bad configuration", 3: "not published: rows were rejected"}.get(status, f"failed with status {status}")


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _trouble(event: JobExecutionEvent) -> None:
    log.error("tick of %s was lost: %s", event.job_id, event.exception or "missed")
