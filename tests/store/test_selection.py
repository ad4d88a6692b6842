"""Selections: rows by position, drawn with the same chance from everywhere, found by key,
distinguished without reading."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.store.errors import SnapshotError
from precompute.store.offline import selection
from precompute.store.offline.part_file import Layers
from precompute.store.offline.selection import CLUSTERS, all_rows, rows_beside, seed_of


def layers(folder: Path, *files: tuple[int, int, list[int]], prefix: str = "part") -> Layers:
    """(first id, rows, dead rows) of each file of 10 rows a row group; a row's ``x`` is its id."""
    paths = []
    for number, (first, rows, _) in enumerate(files):
        paths.append(folder / f"{prefix}-{number}.parquet")
        ids = np.arange(first, first + rows)
        pq.write_table(pa.table({"id": ids, "x": ids * 1.0}), paths[-1], row_group_size=10)
    dead = {number: np.array(d) for number, (_, _, d) in enumerate(files) if d}
    return Layers(paths, [rows for _, rows, _ in files], dead)


def ids(rows: selection.Selection, columns: list[str] | None = None) -> list[int]:
    return [i for batch in rows.batches(columns) for i in batch.column("id").to_pylist()]


def test_all_rows_are_those_that_are_not_dead(tmp_path: Path) -> None:
    found = all_rows(layers(tmp_path, (0, 25, [0, 3, 19, 24]), (100, 3, [0, 1, 2]), (200, 2, [])))
    expected = [i for i in range(25) if i not in (0, 3, 19, 24)] + [200, 201]
    assert (found.count, ids(found), ids(found, ["id"])) == (23, expected, expected)
    assert found.files[0].nth(np.arange(21)).tolist() == expected[:21]


def test_places_among_rows_are_read(tmp_path: Path) -> None:
    rows = all_rows(layers(tmp_path, (0, 25, [0, 3, 19, 24]), (100, 3, [0, 1, 2]), (200, 9, [4])))
    expected = ids(rows)
    for places in ([], [0], [20, 21], [28], [0, 5, 20, 21, 27], range(29)):
        chosen = rows.at(np.array([*places], np.int64))
        assert ids(chosen) == [expected[place] for place in places]


def test_a_draw_is_of_living_rows_and_the_same_every_time(tmp_path: Path) -> None:
    dead = [n for n in range(1000) if n % 3]
    made = layers(tmp_path, (0, 1000, dead), (1000, 500, []), (2000, 3, [0, 1, 2]))
    rows = all_rows(made)
    assert ids(rows.draw(rows.count, 1)) == ids(rows)
    drawn = ids(rows.draw(200, seed_of(made)))
    assert drawn == ids(rows.draw(200, seed_of(made)))
    assert drawn != ids(rows.draw(200, seed_of(made) + 1))
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(ids(rows))
    assert 100 <= len(drawn) <= 200
    for few in (1, 5, 63):
        assert 0 < len(ids(rows.draw(few, 7))) <= few


def test_every_row_has_the_same_chance(tmp_path: Path) -> None:
    """Whatever the size of its file, and of the row group that dead rows left."""
    rows = all_rows(
        layers(
            tmp_path,
            (0, 400, list(range(5, 300))),
            (400, 40, []),
            (500, 300, [n for n in range(300) if n % 10]),
        )
    )
    times = Counter(i for seed in range(150) for i in ids(rows.draw(70, seed), ["id"]))
    assert set(times) == set(ids(rows))
    share = np.array([times[i] for i in ids(rows)]) / sum(times.values()) * rows.count
    assert (share > 0.6).all()
    assert (share < 1.5).all()


def test_a_draw_comes_from_every_part_and_reads_few_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def reading(file: pq.ParquetFile, group: int, columns: list[str] | None = None) -> pa.Table:
        read.append(group)
        return original(file, group, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", reading)
    rows = all_rows(layers(tmp_path, *((10_000 * n, 10_000, []) for n in range(4))))
    drawn = np.array(ids(rows.draw(640, 3)))
    assert len(read) <= CLUSTERS
    assert len(drawn) >= 600
    assert np.bincount(drawn // 10_000).tolist() == pytest.approx([len(drawn) / 4] * 4, abs=10)
    assert ((drawn >= 30_000).mean(), (drawn < 13_333).mean()) == pytest.approx(
        (0.25, 1 / 3), abs=0.02
    )


def test_many_small_row_groups_are_drawn_from_until_there_are_rows_enough(tmp_path: Path) -> None:
    rows = all_rows(layers(tmp_path, *((10 * n, 2, []) for n in range(300))))
    assert 250 <= rows.draw(500, 1).count <= 500


def test_few_rows_in_many_large_row_groups_are_drawn_from_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layers(tmp_path, (0, 3000, []), (3000, 2000, []))
    changed = layers(tmp_path, (0, 3000, list(range(0, 3000, 15))), (3000, 2000, []))
    rows = rows_beside(made, changed)
    assert ids(rows.draw(8192, 1)) == ids(rows) == list(range(0, 3000, 15))
    monkeypatch.setattr(selection, "MOST_READ_BYTES", 1.0)
    drawn = ids(rows.draw(8192, 1))
    assert set(drawn) < set(ids(rows))
    # evenly from all over them: 64 places in 200 row groups
    assert CLUSTERS // 2 < len(drawn) <= CLUSTERS
    assert np.histogram(drawn, 4, (0, 3000))[0].min() > CLUSTERS // 8


def test_what_two_snapshots_share_is_found_by_position(tmp_path: Path) -> None:
    first = layers(tmp_path, (0, 20, [1]), (100, 5, []))
    later = layers(tmp_path, (200, 4, []), prefix="later")
    second = Layers(
        [*first.paths, *later.paths], [20, 5, 4], {0: np.array([1, 4, 7]), 1: np.array([0])}
    )
    other = Layers(
        [*first.paths, *later.paths], [20, 5, 4], {0: np.array([1, 4]), 2: np.array([3])}
    )
    assert ids(rows_beside(first, second)) == [4, 7, 100]
    assert ids(rows_beside(second, first)) == [200, 201, 202, 203]
    assert (ids(rows_beside(second, other)), ids(rows_beside(other, second))) == ([203], [7, 100])
    assert rows_beside(first, first).count == 0
    assert ids(rows_beside(first, later)) == ids(all_rows(first))


def test_rows_are_found_by_key_among_those_selected(tmp_path: Path) -> None:
    rows = all_rows(layers(tmp_path, (0, 40, [7]), (100, 10, [])))
    assert rows.find(pa.array(["3", "7", "109", "5000"]), ["id"]).to_pylist() == ["3", "109"]
    assert rows.find(pa.array(["7"]), ["id"]).to_pylist() == []


def test_text_and_composite_keys_are_found_by_their_text(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"a": ["x", "x/y", "50%"], "id": [1, 2, 3]}), path)
    rows = all_rows(Layers([path], [3], {}))
    found = rows.find(pa.array(["x%2Fy/2", "50%25/3", "x/2"]), ["a", "id"])
    assert found.to_pylist() == ["x%2Fy/2", "50%25/3"]
    assert rows.find(pa.array(["x/y", "y"]), ["a"]).to_pylist() == ["x/y"]
    # no number, of a time when keys were text
    assert rows.find(pa.array(["x", "2"]), ["id"]).to_pylist() == ["2"]


@pytest.mark.parametrize(
    "use",
    [lambda s: s.draw(5, 1), ids, lambda s: s.find(pa.array(["1"]), ["id"])],
    ids=["draw", "read", "find"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, use: object) -> None:
    assert callable(use)
    made = layers(tmp_path, (0, 40, []))
    made.paths[0].write_bytes(b"PAR1nothing")
    with pytest.raises(SnapshotError, match=r"part-0\.parquet cannot be read"):
        use(all_rows(made))
