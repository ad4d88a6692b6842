"""Fallback: the contract of a model behind misses: what it takes and returns; and which powers
answer a view's misses before it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from precompute.store.doors import MISSES, VIEW_KEYS
from precompute.store.errors import ConfigError, RequestError, did_you_mean
from precompute.store.feature_view import RESERVED, FeatureView
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason, Status

log = logging.getLogger(__name__)

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
class Computed:
    """One row the model made now, packed as the online store would hold it, and when (µs since
    1970); what a view is searched by is packed as a row of :func:`unpacked_view`, its vector not
    quantized.
    """

    row: bytes
    computed_at_us: int
    says: Mapping[str, Any] | None = None
    """Column → value: what the row says besides, of the columns of what answers the view's misses;
    None: nothing."""
    stored: bool = False
    """Whether no model made it: it is the published row of another entity, and as old as that."""


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


class Column(NamedTuple):
    """What rows may say of themselves besides: a column of Arrow, a member of a row in JSON."""

    name: str
    type: pa.DataType
    what: str
    """What it says, of which rows; of the OpenAPI document."""


_told: set[tuple[str, str]] = set()
"""View and key of a power that it is served without, as the log has it."""


def handlers_of(view: FeatureView) -> dict[str, type[Any]]:
    """Key → the class of a :class:`precompute.store.answers.misses.MissHandler`, by the powers that
    a view's record names, in that order. What is not here is left out, and the log tells of it."""
    found, taken = dict[str, type[Any]](), {*RESERVED, *view.entity, *view.feature_names}
    for key in view.powers:
        try:
            if not VIEW_KEYS.is_here(key):
                raise ConfigError(VIEW_KEYS.absence(key))
            if MISSES.has(key):
                kind = MISSES.open(key)
                names = {column.name for column in kind.columns}
                if twice := sorted(names & taken):
                    raise ConfigError(
                        f"misses {key!r}: its column {twice[0]!r} is there already: call it"
                        " otherwise, or what has that name"
                    )
                found[key], taken = kind, taken | names
        except ConfigError as exc:
            if (view.name, key) not in _told:
                _told.add((view.name, key))
                log.warning("view %r is served without what its record names: %s", view.name, exc)
    return found


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
