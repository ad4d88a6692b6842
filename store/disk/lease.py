"""Lease: the right to write, held for as long as its holder lives and gives signs of life. What
runs, publishing, backfills and the scheduler's leader hold, so that each thing is done by one of
them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
import weakref
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from precompute.store.disk.durable_file import disk_message, locked, make_folder, replace_durably
from precompute.store.disk.record import Record, read_record_file, sealed
from precompute.store.errors import ConflictError, FencedError, SnapshotError

log = logging.getLogger(__name__)

TTL_S = 60.0
"""How long a holder may be silent. A model that keeps the interpreter for longer in one call would
lose its lease to a second run."""

UNREADABLE = "somebody whose record is damaged"
"""The holder of a lease whose record cannot be read."""

_held: weakref.WeakSet[Lease] = weakref.WeakSet()
"""What this process holds."""
_held_lock = threading.Lock()


class Holder(Record, frozen=True):
    """Who took a lease last. ``host`` changes with every boot of the machine, so that a process
    number is never mistaken."""

    fence: int
    holder: str
    host: str
    pid: int
    ttl_s: float


class Lease:
    """A lease that is held; made by :func:`take`. A context manager that lets go at the end.

        <folder>/lease-<name>.json            {fence, holder, host, pid, ttl_s}: who holds it
        <folder>/.lease-<name>.<fence>.held   locked by the holder, touched three times per TTL:
        that it lives

    A holder that died on this machine is known at once, since the kernel let go of its flock; one
    on another machine, or one that is stopped, once its TTL passed without a touch. Anyone who
    takes over raises the **fence**; the late holder finds a higher one and is refused. Safety never
    rests on a clock, only how soon somebody else may take over.
    """

    def __init__(self, folder: Path, name: str, record: Holder, file: BinaryIO) -> None:
        self.folder, self.name, self.record = folder, name, record
        self._file = file
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease-{name}", daemon=True)
        self._thread.start()
        with _held_lock:
            _held.add(self)

    def check(self) -> None:
        """Raises:
        FencedError: somebody else took the lease meanwhile; what this process was about to write is
            not wanted any more.
        """
        current = holder(self.folder, self.name)
        if (
            current is not None
            and current.holder == UNREADABLE
            and current.fence == self.record.fence
        ):
            # nobody took it since: what became of its bytes is nobody's act
            replace_durably(self.folder / f"lease-{self.name}.json", sealed(self.record))
            return
        if current != self.record:
            by = "nobody: its file is gone" if current is None else current.holder
            raise FencedError(
                f"{self.record.holder} was silent for over {self.record.ttl_s:.0f} s and lost its"
                f" lease {self.name!r} to {by}; nothing of it becomes visible. Was the process"
                " stopped, or the machine asleep?"
            )

    def release(self) -> None:
        """Let go; the next one may take it at once. Letting go twice is no error."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if not self._file.closed:
            # Gone or not, the flock ends with the file.
            with contextlib.suppress(OSError):
                _held_path(self.folder, self.name, self.record.fence).unlink(missing_ok=True)
            self._file.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._stop.wait(self.record.ttl_s / 3):
            try:
                # Needs no space on a full disk.
                os.utime(self._file.fileno())
            except OSError as exc:
                log.warning("lease %r cannot be renewed: %s", self.name, exc)


def take(
    folder: Path,
    name: str,
    by: str,
    *,
    ttl_s: float = TTL_S,
    busy: str = "",
    force: bool = False,
    wait_s: float = 0.0,
) -> Lease:
    """Take a lease.

    Args:
        folder: where its files are; created.
        name: letters, digits, ``-`` and ``_``.
        by: who takes it, for messages.
        ttl_s: how long the holder may be silent.
        busy: what to tell when it is held; the holder is added.
        force: take it from its holder, who is fenced then.
        wait_s: how long to wait for a holder to let go.

    Raises:
        ConflictError: it is held.
        SnapshotError: the file system failed.
    """
    assert re.fullmatch(r"[A-Za-z0-9_-]+", name), name
    limit = time.monotonic() + wait_s
    while True:
        try:
            return _take(folder, name, by, ttl_s, busy, force)
        except ConflictError:
            if time.monotonic() >= limit:
                raise
            time.sleep(0.1)


def _take(folder: Path, name: str, by: str, ttl_s: float, busy: str, force: bool) -> Lease:
    try:
        make_folder(folder)
        with locked(folder / ".lock"):
            last = _read(folder, name)
            if last is not None and not force and _is_held(folder, name, last):
                raise ConflictError(
                    f"{busy or f'lease {name!r} is held'} (by {last.holder}, process {last.pid})"
                )
            record = Holder(1 if last is None else last.fence + 1, by, _host(), os.getpid(), ttl_s)
            file = _held_path(folder, name, record.fence).open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.utime(file.fileno())
                replace_durably(folder / f"lease-{name}.json", sealed(record))
            except BaseException:
                file.close()
                raise
            # Anyone who took it before removed those before: no need to look through all leases'
            # files.
            if last is not None:
                _held_path(folder, name, last.fence).unlink(missing_ok=True)
    except OSError as exc:
        raise SnapshotError(disk_message(folder / f"lease-{name}.json", exc)) from exc
    return Lease(folder, name, record, file)


def release_leases() -> None:
    """Let go of all that this process holds: it is about to end without unwinding, and another
    machine would wait for the TTL."""
    with _held_lock:
        held = list(_held)
    for lease in held:
        lease.release()


def holder(folder: Path, name: str) -> Holder | None:
    """Who took the lease last, alive or not; None when nobody ever did."""
    return _read(folder, name)


def is_held(folder: Path, name: str) -> bool:
    """Whether somebody holds the lease now."""
    last = _read(folder, name)
    return last is not None and _is_held(folder, name, last)


def _is_held(folder: Path, name: str, last: Holder) -> bool:
    path = _held_path(folder, name, last.fence)
    try:
        if time.time() > path.stat().st_mtime + last.ttl_s:
            return False
        if last.host != _host():
            return True
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as exc:
        raise SnapshotError(f"{path} cannot be read: {exc.strerror or exc}") from exc


def _read(folder: Path, name: str) -> Holder | None:
    """Who took it last. Where the record is damaged, somebody whom the newest lock stands for:
    nobody holds it whom the kernel does not know of."""
    try:
        return read_record_file(
            Holder, folder / f"lease-{name}.json", "who holds it is known from its lock alone"
        )
    except SnapshotError as exc:
        if not isinstance(exc.__cause__, ValueError):
            raise
        log.warning("%s", exc)
        fences = [path.name.split(".")[2] for path in folder.glob(f".lease-{name}.*.held")]
        # past any that was given, where no lock tells
        fence = max(
            (int(fence) for fence in fences if fence.isdigit()), default=time.time_ns() // 1000
        )
        return Holder(fence, UNREADABLE, _host(), 0, TTL_S)


def _held_path(folder: Path, name: str, fence: int) -> Path:
    return folder / f".lease-{name}.{fence}.held"


@lru_cache(1)
def _host() -> str:
    """This boot of this machine, as seen from this process's namespace."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {boot}".strip()
