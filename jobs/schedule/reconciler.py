"""Reconciler: checks each minute what is live, and has repaired what readers lost of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import STOP_GRACE_S
from precompute.store.account.account import HEALING, Account, Act, has_sightings
from precompute.store.account.checker import LOOK_S, check_live, is_due, share_of
from precompute.store.errors import PrecomputeError
from precompute.store.online.url import open_online_store
from precompute.store.times import doubled_s, duration
from precompute.workers.process import ChildProcess, end_all, installed_module

POLL_S = 0.05
"""How often processes are checked for their end."""
LONGEST_WAIT_S = 3600.0
"""Longest wait between two attempts that failed."""
AT_ONCE = 2
"""Views that are repaired at the same time, so that a small one does not wait hours for a large
one; each may take ``memory_mb``."""


def reconcile_command(project: Project, view: str) -> list[str]:
    """The command line that repairs a view (``reconcile``)."""
    return [*installed_module("precompute.jobs.cli"), "-c", str(project.folder), "reconcile", view]


class Reconciler:
    """Checks and repairs all views of a project.

    Args:
        project: its views, and how often they are checked.
        announce: called with messages: what was lost, and how the repair ended.
        command: makes the command line of a repair; tests pass their own.
    """

    def __init__(
        self,
        project: Project,
        announce: Callable[[str], None],
        command: Callable[[Project, str], Sequence[str]] = reconcile_command,
    ) -> None:
        self._project, self._announce, self._command = project, announce, command
        offline = project.offline
        self._views = {name: offline.view(name) for name in project.names}
        self._notes = {name: view.leases for name, view in self._views.items()}
        self._stopping, self._looking = threading.Event(), threading.Lock()
        self._reported: dict[str, str] = {}
        self._attempts: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._tried: dict[str, set[str]] = {}
        """View → what has been repaired since it was last whole."""
        self._mending: dict[str, threading.Thread] = {}
        self._turns = threading.Semaphore(AT_ONCE)

    def stop(self) -> None:
        """End the repairs in progress soon; safe to call from another thread."""
        self._stopping.set()

    def wait(self) -> None:
        """Wait for the repairs in progress; after :meth:`stop`, only for their processes to end."""
        for thread in list(self._mending.values()):
            thread.join()

    @property
    def sighted(self) -> bool:
        """Whether readers reported damage."""
        try:
            return any(
                has_sightings(notes) and is_due(self._views[view])
                for view, notes in self._notes.items()
            )
        except PrecomputeError:
            # reported by :meth:`check`
            return False

    def check(self) -> None:
        """Check every view that is not being repaired, and begin the repairs that are needed;
        nothing while another thread does."""
        if self._looking.acquire(blocking=False):
            try:
                self._check()
            finally:
                self._looking.release()

    def _check(self) -> None:
        for view in self._project.names:
            if self._stopping.is_set():
                return
            if view in self._mending and self._mending[view].is_alive():
                continue
            try:
                account = self._account(view)
            except PrecomputeError as exc:
                self._report(
                    view, f"whether the online store serves what is live is not known: {exc}"
                )
                continue
            wrong = "; ".join(account.trouble)
            if account.act is Act.NOTHING:
                if wrong:
                    self._report(view, wrong)
                elif self._reported.pop(view, None) is not None:
                    self._announce(f"{view}: the online store serves what is live")
                self._attempts.pop(view, None)
                self._tried.pop(view, None)
                continue
            wanted = {finding.what for finding in account.findings if finding.act in HEALING}
            if not wanted <= self._tried.get(view, set()):
                # another fault than before: no wait
                self._attempts.pop(view, None)
            elif time.monotonic() < self._not_before.get(view, 0.0):
                continue
            self._report(view, f"{wrong}; it is brought back", always=True)
            thread = threading.Thread(
                target=self._bring_back, args=(view, wanted), name=f"reconcile-{view}"
            )
            try:
                thread.start()
            except RuntimeError as exc:
                # no thread is left; the next check tries again
                self._report(view, f"cannot be brought back now: {exc}", always=True)
                continue
            self._mending[view] = thread

    def _bring_back(self, view: str, wanted: set[str]) -> None:
        # here, since one without a thread was no attempt
        self._tried[view] = self._tried.get(view, set()) | wanted
        self._attempts[view] = self._attempts.get(view, 0) + 1
        while not self._turns.acquire(timeout=POLL_S):
            if self._stopping.is_set():
                return
        try:
            failure = self._mend(view)
        finally:
            self._turns.release()
        # a store that evicts rows may lose them again at once: each attempt waits
        # longer, until a check finds nothing lost
        doublings = self._attempts[view] - (2 if failure is None else 0)
        wait_s = doubled_s(self._project.settings.reconcile, doublings, LONGEST_WAIT_S)
        self._not_before[view] = time.monotonic() + wait_s
        if failure is not None:
            self._report(view, f"{failure}; once more in {duration(wait_s)}", always=True)

    def _account(self, view: str) -> Account:
        share = share_of(self._project.settings.reconcile)
        budget_s = LOOK_S / len(self._project.names)
        with contextlib.closing(open_online_store(self._project.online)) as online:
            return check_live(self._views[view], online, share=share, budget_s=budget_s)

    def _mend(self, view: str) -> str | None:
        """Run the repair; returns why it failed, None when it did not."""
        deadline_s = self._project.settings.runs.deadline
        try:
            process = ChildProcess(self._command(self._project, view))
        except OSError as exc:
            return f"cannot be started: {exc}"
        began = time.monotonic()
        while not process.ended():
            if self._stopping.wait(POLL_S) or time.monotonic() >= began + deadline_s:
                end_all([process], STOP_GRACE_S)
                break
        if process.status == 0:
            return None
        return f"it could not be brought back ({process.how_it_ended()}); its output shows more"

    def _report(self, view: str, text: str, always: bool = False) -> None:
        """Announce a message, unless it is the same as the last one."""
        if always or self._reported.get(view) != text:
            self._reported[view] = text
            self._announce(f"{view}: {text}")
