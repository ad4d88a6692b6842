"""Status: each view's live snapshot, its age against the TTL, and how the last run ended. For people and for alerting."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from jobs.config import Project
from store.freshness import Status, age_s, status_of
from store.offline_store import OfflineStore
from store.online_store import OnlineStore
from store.online_url import open_online_store


def view_status(project: Project, name: str, store: OfflineStore, online: OnlineStore) -> dict[str, Any]:
    """One view: ``status`` is fresh, stale, expired or unpublished; ``online`` whether the online store serves what is live.

    Raises:
        SnapshotError, OnlineStoreError: something cannot be read.
    """
    view = project.view(name)
    ref, pointer, last = store.live(name), online.live(name), store.last_report(name)
    line: dict[str, Any] = {
        "view": name,
        "status": "unpublished",
        "snapshot": None,
        "rows": None,
        "age_s": None,
        "ttl_s": view.ttl,
        "coverage": None,
        "rejected": None,
        "online": None,
        "last_run": None
        if last is None
        else {k: last[k] for k in ("run", "command", "status", "started_at", "seconds", "error")},
        "schedule": project.settings.schedule.get(name),
    }
    if ref is None:
        return line
    snapshot = store.snapshot(name, ref.snapshot)
    oldest = snapshot.computed_at_min
    age = (
        age_s(oldest, time.time_ns() // 1000)
        if oldest is not None
        else (time.time() - datetime.fromisoformat(snapshot.created_at).timestamp())
    )
    status = status_of(snapshot.view, age)  # as it is served; an edited TTL takes effect with the next run
    return line | {
        "status": "expired" if status is Status.MISSING else str(status),
        "snapshot": ref.snapshot,
        "ttl_s": snapshot.view.ttl_s,
        "rows": snapshot.counts.written,
        "age_s": age,
        "coverage": snapshot.counts.written / snapshot.counts.source if snapshot.counts.source else None,
        "rejected": snapshot.counts.rejected,
        "online": pointer is not None and pointer.epoch == ref.epoch,
    }


def project_status(project: Project) -> list[dict[str, Any]]:
    """:func:`view_status` of every view."""
    store, online = OfflineStore(project.root), open_online_store(project.online)
    try:
        return [view_status(project, name, store, online) for name in project.views]
    finally:
        online.close()
