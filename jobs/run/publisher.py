"""Publisher: makes a snapshot live: loads it into the online store and the vector index, verifies
it, and moves the live pointer; renews, repairs and degrades that pointer, too.

Order: segments and index beside what is live → read back → an event of the log → the online
pointer. A reader follows only the online pointer, so it sees rows and index of one snapshot.
What is read online is the snapshot's own list of segments; only those are loaded that are not
there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from precompute.jobs.run.command_process import Progress
from precompute.jobs.run.index_publisher import IndexPublisher
from precompute.jobs.run.loader import Loader, online_segment
from precompute.store.account.account import Account, Act, Finding
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
    FencedError,
    OnlineStoreError,
    PrecomputeError,
    RowsLostError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.keys import key_column
from precompute.store.offline import hooks
from precompute.store.offline.log import BadMark, Hold, LiveRef
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


NOT_LIVE = LiveRef(1, 0, None, "", "")
"""Of what is not live yet: a pointer is made to read its rows."""


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
            store, online, report, progress, "" if take_over else self._owner, lease, memory_mb
        )
        self._indexes = IndexPublisher(store, report, memory_mb)

    def publish(
        self,
        number: int | None = None,
        *,
        reason: str = "publish",
        held: Hold | None = None,
        reload: bool = False,
        found: Account | None = None,
        run: str | None = None,
        marks: Mapping[int, BadMark] | None = None,
    ) -> Pointer:
        """Make a snapshot live.

        Args:
            number: which snapshot; by default the newest usable one of the newest partition.
            reason: stored in the live pointer.
            held: since when and why runs publish nothing after this; None: they publish.
            reload: load all of it again, though the online store seems to hold it.
            found: load what was found not to be whole, too, whatever is found now.
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
        ref, current = store.log.readable_live(), self._current()
        epoch = 0 if current is None else current.epoch
        live = ref if ref is not None and ref.snapshot == number else None
        budget_s = CURRENT_LOOK_S if live is not None and not reload else 0.0
        account = check_live(store, online, budget_s=budget_s, publishing=True)
        findings = (*account.findings, *(() if found is None else found.findings))
        doubted = any(finding.act in (Act.INDEX, Act.LOAD) for finding in findings)
        if live is not None and not (reload or doubted) and live.epoch >= epoch:
            again = repaired or account.act is Act.POINT
            pointer = self._keep_current(snapshot, live, current, again)
            if pointer is not None:
                report.snapshot, report.model = number, snapshot.model
                return pointer
        standing.check_publishable(snapshot, unchanged=report.status == "current")
        report.snapshot, report.model = number, snapshot.model
        # what failed publishings had loaded, and may never have been read back
        self._drop_unused(snapshot, ref, current)
        lost = frozenset(snapshot.names) if reload else _lost(findings, snapshot)
        loaded = self._load(snapshot, lost, current)
        with self._dropping(loaded, current):
            indexes, built = self._indexes.ready(snapshot, ref, doubted=doubted, again=reload)
        move: dict[str, Any] = {"reason": reason, "held": held, "run": run or report.run}
        move |= {"expected_epoch": 0 if ref is None else ref.epoch, "above": epoch, "marks": marks}
        ref = self._make_live(snapshot, current, move | {"indexes": indexes}, loaded, built)
        self._tidy(snapshot, ref, current)
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

    def _keep_current(
        self, snapshot: Snapshot, ref: LiveRef, current: Pointer | None, again: bool
    ) -> Pointer | None:
        """The pointer of what is live already and stays so; None where some of it has to be loaded
        again. ``again``: flip it even if it is the same."""
        pointer = self._pointer(snapshot, ref)
        rows = DOUBTED_ROWS if pointer.degraded else BASE_ROWS
        if self._lost_of(pointer, snapshot, rows) or not self._indexes.are_there(ref.indexes):
            return None
        pointer = replace(pointer, degraded=False)
        if again or current != pointer:
            self._flip_online(pointer)
        self._tidy(snapshot, ref, current)
        self._report.status = "published" if again or current != pointer else "current"
        self._report.epoch = ref.epoch
        return pointer

    def repair_pointer(self) -> bool:
        """Flip the online pointer to what the log says, where a crash between the two left it
        behind; returns whether it did."""
        ref, current = self._store.log.readable_live(), self._current()
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
        if self._lost_of(pointer, snapshot) or not self._indexes.are_there(ref.indexes):
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
        ref = self._store.log.live()
        # the caller has just published it
        assert ref is not None
        ref = self._store.log.renew_live(ref, renewed_at_us, self._lease)
        self._flip_online(self._pointer(self._store.snapshot(ref.snapshot), ref))

    def _load(
        self, snapshot: Snapshot, lost: frozenset[str], current: Pointer | None
    ) -> frozenset[str]:
        """Load those segments of a snapshot that the online store lacks, or that lost rows, the
        lowest first; a few rows of each segment are read. Returns the names of those that are
        new."""
        _check_tags(snapshot)
        names, loaded = snapshot.names, set[str]()
        there, pointer = self._online.segments(self._store.name), self._pointer(snapshot, NOT_LIVE)
        lost |= {name for at, name in enumerate(names) if online_segment(snapshot, at) not in there}
        rows = DOUBTED_ROWS if current is not None and current.degraded else BASE_ROWS
        with self._dropping(loaded, current):
            while True:
                for at, name in enumerate(names):
                    if name in lost - loaded:
                        self._loader.load(snapshot, at)
                        loaded.add(name)
                if loaded.issuperset(names):
                    break
                lost = self._lost_of(pointer, snapshot, rows, values=not loaded)
                if not lost - loaded:
                    break
        return frozenset(loaded)

    @contextlib.contextmanager
    def _dropping(self, loaded: Collection[str], current: Pointer | None) -> Iterator[None]:
        """Drop what was loaded where what is done meanwhile fails, but not for a lost lease: its
        next holder may be about to make the same segments live."""
        try:
            yield
        except FencedError:
            raise
        except PrecomputeError:
            self._give_up(loaded, current)
            raise

    def _give_up(self, loaded: Collection[str], current: Pointer | None) -> None:
        """Drop what was loaded and will not go live, unless it is read."""
        for name in set(loaded) - self._in_use(self._store.log.readable_live(), current):
            with contextlib.suppress(OnlineStoreError, ConflictError):
                self._online.drop(self._store.name, name)

    def _make_live(
        self,
        snapshot: Snapshot,
        current: Pointer | None,
        move: Mapping[str, Any],
        loaded: frozenset[str],
        built: frozenset[str],
    ) -> LiveRef:
        """Move the live pointer, and the online one; ``loaded`` are the segments that were loaded
        for it, and ``built`` the indexes."""
        view_log = self._store.log
        with self._report.stage("flip"):
            try:
                ref = view_log.move_live(snapshot.number, lease=self._lease, **move)
            except FencedError:
                raise
            except ConflictError:
                # another run was first: what was loaded here will never be read, unless the reply
                # to the move was lost and a later pointer names it as what was before
                self._give_up(loaded, current)
                raise
            pointer = replace(self._pointer(snapshot, ref), degraded=False)
            self._flip_online(pointer, loaded | built)
            crashpoint("online.flip")
        hooks.published(self._store)
        return ref

    def _flip_online(self, pointer: Pointer, loaded: Collection[str] = ()) -> None:
        """Move the online pointer, here and for all that follow the root; files of the segments
        and indexes that were ``loaded`` may be others than before."""
        self._online.flip(pointer)
        for each in self._followers:
            each.publish(pointer, loaded)

    def _current(self) -> Pointer | None:
        """The online pointer; None when there is none, or it is damaged and about to be
        rewritten."""
        try:
            return self._online.live(self._store.name)
        except DamagedPointerError as exc:
            log.warning("%s; it is rewritten", exc)
            return None

    def _lost_of(
        self, pointer: Pointer, snapshot: Snapshot, rows: int = BASE_ROWS, *, values: bool = True
    ) -> frozenset[str]:
        """Names of those segments of a pointer whose rows are not there, or not right, by a
        sample; their ``values`` are compared with Parquet where nothing is loaded beside them: they
        vouch for themselves where that cannot be read."""
        store = self._store
        try:
            check_served(store, self._online, pointer, snapshot, rows, values=values)
        except RowsLostError as exc:
            log.warning("%s; it is loaded again", exc)
            return frozenset(pointer.segments) if exc.segments is None else exc.segments
        except SnapshotError as exc:
            log.warning("%s", exc)
            if not values:
                store.check_parts(snapshot)
        return frozenset()

    def _drop_unused(
        self, snapshot: Snapshot, ref: LiveRef | None, current: Pointer | None
    ) -> None:
        """Remove segments except the live ones, the ones before (for a rollback), and
        those that the online pointer named until now, which requests that began before the flip
        still read. ``snapshot`` is any of the view."""
        self._lease.check()
        online, view = self._online, self._store.name
        keep = self._in_use(ref, current)
        if ref is not None and not keep:
            # something is read, and nobody says what
            return
        try:
            for segment in online.segments(view):
                if segment.name not in keep:
                    online.drop(view, segment.name, self._keys_of(segment, snapshot))
        except OnlineStoreError as exc:
            # what is live is whole; the next publishing drops the rest
            log.warning("view %r: old segments stay for now: %s", view, exc)
        for each in self._followers:
            each.drop_all_but(keep)

    def _tidy(self, snapshot: Snapshot, ref: LiveRef | None, current: Pointer | None) -> None:
        self._drop_unused(snapshot, ref, current)
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

    def _keys_of(self, segment: Segment, snapshot: Snapshot) -> KeysOf:
        """What keys a segment has, by its files, as long as they are there; ``snapshot`` is any of
        the view."""

        def keys() -> Iterator[Packed]:
            store, entity = self._store, snapshot.view.entity
            of = store.segment(segment.name, segment.digest)
            yield packed_strings(store.removed_keys(snapshot, of))
            for batch in store.segment_batches(snapshot, of, entity, KEYS_ROWS):
                yield packed_strings(key_column(batch, entity))

        return keys

    def _in_use(self, ref: LiveRef | None, current: Pointer | None) -> set[str]:
        """Segments and indexes that the live snapshot, the one to go back to and the online pointer
        have; where a manifest is damaged, that pointer still tells what is read."""
        names = set(() if current is None else (*current.segments, *current.indexes))
        if ref is not None:
            names |= {*ref.indexes, *ref.previous_indexes}
        for number in () if ref is None else (ref.snapshot, ref.previous):
            try:
                names.update(() if number is None else self._store.snapshot(number).names)
            except SnapshotError as exc:
                log.warning("%s", exc)
        return names

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
            segments=snapshot.names,
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
            and not set(snapshot.names).isdisjoint(current.segments),
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


def _lost(findings: Sequence[Finding], snapshot: Snapshot) -> frozenset[str]:
    """The segments whose rows are to be loaded again; all of a snapshot's where a finding does not
    say which."""
    return frozenset(
        name
        for finding in findings
        if finding.act is Act.LOAD
        for name in (snapshot.names if finding.segments is None else finding.segments)
    )


def _check_tags(snapshot: Snapshot) -> None:
    """Raises:
    SnapshotError: a segment has rows of other features than the snapshot's view.
    """
    tag, view = schema_tag(snapshot.view), snapshot.view.name
    for segment in snapshot.segments:
        if segment.schema_tag != tag:
            raise SnapshotError(
                f"segment {segment.name} of snapshot {snapshot.number} of view {view!r} has rows of"
                f" other features than the view (schema {segment.schema_tag}, and not {tag}):"
                f" precompute run {view} --full makes all rows anew"
            )
