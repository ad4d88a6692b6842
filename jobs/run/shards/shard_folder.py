"""Shard folder: what a run hands to its shard workers and what they hand back, all in files under
the view's root (docs/architecture.md draws them).

No worker talks to the run, nor to another worker.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.disk.durable_file import make_folder, sha256_of
from precompute.store.disk.lease import Lease, holder, is_held, take
from precompute.store.disk.record import Record, field, read_record, sealed
from precompute.store.disk.storage import read_record_file
from precompute.store.errors import PrecomputeError, SnapshotError
from precompute.store.feature_view import FeatureView
from precompute.store.keys import key_column
from precompute.store.offline.log import run_lease
from precompute.store.offline.runs import Finished
from precompute.store.offline.segment import Part
from precompute.store.offline.stored_file import check_file
from precompute.store.offline.view_store import ViewStore

ENDING = "-shards"
"""What the folder's name ends with, after the run's id."""


class ShardPlan(Record, frozen=True):
    """What a run hands to workers."""

    run: str
    view: FeatureView
    model: str
    """Its fingerprint: a worker that loads another one does not work."""
    code: dict[str, str]
    """The code of a user's model, which a worker must have, too."""
    recipe: str
    partition: str | None
    full: bool
    fence: int
    """The fence of the run's lease: under another one the run is over."""
    shards: list[Part]
    """The rows of each shard."""
    columns: Part
    """A table without rows, with the source's columns."""
    examples: Part | None
    """Rows for the conversion of the model, of a view that is not in float32."""
    tables: dict[str, Part]
    """The model's arguments that were given as SQL."""
    allowed: int
    """How many rows may be rejected."""
    rows: int
    """How many the source has."""
    audited: int
    """How many rows the audit's sample is to have, of all shards together."""
    golden: Part | None
    """Golden rows, which are computed among those of the first shard; None without any."""


class ShardResult(Record, frozen=True):
    """What came of a shard, or of one attempt that failed: then ``error`` is set, and ``kind`` is
    the name of its class."""

    shard: int
    attempt: int
    worker: str
    chunks: list[Finished] = field(default_factory=list)
    rejected: int = 0
    computed_at: list[int] = field(default_factory=list)
    """When the first and the last row of this attempt were computed, µs since 1970."""
    fits: bool = False
    """Whether the model's value fitted the view for any row."""
    sample: Part | None = None
    """The file of rows for the audit."""
    sampled: int = 0
    """How many rows they were drawn from."""
    golden: Part | None = None
    """What came of the golden rows, of the shard that had them."""
    seconds: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of the worker, its children's included, while it computed the shard."""
    model_s: float = 0.0
    """Seconds in which the model computed."""
    peak_bytes: int = 0
    """Memory that the worker took at most."""
    engine: dict[str, Any] = field(default_factory=dict)
    """As of a run's report."""
    error: str | None = None
    kind: str = ""

    @property
    def rows(self) -> int:
        """How many were computed."""
        return sum(chunk.part.rows for chunk in self.chunks if chunk.part is not None)


class WorkerProgress(Record, frozen=True):
    """How far a worker is with the shard that it computes; each report of it is a beat."""

    worker: str
    shard: int | None = None
    computed: int = 0
    """Rows of it that came out of the model, rejected ones too."""
    recorded: int = 0
    """Rows of it that are in finished chunks."""
    rejected: int = 0
    reasons: str = ""
    """The commonest reasons of these."""
    fits: bool = False
    """Whether the model's value fitted the view for any row of it."""


class ShardFolder:
    """The folder of one run's shards.

    Args:
        store: of the view.
        run: id of the run.
    """

    def __init__(self, store: ViewStore, run: str) -> None:
        self.store, self.run, self.name = store, run, run + ENDING
        self.folder = store.data / self.name
        self._results: dict[int, ShardResult] = {}

    @classmethod
    def runs(cls, store: ViewStore) -> list[str]:
        """Ids of the runs that have shards, the newest first."""
        names = [name for name in store.storage.names(store.data) if name.endswith(ENDING)]
        return sorted((name.removesuffix(ENDING) for name in names), reverse=True)

    # ---- the run's side

    def open(self, plan: ShardPlan) -> None:
        """Let workers begin.

        Raises:
            OSError: the file system failed.
        """
        self.store.storage.create(self.folder / "plan.json", sealed(plan))

    def withdraw(self) -> None:
        """Let workers end."""
        with contextlib.suppress(OSError):
            self.store.storage.delete(self.folder / "plan.json")

    def close(self) -> None:
        """Let workers end, and remove the folder; what they computed stays."""
        self.withdraw()
        with contextlib.suppress(OSError):
            self.store.storage.delete_all(self.folder)

    def forget(self, plan: ShardPlan) -> None:
        """Remove what a worker wrote after the run had removed the folder."""
        with contextlib.suppress(OSError):
            if self.store.storage.stat(self.store.folder / plan.columns.path) is None:
                self.close()

    def results(self) -> dict[int, ShardResult]:
        """The result of each shard that is done or failed for good."""
        for name in self._names("result"):
            number = int(name[7:12])
            if number not in self._results:
                found = read_record_file(
                    ShardResult,
                    self.folder / name,
                    "run the view again: it takes over what is done",
                )
                if found is not None:
                    self._results[number] = found
        return self._results

    def beats(self) -> list[WorkerProgress]:
        """The progress that each worker that has begun reported last."""
        found = []
        for name in self._names("beat"):
            # half written, or being replaced
            with contextlib.suppress(OSError, ValueError):
                path = self.folder / name
                found.append(read_record(WorkerProgress, self.store.storage.read(path), path))
        return found

    # ---- a worker's side

    def plan(self) -> ShardPlan | None:
        """What is to be computed; None where the run is over.

        Raises:
            SnapshotError: it cannot be read.
        """
        return read_record_file(ShardPlan, self.folder / "plan.json", "run the view again")

    def is_open(self, plan: ShardPlan) -> bool:
        """Whether the run still waits for results: it is not over, and no other one has begun."""
        there = self.store.storage.stat(self.folder / "plan.json") is not None
        return there and not self.is_superseded(plan)

    def is_superseded(self, plan: ShardPlan) -> bool:
        """Whether another run of the view, or of the partition, has begun."""
        by = holder(self.store.leases, run_lease(plan.partition))
        return by is not None and by.fence != plan.fence

    def take(self, shard: int, by: str, ttl_s: float) -> Lease:
        """The right to compute a shard.

        Raises:
            ConflictError: another worker has it.
        """
        return take(self.folder, f"{shard:05d}", by, ttl_s=ttl_s)

    def is_taken(self, shard: int) -> bool:
        """Whether a worker computes the shard, as far as clocks tell."""
        return is_held(self.folder, f"{shard:05d}")

    def begun(self) -> set[int]:
        """The shards that a worker has taken before."""
        return {int(name[6:-5]) for name in self._names("lease")}

    def attempt(self, shard: int, number: int) -> str:
        """Name of the folder of an attempt's parts and journal."""
        return f"{self.run}-s{shard:05d}-{number}"

    def attempts(self, shard: int) -> list[int]:
        """Numbers of the attempts at a shard that left a journal."""
        pattern = re.compile(re.escape(f"{self.run}-s{shard:05d}-") + r"(\d+)")
        found = (pattern.fullmatch(run) for run in self.store.journals.runs())
        return sorted(int(match[1]) for match in found if match)

    def record(self, result: ShardResult) -> bool:
        """Record what came of a shard; returns whether it counts: another attempt may have been
        first.

        Raises:
            OSError: the file system failed.
        """
        try:
            path = self.folder / f"result-{result.shard:05d}.json"
            self.store.storage.create(path, sealed(result))
            return True
        except FileExistsError:
            return False

    def fail(self, result: ShardResult) -> None:
        """Record why an attempt failed.

        Raises:
            OSError: the file system failed.
        """
        name = f"failed-{result.shard:05d}-{result.attempt}.json"
        self.store.storage.write(self.folder / name, sealed(result))

    def failed(self, shard: int) -> set[int]:
        """Numbers of the attempts at a shard that failed with an error."""
        return {int(name[13:-5]) for name in self._names(f"failed-{shard:05d}")}

    def beat(self, beat: WorkerProgress) -> None:
        """Report how far a worker is; a full disk does not end it."""
        with contextlib.suppress(OSError):
            self.store.storage.write(self.folder / f"beat-{beat.worker}.json", sealed(beat))

    def _names(self, kind: str) -> list[str]:
        names = self.store.storage.names(self.folder)
        return sorted(n for n in names if n.startswith(f"{kind}-") and n.endswith(".json"))


def error_of(result: ShardResult) -> PrecomputeError:
    """The error that a shard failed with, as it was raised."""
    kinds: dict[str, Any] = {kind.__name__: kind for kind in _with_subclasses(PrecomputeError)}
    kind: type[PrecomputeError] = kinds.get(result.kind, SnapshotError)
    return kind(f"shard {result.shard}, computed by {result.worker}: {result.error}")


def _with_subclasses(kind: type[PrecomputeError]) -> list[type[PrecomputeError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _with_subclasses(child))]


def _options(store: ViewStore) -> pa.ipc.IpcWriteOptions:
    """Compressed where the files travel: in a folder that costs 17 ns a row of three numbers, and
    they are mapped as they are."""
    return pa.ipc.IpcWriteOptions(compression=None if store.storage.local else "lz4")


def bounds(rows: int, shards: int) -> list[int]:
    """Where each of so many shards ends, in rows: of like size, none empty."""
    shards = max(1, min(rows, shards))
    return [rows * (n + 1) // shards for n in range(shards)]


def write_shards(
    store: ViewStore,
    run: str,
    batches: Iterator[pa.RecordBatch],
    rows: int,
    shards: int,
) -> list[Part]:
    """Write rows into a file for each of so many shards, in the order of the rows.

    Args:
        store: of the view.
        run: id of the folder that they are written to.
        batches: the rows.
        rows: how many there are, at least one.
        shards: how many files.

    Raises:
        OSError: the file system failed.
    """
    ends, written = bounds(rows, shards), list[Part]()
    pieces = _cut(batches, ends)
    for number, (end, before) in enumerate(zip(ends, [0, *ends], strict=False)):
        path = store.data / run / f"rows-{number:05d}.arrow"
        make_folder(path.parent)
        first = next(pieces)
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_stream(file, first.schema, options=_options(store)) as out,
        ):
            out.write_batch(first)
            left = end - before - first.num_rows
            while left:
                piece = next(pieces)
                out.write_batch(piece)
                left -= piece.num_rows
        written.append(part_of(store, path, end - before))
    return written


def _cut(batches: Iterator[pa.RecordBatch], ends: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """The batches, cut where shards end."""
    seen, left = 0, iter(ends)
    end = next(left)
    for batch in batches:
        rest = batch
        while rest.num_rows:
            piece = rest.slice(0, end - seen)
            seen, rest = seen + piece.num_rows, rest.slice(piece.num_rows)
            end = next(left, end) if seen == end else end
            yield piece


def write_shard_table(store: ViewStore, run: str, name: str, table: pa.Table) -> Part:
    """Write a whole table into one file.

    Raises:
        OSError: the file system failed.
    """
    path = store.data / run / f"{name}.arrow"
    make_folder(path.parent)
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, table.schema, options=_options(store)) as out,
    ):
        out.write_table(table)
    return part_of(store, path, table.num_rows)


def part_of(store: ViewStore, path: Path, rows: int) -> Part:
    """A file that was written here, made there for all."""
    store.storage.put([path])
    return Part(str(path.relative_to(store.folder)), rows, path.stat().st_size, sha256_of(path))


def shard_file_path(store: ViewStore, part: Part) -> Path:
    """A file that a run or a worker wrote here, compared with its checksum.

    Raises:
        SnapshotError: it is gone, or damaged.
        UnreadableError: it cannot be read now.
    """
    file = part.in_folder(store.folder)
    try:
        check_file(file)
    except SnapshotError as exc:
        raise SnapshotError(f"{exc}; run the view again") from exc
    return file.path


def read_shard_table(path: Path) -> pa.Table:
    """What :func:`write_shard_table` wrote."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return stream.read_all()


def shard_batches(
    path: Path, entity: Sequence[str], done: pa.Array | None, batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """The rows of a shard's file, without those whose keys' texts are ``done``, at most so many at
    a time."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            if done is not None:
                keys = key_column(batch.select(list(entity)), entity)
                batch = batch.filter(pc.invert(pc.is_in(keys, value_set=done, skip_nulls=True)))
            for start in range(0, batch.num_rows, batch_rows):
                yield batch.slice(start, batch_rows)
