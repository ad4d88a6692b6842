"""Calls: each request of the API as bytes, and how its answer is read; there is no connection here.
Both clients send these."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar, cast
from urllib.parse import quote, urlencode

import msgspec

from precompute.store.client.replies import (
    Answered,
    Reply,
    of_rows,
    of_table,
    read_lookup,
    read_row,
    read_search,
    read_service,
    read_several,
    read_table,
    refusal,
    strays,
)
from precompute.store.errors import ConfigError, NoAnswerError, RequestError
from precompute.store.keys import join_key, key_columns, key_list, plain_key
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import BASE64, LookupOptions, SearchOptions, check_limits

T = TypeVar("T")

_UNREADABLE = (
    msgspec.MsgspecError,
    struct.error,
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
)
"""What reading bytes raises that are no answer of this API: not JSON or Arrow, of another form, or
nested without end."""


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


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. Calls of one ``kind`` take about as long as each other; ``read`` makes the
    result from an answer's bytes, and ``strays`` names what of it was not requested, None if
    nothing."""

    kind: str
    path: str
    read: Callable[[bytes], T]
    strays: Callable[[T], str | None] = lambda _: None
    body: bytes | None = None
    accept: str = bodies.JSON
    timeout_s: float | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def method(self) -> bytes:
        """POST with a body, else GET; both only read, so sending twice is safe."""
        return b"GET" if self.body is None else b"POST"

    def deadline(self, timeout_s: float) -> float:
        """When the call must be over, by ``time.monotonic``; after ``timeout_s`` if it has no
        timeout.

        Raises:
            RequestError: that is no time limit.
        """
        return time.monotonic() + check_timeout(
            timeout_s if self.timeout_s is None else self.timeout_s
        )

    def checked(self, reply: Reply) -> tuple[Reply, NoAnswerError | None]:
        """The reply, read; with an error where it answers another request than this one, so that
        its connection is not to be trusted any more."""
        if not 200 <= reply.status < 300:
            return reply, None
        try:
            value = self.read(reply.content)
        except (ModuleNotFoundError, *_UNREADABLE):
            # reported by answer()
            return reply, None
        stray = self.strays(value)
        if stray is None:
            return reply._replace(value=value), None
        return reply, NoAnswerError(
            f"what came is the answer to another request: {stray}; the connection was closed, look"
            " at what lies between"
        )

    def answer(self, reply: Reply, sent: str) -> T:
        """The call's result.

        Raises:
            PrecomputeError: the server refused, or the reply is no answer of this API; ``sent``
                names the server.
        """
        if not 200 <= reply.status < 300:
            raise refusal(reply, sent)
        if reply.value is not None:
            return cast(T, reply.value)
        try:
            return self.read(reply.content)
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"an answer as Arrow needs {exc.name}: pip install 'precompute-store[client]'"
            ) from exc
        except _UNREADABLE as exc:
            raise NoAnswerError(
                f"{sent} answered something else than this API: {exc}; is that address right?"
            ) from exc


def check_timeout(timeout_s: float) -> float:
    """``timeout_s`` itself.

    Raises:
        RequestError: not above 0, or more than :data:`LONGEST_TIMEOUT_S`.
    """
    try:
        right = 0 < timeout_s <= LONGEST_TIMEOUT_S
    except (TypeError, ValueError):
        right = False
    if not right:
        raise RequestError(
            f"timeout_s is a number of seconds above 0 and up to {LONGEST_TIMEOUT_S}, got"
            f" {timeout_s!r}"
        )
    return float(timeout_s)


LONGEST_TIMEOUT_S = 1_000_000
"""Eleven days; a socket takes 24 (2³¹ ms, of poll)."""

# ---- what can be requested


def table(view: str, keys: Any, words: LookupWords) -> Call[Any]:
    """A lookup, answered as a ``pyarrow.Table``."""
    return _lookup(view, keys, words, bodies.ARROW, read_table, of_table)


def rows(view: str, keys: Any, words: LookupWords) -> Call[bodies.LookupAnswer]:
    """A lookup, answered as rows."""
    return _lookup(view, keys, words, bodies.JSON, read_lookup, of_rows)


def _lookup(
    view: str,
    keys: Any,
    words: LookupWords,
    accept: str,
    read: Callable[[bytes], T],
    answered: Callable[[T], Answered],
) -> Call[T]:
    options, keys = _options(words), _plain_keys(keys)
    body = {
        "keys": _spelled(keys),
        **options._asdict(),
        **({} if accept == bodies.ARROW else _BASE64),
    }
    path = f"/v1/views/{quote(view, safe='')}/lookup"
    return Call(
        f"lookup {view}",
        path,
        read,
        lambda answer: strays([(view, keys)], [answered(answer)]),
        encoded(body),
        accept,
        words.get("timeout_s"),
        _cache_control(words),
    )


def several(
    requests: Sequence[bodies.ViewLookupRequest], timeout_s: float | None, words: FreshnessWords
) -> Call[list[bodies.ViewAnswer]]:
    """Lookups of several views in one call."""
    unknown = words.keys() - FreshnessWords.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"a lookup of several views takes no {', '.join(sorted(unknown))}: each of its"
            " requests may"
        )
    # as for one view: JSON has no NaN or infinity, and a limit that arrives as null is none
    for request in requests:
        request.options().check()
    wanted = [(request.view, _plain_keys(request.keys)) for request in requests]
    named = zip(requests, wanted, strict=True)
    body = {
        "requests": [
            msgspec.structs.asdict(request) | {"keys": _spelled(keys)} | _BASE64
            for request, (_, keys) in named
        ]
    }
    return Call(
        "several",
        "/v1/lookup",
        read_several,
        lambda answers: strays(wanted, map(of_rows, answers)),
        encoded(body),
        timeout_s=timeout_s,
        headers=_cache_control(words),
    )


def row(view: str, key: Any, words: RowWords) -> Call[bodies.ViewRow]:
    """One row; that it is missing is an error."""
    options = _options(words)
    plain = plain_key(key)
    parts = [join_key(part, ("key",)) for part in (plain if isinstance(plain, list) else [key])]
    # with all its digits: rounded, a limit of twelve days would let rows pass that are seconds
    # older
    query = {
        name: repr(float(value))
        for name in ("deadline_ms", "max_age_s")
        if (value := getattr(options, name)) is not None
    }
    if options.features is not None:
        query["features"] = ",".join(options.features)
    if not options.fallback:
        query["fallback"] = "false"
    query |= _BASE64
    path = (
        f"/v1/views/{quote(view, safe='')}/rows/{'/'.join(quote(part, safe='') for part in parts)}"
    )
    path += f"?{urlencode(query)}"
    return Call(
        f"row {view}",
        path,
        read_row,
        lambda row: strays([(view, [plain])], [(row.view, [row.key])]),
        timeout_s=words.get("timeout_s"),
        headers=_cache_control(words),
    )


def service_table(service: str, entities: Any, words: ServiceWords) -> Call[Any]:
    """A service's features, answered as a ``pyarrow.Table``."""
    return _service(service, entities, words, bodies.ARROW, read_table, _of_joined_table)


def service_rows(service: str, entities: Any, words: ServiceWords) -> Call[bodies.ServiceAnswer]:
    """A service's features, answered as rows."""
    return _service(service, entities, words, bodies.JSON, read_service, _of_joined_rows)


def _service(
    service: str,
    entities: Any,
    words: ServiceWords,
    accept: str,
    read: Callable[[bytes], T],
    answered: Callable[[T, list[str]], list[Answered]],
) -> Call[T]:
    sent = {name: value for name, value in words.items() if name not in _OF_THE_CALL}
    if unknown := sent.keys() - ServiceWords.__annotations__.keys():
        raise TypeError(f"a request for a service takes no {', '.join(sorted(unknown))}")
    check_limits(deadline_ms=words.get("deadline_ms"), max_age_s=words.get("max_age_s"))
    columns = {
        name: [plain_key(key) for key in keys] for name, keys in key_columns(entities).items()
    }
    body = {"entities": {name: _spelled(values) for name, values in columns.items()}, **sent}
    # each column of the entity as the keys of a view of that name
    wanted = [(service, []), *columns.items()]
    return Call(
        f"service {service}",
        f"/v1/services/{quote(service, safe='')}",
        read,
        lambda answer: strays(wanted, answered(answer, list(columns))),
        encoded(body | ({} if accept == bodies.ARROW else _BASE64)),
        accept,
        words.get("timeout_s"),
        _cache_control(words),
    )


def _of_joined_rows(answer: bodies.ServiceAnswer, names: list[str]) -> list[Answered]:
    return [
        (answer.service, None),
        *((name, [row.entity[name] for row in answer.rows]) for name in names),
    ]


def _of_joined_table(table: Any, names: list[str]) -> list[Answered]:
    service = (table.schema.metadata or {}).get(b"service", b"").decode()
    return [(service, None), *((name, table.column(name).to_pylist()) for name in names)]


def search(view: str, words: SearchWords) -> Call[bodies.SearchAnswer]:
    """The nearest rows."""
    timeout_s = words.get("timeout_s")
    sent = {name: value for name, value in words.items() if name != "timeout_s"} | (
        _BASE64 if words.get("features") else {}
    )
    if unknown := sent.keys() - set(SearchOptions._fields):
        raise TypeError(f"a search takes no {', '.join(sorted(unknown))}")
    for name in ("only", "exclude"):
        if sent.get(name) is not None:
            sent[name] = _spelled(_plain_keys(sent[name]))
    if sent.get("key") is not None:
        sent["key"] = _spelled(plain_key(sent["key"]))
    path, of_view = (
        f"/v1/views/{quote(view, safe='')}/search",
        lambda answer: strays([(view, [])], [(answer.view, [])]),
    )
    return Call(f"search {view}", path, read_search, of_view, encoded(sent), timeout_s=timeout_s)


def views(timeout_s: float | None) -> Call[list[dict[str, Any]]]:
    """The live views."""
    return Call(
        "views",
        "/v1/views",
        lambda content: list(msgspec.json.decode(content)["views"]),
        timeout_s=timeout_s,
    )


def _options(words: RowWords) -> LookupOptions:
    sent = {name: value for name, value in words.items() if name not in _OF_THE_CALL}
    options = LookupOptions(**sent)  # type: ignore[arg-type]  # a TypedDict of these very fields, and of those of the call
    options.check()
    return (
        options if options.features is None else options._replace(features=list(options.features))
    )


_BASE64 = {"encoding_format": BASE64}
"""Vectors as base64 take a tenth of the server's time, and are exactly the store's; callers get
lists."""

_OF_THE_CALL = frozenset({"timeout_s", *FreshnessWords.__annotations__})


def _cache_control(words: FreshnessWords) -> list[tuple[bytes, bytes]]:
    """The header that says how fresh stored rows must be (RFC 9111 §5.2.1), in whole seconds, to
    the strict side."""
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


def _spelled(keys: Any) -> msgspec.Raw:
    """Keys, or one, as :func:`precompute.store.keys.plain_key` has them, in JSON: what is none
    is one bad key, whatever it is."""
    try:
        return msgspec.Raw(_encoder.encode(keys))
    except UnicodeEncodeError:
        # half of a surrogate pair, which JSON can spell
        return msgspec.Raw(json.dumps(keys).encode())


def _plain_keys(keys: Any) -> list[Any]:
    """Raises:
    RequestError: one key, where a list of keys belongs.
    """
    return [plain_key(key) for key in key_list(keys)]


def encoded(body: Any) -> bytes:
    """A request's body as JSON; a number of numpy as the number it is.

    Raises:
        RequestError: not something JSON can carry.
    """
    try:
        try:
            return _encoder.encode(body)
        except UnicodeEncodeError:
            # half of a surrogate pair, which JSON can spell: of a view's name or of inputs, it is
            # theirs alone
            return json.dumps(body, default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as exc:
        raise RequestError(f"not something JSON can carry: {exc}") from exc


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
