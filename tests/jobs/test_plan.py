"""Plan: which rows a run computes and the words it says so with; and that a chain of deltas is, row
by row, what a full run makes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precompute.jobs.ops.status import project_status
from precompute.jobs.run.rows import chunks
from precompute.sources.diff import Diff
from precompute.store.disk import crashpoint
from precompute.store.disk.crashpoint import InjectedError
from precompute.store.errors import PrecomputeError, RejectedError, SnapshotError
from precompute.store.offline.view_store import ViewStore
from tests.fixtures import MakeProject
from tests.jobs.test_run_all import view as doubled
from tests.models import Doubler
from tests.scene import Scene

HERE = "tests.jobs.test_plan"
ROWS = [(i, float(i)) for i in range(1, 9)]
GATES_OFF = {"gates": {"rows": None, "first": None}}
"""Keys come and go as they like, and the vectors of a Doubler have nearly one direction."""
Captured = pytest.CaptureFixture[str]

computed: list[float] = []
"""Every x the :class:`Counting` model saw, in order; emptied by the tests."""


class Counting(Doubler):
    """A doubler that notes what it computed, and raises on a negative x."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        x = [float(v) for v in batch.column("x").to_pylist()]
        if any(v < 0 for v in x):
            raise ValueError("negative")
        computed.extend(x)
        return super().compute(batch)


COUNTING = {"model": {"use": f"{HERE}:Counting"}} | GATES_OFF


@pytest.fixture(autouse=True)
def nothing_computed() -> None:
    computed.clear()


# ---- the words


def test_the_first_run_computes_every_row(make_project: MakeProject) -> None:
    project = make_project(ROWS)
    found = project.plan()
    assert str(found) == "full: 8 of 8 rows to compute (8 new); the first snapshot"
    assert found.to_json() == {
        "kind": "full",
        "source": 8,
        "compute": 8,
        "new": 8,
        "changed": 0,
        "expired": 0,
        "unchanged": 0,
        "removed": 0,
        "resumed": 0,
        "refused": 0,
        "retried": 0,
        "parent": None,
        "compact": False,
        "merging": 0,
        "reason": "the first snapshot",
    }


def test_nothing_to_do_changed_new_and_removed_are_counted(make_project: MakeProject) -> None:
    project = make_project(ROWS)
    assert project.materialize().plan == "full: 8 of 8 rows to compute (8 new); the first snapshot"
    found = project.plan()
    assert str(found) == "nothing to do: 0 of 8 rows to compute, 8 unchanged; builds on snapshot 1"
    assert found.to_json()["kind"] == "none"
    project = make_project([(1, 10.0), (2, 20.0), (3, 30.0), (5, 50.0), *ROWS[5:], (9, 9.0)])
    found = project.plan()
    assert str(found) == (  # five new rows, and five that are dead, beside eight
        "full, compacting: 5 of 8 rows to compute (1 new, 4 changed), 3 unchanged, 1 removed; builds on snapshot 1"
    )
    project = make_project([*ROWS[:5], (9, 9.0)])
    found = project.plan()
    assert (
        str(found)
        == "delta: 1 of 6 rows to compute (1 new), 5 unchanged, 3 removed; builds on snapshot 1"
    )
    kinds = {
        name: found.to_json()[name]
        for name in ("kind", "new", "changed", "unchanged", "removed", "parent", "compact")
    }
    assert kinds == {
        "kind": "delta",
        "new": 1,
        "changed": 0,
        "unchanged": 5,
        "removed": 3,
        "parent": 1,
        "compact": False,
    }


def test_rows_hashed_by_another_duckdb_are_computed_again(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(ROWS)
    project.materialize()
    monkeypatch.setattr("precompute.sources.source.hash_kind", lambda: "duckdb-0123456789abcdef")
    assert str(project.plan()) == (
        "full: 8 of 8 rows to compute (8 new); every row, since the way rows are hashed changed, by another version of DuckDB"
    )


def test_a_dry_run_writes_nothing_and_says_the_same_as_the_run(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = make_project(ROWS)
    project.materialize()
    project = make_project([(1, 10.0), *ROWS[1:]])
    before = sorted(project.root.rglob("*"))
    assert project.cli("materialize", "numbers", "--dry-run") == 0
    assert capsys.readouterr().out == (
        "numbers: delta: 1 of 8 rows to compute (1 changed), 7 unchanged; builds on snapshot 1; shown by: precompute history numbers\n"
    )
    assert project.cli("materialize", "numbers", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["changed"] == 1
    assert sorted(project.root.rglob("*")) == before
    assert (
        project.materialize().plan
        == "delta: 1 of 8 rows to compute (1 changed), 7 unchanged; builds on snapshot 1"
    )


OTHER: dict[str, tuple[dict[str, Any], Any]] = {
    "the model's fingerprint": (
        {"model": {"use": "tests.models:Doubler", "args": {"version": 2}}},
        "model (or its tokenizer or tables) changed, fingerprint ",
    ),
    "the SQL": (
        {"source": {"sql": "SELECT *, 1 AS y FROM read_parquet('${data}/data.parquet')"}},
        "source's SQL changed",
    ),
    "a feature": (
        {"features": {"double": {"dtype": "float32"}, "vector": {"dtype": "float32", "dim": 4}}},
        "features or the entity changed",
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_recipe_computes_every_row_and_says_why(
    make_project: MakeProject, what: str
) -> None:
    change, reason = OTHER[what]
    make_project(ROWS).materialize()
    project = make_project(ROWS, view=change)
    found = project.plan()
    assert (found.parent, found.diff) == (None, Diff(new=8))
    assert found.reason.startswith(f"every row, since the {reason}")
    report = project.materialize()
    assert (project.snapshot_of(report).kind, report.counts["written"]) == ("full", 8)


def of_version(version: int) -> dict[str, Any]:
    return {"model": {"use": f"{HERE}:Counting", "args": {"version": version}}} | GATES_OFF


def test_a_run_builds_on_the_newest_of_its_own_recipe(make_project: MakeProject) -> None:
    make_project(ROWS, view=of_version(1)).run()
    assert make_project(view=of_version(2)).materialize().counts["written"] == 8
    for version, live in ((1, 1), (2, 2), (1, 1)):
        computed.clear()
        report = make_project(view=of_version(version)).run()
        assert (report.snapshot, report.counts["written"], computed) == (live, 0, [])
        assert make_project(view=of_version(version)).live().snapshot == live
    # and a changed row is one row, over what was made by this model
    rows = [(1, 50.0), *ROWS[1:]]
    report = make_project(rows, view=of_version(2)).run()
    project = make_project(view=of_version(2))
    made = project.snapshot_of(report)
    assert (made.number, made.parent, computed) == (3, 2, [50.0])
    assert project.doubles()[1] == 100.0
    report = make_project(view=of_version(1)).run()
    assert (make_project(view=of_version(1)).snapshot_of(report).parent, computed) == (
        1,
        [50.0] * 2,
    )


def test_what_was_rolled_back_from_is_built_on_by_no_recipe(make_project: MakeProject) -> None:
    project = make_project(ROWS, view=of_version(1))
    project.run()
    rows = [(1, 50.0), *ROWS[1:]]
    project = make_project(rows, view=of_version(1))
    project.run()
    project.rollback()
    make_project(view=of_version(2)).materialize()
    parent = make_project(view=of_version(1)).plan().parent
    assert parent is not None
    assert parent.number == 1


def test_another_column_type_computes_every_row(make_project: MakeProject) -> None:
    make_project(pa.table({"id": [1, 2], "x": pa.array([1, 2], pa.int32())})).materialize()
    project = make_project(pa.table({"id": [1, 2], "x": pa.array([1, 2], pa.int64())}))
    assert project.plan().reason.startswith(
        "every row, since the type of a column changed: 'x', int32 → int64 (cast it"
    )
    project = make_project(
        pa.table({"id": pa.array([1, 2], pa.int16()), "x": pa.array([1, 2], pa.int32())})
    )
    assert (
        "since the type or order of columns changed, of the key perhaps: 'id', int16 now"
        in project.plan().reason
    )


# ---- rejected rows


def test_a_rejected_row_is_not_tried_again_before_its_input_changes(
    make_project: MakeProject,
) -> None:
    rows = [*ROWS[:7], (8, -1.0)]
    project = make_project(rows, view=COUNTING)
    assert project.materialize().counts["rejected"] == 1
    found = project.plan()
    assert str(found) == (
        "nothing to do: 0 of 8 rows to compute (1 new, –1 rejected before with the same input), 7 unchanged; builds on snapshot 1"
    )
    assert project.materialize().status == "current"
    again = project.plan(retry_rejected=True)
    assert (
        str(again)
        == "delta: 1 of 8 rows to compute (1 new, 1 of them rejected before), 7 unchanged; builds on snapshot 1"
    )
    for attempts in (2, 3):
        assert project.cli("materialize", "numbers", "--retry-rejected") == 0
        report = project.report()
        store = project.offline
        rejected = store.view("numbers").snapshot(report.snapshot or 0).rejected
        assert rejected is not None
        (row,) = pq.read_table(store.root / "numbers" / rejected.path).to_pylist()
        assert (row["key"], row["stage"], row["attempts"]) == ("8", "model", attempts)
    assert report.counts["rejected"] == 1
    assert report.counts["unchanged"] == 7
    assert report.counts["written"] == 0
    report = make_project(
        [*ROWS[:6], (7, 70.0), (8, -1.0)], view=COUNTING
    ).materialize()  # what was rejected stays counted
    assert report.counts == {
        "source": 8,
        "written": 1,
        "rejected": 1,
        "unchanged": 6,
        "removed": 0,
        "duplicates": 0,
    }
    report = make_project([*ROWS[:6], (7, 70.0), (8, 8.0)], view=COUNTING).materialize()
    assert report.counts == {
        "source": 8,
        "written": 1,
        "rejected": 0,
        "unchanged": 7,
        "removed": 0,
        "duplicates": 0,
    }
    assert make_project().doubles(report.snapshot or 0) == {i: 2.0 * i for i in range(1, 9)} | {
        7: 140.0
    }


def test_a_damaged_file_of_rejected_rows_does_not_stop_a_retry(make_project: MakeProject) -> None:
    project = make_project([*ROWS[:7], (8, -1.0)], view=COUNTING)
    first = project.materialize()
    store = project.offline
    rejected = store.view("numbers").snapshot(first.snapshot or 0).rejected
    assert rejected is not None
    (store.root / "numbers" / rejected.path).write_bytes(b"no Parquet")
    report = project.materialize(retry_rejected=True)
    assert (report.counts["rejected"], report.counts["unchanged"]) == (1, 7)
    again = store.view("numbers").snapshot(report.snapshot or 0).rejected
    assert again is not None
    (row,) = pq.read_table(store.root / "numbers" / again.path).to_pylist()
    assert (row["key"], row["attempts"]) == ("8", 1)


# ---- what an interrupted run left


def test_resumed_rows_are_said_and_not_computed(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 2)
    monkeypatch.setattr(chunks, "PART_BYTES", 1)
    view = COUNTING | {"max_rejected": 0.0}
    project = make_project([*ROWS[:7], (8, -8.0)], view=view)
    with pytest.raises(RejectedError):
        project.materialize()
    assert str(make_project(ROWS, view=view).plan()) == (
        "full: 2 of 8 rows to compute (8 new, –6 computed by an interrupted run); the first snapshot"
    )
    computed.clear()
    report = make_project(ROWS, view=view).materialize()
    assert (report.resumed, sorted(computed), report.counts["written"]) == (6, [7.0, 8.0], 8)
    assert project.doubles(1) == {i: 2.0 * i for i in range(1, 9)}


# ---- compaction


def test_small_deltas_are_merged_with_each_other_without_a_model(make_project: MakeProject) -> None:
    """Whatever was published: a list is short."""
    rows = {i: float(i) for i in range(100)}
    project = make_project(list(rows.items()), view=COUNTING)
    project.materialize()
    lists, plans = [], []
    for step in range(1, 14):
        rows[step] += 1000
        rows.pop(90 if step == 3 else -1, None)
        project = make_project(list(rows.items()), view=COUNTING)
        computed.clear()
        report = project.materialize()
        assert computed == [rows[step]]
        snapshot = project.snapshot_of(report)
        assert snapshot.kind == "delta"
        assert snapshot.counts.written == 1
        assert snapshot.counts.unchanged == len(rows) - 1
        assert project.doubles(snapshot.number) == {i: 2 * x for i, x in rows.items()}
        assert snapshot.rows == len(rows)
        lists.append([segment.number for segment in snapshot.segments])
        plans.append("merged" in (report.plan or ""))
        if step == 7:
            project.publish()
    assert lists[3:6] == [[1, 2, 3, 4, 5], [1, 6], [1, 6, 7]]
    assert lists[6:] == [
        [1, 6, 7, 8],
        [1, 6, 7, 8, 9],
        [1, 6, 10],
        [1, 6, 10, 11],
        [1, 6, 10, 11, 12],
        [1, 6, 10, 13],
        [1, 6, 10, 13, 14],
    ]
    assert [step for step, merged in enumerate(plans, 1) if merged] == [5, 9, 12]
    assert project.snapshot(6).segments[1].removed == 1


def test_more_than_half_of_the_base_compacts(make_project: MakeProject) -> None:
    rows = [(i, float(i)) for i in range(20)]
    make_project(rows).materialize()
    for changed, kind in (
        (6, "delta"),
        (10, "delta"),
        (11, "full"),
    ):  # 6, then 6 + 4, then 10 + 1 rows of 20
        project = make_project([(i, x + 100 if i < changed else x) for i, x in rows])
        assert project.snapshot_of(project.materialize()).kind == kind
    assert project.doubles(4) == {i: 2 * (x + 100 if i < 11 else x) for i, x in rows}


# ---- only what must be


# ---- any sequence of changes

X = st.sampled_from([-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
KEY = st.tuples(
    st.sampled_from(["a", "a/b", "50%", "", None]), st.one_of(st.none(), st.integers(1, 4))
)
TABLES = st.lists(st.dictionaries(KEY, X, min_size=1, max_size=12), min_size=2, max_size=6)


@given(tables=TABLES, doubled=st.booleans(), renew=st.booleans())
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_chain_of_deltas_is_what_a_full_run_makes(
    make_project: MakeProject,
    tmp_path_factory: pytest.TempPathFactory,
    tables: list[dict[tuple[str | None, int | None], float]],
    doubled: bool,
    renew: bool,
) -> None:
    root = str(tmp_path_factory.mktemp("root"))
    view = COUNTING | {"entity": ["a", "b"], "max_rejected": 1.0, "renew_unchanged": renew}
    previous: dict[Any, float] = {}
    for table in tables:
        items = list(table.items())
        items += items[:2] if doubled else []
        data = pa.table(
            {
                "a": pa.array([a for (a, _), _ in items], pa.string()),
                "b": pa.array([b for (_, b), _ in items], pa.int64()),
                "x": pa.array([x for _, x in items], pa.float64()),
            }
        )
        project = make_project(data, view=view, project={"root": root})
        good = {key: 2 * x for key, x in table.items() if None not in key and x >= 0}
        computed.clear()
        if not good:
            with pytest.raises(PrecomputeError):
                project.materialize()
            continue
        report = project.materialize()
        nulls = sum(None in key for key, _ in items)
        source = sum(None not in key for key in table) + nulls
        counts = report.counts
        assert counts["source"] == source
        assert counts["written"] + counts["unchanged"] == len(good)
        assert counts["rejected"] == source - len(good)
        snapshot = project.snapshot_of(report)
        rows = project.rows(snapshot.number)
        assert len(rows) == len(good)
        assert {(row["a"], row["b"]): row["double"] for row in rows} == good
        if report.status == "committed" and snapshot.parent is not None:
            assert counts["unchanged"] == sum(
                previous.get(key) == value for key, value in good.items()
            )
            assert counts["removed"] == sum(key not in table for key in previous)
        project.offline.view(snapshot.view.name).check_parts(snapshot)
        previous = good


# ---- renewal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how many seconds ahead of the real time all clocks of runs and of ``status`` are."""
    real, ahead = time.time_ns, [0.0]

    class Ahead:
        """``time`` as the modules see it."""

        monotonic = staticmethod(time.monotonic)
        thread_time = staticmethod(time.thread_time)

        @staticmethod
        def time_ns() -> int:
            return real() + int(ahead[0] * 1e9)

    from precompute.jobs.ops import status
    from precompute.store import times

    for module in (times, chunks, status):
        monkeypatch.setattr(module, "time", Ahead)

    def utc_now() -> str:
        at = datetime.fromtimestamp(Ahead.time_ns() / 1e9, UTC)
        return at.isoformat(timespec="microseconds").replace("+00:00", "Z")

    monkeypatch.setattr("precompute.store.offline.log.utc_now", utc_now)

    def move(seconds: float) -> None:
        ahead[0] = seconds

    return move


def looked_up(project: Scene, ahead_s: float, keys: list[int]) -> list[tuple[str, int]]:
    """(status, age in whole hundreds of seconds) of each key, as requested ``ahead_s`` from now."""
    with project.lookup(clock=lambda: time.time() + ahead_s) as lookup:
        rows = [lookup.row("numbers", key) for key in keys]
        assert [row["status"] for row in rows] == lookup.get("numbers", keys)["status"].to_pylist()
        return [(row["status"], round(row["age_s"] / 100)) for row in rows]


def test_unchanged_rows_are_as_fresh_as_the_run_that_saw_them(
    make_project: MakeProject, clock: Callable[[float], None], online: str
) -> None:
    project_yaml = {"online": online}
    project = make_project(ROWS, view=COUNTING, project=project_yaml)
    project.run()
    clock(5000)  # past the ttl of an hour
    assert looked_up(project, 5000, [1, 2]) == [("stale", 50), ("stale", 50)]
    assert project.run().status == "current"
    assert computed == [x for _, x in ROWS]
    assert looked_up(project, 5000, [1, 2]) == [("fresh", 0), ("fresh", 0)]
    line = project_status(project)[0]
    assert (line["status"], round(line["age_s"] / 100)) == ("fresh", 0)
    project = make_project([(1, 10.0), *ROWS[1:]], view=COUNTING, project=project_yaml)
    clock(10000)
    report = project.run()
    assert (report.counts["written"], report.counts["unchanged"]) == (1, 7)
    assert looked_up(project, 10200, [1, 2]) == [("fresh", 2), ("fresh", 2)]
    table = project.open_lookup().get("numbers", [1, 2])
    at = table["computed_at"].to_pylist()
    assert (at[0] - at[1]).total_seconds() > 9990  # when it was computed is still shown


def test_without_renewal_rows_past_their_ttl_are_computed(
    make_project: MakeProject, clock: Callable[[float], None]
) -> None:
    view = COUNTING | {"renew_unchanged": False}
    project = make_project(ROWS, view=view)
    project.run()
    clock(2000)
    project = make_project([(1, 10.0), *ROWS[1:]], view=view)
    project.run()
    assert looked_up(project, 2000, [1, 2]) == [("fresh", 0), ("fresh", 20)]
    clock(3000)
    assert project.run().status == "current"
    assert looked_up(project, 3000, [1, 2]) == [("fresh", 10), ("fresh", 30)]
    assert round(project_status(project)[0]["age_s"] / 100) == 30
    clock(4000)
    computed.clear()
    assert str(project.plan()).startswith(
        "full, compacting: 7 of 8 rows to compute (7 past ttl), 1 unchanged"
    )
    project.run()
    assert sorted(computed) == [x for _, x in ROWS[1:]]
    assert looked_up(project, 4000, [1, 2]) == [("fresh", 20), ("fresh", 0)]


def test_expired_rows_that_an_interrupted_run_computed_are_published(
    make_project: MakeProject, clock: Callable[[float], None]
) -> None:
    """All of them: there is nothing left to compute, and something to do."""
    project = make_project(ROWS, view=COUNTING | {"renew_unchanged": False})
    project.run()
    clock(4000)
    crashpoint.arm("manifest.write", mode="raise")
    with pytest.raises(InjectedError):
        project.run()
    crashpoint.disarm()
    computed.clear()
    assert project.plan().diff.resumed == 8
    assert project.plan().diff.compute == 0
    assert project.run().status == "published"
    assert (computed, looked_up(project, 4000, [1])) == ([], [("fresh", 0)])


def test_going_back_to_computing_at_ttl_computes_what_was_only_renewed(
    make_project: MakeProject, clock: Callable[[float], None]
) -> None:
    project = make_project(ROWS, view=COUNTING)
    project.run()
    clock(5000)
    project.run()
    project = make_project(ROWS, view=COUNTING | {"renew_unchanged": False})
    assert project.plan().diff.expired == 8


# ---- other views read a chain


def test_views_that_read_a_delta_chain_see_its_rows_and_no_others(
    make_project: MakeProject,
) -> None:
    model = {"use": f"{HERE}:Counting", "args": {"dim": 0}}
    derived = doubled("numbers") | GATES_OFF | {"model": model}
    base = {i: float(i) for i in range(40)}
    project = make_project(list(base.items()), view=GATES_OFF, views={"derived": derived})
    project.run()
    project.run("derived")
    for step in range(3):
        base[step] += 50
        del base[39 - step]
        base[100 + step] = 5.5
        project = make_project(list(base.items()), view=GATES_OFF, views={"derived": derived})
        assert project.snapshot_of(project.run()).kind == "delta"
        computed.clear()
        report = project.run("derived")
        assert sorted(computed) == sorted([2 * base[step], 11.0])
        assert report.counts["removed"] == 1
        found = {row["id"]: row["double"] for row in project.rows(report.snapshot or 0, "derived")}
        assert found == {i: 4 * x for i, x in base.items()}


def test_top_k_ranks_the_items_of_a_delta_chain(make_project: MakeProject) -> None:
    users = {
        "entity": ["id"],
        "source": {
            "sql": "SELECT id, [1.0::FLOAT, 0, 0, 0] AS vector FROM (VALUES (1), (2)) t(id)"
        },
        "model": {
            "use": "top_k",
            "args": {"items": {"sql": "SELECT id, vector FROM live.numbers"}, "k": 3},
        },
        "features": {
            "items": {"dtype": "int64", "max_items": 3},
            "scores": {"dtype": "float32", "max_items": 3},
        },
        "ttl": "1h",
    }
    base = {i: float(i) for i in range(40)}
    project = make_project(list(base.items()), views={"users": users})
    project.run()
    assert project.rows(project.run("users").snapshot or 0, "users")[0]["items"] == [39, 38, 37]
    assert project.run("users").status == "current"
    base[0] = 100.0
    del base[39]
    project = make_project(list(base.items()), views={"users": users})
    assert project.snapshot_of(project.run()).kind == "delta"
    report = project.run("users")
    assert "tables) changed" in (report.plan or "")
    assert [row["items"] for row in project.rows(report.snapshot or 0, "users")] == [
        [0, 38, 37]
    ] * 2
    for _ in range(3):  # the same chain read again is the same table
        assert project.run("users").status == "current"


# ---- a parent that cannot be used


def test_a_parent_whose_part_is_gone_is_passed_over(make_project: MakeProject) -> None:
    project = make_project(ROWS)
    project.materialize()
    for path in (project.root / "numbers" / "data").rglob("part-*.parquet"):
        path.unlink()
    assert project.plan().diff == Diff(new=8)
    assert project.materialize().snapshot == 2
    assert project.doubles(2) == {i: 2 * x for i, x in ROWS}


def run_to_the_commit(project: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends right before it commits: its chunks and its journal stay."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ViewStore, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            project.materialize()


@pytest.mark.parametrize("changed", [1, 6], ids=["delta", "compacted"])
def test_damage_the_plan_does_not_see_is_reported_and_not_built_on(
    make_project: MakeProject, changed: int
) -> None:
    project = make_project(ROWS, view=COUNTING | GATES_OFF)
    project.materialize()
    store = project.offline
    (path,) = store.view("numbers").part_paths(store.view("numbers").snapshot(1))
    metadata = pq.read_metadata(path).row_group(0)
    (column,) = [
        c for c in map(metadata.column, range(metadata.num_columns)) if "vector" in c.path_in_schema
    ]
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    project = make_project(
        [(i, x + 100 * (i <= changed)) for i, x in ROWS], view=COUNTING | GATES_OFF
    )
    computed.clear()
    with pytest.raises(
        SnapshotError, match=r"snapshot 1, .* is damaged, and marked bad now.*run the view again"
    ):
        project.materialize()
    report = project.materialize()
    assert report.status == "committed"
    assert report.resumed == changed
    assert sorted(computed) == sorted(x + 100 * (i <= changed) for i, x in ROWS)


def test_a_compaction_ends_the_journals_of_the_runs_it_takes_over(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(ROWS)
    project.materialize()
    project = make_project([(i, x + 100) for i, x in ROWS])
    run_to_the_commit(project, monkeypatch)
    report = project.materialize()
    assert (report.resumed, "compacting" in str(report.plan)) == (8, True)
    assert project.store.journals.partitions() == {}
