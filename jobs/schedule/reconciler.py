"""Reconciler: looks every minute at what is live, and has processes of their own heal what is not whole, while it looks on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from precompute.jobs.config.project import Project
from precompute.store.account.account import HEALING, Account, Act
from precompute.store.account.checker import LOOK_S, look, share_of
from precompute.store.account.rounds import is_due
from precompute.store.account.sightings import are_there
from precompute.store.clock import doubled_s, duration
from precompute.store.errors import PrecomputeError
from precompute.store.online_url import open_online_store
from precompute.workers.process import ChildProcess, end_all, installed_module

POLL_S = 0.05
STOP_GRACE_S = 10.0
"""How long a load may take to end after SIGTERM before it is killed. What it loaded is gone on with, or dropped by the next one."""
LONGEST_WAIT_S = 3600.0
"""Between two attempts that failed, at most."""
AT_ONCE = 2
"""Views that are brought back side by side, so that a small one need not wait for the hours of a large one; each may take ``memory_mb``."""


def reconcile_command(project: Project, view: str) -> list[str]:
    """The command line that brings back what a view lost."""
    return [*installed_module("precompute.jobs.cli"), "-c", str(project.folder), "reconcile", view]


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
        self._tried: dict[str, set[str]] = {}
        """What of a view was to be brought back since it was last whole."""
        self._mending: dict[str, threading.Thread] = {}
        self._turns = threading.Semaphore(AT_ONCE)

    def stop(self) -> None:
        """End what goes on, soon; safe to call from a signal handler."""
        self._stopping.set()

    def wait(self) -> None:
        """Wait for what is being brought back; after :meth:`stop`, no longer than a load takes to end."""
        for thread in list(self._mending.values()):
            thread.join()

    @property
    def sighted(self) -> bool:
        """Whether readers met damage that is to be looked at."""
        views = (self._project.offline.view(view) for view in self._project.names)
        try:
            return any(are_there(view.refs.folder) and is_due(view) for view in views)
        except PrecomputeError:
            # it is told when it is looked
            return False

    def look(self) -> None:
        """Look once at every view that is not being brought back, and begin to bring back what is not as it should be."""
        for view in self._project.names:
            if self._stopping.is_set():
                return
            if view in self._mending and self._mending[view].is_alive():
                continue
            try:
                account = self._account(view)
            except PrecomputeError as exc:
                self._tell(view, f"whether the online store serves what is live is not known: {exc}")
                continue
            wrong = "; ".join(account.trouble)
            if account.act is Act.NOTHING:
                if wrong:
                    self._tell(view, wrong)
                elif self._told.pop(view, None) is not None:
                    self._announce(f"{view}: the online store serves what is live")
                self._attempts.pop(view, None)
                self._tried.pop(view, None)
                continue
            wanted, tried = {finding.what for finding in account.findings if finding.act in HEALING}, self._tried.get(view, set())
            if not wanted <= tried:
                # another thing than those that attempts are waited between for
                self._attempts.pop(view, None)
            elif time.monotonic() < self._not_before.get(view, 0.0):
                continue
            self._tried[view] = tried | wanted
            self._tell(view, f"{wrong}; it is brought back", always=True)
            self._attempts[view] = self._attempts.get(view, 0) + 1
            self._mending[view] = threading.Thread(target=self._bring_back, args=(view,), name=f"reconcile-{view}")
            self._mending[view].start()

    def _bring_back(self, view: str) -> None:
        while not self._turns.acquire(timeout=POLL_S):
            if self._stopping.is_set():
                return
        try:
            failure = self._mend(view)
        finally:
            self._turns.release()
        # what was brought back need not stay, in a store that drops rows: each attempt waits longer, until a look finds nothing lost
        doublings = self._attempts[view] - (2 if failure is None else 0)
        wait_s = doubled_s(self._project.settings.reconcile, doublings, LONGEST_WAIT_S)
        self._not_before[view] = time.monotonic() + wait_s
        if failure is not None:
            self._tell(view, f"{failure}; once more in {duration(wait_s)}", always=True)

    def _account(self, view: str) -> Account:
        share, budget_s = share_of(self._project.settings.reconcile), LOOK_S / len(self._project.names)
        with contextlib.closing(open_online_store(self._project.online)) as online:
            return look(self._project.offline.view(view), online, share=share, budget_s=budget_s)

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
