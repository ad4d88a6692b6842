"""The fallback behind a miss: the live snapshot's own SQL, inputs and model, or nothing."""

from __future__ import annotations

import base64
import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.engine.microbatch import GROW_BY, longest_s
from precompute.jobs.serve.fallback import ViewFallback, row_hash
from precompute.jobs.serve.live_view import Opener
from precompute.jobs.serve.lookup_worker import Warmer
from precompute.jobs.serve.processes import Watch
from precompute.model import digest
from precompute.sources.source import Source
from precompute.store.answers.answer import Answer
from precompute.store.answers.fallback import CLIENT, Computed, Miss
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import ModelError, SourceError
from precompute.store.online.miss_cache import MissCacheFile, MissCacheLimits, input_names
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason
from precompute.store.wire.lookup_options import LookupOptions
from tests.fixtures import MakeProject
from tests.models import Counting, Doubler
from tests.scene import Scene, values_of
from tests.server import eventually

FALLBACK = {"fallback": {"enabled": True, "deadline": "20s"}}
HERE = "tests.jobs.test_fallback"


class Size:
    """How many bytes ``raw`` has."""

    def fingerprint(self) -> str:
        return "size"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        return {"double": [float(len(value)) for value in batch.column("raw").to_pylist()]}


class Everything:
    """One feature of each kind, some of them null; what the neighbours in the batch are must not
    show."""

    def fingerprint(self) -> str:
        return "everything 1"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray | pa.Array]:
        x = batch.column("x").to_pylist()
        return {
            "whole": pa.array([None if v % 3 == 0 else int(v) for v in x], pa.int64()),
            "flag": pa.array([v > 2 for v in x]),
            "text": pa.array([None if v % 4 == 0 else "é" * int(v) for v in x]),
            "half": np.array([[v / 3, -v] for v in x], np.float16),
            "words": pa.array([["", "ü"] * (int(v) % 3) for v in x], pa.list_(pa.string())),
            "ids": pa.array(
                [None if v == 5 else list(range(int(v))) for v in x], pa.list_(pa.int32())
            ),
        }


EVERYTHING = {
    "model": {"use": f"{HERE}:Everything"},
    "features": {
        "whole": {"dtype": "int64"},
        "flag": {"dtype": "bool"},
        "text": {"dtype": "string"},
        "half": {"dtype": "float16", "dim": 2},
        "words": {"dtype": "string", "max_items": 4},
        "ids": {"dtype": "int32", "max_items": 20},
    },
}


class Scaled:
    """``double`` = x times the number in a file, its weights.

    Args:
        path: the file.
        fail: raise this from ``compute``: ``SystemExit``, ``MemoryError``, or what says that a GPU
            is ``lost``.
    """

    made = 0

    def __init__(self, path: str, fail: str = "") -> None:
        self._weights, self._fail, self._path = float(Path(path).read_text()), fail, path
        Scaled.made += 1

    def fingerprint(self) -> str:
        return f"scaled {self._weights}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        x = np.asarray(batch.column("x"))
        if self._fail and (x == 13).any():
            raise {
                "SystemExit": SystemExit("13"),
                "MemoryError": MemoryError("13"),
                "lost": RuntimeError("CUDA error: device-side assert triggered"),
            }[self._fail]
        return {"double": self._weights * x}


class Reread(Scaled):
    """Its fingerprint reads the file when it is requested, as ``digest(self.path)`` does. A file
    ``….next`` takes its place once it was loaded."""

    def __init__(self, path: str, fail: str = "") -> None:
        super().__init__(path, fail)
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}.next", path)

    def fingerprint(self) -> str:
        return digest(self._path)


class TwoSided(Doubler):
    """What is searched by comes out negative."""

    def for_queries(self) -> Doubler:
        """The other side."""
        other = Doubler()
        compute = other.compute
        other.compute = lambda batch: {name: -values for name, values in compute(batch).items()}  # type: ignore[method-assign]
        return other


def write_data(project: Scene, x_of_id: dict[Any, float]) -> None:
    """The source's file, replaced as a whole."""
    table = pa.table({"id": list(x_of_id), "x": list(x_of_id.values())})
    pq.write_table(table, project.folder / "data.tmp")
    os.replace(project.folder / "data.tmp", project.folder / "data.parquet")


OpenLookup = Callable[[Scene], Lookup]
Served = Callable[..., tuple[Scene, Lookup]]


@pytest.fixture
def served(make_project: MakeProject, open_lookup: OpenLookup) -> Served:
    """Publishes ``numbers`` of some rows, where its file differs by ``view``, and opens it."""

    def made(rows: Any = ((1, 1.0),), **view: Any) -> tuple[Scene, Lookup]:
        rows = rows if isinstance(rows, pa.Table) else list(rows)
        project = make_project(rows, view=FALLBACK | view)
        project.publish_all()
        return project, open_lookup(project)

    return made


@contextlib.contextmanager
def opened(project: Scene, **options: Any) -> Iterator[tuple[ViewFallback, dict[str, Pointer]]]:
    """What stands behind a project's misses, and the pointers of what is live."""
    with (
        contextlib.closing(project.open_online()) as online,
        contextlib.closing(ViewFallback(project.offline, project.home, 64, **options)) as fallback,
    ):
        found = ((name, online.live(name)) for name in project.views)
        yield fallback, {name: pointer for name, pointer in found if pointer is not None}


def features(table: pa.Table) -> list[dict[str, Any]]:
    """The feature columns, as rows."""
    return table.select(table.column_names[9:]).to_pylist()


def statuses(lookup: Lookup, keys: Sequence[Any], **options: Any) -> list[str]:
    """``computed``, ``fresh``, or why a row is missing."""
    table = lookup.get("numbers", keys, **options)
    columns = (table[name].to_pylist() for name in ("status", "reason"))
    return [reason or status for status, reason in zip(*columns, strict=True)]


# ---- parity


def test_computed_rows_equal_the_batch_jobs_rows(
    make_project: MakeProject, open_lookup: OpenLookup
) -> None:
    rows = [(i, float(i)) for i in range(1, 13)]
    over = EVERYTHING | FALLBACK
    project = make_project(
        rows, view=over, views={"expired": _view(over | {"ttl": 0, "stale_for": 0})}
    )
    project.publish_all()
    lookup, keys = open_lookup(project), [i for i, _ in rows]
    stored, computed = lookup.get("numbers", keys), lookup.get("expired", keys)
    assert set(stored["status"].to_pylist()) == {"fresh"}
    assert (set(computed["status"].to_pylist()), set(computed["source"].to_pylist())) == (
        {"computed"},
        {"fallback"},
    )
    assert computed.schema == stored.schema
    assert features(computed) == features(stored)
    for key in (4, 5, 9):
        assert features(lookup.get("expired", [key])) == features(lookup.get("numbers", [key]))
        assert lookup.row("expired", key)["features"] == lookup.row("numbers", key)["features"]


def _view(over: dict[str, Any]) -> dict[str, Any]:
    """A second view file like the first one."""
    base = {
        "entity": ["id"],
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
        "ttl": "1h",
        "max_rejected": 0.5,
    }
    return base | over


# ---- the live snapshot's definition, inputs and model


def test_the_live_snapshots_sql_counts_not_the_configurations(
    make_project: MakeProject, open_lookup: OpenLookup
) -> None:
    project = make_project([(1, 1.0)], view=FALLBACK)
    project.publish_all()
    write_data(project, {1: 1.0, 2: 2.0})
    changed = make_project(
        view=FALLBACK
        | {"source": {"sql": "SELECT id, x + 100 AS x FROM read_parquet('${data}/data.parquet')"}}
    )
    assert open_lookup(changed).get("numbers", [2])["double"].to_pylist() == [4.0]
    changed.publish_all()
    write_data(project, {3: 3.0})
    assert open_lookup(changed).get("numbers", [3])["double"].to_pylist() == [206.0]


def test_views_it_reads_are_read_at_the_snapshots_the_batch_job_read(
    make_project: MakeProject, open_lookup: OpenLookup
) -> None:
    reading = _view(
        FALLBACK
        | {"source": {"sql": "SELECT id, double AS x FROM live.numbers"}, "ttl": 0, "stale_for": 0}
    )
    doubles = {
        "model": {"use": "tests.models:Doubler", "args": {"dim": 0}},
        "features": {"double": {"dtype": "float64"}},
    }
    project = make_project([(1, 1.0)], view=doubles, views={"twice": reading | doubles})
    project.publish_all("numbers", "twice")
    write_data(project, {1: 50.0, 2: 60.0})
    project.publish_all("numbers")
    lookup = open_lookup(project)
    assert lookup.get("twice", [1, 2])["double"].to_pylist() == [4.0, None]
    project.publish_all("twice")
    assert lookup.get("twice", [1, 2])["double"].to_pylist() == [200.0, 240.0]


def test_a_refusal_is_remembered_and_the_model_not_loaded_for_each_miss(
    make_project: MakeProject,
    open_lookup: OpenLookup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    project, weights = _scaled(make_project, tmp_path, 3.0)
    project.publish_all()
    write_data(project, {1: 1.0, 2: 2.0})
    lookup = open_lookup(project)
    weights.write_text("4.0")
    assert statuses(lookup, [1, 2]) == ["fresh", "model_error"]
    made = Scaled.made
    weights.write_text("3.0")
    assert (statuses(lookup, [2]), Scaled.made) == (["model_error"], made)
    # logged once
    assert (
        caplog.text.count("fallback of view")
        == caplog.text.count("view 'numbers': the model on disk has fingerprint")
        == 1
    )
    monkeypatch.setattr("precompute.jobs.serve.live_view.REFUSED_S", 0.0)
    assert (statuses(lookup, [2]), Scaled.made) == (["computed"], made + 1)


@pytest.mark.parametrize("model", ["Scaled", "Reread"])
def test_new_weights_in_place_are_loaded_once_their_snapshot_is_live(
    make_project: MakeProject, open_lookup: OpenLookup, tmp_path: Path, model: str
) -> None:
    project, weights = _scaled(make_project, tmp_path, 3.0, model=model)
    project.publish_all()
    lookup = open_lookup(project)
    for factor in (3.0, 4.0, 5.0):
        weights.write_text(str(factor))
        write_data(project, {1: 1.0})
        project.publish_all()
        write_data(project, {1: 1.0, 2: 2.0})
        assert lookup.get("numbers", [1, 2])["double"].to_pylist() == [factor, 2 * factor]


def test_weights_that_come_while_others_are_loaded_are_loaded_once_more(
    make_project: MakeProject, open_lookup: OpenLookup, tmp_path: Path
) -> None:
    """By a run and by the fallback."""
    project, weights = _scaled(make_project, tmp_path, 3.0, model="Reread")
    weights.with_name("weights.next").write_text("4.0")
    project.publish_all()
    weights.write_text("3.0")
    weights.with_name("weights.next").write_text("4.0")
    write_data(project, {1: 1.0, 2: 2.0})
    assert open_lookup(project).get("numbers", [1, 2])["double"].to_pylist() == [4.0, 8.0]
    assert project.store.snapshot(1).model == project.run().model


def test_a_loaded_model_whose_fingerprint_raises_is_a_model_error(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project()
    opener = Opener(project.store.offline, project.folder, 64)
    opener._load("tests.models:Doubler", {}, "fp32")

    def raising(_: Doubler) -> str:
        raise OSError("no disk")

    monkeypatch.setattr(Doubler, "fingerprint", raising)
    with pytest.raises(ModelError, match=r"Doubler': fingerprint\(\) raised OSError"):
        opener._load("tests.models:Doubler", {}, "fp32")


def _scaled(
    make_project: MakeProject, folder: Path, factor: float, fail: str = "", model: str = "Scaled"
) -> tuple[Scene, Path]:
    weights = folder / "weights"
    weights.write_text(str(factor))
    used = {"use": f"{HERE}:{model}", "args": {"path": str(weights), "fail": fail}}
    return make_project(
        [(1, 1.0)], view=FALLBACK | {"model": used, "features": {"double": {"dtype": "float64"}}}
    ), weights


def test_misses_of_views_of_one_model_are_one_call(make_project: MakeProject) -> None:
    folder = make_project([(1, 1.0)]).folder
    counting = FALLBACK | {
        "model": {
            "use": "tests.models:Counting",
            "args": {"path": str(folder / "batches"), "sleep_s": 0.3},
        }
    }
    one = {"features": {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 4}}}
    views = {
        "second": _view(counting | one),
        "other": _view(counting | {"features": {"double": {"dtype": "float64"}}}),
    }
    project = make_project(view=counting, views=views)
    project.publish_all()
    write_data(project, {i: float(i) for i in range(4, 9)})
    with opened(project) as (fallback, pointers):
        for pointer in pointers.values():
            warm(fallback, pointer)
        (folder / "batches").write_text("")
        requested = {("numbers", "4"): _submit(fallback, pointers["numbers"], "4")}
        eventually(lambda: (folder / "batches").read_text() != "")
        for which in ("numbers 5", "second 5", "second 6", "other 7", "numbers 77"):
            name, key = which.split()
            requested[name, key] = _submit(fallback, pointers[name], key)
        done = {
            which: one.exception(timeout=20) or one.result() for which, one in requested.items()
        }
    unknown = done.pop(("numbers", "77"))
    assert isinstance(unknown, Miss)
    assert unknown.reason is Reason.UNKNOWN_ENTITY
    doubles = {
        which: values_of(pointers[which[0]], row)["double"]
        for which, row in done.items()
        if isinstance(row, Computed)
    }
    assert doubles == {which: 2 * float(which[1]) for which in done}
    first, *others = (folder / "batches").read_text().splitlines()
    assert first == "[4.0]"
    # what has other features is another call
    assert sorted(others) == ["[5.0, 6.0, 5.0]", "[7.0]"]


def test_a_caller_that_looked_before_a_row_was_cached_is_given_it(
    make_project: MakeProject, tmp_path: Path
) -> None:
    folder = make_project([(1, 1.0)]).folder
    counting = {
        "model": {"use": "tests.models:Counting", "args": {"path": str(folder / "batches")}}
    }
    other = _view(FALLBACK | counting | {"features": {"double": {"dtype": "float64"}}})
    other["fallback"] = other["fallback"] | {"keep": 0, "keep_missing": 0}
    project = make_project(view=FALLBACK | counting, views={"unkept": other})
    project.publish_all()
    write_data(project, {5: 5.0})
    miss_cache = MissCacheFile(tmp_path / "kept", MissCacheLimits())
    with (
        contextlib.closing(miss_cache),
        opened(project, miss_cache=miss_cache) as (fallback, pointers),
    ):
        for view, calls in (("numbers", 1), ("unkept", 3)):
            pointer = pointers[view]
            warm(fallback, pointer)
            (folder / "batches").write_text("")
            rows = [_submit(fallback, pointer, "5").result(20) for _ in range(3)]
            assert [values_of(pointer, row)["double"] for row in rows] == [10.0] * 3
            assert len((folder / "batches").read_text().splitlines()) == calls
            for _ in range(2):
                unknown = _submit(fallback, pointer, "77").exception(20)
                assert isinstance(unknown, Miss)
                assert unknown.reason is Reason.UNKNOWN_ENTITY
        pointer = pointers["numbers"]
        eventually(lambda: set(miss_cache.read(pointer, ["5", "77"])) == {"5", "77"})
        given = _submit(fallback, pointer, "5", x=9.0).result(20)
        assert values_of(pointer, given)["double"] == 18.0


class ByIds(Counting):
    """``double`` is the entity's id, twice, and x."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray | pa.Array]:
        return super().compute(batch) | {
            "double": 2.0 * np.asarray(batch.column("id")) + np.asarray(batch.column("x"))
        }


class OfInputsAlone(Counting):
    """Says what it reads."""

    def reads(self) -> list[str]:
        return ["x"]


@pytest.mark.parametrize("model", ["ByIds", "OfInputsAlone"])
def test_a_row_of_a_requests_inputs_is_computed_once_for_all(
    make_project: MakeProject, tmp_path: Path, model: str
) -> None:
    folder = make_project([(1, 1.0)]).folder
    project = make_project(
        view=FALLBACK
        | {"model": {"use": f"{HERE}:{model}", "args": {"path": str(folder / "batches")}}}
    )
    project.publish_all()
    write_data(project, {2: 2.0})
    miss_cache = MissCacheFile(tmp_path / "kept", MissCacheLimits())
    online, fallback = (
        project.open_online(),
        ViewFallback(project.offline, project.home, memory_mb=64, miss_cache=miss_cache),
    )
    lookup = Lookup(online, None, fallback, miss_cache=miss_cache)

    def requested(
        keys: Sequence[int], x: float | None, **options: Any
    ) -> list[tuple[str, float, str]]:
        inputs = None if x is None else {str(key): {"x": x} for key in keys}
        table = lookup.get("numbers", keys, inputs=inputs, **options)
        return list(
            zip(*(table[name].to_pylist() for name in ("key", "double", "source")), strict=True)
        )

    def double(key: int, x: float) -> float:
        return 2.0 * key + x if model == "ByIds" else 2.0 * x

    try:
        assert requested([8], 5.0) == [("8", double(8, 5.0), "fallback")]
        pointer = online.live("numbers")
        assert pointer is not None
        eventually(lambda: bool(miss_cache.read(pointer, input_names({"x": 5.0}, "8") or ())))
        (folder / "batches").write_text("")
        other = "fallback" if model == "ByIds" else "cache"
        assert requested([8, 9], 5.0) == [
            ("8", double(8, 5.0), "cache"),
            ("9", double(9, 5.0), other),
        ]
        # it stands for no key: neither for one that is published, nor for one that the source has,
        # nor for one that nobody knows
        assert requested([1, 2], None) == [
            ("1", double(1, 1.0), "store"),
            ("2", double(2, 2.0), "fallback"),
        ]
        assert statuses(lookup, [8]) == ["unknown_entity"]
        assert requested([1], 5.0) == [("1", double(1, 1.0), "store")]
        assert requested([8], 6.0) == [("8", double(8, 6.0), "fallback")]
        # who wants none that is stored gets none
        assert requested([8], 5.0, max_age_s=0.0) == [("8", double(8, 5.0), "fallback")]
    finally:
        fallback.close()
        online.close()
        miss_cache.close()


class Permitted(Doubler):
    """Computes as many rows as the test has permitted, of those from 100 on."""

    permits = threading.Semaphore(0)
    begun: ClassVar[list[list[float]]] = []

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        self.begun.append(batch.column("x").to_pylist())
        for x in self.begun[-1]:
            if x >= 100:
                assert self.permits.acquire(timeout=20)
        return super().compute(batch)


@pytest.fixture
def permits() -> Iterator[threading.Semaphore]:
    """Of :class:`Permitted`; in the end there are enough for all."""
    Permitted.permits, Permitted.begun = threading.Semaphore(0), []
    yield Permitted.permits
    Permitted.permits.release(1000)


def test_at_its_deadline_an_answer_has_what_was_computed_until_then(
    served: Served, permits: threading.Semaphore
) -> None:
    _, lookup = served(model={"use": f"{HERE}:Permitted"})
    keys = [str(key) for key in range(100, 160)]
    permits.release(1)
    # opened by then
    assert statuses(lookup, [200], inputs={"200": {"x": 200.0}}) == ["computed"]
    permits.release(GROW_BY)
    given = statuses(lookup, keys, inputs={key: {"x": float(key)} for key in keys}, deadline_ms=800)
    assert given == ["computed"] * GROW_BY + ["deadline"] * (len(keys) - GROW_BY)


def test_one_clients_rows_are_behind_the_first_of_anothers(
    served: Served, permits: threading.Semaphore
) -> None:
    _, lookup = served(model={"use": f"{HERE}:Permitted"})

    def begin(client: str, xs: Sequence[int]) -> Answer:
        inputs = {str(x): {"x": float(x)} for x in xs}
        account = CLIENT.set(client)
        try:
            return lookup.begin("numbers", list(inputs), LookupOptions(inputs=inputs))
        finally:
            CLIENT.reset(account)

    crawlers = begin("crawler", range(100, 140))
    eventually(lambda: [xs[0] for xs in Permitted.begun if xs[0] >= 100] == [100.0])
    shops = begin("shop", [200])
    permits.release(41)
    for answer in (crawlers, shops):
        answer.wait()
    order = [x for xs in Permitted.begun for x in xs if x >= 100]
    assert order == [*range(100, 100 + GROW_BY), 200, *range(100 + GROW_BY, 140)]
    assert {
        str(status)
        for answer in (crawlers, shops)
        for status in (answer.row(i).status for i in range(len(answer.keys)))
    } == {"computed"}


# ---- while snapshots change


def test_requests_of_the_old_and_new_snapshot_are_each_answered(make_project: MakeProject) -> None:
    project = make_project([(1, 0.5)], view=FALLBACK)
    online, pointers = project.open_online(), []
    for x in (0.5, 1.0, 1.5):
        make_project([(1, x)], view=FALLBACK).publish_all()
        pointer = online.live("numbers")
        assert pointer is not None
        pointers.append(pointer)
    online.close()
    with opened(project) as (fallback, _):
        requested = [_submit(fallback, pointers[which], "1") for which in (1, 0, 1)]
        computed = [future.result(timeout=20) for future in requested]
        warm(fallback, pointers[2])
        # the two that were opened last
        assert fallback.open_publishings() == [("numbers", pointers[n].publishing) for n in (0, 2)]
    assert [values_of(pointers[0], c)["double"] for c in computed] == [3.0] * 3
    assert [p.epoch for p in pointers] == [1, 2, 3]


def warm(fallback: ViewFallback, pointer: Pointer) -> None:
    """Open a view, and wait for it."""
    fallback.begin_warm(pointer, time.monotonic() + 20).exception()


class Watched(Watch):
    """Notes what it is shown."""

    seen: ClassVar[list[tuple[float, list[int]]]] = []

    def set(self, done_by: float, rows: Collection[int] | None = None) -> None:
        super().set(done_by, rows)
        self.seen.append((done_by, self.held()))


def _submit(fallback: ViewFallback, pointer: Pointer, key: str, **inputs: Any) -> Future[Computed]:
    given = {key: inputs} if inputs else {}
    return fallback.submit(pointer, [key], given, time.monotonic() + 20)[0]


@pytest.mark.parametrize(
    ("deadlines_s", "row_s", "allowed_s"),
    [
        # nothing is known of the model: its source had no rows when it was opened
        ([0.1], None, 30.0),
        ([60.0, 0.1], None, 60.0),
        # as configured
        ([0.1, 0.2], 0.001, pytest.approx(0.3)),
        ([2.0] * 64, 0.001, 10.0),
        ([60.0] * 2, 0.001, 60.0),
        # as slow as it is, ten times over, and twice where that takes long
        ([0.1] * 4, 0.5, 10.0),
        ([0.1] * 10, 0.5, 10.0),
        ([2.0] * 64, 1.0, 128.0),
    ],
)
def test_a_batch_may_take_what_is_configured_or_what_its_model_takes(
    deadlines_s: list[float], row_s: float | None, allowed_s: float
) -> None:
    assert longest_s(deadlines_s, row_s) == allowed_s


def test_a_batchs_deadline_follows_the_models_pace_not_patience(make_project: MakeProject) -> None:
    slow = {
        "fallback": {"enabled": True, "deadline": "100ms"},
        "model": {"use": "tests.models:Doubler", "args": {"sleep_s": 0.5}},
    }
    project = make_project([(1, 1.0)], view=slow)
    project.publish_all()
    with opened(project, watch=Watched(may_try_suspects=True)) as (fallback, pointers):
        warm(fallback, pointers["numbers"])
        Watched.seen.clear()
        began = time.monotonic()
        fallback.submit(pointers["numbers"], ["1"], {}, began + 60)[0].result(20)
        eventually(lambda: len(Watched.seen) == 2)
        assert began + 5 <= Watched.seen[0][0] < began + 20
        assert Watched.seen[1] == (math.inf, [])


def test_suspected_rows_are_computed_alone_until_they_came_through(
    make_project: MakeProject,
) -> None:
    project = make_project([(number, 1.0) for number in range(1, 5)], view=FALLBACK)
    project.publish_all()
    one, two, three, four = (row_hash("numbers", str(number), None) for number in range(1, 5))
    suspects = {one: 0.0, two: 0.0, four: math.inf}
    data = project.folder / "data.parquet"
    with opened(project, watch=Watched(may_try_suspects=True)) as (fallback, pointers):
        fallback.suspects, pointer = suspects, pointers["numbers"]
        # while the view cannot be opened nothing is tried
        gone = data.rename(project.folder / "gone")
        assert isinstance(_submit(fallback, pointer, "1").exception(20), Miss)
        gone.rename(data)
        warm(fallback, pointer)
        for alone in ([[one], [two], [three]], [[one, two, three]]):
            Watched.seen.clear()
            with fallback._batcher._changed:
                # none is begun before all are requested
                futures = fallback.submit(pointer, ["1", "2", "3", "4"], {}, time.monotonic() + 20)
            refused = futures.pop().exception(20)
            assert isinstance(refused, Miss)
            assert (refused.reason, refused.broken) == (Reason.MODEL_ERROR, None)
            doubles = [values_of(pointer, one.result(20))["double"] for one in futures]
            assert doubles == [2.0] * 3
            eventually(lambda: [rows for _, rows in Watched.seen if rows] == alone)  # noqa: B023


def test_a_suspect_that_is_given_up_while_it_waits_is_not_computed(
    make_project: MakeProject,
) -> None:
    """Nor one whose caller goes after it was begun, as with every other row."""
    project = make_project([(1, 1.0), (2, 2.0)], view=FALLBACK)
    project.publish_all()
    watch = Watched(may_try_suspects=False)
    with opened(project, watch=watch) as (fallback, pointers):
        pointer = pointers["numbers"]
        warm(fallback, pointer)
        Watched.seen.clear()
        fallback.suspects = {row_hash("numbers", key, None): 0.0 for key in "12"}
        early, late = (_submit(fallback, pointer, key) for key in "12")
        fallback.try_postponed()
        early.cancel()
        watch.may_try_suspects = True
        with fallback._batcher._changed:
            # begun, and given up before it is computed
            fallback.try_postponed()
            late.cancel()
        assert values_of(pointer, _submit(fallback, pointer, "1").result(20))["double"] == 2.0
        seen = {row for _, rows in Watched.seen for row in rows}
        assert row_hash("numbers", "2", None) not in seen


def test_equal_inputs_under_two_keys_are_one_row_in_hand(make_project: MakeProject) -> None:
    """Else what ends process after process would never have been alone."""
    project = make_project([(1, 1.0)], view=FALLBACK)
    project.publish_all()
    with opened(project, watch=Watched(may_try_suspects=True)) as (fallback, pointers):
        pointer, deadline = pointers["numbers"], time.monotonic() + 20
        warm(fallback, pointer)
        Watched.seen.clear()
        given = {"x": 3.0}
        with fallback._batcher._changed:
            futures = fallback.submit(pointer, ["8", "9"], {"8": given, "9": given}, deadline)
        assert [values_of(pointer, one.result(20))["double"] for one in futures] == [6.0, 6.0]
        row = row_hash("numbers", "8", '{"x": 3.0}')
        eventually(lambda: [rows for _, rows in Watched.seen if rows] == [[row]])


def test_rows_that_a_gpu_was_lost_with_stay_in_hand(
    make_project: MakeProject, tmp_path: Path
) -> None:
    project, _ = _scaled(make_project, tmp_path, 2.0, "lost")
    project.publish_all()
    write_data(project, {12: 12.0, 13: 13.0})
    with opened(project, watch=Watched(may_try_suspects=True)) as (fallback, pointers):
        assert isinstance(_submit(fallback, pointers["numbers"], "13").exception(20), Miss)
        assert fallback.gpu_is_lost()
        _submit(fallback, pointers["numbers"], "12").result(20)
        eventually(lambda: Watched.seen[-1] == (math.inf, [row_hash("numbers", "13", None)]))


def test_what_is_searched_by_is_never_computed_among_rows(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)], view=FALLBACK | {"model": {"use": f"{HERE}:TwoSided"}})
    project.publish_all()
    with opened(project) as (fallback, pointers):
        pointer, deadline = pointers["numbers"], time.monotonic() + 20
        requested = [
            fallback.submit(pointer, ["9"], {"9": {"x": 3.0}}, deadline, query=query)[0]
            for query in (False, True) * 3
        ]
        found = [values_of(pointer, future.result(timeout=20))["double"] for future in requested]
    assert found == [6.0, -6.0] * 3


@contextlib.contextmanager
def warming(lookup: Lookup, *args: Any) -> Iterator[tuple[Warmer, ViewFallback]]:
    """A warmer of the lookup's views."""
    assert isinstance(lookup.fallback, ViewFallback)
    warmer = Warmer(lookup, lookup.fallback, *args)
    try:
        yield warmer, lookup.fallback
    finally:
        warmer.stop()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is live is looked for all the time."""
    for setting in ("lookup_worker.WARM_EVERY_S", "lookup_worker.AGAIN_S", "live_view.REFUSED_S"):
        monkeypatch.setattr(f"precompute.jobs.serve.{setting}", 0.01)


@pytest.mark.usefixtures("hasty")
def test_a_model_that_comes_after_its_snapshot_is_opened_without_a_miss(
    make_project: MakeProject, open_lookup: OpenLookup, tmp_path: Path
) -> None:
    project, weights = _scaled(make_project, tmp_path, 4.0)
    project.publish_all()
    weights.write_text("3.0")
    with warming(open_lookup(project)) as (warmer, fallback):
        eventually(lambda: not warmer.warming)
        assert not fallback.ready(project.pointer())
        weights.write_text("4.0")
        eventually(lambda: fallback.ready(project.pointer()))


@pytest.mark.usefixtures("hasty")
def test_another_model_is_loaded_before_what_it_computed_is_live(
    make_project: MakeProject,
    open_lookup: OpenLookup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project, weights = _scaled(make_project, tmp_path, 3.0)
    project.publish_all()
    lookup, live, wanted = open_lookup(project), project.pointer(), list[set[str]]()
    with warming(lookup, wanted.append, project.offline) as (warmer, fallback):
        eventually(lambda: not warmer.warming)
        assert wanted[-1] == {live.model}
        weights.write_text("4.0")
        project.materialize(full=True)
        coming = project.store.snapshot(2)
        eventually(
            lambda: ("numbers", (live.epoch + 1, coming.created_at)) in fallback.open_publishings()
        )
        assert wanted[-1] == {live.model, coming.model}
        # what was committed long ago is not about to be live
        monkeypatch.setattr("precompute.jobs.serve.lookup_worker.COMING_S", 0.0)
        eventually(lambda: wanted[-1] == {live.model})
        made = Scaled.made
        project.publish()
        write_data(project, {2: 2.0})
        assert features(lookup.get("numbers", [2])) == [{"double": 8.0}]
        assert Scaled.made == made


@pytest.mark.usefixtures("hasty")
def test_a_view_that_began_again_is_computed_by_its_own_model(
    make_project: MakeProject, open_lookup: OpenLookup, tmp_path: Path
) -> None:
    """Its epochs and segments start at 1 again, under a server that goes on."""
    project, weights = _scaled(make_project, tmp_path, 3.0)
    lookup, pointers = open_lookup(project), []
    with warming(lookup) as (_, fallback):
        for factor in (3.0, 4.0):
            weights.write_text(str(factor))
            write_data(project, {1: 1.0})
            project.publish_all()
            write_data(project, {1: 1.0, 2: 2.0})
            pointers.append(project.pointer())
            eventually(partial(fallback.ready, pointers[-1]))
            doubles = lookup.get("numbers", [1, 2])["double"].to_pylist()
            assert doubles == [factor, 2 * factor]
            shutil.rmtree(project.root)
    assert [(p.epoch, p.numbers) for p in pointers] == [(1, (1,)), (1, (1,))]


def test_closed_it_refuses_as_shed(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)], view=FALLBACK)
    project.publish_all()
    with opened(project) as (fallback, pointers):
        pass
    with pytest.raises(Miss) as caught:
        _submit(fallback, pointers["numbers"], "1").result(timeout=20)
    assert caught.value.reason is Reason.SHED


# ---- what fails


@pytest.mark.parametrize("fail", ["MemoryError", "SystemExit"])
def test_a_row_the_model_fails_on_fails_alone_and_the_next_are_computed(
    make_project: MakeProject, open_lookup: OpenLookup, tmp_path: Path, fail: str
) -> None:
    project, _ = _scaled(make_project, tmp_path, 2.0, fail)
    project.publish_all()
    write_data(project, {1: 1.0, 12: 12.0, 13: 13.0, 14: 14.0})
    lookup = open_lookup(project)
    expected = ["computed", "model_error", "computed", "unknown_entity"]
    assert statuses(lookup, [12, 13, 14, 77], deadline_ms=3000) == expected
    assert statuses(lookup, [14], deadline_ms=3000) == ["computed"]


def test_a_source_that_is_replaced_while_it_is_read_is_read_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, lookup = served()
    write_data(project, {1: 1.0, 2: 2.0})
    real, failed = Source.rows, list[Sequence[str]]()

    def rows(self: Source, keys: Sequence[str], **options: Any) -> pa.Table:
        if not failed:
            failed.append(keys)
            raise SourceError("the source cannot be read: its file is shorter than its footer said")
        return real(self, keys, **options)

    monkeypatch.setattr(Source, "rows", rows)
    assert features(lookup.get("numbers", [2]))[0]["double"] == 4.0
    assert failed == [["2"]]


def test_a_source_that_is_gone_is_a_model_error_until_it_is_back(served: Served) -> None:
    project, lookup = served()
    data = project.folder / "data.parquet"
    assert statuses(lookup, [77]) == ["unknown_entity"]
    data.rename(project.folder / "gone")
    assert statuses(lookup, [1, 77]) == ["fresh", "model_error"]
    data.write_bytes(b"this is no Parquet")
    assert statuses(lookup, [77]) == ["model_error"]
    write_data(project, {77: 1.0})
    assert statuses(lookup, [77]) == ["computed"]


def test_inputs_of_a_request_need_no_source_and_missing_ones_are_null(served: Served) -> None:
    """Bytes are base64, as JSON has them; in this process they may be bytes."""
    sql = "SELECT id, x, 1.5 AS y, encode('some') AS raw FROM read_parquet('${data}/data.parquet')"
    view = {"source": {"sql": sql}, "features": {"double": {"dtype": "float64"}}, "index": None}
    _, lookup = served(**view, model={"use": "tests.models:Doubler", "args": {"dim": 0}})
    for key, given in ((500, {"500": {"x": 7, "y": 1}}), ("500", {500: {"x": 7}})):
        assert lookup.get("numbers", [key], inputs=given)["double"].to_pylist() == [14.0]
    assert statuses(lookup, [500], inputs={"500": {"y": 7}}) == ["model_error"]
    assert statuses(lookup, [500]) == ["unknown_entity"]
    _, lookup = served(**view, model={"use": f"{HERE}:Size"})
    for raw in (b"12345", base64.b64encode(b"12345").decode()):
        found = lookup.get("numbers", [500], inputs={"500": {"raw": raw}})
        assert found["double"].to_pylist() == [5.0]
    assert statuses(lookup, [501], inputs={"501": {"raw": "none!"}}) == ["model_error"]


def test_the_same_key_with_other_inputs_is_another_computation(make_project: MakeProject) -> None:
    project = make_project(
        [(1, 1.0)],
        view=FALLBACK | {"model": {"use": "tests.models:Doubler", "args": {"sleep_s": 0.2}}},
    )
    project.publish_all()
    write_data(project, {5: 5.0})
    with opened(project) as (fallback, pointers):
        pointer = pointers["numbers"]
        warm(fallback, pointer)
        given: tuple[dict[str, Any], ...] = ({}, {"x": 1}, {"x": 2}, {"x": 1}, {})
        requested = [_submit(fallback, pointer, "5", **inputs) for inputs in given]
        computed = [future.result(timeout=20) for future in requested]
    assert computed[0] is computed[4]
    assert computed[1] is computed[3]
    assert [values_of(pointer, one)["double"] for one in computed] == [10.0, 2.0, 4.0, 2.0, 10.0]
