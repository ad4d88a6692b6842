"""Source age: how old what a view is computed from is, whatever the age of its rows. A source that is frozen upstream shows here alone, since rows
that are found unchanged count as fresh.
"""

from __future__ import annotations

from collections.abc import Iterable

from precompute.jobs.rows.open_view import OpenView
from precompute.sources.statement import referenced_views
from precompute.store.freshness import as_datetime, iso, microseconds
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import OfflineStore

REPORTS = 50
"""How many of a view's newest reports are looked at for the last one that did its work."""


def read_source_at(opened: OpenView, offline: OfflineStore) -> str | None:
    """When what a view's source SQL reads was last modified: the newest of its local files, or the oldest of that and what is known of the views it
    reads. ISO 8601 in UTC; None where nothing is known.

    Raises:
        SourceError, SnapshotError: something cannot be read.
    """
    times_us = [opened.source.modified_us()]
    for name in referenced_views(opened.view.definition.source):
        store = offline.view(name)
        times_us.append(microseconds(known_source_at(store.snapshot(opened.inputs[name]), store.runs.reports(REPORTS)) or ""))
    return iso_us(min((us for us in times_us if us is not None), default=None))


def known_source_at(snapshot: Snapshot, reports: Iterable[Report]) -> str | None:
    """As the newest of ``reports`` that found the snapshot to be what the source yields tells it, and else its manifest."""
    did = (report for report in reports if report.finished and report.snapshot == snapshot.number)
    return next((report.source_at for report in did if report.source_at), snapshot.source_at)


def iso_us(us: int | None) -> str | None:
    """µs since 1970 as an ISO 8601 time in UTC."""
    return None if us is None else iso(as_datetime(us))
