"""Samples: exact where a view is small, within bounds where it is large; the same rows however a
snapshot came about; a lost or damaged one is read from its part. Random lists of segments, merges
and assembled ones: tests/jobs/test_segments.py."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.run.judge.feature_figures import figures_of
from precompute.jobs.run.rows import samples
from precompute.jobs.run.rows.samples import Samples, SnapshotSample, key_hashes, write_rows
from precompute.store.disk.record import replace
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.odd_rows import NOT_FINITE, odd_rows
from precompute.store.offline.segment import ALL_HASHES, KILLS, Part, Segment, kills_table
from precompute.store.offline.selection import all_rows
from precompute.store.offline.snapshot import Counts, Snapshot
from precompute.store.offline.view_store import OfflineStore, ViewStore

VIEW = FeatureView(
    "things",
    ("id",),
    (
        Feature("number", "int64"),
        Feature("score", "float64"),
        Feature("label", "string"),
        Feature("vector", "float32", dim=2),
    ),
    ttl_s=1.0,
    stale_for_s=1.0,
)
NIGHT = 10_000


@pytest.fixture
def store(tmp_path: Path) -> ViewStore:
    return OfflineStore(tmp_path).view("things")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample beside each part, of 100 rows of a snapshot."""
    monkeypatch.setattr(samples, "ROW_GROUP_BYTES", 0)
    monkeypatch.setattr(samples, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(samples, "WIDE_ROWS", 100)


def table(keys: Sequence[int], night: int = 0) -> pa.Table:
    """Rows that follow from key and night: of each 50th the vector is all zeros, of each 70th the
    score is not finite."""
    ids = np.asarray(keys, np.int64)
    made = ids * 7 + night * NIGHT
    score = np.where(made % 70 == 0, np.inf, np.sin(made) * 3)
    pairs = np.where((made % 50 == 0)[:, None], 0, np.stack([made % 13 + 1, made % 5], axis=1))
    vector = pa.FixedSizeListArray.from_arrays(pa.array(pairs.astype(np.float32).ravel()), 2)
    return pa.table(
        {
            "id": ids,
            "number": made % 17,
            "score": score,
            "label": pa.array([None if i % 11 == 0 else f"l{i % 23}" for i in made.tolist()]),
            "vector": vector,
            "computed_at": pa.array(made, pa.timestamp("us", "UTC")),
            "input_hash": made,
        }
    )


def parts_of(store: ViewStore, run: str, ids: Sequence[int], night: int, each: int) -> list[Part]:
    """Parts of ``each`` rows of a source with as many rows as ids."""
    return [
        write_rows(
            store, run, f"part-{at:05d}.parquet", table(ids[at : at + each], night), VIEW, 2000
        )
        for at in range(0, len(ids), each)
    ]


def full(
    store: ViewStore, run: str, parts: Sequence[Part], below: Sequence[Segment] = ()
) -> Snapshot:
    rows = sum(part.rows for part in parts)
    segment = Segment(0, run, "recipe", 7, tuple(parts))
    counts = Counts(rows, rows)
    return store.commit(Snapshot(VIEW, run, "m", counts, (segment,), None, "now", None, None))


def delta(
    store: ViewStore, parent: Snapshot, ids: Sequence[int], gone: Sequence[int], night: int
) -> Snapshot:
    """A snapshot over another one with other rows of ``ids``, and without those of ``gone``."""
    places: Mapping[int, tuple[str, int]] = {
        key: (part.path, row) for part in parent.parts for row, key in enumerate(_ids(store, part))
    }
    dead = [*ids, *gone]
    killed = kills_table(
        pa.array([places[key][0] for key in dead]),
        pa.array([places[key][1] for key in dead], pa.int64()),
        pa.array([key in gone for key in dead]),
        {"id": pa.array(dead, pa.int64())},
    )
    run = f"r{night}"
    parts = parts_of(store, run, ids, night, 1000)
    kills = store.write_part(run, KILLS, killed)
    segment = Segment(0, run, "recipe", 7, tuple(parts), kills, removed=len(gone))
    rows = parent.rows - len(gone)
    counts = Counts(rows, len(ids), 0, rows - len(ids), len(gone))
    segments = (*parent.segments, segment)
    return store.commit(Snapshot(VIEW, run, "m", counts, segments, None, "now", None, None))


def _ids(store: ViewStore, part: Part) -> list[int]:
    return pq.read_table(store.folder / part.path, columns=["id"])["id"].to_pylist()


def drawn(store: ViewStore, snapshot: Snapshot) -> SnapshotSample:
    return Samples(store).of(snapshot)


def odd_of(rows: pa.Table) -> dict[str, int]:
    return {kind: len(numbers) for kind, numbers in odd_rows(rows, VIEW).items()}


def test_of_a_small_view_all_is_counted(store: ViewStore) -> None:
    snapshot = full(store, "r", parts_of(store, "r", range(1000), 0, 300))
    assert all(part.sample is None and part.below == ALL_HASHES for part in snapshot.parts)
    later = delta(store, snapshot, range(40, 90), range(500, 520), 1)
    for one in (snapshot, later):
        sample, rows = drawn(store, one), pa.Table.from_batches(list(store.batches(one)))
        order = np.argsort(key_hashes(rows, ["id"]))
        assert sample.rows == rows.take(pa.array(order))
        assert (sample.living, sample.odd) == (one.rows, odd_of(rows))
        assert sample.odd[NOT_FINITE] > 10


def test_of_a_large_view_the_figures_are_near(store: ViewStore) -> None:
    """Of 300,000 narrow rows 37,449 are looked at; shares are within 0.7 %, what is odd exact."""
    snapshot = full(
        store, "r", [write_rows(store, "r", "p.parquet", table(range(300_000)), VIEW, 300_000)]
    )
    (part,) = snapshot.parts
    assert part.sample is not None
    assert part.sample in snapshot.segments[0].files
    sample, rows = drawn(store, snapshot), store.table(snapshot, all_rows(store.layers(snapshot)))
    assert (sample.living, sample.odd) == (300_000, odd_of(rows))
    assert sample.rows.num_rows == part.sample.rows == pytest.approx(2 * 2**20 / 80, rel=0.02)
    near, exact = (figures_of(one, VIEW) for one in (sample.rows, rows))
    for name in ("number.zero", "number.common", "score.negative", "label.null", "vector.zero"):
        assert near[name] == pytest.approx(exact[name], abs=0.007)
    for name in ("score.p50", "score.mean", "vector.norm.p50"):
        assert near[name] == pytest.approx(exact[name], rel=0.02, abs=0.03)


@pytest.mark.usefixtures("small")
def test_deltas_have_the_figures_of_a_run_in_one_go(store: ViewStore) -> None:
    ids = range(2000)
    snapshot = full(store, "r0", parts_of(store, "r0", ids, 0, 700))
    nights = dict.fromkeys(ids, 0)
    for night in (1, 2, 3):
        changed, gone = range(night * 400, night * 400 + 90), range(night * 50, night * 50 + 9)
        snapshot = delta(store, snapshot, changed, gone, night)
        nights |= dict.fromkeys(changed, night)
        nights = {key: last for key, last in nights.items() if key not in gone}
    found = drawn(store, snapshot)
    assert 40 < found.rows.num_rows < 200
    each = ([key for key, last in nights.items() if last == night] for night in range(4))
    whole = pa.concat_tables([table(keys, night) for night, keys in enumerate(each)])
    # in parts of other sizes, as by a faster machine, and one that is read itself
    parts = [
        write_rows(store, "again", f"part-{at}.parquet", whole.slice(at, size), VIEW, 2000)
        for at, size in ((0, 50), (50, 1200), (1250, 2000))
    ]
    parts[0] = replace(parts[0], sample=None)
    again = drawn(store, full(store, "again", parts))
    assert again.rows == found.rows
    for one in (again, found):
        assert (one.living, one.odd) == (whole.num_rows, odd_of(whole))


@pytest.mark.usefixtures("small")
def test_a_list_takes_the_least_threshold_of_its_parts(store: ViewStore) -> None:
    wide = write_rows(store, "r", "a.parquet", table(range(400)), VIEW, 400)
    narrow = write_rows(store, "r", "b.parquet", table(range(400, 3000)), VIEW, 3000)
    assert ALL_HASHES > wide.below > narrow.below
    snapshot = full(store, "r", [wide, narrow])
    sample = drawn(store, snapshot)
    hashes = key_hashes(pa.table({"id": np.arange(3000)}), ["id"])
    expected = np.flatnonzero(hashes < narrow.below)
    assert sample.rows["id"].to_pylist() == expected[np.argsort(hashes[expected])].tolist()
    # of dead parts nothing is asked
    alone = drawn(store, delta(store, snapshot, [], range(400, 3000), 1))
    assert alone.below == wide.below


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("harm", ["a bit", "lost", "cut"])
def test_in_place_of_a_lost_sample_its_part_is_read(
    store: ViewStore, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = full(store, "r", parts_of(store, "r", range(2000), 0, 800))
    whole = drawn(store, snapshot)
    sample = snapshot.parts[1].sample
    assert sample is not None
    path = store.folder / sample.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if harm != "lost":
        path.write_bytes(bytes(data) if harm == "a bit" else bytes(data[:100]))
    with caplog.at_level(logging.WARNING):
        found = drawn(store, snapshot)
    assert (found.rows, found.living, found.odd) == (whole.rows, whole.living, whole.odd)
    assert (path.name in caplog.text) == (harm != "lost")
    # its rows are whole, and who looks at all files tells of it
    store.compare_parts(snapshot)
    with pytest.raises(SnapshotError, match=path.name):
        store.check_parts(snapshot)


def test_keys_of_texts_and_of_several_columns() -> None:
    one = pa.table({"id": ["1", "2"], "day": [3, 4]})
    assert len({*key_hashes(one, ["id"]).tolist(), *key_hashes(one, ["id", "day"]).tolist()}) == 4
    numbers = key_hashes(pa.table({"id": pa.chunked_array([[1], [2, 3]])}), ["id"])
    assert numbers.tolist() == key_hashes(pa.table({"id": [0, 1, 2, 3]}).slice(1), ["id"]).tolist()


def test_a_sample_of_long_texts_has_fewer_rows(
    store: ViewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "ROW_GROUP_BYTES", 0)
    monkeypatch.setattr(samples, "MOST_TEXT_BYTES", 100_000)
    rows = table(range(2000))
    texts = pa.array([f"{i:04}" * 250 for i in range(2000)])
    rows = rows.set_column(rows.schema.get_field_index("label"), "label", texts)
    written = write_rows(store, "r", "part-00000.parquet", rows, VIEW, 2000)
    assert written.sample is not None
    assert written.sample.size_bytes < written.size_bytes / 5
    by_hash = np.sort(key_hashes(rows, ["id"]))
    sample = drawn(store, full(store, "r", [written]))
    # as many as fit, by halves, and all of those whose hash is less
    assert 0 < sample.rows.num_rows <= 100 < 2 * sample.rows.num_rows + 20
    assert sample.hashes.tolist() == by_hash[: sample.rows.num_rows].tolist()
    assert (sample.living, written.below) == (2000, sample.below)
