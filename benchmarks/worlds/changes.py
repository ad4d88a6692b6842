"""Changes of a night's rows that are nobody's fault: those of ordinary nights, and those of special
days, which somebody knows of before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.worlds.past import Past
from benchmarks.worlds.world import ITEMS, Random, Rows, joined, sigmoid, taken


class Night(NamedTuple):
    """What a change is made of."""

    past: Past
    number: int
    rows: Rows
    """As they would be without it."""
    random: Random

    @property
    def everybody(self) -> Rows:
        """The night's rows, of keys that come later, too."""
        return self.past.world.everybody(self.number)

    @property
    def keys(self) -> int:
        """How many rows there are."""
        return len(self.rows["id"])


Change = Callable[[Night], Rows]
Values = Any


def at(**columns: Callable[[Values, Night], Values]) -> Change:
    """Another value of these columns."""
    return lambda night: (
        night.rows | {name: become(night.rows[name], night) for name, become in columns.items()}
    )


def plain(night: Night) -> Rows:
    return night.rows


def newcomers(share: float) -> Change:
    def change(night: Night) -> Rows:
        everybody, keys = night.everybody, night.keys
        return taken(everybody, np.arange(min(len(everybody["id"]), round(keys * (1 + share)))))

    return change


def leave(share: float) -> Change:
    def change(night: Night) -> Rows:
        return taken(night.rows, np.flatnonzero(night.random.random(night.keys) > share))

    return change


def late(share: float) -> Change:
    """What some keys did today is known tomorrow."""

    def change(night: Night) -> Rows:
        before = night.past.rows(night.number - 1)
        is_late = night.random.random(len(before["id"])) < share
        late_keys = set(np.asarray(before["id"])[is_late].tolist())
        on_time = [
            n for n, key in enumerate(np.asarray(night.rows["id"]).tolist()) if key not in late_keys
        ]
        return joined(taken(night.rows, np.array(on_time)), taken(before, np.flatnonzero(is_late)))

    return change


def _nothing(night: Night) -> Rows:
    return night.past.rows(night.number - 1)


def _another_order(night: Night) -> Rows:
    return taken(night.rows, night.random.permutation(night.keys))


def _another_cpu(night: Night) -> Rows:
    """Floats that are off by their last digits, equal ones alike."""
    return night.rows | {
        name: values * (1 + 3e-7)
        for name, values in night.rows.items()
        if isinstance(values, np.ndarray) and values.dtype == np.float64
    }


def _shaken(share: float, **noise: float) -> Change:
    """Of some keys, numbers that are off by so many spreads."""

    def change(night: Night) -> Rows:
        rows = dict(night.rows)
        for name, spreads in noise.items():
            values = np.asarray(rows[name], float)
            hit = night.random.random(len(values)) < share
            by = spreads * values.std(axis=0) * night.random.normal(size=values.shape)
            rows[name] = values + by * hit.reshape(-1, *[1] * (values.ndim - 1))
        return rows

    return change


def _cold(**defaults: Values) -> Change:
    """A twentieth of the rows are new keys of which nothing is known."""

    def change(night: Night) -> Rows:
        new = round(0.05 * night.keys)
        cold = taken(night.everybody, np.arange(night.keys, night.keys + new))
        for name, value in defaults.items():
            cold[name] = [value] * new
        return joined(night.rows, cold)

    return change


def _nulls(share: float, *names: str) -> Change:
    def change(night: Night) -> Rows:
        gone = night.random.random(night.keys) < share
        return night.rows | {
            name: [None if g else v for v, g in zip(night.rows[name], gone, strict=True)]
            for name in names
        }

    return change


def _times(by: float, *names: str) -> Change:
    return lambda night: night.rows | {name: np.asarray(night.rows[name]) * by for name in names}


def _counted(by: float, name: str) -> Change:
    """Counts as of a day with so many times as much."""

    def change(night: Night) -> Rows:
        counts, random = np.asarray(night.rows[name]), night.random
        other = (
            random.binomial(counts, by) if by < 1 else counts + random.poisson((by - 1) * counts)
        )
        return night.rows | {name: other}

    return change


def _retrained_scores(night: Night) -> Rows:
    score = np.asarray(night.rows["score"])
    logit = np.log(score / (1 - score))
    return night.rows | {
        "score": sigmoid(0.95 * logit + 0.15 * night.random.normal(size=len(score)))
    }


def _retrained_labels(night: Night) -> Rows:
    """3 % of the rows lie on the other side of a border."""
    other = taken(night.rows, night.random.permutation(night.keys))
    hit = night.random.random(night.keys) < 0.03
    return night.rows | {"label": np.where(hit, other["label"], night.rows["label"])}


def _some_items_gone(share: float) -> Change:
    """Items that nobody sells any more leave the lists, whose next item takes the place."""

    def change(night: Night) -> Rows:
        gone = set(
            (1000 + night.random.choice(ITEMS, round(share * ITEMS), replace=False)).tolist()
        )
        popular = [n for n in _bestsellers(night) if n not in gone]
        lists = []
        for items in night.rows["items"]:
            kept = [item for item in items if item not in gone]
            kept += [item for item in popular if item not in kept]
            lists.append(kept[:10])
        return night.rows | {"items": lists}

    return change


def _bestsellers(night: Night) -> list[int]:
    items = [item for one in night.rows["items"] for item in one]
    counts = np.bincount(items)
    return np.argsort(-counts, kind="stable")[: (counts > 0).sum()].tolist()  # type: ignore[no-any-return]


def _shorter(night: Night) -> Rows:
    """Of a twentieth of the users fewer items are known."""
    few = night.random.random(night.keys) < 0.05
    return night.rows | {
        name: [v[:6] if f else v for v, f in zip(night.rows[name], few, strict=True)]
        for name in ("items", "scores")
    }


def _corrected(night: Night) -> Rows:
    """A word in a tenth of the texts."""
    hit = night.random.random(night.keys) < 0.1
    texts = zip(night.rows["text"], hit, strict=True)
    return night.rows | {"text": [t.replace("sturdy", "robust") if h else t for t, h in texts]}


def _longer_texts(night: Night) -> Rows:
    hit = night.random.random(night.keys) < 0.08
    texts = zip(night.rows["text"], hit, strict=True)
    return night.rows | {"text": [f"{t} Now in a second color." if h else t for t, h in texts]}


EVERY: dict[str, Change] = {
    "an ordinary night": plain,
    "another ordinary night": plain,
    "nothing changed": _nothing,
    "rows in another order": _another_order,
    "floats of another CPU": _another_cpu,
    "3 % new keys": newcomers(0.03),
    "3 % of the keys left": leave(0.03),
    "2 % of the rows are late": late(0.02),
}
"""What happens to any view; of a day's counts something changes every day."""
DAILY = ("count", "store_day")
RETRAINED = "retrained and alike"
"""By another model, so what compares is told and refuses nothing."""
SATURDAY, SUNDAY, MONDAY = "a Saturday", "a Sunday", "a Monday"

OWN: dict[str, dict[str, Change]] = {
    "score": {
        SATURDAY: plain,
        RETRAINED: _retrained_scores,
        "+ 20 % keys": newcomers(0.2),
    },
    "count": {
        SATURDAY: plain,
        SUNDAY: plain,
        MONDAY: plain,
        "a tenth more": _counted(1.1, "orders"),
    },
    "amount": {
        SATURDAY: plain,
        "5 % new keys without orders": _cold(spend=0.0, orders_30d=0),
        "prices up by 2 %": _times(1.02, "spend"),
    },
    "classifier": {
        SATURDAY: plain,
        RETRAINED: _retrained_labels,
        "+ 20 % keys": newcomers(0.2),
    },
    "fraud": {
        "three frauds more": at(
            is_fraud=lambda v, night: v | (np.arange(len(v)) % (len(v) // 3) == 1)
        ),
        "10 % of the keys left": leave(0.1),
    },
    "embedding": {
        RETRAINED: _shaken(1.0, vector=0.12),
        "one in 50 items described anew": _shaken(0.02, vector=0.8),
    },
    "text": {
        SATURDAY: plain,
        "a word corrected in a tenth": _corrected,
        "a sentence more in a twelfth": _longer_texts,
    },
    "top_10": {
        SATURDAY: plain,
        MONDAY: plain,
        "2 % of the items sold out": _some_items_gone(0.02),
        "shorter lists of a twentieth": _shorter,
    },
    "store_day": {SATURDAY: plain, SUNDAY: plain, MONDAY: plain},
}
"""What happens to one kind of view."""


def ordinary(kind: str) -> dict[str, Change]:
    """What happens to a kind of view and needs no announcement."""
    found = EVERY | OWN[kind]
    return {n: c for n, c in found.items() if not (kind in DAILY and n == "nothing changed")}


WEEKDAYS = {SATURDAY: 5, SUNDAY: 6, MONDAY: 0}


def _attack(night: Night) -> Rows:
    hit = night.random.random(night.keys) < 0.05
    risk = np.where(hit, 0.7 + 0.2 * night.random.random(night.keys), night.rows["risk"])
    return night.rows | {"risk": risk, "is_fraud": risk > 0.6}


def _season(night: Night) -> Rows:
    hit = night.random.random(night.keys) < 0.3
    return night.rows | {"label": np.where(hit, "garden", night.rows["label"])}


SPECIAL: dict[str, dict[str, Change]] = {
    "score": {
        "a campaign: scores of a quarter up": at(
            score=lambda v, night: np.where(night.random.random(len(v)) < 0.25, (1 + v) / 2, v)
        )
    },
    "count": {
        "a sale: three times as much": _counted(3.0, "orders"),
        "a holiday: a fifth": _counted(0.2, "orders"),
        "a quiet day: half": _counted(0.5, "orders"),
    },
    "amount": {
        "Black Friday": _times(1.6, "spend", "orders_30d"),
        "another currency": _times(4.3, "spend"),
    },
    "classifier": {"a season: a third is for the garden": _season},
    "fraud": {"a wave of frauds": _attack},
    "embedding": {"half of the items described anew": _shaken(0.5, vector=1.0)},
    "text": {
        "another wording": at(
            text=lambda v, _: [t.replace("last bought", "someone bought it") + " Buy!" for t in v]
        )
    },
    "top_10": {
        "a third of the items sold out": _some_items_gone(0.33),
        "another season": lambda night: (
            night.past.world.night(night.number + 60)
            | {"id": night.past.world.night(night.number + 60)["id"]}
        ),
    },
    "store_day": {
        "a sale": _times(2.2, "visitors", "revenue"),
        "a strike": at(
            visitors=lambda v, _: np.asarray(v) // 4, revenue=lambda v, _: np.asarray(v) / 4
        ),
    },
}
"""Special days: announced they pass, and are no history."""
