"""Fallback: the contract of a model behind misses: what it takes and returns; and of what a power
brings before it (:data:`precompute.store.doors.MISSES`)."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import pyarrow as pa

from precompute.store.doors import MISSES, VIEW_KEYS
from precompute.store.errors import ConfigError, RequestError, did_you_mean
from precompute.store.feature_view import FeatureView
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason, Status

if TYPE_CHECKING:
    from precompute.store.answers.search import Begin
    from precompute.store.vectors.vector_index import VectorIndex

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
    """Column → value, of those that a :class:`MissHandler` of the view has: what the row says
    besides; None: nothing."""
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


Rest = Callable[[Sequence[str], Mapping[str, Mapping[str, Any]]], list[Future[Computed]]]
"""Takes keys of a request, and inputs of theirs; begins to compute what a handler does not answer,
and returns a future for each."""


@dataclass(frozen=True, slots=True)
class MissTools:
    """What a :class:`MissHandler` works with."""

    fallback: Fallback
    """Computes rows of any view."""
    live: Callable[[str], Pointer]
    """A view's pointer; raises where there is none."""
    index_of: Callable[[Pointer], VectorIndex]
    """The index that was published with a pointer; raises where there is none."""
    begin: Begin
    """Begins a lookup."""
    count: Callable[..., None]
    """Takes the name of an instrument of :data:`precompute.store.doors.METRICS`, by how much it is
    raised, and its labels; does nothing where nobody counts."""


class MissHandler(Protocol):
    """What answers misses of the views that have its key, before the model does."""

    columns: ClassVar[Sequence[Column]]
    """What rows of such a view may say besides; they stand before the features."""

    def __init__(self, tools: MissTools) -> None:
        """Made once for a lookup, with the first miss of such a view."""

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        oldest_s: float | None,
        rest: Rest,
    ) -> list[Future[Computed]]:
        """As :meth:`Fallback.submit`, of a view with its key; returns at once.

        Args:
            pointer: likewise.
            keys: key texts of rows that are missing.
            inputs: likewise.
            deadline: likewise.
            oldest_s: the largest age of a stored row that counts; None: the view's own limits hold;
                below 0 none counts.
            rest: what computes the rows that it does not answer.
        """

    def close(self) -> None:
        """Answer no more."""

    @staticmethod
    def words(spec: Any) -> str:
        """What stands behind misses then, for people, by what the view's record keeps of the
        key."""


class SubstituteMisses(MissHandler, Protocol):
    """Such a one whose views have another model compute misses in their own's stead
    (:attr:`precompute.store.feature_view.FeatureView.misses_by`)."""

    @staticmethod
    def says(pointer: Pointer) -> Mapping[str, Any]:
        """Column → value, of its ``columns``: what each row says that this model computed, now or
        before, under a pointer that has a substitute."""


_told: set[tuple[str, str]] = set()
"""View and key of a power that it is served without, as the log has it."""


def handlers_of(view: FeatureView) -> dict[str, type[MissHandler]]:
    """Key → what answers misses of a view, by the powers that its record names, in that order. What
    is not here is left out, and the log tells of it."""
    found = dict[str, type[MissHandler]]()
    for key in view.powers:
        try:
            if not VIEW_KEYS.is_here(key):
                raise ConfigError(VIEW_KEYS.absence(key))
            if MISSES.has(key):
                found[key] = MISSES.open(key)
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
