"""Verdicts: what the gates have measured of a snapshot so far, and what they say to it."""

from __future__ import annotations

from precompute.store.offline.snapshot import Verdict

JUDGED_ROWS = 20
"""Fewer rows than these make no statistics: their shares, norms and drift are measured, and not judged."""

STATISTICS = ("zero", "norm", "duplicates", "drift", "moved", "packed", "empty", "constant", "shift", "mass", "agreement")
"""The gates that say nothing of so few rows."""

_ROUNDING = 1e-12
"""What a share of floats may be beside the limit that it equals."""


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
        self.returned: dict[int, int] = {}
        self.excused: dict[int, int] = {}
        """For the manifest: see :class:`precompute.store.offline.snapshot.Snapshot`."""

    def add(self, gate: str, measured: float, limit: float | None, passed: bool, message: str) -> None:
        """Note a figure, and the verdict of its gate unless that is switched off (``limit`` None) or there are too few rows for it. Of two
        features the figure is that of the one that fails.

        Args:
            gate: its name in :class:`precompute.jobs.config.view.GatesConfig`.
            measured: the figure; it is kept though the gate is switched off.
            limit: of the gate.
            passed: whether the figure is within it.
            message: for people, and what an acceptance is remembered by: the same rows give the same words.
        """
        if gate not in self.quality or not passed:
            self.quality[gate] = measured
        if limit is not None and not (self._few and gate in STATISTICS):
            self.all.append(Verdict(gate, passed, measured, limit, message))

    def at_most(self, gate: str, measured: float, limit: float | None, message: str) -> None:
        """:meth:`add` of a gate that is passed up to its limit; of two features the larger figure is kept."""
        largest = max(self.quality.get(gate, measured), measured)
        self.add(gate, measured, limit, limit is None or measured <= limit + _ROUNDING, message)
        self.quality[gate] = largest

    def at_least(self, gate: str, measured: float, limit: float | None, message: str) -> None:
        """:meth:`add` of a gate that is passed down to its limit; of two features the smaller figure is kept."""
        smallest = min(self.quality.get(gate, measured), measured)
        self.add(gate, measured, limit, limit is None or measured >= limit - _ROUNDING, message)
        self.quality[gate] = smallest
