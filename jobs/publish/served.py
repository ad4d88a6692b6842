"""Served: whether the online store gives back the rows of a snapshot, by some of them drawn from all over it."""

from __future__ import annotations

from store.errors import OnlineStoreError
from store.offline.snapshot import Snapshot
from store.offline.view_store import ViewStore
from store.online.codec import HEADER_BYTES, RowCodec, State
from store.online.found_rows import FoundRows, overlaid
from store.online.online_store import OnlineStore, Pointer

SAMPLE_ROWS = 256
"""Of 1 % of the rows that are lost, 256 see one with a probability of 92 %; they are read in about 10 ms."""
_BATCH_KEYS = 500


def check_served(store: ViewStore, online: OnlineStore, pointer: Pointer, snapshot: Snapshot, rows: int = SAMPLE_ROWS) -> int:
    """Read some rows under ``pointer``, which need not be live, and compare them with the snapshot's.

    Returns:
        how many were compared.

    Raises:
        OnlineStoreError: a generation is gone, or a row is missing, damaged or another one; says what to do.
        SnapshotError: the snapshot cannot be read.
    """
    name, view, codec = store.name, snapshot.view, RowCodec(snapshot.view)
    loaded, remedy = {g.number for g in online.generations(name)}, f"precompute publish {name} --reload"
    for number in pointer.generations:
        if number not in loaded:
            raise OnlineStoreError(f"generation {number} of view {name!r} is not in the online store: {remedy}")
    compared = 0
    snapshots = {pointer.base_snapshot, pointer.snapshot}
    for batch in store.sample(snapshot, rows).to_batches(max_chunksize=_BATCH_KEYS):
        expected = codec.row_batch(batch, view.entity, snapshot.number)
        keys = list(map(bytes, expected.keys.strings()))
        found = _read(online, pointer, keys)
        states, computed_at = codec.verify(found, snapshots)
        theirs = found.values
        for i, row in enumerate(expected.rows.strings()):
            whole = states[i] == State.WHOLE
            # but for checksum and snapshot, by which a base's rows differ from those of the snapshot over it
            if not whole or bytes(theirs[i] or b"")[HEADER_BYTES:] != row[HEADER_BYTES:] or not _same_time(computed_at[i], row):
                what = "is missing" if states[i] == State.ABSENT else "has other bytes than in Parquet"
                raise OnlineStoreError(f"key {keys[i].decode()!r} of view {name!r} {what} in the online store: {remedy}")
        compared += len(keys)
    return compared


def _read(online: OnlineStore, pointer: Pointer, keys: list[bytes]) -> FoundRows:
    found = [online.read_generation(pointer.view.name, number, keys) for number in pointer.generations]
    return found[0] if len(found) == 1 else overlaid(*found)


def _same_time(computed_at_us: int, row: memoryview) -> bool:
    return int(computed_at_us) == int.from_bytes(row[8:16], "little", signed=True)
