"""Report: writes the record of a run: what it did, with which versions, and what it took, by a
meter of its usage; shows it in lines; and calls the operator's command with it.

The record is :class:`precompute.store.offline.runs.Report`. It is written when the run begins
(``running``) and again when it ends. A run that was killed leaves ``running`` behind; the next one,
which finds its lease free, closes it as ``killed``. Planning and scheduling read these files.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import platform
import re
import resource
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from precompute.engine.resources import ResidentPeak, allowed, usable_threads
from precompute.jobs.run.command_process import (
    Terminated,
    end_signal,
    last_words,
    logged_as,
    signal_text,
)
from precompute.store.disk.lease import is_held
from precompute.store.disk.record import replace
from precompute.store.errors import (
    ConflictError,
    GateError,
    PrecomputeError,
    RejectedError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.offline.log import PUBLISH_LEASE
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import duration, utc_now

log = logging.getLogger(__name__)

COMPUTING = ("run", "materialize")
"""Commands that compute rows: they hold the lease of their partition while they run."""

PUBLISHING = ("publish", "rollback", "resume", "reconcile")
"""Commands that hold the publishing lease, and no other."""

OPERATOR_COMMANDS = ("publish", "rollback", "resume")
"""Commands of operators: one that is refused before it changes anything leaves no report."""

_REFUSALS = (ConflictError, GateError, SnapshotError, UnreadableError)

VERSIONED = ("precompute-store", "torch", "pyarrow", "duckdb", "transformers", "faiss-cpu", "numpy")


@contextlib.contextmanager
def reporting_run(
    store: ViewStore,
    command: str,
    finished: Callable[[Report], None] = lambda _: None,
    **known: Any,
) -> Iterator[Report]:
    """A run from start to end: its report is written when it begins, and when it succeeds, fails or
    is interrupted; then ``finished`` is called with it. A command of :data:`OPERATOR_COMMANDS`
    that was refused and changed nothing leaves none. ``known`` are fields that are known at the
    start."""
    run = f"{store.runs.stamp()}-{secrets.token_hex(3)}"
    report = Report(
        run,
        store.name,
        command,
        started_at=utc_now(),
        versions=dict(versions()),
        pid=os.getpid(),
        **known,
    )
    started, meter = time.monotonic(), UsageMeter()
    store.runs.write(report, "nothing was begun, the live snapshot is untouched")

    def closed(exc: BaseException) -> None:
        report.status, report.error = _end(exc)
        # a full disk must not hide the reason of the failure
        with contextlib.suppress(PrecomputeError):
            _write(store, report, started, meter)

    with logged_as(run), last_words(lambda: closed(Terminated())):
        try:
            yield report
        except BaseException as exc:
            closed(exc)
            if (
                command in OPERATOR_COMMANDS
                and report.backfill is None
                and report.snapshot is None
                and isinstance(exc, _REFUSALS)
            ):
                store.runs.withdraw(report)
            finished(report)
            raise
        _write(store, report, started, meter)
    finished(report)


def _end(exc: BaseException) -> tuple[str, str]:
    number = end_signal()
    if number is not None:
        return "cancelled" if number == signal.SIGINT else "killed", signal_text(number)
    error = (
        str(exc)
        if isinstance(exc, PrecomputeError)
        else f"{type(exc).__name__}: {exc}".removesuffix(": ")
    )
    # no terminal takes half a surrogate pair: status and history print it
    error = error.encode(errors="backslashreplace").decode()
    if isinstance(exc, RejectedError):
        return "rejected", error
    if isinstance(exc, GateError):
        return "refused", error
    if isinstance(exc, KeyboardInterrupt):
        return "cancelled", error
    return "failed" if isinstance(exc, Exception) else "killed", error


def close_dead(
    store: ViewStore,
    partition: str | None,
    why: str = "it died without reporting why",
    commands: Collection[str] = COMPUTING,
    own: str | None = None,
) -> list[str]:
    """Close as ``killed`` the reports of this partition's runs that still say ``running``. The
    caller knows that none but its ``own`` is running, since it holds their lease or saw the process
    end. Only ``commands`` that compute have a partition.

    Returns:
        ids of the runs closed.
    """
    closed = []
    for report in store.runs.unended():
        # the process number proves nothing: in a container every command may have the same
        if report.command in commands and report.partition == partition and report.run != own:
            report.status, report.error, report.finished_at = "killed", f"killed: {why}", utc_now()
            store.runs.write(report)
            closed.append(report.run)
    return closed


def with_real_status(store: ViewStore, report: Report) -> Report:
    """The report, ``killed`` where the process is gone without having written that; ``running``
    only for a run that is."""
    if report.status != "running":
        return report
    publishing = report.command in PUBLISHING and is_held(store.leases, PUBLISH_LEASE)
    if publishing or (report.command in COMPUTING and store.running(report.partition)):
        return report
    return replace(
        report,
        status="killed",
        error="the process died without reporting why: killed, out of memory, or the machine went"
        " down",
    )


def _write(store: ViewStore, report: Report, started: float, meter: UsageMeter) -> None:
    seconds = time.monotonic() - started
    report.seconds = round(seconds, 3)
    report.stages_s = {name: round(stage_s, 3) for name, stage_s in report.stages_s.items()}
    report.finished_at = utc_now()
    meter.fill(report)
    if report.counts.get("source") and "model" in report.stages_s:
        report.rows_per_s = round(report.counts["source"] / seconds, 1)
    store.runs.write(report)


def engine_line(engine: dict[str, Any]) -> str:
    """Rates, padding, MFU and memory in one line; empty where nothing was computed."""
    if "shards" in engine:
        return _shards_line(engine)
    if not engine.get("batches"):
        return ""
    said = [f"{engine['rows_per_s']:,.0f} rows/s"]
    if engine["cost"] and engine["cost_unit"] != "rows":
        said.append(f"{engine['cost_per_s']:,.0f} {engine['cost_unit']}/s")
        said.append(f"padding {engine['padding']:.1%}")
    said.append(
        f"{engine['batches']:,} batch{'es' * (engine['batches'] > 1)}"
        + (
            f" of up to {engine['budget']:,} {engine['cost_unit']}"
            if engine["cost"] and engine.get("budget")
            else ""
        )
    )
    if (lanes := engine.get("lanes", {"count": 1}))["count"] > 1:
        said.append(
            f"{lanes['count']} at once, {lanes['threads']} thread{'s' * (lanes['threads'] > 1)}"
            " each"
        )
    if engine.get("mfu"):
        said.append(
            f"{engine['flops_per_s'] / 1e9:,.0f} GFLOP/s, MFU {engine['mfu']:.0%} of"
            f" {engine['peak_flops'] / 1e9:,.0f}"
        )
    if engine.get("peak_memory_bytes"):
        said.append(f"peak {engine['peak_memory_bytes'] / 2**20:,.0f} MiB")
    # what a model counted itself
    if isinstance(counted := engine.get(str(engine.get("device"))), dict):
        said += [f"{name.replace('_', ' ')} {count:,}" for name, count in counted.items() if count]
    if engine.get("workers"):
        said.append(str(engine["device"]))
    for count, what in (
        (engine["retries"], "batches retried"),
        (engine["out_of_memory"], "times out of memory"),
        (engine.get("workers_replaced", 0), "workers replaced"),
    ):
        said += [f"{count:,} {what}"] if count else []
    return " · ".join(said)


def _shards_line(engine: dict[str, Any]) -> str:
    """The same for a run whose rows workers computed."""
    workers, again = engine["workers"], engine["attempts"] - engine["shards"]
    said = [
        f"{engine['shards']} shard{'s' * (engine['shards'] != 1)} by {workers}"
        f" worker{'s' * (workers != 1)}",
        f"{engine['cpu_s']:,.1f} CPU s",
        f"peak {engine['peak_memory_bytes'] / 2**20:,.0f} MiB each",
    ]
    said += [f"{again} shard attempt{'s' * (again != 1)} repeated"] if again else []
    said += [f"{engine['retries']:,} batches retried"] if engine["retries"] else []
    return " · ".join(said)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and the main libraries; cached, since reading them takes longer than a
    small window."""
    installed = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.distribution(name)
            # in a fifth of the time of found.version, which parses the text as an e-mail
            version = re.search(
                r"^Version: *(\S+)", found.read_text("METADATA") or "", re.MULTILINE
            )
            installed[name] = found.version if version is None else version[1]
    return installed


# ---- Notify: the operator's own command, called after a run. If it fails, the run does not.

TIMEOUT_S = 30.0


def notify(command: Sequence[str], report: Report, folder: Path) -> None:
    """Run ``command`` in the project's ``folder``, with the run in its environment:
    ``NOTIFY_VIEW``, ``_STATUS``, ``_COMMAND``, ``_RUN``, ``_SNAPSHOT``, ``_EPOCH``, ``_ERROR``,
    ``_HELD``. An
    empty command does nothing; one that fails, or takes longer than :data:`TIMEOUT_S`, is logged.
    """
    if not command:
        return
    message = {
        "VIEW": report.view,
        "STATUS": report.status,
        "COMMAND": report.command,
        "RUN": report.run,
        "SNAPSHOT": report.snapshot,
        "EPOCH": report.epoch,
        "ERROR": report.error,
        "HELD": report.held,
    }
    # the kernel takes neither NUL nor more than 128 KiB in one variable
    texts = {
        name: "" if value is None else str(value).replace("\0", "\\0")[:10_000]
        for name, value in message.items()
    }
    texts = {name: text.encode(errors="replace").decode() for name, text in texts.items()}
    environment = os.environ | {f"NOTIFY_{name}": text for name, text in texts.items()}
    try:
        done = subprocess.run(
            list(command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        log.warning("notify: %s cannot be run: %s", command[0], exc)
        return
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-500:]
        log.warning("notify: %s ended with status %d: %s", command[0], done.returncode, said)


def is_told(report: Report) -> bool:
    """Whether the operator's command is called with a run that ended: one that published, that
    failed in any way, or whose snapshot waits."""
    waits = report.status == "committed" and report.held is not None
    return waits or report.status == "published" or report.error is not None


def notifying(
    command: Sequence[str], folder: Path, finished: Callable[[Report], None]
) -> Callable[[Report], None]:
    """``finished``, after the operator's command for a run that failed."""

    def ended(report: Report) -> None:
        if report.error is not None:
            notify(command, report, folder)
        finished(report)

    return ended


_STAT, _IO = Path("/proc/stat"), Path("/proc/self/io")


class UsageMeter:
    """Reads the process's and the machine's own counters: 0.1 ms when a run begins, and when it
    ends."""

    def __init__(self) -> None:
        self._began_s, self._machine, self._read = time.process_time(), _ticks(), _read_bytes()

    def fill(self, report: Report) -> None:
        """Complete the usage of a report, of the run that began with this meter; calling it again
        is no error."""
        usage = report.usage
        usage.cores = usable_threads(allowed())
        own_s = time.process_time() - self._began_s
        of_stages_s = sum(s for name, s in usage.cpu_s.items() if name != "other")
        usage.cpu_s["other"] = max(0.0, own_s - of_stages_s)
        for seconds in (usage.cpu_s, usage.workers_cpu_s):
            seconds.update({name: round(s, 3) for name, s in seconds.items()})
        usage.peak_bytes = ResidentPeak().bytes()
        usage.read_bytes = max(0, _read_bytes() - self._read)
        ticks = [now - then for now, then in zip(_ticks(), self._machine, strict=False)]
        # a run of an instant, or a system that does not tell
        if sum(ticks) > 0:
            usage.idle, usage.steal = (
                round(part / sum(ticks), 3) for part in (ticks[3] + ticks[4], ticks[7])
            )


class OverlappingCpu:
    """CPU seconds of the stages that compute rows, which overlap: the reader's thread is ``read``,
    what :meth:`Report.stage` counts by ``time.thread_time`` is that stage's, and all else that the
    process computes meanwhile is ``model``, threads that libraries start included. Child processes
    that end in between are workers."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._before_s, self._children_s = self._uncounted_s(), _children_s()

    def end(self, read_s: float) -> None:
        """Count them; ``read_s`` is what the reader's thread computed."""
        model_s = self._uncounted_s() - self._before_s - read_s
        self._report.add_cpu("read", read_s)
        self._report.add_cpu("model", max(0.0, model_s))
        if (workers_s := _children_s() - self._children_s) > 0:
            self._report.add_cpu("model", workers_s, workers=True)

    def _uncounted_s(self) -> float:
        return time.process_time() - sum(self._report.usage.cpu_s.values())


def usage_line(report: Report) -> str:
    """What a run took, in one line; empty where that was not recorded."""
    usage = report.usage
    if not usage.cores:
        return ""
    own_s, workers_s = sum(usage.cpu_s.values()), sum(usage.workers_cpu_s.values())
    said = [f"{own_s:,.1f} CPU s of {usage.cores} core{'s' * (usage.cores > 1)}"]
    said += [f"{workers_s:,.1f} of workers"] if workers_s else []
    said += [f"{duration(usage.gpu_s)} of GPUs"] if usage.gpu_s else []
    said += [f"the machine {usage.idle:.0%} idle"] if usage.idle is not None else []
    said += [f"peak {usage.peak_bytes / 2**20:,.0f} MiB"]
    for size_bytes, what in (
        (usage.read_bytes, "read"),
        (usage.written_bytes, "written"),
        (usage.loaded_bytes, "loaded"),
        (usage.spilled_bytes, "spilled"),
    ):
        said += [f"{size_bytes / 1e6:,.1f} MB {what}"] if size_bytes else []
    return " · ".join(said)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ticks() -> list[int]:
    """The machine's CPU time since it was started, in ticks: user, nice, system, idle, waiting for
    disks, interrupts (2), steal; empty where the system does not tell."""
    try:
        with _STAT.open() as file:
            return [int(number) for number in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return []


def _read_bytes() -> int:
    try:
        return int(_IO.read_text().partition("rchar:")[2].split(maxsplit=1)[0])
    except (OSError, ValueError, IndexError):
        return 0
