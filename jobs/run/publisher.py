"""Publisher: makes a snapshot live: loads it into the online store and the vector index, verifies
it, and moves the live pointer; renews, repairs and degrades that pointer, too.

Order: segment and index beside what is live → read back → an event of the log → the online
pointer. A reader follows only the online pointer, so it sees rows and index of one snapshot.
Of a snapshot that builds on what is live only the rows that changed are loaded, as a segment over
those of what is live; upper segments are merged as deltas are, so that readers have few to read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

from precompute.jobs.run.command_process import Progress
from precompute.jobs.run.index_publisher import IndexPublisher
from precompute.jobs.run.loader import Loader
from precompute.store.account.account import Act
from precompute.store.account.checker import check_live
from precompute.store.account.followers import followers
from precompute.store.account.rows import DOUBTED_ROWS, check_served
from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.lease import Lease
from precompute.store.disk.record import replace
from precompute.store.disk.storage import identity_of
from precompute.store.errors import (
    ConflictError,
    DamagedPointerError,
    OnlineStoreError,
    RowsLostError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.history.changes import Changes, shared_segments
from precompute.store.keys import key_column
from precompute.store.offline import hooks
from precompute.store.offline.log import BadMark, Hold, LiveRef
from precompute.store.offline.part_file import layers_that_stay
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.codec import schema_tag
from precompute.store.online.kernels import Packed
from precompute.store.online.online_store import (
    KeysOf,
    OnlineStore,
    Pointer,
    Segment,
    check_owner,
    number_of,
)
from precompute.store.online.row_values import packed_strings

log = logging.getLogger(__name__)

BASE_ROWS = 64
"""Rows that are compared with Parquet before they go live, in 40 to 60 ms. Of segments that others
are loaded over as many are checked by their checksums alone, in a tenth of that."""
CURRENT_LOOK_S = 0.3
"""Time budget for checking live data when it stays live. Before more is loaded over it only the
account and the sampled rows are checked."""
KEYS_ROWS = 65_536
"""Keys that are read at a time of what is dropped."""
MOST_CHANGED = 0.5
"""Share of the lowest segment's rows beyond which all rows are loaded: those that upper segments
replace lie in the store twice."""


def segment_of(snapshot: Snapshot, below: str = "") -> Segment:
    """The segment that is loaded of a snapshot: all of its rows, or those that changed since the
    segment ``below`` and those under it. Its digest is of all that its rows follow from; a run
    makes a snapshot once."""
    tag = schema_tag(snapshot.view)
    made = {"snapshot": snapshot.number, "run": snapshot.run, "below": below, "schema": tag}
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    return Segment(snapshot.number, digest, snapshot.number, snapshot.run, bool(below), tag)


class Publisher:
    """Makes snapshots of one view live; the caller holds the view's publishing lease.

    Args:
        store: of the view; the snapshots are there.
        online: where they go.
        report: stage times, snapshot, epoch and status are added to it.
        progress: called with every batch.
        lease: checked when the pointer moves.
        take_over: publish the view though it is another project's.
        memory_mb: what the vector index may keep in memory.
    """

    def __init__(
        self,
        store: ViewStore,
        online: OnlineStore,
        report: Report,
        progress: Progress,
        lease: Lease,
        *,
        take_over: bool = False,
        memory_mb: int = 1024,
    ) -> None:
        self._store, self._online, self._report, self._lease = store, online, report, lease
        self._owner, self._take_over = identity_of(store.offline.root), take_over
        self._followers = followers(store, online)
        self._loader = Loader(
            store, online, report, progress, "" if take_over else self._owner, memory_mb
        )
        self._indexes = IndexPublisher(store, report, memory_mb)

    def publish(
        self,
        number: int | None = None,
        *,
        reason: str = "publish",
        held: Hold | None = None,
        reload: bool = False,
        run: str | None = None,
        marks: Mapping[int, BadMark] | None = None,
    ) -> Pointer:
        """Make a snapshot live.

        Args:
            number: which snapshot; by default the newest usable one of the newest partition.
            reason: stored in the live pointer.
            held: since when and why runs publish nothing after this; None: they publish.
            reload: load it again, though the online store seems to hold it.
            run: id that the publishing bears; by default the report's.
            marks: numbers of the snapshots that are bad from the move on → why.

        Returns:
            the pointer that is live now; nothing was loaded if the snapshot was live already.

        Raises:
            SnapshotError: there is no such snapshot, or it is damaged.
            GateError: a gate refused it and that is not accepted, or it is bad.
            OnlineStoreError: the store refused, or returned other bytes than were loaded; what was
                live stays live.
            ConflictError: another run published meanwhile, or the view is another project's;
                FencedError, if another run took the lease.
        """
        store, online, report, view = self._store, self._online, self._report, self._store.name
        if not self._take_over:
            # before anything is dropped: other segments there are the owner's, too
            check_owner(self._current(), view, self._owner)
        standing = Standing(store, left=marks)
        self.follow()
        number = standing.newest_publishable() if number is None else number
        snapshot = store.snapshot(number)
        repaired = self.repair_pointer()
        ref, current = store.refs.readable_live(), self._current()
        epoch = 0 if current is None else current.epoch
        live = ref if ref is not None and ref.snapshot == number else None
        budget_s = CURRENT_LOOK_S if live is not None and not reload else 0.0
        act = check_live(store, online, budget_s=budget_s, publishing=True).act
        damaged, doubted = act is Act.LOAD, act in (Act.INDEX, Act.LOAD)
        if live is not None and not (reload or doubted) and live.epoch >= epoch:
            pointer = self._keep_current(snapshot, live, repaired or act is Act.POINT)
            if pointer is not None:
                report.snapshot, report.model = number, snapshot.model
                return pointer
        standing.check_publishable(snapshot)
        report.snapshot, report.model = number, snapshot.model
        expected, lost = 0 if ref is None else ref.epoch, damaged and live is not None
        segments = None if reload or lost else self._retained(snapshot, ref)
        loads = segments is None
        if segments is None:
            # what failed publishings had loaded
            self._drop_unused(ref, current)
            segments = self._load(snapshot, ref, reload or damaged)
        indexes, built = self._indexes.ready(snapshot, ref, doubted=doubted, again=reload)
        move: dict[str, Any] = {"reason": reason, "held": held, "run": run or report.run}
        move |= {"expected_epoch": expected, "above": epoch, "marks": marks}
        move |= {"segments": segments, "indexes": indexes}
        unused = set(segments) - self._in_use(ref, current)
        ref = self._make_live(snapshot, move, unused, again=loads or built)
        self._tidy(ref, current)
        if doubted:
            check_live(store, online, budget_s=0.0, publishing=True)
        report.status, report.epoch = "published", ref.epoch
        return self._pointer(snapshot, ref)

    def follow(self, *, again: bool = False) -> None:
        """Serve what the root says on this host, too, where it follows one; ``again`` restores what
        differs from there."""
        try:
            for each in self._followers:
                each.follow(again=again)
        except (SnapshotError, UnreadableError) as exc:
            # what is not here is loaded
            log.warning("%s", exc)

    def _keep_current(self, snapshot: Snapshot, ref: LiveRef, again: bool) -> Pointer | None:
        """The pointer of what is live already and stays so; None where it has to be loaded again.
        ``again``: flip it even if it is the same."""
        current, pointer = self._current(), self._pointer(snapshot, ref)
        rows = DOUBTED_ROWS if pointer.degraded else BASE_ROWS
        if not (
            self._indexes.are_there(ref.indexes) and self._can_be_read(pointer, snapshot, rows=rows)
        ):
            return None
        pointer = replace(pointer, degraded=False)
        if again or current != pointer:
            self._flip_online(pointer)
        self._tidy(ref, current)
        self._report.status = "published" if again or current != pointer else "current"
        self._report.epoch = ref.epoch
        return pointer

    def repair_pointer(self) -> bool:
        """Flip the online pointer to what the log says, where a crash between the two left it
        behind; returns whether it did."""
        ref, current = self._store.refs.readable_live(), self._current()
        if ref is None or (
            current is not None
            and current.epoch >= ref.epoch
            and not any(each.is_behind(ref.epoch) for each in self._followers)
        ):
            return False
        try:
            snapshot = self._store.snapshot(ref.snapshot)
        except SnapshotError as exc:
            log.warning("%s", exc)
            return False
        pointer = self._pointer(snapshot, ref)
        if not (self._indexes.are_there(ref.indexes) and self._can_be_read(pointer, snapshot)):
            return False
        self._flip_online(pointer)
        self.sweep()
        return True

    def degrade(self) -> None:
        """Mark the online pointer: rows of what is live may be lost, so readers do not take a
        missing row for an unknown entity; until the next flip."""
        current = self._current()
        if current is not None and not current.degraded and current.owner in ("", self._owner):
            try:
                self._flip_online(replace(current, degraded=True))
            except OnlineStoreError as exc:
                # its segments cannot be read at all, so readers know
                log.warning("%s", exc)

    def renew(self, renewed_at_us: int) -> None:
        """Note in both pointers that a run found nothing changed since what is live.

        Raises:
            SnapshotError, OnlineStoreError, ConflictError: as :meth:`publish`.
        """
        ref = self._store.refs.live()
        # the caller has just published it
        assert ref is not None
        ref = self._store.refs.renew_live(ref, renewed_at_us, self._lease)
        self._flip_online(self._pointer(self._store.snapshot(ref.snapshot), ref))

    def _load(self, snapshot: Snapshot, ref: LiveRef | None, reload: bool) -> tuple[str, ...]:
        """Load a snapshot: what changed over what is live, or over its lower segments, where it
        builds on them and little changed since; else all of it. Nothing is loaded if no row
        changed. Returns the names of its segments, the lowest first."""
        under = None if reload or ref is None else self._segments_below(snapshot, ref)
        if under is None:
            segment = segment_of(snapshot)
            done = self._prepare(segment, snapshot, snapshot.rows)
            self._loader.load(segment, snapshot, None, done)
            return (segment.name,)
        below, changes = under
        rows = changes.rows + len(changes.removed)
        if not rows:
            return below
        segment = segment_of(snapshot, below[-1])
        done = self._prepare(segment, snapshot, rows)
        self._loader.load(segment, snapshot, changes, done)
        return (*below, segment.name)

    def _prepare(self, segment: Segment, snapshot: Snapshot, rows: int) -> int:
        done = self._loader.prepare(segment, snapshot, rows)
        self._lease.check()
        return done

    def _segments_below(
        self, snapshot: Snapshot, ref: LiveRef
    ) -> tuple[tuple[str, ...], Changes] | None:
        """The segments of what is live that one of the snapshot would lie over, and how the
        snapshot differs from them; None where all of it is due, or they are not whole."""
        store, current = self._store, self._current()
        if current is not None and current.degraded:
            return None
        loaded = self._loaded(ref, snapshot)
        if not loaded or loaded[0].view.features != snapshot.view.features:
            return None
        base, shared = loaded[0], [shared_segments(layer, snapshot) for layer in loaded]
        # the layers that the snapshot's list continues, and the base in any case; others were
        # merged since, or are of a snapshot that was rolled back from
        whole = (n == len(one.segments) for n, one in zip(shared, loaded, strict=True))
        under_it = shared[: max(1, sum(takewhile(bool, whole)))]
        weights = [max(one.rows, one.weight - one.rows) for one in snapshot.segments]
        if not shared[0] or sum(weights[shared[0] :]) > MOST_CHANGED * base.rows:
            return None
        new = sum(weights[under_it[-1] :])
        stay = (
            layers_that_stay([sum(weights[i:j]) for i, j in pairwise(under_it)], new)
            if new
            else len(under_it) - 1
        )
        top, below = loaded[stay], ref.segments[: stay + 1]
        changes = Changes(store, top, snapshot)
        with self._report.stage("check"):
            changes.check_parts()
        pointer = self._pointer(top, replace(ref, snapshot=top.number, segments=below))
        return (
            (below, changes)
            if self._can_be_read(pointer, top, ok_if_unreadable=False, values=False)
            else None
        )

    def _loaded(self, ref: LiveRef, snapshot: Snapshot) -> list[Snapshot]:
        """The snapshots that the live segments make, the lowest first, as far as they are loaded as
        recorded, and of one model with the snapshot."""
        loaded = {segment.name: segment for segment in self._online.segments(self._store.name)}
        layers, below = list[Snapshot](), ""
        for name in ref.segments:
            try:
                layer = self._store.snapshot(number_of(name))
            except SnapshotError as exc:
                log.warning("%s", exc)
                break
            if layer.model != snapshot.model or loaded.get(name) != segment_of(layer, below):
                break
            layers.append(layer)
            below = name
        return layers

    def _make_live(
        self, snapshot: Snapshot, move: Mapping[str, Any], unused: set[str], *, again: bool
    ) -> LiveRef:
        """Move the live pointer, and the online one; ``unused`` are the segments that were loaded
        for it, and ``again`` whether any was."""
        refs = self._store.refs
        with self._report.stage("flip"):
            try:
                ref = refs.move_live(snapshot.number, lease=self._lease, **move)
            except ConflictError:
                # another run was first: what was loaded here will never be read, unless the reply
                # to the move was lost and a later pointer names it as what was before
                for name in unused - self._in_use(refs.readable_live(), None):
                    with contextlib.suppress(OnlineStoreError, ConflictError):
                        self._online.drop(self._store.name, name)
                raise
            self._flip_online(self._pointer(snapshot, ref), again=again)
            crashpoint("online.flip")
        hooks.published(self._store)
        return ref

    def _flip_online(self, pointer: Pointer, *, again: bool = False) -> None:
        """Move the online pointer, here and for all that follow the root; ``again``: what it names
        may have been loaded again."""
        self._online.flip(pointer)
        for each in self._followers:
            each.publish(pointer, again=again)

    def _retained(self, snapshot: Snapshot, ref: LiveRef | None) -> tuple[str, ...] | None:
        """The segments of a snapshot that the online store still holds, if it was live before the
        last publishing: a rollback to it loads nothing."""
        # any others are of publishings that failed, and may never have been read back
        loaded = {segment.name: segment for segment in self._online.segments(self._store.name)}
        for whole in () if ref is None else (ref.segments, ref.previous_segments):
            for count in range(len(whole), 0, -1):
                segments = whole[:count]
                top = loaded.get(segments[-1])
                if top is None or (top.snapshot, top.run) != (snapshot.number, snapshot.run):
                    continue
                pointer = self._pointer(
                    snapshot, LiveRef(1, snapshot.number, None, "", "", segments=segments)
                )
                if loaded.keys() >= set(segments) and self._can_be_read(pointer, snapshot):
                    return segments
        return None

    def _current(self) -> Pointer | None:
        """The online pointer; None when there is none, or it is damaged and about to be
        rewritten."""
        try:
            return self._online.live(self._store.name)
        except DamagedPointerError as exc:
            log.warning("%s; it is rewritten", exc)
            return None

    def _can_be_read(
        self,
        pointer: Pointer,
        snapshot: Snapshot,
        *,
        ok_if_unreadable: bool = True,
        rows: int = BASE_ROWS,
        values: bool = True,
    ) -> bool:
        """Whether segments are there and their rows are right; the caller loads again what is
        not."""
        try:
            check_served(self._store, self._online, pointer, snapshot, rows, values=values)
        except RowsLostError as exc:
            log.warning("%s; all rows are loaded", exc)
            return False
        except SnapshotError as exc:
            log.warning("%s", exc)
            return ok_if_unreadable
        return True

    def _drop_unused(self, ref: LiveRef | None, current: Pointer | None) -> None:
        """Remove segments except the live ones, the ones before (for a rollback), and
        those that the online pointer named until now, which requests that began before the flip
        still read."""
        self._lease.check()
        online, view = self._online, self._store.name
        keep = self._in_use(ref, current)
        try:
            segments = online.segments(view)
            # the keys of an upper one follow from what is below
            for segment in reversed(segments):
                if segment.name not in keep:
                    online.drop(view, segment.name, self._keys_of(segment, segments))
        except OnlineStoreError as exc:
            # what is live is whole; the next publishing drops the rest
            log.warning("view %r: old segments stay for now: %s", view, exc)
        for each in self._followers:
            each.drop_all_but(keep)

    def _tidy(self, ref: LiveRef, current: Pointer | None) -> None:
        self._drop_unused(ref, current)
        self._indexes.drop_all_but(self._in_use(ref, current))
        self.sweep()

    def sweep(self) -> None:
        """Remove what killed loads and drops left in the online store."""
        self._lease.check()
        try:
            self._online.sweep(self._store.name)
        except OnlineStoreError as exc:
            # what is live is whole; who publishes next sweeps it
            log.warning("view %r: what killed loads left stays for now: %s", self._store.name, exc)

    def _keys_of(self, segment: Segment, segments: Sequence[Segment]) -> KeysOf:
        """What keys a segment was loaded with, by the snapshots' files."""

        def keys() -> Iterator[Packed]:
            store, below = self._store, ""
            snapshot = store.snapshot(segment.snapshot)
            names = [each.name for each in segments] if segment.upper else [""]
            with contextlib.suppress(StopIteration):
                below = next(name for name in names if segment_of(snapshot, name) == segment)
            entity = snapshot.view.entity
            batches = store.batches(snapshot, entity, KEYS_ROWS)
            if segment.upper:
                if not below:
                    raise SnapshotError(f"what segment {segment.name} lay over is gone")
                changes = Changes(store, store.snapshot(number_of(below)), snapshot)
                yield packed_strings(changes.removed)
                batches = changes.batches(entity, KEYS_ROWS)
            for batch in batches:
                yield packed_strings(key_column(batch, entity))

        return keys

    @staticmethod
    def _in_use(ref: LiveRef | None, current: Pointer | None) -> set[str]:
        """Segments and indexes that the live pointer, the one to go back to and the online one
        have."""
        names = set[str]()
        if ref is not None:
            names |= {*ref.segments, *ref.previous_segments, *ref.indexes, *ref.previous_indexes}
        return names if current is None else names | {*current.segments, *current.indexes}

    def _pointer(self, snapshot: Snapshot, ref: LiveRef) -> Pointer:
        """The online pointer, made of the manifest, the live pointer and the online pointer before,
        so that it can be made again at any time."""
        current = self._current()
        renewed = [us for us in (snapshot.renewed_at, ref.renewed_at) if us is not None]
        folders = [f"{snapshot.view.name}/index/{name}" for name in ref.indexes]
        index, changed = (*folders, None, None)[:2]
        return Pointer(
            view=snapshot.view,
            snapshot=snapshot.number,
            epoch=ref.epoch,
            model=snapshot.model,
            rows=snapshot.rows,
            source_rows=snapshot.counts.source,
            at=ref.at,
            computed_at_min=snapshot.computed_at_min,
            input_columns=dict(snapshot.input_columns),
            inputs=dict(snapshot.inputs),
            index=index,
            segments=ref.segments,
            # misses of a snapshot of all partitions are computed from the newest partition's source
            partition=snapshot.partition or max(snapshot.members, default=None),
            renewed_at_us=max(renewed, default=0),
            changed_index=changed,
            owner=self._owner,
            lossy=self._is_lossy,
            took_over=self._owner_before(current),
            # rows are known to be lost, until they are loaded again
            degraded=current is not None
            and current.degraded
            and not set(ref.segments).isdisjoint(current.segments),
            substitute=snapshot.substitute,
        )

    @cached_property
    def _is_lossy(self) -> bool:
        return self._online.is_lossy()

    def _owner_before(self, current: Pointer | None) -> str:
        """The project that the view was taken over from, or is now; empty if it was not."""
        if current is None or current.owner == self._owner:
            return "" if current is None else current.took_over
        return current.owner if self._take_over else ""
