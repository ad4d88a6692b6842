"""Index rows: the rows of a vector index: keys, when each was computed, and the scalar features
that a search may filter by, and the filter over them; mapped Arrow files."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.errors import RequestError, VectorIndexError, did_you_mean
from precompute.store.feature_view import FeatureView
from precompute.store.keys import key_column
from precompute.store.online.kernels import Packed, hash_of, hashes, pack
from precompute.store.vectors.index_files import HASHES, ROWS, RowNumbers

BATCH_BYTES = 32 * 2**20
"""Bytes of one record batch of the file, about: what building holds in memory, with the rows that
came last; of keys and times alone these are a million rows."""


def filterable(view: FeatureView) -> dict[str, pa.DataType]:
    """Scalar features of a view → the type they are stored in. Arrow does not compare float16, so
    that is stored as float32."""
    scalars = (f for f in view.features if f.dim is None and f.max_items is None)
    return {f.name: pa.float32() if f.arrow_type == pa.float16() else f.arrow_type for f in scalars}


def index_columns(view: FeatureView) -> list[str]:
    """The columns of a snapshot that an index is built from."""
    assert view.index is not None
    return [*view.entity, view.index.on, *filterable(view), "computed_at"]


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as an Arrow file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def read_table(path: Path) -> pa.Table:
    """The table of an Arrow file, mapped."""
    with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
        return reader.read_all()


class RowsWriter:
    """Writes the rows beside an index, in the order they are added.

    Args:
        folder: of the index.
        view: whose rows they are.
    """

    def __init__(self, folder: Path, view: FeatureView) -> None:
        self._folder, self._view, self._types = folder, view, filterable(view)
        scalars = [pa.field(name, kind) for name, kind in self._types.items()]
        self._schema = pa.schema(
            [pa.field("key", pa.large_string()), pa.field("computed_at", pa.int64()), *scalars]
        )
        self._sink = pa.OSFile(str(folder / ROWS), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self._scalars: list[npt.NDArray[np.uint64]] = []
        self.rows = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Append rows with the columns of :func:`index_columns`."""
        keys = key_column(rows, self._view.entity)
        columns = [pc.cast(keys, pa.large_string()), rows.column("computed_at").cast(pa.int64())]
        columns += [rows.column(name).cast(kind) for name, kind in self._types.items()]
        self._hashes.append(hashes_of(keys))
        if self._types:
            self._scalars.append(_hashes_of_scalars(columns[2:]))
        self._waiting.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._waiting_bytes += self._waiting[-1].nbytes
        self.rows += rows.num_rows
        if self._waiting_bytes >= BATCH_BYTES:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting, self._schema)
            self._writer.write_table(table.combine_chunks())
        self._waiting, self._waiting_bytes = [], 0

    def close(self) -> None:
        """Write the rows that wait.

        Raises:
            OSError: the disk is full or refuses.
        """
        self._write()
        self._writer.close()
        self._sink.close()

    def write_hashes(self, vectors: npt.NDArray[Any]) -> None:
        """Write the hashes of all keys, ascending, each with its row number, ``check`` (key's hash
        ^ time ^ vector's hash) and, where there are any, ``scalars`` (key's hash ^ scalars' hash).
        So a bit that changes in a row's key, time or vector is seen by what reads it; in its
        scalars, by what was filtered by them.

        Args:
            vectors: of all rows, [rows, dim], as they are stored.

        Raises:
            OSError: the disk is full or refuses.
        """
        keys = np.concatenate(self._hashes or [np.zeros(0, np.uint64)])
        times = read_table(self._folder / ROWS).column("computed_at").to_numpy().view(np.uint64)
        checks = {"check": keys ^ times ^ _hashes_of_vectors(vectors)}
        if self._types:
            checks["scalars"] = keys ^ np.concatenate(self._scalars or [np.zeros(0, np.uint64)])
        order = np.argsort(keys, kind="stable")
        table = pa.table(
            {"hash": keys[order], "row": order.astype(np.int64)}
            | {name: check[order] for name, check in checks.items()}
        )
        write_table(self._folder / HASHES, table)

    def abandon(self) -> None:
        """Close the file as it is."""
        self._sink.close()


class IndexRows:
    """The rows of an index, read where they lie.

    Args:
        folder: of the index.

    Raises:
        OSError, ValueError, KeyError: the files cannot be read as such.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        rows, found = read_table(folder / ROWS), read_table(folder / HASHES)
        self._keys = rows.column("key")
        self.table = _with_own_offsets(rows.drop_columns(["key"]))
        """When each row was computed, and the scalars."""
        self._hashes = found.column("hash").to_numpy()
        self._row_of = found.column("row").to_numpy()
        self._checks = found.column("check").to_numpy()
        self._scalars = found.column("scalars").to_numpy() if self.table.num_columns > 1 else None
        self._texts = [_text_buffers(chunk) for chunk in self._keys.chunks if len(chunk)]
        self._starts = [0, *accumulate(len(chunk) for chunk in self._keys.chunks if len(chunk))][
            :-1
        ]
        self._computed_at_us: npt.NDArray[np.int64] = self.table.column("computed_at").to_numpy()
        if len(self._hashes) != len(self.table):
            raise ValueError(f"{HASHES} is not of these rows")

    def __len__(self) -> int:
        return len(self.table)

    def named(
        self, rows: RowNumbers, vectors: npt.NDArray[Any], *, filtered: bool = False
    ) -> tuple[list[str], npt.NDArray[np.int64]]:
        """The key texts of some rows and when they were computed (µs since 1970). The hashes
        confirm these and the vectors given: the files are mapped, and a bit may have changed since
        their checksums were compared.

        Args:
            rows: which.
            vectors: theirs, [n, dim], as they are stored.
            filtered: whether they were found by their scalars, which are confirmed as well then.

        Raises:
            VectorIndexError: one is damaged.
        """
        wanted = rows.tolist()
        texts = [text for text in map(self._text, wanted) if text is not None]
        if len(texts) == len(wanted):
            times = self._computed_at_us[rows]
            hashed = np.fromiter((hash_of(text.encode()) for text in texts), np.uint64, len(texts))
            at = np.minimum(np.searchsorted(self._hashes, hashed), len(self) - 1)
            same = (self._row_of[at] == rows) & (self._hashes[at] == hashed)
            # the rest are of two keys of one hash, or damaged
            others = np.flatnonzero(~same)
            at[others] = [self._place(int(hashed[i]), wanted[i]) for i in others.tolist()]
            checks = hashed ^ times.view(np.uint64) ^ _hashes_of_vectors(vectors)
            whole = bool((at >= 0).all()) and np.array_equal(self._checks[at], checks)
            if whole and filtered and self._scalars is not None:
                scalars = self.table.take(pa.array(rows)).columns[1:]
                whole = np.array_equal(self._scalars[at], hashed ^ _hashes_of_scalars(scalars))
            if whole:
                return texts, times
        raise self._damaged()

    def _place(self, hashed: int, row: int) -> int:
        """Where a row of that hash stands in the sorted hashes; -1 where it is not there."""
        first, end = (
            np.searchsorted(self._hashes, np.uint64(hashed)),
            np.searchsorted(self._hashes, np.uint64(hashed), "right"),
        )
        found = np.flatnonzero(self._row_of[first:end] == row)
        return int(first + found[0]) if len(found) else -1

    def _damaged(self) -> VectorIndexError:
        return VectorIndexError(
            f"the vector index {self._folder} is damaged since it was opened: `precompute publish"
            " <view> --reload` builds it again"
        )

    def _text(self, row: int) -> str | None:
        """The key text of a row; None where a damaged file has none."""
        if not 0 <= row < len(self):
            return None
        chunk = bisect_right(self._starts, row) - 1
        offsets, data = self._texts[chunk]
        at = row - self._starts[chunk]
        first, end = offsets[at], offsets[at + 1]
        if not 0 <= first <= end <= len(data):
            return None
        try:
            return str(data[first:end], "utf-8")
        except UnicodeDecodeError:
            return None

    def find(self, keys: Collection[str]) -> RowNumbers:
        """The rows of those ``keys`` that are here, in the order of the keys."""
        if not keys or not len(self):
            return np.zeros(0, np.int64)
        texts = list(keys)
        wanted = np.array([hash_of(text.encode()) for text in texts], np.uint64)
        at = np.searchsorted(self._hashes, wanted)
        found = []
        for text, hash_, place in zip(texts, wanted, at.tolist(), strict=True):
            # two keys of one hash are next to each other
            while place < len(self._hashes) and self._hashes[place] == hash_:
                row = int(self._row_of[place])
                if self._text(row) == text:
                    found.append(row)
                    break
                place += 1
        return np.array(found, np.int64)

    def same(
        self,
        keys: pa.Array,
        computed_at_us: npt.NDArray[np.int64],
        vectors: npt.NDArray[Any],
        scalars: list[pa.Array],
    ) -> RowNumbers:
        """For each of some rows the number of the one here that is the very same, by its hashes; -1
        where there is none, or two keys of its hash.

        Args:
            keys: their texts [n].
            computed_at_us: when they were computed, µs since 1970.
            vectors: [n, dim], as they are stored here.
            scalars: the columns of :func:`filterable`.
        """
        if not len(self):
            return np.full(len(keys), -1, np.int64)
        hashed = hashes_of(keys)
        at = np.minimum(np.searchsorted(self._hashes, hashed), len(self) - 1)
        checks = hashed ^ computed_at_us.view(np.uint64) ^ _hashes_of_vectors(vectors)
        equal = (self._hashes[at] == hashed) & (self._checks[at] == checks)
        if self._scalars is not None:
            equal &= self._scalars[at] == hashed ^ _hashes_of_scalars(scalars)
        found: RowNumbers = np.where(equal, self._row_of[at], -1)
        return found


def hashes_of(keys: pa.Array) -> npt.NDArray[np.uint64]:
    """xxh3_64 of each key text, uint64 [n]."""
    return pack(keys.cast(pa.binary()).to_pylist())[1]


def _hashes_of_scalars(columns: list[pa.Array]) -> npt.NDArray[np.uint64]:
    """A hash of each row of some scalar columns, uint64 [n]."""
    texts = [pc.cast(column, pa.string()) for column in columns]
    joined = pc.binary_join_element_wise(
        *texts, "\x1f", null_handling="replace", null_replacement="\0"
    )
    return hashes_of(joined)


def _hashes_of_vectors(vectors: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """xxh3_64 of each vector's bytes, uint64 [n], of [n, dim]."""
    size = vectors.shape[1] * vectors.itemsize
    offsets = np.arange(0, (len(vectors) + 1) * size, size, dtype=np.int64)
    return hashes(Packed(np.ascontiguousarray(vectors).reshape(-1).view(np.uint8), offsets))


def _with_own_offsets(table: pa.Table) -> pa.Table:
    """The table with the offsets of its text scalars copied into memory, 4 bytes a row: a filter
    follows them, and a changed bit of a mapped one ends the process (SIGSEGV in Arrow)."""
    for at, field in enumerate(table.schema):
        if field.type == pa.string():
            texts = []
            for chunk in table.column(at).chunks:
                valid, offsets, data = chunk.buffers()
                own = pa.py_buffer(offsets.to_pybytes())
                texts.append(
                    pa.StringArray.from_buffers(
                        len(chunk), own, data, valid, chunk.null_count, chunk.offset
                    )
                )
            table = table.set_column(at, field, pa.chunked_array(texts, field.type))
    return table


def _text_buffers(texts: pa.Array) -> tuple[memoryview, memoryview]:
    """Where each text begins, and all of them: read by hand, since Arrow would follow a damaged
    offset anywhere."""
    _, offsets, data = texts.buffers()
    return memoryview(offsets).cast("q")[texts.offset :], memoryview(b"" if data is None else data)


# ---- Row filter: which rows a search may answer with, by the scalar features of the view.


MOST_CONDITIONS, MOST_VALUES = 16, 1000
"""Features that one filter may name, and values that a feature may be one of."""

_LEAST, _MOST = -(2**63), 2**63 - 1

_BOUNDS: dict[str, Callable[[Any, Any], Any]] = {
    "gte": pc.greater_equal,
    "gt": pc.greater,
    "lte": pc.less_equal,
    "lt": pc.less,
}


class RowFilter:
    """Conditions on scalar features, all of which must hold; a null meets none.

    Args:
        view: whose features they are.
        wanted: feature → a value it must equal, a list of values it must be one of, or bounds: some
            of ``gte``, ``gt``, ``lte``, ``lt``.

    Raises:
        RequestError: not of that form, a feature that is not there or no scalar, or a value of
            another type.
    """

    def __init__(self, view: FeatureView, wanted: Mapping[str, Any]) -> None:
        types = filterable(view)
        if not isinstance(wanted, Mapping) or len(wanted) > MOST_CONDITIONS:
            raise _refused(
                f"a filter is a mapping of up to {MOST_CONDITIONS} features to what they must be"
            )
        self._conditions: list[tuple[str, Callable[[Any], Any]]] = []
        for name, condition in wanted.items():
            if name not in types:
                have = ", ".join(types) or "none"
                near = did_you_mean(str(name)[:80], types)
                raise _refused(
                    f"view {view.name!r} has no scalar feature {str(name)[:80]!r} to filter by (it"
                    f" has: {have}){near}"
                )
            self._conditions.append(
                (
                    name,
                    _tests(
                        name, types[name], condition, half=view.feature(name).dtype == "float16"
                    ),
                )
            )

    def admits(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        """Whether each row meets all conditions, bool [rows]."""
        masks = [pc.fill_null(test(table.column(name)), False) for name, test in self._conditions]
        if not masks:
            return np.ones(len(table), np.bool_)
        return np.asarray(functools.reduce(pc.and_, masks), np.bool_)


def _tests(name: str, kind: pa.DataType, condition: Any, *, half: bool) -> Callable[[Any], Any]:
    """A function of a column that returns which rows meet one feature's condition."""

    def value_of(value: Any) -> pa.Scalar:
        return _value(name, kind, value, half=half)

    if isinstance(condition, Mapping):
        if not condition or not set(condition) <= set(_BOUNDS):
            raise _refused(
                f"filter: the bounds of {name!r} are some of {', '.join(_BOUNDS)}, got"
                f" {str(list(condition))[:80]}"
            )
        if pa.types.is_boolean(kind):
            raise _refused(f"filter: {name!r} is true or false, it has no bounds")
        values = {bound: value_of(value) for bound, value in condition.items()}
        if pa.types.is_integer(kind):
            bounds = [_whole(bound, value) for bound, value in values.items()]
        else:
            bounds = [(_BOUNDS[bound], value) for bound, value in values.items()]
        return lambda column: functools.reduce(
            pc.and_, [compare(column, value) for compare, value in bounds]
        )
    if isinstance(condition, (list, tuple)):
        if not 0 < len(condition) <= MOST_VALUES:
            raise _refused(
                f"filter: {name!r} may be one of 1 to {MOST_VALUES} values, got {len(condition)}"
            )
        inside = [value.cast(kind) for value in map(value_of, condition) if _fits(value, kind)]
        return lambda column: pc.is_in(column, pa.array([v.as_py() for v in inside], kind))
    value = value_of(condition)
    if not _fits(value, kind):
        return lambda column: pa.chunked_array([pa.repeat(False, len(column))])
    return lambda column: pc.equal(column, value.cast(kind))


def _whole(bound: str, value: pa.Scalar) -> tuple[Callable[[Any, Any], Any], pa.Scalar]:
    """A bound of integers as the integer that says the same: Arrow refuses to compare those beyond
    2⁵³ with a float. A bound beyond int64 becomes the outermost int64, which all rows meet, or
    none."""
    number = value.as_py()
    if bound in ("gte", "gt"):
        least = math.ceil(number) if bound == "gte" else math.floor(number) + 1
        compare, whole = (
            (pc.greater_equal, max(least, _LEAST)) if least <= _MOST else (pc.greater, _MOST)
        )
    else:
        most = math.floor(number) if bound == "lte" else math.ceil(number) - 1
        compare, whole = (pc.less_equal, min(most, _MOST)) if most >= _LEAST else (pc.less, _LEAST)
    return compare, pa.scalar(whole, pa.int64())


def _value(name: str, kind: pa.DataType, value: Any, *, half: bool) -> pa.Scalar:
    """A value to compare a feature with.

    Raises:
        RequestError: of another type than the feature, not finite, or too large.
    """
    is_text, is_bool = pa.types.is_string(kind), pa.types.is_boolean(kind)
    right = (
        isinstance(value, str)
        if is_text
        else isinstance(value, bool)
        if is_bool
        else _is_number(value)
    )
    if not right:
        what = "a text" if is_text else "true or false" if is_bool else "a finite number"
        raise _refused(f"filter: {name!r} is compared with {what}, got {str(value)[:80]!r}")
    try:
        if is_text or is_bool:
            return pa.scalar(value, kind)
        if isinstance(value, int) and pa.types.is_integer(kind):
            return pa.scalar(value, pa.int64())
        # float16 0.1 is not the 0.1 that was given, but that is what is meant
        with np.errstate(over="ignore"):
            number = float(np.float16(value)) if half else float(value)
        return pa.scalar(number, kind if pa.types.is_floating(kind) else pa.float64())
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as exc:
        raise _refused(f"filter: {name!r} cannot be compared with {str(value)[:80]!r}") from exc


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _fits(value: pa.Scalar, kind: pa.DataType) -> bool:
    """Whether a feature of that type can be equal to the value at all: 300 is no int8, 0.5 no
    integer."""
    if pa.types.is_floating(kind):
        return True
    try:
        value.cast(kind)
    except pa.ArrowException:
        return False
    return True


def _refused(message: str) -> RequestError:
    return RequestError(message, code="bad_filter")
