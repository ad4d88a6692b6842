"""World: the rows of one kind of view on each night, from habits of its keys, a shock that all of
them share, the weekday, and a trend; all by one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.feature_view import Feature, FeatureView

F8 = npt.NDArray[np.float64]
Random = np.random.Generator
Rows = dict[str, Any]
"""Column → its values, an array [rows] or [rows, dim], or a list of values and None; ``id`` is the
key."""
Habits = Mapping[str, Any]
"""What stays as it is of each key."""

MONDAY = date(2026, 3, 2)
NEWCOMERS = 1.4
"""Keys that there are at all, for each one of the first night: the others come later."""


class Tonight(NamedTuple):
    """What all keys share on a night."""

    number: int
    weekday: int
    """0 is Monday."""
    shock: float
    """Of the day, about a standard normal number, half of it yesterday's."""
    random: Random


@dataclass(frozen=True)
class Kind:
    """A kind of view.

    ``habits(random, keys)`` draws what stays of each key; ``rows(habits, tonight)`` are the rows of
    all of them. ``growth`` is how many more keys there are each night, as a share.
    """

    name: str
    features: tuple[Feature, ...]
    size: int
    habits: Callable[[Random, int], dict[str, Any]]
    rows: Callable[[Habits, Tonight], Rows]
    growth: float = 0.0


@dataclass(frozen=True)
class World:
    """One view of a kind, by a seed.

    Args:
        kind: what its rows are.
        seed: of everything that is drawn.
        size: keys of the first night, in place of the kind's.
    """

    kind: Kind
    seed: int
    size: int = 0
    _known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def view(self) -> FeatureView:
        """As the gates know it."""
        kind = self.kind
        return FeatureView(kind.name, ("id",), kind.features, ttl_s=86400, stale_for_s=86400)

    @property
    def habits(self) -> Habits:
        """Of all keys that will ever be there."""
        if "habits" not in self._known:
            keys = round(NEWCOMERS * (self.size or self.kind.size))
            random = np.random.default_rng([self.seed, 1])
            self._known["habits"] = self.kind.habits(random, keys) | {
                "wave": random.uniform(20, 90, keys),
                "phase": random.uniform(0, 2 * np.pi, keys),
                "country": random.choice(COUNTRIES, keys, p=_COUNTRY_SHARES),
            }
        return self._known["habits"]  # type: ignore[no-any-return]

    def keys(self, night: int) -> int:
        """How many there are on a night."""
        size = self.size or self.kind.size
        return round(size * min(NEWCOMERS - 0.15, 1 + self.kind.growth * night))

    def everybody(self, night: int, rest: bool = False) -> Rows:
        """Rows of all keys there will ever be, as they would be on a night."""
        random = np.random.default_rng([self.seed, 2, night])
        shock = float(_shocks(self.seed)[night])
        habits = dict(self.habits)
        turn = 2 * np.pi * night / habits["wave"] + habits["phase"]
        habits["drift"] = np.sin(turn)
        rows = self.kind.rows(habits, Tonight(night, night % 7, shock, random))
        return {"id": np.arange(len(habits["wave"]))} | rows

    def night(self, night: int) -> Rows:
        """The rows of a night."""
        return taken(self.everybody(night), np.arange(self.keys(night)))


@cache
def _shocks(seed: int) -> F8:
    random = np.random.default_rng([seed, 3])
    shocks = np.zeros(400)
    for night, fresh in enumerate(random.normal(size=400)):
        shocks[night] = 0.5 * shocks[night - 1] + 0.87 * fresh
    return shocks


def day(night: int) -> str:
    """The date of a night."""
    return (MONDAY + timedelta(days=night)).isoformat()


def taken(rows: Rows, at: npt.NDArray[np.int64]) -> Rows:
    """Some rows."""
    return {
        name: values[at] if isinstance(values, np.ndarray) else [values[n] for n in at.tolist()]
        for name, values in rows.items()
    }


def joined(one: Rows, other: Rows) -> Rows:
    """Rows, and others below them."""
    return {name: [*values, *other[name]] for name, values in one.items()}


def table_of(view: FeatureView, rows: Rows) -> pa.Table:
    """Rows as the gates get them."""
    columns = {"id": pa.array(rows["id"], pa.int64())}
    for feature in view.features:
        values = rows[feature.name]
        if feature.dim is not None:
            values = [None if one is None else np.asarray(one, "float32") for one in values]
        elif isinstance(values, np.ndarray):
            values = values.tolist()
        if feature.dtype.startswith("int") and feature.max_items is None:
            values = [None if one is None else int(one) for one in values]
        columns[feature.name] = pa.array(values, feature.arrow_type)
    return pa.table(columns)


# ---- the nine kinds

COUNTRIES = ("DE", "FR", "IT", "ES", "PL", "NL", "SE", "AT")
_COUNTRY_SHARES = (0.3, 0.2, 0.14, 0.1, 0.08, 0.08, 0.06, 0.04)
BUSY = np.array([1.0, 0.98, 1.02, 1.05, 1.15, 0.62, 0.5])
"""How much happens on each weekday, beside Monday."""
LABELS = ("books", "games", "garden", "music", "sports", "travel")
DIM, ITEMS, MOST = 32, 500, 10


def sigmoid(x: F8) -> F8:
    """Of numbers."""
    found: F8 = 1 / (1 + np.exp(-x))
    return found


def _score_habits(random: Random, keys: int) -> dict[str, Any]:
    return {"taste": 1.3 * random.normal(size=keys) - 0.8, "views": random.lognormal(3, 1.2, keys)}


def _score_rows(habits: Habits, tonight: Tonight) -> Rows:
    random, taste = tonight.random, habits["taste"]
    weekend = 0.06 * (tonight.weekday >= 5)
    logit = taste + 0.25 * habits["drift"] + 0.05 * tonight.shock + weekend
    logit = logit + 0.12 * random.normal(size=len(taste))
    views = habits["views"] * np.exp(0.1 * habits["drift"] + 0.002 * tonight.number)
    return {"score": sigmoid(logit), "popularity": np.log1p(random.poisson(views))}


def _count_habits(random: Random, keys: int) -> dict[str, Any]:
    return {
        "rate": random.lognormal(1.6, 1.0, keys),
        "mobile": random.beta(4, 3, keys),
        "is_shop": random.random(keys) < 0.25,
    }


def _count_rows(habits: Habits, tonight: Tonight) -> Rows:
    random = tonight.random
    # shops are busy when offices are not
    busy = np.where(habits["is_shop"], 1.7 - 0.7 * BUSY[tonight.weekday], BUSY[tonight.weekday])
    rate = habits["rate"] * busy * np.exp(0.1 * tonight.shock + 0.2 * habits["drift"])
    orders = random.poisson(rate * (1 + 0.002 * tonight.number))
    mobile = random.binomial(np.maximum(orders, 1), habits["mobile"]) / np.maximum(orders, 1)
    return {"orders": orders, "mobile_share": np.where(orders > 0, mobile, 0.0)}


def _amount_habits(random: Random, keys: int) -> dict[str, Any]:
    return {"size": random.lognormal(3.6, 1.1, keys), "quiet": random.uniform(-1, 1, keys)}


def _amount_rows(habits: Habits, tonight: Tonight) -> Rows:
    random, size = tonight.random, habits["size"]
    active = habits["quiet"] + 0.15 * habits["drift"] > -0.6
    by = 0.12 * habits["drift"] + 0.02 * tonight.shock + 0.001 * tonight.number
    spend = np.where(active, size * np.exp(by + 0.05 * random.normal(size=len(size))), 0.0)
    orders = np.where(active, 1 + random.poisson(np.sqrt(size) / 2), 0)
    return {"spend": np.round(spend, 2), "orders_30d": orders, "country": habits["country"]}


def _class_habits(random: Random, keys: int) -> dict[str, Any]:
    prior = np.array([0.9, 0.6, 0.2, 0.3, 0.0, -0.5])
    return {"logits": 1.8 * random.normal(size=(keys, len(LABELS))) + prior}


def _class_rows(habits: Habits, tonight: Tonight) -> Rows:
    random, logits = tonight.random, habits["logits"]
    drifts = 0.2 * habits["drift"][:, None] * np.array([1, -1, 0, 1, 0, -1])
    season = 0.05 * tonight.shock * np.array([0, 1, 1, 0, -1, 0])
    now = logits + drifts + season + 0.08 * random.normal(size=logits.shape)
    odds = np.exp(now - now.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return {"label": np.array(LABELS)[odds.argmax(axis=1)], "probability": odds.max(axis=1)}


def _fraud_habits(random: Random, keys: int) -> dict[str, Any]:
    return {"danger": random.normal(size=keys) + 0.5 * random.exponential(size=keys)}


def _fraud_rows(habits: Habits, tonight: Tonight) -> Rows:
    random, danger = tonight.random, habits["danger"]
    logit = 1.2 * danger - 5.5 + 0.2 * habits["drift"] + 0.08 * tonight.shock
    risk = sigmoid(logit + 0.1 * random.normal(size=len(danger)))
    # 1 in 2,000
    return {"risk": risk, "is_fraud": risk > sigmoid(1.2 * np.quantile(danger, 0.9995) - 5.5)}


def _vector_habits(random: Random, keys: int) -> dict[str, Any]:
    middle = 0.5 * random.normal(size=DIM)
    centers = middle + 0.9 * random.normal(size=(20, DIM)) * np.linspace(1.4, 0.5, DIM)
    own = centers[random.integers(0, 20, keys)] + 0.5 * random.normal(size=(keys, DIM))
    return {"own": own, "way": random.normal(size=(keys, DIM))}


def _vector_rows(habits: Habits, tonight: Tonight) -> Rows:
    own, random = habits["own"], tonight.random
    moved = 0.12 * habits["drift"][:, None] * habits["way"]
    return {"vector": own + moved + 0.06 * random.normal(size=own.shape) + 0.01 * tonight.shock}


ADJECTIVES = ("small", "red", "sturdy", "quiet", "bright", "folding", "light", "soft", "old")
NOUNS = ("lamp", "chair", "kettle", "tent", "guitar", "racket", "novel", "rake", "suitcase")


def _text_habits(random: Random, keys: int) -> dict[str, Any]:
    words = [random.choice(of, keys) for of in (ADJECTIVES, ADJECTIVES, NOUNS)]
    return {
        "names": [f"{a} {b} {c}" for a, b, c in zip(*words, strict=True)],
        "reviews": random.lognormal(3, 1, keys),
        "bought": random.integers(0, 60, keys),
    }


def _text_rows(habits: Habits, tonight: Tonight) -> Rows:
    reviews = (habits["reviews"] * (1 + 0.004 * tonight.number)).astype(int)
    ago = (tonight.number + habits["bought"]) % 60
    return {
        "text": [
            f"A {name} from {country}, {count} reviews; last bought {days} days ago, as of"
            f" {day(tonight.number)}."
            for name, country, count, days in zip(
                habits["names"],
                habits["country"].tolist(),
                reviews.tolist(),
                ago.tolist(),
                strict=True,
            )
        ]
    }


def _list_habits(random: Random, keys: int) -> dict[str, Any]:
    items = random.normal(size=(ITEMS, 16))
    return {
        "users": random.normal(size=(keys, 16)),
        "items": items,
        "likes": 0.5 * random.normal(size=ITEMS),
        "wanders": random.uniform(0, 2 * np.pi, ITEMS),
        "is_leisure": items[:, 0] > 0.8,
    }


def _list_rows(habits: Habits, tonight: Tonight) -> Rows:
    random, users, items = tonight.random, habits["users"], habits["items"]
    likes = habits["likes"] + 0.3 * np.sin(tonight.number / 9 + habits["wanders"])
    likes = likes + 0.5 * (tonight.weekday >= 5) * habits["is_leisure"]
    likes = likes + 0.15 * tonight.shock * np.sin(3 * habits["wanders"])
    scores = users @ items.T + likes + 0.5 * habits["drift"][:, None] * items[:, 1]
    scores = scores + 0.3 * random.normal(size=scores.shape)
    top = np.argsort(-scores, axis=1, kind="stable")[:, :MOST]
    return {
        "items": (top + 1000).tolist(),
        "scores": np.take_along_axis(scores, top, axis=1).tolist(),
    }


def _store_habits(random: Random, keys: int) -> dict[str, Any]:
    return {
        "rate": random.lognormal(4.2, 0.7, keys),
        "basket": random.lognormal(3.1, 0.3, keys),
        "buys": random.beta(5, 15, keys),
    }


def _store_rows(habits: Habits, tonight: Tonight) -> Rows:
    random = tonight.random
    busy = (1.7 - 0.7 * BUSY)[tonight.weekday] * np.exp(0.08 * tonight.shock)
    rate = habits["rate"] * busy * np.exp(0.15 * habits["drift"]) * (1 + 0.001 * tonight.number)
    visitors = random.poisson(rate)
    buyers = random.binomial(visitors, habits["buys"])
    basket = habits["basket"] * np.exp(0.1 * random.normal(size=len(rate)))
    return {
        "visitors": visitors,
        "revenue": np.round(buyers * basket, 2),
        "conversion": buyers / np.maximum(1, visitors),
    }


_float = "float32"
KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "score",
            (Feature("score", _float), Feature("popularity", _float)),
            4000,
            _score_habits,
            _score_rows,
        ),
        Kind(
            "count",
            (Feature("orders", "int64"), Feature("mobile_share", _float)),
            3000,
            _count_habits,
            _count_rows,
            0.001,
        ),
        Kind(
            "amount",
            (
                Feature("spend", _float),
                Feature("orders_30d", "int32"),
                Feature("country", "string"),
            ),
            4000,
            _amount_habits,
            _amount_rows,
            0.001,
        ),
        Kind(
            "classifier",
            (Feature("label", "string"), Feature("probability", _float)),
            3000,
            _class_habits,
            _class_rows,
        ),
        Kind(
            "fraud",
            (Feature("risk", _float), Feature("is_fraud", "bool")),
            5000,
            _fraud_habits,
            _fraud_rows,
            0.001,
        ),
        Kind("embedding", (Feature("vector", _float, DIM),), 2000, _vector_habits, _vector_rows),
        Kind("text", (Feature("text", "string"),), 2000, _text_habits, _text_rows),
        Kind(
            "top_10",
            (Feature("items", "int64", max_items=MOST), Feature("scores", _float, max_items=MOST)),
            2000,
            _list_habits,
            _list_rows,
        ),
        Kind(
            "store_day",
            (
                Feature("visitors", "int32"),
                Feature("revenue", "float64"),
                Feature("conversion", _float),
            ),
            2500,
            _store_habits,
            _store_rows,
            0.002,
        ),
    )
}
