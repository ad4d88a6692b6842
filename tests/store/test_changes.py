"""Changes: put over the snapshot they are counted from, what was written since and what left make
the later one, row for row."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precompute.store.errors import SnapshotError
from precompute.store.history.changes import Changes
from precompute.store.keys import key_column, key_text
from tests.fixtures import MakeProject
from tests.scene import Scene

Rows = Mapping[Any, float]
"""Key → x; the model makes double = 2x of it, and rejects :data:`BAD`."""

BAD = 99.0
BASE = {i: float(i) for i in range(40)}
"""A delta of up to 10 rows is not copied together with it."""

VIEW = {
    "model": {"use": "tests.models:Doubler", "args": {"nan_on": BAD}},
}
NUMBER: dict[str, pa.DataType] = {"id": pa.int64()}
PAIR: dict[str, pa.DataType] = {"shop": pa.string(), "item": pa.int64()}


def changed(rows: Rows, new: Mapping[Any, float | None]) -> dict[Any, float]:
    """The rows with some written over or added; those of None left."""
    return {key: x for key, x in {**rows, **new}.items() if x is not None}


def table_of(rows: Rows, entity: Mapping[str, pa.DataType] = NUMBER) -> pa.Table:
    keys = [key if isinstance(key, tuple) else (key,) for key in rows]
    columns = [pa.array([key[i] for key in keys], kind) for i, kind in enumerate(entity.values())]
    return pa.table([*columns, pa.array(list(rows.values()), pa.float64())], names=[*entity, "x"])


def committed(
    make_project: MakeProject,
    *stages: Rows,
    entity: Mapping[str, pa.DataType] = NUMBER,
    **view: Any,
) -> Scene:
    """A chain of snapshots, numbered from 1: a full one, and deltas."""
    for rows in stages:
        table = table_of(rows, entity)
        project = make_project(table, view=VIEW | {"entity": list(entity)} | view)
        assert project.materialize().status == "committed"
    assert [project.snapshot(n).kind for n in project.numbers()] == ["full"] + ["delta"] * (
        len(stages) - 1
    )
    return project


def doubles(project: Scene, number: int) -> dict[str, float]:
    """Key text → double of a snapshot."""
    snapshot = project.snapshot(number)
    batches = list(project.store.batches(snapshot))
    return {k: v for batch in batches for k, v in by_key(batch, list(snapshot.view.entity)).items()}


def by_key(batch: pa.RecordBatch, entity: list[str]) -> dict[str, float]:
    keys = key_column(batch, entity).to_pylist()
    return dict(zip(keys, batch.column("double").to_pylist(), strict=True))


def changes(project: Scene, since: int, number: int) -> tuple[dict[str, float], set[str]]:
    """Rows and removed keys, after it was found that they make of the one snapshot the other."""
    store, first, last = project.store, project.snapshot(since), project.snapshot(number)
    found = Changes(store, first, last)
    batches = list(found.batches(batch_rows=3))
    assert all(batch.num_rows <= 3 for batch in batches)
    rows = {k: v for batch in batches for k, v in by_key(batch, list(last.view.entity)).items()}
    assert found.rows == sum(batch.num_rows for batch in batches) == len(rows)
    entity = [list(batch.schema.names) for batch in found.batches(list(last.view.entity))]
    assert all(names == list(last.view.entity) for names in entity)
    removed = found.removed.to_pylist()
    assert found.removed.type == pa.string()
    assert len(set(removed)) == len(removed)
    assert not set(removed) & set(rows)
    unchanged = {
        key: double for key, double in doubles(project, since).items() if key not in removed
    }
    assert unchanged | rows == doubles(project, number)
    found.check_parts()
    return rows, set(removed)


def test_one_delta_is_its_rows_and_who_left(make_project: MakeProject) -> None:
    project = committed(make_project, BASE, changed(BASE, {3: 30.0, 7: None, 39: None, 50: 5.0}))
    assert changes(project, 1, 2) == ({"3": 60.0, "50": 10.0}, {"7", "39"})


def test_what_left_came_back_or_was_replaced_twice_counts_as_it_is_now(
    make_project: MakeProject,
) -> None:
    """3 leaves, comes back and leaves again, 4 comes back, 5 is replaced twice, 50 comes and
    leaves."""
    second = changed(BASE, {3: None, 4: None, 5: 50.0, 50: 5.0})
    third = changed(second, {3: 30.0, 4: 4.0, 5: 51.0, 50: None})
    project = committed(make_project, BASE, second, third, changed(third, {3: None}))
    expected = {
        (1, 2): ({"5": 100.0, "50": 10.0}, {"3", "4"}),
        (2, 3): ({"3": 60.0, "4": 8.0, "5": 102.0}, {"50"}),
        (1, 4): ({"4": 8.0, "5": 102.0}, {"3"}),
        (3, 4): ({}, {"3"}),
        (4, 4): ({}, set()),
    }
    for (since, number), (rows, removed) in expected.items():
        found = changes(project, since, number)
        # whether one that came and left is among the removed does not matter
        assert (found[0], found[1] - {"50"}) == (rows, removed - {"50"})


def test_a_row_that_is_rejected_since_has_left(make_project: MakeProject) -> None:
    """It is still in the source, but the snapshot has no row of it any more: the earlier one's must
    not come through."""
    second = changed(BASE, {3: BAD, 4: 40.0})
    third = changed(second, {3: BAD, 5: BAD, 4: BAD})
    project = committed(make_project, BASE, second, third, changed(third, {3: 33.0}))
    assert set(doubles(project, 2)) == {str(i) for i in range(40) if i != 3}
    assert changes(project, 1, 2) == ({"4": 80.0}, {"3"})
    assert changes(project, 2, 3) == ({}, {"4", "5"})
    assert changes(project, 1, 3) == ({}, {"3", "4", "5"})
    assert changes(project, 1, 4) == ({"3": 66.0}, {"4", "5"})


def test_a_key_of_two_columns_is_its_text(make_project: MakeProject) -> None:
    base = {
        (shop, item): float(i)
        for i, (shop, item) in enumerate(
            (s, n) for s in ("a", "a/b", "50%", "%2F") for n in range(10)
        )
    }
    second = changed(base, {("a/b", 1): None, ("50%", 2): None, ("a", 1): 77.0, ("é/", -7): 5.0})
    third = changed(second, {("a/b", 1): 1.5, ("%2F", 3): None})
    project = committed(make_project, base, second, third, entity=PAIR)

    def text(shop: str, item: int) -> str:
        return key_text((shop, item), list(PAIR))

    assert changes(project, 1, 2) == (
        {text("a", 1): 154.0, text("é/", -7): 10.0},
        {text("a/b", 1), text("50%", 2)},
    )
    assert changes(project, 1, 3) == (
        {text("a", 1): 154.0, text("é/", -7): 10.0, text("a/b", 1): 3.0},
        {text("50%", 2), text("%2F", 3)},
    )


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    stages=st.lists(
        st.dictionaries(st.integers(0, 5), st.sampled_from([None, 1.0, 2.0, BAD]), max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_whatever_came_and_went_the_changes_make_the_later_snapshot(
    make_project: MakeProject, stages: list[dict[int, float | None]]
) -> None:
    rows = [BASE]
    for stage in stages:
        after = changed(rows[-1], stage)
        # of equal sources there is no second snapshot
        if after != rows[-1]:
            rows.append(after)
    shutil.rmtree(make_project().root, ignore_errors=True)
    project = committed(make_project, *rows)
    for since in range(1, len(rows) + 1):
        changes(project, since, len(rows))


def test_damage_of_what_came_since_is_reported_and_older_is_not_read(
    make_project: MakeProject,
) -> None:
    project = committed(
        make_project, BASE, changed(BASE, {3: 30.0}), changed(BASE, {3: 30.0, 4: None})
    )
    first, second, third = (project.snapshot(n) for n in (1, 2, 3))
    own = [s.own for s in (second, third) if s.own is not None]

    def flip(path: str) -> None:
        file = project.store.folder / path
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    flip(first.parts[0].path)
    Changes(project.store, first, third).check_parts()
    flip(own[0].parts[0].path)
    Changes(project.store, second, third).check_parts()
    with pytest.raises(SnapshotError, match="differs from its checksum"):
        Changes(project.store, first, third).check_parts()
    kills = own[1].kills
    assert kills is not None
    flip(kills.path)
    with pytest.raises(SnapshotError, match="differs from its checksum"):
        Changes(project.store, second, third).check_parts()
    (project.store.folder / kills.path).unlink()
    with pytest.raises(SnapshotError, match="is missing"):
        _ = Changes(project.store, first, third).removed


def test_any_two_snapshots_are_counted_from_each_other(make_project: MakeProject) -> None:
    """Also the earlier one from the later, and two that were computed from one beside each other:
    what either replaced or removed comes back."""
    second = changed(BASE, {3: 30.0, 4: None, 50: 5.0})
    project = committed(make_project, BASE, second, changed(second, {5: 50.0, 6: None}))
    store = project.store
    assert changes(project, 2, 1) == ({"3": 6.0, "4": 8.0}, {"50"})
    assert changes(project, 3, 1) == ({"3": 6.0, "4": 8.0, "5": 10.0, "6": 12.0}, {"50"})
    store.mark_bad(3, "for a test", back_to=1)
    store.mark_bad(2, "for a test", back_to=1)
    last = changed(BASE, {3: 31.0, 5: None})
    make_project(table_of(last), view=VIEW).materialize()
    assert project.snapshot(4).names[0] == project.snapshot(3).names[0]
    assert changes(project, 3, 4) == ({"3": 62.0, "4": 8.0, "6": 12.0}, {"5", "50"})
    assert changes(project, 4, 3) == ({"3": 60.0, "5": 100.0, "50": 10.0}, {"4", "6"})
