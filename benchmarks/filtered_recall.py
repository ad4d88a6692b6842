"""What searches find of the true neighbours under every way to leave rows out, and what a filter
costs: an index that a build chose against comparing with every row.

Two sets of clustered rows (each row a centre of standard normal numbers and a third as much noise)
with two scalar features: a number drawn at random, and a language that half of the clusters have.
50,000 rows of 400 clusters tell recall, by each metric: a query is a row, without itself, and with
what stands in its line besides; the truth is float64, of every row. 200,000 rows of 1,600 clusters
tell time: a filter that admits 20 %, by the index and by one that compares every row, both of the
same rows and through the same search; they take turns, and a ratio is the median of the rounds'.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.common import median_us, report
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.store.vectors.index_build import build_index
from precompute.store.vectors.index_choice import Limits
from precompute.store.vectors.index_files import METRICS
from precompute.store.vectors.index_rows import RowFilter
from precompute.store.vectors.vector_index import VectorIndex

DIM, PROMISED, K = 64, 0.95, 10
SPREAD = 0.35

Numbers = npt.NDArray[np.float32]


class Rows(NamedTuple):
    """Vectors [n, DIM], the cluster of each, and a number in [0, 1)."""

    vectors: Numbers
    cluster: npt.NDArray[np.int64]
    number: npt.NDArray[np.float64]

    def batch(self) -> pa.RecordBatch:
        """As a snapshot has them."""
        count = len(self.vectors)
        return pa.record_batch(
            {
                "id": [f"k{row}" for row in range(count)],
                "vector": pa.FixedSizeListArray.from_arrays(
                    pa.array(self.vectors.reshape(-1)), DIM
                ),
                "computed_at": np.zeros(count, np.int64),
                "number": self.number,
                "language": np.where(self.cluster % 2, "de", "en").tolist(),
            }
        )


class Kind(NamedTuple):
    """A kind of query: of a row, what is searched by, which rows are admitted, which excluded, and
    the filter."""

    vector: Callable[[int], Numbers]
    admitted: Callable[[int], npt.NDArray[np.bool_]]
    excluded: Callable[[int], npt.NDArray[np.int64]]
    where: Callable[[int], dict[str, Any]] | None = None


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--timed-rows", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    lines, figures = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for metric in METRICS:
            rows = clustered(arguments.rows, arguments.rows // 125)
            found, told = recalls(Path(folder) / metric, rows, metric, arguments.queries)
            figures[metric] = found | {"index": told}
            least = min(found, key=lambda kind: found[kind])
            lines.append(
                f"{metric}: {arguments.rows:,} rows, {told}; recall@10 at least {found[least]:.3f}"
                f" ({least}), promised {PROMISED}"
            )
            lines.append(
                "  " + " · ".join(f"{kind} {recall:.3f}" for kind, recall in found.items())
            )
        timed = speed(
            Path(folder),
            clustered(arguments.timed_rows, arguments.timed_rows // 125),
            arguments.rounds,
        )
    figures["speed"] = timed
    lines.append(
        f"{arguments.timed_rows:,} rows, a filter that admits 20 %: {timed['filtered_us']:.0f} µs"
        f" against {timed['filtered_exact_us']:.0f} by comparing with all that it admits:"
        f" {timed['filtered_ratio']:.1f} ×"
        f" [{timed['filtered_lowest']:.1f}–{timed['filtered_highest']:.1f}]; without a filter"
        f" {timed['plain_us']:.0f} against {timed['plain_exact_us']:.0f}:"
        f" {timed['plain_ratio']:.1f} ×"
    )
    lines.append(
        f"  built in {timed['build_s']:.1f} s, {timed['unmeasured_s']:.1f} s of an index that needs"
        " no measuring"
    )
    report("filtered_recall", lines, figures)


def clustered(count: int, clusters: int) -> Rows:
    """Rows of clusters, all of length 1."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((clusters, DIM))
    cluster = rng.integers(clusters, size=count)
    vectors = centres[cluster] + SPREAD * rng.standard_normal((count, DIM))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return Rows(vectors.astype(np.float32), cluster, rng.random(count))


def view_of(metric: str) -> FeatureView:
    """The view of :class:`Rows`."""
    features = (
        Feature("vector", "float32", DIM),
        Feature("number", "float64"),
        Feature("language", "string"),
    )
    return FeatureView(
        "rows", ("id",), features, 86400, 86400, IndexSpec("vector", metric, PROMISED)
    )


def kinds_of(rows: Rows) -> dict[str, Kind]:
    """Every kind of query, by what it is called in the report."""
    every = np.ones(len(rows.vectors), np.bool_)

    def itself(row: int) -> Numbers:
        found: Numbers = rows.vectors[row]
        return found

    def alone(row: int) -> npt.NDArray[np.int64]:
        return np.array([row])

    def nearest(row: int, count: int) -> npt.NDArray[np.int64]:
        return np.append(np.argsort(-(rows.vectors @ rows.vectors[row]))[: count + 1], row)

    def noisy(row: int, noise: float) -> Numbers:
        drawn = np.random.default_rng(row).standard_normal(DIM)
        found: Numbers = (rows.vectors[row] + noise * drawn / np.linalg.norm(drawn)).astype(
            np.float32
        )
        return found

    def at_most(share: float) -> Kind:
        admitted = rows.number < share
        return Kind(itself, lambda row: admitted, alone, lambda row: {"number": {"lt": share}})

    kinds = {"no filter": Kind(itself, lambda row: every, alone)}
    kinds |= {f"filter {share:.0%}": at_most(share) for share in (0.5, 0.2, 0.05, 0.01)}
    kinds["other language"] = Kind(
        itself,
        lambda row: rows.cluster % 2 != rows.cluster[row] % 2,
        alone,
        lambda row: {"language": "en" if rows.cluster[row] % 2 else "de"},
    )
    for count in (10, 100, 990):
        kinds[f"{count} nearest excluded"] = Kind(
            itself, lambda row: every, partial(nearest, count=count)
        )
    kinds["own cluster excluded"] = Kind(
        itself, lambda row: every, lambda row: np.flatnonzero(rows.cluster == rows.cluster[row])
    )
    for noise in (0.5, 1.0, 100.0):
        kinds[f"noise {noise:g}"] = Kind(partial(noisy, noise=noise), lambda row: every, alone)
    return kinds


def recalls(folder: Path, rows: Rows, metric: str, queries: int) -> tuple[dict[str, float], str]:
    """recall@10 by kind of query, and what the index is."""
    view = view_of(metric)
    figures = build_index(folder, [rows.batch()], view, model="m")
    index, wide = VectorIndex(folder), rows.vectors.astype(np.float64)
    asking = np.random.default_rng(1).choice(len(wide), queries, replace=False).tolist()
    found = {}
    for name, kind in kinds_of(rows).items():
        shares = []
        for row in asking:
            query, left = kind.vector(row), kind.admitted(row).copy()
            excluded = kind.excluded(row)
            left[excluded] = False
            near = wide @ query if metric != "l2" else -np.square(wide - query).sum(axis=1)
            near[~left] = -np.inf
            true = set(np.argpartition(-near, K)[:K].tolist())
            where = None if kind.where is None else RowFilter(view, kind.where(row))
            keys = index.search(query, K, exclude=[f"k{i}" for i in excluded], where=where).keys
            shares.append(len(true & {int(key[1:]) for key in keys}) / K)
        found[name] = round(statistics.mean(shares), 4)
    return found, f"{figures.kind} in {index.dtype}"


def speed(folder: Path, rows: Rows, rounds: int) -> dict[str, Any]:
    """A filter of 20 %, and none, by the index that a build chose and by an exact one."""
    view, seconds = view_of("cosine"), []
    for name, limits in (("chosen", Limits()), ("exact", Limits(small_rows=len(rows.vectors) + 1))):
        began = time.monotonic()
        build_index(folder / name, [rows.batch()], view, model="m", limits=limits)
        seconds.append(time.monotonic() - began)
    chosen, exact = VectorIndex(folder / "chosen"), VectorIndex(folder / "exact")
    asked = list(
        rows.vectors[np.random.default_rng(2).choice(len(rows.vectors), 60, replace=False)]
    )
    where = RowFilter(view, {"number": {"lt": 0.2}})
    told: dict[str, Any] = {
        "build_s": seconds[0],
        "unmeasured_s": seconds[1],
        "kind": chosen.figures.kind,
    }
    for name, wanted in (("filtered", where), ("plain", None)):
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(median_us(partial(chosen.search, k=K, where=wanted), asked))
            theirs.append(median_us(partial(exact.search, k=K, where=wanted), asked[:20]))
        ratios = sorted(slow / quick for slow, quick in zip(theirs, ours, strict=True))
        told |= {
            f"{name}_us": statistics.median(ours),
            f"{name}_exact_us": statistics.median(theirs),
        }
        told |= {
            f"{name}_ratio": statistics.median(ratios),
            f"{name}_lowest": ratios[0],
            f"{name}_highest": ratios[-1],
        }
    return told


if __name__ == "__main__":
    main()
