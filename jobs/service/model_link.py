"""Model link: a lookup worker's connection to one model process, made when there is something to ask, and again after it was lost.

Nobody who asks waits here: a thread writes what was asked, another reads what comes. What a process ended with is asked of the next one, which knows what may have
ended it. Each future ends: with its row, with why there is none, or when the connection was lost too often; or it was cancelled, and the process is told that nobody waits.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from precompute.store.fallback import CLIENT, Computed, Miss
from precompute.store.online.online_store import Pointer
from precompute.store.status import Reason
from precompute.store.telemetry.trace import TRACE
from precompute.workers.frames import framed, read_message

log = logging.getLogger(__name__)

TRY_EVERY_S = 0.05
"""How often a process that is not there yet is looked for."""


MOST_SENT = 3
"""Times that a key is asked for, of one process after the other: among others, alone, and once more to be told that it is left alone."""


@dataclass(slots=True, eq=False)
class _Asked:
    """Keys under a pointer, the first of them called ``number``, or, without keys, that it is to be opened; ``left`` of them were given up, and processes ended with
    it ``lost`` times."""

    pointer: Pointer
    keys: Sequence[str]
    inputs: Mapping[str, Mapping[str, Any]]
    deadline: float
    query: bool
    number: int
    futures: list[Future[Computed]]
    client: str
    trace: str | None = None
    left: int = 0
    lost: int = 0

    def alone(self, number: int) -> _Asked:
        """One of the keys, asked for once more."""
        at = number - self.number
        key = self.keys[at]
        given = {key: self.inputs[key]} if key in self.inputs else {}
        return replace(self, keys=[key], inputs=given, number=number, futures=[self.futures[at]], left=0, lost=self.lost + 1)

    def header(self, pointer: int) -> dict[str, Any]:
        if not self.keys:
            return {"warm": self.number, "pointer": pointer, "deadline": self.deadline}
        asked = {"ask": self.number, "pointer": pointer, "keys": self.keys, "inputs": self.inputs}
        traced = {} if self.trace is None else {"trace": self.trace}
        return asked | {"deadline": self.deadline, "query": self.query, "client": self.client} | traced


@dataclass(slots=True)
class _Connection:
    """``waiting`` is what was sent over it, by number, ``pointers`` of each view the publishing that the process knows it by, and its number."""

    socket: socket.socket
    waiting: dict[int, _Asked] = field(default_factory=dict)
    pointers: dict[str, tuple[tuple[int, str], int]] = field(default_factory=dict)
    lost: bool = False


class ModelLink:
    """To the process of one model.

    Args:
        path: its socket.
        want: told that the process is wanted, where it is not there.
        on_lost: told when a connection was lost, and the views of the rows that were waited for.
    """

    def __init__(self, path: Path, want: Callable[[], None], on_lost: Callable[[set[str]], None]) -> None:
        self._path, self._want, self._on_lost = path, want, on_lost
        self._numbers = itertools.count()
        self._lock = threading.Condition(threading.Lock())
        """Told of what is to be written."""
        self._connection: _Connection | None = None
        self._open: frozenset[tuple[str, tuple[int, str]]] = frozenset()
        self._outbox: dict[int, _Asked] = {}
        self._left: list[int] = []
        """Numbers of what nobody waits for any more, of that which was sent."""
        self._in_hand = 0
        self._closed = threading.Event()
        threading.Thread(target=self._write, name="model link", daemon=True).start()

    def ask(
        self, pointer: Pointer, keys: Sequence[str], inputs: Mapping[str, Mapping[str, Any]], deadline: float, query: bool = False
    ) -> list[Future[Computed]]:
        """As :meth:`precompute.store.fallback.Fallback.submit`."""
        asked = self._begin(pointer, keys, inputs, deadline, query, len(keys))
        with self._lock:
            self._in_hand += len(keys)
        for number, future in enumerate(asked.futures, asked.number):
            future.add_done_callback(partial(self._landed, asked, number))
        return asked.futures

    def warm(self, pointer: Pointer, deadline: float) -> Future[Computed]:
        """Have the process open what a pointer names; the future always ends in an error, once that was tried."""
        return self._begin(pointer, (), {}, deadline, False, 1).futures[0]

    def is_open(self, pointer: Pointer) -> bool:
        """Whether the process has said that it has this publishing open."""
        return (pointer.view.name, pointer.publishing) in self._open

    @property
    def idle(self) -> bool:
        """Whether no row that was asked for is waited for."""
        return self._in_hand == 0

    def close(self) -> None:
        """Ask for nothing more; what was asked ends as if the process had ended, and so does what is asked from now on."""
        with self._lock:
            self._closed.set()
            connection = self._connection
            self._lock.notify()
        if connection is not None:
            self._lose(connection)

    def _begin(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        query: bool,
        futures: int,
    ) -> _Asked:
        with self._lock:
            number = next(self._numbers)
            for _ in range(futures - 1):
                next(self._numbers)
            made: list[Future[Computed]] = [Future() for _ in range(futures)]
            asked = _Asked(pointer, keys, inputs, deadline, query, number, made, CLIENT.get(), TRACE.get())
            closed = self._closed.is_set()
            if not closed:
                self._outbox[number] = asked
                self._lock.notify()
        if closed:
            _fail(asked.futures, _ended())
        return asked

    def _landed(self, asked: _Asked, number: int, future: Future[Computed]) -> None:
        with self._lock:
            self._in_hand -= 1
            if not future.cancelled():
                return
            asked.left += 1
            connection = self._connection
            if self._outbox.get(asked.number) is asked:
                if asked.left == len(asked.futures):
                    del self._outbox[asked.number]
            elif number in self._outbox:
                # asked for once more
                del self._outbox[number]
            elif connection is not None and connection.waiting.pop(number, None) is not None:
                self._left.append(number)
                self._lock.notify()

    # ---- what is asked

    def _write(self) -> None:
        while True:
            with self._lock:
                while not (self._outbox or self._left or self._closed.is_set()):
                    self._lock.wait()
                left, self._left = self._left, []
                asked = self._outbox.pop(next(iter(self._outbox))) if self._outbox else None
                connection = self._connection
            if left and connection is not None:
                # of another connection, it knows none of them; and one that is lost is seen by who reads
                with contextlib.suppress(OSError):
                    connection.socket.sendall(framed({"left": left}))
            if asked is not None:
                self._ask(asked)
            elif self._closed.is_set():
                return

    def _ask(self, asked: _Asked) -> None:
        try:
            self._send(asked)
        except (OSError, RuntimeError, TypeError, ValueError) as exc:
            # also that there is no room for a thread, or inputs that are no JSON, which come from no request over HTTP
            _fail(asked.futures, Miss(Reason.MODEL_ERROR, f"the model process cannot be asked: {exc}"))

    def _send(self, asked: _Asked) -> None:
        connection = self._connected(asked.deadline)
        if connection is None:
            _fail(asked.futures, Miss(Reason.DEADLINE))
            return
        view, publishing = asked.pointer.view.name, asked.pointer.publishing
        known, number = connection.pointers.get(view, (None, len(connection.pointers)))
        data = b""
        if known != publishing:
            body = asked.pointer.to_bytes()
            data = framed({"pointer": number}, len(body)) + body
        data += framed(asked.header(number))
        with self._lock:
            if asked.left == len(asked.futures):
                return
            lost = connection.lost
            if not lost:
                connection.waiting |= dict.fromkeys(range(asked.number, asked.number + len(asked.futures)), asked)
        if lost:
            # between two lines
            self._send(asked)
            return
        connection.pointers[view] = publishing, number
        try:
            connection.socket.sendall(data)
        except OSError:
            # its process ended before it had all of this, and so began nothing of it
            with self._lock:
                # who reads may have seen the end first, and have ended what was asked
                lost = connection.lost
                for one in range(asked.number, asked.number + len(asked.futures)):
                    connection.waiting.pop(one, None)
            self._lose(connection)
            if not lost:
                self._send(asked)

    def _connected(self, deadline: float) -> _Connection | None:
        """The connection; None where there is none by the deadline."""
        while not self._closed.is_set():
            with self._lock:
                if self._connection is not None:
                    return self._connection
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                opened.connect(str(self._path))
            except OSError:
                opened.close()
                self._want()
                if time.monotonic() + TRY_EVERY_S > deadline:
                    return None
                time.sleep(TRY_EVERY_S)
                continue
            with self._lock:
                if self._closed.is_set():
                    opened.close()
                    return None
                connection = self._connection = _Connection(opened)
            try:
                threading.Thread(target=self._read, args=(connection,), name="model answers", daemon=True).start()
            except RuntimeError:
                self._lose(connection)
                raise
        return None

    # ---- what is answered

    def _read(self, connection: _Connection) -> None:
        try:
            with contextlib.suppress(OSError), connection.socket.makefile("rb") as file:
                while (message := read_message(file)) is not None:
                    header, body = message
                    if "open" in header:
                        self._open = frozenset((view, (epoch, at)) for view, (epoch, at) in header["open"])
                    self._land(connection, header, body.to_pybytes())
        finally:
            self._lose(connection)

    def _land(self, connection: _Connection, header: Mapping[str, Any], body: bytes) -> None:
        at = 0
        for number, computed_at_us, size in header["rows"]:
            with self._lock:
                asked = connection.waiting.pop(number, None)
            if asked is not None:
                # given up just now
                with contextlib.suppress(InvalidStateError):
                    asked.futures[number - asked.number].set_result(Computed(body[at : at + size], computed_at_us))
            at += size
        for number, reason, detail, broken in header["missed"]:
            with self._lock:
                asked = connection.waiting.pop(number, None)
            if asked is not None:
                _fail([asked.futures[number - asked.number]], Miss(Reason(reason), detail, broken=broken))

    def _lose(self, connection: _Connection) -> None:
        """Ask once more for what was asked over a connection that is no more."""
        with self._lock:
            if connection.lost:
                return
            connection.lost = True
            if self._connection is connection:
                self._connection, self._open = None, frozenset()
            waiting, connection.waiting = connection.waiting, {}
            over, now = [], time.monotonic()
            for number, asked in waiting.items():
                future = asked.futures[number - asked.number]
                if self._closed.is_set() or not asked.keys or asked.lost + 1 >= MOST_SENT or asked.deadline <= now:
                    over.append(future)
                elif not future.done():
                    self._outbox[number] = asked.alone(number)
            self._lock.notify()
        # wakes who reads it
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()
        _fail(over, _ended())
        if not self._closed.is_set():
            self._on_lost({asked.pointer.view.name for asked in waiting.values() if asked.keys})


def _ended() -> Miss:
    return Miss(Reason.MODEL_ERROR, "the model process ended", broken=None)


def _fail(futures: Iterable[Future[Computed]], miss: Miss) -> None:
    for future in futures:
        # given up, or told already
        with contextlib.suppress(InvalidStateError):
            future.set_exception(miss)
