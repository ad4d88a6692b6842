"""Pairs of users and items → scores of LightGBM, 1 M pairs or as many as its argument says: the
whole ``materialize`` (Parquet read and hashed, planned, scored, checked, judged by the gates,
written durably) against ``Booster.predict`` of the same columns alone, a matrix in memory of which
nothing is retained.

Two models of 20 features: 500 trees of 63 leaves, and 100 of 31. Both sides take turns in one
process, with all cores; a warm-up of each is not counted. Beside times stands the processor's time.
All scores of both sides are compared.

    python -m benchmarks.engine_trees [pairs] [rounds] [trees]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import lightgbm
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from benchmarks.common import cpu_s, report, run, stages, write_project
from precompute.jobs.config.project import Project

PAIRS = 1_000_000
FEATURES, ITEMS = 20, 1000
MODELS = {"500 × 63": (500, 63), "100 × 31": (100, 31)}
ROUNDS = 3
GOAL = 0.85
SLICE = 1_000_000
"""Rows that ``Booster.predict`` is given at once."""


def write_model(path: Path, trees: int, leaves: int) -> None:
    """Clicks on products of features, 100,000 of them."""
    rng = np.random.default_rng(0)
    x = rng.random((100_000, FEATURES))
    noise = rng.normal(size=len(x)) / 4
    clicked = x[:, 0] * x[:, 1] + np.sin(6 * x[:, 2]) / 2 + x[:, 3:8].sum(1) / 5 + noise > 0.9
    names = [f"f{number}" for number in range(FEATURES)]
    data = lightgbm.Dataset(x, clicked, feature_name=names)
    lightgbm.train(
        {"objective": "binary", "num_leaves": leaves, "learning_rate": 0.05, "verbose": -1},
        data,
        trees,
    ).save_model(path)


def pair_scores(folder: Path, pairs: int) -> Project:
    """A view of pairs, whose features lie in one Parquet file as float32."""
    columns = ", ".join(
        f"CAST(hash(i, {number}) / 18446744073709551616 AS FLOAT) AS f{number}"
        for number in range(FEATURES)
    )
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT i // {ITEMS} AS user_id, i % {ITEMS} AS item_id, {columns} FROM"
            f" range({pairs}) t(i)) TO '{folder}/pairs.parquet'"
        )
    view = {
        "entity": ["user_id", "item_id"],
        "source": {"sql": "SELECT * FROM read_parquet('${data}/pairs.parquet')"},
        "model": {"use": "lightgbm", "args": {"path": "./model.txt"}},
        "features": {"score": {"dtype": "float32"}},
    }
    return write_project(folder, {"pair_score": view})


def predicted(
    booster: lightgbm.Booster, matrix: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Scores of all rows, as the view declares them."""
    parts = [
        booster.predict(matrix[start : start + SLICE]) for start in range(0, len(matrix), SLICE)
    ]
    return np.concatenate([np.asarray(part, np.float32) for part in parts])


def measured(folder: Path, project: Project, pairs: int, rounds: int) -> dict[str, Any]:
    """Both sides in turn."""
    table = pq.read_table(
        folder / "pairs.parquet", columns=[f"f{number}" for number in range(FEATURES)]
    )
    matrix = np.empty((pairs, FEATURES), np.float32)
    for number, column in enumerate(table.columns):
        matrix[:, number] = column.to_numpy()
    del table
    booster = lightgbm.Booster(model_file=folder / "model.txt")
    took: dict[str, list[float]] = {"ours": [], "ours_cpu": [], "alone": [], "alone_cpu": []}
    predicted(booster, matrix[: SLICE // 10])
    engine: dict[str, Any] = {}
    for number in range(rounds):
        before, started = cpu_s(), time.perf_counter()
        alone = predicted(booster, matrix)
        took["alone"].append(time.perf_counter() - started)
        took["alone_cpu"].append(cpu_s() - before)
        before, started = cpu_s(), time.perf_counter()
        done = run(project, "pair_score", "materialize", full=True)
        took["ours"].append(time.perf_counter() - started)
        took["ours_cpu"].append(cpu_s() - before)
        assert done.counts["written"] == pairs, done
        if number == 0:
            assert done.snapshot is not None
            view = project.offline.view("pair_score")
            for batch in view.batches(view.snapshot(done.snapshot)):
                places = (
                    batch.column("user_id").to_numpy() * ITEMS + batch.column("item_id").to_numpy()
                )
                assert np.array_equal(batch.column("score").to_numpy(), alone[places]), (
                    "other scores than Booster.predict's"
                )
        engine = dict(done.stages_s)
    seconds = {name: statistics.median(values) for name, values in took.items()}
    ratios = [a / b for a, b in zip(took["alone"], took["ours"], strict=True)]
    cpu_ratios = [a / b for a, b in zip(took["alone_cpu"], took["ours_cpu"], strict=True)]
    return {
        "pairs": pairs,
        "seconds": seconds,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "cpu_ratios": cpu_ratios,
        "stages_s": engine,
    }


def main() -> None:
    """Measure and report."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    chosen = {
        name: sizes for name, sizes in MODELS.items() if sys.argv[3:] in ([], [str(sizes[0])])
    }
    lines, figures = (
        [
            f"{pairs:,} pairs, {FEATURES} features, {rounds} rounds; all scores equal"
            " Booster.predict's"
        ],
        dict[str, Any](),
    )
    with tempfile.TemporaryDirectory() as name:
        project = pair_scores(Path(name), pairs)
        for model, (trees, leaves) in chosen.items():
            write_model(Path(name) / "model.txt", trees, leaves)
            figures[model] = found = measured(Path(name), project, pairs, rounds)
            s = found["seconds"]
            ratios = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
            lines += [
                (
                    f"{model}: {found['ratio']:.2f} times Booster.predict's rate ({ratios}; goal"
                    f" {GOAL}): {pairs / s['ours']:,.0f} pairs/s"
                ),
                (
                    f"  {s['ours']:.2f} s of clock and {s['ours_cpu']:.2f} s of processor, against"
                    f" {s['alone']:.2f} and {s['alone_cpu']:.2f}"
                ),
                f"  {stages(found['stages_s'])}",
            ]
    report("engine_trees", lines, figures)


if __name__ == "__main__":
    main()
