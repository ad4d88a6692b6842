"""Shards: rows computed by workers that share nothing but the root are the rows of one run, whoever
dies, stops, disagrees or comes twice."""

from __future__ import annotations

import contextlib
import decimal
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.run.shards import coordinator as coordinator_module
from precompute.jobs.run.shards import worker as worker_module
from precompute.jobs.run.shards.shard_folder import ShardFolder, ShardPlan
from precompute.jobs.run.shards.worker import WorkSummary, work
from precompute.store.disk import lease as lease_module
from precompute.store.errors import (
    ConfigError,
    ModelError,
    PrecomputeError,
    SnapshotError,
)
from precompute.store.offline.gc import collect
from precompute.store.times import containing
from tests import REPOSITORY
from tests.fixtures import MakeProject
from tests.models import Doubler
from tests.scene import Scene

ROWS = [(i, i / 7) for i in range(100)]
ELSEWHERE = {"engine": {"on": "elsewhere"}, "lease": "1s"}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are sharded, too, and nobody waits."""
    monkeypatch.setattr(coordinator_module, "FEW_ROWS", 1)
    monkeypatch.setattr(coordinator_module, "RESULTS_LOOK_S", 0.01)
    monkeypatch.setattr(worker_module, "SHARD_LOOK_S", 0.02)
    monkeypatch.setattr(worker_module, "BEAT_S", 0.0)


class Workers:
    """Workers in threads of this process; ``done`` is what each did, or the error that ended it."""

    def __init__(self, scene: Scene, count: int, **options: Any) -> None:
        self.done: list[WorkSummary | PrecomputeError] = []
        self._threads = [
            threading.Thread(target=self._work, args=(scene.reread(), options))
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, scene: Scene, options: dict[str, Any]) -> None:
        try:
            self.done.append(work(scene, "numbers", **{"wait_s": 20.0} | options))
        except PrecomputeError as exc:
            self.done.append(exc)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


@contextlib.contextmanager
def workers(scene: Scene, count: int = 2, **options: Any) -> Iterator[Workers]:
    """Workers that wait for a run that begins meanwhile."""
    crew = Workers(scene, count, **options)
    yield crew
    crew.join()


def rows_of(scene: Scene) -> list[dict[str, Any]]:
    """The newest snapshot's rows in its order, but for when they were computed."""
    return [
        {name: value for name, value in row.items() if name != "computed_at"}
        for row in scene.rows()
    ]


def sharded(
    make_project: MakeProject,
    rows: Any = ROWS,
    shards: int = 4,
    project: dict[str, Any] = ELSEWHERE,
    **view: Any,
) -> Scene:
    """A project whose workers others start."""
    return make_project(rows, view={"shards": shards} | view, project=project)


TYPES = pa.table(
    {
        "id": [f"k/{i}" for i in range(60)],
        "part": list(range(60)),
        "x": [i / 3 for i in range(60)],
        "text": [None if i % 7 == 0 else f"té{i}" for i in range(60)],
        "when": [datetime(2026, 1, 1, tzinfo=UTC)] * 60,
        "day": [date(2026, 1, 1)] * 60,
        "money": pa.array([decimal.Decimal(i) / 4 for i in range(60)], pa.decimal128(12, 2)),
        "blob": [bytes([i]) for i in range(60)],
        "list": [[float(i), None] for i in range(60)],
        "few": pa.array([[1.0, i] for i in range(60)], pa.list_(pa.float32(), 2)),
        "flag": [i % 2 == 0 for i in range(60)],
    }
)
SQL = (
    "SELECT *, uuid AS u, 170141183460469231731687303715884105727 - part AS huge, INTERVAL (part)"
    " MINUTE AS span, CASE WHEN part % 2 = 0 THEN 'a' ELSE 'b' END::ENUM('a', 'b') AS kind,"
    " {{'a': part, 'b': 'x' || part}} AS pair FROM (SELECT *, ('00000000-0000-0000-0000-' ||"
    " lpad(part::VARCHAR, 12, '0'))::UUID AS uuid FROM read_parquet('${{data}}/data.parquet'))"
)


class Shown(Doubler):
    """``double``, and ``said``: every input of the row, with its type, as text."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        schema = [f"{field.name}: {field.type}" for field in batch.schema]
        said = [f"{schema} {row}" for row in batch.to_pylist()]
        return {"double": np.asarray(batch.column("x")) * 2, "said": said}


def test_any_type_reaches_the_model_as_in_one_run(make_project: MakeProject) -> None:
    view: dict[str, Any] = {
        "entity": ["id", "part"],
        "source": {"sql": SQL.format()},
        "model": {"use": "tests.jobs.test_shards:Shown"},
        "features": {"double": {"dtype": "float64"}, "said": {"dtype": "string"}},
    }
    alone = make_project(TYPES, view=view)
    alone.run()
    wanted, content = rows_of(alone), alone.snapshot().content
    scene = sharded(make_project, TYPES, **view)
    with workers(scene):
        report = scene.run(full=True)
    assert rows_of(scene) == wanted
    assert scene.snapshot().content == content
    assert (report.engine["shards"], report.counts["written"]) == (4, 60)
    assert scene.run().status == "current"


def test_a_delta_is_sharded_with_any_number(make_project: MakeProject) -> None:
    scene = sharded(make_project)
    with workers(scene) as crew:
        scene.run()
    assert sum(done.rows for done in crew.done if isinstance(done, WorkSummary)) == 100
    later = [(i, x + (i % 5 == 0) / 9) for i, x in ROWS if i % 11]
    later += [(200 + i, 1.0 + i) for i in range(9)]
    sharded(make_project, later, 7)
    with workers(scene, 3):
        report = scene.reread().run()
    assert report.plan is not None
    assert report.plan.startswith("delta: 27 of 99 rows to compute")
    assert scene.snapshot().kind == "delta"
    assert scene.doubles() == {i: 2 * x for i, x in later}
    assert not [name for name in os.listdir(scene.store.data) if name.endswith("-shards")]
    assert not scene.store.journals.runs()


def test_rejected_rows_are_those_of_one_run(make_project: MakeProject) -> None:
    rows = [(None if i % 17 == 3 else str(i), float(i)) for i in range(100)]
    model = {"use": "tests.models:Doubler", "args": {"nan_on": 50.0}}
    alone = make_project(rows, view={"model": model})
    alone.run()
    counts, part = alone.snapshot().counts, alone.snapshot().rejected
    assert part is not None
    wanted = pq.read_table(alone.store.folder / part.path).to_pylist()
    scene = sharded(make_project, rows, model=model)
    with workers(scene):
        scene.run(full=True)
    part = scene.snapshot().rejected
    assert part is not None
    found = pq.read_table(scene.store.folder / part.path).to_pylist()
    assert scene.snapshot().counts == counts
    assert sorted(found, key=str) == sorted(wanted, key=str)


def test_tables_of_arguments_come_along(make_project: MakeProject) -> None:
    model = {
        "use": "tests.jobs.test_shards:Added",
        "args": {"table": {"sql": "SELECT 7 AS seven"}},
    }
    scene = sharded(make_project, model=model)
    with workers(scene):
        scene.run()
    assert scene.doubles() == {i: 2 * x + 7 for i, x in ROWS}


class Added(Doubler):
    """``double`` = 2x + the table's number."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__()
        self._added = table.column(0)[0].as_py()

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        features = super().compute(batch)
        return features | {"double": features["double"] + self._added}


# ---- who dies, stops or disagrees


class Dying(Doubler):
    """Kills its process after so many calls, as long as a file is there, which it removes."""

    def __init__(self, file: str, calls: int = 1, log: str = "") -> None:
        super().__init__()
        self._file, self._calls, self._log = Path(file), calls, log

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        self.calls += 1
        if self._log:
            with open(self._log, "a") as file:
                file.write(f"{os.getpid()} {batch.num_rows}\n")
        if self.calls > self._calls and self._file.exists():
            self._file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute(batch)


SMALL = (
    "import sys; from precompute.jobs.run.rows import chunks; from precompute.jobs.run.shards import"
    " worker; chunks.WINDOW_ROWS, chunks.PART_BYTES = 5, 1; worker.BEAT_S = 0.0; worker.SHARD_LOOK_S = 0.1;"
    " from precompute.jobs.cli import main; sys.exit(main(sys.argv[1:]))"
)


def worker_process(scene: Scene, *options: str, before: str = "") -> subprocess.Popen[str]:
    """A worker whose windows have five rows and are a chunk each; ``before`` is run first."""
    code = SMALL.replace("from precompute.jobs.cli", f"{before} from precompute.jobs.cli")
    command = [sys.executable, "-c", code, "-c", str(scene.folder), "work", "numbers"]
    return subprocess.Popen(
        [*command, "--wait", "20s", *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_worker_loses_a_chunk(make_project: MakeProject, tmp_path: Path) -> None:
    file, log = tmp_path / "die", tmp_path / "log"
    file.touch()
    args = {"file": str(file), "calls": 3, "log": str(log)}
    scene = sharded(
        make_project, shards=2, model={"use": "tests.jobs.test_shards:Dying", "args": args}
    )
    processes = [worker_process(scene) for _ in range(2)]
    report = scene.run()
    for process in processes:
        process.communicate(timeout=20)
    statuses = sorted(process.returncode for process in processes)
    assert statuses == [-9, 0]
    # one worker may have had both when it was killed
    assert (report.engine["shards"], report.engine["attempts"] in (3, 4)) == (2, True)
    used = report.usage
    assert {"pin", "collect", "other"} <= used.cpu_s.keys()
    assert used.workers_cpu_s == {"model": report.engine["cpu_s"]}
    assert used.workers_cpu_s["model"] > 0
    of = scene.snapshot()
    files = [file for file in (*of.parts, of.nights, *of.anchors) if file is not None]
    assert used.written_bytes == sum(file.size_bytes for file in files)
    assert (used.workers, used.worker_peak_bytes) == (
        report.engine["workers"],
        report.engine["peak_memory_bytes"],
    )
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}
    given = sum(int(line.split()[1]) for line in log.read_text().splitlines())
    # what was in flight: the engine computes some windows ahead of what is written
    assert 100 < given <= 125


def test_sigterm_finishes_the_chunk(make_project: MakeProject, tmp_path: Path) -> None:
    log = tmp_path / "log"
    model = {"use": "tests.models:Counting", "args": {"path": str(log), "sleep_s": 0.2}}
    scene = sharded(make_project, shards=1, model=model)
    first = worker_process(scene)
    finished = threading.Thread(target=scene.reread().run)
    finished.start()
    _until(lambda: len(log.read_text().splitlines()) > 5 if log.exists() else False)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=20)
    assert (first.returncode, "ended before the run was over" in out) == (143, True), err
    second = worker_process(scene)
    finished.join(30)
    second.communicate(timeout=20)
    assert second.returncode == 0
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}
    lines = log.read_text().splitlines()
    # nothing that the first was given is computed again but what it had begun ahead
    assert len(lines) <= 100 / 5 + 2
    assert scene.report().engine["attempts"] == 2


def _until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_killed_run_is_taken_over(make_project: MakeProject, tmp_path: Path) -> None:
    log = tmp_path / "log"
    model = {"use": "tests.models:Counting", "args": {"path": str(log), "sleep_s": 0.1}}
    scene = sharded(make_project, shards=3, model=model)
    command = [sys.executable, "-c", SMALL.replace("worker.SHARD_LOOK_S = 0.1", _FEW), "-c"]
    run = subprocess.Popen(
        [*command, str(scene.folder), "run", "numbers"],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    worker = worker_process(scene)
    _until(lambda: len(log.read_text().splitlines()) > 6 if log.exists() else False)
    run.kill()
    run.wait()
    with workers(scene):
        report = scene.reread().run()
    _, said = worker.communicate(timeout=20)
    assert (worker.returncode, "another one of view 'numbers' has begun" in said) == (1, True), said
    assert report.resumed >= 5
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}


_FEW = "from precompute.jobs.run.shards import coordinator; coordinator.FEW_ROWS = 1; worker.SHARD_LOOK_S = 0.1"


def test_a_shard_that_always_fails_ends_the_run(make_project: MakeProject) -> None:
    scene = sharded(make_project, model={"use": "tests.jobs.test_shards:Wrong"})
    with (
        workers(scene) as crew,
        pytest.raises(ModelError, match=r"shard \d, computed by .*no room on this machine"),
    ):
        scene.run()
    assert scene.report().status == "failed"
    assert scene.numbers() == []
    assert all(isinstance(done, WorkSummary | ModelError) for done in crew.done)


class Wrong(Doubler):
    """Returns too few values, of shards that have the row 60."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        features = super().compute(batch)
        if any(abs(x - 60 / 7) < 1e-9 for x in batch.column("x").to_pylist()):
            raise MemoryErrorOfOurs("no room on this machine")
        return features


class MemoryErrorOfOurs(ModelError):
    """What a row is not to blame for."""


def test_a_row_that_ends_its_process_is_rejected_alone(make_project: MakeProject) -> None:
    model = {"use": "tests.models:Doubler", "args": {"kill_on": ROWS[60][1]}}
    project = {"engine": {"workers": 2}}
    scene = make_project(ROWS, view={"shards": 4, "model": model}, project=project)
    report = scene.run()
    assert scene.doubles() == {i: 2 * x for i, x in ROWS if i != 60}
    # the shard that the row ended may have had the next one beside it
    assert (report.counts["rejected"], report.engine["attempts"] in (5, 6)) == (1, True)


def test_workers_that_die_one_after_the_other_end_the_run(make_project: MakeProject) -> None:
    project = {"engine": {"workers": 2}}
    model = {"use": "tests.jobs.test_shards:Fatal"}
    scene = make_project(ROWS, view={"shards": 4, "model": model}, project=project)
    with pytest.raises(ModelError, match=r"3 workers ended one after the other.*SIGKILL"):
        scene.run()
    assert (scene.report().status, scene.numbers()) == ("failed", [])
    assert not [name for name in os.listdir(scene.store.data) if name.endswith("-shards")]


class Fatal(Doubler):
    """Kills each worker of a run."""

    def fingerprint(self) -> str:
        if "work" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fingerprint()


def _plans(scene: Scene) -> Iterator[ShardPlan]:
    for run in ShardFolder.runs(scene.store):
        plan = ShardFolder(scene.store, run).plan()
        if plan is not None:
            yield plan


def test_a_worker_that_slept_past_its_lease_changes_nothing(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes between its last look at the lease and the record of its result."""
    scene = sharded(make_project, shards=1)
    asleep, woken = threading.Event(), threading.Event()
    record = ShardFolder.record
    counted: list[bool] = []

    def slept(folder: ShardFolder, result: Any) -> bool:
        if not asleep.is_set():
            asleep.set()
            assert woken.wait(20)
        counted.append(record(folder, result))
        return counted[-1]

    monkeypatch.setattr(ShardFolder, "record", slept)
    monkeypatch.setattr(lease_module.Lease, "_beat", lambda lease: lease._stop.wait())
    crew = Workers(scene, 1)
    run = threading.Thread(target=scene.run)
    run.start()
    assert asleep.wait(20)
    for path in scene.store.data.glob("*-shards/.lease-00000.*.held"):
        os.utime(path, (time.time() - 60, time.time() - 60))
    other = Workers(scene, 1)
    run.join(20)
    woken.set()
    crew.join()
    other.join()
    assert counted[0] is True
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}
    assert collect(scene.store, keep=1, grace_s=0) is not None
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}


@pytest.mark.parametrize("what", ["rows-00001.arrow", "plan.json"])
def test_damage_is_said(what: str, make_project: MakeProject) -> None:
    scene = sharded(make_project, shards=2)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            scene.run()
        except PrecomputeError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    _until(lambda: any(_plans(scene)))
    (path,) = scene.store.data.glob(f"*-shards/{what}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if what == "plan.json":
        with pytest.raises(SnapshotError, match=r"plan\.json is damaged.*run the view again"):
            work(scene.reread(), "numbers")
        path.unlink()
        (path.parent / "result-00000.json").write_text("{}")
        thread.join(20)
        assert "result-00000.json is damaged" in str(errors[0])
        return
    with workers(scene):
        thread.join(20)
    assert "rows-00001.arrow differs from its checksum" in str(errors[0])


def test_without_a_run_a_worker_says_so(make_project: MakeProject) -> None:
    scene = sharded(make_project)
    with pytest.raises(ConfigError, match=r"no run of view 'numbers' wants workers now"):
        work(scene, "numbers")
    with pytest.raises(
        ConfigError, match=r"run xyz of view 'numbers' wants no workers, or is over"
    ):
        work(scene, "numbers", run="xyz")


def test_partitions_are_sharded_like_all(make_project: MakeProject) -> None:
    days = [datetime(2026, 1, 1 + i % 2) for i in range(40)]
    table = pa.table(
        {"id": list(range(40)), "x": [float(i) for i in range(40)], "day": pa.array(days)}
    )
    sql = "SELECT * FROM read_parquet('${data}/data.parquet') WHERE day >= $start AND day < $end"
    partition = {"by": "day", "start": "2026-01-01", "column": "day", "serve": "all"}
    scene = sharded(make_project, table, 3, source={"sql": sql}, partition=partition)
    for day in ("2026-01-01", "2026-01-02"):
        with workers(scene):
            scene.run(partition=containing("day", datetime.fromisoformat(day).replace(tzinfo=UTC)))
    assert {row["id"]: row["double"] for row in scene.rows(scene.live().snapshot)} == {
        i: 2.0 * i for i in range(40)
    }


def test_each_recipe_of_the_documents_is_a_worker() -> None:
    """Of Kubernetes, Slurm, shells, Airflow and Dagster."""
    text = (REPOSITORY / "docs/cluster.md").read_text(encoding="utf-8")
    section = text[text.index("### Workers, wherever") : text.index("**Ray**")]
    recipes = re.findall(r"precompute(?: -c configs/docs|,) (work[ ,][^'\"\]\n]+)", section)
    commands = [recipe.replace(",", "").split() for recipe in recipes]
    assert commands == [["work", "doc_embedding", "--wait", "30m"]] * 5
    for code in re.findall(r"```python\n(.+?)```", section, re.DOTALL):
        compile(code, "cluster.md", "exec")
