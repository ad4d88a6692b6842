"""Reconciler: looks every minute whether the online store serves what is live, and has a process of its own bring back what was lost."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

from jobs.config.project import Project
from jobs.publish.served import lost
from precompute.workers.process import ChildProcess, end_all
from store.clock import duration
from store.errors import PrecomputeError
from store.online_url import open_online_store

POLL_S = 0.05
STOP_GRACE_S = 10.0
"""How long a load may take to end after SIGTERM before it is killed. What it loaded is gone on with, or dropped by the next one."""
LONGEST_WAIT_S = 3600.0
"""Between two attempts that failed, at most."""


def reconcile_command(project: Project, view: str) -> list[str]:
    """The command line that brings back what a view lost."""
    return [sys.executable, "-m", "jobs.cli", "-c", str(project.folder), "reconcile", view]


class Reconciler:
    """Looks after all views of a project.

    Args:
        project: its views, and how often.
        announce: told what was lost, and what became of it.
        command: makes the command line that brings it back; tests put their own here.
    """

    def __init__(
        self,
        project: Project,
        announce: Callable[[str], None],
        command: Callable[[Project, str], Sequence[str]] = reconcile_command,
    ) -> None:
        self._project, self._announce, self._command = project, announce, command
        self._stopping = threading.Event()
        self._told: dict[str, str] = {}
        self._attempts: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def stop(self) -> None:
        """End what goes on; :meth:`look` returns soon."""
        self._stopping.set()

    def look(self) -> None:
        """Look at every view once, and mend what is not as it should be."""
        for view in self._project.names:
            if self._stopping.is_set():
                return
            if time.monotonic() < self._not_before.get(view, 0.0):
                continue
            try:
                wrong = self._lost(view)
            except PrecomputeError as exc:
                self._tell(view, f"whether the online store serves what is live is not known: {exc}")
                continue
            if wrong is None:
                if self._told.pop(view, None) is not None:
                    self._announce(f"{view}: the online store serves what is live")
                self._attempts.pop(view, None)
                continue
            self._tell(view, f"{wrong}; it is brought back", always=True)
            self._attempts[view] = self._attempts.get(view, 0) + 1
            failure = self._mend(view)
            # what was brought back need not stay, in a store that drops rows: each attempt waits longer, until a look finds nothing lost
            doublings = self._attempts[view] - (2 if failure is None else 0)
            wait_s = min(LONGEST_WAIT_S, self._project.settings.reconcile * 2.0**doublings)
            self._not_before[view] = time.monotonic() + wait_s
            if failure is not None:
                self._tell(view, f"{failure}; once more in {duration(wait_s)}", always=True)

    def _lost(self, view: str) -> str | None:
        with contextlib.closing(open_online_store(self._project.online)) as online:
            return lost(self._project.offline.view(view), online)

    def _mend(self, view: str) -> str | None:
        """Have it brought back; why that failed, None when it did not."""
        deadline_s = self._project.settings.runs.deadline
        try:
            process = ChildProcess(self._command(self._project, view))
        except OSError as exc:
            return f"cannot be started: {exc}"
        began = time.monotonic()
        while not process.ended():
            if self._stopping.wait(POLL_S) or time.monotonic() >= began + deadline_s:
                end_all([process], STOP_GRACE_S)
        if process.status:
            return f"it could not be brought back (exit status {process.status}); its output tells more"
        return None

    def _tell(self, view: str, text: str, always: bool = False) -> None:
        """Announce a text, unless it is what was told last."""
        if always or self._told.get(view) != text:
            self._told[view] = text
            self._announce(f"{view}: {text}")
