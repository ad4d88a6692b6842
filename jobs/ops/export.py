"""Export: the rows of one snapshot, its deltas merged, as one Parquet or CSV file that any tool
reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from precompute.jobs.config.project import Project
from precompute.store.disk.durable_file import disk_message, replacing
from precompute.store.errors import ConfigError, SnapshotError
from precompute.store.history import snapshot_at
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore

WINDOW_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Exported:
    """A file that was written, and what is in it."""

    view: str
    snapshot: int
    rows: int
    path: str
    size_bytes: int


def export(
    project: Project,
    view: str,
    path: Path | None = None,
    *,
    number: int | None = None,
    replace: bool = False,
) -> Exported:
    """Write all rows of a snapshot into one file: entity key, features, ``computed_at``,
    ``input_hash``. It appears whole or not at all; memory holds some rows at a time.

    Args:
        project: the configuration; the view need not be in it any more.
        view: its name.
        path: ends with .parquet or .csv, in which vectors and lists are JSON; by default
            ``<view>-<snapshot>.parquet`` in the working directory.
        number: of the snapshot; the live one by default.
        replace: a file that is there.

    Raises:
        ConfigError: no such view, the file is there, or of another kind, or its folder is not.
        SnapshotError: no such snapshot, nothing is live, or a file is missing, damaged or cannot be
            written.
    """
    store = project.stored(view)
    snapshot = snapshot_at(store) if number is None else store.snapshot(number)
    path = checked_target(
        Path(f"{view}-{snapshot.number}.parquet") if path is None else path,
        (".parquet", ".csv"),
        replace,
    )
    write = _write_parquet if path.suffix == ".parquet" else _write_csv
    try:
        with replacing(path) as temporary:
            rows = write(store, snapshot, temporary)
        return Exported(view, snapshot.number, rows, str(path), path.stat().st_size)
    except OSError as exc:
        raise SnapshotError(disk_message(path, exc, "nothing was exported")) from exc


def checked_target(path: Path, kinds: Sequence[str], replace: bool, option: str = "--to") -> Path:
    """``path`` itself, where ``option`` of the command line may have a file written that ends with
    one of ``kinds``.

    Raises:
        ConfigError: it is of another kind, its folder is not there, or it is there and not to be
            replaced.
    """
    if path.suffix not in kinds:
        raise ConfigError(f"{option} {path}: name a file that ends with {' or '.join(kinds)}")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: no folder {str(path.parent)!r}; make it, or name another one"
        )
    if path.exists() and not replace:
        raise ConfigError(
            f"{option} {path}: there is such a file; name another one, or say --replace"
        )
    return path


def _schema(store: ViewStore, snapshot: Snapshot) -> pa.Schema:
    view = snapshot.view
    read = pq.read_schema(store.part_paths(snapshot)[0])
    names = [*view.entity, *view.feature_names, "computed_at", "input_hash"]
    return pa.schema([read.field(name) for name in names if name in read.names])


def _batches(store: ViewStore, snapshot: Snapshot, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in store.batches(snapshot, schema.names, WINDOW_ROWS):
        # a key that is a number in one file and text in another is what the first file has, where
        # that is possible
        yield batch.select(schema.names).cast(schema)


def _write_parquet(store: ViewStore, snapshot: Snapshot, path: Path) -> int:
    schema, rows = _schema(store, snapshot), 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _batches(store, snapshot, schema):
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def _write_csv(store: ViewStore, snapshot: Snapshot, path: Path) -> int:
    schema, rows = _schema(store, snapshot), 0
    flat = pa.schema(
        [
            (name, pa.string() if pa.types.is_nested(kind) else kind)
            for name, kind in zip(schema.names, schema.types, strict=True)
        ]
    )
    flat = pa.schema(
        [
            (field.name, pa.float32() if pa.types.is_float16(field.type) else field.type)
            for field in flat
        ]
    )
    with path.open("wb") as file, pa.csv.CSVWriter(file, flat) as writer:
        for batch in _batches(store, snapshot, schema):
            columns = [
                _flat(column, kind) for column, kind in zip(batch.columns, flat.types, strict=True)
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=flat))
            rows += batch.num_rows
    return rows


def _flat(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_nested(column.type):
        return column.cast(kind)
    return pa.array(
        [
            None if value is None else json.dumps(value, ensure_ascii=False)
            for value in column.to_pylist()
        ],
        pa.string(),
    )
