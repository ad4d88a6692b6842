"""Meter: what a run's stages took, and how much the model did."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from precompute.engine.ahead import StageTime

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
    """That are tried again at this moment, since the worker that had them was lost."""
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
