"""Lookup options: what a lookup may ask for beside its keys; one value on its way from the command line, the wire or Python to the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from store.errors import RequestError


class LookupOptions(NamedTuple):
    """As :meth:`store.lookup.Lookup.get` has them."""

    features: Sequence[str] | None = None
    """Which, in which order; all by default."""
    fallback: bool = True
    """False never runs the model."""
    deadline_ms: float | None = None
    """How long to wait for the fallback; the view's own deadline by default."""
    max_age_s: float | None = None
    """Rows older than this count as missing, whatever the view's TTL."""
    inputs: Mapping[Any, Mapping[str, Any]] | None = None
    """Key → input column → value: computes a missing entity that the source does not know."""

    def check(self) -> None:
        """Refuse a limit that is none; what depends on the view is refused where that is read.

        Raises:
            RequestError: names it.
        """
        # most name neither, and this is on the way of every lookup
        if self.deadline_ms is not None or self.max_age_s is not None:
            check_limits(deadline_ms=self.deadline_ms, max_age_s=self.max_age_s)


def check_limits(**limits: float | None) -> None:
    """Refuse a deadline or an age that is negative, infinite or no number.

    Raises:
        RequestError: names it.
    """
    for name, value in limits.items():
        if value is not None and not 0 <= value < float("inf"):
            raise RequestError(f"{name} is a number from 0, got {value}")
