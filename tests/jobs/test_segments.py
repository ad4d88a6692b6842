"""Random histories of segments against dictionaries: runs, removals, rows that come back, merges,
going back to an earlier list, all partitions assembled, lost records. Of every snapshot the rows
are right, however they are read: by our reader, by one statement of DuckDB, by a few lines of
Python, segment over segment, and by an online store that loads what it lacks of each list.

``RANDOM_SNAPSHOTS=2500 pytest --timeout=0 tests/jobs/test_segments.py`` makes 10⁴.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.publisher import Publisher
from precompute.jobs.run.report import reporting_run
from precompute.jobs.run.rows import plan, samples
from precompute.jobs.run.rows.merging import assembled_draft, merged
from precompute.jobs.run.rows.plan import segments_that_stay
from precompute.jobs.run.rows.samples import Samples, key_hashes, write_rows
from precompute.store.account.checker import check_live
from precompute.store.disk.lease import take
from precompute.store.disk.record import replace
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.history.changes import Changes
from precompute.store.offline.log import PUBLISH_LEASE
from precompute.store.offline.segment import KILLS, Part, Segment, kills_table
from precompute.store.offline.snapshot import Counts, Snapshot
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online.codec import HEADER_BYTES, RowCodec, schema_tag
from precompute.store.online.online_store import OnlineStore
from precompute.store.online.table_store import TableStore

SNAPSHOTS = int(os.environ.get("RANDOM_SNAPSHOTS", "60"))
VIEW = FeatureView("made", ("id",), (Feature("x", "float64"),), ttl_s=1.0, stale_for_s=1.0)
TAG = schema_tag(VIEW)
PARTITIONS = [f"2026-01-0{day}T00:00:00Z/2026-01-0{day + 1}T00:00:00Z" for day in (1, 2, 3)]
KEYS = 40

Rows = dict[int, float]
Place = tuple[str, int]
"""Path of a part, and number of a row."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of a few rows beside each part."""
    monkeypatch.setattr(samples, "ROW_GROUP_BYTES", 0)
    monkeypatch.setattr(samples, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(samples, "WIDE_ROWS", 16)


class World:
    """A view's folder, and what each of its snapshots holds."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.store = random.Random(seed), OfflineStore(folder).view("made")
        self.rows: dict[int, Rows] = {}
        self.last: dict[str | None, list[Snapshot]] = {}
        self.clock, self.connection, self.sampled = 0, duckdb.connect(), 0
        self._parts: dict[str, list[dict[str, float]]] = {}
        self._kills: dict[str, list[dict[str, object]]] = {}

    # ---- what readers that are not ours see

    def part(self, part: Part) -> list[dict[str, float]]:
        path = self.store.folder / part.path
        if part.path not in self._parts:
            self._parts[part.path] = pq.read_table(path).to_pylist()
        return self._parts[part.path]

    def kills(self, segment: Segment) -> list[dict[str, object]]:
        if segment.kills is None:
            return []
        if segment.kills.path not in self._kills:
            path = self.store.folder / segment.kills.path
            self._kills[segment.kills.path] = pq.read_table(path).to_pylist()
        return self._kills[segment.kills.path]

    def places(self, snapshot: Snapshot) -> dict[int, Place]:
        """Key → where its row is."""
        dead = {
            (line["part"], line["row"]) for one in snapshot.segments for line in self.kills(one)
        }
        found = [
            (int(row["id"]), (part.path, number))
            for part in snapshot.parts
            for number, row in enumerate(self.part(part))
            if (part.path, number) not in dead
        ]
        assert len(dict(found)) == len(found)
        return dict(found)

    def by_duckdb(self, snapshot: Snapshot) -> Rows:
        parts = [str(self.store.folder / part.path) for part in snapshot.parts]
        kills = [str(self.store.folder / part.path) for part in snapshot.kills]
        if not parts:
            return {}
        sql = "SELECT r.id, r.x FROM read_parquet(?) r" + (
            f" ANTI JOIN read_parquet(?) k ON r.filename = '{self.store.folder}/' || k.part"
            " AND r.file_row_number = k.row"
            if kills
            else ""
        )
        found = self.connection.execute(sql, [parts, kills][: 1 + bool(kills)])
        return dict(found.fetchall())

    def online(self, snapshot: Snapshot) -> Rows:
        """Segment over segment: each one's content is what it was when it was made."""
        answers: Rows = {}
        for segment in snapshot.segments:
            lines = self.kills(segment)
            own = {part.path for part in segment.parts}
            dead = {(line["part"], line["row"]) for line in lines if line["part"] in own}
            gone = [line["key_id"] for line in lines if line["removed"]]
            assert len(set(gone)) == len(gone) == segment.removed
            assert sum(line["part"] in own for line in lines) == segment.own_kills
            assert all(line["removed"] or line["key_id"] is None for line in lines)
            assert all(line["removed"] for line in lines if line["part"] is None)
            order = [(line["part"] or "", line["row"] or 0) for line in lines]
            assert order == sorted(order)
            rows = {
                int(row["id"]): row["x"]
                for part in segment.parts
                for number, row in enumerate(self.part(part))
                if (part.path, number) not in dead
            }
            assert rows.keys().isdisjoint(gone)
            answers = {key: x for key, x in answers.items() if key not in gone} | rows
        return answers

    def check(self, snapshot: Snapshot) -> None:
        rows = self.rows[snapshot.number]
        read = self.store.snapshot(snapshot.number)
        assert read == snapshot
        ours = [row for batch in self.store.batches(read) for row in batch.to_pylist()]
        assert {row["id"]: row["x"] for row in ours} == rows
        assert len(ours) == len(rows) == read.rows
        places = self.places(read)
        assert places.keys() == rows.keys()
        assert self.online(read) == rows
        assert self.by_duckdb(read) == rows
        assert len(read.segments) <= 1 + plan.MOST_DELTAS
        if read.number % 4 == 0:
            self.check_sample(read, rows)
        other = self.store.snapshot(self.random.choice(sorted(self.rows)))
        changes = Changes(self.store, other, read)
        after = self.rows[other.number]
        new = [row for batch in changes.batches() for row in batch.to_pylist()]
        assert len(new) == changes.rows
        gone = set(changes.removed.to_pylist())
        after = {key: x for key, x in after.items() if str(key) not in gone}
        assert after | {row["id"]: row["x"] for row in new} == rows

    def check_sample(self, snapshot: Snapshot, rows: Rows) -> None:
        """It has the living rows of all keys below its threshold."""
        sample = Samples(self.store).of(snapshot)
        hashes = key_hashes(pa.table({"id": pa.array([*rows], pa.int64())}), ["id"])
        drawn = [key for key, h in zip(rows, hashes.tolist(), strict=True) if h < sample.below]
        assert {row["id"]: row["x"] for row in sample.rows.to_pylist()} == {
            k: rows[k] for k in drawn
        }
        assert sample.living == len(rows)
        assert len(sample.rows) == len(drawn)
        self.sampled += len(drawn)

    # ---- what happens

    def newest(self, partition: str | None) -> Snapshot | None:
        """What a run builds on: the last one, or an earlier one that was gone back to."""
        snapshots = self.last.get(partition, [])
        if len(snapshots) > 1 and self.random.random() < 0.15:
            del snapshots[self.random.randrange(1, len(snapshots)) :]
        return snapshots[-1] if snapshots else None

    def run(self, partition: str | None) -> Snapshot:
        random, self.clock = self.random, self.clock + 1
        parent = None if random.random() < 0.03 else self.newest(partition)
        before = {} if parent is None else self.rows[parent.number]
        places = {} if parent is None else self.places(parent)
        few = random.choice([1, 2, 4, 8, 30])
        keys = range(KEYS)
        new = {
            key: float(self.clock * KEYS + key)
            for key in random.sample(keys, random.randint(0, few))
        }
        if parent is None:
            new |= {key: float(self.clock * KEYS + key) for key in keys if random.random() < 0.8}
        left = [key for key in before if key not in new and random.random() < few / 100]
        # what an interrupted run had computed, of which only some is of use
        useless = random.sample(keys, random.choice([0, 0, 0, 2]))
        name = f"r{self.clock}"
        parts, lines = list[Part](), list[tuple[str, int, bool, int]]()
        listed = [(key, x, True) for key, x in new.items()] + [
            (key, -1.0, False) for key in useless
        ]
        random.shuffle(listed)
        for number in range(0, len(listed), 7):
            chunk = listed[number : number + 7]
            table = self.table({i: (key, x) for i, (key, x, _) in enumerate(chunk)})
            most = random.choice([50, 200])
            part = write_rows(self.store, name, f"part-{number:05d}.parquet", table, VIEW, most)
            parts.append(part)
            lines += [
                (part.path, i, False, key) for i, (key, _, used) in enumerate(chunk) if not used
            ]
        own_kills = len(lines)
        lines += [(*places[key], key in left, key) for key in (*new, *left) if key in places]
        segment = Segment(
            0, name, "recipe", TAG, tuple(parts), own_kills=own_kills, removed=len(left)
        )
        if lines:
            segment = replace(segment, kills=self.store.write_part(name, KILLS, self.lines(lines)))
        rows = {key: x for key, x in before.items() if key not in left} | new
        stays = len(set(before) - set(left) - set(new))
        below = () if parent is None else parent.segments
        counts = Counts(len(rows), len(new), unchanged=stays, removed=len(left))
        draft = self.draft(name, counts, (*below, segment), partition)
        if parent is not None and not parts and not lines:
            draft = replace(draft, segments=below)
        elif parent is None and not parts:
            empty = self.store.write_part(name, "part-00000.parquet", self.table({}))
            draft = replace(draft, segments=(replace(segment, parts=(empty,)),))
        if parent is not None:
            draft = merged(self.store, draft, segments_that_stay(below, segment.weight, TAG))
        snapshot = self.store.commit(draft)
        return self.noted(snapshot, rows, partition)

    def assemble(self) -> Snapshot | None:
        self.clock += 1
        members = {}
        for partition in PARTITIONS:
            if (newest := self.newest(partition)) is not None:
                members[partition] = newest
        if not members:
            return None
        live = self.newest("all")
        draft = assembled_draft(self.store, f"r{self.clock}", live, members, 256)
        rows: Rows = {}
        for partition in sorted(members):
            rows |= self.rows[members[partition].number]
        return self.noted(self.store.commit(draft), rows, "all")

    def noted(self, snapshot: Snapshot, rows: Rows, partition: str | None) -> Snapshot:
        self.rows[snapshot.number] = rows
        self.last.setdefault(partition, []).append(snapshot)
        return snapshot

    @staticmethod
    def draft(
        run: str, counts: Counts, segments: tuple[Segment, ...], partition: str | None
    ) -> Snapshot:
        return Snapshot(
            VIEW, run, "model", counts, segments, None, "now", None, None, partition=partition
        )

    @staticmethod
    def table(rows: Mapping[int, tuple[int, float]]) -> pa.Table:
        # a row's time and hash say which value it is
        keys, xs = [key for key, _ in rows.values()], [x for _, x in rows.values()]
        times = pa.array([int(x) for x in xs], pa.timestamp("us", "UTC"))
        columns = [pa.array(keys, pa.int64()), pa.array(xs, pa.float64()), times]
        hashes = pa.array([int(x) for x in xs], pa.int64())
        names = ["id", "x", "computed_at", "input_hash"]
        return pa.Table.from_arrays([*columns, hashes], names=names)

    @staticmethod
    def lines(lines: list[tuple[str, int, bool, int]]) -> pa.Table:
        part, row, removed, key = zip(*lines, strict=True)
        keys = {"id": pa.array(key, pa.int64())}
        return kills_table(pa.array(part), pa.array(row, pa.int64()), pa.array(removed), keys)


class Served:
    """A world's snapshots in an online store: published, gone back to, lost, loaded again.

    Args:
        world: whose they are.
        online: where they are served from.
        lose: loses, or damages, rows of a segment.
        contents: what the store holds of a segment.
    """

    def __init__(
        self,
        world: World,
        online: OnlineStore,
        lose: Callable[[str], None],
        contents: Callable[[str], bytes],
    ) -> None:
        self._world, self._online, self._lose, self._contents = world, online, lose, contents
        self.bytes: dict[str, bytes] = {}
        # another than the world's, whose history is what it is whoever reads
        self.random = random.Random(len(world.rows))
        self.loaded: list[str] = []
        """Names of the segments, each as often as it was loaded."""
        self.most = 0
        load = online.load

        def noted(view: str, segment: Any, *rows: Any) -> int:
            self.loaded.append(segment.name)
            return load(view, segment, *rows)

        setattr(online, "load", noted)  # noqa: B010

    def publish(self, snapshot: Snapshot, *, reload: bool = False) -> None:
        """Publish a snapshot; every key is answered as it says, by segments whose bytes are what
        they ever were."""
        store, before = self._world.store, self._online.live("made")
        there = {segment.name for segment in self._online.segments("made")}
        shared = [] if before is None else [n for n in before.segments if n in snapshot.names]
        lost = self.random.choice([*shared, *[""] * 12])
        if lost:
            self._lose(lost)
        first = len(self.loaded)
        with (
            take(store.leases, PUBLISH_LEASE, "publish") as lease,
            reporting_run(store, "publish") as report,
        ):
            found = check_live(store, self._online, share=1.0, publishing=True) if lost else None
            publisher = Publisher(store, self._online, report, Silent(), lease)
            publisher.publish(snapshot.number, reload=reload, found=found)
        wanted = {*snapshot.names} - (set() if reload else there - {lost})
        loaded = self.loaded[first:]
        assert len(loaded) == len({*loaded})
        # a damaged index of one may answer for a key of another, which is loaded, too, then
        also = {*snapshot.names} if lost else set()
        assert wanted <= {*loaded} <= wanted | also
        pointer = self._online.live("made")
        assert pointer is not None
        assert (pointer.snapshot, pointer.segments) == (snapshot.number, snapshot.names)
        keys = [b"%d" % key for key in range(KEYS)]
        read = self._online.read("made", keys)
        assert read is not None
        codec = RowCodec(VIEW)
        rows = {
            key: codec.decode_one(value)[1]["x"]
            for key, value in enumerate(read[1].values)
            if value is not None and len(value) > HEADER_BYTES
        }
        assert rows == self._world.rows[snapshot.number]
        for name in snapshot.names:
            contents = self._contents(name)
            assert self.bytes.setdefault(name, contents) == contents
        self.most = max(self.most, len(self._online.segments("made")))

    def step(self, snapshot: Snapshot) -> None:
        """Publish a new snapshot, or any earlier one, or what is live again."""
        random, world = self.random, self._world
        if random.random() < 0.2:
            snapshot = world.store.snapshot(random.choice(sorted(world.rows)))
        self.publish(snapshot, reload=random.random() < 0.1)

    def check(self) -> None:
        """Most segments were loaded once, and some again."""
        again = len(self.loaded) - len(set(self.loaded))
        assert 0 < again < len(self.loaded) / 2
        assert self.most > 5


def served_from_tables(world: World, folder: Path) -> Served:
    """From table files, which are gone at times, or have another bit."""
    store, chance = TableStore(folder), random.Random(7)

    def path(name: str) -> Path:
        return folder / "made" / f"{name}.table"

    def lose(name: str) -> None:
        if chance.random() < 0.5:
            path(name).unlink()
            return
        data = bytearray(path(name).read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        # open files stay as they are
        path(name).unlink()
        path(name).write_bytes(data)

    return Served(world, store, lose, lambda name: path(name).read_bytes())


@pytest.mark.parametrize("seed", range(2))
def test_a_view_without_partitions(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    lists, served = set(), served_from_tables(world, tmp_path / "online")
    for number in range(SNAPSHOTS):
        snapshot = world.run(None)
        world.check(snapshot)
        lists.add(len(snapshot.segments))
        if number % 3 == 0:
            served.step(snapshot)
    served.check()
    for number in world.rows:
        world.check(world.store.snapshot(number))
    assert lists == {1, 2, 3, 4, 5}
    assert world.sampled


@pytest.mark.parametrize("seed", range(2))
def test_partitions_and_all_of_them_assembled(tmp_path: Path, seed: int) -> None:
    world, lists, removed = World(tmp_path, seed), set(), 0
    served = served_from_tables(world, tmp_path / "online")
    for _ in range(SNAPSHOTS // 2):
        world.check(world.run(world.random.choice(PARTITIONS)))
        assembled = world.assemble()
        if assembled is not None:
            world.check(assembled)
            if assembled.number % 3 == 0:
                served.step(assembled)
            lists.add(len(assembled.segments))
            removed += sum(segment.removed for segment in assembled.segments)
    assert lists >= {1, 2, 3}
    assert removed
    assert world.sampled
