"""Freshness: what an age means under a view's TTL. Ages never turn negative, whatever the clocks say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum

from store.feature_view import FeatureView

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Status(StrEnum):
    """What one row of an answer is."""

    FRESH = "fresh"
    STALE = "stale"
    COMPUTED = "computed"
    MISSING = "missing"


class Reason(StrEnum):
    """Why a row is missing."""

    UNKNOWN_ENTITY = "unknown_entity"
    EXPIRED = "expired"
    DEADLINE = "deadline"
    SHED = "shed"
    MODEL_ERROR = "model_error"


class Source(StrEnum):
    """Where a row's features came from."""

    STORE = "store"
    FALLBACK = "fallback"


def age_s(computed_at_us: int, now_us: int) -> float:
    """Seconds from ``computed_at_us`` to ``now_us``, at least 0: a writer's clock may run ahead of ours."""
    return max(0, now_us - computed_at_us) / 1e6


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


def as_datetime(us: int) -> datetime:
    """µs since 1970 as an aware datetime in UTC, exact."""
    return EPOCH + timedelta(microseconds=us)
