"""Ahead: runs an iterator in a thread of its own, a bounded number of bytes ahead of its consumer.
Stages chained like this overlap.

Every stage knows how long it worked (busy), how long it waited for the stage before (starved) and
for room after it (blocked): the stage that is never starved nor blocked is the one that sets the
pace.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

JOIN_S = 1.0
"""How long :meth:`Ahead.close` waits for a stage that is in the middle of something; its thread is
a daemon."""


@dataclass(slots=True)
class StageTime:
    """Seconds of one stage; ``cpu_s`` what its own thread computed, without threads that it
    started."""

    busy_s: float = 0.0
    starved_s: float = 0.0
    blocked_s: float = 0.0
    cpu_s: float = 0.0


class Ahead(Generic[Item], Iterator[Item]):
    """The items of ``items``, made ahead in a thread.

    Args:
        items: is advanced in the thread only, and closed there if it can be.
        max_bytes: how much may lie ready; one item always may.
        max_items: how many may lie ready.
        before: the stage that ``items`` takes from; its waiting is this stage's starving.
    """

    def __init__(
        self,
        name: str,
        items: Iterator[Item],
        times: StageTime,
        size_of: Callable[[Item], int],
        max_bytes: int,
        before: Ahead[Any] | None = None,
        max_items: int = 1000,
    ) -> None:
        self.waited_s = 0.0
        self._items = items
        self._times = times
        self._size_of = size_of
        self._max_bytes = max_bytes
        self._before = before
        self._max_items = max_items
        self._ready: deque[tuple[Item, int]] = deque()
        self._ready_bytes = 0
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        """Raises:
        BaseException: what the iterator raised, after the items it made before.
        """
        started = time.monotonic()
        with self._changed:
            while not self._ready and not self._ended and not self._closed:
                self._changed.wait()
            self.waited_s += time.monotonic() - started
            if self._ready and not self._closed:
                item, size = self._ready.popleft()
                self._ready_bytes -= size
                self._changed.notify_all()
                return item
            if self._error is not None:
                error, self._error = self._error, None
                raise error
        raise StopIteration

    def ready(self) -> bool:
        """Whether the next item, or the end, need not be waited for."""
        with self._changed:
            return bool(self._ready) or self._ended or self._closed

    def close(self) -> None:
        """Stop the stage and those before it; what lies ready is dropped."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._before is not None:
            self._before.close()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def join(self) -> None:
        """Wait until its thread has ended, of a stage that was closed or is at its end."""
        self._thread.join()

    def _loop(self) -> None:
        error: BaseException | None = None
        try:
            while True:
                started, waited = time.monotonic(), self._waited_before()
                item = next(self._items, _End())
                starved = self._waited_before() - waited
                self._times.starved_s += starved
                self._times.busy_s += time.monotonic() - started - starved
                if isinstance(item, _End) or not self._put(item):
                    break
        except BaseException as exc:
            # it belongs to the one who takes the items
            error = exc
        finally:
            error = closed(self._items, error)
            self._times.cpu_s += time.thread_time()
            with self._changed:
                self._ended, self._error = True, error
                self._changed.notify_all()

    def _waited_before(self) -> float:
        return 0.0 if self._before is None else self._before.waited_s

    def _put(self, item: Item) -> bool:
        size = self._size_of(item)
        started = time.monotonic()
        with self._changed:
            while (
                self._ready
                and (
                    self._ready_bytes + size > self._max_bytes
                    or len(self._ready) >= self._max_items
                )
                and not self._closed
            ):
                self._changed.wait()
            self._times.blocked_s += time.monotonic() - started
            if self._closed:
                return False
            self._ready.append((item, size))
            self._ready_bytes += size
            self._changed.notify_all()
        return True


def closed(items: object, error: BaseException | None) -> BaseException | None:
    """Close an iterator that can be closed, in the thread that took from it; the error there was,
    or else that of closing it."""
    close = getattr(items, "close", None)
    if close is not None:
        try:
            close()
        except BaseException as exc:
            # it belongs to the one who takes the items
            return error or exc
    return error


class _End:
    """There are no more items."""


# ---- Meter: what a run's stages took, and how much the model did.


STEP = 1.02


@dataclass(slots=True)
class Meter:
    """Filled in by the engine as it goes; read it when the run is over.

    Costs are in the model's unit (tokens, rows), without padding and with; ``forward_s`` and
    ``landing_s`` are parts of the model's stage: launching the forward (on a CPU: the forward), and
    waiting for what comes back.
    """

    stages: dict[str, StageTime] = field(default_factory=dict)
    rows: int = 0
    batches: int = 0
    cost: int = 0
    padded_cost: int = 0
    flops: float = 0.0
    retries: int = 0
    out_of_memory: int = 0
    forward_s: float = 0.0
    landing_s: float = 0.0
    workers_replaced: int = 0
    rows_retried: int = 0
    """Rows that are tried again at this moment, since the worker that had them was lost."""
    batch_steps: Counter[int] = field(default_factory=Counter)
    """Batches by how long they took, in powers of :data:`STEP` seconds: of any number of them,
    little is held."""

    def stage(self, name: str) -> StageTime:
        """The time of one stage, to be added to."""
        return self.stages.setdefault(name, StageTime())

    def batch_took(self, seconds: float) -> None:
        """One more batch, from its launch to its landing."""
        self.batch_steps[round(math.log(max(seconds, 1e-9), STEP))] += 1

    def batch_ms(self) -> dict[str, float]:
        """Milliseconds that a batch took: ``p50``, ``p95`` and ``p99`` (the least that so many took
        no longer than), to 1 %; empty where none is known."""
        steps, total = sorted(self.batch_steps), self.batch_steps.total()
        found: dict[str, float] = {}
        below = 0
        for step in steps:
            below += self.batch_steps[step]
            for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                if name not in found and below >= share * total:
                    found[name] = float(f"{1e3 * STEP**step:.3g}")
        return found

    @property
    def padding(self) -> float:
        """Share of what was computed that was padding."""
        return 1 - self.cost / self.padded_cost if self.padded_cost else 0.0

    def peak_figures(self, peak_flops: float) -> dict[str, float]:
        """``mfu``, FLOP/s while the model computed as a share of ``peak_flops``; and that peak,
        which is the most that was ever seen: where the model itself reached more than the probe, on
        a machine that others use too, it is the model's."""
        computing = self.forward_s + self.landing_s
        reached = self.flops / computing if computing else 0.0
        peak = max(peak_flops, reached)
        return {"peak_flops": round(peak), "mfu": round(reached / peak, 4) if peak else 0.0}

    def to_json(self, seconds: float) -> dict[str, Any]:
        """Plain figures for a run of ``seconds``."""
        rate = 1 / seconds if seconds > 0 else 0.0
        return {
            "seconds": round(seconds, 3),
            "stages": {
                name: {
                    "busy_s": round(t.busy_s, 3),
                    "starved_s": round(t.starved_s, 3),
                    "blocked_s": round(t.blocked_s, 3),
                }
                for name, t in self.stages.items()
            },
            "model_s": {"forward": round(self.forward_s, 3), "landing": round(self.landing_s, 3)},
            "rows": self.rows,
            "rows_per_s": round(self.rows * rate, 1),
            "batches": self.batches,
            "batch_ms": self.batch_ms(),
            "cost": self.cost,
            "cost_per_s": round(self.cost * rate, 1),
            "padding": round(self.padding, 4),
            "flops_per_s": round(self.flops * rate),
            "retries": self.retries,
            "out_of_memory": self.out_of_memory,
        }
