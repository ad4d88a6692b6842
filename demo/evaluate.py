"""Hit rate@10 by leave-one-out, of what the store serves: is each user's held-out item among the
first ten recommendations?

Every item the user has not rated in training competes, not a sample of them (Krichene & Rendle, KDD
2020, on why sampling misleads). The held-out ratings are in no table the two-tower is trained on or
the popularity counted from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from precompute.store.answers.lookup import MAX_KEYS, Lookup


def served_recommendations(lookup: Lookup, users: Sequence[int]) -> dict[int, list[int]]:
    """User → item ids, best first, looked up as a service would."""
    served: dict[int, list[int]] = {}
    for start in range(0, len(users), MAX_KEYS):
        part = users[start : start + MAX_KEYS]
        table = lookup.get("user_recommendations", part, features=["items"], fallback=False)
        served.update(zip(part, table.column("items").to_pylist(), strict=True))
    return served


def most_popular(seen: Mapping[int, set[int]], users: Iterable[int]) -> dict[int, list[int]]:
    """The baseline: for each user the items most users rated, without those the user did."""
    counts = Counter(item for items in seen.values() for item in items)
    ranked = [item for item, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]
    return {
        user: [item for item in ranked if item not in seen.get(user, set())][:10] for user in users
    }


def hit_rate(
    recommendations: Mapping[int, Sequence[int] | None], held_out: Mapping[int, int], k: int = 10
) -> float:
    """Share of users whose held-out item is among their first ``k``; a user without recommendations
    counts as a miss."""
    hits = sum(item in (recommendations.get(user) or [])[:k] for user, item in held_out.items())
    return hits / len(held_out)


def evaluate(lookup: Lookup, data: Path) -> tuple[float, float]:
    """(hit rate@10 served, hit rate@10 of the most popular)."""
    ratings, held = (
        pq.read_table(data / "ratings.parquet"),
        pq.read_table(data / "held_out.parquet"),
    )
    seen: dict[int, set[int]] = {}
    for user, item in zip(
        ratings["user_id"].to_pylist(), ratings["item_id"].to_pylist(), strict=True
    ):
        seen.setdefault(user, set()).add(item)
    held_out = dict(zip(held["user_id"].to_pylist(), held["item_id"].to_pylist(), strict=True))
    if any(item in seen.get(user, ()) for user, item in held_out.items()):
        raise AssertionError(
            "a held-out pair is in the training data: the hit rate would be worthless"
        )
    served = served_recommendations(lookup, list(held_out))
    return hit_rate(served, held_out), hit_rate(most_popular(seen, held_out), held_out)
