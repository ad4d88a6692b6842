"""Verdicts: what the gates have measured of a snapshot so far, and what they say to it."""

from __future__ import annotations

from store.offline.snapshot import Verdict

JUDGED_ROWS = 20
"""Fewer rows than these make no statistics: their shares, norms and drift are measured, and not judged."""

_STATISTICS = ("zero", "norm", "duplicates", "drift", "moved")


class Verdicts:
    """Of one snapshot.

    Args:
        valued: its rows that have a value.
    """

    def __init__(self, valued: int) -> None:
        self._few = valued < JUDGED_ROWS
        self.quality: dict[str, float] = {}
        """Figures by name, for the manifest."""
        self.all: list[Verdict] = []

    def add(self, gate: str, measured: float, limit: float | None, passed: bool, message: str) -> None:
        """Note a figure, and the verdict of its gate unless that is switched off (``limit`` None) or there are too few rows for it. Of two vector
        features the figure is that of the one that fails."""
        if gate not in self.quality or not passed:
            self.quality[gate] = measured
        if limit is not None and not (self._few and gate in _STATISTICS):
            self.all.append(Verdict(gate, passed, measured, limit, message))

    def at_most(self, gate: str, measured: float, limit: float | None, message: str) -> None:
        """:meth:`add` of a gate that is passed up to its limit."""
        self.add(gate, measured, limit, limit is None or measured <= limit, message)
