"""Publish: load a snapshot into the online store and the vector index, verify, then move the live pointer.

Order: generation and index beside what is live → read back → live.json by compare-and-swap → the online pointer. A reader follows only
the online pointer, so it sees rows and index of one snapshot, the old or the new. Every attempt loads a generation of its own number, so
that a writer that slept never writes into what another one made live.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.process.progress import Progress
from store.disk.crashpoint import crashpoint
from store.disk.lease import Lease
from store.entity_key import key_column
from store.errors import ConflictError, DamagedPointerError, OnlineStoreError, SnapshotError, VectorIndexError
from store.offline.refs import LiveRef
from store.offline.runs import Report
from store.offline.snapshot import Snapshot
from store.offline.standing import Standing
from store.offline.view_store import ViewStore
from store.online.codec import Buffer, RowCodec
from store.online.online_store import OnlineStore, Pointer
from store.online.vector_index import VectorIndex, build_index, is_there
from store.record import replace

log = logging.getLogger(__name__)

BATCH_ROWS = 8192
SAMPLE_PER_BATCH = 32
"""Rows of each batch that are read back from the online store and compared byte by byte before the flip."""


class Publisher:
    """Makes snapshots of one view live; the caller holds the view's publishing lease.

    Args:
        store: of the view; the snapshots are there.
        online: where they go.
        report: stage times, snapshot, epoch and status are added to it.
        progress: told of every batch.
        lease: checked when the pointer moves.
    """

    def __init__(
        self, store: ViewStore, online: OnlineStore, report: Report, progress: Progress, lease: Lease | None = None
    ) -> None:
        self._store, self._online, self._report, self._progress, self._lease = store, online, report, progress, lease

    def publish(
        self, number: int | None = None, *, reason: str = "publish", held: str | None = None, reload: bool = False
    ) -> Pointer:
        """Make a snapshot live.

        Args:
            number: which snapshot; by default the newest of the newest partition that no gate refused and nobody rolled back from.
            reason: kept in the live pointer.
            held: why scheduled runs are to publish nothing after this.
            reload: load it again, though the online store seems to hold it.

        Returns:
            the pointer that is live now; nothing is loaded when it was live already.

        Raises:
            SnapshotError: there is no such snapshot, or it is damaged.
            GateError: a gate refused it and nobody accepted that, or it was rolled back from.
            OnlineStoreError: the store refused, or gave back other bytes than were loaded; the old generation stays live.
            ConflictError: somebody else published meanwhile; FencedError, if that took this one's lease.
        """
        store, online, report, view = self._store, self._online, self._report, self._store.name
        standing = Standing(store)
        number = standing.newest_publishable() if number is None else number
        snapshot = store.snapshot(number)
        report.snapshot, report.model = number, snapshot.model
        mended = self.mend()
        ref, current = store.refs.readable_live(), self._current()
        epoch = 0 if current is None else current.epoch
        if ref is not None and ref.snapshot == number and not reload and ref.epoch >= epoch:
            pointer = _pointer(snapshot, ref)
            if self._can_be_read(pointer):
                if current != pointer:
                    online.flip(pointer)
                self._drop_old(ref, current)
                report.status, report.epoch = "published" if mended or current != pointer else "current", ref.epoch
                return pointer
        standing.check_publishable(snapshot)
        # Past both pointers: the root may have been restored, or the online store emptied, behind each other's back.
        expected = 0 if ref is None else ref.epoch
        epoch = store.refs.claim_epoch(max(epoch, *online.generations(view), 0))
        generation = None if reload else self._retained(snapshot, ref)
        if generation is None:
            generation = epoch
            self._load_generation(snapshot, generation)
        ref = self._flip(snapshot, expected, epoch, generation, reason, held)
        self._drop_old(ref, current)
        report.status, report.epoch = "published", epoch
        return _pointer(snapshot, ref)

    def mend(self) -> bool:
        """Flip the online pointer to what ``live.json`` says, where a crash between the two left it behind; whether there was need."""
        ref, current = self._store.refs.readable_live(), self._current()
        if ref is None or (current is not None and current.epoch >= ref.epoch):
            return False
        try:
            pointer = _pointer(self._store.snapshot(ref.snapshot), ref)
        except SnapshotError as exc:
            log.warning("%s", exc)
            return False
        if not self._can_be_read(pointer):
            return False
        self._online.flip(pointer)
        return True

    def renew(self, renewed_at_us: int) -> None:
        """Tell readers that a run found nothing changed since what is live.

        Raises:
            SnapshotError, OnlineStoreError, ConflictError: as :meth:`publish`.
        """
        ref = self._store.refs.live()
        # The caller just published it.
        assert ref is not None
        ref = self._store.refs.renew_live(ref, renewed_at_us, self._lease)
        self._online.flip(_pointer(self._store.snapshot(ref.snapshot), ref))

    def _load_generation(self, snapshot: Snapshot, generation: int) -> None:
        """Rows and index, beside what is live, and read back."""
        report = self._report
        with report.stage("check"):
            self._store.check_parts(snapshot)
        with report.stage("load"):
            sample = self._load(snapshot, generation)
            crashpoint("online.load")
        with report.stage("verify"):
            self._verify(generation, sample)
            crashpoint("online.verify")
        if snapshot.view.index is not None:
            with report.stage("index"):
                self._build(snapshot, generation)
                crashpoint("index.build")

    def _flip(self, snapshot: Snapshot, expected: int, epoch: int, generation: int, reason: str, held: str | None) -> LiveRef:
        refs, lease = self._store.refs, self._lease
        with self._report.stage("flip"):
            try:
                ref = refs.move_live(
                    snapshot.number,
                    expected_epoch=expected,
                    epoch=epoch,
                    reason=reason,
                    generation=generation,
                    held=held,
                    lease=lease,
                )
            except ConflictError:
                # Somebody else won: what was loaded here will never be read.
                if generation == epoch:
                    with contextlib.suppress(OnlineStoreError):
                        self._online.drop(self._store.name, epoch)
                    shutil.rmtree(self._store.index_folder(epoch), ignore_errors=True)
                raise
            self._online.flip(_pointer(snapshot, ref))
            crashpoint("online.flip")
        return ref

    def _retained(self, snapshot: Snapshot, ref: LiveRef | None) -> int | None:
        """The generation that still holds a snapshot, from before the last publishing: going back to it loads nothing."""
        if ref is None or ref.previous_generation is None or ref.previous != snapshot.number:
            return None
        pointer = _pointer(snapshot, replace(ref, generation=ref.previous_generation))
        if pointer.index is not None:
            try:
                VectorIndex(self._store.offline.root / pointer.index)
            except VectorIndexError as exc:
                log.warning("%s; it is built again", exc)
                return None
        return ref.previous_generation if self._can_be_read(pointer) else None

    def _current(self) -> Pointer | None:
        """The online pointer; None when there is none, or it is damaged and about to be written anew."""
        try:
            return self._online.live(self._store.name)
        except DamagedPointerError as exc:
            log.warning("%s; it is written anew", exc)
            return None

    def _can_be_read(self, pointer: Pointer) -> bool:
        """Whether generation and index are there and can be opened; what is gone or damaged is loaded again."""
        online, view, generation = self._online, pointer.view.name, pointer.generation
        if pointer.index is not None and not is_there(self._store.offline.root / pointer.index):
            log.warning("view %r: the vector index %s is gone; it is built again", view, pointer.index)
            return False
        try:
            return generation in online.generations(view) and online.read_generation(view, generation, [b"-"]) is not None
        except OnlineStoreError as exc:
            log.warning("%s; it is loaded again", exc)
            return False

    def _load(self, snapshot: Snapshot, generation: int) -> list[tuple[bytes, bytes]]:
        """Load all rows; returns some of them, (key, row), to be read back."""
        view, codec = snapshot.view, RowCodec(snapshot.view)
        sample: list[tuple[bytes, bytes]] = []

        def rows() -> Iterator[tuple[Sequence[bytes], Sequence[Buffer]]]:
            for batch in self._store.batches(snapshot, batch_rows=BATCH_ROWS):
                keys = pc.cast(key_column(batch, view.entity), pa.binary()).to_pylist()
                computed_at = np.asarray(batch.column("computed_at").cast(pa.int64()))
                packed = list(codec.encode(batch, computed_at, snapshot.number).rows())
                step = max(1, len(keys) // SAMPLE_PER_BATCH)
                sample.extend((keys[i], bytes(packed[i])) for i in range(0, len(keys), step))
                yield keys, packed
                self._progress.advance(len(keys))

        self._progress.begin(f"publish {view.name}", snapshot.rows)
        try:
            count = self._online.load(view.name, generation, rows())
        finally:
            self._progress.end()
        if count != snapshot.rows:
            with contextlib.suppress(OnlineStoreError):
                self._online.drop(view.name, generation)
            raise OnlineStoreError(
                f"the online store holds {count} of {snapshot.rows} rows of view {view.name!r} after loading; is it evicting keys? Nothing was published"
            )
        return sample

    def _verify(self, generation: int, sample: list[tuple[bytes, bytes]]) -> None:
        view = self._store.name
        for start in range(0, len(sample), 1000):
            part = sample[start : start + 1000]
            rows = self._online.read_generation(view, generation, [key for key, _ in part])
            for (key, row), got in zip(part, rows, strict=True):
                if got is None or bytes(got) != row:
                    what = "is missing" if got is None else "has other bytes"
                    raise OnlineStoreError(
                        f"read back from the online store, key {key.decode()!r} of view {view!r} {what}; nothing was published"
                    )

    def _build(self, snapshot: Snapshot, generation: int) -> None:
        view = snapshot.view
        assert view.index is not None
        on, dim = view.index.on, view.feature(view.index.on).dim
        # The configuration refuses an index on anything but a vector.
        assert dim is not None
        batches = self._store.batches(snapshot, columns=[*view.entity, on], batch_rows=BATCH_ROWS)
        build_index(
            self._store.index_folder(generation),
            ((key_column(b, view.entity), b.column(on)) for b in batches),
            dim,
            view.index.metric,
        )

    def _drop_old(self, ref: LiveRef, current: Pointer | None) -> None:
        """Remove generations and indexes but the live and the last: a request that began before the flip still reads the last.

        Raises:
            FencedError: the lease was lost, and what is there may be what somebody else is loading.
        """
        store, online = self._store, self._online
        if self._lease is not None:
            self._lease.check()
        view, last = store.name, ref.previous_generation
        # The offline pointer was lost.
        if last is None and current is not None:
            last = current.generation
        keep = {ref.generation, last}
        try:
            for generation in online.generations(view):
                if generation not in keep:
                    online.drop(view, generation)
        except OnlineStoreError as exc:
            # What is live is whole: what is left over is dropped by the next publishing.
            log.warning("view %r: old generations stay for now: %s", view, exc)
        for path in store.indexes.glob("*") if store.indexes.is_dir() else ():
            if not path.name.isdigit() or int(path.name) not in keep:
                shutil.rmtree(path, ignore_errors=True)


def _pointer(snapshot: Snapshot, ref: LiveRef) -> Pointer:
    """What readers are told: a function of manifest and live pointer alone, so that it can be mended at any time."""
    renewed = [us for us in (snapshot.renewed_at, ref.renewed_at) if us is not None]
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
        index=None if snapshot.view.index is None else f"{snapshot.view.name}/index/{ref.generation:020d}",
        generation=ref.generation,
        partition=snapshot.partition,
        renewed_at_us=max(renewed, default=0),
    )
