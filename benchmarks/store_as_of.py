"""Whether the past is what was served: random histories of real runs, what lookups were answered
meanwhile, and what is told of it afterwards, key by key."""

from __future__ import annotations

import contextlib
import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.common import report
from precompute.jobs.config.project import Project
from precompute.jobs.ops.retention import drop
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rollback import rollback
from precompute.jobs.run.rows.plan import RunOptions
from precompute.jobs.run.run_view import run_view
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import PrecomputeError, RequestError, SnapshotError
from precompute.store.history import explain, get_historical_features, read
from precompute.store.online.url import open_online_store
from precompute.store.times import as_datetime, containing

VIEW = "numbers"
FIRST_DAY = datetime(2025, 1, 1, tzinfo=UTC)
HISTORIES, STEPS, KEYS, EXPLAINED = 50, 25, 40, 4
LOOKUPS = 2
"""After each step, of all keys."""

Value = tuple[float | None, datetime]
"""Of the feature, and when it was computed."""


class Double:
    """``x`` → 2x; no input, no value."""

    def fingerprint(self) -> str:
        """Never another one."""
        return "double"

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Rows without an input."""
        return {
            row: "it has no x" for row, x in enumerate(batch.column("x").to_pylist()) if x is None
        }

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        """Twice the input."""
        return {"double": 2.0 * np.asarray(batch.column("x"))}


@dataclass
class Recorded:
    """What lookups answered at one time (µs since 1970), by key; keys without a row in the store
    are not there."""

    at_us: int
    rows: dict[int, Value]


@dataclass
class History:
    """A project, and what is done to its one view: random, but for the clock's time the same with
    each ``seed``."""

    folder: Path
    seed: int
    recorded: list[Recorded] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    """What was done → how often it went well."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.partitioned = self.seed % 2 == 1
        self.days: dict[int, dict[int, float | None]] = {
            0: {key: float(key) for key in range(KEYS)}
        }
        (self.folder / "views").mkdir(parents=True)
        settings = {
            "root": "./var",
            "online": "table:./online",
            "vars": {"data": "./"},
            "retention": {"keep": 1000, "grace": "1d"},
        }
        day = " WHERE day >= $start AND day < $end" if self.partitioned else ""
        empty = self.random.choice(["keep", "publish"])
        good_for = self.random.choice([("1h", "1h"), ("200ms", "300ms")])
        view = {
            "name": VIEW,
            "entity": ["id"],
            "source": {"sql": f"SELECT id, x FROM read_parquet('${{data}}/data.parquet'){day}"},
            "model": {"use": "benchmarks.store_as_of:Double"},
            "features": {"double": {"dtype": "float64"}},
            "ttl": good_for[0],
            "stale_for": good_for[1],
            "max_rejected": 1.0,
            "bad_rows": self.random.choice(["reject", "null"]),
            "gates": {"coverage": None, "rows": None},
            **(
                {"partition": {"by": "day", "start": f"{FIRST_DAY:%Y-%m-%d}", "empty": empty}}
                if self.partitioned
                else {}
            ),
        }
        (self.folder / "project.yaml").write_text(yaml.safe_dump(settings))
        (self.folder / "views" / f"{VIEW}.yaml").write_text(yaml.safe_dump(view))
        self.project = Project(self.folder, {})
        self.store = self.project.offline.view(VIEW)

    def play(self, steps: int = STEPS) -> None:
        """Do it all, and look keys up after each step."""
        with contextlib.closing(open_online_store(self.project.online)) as online:
            for _ in range(steps):
                does = self.random.choice(self._steps())
                with contextlib.suppress(PrecomputeError):
                    # what is refused is no less of a step
                    does()
                    name = does.__name__.strip("_")
                    self.done[name] = self.done.get(name, 0) + 1
                for _ in range(LOOKUPS):
                    self.recorded.append(looked_up(online))

    def _steps(self) -> Sequence[Callable[[], object]]:
        partitioned = (
            (self._next_day, self._next_day, self._empty_day, self._earlier_day)
            if self.partitioned
            else ()
        )
        again = (
            self._again,
            self._again,
            self._rollback,
            self._publish,
            self._materialize,
            self._reload,
            self._drop,
            self._full,
        )
        return (self._changed, self._changed, self._changed, *partitioned, *again)

    def _run(self, day: int | None = None, **options: object) -> None:
        day = max(self.days) if day is None else day
        rows = [
            (key, x, number) for number, of_day in self.days.items() for key, x in of_day.items()
        ]
        columns = {
            "id": pa.array([key for key, _, _ in rows], pa.int64()),
            "x": pa.array([x for _, x, _ in rows], pa.float64()),
            "day": pa.array(
                [
                    (FIRST_DAY + timedelta(days=number)).replace(tzinfo=None)
                    for _, _, number in rows
                ],
                pa.timestamp("us"),
            ),
        }
        pq.write_table(pa.table(columns), self.folder / "data.parquet")
        partition = containing("day", FIRST_DAY + timedelta(days=day)) if self.partitioned else None
        run_view(self.project, VIEW, Silent(), RunOptions(partition=partition, **options))  # type: ignore[arg-type]

    def _change(self, day: int) -> None:
        for key in self.random.sample(range(KEYS), self.random.choice([1, 2, KEYS // 2])):
            x = self.random.choice([None, -1.0, *[self.random.random()] * 6])
            if x == -1.0:
                self.days[day].pop(key, None)
            else:
                self.days[day][key] = x

    def _changed(self) -> None:
        self._change(max(self.days))
        self._run()

    def _again(self) -> None:
        self._run()

    def _full(self) -> None:
        self._run(full=True)

    def _materialize(self) -> None:
        self._change(max(self.days))
        self._run(command="materialize")

    def _next_day(self) -> None:
        self.days[max(self.days) + 1] = {}
        self._change(max(self.days))
        self._run()

    def _empty_day(self) -> None:
        self.days[max(self.days) + 1] = {}
        self._run()

    def _earlier_day(self) -> None:
        day = self.random.choice(list(self.days))
        self._change(day)
        self._run(day)

    def _rollback(self) -> None:
        rollback(self.project, VIEW, Silent(), hold=False)

    def _publish(self) -> None:
        run_view(
            self.project,
            VIEW,
            Silent(),
            RunOptions(command="publish", snapshot=self.random.choice(self.store.numbers() or [1])),
        )

    def _reload(self) -> None:
        ref = self.store.log.live()
        run_view(
            self.project,
            VIEW,
            Silent(),
            RunOptions(command="publish", snapshot=ref.snapshot if ref else None, reload=True),
        )

    def _drop(self) -> None:
        if self.random.random() < 0.3:
            drop(self.project, VIEW)

    # ---- what is told of it

    def questions(self) -> int:
        """How many keys were looked up."""
        return len(self.recorded) * KEYS

    def differences(self) -> Iterator[str]:
        """What reading, joining or explaining tells otherwise than lookups were answered, in
        words."""
        asked = [(recorded, key) for recorded in self.recorded for key in range(KEYS)]
        for way, told in (("join", self._joined(asked)), ("read", self._read(asked))):
            for (recorded, key), value in zip(asked, told, strict=True):
                if value != recorded.rows.get(key):
                    yield (
                        f"{way}: key {key} at {recorded.at_us}: {value}, and a lookup was answered"
                        f" {recorded.rows.get(key)}"
                    )
        for key in range(EXPLAINED):
            yield from self._explained(key)

    def _joined(self, asked: Sequence[tuple[Recorded, int]]) -> list[Value | None]:
        times = pa.array([recorded.at_us for recorded, _ in asked], pa.timestamp("us", "UTC"))
        table = pa.table({"id": pa.array([key for _, key in asked]), "event_timestamp": times})
        try:
            found = get_historical_features(self.project.offline, table, [VIEW])
        except SnapshotError:
            return [None] * len(asked)
        computed = found[f"{VIEW}__computed_at"].to_pylist()
        doubles = found[f"{VIEW}__double"].to_pylist()
        return [
            None if at is None else (double, at)
            for double, at in zip(doubles, computed, strict=True)
        ]

    def _read(self, asked: Sequence[tuple[Recorded, int]]) -> list[Value | None]:
        tables: dict[int, dict[int, Value]] = {}
        for recorded in self.recorded:
            try:
                rows = read(self.store, as_datetime(recorded.at_us)).to_pylist()
            except SnapshotError:
                rows = []
            tables[recorded.at_us] = {
                row["id"]: (row["double"], row["computed_at"]) for row in rows
            }
        return [tables[recorded.at_us].get(key) for recorded, key in asked]

    def _explained(self, key: int) -> Iterator[str]:
        try:
            versions = explain(self.store, key).versions
        except (RequestError, SnapshotError):
            versions = []
        for recorded in self.recorded:
            at = as_datetime(recorded.at_us)
            told = [
                (version.features["double"], version.computed_at)
                for version in versions
                if any(
                    since <= at and (until is None or at < until) for since, until in version.served
                )
            ]
            if told != [value for value in [recorded.rows.get(key)] if value is not None]:
                yield (
                    f"explain: key {key} at {recorded.at_us}: {told}, and a lookup was answered"
                    f" {recorded.rows.get(key)}"
                )


def looked_up(online: object) -> Recorded:
    """What the online store answers now."""
    last = [0.0]

    def clock() -> float:
        last[0] = time.time()
        return last[0]

    lookup = Lookup(online, clock=clock)  # type: ignore[arg-type]
    try:
        answer = (
            lookup.get(VIEW, list(range(KEYS)))
            .select(["key", "status", "double", "computed_at"])
            .to_pylist()
        )
    except RequestError:
        # no such view
        clock()
        answer = []
    rows = {
        int(row["key"]): (row["double"], row["computed_at"])
        for row in answer
        if row["status"] != "missing"
    }
    return Recorded(int(last[0] * 1e6), rows)


def main() -> None:
    """Compare and report."""
    # refusals are part of it
    logging.disable(logging.WARNING)
    questions, differ, done, missing = 0, 0, dict[str, int](), 0
    for seed in range(HISTORIES):
        with tempfile.TemporaryDirectory() as folder:
            history = History(Path(folder) / "project", seed)
            history.play()
            found = list(history.differences())
            questions, differ = questions + history.questions(), differ + len(found)
            missing += sum(KEYS - len(recorded.rows) for recorded in history.recorded)
            done = {
                name: done.get(name, 0) + history.done.get(name, 0) for name in done | history.done
            }
            for line in found[:5]:
                print(f"seed {seed}: {line}")
    report(
        "store_as_of",
        [
            (
                f"{questions:,} questions of {HISTORIES} random histories,"
                f" {missing / questions:.0%} answered with no row: {differ:,} are told otherwise"
                " afterwards"
            ),
            (
                "what was done:"
                f" {', '.join(f'{name} {count}' for name, count in sorted(done.items()))}"
            ),
        ],
        {"questions": questions, "missing": missing, "differ": differ, "done": done},
    )


if __name__ == "__main__":
    main()
