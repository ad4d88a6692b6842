"""Online stores in tests: rows as opaque bytes, pointers that say their epoch, and the steps of a
publishing."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from precompute.store.disk.record import replace
from precompute.store.errors import OnlineStoreError
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.store.online import kernels
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import Packed, RowBatch, Rows
from precompute.store.online.online_store import OnlineStore, Pointer, Segment


def segment(number: int, *, upper: bool = False, of: bytes = b"") -> Segment:
    """The segment of that number, whose rows are of any kind."""
    return Segment(number, hashlib.sha256(b"%d" % number + of).hexdigest(), upper)


def named(number: int) -> str:
    """Its name."""
    return segment(number).name


def pointer(
    epoch: int, view: str = "numbers", snapshot: int | None = None, **changes: Any
) -> Pointer:
    """A pointer whose every field says its epoch, to the segment of that number."""
    made = Pointer(
        view=FeatureView(
            view,
            ("id",),
            (Feature(f"f{epoch}", "float64"),),
            ttl_s=epoch,
            stale_for_s=1.5,
            index=IndexSpec("v"),
        ),
        snapshot=snapshot or epoch,
        epoch=epoch,
        model=f"model {epoch}",
        rows=epoch,
        source_rows=epoch + 1,
        at=f"at {epoch}",
        computed_at_min=None if epoch % 2 else epoch,
        input_columns={"x": "double"},
        inputs={"other": epoch},
        index=f"{view}/index/{epoch}",
        segments=(named(epoch),),
    )
    return replace(made, **changes)


def batch_of(table: dict[bytes, bytes]) -> RowBatch:
    keys = Packed.of(list(table))
    return RowBatch(keys, Packed.of(list(table.values())), kernels.hashes(keys))


def rows_of(table: dict[bytes, bytes], batch: int = 3) -> Rows:
    items = iter(table.items())
    while part := list(itertools.islice(items, batch)):
        yield batch_of(dict(part))


def of_number(folder: Path, number: int, suffix: str = "") -> Path:
    """The table file, with its suffix, or the index folder of the segment of a number that lies in
    a folder."""
    (path,) = (p for p in folder.glob(f"{number}-*{suffix}") if not p.name.startswith("."))
    return path


def load(
    store: OnlineStore,
    number: int,
    table: dict[bytes, bytes],
    view: str = "numbers",
    upper: bool = False,
) -> int:
    return store.load(view, segment(number, upper=upper), rows_of(table))


def publish(
    store: OnlineStore, epoch: int, table: dict[bytes, bytes], view: str = "numbers"
) -> None:
    assert load(store, epoch, table, view) == len(table)
    store.flip(pointer(epoch, view))


def publish_over(
    store: OnlineStore, epoch: int, below: int, table: dict[bytes, bytes], view: str = "numbers"
) -> None:
    """Load what changed over one segment, and flip."""
    assert load(store, epoch, table, view, upper=True) == len(table)
    store.flip(over(below, epoch, view))


def over(below: int, epoch: int, view: str = "numbers") -> Pointer:
    """The pointer of two segments."""
    return pointer(epoch, view, segments=(named(below), named(epoch)))


def numbers(store: OnlineStore, view: str = "numbers") -> list[int]:
    return [segment.number for segment in store.segments(view)]


def found_in(store: OnlineStore, number: int, keys: Sequence[bytes]) -> list[bytes | None]:
    """Rows of one segment, whatever is live."""
    return plain(store.read_segments("numbers", [named(number)], keys))


def values(found: tuple[Pointer, FoundRows] | None) -> list[bytes | None]:
    assert found is not None
    return plain(found[1])


def plain(found: FoundRows) -> list[bytes | None]:
    """The rows; both faces of what was found say the same."""
    rows = [None if value is None else bytes(value) for value in found.values]
    assert [bytes(string) or None for string in found.packed.strings()] == rows
    return rows


def many(rows: int, width: int = 100) -> dict[bytes, bytes]:
    """So many rows of so many bytes."""
    return {b"%d" % i: b"%d:" % i + b"x" * (width - len(str(i)) - 1) for i in range(rows)}


def is_refused(use: Callable[[], object]) -> bool:
    """Whether the online store refuses, or does not answer."""
    try:
        use()
    except OnlineStoreError:
        return True
    return False


TABLE = {b"a": b"1", b"b": b"22", b"c": b"3", b"d": b"\0\xff" * 300}


def back_to(number: int, epoch: int, **changes: Any) -> Pointer:
    """A pointer of a later publishing that goes back to an older segment."""
    return pointer(epoch, segments=(named(number),), **changes)


class Stopped(Exception):
    """A load that does not come to its end."""


def torn(table: dict[bytes, bytes], error: Exception) -> Rows:
    yield from rows_of(table)
    raise error


DAMAGED_POINTERS = [
    b"",
    b"[]",
    b"{}",
    b"\xff\xfe",
    pointer(1).to_bytes()[:-1],
]
