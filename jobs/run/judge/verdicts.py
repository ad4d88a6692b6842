"""Verdicts: what all gates report to: the figures and verdicts of one snapshot."""

from __future__ import annotations

from collections.abc import Callable

from precompute.jobs.config.announcement import UNANNOUNCED, Announced
from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.run.judge.nights import Limits
from precompute.store.feature_view import Substitute
from precompute.store.offline.segment import Part
from precompute.store.offline.snapshot import Verdict

_ROUNDING = 1e-12
"""How far a share that equals its limit may be from it in floating point."""


class Verdicts:
    """The verdicts and figures of one snapshot.

    Args:
        gates: the limits.
        announced: of the snapshot.
    """

    def __init__(self, gates: GatesConfig, announced: Announced = UNANNOUNCED) -> None:
        self.gates, self.announced = gates, announced
        self.quality: dict[str, float] = {}
        """Figures by name, for the manifest."""
        self.all: list[Verdict] = []
        self.limits: dict[str, Limits] = {}
        """Between which values the gates on features let each figure pass."""
        self.anchor: list[Part] = []
        """File of some of its rows."""
        self.substitute: Substitute | None = None
        """What the manifest has of what computes misses: see
        :class:`precompute.store.offline.snapshot.Snapshot`."""

    def add(
        self,
        gate: str,
        measured: float,
        limit: float | None,
        passed: bool,
        message: str,
        worst: Callable[[float, float], float] | None = None,
    ) -> None:
        """Note a figure, and the verdict of its gate unless that is switched off (``limit`` None).

        Args:
            gate: its name in :class:`precompute.jobs.config.gates.GatesConfig`.
            measured: the figure; it is noted though the gate is switched off.
            limit: of the gate.
            passed: whether the figure is within it.
            message: for people. An acceptance holds for the same message, so the same rows must
                give the same.
            worst: picks which of two features' figures is recorded; by default a failing one.
        """
        if worst is not None:
            self.quality[gate] = worst(self.quality.get(gate, measured), measured)
        elif gate not in self.quality or not passed:
            self.quality[gate] = measured
        if limit is not None:
            self.all.append(self.announced.told(Verdict(gate, passed, measured, limit, message)))

    def at_most(self, gate: str, measured: float, limit: float | None, message: str) -> None:
        """:meth:`add` of a gate that is passed up to its limit."""
        passed = limit is None or measured <= limit + _ROUNDING
        self.add(gate, measured, limit, passed, message, max)

    def at_least(self, gate: str, measured: float, limit: float | None, message: str) -> None:
        """:meth:`add` of a gate that is passed down to its limit."""
        passed = limit is None or measured >= limit - _ROUNDING
        self.add(gate, measured, limit, passed, message, min)
