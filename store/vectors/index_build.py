"""Index build: writes a vector index's folder, whole or not at all: of all rows of a list of
segments (a base), or of those that a base has not (changed rows)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.disk.durable_file import disk_message, make_folder, sync_file, sync_folder
from precompute.store.disk.record import replace
from precompute.store.errors import SnapshotError, VectorIndexError
from precompute.store.feature_view import FeatureView
from precompute.store.keys import key_column
from precompute.store.vectors.index_choice import Choice, Chooser, Limits
from precompute.store.vectors.index_files import (
    CODES,
    DTYPES,
    GONE,
    HASHES,
    LARGEST_FLOAT16,
    PARTS,
    ROWS,
    VECTORS,
    FileMark,
    FlatFile,
    Floats,
    IndexFigures,
    IndexRecord,
    RowNumbers,
    batches_of,
    mapped_vectors,
    mark_of,
    name_of,
    open_flat,
    read_index_record,
    write_codes,
    write_index_record,
)
from precompute.store.vectors.index_rows import (
    IndexRows,
    RowsWriter,
    filterable,
    read_table,
    write_table,
)
from precompute.store.vectors.indexed_parts import IndexedList, write_parts

NOTHING = IndexedList()
"""Of no list of segments."""
_EXACT_VECTORS = "exact.faiss"
"""The float32 vectors, until it is known that another file takes their place."""


def build_index(
    folder: Path,
    rows: Iterable[pa.RecordBatch],
    view: FeatureView,
    *,
    model: str,
    limits: Limits | None = None,
    listed: IndexedList = NOTHING,
) -> IndexFigures:
    """Build a base; one that is there already is replaced. Memory holds 32 MB of rows without their
    vectors, a hash or two of each row, for an index with codes also the codes, and, while it is
    measured, some bits for each row.

    Args:
        folder: where; its parent is created.
        rows: with the columns of :func:`precompute.store.vectors.index_rows.index_columns`; those
            with a null vector are left out.
        view: which feature is indexed, by which metric, and what recall is promised.
        model: fingerprint of the model that made the vectors.
        limits: what the index may cost.
        listed: the list of segments that the rows are of; of none, no other list can be searched
            through it.

    Returns:
        what was chosen and measured.

    Raises:
        SnapshotError: the disk is full or refuses.
    """
    with _built_aside(folder) as temporary:
        began = time.monotonic()
        writer, dim, dtype, null = _write_rows(temporary, rows, view)
        write_parts(temporary / PARTS, listed.parts, null)
        choice = _chosen(temporary, view, dim, dtype, limits or Limits())
        spec = view.index
        assert spec is not None
        codes, measured = choice.codes, choice.by_query.values()
        figures = IndexFigures(
            kind=choice.kind,
            promised=spec.recall_at_10,
            recall_at_10=min((kind.recall_at_10 for kind in measured), default=1.0),
            recall_bound=min((kind.recall_bound for kind in measured), default=1.0),
            queries=min((kind.queries for kind in measured), default=0),
            by_query=choice.by_query,
            query_us=choice.query_us,
            exact_us=choice.exact_us,
            build_s=round(time.monotonic() - began, 3),
            why=choice.why,
            **({} if codes is None else codes._asdict()),
        )
        return _sealed(
            temporary,
            writer,
            IndexRecord(
                spec.metric,
                dim,
                0,
                choice.dtype,
                model,
                {},
                figures,
                name=name_of(folder),
                segments=listed.segments,
                space=listed.space,
            ),
        )


def build_changed(
    folder: Path,
    base_folder: Path,
    rows: Iterable[pa.RecordBatch],
    gone: RowNumbers,
    view: FeatureView,
    *,
    model: str,
    listed: IndexedList = NOTHING,
) -> IndexFigures:
    """Build the index of the rows that a base has not: one without codes, in the base's dtype where
    that holds their numbers; and which of the base's rows count no more.

    It costs what changed: of the base no more is read than its record.

    Args:
        folder: where; one that is there already is replaced.
        base_folder: of the index that it lies over.
        rows: as for :func:`build_index`.
        gone: numbers of the base's rows that count no more.
        view, model: as for :func:`build_index`; both the base's.
        listed: the list of segments that base and changed rows together are of.

    Returns:
        figures of an index of kind ``exact``, its size and time those of the changed rows alone.

    Raises:
        SnapshotError: the disk is full or refuses.
        VectorIndexError: the base is not there, damaged, or of another model, metric or dimension.
    """
    try:
        base, _ = read_index_record(base_folder)
    except (OSError, ValueError, KeyError) as exc:
        raise VectorIndexError(
            f"the vector index {base_folder} cannot be built on ({exc}): publish with --reload"
        ) from exc
    spec = view.index
    if base.base is not None or spec is None or (base.model, base.metric) != (model, spec.metric):
        raise VectorIndexError(
            f"the vector index {base_folder} is of another model or metric: publish with --reload"
        )
    with _built_aside(folder) as temporary:
        began = time.monotonic()
        writer, dim, dtype, _ = _write_rows(temporary, rows, view)
        if dim != base.dim:
            raise VectorIndexError(
                f"the vector index {base_folder} is of {base.dim} numbers a vector, these have"
                f" {dim}"
            )
        stored_dtype = base.dtype if dtype == "float16" else "float32"
        _keep_flat(temporary, dim, stored_dtype, l2=spec.metric == "l2")
        write_table(temporary / GONE, pa.table({"row": np.unique(gone)}))
        # nothing is approximate in it, and what was promised is the base's
        figures = IndexFigures(
            promised=base.figures.promised,
            build_s=round(time.monotonic() - began, 3),
            why="the rows that changed since the base, compared with one by one",
        )
        of = (base_folder.name, name_of(folder), listed.segments, listed.space)
        record = IndexRecord(base.metric, dim, 0, stored_dtype, model, {}, figures, *of)
        return _sealed(temporary, writer, record)


def without_copies(
    base_folder: Path, rows: Iterable[pa.RecordBatch], gone: RowNumbers, view: FeatureView
) -> tuple[RowNumbers, RowNumbers]:
    """Of rows that a base has not and such that it has and that count no more, those that are no
    copies of each other: merging segments puts a row into another file as it is.

    Args:
        base_folder: of the base, whose files were compared with their checksums.
        rows: as for :func:`build_index`.
        gone: numbers of the base's rows.
        view: of both.

    Returns:
        which of ``rows`` that have a vector, from 0 and ascending, and which of ``gone``.
    """
    spec, (record, _) = view.index, read_index_record(base_folder)
    assert spec is not None
    base, left = IndexRows(base_folder), np.zeros(record.rows, np.bool_)
    left[gone] = True
    others, came = [np.zeros(0, np.int64)], 0
    for batch in rows:
        here = np.flatnonzero(batch.column(spec.on).is_valid()) + came
        came += batch.num_rows
        batch = batch.filter(batch.column(spec.on).is_valid())
        found = base.same(
            key_column(batch, view.entity),
            np.asarray(batch.column("computed_at").cast(pa.int64())),
            _numbers(batch.column(spec.on), view).astype(DTYPES[record.dtype]),
            [batch.column(name).cast(kind) for name, kind in filterable(view).items()],
        )
        copied = found >= 0
        copied[copied] = left[found[copied]]
        left[found[copied]] = False
        others.append(here[~copied])
    return np.concatenate(others), np.flatnonzero(left)


def _numbers(vectors: pa.Array, view: FeatureView) -> Floats:
    """Vectors, none of them null, as they are compared: float32 [n, dim], of length 1 for
    cosine."""
    assert view.index is not None
    dim = view.feature(view.index.on).dim
    # the configuration refuses an index on anything but a vector
    assert dim is not None
    values = np.asarray(vectors.flatten()).astype(np.float32).reshape(-1, dim)
    return _normalised(values) if view.index.metric == "cosine" else values


def _write_rows(
    folder: Path, rows: Iterable[pa.RecordBatch], view: FeatureView
) -> tuple[RowsWriter, int, str, RowNumbers]:
    """Vectors and rows of an index, in the order they come.

    Returns:
        what wrote the rows, the dimension, whether float16 could hold every number (``float16``) or
            not (``float32``), and which of the rows that came had no vector, from 0 and ascending.
    """
    spec = view.index
    assert spec is not None
    dim = view.feature(spec.on).dim
    assert dim is not None
    flat = FlatFile(folder / _EXACT_VECTORS, dim, "float32", l2=spec.metric == "l2")
    writer = RowsWriter(folder, view)
    largest, came, null = 0.0, 0, [np.zeros(0, np.int64)]
    try:
        for batch in rows:
            vectors = batch.column(spec.on)
            came += batch.num_rows
            if vectors.null_count:
                null.append(np.flatnonzero(vectors.is_null()) + came - batch.num_rows)
                batch = batch.filter(vectors.is_valid())
                vectors = batch.column(spec.on)
            values = _numbers(vectors, view)
            largest = max(largest, float(np.abs(values).max(initial=0.0)))
            flat.add(values)
            writer.add(batch)
        flat.close()
        writer.close()
    finally:
        flat.abandon()
        writer.abandon()
    dtype = "float16" if largest <= LARGEST_FLOAT16 else "float32"
    return writer, dim, dtype, np.concatenate(null)


def _chosen(folder: Path, view: FeatureView, dim: int, dtype: str, limits: Limits) -> Choice:
    """Choose, and leave in the folder the files of what was chosen."""
    spec = view.index
    assert spec is not None
    exact = folder / _EXACT_VECTORS

    def halved() -> tuple[Any, npt.NDArray[Any]]:
        _write_float16(folder, dim, l2=spec.metric == "l2")
        return open_flat(folder / VECTORS), mapped_vectors(folder / VECTORS, dim, "float16")

    vectors = mapped_vectors(exact, dim, "float32")
    if dtype == "float32":
        limits = dataclasses.replace(limits, small_rows=len(vectors) + 1)
    scalars = read_table(folder / ROWS).drop_columns(["key", "computed_at"])
    choice = Chooser(
        vectors,
        open_flat(exact),
        halved,
        scalars,
        spec.recall_at_10,
        metric=spec.metric,
        limits=limits,
    ).choose()
    if dtype == "float32":
        choice = dataclasses.replace(
            choice,
            why=(
                "the vectors hold numbers that float16 cannot, so that all are compared with as"
                " they are"
            ),
        )
    if choice.coded is not None:
        write_codes(choice.coded, folder / CODES)
    if choice.dtype == "float32":
        os.replace(exact, folder / VECTORS)
    exact.unlink(missing_ok=True)
    return choice


def _keep_flat(folder: Path, dim: int, dtype: str, *, l2: bool) -> None:
    if dtype == "float16":
        _write_float16(folder, dim, l2=l2)
        (folder / _EXACT_VECTORS).unlink()
    else:
        os.replace(folder / _EXACT_VECTORS, folder / VECTORS)


def _write_float16(folder: Path, dim: int, *, l2: bool) -> None:
    flat = FlatFile(folder / VECTORS, dim, "float16", l2=l2)
    try:
        for part in batches_of(mapped_vectors(folder / _EXACT_VECTORS, dim, "float32")):
            flat.add(part)
        flat.close()
    finally:
        flat.abandon()


def _sealed(folder: Path, writer: RowsWriter, record: IndexRecord) -> IndexFigures:
    """Write each row's check, sync every file, and write the record that vouches for them."""
    writer.write_hashes(mapped_vectors(folder / VECTORS, record.dim, record.dtype))
    files: dict[str, FileMark] = {}
    for name in (VECTORS, CODES, ROWS, HASHES, PARTS, GONE):
        if (folder / name).is_file():
            sync_file(folder / name)
            files[name] = mark_of(folder / name)
    figures = replace(record.figures, size_bytes=sum(file.size_bytes for file in files.values()))
    write_index_record(folder, replace(record, rows=writer.rows, files=files, figures=figures))
    sync_folder(folder)
    return figures


@contextlib.contextmanager
def _built_aside(folder: Path) -> Iterator[Path]:
    """A folder to build in, which takes the place of ``folder`` at the end, or goes.

    Raises:
        SnapshotError: the disk is full or refuses.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        make_folder(folder.parent)
        temporary.mkdir()
        yield temporary
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except OSError as exc:
        raise SnapshotError(disk_message(folder, exc)) from exc
    except RuntimeError as exc:
        # How FAISS reports a failed write.
        raise SnapshotError(
            f"cannot write the vector index {folder}: {exc} (the live snapshot is untouched)"
        ) from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _normalised(vectors: Floats) -> Floats:
    scaled = vectors / np.maximum(
        np.abs(vectors).max(axis=1, keepdims=True), np.finfo(np.float32).tiny
    )
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    return np.asarray(scaled / np.maximum(norms, np.finfo(np.float32).tiny), np.float32)
