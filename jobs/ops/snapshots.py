"""Snapshots: what a view has committed, and which of it can be gone back to. What ``rollback --to``, ``publish --snapshot`` and ``pin`` choose from."""

from __future__ import annotations

from typing import Any

from precompute.jobs.config.project import Project
from precompute.store.errors import SnapshotError
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing


def list_snapshots(project: Project, name: str) -> list[dict[str, Any]]:
    """A view's snapshots, the newest first; of a view that is not configured any more, too.

    Returns:
        for each ``snapshot`` (its number), ``created_at``, ``kind`` (full or delta), ``parent``, ``partition``, ``rows``, ``model``,
        ``refused_by`` and ``accepted`` (gates), ``live``, ``previous``, ``bad`` (why it is never published again), ``pinned``, and ``error``
        when the manifest cannot be read, whose other fields are None then.

    Raises:
        ConfigError: no such view, neither configured nor in the offline store.
        SnapshotError: the live pointer cannot be read.
    """
    store = project.stored(name)
    ref, standing, pins = store.refs.live(), Standing(store), store.refs.pins()
    lines = []
    for number in reversed(store.numbers()):
        marks = {
            "live": ref is not None and ref.snapshot == number,
            "previous": ref is not None and ref.previous == number,
            "pinned": number in pins,
        }
        try:
            snapshot = store.snapshot(number)
            line = _facts(snapshot) | {"bad": _why_bad(standing, snapshot), "error": None}
        except SnapshotError as exc:
            line = dict.fromkeys(_FACTS) | {
                "bad": standing.marks[number].reason if number in standing.marks else None,
                "error": str(exc),
            }
        lines.append({"snapshot": number} | line | marks)
    return lines


_FACTS = ("created_at", "kind", "parent", "partition", "rows", "model", "refused_by", "accepted")


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    return {name: getattr(snapshot, name) for name in _FACTS} | {"accepted": list(snapshot.accepted)}


def _why_bad(standing: Standing, snapshot: Snapshot) -> str | None:
    below = standing.bad_below(snapshot)
    if below is None:
        return None
    reason = standing.marks[below].reason
    return reason if below == snapshot.number else f"builds on {below}: {reason}"
