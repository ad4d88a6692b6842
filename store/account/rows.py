"""Rows: whether the online store serves what is live: its pointer, and the rows of a snapshot, by a
sample or one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.account.account import ROWS, Act, Finding, Turn
from precompute.store.account.account import State as AccountState
from precompute.store.disk.record import replace
from precompute.store.disk.storage import known_identity
from precompute.store.errors import (
    ConflictError,
    DamagedPointerError,
    OnlineStoreError,
    OtherFormatError,
    RowsLostError,
    SnapshotError,
)
from precompute.store.keys import key_column
from precompute.store.offline.log import LiveRef
from precompute.store.offline.selection import CLUSTERS, Selection, all_rows
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.codec import HEADER_BYTES, RowCodec, State
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.online_store import (
    OnlineStore,
    Pointer,
    check_own_rows,
    check_owner,
)
from precompute.store.online.row_values import packed_strings

SAMPLE_ROWS = 256
"""Rows of a sample: where 1 % of all rows are lost, 256 find one with a probability of 92 %; they
are read in about 10 ms."""
DOUBTED_ROWS = 20_000
"""Rows that are compared where the store itself doubts that it has all: of 1 in 4,000 that are
lost, they see one with a probability of 99 %."""
MOST_KEYS = 100_000
"""Keys whose segments are looked up, at most: of more, all are taken to be at fault."""
KEY_PLACES = 16
"""Places of the files that keys alone are drawn from: what an online store loses by itself is
spread over all keys, and of what was loaded one after the other a sixteenth is seen for sure. They
take 9 ms of CPU, and 64 places 20."""
_BATCH_KEYS, _MAPPED_KEYS = 500, 8192
"""Keys of one read; of a store whose rows are mapped, many at once."""
_BATCH_BYTES = 8 * 2**20
"""Bytes of the rows that are compared at once, about; one may have more."""

Times = npt.NDArray[np.int64]


def served_pointer(
    store: ViewStore, online: OnlineStore, ref: LiveRef, names: tuple[str, ...]
) -> Pointer | Finding | None:
    """The online pointer of a view, where it is the root's and names what was loaded; else what is
    wrong with it. None where something was published since the root was read.

    Args:
        store: of the view.
        online: where it is served from.
        ref: what the root says is live.
        names: of the segments of its snapshot.

    Raises:
        OnlineStoreError: the store does not answer.
        SnapshotError: the root's identity cannot be read.
    """
    name, what = store.name, "online pointer"
    try:
        pointer = online.live(name)
        if pointer is None:
            found = (
                f"the online store has no pointer of view {name!r}, whose snapshot {ref.snapshot}"
                " is live"
            )
            return Finding(what, AccountState.MISSING, Act.POINT, found)
        check_owner(pointer, name, known_identity(store.offline.root))
        if pointer.epoch > ref.epoch:
            return _lost_end(store, ref, pointer)
        served = (pointer.epoch, pointer.segments, pointer.indexes)
        if served != (ref.epoch, names, ref.indexes):
            found = (
                f"the online store serves snapshot {pointer.snapshot} of view {name!r}, and"
                f" {ref.snapshot} is live"
            )
            return Finding(what, AccountState.DAMAGED, Act.POINT, found)
        check_own_rows(pointer, online.loaded(name, pointer.segments))
    except DamagedPointerError as exc:
        return Finding(what, AccountState.DAMAGED, Act.POINT, str(exc))
    except OtherFormatError as exc:
        return Finding(what, AccountState.OTHER_FORMAT, Act.PERSON, str(exc))
    except ConflictError as exc:
        return Finding(what, AccountState.FOREIGN, Act.PERSON, str(exc))
    except RowsLostError as exc:
        return lost_rows(AccountState.MISSING, str(exc), exc.segments)
    return pointer


def _lost_end(store: ViewStore, ref: LiveRef, pointer: Pointer) -> Finding | None:
    """That the log ends before what is served; None where it goes on by now."""
    store.storage.afresh(store.folder)
    now = store.log.readable_live()
    if now is None or now.epoch != ref.epoch:
        return None
    found = (
        f"readers of view {store.name!r} are served snapshot {pointer.snapshot} by event"
        f" {pointer.epoch}, and its log in {store.folder} says no more than event {ref.epoch}:"
        " restore the events after it; or, where the whole root was restored from a backup, say"
        f" anew what is live: precompute publish {store.name}"
    )
    return Finding("log", AccountState.MISSING, Act.PERSON, found)


def check_served(
    store: ViewStore,
    online: OnlineStore,
    pointer: Pointer,
    snapshot: Snapshot,
    rows: int = SAMPLE_ROWS,
    *,
    values: bool = True,
    turn: int = 0,
) -> int:
    """Read some rows under ``pointer``, which need not be live, and compare them with the
    snapshot's.

    Args:
        store: of the view.
        online: where it is served from.
        pointer: what is read.
        snapshot: what the pointer names.
        rows: how many.
        values: False compares no values: the rows have to be there and pass their own checks. Keys
            alone are read of Parquet then, in a tenth of the time.
        turn: others are drawn for each.

    Returns:
        how many were compared.

    Raises:
        RowsLostError: a segment is gone, or another one than the pointer says, or a row is
            missing, damaged or another one; says what to do.
        OnlineStoreError: the store does not answer.
        SnapshotError: the snapshot cannot be read.
    """
    name, view = store.name, snapshot.view
    check_own_rows(pointer, online.loaded(name, pointer.segments))
    compared = 0
    # one batch of what came from many row groups: one look at the store
    columns, places = (None, CLUSTERS) if values else (view.entity, KEY_PLACES)
    sample = store.sample(snapshot, rows, columns, places, turn).combine_chunks()
    row_bytes = max(1, sample.nbytes // max(1, sample.num_rows))
    for batch in sample.to_batches(
        max_chunksize=max(1, min(_BATCH_KEYS, _BATCH_BYTES // row_bytes))
    ):
        keys = list(map(bytes, packed_strings(key_column(batch, view.entity)).strings()))
        wrong = _wrong(online, pointer, snapshot, keys, batch if values else None)
        if wrong:
            at, what = next(iter(wrong.items()))
            raise RowsLostError(
                f"key {keys[at].decode()!r} of view {name!r} {what} in the online store:"
                f" precompute publish {name} --reload",
                segments_of(store, snapshot, [keys[at] for at in wrong]),
            )
        compared += len(keys)
    return compared


def _wrong(
    online: OnlineStore,
    pointer: Pointer,
    snapshot: Snapshot,
    keys: list[bytes],
    batch: pa.RecordBatch | None,
) -> dict[int, str]:
    """Which of the keys have another row than ``batch``, or none that is whole, and in words what
    each has."""
    codec, found = RowCodec(snapshot.view), _read(online, pointer, keys)
    states, computed_at = found.verified(codec, pointer.numbers)
    other = "has other bytes than in Parquet"
    wrong = {
        i: "is missing" if states[i] == State.ABSENT else other
        for i in np.flatnonzero(states != State.WHOLE).tolist()
    }
    if batch is not None and not wrong:
        expected = codec.row_batch(batch, snapshot.view.entity, snapshot.number)
        for i, row in enumerate(expected.rows.strings()):
            # but for checksum and number, which are those of the segment that has it
            same_time = int(computed_at[i]) == int.from_bytes(row[8:16], "little", signed=True)
            if not same_time or bytes(found.values[i] or b"")[HEADER_BYTES:] != row[HEADER_BYTES:]:
                wrong[i] = other
    return wrong


def segments_of(
    store: ViewStore, snapshot: Snapshot, keys: Sequence[bytes]
) -> frozenset[str] | None:
    """Names of the segments of a snapshot that have the rows of some keys, which are read of all
    its files; None where these cannot be read, have none of the keys, or the keys are too many.

    Raises:
        UnreadableError: a file cannot be read now.
    """
    if len(keys) > MOST_KEYS:
        return None
    try:
        layers = store.layers(snapshot)
        texts = pa.array([key.decode() for key in keys])
        entity = snapshot.view.entity
        paths = {
            file.path
            for file in all_rows(layers).files
            if len(Selection([file]).find(texts, entity))
        }
    except SnapshotError:
        return None
    of = [one.name for one in snapshot.segments for _ in one.parts]
    found = frozenset(name for name, path in zip(of, layers.paths, strict=True) if path in paths)
    return found or None


def lost_rows(
    state: AccountState,
    found: str,
    segments: frozenset[str] | None,
    keys: tuple[str, ...] = (),
) -> Finding:
    """What is told of rows that are not whole, of segments where those are known."""
    names = None if segments is None else tuple(sorted(segments))
    return Finding(ROWS, state, Act.LOAD, found, keys, names)


def not_whole(
    online: OnlineStore,
    pointer: Pointer,
    codec: RowCodec,
    keys: list[bytes],
    computed_us: Times | None,
) -> list[bytes]:
    """Those of some keys whose rows are not what a reader should find: missing, damaged, or
    computed at another time.

    Args:
        online: where they are read, as every reader reads.
        pointer: what is live.
        codec: of its rows.
        keys: of rows that the snapshot has.
        computed_us: int64 [keys], when the snapshot's rows were computed, µs since 1970; None where
            that is not known.

    Raises:
        OnlineStoreError: the store does not answer; RowsLostError: what the pointer names is gone.
        MovedError: something else is live.
    """
    read = online.read(pointer.view.name, keys)
    if read is None or read[0].publishing != pointer.publishing:
        raise MovedError
    states, computed = read[1].verified(codec, pointer.numbers)
    wrong = states != State.WHOLE
    if computed_us is not None:
        wrong |= computed != computed_us
    return [keys[i] for i in np.flatnonzero(wrong).tolist()]


def read_on(
    turn: Turn,
    online: OnlineStore,
    pointer: Pointer,
    rows: Selection,
    least: float,
    ends_s: float,
    now_us: int,
) -> tuple[Turn, list[bytes]]:
    """Read a snapshot's rows in the online store, from where a turn over all of them is, at least
    so many, and more until a time by the monotonic clock.

    Returns:
        the turn as it is then, the next one after the last row; and keys of rows that are not
            whole.

    Raises:
        OnlineStoreError, MovedError: as :func:`not_whole` raises them.
        SnapshotError: the snapshot cannot be read.
    """
    wrong: list[bytes] = []
    codec, entity, read = RowCodec(pointer.view), list(pointer.view.entity), 0
    most = _BATCH_KEYS if online.blocking else _MAPPED_KEYS
    for file, group, table in rows.groups(turn.file, turn.group, [*entity, "computed_at"]):
        for batch in table.combine_chunks().to_batches(max_chunksize=most):
            keys = list(map(bytes, packed_strings(key_column(batch, tuple(entity))).strings()))
            computed_us = np.asarray(batch.column("computed_at").cast("int64"))
            wrong += not_whole(online, pointer, codec, keys, computed_us)
        read += table.num_rows
        turn = replace(turn, file=file, group=group, rows=turn.rows + table.num_rows)
        if read >= least and time.monotonic() >= ends_s:
            return turn, wrong
    return Turn(turn.base, began_us=now_us, before_us=turn.began_us), wrong


class MovedError(Exception):
    """Something else went live while rows were read."""


def _read(online: OnlineStore, pointer: Pointer, keys: list[bytes]) -> FoundRows:
    try:
        return online.read_segments(pointer.view.name, pointer.segments, keys)
    except OnlineStoreError as exc:
        # what a network does not bring may be there; a file that cannot be read is as good as gone
        if online.blocking or isinstance(exc, RowsLostError):
            raise
        raise RowsLostError(str(exc)) from exc
