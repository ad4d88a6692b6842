"""Lookup options: what a lookup or a search may say beside its keys, one value from the command
line, the wire or Python to the answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from precompute.store.errors import RequestError, did_you_mean

if TYPE_CHECKING:
    # it brings Arrow along, which a client over HTTP can do without
    from precompute.store.feature_view import FeatureView

MAX_KEYS = 1000
"""Keys in one request."""
MAX_DEADLINE_MS = 60_000
"""Time that a request may wait for a model, at most."""
MAX_NEIGHBOURS = 1000
"""Neighbours in one search."""
FLOAT, BASE64 = "float", "base64"
"""How JSON has vectors (``encoding_format``, as APIs of embeddings name it): as lists of numbers,
or as base64 of their bytes, little-endian."""


class LookupOptions(NamedTuple):
    """As :meth:`precompute.store.answers.lookup.Lookup.get` has them."""

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
    encoding_format: str = FLOAT
    """How vectors are written in JSON: :data:`FLOAT` or :data:`BASE64`; in process there is no
    JSON."""

    def check(self) -> None:
        """Refuse a limit that is none; what depends on the view is refused where that is read.

        Raises:
            RequestError: names it.
        """
        # most name neither, and this is on the way of every lookup
        if self.deadline_ms is not None or self.max_age_s is not None:
            check_limits(deadline_ms=self.deadline_ms, max_age_s=self.max_age_s)


class CacheControl(NamedTuple):
    """What a request's ``Cache-Control`` demands of stored rows (RFC 9111 §5.2.1), ages in seconds.
    A directive that is not there is None or False."""

    max_age_s: float | None = None
    """No older than this."""
    min_fresh_s: float | None = None
    """Fresh for so much longer."""
    max_stale_s: float | None = None
    """Stale for no longer."""
    no_cache: bool = False
    """Not without the origin: where a model may be called, it is; where none may, the store is the
    origin itself."""
    only_if_cached: bool = False
    """Nothing but what is stored: never the model."""

    def oldest_s(
        self, view: FeatureView, max_age_s: float | None, model_may_run: bool
    ) -> float | None:
        """The largest age that a stored row may have, or None: all limits hold; below 0, none is
        good enough.

        Args:
            view: whose TTL counts.
            max_age_s: of the lookup's own options.
            model_may_run: whether one stands behind the view, and the request allows it.
        """
        limits = [limit for limit in (max_age_s, self.max_age_s) if limit is not None]
        if self.min_fresh_s is not None:
            limits.append(view.ttl_s - self.min_fresh_s)
        if self.max_stale_s is not None:
            limits.append(view.ttl_s + self.max_stale_s)
        if self.no_cache and (model_may_run or self.only_if_cached):
            limits.append(-1.0)
        return min(limits, default=None)


class SearchOptions(NamedTuple):
    """As :meth:`precompute.store.answers.lookup.Lookup.search` has them: exactly one of ``key``,
    ``text``, ``vector`` and ``inputs`` is searched by."""

    key: Any = None
    text: str | None = None
    """The text to search by: the value of the one input column that takes texts, whatever its
    name."""
    vector: Sequence[float] | None = None
    inputs: Mapping[str, Any] | None = None
    k: int = 10
    filter: Mapping[str, Any] | None = None
    """Scalar feature → a value, a list of values, or bounds: ``gte``, ``gt``, ``lte``, ``lt``."""
    only: Sequence[Any] | None = None
    """Keys that alone may be found; of a view of chunks a long text's key, too, which means all of
    its chunks."""
    exclude: Sequence[Any] = ()
    """Keys that are left out; likewise."""
    features: Sequence[str] = ()
    deadline_ms: float | None = None
    """How long the model may take to embed ``text`` or ``inputs``."""
    model: str | None = None
    """Fingerprint of the model that made ``vector``."""
    encoding_format: str = FLOAT
    """As of :class:`LookupOptions`."""

    def check(self) -> None:
        """Refuse what no view could answer.

        Raises:
            RequestError: names it.
        """
        if sum(given is not None for given in (self.key, self.text, self.vector, self.inputs)) != 1:
            raise RequestError("a search takes exactly one of key, text, vector and inputs")
        if self.text is not None and not isinstance(self.text, str):
            raise RequestError(
                f"text is a text, got {type(self.text).__name__}: {str(self.text)[:80]}"
            )
        if self.k % 1 or not 0 < self.k <= MAX_NEIGHBOURS:
            raise RequestError(
                f"k is a whole number from 1 to {MAX_NEIGHBOURS}, got {str(self.k)[:80]}"
            )
        for name, keys in (("only", self.only or ()), ("exclude", self.exclude)):
            if len(keys) > MAX_KEYS:
                raise RequestError(
                    f"{name} takes at most {MAX_KEYS} keys, got {len(keys)}",
                    status=413,
                    code="too_many_keys",
                )
        check_limits(deadline_ms=self.deadline_ms)


def check_limits(**limits: float | None) -> None:
    """Refuse a deadline or an age that is negative, infinite or no number, and a deadline past
    :data:`MAX_DEADLINE_MS`.

    Raises:
        RequestError: names it.
    """
    for name, value in limits.items():
        if value is not None and not 0 <= value < float("inf"):
            raise RequestError(f"{name} is a number from 0, got {value}")
        if value is not None and name == "deadline_ms" and value > MAX_DEADLINE_MS:
            raise RequestError(f"deadline_ms is at most {MAX_DEADLINE_MS:,}, got {value:g}")


def check_features(view: FeatureView, features: Sequence[str]) -> None:
    """Refuse names of features that a view has not, and one that is there twice.

    Raises:
        RequestError: names it.
    """
    # once: a body may name a hundred thousand
    there = view.feature_names
    unknown = next((name for name in features if name not in there), None)
    if unknown is not None:
        raise RequestError(
            f"view {view.name!r} has no feature {str(unknown)[:80]!r} (it has:"
            f" {', '.join(there)}){did_you_mean(str(unknown)[:80], there)}",
            code="unknown_feature",
        )
    if len(set(features)) != len(features):
        # soon found: there are no more names than features
        twice = next(name for place, name in enumerate(features) if name in features[:place])
        raise RequestError(f"feature {twice!r} is named twice", code="bad_request")


# ---- Words of the client's calls: the same options by name, and how long the whole call may take.


class FreshnessWords(TypedDict, total=False):
    """The options of a call that say how fresh stored rows must be."""

    min_fresh_s: float | None
    """Rows that are not fresh for so much longer count as missing."""
    max_stale_s: float | None
    """Rows that are stale for longer count as missing."""
    no_cache: bool
    """Computed again, where a model stands behind the view."""
    only_if_cached: bool
    """Nothing but what is stored: never the model."""


class RowWords(FreshnessWords, total=False):
    """What a lookup may say beside its key, as :meth:`precompute.store.answers.lookup.Lookup.get`
    has it, and how long the whole call may take."""

    features: Sequence[str] | None
    fallback: bool
    deadline_ms: float | None
    max_age_s: float | None
    timeout_s: float | None


class LookupWords(RowWords, total=False):
    """Options of a lookup of several rows."""

    inputs: Mapping[Any, Mapping[str, Any]] | None


class ServiceWords(FreshnessWords, total=False):
    """What a request for a service may say, as
    :meth:`precompute.store.answers.lookup.Lookup.service` has it, and how long the whole call may
    take."""

    fallback: bool
    deadline_ms: float | None
    max_age_s: float | None
    inputs: Mapping[str, Mapping[Any, Mapping[str, Any]]] | None
    timeout_s: float | None


class SearchWords(TypedDict, total=False):
    """What a search may say, as :meth:`precompute.store.answers.lookup.Lookup.search` has it, and
    how long the whole call may take."""

    key: Any
    text: str | None
    vector: Sequence[float] | None
    inputs: Mapping[str, Any] | None
    k: int
    filter: Mapping[str, Any] | None
    only: Iterable[Any] | None
    exclude: Iterable[Any]
    features: Sequence[str]
    deadline_ms: float | None
    model: str | None
    timeout_s: float | None


OF_THE_CALL = frozenset({"timeout_s", *FreshnessWords.__annotations__})
"""Words that are no options of a lookup: they stand in a header, or are the client's own."""


def options_of(words: RowWords) -> LookupOptions:
    """A lookup's options among the words of a call.

    Raises:
        RequestError: a limit that is none.
    """
    sent = {name: value for name, value in words.items() if name not in OF_THE_CALL}
    options = LookupOptions(**sent)  # type: ignore[arg-type]  # a TypedDict of these very fields, and of those of the call
    options.check()
    return (
        options if options.features is None else options._replace(features=list(options.features))
    )


def cache_control_of(words: FreshnessWords) -> list[tuple[bytes, bytes]]:
    """The header that says how fresh stored rows must be (RFC 9111 §5.2.1), in whole seconds, to
    the strict side; none without such words.

    Raises:
        RequestError: a limit that is none.
    """
    min_fresh_s, max_stale_s = words.get("min_fresh_s"), words.get("max_stale_s")
    check_limits(min_fresh_s=min_fresh_s, max_stale_s=max_stale_s)
    sent = [
        name
        for name, said in (
            ("no-cache", words.get("no_cache")),
            ("only-if-cached", words.get("only_if_cached")),
        )
        if said
    ]
    sent += [] if min_fresh_s is None else [f"min-fresh={math.ceil(min_fresh_s)}"]
    sent += [] if max_stale_s is None else [f"max-stale={math.floor(max_stale_s)}"]
    return [(b"Cache-Control", ", ".join(sent).encode())] if sent else []
