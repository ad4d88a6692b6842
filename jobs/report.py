"""Report: what one run did, written to ``<root>/<view>/runs/<run>.json`` whatever becomes of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from store.errors import PrecomputeError, RejectedError
from store.offline_store import OfflineStore, utc_now

VERSIONED = ("precompute", "torch", "pyarrow", "duckdb", "transformers", "faiss-cpu", "numpy")


@dataclass(slots=True)
class Report:
    """One run. ``status``: running, published, committed, current (nothing to do), rejected or failed; times in seconds."""

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
    inputs: dict[str, int] = field(default_factory=dict)
    error: str | None = None
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
    store: OfflineStore, view: str, command: str, finished: Callable[[Report], None] = lambda _: None
) -> Iterator[Report]:
    """A run from start to end: its report is written when it succeeds, fails or is interrupted (not when it is killed), and given to
    ``finished``."""
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(3)}"
    report = Report(run, view, command, started_at=utc_now(), versions=versions())
    started = time.monotonic()
    try:
        yield report
    except BaseException as exc:
        report.status = "rejected" if isinstance(exc, RejectedError) else "failed"
        report.error = str(exc) if isinstance(exc, PrecomputeError) else f"{type(exc).__name__}: {exc}"
        with contextlib.suppress(PrecomputeError):  # a full disk must not hide why the run failed
            _write(store, report, started)
        finished(report)
        raise
    _write(store, report, started)
    finished(report)


def _write(store: OfflineStore, report: Report, started: float) -> None:
    report.seconds = time.monotonic() - started
    report.finished_at = utc_now()
    if report.counts.get("source") and "model" in report.stages_s:
        report.rows_per_s = round(report.counts["source"] / report.seconds, 1)
    store.write_report(report.view, report.run, report.to_json())


def versions() -> dict[str, str]:
    """Python's and the main libraries' versions."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
