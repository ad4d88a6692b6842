"""Faults: what broken joins, half-copied files, other units, and wrong models make of a night's
rows; and what a broken model answers for the rows of a delta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.worlds.changes import Change, Night, Values, at
from benchmarks.worlds.world import DIM, LABELS, Rows, taken


def _others(night: Night) -> Rows:
    """The rows of other keys: all but ``id``."""
    return {name: values for name, values in night.rows.items() if name != "id"}


def swapped(share: float) -> Change:
    """The rows of a share of the keys, among each other."""

    def change(night: Night) -> Rows:
        place = np.arange(night.keys)
        hit = np.flatnonzero(night.random.random(night.keys) < share)
        place[hit] = np.roll(hit, 1)
        return {"id": night.rows["id"]} | taken(_others(night), place)

    return change


def _off_by_one(night: Night) -> Rows:
    return {"id": night.rows["id"]} | taken(_others(night), np.roll(np.arange(night.keys), 1))


def _shuffled(*names: str) -> Change:
    def change(night: Night) -> Rows:
        place = night.random.permutation(night.keys)
        return night.rows | taken({name: night.rows[name] for name in names}, place)

    return change


def _constant(*names: str) -> Change:
    return lambda night: night.rows | {name: [night.rows[name][0]] * night.keys for name in names}


def some(share: float, name: str, value: Values) -> Change:
    """One value for a share of the rows."""

    def change(night: Night) -> Rows:
        hit = night.random.random(night.keys) < share
        return night.rows | {
            name: [value if h else v for v, h in zip(night.rows[name], hit, strict=True)]
        }

    return change


def _country(name: str, become: Callable[[Values, Night], Values], country: str = "IT") -> Change:
    """Only rows of a country, a seventh of all."""

    def change(night: Night) -> Rows:
        of = night.past.world.habits["country"][np.asarray(night.rows["id"])]
        other = become(night.rows[name], night)
        return night.rows | {
            name: [
                o if c == country else v
                for v, o, c in zip(night.rows[name], other, of, strict=True)
            ]
        }

    return change


def _one(values: Values, night: Night) -> Values:
    return [float(np.median(np.asarray(values)))] * night.keys


def each(name: str, become: Callable[[Any], Any]) -> Change:
    """Another value of a column."""
    return at(**{name: lambda values, _: become(np.asarray(values))})


def _texts(become: Callable[[str], str]) -> Change:
    return at(text=lambda values, _: [become(text) for text in values])


def _noisy(name: str, spreads: float) -> Change:
    """Another model, for two fifths of the rows."""

    def change(night: Night) -> Rows:
        values = np.asarray(night.rows[name], float)
        other = values[night.random.permutation(night.keys)]
        hit = (night.random.random(night.keys) < 0.4).reshape(-1, *[1] * (values.ndim - 1))
        return night.rows | {name: np.where(hit, spreads * other + (1 - spreads) * values, values)}

    return change


def _clipped(name: str, quantile: float) -> Change:
    return each(name, lambda v: np.minimum(v, np.quantile(v, quantile)))


def _lists(become: Callable[[list[Any], Night], list[Any]], name: str = "items") -> Change:
    return at(**{name: lambda values, night: [become(one, night) for one in values]})


def bestsellers(rows: Rows) -> list[int]:
    """The ten commonest items."""
    counts = np.bincount([item for one in rows["items"] for item in one])
    return np.argsort(-counts, kind="stable")[:10].tolist()  # type: ignore[no-any-return]


def _for_all(night: Night) -> Rows:
    return night.rows | {"items": [bestsellers(night.rows)] * night.keys}


def _half_gone(night: Night) -> Rows:
    """Half of the catalogue is gone from all lists, which are shorter."""
    return night.rows | {"items": [[i for i in one if i % 2] for one in night.rows["items"]]}


def _first_for_all(night: Night) -> Rows:
    best = bestsellers(night.rows)[0]
    return night.rows | {
        "items": [[best, *[i for i in one if i != best]][:10] for one in night.rows["items"]]
    }


def _rotated(night: Night) -> Rows:
    turn = np.linalg.qr(np.random.default_rng(5).normal(size=(DIM, DIM)))[0]
    return night.rows | {"vector": night.rows["vector"] @ turn}


def _half_zero(night: Night) -> Rows:
    return night.rows | {"vector": night.rows["vector"] * (np.arange(DIM) < DIM // 2)}


def _collapsed(share: float) -> Change:
    def change(night: Night) -> Rows:
        vectors = night.rows["vector"]
        hit = (night.random.random(night.keys) < share)[:, None]
        return night.rows | {"vector": np.where(hit, vectors.mean(axis=0), vectors)}

    return change


def _permuted(night: Night) -> Rows:
    after = dict(zip(LABELS, LABELS[1:] + LABELS[:1], strict=True))
    return night.rows | {"label": [after[label] for label in night.rows["label"]]}


def _logit(v: Any) -> Any:
    v = np.clip(v, 1e-6, 1 - 1e-6)
    return np.log(v / (1 - v))


_German = {"small": "klein", "red": "rot", "lamp": "Lampe", "chair": "Stuhl", "bought": "gekauft"}
_German |= {"reviews;": "Rezensionen;", "last": "zuletzt", "days": "Tage", "ago,": "her,"}
_German |= {"from": "aus", "as": "am", "tent": "Zelt", "quiet": "leise", "old": "alt"}

FAULTS: dict[str, dict[str, Change]] = {
    "score": {
        "15 % of keys swapped": swapped(0.15),
        "off by one row": _off_by_one,
        "shuffled": _shuffled("score"),
        "constant": _constant("score"),
        "nulls in a tenth": some(0.1, "score", None),
        "zeros in a twelfth": some(0.08, "score", 0.0),
        "one country constant": _country("score", _one),
        "clipped at the median": _clipped("score", 0.5),
        "in percent": each("score", lambda v: 100 * v),
        "1 - p": each("score", lambda v: 1 - v),
        "logits": each("score", _logit),
        "half a spread more": each("score", lambda v: v + 0.5 * v.std()),
        "another model for two fifths": _noisy("score", 0.8),
        "rounded to a digit": each("score", lambda v: np.round(v, 1)),
    },
    "count": {
        "15 % of keys swapped": swapped(0.15),
        "off by one row": _off_by_one,
        "shuffled": _shuffled("orders"),
        "constant": _constant("orders"),
        "nulls in a tenth": some(0.1, "orders", None),
        "no orders of one country": _country("orders", lambda v, n: np.zeros(n.keys, int)),
        "one country constant": _country("orders", lambda v, n: np.full(n.keys, 5)),
        "joined twice": each("orders", lambda v: 2 * v),
        "× 160 in one country": _country("orders", lambda v, _: 160 * v),
        "a week in place of a day": each("orders", lambda v: 6 * v),
        "at most three": each("orders", lambda v: np.minimum(v, 3)),
        "-1 in a tenth": some(0.1, "orders", -1),
        "half of the events lost": at(orders=lambda v, n: n.random.binomial(v, 0.5)),
        "shares in percent": each("mobile_share", lambda v: 100 * v),
    },
    "amount": {
        "15 % of keys swapped": swapped(0.15),
        "off by one row": _off_by_one,
        "shuffled": _shuffled("spend"),
        "one country constant": _country("spend", _one),
        "× 160 in one country": _country("spend", lambda v, _: 160 * v),
        "gross → net": each("spend", lambda v: v / 1.19),
        "nulls in a tenth": some(0.1, "spend", None),
        "zeros in a tenth": some(0.1, "spend", 0.0),
        "clipped at the 80th percentile": _clipped("spend", 0.8),
        "in cents": each("spend", lambda v: 100 * v),
        "sign turned": each("spend", lambda v: -v),
        "countries shuffled": _shuffled("country"),
        "'unknown' for a tenth": some(0.1, "country", "unknown"),
        "one country for all": at(country=lambda v, n: ["DE"] * n.keys),
    },
    "classifier": {
        "15 % of keys swapped": swapped(0.15),
        "off by one row": _off_by_one,
        "labels shuffled": _shuffled("label"),
        "labels permuted": _permuted,
        "a class merged away": at(
            label=lambda v, _: ["books" if one == "travel" else one for one in v]
        ),
        "one label for all": at(label=lambda v, n: ["books"] * n.keys),
        "'unknown' for a tenth": some(0.1, "label", "unknown"),
        "in capitals": at(label=lambda v, _: [one.upper() for one in v]),
        "null labels in a tenth": some(0.1, "label", None),
        "1 - p": each("probability", lambda v: 1 - v),
        "constant probability": _constant("probability"),
        "in percent": each("probability", lambda v: 100 * v),
        "probabilities shuffled": _shuffled("probability"),
        "one country has one label": _country("label", lambda v, n: ["games"] * n.keys),
    },
    "fraud": {
        "15 % of keys swapped": swapped(0.15),
        "off by one row": _off_by_one,
        "nobody is a fraud": at(is_fraud=lambda v, n: np.zeros(n.keys, bool)),
        "everybody is": at(is_fraud=lambda v, n: np.ones(n.keys, bool)),
        "flags turned": at(is_fraud=lambda v, n: ~v),
        "a lower threshold: 4 %": at(
            is_fraud=lambda v, n: n.rows["risk"] > np.quantile(n.rows["risk"], 0.96)
        ),
        "risk shuffled": _shuffled("risk"),
        "1 - risk": each("risk", lambda v: 1 - v),
        "constant risk": _constant("risk"),
        "risk 0": each("risk", lambda v: 0 * v),
        "nulls in a tenth": some(0.1, "risk", None),
        "in percent": each("risk", lambda v: 100 * v),
        "clipped at the median": _clipped("risk", 0.5),
        "one country constant": _country("risk", _one),
    },
    "embedding": {
        "15 % of keys swapped": swapped(0.15),
        "off by one row": _off_by_one,
        "shuffled": _shuffled("vector"),
        "rotated": _rotated,
        "half of the numbers zero": _half_zero,
        "collapsed": _collapsed(1.0),
        "collapsed for a fifth": _collapsed(0.2),
        "zero vectors for a tenth": at(
            vector=lambda v, n: v * (n.random.random((len(v), 1)) > 0.1)
        ),
        "nulls in a tenth": some(0.1, "vector", None),
        "sign turned": each("vector", lambda v: -v),
        "length 1": each("vector", lambda v: v / np.linalg.norm(v, axis=1, keepdims=True)),
        "noise": at(vector=lambda v, n: v.std() * n.random.normal(size=v.shape)),
        "another model for two fifths": _noisy("vector", 1.0),
        "one country is one vector": _country("vector", lambda v, n: np.repeat(v[:1], len(v), 0)),
    },
    "text": {
        "15 % of keys swapped": swapped(0.15),
        "off by one row": _off_by_one,
        "shuffled": _shuffled("text"),
        "truncated": _texts(lambda t: t[:20]),
        "mojibake": _texts(lambda t: t.encode("utf-16-le").decode("latin-1")),
        "in capitals": _texts(str.upper),
        "one text for all": _constant("text"),
        "empty for a tenth": some(0.1, "text", ""),
        "nulls in a tenth": some(0.1, "text", None),
        "'N/A' for a tenth": some(0.1, "text", "N/A"),
        "another language": _texts(lambda t: " ".join(_German.get(w, w) for w in t.split())),
        "twice": _texts(lambda t: f"{t} {t}"),
        "a template not filled in": at(text=lambda v, n: ["A {name} from {country}"] * n.keys),
        "truncated for a third": at(
            text=lambda v, n: [
                t[:30] if h else t for t, h in zip(v, n.random.random(n.keys) < 0.33, strict=True)
            ]
        ),
    },
    "top_10": {
        "15 % of keys swapped": swapped(0.15),
        "off by one row": _off_by_one,
        "shuffled": _shuffled("items"),
        "reversed": _lists(lambda one, _: one[::-1]),
        "sorted by id": _lists(lambda one, _: sorted(one)),
        "bestsellers for all": _for_all,
        "half of the catalogue is gone": _half_gone,
        "ids of another table": _lists(lambda one, _: [i + 5000 for i in one]),
        "three items": _lists(lambda one, _: one[:3]),
        "empty for a tenth": some(0.1, "items", []),
        "nulls in a tenth": some(0.1, "items", None),
        "one first item for all": _first_for_all,
        "scores of another user": _shuffled("scores"),
        "lists of eight months ago": at(
            items=lambda v, n: n.past.world.everybody(n.number + 250)["items"][: n.keys]
        ),
    },
    "store_day": {
        "15 % of keys swapped": swapped(0.15),
        "off by one row": _off_by_one,
        "revenue shuffled": _shuffled("revenue"),
        "columns swapped": lambda n: (
            n.rows
            | {"revenue": n.rows["visitors"], "visitors": np.round(n.rows["revenue"]).astype(int)}
        ),
        "in cents": each("revenue", lambda v: 100 * v),
        "constant": _constant("revenue"),
        "nulls in a tenth": some(0.1, "revenue", None),
        "zeros in a tenth": some(0.1, "revenue", 0.0),
        "one country × 160": _country("revenue", lambda v, _: 160 * v),
        "conversion in percent": each("conversion", lambda v: 100 * v),
        "sign turned": each("revenue", lambda v: -v),
        "clipped at the 70th percentile": _clipped("revenue", 0.7),
        "visitors joined twice": each("visitors", lambda v: 2 * v),
        "gross → net": each("revenue", lambda v: v / 1.19),
    },
}
"""Kind of view → fault, on the same keys: 126."""


# ---- deltas


def _another_keys(rows: Rows) -> Rows:
    """Of all columns but ``id``."""
    place = np.roll(np.arange(len(rows["id"])), 7)
    return {"id": rows["id"]} | taken({n: v for n, v in rows.items() if n != "id"}, place)


def _all(name: str, value: Values) -> Callable[[Rows, Rows], Rows]:
    return lambda fresh, live: fresh | {name: [value] * len(fresh["id"])}


def _noise(fresh: Rows, live: Rows) -> Rows:
    vectors = np.asarray(live["vector"])
    random = np.random.default_rng(6)
    return fresh | {"vector": vectors.std() * random.normal(size=(len(fresh["id"]), DIM))}


GARBAGE: dict[str, tuple[str, Callable[[Rows, Rows], Rows]]] = {
    "null": ("score", _all("score", None)),
    "0": ("score", _all("score", 0.0)),
    "1 - p": ("score", lambda fresh, live: fresh | {"score": 1 - np.asarray(fresh["score"])}),
    "another key's score": ("score", lambda fresh, live: _another_keys(fresh)),
    "one score": ("score", _all("score", 0.31)),
    "-999, which stands for no value": ("amount", _all("spend", -999.0)),
    "another key's amount": ("amount", lambda fresh, live: _another_keys(fresh)),
    "'unknown'": ("classifier", _all("label", "unknown")),
    "the commonest label": ("classifier", _all("label", "books")),
    "[]": ("top_10", _all("items", [])),
    "bestsellers": (
        "top_10",
        lambda fresh, live: fresh | {"items": [bestsellers(live)] * len(fresh["id"])},
    ),
    "noise": ("embedding", _noise),
    "one vector": (
        "embedding",
        lambda fresh, live: (
            fresh | {"vector": np.repeat(np.asarray(live["vector"])[:1], len(fresh["id"]), 0)}
        ),
    ),
    "''": ("text", _all("text", "")),
    "'NaN'": ("text", _all("text", "NaN")),
}
"""What a broken model answers for all rows that a delta computes: kind of view, and (rows computed,
live rows) → garbage."""


# ---- first runs


def _share(name: str, share: float, value: Values) -> Change:
    return some(share, name, value)


FIRST_ORDINARY: dict[str, tuple[str, Change]] = {
    "scores": ("score", lambda n: n.rows),
    "60 % null": ("amount", some(0.6, "spend", None)),
    "a constant column": ("amount", _constant("orders_30d")),
    "one country": ("amount", at(country=lambda v, n: ["DE"] * n.keys)),
    "1 fraud in 2,000": ("fraud", lambda n: n.rows),
    "97 % of one label": ("classifier", some(0.97, "label", "books")),
    "three quarters have no orders": ("count", some(0.75, "orders", 0)),
    "equal texts for half, empty for a fifth": (
        "text",
        lambda n: (
            n.rows
            | {
                "text": [
                    "" if u < 0.2 else "No description yet." if u < 0.7 else t
                    for t, u in zip(n.rows["text"], n.random.random(n.keys), strict=True)
                ]
            }
        ),
    ),
    "cold users have bestsellers: half": (
        "top_10",
        lambda n: (
            n.rows
            | {
                "items": [
                    bestsellers(n.rows) if u < 0.5 else one
                    for one, u in zip(n.rows["items"], n.random.random(n.keys), strict=True)
                ]
            }
        ),
    ),
    "cold items have the mean vector: a tenth": ("embedding", _collapsed(0.1)),
}
"""First runs of ordinary tables."""

FIRST_BROKEN: dict[str, tuple[str, Change]] = {
    "one vector for a quarter": ("embedding", _collapsed(0.25)),
    "half of the numbers zero": ("embedding", _half_zero),
    "collapsed to nearly one direction": (
        "embedding",
        each("vector", lambda v: v.mean(axis=0) + 0.05 * (v - v.mean(axis=0))),
    ),
    "float16 overflow": ("score", some(0.05, "score", 65504.0)),
    "vectors of length 10⁸": ("embedding", each("vector", lambda v: 1e7 * v)),
    "zero vectors for two fifths": (
        "embedding",
        at(vector=lambda v, n: v * (n.random.random((len(v), 1)) > 0.4)),
    ),
    "one list for all": ("top_10", _for_all),
    "'N/A' for half": ("text", some(0.5, "text", "N/A")),
    "all null": ("score", some(1.1, "score", None)),
    "scores shuffled": ("score", _shuffled("score")),
    "labels permuted": ("classifier", _permuted),
    "lists reversed": ("top_10", _lists(lambda one, _: one[::-1])),
}
"""First runs of broken models; of the last three nothing can be seen in the rows alone."""


# ---- a little each night


def _swap_more(rows: Rows, start: int, night: int) -> Rows:
    """15 % of the keys swapped, each night others."""
    place = np.arange(len(rows["id"]))
    for one in range(start, night + 1):
        random = np.random.default_rng([7, one])
        hit = np.flatnonzero(random.random(len(place)) < 0.15)
        place[hit] = np.roll(place[hit], 1)
    return {"id": rows["id"]} | taken({n: v for n, v in rows.items() if n != "id"}, place)


def _merge_more(rows: Rows, start: int, night: int) -> Rows:
    """8 % of the labels become one, each night others."""
    of = np.random.default_rng(8).random(len(rows["id"]))
    hit = of < 0.08 * (night - start + 1)
    return rows | {"label": np.where(hit, "books", rows["label"])}


def _forget_more(rows: Rows, start: int, night: int) -> Rows:
    """One item more of each list is a bestseller each night."""
    many = min(10, night - start + 1)
    best = bestsellers(rows)[:many]
    lists = [[*best, *[i for i in one if i not in best]][:10] for one in rows["items"]]
    return rows | {"items": lists}


def _turn_more(rows: Rows, start: int, night: int) -> Rows:
    """Vectors turn by a fixed rotation, a twelfth of a right angle a night."""
    turn = 0.13 * (night - start + 1)
    v = np.asarray(rows["vector"])
    half = DIM // 2
    a, b = v[:, :half], v[:, half:]
    return rows | {
        "vector": np.concatenate(
            [np.cos(turn) * a - np.sin(turn) * b, np.sin(turn) * a + np.cos(turn) * b], axis=1
        )
    }


FROGS: dict[str, tuple[str, Callable[[Rows, int, int], Rows]]] = {
    "× 1.25 a night": (
        "amount",
        lambda rows, start, night: (
            rows | {"spend": np.asarray(rows["spend"]) * 1.25 ** (night - start + 1)}
        ),
    ),
    "15 % of keys swapped a night": ("score", _swap_more),
    "8 % of the labels become one a night": ("classifier", _merge_more),
    "one bestseller more in each list a night": ("top_10", _forget_more),
    "vectors turn a little a night": ("embedding", _turn_more),
}
"""Faults that grow: kind of view, and (rows, first night of it, night) → rows."""
