"""Night lines: small drawings of what a figure was in the nights before, with the band in which it
passes, and tonight's value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from precompute.jobs.ops.gate_history import REFUSED, WARNED, GateFigure

WIDTH, HEIGHT = 240.0, 34.0
"""Of a drawing, in pixels."""
_MARGIN = 4.0
_COLOURS = {REFUSED: "f-missing", WARNED: "f-stale"}


class NightLine(NamedTuple):
    """One drawing: the ``figure`` of a feature in words, its value ``tonight`` and between which it
    ``passes``, its ``state``; ``points`` of the nights as SVG has them, the ``band`` (from the top,
    height), and where ``tonight_at`` stands, in the ``colour`` of a class; all in pixels."""

    feature: str
    figure: str
    tonight: str
    passes: str
    state: str
    points: str
    band: tuple[float, float] | None
    tonight_at: tuple[float, float]
    colour: str
    width: float = WIDTH
    height: float = HEIGHT


def night_line(figure: GateFigure) -> NightLine:
    """A figure and its nights, drawn: the lowest value or limit at the bottom, the highest at the
    top, tonight at the right end; a value that is far off at the edge, so that the nights keep a
    third of the height."""
    values = [value for _, value in figure.nights]
    ends = [end for end in (figure.low, figure.high) if end is not None]
    known = [*values, *ends] or [figure.value]
    low, high = min(known), max(known)
    off = 2 * (high - low) if high > low else math.inf
    tonight = min(max(figure.value, low - off), high + off)
    low, high = min(low, tonight), max(high, tonight)

    def y(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(_MARGIN + (HEIGHT - 2 * _MARGIN) * (1 - share), 1)

    step = (WIDTH - 2 * _MARGIN) / max(len(values), 1)
    points = " ".join(f"{_MARGIN + n * step:.1f},{y(v)}" for n, v in enumerate(values))
    band = None
    if ends:
        top = 0.0 if figure.high is None else y(figure.high)
        bottom = HEIGHT if figure.low is None else y(figure.low)
        band = (top, round(max(bottom - top, 1.0), 1))
    return NightLine(
        figure.feature,
        figure.words,
        f"{figure.value:.4g}",
        figure.passes(),
        figure.state,
        points,
        band,
        (WIDTH - _MARGIN, y(tonight)),
        _COLOURS.get(figure.state, "s0"),
    )


def nearest_lines(figures: Sequence[GateFigure]) -> list[NightLine]:
    """Of each feature the figure that was refused, or else is nearest to its limit."""
    by_feature: dict[str, GateFigure] = {}
    for one in figures:
        best = by_feature.get(one.feature)
        if best is None or (bool(one.state), one.used) > (bool(best.state), best.used):
            by_feature[one.feature] = one
    return [night_line(one) for one in by_feature.values()]
