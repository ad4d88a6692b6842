"""Report: what one run did, written to ``<root>/<view>/runs/<run>.json`` whatever becomes of it.

It is written when the run begins (``running``) and again when it ends. A run that was killed leaves ``running`` behind; the next one, which
finds its lease free, closes it as ``killed``. So these files are the ledger that planning and scheduling read.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from jobs.termination import Terminated, asked, described, last_words
from store.errors import GateError, PrecomputeError, RejectedError
from store.offline.view_store import OfflineStore, utc_now

LEASED = ("run", "materialize")
"""Commands that hold the lease of their partition while they go on."""

PUBLISHING = ("publish", "rollback")
"""Commands that hold the publishing lease, and no other."""

VERSIONED = ("precompute", "torch", "pyarrow", "duckdb", "transformers", "faiss-cpu", "numpy")


@dataclass(slots=True)
class Report:
    """One run; times in seconds.

    ``status``: running · published · committed (not published) · current (nothing to do) · refused (by a gate) · rejected (too many rows) ·
    failed · cancelled (interrupted) · killed.
    """

    run: str
    view: str
    command: str
    status: str = "running"
    started_at: str = ""
    finished_at: str = ""
    seconds: float = 0.0
    snapshot: int | None = None
    epoch: int | None = None
    model: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    rows_per_s: float | None = None
    stages_s: dict[str, float] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    """What computing took, stage by stage: :meth:`precompute.engine.meter.Meter.to_json`."""
    inputs: dict[str, int] = field(default_factory=dict)
    gates: list[dict[str, Any]] = field(default_factory=list)
    resumed: int = 0
    """Rows an interrupted run had computed."""
    plan: str | None = None
    """Which rows were computed, and why."""
    partition: str | None = None
    backfill: str | None = None
    """Id of the backfill it was a part of."""
    due: str | None = None
    """The schedule's time it ran for, ISO 8601 in UTC."""
    parents: dict[str, int] = field(default_factory=dict)
    """Views it is scheduled after → the epoch of their live pointer when it began."""
    pid: int = 0
    read_at_us: int = 0
    """When the source was read, µs since 1970."""
    source_at: str | None = None
    """When the source itself was last modified, ISO 8601 in UTC; None where it is not known. See :mod:`jobs.source_age`."""
    error: str | None = None
    attention: list[str] = field(default_factory=list)
    """What an operator should look at though the run went well."""
    versions: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to a stage."""
        self.stages_s[name] = self.stages_s.get(name, 0.0) + seconds

    def to_json(self) -> dict[str, Any]:
        """A plain dict, durations rounded to the millisecond."""
        body = asdict(self)
        body["seconds"] = round(self.seconds, 3)
        body["stages_s"] = {name: round(s, 3) for name, s in self.stages_s.items()}
        return body


@contextlib.contextmanager
def recorded(
    store: OfflineStore, view: str, command: str, finished: Callable[[Report], None] = lambda _: None, **known: Any
) -> Iterator[Report]:
    """A run from start to end: its report is written when it begins, and when it succeeds, fails or is interrupted; then it is given to
    ``finished``. ``known`` are fields of it that are known at the start."""
    run = f"{store.run_stamp(view)}-{secrets.token_hex(3)}"
    report = Report(run, view, command, started_at=utc_now(), versions=versions(), pid=os.getpid(), **known)
    started = time.monotonic()
    store.write_report(view, run, report.to_json(), "nothing was begun, the live snapshot is untouched")

    def closed(exc: BaseException) -> None:
        report.status, report.error = _end(exc)
        with contextlib.suppress(PrecomputeError):  # a full disk must not hide why the run failed
            _write(store, report, started)

    with last_words(lambda: closed(Terminated())):
        try:
            yield report
        except BaseException as exc:
            closed(exc)
            finished(report)
            raise
        _write(store, report, started)
    finished(report)


def _end(exc: BaseException) -> tuple[str, str]:
    """What a run that ended with an exception is told as: status and error."""
    number = asked()
    if number is not None:
        return "cancelled" if number == signal.SIGINT else "killed", described(number)
    error = str(exc) if isinstance(exc, PrecomputeError) else f"{type(exc).__name__}: {exc}".removesuffix(": ")
    if isinstance(exc, RejectedError):
        return "rejected", error
    if isinstance(exc, GateError):
        return "refused", error
    if isinstance(exc, KeyboardInterrupt):
        return "cancelled", error
    return "failed" if isinstance(exc, Exception) else "killed", error


def close_dead(
    store: OfflineStore,
    view: str,
    partition: str | None,
    why: str = "it ended without a word",
    commands: Collection[str] = LEASED,
    own: str | None = None,
) -> list[str]:
    """Close as ``killed`` the reports of runs of this partition that never did it themselves; the caller knows that none goes on but its ``own``, if
    that was begun, since it holds their lease, or saw the process end. ``commands`` other than those that compute have no partition.

    Returns:
        ids of the runs closed.
    """
    closed = []
    for report in store.unended(view):
        # not told by its process number: in a container every command may have the same
        if report.get("command") in commands and report.get("partition") == partition and report.get("run") != own:
            report |= {"status": "killed", "error": f"killed: {why}", "finished_at": utc_now()}
            store.write_report(view, report["run"], report)
            closed.append(str(report["run"]))
    return closed


def _write(store: OfflineStore, report: Report, started: float) -> None:
    report.seconds = time.monotonic() - started
    report.finished_at = utc_now()
    if report.counts.get("source") and "model" in report.stages_s:
        report.rows_per_s = round(report.counts["source"] / report.seconds, 1)
    store.write_report(report.view, report.run, report.to_json())


def engine_line(engine: dict[str, Any]) -> str:
    """Rates, padding, MFU and memory in one line; empty where nothing was computed."""
    if not engine.get("batches"):
        return ""
    said = [f"{engine['rows_per_s']:,.0f} rows/s"]
    if engine["cost"] and engine["cost_unit"] != "rows":
        said.append(f"{engine['cost_per_s']:,.0f} {engine['cost_unit']}/s")
        said.append(f"padding {engine['padding']:.1%}")
    said.append(
        f"{engine['batches']:,} batch{'es' * (engine['batches'] > 1)}"
        + (f" of up to {engine['budget']:,} {engine['cost_unit']}" if engine["cost"] and engine.get("budget") else "")
    )
    if engine.get("mfu"):
        said.append(f"{engine['flops_per_s'] / 1e9:,.0f} GFLOP/s, MFU {engine['mfu']:.0%} of {engine['peak_flops'] / 1e9:,.0f}")
    if engine.get("peak_memory_bytes"):
        said.append(f"peak {engine['peak_memory_bytes'] / 2**20:,.0f} MiB")
    if engine.get("workers"):
        said.append(str(engine["device"]))
    for count, what in ((engine["retries"], "batches retried"), (engine["out_of_memory"], "times out of memory")):
        said += [f"{count:,} {what}"] if count else []
    return " · ".join(said)


def versions() -> dict[str, str]:
    """Python's and the main libraries' versions."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
