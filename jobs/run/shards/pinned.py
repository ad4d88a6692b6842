"""Pinned: rows of a source as Arrow files, so that those who compute them read what the run's diff
saw, whatever becomes of the source.

Arrow's stream format and not Parquet: the model gets exactly the types that the source yields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.disk.durable_file import make_folder, sha256_of
from precompute.store.disk.storage import LOCAL
from precompute.store.errors import SnapshotError
from precompute.store.keys import key_column
from precompute.store.offline.snapshot import Part
from precompute.store.offline.view_store import ViewStore


def _options(store: ViewStore) -> pa.ipc.IpcWriteOptions:
    """Compressed where the files travel: in a folder that costs 17 ns a row of three numbers, and
    they are mapped as they are."""
    return pa.ipc.IpcWriteOptions(compression=None if store.storage is LOCAL else "lz4")


def bounds(rows: int, shards: int) -> list[int]:
    """Where each of so many shards ends, in rows: of like size, none empty."""
    shards = max(1, min(rows, shards))
    return [rows * (n + 1) // shards for n in range(shards)]


def pin(
    store: ViewStore,
    run: str,
    batches: Iterator[pa.RecordBatch],
    rows: int,
    shards: int,
) -> list[Part]:
    """Write rows into a file for each of so many shards, in the order of the rows.

    Args:
        store: of the view.
        run: id of the folder that they are written to.
        batches: the rows.
        rows: how many there are, at least one.
        shards: how many files.

    Raises:
        OSError: the file system failed.
    """
    ends, written = bounds(rows, shards), list[Part]()
    pieces = _cut(batches, ends)
    for number, (end, before) in enumerate(zip(ends, [0, *ends], strict=False)):
        path = store.data / run / f"rows-{number:05d}.arrow"
        make_folder(path.parent)
        first = next(pieces)
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_stream(file, first.schema, options=_options(store)) as out,
        ):
            out.write_batch(first)
            left = end - before - first.num_rows
            while left:
                piece = next(pieces)
                out.write_batch(piece)
                left -= piece.num_rows
        written.append(part_of(store, path, end - before))
    return written


def _cut(batches: Iterator[pa.RecordBatch], ends: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """The batches, cut where shards end."""
    seen, left = 0, iter(ends)
    end = next(left)
    for batch in batches:
        rest = batch
        while rest.num_rows:
            piece = rest.slice(0, end - seen)
            seen, rest = seen + piece.num_rows, rest.slice(piece.num_rows)
            end = next(left, end) if seen == end else end
            yield piece


def pin_table(store: ViewStore, run: str, name: str, table: pa.Table) -> Part:
    """Write a whole table into one file.

    Raises:
        OSError: the file system failed.
    """
    path = store.data / run / f"{name}.arrow"
    make_folder(path.parent)
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, table.schema, options=_options(store)) as out,
    ):
        out.write_table(table)
    return part_of(store, path, table.num_rows)


def part_of(store: ViewStore, path: Path, rows: int) -> Part:
    """A file that was written here, made there for all."""
    store.storage.put([path])
    return Part(str(path.relative_to(store.folder)), rows, path.stat().st_size, sha256_of(path))


def pinned_path(store: ViewStore, part: Part) -> Path:
    """A pinned file, compared with its checksum.

    Raises:
        SnapshotError: it is gone, or damaged.
    """
    try:
        path = store.file(part)
        if sha256_of(path) == part.sha256:
            return path
        raise SnapshotError(f"{path} is damaged: it differs from its checksum; run the view again")
    except OSError as exc:
        raise SnapshotError(
            f"{store.folder / part.path} cannot be read: {exc.strerror or exc}"
        ) from exc


def pinned_table(path: Path) -> pa.Table:
    """What :func:`pin_table` wrote."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return stream.read_all()


def pinned_batches(
    path: Path, entity: Sequence[str], done: pa.Array | None, batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Rows that :func:`pin` wrote, without those whose keys' texts are ``done``, at most so many at
    a time."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            if done is not None:
                keys = key_column(batch.select(list(entity)), entity)
                batch = batch.filter(pc.invert(pc.is_in(keys, value_set=done, skip_nulls=True)))
            for start in range(0, batch.num_rows, batch_rows):
                yield batch.slice(start, batch_rows)
