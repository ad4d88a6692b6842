"""Fault harness: small real projects over an arithmetic model, child processes that die where a
test has them die, and the oracle.

The oracle is arithmetic. Every state the source was ever in is remembered, so every snapshot must
equal one of these states as a whole: a row that is lost, doubled, or of another state than its
neighbours shows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import precompute.jobs.run.rows.chunks
import precompute.jobs.run.rows.plan
from precompute.jobs.config.gates import GATES
from precompute.jobs.ops.retention import drop
from precompute.store.answers.lookup import Lookup
from precompute.store.disk import crashpoint, lease
from precompute.store.disk.crashpoint import InjectedError
from precompute.store.errors import PrecomputeError
from precompute.store.offline.gc import collect
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.online.online_store import OnlineStore, number_of
from precompute.store.vectors.vector_index import VectorIndex
from tests.online_rig import rigged
from tests.scene import Scene

VIEW = "numbers"
DIM = 4
WINDOW_ROWS = 8
"""Rows of a window, and with ``PART_BYTES`` of one byte also of a chunk: what a killed run may
lose."""

State = tuple[Mapping[int, int], int]
"""Source rows (key → x) and the version of the model: all that makes a snapshot's values."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.faults.harness",
        "duckdb",
        "pyarrow.parquet",
        "pyarrow.dataset",
        "table",
        "redis",
        "faiss",
        "precompute.store.online.table_store",
    ]
)


class Counted:
    """``x`` → ``double`` = 2x + a million for each version, and ``vector`` = [x, x + 1, …]; every
    call is noted in a file.

    Args:
        log: file that gets a line with the number of rows of every batch.
        version: part of the fingerprint and of the values.
        raise_at, nan_at, memory_at, kill_at, hang_at: the n-th call of this process raises
            ValueError, returns NaN, raises MemoryError, kills the process, sleeps for good and
            takes no SIGTERM.
    """

    def __init__(
        self,
        log: str = "",
        version: int = 1,
        raise_at: int = 0,
        nan_at: int = 0,
        memory_at: int = 0,
        kill_at: int = 0,
        hang_at: int = 0,
    ) -> None:
        self.log, self.version, self.calls = log, version, 0
        self.raise_at, self.nan_at, self.memory_at, self.kill_at, self.hang_at = (
            raise_at,
            nan_at,
            memory_at,
            kill_at,
            hang_at,
        )

    def fingerprint(self) -> str:
        return f"counted {self.version}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        self.calls += 1
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"{batch.num_rows}\n")
        if self.calls == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == self.hang_at:
            while True:  # in a thread of the engine: nothing that Python does ends it
                time.sleep(60)
        if self.calls == self.raise_at:
            raise ValueError("injected by the model")
        if self.calls == self.memory_at:
            raise MemoryError
        x = np.asarray(batch.column("x")).astype(np.float64)
        double = 2 * x + 1_000_000 * self.version
        if self.calls == self.nan_at:
            double[0] = np.nan
        return {"double": double, "vector": (x[:, None] + np.arange(DIM)).astype(np.float32)}


def values(x: int, version: int) -> tuple[float, tuple[float, ...]]:
    """What the model makes of ``x``."""
    return 2.0 * x + 1_000_000 * version, tuple(float(x + i) for i in range(DIM))


def values_of(state: State) -> dict[int, tuple[float, tuple[float, ...]]]:
    """Every row of a state: key → (double, vector)."""
    rows, version = state
    return {key: values(x, version) for key, x in rows.items()}


# ---- a project


@dataclass
class FaultScene:
    """A project on disk and everything its source ever was.

    ``seen`` maps the number of a snapshot to its run: a number that comes again with another run
    was given out twice.
    """

    folder: Path
    online: str = "table:./var/online"
    model: dict[str, Any] = field(default_factory=dict)
    view: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    version: int = 1
    history: list[State] = field(default_factory=list)
    seen: dict[int, str] = field(default_factory=dict)
    _project: Scene | None = None

    @property
    def log(self) -> Path:
        """What the model noted."""
        return self.folder / "calls"

    @property
    def store(self) -> ViewStore:
        """The offline store."""
        return OfflineStore(self.folder / "var").view(VIEW)

    @property
    def view_folder(self) -> Path:
        """The view's folder in the offline store."""
        return self.folder / "var" / VIEW

    def write(
        self, rows: Mapping[int, int] | None = None, *, version: int | None = None, **model: Any
    ) -> FaultScene:
        """Write the source, and the configuration with these arguments of the model; the state they
        make is remembered."""
        if rows is not None:
            self.rows = dict(rows)
            self.write_source(self.rows)
        self.version = self.version if version is None else version
        self.model = model
        self.write_configuration()
        if (self.rows, self.version) not in self.history:
            self.history.append((dict(self.rows), self.version))
        return self

    def write_source(self, rows: Mapping[int, int]) -> None:
        """Replace the source file."""
        table = pa.table(
            {"id": pa.array(list(rows), pa.int64()), "x": pa.array(list(rows.values()), pa.int64())}
        )
        temporary = self.folder / "data.tmp"
        self.folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, temporary)
        temporary.replace(self.folder / "data.parquet")

    def write_configuration(self) -> None:
        """Write project.yaml and the view."""
        self._project = None
        (self.folder / "views").mkdir(parents=True, exist_ok=True)
        # what is tried is what happens to rows, whatever their values become; they are counted as
        # the model is given them
        gates = dict.fromkeys(
            name
            for name in GATES
            if name not in ("accuracy", "batch", "bounds", "library", "rejected", "coverage")
        )
        retention = {"keep": 1, "grace": "0s"}
        settings = {
            "root": "./var",
            "online": self.online,
            "vars": {"data": "./"},
            "notify": ["true"],
            "retention": retention,
        }
        definition = {
            "name": VIEW,
            "entity": ["id"],
            "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
            "model": {
                "use": "tests.faults.harness:Counted",
                "args": {"log": str(self.log), "version": self.version} | self.model,
            },
            "features": {
                "double": {"dtype": "float64"},
                "vector": {"dtype": "float32", "dim": DIM},
            },
            "index": {"on": "vector", "metric": "l2"},
            "ttl": "1h",
            "max_rejected": 0.0,
            "gates": gates,
        }
        (self.folder / "project.yaml").write_text(yaml.safe_dump(settings | self.settings))
        (self.folder / "views" / f"{VIEW}.yaml").write_text(yaml.safe_dump(definition | self.view))

    def project(self) -> Scene:
        """The project as it was last written."""
        if self._project is None:
            self._project = Scene(self.folder, {})
        return self._project

    def copied(self, folder: Path) -> FaultScene:
        """The same scene in a folder that is a copy of this one's."""
        copy = FaultScene(
            folder,
            self.online,
            dict(self.model),
            dict(self.view),
            dict(self.settings),
            dict(self.rows),
            self.version,
            list(self.history),
            dict(self.seen),
        )
        copy.write_configuration()
        return copy

    def computed(self) -> int:
        """Rows the model was given since the last call of this."""
        lines = self.log.read_text().split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return sum(map(int, lines))

    def run(self, **options: Any) -> Report:
        """A run in this process."""
        return self.project().run(**options)

    def forget_lease(self, *names: str) -> None:
        """Have watched leases for an hour without a sign of life of their holder: what a stopped
        process's come to after a while."""
        for name in names or ("run", "publish"):
            for path in (self.view_folder / "notes").glob(f".lease-{name}.*.held"):
                seen = path.stat().st_mtime_ns, time.monotonic() - 3600, False
                lease._seen[path] = seen


def changed(
    rows: Mapping[int, int],
    change: Collection[int] = (),
    new: Collection[int] = (),
    gone: Collection[int] = (),
) -> dict[int, int]:
    """The rows with values nobody had before for ``change`` and ``new``, and without ``gone``."""
    top = max(rows.values(), default=0)
    result = {key: x for key, x in rows.items() if key not in set(gone)}
    for offset, key in enumerate([*change, *new], 1):
        result[key] = top + offset * 10
    return result


@contextlib.contextmanager
def small_chunks(
    window_rows: int = WINDOW_ROWS, part_bytes: int = 1, **plan: Any
) -> Iterator[None]:
    """Make every window a chunk of its own; ``plan`` replaces constants of
    :mod:`precompute.jobs.run.rows.plan`."""
    todo = [
        (precompute.jobs.run.rows.chunks, "WINDOW_ROWS", window_rows),
        (precompute.jobs.run.rows.chunks, "PART_BYTES", part_bytes),
    ]
    todo += [(precompute.jobs.run.rows.plan, name, value) for name, value in plan.items()]
    before = [(module, name, getattr(module, name)) for module, name, _ in todo]
    for module, name, value in todo:
        assert hasattr(module, name)
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


# ---- what a process does


def act(scene: FaultScene, what: str, **options: Any) -> str:
    """Do one thing to the view and say how it ended: a report's status."""
    project = scene.project()
    if what == "rollback":
        return project.rollback(**options).status
    if what == "resume":
        return project.resume(**options).status
    if what in ("drop", "remove"):
        drop(project, VIEW, data=what == "remove")
        return "dropped"
    if what == "gc":
        collect(scene.store, keep=1, grace_s=0)
        return "collected"
    return project.run(command=what, **options).status


@dataclass(frozen=True)
class Ended:
    """How a child ended: what it said, or the signal that ended it. ``error`` is the exception's
    class and message."""

    status: str | None = None
    error: str | None = None
    signal: int | None = None


class Child:
    """A process that does one thing to a scene, perhaps with a crash point armed: ``(name, nth,
    mode)``.

    Args:
        before: called in the child first, such as to set a limit.
    """

    def __init__(
        self,
        scene: FaultScene,
        what: str = "run",
        *,
        crash: tuple[str, int, str] | None = None,
        chunks: Mapping[str, Any] | None = None,
        before: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        self._answer, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(
            target=_child,
            args=(
                theirs,
                replace(scene, _project=None),
                what,
                crash,
                dict(chunks or {}),
                before,
                options,
            ),
        )
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def stopped(self) -> None:
        """Wait until the process is stopped by SIGSTOP."""
        limit = time.monotonic() + 30
        while self._state() != "T":
            assert self._process.is_alive(), self.ended()
            assert time.monotonic() < limit
            time.sleep(0.005)

    def go_on(self) -> Ended:
        """Let a stopped process go on, to its end."""
        os.kill(self.pid, signal.SIGCONT)
        return self.ended()

    def kill(self) -> Ended:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.ended()

    def ended(self) -> Ended:
        """Wait for the end."""
        status = error = None
        with contextlib.suppress(EOFError):
            status, error = self._answer.recv()
        self._process.join(60)
        code = self._process.exitcode
        assert code is not None, "the child does not end"
        self._answer.close()
        self._process.close()
        assert code <= 0, f"the child ended with status {code}"
        return Ended(status, error, -code or None)

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""


def _child(
    answer: Connection,
    scene: FaultScene,
    what: str,
    crash: tuple[str, int, str] | None,
    chunks: dict[str, Any],
    before: Callable[[], None] | None,
    options: dict[str, Any],
) -> None:
    tempfile.tempdir = str(
        scene.folder
    )  # a killed process leaves DuckDB's folder: it goes with the scene
    if before is not None:
        before()
    with small_chunks(**chunks):
        if crash is not None:
            crashpoint.arm(*crash)
        try:
            status = act(scene, what, **options)
        except (
            PrecomputeError,
            InjectedError,
            OSError,
        ) as exc:  # anything else ends the child with a traceback and status 1
            answer.send((None, f"{type(exc).__name__}: {exc}"))
        else:
            answer.send((status, None))


# ---- the oracle


def read_snapshot(scene: FaultScene, number: int) -> dict[int, tuple[float, tuple[float, ...]]]:
    """A snapshot's rows from Parquet; none of them twice."""
    snapshot = scene.store.snapshot(number)
    table = pa.Table.from_batches(scene.store.batches(snapshot, ["id", "double", "vector"]))
    vectors = map(
        tuple, np.asarray(table["vector"].combine_chunks().flatten()).reshape(-1, DIM).tolist()
    )
    found = dict(
        zip(
            table["id"].to_pylist(),
            zip(table["double"].to_pylist(), vectors, strict=True),
            strict=True,
        )
    )
    rows = table.num_rows
    assert len(found) == rows == snapshot.rows, (
        f"snapshot {number}: {rows} rows, {len(found)} keys, {snapshot.rows} in the manifest"
    )
    return found


def state_of(scene: FaultScene, found: Mapping[int, Any], what: str) -> State:
    """The one state of the source that these rows are all of."""
    for state in reversed(scene.history):
        if values_of(state) == found:
            return state
    raise AssertionError(
        f"{what}: its rows are those of no state the source was in; nearest: {nearest(scene, found)}"
    )


def nearest(scene: FaultScene, found: Mapping[int, Any]) -> str:
    """How the rows differ from the state that is most like them."""

    def differing(state: State) -> list[int]:
        wanted = values_of(state)
        return [key for key in {*wanted, *found} if wanted.get(key) != found.get(key)]

    best = min(scene.history, key=lambda state: len(differing(state)))
    return f"state {scene.history.index(best)} of {len(scene.history)}, but for keys {sorted(differing(best))[:20]}"


def check_snapshots(scene: FaultScene) -> None:
    """Every snapshot there is equals one state, and no number was given out twice."""
    store = scene.store
    for number in store.numbers():
        state_of(scene, read_snapshot(scene, number), f"snapshot {number}")
        run = store.snapshot(number).run
        assert scene.seen.setdefault(number, run) == run, (
            f"number {number} was given to two snapshots"
        )


def read_online(
    scene: FaultScene, online: OnlineStore
) -> tuple[int, dict[int, tuple[float, tuple[float, ...]]]]:
    """(epoch, rows) that a lookup finds for every key there ever was: all in one request, so of one
    segment."""
    keys = sorted({key for rows, _ in scene.history for key in rows})
    found: dict[int, tuple[float, tuple[float, ...]]] = {}
    lookup = Lookup(online, scene.store.offline.root)
    epochs = set()
    for start in range(0, len(keys), 1000):
        part = keys[start : start + 1000]
        answer = lookup.begin(VIEW, part)
        epochs.add(answer.pointer.epoch)
        for key, row in zip(part, answer.rows(), strict=True):
            assert row["status"] in ("fresh", "stale", "missing"), row
            if row["status"] != "missing":
                found[key] = (row["features"]["double"], tuple(row["features"]["vector"]))
    assert len(epochs) == 1
    return epochs.pop(), found


def check_readers(scene: FaultScene) -> State:
    """What is live is readable, all of one state, the one of the snapshot it says; the index fits.
    Holds at any time, recovered or not."""
    with scene.project().online_store() as online:
        pointer = online.live(VIEW)
        assert pointer is not None
        _, found = read_online(scene, online)
        state = state_of(scene, found, f"live, snapshot {pointer.snapshot}")
        assert len(found) == pointer.rows
        if pointer.snapshot in scene.store.numbers():
            assert read_snapshot(scene, pointer.snapshot) == found
        assert pointer.index is not None
        root = scene.store.offline.root
        index = VectorIndex(*(root / folder for folder in pointer.index_folders))
        assert len(index) == len(found)
        key, (_, vector) = next(iter(found.items()))
        nearest_key, score, _ = index.search(list(vector), 1)
        assert (nearest_key, score[0]) == ([str(key)], 0.0)
        return state


def check_everything(scene: FaultScene, *, current: bool = True) -> None:
    """The whole oracle, after recovery: see the parts. ``current``: live is the newest state of the
    source."""
    state = check_readers(scene)
    if current:
        assert state == (scene.rows, scene.version)
    check_snapshots(scene)
    assert scene.project().faults() == []
    if current:
        scene.computed()
        numbers = scene.store.numbers()
        assert scene.run().status == "current"
        assert scene.computed() == 0
        assert set(scene.store.numbers()) <= set(numbers), "nothing new was committed"
    check_no_orphans(scene)
    assert check_readers(scene) == state
    if current:
        check_online_is_tidy(scene)
        assert "running" not in {report.status for report in scene.store.runs.reports()}


def check_no_orphans(scene: FaultScene) -> None:
    """After gc without grace, every file is named by a manifest that stays."""
    store = scene.store
    collect(store, keep=1, grace_s=0)
    snapshots = [store.snapshot(number) for number in store.numbers()]
    named = {
        part.path
        for s in snapshots
        for part in (
            *(*s.files, s.rejected, s.nights, *s.anchors),
            *(one.record for one in s.segments),
        )
        if part is not None
    }
    folder = scene.view_folder
    data = {
        str(path.relative_to(folder))
        for name in ("data", "segments")
        for path in (folder / name).rglob("*")
        if path.is_file()
    }
    assert data <= named, f"orphans: {sorted(data - named)}"
    others = [
        p
        for name in ("manifests", "segments", "notes", "runs")
        for p in (folder / name).rglob("*.tmp")
    ]
    assert others == []


def check_online_is_tidy(scene: FaultScene) -> None:
    """The segments and indexes of what is live and was before, and nothing of any other in the
    store."""
    with scene.project().online_store() as online:
        names = [segment.name for segment in online.segments(VIEW)]
        left = online.unfinished(VIEW)
        assert left == [], f"left in the online store: {left}"
        ref = scene.store.log.live()
        assert ref is not None
        live = scene.store.snapshot(ref.snapshot).names
        before = () if ref.previous is None else scene.store.snapshot(ref.previous).names
        in_use = {*live, *before}
        assert {*live} <= set(names) <= in_use
        indexes = {path.name for path in (scene.view_folder / "index").iterdir()}
        assert {*ref.indexes} <= indexes <= {*ref.indexes, *ref.previous_indexes}
    if scene.online.startswith("table:"):
        files = {
            path.name
            for path in (scene.folder / scene.online.removeprefix("table:") / VIEW).iterdir()
        }
        extra = files - {f"{name}.table" for name in names} - {"live.json", ".lock"}
        assert extra == set(), f"left in the online store: {sorted(extra)}"
    else:
        rigged(scene.online).check_tidy(scene.online, VIEW, [number_of(name) for name in names])


def recover(scene: FaultScene, **options: Any) -> Report:
    """What the operator, or the schedule, does after a fault: run again, and resume what is held.
    It must succeed."""
    with small_chunks():
        report = scene.run(**options)
        if report.held is not None:
            assert report.status in ("committed", "current"), report
            report = scene.project().resume()
    assert report.status in ("published", "current"), report
    return report
