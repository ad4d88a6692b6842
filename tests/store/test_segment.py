"""Files of kills: how they are written, read, and put together when segments are merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.store.errors import SnapshotError
from precompute.store.offline.segment import (
    Part,
    dead_rows,
    kills_table,
    merged_kills,
    read_kills,
    removed_keys,
)

Line = tuple[str | None, int | None, bool, Any]


def table(*lines: Line, kind: pa.DataType | None = None) -> pa.Table:
    part, row, removed, key = zip(*lines, strict=True) if lines else ((), (), (), ())
    return kills_table(
        pa.array(part, pa.string()),
        pa.array(row, pa.int64()),
        pa.array(removed, pa.bool_()),
        {"id": pa.array(key, kind or pa.int64())},
    )


def written(path: Path, *lines: Line, kind: pa.DataType | None = None) -> Path:
    pq.write_table(table(*lines, kind=kind), path)
    return path


def lines_of(found: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(line.values()) for line in found.to_pylist()]


def test_lines_are_sorted_and_only_removed_keys_stand_in_them(tmp_path: Path) -> None:
    found = table(
        *[("b", 2, False, 5), ("a", 7, True, 3), (None, None, True, 9), ("b", 1, True, 4)]
    )
    assert lines_of(found) == [
        (None, None, True, 9),
        ("a", 7, True, 3),
        ("b", 1, True, 4),
        ("b", 2, False, None),
    ]
    path = tmp_path / "kills.parquet"
    pq.write_table(found, path)
    assert {part: rows.tolist() for part, rows in read_kills(path).items()} == {
        "a": [7],
        "b": [1, 2],
    }
    assert removed_keys(path, ["id"]).to_pylist() == ["9", "3", "4"]
    parts = [Part("a", 8, 1, ""), Part("b", 3, 1, "")]
    assert {n: rows.tolist() for n, rows in dead_rows(parts, [path]).items()} == {0: [7], 1: [1, 2]}
    with pytest.raises(SnapshotError, match=r"kills.parquet names part a, which no segment"):
        dead_rows(parts[1:], [path])
    with pytest.raises(SnapshotError, match=r"kills.parquet names a row of part a, which has 7"):
        dead_rows([Part("a", 7, 1, ""), parts[1]], [path])


def test_a_file_of_tombstones_alone_names_no_row(tmp_path: Path) -> None:
    path = written(tmp_path / "kills.parquet", (None, None, True, 1), (None, None, True, 2))
    assert read_kills(path) == {}
    assert dead_rows([], [path]) == {}
    assert removed_keys(path, ["id"]).to_pylist() == ["1", "2"]


@pytest.mark.parametrize(
    ("files", "living", "expected"),
    [
        # a row below stays dead, one of what is merged is gone with its part
        ([[("low", 1, False, 1)], [("up", 0, False, 1)]], ["1"], [("low", 1, False, None)]),
        # a key that is removed keeps its tombstone when its part is merged away
        (
            [[("low", 1, False, 1)], [("up", 0, True, 1)]],
            [],
            [("low", 1, False, None), (None, None, True, 1)],
        ),
        # removed and come again: it has a row
        ([[("low", 1, True, 1)], [("up", 0, False, 1)]], ["1"], [("low", 1, False, None)]),
        ([[("up", 1, True, 1)]], ["1"], []),
        # removed, come again, removed again: one tombstone, where there is one that of a row below
        (
            [[("low", 1, True, 1)], [("up", 0, True, 1)], [(None, None, True, 1)]],
            [],
            [("low", 1, True, 1)],
        ),
        ([[(None, None, True, 1)], [("up", 0, True, 1)]], ["2"], [(None, None, True, 1)]),
    ],
)
def test_merged_kills_say_what_several_say_of_what_lies_below(
    tmp_path: Path, files: list[list[Line]], living: list[str], expected: list[Line]
) -> None:
    paths = [written(tmp_path / f"{n}.parquet", *lines) for n, lines in enumerate(files)]
    found = merged_kills(paths, ["low"], pa.array(living, pa.string()), ["id"])
    assert sorted(lines_of(found), key=str) == sorted(expected, key=str)


def test_keys_that_were_numbers_and_are_text_are_merged_as_text(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / "0.parquet", ("up", 1, True, 1)),
        written(
            tmp_path / "1.parquet", ("low", 1, True, "1"), (None, None, True, "x"), kind=pa.string()
        ),
    ]
    found = merged_kills(paths, ["low"], pa.array([], pa.string()), ["id"])
    assert sorted(lines_of(found), key=str) == [("low", 1, True, "1"), (None, None, True, "x")]
