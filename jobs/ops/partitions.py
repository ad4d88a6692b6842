"""Partitions: which partitions of a view are served, and why the others are not: not computed, of
an older model, with late rows. Read from the catalog and the runs' reports: few manifests are read,
and no source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from precompute.jobs.config.view import ViewConfig, model_queries
from precompute.sources.database import parameters
from precompute.store.feature_view import FeatureView
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Entry, Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition

NAMED = 3
"""Late partitions that are named in a line."""


def partitions_served(
    config: ViewConfig, store: ViewStore, live: Snapshot, reports: Sequence[Report]
) -> dict[str, Any] | None:
    """What of a view's partitions is live; None for a view that has none.

    Args:
        config: of the view.
        store: its snapshots.
        live: the one that is served.
        reports: its newest runs', the newest first.

    Returns:
        ``serve`` (newest or all, as what is live was published), ``served`` and ``computed``
        (partitions with rows), ``rows`` (computed in the newest snapshots of all these, a key
        counted in each partition that has it), ``left_out``: reason → how many partitions are not
        served as they were computed last, ``older``: partitions of another model or source than
        the view would be computed with now, ``looked_at``: how many partitions' sources these runs
        read again to look for late rows, and ``late``: those of them that have other rows now.

    Raises:
        SnapshotError: a manifest cannot be read.
    """
    if config.partition is None:
        return None
    newest: dict[str, Entry] = {}
    for entry in store.catalog().entries.values():
        if entry.partition is not None:
            newest[entry.partition] = entry
    of_source = {"older": _older(config, store, newest)} | _late(newest, reports)
    newest = {partition: entry for partition, entry in newest.items() if entry.rows}
    facts = {"computed": len(newest), "rows": sum(entry.rows for entry in newest.values())}
    if not live.members:
        return {"serve": "newest", "served": 1} | facts | {"left_out": {}} | of_source
    return (
        {"serve": "all", "served": len(live.members)}
        | facts
        | {"left_out": _left_out(config, store, live, newest)}
        | of_source
    )


def _left_out(
    config: ViewConfig, store: ViewStore, live: Snapshot, newest: Mapping[str, Entry]
) -> dict[str, int]:
    assert config.partition is not None
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
            left_out[
                (
                    "of another model"
                    if store.snapshot(entry.number).model != live.model
                    else "not published yet"
                )
            ] += 1
    return dict(left_out)


def _older(config: ViewConfig, store: ViewStore, newest: Mapping[str, Entry]) -> list[str]:
    """Partitions that were computed otherwise than the one that was computed last, or all, where
    the view's file says another model or source by now. That a model's own files changed, the next
    run finds."""
    if not newest:
        return []
    last = max(newest.values(), key=lambda entry: entry.number)
    if _made_by(config.feature_view()) != _made_by(store.snapshot(last.number).view):
        return sorted(newest)
    if any(parameters(sql) for sql in model_queries(config.model.args).values()):
        # each partition has a model of its own
        return []
    return sorted(
        partition for partition, entry in newest.items() if entry.computation != last.computation
    )


def _made_by(view: FeatureView) -> tuple[Any, ...]:
    made_by = view.definition
    return (
        view.entity,
        view.features,
        made_by.source.strip(),
        made_by.model,
        made_by.bad_rows == "null",
    )


def _late(newest: Mapping[str, Entry], reports: Sequence[Report]) -> dict[str, Any]:
    """Late rows of each partition by the last run that looked at it, but where it was computed
    again since."""
    looked_at, late = set[str](), []
    for report in reports:
        for partition in set(report.looked_at) - looked_at:
            if (
                partition in report.late
                and partition in newest
                and newest[partition].run < report.run
            ):
                late.append(partition)
        looked_at.update(report.looked_at)
    return {"looked_at": len(looked_at), "late": sorted(late)}


def in_words(view: str, partitions: Mapping[str, Any], rows: int) -> list[str]:
    """One glance shows what is online, and what would mend the rest; empty where all is as it
    should be."""
    lines = []
    if partitions["serve"] == "all":
        why = ", ".join(f"{count:,} {reason}" for reason, count in partitions["left_out"].items())
        lines.append(
            f"all partitions: {partitions['served']:,} served"
            + (f"; not served as computed last: {why}" if why else "")
        )
    elif partitions["computed"] > 1:
        lines.append(
            f"newest partition only: {rows:,} of about {partitions['rows']:,} keys computed so far,"
            f" in {partitions['computed']:,} partitions (partition: {{serve: all}} serves them all)"
        )
    if partitions["older"]:
        older = partitions["older"]
        lines.append(
            f"{_count(older)} of an older model or source: {_backfill(view, older)} --reprocess"
            " stale` computes what is to be computed again"
        )
    if partitions["late"]:
        late = partitions["late"]
        named = ", ".join(_date(partition) for partition in late[-NAMED:]) + (
            " and others" if len(late) > NAMED else ""
        )
        lines.append(
            f"late rows in {_count(late)} ({named}) of the {partitions['looked_at']:,} that runs"
            f" looked at: {_backfill(view, late)} --reprocess stale --check-inputs` computes these,"
            " and looks at all others"
        )
    return lines


def _count(partitions: Sequence[str]) -> str:
    return f"{len(partitions):,} partition{'s' if len(partitions) > 1 else ''}"


def _backfill(view: str, partitions: Sequence[str]) -> str:
    return f"`precompute backfill {view} --from {_date(partitions[0])} --to {_date(partitions[-1])}"


def _date(partition: str) -> str:
    """Where a partition begins, as ``--from`` and ``--to`` take it."""
    return partition.partition("/")[0].removesuffix("T00:00Z")
