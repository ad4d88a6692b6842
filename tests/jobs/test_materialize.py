"""Materialize: what a snapshot is on disk, that every row is accounted for, and what becomes of bad
rows and bad runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.engine import runner
from precompute.engine.batches import LONG_S, WINDOW_ROWS
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rows import chunks
from precompute.jobs.run.rows.plan import RunOptions
from precompute.jobs.run.run_view import run_view
from precompute.sources.source import Source
from precompute.store.disk.record import plain
from precompute.store.errors import (
    ConfigError,
    ModelError,
    PrecomputeError,
    RejectedError,
    SnapshotError,
    SourceError,
)
from precompute.store.feature_view import FeatureView
from precompute.store.offline.runs import Journals, Report
from precompute.store.offline.snapshot import Counts, Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.online.codec import schema_tag
from tests.fixtures import MakeProject
from tests.jobs.test_run_all import view as doubled
from tests.models import REFUSED_AT, Doubler
from tests.scene import Scene

NAN = float("nan")


class ShortVectors:
    """Vectors of three numbers, whatever the view declares."""

    def fingerprint(self) -> str:
        return "short"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        return {"double": np.zeros(batch.num_rows), "vector": np.zeros((batch.num_rows, 3))}


def made(project: Scene, view: str = "numbers") -> Snapshot:
    report = project.materialize(view)
    assert (report.status, report.error) == ("committed", None)
    assert report.snapshot is not None
    return project.offline.view(view).snapshot(report.snapshot)


def rejected_of(project: Scene, run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(
        project.root / "numbers" / "data" / run / "rejected.parquet"
    ).to_pylist()
    return found


def refused(project: Scene, error: type[PrecomputeError]) -> Report:
    """The report of a run that must fail; nothing is committed."""
    store = project.store
    before = store.numbers()
    with pytest.raises(error) as caught:
        project.run()
    assert store.numbers() == before
    report = project.report()
    assert report.error == str(caught.value)
    assert report.finished_at > report.started_at
    return report


# ---- on disk


def test_a_snapshot_on_disk_is_what_the_design_says(make_project: MakeProject) -> None:
    project = make_project(
        [(3, 1.5), (1, -2.0), (2, 0.0)], view={"index": {"on": "vector", "metric": "dot"}}
    )
    before = time.time()
    snapshot = made(project)
    root = project.root / "numbers"
    run = snapshot.run
    assert {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} == {
        f"data/{run}/part-00000.parquet",
        f"data/{run}/anchor.parquet",
        "manifests/00000000000000000001.json",
        snapshot.segments[0].record.path,
        f"runs/{run}.json",
        "notes/catalog.jsonl",
        "notes/lease-run.json",
        "notes/.lock",
    }
    part = root / "data" / run / "part-00000.parquet"
    table = pq.read_table(part)
    assert table.schema.remove_metadata() == pa.schema(
        [
            ("id", pa.int64()),
            ("double", pa.float64()),
            ("vector", pa.list_(pa.float32(), 4)),
            ("computed_at", pa.timestamp("us", "UTC")),
            ("input_hash", pa.int64()),
        ]
    )
    columns = table.select(["id", "double", "vector"]).to_pylist()
    assert columns == [
        {"id": i, "double": 2 * x, "vector": [x, x + 1, x + 2, x + 3]}
        for i, x in ((3, 1.5), (1, -2.0), (2, 0.0))
    ]
    assert all(before <= at.timestamp() <= time.time() for at in table["computed_at"].to_pylist())
    with duckdb.connect() as connection:
        sql = f"SELECT id, double, vector[4], computed_at <= now(), input_hash FROM read_parquet('{root}/data/{run}/part-*.parquet') ORDER BY id"
        plain = connection.execute(sql).fetchall()
    assert [row[:4] for row in plain] == [
        (1, -4.0, 1.0, True),
        (2, 0.0, 3.0, True),
        (3, 3.0, 4.5, True),
    ]
    assert len({row[4] for row in plain}) == 3

    text = (root / "manifests" / "00000000000000000001.json").read_text()
    manifest = json.loads(text)
    (path,) = (root / "segments").iterdir()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f"1-{digest[:8]}.json"
    assert manifest["segments"] == [{"name": path.stem, "sha256": digest}]
    segment = json.loads(path.read_text())
    assert segment.pop("recipe") == manifest["recipe"]
    assert segment.pop("schema_tag") == schema_tag(snapshot.view)
    assert segment == {
        "number": 1,
        "run": run,
        "parts": [
            {
                "path": f"data/{run}/part-00000.parquet",
                "rows": 3,
                "size_bytes": part.stat().st_size,
                "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
            }
        ],
        "kills": None,
        "own_kills": 0,
        "removed": 0,
        "members": {},
        "merged": [],
        "weight": 3,
        "format": 3,
    }
    assert manifest["counts"] == {
        "source": 3,
        "written": 3,
        "rejected": 0,
        "unchanged": 0,
        "removed": 0,
        "duplicates": 0,
    }
    assert manifest["number"] == 1
    assert manifest["parent"] is None
    assert manifest["rejected"] is None
    assert manifest["partition"] is None
    assert manifest["renewed_at"] is None
    # some rows, by which the nights to come see a little each night; no night was before
    anchor = root / "data" / run / "anchor.parquet"
    assert (manifest["nights"], manifest["announced"], manifest["anchors"]) == (
        None,
        "",
        [
            {
                "path": f"data/{run}/anchor.parquet",
                "rows": 3,
                "size_bytes": anchor.stat().st_size,
                "sha256": hashlib.sha256(anchor.read_bytes()).hexdigest(),
            }
        ],
    )
    assert (manifest["format"], manifest["fence"]) == (3, 1)
    assert len(manifest["recipe"]) == 64
    assert manifest["content"].startswith(manifest["recipe"] + ":3-")
    assert FeatureView.from_json(manifest["view"]) == project.view("numbers").feature_view()
    assert manifest["view_fingerprint"] == project.view("numbers").feature_view().fingerprint()
    assert len(manifest["model"]) == 64
    assert manifest["input_columns"] == {"x": "double"}
    assert manifest["versions"].keys() >= {"python", "pyarrow", "duckdb"}
    body, _, _ = text.rpartition(',\n "zz_sha256"')
    assert manifest["zz_sha256"] == hashlib.sha256(body.encode()).hexdigest()


def test_many_windows_and_parts_hold_every_row_once_and_in_order(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 7)
    monkeypatch.setattr(chunks, "PART_BYTES", 1000)
    xs = [(i * 37 % 101, float(i)) for i in range(100)]
    project = make_project(
        xs,
        view={"model": {"use": "tests.models:Doubler", "args": {"fail_on": 50, "nan_on": 60}}},
    )
    snapshot = made(project)
    assert len(snapshot.parts) > 3
    assert sum(p.rows for p in snapshot.parts) == snapshot.counts.written == 98
    left = [(i, x) for i, x in xs if x not in (50, 60)]
    rows = project.rows(snapshot.number)
    assert [(r["id"], r["double"]) for r in rows] == [(i, 2 * x) for i, x in left]
    micros = [int(r["computed_at"].timestamp() * 1e6) for r in rows]
    assert abs(min(micros) - (snapshot.computed_at_min or 0)) <= 1
    assert abs(max(micros) - (snapshot.computed_at_max or 0)) <= 1
    assert [r["key"] for r in rejected_of(project, snapshot.run)] == [
        str(i) for i, x in xs if x in (50, 60)
    ]


@pytest.mark.parametrize(
    ("rows", "read"), [([(i, float(i)) for i in range(9000)], 9000), ([("a", 1.0)], 1)]
)
def test_narrow_rows_are_read_in_larger_windows_than_texts(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, rows: Any, read: int
) -> None:
    sizes, largest = [], [0]
    batches = Source.batches

    def reading(source: Source, batch_rows: int) -> Iterator[pa.RecordBatch]:
        sizes.append(batch_rows)
        for batch in batches(source, batch_rows):
            largest.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(Source, "batches", reading)
    assert made(make_project(rows)).rows == len(rows)
    assert (sizes, max(largest)) == ([65_536 if read > 1 else 8192], read)


@pytest.mark.parametrize(
    ("column", "stored"),
    [
        (pa.array([1, 2], pa.uint32()), pa.int64()),
        (pa.array(["1", "2"], pa.large_string()), pa.string()),
    ],
)
def test_key_columns_are_int64_or_string(
    make_project: MakeProject, column: pa.Array, stored: pa.DataType
) -> None:
    project = make_project(pa.table({"id": column, "x": [1.0, 2.0]}))
    snapshot = made(project)
    batch = next(project.offline.view(snapshot.view.name).batches(snapshot))
    assert batch.schema.field("id").type == stored
    assert [str(i) for i in batch.column("id").to_pylist()] == ["1", "2"]


# ---- accounting and bad rows


@pytest.mark.parametrize(
    ("rows", "args", "counts"),
    [
        ([(1, 1.0), (2, 2.0), (1, 1.0), (1, 1.0)], {}, Counts(2, 2, duplicates=2)),
        ([(1, 1.0), (2, None), (3, 3.0), (4, NAN)], {}, Counts(4, 2, rejected=2)),
        (
            [(1, 1.0), (2, 7.0), (3, 8.0), (4, 9.0)],
            {"fail_on": 7, "nan_on": 9},
            Counts(4, 2, rejected=2),
        ),
        (
            [(1, 1.0), (None, 7.0), (2, 7.0), (1, 1.0), (3, 3.0), (4, 4.0)],
            {"fail_on": 7},
            Counts(5, 3, rejected=2, duplicates=1),
        ),
    ],
)
def test_every_row_is_written_or_rejected(
    make_project: MakeProject, rows: Any, args: dict[str, Any], counts: Counts
) -> None:
    table = pa.table(
        {
            "id": pa.array([i for i, _ in rows], pa.int64()),
            "x": pa.array([x for _, x in rows], pa.float64()),
        }
    )
    project = make_project(table, view={"model": {"use": "tests.models:Doubler", "args": args}})
    snapshot = made(project)
    assert snapshot.counts == counts
    assert project.report().counts == plain(counts)
    assert len(project.rows(snapshot.number)) == counts.written
    if counts.rejected:
        assert snapshot.rejected is not None
        assert snapshot.rejected.rows == len(rejected_of(project, snapshot.run)) == counts.rejected
    else:
        assert snapshot.rejected is None


def test_rejected_rows_are_stored_with_key_stage_error_and_hash(make_project: MakeProject) -> None:
    keys = ["ok", "raises", "nan", None, "", "k" * 512, "a\0b", "é" * 256, "k" * 511, "fine"]
    xs = [1.0, 7.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    args = {"fail_on": 7, "nan_on": 9}
    project = make_project(
        pa.table({"id": keys, "x": xs}),
        view={"model": {"use": "tests.models:Doubler", "args": args}, "max_rejected": 0.9},
    )
    snapshot = made(project)
    rejected = rejected_of(project, snapshot.run)
    assert [(r["key"], r["stage"], r["error"]) for r in rejected] == [
        (None, "key", "null key"),
        ("", "key", "empty key"),
        ("k" * 512, "key", "key longer than 511 bytes"),
        ("é" * 256, "key", "key longer than 511 bytes"),
        ("a\0b", "key", "key with a NUL byte"),
        ("raises", "model", f"ValueError: cannot take 7{REFUSED_AT}"),
        ("nan", "output", "double is not finite"),
    ]
    hashes = {r["id"]: r["input_hash"] for r in project.rows(snapshot.number)}
    assert set(hashes) == {"ok", "k" * 511, "fine"}
    assert {r["input_hash"] for r in rejected[:5]} == {hashes["ok"]}
    assert {r["attempts"] for r in rejected} == {1}


@pytest.mark.parametrize(
    ("allowed", "bad", "good", "passes"),
    [
        (0.29, 29, 71, True),
        (0.29, 30, 70, False),
        (0.0, 1, 99, False),
        (1.0, 2, 1, True),
    ],
)
def test_max_rejected_is_the_share_that_still_passes(
    make_project: MakeProject, allowed: float, bad: int, good: int, passes: bool
) -> None:
    rows = [(i, 7.0) for i in range(bad)] + [(bad + i, 1.0) for i in range(good)]
    view = {
        "model": {"use": "tests.models:Doubler", "args": {"fail_on": 7}},
        "max_rejected": allowed,
    }
    project = make_project(rows, view=view)
    if passes:
        assert made(project).counts == Counts(bad + good, good, rejected=bad)
    else:
        assert refused(project, RejectedError).status == "rejected"


def test_all_rows_rejected_is_a_refusal_even_where_all_are_allowed(
    make_project: MakeProject,
) -> None:
    args = {"nan_on": 7}
    project = make_project(
        [(1, 7.0), (2, 7.0)],
        view={"model": {"use": "tests.models:Doubler", "args": args}, "max_rejected": 1.0},
    )
    report = refused(project, RejectedError)
    assert "all 2 rows" in (report.error or "")
    assert len(rejected_of(project, report.run)) == 2


# ---- bad runs


@pytest.mark.parametrize(
    ("rows", "view", "error", "parts"),
    [
        ([(1, 1.0), (1, 2.0)], {}, SourceError, ["1 (2 rows)", "make (id) unique"]),
        (
            pa.table({"id": pa.array([], pa.int64()), "x": pa.array([], pa.float64())}),
            {},
            SourceError,
            ["'numbers'", "no rows"],
        ),
        (
            pa.table({"id": [1.5], "x": [1.0]}),
            {},
            ConfigError,
            ["key column 'id' is double", "CAST(id AS VARCHAR)"],
        ),
        (pa.table({"other": [1], "x": [1.0]}), {}, ConfigError, ["no column 'id'", "other, x"]),
        (
            None,
            {"source": {"sql": "SELECT nope FROM read_parquet('${data}/data.parquet')"}},
            ConfigError,
            ["numbers.yaml", "nope"],
        ),
        (
            None,
            {"source": {"sql": "SELECT id, error('boom') AS x FROM range(2) t(id)"}},
            SourceError,
            ["boom"],
        ),
        (
            None,
            {"model": {"use": "tests.jobs.test_materialize:ShortVectors"}},
            ModelError,
            ["'vector'", "4", "[1, 3]"],
        ),
        (
            None,
            {"features": {"triple": {"dtype": "float32"}}},
            ModelError,
            ["'triple'", "double, vector"],
        ),
        (None, {"model": {"use": "tests.models:Nope"}}, ConfigError, ["numbers.yaml", "Nope"]),
        (
            None,
            {"model": {"use": "tests.models:Doubler", "args": {"dim": {"sql": "SELECT nope"}}}},
            ConfigError,
            ["numbers.yaml", "dim", "nope"],
        ),
        (
            None,
            {"source": {"sql": "SELECT id, x FROM live.numbers"}},
            SourceError,
            ["live.numbers", "never published"],
        ),
    ],
)
def test_a_run_that_cannot_work_fails_in_words(
    make_project: MakeProject,
    rows: Any,
    view: dict[str, Any],
    error: type[PrecomputeError],
    parts: list[str],
) -> None:
    report = refused(make_project([(1, 1.0)] if rows is None else rows, view=view), error)
    assert report.status == "failed"
    for part in parts:
        assert part in (report.error or "")


def test_a_count_that_does_not_add_up_is_not_committed(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project([(1, 1.0), (2, 2.0)])
    load = Source.load
    monkeypatch.setattr(Source, "load", lambda source, within: load(source, within) + 1)
    report = refused(project, SnapshotError)
    assert "3 rows came from the source but 2 are accounted for" in (report.error or "")


# ---- views that read views


def test_a_view_reads_the_live_snapshot_of_another_and_says_which(
    make_project: MakeProject,
) -> None:
    project = make_project([(1, 1.0), (2, 2.0)], views={"sums": doubled("numbers")})
    project.run()
    made(make_project([(1, 100.0)]))  # newer, but not live
    snapshot = made(project, "sums")
    assert snapshot.inputs == {"numbers": 1}
    assert [(r["id"], r["double"]) for r in project.rows(snapshot.number, "sums")] == [
        (1, 4.0),
        (2, 8.0),
    ]


# ---- only what changed is computed

MANY = [(i, float(i)) for i in range(40)]


class Calls:
    """Counts the rows every model of a test was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        original = Doubler.compute

        def counted(model: Doubler, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
            self.rows += batch.num_rows
            return original(model, batch)

        monkeypatch.setattr(Doubler, "compute", counted)

    def take(self) -> int:
        """Rows since the last time."""
        rows, self.rows = self.rows, 0
        return rows


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def built(project: Scene, status: str = "committed", **how: Any) -> Snapshot:
    report = project.materialize(**how)
    assert (report.status, report.error) == (status, None)
    assert report.snapshot is not None
    store = project.store
    snapshot = store.snapshot(report.snapshot)
    store.check_parts(snapshot)
    return snapshot


def test_a_run_over_unchanged_rows_computes_and_commits_nothing(
    make_project: MakeProject, calls: Calls
) -> None:
    project = make_project([*MANY, (99, None)])
    first = built(project)
    assert calls.take() == 41
    folders = [project.root / "numbers" / name for name in ("data", "manifests")]
    before = {
        path: path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    }
    # a part, two files of the rejected row, rows for the nights to come, and the manifest
    assert len(before) == 5
    for rows in ([*MANY, (99, None)], [(99, None), *MANY[::-1]], [*MANY, *MANY, (99, None)]):
        assert built(make_project(rows), "current") == first
        assert calls.take() == 0
        report = project.report()
        assert report.counts == {
            "source": 41,
            "written": 0,
            "rejected": 1,
            "unchanged": 40,
            "removed": 0,
            "duplicates": 0,
        }
        assert (report.plan or "").startswith("nothing to do: 0 of 41 rows to compute (")
    assert {
        path: path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    } == before
    assert project.numbers() == [1]


def test_changed_rows_make_a_delta_and_the_others_cost_no_inference(
    make_project: MakeProject, calls: Calls
) -> None:
    first = built(make_project(MANY))
    calls.take()
    changed = [(i, 100.0 if i == 7 else x) for i, x in MANY if i not in (3, 39)] + [(50, 5.0)]
    project = make_project(changed)
    second = built(project)
    assert calls.take() == 2
    assert (second.number, second.kind, second.parent) == (2, "delta", 1)
    assert second.counts == Counts(source=39, written=2, unchanged=37, removed=2)
    assert second.segments[:1] == first.segments
    own = second.segments[1]
    assert (own, own.rows, own.removed, own.own_kills, own.weight) == (second.own, 2, 2, 0, 5)
    assert project.doubles(second.number) == {i: 2 * x for i, x in changed}
    assert project.doubles(first.number) == {i: 2 * x for i, x in MANY}
    assert own.kills is not None
    assert own.kills.path == f"data/{second.run}/kills.parquet"
    found = pq.read_table(project.root / "numbers" / own.kills.path).to_pylist()
    path = first.parts[0].path
    assert found == [
        {"part": path, "row": 3, "removed": True, "key_id": 3},
        {"part": path, "row": 7, "removed": False, "key_id": None},
        {"part": path, "row": 39, "removed": True, "key_id": 39},
    ]
    assert (second.recipe, second.model) == (first.recipe, first.model)
    assert second.content != first.content
    assert (second.computed_at_min, second.computed_at_max or 0) > (
        first.computed_at_min,
        first.computed_at_max or 0,
    )
    assert second.renewed_at == project.report().read_at_us


@pytest.mark.parametrize(
    "view",
    [
        {"ttl": "2h"},
        {"fallback": {"enabled": True}, "gates": {"parity": None}},
    ],
)
def test_an_edited_view_takes_effect_though_no_row_is_computed(
    make_project: MakeProject, calls: Calls, view: dict[str, Any]
) -> None:
    built(make_project(MANY))
    calls.take()
    project = make_project(MANY, view=view)
    snapshot = built(project)
    assert snapshot.view == project.view("numbers").feature_view()
    assert (calls.take(), snapshot.counts) == (0, Counts(40, 0, unchanged=40))
    assert project.doubles(snapshot.number) == {i: 2 * x for i, x in MANY}
    assert built(project, "current") == snapshot


def test_rejected_rows_of_before_count_against_the_threshold(make_project: MakeProject) -> None:
    view = {
        "model": {"use": "tests.models:Doubler", "args": {"fail_on": 7}},
        "max_rejected": 0.05,
    }
    rows = [(i, 7.0 if i < 2 else float(i + 10)) for i in range(40)]
    built(make_project(rows, view=view))
    rows[5] = (5, 7.0)
    project = make_project(rows, view=view)
    report = refused(project, RejectedError)
    assert "3 rows rejected so far, 2 allowed" in (report.error or "")


# ---- chunks of interrupted runs


def interrupted(project: Scene, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """A run that ends without a word once it has journaled so many chunks."""
    original = Journals.add
    noted = 0

    def ending(*arguments: Any) -> None:
        nonlocal noted
        original(*arguments)
        noted += 1
        if noted == chunks:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journals, "add", ending)
        with pytest.raises(KeyboardInterrupt):
            project.materialize()
    assert noted == chunks


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 5)
    monkeypatch.setattr(chunks, "PART_BYTES", 1)


class Counting(Silent):
    def __init__(self) -> None:
        self.advances: list[int] = []

    def advance(self, rows: int, retried: int = 0) -> None:
        self.advances.append(rows)


def test_a_killed_run_loses_seconds_of_work_however_slow_the_model(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    """One window holds all rows, and every row takes longer than a piece and a chunk may."""
    assert len(MANY) < WINDOW_ROWS
    monkeypatch.setattr(runner, "HAND_ON_S", 0.0)
    monkeypatch.setattr(runner, "BATCH_S", 1e-12)
    monkeypatch.setattr(runner, "START_ROWS", 2)
    monkeypatch.setattr(chunks, "CHUNK_S", 0.0)
    project = make_project(MANY)
    interrupted(project, monkeypatch, 12)
    calls.take()
    progress = Counting()
    run_view(project, "numbers", progress, RunOptions(command="materialize"))
    assert 12 <= project.report().resumed <= 24
    assert calls.take() == 40 - project.report().resumed
    assert sum(progress.advances) == 40 - project.report().resumed
    assert max(progress.advances) <= 2
    snapshot = Standing(project.store).newest()
    assert snapshot is not None
    assert project.doubles(snapshot.number) == {i: 2 * x for i, x in MANY}


def test_what_a_kill_costs_is_less_than_half_a_minute() -> None:
    """A chunk; a piece gathered, one ready and one in the model; a batch, for once as long as any
    may take."""
    assert chunks.CHUNK_S + 3 * runner.HAND_ON_S + LONG_S <= 30


def test_pieces_of_windows_are_written_in_the_sources_order(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "HAND_ON_S", 0.0)
    rows = [(i, float(1 + i * 7 % 40)) for i in range(40)]
    project = make_project(
        rows, view={"model": {"use": "tests.jobs.test_materialize:Dear", "args": {}}}
    )
    assert [row["id"] for row in project.rows(made(project).number)] == [i for i, _ in rows]


class Dear(Doubler):
    """Row x costs x."""

    max_cost = 40

    def costs(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        return np.asarray(batch.column("x")).astype(np.int64)


@pytest.mark.usefixtures("small_chunks")
def test_rows_changed_since_the_interruption_are_computed_again(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    interrupted(make_project(MANY), monkeypatch, 3)
    calls.take()
    changed = [(i, x + 100 if i in (0, 1, 2, 3, 4, 6) else x) for i, x in MANY if i != 8]
    project = make_project(changed)
    snapshot = built(project)
    assert calls.take() == 39 - 8
    (segment,) = snapshot.segments
    assert (snapshot.counts, segment.own_kills) == (Counts(39, 39), 2)
    assert project.report().resumed == 8
    assert project.doubles(snapshot.number) == {i: 2 * x for i, x in changed}
    assert (
        len([part for part in snapshot.parts if snapshot.run not in part.path]) == 2
    )  # no row of the first chunk was of use
