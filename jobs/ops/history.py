"""History: what happened to a view, the newest first: its snapshots, its runs, and the moves of its
live pointer. And one run, found by its id."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow.parquet as pq

from precompute.jobs.config.project import Project
from precompute.jobs.ops.retention import list_snapshots
from precompute.jobs.run.report import as_it_ended
from precompute.store.errors import ConfigError
from precompute.store.history.versions import reading
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import parsed_time

MOST_REJECTED, SHOWN_REASONS, SHOWN_REJECTED = 100_000, 10, 20
"""Rejected rows whose reasons are counted; reasons and rows that are shown."""


def history(project: Project, view: str, limit: int) -> list[dict[str, Any]]:
    """What happened to a view, the newest first.

    Args:
        project: the configuration; the view need not be in it any more.
        limit: how many events at most.

    Returns:
        of each event ``at`` (ISO 8601 in UTC; None where it cannot be read), ``kind``, and what is
        known of it: a ``snapshot`` as ``snapshots`` lists it; a ``run`` with id, command, status,
        seconds (None of one that goes on, or was killed), snapshot and error; a ``pointer`` that
        moved to a snapshot (None: the view was dropped), with epoch and reason.

    Raises:
        ConfigError: no such view, neither configured nor in the offline store.
        SnapshotError: the live pointer, or the log of publishings, cannot be read.
    """
    store = project.stored(view)
    events = [
        {name: value for name, value in line.items() if name != "created_at"}
        | {"at": line["created_at"], "kind": "snapshot", "kind_of_snapshot": line["kind"]}
        for line in list_snapshots(project, view)
    ]
    events += [
        {"at": report.started_at, "kind": "run"}
        | {field: getattr(report, field) for field in _OF_RUN}
        # of one that goes on, or could not write its end, it is not known how long it took
        | {"seconds": report.seconds or None}
        for report in (as_it_ended(store, report) for report in store.runs.reports(limit))
    ]
    moves = [
        entry
        for entry in store.refs.publishings()
        if entry.since == entry.published_at or entry.snapshot is None
    ]
    events += [
        {
            "at": entry.since,
            "kind": "pointer",
            "epoch": entry.epoch,
            "snapshot": entry.snapshot,
            "reason": entry.reason,
        }
        for entry in moves[-limit:]
    ]
    order = ["run", "snapshot", "pointer"]
    # a snapshot that cannot be read has no time: it stands first, where it is seen
    events.sort(
        key=lambda event: (
            event["at"] is None,
            str(parsed_time(event["at"])),
            order.index(event["kind"]),
        ),
        reverse=True,
    )
    return events[:limit]


_OF_RUN = ("run", "command", "status", "seconds", "snapshot", "partition", "error")


def find_run(project: Project, run: str | None) -> tuple[ViewStore, Report]:
    """A run's report, by its id or the beginning of it, wherever its view is configured; or by the
    name of a view, whose last run it is; of None the last of all.

    Raises:
        ConfigError: there is none, or there are several.
    """
    stores = [
        project.offline.view(name)
        for name in dict.fromkeys((*project.names, *project.offline.views()))
    ]
    if run is None:
        newest = max(
            (name for store in stores for name in store.runs.ids()),
            default=None,
        )
        if newest is None:
            raise ConfigError("no view has a run yet: precompute run VIEW")
        run = newest
    for store in stores:
        if store.name == run:
            last = store.runs.last()
            if last is None:
                raise ConfigError(f"view {run!r} has no run yet: precompute run {run}")
            return store, as_it_ended(store, last)
    found = [(store, name) for store in stores for name in store.runs.ids() if name.startswith(run)]
    exact = [(store, name) for store, name in found if name == run] or found
    if len(exact) != 1 or not run:
        which = (
            f"{len(exact)} runs begin so: write more of it"
            if exact
            else "`precompute history VIEW` lists a view's runs"
        )
        raise ConfigError(f"no run {run!r}: {which}" if not exact else f"run {run!r}: {which}")
    store, name = exact[0]
    return store, as_it_ended(store, store.runs.read(name))


def rejections(store: ViewStore, run: str) -> dict[str, Any] | None:
    """The rows a run rejected: how many ``rows``, the ``path`` of the file with all of them, the
    commonest ``reasons`` (stage and error → rows), and the ``first`` of them with key, stage and
    error. None without any, and where the file is gone.

    Raises:
        SnapshotError: the file is damaged.
    """
    path = store.data / run / "rejected.parquet"
    if not store.is_here(path):
        return None
    with reading(store.name):
        table = pq.read_table(path, columns=["key", "stage", "error"])
    rows = table.slice(0, MOST_REJECTED).to_pylist()
    reasons = Counter(f"{row['stage']}: {row['error']}" for row in rows)
    return {
        "rows": table.num_rows,
        "path": str(path),
        "reasons": dict(reasons.most_common(SHOWN_REASONS)),
        "first": rows[:SHOWN_REJECTED],
    }
