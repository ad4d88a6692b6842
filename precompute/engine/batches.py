"""Batches: the stages before the model: windows are prepared, and cut in batches of like cost; and
how much one may cost, and for how long it may compute. A row that cannot be prepared is one bad
row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.rows import Batch, Later, Rows, Window, taken
from precompute.model import CheckingModel, Model, SizedModel, StagedModel
from precompute.registry import described
from precompute.store.errors import ModelError
from precompute.store.feature_view import FeatureView

WINDOW_ROWS = 65_536
"""Rows of a window, at most."""
WIDE_ROWS = 8192
"""Rows of a window of rows that are not narrow (:func:`window_rows`): so many texts are sorted
together. 1,024 instead costs 12 % of the rate at a large budget."""
WINDOW_BYTES = 2**21
"""Bytes of a window of narrow rows, at most."""

DEVICE_WINDOW_ROWS = 131_072
"""Rows of a window for a device that computes large batches: 64 times the first one of rows, and of
titles of 10 tokens, too."""


def window_rows(schema: pa.Schema) -> int:
    """How many rows of these columns to read as one window: more of narrow ones, since each window
    costs the stages some 0.3 ms. Of 10⁷ rows of an id and a number a run took 167 ns of CPU a row
    by 8,192, and takes 134 by 65,536 (AMD Zen 5)."""
    try:
        row_bytes = max(1, sum(int(field.type.bit_width) for field in schema) // 8)
    except ValueError:
        # of a text or a list there is none
        return WIDE_ROWS
    return min(WINDOW_ROWS, max(WIDE_ROWS, WINDOW_BYTES // row_bytes))


MIN_FILL = 0.5
"""Share of the budget below which a batch is not cut for the sake of less padding, since small
batches are slow."""


def batches_by_cost(
    costs: npt.NDArray[np.int64], max_cost: int | Callable[[int], int], max_padding: float = 1.0
) -> Iterator[npt.NDArray[np.int64]]:
    """Row numbers of each batch, dearest rows first, so that running out of memory shows at the
    start.

    The padded cost of a batch, rows times the dearest row, stays within ``max_cost``; a single row
    beyond it goes alone.

    Args:
        costs: int64 [rows], at least 1.
        max_cost: budget of one batch, or what returns it when the batch is made, given the cost of
            all rows that are left.
        max_padding: share of the padded cost that may be padding, where the batch stays at least
            half full without more.
    """
    if len(costs) and costs.min() == costs.max():
        yield from _alike(len(costs), int(costs[0]), max_cost)
        return
    order = np.argsort(-costs, kind="stable")
    sums = np.concatenate(([0], np.cumsum(costs[order])))
    start = 0
    while start < len(order):
        budget = max_cost(int(sums[-1] - sums[start])) if callable(max_cost) else max_cost
        dearest = int(costs[order[start]])
        rows = max(1, min(budget // dearest, len(order) - start))
        if max_padding < 1 and costs[order[start + rows - 1]] < dearest:
            least = max(1, min(rows, int(np.ceil(MIN_FILL * budget / dearest))))
            number = np.arange(least, rows + 1)
            # grows with the rows, which are sorted
            padding = 1 - (sums[start + number] - sums[start]) / (number * dearest)
            rows = max(least, int(least - 1 + np.count_nonzero(padding <= max_padding)))
        yield order[start : start + rows]
        start += rows


def _alike(
    rows: int, cost: int, max_cost: int | Callable[[int], int]
) -> Iterator[npt.NDArray[np.int64]]:
    positions = np.arange(rows)
    start = 0
    while start < rows:
        end = start + max(
            1, (max_cost((rows - start) * cost) if callable(max_cost) else max_cost) // cost
        )
        yield positions[start:end]
        start = end


PREPARE_S = 5.0
"""What preparing a window should take at most, or it is cut in smaller ones. Long, since rows are
best sorted in large windows."""
START_WINDOW_ROWS = 64
"""Rows of the first window that is prepared."""

MAX_PADDING = 0.01
"""Share of a batch that may be padding, as long as the batch is not cut below half its budget for
it. Measured over 5,268 texts at 2,048 tokens: 1.28 % without, 0.78 % with."""


class Preparation:
    """Makes windows and batches for one model.

    Args:
        staged: the model, where it is one.
        next_budget: returns what the batch made now may cost, given the cost of what is left of its
            window.
    """

    def __init__(
        self,
        model: Model,
        staged: StagedModel | None,
        view: FeatureView,
        next_budget: Callable[[int], int],
    ) -> None:
        self._staged, self._view, self._next_budget = staged, view, next_budget
        self._checking = model if isinstance(model, CheckingModel) else None
        self._sized = model if staged is None and isinstance(model, SizedModel) else None

    def windows(self, batches: Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]) -> Iterator[Window]:
        """Prepared windows of batches, each as it came and as the model sees it; several of one
        that takes longer than :data:`PREPARE_S`."""
        paced = (self._staged or self._sized or self._checking) is not None
        pace = Pace(START_WINDOW_ROWS if paced else None, PREPARE_S)
        # a model whose rows become large, such as pictures, declares how many it takes at once
        most = getattr(self._staged, "prepared_rows", None)
        for number, (batch, shown) in enumerate(batches):
            first = 0
            while True:
                part = shown.slice(first, pace.limit if most is None else min(most, pace.limit))
                started = time.monotonic()
                window = self.window(
                    Window(batch, part, number, first, first + part.num_rows >= batch.num_rows)
                )
                if part.num_rows:
                    pace.done(part.num_rows, time.monotonic() - started)
                yield window
                first += part.num_rows
                if window.last:
                    break

    def batches(self, windows: Iterable[Window]) -> Iterator[Batch]:
        """The batches of each window, dearest rows first, and its end."""
        for window in windows:
            for positions, budget in self._planned(window):
                yield Batch(window, positions, budget, self._inputs(window, positions))
            yield Batch(window, None)

    def window(self, window: Window) -> Window:
        """A window, prepared."""
        if self._checking is not None and window.shown.num_rows:
            for row, reason in self._unusable(self._checking, window):
                window.reject(row, "input", reason)
        window.rows = np.arange(window.shown.num_rows)
        if window.rejections:
            window.rows = np.setdiff1d(window.rows, np.fromiter(window.rejections, np.int64))
        if not len(window.rows):
            return window
        if self._staged is not None:
            self._prepare_staged(self._staged, window)
        elif self._sized is not None:
            window.costs = self._costs(
                self._called("costs()", self._sized.costs, taken(window.shown, window.rows)), window
            )
        return window

    def _prepare_staged(self, model: StagedModel, window: Window) -> None:
        try:
            prepared = model.prepare(
                taken(window.shown, window.rows) if window.rejections else window.shown
            )
        except (ModelError, KeyboardInterrupt):
            raise
        except BaseException:
            # which row did it is what counts
            self._find_unpreparable(model, window, window.rows)
            window.rows = np.array(
                [row for row in window.rows.tolist() if row not in window.rejections], np.int64
            )
            if not len(window.rows):
                return
            try:
                prepared = model.prepare(taken(window.shown, window.rows))
            except (ModelError, KeyboardInterrupt):
                raise
            except BaseException as exc:
                what = (
                    f"prepare() of {len(window.rows):,} rows raised {described(exc)}, though it"
                    " took the same rows in smaller numbers"
                )
                raise ModelError(f"the model of view {self._view.name!r}: {what}") from exc
        for position, reason in prepared.bad.items():
            window.reject(int(window.rows[position]), "input", reason)
        window.prepared, window.costs = prepared, self._costs(prepared.costs, window)

    def _find_unpreparable(self, model: StagedModel, window: Window, rows: Rows) -> None:
        try:
            model.prepare(taken(window.shown, rows))
        except (ModelError, KeyboardInterrupt):
            raise
        except BaseException as exc:
            if len(rows) == 1:
                window.reject(int(rows[0]), "prepare", described(exc))
                return
            self._find_unpreparable(model, window, rows[: len(rows) // 2])
            self._find_unpreparable(model, window, rows[len(rows) // 2 :])

    def _called(
        self, what: str, method: Callable[[pa.RecordBatch], Any], batch: pa.RecordBatch
    ) -> Any:
        try:
            return method(batch)
        except (ModelError, KeyboardInterrupt):
            raise
        except BaseException as exc:
            # a user's model may raise anything
            raise ModelError(
                f"the model of view {self._view.name!r}: {what} raised {described(exc)}"
            ) from exc

    def _unusable(self, model: CheckingModel, window: Window) -> list[tuple[int, str]]:
        """The rows that the model takes none of, with its reasons.

        Raises:
            ModelError: it names them otherwise than by their position.
        """
        named = self._called("unusable()", model.unusable, window.shown)
        if not isinstance(named, Mapping) or not all(
            isinstance(row, (int, np.integer)) and 0 <= row < window.shown.num_rows for row in named
        ):
            raise ModelError(
                f"the model of view {self._view.name!r}: unusable() is to return {{position of a"
                f" row, from 0: reason}} of {window.shown.num_rows} rows, and returned"
                f" {str(named)[:80]}"
            )
        return [(int(row), str(reason)) for row, reason in named.items()]

    def _costs(self, named: npt.ArrayLike, window: Window) -> Rows:
        """What the model named, at least 1 each.

        Raises:
            ModelError: no integer for each row.
        """
        costs = np.asarray(named)
        if costs.shape != (len(window.rows),) or costs.dtype.kind not in "iu":
            raise ModelError(
                f"the model of view {self._view.name!r}: its costs are {costs.dtype}"
                f" {list(costs.shape)}, not an integer for each of {len(window.rows)} rows"
            )
        at_least_1: Rows = np.maximum(costs, 1, dtype=np.int64, casting="unsafe")
        return at_least_1

    def _planned(self, window: Window) -> Iterator[tuple[Rows, int]]:
        """Positions of each batch, and the budget it was made under."""
        positions = np.arange(len(window.rows))
        if window.prepared is not None and window.prepared.bad:
            positions = np.setdiff1d(positions, np.fromiter(window.prepared.bad, np.int64))
        if window.costs is None or len(positions) < 2:
            start = 0
            while start < len(positions):
                budget = self._next_budget(len(positions) - start)
                yield positions[start : start + budget], budget
                start += budget
            return
        budget = 0

        def next_budget(left: int) -> int:
            nonlocal budget
            budget = self._next_budget(left)
            return budget

        padding = 1.0 if self._staged is None else MAX_PADDING
        for chosen in batches_by_cost(window.costs[positions], next_budget, padding):
            yield positions[chosen], budget

    def _inputs(self, window: Window, positions: Rows) -> Any:
        if self._staged is None or window.prepared is None:
            return window.at(positions)
        try:
            return self._staged.inputs(window.prepared, positions)
        except (ModelError, KeyboardInterrupt):
            raise
        except BaseException:
            return Later()


# ---- Budget: how much a batch may cost; and pace, for how long it may compute.

ROUNDS = 3
"""Batches of each candidate before one is chosen."""
TIE = 0.97
"""A budget this close to the best rate is as good, and the smaller one takes less memory."""
FILLED = 0.5
"""Share of its budget, padding counted, that a batch fills to count: one that costs less says
nothing of it, as a window's last one may."""
PADDED = 0.1
"""Share of a batch that is padding, beyond which it says nothing either: its window was small, as
the first ones are."""
TRIES = 16
"""Batches made under a candidate, after which it is given up unless enough of them were filled:
those on their way, some 11, among them."""
SHORT_S = 0.02
"""A batch that takes no longer is not made smaller near the end of its window: of a small model
another window follows at once, and each batch costs the other stages a third of a millisecond."""
MEMORY_SHARE = 0.8
"""Share of the free memory that one batch may take."""
GROW_AFTER = 32
"""Batches in a row that went well before a budget that was cut grows again."""
GROW_BY = 1.25
BELOW_CEILING = 0.9
"""Share of a cost that ran out of memory up to which the budget grows again."""


class Budget:
    """The cost that the next batch may have; one thread may read it while another reports batches.

    On a GPU it is searched: the first batches take turns with several budgets, and the smallest of
    the best wins; where that is the largest, larger ones take turns with it. What a batch took,
    measured, bounds every larger one before it is tried. A batch that ran out of memory halves the
    budget, which grows back in small steps towards what did not fit.

    Args:
        start: the first budget, at least 1.
        fixed: whether it was configured: no search, and no smaller batches near the end, but the
            ladder all the same.
        search: whether the best budget is searched; without, it stays what it begins with.
        reach: largest candidate of the search, in multiples of ``start``.
        free_bytes: returns the memory that can still be taken.
    """

    def __init__(
        self,
        start: int,
        *,
        fixed: bool = False,
        search: bool = True,
        reach: int = 2,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._free_bytes = free_bytes
        self.cost = max(1, start)
        self.ceiling: int | None = None
        self._wanted = self.cost
        self._good = 0
        self._short = False
        self._bytes_per_cost = 0.0
        self._most = self.cost * reach
        # what was configured is not made smaller
        self._least = self.cost if fixed else max(1, self.cost // 2)
        self._candidates: list[int] = []
        self._measured: dict[int, list[tuple[int, float]]] = {}
        self._given: dict[int, int] = {}
        self._turn = 0
        if search and not fixed:
            self._try([self.cost // 2, self.cost, self.cost * 2])
        self._before: tuple[int, int | None, list[int]] = (self.cost, None, self._candidates)

    @property
    def settled(self) -> bool:
        """Whether the search is over."""
        return not self._candidates

    def next(self, share: int = 2**62) -> int:
        """The budget of the batch made now.

        Args:
            share: of what is left to compute, a part that is small enough for several who compute
                at once to end together: near the end, batches become smaller, down to half of the
                first budget; not where one is over in :data:`SHORT_S`.
        """
        if self._short:
            share = 2**62
        if not self._candidates and share >= self.cost:
            return self.cost
        with self._lock:
            if share < self.cost:
                return min(self.cost, max(share, self._least))
            if not self._candidates:
                return self.cost
            self._turn += 1
            candidate = self._candidates[self._turn % len(self._candidates)]
            if share < candidate:
                return share
            self._given[candidate] += 1
            return candidate

    def done(
        self, budget: int, cost: int, seconds: float, size_bytes: int = 0, padded_cost: int = 0
    ) -> None:
        """A batch made under ``budget`` went well.

        Args:
            budget: what :meth:`next` said.
            cost: what its rows cost, padding not counted.
            seconds: how long it took.
            size_bytes: memory it took beyond what was taken before it; 0 when not measured.
            padded_cost: what its rows cost, padding counted; by default there is none.
        """
        padded_cost = max(cost, padded_cost)
        self._short = seconds * self.cost < SHORT_S * padded_cost
        if not size_bytes and not self._candidates and self.cost >= self._wanted:
            return
        filled = padded_cost >= FILLED * budget
        with self._lock:
            # a small batch takes more for each unit of cost: the libraries' own memory
            if size_bytes > 0 and filled:
                self._bytes_per_cost = max(self._bytes_per_cost, size_bytes / padded_cost)
            if self._candidates:
                if filled and budget in self._measured and cost >= (1 - PADDED) * padded_cost:
                    self._measured[budget].append((cost, seconds))
                self._search()
            elif self.cost < self._wanted:
                self._good += 1
                if self._good >= GROW_AFTER:
                    self._good = 0
                    if self.ceiling is not None and self.cost >= self._limit():
                        # it may have been another process that took the memory
                        self.ceiling = int(self.ceiling * GROW_BY) + 1
                    self.cost = max(
                        self.cost, min(int(self.cost * GROW_BY) + 1, self._wanted, self._limit())
                    )

    def out_of_memory(self, cost: int) -> None:
        """A batch of this cost did not fit: halve."""
        with self._lock:
            self._before = (self.cost, self.ceiling, self._candidates)
            self._good = 0
            self.ceiling = cost if self.ceiling is None else min(self.ceiling, cost)
            self._candidates = [c for c in self._candidates if c < cost]
            self.cost = max(1, min(self.cost, cost) // 2)

    def was_one_row(self) -> None:
        """What did not fit was a single row, that does not fit alone either: take the last halving
        back."""
        with self._lock:
            self.cost, self.ceiling, self._candidates = self._before

    def _limit(self) -> int:
        """The largest budget that memory allows, as far as is known."""
        limit = 2**62 if self.ceiling is None else max(1, int(self.ceiling * BELOW_CEILING))
        if self._bytes_per_cost and self._free_bytes is not None:
            limit = min(
                limit, max(1, int(MEMORY_SHARE * self._free_bytes() / self._bytes_per_cost))
            )
        return limit

    def _try(self, candidates: list[int]) -> None:
        """Have these take turns, as far as they are allowed; what was measured of one before was
        beside others."""
        self._candidates = sorted(
            {max(1, c) for c in candidates if c <= max(self._most, self.cost)}
        )
        self._measured = {c: [] for c in self._candidates}
        self._given = dict.fromkeys(self._candidates, 0)

    def _search(self) -> None:
        limit = self._limit()
        unfilled = [
            c
            for c in self._candidates
            if self._given[c] >= TRIES and len(self._measured[c]) <= ROUNDS
        ]
        if unfilled:
            self._most = min(self._most, max(1, min(unfilled) - 1))
        self._candidates = [c for c in self._candidates if c <= limit and c not in unfilled]
        measured = {c: self._measured[c] for c in self._candidates}
        if not measured:
            self.cost = self._wanted = min(self.cost, limit)
            return
        if all(len(batches) > ROUNDS for batches in measured.values()):
            # the first of each is left out: it pays for memory that the later ones find at hand
            rates = {
                c: sum(n for n, _ in m[1:]) / max(sum(s for _, s in m[1:]), 1e-9)
                for c, m in measured.items()
            }
            best = max(rates.values())
            self.cost = self._wanted = min(c for c, rate in rates.items() if rate >= TIE * best)
            largest = self.cost == max(rates)
            self._candidates = []
            if largest and 2 * self.cost <= min(self._most, limit):
                self._try([c for c in (self.cost, 2 * self.cost, 4 * self.cost) if c <= limit])


LONG_S = 10.0
"""Nothing takes longer, if it can be helped, whatever the bargain."""
GAIN = 1.3
"""A size whose rate is so many times that of a smaller one is worth its time."""
FLAT = 0.7
"""Where one of half the size or less takes more than this share of the time, cutting does not
help."""
PACE_GROW_BY = 8
"""Factor by which a batch may be larger than the one before, at most."""


class Pace:
    """The largest cost that is begun now.

    Args:
        start: where to begin; None for any.
        goal_s: how long one should take. Up to twice that is let be.
    """

    def __init__(self, start: int | None, goal_s: float) -> None:
        self.limit = 2**62 if start is None else start
        self._goal_s = goal_s
        self._seen: dict[int, tuple[int, float]] = {}
        """Bits of a cost → the last one of that size, and its seconds."""

    def done(self, cost: int, seconds: float) -> None:
        """Something of this cost, at least 1, took so long."""
        seconds = max(seconds, 1e-9)
        size, rate = cost.bit_length(), cost / seconds
        self._seen[size] = (cost, seconds)
        smaller = max((c / s for bits, (c, s) in self._seen.items() if bits < size), default=0.0)
        larger = [(c, s) for bits, (c, s) in self._seen.items() if bits > size]
        better = max((c for c, s in larger if s <= LONG_S and c / s >= GAIN * rate), default=0)
        same = 0
        # back to a larger one that takes no longer, or on to one that is not known
        if seconds > LONG_S / 2:
            below = [s for c, s in self._seen.values() if 2 * c <= cost]
            flat = [c for c, s in larger if 2 * cost <= c and FLAT * s < seconds]
            same = max(flat, default=2 * cost if below and min(below) > FLAT * seconds else 0)
        pays = 0 < GAIN * smaller <= rate
        if same:
            self.limit = max(self.limit, same)
        elif seconds > LONG_S or (seconds > 2 * self._goal_s and not pays and not better):
            self.limit = min(self.limit, max(1, int(cost * self._goal_s / seconds)))
        elif seconds <= self._goal_s / 2:
            self.limit = max(self.limit, cost * min(PACE_GROW_BY, int(self._goal_s / seconds)))
        elif better:
            self.limit = max(self.limit, better)
        elif seconds <= LONG_S / 2 and (pays or not smaller) and not larger:
            self.limit = max(self.limit, 2 * cost)
