"""Lease: the right to write, held for as long as its holder lives and gives signs of life. What
runs, publishing, backfills and the scheduler's leader hold, so that each thing is done by one of
them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import threading
import time
import weakref
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from precompute.store.disk.durable_file import disk_message, locked, make_folder, replace_durably
from precompute.store.disk.record import Record, replace, sealed, whole_record
from precompute.store.disk.storage import (
    Storage,
    no_answer,
    read_record_file,
    storage_of,
)
from precompute.store.errors import (
    ConflictError,
    FencedError,
    PrecomputeError,
    SnapshotError,
    UnreadableError,
)

log = logging.getLogger(__name__)

TTL_S = 60.0
"""How long a holder may be silent. A model that keeps the interpreter for longer in one call would
lose its lease to a second run."""

FORGOTTEN_S = 3600.0
"""A holder that was silent for so long by the clock of what the root lies in need not be watched,
as a container that was killed last night. If that clock was set forward meanwhile, the holder finds
that it lost its lease, and nothing of it becomes visible."""

UNREADABLE = "somebody whose record is damaged"
"""The holder of a lease whose record cannot be read."""

_held: weakref.WeakSet[Lease] = weakref.WeakSet()
"""Leases that this process holds."""
_held_lock = threading.Lock()
MOST_SEEN = 10_000
_seen: dict[Path, tuple[object, float, bool]] = {}
"""The last sign of life that this process saw of a lease, by the path of its file, when it came
(monotonic s), and whether there was another before it."""


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
    on another machine, or one that is stopped, is watched by who wants the lease, and overtaken
    when there was no touch for a TTL by the clock of who watched, or for an hour by the clock of
    what the root lies in. Anyone who takes over raises the **fence**; the late holder finds a
    higher one and is refused. No two clocks are compared, and safety rests on none.

    Of a root elsewhere the record itself is what is touched, by compare and swap.
    """

    def __init__(self, folder: Path, name: str, record: Holder, sign: _Locked | _Swapped) -> None:
        self.folder, self.name, self.record = folder, name, record
        self._sign = sign
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease-{name}", daemon=True)
        self._thread.start()
        with _held_lock:
            _held.add(self)

    def check(self) -> None:
        """Raises:
        FencedError: another process took the lease meanwhile, and what this one was about to write
            must not be written.
        """
        current = holder(self.folder, self.name)
        if (
            current is not None
            and current.holder == UNREADABLE
            and current.fence == self.record.fence
        ):
            # no process took it since: its bytes were damaged, not changed
            self._sign.write_again(self.record)
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
        self._sign.end()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._stop.wait(self.record.ttl_s / 3):
            try:
                self._sign.beat()
            except (OSError, PrecomputeError) as exc:
                log.warning("lease %r cannot be renewed: %s", self.name, exc)


class _Locked:
    """Sign of life of a local holder: a file that it has locked, and touches."""

    def __init__(self, folder: Path, name: str, fence: int) -> None:
        self._folder, self._name = folder, name
        self._path = _held_path(folder, name, fence)
        self._file = self._path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.beat()
        except BaseException:
            self._file.close()
            raise

    def beat(self) -> None:
        # needs no space on a full disk
        os.utime(self._file.fileno())

    def write_again(self, record: Holder) -> None:
        replace_durably(_record_path(self._folder, self._name), sealed(record))

    def end(self) -> None:
        if not self._file.closed:
            # gone or not, the flock ends with the file
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._file.close()


class _Sign(Record, frozen=True):
    """The record of a lease elsewhere. ``started`` distinguishes the process from a later
    one of its number; ``beats`` changes while it lives, and the nonce that the storage adds with
    it."""

    holder: Holder
    started: str
    beats: int = 0
    free: bool = False


class _Swapped:
    """Sign of life elsewhere: a record that its holder swaps for the next."""

    def __init__(self, storage: Storage, path: Path, sign: _Sign) -> None:
        self._storage, self._path, self._last, self._lock = storage, path, sign, threading.Lock()

    def _swap(self, free: bool = False) -> None:
        with self._lock:
            if self._last.free:
                return
            new = replace(self._last, beats=self._last.beats + 1, free=free)

            def changed(data: bytes | None) -> bytes:
                found = whole_record(_Sign, data, self._path)
                # its own record that was damaged is written again
                if data is None or (found is not None and found.holder != new.holder):
                    raise ConflictError("somebody else took it")
                return sealed(new)

            self._storage.update(self._path, changed)
            self._last = new

    def beat(self) -> None:
        self._swap()

    def write_again(self, record: Holder) -> None:
        self._storage.write(self._path, sealed(replace(self._last, holder=record)))

    def end(self) -> None:
        # where that fails, the TTL ends it
        with contextlib.suppress(OSError, PrecomputeError):
            self._swap(free=True)


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
        busy: the message when it is held; the holder is added.
        force: take it from its holder, who is fenced then.
        wait_s: how long to wait for a holder to let go.

    Raises:
        ConflictError: it is held.
        SnapshotError: the file system failed.
        UnreadableError: who holds it cannot be read now.
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
    storage, path = storage_of(folder), _record_path(folder, name)
    try:
        if storage.local:
            make_folder(folder)
        while not force and not _may_be_taken(found := _found(storage, folder, name)):
            assert found is not None
            if not _seems_silent(storage, found):
                raise _held_error(found.holder, name, busy)
            if not _may_be_taken(found):
                time.sleep(found.holder.ttl_s / 20)
        if not storage.local:
            return _take_swapped(storage, folder, name, by, ttl_s, busy, force)
        with locked(folder / ".lock"):
            last, now = holder(folder, name), _found(storage, folder, name)
            if now is not None and not force and not _may_be_taken(now):
                raise _held_error(now.holder, name, busy)
            record = Holder(1 if last is None else last.fence + 1, by, _host(), os.getpid(), ttl_s)
            sign = _Locked(folder, name, record.fence)
            try:
                sign.write_again(record)
            except BaseException:
                sign.end()
                raise
            # Each holder removed the files of those before: no need to look through all leases'
            # files.
            if last is not None:
                _held_path(folder, name, last.fence).unlink(missing_ok=True)
    except UnreadableError:
        raise
    except OSError as exc:
        raise SnapshotError(disk_message(path, exc)) from exc
    return Lease(folder, name, record, sign)


def _take_swapped(
    storage: Storage, folder: Path, name: str, by: str, ttl_s: float, busy: str, force: bool
) -> Lease:
    """As :func:`take`, of a root that is not local."""
    path = _record_path(folder, name)
    before = _read_or_none(storage, path)
    last = whole_record(_Sign, before, path)
    # the fence of a damaged one is not known: past any that was given
    fence = last.holder.fence if last else 0 if before is None else time.time_ns() // 1000
    record = Holder(fence + 1, by, f"{_host()} {_namespace()}", os.getpid(), ttl_s)
    sign = _Sign(record, _started(os.getpid()))

    def swapped(data: bytes | None) -> bytes:
        found = _found_elsewhere(path, data)
        if data != before or not (force or _may_be_taken(found)):
            raise _held_error(record if found is None else found.holder, name, busy)
        return sealed(sign)

    storage.update(path, swapped)
    return Lease(folder, name, record, _Swapped(storage, path, sign))


class _Found(NamedTuple):
    """A lease that somebody may hold: the file that shows it, and what changes there with each sign
    of life."""

    holder: Holder
    path: Path
    sign: object
    lives: bool
    """Whether its process is known to be there, if perhaps stopped."""


def _found(storage: Storage, folder: Path, name: str) -> _Found | None:
    """Who may hold a lease; None where it is known that nobody does."""
    path = _record_path(folder, name)
    if not storage.local:
        return _found_elsewhere(path, _read_or_none(storage, path))
    last = holder(folder, name)
    if last is None:
        return None
    path, lives = _held_path(folder, name, last.fence), False
    try:
        with path.open("rb") as file:
            sign = os.fstat(file.fileno()).st_mtime_ns
            if last.host == _host():
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        lives = True
    except OSError as exc:
        raise no_answer(path, exc) from exc
    return _Found(last, path, sign, lives)


def _found_elsewhere(path: Path, data: bytes | None) -> _Found | None:
    sign = whole_record(_Sign, data, path)
    if sign is None or sign.free or _is_dead(sign):
        return None
    lives = sign.holder.host == f"{_host()} {_namespace()}"
    return _Found(sign.holder, path, sign, lives)


def _still_s(found: _Found) -> tuple[float, bool]:
    """For how long this process saw no sign of life of a lease, by a clock that nobody sets, and
    whether it ever saw one."""
    now_s = time.monotonic()
    sign, since_s, beats = _seen.get(found.path, (None, now_s, False))
    if sign != found.sign:
        if len(_seen) >= MOST_SEEN:
            # those that are watched are watched anew
            _seen.clear()
        beats, since_s = sign is not None, now_s
        _seen[found.path] = found.sign, since_s, beats
    return now_s - since_s, beats


def _may_be_taken(found: _Found | None) -> bool:
    """Whether nobody holds a lease, or who does gave no sign of life for a TTL."""
    return found is None or _still_s(found)[0] >= found.holder.ttl_s


def _seems_silent(storage: Storage, found: _Found) -> bool:
    """Whether it is worth watching who holds a lease, or, of a look that is the first, what is most
    likely: by the last sign of life and now, both by the clock of what the root lies in."""
    still_s, beats = _still_s(found)
    if still_s >= found.holder.ttl_s:
        return True
    try:
        item = None if beats else storage.stat(found.path)
        now_s = 0.0 if item is None else storage.now_s(found.path.parent)
    except OSError:
        # who may not write there does not learn what time it is there
        return False
    silent_s = -math.inf if item is None else now_s - item.modified_ns / 1e9
    if silent_s >= FORGOTTEN_S and not found.lives:
        _seen[found.path] = found.sign, time.monotonic() - silent_s, False
    return silent_s > found.holder.ttl_s


def _held_error(by: Holder, name: str, busy: str) -> ConflictError:
    return ConflictError(f"{busy or f'lease {name!r} is held'} (by {by.holder}, process {by.pid})")


def _read_or_none(storage: Storage, path: Path) -> bytes | None:
    try:
        return storage.read(path)
    except FileNotFoundError:
        return None


def _is_dead(sign: _Sign) -> bool:
    """Whether it is known to be: its process is of this boot of this machine, and gone."""
    by = sign.holder
    return by.host == f"{_host()} {_namespace()}" and _started(by.pid) != sign.started


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@lru_cache(1)
def _namespace() -> str:
    """The PID namespace that this process's number is of."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def release_leases() -> None:
    """Let go of all that this process holds: it is about to end without unwinding, and another
    machine would wait for the TTL."""
    with _held_lock:
        held = list(_held)
    for lease in held:
        lease.release()


def is_held(folder: Path, name: str) -> bool:
    """Whether a process holds the lease now; of one that this process watched, by its signs of
    life, else by the clock of what the root lies in."""
    storage = storage_of(folder)
    found = _found(storage, folder, name)
    return found is not None and not _seems_silent(storage, found)


def holder(folder: Path, name: str) -> Holder | None:
    """Who took the lease last, alive or not; None when none ever did. Where the record is damaged,
    a holder whom the newest lock stands for: the kernel knows of every process that holds it."""
    storage, path = storage_of(folder), _record_path(folder, name)
    remedy = "who holds it is known from its lock alone"
    try:
        if not storage.local:
            sign = read_record_file(_Sign, path, remedy)
            return None if sign is None else sign.holder
        return read_record_file(Holder, path, remedy)
    except SnapshotError as exc:
        log.warning("%s", exc)
        fences = [path.name.split(".")[2] for path in folder.glob(f".lease-{name}.*.held")]
        # past any that was given, where no lock says so
        fence = max(
            (int(fence) for fence in fences if fence.isdigit()), default=time.time_ns() // 1000
        )
        return Holder(fence, UNREADABLE, _host(), 0, TTL_S)


def _record_path(folder: Path, name: str) -> Path:
    return folder / f"lease-{name}.json"


def _held_path(folder: Path, name: str, fence: int) -> Path:
    return folder / f".lease-{name}.{fence}.held"


@lru_cache(1)
def _host() -> str:
    """This boot of this machine, as seen from this process's namespace."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {boot}".strip()
