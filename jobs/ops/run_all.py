"""Run all: several views, each in a process of its own, in the order of what they depend on. One
that fails stops only what depends on it."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from precompute.jobs.config.project import Project
from precompute.jobs.ops.status import WAITING, Waiting, never_began, project_status
from precompute.jobs.run.command_process import STOP_GRACE_S, on_signals
from precompute.jobs.schedule.dependencies import Dependencies
from precompute.store.disk.durable_file import replace_durably
from precompute.store.disk.lease import take
from precompute.store.disk.record import plain, sealed
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.store.offline.runs import Report
from precompute.store.times import shown_time, utc_now
from precompute.workers.process import POLL_S, ChildProcess, end_all, installed_module

log = logging.getLogger(__name__)

DONE, FAILED, BAD_USAGE, REFUSED = 0, 1, 2, 3
_WORST = (BAD_USAGE, FAILED, REFUSED, DONE)
"""Exit statuses of a run, the worst first."""

FAILED_ENDS = ("failed", "killed", "cancelled", "rejected", "refused")

Output = Literal["inherited", "captured"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one view. ``status`` is its report's; ``failed`` without a report; ``skipped``
    if a view that it depends on was not done. ``exit_status`` is that of ``run VIEW``, None where
    it did not run."""

    view: str
    status: str
    exit_status: int | None
    seconds: float = 0.0
    run: str | None = None
    snapshot: int | None = None
    rows: int | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        """Whether what depends on it may run."""
        return self.exit_status == DONE


@dataclass(frozen=True, slots=True)
class Selection:
    """Which views are to run, and how. ``selectors`` as :meth:`Dependencies.select` has them, none
    for all. ``stale`` selects those that are not fresh, ``failed`` those whose last run failed or
    never began, or whose file is wrong, each with the views that depend on them. ``options`` of the
    command line go to each run."""

    selectors: Sequence[str] = ()
    stale: bool = False
    failed: bool = False
    options: Sequence[str] = field(default=())


def selected(project: Project, selection: Selection) -> list[str]:
    """The views to run, in order. Views that take a DataFrame are left out unless they are named,
    since only Python gives one.

    Raises:
        ConfigError: a selector names no view.
    """
    dependencies = Dependencies(project)
    chosen = dependencies.select(
        selection.selectors or [name for name in project.names if not _takes_frame(project, name)]
    )
    if not (selection.stale or selection.failed):
        return chosen
    wanted, waited = set[str](), never_began(project)
    for line in project_status(project):
        name, last = line["view"], line["last_run"]
        stale = selection.stale and (line["status"] != "fresh" or bool(line["behind"]))
        failed = selection.failed and (
            name in project.broken
            or name in waited
            or (last is not None and last["status"] in FAILED_ENDS)
        )
        if name in chosen and (stale or failed):
            wanted |= {name} | dependencies.below(name)
    return [name for name in chosen if name in wanted]


def _takes_frame(project: Project, name: str) -> bool:
    return name not in project.broken and project.view(name).source.frame is not None


def run_all(
    project: Project,
    names: Sequence[str],
    options: Sequence[str] = (),
    *,
    output: Output = "inherited",
    announce: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Run views one after the other, each after those that it depends on. Views that a killed run
    of several had not begun are announced first.

    Args:
        names: in the order of :func:`selected`.
        options: of ``run``, for each.
        output: whether their processes write to our output; if not, the end of it is in the
            outcomes.
        announce: called with messages.

    Returns:
        an outcome for each, in order.
    """
    if left := never_began(project):
        announce(
            f"the run of several views of {shown_time(min(left.values()))} was killed before these"
            f" began: {', '.join(left)}"
        )
    with waiting(project, names):
        return _run_each(project, names, options, output, announce)


@contextlib.contextmanager
def waiting(project: Project, names: Sequence[str]) -> Iterator[None]:
    """Record these views while they run; if the process is killed, the record stays."""
    path = project.root / WAITING
    try:
        lease = take(path.parent, path.stem, "run of several views")
        replace_durably(path, sealed(Waiting(utc_now(), list(names))))
    except (PrecomputeError, OSError) as exc:
        log.warning("which views wait is not on record: %s", exc)
        yield
        return
    with lease:
        yield
        path.unlink(missing_ok=True)


def _run_each(
    project: Project,
    names: Sequence[str],
    options: Sequence[str],
    output: Output,
    announce: Callable[[str], None],
) -> list[Outcome]:
    dependencies, outcomes = Dependencies(project), dict[str, Outcome]()
    for number, name in enumerate(names, 1):
        stopped = [
            parent
            for parent in dependencies.parents[name]
            if parent in outcomes and not outcomes[parent].done
        ]
        if stopped:
            ends = {parent: outcomes[parent].status for parent in stopped}
            why = ", ".join(
                f"{p} {'' if end == 'failed' else 'was '}{end}" for p, end in ends.items()
            )
            outcomes[name] = Outcome(name, "skipped", None, error=f"not run: {why}")
            announce(f"{name} ({number} of {len(names)}): {outcomes[name].error}")
            continue
        announce(f"{name} ({number} of {len(names)})")
        outcomes[name] = _run(project, name, options, output)
    return list(outcomes.values())


def _run(project: Project, name: str, options: Sequence[str], output: Output) -> Outcome:
    """Run one view in a process of its own: if a model crashes or the kernel kills it, the other
    views still run."""
    try:
        project.view(name)
    except ConfigError as exc:
        return Outcome(name, "failed", BAD_USAGE, error=str(exc))
    store, started = project.offline.view(name), time.monotonic()
    before = store.runs.last()
    command = [
        *installed_module("precompute.jobs.cli"),
        "-c",
        str(project.folder),
        "run",
        name,
        *options,
    ]
    came: list[int] = []
    with on_signals(lambda number, _: came.append(number)):
        try:
            process = ChildProcess(command, output=output)
        except OSError as exc:
            error = f"its process cannot be started: {exc.strerror or exc}"
            return Outcome(name, "failed", FAILED, error=error)
        while not (came or process.wait(POLL_S)):
            pass
        # what ends this process ends it, too, and its report says so; this one waits for that
        if came:
            end_all([process], STOP_GRACE_S)
    if came:
        signal.raise_signal(came[0])
    report = store.runs.last()
    if report is not None and (
        (before is not None and report.run <= before.run) or report.pid != process.pid
    ):
        # none was written: the last one is of a run before, or of one that was begun elsewhere
        # while this process started, and keeps it from running
        report = None
    return _outcome(name, process, report, time.monotonic() - started)


def _outcome(name: str, process: ChildProcess, report: Report | None, seconds: float) -> Outcome:
    status = process.status
    assert status is not None
    code = status if status in _WORST else FAILED
    if report is None:
        return Outcome(
            name,
            "current" if code == DONE else "failed",
            code,
            round(seconds, 3),
            error=None
            if code == DONE
            else process.last_words() or f"its process {process.how_it_ended()}",
        )
    error = report.error
    if report.status == "running":
        # the process was killed, so the report has no end
        report.status, error = "killed", f"its process {process.how_it_ended()}"
    rows = report.counts["written"] + report.counts["unchanged"] if report.counts else None
    return Outcome(
        name, report.status, code, round(seconds, 3), report.run, report.snapshot, rows, error
    )


def worst(outcomes: Sequence[Outcome]) -> int:
    """The exit status of all: 2 before 1 before 3 before 0."""
    return next(
        (status for status in _WORST if any(outcome.exit_status == status for outcome in outcomes)),
        DONE,
    )


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """One report of all: ``exit_status``, ``seconds``, how many ended how (``counts``), and
    ``views``, an outcome each in the order they ran."""
    return {
        "exit_status": worst(outcomes),
        "seconds": round(seconds, 3),
        "counts": dict(Counter(outcome.status for outcome in outcomes)),
        "views": [plain(outcome) for outcome in outcomes],
    }
