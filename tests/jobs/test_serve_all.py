"""A view that serves all of its partitions: each key has its row of the newest that has it,
whatever is computed, lost, rolled back from or let go of."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pyarrow as pa
import pytest

import precompute.jobs.run.materialize
import precompute.jobs.run.run_view
from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.run.rows import chunks
from precompute.store.disk import crashpoint
from precompute.store.disk.crashpoint import InjectedError
from precompute.store.errors import ConfigError, GateError, SnapshotError
from precompute.store.history import explain, get_historical_features, read
from precompute.store.offline.gc import collect
from precompute.store.offline.runs import Report
from precompute.store.times import containing
from tests.fixtures import MakeProject
from tests.scene import Scene

TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
DAYS = [TODAY - timedelta(days=n) for n in range(8, 0, -1)]
SQL = "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE t >= $start AND t < $end"
UNGATED: dict[str, Any] = {
    name: None
    for name, of in GatesConfig.model_fields.items()
    if type(None) in get_args(of.annotation)
}
Rows = dict[int, float]


@dataclass
class Corpus:
    """A project of one such view, and what each day's source holds."""

    make_project: MakeProject
    view: dict[str, Any] = field(default_factory=dict)
    project: dict[str, Any] = field(default_factory=dict)
    days: dict[int, Rows] = field(default_factory=dict)
    scene: Scene = None  # type: ignore[assignment]

    def write(self, day: int | None = None, rows: Rows | None = None, **view: Any) -> Scene:
        if day is not None:
            self.days[day] = rows or {}
        lines = [(key, x, DAYS[d]) for d, of in self.days.items() for key, x in of.items()]
        table = pa.table(
            {
                "id": pa.array([key for key, _, _ in lines], pa.int64()),
                "x": pa.array([x for _, x, _ in lines], pa.float64()),
                "t": pa.array([t for _, _, t in lines], pa.timestamp("us", "UTC")),
            }
        )
        self.view |= view
        definition = {
            "source": {"sql": SQL},
            "partition": {"by": "day", "start": DAYS[0].date().isoformat(), "serve": "all"},
            "gates": UNGATED,
            "ttl": "90d",
        }
        self.scene = self.make_project(table, view=definition | self.view, project=self.project)
        return self.scene

    def run(
        self, day: int, rows: Rows | None = None, command: str = "run", **options: Any
    ) -> Report:
        if rows is not None or day not in self.days:
            self.write(day, rows)
        return self.scene.run(command=command, partition=containing("day", DAYS[day]), **options)

    def served(self, keys: int = 12) -> Rows:
        with self.scene.lookup() as lookup:
            doubles = lookup.get("numbers", list(range(keys)))["double"].to_pylist()
        return {key: double / 2 for key, double in enumerate(doubles) if double is not None}


@pytest.fixture
def corpus(make_project: MakeProject) -> Corpus:
    return Corpus(make_project)


def serving(**more: Any) -> dict[str, Any]:
    return {"by": "day", "start": DAYS[0].date().isoformat(), "serve": "all"} | more


# ---- against ten lines that say what it is to do


class Model:
    """Day → rows, of all that was computed; and each state that was published, the newest last."""

    def __init__(self, keep: int | None = None) -> None:
        self.keep, self.computed, self.published = keep, dict[int, Rows](), list[dict[int, Rows]]()

    def compute(self, day: int, rows: Rows) -> None:
        if rows:
            self.computed[day] = rows

    def publish(self) -> None:
        newest = max(self.computed, default=0)
        state = {
            d: rows
            for d, rows in self.computed.items()
            if self.keep is None or d > newest - self.keep
        }
        if state and (not self.published or self.published[-1] != state):
            self.published.append(state)

    def roll_back(self) -> None:
        left, back = self.published.pop(), self.published[-1]
        for day, rows in left.items():
            if rows is not back.get(day) and self.computed.get(day) is rows:
                self.computed = {d: r for d, r in self.computed.items() if d != day} | (
                    {day: back[day]} if day in back else {}
                )

    def served(self) -> Rows:
        return {
            key: x
            for day in sorted(self.published[-1])
            for key, x in self.published[-1][day].items()
        }


def drive(corpus: Corpus, model: Model, seed: int, steps: int) -> None:
    """Do ``steps`` random things, and compare every lookup with the model."""
    at_random = random.Random(seed)
    for step in range(steps):
        what = at_random.choice(
            ["run", "run", "run", "empty", "materialize", "again", "rollback", "gc"]
        )
        day = at_random.randrange(len(DAYS))
        if what in ("run", "materialize", "empty"):
            keys = [] if what == "empty" else at_random.sample(range(12), at_random.randrange(1, 7))
            rows = {key: float(1000 * step + key) for key in keys}
            corpus.run(day, rows, "materialize" if what == "materialize" else "run")
            model.compute(day, rows)
        elif what == "again" and day in corpus.days and corpus.days[day] == model.computed.get(day):
            corpus.run(day)
        elif what == "rollback" and len(model.published) > 1:
            corpus.scene.rollback(hold=False)
            model.roll_back()
        elif what == "gc" and model.published:
            collect(corpus.scene.store, keep=3, grace_s=-1.0)
            model.published = model.published[-3:]
        if what in ("run", "empty", "again") and corpus.days:
            if what == "again" and model.computed:
                corpus.scene.publish()
            model.publish()
        if model.published:
            assert corpus.served() == model.served(), (seed, step, what, day)
            assert corpus.scene.faults() == []
            key, x = at_random.choice(sorted(model.served().items()))
            assert corpus.scene.nearest(x) == (corpus.scene.live().snapshot, str(key))


@pytest.mark.parametrize(("seed", "keep"), [(1, None), (2, 3)])
def test_random_days_are_served_as_ten_lines_say(
    corpus: Corpus, seed: int, keep: int | None
) -> None:
    corpus.view = {"index": {"on": "vector", "metric": "l2"}}
    corpus.view |= {"partition": serving(**({} if keep is None else {"keep": f"{keep}d"}))}
    drive(corpus, Model(keep), seed, 20)


# ---- rows that come back, and those that are never to


def test_rows_that_come_back_are_copied_by_their_bytes(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.run(0, {key: float(key) for key in range(40)})
    corpus.run(1, {key: 10.0 * key for key in range(10)})
    monkeypatch.setattr(chunks, "PART_BYTES", 1)
    corpus.run(1, {9: 90.0})
    assert corpus.served(40) == {key: float(key) for key in range(40)} | {9: 90.0}
    names = [part.path.rpartition("/")[2] for part in corpus.scene.live_snapshot().parts]
    # in that order, none twice
    assert [name for name in names if name.startswith("copied")] == ["copied-all-00000.parquet"]
    assert corpus.scene.faults() == []


def test_a_new_day_is_a_segment_and_a_lost_key_gives_way_to_the_older_row(corpus: Corpus) -> None:
    corpus.run(0, {key: float(key) for key in range(40)})
    corpus.run(1, {1: 10.0, 2: 20.0})
    assert corpus.scene.pointer().numbers[1:] == (4,)
    assert corpus.scene.live_snapshot().counts.written == 2
    assert corpus.served(3) == {0: 0.0, 1: 10.0, 2: 20.0}
    report = corpus.run(1, {2: 20.0, 99: 5.0})
    assert corpus.served(3) == {0: 0.0, 1: 1.0, 2: 20.0}
    counts = corpus.scene.snapshot_of(report).counts
    assert (counts.written, counts.unchanged, counts.removed) == (2, 39, 0)
    corpus.run(1, {2: 20.0})
    assert corpus.scene.live_snapshot().counts.removed == 1
    assert corpus.scene.live_snapshot().rows == 40
    # of the row that came back, when it was computed
    computed_at = {
        row["id"]: row["computed_at"] for row in corpus.scene.rows(corpus.scene.live().snapshot)
    }
    assert computed_at[1] == computed_at[0] < computed_at[2]
    corpus.run(0, {key: -float(key) for key in range(40)})
    assert corpus.served(3) == {0: 0.0, 1: -1.0, 2: 20.0}
    assert corpus.scene.faults() == []


def test_empty_partitions_first_last_in_the_middle_and_twice(corpus: Corpus) -> None:
    assert corpus.run(0, {}).status == "committed"
    corpus.run(2, {1: 1.0})
    for day in (1, 3, 3):
        assert corpus.run(day, {}).status == "current"
        assert corpus.served() == {1: 1.0}
    # what a partition had stays, by default; another view says that an empty one is one without
    # rows
    corpus.run(2, {})
    assert corpus.served() == {1: 1.0}
    corpus.write(partition=serving(empty="publish"))
    corpus.run(4, {2: 2.0})
    corpus.run(4, {})
    assert corpus.served() == {1: 1.0}


@pytest.mark.parametrize("first", [0, 2])
def test_a_partition_that_is_computed_again_while_a_newer_one_goes_live(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    for day in range(2):
        corpus.run(day, {10 * day: 1.0, 1: 1.0 + day})
    corpus.write(first, corpus.days.get(first, {}) | {5: 5.0})
    other = 2 - first
    corpus.write(other, corpus.days.get(other, {}) | {6: 6.0})
    committed = precompute.jobs.run.materialize.materialize

    def then_another(*run: Any) -> Any:
        snapshot = committed(*run)
        monkeypatch.undo()
        assert corpus.run(other).status == "published"
        return snapshot

    monkeypatch.setattr(precompute.jobs.run.run_view, "materialize", then_another)
    corpus.run(first)
    assert corpus.served() == {0: 1.0, 1: 2.0, 5: 5.0, 6: 6.0, 10: 1.0}


def test_what_was_rolled_back_from_is_not_assembled_again(corpus: Corpus) -> None:
    for day in range(3):
        corpus.run(day, {day: 1.0})
    good = corpus.scene.live().snapshot
    corpus.run(1, {1: 13.0})
    corpus.run(3, {3: 1.0, 0: 66.0})
    assert corpus.scene.rollback(to=good).snapshot == good
    assert corpus.served() == {0: 1.0, 1: 1.0, 2: 1.0}
    assert corpus.scene.publish().status == "current"
    corpus.run(4, {4: 1.0})
    again = corpus.run(3)
    assert corpus.served() == {0: 1.0, 1: 1.0, 2: 1.0}
    held = corpus.scene.status()["held"]
    assert (again.status, held["waits"]) == ("committed", again.snapshot)
    assert corpus.scene.store.log.bad().keys() >= {held["repeats"]}
    corpus.run(3, {3: 2.0})
    assert corpus.scene.resume().status == "published"
    assert corpus.served() == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 1.0}
    assert corpus.scene.live().held is None


def test_a_backfill_is_taken_back_as_one(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    """It publishes again and again; rollback, history and marks take that for one thing."""
    for day in range(3):
        corpus.run(day, {day: 1.0})
    good = corpus.scene.live().snapshot
    for day, x in ((0, 5.0), (1, 6.0), (3, 7.0)):
        made = corpus.run(day, {day: x}, "materialize", backfill="night", in_order=True)
        corpus.scene.publish(snapshot=made.snapshot, backfill="night")
    assert corpus.served() == {0: 5.0, 1: 6.0, 2: 1.0, 3: 7.0}
    assert corpus.scene.cli("history", "numbers") == 0
    assert "by publish (night), the last of 3 publishings" in capsys.readouterr().out
    assert corpus.scene.rollback().snapshot == good
    assert corpus.served() == {0: 1.0, 1: 1.0, 2: 1.0}
    corpus.run(4, {4: 1.0})
    assert corpus.served() == {0: 1.0, 1: 1.0, 2: 1.0}
    assert corpus.scene.resume().status == "published"
    assert corpus.served() == {0: 1.0, 1: 1.0, 2: 1.0, 4: 1.0}
    assert corpus.scene.faults() == []


def test_a_refused_day_is_left_out_and_too_many_lost_rows_are_refused(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # time enough to look at the other day, however busy the machine is
    monkeypatch.setattr("precompute.jobs.run.run_view.LATE_ROWS_LEAST_S", 60.0)
    corpus.view = {"gates": UNGATED | {"rows": 1.0, "finite": 0.0}, "bad_rows": "reject"}
    for day, keys in enumerate((70, 30)):
        corpus.run(day, {100 * day + key: 1.0 for key in range(keys)})
    corpus.write(partition=serving(keep="1d"))
    with pytest.raises(GateError, match=r"rows: 30 rows, 0\.30 times the 100 of snapshot 4"):
        corpus.scene.publish()
    assert corpus.scene.live_snapshot().rows == 100
    assert corpus.scene.publish(accept=("rows",)).status == "published"
    assert corpus.scene.live_snapshot().rows == 30
    assert corpus.scene.status()["partitions"]["left_out"] == {"older than keep": 1}
    with pytest.raises(GateError, match="rows"):
        corpus.run(1, dict.fromkeys(range(5), 1.0))
    assert corpus.scene.live_snapshot().rows == 30
    # more by another day: it may
    corpus.write(partition=serving())
    assert corpus.scene.publish().status == "published"
    assert corpus.scene.status()["partitions"] == {
        "serve": "all",
        "served": 2,
        "computed": 2,
        "left_out": {"refused by rows": 1},
        "refused": {str(containing("day", DAYS[1])): ["rows"]},
        "uncompared": [],
        "older": [],
        "looked_at": 1,
        "late": [],
    }


# ---- another model, damage, death


def test_another_model_goes_live_once_every_served_partition_is_of_it(corpus: Corpus) -> None:
    for day in range(3):
        corpus.run(day, {day: 1.0, 9: float(day)})
    model = {"use": "tests.models:Doubler", "args": {"version": 2}}
    corpus.write(model=model)
    before = corpus.scene.live_snapshot()
    report = corpus.run(3, {3: 1.0})
    assert (report.status, corpus.scene.live_snapshot()) == ("current", before)
    assert "3 of 3 served partitions still have the old one" in report.attention[0]
    assert corpus.scene.status()["partitions"]["left_out"] == {"of another model": 1}
    for day in (0, 1):
        corpus.run(day)
        assert corpus.scene.live_snapshot() == before
    corpus.run(2)
    live = corpus.scene.live_snapshot()
    assert (live.model != before.model, len(live.members), live.kind) == (True, 4, "full")
    assert corpus.served() == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 9: 2.0}
    assert corpus.scene.rollback().snapshot == before.number
    assert corpus.served() == {0: 1.0, 1: 1.0, 2: 1.0, 9: 2.0}


def test_another_model_of_a_view_that_is_read_is_another_model(corpus: Corpus) -> None:
    """Though its values, and so the rows of each day, are the same ones."""
    at = f"TIMESTAMP '{DAYS[0].date()}' + to_days(CAST(id % 8 AS INTEGER))"
    sql = f"SELECT id, double / 2 AS x FROM live.entries WHERE {at} >= $start AND {at} < $end"

    def scene(version: int) -> Scene:
        entries = {
            "entity": ["id"],
            "source": {"sql": "SELECT id, x FROM read_parquet('${data}/data.parquet')"},
            "model": {"use": "tests.models:Doubler", "args": {"version": version}},
            "features": {"double": {"dtype": "float64"}},
            "ttl": "90d",
        }
        corpus.scene = corpus.make_project(
            [(key, float(key)) for key in range(24)],
            view={"source": {"sql": sql}, "partition": serving(), "gates": UNGATED, "ttl": "90d"},
            views={"entries": entries},
        )
        return corpus.scene

    def run(day: int) -> Report:
        return corpus.scene.run(partition=containing("day", DAYS[day]))

    scene(1).run("entries")
    for day in range(3):
        assert run(day).status == "published"
    before = corpus.scene.live_snapshot()
    scene(2).run("entries")
    report = run(2)
    assert (report.status, report.counts["written"]) == ("current", 0)
    assert corpus.scene.live_snapshot() == before
    assert "2 of 3 served partitions still have the old one" in report.attention[0]
    status = corpus.scene.status()["partitions"]
    assert status["left_out"] == {"of another model": 1}
    assert len(status["older"]) == 2
    days = [f"--{end}={DAYS[day].date()}" for end, day in (("from", 0), ("to", 2))]
    assert corpus.scene.cli("backfill", "numbers", *days, "--reprocess", "stale") == 0
    live = corpus.scene.live_snapshot()
    assert (live.made_by != before.made_by, live.model, len(live.members)) == (
        *(True, before.model, 3),
    )
    assert corpus.served(24) == {key: float(key) for key in range(24) if key % 8 < 3}
    # a day that has it already is not computed once more
    assert run(1).status == "current"


def test_what_is_live_is_made_of_stays_while_another_model_is_computed(corpus: Corpus) -> None:
    first = corpus.write(0, {0: 1.0}).view("numbers").model.model_dump(exclude_unset=True)
    for day in range(2):
        corpus.run(day, {day: 1.0})
    corpus.write(model={"use": "tests.models:Doubler", "args": {"version": 2}})
    corpus.run(0)
    collect(corpus.scene.store, keep=1, grace_s=-1.0)
    assert set(corpus.scene.live_snapshot().members.values()) <= set(corpus.scene.numbers())
    # the first one after all
    corpus.write(model=first)
    corpus.run(2, {2: 1.0})
    assert corpus.served() == {0: 1.0, 1: 1.0, 2: 1.0}


def test_rows_of_another_model_alone_only_where_an_operator_says_so(corpus: Corpus) -> None:
    for day in range(2):
        corpus.run(day, {day: 1.0})
    corpus.write(model={"use": "tests.models:Doubler", "args": {"version": 2}})
    corpus.run(2, {2: 1.0})
    assert corpus.served() == {0: 1.0, 1: 1.0}
    corpus.scene.publish(accept=("rows",))
    assert corpus.served() == {2: 1.0}


def test_a_damaged_partition_is_reported_and_computed_again(corpus: Corpus) -> None:
    for day in range(3):
        corpus.run(day, {day: 1.0, 10 + day: 2.0})
    store = corpus.scene.store
    member = store.snapshot(
        corpus.scene.live_snapshot().members[max(corpus.scene.live_snapshot().members)]
    )
    path = store.folder / member.parts[0].path
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "checksums" in [check.check for check in corpus.scene.faults()]
    with pytest.raises(
        SnapshotError, match="is served and has no good snapshot any more; what is live stays"
    ):
        corpus.run(3, {3: 1.0})
    assert len(corpus.served(20)) == 6
    assert corpus.run(2, {2: 1.0, 12: 2.0}).status == "published"
    assert len(corpus.served(20)) == 7
    assert corpus.scene.faults() == []


@pytest.mark.parametrize(
    "point",
    [
        "part.rename:2",
        "manifest.link:2",
        "log.link:1",
        "online.flip:1",
    ],
)
def test_a_publishing_that_was_killed_is_gone_on_with(corpus: Corpus, point: str) -> None:
    corpus.run(0, {1: 1.0, 2: 1.0})
    corpus.write(1, {1: 2.0, 3: 2.0})
    name, _, nth = point.partition(":")
    crashpoint.arm(name, int(nth), "raise")
    with pytest.raises(InjectedError):
        corpus.run(1)
    assert crashpoint.disarm()[name] == int(nth)
    assert corpus.served() in ({1: 1.0, 2: 1.0}, {1: 2.0, 2: 1.0, 3: 2.0})
    corpus.scene.publish()
    assert corpus.served() == {1: 2.0, 2: 1.0, 3: 2.0}
    # one of the first day, one of both
    assert [
        len(s.members) for s in map(corpus.scene.snapshot, corpus.scene.numbers()) if s.members
    ] == [1, 2]
    assert corpus.scene.faults() == []


def test_the_model_behind_a_miss_reads_the_newest_partition(corpus: Corpus) -> None:
    corpus.view = {"fallback": {"enabled": True, "deadline": "10s"}}
    corpus.run(0, {1: 1.0})
    corpus.run(1, {2: 2.0})
    corpus.write(1, {2: 2.0, 3: 3.0})
    with corpus.scene.answering() as lookup:
        table = lookup.get("numbers", [1, 2, 3, 4], deadline_ms=10_000)
    assert table["double"].to_pylist() == [2.0, 4.0, 6.0, None]
    assert table["source"].to_pylist()[:3] == ["store", "store", "fallback"]


# ---- what is reported


def test_the_past_of_partitions_that_add_up_is_what_was_served(corpus: Corpus) -> None:
    corpus.run(0, {1: 1.0, 2: 2.0})
    between = datetime.now(UTC)
    corpus.run(1, {1: 10.0, 3: 30.0})
    store = corpus.scene.store
    for at, expected in (
        (between, {1: 2.0, 2: 4.0}),
        (datetime.now(UTC), {1: 20.0, 2: 4.0, 3: 60.0}),
    ):
        rows = read(store, as_of=at)
        assert (
            dict(zip(rows["id"].to_pylist(), rows["double"].to_pylist(), strict=True)) == expected
        )
        entities = pa.table(
            {"id": [1, 2, 3], "event_timestamp": pa.array([at] * 3, pa.timestamp("us", "UTC"))}
        )
        found = get_historical_features(store.offline, entities, ["numbers"])
        assert found["numbers__double"].to_pylist() == [expected.get(key) for key in (1, 2, 3)]
    # in data time a day's rows count until the next day's do
    entities = pa.table(
        {"id": [1, 2], "event_timestamp": pa.array([DAYS[1]] * 2, pa.timestamp("us", "UTC"))}
    )
    known = get_historical_features(store.offline, entities, ["numbers"], values="best_known")
    assert known["numbers__double"].to_pylist() == [2.0, 4.0]
    versions = explain(store, 1).versions
    assert [(v.features["double"], v.partition, v.live, len(v.served)) for v in versions] == [
        (20.0, str(containing("day", DAYS[1])), True, 1),
        (2.0, str(containing("day", DAYS[0])), False, 1),
    ]


def test_a_view_of_the_newest_partition_says_what_that_means(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus.write(partition=serving(serve="newest"))
    for day in range(3):
        corpus.run(day, {10 * day + key: 1.0 for key in range(4)})
    assert corpus.scene.cli("status") == 0
    assert (
        f"numbers: newest partition only: 4 keys of {DAYS[2]:%Y-%m-%d}; lookups see no other of"
        " the 3 partitions computed so far\n" in capsys.readouterr().out
    )
    corpus.write(partition=serving())
    corpus.scene.publish()
    assert len(corpus.served(30)) == 12
    assert corpus.scene.cli("status") == 0
    assert "numbers: all partitions: 3 served" in capsys.readouterr().out
    assert corpus.scene.cli("snapshots", "numbers") == 0
    assert next(line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]) == "all"
    assert corpus.scene.cli("explain", "numbers", "1") == 0


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (
            {"partition": serving(serve="newest", keep="9d")},
            r"partition\.keep: only what serves all partitions lets go",
        ),
        (
            {"partition": serving(keep="9d"), "ttl": "26h"},
            r"partition\.keep: rows of 9 d ago are to be served, and ttl lets them expire after 26 h",
        ),
        (
            {
                "model": {
                    "use": "tests.models:Doubler",
                    "args": {"version": {"sql": "SELECT $start"}},
                }
            },
            r"partition\.serve: all: model\.args\.version\.sql takes \$start",
        ),
    ],
)
def test_what_cannot_be_served_is_a_mistake_of_the_file(
    corpus: Corpus, view: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        corpus.write(**view).view("numbers")
