"""Behind: the views whose live rows are others than those that a view was computed from, for how long, and whether that is too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from precompute.jobs.config.project import Project
from precompute.store.clock import duration, parsed_time
from precompute.store.errors import SnapshotError
from precompute.store.offline.refs import LiveRef
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore


def inputs_behind(store: ViewStore, snapshot: Snapshot, reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The views whose live rows are others than those that ``snapshot`` was computed from: ``input``, the numbers ``computed_from`` and ``live``,
    and ``behind_s``, for how long."""
    # a run that found nothing changed commits nothing: which inputs it saw, its report tells.
    did = (report for report in reports if report.finished and report.snapshot == snapshot.number)
    inputs = next((report.inputs for report in did if report.inputs), snapshot.inputs)
    computed, behind = datetime.fromisoformat(snapshot.created_at), []
    for name, used in sorted(inputs.items()):
        read = store.offline.view(name)
        ref = read.refs.readable_live()
        since = None if ref is None else _other_rows_since(read, used, ref, computed)
        if ref is not None and since is not None:
            behind_s = max(0.0, (datetime.now(UTC) - since).total_seconds())
            behind.append({"input": name, "computed_from": used, "live": ref.snapshot, "behind_s": behind_s})
    return behind


def _other_rows_since(store: ViewStore, used: int, ref: LiveRef, computed: datetime) -> datetime | None:
    """Since when other rows than those of the snapshot ``used`` are live; None when they are the same."""

    def manifest(number: int) -> Snapshot | None:
        try:
            return store.snapshot(number)
        except SnapshotError:
            # gone or damaged, which that view's own line tells
            return None

    before, now = manifest(used) if ref.snapshot != used else None, manifest(ref.snapshot)
    if ref.snapshot == used or (before and now and before.content and before.content == now.content):
        return None
    if ref.snapshot < used:
        # rolled back
        return parsed_time(ref.at)
    newer = [number for number in store.numbers() if used < number <= ref.snapshot]
    if newer[:1] != [used + 1]:
        # the first of them is collected: it came soon after
        return computed
    for snapshot in map(manifest, newer):
        if snapshot and not snapshot.refused_by and not (before and before.content == snapshot.content):
            return max(computed, datetime.fromisoformat(snapshot.created_at))
    return parsed_time(ref.at)


def is_late(project: Project, snapshot: Snapshot, behind: Mapping[str, Any]) -> bool:
    """Whether a view is behind for longer than its rows may be old, or nothing in the schedule will bring it up."""
    if behind["behind_s"] > snapshot.view.ttl_s:
        return True
    return bool(project.schedules()) and not _follows(project, snapshot.view.name, behind["input"])


def _follows(project: Project, name: str, other: str) -> bool:
    """Whether a view runs by the clock, or after ``other`` itself or views that are computed from it."""
    schedule = project.schedules().get(name)
    if schedule is None:
        return False
    if schedule.cron is not None:
        return True
    return any(
        parent == other or (_reads(project, parent, other) and _follows(project, parent, other)) for parent in schedule.parents
    )


def _reads(project: Project, name: str, other: str) -> bool:
    """Whether a view is computed from another one, itself or through others, which may read each other."""
    seen, ahead = set[str](), [name]
    while ahead:
        at = ahead.pop()
        inputs = project.views[at].inputs() if at in project.views and at not in seen else []
        if other in inputs:
            return True
        seen.add(at)
        ahead += inputs
    return False


def in_words(behind: Mapping[str, Any]) -> str:
    """One of :func:`inputs_behind`, for people."""
    return (
        f"computed from snapshot {behind['computed_from']} of {behind['input']}, of which {behind['live']} is live: "
        f"behind for {duration(behind['behind_s'])}"
    )
