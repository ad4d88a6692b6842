"""Status: what one row of an answer is, why it is missing, and where it came from. Words alone: the
client imports them, and little else."""

from __future__ import annotations

from enum import StrEnum


class _Word(StrEnum):
    """One of a few words, or one that a newer server knows: an older client takes it as it is,
    rather than fail on the whole answer."""

    @classmethod
    def _missing_(cls, value: object) -> _Word | None:
        if not isinstance(value, str):
            return None
        word = str.__new__(cls, value)
        word._name_ = word._value_ = value
        return word


class Status(_Word):
    """What one row of an answer is."""

    FRESH = "fresh"
    STALE = "stale"
    COMPUTED = "computed"
    MISSING = "missing"


class Reason(_Word):
    """Why a row is missing."""

    UNKNOWN_ENTITY = "unknown_entity"
    NOT_IN_STORE = "not_in_store"
    """The store drops rows by itself when it is full, or was seen to have lost some: nobody can
    tell an unknown entity from a lost row."""
    DAMAGED = "damaged"
    """What the store holds for the key does not vouch for itself."""
    EXPIRED = "expired"
    BAD_KEY = "bad_key"
    """No entity can have it: of another type or number of parts, empty, too long."""
    DEADLINE = "deadline"
    SHED = "shed"
    MODEL_ERROR = "model_error"
    # of all rows of a view that a service takes features of
    UNKNOWN_VIEW = "unknown_view"
    """No view of that name is live: it was never published, or has another name now."""
    OTHER_ENTITY = "other_entity"
    """Its key is not among the service's entity columns."""
    STORE_UNAVAILABLE = "store_unavailable"


class AnswerSource(_Word):
    """Where a row's features came from."""

    STORE = "store"
    CACHE = "cache"
    """Computed for a miss before, and stored."""
    FALLBACK = "fallback"
    DEFAULT = "default"
    """Of a missing row: the view's default stands in for it."""
