"""Changes: how a snapshot differs from one that it builds on, which is what an overlay is loaded
from; and any two compared, rows by key in DuckDB, and the figures of each feature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.disk.sql import SpillFolder, open_duckdb
from precompute.store.feature_view import Feature
from precompute.store.history.versions import reading
from precompute.store.keys import key_column
from precompute.store.offline.row_figures import RowFigures, ValueFigures, VectorFigures, distance
from precompute.store.offline.selection import Selection, reading_file, rows_beside
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore


class Changes:
    """The rows of ``snapshot`` that are not ``since``'s, and the keys of ``since`` that
    ``snapshot`` has not.

    Args:
        store: of the view.
        since: a snapshot of ``snapshot``'s chain.
        snapshot: the later one.

    Raises:
        SnapshotError: a file is missing or has another size.
    """

    def __init__(self, store: ViewStore, since: Snapshot, snapshot: Snapshot) -> None:
        self._store, self._snapshot = store, snapshot
        chain = store.chain(snapshot)
        position = [layer.number for layer in chain].index(since.number)
        self.layers: Sequence[Snapshot] = chain[position + 1 :]
        """The snapshots after ``since``, the oldest first."""
        self._first = len({part.path for layer in chain[: position + 1] for part in layer.parts})
        """Number of the first file that ``since`` has not, among those of the chain."""

    @cached_property
    def rows(self) -> int:
        """Rows written since that ``snapshot`` still has."""
        layers = self._store.layers(self._snapshot)
        return sum(layers.rows[self._first :]) - sum(
            len(dead) for file, dead in layers.dead.items() if file >= self._first
        )

    @cached_property
    def removed(self) -> pa.Array:
        """Key texts of the entities that had a row and have none any more, string [n]: they left
        since, or what they are now was rejected. Some may never have been in ``since``."""
        if all(layer.losses == 0 for layer in self.layers):
            # all that are dead were replaced: of 50,000 rows that is 20 ms of reading keys
            return pa.array([], pa.string())
        dead = [self._dead(layer) for layer in self.layers if layer.deletes is not None]
        keys = pc.unique(pa.concat_arrays([pa.array([], pa.string()), *dead]))
        if len(keys):
            entity = self._snapshot.view.entity
            for batch in self.batches(list(entity), 65536):
                keys = keys.filter(pc.invert(pc.is_in(keys, key_column(batch, entity))))
        return keys

    @cached_property
    def deletes(self) -> pa.Table | None:
        """Which rows of ``since`` are none of ``snapshot``: what ``deletes.parquet`` of a delta
        right over it has, with the keys; None where there are none."""
        inherited = pa.array(
            [
                part.path
                for layer in self._store.chain(self._snapshot)[: -len(self.layers)]
                for part in layer.parts
            ],
            pa.string(),
        )
        tables = [self._read(layer, None) for layer in self.layers if layer.deletes is not None]
        tables = [
            table.filter(pc.is_in(table.column("part").cast(pa.string()), inherited))
            for table in tables
        ]
        tables = [table.unify_dictionaries() for table in tables if table.num_rows]
        return pa.concat_tables(tables) if tables else None

    def batches(
        self, columns: Sequence[str] | None = None, batch_rows: int = 8192
    ) -> Iterator[pa.RecordBatch]:
        """The rows written since that ``snapshot`` still has, as :meth:`ViewStore.batches` gives
        them."""
        return self._store.batches(self._snapshot, columns, batch_rows, first=self._first)

    def check_parts(self) -> None:
        """As :meth:`ViewStore.check_parts`, of what came since alone."""
        self._store.check_parts(self._snapshot, self.layers)

    def _dead(self, layer: Snapshot) -> pa.Array:
        """Key texts of the rows of earlier snapshots that are none of this one any more; those
        replaced, too."""
        entity = layer.view.entity
        table = self._read(layer, ["part", *(f"key_{name}" for name in entity)])
        # those of its own parts an interrupted run had computed: what is there of such a key is
        # another row, an earlier snapshot's perhaps
        own = pc.is_in(
            table.column("part").cast(pa.string()),
            pa.array([part.path for part in layer.parts], pa.string()),
        )
        earlier = table.drop_columns("part").filter(pc.invert(own))
        return key_column(earlier.rename_columns(list(entity)), entity)

    def _read(self, layer: Snapshot, columns: list[str] | None) -> pa.Table:
        assert layer.deletes is not None
        with reading_file(self._store.checked_path(layer, layer.deletes)) as file:
            return file.read(columns)


# ---- Compared: the rows of two snapshots side by side.


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


# ---- Feature figures: what is counted of each feature of a snapshot, by name, so that two
# stand side by side.


_SHARES = {"p1": 0.01, "median": 0.5, "p99": 0.99}


class Beside(NamedTuple):
    """One figure of a feature in two snapshots; None where it is not known."""

    figure: str
    first: float | str | None
    second: float | str | None


def beside(feature: Feature, first: Snapshot, second: Snapshot) -> list[Beside]:
    """The figures of a feature in two snapshots, as they were counted of all rows when these were
    written."""
    one, two = (figures_of(feature, snapshot) for snapshot in (first, second))
    lines = [Beside(name, one.get(name), two.get(name)) for name in dict.fromkeys((*one, *two))]
    moved = moved_by(feature, first, second)
    return lines + ([] if moved is None else [Beside("moved by", None, moved)])


def figures_of(feature: Feature, snapshot: Snapshot) -> dict[str, float | str]:
    """Name → figure; empty where nothing was counted."""
    figures = snapshot.figures
    if figures is None or not any(f.name == feature.name for f in snapshot.view.features):
        return {}
    found: dict[str, float | str] = {"nulls": figures.nulls.get(feature.name, 0)}
    if feature.name in figures.vectors:
        return found | _of_vectors(figures.vectors[feature.name])
    return found | (
        _of_values(feature, figures.values[feature.name]) if feature.name in figures.values else {}
    )


def _of_vectors(vectors: VectorFigures) -> dict[str, float | str]:
    lengths = vectors.norm_quantiles([*_SHARES.values()])
    found: dict[str, float | str] = {"zero vectors": vectors.zero, "mean length": vectors.mean_norm}
    return found | {f"length {name}": value for name, value in zip(_SHARES, lengths, strict=True)}


def _of_values(feature: Feature, values: ValueFigures) -> dict[str, float | str]:
    found: dict[str, float | str] = {"distinct": values.distinct}
    if values.buckets and feature.dtype != "bool":
        found |= {"mean": values.mean, "spread": values.spread, "zero": values.zero}
        found |= dict(zip(_SHARES, values.quantiles([*_SHARES.values()]), strict=True))
    if feature.max_items is not None or feature.dtype == "string":
        found["empty"] = values.empty
    if feature.max_items is not None and values.rows:
        found["mean items"] = values.items / values.rows
    if values.common:
        value, times = max(values.common.items(), key=lambda item: item[1])
        found["commonest"] = f"{value} ({times / max(values.looked_at, 1):.1%})"
    return found


def shown_figure(value: float | str | None) -> str:
    """A figure for people, in a few letters."""
    if value is None:
        return "–"
    return (
        value
        if isinstance(value, str)
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value:.4g}"
    )


def buckets_of(feature: Feature, figures: RowFigures | None) -> Mapping[int, int]:
    """Bucket → rows of what is plotted of a feature: numbers; lengths of texts and lists; squared
    lengths of vectors."""
    if figures is None:
        return {}
    if feature.name in figures.vectors:
        return figures.vectors[feature.name].norms
    values = figures.values.get(feature.name, ValueFigures())
    return values.buckets or values.lengths


def moved_by(feature: Feature, first: Snapshot, second: Snapshot) -> float | None:
    """How far apart a feature's values are in two snapshots: the Kolmogorov–Smirnov distance, from
    0 to 1; None where nothing was counted."""
    buckets = [buckets_of(feature, snapshot.figures) for snapshot in (first, second)]
    return distance(*buckets) if all(buckets) else None
