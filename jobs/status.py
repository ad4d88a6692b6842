"""Status: each view's live snapshot, its age against the TTL, what is due next, and how the last run ended. For people and for alerting."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from jobs.config import Project
from jobs.due import next_due
from store.errors import PrecomputeError
from store.freshness import Status, age_s, status_of
from store.offline_store import LiveRef, OfflineStore
from store.online_store import OnlineStore
from store.online_url import open_online_store
from store.snapshot import Snapshot

_ENDED_BADLY = ("failed", "killed", "rejected", "refused")


def view_status(project: Project, name: str, store: OfflineStore, online: OnlineStore) -> dict[str, Any]:
    """One view: ``status`` is fresh, stale, expired or unpublished; ``online`` whether the online store serves what is live; ``attention``
    what an operator should look at, empty when all is well.

    Raises:
        SnapshotError, OnlineStoreError: something cannot be read.
    """
    view = project.view(name)
    ref, pointer, last = store.live(name), online.live(name), _last_run(store, name)
    due, due_text = next_due(project, store, name, datetime.now(UTC))
    schedule = project.schedules().get(name)
    line: dict[str, Any] = {
        "view": name,
        "status": "unpublished",
        "snapshot": None,
        "partition": None,
        "rows": None,
        "age_s": None,
        "ttl_s": view.ttl,
        "coverage": None,
        "rejected": None,
        "online": None,
        "held": None if ref is None else ref.held,
        "last_run": None if last is None else {k: last.get(k) for k in _LAST_RUN},
        "schedule": None if schedule is None else schedule.when,
        "next_due": None if due is None else due.isoformat(),
        "next_due_why": due_text,
    }
    if ref is not None:
        line |= _live(store.snapshot(name, ref.snapshot), ref) | {"online": pointer is not None and pointer.epoch == ref.epoch}
    return line | {"attention": _attention(line)}


_LAST_RUN = ("run", "command", "status", "started_at", "seconds", "partition", "error")


def _last_run(store: OfflineStore, name: str) -> dict[str, Any] | None:
    """The newest run's report, whose end is told truly: one that was killed could not write it."""
    last = store.last_report(name)
    if last is None or last.get("status") != "running" or last.get("command") not in ("run", "materialize"):
        return last
    if not store.running(name, last.get("partition")):
        last |= {"status": "killed", "error": "the process ended without a word: killed, out of memory, or the machine went down"}
    return last


def _live(snapshot: Snapshot, ref: LiveRef) -> dict[str, Any]:
    oldest = max(snapshot.computed_at_min or 0, snapshot.renewed_at or 0, ref.renewed_at or 0)
    age = age_s(oldest, time.time_ns() // 1000)
    status = status_of(snapshot.view, age)  # as it is served; an edited TTL takes effect with the next run
    return {
        "status": "expired" if status is Status.MISSING else str(status),
        "snapshot": ref.snapshot,
        "partition": snapshot.partition,
        "ttl_s": snapshot.view.ttl_s,
        "rows": snapshot.rows,
        "age_s": age,
        "coverage": snapshot.rows / snapshot.counts.source if snapshot.counts.source else None,
        "rejected": snapshot.counts.rejected,
    }


def _attention(line: dict[str, Any]) -> list[str]:
    found = []
    if line["status"] != "fresh":
        found.append(line["status"])
    if line["online"] is False:
        found.append("the online store does not serve what is live")
    if line["held"] is not None:
        found.append(f"held: {line['held']}")
    last = line["last_run"]
    if last is not None and last["status"] in _ENDED_BADLY:
        found.append(f"the last run {last['status']}")
    return found


def project_status(project: Project) -> list[dict[str, Any]]:
    """:func:`view_status` of every view; one that cannot be read says so under ``attention``."""
    store, online = OfflineStore(project.root), open_online_store(project.online)
    lines = []
    try:
        for name in project.views:
            try:
                lines.append(view_status(project, name, store, online))
            except PrecomputeError as exc:
                lines.append(_UNREADABLE | {"view": name, "ttl_s": project.view(name).ttl, "attention": [str(exc)]})
        return lines
    finally:
        online.close()


_UNREADABLE: dict[str, Any] = dict.fromkeys(
    (
        "snapshot",
        "partition",
        "rows",
        "age_s",
        "coverage",
        "rejected",
        "online",
        "held",
        "last_run",
        "schedule",
        "next_due",
        "next_due_why",
    )
) | {"status": "unreadable"}
