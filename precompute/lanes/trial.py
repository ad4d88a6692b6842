"""Trial: how many lanes a model is computed in, by what its first batches take. Nothing is computed for it that is not asked for anyway."""

from __future__ import annotations

from dataclasses import dataclass

from precompute.lanes.cores import usable_threads

TURN_S = 0.2
"""How long each number of lanes has its turn, of which there are two; at least :data:`TURN_BATCHES` batches a lane, and no more than :data:`ENOUGH_BATCHES`."""
TURN_BATCHES = 2
ENOUGH_BATCHES = 24
"""Of a small model they take 30 ms, and 0.4 s of one lane were a third of a run over 2 M rows."""
TIE = 0.97
"""A number of lanes this close to the best rate is as good, and the smaller takes less memory."""
CLEAR = 1.5
"""A number whose rate is so many times another's is better than it, though its turn came later, when batches are cheaper: the other has no second one,
which for MiniLM in bfloat16 by the C++ encoder was 0.15 s at half the rate."""
LONG_S = 2.0
"""What a batch should take in a lane at most: there a batch has a share of the CPU. Beyond, a killed run loses more and a progress bar stands still."""
MEMORY_SHARE = 0.5
"""Of the free memory, at most, for the batches of all lanes."""
WIDE = 4
"""Compute threads of a lane, where there are enough to try that between one and all: more would wait for one another, and fewer have a model's weights
come from memory for each."""


@dataclass(slots=True)
class _Turn:
    lanes: int
    length: int
    """In turns: the most lanes are next to themselves on the way there and back."""
    seen: int = 0
    """Batches, the first ``lanes`` of which are not counted: they find caches cold."""
    batches: int = 0
    cost: int = 0
    seconds: float = 0.0
    size_bytes: int = 0

    def over(self) -> bool:
        """Whether it lasted long enough."""
        least = self.length * self.lanes
        return self.batches >= TURN_BATCHES * least and (self.seconds >= TURN_S * least or self.batches >= ENOUGH_BATCHES * least)


class Trial:
    """Numbers of lanes that take turns, 1 first: all compute threads in one batch.

    Args:
        total: compute threads of the process; no more are used than there are CPUs for.
        asked: a number of lanes that somebody chose, to be used as it is.
    """

    def __init__(self, total: int, asked: int | None = None) -> None:
        self.total = usable_threads(total)
        numbers = {1, self.total, self.total // WIDE if self.total >= 2 * WIDE else 1}
        if asked is not None:
            numbers = {max(1, asked)}
        up = sorted(numbers)
        # there and back, since batches become cheaper as a window goes on
        self._turns = [_Turn(n, 1 + (n == up[-1])) for n in (*up, *reversed(up[:-1]))] if len(up) > 1 else []
        self._done: list[_Turn] = []
        self._chosen = up[0]

    @property
    def settled(self) -> bool:
        """Whether the number of lanes is found."""
        return not self._turns

    @property
    def turn(self) -> int:
        """Of whose batches :meth:`done` is told now: it changes when another number of lanes has its turn."""
        return len(self._done)

    @property
    def lanes(self) -> int:
        """How many to compute the next batch in."""
        return self._turns[0].lanes if self._turns else self._chosen

    @property
    def threads(self) -> int:
        """Compute threads of each."""
        return max(1, self.total // self.lanes)

    def rates(self) -> dict[str, float]:
        """Cost a second of each that had its turn: lanes × compute threads of each → of all lanes together."""
        return {f"{lanes}×{max(1, self.total // lanes)}": round(rate, 1) for lanes, rate in self._rates().items()}

    def done(self, turn: int, cost: int, seconds: float, size_bytes: int = 0, free_bytes: int = 0) -> None:
        """A batch went well.

        Args:
            turn: whose it was; one that is over counts no more.
            cost: of its rows, padding counted: the first windows are small, and their batches full of it.
            seconds: it took, in its lane.
            size_bytes: memory it took beyond what was taken before it; 0 when not measured.
            free_bytes: memory that can still be taken.
        """
        if turn != self.turn or not self._turns:
            return
        now = self._turns[0]
        now.seen += 1
        now.size_bytes = max(now.size_bytes, size_bytes)
        if now.seen > now.lanes:
            now.batches, now.cost, now.seconds = now.batches + 1, now.cost + cost, now.seconds + seconds
        if now.over():
            self._done.append(self._turns.pop(0))
            if now.lanes == 1:
                self._turns = [t for t in self._turns if t.lanes == 1 or _bearable(t.lanes, now, free_bytes)]
            if now.length > 1:
                rates = self._rates()
                self._turns = [t for t in self._turns if CLEAR * rates[t.lanes] > max(rates.values())]
            if len({t.lanes for t in (*self._done, *self._turns)}) == 1 or not self._turns:
                rates = self._rates()
                best = max(rates.values())
                self._chosen = min(lanes for lanes, rate in rates.items() if rate >= TIE * best)
                self._turns = []

    def _rates(self) -> dict[int, float]:
        """Lanes → cost a second: of one lane among so many that are busy, times their number."""
        rates = {}
        for lanes in sorted({t.lanes for t in self._done}):
            turns = [t for t in self._done if t.lanes == lanes]
            rates[lanes] = lanes * sum(t.cost for t in turns) / max(sum(t.seconds for t in turns), 1e-9)
        return rates


def _bearable(lanes: int, alone: _Turn, free_bytes: int) -> bool:
    """Whether batches would be over soon enough in so many lanes, and fit in memory, by those that had the CPU to themselves."""
    fit = not alone.size_bytes or not free_bytes or lanes * alone.size_bytes <= MEMORY_SHARE * free_bytes
    return fit and lanes * alone.seconds <= LONG_S * alone.batches
