"""Batches: what a model process tells of the batches that it computes: their times, and spans for those requests in them that are traced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from precompute.store.telemetry.instruments import MODEL_SECONDS, Meter
from precompute.store.telemetry.trace import Asked


class Tell(Protocol):
    """:meth:`precompute.store.telemetry.tracing.Spans.tell`."""

    def __call__(self, trace: str, name: str, began_ns: int, ended_ns: int, rows: int) -> None: ...


class Batches:
    """Told of each batch, by the thread that computes it.

    Args:
        meter: counts.
        tell: makes a span under a request's; None where nothing is traced.
    """

    def __init__(self, meter: Meter, tell: Tell | None = None) -> None:
        self._meter, self._tell = meter, tell

    def begun(self, asked: Sequence[Asked | None]) -> None:
        """A batch of these begins now: until then they were in the queue."""
        if self._tell is not None:
            now_ns = time.time_ns()
            for one in _once(asked):
                self._tell(one.trace, "queue", one.at_ns, now_ns, asked.count(one))

    @contextlib.contextmanager
    def inputs(self, asked: Sequence[Asked | None]) -> Iterator[None]:
        """Meanwhile the source's rows are read for these."""
        began_ns = time.time_ns()
        try:
            yield
        finally:
            self._told("inputs", began_ns, asked)

    @contextlib.contextmanager
    def model(self, views: Iterable[str], asked: Sequence[Asked | None]) -> Iterator[None]:
        """Meanwhile the model computes these rows of these views, in one batch."""
        began_ns = time.time_ns()
        try:
            yield
        finally:
            took_s = (time.time_ns() - began_ns) / 1e9
            for view in set(views):
                self._meter.timer(MODEL_SECONDS, view).observe(took_s)
            self._told("model", began_ns, asked)

    def _told(self, name: str, began_ns: int, asked: Sequence[Asked | None]) -> None:
        if self._tell is not None:
            now_ns = time.time_ns()
            for one in _once(asked):
                # of how many rows, whosever they are: these are computed together
                self._tell(one.trace, name, began_ns, now_ns, len(asked))


def _once(asked: Iterable[Asked | None]) -> list[Asked]:
    return [one for one in dict.fromkeys(asked) if one is not None]
