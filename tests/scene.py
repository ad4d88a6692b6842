"""Scene: a small real project of a test, and what tests do with it: run, publish, roll back, serve,
read."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from precompute.jobs.cli import main
from precompute.jobs.config.project import Project
from precompute.jobs.ops.status import StatusLine, view_status
from precompute.jobs.ops.verify import Check, verify
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.judge.gate_table import TABLE
from precompute.jobs.run.rollback import resume, rollback
from precompute.jobs.run.rows.plan import Plan, RunOptions
from precompute.jobs.run.run_view import plan_view, run_view
from precompute.jobs.serve.fallback import ViewFallback
from precompute.store.answers.fallback import Computed
from precompute.store.answers.lookup import Lookup
from precompute.store.offline.log import LiveRef
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import Packed
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.online.url import open_online_store


def values_of(pointer: Pointer, computed: Computed) -> dict[str, Any]:
    """The features of a row that a fallback made of no query."""
    columns = RowCodec(pointer.view).decode(Packed.of([computed.row])).columns
    return {
        name: column.to_pylist()[0]
        for name, column in zip(pointer.view.feature_names, columns, strict=True)
    }


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """What a full disk is like: no larger file can be written."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python takes a module's cached bytecode that was cut short for whole
    cached, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, most))
    try:
        yield
    finally:
        sys.dont_write_bytecode = cached
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


UNJUDGED: dict[str, Any] = dict.fromkeys(name for name in TABLE if name != "bounds")
"""``gates``: of the features' values nothing is said."""


class Scene(Project):
    """A project as any other; its view is ``numbers`` where none is named."""

    def cli(self, *command: str) -> int:
        """Exit status of the command line."""
        return main(["-c", str(self.folder), *command])

    def reread(self) -> Scene:
        """The project as its files are now."""
        return Scene(self.folder, {})

    # ---- what is done to a view

    def run(self, view: str = "numbers", **options: Any) -> Report:
        """Compute it and publish it; ``options`` as of
        :func:`precompute.jobs.run.run_view.run_view`."""
        return run_view(self, view, Silent(), RunOptions(**options))

    def materialize(self, view: str = "numbers", **options: Any) -> Report:
        """Compute it and commit it."""
        return self.run(view, command="materialize", **options)

    def resume(self, view: str = "numbers") -> Report:
        """Let go of it, and publish what waits."""
        return resume(self, view, Silent())

    def publish(self, view: str = "numbers", **options: Any) -> Report:
        """Publish what is committed."""
        return self.run(view, command="publish", **options)

    def rollback(self, view: str = "numbers", **options: Any) -> Report:
        """Go back to what was live before."""
        return rollback(self, view, Silent(), **options)

    def publish_all(self, *views: str) -> None:
        """Compute and publish each of these views, or all."""
        for view in views or self.views:
            self.run(view)

    def plan(self, view: str = "numbers", **options: Any) -> Plan:
        """What a run would compute."""
        return plan_view(self, view, RunOptions(**options))

    # ---- what is kept of it

    @property
    def store(self) -> ViewStore:
        """What is kept of ``numbers``."""
        return self.offline.view("numbers")

    def numbers(self, view: str = "numbers") -> list[int]:
        """Of its snapshots."""
        return self.offline.view(view).numbers()

    def snapshot(self, number: int | None = None, view: str = "numbers") -> Snapshot:
        """The newest one, or the one of this number."""
        return self.offline.view(view).snapshot(
            self.numbers(view)[-1] if number is None else number
        )

    def refused_by(self, number: int | None = None, view: str = "numbers") -> list[str]:
        """The gates that refuse its newest snapshot, or the one of this number, accepted ones left
        out."""
        store = self.offline.view(view)
        return list(Standing(store).refused_by(self.snapshot(number, view)))

    def snapshot_of(self, report: Report) -> Snapshot:
        """The one that a run committed or published."""
        assert report.snapshot is not None
        return self.snapshot(report.snapshot, report.view)

    def rows(self, number: int | None = None, view: str = "numbers") -> list[dict[str, Any]]:
        """Of a snapshot, from Parquet."""
        batches = self.offline.view(view).batches(self.snapshot(number, view))
        return [row for batch in batches for row in batch.to_pylist()]

    def doubles(self, number: int | None = None) -> dict[Any, float]:
        """Key → double of a snapshot, no key twice."""
        rows = self.rows(number)
        doubles = {row["id"]: row["double"] for row in rows}
        assert len(doubles) == len(rows) == self.snapshot(number).rows
        return doubles

    def report(self, view: str = "numbers") -> Report:
        """The newest run's."""
        report = self.offline.view(view).runs.last()
        assert report is not None
        return report

    def live(self, view: str = "numbers") -> LiveRef:
        """The live pointer, which must be there."""
        ref = self.offline.view(view).log.live()
        assert ref is not None
        return ref

    def live_snapshot(self, view: str = "numbers") -> Snapshot:
        """The snapshot that is live offline."""
        return self.snapshot(self.live(view).snapshot, view)

    def status(self, view: str = "numbers") -> dict[str, Any]:
        """Its line of ``status``, which is as its schema says."""
        with self.online_store() as store:
            line = view_status(self, self.offline.view(view), store)
        msgspec.convert(line, StatusLine)
        assert line.keys() == StatusLine.__annotations__.keys()
        return line

    def faults(self, view: str = "numbers") -> list[Check]:
        """What ``verify`` finds wrong."""
        return [check for check in verify(self, view) if not check.ok]

    # ---- what is served of it

    def open_online(self) -> OnlineStore:
        """Its online store."""
        return open_online_store(self.online)

    def open_lookup(self, fallback: Any = None, **options: Any) -> Lookup:
        """A reader of its own."""
        return Lookup(self.open_online(), self.root, fallback, **options)

    @contextlib.contextmanager
    def online_store(self) -> Iterator[OnlineStore]:
        """Its online store, closed afterwards."""
        with contextlib.closing(self.open_online()) as store:
            yield store

    @contextlib.contextmanager
    def lookup(self, fallback: Any = None, **options: Any) -> Iterator[Lookup]:
        """A reader that is closed afterwards."""
        with contextlib.closing(self.open_lookup(fallback, **options)) as lookup:
            yield lookup

    @contextlib.contextmanager
    def answering(self) -> Iterator[Lookup]:
        """A reader with the model behind every miss; both are closed afterwards."""
        with (
            contextlib.closing(ViewFallback(self.offline, self.home, memory_mb=64)) as fallback,
            self.lookup(fallback) as lookup,
        ):
            yield lookup

    def pointer(self, view: str = "numbers") -> Pointer:
        """The online pointer, which must be there."""
        with self.online_store() as store:
            pointer = store.live(view)
        assert pointer is not None
        return pointer

    def served(
        self, keys: Sequence[Any] = (1, 2, 3), view: str = "numbers"
    ) -> tuple[int, list[float | None]]:
        """(snapshot, double of each key), all of one snapshot."""
        with self.lookup() as lookup:
            table = lookup.get(view, keys)
        (snapshot,) = set(table["snapshot"].to_pylist())
        return snapshot, table["double"].to_pylist()

    def nearest(self, x: float) -> tuple[int, str]:
        """(snapshot, key) of the row whose vector is nearest to the one of x."""
        with self.lookup() as lookup:
            answer = lookup.search("numbers", vector=[x, x + 1, x + 2, x + 3], k=1)
        return answer["snapshot"], answer["rows"][0]["key"]
