"""History against brute force: made-up snapshots of every kind, requested for every key at every
time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precompute.store.errors import RequestError, SnapshotError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.history import (
    Explanation,
    explain,
    get_historical_features,
    read,
    snapshot_at,
)
from precompute.store.offline import log as log_module
from precompute.store.offline.log import BadMark
from precompute.store.offline.runs import Report
from precompute.store.offline.segment import COPIED, KILLS, Part, Segment, kills_table
from precompute.store.offline.snapshot import Counts, Snapshot, Verdict
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import as_us, containing
from tests.fixtures import MakeProject

FEATURES = (
    Feature("double", "float64"),
    Feature("half", "float16", dim=2),
    Feature("tags", "string", max_items=3),
    Feature("name", "string"),
    Feature("flag", "bool"),
)
ENTITIES: dict[str, dict[str, pa.DataType]] = {
    "number": {"id": pa.int64()},
    "text": {"id": pa.string()},
    "several": {"us": pa.int64(), "known": pa.string()},  # names that are columns of the join, too
}
START = datetime(2026, 1, 1, tzinfo=UTC)
REFUSED = (Verdict("shape", False, 1.0, 0.5, "far off"),)
Key = tuple[Any, ...]


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


@dataclass(frozen=True)
class Value:
    """A row: when it was computed (s after START) and from what."""

    computed: int
    x: int

    def features(self) -> dict[str, Any]:
        x = self.x
        return {
            "double": 2.0 * x,
            "half": [x / 2, -x / 2],
            "tags": None if x % 4 == 0 else [str(x)] * (x % 3),
            "name": None if x % 3 == 0 else f"n{x}",
            "flag": x % 2 == 0,
        }


@dataclass
class Made:
    """A store with snapshots made by hand, and what each of them holds."""

    store: ViewStore
    entity: Mapping[str, pa.DataType]
    snapshots: list[Snapshot] = field(default_factory=list)
    rows: dict[int, dict[Key, Value]] = field(default_factory=dict)
    places: dict[int, dict[Key, tuple[str, int]]] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)
    good_for_s: float = 1e9
    """Until a row has expired."""

    @property
    def view(self) -> FeatureView:
        return FeatureView(
            "made",
            tuple(self.entity),
            FEATURES,
            ttl_s=self.good_for_s / 2,
            stale_for_s=self.good_for_s / 2,
        )

    def parent(self, partition: str | None) -> Snapshot | None:
        found = [s for s in self.snapshots if s.partition == partition and s.number not in self.bad]
        return found[-1] if found else None

    def commit(
        self,
        rows: Mapping[Key, Value],
        created: int,
        *,
        how: str = "full",
        refused: bool = False,
        partition: str | None = None,
        content: str = "",
        live: bool = True,
    ) -> Snapshot:
        """A snapshot of these rows: ``full``, ``delta`` to the newest good one, or ``compact``: its
        parent's rows copied. It goes live unless a gate refused it, or with ``live`` false."""
        parent = None if how == "full" else self.parent(partition)
        old = {} if parent is None else self.rows[parent.number]
        run = f"run{len(self.snapshots) + 1}"
        same = {key for key, value in rows.items() if old.get(key) == value}
        written = [key for key in rows if key not in same]
        delta = parent is not None and how == "delta"
        parts, places = self._parts(
            run,
            {key: rows[key] for key in rows if not delta or key in written},
            "part-" if how != "compact" else COPIED,
        )
        kills, below = None, () if parent is None or not delta else parent.segments
        if delta:
            assert parent is not None
            before = self.places[parent.number]
            places |= {key: before[key] for key in same}
            gone = {key: place for key, place in before.items() if key not in same}
            if gone:
                kills = self.store.write_part(run, KILLS, self._kills(gone, rows))
        removed = len(old.keys() - rows.keys())
        segment = Segment(0, run, "recipe", 7, tuple(parts), kills)
        counts = Counts(
            source=len(rows), written=len(written), unchanged=len(same), removed=removed
        )
        snapshot = self.store.commit(
            Snapshot(
                self.view, run, "model", counts, (*below, segment), None, at(created).isoformat(), None, None,
                partition=partition, gates=REFUSED if refused else (), content=content,
            )
        )  # fmt: skip
        self.snapshots.append(snapshot)
        self.rows[snapshot.number], self.places[snapshot.number] = dict(rows), places
        if live and not refused:
            self.publish(snapshot.number, created)
        return snapshot

    def publish(self, number: int | None, second: float) -> None:
        """Make a snapshot live at a time; None drops the view."""
        view, ref = self.store.log, self.store.log.live()
        with mock.patch.object(log_module, "utc_now", return_value=at(second).isoformat()):
            if number is None:
                view.end_live()
            else:
                expected = 0 if ref is None else ref.epoch
                view.move_live(number, expected_epoch=expected, reason="test")

    def renew(self, renewed: float, second: float) -> None:
        """A run that read the source at ``renewed`` found nothing changed, which readers knew from
        ``second`` on."""
        ref = self.store.log.live()
        if ref is not None:
            with mock.patch.object(log_module, "utc_now", return_value=at(second).isoformat()):
                self.store.log.renew_live(ref, as_us(at(renewed)))

    def mark_bad(self, number: int) -> None:
        made = self.snapshots[number - 1]
        mark = BadMark("test", made.created_at, made.content, segments=made.names[-1:])
        self.store.log.mark_bad(number, mark)
        self.bad.add(number)

    def good(self) -> list[Snapshot]:
        made_by = {number: self.snapshots[number - 1].names[-1] for number in self.bad}
        return [
            s
            for s in self.snapshots
            if set(s.names).isdisjoint(made_by.values()) and not s.failed_gates
        ]

    def _parts(
        self, run: str, rows: Mapping[Key, Value], name: str = "part-"
    ) -> tuple[list[Part], dict[Key, tuple[str, int]]]:
        parts: list[Part] = []
        places: dict[Key, tuple[str, int]] = {}
        keys = list(rows)
        for number in range(0, len(keys), 2):  # two rows a file, so that files are shared
            here = keys[number : number + 2]
            part = self.store.write_part(
                run, f"{name}{number:05d}.parquet", self.table({key: rows[key] for key in here})
            )
            parts.append(part)
            places |= {key: (part.path, row) for row, key in enumerate(here)}
        return parts, places

    def table(self, rows: Mapping[Key, Value]) -> pa.Table:
        columns = [
            pa.array([key[i] for key in rows], kind) for i, kind in enumerate(self.entity.values())
        ]
        for feature in FEATURES:
            columns.append(
                pa.array(
                    [value.features()[feature.name] for value in rows.values()], feature.arrow_type
                )
            )
        columns.append(
            pa.array([at(value.computed) for value in rows.values()], pa.timestamp("us", "UTC"))
        )
        columns.append(pa.array([value.x for value in rows.values()], pa.int64()))
        return pa.table(
            columns, names=[*self.entity, *(f.name for f in FEATURES), "computed_at", "input_hash"]
        )

    def _kills(self, gone: Mapping[Key, tuple[str, int]], rows: Mapping[Key, Value]) -> pa.Table:
        columns = [
            pa.array([path for path, _ in gone.values()], pa.string()).dictionary_encode(),
            pa.array([row for _, row in gone.values()], pa.int64()),
            pa.array([key not in rows for key in gone], pa.bool_()),
            *(
                pa.array([key[i] for key in gone], kind)
                for i, kind in enumerate(self.entity.values())
            ),
        ]
        part, row, removed, *keys = columns
        return kills_table(part, row, removed, dict(zip(self.entity, keys, strict=True)))

    def requested(self, questions: Sequence[tuple[Key, float]], unit: str = "us") -> pa.Table:
        columns = {
            name: pa.array([key[i] for key, _ in questions], kind)
            for i, (name, kind) in enumerate(self.entity.items())
        }
        times = pa.array([at(second) for _, second in questions], pa.timestamp("us", "UTC")).cast(
            pa.timestamp(unit, "UTC")
        )
        return pa.table(
            {
                "label": pa.array(range(len(questions)), pa.int64()),
                **columns,
                "event_timestamp": times,
            }
        )

    def check(self, requested: pa.Table, expected: Sequence[Value | None], **options: Any) -> None:
        """The join gives these values, with every type as declared, and the requested columns as
        they were."""
        found = get_historical_features(self.store.offline, requested, ["made"], **options)
        assert found.select(requested.column_names).equals(requested)
        schema = [(f"made__{f.name}", f.arrow_type) for f in FEATURES] + [
            ("made__computed_at", pa.timestamp("us", "UTC"))
        ]
        assert [(f.name, f.type) for f in found.schema][requested.num_columns :] == schema
        nothing: dict[str, Any] = dict.fromkeys((name for name, _ in schema))
        want = [
            nothing
            if value is None
            else {f"made__{n}": v for n, v in value.features().items()}
            | {"made__computed_at": at(value.computed)}
            for value in expected
        ]
        assert found.select([name for name, _ in schema]).to_pylist() == want


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(OfflineStore(tmp_path / "root").view("made"), ENTITIES["number"])


def keys_of(kind: str) -> list[Key]:
    keys: dict[str, list[Key]] = {
        "number": [(n,) for n in (1, 2, 3, -4, 2**62)],
        "text": [(t,) for t in ("1", "01", "a/b", "é", "x y")],
        "several": [(1, "a"), (1, "a/b"), (1, "%"), (2, "a"), (-3, "")],
    }
    return keys[kind]


# ---- the point-in-time join against brute force


@st.composite
def histories(draw: st.DrawFn, partitioned: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """The kind of key, and what happened: each step's rows, times and mishaps."""
    kind = draw(st.sampled_from(sorted(ENTITIES)))
    keys = keys_of(kind)[:4]
    now, held, steps = 0, dict[Key, Value](), []
    for _ in range(draw(st.integers(1, 6))):
        now += draw(st.integers(0, 4))
        changed = draw(
            st.dictionaries(
                st.sampled_from(keys), st.one_of(st.none(), st.integers(0, 9)), max_size=4
            )
        )
        rows = dict(held)
        for key, x in changed.items():
            if x is None:
                rows.pop(key, None)
            else:  # earlier than now: an interrupted run had computed it
                rows[key] = Value(now - draw(st.integers(0, 3)), x)
        if draw(st.booleans()):
            rows = {key: Value(now, value.x) for key, value in rows.items()}
        if not rows:
            rows = {keys[0]: Value(now, 5)}
        now += draw(st.integers(0, 3))
        steps.append(
            {
                "rows": rows,
                "created": now,
                "how": draw(st.sampled_from(["full", "delta", "delta", "delta", "compact"])),
                "mishap": draw(st.sampled_from([None, None, None, "bad", "refused"])),
                "late": draw(st.booleans()),
                "day": draw(st.integers(0, 2)) if partitioned else None,
                "live": draw(st.booleans()),
                "then": draw(
                    st.lists(
                        st.sampled_from(["back", "forward", "renew", "drop", "reload", "clock"]),
                        max_size=3,
                    )
                ),
            }
        )
        held = rows
    return kind, steps


@st.composite
def questions(draw: st.DrawFn, kind: str, latest: int) -> list[tuple[Key, int]]:
    requested = st.tuples(st.sampled_from(keys_of(kind)), st.integers(-2, latest + 2))
    return draw(st.lists(requested, min_size=1, max_size=25))


Log = list[tuple[float, int | None, float, float]]
"""From when on, which snapshot, published when, and renewed when."""


def build(made: Made, steps: list[dict[str, Any]]) -> Log:
    """Make it all happen; what was live and when."""
    later: list[int] = []
    log: Log = []

    def publish(number: int | None, second: float) -> None:
        if number is not None or (log and log[-1][1] is not None):
            # what is live already is as old as it was found to be
            renewed = log[-1][3] if log and log[-1][1] == number else -1e9
            made.publish(number, second)
            log.append((second, number, second, renewed))

    for step in steps:
        partition = (
            None
            if step["day"] is None
            else str(containing("day", START + timedelta(days=step["day"])))
        )
        refused, now = step["mishap"] == "refused", step["created"]
        snapshot = made.commit(
            step["rows"], now, how=step["how"], refused=refused, partition=partition, live=False
        )
        if step["live"] and not refused:
            publish(snapshot.number, now)
        if step["mishap"] == "bad":
            if step["late"]:  # after others were built on it
                later.append(snapshot.number)
            else:
                made.mark_bad(snapshot.number)
        for number, event in enumerate(step["then"]):
            second = now + 0.25 * (number + 1)
            if event == "drop":
                publish(None, second)
            elif event == "renew" and log and log[-1][1] is not None:
                made.renew(second - 0.125, second)
                log.append((second, *log[-1][1:3], second - 0.125))
            elif event == "clock" and log:  # set back: what comes later begins no earlier
                publish(snapshot.number, second - 2)
            elif event == "reload" and log:
                publish(log[-1][1], second)
            elif event in ("back", "forward") and log:
                publish(1 if event == "back" else snapshot.number, second)
    for number in later:
        made.mark_bad(number)
    return log


def seconds(moment: str) -> int:
    return round((datetime.fromisoformat(moment) - START).total_seconds())


def served(made: Made, log: Log, key: Key, second: float, oldest: float = 1e9) -> Value | None:
    """The definition: what was live then, unless it had expired."""
    clamped = [(max(since for since, *_ in log[: n + 1]), *log[n][1:]) for n in range(len(log))]
    for since, number, published, renewed in reversed(clamped):
        if since > second:
            continue
        value = None if number is None else made.rows[number].get(key)
        if value is None or second - max(min(value.computed, published), renewed) > min(
            made.good_for_s, oldest
        ):
            return None
        return value
    return None


def by_commit(made: Made, log: Log, key: Key, second: float) -> Value | None:
    committed = [s for s in made.good() if seconds(s.created_at) <= second]
    return made.rows[committed[-1].number].get(key) if committed else None


def by_partition(made: Made, log: Log, key: Key, second: float) -> Value | None:
    newest = {s.partition or "": s for s in made.good()}
    over = [
        p for p in sorted(newest) if seconds(p.partition("/")[2].replace("Z", "+00:00")) <= second
    ]
    if not over:
        return None
    age = second - seconds(over[-1].partition("/")[2].replace("Z", "+00:00"))
    return made.rows[newest[over[-1]].number].get(key) if age <= made.good_for_s else None


def in_types(requested: pa.Table, draw: st.DataObject) -> pa.Table:
    """The same questions in other types: what a training set comes with."""
    others = {
        pa.int64(): [pa.int64(), pa.string()],
        pa.string(): [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())],
    }
    for i, column in enumerate(requested.schema):
        if column.name not in ("label", "event_timestamp"):
            kind = draw.draw(st.sampled_from(others[column.type]))
            requested = requested.set_column(i, column.name, requested.column(i).cast(kind))
    unit = draw.draw(st.sampled_from(["ms", "us", "ns"]))
    zone = draw.draw(st.sampled_from(["UTC", "America/New_York"]))
    at_column = requested.column_names.index("event_timestamp")
    return requested.set_column(
        at_column, "event_timestamp", requested.column(at_column).cast(pa.timestamp(unit, zone))
    )


@pytest.mark.parametrize("reference", [served, by_commit, by_partition])
@settings(max_examples=12, deadline=None)
@given(draw=st.data())
def test_the_join_answers_as_brute_force_does(reference: Any, draw: st.DataObject) -> None:
    kind, steps = draw.draw(histories(partitioned=reference is by_partition))
    values: Any = "served" if reference is served else "best_known"
    with tempfile.TemporaryDirectory() as folder:
        made = Made(
            OfflineStore(folder).view("made"),
            ENTITIES[kind],
            good_for_s=draw.draw(st.sampled_from([2, 4, 90_000, 1e9])),
        )
        log = build(made, steps)
        if reference is by_partition:
            requested: list[tuple[Key, float]] = [
                (key, 43_200 * half) for key, half in draw.draw(questions(kind, 8))
            ]
        else:
            requested = [
                (key, half / 2)
                for key, half in draw.draw(questions(kind, 2 * steps[-1]["created"]))
            ]
        table = in_types(made.requested(requested), draw)
        if not (log if reference is served else made.good()):
            with pytest.raises(
                SnapshotError,
                match="nothing that was served" if reference is served else "no snapshot under",
            ):
                get_historical_features(made.store.offline, table, ["made"], values=values)
            return
        expected = [reference(made, log, key, second) for key, second in requested]
        made.check(table, expected, values=values)
        if reference is not served:
            return
        age = draw.draw(st.integers(0, 5))
        young = [served(made, log, key, second, oldest=age) for key, second in requested]
        made.check(table, young, max_age_s=age)
        for value, (key, second) in list(zip(expected, requested, strict=True))[:3]:
            check_read_and_explain(made, key, second, value)


def check_read_and_explain(made: Made, key: Key, second: float, value: Value | None) -> None:
    """Both answer as the join did."""
    try:
        rows = read(made.store, at(second))
    except SnapshotError:
        assert value is None
    else:
        names = list(made.entity)
        found = [row for row in rows.to_pylist() if tuple(row[name] for name in names) == key]
        assert [(row["double"], row["computed_at"]) for row in found] == (
            [] if value is None else [(2.0 * value.x, at(value.computed))]
        )
    try:
        versions = explain(made.store, list(key)).versions
    except RequestError:
        assert value is None
        return
    answered = [
        (version.features["double"], version.computed_at)
        for version in versions
        if any(
            since <= at(second) and (until is None or at(second) < until)
            for since, until in version.served
        )
    ]
    assert answered == ([] if value is None else [(2.0 * value.x, at(value.computed))])


# ---- the join's edges


def test_a_folder_above_the_store_is_no_partition(tmp_path: Path) -> None:
    made = Made(
        OfflineStore(tmp_path / "id=9" / "row=9" / "input_hash=9" / "root").view("made"),
        ENTITIES["number"],
    )
    made.commit({(1,): Value(1, 1), (2,): Value(1, 2)}, 2)
    made.commit({(1,): Value(5, 3)}, 6, how="delta")
    made.check(
        made.requested([((1,), 3), ((1,), 9), ((2,), 3), ((2,), 9)]),
        [Value(1, 1), Value(5, 3), Value(1, 2), None],
    )


def test_a_time_finer_than_a_microsecond_knows_only_what_was_before_it(made: Made) -> None:
    made.commit({(1,): Value(10, 1)}, 11)
    ns = int(at(11).timestamp()) * 10**9
    times = pa.array([ns - 1, ns, ns + 1, -1], pa.timestamp("ns", "UTC"))
    made.check(
        pa.table({"id": [1, 1, 1, 1], "event_timestamp": times}),
        [None, Value(10, 1), Value(10, 1), None],
    )


def test_rows_and_their_order_stay_and_others_columns_do_not_matter(made: Made) -> None:
    made.commit({(1,): Value(1, 1), (2,): Value(1, 2)}, 1)
    table = made.requested([((2,), 5), ((1,), 5), ((2,), 5), ((3,), 5), ((2,), 0)])
    chunked = pa.concat_tables([table.slice(0, 2), table.slice(2)])
    made.check(chunked, [Value(1, 2), Value(1, 1), Value(1, 2), None, None])
    made.check(table.slice(0, 0), [])
    made.check(
        table.set_column(1, "id", pa.array([None, 2**64 - 1, 2, 1, 1], pa.uint64())),
        [None, None, Value(1, 2), Value(1, 1), None],
    )


def test_what_was_rolled_back_from_was_served_and_is_not_best_known(made: Made) -> None:
    one, two = Value(1, 1), Value(3, 2)
    made.commit({(1,): one}, 2, content="one")
    made.commit({(1,): two}, 4, content="two")
    made.publish(1, 6)
    made.mark_bad(2)
    made.commit({(1,): Value(7, 2)}, 8, content="two", live=False)
    requested = made.requested([((1,), second) for second in (3, 5, 7, 9)])
    made.check(requested, [one, two, one, one])
    made.check(requested, [one] * 4, values="best_known")
    assert [snapshot_at(made.store, at(second)).number for second in (3, 5, 7, 9)] == [1, 2, 1, 1]
    assert snapshot_at(made.store, at(5), values="best_known").number == 1
    versions = {version.snapshot: version for version in explain(made.store, 1).versions}
    assert {number: version.served for number, version in versions.items()} == {
        1: [(at(2), at(4)), (at(6), at(1 + 10**9) + timedelta(microseconds=1))], 2: [(at(4), at(6))], 3: []
    }  # fmt: skip
    assert versions[2].void == "test"


def test_what_was_only_committed_is_best_known_and_was_not_served(made: Made) -> None:
    made.commit({(1,): Value(1, 1)}, 2, live=False)
    refused = made.commit({(1,): Value(3, 2)}, 4, how="delta", refused=True)
    requested = made.requested([((1,), 3), ((1,), 9)])
    for ask in (
        lambda: get_historical_features(made.store.offline, requested, ["made"]),
        lambda: read(made.store, at(9)),
    ):
        with pytest.raises(
            SnapshotError,
            match="it was never published; see its name, run it, or read values='best_known'",
        ):
            ask()
    made.check(requested, [Value(1, 1), Value(1, 1)], values="best_known")
    made.store.log.accept(refused.number, ["shape"], "publish", "as it should be")
    made.check(requested, [Value(1, 1), Value(3, 2)], values="best_known")
    with pytest.raises(RequestError, match="values are 'served' or 'best_known', not 'latest'"):
        read(made.store, at(9), values="latest")  # type: ignore[arg-type]


def test_a_row_expires_as_for_lookups_and_is_renewed_likewise(tmp_path: Path) -> None:
    made, value = (
        Made(OfflineStore(tmp_path).view("made"), ENTITIES["number"], good_for_s=4),
        Value(1, 1),
    )
    made.commit({(1,): value}, 2)
    made.renew(7, 9)
    requested = [
        (5, value),
        (5.000001, None),
        (8.999999, None),
        (9, value),
        (11, value),
        (11.000001, None),
    ]
    made.check(
        made.requested([((1,), second) for second, _ in requested]),
        [found for _, found in requested],
    )
    assert [read(made.store, at(second)).num_rows for second, _ in requested] == [
        int(found is not None) for _, found in requested
    ]
    later = timedelta(microseconds=1)
    assert explain(made.store, 1).versions[0].served == [
        (at(2), at(5) + later),
        (at(9), at(11) + later),
    ]


def test_after_a_drop_nothing_is_known_until_the_next_publishing(made: Made) -> None:
    made.commit({(1,): Value(1, 1)}, 2)
    made.publish(None, 4)
    made.commit({(1,): Value(5, 2)}, 6)
    made.check(
        made.requested([((1,), second) for second in (3, 4, 5, 6)]),
        [Value(1, 1), None, None, Value(5, 2)],
    )
    with pytest.raises(
        SnapshotError,
        match=r"nothing to read as of 2026-01-01T00:00:05\+00:00; it was dropped at 2026-01-01T00:00:04",
    ):
        read(made.store, at(5))


def test_where_the_snapshot_is_gone_nothing_is_known(made: Made) -> None:
    for number in (1, 2, 3):
        made.commit({(1,): Value(number, number)}, 2 * number)
    for number in (2, 1):
        (made.store.folder / "manifests" / f"{number:020d}.json").unlink()  # as gc does
        requested = made.requested([((1,), second) for second in (3, 5, 7)])
        made.check(requested, [Value(1, 1) if number == 2 else None, None, Value(3, 3)])
    why = "the oldest snapshot that can be read is 3, which counts from 2026-01-01T00:00:06Z on"
    with pytest.raises(
        SnapshotError, match=rf"nothing to read as of 2026-01-01T00:00:05\+00:00: {why}"
    ):
        read(made.store, at(5))


def test_features_may_be_chosen_and_views_joined(made: Made) -> None:
    made.commit({(1,): Value(1, 2)}, 2)
    found = get_historical_features(
        made.store.offline, made.requested([((1,), 3)]), {"made": ["name", "double"]}
    )
    assert found.column_names[3:] == ["made__name", "made__double", "made__computed_at"]
    assert found.to_pylist()[0]["made__name"] == "n2"
    assert get_historical_features(made.store.offline, found, {}).equals(found)


def test_a_feature_an_older_snapshot_lacked_or_had_otherwise_is_null_there(made: Made) -> None:
    made.commit({(1,): Value(1, 2)}, 2)
    newer = FeatureView(
        "made",
        ("id",),
        (Feature("double", "float32"), Feature("name", "string"), Feature("new", "int8")),
        1e9,
        1.0,
    )
    columns = {
        "id": pa.array([1]),
        "double": pa.array([5.0], pa.float32()),
        "name": ["n"],
        "new": pa.array([7], pa.int8()),
        "computed_at": pa.array([at(5)], pa.timestamp("us", "UTC")),
        "input_hash": pa.array([1]),
    }
    part = made.store.write_part("newer", "part-00000.parquet", pa.table(columns))
    made.store.commit(
        Snapshot(
            newer,
            "newer",
            "model",
            Counts(1, 1),
            (Segment(0, "newer", "", 7, (part,)),),
            None,
            at(6).isoformat(),
            None,
            None,
        )
    )
    made.publish(2, 6)
    found = get_historical_features(
        made.store.offline, made.requested([((1,), 3), ((1,), 6)]), ["made"]
    )
    assert found.schema.field("made__double").type == pa.float32()
    assert found.select(["made__double", "made__name", "made__new"]).to_pylist() == [
        {"made__double": None, "made__name": "n2", "made__new": None},
        {"made__double": 5.0, "made__name": "n", "made__new": 7},
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["id"]), "no column 'id', a key column of view 'made'"),
        (
            lambda t: t.set_column(1, "id", pa.array([1.0])),
            "column 'id' of the entity table is double: a key is text or an integer",
        ),
        (lambda t: t.drop_columns(["event_timestamp"]), "no timestamp column 'event_timestamp'"),
        (
            lambda t: t.set_column(2, "event_timestamp", pa.array([datetime(2026, 1, 1)])),
            "must be a timestamp with a time zone",
        ),
        (
            lambda t: t.set_column(
                2, "event_timestamp", pa.array([None], pa.timestamp("us", "UTC"))
            ),
            r"1 rows .* no 'event_timestamp'",
        ),
        (
            lambda t: t.set_column(
                2, "event_timestamp", pa.array([2**62], pa.timestamp("s", "UTC"))
            ),
            "no timestamp in µs can hold",
        ),
        (lambda t: t.append_column("made__name", pa.array([1])), "has a column made__name already"),
    ],
)
def test_an_entity_table_that_cannot_be_used_is_refused(
    made: Made, change: Any, message: str
) -> None:
    made.commit({(1,): Value(1, 1)}, 2)
    with pytest.raises(RequestError, match=message):
        get_historical_features(made.store.offline, change(made.requested([((1,), 3)])), ["made"])


def test_unknown_features_ages_and_views_are_refused(made: Made) -> None:
    made.commit({(1,): Value(1, 1)}, 2)
    requested = made.requested([((1,), 3)])
    with pytest.raises(
        RequestError, match=r"no feature 'nam' \(it has: double, half, tags, name, flag\)"
    ) as caught:
        get_historical_features(made.store.offline, requested, {"made": ["nam"]})
    assert caught.value.code == "unknown_feature"
    for age in (-1.0, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="max_age_s is a number of seconds"):
            get_historical_features(made.store.offline, requested, ["made"], max_age_s=age)
    with pytest.raises(SnapshotError, match="view 'other' has nothing that was served"):
        get_historical_features(made.store.offline, requested, "other")


def test_a_missing_file_is_an_error(made: Made) -> None:
    snapshot = made.commit({(1,): Value(1, 1)}, 2)
    (made.store.folder / snapshot.parts[0].path).unlink()
    with pytest.raises(SnapshotError, match=r"part-00000.parquet is missing: snapshot 1 of 'made'"):
        get_historical_features(made.store.offline, made.requested([((1,), 3)]), ["made"])


def test_each_file_is_read_once_however_many_snapshots_share_it(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {(n,): Value(0, n) for n in range(6)}
    for n in range(6):
        rows[(n,)] = Value(n, n)
        made.commit(rows, n, how="delta")
    opened: list[str] = []
    original = pa.parquet.ParquetFile

    def counting(path: Path, *arguments: Any, **named: Any) -> Any:
        opened.append(str(path))
        return original(path, *arguments, **named)

    monkeypatch.setattr("precompute.store.history.versions.pq.ParquetFile", counting)
    made.check(
        made.requested([((n,), 9) for n in range(6)] * 2), [Value(n, n) for n in range(6)] * 2
    )
    assert len(opened) == len(set(opened)) == len({made.places[6][(n,)][0] for n in range(6)})


# ---- the whole view at a time


def test_best_known_of_a_partitioned_view_is_in_data_time(made: Made) -> None:
    days = [containing("day", START + timedelta(days=day)) for day in range(3)]
    for n, day in enumerate((2, 0, 0)):  # backfilled: the later partition first
        made.commit({(1,): Value(10**7 + n, n)}, 10**7 + n, partition=str(days[day]), live=n == 0)
    assert [snapshot_at(made.store, day.end, values="best_known").number for day in days] == [
        3,
        3,
        1,
    ]
    with pytest.raises(
        SnapshotError,
        match=r"nothing to read as of .*: the oldest snapshot that can be read is 3, of partition 2026-01-01T00:00Z/",
    ):
        snapshot_at(made.store, days[0].end - timedelta(microseconds=1), values="best_known")
    requested = made.requested(
        [((1,), day * 86_400 + second) for day in (1, 2, 3) for second in (-1, 0)]
    )
    made.check(requested, [None, *[Value(10**7 + 2, 2)] * 4, Value(10**7, 0)], values="best_known")
    old = [None, Value(10**7 + 2, 2), None, None, None, Value(10**7, 0)]
    made.check(requested, old, max_age_s=86_398, values="best_known")
    made.check(requested, [None] * 6)
    made.check(
        made.requested([((1,), 10**7 - 1), ((1,), 10**7), ((1,), 10**7 + 9)]),
        [None, *[Value(10**7, 0)] * 2],
    )


def test_what_was_refused_or_never_computed_is_not_bridged_beyond_the_ttl(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Days 0, 5 and 6 are good, 1 was refused, 2 rolled back from, 3 has no rows, 4 and from 7 on
    none was computed; a row expires after 30 hours."""
    hour, entity = 3600, ENTITIES["number"]
    made = Made(OfflineStore(tmp_path).view("made"), entity, good_for_s=30 * hour)
    value = {n: Value(10**7 + n, n) for n in range(7)}
    for n in (0, 1, 2, 3, 5, 6):
        day = str(containing("day", START + timedelta(days=n)))
        rows = {} if n == 3 else {(1,): value[n]}
        made.commit(rows, 10**7 + n, partition=day, refused=n == 1, live=False)
    made.mark_bad(3)
    asked = {
        # hours since the beginning → the day whose value it is
        0: None,
        24: 0,
        47: 0,
        48: 0,  # within 30 hours
        54: 0,
        55: None,
        72: None,
        96: None,
        120: None,
        144: 5,
        168: 6,
        191: 6,
        192: 6,
        199: None,
        250: None,
    }
    requested = made.requested([((1,), at * hour) for at in asked])
    expected = [None if n is None else value[n] for n in asked.values()]
    made.check(requested, expected, values="best_known")
    table = get_historical_features(made.store.offline, requested, ["made"], values="best_known")
    (gaps,) = json.loads(table.schema.metadata[b"gaps"]).values()
    assert gaps == {
        "rows": 9,
        "null": 6,
        "partitions": {
            "refused by shape": ["2026-01-02"],
            "test": ["2026-01-03"],
            "not computed": ["2026-01-05", "2026-01-08", "2026-01-10"],
        },
    }
    assert (
        "view 'made': 9 rows ask for partitions without good rows: 6 of them are null, 3 have those"
        " of an earlier partition, within ttl and stale_for; 1 refused by shape (2026-01-02); 1 test"
        in caplog.text
    )
    # none of these rows asks for one of them
    requested = made.requested([((1,), at * hour) for at in (0, 24, 144, 168)])
    table = get_historical_features(made.store.offline, requested, ["made"], values="best_known")
    assert table.schema.metadata is None
    assert read(made.store, at(54 * hour), values="best_known").num_rows == 1
    assert read(made.store, at(55 * hour), values="best_known").num_rows == 0


def test_read_of_what_is_live_and_of_nothing(made: Made) -> None:
    with pytest.raises(SnapshotError, match="view 'made' was never published"):
        read(made.store)
    made.commit({(1,): Value(1, 1)}, 5)
    made.commit({(1,): Value(6, 2)}, 7, live=False)
    assert read(made.store).equals(made.table({(1,): Value(1, 1)}))
    with pytest.raises(
        SnapshotError,
        match=r"nothing to read as of 2026-01-01T00:00:04\+00:00: the oldest snapshot that can be read is 1, which counts from 2026-01-01T00:00:05Z",
    ):
        read(made.store, at(4))
    with pytest.raises(RequestError, match="has no time zone"):
        read(made.store, datetime(2026, 1, 1))


# ---- one row


def log(found: Explanation) -> list[tuple[Any, ...]]:
    return [
        (v.snapshot, v.run, v.features["double"], v.before, v.removed_in, v.live, v.void)
        for v in found.versions
    ]


def test_explain_has_each_version_once_and_what_it_was_before(made: Made) -> None:
    one, two, three = Value(1, 1), Value(3, 5), Value(9, 2)
    made.commit({(1,): one, (2,): one}, 2)
    made.commit({(1,): two, (2,): one}, 4, how="delta")
    made.commit({(1,): two, (2,): one}, 5, how="compact")
    made.commit({(2,): one}, 6, how="delta")
    made.commit({(1,): three, (2,): one}, 10, how="delta", refused=True)
    made.publish(3, 11)
    found = explain(made.store, 1)
    assert (found.view, found.key, found.live, found.rejections) == ("made", "1", 3, [])
    difference = {
        "double": 10.0,
        "half": [2.5, -2.5],
        "tags": ["5", "5"],
        "name": "n5",
        "flag": False,
    }
    assert log(found) == [
        (5, "run5", 4.0, difference, None, False, "refused by shape"),
        (
            2,
            "run2",
            10.0,
            {"double": 2.0, "half": [0.5, -0.5], "tags": ["1"], "name": "n1"},
            4,
            True,
            None,
        ),
        (1, "run1", 2.0, None, None, False, None),
    ]
    assert [(v.computed_at, v.input_hash, v.removed_at) for v in found.versions] == [
        (at(9), 2, None), (at(3), 5, at(6).isoformat()), (at(1), 1, None)
    ]  # fmt: skip
    assert len(explain(made.store, "2").versions) == 1
    body = found.to_json()
    assert (body["versions"][0]["computed_at"], body["versions"][0]["features"]) == (
        "2026-01-01T00:00:09Z",
        three.features(),
    )


def test_explain_finds_the_run_of_a_copied_row_in_the_reports(made: Made) -> None:
    made.commit({(1,): Value(1, 1), (2,): Value(1, 1)}, 2)
    made.commit({(1,): Value(1, 1), (2,): Value(5, 2)}, 6, how="compact")
    (made.store.folder / "manifests" / f"{1:020d}.json").unlink()  # as gc does
    assert log(explain(made.store, 1))[0][:2] == (2, None)
    for run, command, began, ended in (
        ("a", "run", -9, 0),
        ("b", "run", 0, 3),
        ("c", "publish", 0, 3),
        ("d", "run", 4, 7),
    ):
        made.store.runs.write(
            Report(run, "made", command, "published", at(began).isoformat(), at(ended).isoformat())
        )
    assert log(explain(made.store, 1))[0][:2] == (2, "b")
    assert log(explain(made.store, 2))[0][:2] == (2, "d")


def test_explain_finds_a_key_of_several_columns_and_no_other(tmp_path: Path) -> None:
    made = Made(OfflineStore(tmp_path).view("made"), ENTITIES["several"])
    made.commit({key: Value(1, n) for n, key in enumerate(keys_of("several"))}, 2)
    for n, key in enumerate(keys_of("several")):
        assert log(explain(made.store, list(key)))[0][2] == 2.0 * n
    with pytest.raises(RequestError, match="no history of key '77") as caught:
        explain(made.store, ["77"] * len(made.entity))
    assert (caught.value.status, caught.value.code) == (404, "unknown_entity")


def test_explain_of_a_partitioned_view_keeps_the_partitions_apart(made: Made) -> None:
    days = [str(containing("day", START + timedelta(days=day))) for day in range(2)]
    made.commit({(1,): Value(1, 1)}, 2, partition=days[1])
    made.commit({(1,): Value(3, 2), (2,): Value(3, 2)}, 4, partition=days[0])
    made.commit({(2,): Value(3, 2)}, 6, partition=days[0], how="delta")
    found = explain(made.store, 1).versions
    assert [(v.partition, v.snapshot, v.removed_in) for v in found] == [
        (days[1], 1, None),
        (days[0], 2, 3),
    ]


# ---- with real runs


def lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line)


def test_the_command_line_explains(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    for rows in ([(1, 1.0), (2, 2.0), (3, None)], [(1, 5.0), (2, 2.0), (3, None)]):
        project = make_project(rows)
        project.run()
    capsys.readouterr()
    assert project.cli("explain", "numbers", "1") == 0
    said = list(lines(capsys.readouterr().out))
    assert said[0] == "numbers 1: 2 version(s), live in snapshot 2"
    assert said[1].endswith("Z  snapshot 2 (live)")
    assert [line.split()[0] for line in said[2:8]] == [
        "run",
        "model",
        "input",
        "served",
        "double",
        "vector",
    ]
    since, until = (datetime.fromisoformat(ref.since) for ref in project.store.log.publishings())
    assert said[12].startswith(
        f"  served  {since:%Y-%m-%dT%H:%M:%SZ} to {until:%Y-%m-%dT%H:%M:%SZ}"
    )
    assert said[6:8] == [
        "  double  10  (was 2)",
        "  vector  [5, 6, 7, 8] (4)  (was [1, 2, 3, 4] (4))",
    ]
    assert said[8].endswith("Z  snapshot 1 (replaced)")
    assert project.cli("explain", "numbers", "3") == 0
    said = list(lines(capsys.readouterr().out))
    assert said[0] == "numbers 3: 0 version(s), live is snapshot 2, without it"
    assert said[1].startswith("rejected by snapshot 2, stage ")
    assert project.cli("explain", "numbers", "8") == 2
    assert "has no history of key '8'" in capsys.readouterr().err
