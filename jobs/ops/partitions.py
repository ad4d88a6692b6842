"""Partitions: of a partitioned view, how many of those that were computed are served, and why the others are not. From the catalog: few manifests are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from jobs.config.view import ViewConfig
from store.offline.catalog import Entry
from store.offline.snapshot import Snapshot
from store.offline.view_store import ViewStore
from store.partition import Partition


def partitions_served(config: ViewConfig, store: ViewStore, live: Snapshot) -> dict[str, Any] | None:
    """What of a view's partitions is live; None for a view that has none.

    Returns:
        ``serve`` (newest or all, as what is live was published), ``served`` and ``computed`` (partitions with rows), ``rows`` (computed in the newest snapshots of all
        these, a key counted in each partition that has it), and ``left_out``: reason → how many partitions are not served as they were computed last.

    Raises:
        SnapshotError: a manifest cannot be read.
    """
    if config.partition is None:
        return None
    newest: dict[str, Entry] = {}
    for entry in store.catalog().entries.values():
        if entry.partition is not None and entry.rows:
            newest[entry.partition] = entry
    facts = {"computed": len(newest), "rows": sum(entry.rows for entry in newest.values())}
    if not live.members:
        return {"serve": "newest", "served": 1} | facts | {"left_out": {}}
    marks, left_out = store.refs.bad(), Counter[str]()
    since = None
    if config.partition.keep is not None:
        since = Partition.parse(max(live.members)).end - timedelta(seconds=config.partition.keep)
    for partition, entry in sorted(newest.items()):
        if live.members.get(partition) == entry.number:
            continue
        if since is not None and Partition.parse(partition).end <= since:
            left_out["older than keep"] += 1
        elif entry.number in marks:
            left_out[marks[entry.number].reason.partition(",")[0].partition(":")[0]] += 1
        elif entry.refused_by:
            left_out[f"refused by {', '.join(entry.refused_by)}"] += 1
        else:
            left_out["of another model" if store.snapshot(entry.number).model != live.model else "not published yet"] += 1
    return {"serve": "all", "served": len(live.members)} | facts | {"left_out": dict(left_out)}


def in_words(partitions: Mapping[str, Any], rows: int) -> str:
    """One glance shows what is online; empty where that is all there is."""
    if partitions["serve"] == "newest":
        if partitions["computed"] < 2:
            return ""
        return (
            f"newest partition only: {rows:,} of about {partitions['rows']:,} keys computed so far, in {partitions['computed']:,} partitions "
            "(partition: {serve: all} serves them all)"
        )
    why = ", ".join(f"{count:,} {reason}" for reason, count in partitions["left_out"].items())
    return f"all partitions: {partitions['served']:,} served" + (f"; not served as computed last: {why}" if why else "")
