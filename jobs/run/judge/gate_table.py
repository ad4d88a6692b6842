"""The gates on features, as a table: one row for each figure that a gate compares.

``young``, ``floor`` and bounds were measured on nine kinds of view, with 126 faults and 111
ordinary changes (``python -m benchmarks.gates_table`` prints what they let through and what they
refuse).
"""

from __future__ import annotations

from typing import NamedTuple

from precompute.jobs.run.judge.feature_figures import (
    FLAG,
    LIST,
    NUMBER,
    NUMBERS,
    TEXT,
    VECTOR,
)

SHARE, LEVEL, LOG, COUNT, CORRELATION, FALL = "share", "level", "log", "count", "rank", "fall"
"""How a figure is compared: as a share, whose chance is known; in spreads of the feature's values;
by its logarithm; by that of one more; by its inverse hyperbolic tangent; as it is."""
BOTH, UP, DOWN = "both", "up", "down"

ALL = (NUMBER, FLAG, TEXT, LIST, NUMBERS, VECTOR)
_SCALES = (NUMBER, NUMBERS)


class Check(NamedTuple):
    """One figure that a gate compares: with the view's own nights (``floor``: the least reach), or
    with fewer of them with the last accepted one (``young``: how far from it), for ``moved`` and
    ``computed`` with a bound. None: not then."""

    gate: str
    kinds: tuple[str, ...]
    figure: str
    scale: str
    side: str
    young: float | None
    floor: float | None
    words: str


CHECKS = (
    Check("null", ALL, "null", SHARE, UP, 0.05, 0.02, "share of nulls"),
    Check("null", (NUMBER, VECTOR), "not_finite", SHARE, UP, 0.05, 0.02, "share not finite"),
    Check("null", (VECTOR,), "zero", SHARE, UP, 0.05, 0.02, "share of zero vectors"),
    Check("null", (TEXT, LIST, NUMBERS), "empty", SHARE, UP, 0.05, 0.02, "share of empty ones"),
    Check("null", (TEXT,), "missing", SHARE, UP, 0.05, 0.02, "share of words for no value"),
    Check("constant", (NUMBER, TEXT), "common", SHARE, UP, 0.15, 0.02, "share of one value"),
    Check("constant", (LIST, NUMBERS), "common", SHARE, UP, 0.15, 0.02, "share of one list"),
    Check("constant", (VECTOR,), "common", SHARE, UP, 0.15, 0.02, "share of one vector"),
    Check("constant", (VECTOR,), "repeated", SHARE, UP, 0.15, 0.02, "share of repeated vectors"),
    Check(
        "constant", (VECTOR,), "dead", SHARE, UP, 0.1, 0.02, "share of dimensions without spread"
    ),
    Check("constant", (VECTOR,), "cosine", FALL, UP, 0.15, 0.05, "mean cosine of two rows"),
    Check("shape", _SCALES, "p05", LEVEL, BOTH, 3.0, 0.4, "5th percentile"),
    Check("shape", _SCALES, "p25", LEVEL, BOTH, 1.5, 0.4, "25th percentile"),
    Check("shape", _SCALES, "p50", LEVEL, BOTH, 1.5, 0.4, "median"),
    Check("shape", _SCALES, "p75", LEVEL, BOTH, 1.5, 0.4, "75th percentile"),
    Check("shape", _SCALES, "p95", LEVEL, BOTH, 3.0, 0.4, "95th percentile"),
    Check("shape", _SCALES, "spread", LOG, BOTH, 1.0, 0.4, "spread"),
    Check("shape", _SCALES, "zero", SHARE, BOTH, 0.15, 0.02, "share of zeros"),
    Check("shape", (NUMBER,), "negative", SHARE, BOTH, 0.15, 0.02, "share of negative ones"),
    Check(
        "shape", (NUMBER, TEXT), "common", SHARE, DOWN, 0.15, 0.02, "share of the commonest value"
    ),
    Check(
        "shape", (NUMBER, TEXT), "distinct", SHARE, BOTH, 0.15, 0.02, "share of different values"
    ),
    Check("shape", (FLAG,), "true", SHARE, BOTH, 0.15, 0.02, "share of true"),
    Check("shape", (TEXT,), "length", COUNT, BOTH, 0.5, 0.4, "median length"),
    Check("shape", (TEXT,), "prefix", SHARE, BOTH, 0.15, 0.02, "share of the commonest beginning"),
    Check("shape", (LIST, NUMBERS), "length", COUNT, BOTH, 0.5, 0.4, "mean length"),
    Check("shape", (LIST,), "coverage", COUNT, BOTH, 0.5, 0.4, "number of different items"),
    Check("shape", (LIST,), "item", SHARE, BOTH, 0.15, 0.02, "share of the commonest item"),
    Check("shape", (LIST,), "first", SHARE, BOTH, 0.15, 0.02, "share of the commonest first item"),
    Check("shape", (LIST,), "doubled", SHARE, UP, 0.15, 0.02, "share with an item twice"),
    Check("shape", (VECTOR,), "norm.p50", LOG, BOTH, 0.18, 0.1, "median length"),
    Check("shape", (VECTOR,), "norm.p95", LOG, BOTH, 0.5, 0.2, "95th percentile of lengths"),
    Check(
        "moved", _SCALES, "moved.quarter", SHARE, UP, None, 0.02, "share moved by a quarter spread"
    ),
    Check("moved", _SCALES, "moved.one", SHARE, UP, None, 0.02, "share moved by a spread"),
    Check("moved", _SCALES, "moved.four", SHARE, UP, None, 0.02, "share moved by four spreads"),
    Check("moved", _SCALES, "moved.rank", CORRELATION, DOWN, 0.3, 0.6, "rank correlation"),
    Check("moved", (TEXT, FLAG), "moved.changed", SHARE, UP, 0.5, 0.02, "share of other values"),
    Check(
        "moved", (TEXT,), "moved.unseen", SHARE, UP, 0.1, 0.02, "share of values not seen before"
    ),
    Check("moved", (TEXT, FLAG), "moved.transition", SHARE, UP, None, 0.02, "share of one change"),
    Check(
        "moved",
        (TEXT, FLAG),
        "moved.kept",
        CORRELATION,
        DOWN,
        None,
        0.6,
        "least share of a value kept",
    ),
    Check("moved", (TEXT,), "moved.tokens", FALL, DOWN, None, 0.12, "share of words kept"),
    Check("moved", (LIST,), "moved.overlap", FALL, DOWN, 0.2, 0.12, "overlap by rank"),
    Check("moved", (LIST,), "moved.lost", SHARE, UP, 0.5, 0.02, "share with next to nothing kept"),
    Check("moved", (LIST,), "moved.order", CORRELATION, DOWN, 0.3, 0.6, "order of what was kept"),
    Check(
        "moved", (VECTOR,), "moved.cosine05", FALL, DOWN, None, 0.12, "5th percentile of cosines"
    ),
    Check("moved", (VECTOR,), "moved.cosine50", FALL, DOWN, 0.5, 0.12, "median cosine"),
    Check(
        "moved",
        (VECTOR,),
        "moved.dimension",
        CORRELATION,
        DOWN,
        -0.2,
        0.6,
        "least correlation of a dimension",
    ),
)
"""What is compared with the view's own nights, or with live rows by key."""

LABELS = 0.5
"""Share of different values up to which texts are labels: other texts may be others every night,
and are not judged by ``changed`` and ``unseen`` before the view has nights of its own."""

NOT_NEVER = ("distinct", "repeated", "doubled", "dead")
"""Shares of which ``never`` says nothing: how often values repeat is judged by ``shape`` and
``constant`` (1 of ``distinct`` is what other numbers of more digits have), and ``dead`` is of
dimensions, not of rows."""


class Bound(NamedTuple):
    """A figure that is judged alone: no more than ``most``; ``is_drawn``: and what chance does to a
    share of few rows."""

    kinds: tuple[str, ...]
    figure: str
    most: float
    words: str
    is_drawn: bool = False
    gate: str = "first"


FIRST = (
    Bound((VECTOR,), "common", 0.2, "share of one vector", True),
    Bound((VECTOR,), "dead", 0.1, "share of dimensions without spread"),
    Bound((VECTOR,), "norm.p50", 1e6, "median length"),
    Bound((VECTOR,), "cosine", 0.98, "mean cosine of two rows"),
    Bound((VECTOR,), "zero", 0.2, "share of zero vectors", True),
    Bound((LIST, NUMBERS), "common", 0.7, "share of one list", True),
    Bound((TEXT,), "missing", 0.3, "share of words for no value", True),
    Bound((NUMBER,), "huge", 0.001, "share of overflows"),
    Bound((NUMBER,), "not_finite", 0.0, "share not finite"),
    Bound(ALL, "null", 0.999, "share of nulls"),
)
"""What a first snapshot is judged by: ordinary tables have a column that is constant or mostly
null; no model that works answers one vector for a fifth of the rows."""

COMPUTED = (
    Check("computed", ALL, "null", SHARE, UP, 0.15, None, "share of nulls"),
    Check("computed", (NUMBER, VECTOR), "not_finite", SHARE, UP, 0.15, None, "share not finite"),
    Check("computed", (NUMBER, NUMBERS, VECTOR), "zero", SHARE, UP, 0.15, None, "share of zeros"),
    Check("computed", (TEXT, LIST, NUMBERS), "empty", SHARE, UP, 0.15, None, "share of empty ones"),
    Check("computed", (TEXT,), "missing", SHARE, UP, 0.15, None, "share of words for no value"),
    Check(
        "computed",
        (NUMBER, TEXT, LIST, NUMBERS, VECTOR),
        "common",
        SHARE,
        UP,
        0.15,
        None,
        "share of one value",
    ),
    Check("computed", (FLAG,), "true", SHARE, BOTH, 0.15, None, "share of true"),
    Check("computed", _SCALES, "p50", LEVEL, BOTH, None, None, "median"),
    Check("computed", _SCALES, "spread", LOG, DOWN, 2.0, None, "spread"),
    Check("computed", (TEXT,), "length", COUNT, BOTH, 0.7, None, "median length"),
    Check("computed", (LIST, NUMBERS), "length", COUNT, BOTH, 0.7, None, "mean length"),
    Check("computed", (VECTOR,), "norm.p50", LOG, BOTH, 0.26, None, "median length"),
    Check("computed", (VECTOR,), "direction", FALL, BOTH, 0.3, None, "mean cosine to live's mean"),
    Check(
        "computed",
        _SCALES,
        "moved.rank",
        CORRELATION,
        DOWN,
        0.15,
        None,
        "rank correlation with live's",
    ),
    Check("computed", (TEXT, FLAG), "moved.changed", SHARE, UP, 0.5, None, "share of other values"),
    Check(
        "computed", (TEXT,), "moved.unseen", SHARE, UP, 0.1, None, "share of values not seen before"
    ),
    Check(
        "computed", (LIST,), "moved.overlap", FALL, DOWN, 0.1, None, "overlap by rank with live's"
    ),
    Check(
        "computed", (VECTOR,), "moved.cosine50", FALL, DOWN, 0.5, None, "median cosine to live's"
    ),
)
"""What the rows that a run computed are judged by, beside live's: no history is needed."""

ANCHOR = (
    Check("anchor", _SCALES, "moved.one", SHARE, UP, None, None, "share moved by a spread"),
    Check("anchor", _SCALES, "spread", LOG, BOTH, None, 0.4, "spread"),
    Check("anchor", _SCALES, "moved.rank", SHARE, DOWN, None, None, "rank correlation"),
    Check("anchor", (TEXT, FLAG), "moved.changed", SHARE, UP, None, None, "share of other values"),
    Check("anchor", (TEXT,), "common", SHARE, UP, None, 0.1, "share of one value"),
    Check("anchor", (LIST,), "moved.overlap", SHARE, DOWN, None, None, "overlap by rank"),
    Check(
        "anchor",
        (VECTOR,),
        "moved.turned",
        SHARE,
        UP,
        None,
        None,
        "median turn, as a share of a right angle,",
    ),
)
"""What is compared with an accepted snapshot some nights ago."""
ANCHOR_LEAST = 0.15
"""What moved since then at least, where it is too much; and more than √nights times a night's."""

TABLE = ("first", "null", "constant", "shape", "computed", "moved", "anchor", "never", "bounds")
"""Gates of this table."""
