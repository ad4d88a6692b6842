"""Handover: the windows of one source for several engines, one after the other, each of which goes on with what those before it have not done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.ahead import JOIN_S, closed
from precompute.engine.window import Outcome, Rows, taken


@dataclass(slots=True, eq=False)
class _Begun:
    """A window that was read, and of which not everything is told."""

    number: int
    batch: pa.RecordBatch
    left: npt.NDArray[np.bool_]
    """Which of its rows have neither features nor a rejection."""


class Handover:
    """Gives windows out and takes outcomes in; seen from outside there was one engine.

    Args:
        windows: rows; advanced in the threads of the engines, never in two at once.
    """

    def __init__(self, windows: Iterable[pa.RecordBatch]) -> None:
        self._source = iter(windows)
        self._reading = threading.Lock()
        self._begun: dict[int, _Begun] = {}
        self._count = 0
        self._error: BaseException | None = None
        """Of the source: who read it may have been closed before that was told, and a generator that raised is at its end."""
        self._turn = Turn(self, deque(), None)

    def turn(self, most_rows: int | None = None) -> Turn:
        """The windows for the next engine, and no more for the one before, whose stream must be closed. Waits for the window that is being read.

        Args:
            most_rows: larger ones are cut.
        """
        with self._reading:
            # one that is done and was not told to be gets its end from the next engine
            again = deque((begun, np.flatnonzero(begun.left)) for begun in self._begun.values())
            self._turn = Turn(self, again, most_rows)
            return self._turn

    def told(self, done: Outcome) -> tuple[pa.RecordBatch, Outcome]:
        """What the engine whose turn it is made of what it was given, as that of the window that was read."""
        begun, rows = self._turn.given[done.window] if not done.last else self._turn.given.pop(done.window)
        rejections = [replace(rejection, row=int(rows[rejection.row])) for rejection in done.rejections]
        computed = rows[done.rows]
        begun.left[computed] = False
        begun.left[[rejection.row for rejection in rejections]] = False
        last = done.last and not begun.left.any()
        if last:
            del self._begun[begun.number]
        return begun.batch, Outcome(computed, done.features, rejections, begun.number, last)

    def close(self) -> None:
        """Close the source, unless a thread is in the middle of reading it."""
        if self._reading.acquire(timeout=JOIN_S):
            try:
                self._turn = Turn(self, deque(), None)
                if (error := closed(self._source, None)) is not None:
                    raise error
            finally:
                self._reading.release()

    def next_of(self, turn: Turn) -> pa.RecordBatch:
        """Raises:
        StopIteration: there are no more, or it is another's turn.
        BaseException: what the source raised, to each that comes there.
        """
        with self._reading:
            if turn is not self._turn:
                raise StopIteration
            if turn.again:
                begun, rows = turn.again.popleft()
            else:
                batch = self._read()
                begun, rows = _Begun(self._count, batch, np.ones(batch.num_rows, np.bool_)), np.arange(batch.num_rows)
                self._begun[self._count] = begun
                self._count += 1
            if turn.most_rows is not None and len(rows) > turn.most_rows:
                turn.again.appendleft((begun, rows[turn.most_rows :]))
                rows = rows[: turn.most_rows]
            turn.given[turn.count] = (begun, rows)
            turn.count += 1
            return taken(begun.batch, rows)

    def _read(self) -> pa.RecordBatch:
        if self._error is not None:
            raise self._error
        try:
            return next(self._source)
        except StopIteration:
            raise
        except BaseException as exc:
            self._error = exc
            raise


class Turn(Iterator[pa.RecordBatch]):
    """What one engine is given, numbered from 0 as engines do."""

    def __init__(self, handover: Handover, again: deque[tuple[_Begun, Rows]], most_rows: int | None) -> None:
        self._handover = handover
        self.again, self.most_rows = again, most_rows
        self.given: dict[int, tuple[_Begun, Rows]] = {}
        self.count = 0

    def __next__(self) -> pa.RecordBatch:
        return self._handover.next_of(self)
