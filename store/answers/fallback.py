"""Fallback: the contract of a model behind misses: what it takes and returns."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from precompute.store.errors import RequestError, did_you_mean
from precompute.store.feature_view import FeatureView
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason, Status

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""The client of the request that is worked on, by token or address, to whose share the rows that it
misses count; empty where clients cannot be told apart."""

SHARE = 3
"""A client may hold about so many times as many places (rows in a model's queue) as are free: of
500 one alone holds 376, and beside eight that each want all, 20 stay free."""


def places(free: int, mine: int) -> int:
    """How many more places a client may take that has ``mine``, where ``free`` are left: there is
    always one for who has none, as long as one is free."""
    return max(0, min(free, (SHARE * free - mine) // (SHARE + 1) + 1))


@dataclass(frozen=True, slots=True)
class Likeness:
    """Whose stored row it is, and how near that entity's input is to what was requested: a
    cosine."""

    key: str
    similarity: float


@dataclass(frozen=True, slots=True)
class Computed:
    """One row the model made now, packed as the online store would hold it, and when (µs since
    1970); what a view is searched by is packed as a row of :func:`unpacked_view`, its vector not
    quantized. With ``like`` no model made it: it is the stored row of another entity
    (:mod:`precompute.store.answers.misses`).
    """

    row: bytes
    computed_at_us: int
    like: Likeness | None = None


class Miss(Exception):
    """Why a fallback gave no row; carried by its future. ``broken``: true if the model is at fault,
    false if this row is, None if that is not known. ``retry_after_s``: before then, a retry is in
    vain; 0: not known."""

    def __init__(
        self,
        reason: Reason,
        detail: str = "",
        *,
        broken: bool | None = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(detail or reason)
        self.reason, self.broken, self.retry_after_s = reason, broken, retry_after_s


def outcome_of(future: Future[Computed]) -> str:
    """What became of a row, once that is known: ``computed``, why it is missing, or ``given_up`` by
    the caller."""
    if future.cancelled():
        return "given_up"
    error = future.exception()
    if error is None:
        return str(Status.COMPUTED)
    return str(error.reason if isinstance(error, Miss) else Reason.MODEL_ERROR)


class Fallback(Protocol):
    """What stands behind a miss: the same model, run now."""

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        *,
        query: bool = False,
    ) -> list[Future[Computed]]:
        """Begin to compute ``keys`` under the model of ``pointer``, on the account of
        :data:`CLIENT`; returns at once.

        Args:
            pointer: names the view, the snapshot and the model fingerprint the rows must belong to.
            keys: key texts.
            inputs: key → input column → value, for keys whose inputs come with the request.
            deadline: :func:`time.monotonic` time after which the caller waits no more.
            query: the inputs are what the view is searched by, and none of its rows: an encoder may
                have another prompt for them.

        Returns:
            a future per key, the caller's own: a :class:`Computed`, or :class:`Miss` raised. To
            cancel it is to give the row up: it is computed only where another request waits for it,
            or where that has begun.
        """


class Waiting:
    """What one request waits for, in whatever thread, so that others may end that, and know when it
    will be over."""

    def __init__(self) -> None:
        self.until = -math.inf
        """When it has no patience any more (:func:`time.monotonic`); minus infinity where it waits
        for no model."""
        self._futures: list[Future[Computed]] = []
        self._lock, self._over = threading.Lock(), False

    def add(self, future: Future[Computed], until: float) -> None:
        """Record a future that the request waits for, and until when (:func:`time.monotonic`)."""
        with self._lock:
            self._futures.append(future)
            self.until, over = max(self.until, until), self._over
        if over:
            future.cancel()

    def give_up(self) -> None:
        """Cancel all that it waits for, now and later."""
        with self._lock:
            self._over = True
        for future in self._futures:
            future.cancel()


def unpacked_view(view: FeatureView) -> FeatureView:
    """The view with all of its vectors stored as they are."""
    return replace(view, features=tuple(replace(feature, packed=None) for feature in view.features))


def no_fallback(view: FeatureView) -> RequestError:
    """The refusal of what needs a model behind a view's misses, where there is none."""
    remedy = "ask its server, or open its project with precompute.open"
    if not view.fallback:
        remedy = (
            f"write `fallback: {{enabled: true}}` in views/{view.name}.yaml and run the view again"
        )
    return RequestError(
        f"view {view.name!r} has no fallback here, so no model computes what it has not stored:"
        f" {remedy}",
        code="no_fallback",
    )


def check_inputs(pointer: Pointer, inputs: Any) -> None:
    """Refuse what is no input of a view's model.

    Raises:
        RequestError: no mapping of input columns to values, or a column that the view's source has
            not.
    """
    columns = pointer.input_columns
    if not isinstance(inputs, Mapping) or not inputs:
        raise RequestError(
            f"inputs are a mapping of input columns to values (columns: {', '.join(columns)})",
            code="bad_inputs",
        )
    for name in inputs:
        if name not in columns:
            raise RequestError(
                f"view {pointer.view.name!r} has no input column {str(name)[:80]!r} (it has:"
                f" {', '.join(columns)}){did_you_mean(str(name)[:80], columns)}",
                code="bad_inputs",
            )
