"""Recipes: every way to make a student, by what it is for."""

from __future__ import annotations

from precompute.students.lesson import Recipe

BY = ("distil", "prune", "qat", "cascade")
"""Ways of making a student."""


def recipes(by: str | None, purpose: str | None) -> list[Recipe]:
    """The recipes to try, the quickest first.

    Args:
        by: one of :data:`BY`; None, or ``cascade``, for all: each may be first in a cascade.
        purpose: ``batch`` for what may compute a view's rows, ``fallback`` for what answers misses
            in a fraction of the teacher's time; None for both.
    """
    # torch takes a second to import
    from precompute.students import distil, narrow, prune, qat
    from precompute.students.columns_student import SmallMlp, Trees
    from precompute.students.static_table import StaticTable

    behind_misses: list[Recipe] = [StaticTable(), SmallMlp(), Trees()]
    in_batches: list[Recipe] = [
        *distil.RECIPES,
        *narrow.RECIPES,
        *prune.RECIPES,
        *qat.RECIPES,
    ]
    found = {None: behind_misses + in_batches, "fallback": behind_misses, "batch": in_batches}
    return [one for one in found[purpose] if by in (None, "cascade", one.by)]
