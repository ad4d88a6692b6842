"""Publish: load a snapshot into the online store and the vector index, verify, then move the live pointer.

Order: generation and index beside what is live → read back → live.json by compare-and-swap → the online pointer. A reader follows only
the online pointer, so it sees rows and index of one snapshot, the old or the new.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.progress import Progress
from jobs.report import Report
from store.codec import Buffer, RowCodec
from store.entity_key import key_column
from store.errors import DamagedPointerError, OnlineStoreError, SnapshotError
from store.offline_store import OfflineStore, utc_now
from store.online_store import OnlineStore, Pointer
from store.snapshot import Snapshot
from store.vector_index import build_index

log = logging.getLogger(__name__)

BATCH_ROWS = 8192
SAMPLE_PER_BATCH = 32
"""Rows of each batch that are read back from the online store and compared byte by byte before the flip."""


def publish(
    view: str,
    store: OfflineStore,
    online: OnlineStore,
    report: Report,
    progress: Progress,
    *,
    number: int | None = None,
    reason: str = "publish",
) -> Pointer:
    """Make a snapshot live; the caller holds the view's run lock.

    Args:
        view: name of the view.
        store: where the snapshot is.
        online: where it goes.
        report: stage times are added to it.
        progress: told of every batch.
        number: which snapshot; the newest by default.
        reason: kept in the live pointer.

    Returns:
        the pointer that is live now; nothing is loaded when it was live already.

    Raises:
        SnapshotError: there is no such snapshot, or it is damaged.
        OnlineStoreError: the store refused, or gave back other bytes than were loaded; the old generation stays live.
        ConflictError: somebody else published meanwhile.
    """
    number = _newest(view, store) if number is None else number
    snapshot = store.snapshot(view, number)
    ref, current = store.readable_live(view), _readable_pointer(view, online)
    report.snapshot, report.model = number, snapshot.model
    same = ref is not None and current is not None and (ref.snapshot, ref.epoch) == (number, current.epoch)
    if same and current is not None and _is_served(view, online, current.epoch):
        report.status, report.epoch = "current", current.epoch
        return current
    with report.stage("check"):
        store.check_parts(snapshot)
    # Past both pointers: the root may have been restored, or the online store emptied, behind each other's back.
    expected = 0 if ref is None else ref.epoch
    epoch = max(expected, 0 if current is None else current.epoch, *online.generations(view), 0) + 1
    with report.stage("load"):
        sample = _load(snapshot, store, online, epoch, progress)
    with report.stage("verify"):
        _verify(snapshot, online, epoch, sample)
    index = None
    if snapshot.view.index is not None:
        index = f"{view}/index/{epoch:020d}"
        with report.stage("index"):
            _build(snapshot, store, index)
    pointer = _pointer(snapshot, epoch, index)
    with report.stage("flip"):
        store.move_live(view, number, expected_epoch=expected, epoch=epoch, reason=reason)
        online.flip(pointer)
    try:
        _drop_old(view, store, online, keep={epoch, epoch if current is None else current.epoch})
    except OnlineStoreError as exc:  # the new generation is live and whole: what is left over is dropped by the next publishing
        log.warning("view %r: old generations stay for now: %s", view, exc)
    report.status, report.epoch = "published", epoch
    return pointer


def _newest(view: str, store: OfflineStore) -> int:
    numbers = store.numbers(view)
    if not numbers:
        raise SnapshotError(f"view {view!r} has no snapshot yet: run `precompute run {view}`")
    return numbers[-1]


def _readable_pointer(view: str, online: OnlineStore) -> Pointer | None:
    """The online pointer; None when there is none, or it is damaged and about to be written anew."""
    try:
        return online.live(view)
    except DamagedPointerError as exc:
        log.warning("%s; it is written anew", exc)
        return None


def _pointer(snapshot: Snapshot, epoch: int, index: str | None) -> Pointer:
    return Pointer(
        view=snapshot.view,
        snapshot=snapshot.number,
        epoch=epoch,
        model=snapshot.model,
        rows=snapshot.counts.written,
        source_rows=snapshot.counts.source,
        at=utc_now(),
        computed_at_min=snapshot.computed_at_min,
        input_columns=dict(snapshot.input_columns),
        inputs=dict(snapshot.inputs),
        index=index,
    )


def _is_served(view: str, online: OnlineStore, epoch: int) -> bool:
    """Whether the live generation is there and can be opened; one that is gone or damaged is loaded again."""
    try:
        return epoch in online.generations(view) and online.read(view, [b"-"]) is not None
    except OnlineStoreError as exc:
        log.warning("%s; it is loaded again", exc)
        return False


def _load(
    snapshot: Snapshot, store: OfflineStore, online: OnlineStore, epoch: int, progress: Progress
) -> list[tuple[bytes, bytes]]:
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

    progress.begin(f"publish {view.name}", snapshot.counts.written)
    try:
        count = online.load(view.name, epoch, rows())
    finally:
        progress.end()
    if count != snapshot.counts.written:
        with contextlib.suppress(OnlineStoreError):
            online.drop(view.name, epoch)
        raise OnlineStoreError(
            f"the online store holds {count} of {snapshot.counts.written} rows of view {view.name!r} after loading; is it evicting keys? Nothing was published"
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


def _build(snapshot: Snapshot, store: OfflineStore, folder: str) -> None:
    view = snapshot.view
    assert view.index is not None
    on, dim = view.index.on, view.feature(view.index.on).dim
    assert dim is not None  # the configuration refuses an index on anything but a vector
    batches = store.batches(snapshot, columns=[*view.entity, on], batch_rows=BATCH_ROWS)
    build_index(store.root / folder, ((key_column(b, view.entity), b.column(on)) for b in batches), dim, view.index.metric)


def _drop_old(view: str, store: OfflineStore, online: OnlineStore, keep: set[int]) -> None:
    """Remove generations and indexes but the live and the last: a request that began before the flip still reads the last."""
    for generation in online.generations(view):
        if generation not in keep:
            online.drop(view, generation)
    folder = store.root / view / "index"
    for path in folder.glob("*") if folder.is_dir() else ():
        if not path.name.isdigit() or int(path.name) not in keep:
            shutil.rmtree(path, ignore_errors=True)
