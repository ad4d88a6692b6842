"""Which natural changes and which faults the gates tell apart, with the limits that every view has:
MovieLens-100k's users, items and pairs, by a model that answers what this script computed, so that
a fault is one of data outside of the fingerprint.

A base is live; each change is computed on it and judged, and nothing else is published. Natural
changes by the same model change inputs alone (a user's factors are folded in from the ratings there
are); a model trained again has another fingerprint. A fault comes on top of a week of new ratings.
The table names the gates that refused, of each kind of view.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import report
from demo.data import write_movielens
from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rows.plan import RunOptions
from precompute.jobs.run.run_view import run_view
from precompute.model import digest
from precompute.store.errors import PrecomputeError

DIM, K, PAIRS = 32, 10, 20_000
WEEK_S = 7 * 86400

F8 = npt.NDArray[np.float64]
Values = dict[str, dict[str, Any]]
"""View → column → values, ``id`` the key."""

VIEWS: dict[str, str] = {
    "pair_score": "score: {dtype: float32}, popularity: {dtype: float32}",
    "user_taste": "label: {dtype: string}, share: {dtype: float32}",
    "user_top_10": "items: {dtype: int64, max_items: 10}, scores: {dtype: float32, max_items: 10}",
    "item_vector": f"vector: {{dtype: float32, dim: {DIM}}}",
    "item_text": "text: {dtype: string}",
}


class Given:
    """Answers what a file says of each key.

    Args:
        path: Parquet: ``id`` and the features.
        version: what the fingerprint tells.
    """

    def __init__(self, path: str, version: int) -> None:
        self._path, self._version = path, version
        self._table: pa.Table | None = None

    def fingerprint(self) -> str:
        return digest(version=self._version)

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """The rows of the batch's keys."""
        import pyarrow.compute as pc

        self._table = pq.read_table(self._path) if self._table is None else self._table
        rows = self._table.take(
            pc.index_in(batch.column("id"), self._table.column("id").combine_chunks())
        )
        return {
            name: rows.column(name).combine_chunks() for name in rows.column_names if name != "id"
        }


@dataclass(frozen=True)
class World:
    """What the features are computed from: ratings [n, 4] (user, item, stars, time), factors of the
    items, and the items' texts."""

    ratings: F8
    users: tuple[int, ...]
    items: tuple[int, ...]
    factors: F8
    genres: Mapping[int, str]
    titles: Mapping[int, str]
    popularity_bias: float = 0.0
    noise: float = 0.0

    def values(self) -> Values:
        """Of every view."""
        users, items = np.array(self.users), np.array(self.items)
        place_u, place_i = np.full(users.max() + 1, -1), np.full(items.max() + 1, -1)
        place_u[users], place_i[items] = np.arange(len(users)), np.arange(len(items))
        known = self.ratings[
            np.isin(self.ratings[:, 0], users) & np.isin(self.ratings[:, 1], items)
        ]
        u, i = place_u[known[:, 0].astype(int)], place_i[known[:, 1].astype(int)]
        stars = np.zeros((len(users), len(items)))
        stars[u, i] = known[:, 2]
        rated, vectors = stars > 0, self.factors[items]
        folded = _fold_in(stars, rated, vectors)
        count = rated.sum(axis=0)
        scores = folded @ vectors.T + self.popularity_bias * count / count.max()
        scores += self.noise * np.random.default_rng(1).normal(size=scores.shape)
        draw = np.random.default_rng(0).choice(944 * 1683, PAIRS, replace=False)
        pairs = [
            (a, b) for a, b in zip((draw // 1683).tolist(), (draw % 1683).tolist(), strict=True)
        ]
        pairs = [
            (a, b)
            for a, b in pairs
            if a < len(place_u) and b < len(place_i) and place_u[a] >= 0 and place_i[b] >= 0
        ]
        at_u, at_i = place_u[[a for a, _ in pairs]], place_i[[b for _, b in pairs]]
        open_scores = np.where(rated, -np.inf, scores)
        order = np.argsort(-open_scores, axis=1, kind="stable")[:, :K]
        names = sorted({genre for text in self.genres.values() for genre in text.split()})
        has = np.array(
            [[name in self.genres[item].split() for name in names] for item in self.items], float
        )
        taste = np.exp(2 * (stars @ has) / np.maximum(1, stars.sum(axis=1, keepdims=True)))
        taste /= taste.sum(axis=1, keepdims=True)
        return {
            "pair_score": {
                "id": [a * 10_000 + b for a, b in pairs],
                "score": scores[at_u, at_i],
                "popularity": np.log1p(count[at_i]),
            },
            "user_taste": {
                "id": users.tolist(),
                "label": [names[n] for n in taste.argmax(axis=1)],
                "share": taste.max(axis=1),
            },
            "user_top_10": {
                "id": users.tolist(),
                "items": [[int(items[n]) for n in row] for row in order],
                "scores": np.take_along_axis(scores, order, axis=1).tolist(),
            },
            "item_vector": {"id": items.tolist(), "vector": vectors},
            "item_text": {
                "id": items.tolist(),
                "text": [f"{self.titles[n]}, {self.genres[n].lower()}" for n in self.items],
            },
        }


def _fold_in(stars: F8, rated: npt.NDArray[np.bool_], vectors: F8, weight: float = 5.0) -> F8:
    """Each user's factors from the ratings there are, by ridge regression on the items'."""
    eye = weight * np.eye(vectors.shape[1])
    return np.stack(
        [
            np.linalg.solve(vectors[r].T @ vectors[r] + eye, vectors[r].T @ (s[r] - 3.0))
            for s, r in zip(stars, rated, strict=True)
        ]
    )


def trained(ratings: F8, seed: int = 0, epochs: int = 4) -> F8:
    """Factors [1683, DIM] of the items by alternating least squares."""
    stars = np.zeros((944, 1683))
    stars[ratings[:, 0].astype(int), ratings[:, 1].astype(int)] = ratings[:, 2]
    rated, items = stars > 0, np.random.default_rng(seed).normal(size=(1683, DIM)) / 8
    for _ in range(epochs):
        users = _fold_in(stars, rated, items)
        items = _fold_in(stars.T, rated.T, users)
    return items


def natural(base: World, everything: F8, reserve: set[int]) -> dict[str, tuple[World, int]]:
    """Change → the world after it, and the version of its model: 1 is what is live; ``reserve`` are
    items that it does not have."""
    r, draw = base.ratings, np.random.default_rng(5)
    end = r[:, 3].max()

    def until(weeks: float) -> F8:
        kept: F8 = everything[everything[:, 3] <= end + weeks * WEEK_S]
        return kept

    def some(of: tuple[int, ...], share: float) -> set[int]:
        return set(draw.choice(of, round(share * len(of)), replace=False).tolist())

    new_users, new_items = some(base.users, 0.1), some(base.items, 0.1)
    fifth = some(base.items, 0.2)
    busy, summer = (
        some(base.users, 0.05),
        r[[("Children's" in base.genres[int(i)]) for i in r[:, 1]]],
    )
    titles = {
        n: t.replace("e", "é", 1) if n in fifth and n % 4 == 0 else t
        for n, t in base.titles.items()
    }
    less = replace(
        base,
        users=tuple(u for u in base.users if u not in new_users),
        items=tuple(i for i in base.items if i not in new_items),
    )
    one = some(base.users, 0.01)
    return {
        "nothing": (base, 1),
        "a day of ratings": (replace(base, ratings=until(1 / 7)), 1),
        "a week of ratings": (replace(base, ratings=until(1)), 1),
        "a month of ratings": (replace(base, ratings=until(4)), 1),
        "1 % of the users left": (
            replace(base, users=tuple(u for u in base.users if u not in one)),
            1,
        ),
        "10 % of users and items left": (less, 1),
        "a fifth of the catalogue replaced": (
            replace(base, items=tuple(sorted({*base.items} - fifth | reserve))),
            1,
        ),
        "a season: twice the children's films": (
            replace(
                base, ratings=np.concatenate([r, summer[::2] + np.array([0.0, 0.0, 0.0, 1.0])])
            ),
            1,
        ),
        "a burst of 5 % of the users": (
            replace(base, ratings=r[~((np.isin(r[:, 0], list(busy))) & (r[:, 2] < 3))]),
            1,
        ),
        "a tenth of the ratings withdrawn": (
            replace(base, ratings=r[draw.random(len(r)) > 0.1]),
            1,
        ),
        "rows in another order": (replace(base, users=base.users[::-1], items=base.items[::-1]), 1),
        "numbers of another CPU": (replace(base, noise=1e-3), 1),
        "titles corrected": (replace(base, titles=titles), 1),
        "another seed": (replace(base, factors=trained(r, seed=1)), 2),
        "trained on a week more": (replace(base, ratings=until(1), factors=trained(until(1))), 2),
        "trained on all": (replace(base, ratings=everything, factors=trained(everything)), 2),
        "another epoch count": (replace(base, factors=trained(r, epochs=8)), 2),
        "trained on the newer half": (
            replace(base, factors=trained(r[r[:, 3] > np.median(r[:, 3])])),
            2,
        ),
        "trained, and 10 % left": (replace(less, factors=trained(r, seed=3)), 2),
        "popularity weighed in": (replace(base, factors=trained(r), popularity_bias=0.3), 2),
    }


def faults(week: World, base: World) -> dict[str, Callable[[Values], Values]]:
    """Fault → what it makes of the values; of a view that it leaves alone, nothing."""
    bestsellers = np.bincount(week.ratings[:, 1].astype(int)).argsort()[::-1][:K].tolist()
    yesterday = replace(base, factors=trained(base.ratings, seed=9)).values()
    biased = replace(week, popularity_bias=8.0).values()
    german = {
        "action": "Handlung",
        "comedy": "Komödie",
        "drama": "Schauspiel",
        "thriller": "Spannung",
        "romance": "Liebe",
        "war": "Krieg",
    }

    def each(**columns: Callable[[Any], Any]) -> Callable[[Values], Values]:
        def become(values: Values) -> Values:
            return {
                view: of | {name: columns[name](of[name]) for name in of if name in columns}
                for view, of in values.items()
                if columns.keys() & of.keys()
            }

        return become

    def numbers(change: Callable[[F8], Any]) -> Callable[[Values], Values]:
        return each(
            score=lambda v: change(np.asarray(v)),
            share=lambda v: change(np.asarray(v)),
            vector=lambda v: change(np.asarray(v)),
        )

    def holes(v: F8) -> F8:
        return np.where((np.arange(len(v)) % 5 == 0).reshape(-1, *[1] * (v.ndim - 1)), 0.0, v)

    def rolled(values: Values) -> Values:
        return {
            view: {n: v if n == "id" else list(v[1:]) + list(v[:1]) for n, v in of.items()}
            for view, of in values.items()
        }

    def swapped(values: Values) -> Values:
        of = values["pair_score"]
        return {"pair_score": of | {"score": of["popularity"], "popularity": of["score"]}}

    def half(values: Values) -> Values:
        mixed: Values = {}
        for view in ("item_vector", "user_top_10"):
            old = {key: n for n, key in enumerate(yesterday[view]["id"])}
            mixed[view] = {
                n: (
                    v
                    if n == "id"
                    else [
                        yesterday[view][n][old[k]] if k in old and m % 2 else v[m]
                        for m, k in enumerate(values[view]["id"])
                    ]
                )
                for n, v in values[view].items()
            }
        return mixed

    def multiplied(values: Values) -> Values:
        return {
            view: {
                n: list(v) + ([-k - 1 for k in v] if n == "id" else list(v)) for n, v in of.items()
            }
            for view, of in values.items()
        }

    return {
        "zeros": numbers(np.zeros_like),
        "constant": numbers(lambda v: np.broadcast_to(v[0], v.shape)),
        "nulls": each(
            score=lambda v: [None] * len(v),
            label=lambda v: [None] * len(v),
            items=lambda v: [None] * len(v),
            text=lambda v: [None] * len(v),
        ),
        "NaN → 0 in a fifth": numbers(holes),
        "× −1": numbers(lambda v: -v),
        "× 10": numbers(lambda v: 10 * v),
        "+ offset (one spread)": each(score=lambda v: v + np.std(v), share=lambda v: v + np.std(v)),
        "off by one row": rolled,
        "columns swapped": swapped,
        "ids of another entity": each(items=lambda v: [[n + 2000 for n in items] for items in v]),
        "list reversed": each(items=lambda v: [items[::-1] for items in v]),
        "everybody's bestsellers": each(items=lambda v: [bestsellers] * len(v)),
        "popularity bias": lambda _: {view: biased[view] for view in ("pair_score", "user_top_10")},
        "labels permuted": each(
            label=lambda v: [
                dict(zip(sorted(set(v)), np.roll(sorted(set(v)), 1).tolist(), strict=True))[x]
                for x in v
            ]
        ),
        "one label for all": each(label=lambda v: ["Drama"] * len(v)),
        "text cut": each(text=lambda v: [x[:12] for x in v]),
        "mojibake": each(text=lambda v: [x.encode("utf-16-le").decode("latin-1") for x in v]),
        "language swapped": each(
            text=lambda v: [" ".join(german.get(w.strip(","), w) for w in x.split()) for x in v]
        ),
        "half the rows of another model": half,
        "float16 overflow": numbers(
            lambda v: np.where(np.abs(v) > np.median(np.abs(v)), np.inf, v)
        ),
        "a partition twice": lambda values: {
            view: {n: list(v) + list(v) for n, v in of.items()} for view, of in values.items()
        },
        "sorted by id": each(items=lambda v: [sorted(items) for items in v]),
        "softmax missing": each(share=lambda v: np.log(np.asarray(v) / (1 - np.asarray(v)))),
        "clipped at 0": each(score=lambda v: np.maximum(v - np.median(v), 0)),
        "a join that multiplied": multiplied,
    }


class Bench:
    """A project of the five views in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.day = folder, 0
        (folder / "views").mkdir()
        (folder / "project.yaml").write_text("root: ./var\nonline: table:./var/online\n")

    def judged(
        self, values: Values, version: int, command: str = "materialize"
    ) -> dict[str, list[str]]:
        """View → the gates that refuse it, or what else does."""
        self.day += 1
        found = {}
        for view, of in values.items():
            columns = {
                n: np.asarray(v).tolist() if isinstance(v, np.ndarray) else v for n, v in of.items()
            }
            kinds = {
                "vector": pa.list_(pa.float32(), DIM),
                "items": pa.list_(pa.int64()),
                "scores": pa.list_(pa.float32()),
            }
            kinds |= (
                dict.fromkeys(("score", "popularity", "share"), pa.float32())
                | dict.fromkeys(("label", "text"), pa.string())
                | {"id": pa.int64()}
            )
            pq.write_table(
                pa.table({n: pa.array(v, kinds[n]) for n, v in columns.items()}),
                self.folder / f"{view}.parquet",
            )
            # a partition that comes twice brings each key with another input
            day = f"{self.day} + row_number() OVER (PARTITION BY id)"
            (self.folder / "views" / f"{view}.yaml").write_text(
                f"name: {view}\nentity: [id]\nttl: 1d\nfeatures: {{{VIEWS[view]}}}\nsource: {{sql:"
                f" \"SELECT id, {day} AS day FROM read_parquet('{view}.parquet')\"}}\nmodel: {{use:"
                f" 'benchmarks.gates_table:Given', args: {{path: ./{view}.parquet, version:"
                f" {version}}}}}\n"
            )
            try:
                done = run_view(
                    Project(self.folder, {}), view, Silent(), RunOptions(command=command, full=True)
                )
                found[view] = [verdict.gate for verdict in done.gates if not verdict.passed]
            except PrecomputeError as exc:
                found[view] = [type(exc).__name__]
        return {view: list(dict.fromkeys(gates)) for view, gates in found.items()}


def main() -> None:
    """Print the table in Markdown, and the two counts."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data, folder = Path(scratch) / "data", Path(scratch) / "project"
        folder.mkdir()
        write_movielens(data)
        table, items = (
            pq.read_table(data / "ratings.parquet"),
            pq.read_table(data / "items.parquet").to_pylist(),
        )
        everything = np.stack(
            [
                np.asarray(table[name]).astype(float)
                for name in ("user_id", "item_id", "rating", "rated_at")
            ],
            axis=1,
        )
        then = np.quantile(everything[:, 3], 0.9)
        ratings = everything[everything[:, 3] <= then]
        users = tuple(sorted(set(ratings[:, 0].astype(int).tolist())))
        # what was rated five times in either half, since factors that were trained on nothing are
        # zeros
        halves = [
            ratings[part, 1].astype(int)
            for part in (
                ratings[:, 3] <= np.median(ratings[:, 3]),
                ratings[:, 3] > np.median(ratings[:, 3]),
            )
        ]
        known = np.flatnonzero(
            np.minimum(*(np.bincount(half, minlength=1683) for half in halves)) >= 5
        )
        reserve = set(
            np.random.default_rng(8).choice(known, len(known) // 6, replace=False).tolist()
        )
        base = World(
            ratings,
            users,
            tuple(n for n in known.tolist() if n not in reserve),
            trained(ratings),
            {row["item_id"]: row["genres"] or "unknown" for row in items},
            {row["item_id"]: f"{row['title']} ({row['year']})" for row in items},
        )
        changes = natural(base, everything, reserve)
        week = changes["a week of ratings"][0]
        bench = Bench(folder)
        bench.judged(base.values(), 1, command="run")
        rows: list[tuple[str, str, dict[str, list[str]]]] = []
        for name, (world, version) in changes.items():
            rows.append(
                (
                    "natural",
                    name + (" (another model)" if version > 1 else ""),
                    bench.judged(world.values(), version),
                )
            )
        for name, become in faults(week, base).items():
            rows.append(("fault", name, bench.judged(become(week.values()), 1)))
    print(f"| | change | {' | '.join(VIEWS)} |\n|---|---|{'---|' * len(VIEWS)}")
    for kind, name, seen in rows:
        cells = (
            (
                "–"
                if view not in seen
                else ", ".join(seen[view]) or ("passes" if kind == "natural" else "**PASSES**")
            )
            for view in VIEWS
        )
        print(f"| {kind} | {name} | {' | '.join(cells)} |")
    refused = [name for kind, name, seen in rows if kind == "natural" and any(seen.values())]
    published = [name for kind, name, seen in rows if kind == "fault" and not all(seen.values())]
    told = (
        f"natural changes refused: {len(refused)} of {len(changes)}; faults published:"
        f" {len(published)} of {len(rows) - len(changes)}"
    )
    report(
        "gates_table",
        [told],
        {
            "natural": len(changes),
            "natural_refused": refused,
            "faults": len(rows) - len(changes),
            "faults_published": published,
        },
    )


if __name__ == "__main__":
    main()
