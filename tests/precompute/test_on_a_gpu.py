"""What only a device shows, on a device: ``pytest -m gpu``. Skipped where there is none;
``PRECOMPUTE_GPU_TESTS=cpu`` walks the same way on a CPU, where it proves nothing of a GPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch

from benchmarks import engine_gpu, gpu_parts
from precompute.engine.runner import Runner
from precompute.models.device import Device, Graphed, gpu_count
from precompute.models.text_encoder import TextEncoder, UnpaddedEncoder
from precompute.models.top_k import TopK
from precompute.sources.sized_batches import joined
from precompute.store.errors import ConfigError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.vectors import index_files
from precompute.techniques.conversion import convert, use_variant
from precompute.techniques.row_errors import tolerance
from precompute.techniques.table import NAMES, is_here
from precompute.techniques.technique import technique
from precompute.text.unpadded import UnpaddedTransformer, computes_the_same
from tests.precompute.test_attention import FAMILIES, of_transformers
from tests.precompute.test_cuda import DOCS, TEXTS, VIEW, Rows, Waiting, batch, mlp

DEVICE = os.environ.get("PRECOMPUTE_GPU_TESTS", "cuda")
ON_A_GPU = DEVICE == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(ON_A_GPU and not gpu_count(), reason="no GPU"),
]
SMALL: dict[str, Any] = {"max_tokens": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small encoder of heads of 8 numbers."""
    made = tmp_path_factory.mktemp("encoder")
    gpu_parts.write_encoder(made, layers=2, dim=16, heads=2)
    return str(made)


def streamed(model: Any, view: FeatureView, given: pa.RecordBatch) -> npt.NDArray[np.float32]:
    """By the engine, its stages side by side; every row must be computed."""
    runner = Runner(model, view)
    made: dict[int, npt.NDArray[np.float32]] = {}
    before = 0
    for window, done in runner.stream(joined(gpu_parts.windows(given, 100), runner.window_rows)):
        assert not done.rejections
        # a window that takes long, as one that compiles does, comes in pieces of rows of like costs
        for row, value in zip(done.rows, done.features.column(0).to_pylist(), strict=True):
            made[before + row] = value
        before += window.num_rows if done.last else 0
    assert before == given.num_rows
    return np.stack([made[row] for row in range(given.num_rows)])


def cosines(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(1) / norms).min())


@contextlib.contextmanager
def converting() -> Iterator[None]:
    """On a CPU some are refused that only a newer one has."""
    try:
        yield
    except ConfigError as exc:
        if ON_A_GPU:
            raise
        pytest.skip(str(exc))


# bf16-encoder is a CPU's and no MLP's; int8-static cuts what lies beyond its examples
BUT = ("bf16-encoder", "int8-static-openvino")
HERE = [name for name in NAMES if name not in BUT and is_here(name)]


@pytest.mark.parametrize("name", HERE)
def test_every_technique_computes_an_mlp_as_float32_does(name: str, tmp_path: Path) -> None:
    model = Rows(mlp(), Device(DEVICE))
    if reason := technique(name).missing(model.device):
        pytest.skip(reason)
    x = torch.from_numpy(np.stack(batch(64).column("x").to_pylist()).astype(np.float32))
    with converting():
        convert(model, technique(name), lambda: [(x[:n],) for n in (3, 16, 64)], tmp_path)
    expected = streamed(Rows(mlp(), Device("cpu")), VIEW, batch(300))
    found = streamed(model, VIEW, batch(300))
    limit = tolerance(name.rpartition("-")[0], "float32").limit
    # of the largest, since some are nearly 0; a few times the noise of large layers
    assert np.abs(found - expected).max() <= max(1e-5, 20 * limit) * np.abs(expected).max()


@pytest.mark.parametrize("name", HERE)
def test_every_technique_embeds_as_float32_does(name: str, folder: str, tmp_path: Path) -> None:
    model = TextEncoder(folder, device=DEVICE, **SMALL)
    if reason := technique(name).missing(model.device):
        pytest.skip(reason)
    # of several batches, whose lengths differ
    model.start_cost = 64
    with converting():
        use_variant(model, name, lambda: pa.Table.from_batches([TEXTS]), tmp_path)
    expected = streamed(TextEncoder(folder, device="cpu", **SMALL), DOCS, TEXTS)
    given = pa.record_batch({"text": TEXTS.column("text").to_pylist() * 8})
    found = streamed(model, DOCS, given)
    assert cosines(found, np.tile(expected, (8, 1))) > (0.9 if "int" in name else 0.99)
    if ON_A_GPU and name in ("bf16-eager", "fp16-eager", "bf16-compile"):
        assert isinstance(model.forward, UnpaddedEncoder)
    if name.endswith("-graphs"):
        assert isinstance(model.forward, Graphed)
        assert model.forward.counts["failed"] == 0
    assert model.device.peak_flops() > 0


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_is_unpadded_as_padded(name: str) -> None:
    device = torch.device(DEVICE)
    transformer = of_transformers(*FAMILIES[name]).to(device)
    if ON_A_GPU:
        transformer = transformer.to(torch.bfloat16)
    assert computes_the_same(UnpaddedTransformer(transformer), transformer, 60, device)


def test_graphs_go_on_after_one_that_cannot_be_recorded() -> None:
    if not ON_A_GPU:
        pytest.skip("a CPU records none")
    model = Rows(Waiting(), Device())
    model.use(graphed := Graphed(model.module, model.device.torch))
    used = []
    for _ in range(4):
        # batches of 16 rows wait for the device, and the last of 4 do not
        found = streamed(model, VIEW, batch(100))
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    expected = streamed(Rows(mlp(), Device("cpu")), VIEW, batch(100))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert graphed.counts["failed"] == graphed.counts["recorded"] == 1
    assert graphed.counts["replayed"] > 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    # what several streams use is free again: nothing more is held after each
    assert used[-1] <= used[-2]
    # numbers are drawn as ever
    assert torch.randn(4, device="cuda").isfinite().all()


class Greedy(torch.nn.Module):
    """Takes a fifth of the memory for every row."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.layers, self.limit_bytes = mlp(), limit_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda and len(x) > 4:
            raise MemoryError("as on a GPU")
        if x.is_cuda:
            torch.empty(len(x) * self.limit_bytes // 5, dtype=torch.uint8, device=x.device)
        made: torch.Tensor = self.layers(x)
        return made


def test_a_batch_that_does_not_fit_is_computed_in_parts() -> None:
    device = Device(DEVICE)
    total = torch.cuda.get_device_properties(0).total_memory if device.is_cuda else 0
    model = Rows(Greedy(total), device)
    expected = streamed(Rows(mlp(), Device("cpu")), VIEW, batch(40))
    np.testing.assert_allclose(streamed(model, VIEW, batch(40)), expected, rtol=1e-3, atol=1e-4)


def test_a_row_that_breaks_the_context_is_rejected_alone(tmp_path: Path) -> None:
    notes = gpu_parts.Notes(tmp_path / "notes", time.monotonic() + 600)
    gpu_parts.lost(notes, DEVICE, gpu_parts.SIZES["cpu"])
    (note,) = engine_gpu._read(tmp_path / "notes").values()
    stage = "worker" if ON_A_GPU else "model"
    assert note.startswith(f"row 37 rejected at stage {stage!r}, 63 others computed")


def test_top_k_ranks_as_on_a_cpu() -> None:
    rng = np.random.default_rng(0)
    items = pa.table(
        {"item": range(500), "vector": list(rng.normal(size=(500, 8)).astype(np.float32))}
    )
    users = pa.record_batch({"vector": list(rng.normal(size=(300, 8)).astype(np.float32))})
    view = FeatureView("best", ("id",), (Feature("items", "int64", max_items=5),), 60, 60)
    assert np.array_equal(
        streamed(TopK(items, 5, device=DEVICE), view, users),
        streamed(TopK(items, 5, device="cpu"), view, users),
    )


def test_faiss_finds_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    vectors = np.random.default_rng(0).normal(size=(70_000, 16)).astype(np.float32)
    found = index_files.nearest_of_some(vectors, None, vectors[:50], 10, l2=True)
    flat = faiss.IndexFlatL2(16)
    flat.add(vectors)
    searched = index_files.on_gpu(flat).search(vectors[:50], 10)[1]
    monkeypatch.setattr(index_files, "gpus", lambda: 0)
    expected = index_files.nearest_of_some(vectors, None, vectors[:50], 10, l2=True)
    # two as near as each other may change places
    assert (found == expected).mean() > 0.999
    assert (searched == expected).mean() > 0.999
