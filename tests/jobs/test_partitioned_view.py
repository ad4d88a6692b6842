"""A partitioned view: what $start and $end stand for, which partition a run takes, and that live
never moves back in data time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.run.rows import chunks
from precompute.jobs.serve.fallback import ViewFallback
from precompute.store.answers.lookup import Lookup
from precompute.store.disk.lease import take
from precompute.store.errors import ConfigError, GateError, RejectedError, SourceError
from precompute.store.offline.runs import Report
from precompute.store.offline.standing import Standing
from precompute.store.times import Partition, containing
from tests.fixtures import MakeProject
from tests.scene import UNJUDGED, Scene

TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
DAYS = [TODAY - timedelta(days=n) for n in (4, 3, 2, 1, 0)]
"""Four days that are over, and today."""
SQL = "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE t >= $start AND t < $end"
Captured = pytest.CaptureFixture[str]


def events(factor: float = 1.0, kind: pa.DataType | None = None) -> pa.Table:
    """Three rows a day; x is the key, times the factor, plus a hundred for every day since the
    first."""
    times = [day + timedelta(hours=8 * n) for day in DAYS for n in range(3)]
    rows = [(n + 1, (n + 1) * factor + 100 * d) for d in range(len(DAYS)) for n in range(3)]
    kind = kind or pa.timestamp("us", "UTC")
    seconds = pa.array([int(at.timestamp()) for at in times], pa.int64())
    at = (
        seconds
        if kind == pa.int64()
        else pa.array([at.replace(tzinfo=None) for at in times], pa.timestamp("us")).cast(
            pa.timestamp("us")
        )
    )
    if kind != pa.int64():
        at = (
            at.cast(pa.date32(), safe=False)
            if kind == pa.date32()
            else pa.array(times, kind)
            if kind.tz
            else at
        )
    return pa.table({"id": [i for i, _ in rows], "x": [x for _, x in rows], "t": at})


def make(make_project: MakeProject, table: pa.Table | None = None, **view: Any) -> Scene:
    definition = {
        "source": {"sql": SQL},
        "partition": {"by": "day", "start": DAYS[0].date().isoformat()},
        # days have rows of their own, and other numbers
        "gates": UNJUDGED | {"rows": None},
    }
    return make_project(events() if table is None else table, view=definition | view)


def run(
    project: Scene, day: datetime | None = None, command: str = "run", **options: Any
) -> Report:
    partition = None if day is None else containing("day", day)
    return project.run(command=command, partition=partition, **options)


def values(project: Scene, number: int) -> dict[int, float]:
    store = project.store
    return {
        row["id"]: row["double"] / 2
        for b in store.batches(store.snapshot(number))
        for row in b.to_pylist()
    }


def expected(day: int, factor: float = 1.0) -> dict[int, float]:
    return {n: n * factor + 100 * day for n in (1, 2, 3)}


def live(project: Scene) -> tuple[int, str | None]:
    """(snapshot, day) that offline and online pointer agree on."""
    snapshot, pointer = project.live_snapshot(), project.pointer()
    assert (pointer.snapshot, pointer.partition) == (snapshot.number, snapshot.partition)
    return pointer.snapshot, None if pointer.partition is None else pointer.partition[:10]


def day(n: int) -> str:
    return DAYS[n].date().isoformat()


# ---- what the SQL is given


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (pa.timestamp("us"), "t >= $start AND t < $end"),
        (pa.timestamp("us", "UTC"), "t >= $start AND t < $end"),
        (pa.timestamp("us", "America/New_York"), "t >= $start AND t < $end"),
        (pa.int64(), "t >= epoch($start) AND t < epoch($end)"),
        (pa.timestamp("us"), "t BETWEEN $start AND $end - INTERVAL 1 microsecond"),
        (pa.date32(), "t = $start::DATE"),
    ],
)
def test_start_and_end_bound_each_kind_of_time(
    make_project: MakeProject, kind: pa.DataType, where: str
) -> None:
    sql = f"SELECT id, x FROM read_parquet('${{data}}/data.parquet') WHERE {where}"
    project = make(make_project, events(kind=kind), source={"sql": sql})
    for n in (0, 3):
        report = run(project, DAYS[n], "materialize")
        assert values(project, report.snapshot or 0) == expected(n)
        assert report.partition == f"{day(n)}T00:00Z/{day(n + 1)}T00:00Z"


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_the_machines_time_zone_does_not_count(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        project = make(make_project)
        assert values(project, run(project, DAYS[1], "materialize").snapshot or 0) == expected(1)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")])
def test_rows_outside_the_partition_are_refused(
    make_project: MakeProject, kind: pa.DataType
) -> None:
    partition = {"by": "day", "start": day(0), "column": "t"}
    sql = "SELECT id + day(t) * 1000 AS id, x, t FROM read_parquet('${data}/data.parquet') WHERE t >= $start"
    project = make(make_project, events(kind=kind), source={"sql": sql}, partition=partition)
    with pytest.raises(
        SourceError,
        match=rf"6 rows have a t outside the partition {day(2)} .*bind \$start and \$end",
    ):
        run(project, DAYS[2])
    good = make(make_project, source={"sql": f"{sql} AND t < $end"}, partition=partition)
    assert run(good, DAYS[2]).counts["written"] == 3


def test_a_column_that_is_no_time_is_refused(make_project: MakeProject) -> None:
    sql = f"SELECT id, x, t FROM ({SQL.replace('SELECT id, x', 'SELECT *').replace('$start', 'epoch($start)').replace('$end', 'epoch($end)')})"
    project = make(
        make_project,
        events(kind=pa.int64()),
        source={"sql": sql},
        partition={"by": "day", "start": day(0), "column": "t"},
    )
    with pytest.raises(ConfigError, match=r"partition\.column"):
        run(project)


# ---- which partition


def test_a_run_takes_the_latest_that_is_over(make_project: MakeProject) -> None:
    project = make(make_project)
    report = run(project)
    assert report.partition == f"{day(3)}T00:00Z/{day(4)}T00:00Z"
    assert values(project, 1) == expected(3)
    assert live(project) == (1, day(3))
    assert run(project).status == "current"


def test_the_first_partition_must_be_over(make_project: MakeProject) -> None:
    project = make(make_project, partition={"by": "day", "start": day(4)})
    with pytest.raises(
        ConfigError, match=f"its first partition, of {day(4)}T00:00Z, is not over yet"
    ):
        run(project)
    noon = (DAYS[3] + timedelta(hours=12)).isoformat()
    assert (
        run(make(make_project, partition={"by": "day", "start": noon})).partition
        == f"{day(3)}T00:00Z/{day(4)}T00:00Z"
    )


@pytest.mark.parametrize(
    ("by", "now", "start", "end"),
    [
        (
            "hour",
            "2026-03-29T02:30+02:00",
            "2026-03-28T23:00",
            "2026-03-29T00:00",
        ),  # a clock change is no matter in UTC
        ("day", "2026-03-01T00:00", "2026-02-28T00:00", "2026-03-01T00:00"),
        ("week", "2026-03-08T12:00", "2026-02-23T00:00", "2026-03-02T00:00"),
    ],
)
def test_the_latest_partition_that_is_over(
    make_project: MakeProject, by: str, now: str, start: str, end: str
) -> None:
    project = make(make_project, partition={"by": by, "start": "2020-01-01"})
    at = datetime.fromisoformat(now)
    found = project.view("numbers").partition_at(
        at.replace(tzinfo=UTC) if at.tzinfo is None else at
    )
    assert str(found) == f"{start}Z/{end}Z"
    assert Partition.parse(str(found)) == found


def test_materialize_takes_a_partition_by_any_time_in_it(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = make(make_project)
    for text in (day(1), f"{day(1)}T13:45", f"{day(2)}T01:00+02:00"):
        assert project.cli("materialize", "numbers", "--partition", text, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["partition"][:10], report["snapshot"]) == (day(1), 1)
    assert project.cli("materialize", "numbers", "--partition", day(0), "--dry-run") == 0
    assert "3 of 3 rows to compute (3 new); the first snapshot" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["tomorrow", "2026-13-01", "", "9999-12-31", "0001-01-01T00:00+05:00"]
)
def test_a_partition_that_is_no_time_is_bad_usage(
    make_project: MakeProject, capsys: Captured, text: str
) -> None:
    project = make(make_project)
    assert project.cli("materialize", "numbers", "--partition", text) == 2
    assert "--partition" in capsys.readouterr().err


def test_a_partition_before_the_first_or_not_over_is_bad_usage(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = make(make_project, partition={"by": "day", "start": day(1)})
    assert project.cli("materialize", "numbers", "--partition", day(0)) == 2
    assert day(1) in capsys.readouterr().err
    assert (
        project.cli("run", "numbers", "--partition", day(4)) == 2
    )  # half a day would look like a whole one
    assert project.numbers() == []


# ---- what is live


def test_live_never_moves_back(make_project: MakeProject) -> None:
    project = make(make_project)
    run(project, DAYS[2])
    report = run(project, DAYS[0])
    assert (report.status, live(project)) == ("committed", (1, day(2)))
    run(project, DAYS[3])
    assert live(project) == (3, day(3))
    project = make(make_project, events(2.0))
    assert run(project, DAYS[2]).status == "committed"  # mended, and still not the latest
    assert run(project, DAYS[3]).status == "published"  # mended, and the latest
    assert live(project) == (5, day(3))
    assert values(project, 5) == expected(3, 2.0)
    assert run(project, command="publish").status == "current"
    assert run(project, command="publish", snapshot=1).status == "published"  # an operator may
    assert live(project) == (1, day(2))
    assert run(project, command="publish").snapshot == 5


def test_each_partition_builds_on_its_own_snapshots(make_project: MakeProject) -> None:
    project = make(make_project)
    for n in range(4):
        assert (
            run(project, DAYS[n], "materialize").plan
            == "full: 3 of 3 rows to compute (3 new); the first snapshot"
        )
    table = events().to_pylist()
    table[3]["x"] = -5.0  # of the second day
    project = make(make_project, pa.Table.from_pylist(table, events().schema), gates={})
    for n in range(4):
        found = project.plan(partition=containing("day", DAYS[n]))
        assert found.reason == f"builds on snapshot {n + 1}"
        assert (found.diff.compute, found.diff.unchanged) == ((1, 2) if n == 1 else (0, 3))


def test_a_partition_is_judged_against_its_own_earlier_snapshot(make_project: MakeProject) -> None:
    def with_second_day(x: Callable[[int], float], rows: int) -> Scene:
        days = [(i, 5.0 + i, DAYS[0] + timedelta(hours=1)) for i in range(30)]
        days += [(i, x(i), DAYS[1] + timedelta(hours=1)) for i in range(rows)]
        table = pa.table(
            {name: [row[n] for row in days] for n, name in enumerate(("id", "x", "t"))}
        )
        return make(make_project, table, gates=UNJUDGED | {"computed": 1.0})

    project = with_second_day(lambda i: -2.0 - i, 90)
    assert run(project, DAYS[0]).status == "published"
    assert run(project, DAYS[1]).status == "published"  # three times the rows, and others
    with pytest.raises(GateError, match="computed"):
        run(with_second_day(lambda i: 2.0 + i, 90), DAYS[1])
    for _ in range(
        3
    ):  # a refused snapshot is no measure, neither of itself nor of what comes after it
        with pytest.raises(GateError, match="computed"):
            run(project, DAYS[1])
    with pytest.raises(GateError, match="rows"):
        run(with_second_day(lambda i: -2.0 - i, 30), DAYS[1])
    assert live(project) == (2, day(1))


# ---- the fallback


def test_the_fallback_computes_with_the_partition_that_is_live(make_project: MakeProject) -> None:
    project = make(
        make_project, fallback={"enabled": True, "deadline": "20s"}, ttl="1s", stale_for="0s"
    )
    run(project, DAYS[2])
    fallback = ViewFallback(project.offline, project.home)
    lookup = project.open_lookup(fallback, clock=lambda: time.time() + 10**6)
    try:
        for n in (2, 3):
            if n == 3:
                run(project, DAYS[3])
            rows = [lookup.row("numbers", key) for key in (1, 2, 3, 4)]
            assert [row["status"] for row in rows] == ["computed"] * 3 + ["missing"]
            assert {key: rows[key - 1]["features"]["double"] / 2 for key in (1, 2, 3)} == expected(
                n
            )
    finally:
        fallback.close()
        lookup.close()


# ---- resume


def test_what_is_resumed_is_of_the_same_partition(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 1)
    monkeypatch.setattr(chunks, "PART_BYTES", 1)
    rows = events().to_pylist()
    for row in rows[3:6]:  # the second day has the first one's inputs, and a row that fails
        row["x"] -= 100
    bad = [*rows]
    bad[2] = bad[2] | {"x": None}
    project = make(make_project, pa.Table.from_pylist(bad, events().schema), max_rejected=0.0)
    with pytest.raises(RejectedError):
        run(project, DAYS[0], "materialize")
    project = make(make_project, pa.Table.from_pylist(rows, events().schema), max_rejected=0.0)
    assert run(project, DAYS[1], "materialize").resumed == 0
    assert run(project, DAYS[0], "materialize").resumed == 2
    assert values(project, 1) == values(project, 2) == expected(0)


@pytest.mark.usefixtures("impatient")
def test_two_partitions_run_at_once_and_one_only_once(make_project: MakeProject) -> None:
    from precompute.store.errors import ConflictError
    from precompute.store.offline.log import run_lease

    project = make(make_project)
    folder = project.store.leases
    with take(folder, run_lease(str(containing("day", DAYS[0]))), "another"):
        with pytest.raises(
            ConflictError, match=f"another run of view 'numbers' and partition {day(0)}"
        ):
            run(project, DAYS[0])
        assert run(project, DAYS[1]).status == "published"


# ---- partitions without rows


def without(*days: int) -> pa.Table:
    """The events of all days but some."""
    table = events()
    times = table.column("t").to_pylist()
    return table.filter(pa.array([all(at.date() != DAYS[n].date() for n in days) for at in times]))


def run_day(project: Scene, number: int, **how: Any) -> Report:
    return project.run(partition=containing("day", DAYS[number]), **how)


def test_an_empty_partition_is_done_and_what_is_live_stays(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = make(make_project, without(2, 3))
    store, online = project.store, project.open_online()
    assert run_day(project, 1).status == "published"
    for number, snapshot in ((2, 2), (3, 3)):
        report = run_day(project, number)
        assert report.status == "committed"
        assert report.snapshot == snapshot
        assert report.counts["source"] == 0
        found = store.snapshot(snapshot)
        assert found.rows == 0
        assert found.gates == ()
        assert found.computed_at_min is None
        assert found.partition == report.partition
        (part,) = store.part_paths(found)
        assert pq.read_schema(part).names == ["id", "double", "vector", "computed_at", "input_hash"]
        assert run_day(project, number).status == "current"
    assert Standing(store).newest_publishable() == 1
    pointer = online.live("numbers")
    assert pointer is not None
    assert (pointer.snapshot, pointer.rows) == (1, 3)
    assert project.cli("publish", "numbers", "--snapshot", "3") == 0
    assert Lookup(online).row("numbers", 1)["reason"] == "unknown_entity"
    assert project.cli("verify", "numbers") == 0
    assert project.cli("status") == 0
    assert project.cli("rollback", "numbers") == 0
    assert Lookup(online).row("numbers", 1)["status"] == "fresh"
    make(make_project)
    assert (run_day(project, 3).status, run_day(project, 3).status) == ("committed", "current")
    assert project.resume().status == "published"
    assert Lookup(online).row("numbers", 1)["features"]["double"] == 2 * (1 + 300)


def test_a_view_may_forbid_empty_partitions_or_publish_them(make_project: MakeProject) -> None:
    by = {"by": "day", "start": DAYS[0].date().isoformat()}
    project = make(make_project, without(3), partition=by | {"empty": "fail"})
    run_day(project, 2)
    with pytest.raises(
        SourceError, match=rf"the source of partition {DAYS[3]:%Y-%m-%d}\S* yielded no rows"
    ):
        run_day(project, 3)
    project = make(make_project, without(3), partition=by | {"empty": "publish"})
    report = run_day(project, 3)
    assert (report.status, report.snapshot) == ("published", 2)
    assert project.pointer().rows == 0


def test_a_partition_that_lost_all_rows_is_refused_until_accepted(
    make_project: MakeProject,
) -> None:
    table = pa.table({"id": range(30), "x": [float(n) for n in range(30)], "t": [DAYS[2]] * 30})
    gates = {"first": None}
    project = make(make_project, table, gates=gates)
    run_day(project, 2)
    make(make_project, table.slice(0, 0), gates=gates)
    with pytest.raises(
        GateError, match=r"no rows any more, against the 30 of snapshot 1 \(limit 1\)"
    ):
        run_day(project, 2)
    store = project.store
    assert (store.snapshot(2).rows, store.snapshot(2).counts.removed) == (0, 30)
    assert run_day(project, 2, accept=["rows"]).status == "current"
    assert (project.numbers(), project.refused_by(), live(project)) == ([1, 2], [], (1, day(2)))


def test_a_new_partition_is_judged_beside_the_newest_one(make_project: MakeProject) -> None:
    rows = {n: [(100 * n + key, float(key + 1)) for key in range(60)] for n in range(3)}
    rows[2] = [(key, 1000.0 * x) for key, x in rows[2]]
    table = pa.table(
        {
            "id": [key for of in rows.values() for key, _ in of],
            "x": [x for of in rows.values() for _, x in of],
            "t": pa.array(
                [DAYS[n] for n, of in rows.items() for _ in of], pa.timestamp("us", "UTC")
            ),
        }
    )
    project = make(
        make_project,
        table,
        gates={"rows": None, "first": None},
        features={"vector": {"dtype": "float32", "dim": 4}, "double": {"dtype": "float64"}},
    )
    assert [run_day(project, n).status for n in range(2)] == ["published", "published"]
    with pytest.raises(GateError, match=r"shape: double: 75th percentile"):
        run_day(project, 2)


# ---- a partition that is served in another one's place


def keyed(*days: Iterable[int]) -> pa.Table:
    """Of each day rows of these keys, whose x is the key."""
    rows = [(key, DAYS[n]) for n, keys in enumerate(days) for key in keys]
    return pa.table(
        {
            "id": pa.array([key for key, _ in rows], pa.int64()),
            "x": pa.array([float(key) for key, _ in rows]),
            "t": pa.array([at for _, at in rows], pa.timestamp("us", "UTC")),
        }
    )


JUDGED = {"gates": UNJUDGED}
"""By rows and keys alone: what is lacking is also of other numbers."""
LOST: dict[str, tuple[Iterable[int], dict[str, Any], str | None]] = {
    "a tenth of the keys": (range(20), {}, "20 rows, 0.10 times the 200 of snapshot 1"),
    "a fifth fewer": (range(160), {}, None),
    "two thirds fewer": (
        range(60),
        {},
        r"60 rows, 0\.30 times the 200 of snapshot 1; at least 0\.40",
    ),
    "two thirds fewer, as allowed": (range(60), {"rows": 4}, None),
    "three times as many": (range(600), {}, None),
    "half of the keys, and others": (range(100, 300), {}, None),
    "fewer of the keys, and others": (range(101, 301), {}, "rows: 5.% of the keys of snapshot 1"),
    "as many others": (range(1000, 1200), {}, "rows: 100% of the keys of snapshot 1 are gone"),
    "nothing asked": (range(20), {"rows": None}, None),
    "another model": (range(20), {"model": 2}, "20 rows, 0.10 times"),
    "nothing, published": ((), {"empty": "publish"}, "no rows any more, against the 200 of"),
    "nothing": ((), {}, None),
}


@pytest.mark.parametrize("case", LOST)
def test_a_newest_partition_is_compared_with_what_readers_have(
    make_project: MakeProject, case: str
) -> None:
    keys, asked, refusal = LOST[case]
    project = make(make_project, keyed(range(200), keys), **JUDGED)
    assert run_day(project, 0).status == "published"
    partition = {"by": "day", "start": day(0), "empty": asked.get("empty", "keep")}
    view: dict[str, Any] = {"partition": partition} | (
        {"gates": JUDGED["gates"] | {"rows": asked["rows"]}} if "rows" in asked else JUDGED
    )
    if "model" in asked:
        view["model"] = {"use": "tests.models:Doubler", "args": {"version": asked["model"]}}
    project = make(make_project, keyed(range(200), keys), **view)
    if refusal is None:
        assert run_day(project, 1).status == ("published" if keys else "committed")
        return
    for _ in range(2):
        # again it is no measure of itself
        with pytest.raises(GateError, match=refusal):
            run_day(project, 1)
    assert (live(project), project.refused_by()) == ((1, day(0)), ["rows"])
    assert project.cli("run", "numbers", "--partition", day(1)) == 3
    assert run_day(project, 1, accept=["rows"]).status == "published"


def test_what_readers_have_is_no_measure_of_an_older_day(
    make_project: MakeProject,
) -> None:
    table = keyed(range(20), range(200), range(1000, 1120))
    project = make(make_project, table, **JUDGED)
    assert run_day(project, 1).status == "published"
    assert run_day(project, 0).status == "committed"
    assert project.refused_by() == []
    # of a day's own rows no more may be gone, nor come
    more = make(make_project, keyed(range(60), range(200)), **JUDGED)
    with pytest.raises(GateError, match=r"rows: 60 rows, 3\.00 times the 20 of snapshot 2"):
        run_day(more, 0, command="run")
    by = {"by": "day", "start": day(0), "serve": "all"}
    project = make(make_project, table, **JUDGED, partition=by, ttl="90d")
    assert run_day(project, 2).status == "published"
    assert project.live_snapshot().rows == 320


def test_a_day_is_compared_with_its_own_recipes_rows(make_project: MakeProject) -> None:
    """A coming model's rows of a day, not published, do not stand in for those of the live one."""

    def scene(version: int, moved: float = 0.0) -> Scene:
        x = [moved + n for n in range(400)]
        table = pa.table({"id": range(400), "x": x, "t": [DAYS[0].replace(tzinfo=None)] * 400})
        model = {"use": "tests.models:Doubler", "args": {"version": version}}
        return make(make_project, table, model=model, gates={"first": None})

    run(scene(1), DAYS[0])
    run(scene(2), DAYS[0], command="materialize")
    with pytest.raises(GateError, match=r"computed: double of 400 rows computed: median"):
        run(scene(1, 1e6), DAYS[0])
