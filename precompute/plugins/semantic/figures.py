"""Figures: what the semantic cache counts, and its lines of the page's table of caches."""

from __future__ import annotations

from collections.abc import Iterator

from precompute.plugins.semantic.cache import ROWS, SIMILARITY
from precompute.store.http.telemetry.instruments import CacheFigures, Counts, Instrument, Kind

_ROWS = Instrument(
    ROWS,
    Kind.COUNTER,
    "Misses looked for among similar inputs; outcome hit, far, no_row, no_vector, unusable or busy;"
    " all but hits go to the model",
    ("view", "outcome"),
)
_SIMILARITY = Instrument(
    SIMILARITY,
    Kind.COUNTER,
    "Sum of the similarities of the hits: divided by them, what they are on average",
    ("view",),
)


class SemanticFigures:
    """What it counts, as :class:`precompute.store.http.telemetry.instruments.PowerFigures`."""

    instruments = (_ROWS, _SIMILARITY)

    @staticmethod
    def caches(counts: Counts) -> Iterator[CacheFigures]:
        """A line for each view with misses that were looked into."""
        by_view: dict[str, dict[str, float]] = {}
        for (view, outcome), rows in counts(_ROWS).items():
            by_view.setdefault(view, {})[outcome] = rows
        for view, outcomes in sorted(by_view.items()):
            hits = outcomes.pop("hit", 0.0)
            words = "calls saved"
            if hits:
                similarity = counts(_SIMILARITY, view).get((), 0.0)
                words += f" at a similarity of {similarity / hits:.3f}"
            details = [words, *(f"{n:,.0f} {outcome}" for outcome, n in sorted(outcomes.items()))]
            missed = sum(outcomes.values())
            yield CacheFigures(
                "similar inputs of", view, hits, missed, "calls saved", "; ".join(details)
            )
