"""Plan: what is requested of a run (:class:`RunOptions`), which rows it computes for that, and why.
It is what ``materialize --dry-run`` prints and
:func:`precompute.jobs.run.materialize.materialize` does.

A row is computed when neither the parent nor an interrupted run has it with its key, its input hash
and the view's recipe. A changed model, SQL, column or feature is another recipe, and then every row
is computed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from precompute.jobs.run.rows.open_model import variant_name
from precompute.jobs.run.rows.open_view import OpenView, files_of
from precompute.model import digest
from precompute.sources.database import Files
from precompute.sources.diff import Diff, compare
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import Substitute
from precompute.store.offline.part_file import layers_that_stay
from precompute.store.offline.runs import Finished
from precompute.store.offline.segment import Part, Segment
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Bad, Refused, Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.codec import schema_tag
from precompute.store.times import Partition

log = logging.getLogger(__name__)

MOST_SHARE = 1.0
"""Weight of all segments over the lowest one, as a share of its rows, beyond which all are made
one: a row that is replaced weighs two, so that half of the rows are. The online store holds the
same segments, the replaced rows too."""
MOST_DELTAS = 4
"""Segments over the lowest one at most: a reader looks into each of them, and with fewer every
change is copied more often. By this rule each row of 50 deltas of the same size is written 3.2
times, with 3 4.7 times, with 5 2.5 times."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run is to do; the command line has options of the same names.

    Args:
        command: ``run``, or only its first half ``materialize``, or only its second half
            ``publish``; or ``resume``, which publishes what waits of a view that is held.
        snapshot: which one to publish; the newest by default.
        partition: which one to compute; of a partitioned view the latest that is over by default.
        full: compute every row.
        retry_rejected: compute rows that were rejected with the same input, too.
        accept: gates whose refusal is accepted, which is noted beside the snapshot.
        expect: gates that a change is announced for: they warn, and refuse nothing.
        reload: publish it again, though the online store seems to hold it.
        take_over: publish it, though another project publishes the view in the online store.
        due: the schedule's time this run is for, ISO 8601 in UTC.
        root: name of the root that it is for; nothing is begun in another.
        backfill: id of the backfill this run is a part of.
        live_before: of a backfill: number of the snapshot that readers had when it began, whose
            contract its partitions keep; None without any.
        in_order: of a backfill: its partitions before this one are there; otherwise it compares
            this one with them once they are.
        deadline_s: the kernel ends the process after this long, whatever it hangs in.
        frame: the rows, of a view with ``source: {frame: …}``: see
            :func:`precompute.sources.frame.write_frame`.
    """

    command: str = "run"
    snapshot: int | None = None
    partition: Partition | None = None
    full: bool = False
    retry_rejected: bool = False
    accept: Collection[str] = ()
    expect: Collection[str] = ()
    reload: bool = False
    take_over: bool = False
    due: str | None = None
    root: str | None = None
    backfill: str | None = None
    live_before: int | None = None
    in_order: bool = False
    deadline_s: float | None = None
    frame: Any = None

    @property
    def partition_text(self) -> str | None:
        """The partition, as manifests and reports name it."""
        return None if self.partition is None else str(self.partition)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does.

    ``parent`` is the snapshot built on, None when every row is computed; ``finished`` the chunks of
    interrupted runs; ``stay`` how many of the parent's segments stay as they are: what lies over
    those is merged with the new one.
    """

    source_rows: int
    diff: Diff
    parent: Snapshot | None
    reason: str
    recipe: str
    content: str
    finished: list[Finished]
    stay: int
    same_view: bool
    """Whether the parent was made of the view as it is defined now, TTL, index and fallback
    included, and by the models that the views which it reads have now."""

    @property
    def nothing_to_do(self) -> bool:
        """Whether the parent has the same content and definition, and none of its rows is past the
        TTL."""
        done = self.parent is not None and self.parent.content == self.content and self.same_view
        return done and not self.diff.compute and not self.diff.expired

    @property
    def compact(self) -> bool:
        """Whether the parent's rows are copied, so that the result is one segment."""
        return self.parent is not None and not self.stay

    @property
    def merging(self) -> int:
        """How many of the parent's segments are merged with the new one."""
        return 0 if self.parent is None else len(self.parent.segments) - self.stay

    def __str__(self) -> str:
        """How many rows of each kind, and why, for people."""
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
        left = [f"{diff.unchanged:,} unchanged"] * bool(diff.unchanged) + [
            f"{diff.removed:,} removed"
        ] * bool(diff.removed)
        kind = (
            "nothing to do"
            if self.nothing_to_do
            else "delta" + (f", merged with {self.merging} before it" if self.merging else "")
            if self.stay
            else "full" + (", compacting" if self.compact else "")
        )
        return (
            f"{kind}: {diff.compute:,} of {self.source_rows:,} rows to compute"
            + (f" ({counted}{retried})" if counted else "")
            + "".join(f", {text}" for text in left)
            + f"; {self.reason}"
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON document."""
        kinds = {
            name: getattr(self.diff, name) for name in Diff.__slots__ if not name.endswith("_us")
        }
        kind = "none" if self.nothing_to_do else "delta" if self.stay else "full"
        parent = None if self.parent is None else self.parent.number
        return {"kind": kind, "source": self.source_rows, "compute": self.diff.compute, **kinds} | {
            "parent": parent,
            "compact": self.compact,
            "merging": self.merging,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Planner:
    """Compares the source of a view with what was computed before.

    Args:
        store: of the view; the caller holds the lease of the partition.
        opened: the view; its source is loaded.
        partition: that is computed; None of a view that has none.
        full: whether every row is to be computed.
        retry_rejected: whether rows are that were rejected with the same input.
        renew_unchanged: whether rows past the TTL stay, if their input is unchanged.
    """

    store: ViewStore
    opened: OpenView
    partition: str | None
    full: bool
    retry_rejected: bool
    renew_unchanged: bool

    def plan(self, source_rows: int, read_at_us: int) -> Plan:
        """What a run does.

        Args:
            source_rows: rows loaded.
            read_at_us: when the source was read, µs since 1970.

        Raises:
            SnapshotError, SourceError: something cannot be read.
        """
        view, recipe = self.opened.view, recipe_of(self.opened)
        content = f"{recipe}:{self.opened.source.content()}"
        expired = None if self.renew_unchanged else read_at_us - int(view.ttl_s * 1e6)
        parent, reason, diff, finished = self._parent_and_diff(recipe, source_rows, expired)
        stay = 0
        if parent is not None:
            # rows, and kills
            new = diff.compute + diff.resumed + diff.changed + diff.expired + diff.removed
            stay = segments_that_stay(parent.segments, new, schema_tag(view))
            reason = f"builds on snapshot {parent.number}" + (
                "" if parent.view == view else ", whose view was defined otherwise"
            )
        other = None if self.opened.substitute is None else self.opened.substitute.use
        same_view = (
            parent is not None
            and parent.view == view
            and parent.input_models == self.opened.input_models
            and _are_same(parent.substitute, other)
        )
        return Plan(
            source_rows,
            diff,
            parent,
            reason,
            recipe,
            content,
            finished,
            stay,
            same_view,
        )

    def _parent_and_diff(
        self, recipe: str, source_rows: int, expired_before_us: int | None
    ) -> tuple[Snapshot | None, str, Diff, list[Finished]]:
        """The parent, why there is none, how the source differs from it, and the chunks taken over;
        only what has whole files counts."""
        store, partition = self.store, self.partition
        # also of a run of every row what it computed before it was interrupted is taken over
        finished = store.journals.unfinished(recipe, partition, full=self.full)
        # what another model or other SQL made since then is no reason to compute these rows again
        ours = recipe_of(self.opened, hashed=False)
        while True:
            standing = Standing(store)
            newest = None if self.full else standing.newest(partition, computation=ours)
            # the rows of a refused snapshot are right, but fewer may differ from the one before
            passed = (
                standing.newest(partition, refused=False, computation=ours)
                if newest is not None and isinstance(standing.verdict(newest), Refused)
                else None
            )
            bases: list[Snapshot | None] = [
                base for base in (newest, passed) if base is not None and base.recipe == recipe
            ]
            first = not store.numbers() or partition is not None
            why_full = (
                "every row was requested"
                if self.full
                else _why_full(
                    newest or standing.newest(partition), self.opened, recipe, first=first
                )
            )
            parent = bases[0] if bases else None
            diff_from = partial(
                self._diff, finished, source_rows=source_rows, expired_before_us=expired_before_us
            )
            try:
                diff = diff_from(parent)
                if diff.compute and len(bases) > 1:
                    of_refused, parent = diff.compute, bases[1]
                    diff = diff_from(parent)
                    if of_refused <= diff.compute:
                        parent = bases[0]
                        diff = diff_from(parent)
                whole = store.journals.whole(finished) if diff.resumed else finished
                if whole == finished:
                    return parent, why_full or "", diff, finished
                finished = whole
            except SnapshotError as exc:
                log.warning("%s", exc)
                whole = store.journals.whole(finished)
                # rows of damaged chunks are computed again
                if whole != finished:
                    finished = whole
                elif parent is not None and mark_if_damaged(store, parent):
                    # it is marked bad now, so the one before it is tried
                    continue
                elif finished:
                    finished = []
                else:
                    raise

    def _diff(
        self,
        finished: list[Finished],
        parent: Snapshot | None,
        *,
        source_rows: int,
        expired_before_us: int | None,
    ) -> Diff:
        store, retry = self.store, self.retry_rejected
        before = None if parent is None else parent.rejected
        rejected = [
            path
            for part in (*(chunk.rejected for chunk in finished), before)
            if part is not None and (path := self._rejected(part)) is not None
        ]
        parts = Files(
            [store.folder / chunk.part.path for chunk in finished if chunk.part is not None]
        )
        if parent is None and not parts.paths and not rejected:
            return Diff(new=source_rows)
        known = None if parent is None else files_of(store.layers(parent))
        compare_source = partial(
            compare, self.opened.source, known, parts, expired_before_us=expired_before_us
        )
        try:
            return compare_source(rejected, retry_rejected=retry)
        except SnapshotError as exc:
            if not (retry and rejected):
                raise
            log.warning("%s; how often rejected rows were tried is counted again", exc)
            return compare_source()

    def _rejected(self, part: Part) -> Path | None:
        """A file of rejected rows; None where it is gone or damaged: they are tried again."""
        try:
            return self.store.file(part)
        except SnapshotError as exc:
            log.warning("%s; the rows that it has are tried again", exc)
            return None


def _are_same(before: Substitute | None, now: Substitute | None) -> bool:
    """Whether misses are computed as before. The agreement is not compared: it is measured again
    where anything else changed."""
    if before is None or now is None:
        return before is now
    return dataclasses.replace(before, agreement={}) == dataclasses.replace(now, agreement={})


def segments_that_stay(segments: Sequence[Segment], new: int, tag: int) -> int:
    """How many of a snapshot's segments stay as they are under one that weighs ``new`` and has rows
    of a schema; those over them are merged with it."""
    weights = [segment.weight for segment in segments[1:]]
    if segments[0].schema_tag != tag or sum(weights) + new > MOST_SHARE * segments[0].rows:
        return 0
    return 1 + layers_that_stay(weights, new, MOST_DELTAS)


def mark_if_damaged(store: ViewStore, snapshot: Snapshot) -> bool:
    """Mark a snapshot bad if its files are not as its manifest says; returns whether it did."""
    try:
        store.check_parts(snapshot)
    except SnapshotError as exc:
        log.warning("%s", exc)
        return isinstance(Standing(store).verdict(snapshot), Bad)
    return False


def recipe_of(opened: OpenView, *, hashed: bool = True) -> str:
    """Digest of all that makes a row except its input, and, if ``hashed``, of how that is hashed;
    see :class:`precompute.store.offline.snapshot.Snapshot`."""
    view = opened.view
    columns = [[field.name, str(field.type)] for field in opened.source.schema]
    features = [[f.name, f.dtype, f.dim, f.max_items] for f in view.features]
    return digest(
        model=opened.fingerprint,
        sql=view.definition.source.strip(),
        entity=list(view.entity),
        columns=columns,
        features=features,
        **({"input_hash": opened.source.hashed_by} if hashed else {}),
        # the policies reject and fail write the same rows
        **({"bad_rows": "null"} if view.definition.bad_rows == "null" else {}),
    )


def _why_full(
    previous: Snapshot | None, opened: OpenView, recipe: str, *, first: bool
) -> str | None:
    if previous is None:
        return (
            "the first snapshot" if first else "no earlier snapshot is whole and good, to build on"
        )
    if previous.recipe == recipe:
        return None
    view, changed = opened.view, []
    if previous.model != opened.fingerprint:
        before, now = previous.view.definition.model, view.definition.model
        same = (before.use, before.args) == (now.use, now.args)
        only_precision = same and variant_name(before) != variant_name(now)
        what = "model's precision" if only_precision else "model (or its tokenizer or tables)"
        changed.append(
            f"{what} changed, fingerprint {previous.model[:12]} → {opened.fingerprint[:12]}"
        )
    if previous.view.definition.source.strip() != view.definition.source.strip():
        changed.append("source's SQL changed")
    if previous.view.features != view.features or previous.view.entity != view.entity:
        changed.append("features or the entity changed")
    policies = [v.definition.bad_rows for v in (previous.view, view)]
    if policies[0] != policies[1] and "null" in policies:
        changed.append(f"policy for bad rows changed, {' → '.join(policies)}")
    columns = {
        name: str(opened.source.schema.field(name).type) for name in opened.source.schema.names
    }
    types = [
        f"{name!r}, {was} → {columns[name]}"
        for name, was in previous.input_columns.items()
        if columns.get(name, was) != was
    ]
    if types:
        changed.append(
            f"type of a column changed: {'; '.join(types)} (cast it to what it was, and nothing is"
            " computed again)"
        )
    elif not changed and previous.computation == recipe_of(opened, hashed=False):
        changed.append("way rows are hashed changed, by another version of DuckDB")
    # of keys no manifest has the types
    keys = ", ".join(f"{name!r}, {columns[name]} now" for name in view.entity)
    return "every row, since the " + ", and the ".join(
        changed or [f"type or order of columns changed, of the key perhaps: {keys}"]
    )
