"""Publish: load a snapshot into the online store and the vector index, verify, then move the live pointer.

Order: generation and index beside what is live → read back → live.json by compare-and-swap → the online pointer. A reader follows only
the online pointer, so it sees rows and index of one snapshot, the old or the new. Every attempt loads a generation of its own number, so
that a writer that slept never writes into what another one made live.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.process.progress import Progress
from store.clock import utc_now
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


def publish(
    store: ViewStore,
    online: OnlineStore,
    report: Report,
    progress: Progress,
    *,
    number: int | None = None,
    reason: str = "publish",
    held: str | None = None,
    reload: bool = False,
    lease: Lease | None = None,
) -> Pointer:
    """Make a snapshot live; the caller holds the view's publishing lease.

    Args:
        store: of the view; the snapshot is there.
        online: where it goes.
        report: stage times are added to it.
        progress: told of every batch.
        number: which snapshot; by default the newest of the newest partition that no gate refused and nobody rolled back from.
        reason: kept in the live pointer.
        held: why scheduled runs are to publish nothing after this.
        reload: load it again, though the online store seems to hold it.
        lease: checked when the pointer moves.

    Returns:
        the pointer that is live now; nothing is loaded when it was live already.

    Raises:
        SnapshotError: there is no such snapshot, or it is damaged.
        GateError: a gate refused it and nobody accepted that, or it was rolled back from.
        OnlineStoreError: the store refused, or gave back other bytes than were loaded; the old generation stays live.
        ConflictError: somebody else published meanwhile; FencedError, if that took this one's lease.
    """
    number = Standing(store).newest_publishable() if number is None else number
    snapshot = store.snapshot(number)
    report.snapshot, report.model, view = number, snapshot.model, store.name
    mended = mend(store, online)
    ref, current = store.refs.readable_live(), _readable_pointer(store.name, online)
    if ref is not None and ref.snapshot == number and not reload and ref.epoch >= (0 if current is None else current.epoch):
        pointer = _pointer(snapshot, ref)
        if _can_be_read(pointer, store, online):
            if current != pointer:
                online.flip(pointer)
            _drop_old(store, online, ref, current, lease)
            report.status, report.epoch = "published" if mended or current != pointer else "current", ref.epoch
            return pointer
    Standing(store).check_publishable(snapshot)
    # Past both pointers: the root may have been restored, or the online store emptied, behind each other's back.
    expected = 0 if ref is None else ref.epoch
    epoch = store.refs.claim_epoch(max(0 if current is None else current.epoch, *online.generations(view), 0))
    generation = None if reload else _retained(snapshot, ref, store, online)
    if generation is None:
        generation = epoch
        with report.stage("check"):
            store.check_parts(snapshot)
        with report.stage("load"):
            sample = _load(snapshot, store, online, epoch, progress)
            crashpoint("online.load")
        with report.stage("verify"):
            _verify(snapshot, online, epoch, sample)
            crashpoint("online.verify")
        if snapshot.view.index is not None:
            with report.stage("index"):
                _build(snapshot, store, store.index_folder(generation))
                crashpoint("index.build")
    with report.stage("flip"):
        try:
            ref = store.refs.move_live(
                number, expected_epoch=expected, epoch=epoch, reason=reason, generation=generation, held=held, lease=lease
            )
        except ConflictError:  # somebody else won: what was loaded here will never be read
            if generation == epoch:
                with contextlib.suppress(OnlineStoreError):
                    online.drop(view, epoch)
                shutil.rmtree(store.index_folder(epoch), ignore_errors=True)
            raise
        online.flip(_pointer(snapshot, ref))
        crashpoint("online.flip")
    _drop_old(store, online, ref, current, lease)
    report.status, report.epoch = "published", epoch
    return _pointer(snapshot, ref)


def mend(store: ViewStore, online: OnlineStore) -> bool:
    """Flip the online pointer to what ``live.json`` says, where a crash between the two left it behind; whether there was need."""
    ref, current = store.refs.readable_live(), _readable_pointer(store.name, online)
    if ref is None or (current is not None and current.epoch >= ref.epoch):
        return False
    try:
        pointer = _pointer(store.snapshot(ref.snapshot), ref)
    except SnapshotError as exc:
        log.warning("%s", exc)
        return False
    if not _can_be_read(pointer, store, online):
        return False
    online.flip(pointer)
    return True


def renew(store: ViewStore, online: OnlineStore, renewed_at_us: int, *, lease: Lease | None = None) -> None:
    """Tell readers that a run found nothing changed since what is live; the caller holds the publishing lease.

    Raises:
        SnapshotError, OnlineStoreError, ConflictError: as :func:`publish`.
    """
    ref = store.refs.live()
    assert ref is not None  # the caller just published it
    ref = store.refs.renew_live(ref, renewed_at_us, lease)
    online.flip(_pointer(store.snapshot(ref.snapshot), ref))


def accepted(snapshot: Snapshot, store: ViewStore, accept: Collection[str], run: str) -> Snapshot:
    """The same snapshot committed once more, as one whose failed gates were accepted by name; itself when none of them failed.

    Raises:
        SnapshotError: the file system failed.
    """
    names = tuple(sorted({*snapshot.accepted, *set(snapshot.refused_by).intersection(accept)}))
    if names == tuple(sorted(snapshot.accepted)):
        return snapshot
    return store.commit(replace(snapshot, accepted=names, run=run, created_at=utc_now()))


def _retained(snapshot: Snapshot, ref: LiveRef | None, store: ViewStore, online: OnlineStore) -> int | None:
    """The generation that still holds a snapshot, from before the last publishing: going back to it loads nothing."""
    if ref is None or ref.previous_generation is None or ref.previous != snapshot.number:
        return None
    pointer = _pointer(snapshot, replace(ref, generation=ref.previous_generation))
    if pointer.index is not None:
        try:
            VectorIndex(store.offline.root / pointer.index)
        except VectorIndexError as exc:
            log.warning("%s; it is built again", exc)
            return None
    return ref.previous_generation if _can_be_read(pointer, store, online) else None


def _readable_pointer(view: str, online: OnlineStore) -> Pointer | None:
    """The online pointer; None when there is none, or it is damaged and about to be written anew."""
    try:
        return online.live(view)
    except DamagedPointerError as exc:
        log.warning("%s; it is written anew", exc)
        return None


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


def _can_be_read(pointer: Pointer, store: ViewStore, online: OnlineStore) -> bool:
    """Whether generation and index are there and can be opened; what is gone or damaged is loaded again."""
    view, generation = pointer.view.name, pointer.generation
    if pointer.index is not None and not is_there(store.offline.root / pointer.index):
        log.warning("view %r: the vector index %s is gone; it is built again", view, pointer.index)
        return False
    try:
        return generation in online.generations(view) and online.read_generation(view, generation, [b"-"]) is not None
    except OnlineStoreError as exc:
        log.warning("%s; it is loaded again", exc)
        return False


def _load(snapshot: Snapshot, store: ViewStore, online: OnlineStore, epoch: int, progress: Progress) -> list[tuple[bytes, bytes]]:
    """Load all rows; returns some of them, (key, row), to be read back."""
    view, codec = snapshot.view, RowCodec(snapshot.view)
    sample: list[tuple[bytes, bytes]] = []

    def rows() -> Iterator[tuple[Sequence[bytes], Sequence[Buffer]]]:
        for batch in store.batches(snapshot, batch_rows=BATCH_ROWS):
            keys = pc.cast(key_column(batch, view.entity), pa.binary()).to_pylist()
            computed_at = np.asarray(batch.column("computed_at").cast(pa.int64()))
            packed = list(codec.encode(batch, computed_at, snapshot.number).rows())
            step = max(1, len(keys) // SAMPLE_PER_BATCH)
            sample.extend((keys[i], bytes(packed[i])) for i in range(0, len(keys), step))
            yield keys, packed
            progress.advance(len(keys))

    progress.begin(f"publish {view.name}", snapshot.rows)
    try:
        count = online.load(view.name, epoch, rows())
    finally:
        progress.end()
    if count != snapshot.rows:
        with contextlib.suppress(OnlineStoreError):
            online.drop(view.name, epoch)
        raise OnlineStoreError(
            f"the online store holds {count} of {snapshot.rows} rows of view {view.name!r} after loading; is it evicting keys? Nothing was published"
        )
    return sample


def _verify(snapshot: Snapshot, online: OnlineStore, epoch: int, sample: list[tuple[bytes, bytes]]) -> None:
    view = snapshot.view.name
    for start in range(0, len(sample), 1000):
        part = sample[start : start + 1000]
        found = online.read_generation(view, epoch, [key for key, _ in part])
        for (key, row), got in zip(part, found, strict=True):
            if got is None or bytes(got) != row:
                what = "is missing" if got is None else "has other bytes"
                raise OnlineStoreError(
                    f"read back from the online store, key {key.decode()!r} of view {view!r} {what}; nothing was published"
                )


def _build(snapshot: Snapshot, store: ViewStore, folder: Path) -> None:
    view = snapshot.view
    assert view.index is not None
    on, dim = view.index.on, view.feature(view.index.on).dim
    assert dim is not None  # the configuration refuses an index on anything but a vector
    batches = store.batches(snapshot, columns=[*view.entity, on], batch_rows=BATCH_ROWS)
    build_index(folder, ((key_column(b, view.entity), b.column(on)) for b in batches), dim, view.index.metric)


def _drop_old(store: ViewStore, online: OnlineStore, ref: LiveRef, current: Pointer | None, lease: Lease | None) -> None:
    """Remove generations and indexes but the live and the last: a request that began before the flip still reads the last.

    Raises:
        FencedError: the lease was lost, and what is there may be what somebody else is loading.
    """
    if lease is not None:
        lease.check()
    view, last = store.name, ref.previous_generation
    if last is None and current is not None:  # the offline pointer was lost
        last = current.generation
    keep = {ref.generation, last}
    try:
        for generation in online.generations(view):
            if generation not in keep:
                online.drop(view, generation)
    except OnlineStoreError as exc:  # what is live is whole: what is left over is dropped by the next publishing
        log.warning("view %r: old generations stay for now: %s", view, exc)
    for path in store.indexes.glob("*") if store.indexes.is_dir() else ():
        if not path.name.isdigit() or int(path.name) not in keep:
            shutil.rmtree(path, ignore_errors=True)
