"""Freshness: what an age means under a view's TTL. Ages never turn negative, and no clock that ran
ahead makes a row younger than is known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from precompute.store.feature_view import FeatureView
from precompute.store.status import Status

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

AHEAD_US = 60_000_000
"""A time that lies further ahead than this was written by a clock that is wrong, or is read by one:
two machines differ by less."""


def age_s(computed_at_us: int, now_us: int) -> float:
    """Seconds from ``computed_at_us`` to ``now_us``, at least 0: a writer's clock may run ahead of
    ours."""
    return max(0, now_us - computed_at_us) / 1e6


class Sighting(NamedTuple):
    """What is known about when a pointer's rows were computed, besides what their writer's clock
    said.

    None was computed after they were published, nor after this process saw them first.
    ``published_us`` (None: not known) and ``renewed_us`` (when all were last found to be what the
    model would answer; 0: never) are µs since 1970; ``elapsed_us`` (at least 0) is the time since
    this process first saw the pointer, by its monotonic clock, which never jumps. A renewal makes
    another pointer, and is seen again.

    Both the clock's difference and ``elapsed_us`` are lower bounds of the age, so the larger one is
    it, whichever way a clock was set meanwhile.
    """

    published_us: int | None
    renewed_us: int
    elapsed_us: int

    def age_us(self, computed_at_us: int, now_us: int) -> int:
        """Age in µs, at least 0, of a row that says it was computed at ``computed_at_us``; the
        later that is, the smaller."""
        since = (
            computed_at_us if self.published_us is None else min(computed_at_us, self.published_us)
        )
        return max(now_us - max(since, self.renewed_us), self.elapsed_us)

    def ages_us(self, computed_at_us: npt.NDArray[np.int64], now_us: int) -> npt.NDArray[np.int64]:
        """:meth:`age_us` of int64 [rows]."""
        # the same, with its bounds put together: three steps over the rows in place of five
        youngest_us = (
            self.elapsed_us
            if self.published_us is None
            else max(now_us - self.published_us, self.elapsed_us)
        )
        oldest_us = max(now_us - self.renewed_us, self.elapsed_us)
        ages: npt.NDArray[np.int64] = now_us - computed_at_us
        np.maximum(ages, youngest_us, out=ages)
        return np.minimum(ages, oldest_us, out=ages)


def microseconds(text: str) -> int | None:
    """An ISO 8601 time as µs since 1970; None for a text that is none."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return as_us(at if at.tzinfo else at.replace(tzinfo=UTC))


def status_of(view: FeatureView, age: float, max_age_s: float | None = None) -> Status:
    """``fresh`` up to the TTL, then ``stale`` for ``stale_for``, then ``missing``.

    Args:
        view: whose TTL counts.
        age: in seconds.
        max_age_s: the caller's own limit; an older row is ``missing`` whatever the TTL says.
    """
    if max_age_s is not None and age > max_age_s:
        return Status.MISSING
    if age <= view.ttl_s:
        return Status.FRESH
    return Status.STALE if age <= view.ttl_s + view.stale_for_s else Status.MISSING


def iso(at: datetime) -> str:
    """An aware time as people and programs see it everywhere: ISO 8601 in UTC, with a ``Z``."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def as_us(at: datetime) -> int:
    """An aware datetime as µs since 1970, exact."""
    return (at - EPOCH) // timedelta(microseconds=1)


def as_datetime(us: int) -> datetime:
    """µs since 1970 as an aware datetime in UTC, exact."""
    return EPOCH + timedelta(microseconds=us)
