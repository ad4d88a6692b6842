"""Plan: which rows a run computes, and why. What ``materialize --dry-run`` prints and :func:`jobs.pipeline.materialize.materialize` carries out.

A row is computed when no earlier result has its key, its input hash and the view's recipe: not the snapshot built on, not an interrupted
run. A changed model, SQL, column or feature is another recipe, and then every row is computed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from jobs.config.view import ViewConfig
from jobs.pipeline.open_view import OpenView, files_of, variant_name
from precompute.diff import Diff, compare
from precompute.model import digest
from precompute.source import Files
from precompute.sources.input_hash import MD5
from store.errors import SnapshotError
from store.offline.journal import Finished
from store.offline.snapshot import Snapshot
from store.offline.standing import Standing
from store.offline.view_store import ViewStore

log = logging.getLogger(__name__)

MAX_DELTAS = 8
"""Deltas in a chain before it is compacted: each adds files to every read."""
MAX_DELTA_SHARE = 0.25
"""Rows of all deltas of a chain, as a share of its full snapshot, before it is compacted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does.

    ``parent`` is the snapshot built on, None when every row is computed; ``finished`` what interrupted runs computed; ``compact`` whether the
    rows taken over are copied, so that the result stands alone.
    """

    source_rows: int
    diff: Diff
    parent: Snapshot | None
    reason: str
    recipe: str
    content: str
    finished: list[Finished]
    compact: bool
    read_at_us: int
    same_view: bool
    """Whether the parent was made of the view as it is defined now, TTL, index and fallback included."""

    @property
    def nothing_to_do(self) -> bool:
        """The parent holds this very content under this very definition, and none of it is past its time."""
        done = self.parent is not None and self.parent.content == self.content and self.same_view
        return done and not self.diff.compute and not self.diff.expired

    @property
    def delta(self) -> bool:
        """Whether the result builds on the parent."""
        return self.parent is not None and not self.compact

    def __str__(self) -> str:
        """For people: how many rows of each kind, and why."""
        diff = self.diff
        kinds = [
            (diff.new, "new"),
            (diff.changed, "changed"),
            (diff.expired, "past ttl"),
            (-diff.resumed, "computed by an interrupted run"),
            (-diff.refused, "rejected before with the same input"),
        ]
        retried = f", {diff.retried:,} of them rejected before" if diff.retried else ""
        counted = ", ".join(f"{'–' if n < 0 else ''}{abs(n):,} {what}" for n, what in kinds if n)
        left = [f"{diff.unchanged:,} unchanged"] * bool(diff.unchanged) + [f"{diff.removed:,} removed"] * bool(diff.removed)
        kind = (
            "nothing to do"
            if self.nothing_to_do
            else ("delta" if self.delta else "full") + (", compacting" if self.compact else "")
        )
        return (
            f"{kind}: {diff.compute:,} of {self.source_rows:,} rows to compute"
            + (f" ({counted}{retried})" if counted else "")
            + "".join(f", {text}" for text in left)
            + f"; {self.reason}"
        )

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        kinds = {name: getattr(self.diff, name) for name in Diff.__slots__ if not name.endswith("_us")}
        kind = "none" if self.nothing_to_do else "delta" if self.delta else "full"
        parent = None if self.parent is None else self.parent.number
        return {"kind": kind, "source": self.source_rows, "compute": self.diff.compute, **kinds} | {
            "parent": parent,
            "compact": self.compact,
            "reason": self.reason,
        }


def make_plan(
    config: ViewConfig,
    opened: OpenView,
    store: ViewStore,
    partition: str | None,
    source_rows: int,
    *,
    read_at_us: int,
    full: bool = False,
    retry_rejected: bool = False,
) -> Plan:
    """Compare a loaded source with what was computed before.

    Args:
        config: the view.
        opened: its source is loaded.
        store: where snapshots and the chunks of interrupted runs are.
        partition: of a partitioned view.
        source_rows: rows loaded.
        read_at_us: when the source was read, µs since 1970.
        full: compute every row, but for those an interrupted run that was told the same has.
        retry_rejected: compute rows that were rejected with the same input, too.

    Raises:
        SnapshotError, SourceError: something cannot be read.
    """
    source, view = opened.source, opened.view
    recipe = recipe_of(opened)
    content = f"{recipe}:{source.content()}"
    expired = None if config.renew_unchanged else read_at_us - int(view.ttl_s * 1e6)
    finished = store.journals.unfinished(recipe, partition, full=full)
    while True:
        previous = None if full else Standing(store).newest(partition)
        reason = (
            "asked for every row"
            if full
            else _why_full(previous, opened, recipe, first=not store.numbers() or partition is not None)
        )
        parent = previous if reason is None else None
        try:
            diff = _diff(opened, store, parent, finished, source_rows, expired, retry_rejected)
            whole = store.journals.whole(finished) if diff.resumed else finished
            if whole == finished:
                break
            finished = whole
        except SnapshotError as exc:
            log.warning("%s", exc)
            whole = store.journals.whole(finished)
            if whole != finished:  # those that are not what they were are computed once more
                finished = whole
            elif parent is not None and is_damaged(store, parent):
                continue  # it is marked bad now, so the one before is next
            elif finished:
                finished = []
            else:
                raise
    compact = False
    if parent is not None:
        chain = store.chain(parent)
        deltas = sum(layer.counts.written + layer.counts.removed for layer in chain[1:])
        deltas += diff.compute + diff.resumed + diff.removed
        compact = len(chain) > MAX_DELTAS or deltas > MAX_DELTA_SHARE * chain[0].rows
        reason = f"builds on snapshot {parent.number}" + ("" if parent.view == view else ", whose view was defined otherwise")
    assert reason is not None
    same_view = parent is not None and parent.view == view
    return Plan(source_rows, diff, parent, reason, recipe, content, finished, compact, read_at_us, same_view)


def _diff(
    opened: OpenView,
    store: ViewStore,
    parent: Snapshot | None,
    finished: list[Finished],
    source_rows: int,
    expired_before_us: int | None,
    retry_rejected: bool,
) -> Diff:
    folder = store.folder
    refused = [folder / chunk.rejected.path for chunk in finished if chunk.rejected is not None]
    if parent is not None and parent.rejected is not None and (folder / parent.rejected.path).is_file():
        refused.append(folder / parent.rejected.path)
    parts = Files([folder / chunk.part.path for chunk in finished if chunk.part is not None])
    if parent is None and not parts.paths and not refused:
        return Diff(new=source_rows)
    known = None if parent is None else files_of(store.layers(parent))
    try:
        return compare(opened.source, known, parts, refused, expired_before_us=expired_before_us, retry_refused=retry_rejected)
    except SnapshotError as exc:
        if not (retry_rejected and refused):
            raise
        log.warning("%s; how often rejected rows were tried is counted anew", exc)
        return compare(opened.source, known, parts, expired_before_us=expired_before_us)


def is_damaged(store: ViewStore, snapshot: Snapshot) -> bool:
    """Whether a snapshot's files are not what its manifest says; it is marked bad then."""
    try:
        store.check_parts(snapshot)
    except SnapshotError as exc:
        log.warning("%s", exc)
        return Standing(store).bad_below(snapshot) is not None
    return False


def go_on_hashing(opened: OpenView, store: ViewStore, partition: str | None, *, full: bool = False) -> None:
    """Before the source is loaded: hash its rows as those were that the run may build on or take over, where they are hashed with MD5, so that
    they are not all computed once more."""
    recipe = recipe_of(opened, MD5)
    newest = None if full else Standing(store).newest(partition)
    if newest is not None and newest.recipe == recipe_of(opened):
        return
    if (newest is not None and newest.recipe == recipe) or store.journals.unfinished(recipe, partition, full=full):
        opened.source.hashed_by = MD5


def recipe_of(opened: OpenView, hashed_by: str | None = None) -> str:
    """Digest of all that makes a row besides its input, and of how that is hashed, by default as the source hashes it; see
    :class:`store.offline.snapshot.Snapshot`."""
    hashed_by = hashed_by or opened.source.hashed_by
    view = opened.view
    columns = [[field.name, str(field.type)] for field in opened.source.schema]
    features = [[f.name, f.dtype, f.dim, f.max_items] for f in view.features]
    return digest(
        model=opened.fingerprint,
        sql=view.definition.source.strip(),
        entity=list(view.entity),
        columns=columns,
        features=features,
        **({} if hashed_by == MD5 else {"input_hash": hashed_by}),
        **({"bad_rows": "null"} if view.definition.bad_rows == "null" else {}),  # to reject and to fail write the same rows
    )


def _why_full(previous: Snapshot | None, opened: OpenView, recipe: str, *, first: bool) -> str | None:
    """Why nothing earlier can be built on; None when it can."""
    if previous is None:
        return "the first snapshot" if first else "no earlier snapshot is whole and good, to build on"
    if previous.recipe == recipe:
        return None
    view, changed = opened.view, []
    if previous.model != opened.fingerprint:
        before, now = previous.view.definition.model, view.definition.model
        same = (before.use, before.args) == (now.use, now.args)
        only_precision = same and variant_name(before) != variant_name(now)
        what = "model's precision" if only_precision else "model (or its tokenizer or tables)"
        changed.append(f"{what} changed, fingerprint {previous.model[:12]} → {opened.fingerprint[:12]}")
    if previous.view.definition.source.strip() != view.definition.source.strip():
        changed.append("source's SQL changed")
    if previous.view.features != view.features or previous.view.entity != view.entity:
        changed.append("features or the entity changed")
    policies = [v.definition.bad_rows for v in (previous.view, view)]
    if policies[0] != policies[1] and "null" in policies:
        changed.append(f"policy for bad rows changed, {' → '.join(policies)}")
    columns = {name: str(opened.source.schema.field(name).type) for name in opened.source.input_columns}
    if not changed and dict(previous.input_columns) == columns:
        changed.append("way rows are hashed changed, by another version of DuckDB")
    return "every row, since the " + ", and the ".join(changed or ["source's column types changed"])


def now_us() -> int:
    """Now, µs since 1970."""
    return time.time_ns() // 1000
