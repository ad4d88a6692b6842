"""Status: what one row of an answer is, why it is missing, and where it came from. Words alone: the client imports them, and little else."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """What one row of an answer is."""

    FRESH = "fresh"
    STALE = "stale"
    COMPUTED = "computed"
    MISSING = "missing"


class Reason(StrEnum):
    """Why a row is missing."""

    UNKNOWN_ENTITY = "unknown_entity"
    NOT_IN_STORE = "not_in_store"
    """The store drops rows by itself when it is full, or was seen to have lost some: nobody can tell an unknown entity from a lost row."""
    DAMAGED = "damaged"
    """What the store holds for the key does not vouch for itself."""
    EXPIRED = "expired"
    BAD_KEY = "bad_key"
    """No entity can have it: of another type or number of parts, empty, too long."""
    DEADLINE = "deadline"
    SHED = "shed"
    MODEL_ERROR = "model_error"


class AnswerSource(StrEnum):
    """Where a row's features came from."""

    STORE = "store"
    FALLBACK = "fallback"
