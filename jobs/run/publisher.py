"""Publisher: makes a snapshot live: loads it into the online store and the vector index, verifies
it, and moves the live pointer; renews, repairs and degrades that pointer, too.

Order: generation and index beside what is live → read back → an event of the log → the online
pointer. A reader follows only the online pointer, so it sees rows and index of one snapshot.
Of a snapshot that builds on what is live only the rows that changed are loaded, as an overlay;
overlays are merged as deltas are, so that readers have few to read.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Mapping
from itertools import pairwise, takewhile
from typing import Any

from precompute.jobs.run.command_process import Progress
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
    OtherFormatError,
    RowsLostError,
    SnapshotError,
    UnreadableError,
    VectorIndexError,
)
from precompute.store.history.changes import Changes, shared_segments
from precompute.store.offline import hooks
from precompute.store.offline.log import BadMark, Hold, LiveRef, Place
from precompute.store.offline.part_file import layers_that_stay
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.codec import schema_tag
from precompute.store.online.online_store import (
    Generation,
    OnlineStore,
    Pointer,
    Terms,
    check_owner,
)
from precompute.store.vectors.vector_index import VectorIndex, is_there

log = logging.getLogger(__name__)

BASE_ROWS = 64
"""Rows that are compared with Parquet before they go live, in 40 to 60 ms. Of a generation under an
overlay as many are checked by their checksums alone, in a tenth of that."""
CURRENT_LOOK_S = 0.3
"""Time budget for checking live data when it stays live. Before an overlay only the account and the
sampled rows are checked."""
MOST_CHANGED = 0.5
"""Share of a base's rows beyond which a new base is loaded: rows that overlays replace lie in the
store twice."""
MOST_SEARCHED = 0.1
"""The same for a view with a vector index: a search compares with every vector that changed since
the base."""


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
            OnlineStoreError: the store refused, or returned other bytes than were loaded; the old
                generation stays live.
            ConflictError: another run published meanwhile, or the view is another project's;
                FencedError, if another run took the lease.
        """
        store, online, report, view = self._store, self._online, self._report, self._store.name
        if not self._take_over:
            # before anything is dropped: other generations there are the owner's, too
            check_owner(self._current(), view, self._owner)
        standing = Standing(store, left=marks)
        self.follow()
        number = standing.newest_publishable() if number is None else number
        snapshot = store.snapshot(number)
        repaired = self.repair_pointer()
        ref, current = store.refs.readable_live(), self._current()
        epoch = 0 if current is None else current.epoch
        live = ref if ref is not None and ref.snapshot == number else None
        unchanged = live is not None and not reload
        act = check_live(
            store, online, budget_s=CURRENT_LOOK_S if unchanged else 0.0, publishing=True
        ).act
        damaged = act is Act.LOAD
        if live is not None and not reload and not damaged and live.epoch >= epoch:
            pointer = self._keep_current(snapshot, live, repaired or act is Act.POINT)
            if pointer is not None:
                report.snapshot, report.model = number, snapshot.model
                return pointer
        standing.check_publishable(snapshot)
        report.snapshot, report.model = number, snapshot.model
        generation, expected = 0, 0 if ref is None else ref.epoch
        reload = reload or (damaged and live is not None)
        place = None if reload else self._retained(snapshot, ref)
        if place is None:
            # what failed publishings had loaded
            self._drop_unused(ref, current)
            generation = self._claimed_number(epoch)
            place = self._load(snapshot, ref, generation, reload or damaged)
        move = {"reason": reason, "held": held, "run": run or report.run, "marks": marks}
        epochs = {"expected_epoch": expected, "above": max(epoch, generation - 1)}
        ref = self._flip(snapshot, generation, place, {**move, **epochs})
        self._drop_unused(ref, current)
        if damaged:
            check_live(store, online, budget_s=0.0, publishing=True)
        report.status, report.epoch = "published", ref.epoch
        return self._pointer(snapshot, ref)

    def _claimed_number(self, epoch: int) -> int:
        """A generation's number, past all that are there: the root may have been restored from a
        backup, or the online store emptied."""
        loaded = self._online.generations(self._store.name)
        return self._store.refs.claim(max(epoch, *(generation.number for generation in loaded), 0))

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
        if not self._can_be_read(
            pointer, snapshot, rows=DOUBTED_ROWS if pointer.degraded else BASE_ROWS
        ):
            return None
        pointer = replace(pointer, degraded=False)
        if again or current != pointer:
            self._flip_online(pointer)
        self._drop_unused(ref, current)
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
        if not self._can_be_read(pointer, snapshot):
            return False
        self._flip_online(pointer)
        return True

    def degrade(self) -> None:
        """Mark the online pointer: rows of what is live may be lost, so readers do not take a
        missing row for an unknown entity; until the next flip."""
        current = self._current()
        if current is not None and not current.degraded and current.owner in ("", self._owner):
            try:
                self._flip_online(replace(current, degraded=True))
            except OnlineStoreError as exc:
                # its generations cannot be read at all, so readers know
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

    def _load(self, snapshot: Snapshot, ref: LiveRef | None, number: int, reload: bool) -> Place:
        """Load a snapshot: as an overlay over what is live, or over its lower layers, where it
        builds on them and little changed since; else as a base. Nothing is loaded if no row
        changed."""
        under = None if reload or ref is None else self._overlay_target(snapshot, ref)
        if under is not None:
            place, changes = under
            rows = changes.rows + len(changes.removed)
            if not rows:
                return place
            below, _ = place.layers[-1]
            generation, terms = self._prepare(snapshot, number, below, rows)
            # not in a lossy store: if it evicts an overlay's rows, those below are served again
            if not terms.lossy:
                self._loader.load(generation, snapshot, changes, terms.rows_done, place)
                overlay = generation.number, snapshot.number
                return replace(place, overlays=(*place.overlays, overlay))
        generation, terms = self._prepare(snapshot, number, None, snapshot.rows)
        self._loader.load(generation, snapshot, None, terms.rows_done)
        return Place(generation.number, snapshot.number, lossy=terms.lossy)

    def _prepare(
        self, snapshot: Snapshot, number: int, below: int | None, rows: int
    ) -> tuple[Generation, Terms]:
        """A new generation of a snapshot, over ``below`` if any, and the store's terms for it; an
        interrupted load of the same is resumed under its own number."""
        tag = schema_tag(snapshot.view)
        generation = Generation(number, snapshot.number, below, snapshot.run, tag)
        terms = self._loader.prepare(generation, snapshot, rows)
        self._lease.check()
        if terms.number is not None:
            generation = replace(generation, number=terms.number)
        return generation, terms

    def _overlay_target(self, snapshot: Snapshot, ref: LiveRef) -> tuple[Place, Changes] | None:
        """The layers of what is live that an overlay of the snapshot would lie over, and how the
        snapshot differs from them; None where a new base is due, or they are not whole."""
        store, place, current = self._store, ref.place, self._current()
        if place.lossy or (current is not None and current.degraded):
            return None
        loaded = self._loaded(place, snapshot)
        if not loaded or (loaded[0].view.features, loaded[0].view.index) != (
            snapshot.view.features,
            snapshot.view.index,
        ):
            return None
        base, shared = loaded[0], [shared_segments(layer, snapshot) for layer in loaded]
        # the layers that the snapshot's list continues, and the base in any case; others were
        # merged since, or are of a snapshot that was rolled back from
        whole = (n == len(one.segments) for n, one in zip(shared, loaded, strict=True))
        under_it = shared[: max(1, sum(takewhile(bool, whole)))]
        weights = [max(one.rows, one.weight - one.rows) for one in snapshot.segments]
        most = MOST_CHANGED if snapshot.view.index is None else MOST_SEARCHED
        if not shared[0] or sum(weights[shared[0] :]) > most * base.rows:
            return None
        new = sum(weights[under_it[-1] :])
        stay = (
            layers_that_stay([sum(weights[i:j]) for i, j in pairwise(under_it)], new)
            if new
            else len(under_it) - 1
        )
        top, under = loaded[stay], place.lowest(stay + 1)
        changes = Changes(store, top, snapshot)
        with self._report.stage("check"):
            changes.check_parts()
        pointer = self._pointer(top, replace(ref, snapshot=top.number, place=under))
        return (
            (under, changes)
            if self._can_be_read(pointer, top, ok_if_unreadable=False, values=False)
            else None
        )

    def _loaded(self, place: Place, snapshot: Snapshot) -> list[Snapshot]:
        """The snapshots of the generations of ``place``, the lowest first, as far as they are
        loaded as recorded, and of one model with the snapshot."""
        loaded = {g.number: g for g in self._online.generations(self._store.name)}
        layers, below = list[Snapshot](), None
        for number, made in place.layers:
            generation = loaded.get(number)
            try:
                layer = self._store.snapshot(made)
            except SnapshotError as exc:
                log.warning("%s", exc)
                break
            if generation is None or layer.model != snapshot.model:
                break
            if (generation.base, generation.snapshot, generation.run) != (below, made, layer.run):
                break
            layers.append(layer)
            below = number
        return layers

    def _flip(
        self,
        snapshot: Snapshot,
        generation: int,
        place: Place,
        move: Mapping[str, Any],
    ) -> LiveRef:
        """Move the live pointer, and the online one; ``generation`` is what was loaded for it, 0
        for nothing."""
        refs = self._store.refs
        with self._report.stage("flip"):
            try:
                ref = refs.move_live(snapshot.number, place=place, lease=self._lease, **move)
            except ConflictError:
                # another run was first: what was loaded here will never be read, unless the reply
                # to the move was lost and a later pointer names it as what was before
                later = refs.readable_live()
                if generation in place.generations and generation not in self._in_use(later, None):
                    with contextlib.suppress(OnlineStoreError):
                        self._online.drop(self._store.name, generation)
                    shutil.rmtree(self._store.index_folder(generation), ignore_errors=True)
                raise
            self._flip_online(self._pointer(snapshot, ref))
            crashpoint("online.flip")
        hooks.published(self._store)
        return ref

    def _flip_online(self, pointer: Pointer) -> None:
        """Move the online pointer, here and for all that follow the root."""
        self._online.flip(pointer)
        for each in self._followers:
            each.publish(pointer)

    def _retained(self, snapshot: Snapshot, ref: LiveRef | None) -> Place | None:
        """The generations of a snapshot that the online store still holds, if it was live before
        the last publishing: a rollback to it loads nothing."""
        # any others are of publishings that failed, and may never have been read back
        loaded = {g.number: g for g in self._online.generations(self._store.name)}
        for whole in () if ref is None else (ref.place, ref.previous_place):
            for layers in range(0 if whole is None else len(whole.layers), 0, -1):
                assert whole is not None
                place = whole.lowest(layers)
                top = loaded.get(place.layers[-1][0])
                if top is None or (top.snapshot, top.run) != (snapshot.number, snapshot.run):
                    continue
                pointer = self._pointer(
                    snapshot, LiveRef(1, snapshot.number, None, "", "", place=place)
                )
                if (
                    place.generations <= loaded.keys()
                    and self._can_be_read(pointer, snapshot)
                    and self._index_opens(pointer)
                ):
                    return place
        return None

    def _index_opens(self, pointer: Pointer) -> bool:
        if pointer.index is not None:
            try:
                root, overlay = self._store.offline.root, pointer.overlay_index
                VectorIndex(root / pointer.index, None if overlay is None else root / overlay)
            except VectorIndexError as exc:
                log.warning("%s; it is built again", exc)
                return False
        return True

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
        """Whether generations and index are there and their rows are right; the caller loads again
        what is not."""
        for index in (pointer.index, pointer.overlay_index):
            if index is not None and not is_there(self._store.offline.root / index):
                log.warning(
                    "view %r: the vector index %s is gone; it is built again",
                    pointer.view.name,
                    index,
                )
                return False
        try:
            check_served(self._store, self._online, pointer, snapshot, rows, values=values)
        except RowsLostError as exc:
            log.warning("%s; the next generation is loaded whole", exc)
            return False
        except SnapshotError as exc:
            log.warning("%s", exc)
            return ok_if_unreadable
        return True

    def _drop_unused(self, ref: LiveRef | None, current: Pointer | None) -> None:
        """Remove generations and indexes except the live ones, the ones before (for a rollback),
        and those that the online pointer named until now, which requests that began before the flip
        still read."""
        self._lease.check()
        store, online, view = self._store, self._online, self._store.name
        keep = self._in_use(ref, current)
        try:
            for generation in online.generations(view):
                if generation.number not in keep:
                    online.drop(view, generation.number)
        except OnlineStoreError as exc:
            # what is live is whole; the next publishing drops the rest
            log.warning("view %r: old generations stay for now: %s", view, exc)
        for path in store.indexes.glob("*") if store.indexes.is_dir() else ():
            if path.name.isdigit() and int(path.name) in keep:
                continue
            # one of another format is another version's, and stays
            with contextlib.suppress(OtherFormatError):
                is_there(path)
                shutil.rmtree(path, ignore_errors=True)
        for each in self._followers:
            each.drop_all_but(keep, 0 if ref is None else ref.epoch)

    @staticmethod
    def _in_use(ref: LiveRef | None, current: Pointer | None) -> set[int]:
        """Generations that the live pointer, the one to go back to and the online one have."""
        places = () if ref is None else (ref.place, ref.previous_place)
        numbers = {n for place in places if place is not None for n in place.generations}
        return numbers | set(() if current is None else current.generations)

    def _pointer(self, snapshot: Snapshot, ref: LiveRef) -> Pointer:
        """The online pointer, made of the manifest, the live pointer and the online pointer before,
        so that it can be made again at any time."""
        current = self._current()
        renewed = [us for us in (snapshot.renewed_at, ref.renewed_at) if us is not None]
        place = ref.place
        folder = None if snapshot.view.index is None else f"{snapshot.view.name}/index"
        overlay, _ = place.layers[-1]
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
            index=None if folder is None else f"{folder}/{place.generation:020d}",
            generation=place.generation,
            # misses of a snapshot of all partitions are computed from the newest partition's source
            partition=snapshot.partition or max(snapshot.members, default=None),
            renewed_at_us=max(renewed, default=0),
            base_snapshot=place.base_snapshot,
            overlays=place.overlays,
            overlay_index=(
                None if folder is None or not place.overlays else f"{folder}/{overlay:020d}"
            ),
            owner=self._owner,
            lossy=place.lossy,
            took_over=self._owner_before(current),
            # rows are known to be lost, until they are loaded again
            degraded=current is not None
            and current.degraded
            and not place.generations.isdisjoint(current.generations),
            substitute=snapshot.substitute,
        )

    def _owner_before(self, current: Pointer | None) -> str:
        """The project that the view was taken over from, or is now; empty if it was not."""
        if current is None or current.owner == self._owner:
            return "" if current is None else current.took_over
        return current.owner if self._take_over else ""
