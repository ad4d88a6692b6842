"""Rows at fault: which rows a refusal is about, in words: the segment that has most of them, and
some keys with their values before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.run.judge.feature_figures import (
    MISSING_WORDS,
    NUMBER,
    VECTOR,
    kind_of,
    matrix_of,
    numbers_of,
    spread_of,
)
from precompute.store.feature_view import Feature

SHOWN_KEYS = 10
"""Keys that are named, at most."""
SHOWN_LETTERS, KEY_LETTERS = 40, 100
"""Letters of a value and of a key's column, at most."""
FEWEST_IN_SEGMENT = 5
"""Rows of a segment below which nothing is said of it."""
MOVED_SPREADS, MOVED_LENGTHS = 0.25, 0.25
"""How far a number is from what it was, in spreads of its feature, and a vector, in its length, to
be at fault."""
_TIMES = 2.0
"""How many times the share elsewhere a segment has at least where it is named."""

Beside = tuple[pa.Table, pa.Table]
"""Rows now and rows before of the same keys, row by row."""
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]


def rows_at_fault(
    rows: pa.Table,
    pairs: Beside | None,
    feature: Feature,
    figure: str,
    entity: Sequence[str],
    by: str | None = None,
    beyond: Numbers | None = None,
) -> str:
    """Which rows made a figure what it is; empty where that cannot be told.

    Args:
        rows: those that were judged.
        pairs: rows beside the live ones of the same keys; of the feature alone where both have it.
        feature: of the figure.
        figure: its name without the feature's.
        entity: columns of the key.
        by: the column whose values are segments; what has none of that name has no segments.
        beyond: how far each of ``rows`` is beyond a bound of the feature's own, float64 [rows], 0
            where it is within: these are named, whatever they were before.
    """
    if beyond is not None:
        at = np.argsort(-beyond, kind="stable")[:SHOWN_KEYS]
        values = rows.column(feature.name)
        named = "; ".join(
            f"{_key(rows, entity, row)}: {_short(values[row].as_py())}"
            for row in at[beyond[at] > 0].tolist()
        )
        segment = worst_segment(rows, beyond > 0, by)
        return "".join(f"; {one}" for one in (segment, named and f"keys {named}") if one)
    beside = None if pairs is None or feature.name not in pairs[1].column_names else pairs
    moves = None if beside is None else row_moves(beside, feature)
    flags = _alone(rows.column(feature.name), feature, figure)
    said = []
    if flags is None and beside is not None and moves is not None:
        said.append(worst_segment(beside[0], moves > 1, by))
    elif flags is not None:
        said.append(worst_segment(rows, flags, by))
    if beside is not None and moves is not None and (moves > 0).any():
        order = np.argsort(-moves, kind="stable")[:SHOWN_KEYS]
        said.append(_keys(beside, feature, entity, order[moves[order] > 0].tolist()))
    elif flags is not None and flags.any():
        at = np.flatnonzero(flags)[:SHOWN_KEYS].tolist()
        named = "; ".join(_key(rows, entity, row) for row in at)
        said.append(f"keys {named}")
    return "".join(f"; {one}" for one in said if one)


def worst_segment(rows: pa.Table, flags: Flags, by: str | None) -> str:
    """The segment whose share of rows at fault is the most times that elsewhere.

    Args:
        rows: with the column ``by``.
        flags: which of them are at fault, bool [rows].
        by: None: no segments.
    """
    if by is None or by not in rows.column_names or not flags.any():
        return ""
    texts = pc.fill_null(rows.column(by).cast(pa.string()), "null").combine_chunks()
    names, codes = np.unique(np.asarray(texts, object), return_inverse=True)
    of, bad = np.bincount(codes), np.bincount(codes[flags], minlength=len(names))
    # half a row more on both sides, so that no share is 0
    share = (bad + 0.5) / (of + 1)
    elsewhere = (bad.sum() - bad + 0.5) / (of.sum() - of + 1)
    large = (of >= FEWEST_IN_SEGMENT) & (of < of.sum())
    if not large.any():
        return ""
    at = int(np.argmax(np.where(large, share / elsewhere, -1.0)))
    here, there = bad[at] / of[at], (bad.sum() - bad[at]) / (of.sum() - of[at])
    if share[at] < _TIMES * elsewhere[at]:
        return f"about alike in every {by}"
    of_rows = f"{_percent(here)} of its {of[at]:,} rows"
    return f"most in {by} = {shortened(names[at])}: {of_rows}, {_percent(there)} elsewhere"


def _percent(share: float) -> str:
    """To two digits: a share of 1 is not to be read as one row."""
    return f"{100 * share:.3g}%" if share > 0.99 else f"{100 * share:.2g}%"


def row_moves(pairs: Beside, feature: Feature) -> Numbers:
    """How far each row is from what it was, float64 [rows]: more than 1 is at fault, infinite where
    one of both is null or not finite, 0 where it is the same."""
    now, then = (of.column(feature.name) for of in pairs)
    there = [np.asarray(column.is_valid()) for column in (now, then)]
    both = there[0] & there[1]
    moves = np.where(there[0] != there[1], np.inf, 0.0)
    a, b = (column.filter(pa.array(both)) for column in (now, then))
    if not both.any() or a.type != b.type:
        return moves
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if kind_of(feature) == NUMBER:
            x, y = numbers_of(a), numbers_of(b)
            found = np.abs(x - y) / (MOVED_SPREADS * _spread(y))
            same = x == y
        elif kind_of(feature) == VECTOR:
            x, y = matrix_of(a), matrix_of(b)
            off, lengths = np.linalg.norm(x - y, axis=1), np.linalg.norm(y, axis=1)
            found, same = off / (MOVED_LENGTHS * lengths), off == 0
        else:
            same = np.array([p == q for p, q in zip(a.to_pylist(), b.to_pylist(), strict=True)])
            found = np.full(len(same), 2.0)
    moves[both] = np.where(same, 0.0, np.nan_to_num(found, nan=np.inf, posinf=np.inf))
    return moves


def _spread(values: Numbers) -> float:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 1.0
    return spread_of(finite) or abs(float(finite[0])) or 1.0


def _alone(column: pa.ChunkedArray, feature: Feature, figure: str) -> Flags | None:
    """Which rows have what a share counts, bool [rows]; None of a figure that is no such share."""
    if figure in ("null", "null_share"):
        return np.asarray(column.is_null())
    kind = pa.types
    if figure in ("zero", "not_finite", "negative") and kind_of(feature) == NUMBER:
        values = np.asarray(column.cast(pa.float64(), safe=False).fill_null(1.0).combine_chunks())
        of: Flags = {"zero": values == 0, "negative": values < 0}.get(figure, ~np.isfinite(values))
        return of
    if figure in ("empty", "missing") and kind.is_string(feature.arrow_type):
        lower = pc.utf8_lower(column.fill_null("x"))
        words = pa.array([""] if figure == "empty" else MISSING_WORDS)
        return np.asarray(pc.is_in(lower, words))
    return None


def _keys(pairs: Beside, feature: Feature, entity: Sequence[str], at: Sequence[int]) -> str:
    now, then = (of.column(feature.name) for of in pairs)
    change = _turned if kind_of(feature) == VECTOR else _became
    named = (
        f"{_key(pairs[0], entity, row)}: {change(then[row].as_py(), now[row].as_py())}"
        for row in at
    )
    return f"keys {'; '.join(named)}"


def _became(before: object, now: object) -> str:
    return f"{_short(before)} → {_short(now)}"


def _turned(before: list[float] | None, now: list[float] | None) -> str:
    """Of a vector its first numbers say nothing: its cosine to what it was, and both lengths."""
    if before is None or now is None:
        return _became(before, now)
    lengths = math.hypot(*before), math.hypot(*now)
    text = f"length {lengths[0]:.3g} → {lengths[1]:.3g}"
    if not lengths[0] * lengths[1] > 0:
        return text
    of_both = sum(a * b for a, b in zip(before, now, strict=True))
    return f"cosine {of_both / lengths[0] / lengths[1]:.2f}, {text}"


def _key(rows: pa.Table, entity: Sequence[str], row: int) -> str:
    key = (str(rows.column(name)[row].as_py()) for name in entity)
    return "/".join(shortened(column, KEY_LETTERS) for column in key)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(_short(one) for one in value[:3])}{', …' if len(value) > 3 else ''}]"
    return shortened("null" if value is None else repr(value))


def shortened(text: str, most: int = SHOWN_LETTERS) -> str:
    """A key or value for a message of one line: what cannot be printed is escaped, and of a long
    one the first ``most`` letters stand there."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:most])
    return shown if len(text) <= most else f"{shown}…"
