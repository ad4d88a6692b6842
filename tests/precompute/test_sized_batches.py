"""Rows are cut and put together by the bytes that they have, whatever stands in one row."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.sources.frame import GROUP_BYTES, write_frame
from precompute.sources.sized_batches import cut, joined
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.store.vectors import index_rows
from precompute.store.vectors.index_files import ROWS
from precompute.store.vectors.index_rows import RowsWriter, index_columns

MB = 10**6
SHAPES = {
    "numbers": pa.array(range(1_000_000), pa.int64()),
    "texts": pa.array([f"{i:09}" * 111_111 for i in range(20)]),
    "few large texts among small ones": pa.array(
        ["x" * MB if 500 <= i < 520 else "x" for i in range(5000)]
    ),
    "lists of floats": pa.array([[0.5] * 5000] * 100, pa.list_(pa.float32())),
    "vectors": pa.FixedSizeListArray.from_arrays(pa.array([0.5] * 1024 * 500, pa.float32()), 1024),
    "one row": pa.array(["x" * 5 * MB]),
    "no row": pa.array([], pa.string()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_cut_by_its_bytes_in_order(shape: str) -> None:
    batch = pa.record_batch({"x": SHAPES[shape]}).slice(len(SHAPES[shape]) > 1)
    pieces = list(cut(batch, 2 * MB))
    assert pa.Table.from_batches(pieces) == pa.Table.from_batches([batch])
    assert [piece.nbytes for piece in pieces if len(piece) > 1 and piece.nbytes > 2 * MB] == []
    # and into no more pieces than halves need
    assert len(pieces) <= 2 + 4 * batch.nbytes // (2 * MB)
    again = list(joined(iter(pieces), 10**9, 2 * MB))
    assert pa.Table.from_batches(again) == pa.Table.from_batches([batch])
    assert [piece.nbytes for piece in again if len(piece) > 1 and piece.nbytes > 2 * MB] == []


CATEGORY = pa.DictionaryArray.from_arrays(
    pa.array([i % 3 for i in range(60)], pa.int8()), pa.array(["a" * MB, "b", "c" * MB])
)


@pytest.mark.parametrize(
    ("column", "whole"),
    [
        (SHAPES["texts"], False),
        (SHAPES["few large texts among small ones"], False),
        # what each row has when it is stored, and not what the category's few texts have
        (CATEGORY, False),
        (pa.array(range(100_000)).dictionary_encode(), True),
        (pa.array(range(100_000)), True),
    ],
)
@pytest.mark.parametrize("batch_rows", [7, 10**6])
def test_a_frame_is_stored_in_row_groups_of_some_bytes(
    column: pa.Array, whole: bool, batch_rows: int, tmp_path: Path
) -> None:
    given = pa.table({"id": pa.array(range(len(column))), "x": column}).slice(0, 40 * batch_rows)
    frame = pa.RecordBatchReader.from_batches(given.schema, given.to_batches(batch_rows))
    path = tmp_path / "frame.parquet"
    assert write_frame(frame, ["id", "x"], ["id"], path) == given.num_rows
    file = pq.ParquetFile(path)
    groups = [file.read_row_group(n) for n in range(file.num_row_groups)]
    assert [group.nbytes for group in groups if group.nbytes > 1.1 * GROUP_BYTES] == []
    assert not whole or len(groups) == 1
    assert pa.concat_tables(groups).to_pylist() == given.to_pylist()


def test_the_rows_of_an_index_are_written_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_rows, "BATCH_BYTES", 4 * MB)
    view = FeatureView(
        "texts",
        ("id",),
        (Feature("vector", "float32", 2), Feature("text", "string")),
        ttl_s=1,
        stale_for_s=0,
        index=IndexSpec("vector"),
    )
    given = pa.table(
        {
            "id": pa.array(range(40)),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array([0.5] * 80, pa.float32()), 2),
            "text": [f"{i}" * (MB // len(f"{i}")) for i in range(40)],
            "computed_at": pa.array([1] * 40, pa.timestamp("us", "UTC")),
        }
    ).select(index_columns(view))
    writer = RowsWriter(tmp_path, view)
    for batch in given.to_batches(1):
        writer.add(batch)
    writer.close()
    with pa.ipc.open_file(str(tmp_path / ROWS)) as reader:
        sizes = [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)]
        assert reader.read_all().column("text") == given.column("text")
    assert sizes == [5] * 8 or sizes == [4] * 10
