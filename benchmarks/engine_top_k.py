"""Top-k of all items for every user, seen items excluded: against FAISS's exact inner-product
search and implicit's ``recommend``.

Same vectors, same seen items, same number of threads, one process, rounds of all side by side. Ours
is timed from Arrow columns to Arrow lists of item ids, the peers from matrices to matrices. FAISS
excludes nothing, so it is asked for k and as many more as anybody has seen, and the seen ones are
struck out; and for k alone, which answers less than was asked. implicit is compared where it is
installed.

A list is equal when its scores, worked out again in float64, are the peer's list's place by place,
to 1e-5: two items may stand in the other order where they score the same in float32.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.common import report

USERS, ITEMS, DIM, K, SEEN = 20_000, 60_000, 64, 100, 50
Matrix = npt.NDArray[np.float32]
Lists = npt.NDArray[np.int64]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    for name in (
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
    ):  # read when FAISS, implicit and torch are loaded
        os.environ[name] = str(given.threads)
    import torch

    torch.set_num_threads(given.threads)

    rng = np.random.default_rng(0)
    users = rng.standard_normal((given.users, DIM), dtype=np.float32)
    items = rng.standard_normal((given.items, DIM), dtype=np.float32)
    counts = rng.integers(0, 2 * SEEN + 1, given.users)
    starts = np.append(0, np.cumsum(counts))
    # each once, as recommenders keep them
    seen = np.concatenate([rng.choice(given.items, n, replace=False) for n in counts.tolist()])

    runs: dict[str, Callable[[], Lists]] = {
        "top_k": _ours(users, items, starts, seen),
        "faiss": _faiss(users, items, starts, seen, K + int(counts.max()), given.threads),
        "faiss, nothing excluded": _faiss(users, items, starts, seen[:0], K, given.threads),
    }
    lines = [
        f"{given.users} users × {given.items} items × {DIM}, k = {K}, {len(seen) / given.users:.0f}"
        f" seen, {given.threads} threads"
    ]
    try:
        runs["implicit"] = _implicit(users, items, starts, seen, given.threads)
    except ImportError:
        lines.append("skipped: implicit is not installed")

    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    lists = {name: run() for name, run in runs.items()}  # to warm up, and to compare
    for _ in range(given.rounds):
        for name, run in runs.items():
            before, started = time.process_time(), time.perf_counter()
            run()
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - before)

    figures: dict[str, Any] = {
        "users": given.users,
        "items": given.items,
        "dim": DIM,
        "k": K,
        "threads": given.threads,
    }
    ours_s, ours_cpu_s = float(np.median(wall["top_k"])), float(np.median(cpu["top_k"]))
    lines.append(
        f"top_k: {ours_s:.2f} s, {ours_cpu_s:.2f} s of processor; {given.users / ours_s:.0f}"
        " users/s"
    )
    figures |= {"s": ours_s, "cpu_s": ours_cpu_s, "users_per_s": given.users / ours_s}
    for name in list(runs)[1:]:
        ratio = float(np.median(np.divide(wall[name], wall["top_k"])))
        cpu_ratio = float(np.median(np.divide(cpu[name], cpu["top_k"])))
        line = (
            f"{name}: {np.median(wall[name]):.2f} s, {np.median(cpu[name]):.2f} s of processor;"
            f" top_k is {ratio:.2f} times as fast"
        )
        lines.append(f"{line}, and takes 1/{cpu_ratio:.2f} of the processor's time")
        figures[name] = {"s": float(np.median(wall[name])), "ratio": ratio, "cpu_ratio": cpu_ratio}
        if name != "faiss, nothing excluded":
            same, scores_equal = _equal(users, items, lists["top_k"], lists[name])
            lines.append(
                f"  equal lists: {scores_equal} of {given.users}; the same items in the same order:"
                f" {same}"
            )
            figures[name] |= {"equal": scores_equal, "same_order": same}
    report("engine_top_k", lines, figures)


def _ours(users: Matrix, items: Matrix, starts: Lists, seen: Lists) -> Callable[[], Lists]:
    from precompute.models.top_k import TopK

    def vectors(matrix: Matrix) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), DIM)

    model = TopK(
        pa.table({"item_id": np.arange(len(items)), "embedding": vectors(items)}),
        K,
        exclude="seen",
        device="cpu",
    )
    lists = pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(seen))
    batch = pa.record_batch({"vector": vectors(users), "seen": lists})

    def run() -> Lists:
        made = [
            model.compute(batch.slice(start, 2048))["items"] for start in range(0, len(users), 2048)
        ]
        return np.concatenate([np.asarray(part.flatten()) for part in made]).reshape(-1, K)

    return run


def _faiss(
    users: Matrix, items: Matrix, starts: Lists, seen: Lists, k: int, threads: int
) -> Callable[[], Lists]:
    import faiss

    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatIP(DIM)
    index.add(items)
    pairs = (
        np.sort(np.repeat(np.arange(len(users)), np.diff(starts)) * len(items) + seen)
        if len(seen)
        else seen
    )

    def run() -> Lists:
        _, found = index.search(users, k)
        if not len(pairs):
            return np.asarray(found)
        wanted = found + np.arange(len(users))[:, None] * len(items)
        place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        left = pairs[place] != wanted
        left &= np.cumsum(left, axis=1) <= K
        return np.asarray(found[left]).reshape(-1, K)

    return run


def _implicit(
    users: Matrix, items: Matrix, starts: Lists, seen: Lists, threads: int
) -> Callable[[], Lists]:
    from implicit.cpu.als import AlternatingLeastSquares
    from scipy.sparse import csr_matrix
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, "blas"):
        model = AlternatingLeastSquares(factors=DIM, num_threads=threads)
    model.user_factors, model.item_factors = users, items
    liked = csr_matrix(
        (np.ones(len(seen), np.float32), seen, starts), shape=(len(users), len(items))
    )
    everybody = np.arange(len(users))

    def run() -> Lists:
        with threadpool_limits(
            1, "blas"
        ):  # as implicit's documentation advises: it has threads of its own
            found, _ = model.recommend(everybody, liked, N=K, filter_already_liked_items=True)
        return np.asarray(found, np.int64)

    return run


def _equal(users: Matrix, items: Matrix, ours: Lists, theirs: Lists) -> tuple[int, int]:
    """(users with the same items in the same order, users whose scores are the same place by
    place)."""
    same = close = 0
    for start in range(0, len(users), 500):
        part = slice(start, start + 500)
        scores = [
            np.einsum(
                "ud,ukd->uk", users[part], items[found[part]], dtype=np.float64, casting="safe"
            )
            for found in (ours, theirs)
        ]
        same += int((ours[part] == theirs[part]).all(1).sum())
        close += int(np.isclose(scores[0], scores[1], rtol=1e-5, atol=1e-5).all(1).sum())
    return same, close


if __name__ == "__main__":
    main()
