"""Calls: each request of the API as bytes, and how its answer is read: whether it answers the call,
and which error it stands for. There is no connection here; both clients send these."""

from __future__ import annotations

import json
import struct
import time
from binascii import a2b_base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast
from urllib.parse import quote, urlencode

import msgspec

from precompute.store.errors import (
    ConfigError,
    DeniedError,
    MissingRowError,
    NoAnswerError,
    OnlineStoreError,
    OtherFormatError,
    OverloadedError,
    PrecomputeError,
    RequestError,
)
from precompute.store.keys import join_key, key_columns, key_list, plain_key, shown_key
from precompute.store.times import Reason
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import (
    BASE64,
    OF_THE_CALL,
    FreshnessWords,
    LookupWords,
    RowWords,
    SearchOptions,
    SearchWords,
    ServiceWords,
    cache_control_of,
    check_limits,
    options_of,
)

T = TypeVar("T")

_UNREADABLE = (msgspec.MsgspecError, struct.error, ValueError, KeyError, TypeError, RecursionError)
"""What reading bytes raises that are no answer of this API: not JSON or Arrow, of another form, or
nested without end."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. ``read`` makes the result from an answer's bytes, and ``strays`` names what of
    it was not requested, None if nothing."""

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
    options, keys = options_of(words), _plain_keys(keys)
    body = {
        "keys": _spelled(keys),
        **options._asdict(),
        **({} if accept == bodies.ARROW else _BASE64),
    }
    path = f"/v1/views/{quote(view, safe='')}/lookup"
    return Call(
        path,
        read,
        lambda answer: strays([(view, keys)], [answered(answer)]),
        encoded(body),
        accept,
        words.get("timeout_s"),
        cache_control_of(words),
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
        "/v1/lookup",
        read_several,
        lambda answers: strays(wanted, map(of_rows, answers)),
        encoded(body),
        timeout_s=timeout_s,
        headers=cache_control_of(words),
    )


def row(view: str, key: Any, words: RowWords) -> Call[bodies.ViewRow]:
    """One row; that it is missing is an error."""
    options = options_of(words)
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
        path,
        read_row,
        lambda row: strays([(view, [plain])], [(row.view, [row.key])]),
        timeout_s=words.get("timeout_s"),
        headers=cache_control_of(words),
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
    sent = {name: value for name, value in words.items() if name not in OF_THE_CALL}
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
        f"/v1/services/{quote(service, safe='')}",
        read,
        lambda answer: strays(wanted, answered(answer, list(columns))),
        encoded(body | ({} if accept == bodies.ARROW else _BASE64)),
        accept,
        words.get("timeout_s"),
        cache_control_of(words),
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
    return Call(path, read_search, of_view, encoded(sent), timeout_s=timeout_s)


def views(timeout_s: float | None) -> Call[list[dict[str, Any]]]:
    """The live views."""
    return Call(
        "/v1/views",
        lambda content: list(msgspec.json.decode(content)["views"]),
        timeout_s=timeout_s,
    )


_BASE64 = {"encoding_format": BASE64}
"""Vectors as base64 take a tenth of the server's time, and are exactly the store's; callers get
lists."""


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


# ---- what came back


Answers = TypeVar(
    "Answers",
    bodies.LookupAnswer,
    bodies.ViewRow,
    bodies.SearchAnswer,
    bodies.ViewAnswer,
    bodies.ServiceView,
)


class Reply(NamedTuple):
    """What came back; ``value`` is what a good one says, once it was read."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    content: bytes
    value: Any = None

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name, in lower case."""
        return next((value for named, value in self.headers if named.lower() == name), None)


Answered = tuple[str, Sequence[str] | None]
"""The view that answered, and the keys of its rows; None for no rows, but a problem that it has
with the request."""


def strays(wanted: Sequence[tuple[str, list[Any]]], answered: Iterable[Answered]) -> str | None:
    """Names what of an answer was not requested; None where views, keys, and how many of them, are
    those of the request, in its order.

    Args:
        wanted: views, and of each the keys as :func:`precompute.store.keys.plain_key` has them.
        answered: the same of the answer.
    """
    answers = list(answered)
    if [view for view, _ in answers] != [view for view, _ in wanted]:
        return (
            f"of {', '.join(view for view, _ in answers) or 'no view'}, not"
            f" {', '.join(view for view, _ in wanted)}"
        )
    for (view, keys), (_, texts) in zip(wanted, answers, strict=True):
        if texts is None or keys == texts:
            continue
        if len(keys) != len(texts):
            return f"{len(texts)} rows of {view}, not {len(keys)}"
        wrong = next(
            (text for key, text in zip(keys, texts, strict=True) if text not in _texts_of(key)),
            None,
        )
        if wrong is not None:
            return f"a row of {view} for a key that was not requested"
    return None


def _texts_of(key: Any) -> tuple[str, ...]:
    """What may stand as ``key`` of the row of a key: its text, and, since only the server knows how
    many columns a key has, what it shows of one that is none."""
    try:
        return join_key(key, key if isinstance(key, list) else ("key",)), shown_key(key)
    except RequestError:
        return (shown_key(key),)


def of_rows(answer: bodies.LookupAnswer | bodies.ViewAnswer) -> Answered:
    """The view and the keys that a JSON answer is of; no keys where it is a refusal."""
    return answer.view, (
        None if isinstance(answer.rows, msgspec.UnsetType) else [row.key for row in answer.rows]
    )


def of_table(table: Any) -> Answered:
    """The view and the keys that an Arrow answer is of."""
    return (table.schema.metadata or {}).get(b"view", b"").decode(), table.column("key").to_pylist()


_of_lookup = msgspec.json.Decoder(bodies.LookupAnswer).decode
_of_row = msgspec.json.Decoder(bodies.ViewRow).decode
_of_service = msgspec.json.Decoder(bodies.ServiceAnswer).decode
_of_search = msgspec.json.Decoder(bodies.SearchAnswer).decode
_decode_several = msgspec.json.Decoder(bodies.MultiLookupAnswer).decode
_decode_problem = msgspec.json.Decoder(bodies.Problem).decode

_NUMBERS = {"float16": (2, "e"), "float32": (4, "f")}
"""dtype → bytes of a number, and :mod:`struct`'s letter."""


def read_lookup(content: bytes) -> bodies.LookupAnswer:
    """A lookup's rows, from JSON."""
    answer = _of_lookup(content)
    return _as_lists(answer, answer.rows)


def read_row(content: bytes) -> bodies.ViewRow:
    """A single row, from JSON."""
    row = _of_row(content)
    return _as_lists(row, [row])


def read_search(content: bytes) -> bodies.SearchAnswer:
    """A search's neighbours, from JSON."""
    answer = _of_search(content)
    return _as_lists(answer, answer.rows)


def read_several(content: bytes) -> list[bodies.ViewAnswer]:
    """An answer or a refusal for each view of a request, from JSON."""
    answers = _decode_several(content).responses
    return [
        _as_lists(one, [] if isinstance(one.rows, msgspec.UnsetType) else one.rows)
        for one in answers
    ]


def read_service(content: bytes) -> bodies.ServiceAnswer:
    """A service's joined rows, from JSON."""
    answer = _of_service(content)
    for name, view in answer.views.items():
        _as_lists(view, [row.views[name] for row in answer.rows])
    return answer


def _as_lists(answer: Answers, rows: Sequence[bodies.Row]) -> Answers:
    """The answer with vectors that came as base64 as lists of numbers: 384 in 6 µs, as digits they
    take 10."""
    for name, dtype in (
        {} if isinstance(answer.base64, msgspec.UnsetType) else answer.base64.items()
    ):
        size, letter = _NUMBERS[dtype]
        for row in rows:
            if row.features is not None and row.features[name] is not None:
                vector = a2b_base64(row.features[name])
                row.features[name] = list(struct.unpack(f"<{len(vector) // size}{letter}", vector))
    answer.base64 = msgspec.UNSET
    return answer


def read_table(content: bytes) -> Any:
    """A pyarrow.Table, from an Arrow IPC stream."""
    # loads Arrow, which takes longer than all else here together
    from precompute.store.client import tables

    return tables.read_table(content)


def refusal(reply: Reply, sent: str) -> PrecomputeError:
    """The error that an answer of another status than 2xx stands for; ``sent`` names the server."""
    try:
        problem = _decode_problem(reply.content)
    except (msgspec.MsgspecError, ValueError):
        problem = None
    if problem is None or not problem.type.startswith(bodies.PROBLEM_URN):
        # of a proxy, or of another server: one that follows RFC 9457 too has types of its own
        text = reply.content[:200].decode(errors="replace")
        message = (
            f"{sent} answered {reply.status}, and something else than this API: {text!r}; is that"
            " address right?"
        )
        problem = bodies.Problem("", "", reply.status, message)
    code, detail = problem.type.rpartition(":")[2] or "http_error", problem.detail
    if problem.model is not msgspec.UNSET:
        return MissingRowError(detail, status=reply.status, code=code)
    if reply.status in (401, 403):
        return DeniedError(detail, status=reply.status, code=code)
    if code == "store_unavailable":
        return OnlineStoreError(detail)
    if code == Reason.OTHER_FORMAT:
        return OtherFormatError(detail)
    if reply.status in (429, 503):
        return OverloadedError(detail, retry_after_s=retry_after_s(reply))
    if code in ("internal_error", "http_error"):
        return NoAnswerError(detail)
    return RequestError(detail, status=reply.status, code=code)


def retry_after_s(reply: Reply) -> float | None:
    """``Retry-After`` (RFC 9110 §10.2.3) in seconds, from now; None where there is none, or none
    that can be read."""
    value = reply.header(b"retry-after")
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    # an HTTP date, which this server sends none of; a proxy may
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(value.decode("latin-1")).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
