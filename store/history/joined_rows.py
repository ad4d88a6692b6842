"""Joined rows: the rows of two snapshots that are not the very same ones, side by side by key; in
DuckDB, which spills what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.disk.spill_folder import SpillFolder
from precompute.store.entity_key import key_column
from precompute.store.feature_view import Feature
from precompute.store.history.versions import reading
from precompute.store.offline.selection import Selection, rows_beside
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.sql import open_duckdb

WINDOW_ROWS = 16_384


class Joined(NamedTuple):
    """Some keys: their texts, string [rows]; whether each has a row in the first and in the second
    snapshot, bool [rows]; and its features there, null where it has none. Numbers of 16 bits come
    as float32."""

    keys: pa.Array
    in_first: pa.Array
    in_second: pa.Array
    first: pa.RecordBatch
    second: pa.RecordBatch


def joined_rows(
    store: ViewStore, first: Snapshot, second: Snapshot, features: Sequence[Feature], memory_mb: int
) -> Iterator[Joined]:
    """The rows of two snapshots of one entity, but for those that both have from the same place of
    the same file.

    Args:
        store: of their view.
        first: a snapshot.
        second: another.
        features: that both have, of one type.
        memory_mb: DuckDB's memory limit.

    Raises:
        SnapshotError: a file is missing or damaged.
    """
    layers = [store.layers(snapshot) for snapshot in (first, second)]
    sides = (rows_beside(layers[0], layers[1]), rows_beside(layers[1], layers[0]))
    spill = SpillFolder()
    with reading(store.name), closing(spill), closing(open_duckdb(spill, memory_mb)) as connection:
        for side, rows, snapshot in zip("ab", sides, (first, second), strict=True):
            connection.register(side, _reader(rows, snapshot.view.entity, features))
        columns = ", ".join(
            f"{side}.f{n} AS {side}{n}" for side in "ab" for n in range(len(features))
        )
        # read as it comes: neither side is sorted
        query = (
            "SELECT coalesce(a.k, b.k) AS k, a.k IS NOT NULL AS in_a, b.k IS NOT NULL AS in_b,"
            f" {columns} FROM a FULL OUTER JOIN b ON a.k = b.k"
        )
        names = [feature.name for feature in features]
        for batch in connection.sql(query).to_arrow_reader(WINDOW_ROWS):
            of = [batch.columns[3 + at * len(names) : 3 + (at + 1) * len(names)] for at in (0, 1)]
            first_rows, second_rows = (
                pa.RecordBatch.from_arrays(columns, names=names) for columns in of
            )
            yield Joined(batch.column(0), batch.column(1), batch.column(2), first_rows, second_rows)


def _reader(
    rows: Selection, entity: Sequence[str], features: Sequence[Feature]
) -> pa.RecordBatchReader:
    """Key texts ``k``, and the features as ``f0``, ``f1``, … of types that DuckDB has."""
    types = [readable(feature.arrow_type) for feature in features]
    schema = pa.schema([("k", pa.string()), *((f"f{n}", kind) for n, kind in enumerate(types))])

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows.batches([*entity, *(feature.name for feature in features)]):
            columns = [
                pc.cast(batch.column(feature.name), kind)
                for feature, kind in zip(features, types, strict=True)
            ]
            yield pa.RecordBatch.from_arrays([key_column(batch, entity), *columns], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def readable(kind: pa.DataType) -> pa.DataType:
    """The type in which DuckDB reads values: it has no numbers of 16 bits with a point."""
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(readable(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(readable(kind.value_type))
    return pa.float32() if pa.types.is_float16(kind) else kind
