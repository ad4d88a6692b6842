"""Explanation: which run, snapshot, input and model made the values of one key, when they were
served, and what they were before."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.errors import RequestError, SnapshotError
from precompute.store.history.point_in_time import manifests_of
from precompute.store.history.versions import (
    Period,
    Span,
    Versions,
    key_names,
    reading,
    rows_at,
    served_periods,
)
from precompute.store.keys import key_text, split_key
from precompute.store.offline.runs import run_of_folder
from precompute.store.offline.segment import COPIED, Part
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.stored_file import parsing
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import as_datetime, iso, microseconds

_INT64 = re.compile("0|-?[1-9][0-9]{0,17}")
"""Whole numbers that fit; a longer one is compared as text, which is as good."""


@dataclass(frozen=True, slots=True)
class Version:
    """One value of a key.

    ``snapshot`` is the oldest one retained that holds it. ``run`` computed it; None when neither
    manifest nor report of that run is retained. ``before`` has the features that differ in the
    version before this one, with their values there; None for the first. ``removed_in`` and
    ``removed_at`` tell of the snapshot in which the key was no more. ``void`` says why no snapshot
    with this value may be live any more: rolled back from, or refused by a gate; None when one may.
    ``served`` has the times from and until which lookups were answered with it from the store, as
    far back as snapshots are retained; None: until now, and one that lies ahead is when the row
    will have expired.
    """

    snapshot: int
    run: str | None
    model: str
    partition: str | None
    computed_at: datetime
    input_hash: int
    features: Mapping[str, Any]
    before: Mapping[str, Any] | None
    removed_in: int | None
    removed_at: str | None
    live: bool
    void: str | None
    served: list[tuple[datetime, datetime | None]]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row of a ``rejected.parquet``: the run that refused the key, its snapshot (None when
    nothing was committed), stage and error."""

    run: str
    snapshot: int | None
    partition: str | None
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a row came to be: its versions and rejections, the newest first; ``live`` is the snapshot
    that is live, None for none."""

    view: str
    key: str
    live: int | None
    versions: list[Version] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The explanation as a JSON document; times are ISO 8601 in UTC."""
        body = asdict(self)
        for version in body["versions"]:
            version["computed_at"] = iso(version["computed_at"])
            version["served"] = [
                tuple(None if at is None else iso(at) for at in times)
                for times in version["served"]
            ]
        return body


def explain(store: ViewStore, key: Any, *, memory_mb: int = 1024) -> Explanation:
    """Which run, snapshot, input and model made the values of a key, when they were served, and
    what they were before.

    Args:
        store: of the view.
        key: as :func:`precompute.store.keys.key_text` takes it.
        memory_mb: DuckDB's memory.

    Raises:
        RequestError: no snapshot that is retained ever had the key, and no run rejected it; or it
            is no key of this view.
        SnapshotError: there is no snapshot, or a file is missing or damaged.
    """
    view, manifests = store.name, manifests_of(store)
    if not manifests:
        raise SnapshotError(
            f"view {view!r} has no snapshot under {store.offline.root}: run `precompute run {view}`"
        )
    ref, entity = store.log.readable_live(), manifests[max(manifests)].view.entity
    live = None if ref is None else ref.snapshot
    text = key_text(key, entity)
    # what is served of several partitions comes behind them: they hold a value first
    order = sorted(
        (s for s in manifests.values() if s.view.entity == entity),
        key=lambda s: (bool(s.members), s.partition or "", s.number),
    )
    explained: list[Version] = []
    parts = split_key(text, entity)
    if len(parts) == len(entity):
        columns = [pa.array([int(part) if _INT64.fullmatch(part) else part]) for part in parts]
        requested = pa.table(columns, names=key_names(entity))
        with reading(view), Versions(store, order, requested, memory_mb) as versions:
            explained = _explained(store, manifests, order, versions, live)
    rejections = list(_rejections(store, manifests, live, text))
    if not explained and not rejections:
        raise RequestError(
            f"view {view!r} has no history of key {text!r}: none of its {len(manifests)} snapshots"
            " has it, and no run rejected it",
            status=404,
            code="unknown_entity",
        )
    return Explanation(view, text, live, explained, rejections)


def _explained(
    store: ViewStore,
    manifests: Mapping[int, Snapshot],
    order: Sequence[Snapshot],
    versions: Versions,
    live: int | None,
) -> list[Version]:
    """The versions of the requested key, the newest first."""
    standing = Standing(store)
    void = [standing.why_void(snapshot) for snapshot in order]
    periods = served_periods(store, manifests)
    spans = versions.spans()
    present = {position for span in spans for position in range(span.first, span.end)}
    explained: list[Version] = []
    for copies in _by_version(spans, order):
        span = copies[0]
        positions = [position for copy in copies for position in range(copy.first, copy.end)]
        oldest = order[positions[0]]
        row = rows_at(
            versions.paths,
            np.array([span.file]),
            np.array([span.row]),
            oldest.view.feature_schema(),
        )
        features = row.to_pylist()[0]
        before = explained[-1].features if explained else None
        removed = _removed(positions[-1], present, order, void)
        explained.append(
            Version(
                snapshot=oldest.number,
                run=_run_of(
                    store,
                    versions.paths[span.file],
                    versions.first_holders[span.file],
                    span.computed_us,
                ),
                model=oldest.model,
                partition=oldest.partition,
                computed_at=as_datetime(span.computed_us),
                input_hash=span.input_hash,
                features=features,
                before=(
                    None
                    if before is None
                    else {n: before.get(n) for n, v in features.items() if before.get(n) != v}
                ),
                removed_in=None if removed is None else removed.number,
                removed_at=None if removed is None else removed.created_at,
                live=any(order[position].number == live for position in positions),
                void=(
                    None
                    if any(void[position] is None for position in positions)
                    else void[positions[0]]
                ),
                served=_served(
                    periods, {order[position].number for position in positions}, span.computed_us
                ),
            )
        )
    return explained[::-1]


def _by_version(spans: Sequence[Span], order: Sequence[Snapshot]) -> list[list[Span]]:
    """The spans of each version: copies of a row keep both time and input, and are copies beyond
    their partition where several are served together."""
    held: dict[tuple[Any, ...], list[Span]] = {}
    together = any(snapshot.members for snapshot in order)
    for span in spans:
        snapshot = order[span.first]
        of = () if together else (snapshot.partition, snapshot.recipe)
        held.setdefault((*of, span.computed_us, span.input_hash), []).append(span)
    return list(held.values())


def _served(
    periods: Sequence[Period], numbers: Collection[int], computed_us: int
) -> list[tuple[datetime, datetime | None]]:
    """The times from and until which a row of these snapshots was served."""
    served: list[tuple[datetime, datetime | None]] = []
    ends = [*(period.since_us for period in periods[1:]), None]
    for period, until_us in zip(periods, ends, strict=True):
        if period.snapshot is None or period.snapshot.number not in numbers:
            continue
        end_us = period.ends_us(computed_us, until_us)
        if end_us is not None and end_us <= period.since_us:
            continue
        since, until = as_datetime(period.since_us), None if end_us is None else as_datetime(end_us)
        if served and served[-1][1] == since:
            since = served.pop()[0]
        served.append((since, until))
    return served


def _removed(
    last: int, present: Collection[int], order: Sequence[Snapshot], void: Sequence[str | None]
) -> Snapshot | None:
    """The next snapshot of the partition that counts, after the position a version was ``last`` in,
    if the key is no more in it."""
    later = range(last + 1, len(order))
    following = next(
        (p for p in later if order[p].partition == order[last].partition and void[p] is None), None
    )
    return None if following is None or following in present else order[following]


def _run_of(store: ViewStore, path: Path, holder: Snapshot, computed_us: int) -> str | None:
    """The run that computed a row: the one whose folder its file is in, unless that run only copied
    rows together."""
    if not path.name.startswith(COPIED):
        return run_of_folder(path.parent.name)
    for report in store.runs.reports(limit=1000):
        # of all partitions, any may have computed it
        other = report.partition != holder.partition and not holder.members
        if other or report.command in ("publish", "rollback", "resume"):
            continue
        began_us, ended_us = microseconds(report.started_at), microseconds(report.finished_at)
        if began_us is not None and ended_us is not None and began_us <= computed_us <= ended_us:
            return report.run
    return None


def _rejections(
    store: ViewStore, manifests: Mapping[int, Snapshot], live: int | None, text: str
) -> Iterator[Rejection]:
    """Where the newest failed run, the newest snapshot and the live one rejected the key."""
    newest = manifests[max(manifests)]
    files: dict[Part, tuple[str, int | None, str | None]] = {}
    for report in store.runs.reports():
        if report.status == "rejected" and report.finished_at > newest.created_at:
            if "rejected" in report.files:
                files[report.files["rejected"]] = (report.run, None, report.partition)
            break
    for snapshot in (newest, manifests.get(live or 0)):
        if snapshot is not None and snapshot.rejected is not None:
            files.setdefault(snapshot.rejected, (snapshot.run, snapshot.number, snapshot.partition))
    for part, (run, number, partition) in files.items():
        path = store.file(part)
        if path is not None:
            with parsing(path, f"precompute run {store.name} tries these rows again"):
                rows = pq.read_table(
                    path, columns=["key", "stage", "error"], filters=[("key", "=", text)]
                ).to_pylist()
            yield from (
                Rejection(run, number, partition, row["stage"], row["error"]) for row in rows
            )
