"""Job: what a run is about: project, view, store, options and lease, all frozen. The results of its
steps are handed from one to the next: see :mod:`precompute.jobs.run.materialize`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precompute.jobs.config.project import Project
from precompute.jobs.config.view import ViewConfig
from precompute.store.disk.lease import Lease
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition

if TYPE_CHECKING:
    from precompute.jobs.run.rows.open_model import Load


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run is to do; the command line has options of the same names.

    Args:
        command: ``run``, or only its first half ``materialize``, or only its second half
            ``publish``.
        number: which snapshot to publish; the newest by default.
        partition: which one to compute; of a partitioned view the latest that is over by default.
        full: compute every row.
        retry_rejected: compute rows that were rejected with the same input, too.
        accept: gates whose refusal is accepted; the manifest records them.
        reload: publish it again, though the online store seems to hold it.
        take_over: publish it, though another project publishes the view in the online store.
        due: the schedule's time this run is for, ISO 8601 in UTC.
        backfill: id of the backfill this run is a part of.
        deadline_s: the kernel ends the process after this long, whatever it hangs in.
        frame: the rows, of a view with ``source: {frame: …}``: see
            :func:`precompute.sources.frame.write_frame`.
    """

    command: str = "run"
    number: int | None = None
    partition: Partition | None = None
    full: bool = False
    retry_rejected: bool = False
    accept: Collection[str] = ()
    reload: bool = False
    take_over: bool = False
    due: str | None = None
    backfill: str | None = None
    deadline_s: float | None = None
    frame: Any = None

    @property
    def partition_text(self) -> str | None:
        """The partition, as manifests and reports name it."""
        return None if self.partition is None else str(self.partition)


@dataclass(frozen=True, slots=True)
class Job:
    """One run. ``lease`` is checked before the commit; None where nothing is committed. ``load``
    makes the model; by default it is loaded as configured."""

    project: Project
    config: ViewConfig
    store: ViewStore
    options: RunOptions
    lease: Lease | None = None
    load: Load | None = None
