"""The gate ``rows``: how many rows there are beside those whose place they take."""

from __future__ import annotations

from precompute.store.offline.snapshot import Snapshot, Verdict

FEWEST_ROWS = 20
"""Rows below which nothing is said of them: of fewer every figure may be chance."""
MANY_ROWS = 500
_OF_MANY, _OF_FEW = (0.65, 1.6), (0.4, 2.5)
"""How many times as many rows there may be: of ordinary nights of nine kinds of view, growth and
weekends among them, none had more or fewer."""


def judge_row_count(
    snapshot: Snapshot, before: Snapshot, factor: float, *, more_is_fine: bool
) -> Verdict:
    """Whether a snapshot has about as many rows as the one before.

    Args:
        snapshot: what is judged.
        before: whose place it takes.
        factor: of the limits, on a scale of ratios.
        more_is_fine: it has rows that the other cannot have.
    """
    low, high = _OF_MANY if before.rows >= MANY_ROWS else _OF_FEW
    least, most = low**factor, high**factor
    ratio = snapshot.rows / before.rows if before.rows else 1.0
    is_within = least <= ratio and (more_is_fine or ratio <= most)
    is_few = max(before.rows, snapshot.rows) < FEWEST_ROWS
    up_to = "" if more_is_fine else f", at most {most:.2f}"
    message = (
        f"{snapshot.rows:,} rows, {ratio:.2f} times the {before.rows:,} of snapshot"
        f" {before.number}; at least {least:.2f} times as many are expected{up_to}"
    )
    return Verdict("rows", is_within or is_few, ratio, least if ratio < 1 else most, message)
