"""Runs: what was done to a view, a report each: the ledger that planning, scheduling and people
read.

<root>/<view>/runs/<run>.json        written when the run begins (``running``) and again when it
ends <root>/<view>/refs/running/<run>     an empty file for each run whose report says that it goes
on
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from precompute.store.disk.durable_file import (
    disk_message,
    make_folder,
    replace_durably,
    sync_folder,
)
from precompute.store.errors import SnapshotError
from precompute.store.freshness import AHEAD_US
from precompute.store.offline.snapshot import Verdict
from precompute.store.record import Record, field, read_record, sealed

log = logging.getLogger(__name__)

FINISHED = ("published", "committed", "current")
"""Statuses of runs that did what they were for."""

AHEAD_S = 86400.0
"""How far ahead of the clock what was noted may lie: a clock set back by hours runs nothing twice.
Beyond that the clock was wrong when it was noted."""

_STAMP = "%Y%m%dT%H%M%S.%fZ"


class Report(Record):
    """One run; times in seconds.

    ``status``: running · published · committed (not published) · current (nothing to do) · refused
    (by a gate) · rejected (too many rows) · failed · cancelled (interrupted) · killed.
    """

    run: str
    view: str
    command: str
    status: str = "running"
    started_at: str = ""
    finished_at: str = ""
    seconds: float = 0.0
    snapshot: int | None = None
    epoch: int | None = None
    model: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    rows_per_s: float | None = None
    stages_s: dict[str, float] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    """What computing took, stage by stage, as the engine's meter tells it."""
    index: dict[str, Any] = field(default_factory=dict)
    """What was measured of the vector index, where one was built: see
    :class:`precompute.store.vectors.index_record.IndexFigures`."""
    inputs: dict[str, int] = field(default_factory=dict)
    gates: list[Verdict] = field(default_factory=list)
    resumed: int = 0
    """Rows an interrupted run had computed."""
    plan: str | None = None
    """Which rows were computed, and why."""
    partition: str | None = None
    backfill: str | None = None
    """Id of the backfill it was a part of."""
    due: str | None = None
    """The schedule's time it ran for, ISO 8601 in UTC."""
    parents: dict[str, int] = field(default_factory=dict)
    """Views it is scheduled after → the epoch of their live pointer when it began."""
    pid: int = 0
    read_at_us: int = 0
    """When the source was read, µs since 1970."""
    source_at: str | None = None
    """When the source itself was last modified, ISO 8601 in UTC; None where it is not known."""
    looked_at: list[str] = field(default_factory=list)
    """Other partitions, whose source was read again after the run."""
    late: list[str] = field(default_factory=list)
    """Those of them whose source yields other rows than they were computed from."""
    error: str | None = None
    attention: list[str] = field(default_factory=list)
    """What an operator should look at though the run went well."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether it did what it was for."""
        return self.status in FINISHED

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to a stage."""
        self.stages_s[name] = self.stages_s.get(name, 0.0) + seconds


class Runs:
    """The runs of one view.

    Args:
        folder: of their reports; made by the first.
        running: folder of the markers.
        view: the view's name, for messages.
    """

    def __init__(self, folder: Path, running: Path, view: str) -> None:
        self.folder, self._running, self._view = folder, running, view

    def stamp(self) -> str:
        """The time that the id of a run begins with that begins now. Ids sort in the order of the
        runs, whatever the clocks say: where an earlier run's time lies ahead, since its clock was
        wrong, this one's is a microsecond later."""
        now = datetime.now(UTC)
        for name in self._names():
            try:
                last = datetime.strptime(name[:23], _STAMP).replace(tzinfo=UTC)
            except ValueError:
                # Not one of ours.
                continue
            if last >= now:
                if last - now > timedelta(microseconds=AHEAD_US):
                    log.warning(
                        "view %r: run %s is dated %d s ahead of this clock, which jumped, or that"
                        " one's was wrong",
                        self._view,
                        name.removesuffix(".json"),
                        (last - now).total_seconds(),
                    )
                now = last + timedelta(microseconds=1)
            break
        return now.strftime(_STAMP)

    def path(self, run: str) -> Path:
        """Where a run's report is."""
        return self.folder / f"{run}.json"

    def write(self, report: Report, state: str = "only the run's report is missing") -> None:
        """Write a run's report, whole or not at all; a second report of the same run replaces the
        first.

        Raises:
            SnapshotError: it cannot be written; ``state`` says what else is lost.
        """
        path, marker, goes_on = (
            self.path(report.run),
            self._running / report.run,
            report.status == "running",
        )
        try:
            make_folder(self.folder)
            if goes_on:
                # before the report: so that unended ones are found without reading all
                make_folder(self._running)
                marker.touch()
                sync_folder(self._running)
            replace_durably(path, sealed(report, indent=1))
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc, state)) from exc
        if not goes_on:
            with contextlib.suppress(OSError):
                marker.unlink(missing_ok=True)

    def withdraw(self, report: Report) -> None:
        """Remove the report of a command that was refused and changed nothing."""
        for path in (self.path(report.run), self._running / report.run):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def unended(self) -> list[Report]:
        """Reports of the runs that did not write their end: they go on, or died."""
        unended = []
        for marker in sorted(self._running.glob("*"), reverse=True):
            try:
                report = read_record(Report, self.path(marker.name).read_bytes())
            except FileNotFoundError:
                # About to be written, or never was.
                continue
            except (OSError, ValueError) as exc:
                log.warning("the report of run %s cannot be read (%s)", marker.name, exc)
                continue
            if report.status == "running":
                unended.append(report)
            else:
                # It ended, and was killed before it could remove its marker.
                with contextlib.suppress(OSError):
                    marker.unlink(missing_ok=True)
        return unended

    def reports(self, limit: int = 100, since: str = "") -> list[Report]:
        """Reports of the newest runs, the newest first; run ids sort in the order of the runs
        (:meth:`stamp`). One that cannot be read is skipped, and reported in the log.

        Args:
            limit: how many at most.
            since: none of a run whose id is below.
        """
        reports: list[Report] = []
        for name in self._names():
            if len(reports) == limit or name < since:
                break
            try:
                reports.append(read_record(Report, (self.folder / name).read_bytes()))
            except (OSError, ValueError) as exc:
                log.warning(
                    "the run's report %s cannot be read (%s); remove the file",
                    self.folder / name,
                    exc,
                )
        return reports

    def read(self, run: str) -> Report:
        """One run's report.

        Raises:
            SnapshotError: there is none, or it cannot be read.
        """
        try:
            return read_record(Report, self.path(run).read_bytes())
        except (OSError, ValueError) as exc:
            raise SnapshotError(
                f"the report of run {run!r} of view {self._view!r} cannot be read: {exc}"
            ) from exc

    def last(self) -> Report | None:
        """The newest run's report."""
        return next(iter(self.reports(1)), None)

    def _names(self) -> list[str]:
        """File names of the reports, the newest first; a Path for each would cost as much as all
        the rest."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(
            (name for name in names if name.endswith(".json") and not name.startswith(".")),
            reverse=True,
        )
