"""Calls: what is asked of the server, as bytes, and how its answer is read; no connection here. Both clients send these."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from store.api import wire
from store.errors import (
    ConfigError,
    DeniedError,
    MissingRowError,
    NoAnswerError,
    OnlineStoreError,
    OverloadedError,
    PrecomputeError,
    RequestError,
)
from store.key_text import join_key
from store.lookup_options import LookupOptions, SearchOptions, check_limits

T = TypeVar("T")


class FreshnessWords(TypedDict, total=False):
    """How fresh stored rows must be, of all that a call asks for."""

    min_fresh_s: float | None
    """Rows that are not fresh for so much longer count as missing."""
    max_stale_s: float | None
    """Rows that are stale for longer count as missing."""
    no_cache: bool
    """Computed anew, where a model stands behind the view."""
    only_if_cached: bool
    """Nothing but what is stored: never the model."""


class RowWords(FreshnessWords, total=False):
    """What a lookup may say beside its key, as :meth:`store.lookup.Lookup.get` has it, and how long the whole call may take."""

    features: Sequence[str] | None
    fallback: bool
    deadline_ms: float | None
    max_age_s: float | None
    timeout_s: float | None


class LookupWords(RowWords, total=False):
    """The same of a lookup of several."""

    inputs: Mapping[Any, Mapping[str, Any]] | None


class SearchWords(TypedDict, total=False):
    """What a search may say, as :meth:`store.lookup.Lookup.search` has it, and how long the whole call may take."""

    key: Any
    vector: Sequence[float] | None
    inputs: Mapping[str, Any] | None
    k: int
    filter: Mapping[str, Any] | None
    only: Sequence[Any] | None
    exclude: Sequence[Any]
    features: Sequence[str]
    deadline_ms: float | None
    model: str | None
    timeout_s: float | None


class Reply(NamedTuple):
    """What came back."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    content: bytes

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name, in lower case."""
        return next((value for named, value in self.headers if named.lower() == name), None)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One question. ``kind`` tells calls apart that take as long as each other; ``read`` makes of a good answer's bytes what the caller gets."""

    kind: str
    path: str
    read: Callable[[bytes], T]
    body: bytes | None = None
    accept: str = wire.JSON
    timeout_s: float | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def method(self) -> bytes:
        """POST with a body, else GET; either only reads, so asking twice is safe."""
        return b"GET" if self.body is None else b"POST"

    def answer(self, reply: Reply, asked: str) -> T:
        """What the caller gets.

        Raises:
            PrecomputeError: the server refused, or what came is no answer of this API; ``asked`` names the server.
        """
        if not 200 <= reply.status < 300:
            raise refusal(reply, asked)
        try:
            return self.read(reply.content)
        except ModuleNotFoundError as exc:
            raise ConfigError(f"an answer as Arrow needs {exc.name}: pip install 'precompute[client]'") from exc
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as exc:
            raise NoAnswerError(f"{asked} answered something else than this API: {exc}; is that address right?") from exc


# ---- what can be asked


def table(view: str, keys: Any, words: LookupWords) -> Call[Any]:
    """A lookup, answered as a ``pyarrow.Table``."""
    return _lookup(view, keys, words, wire.ARROW, _read_table)


def rows(view: str, keys: Any, words: LookupWords) -> Call[wire.LookupAnswer]:
    """A lookup, answered as rows."""
    return _lookup(view, keys, words, wire.JSON, _decode_lookup)


def _lookup(view: str, keys: Any, words: LookupWords, accept: str, read: Callable[[bytes], T]) -> Call[T]:
    options = _options(words)
    body = {"keys": key_list(keys), **options._asdict()}
    path = f"/v1/views/{quote(view, safe='')}/lookup"
    return Call(f"lookup {view}", path, read, encoded(body), accept, words.get("timeout_s"), _cache_control(words))


def several(
    requests: Sequence[wire.ViewLookupRequest], timeout_s: float | None, words: FreshnessWords
) -> Call[list[wire.ViewAnswer]]:
    """Lookups of several views in one call."""
    unknown = words.keys() - FreshnessWords.__annotations__.keys()
    if unknown:
        raise TypeError(f"a lookup of several views takes no {', '.join(sorted(unknown))}: each of its requests may")
    # as of one view: JSON has no NaN or infinity, they would arrive as null, and a limit as none
    for request in requests:
        request.options().check()
    body = {"requests": [msgspec.structs.asdict(request) | {"keys": key_list(request.keys)} for request in requests]}
    headers = _cache_control(words)
    return Call("several", "/v1/lookup", _read_several, encoded(body), timeout_s=timeout_s, headers=headers)


def row(view: str, key: Any, words: RowWords) -> Call[wire.ViewRow]:
    """One row; that it is missing is an error."""
    options = _options(words)
    parts = [join_key(part, ("key",)) for part in (key if isinstance(key, (list, tuple)) else [key])]
    # with all its digits: rounded, a limit of twelve days would let rows pass that are seconds older
    query = {name: repr(float(value)) for name in ("deadline_ms", "max_age_s") if (value := getattr(options, name)) is not None}
    if options.features is not None:
        query["features"] = ",".join(options.features)
    if not options.fallback:
        query["fallback"] = "false"
    path = f"/v1/views/{quote(view, safe='')}/rows/{'/'.join(quote(part, safe='') for part in parts)}"
    path += f"?{urlencode(query)}" if query else ""
    return Call(f"row {view}", path, _decode_row, timeout_s=words.get("timeout_s"), headers=_cache_control(words))


def search(view: str, words: SearchWords) -> Call[wire.SearchAnswer]:
    """The nearest rows."""
    timeout_s = words.get("timeout_s")
    asked = {name: value for name, value in words.items() if name != "timeout_s"}
    if unknown := asked.keys() - set(SearchOptions._fields):
        raise TypeError(f"a search takes no {', '.join(sorted(unknown))}")
    for name in ("only", "exclude"):
        if asked.get(name) is not None:
            asked[name] = key_list(asked[name])
    return Call(f"search {view}", f"/v1/views/{quote(view, safe='')}/search", _decode_search, encoded(asked), timeout_s=timeout_s)


def views(timeout_s: float | None) -> Call[list[dict[str, Any]]]:
    """The live views."""
    return Call("views", "/v1/views", lambda content: list(msgspec.json.decode(content)["views"]), timeout_s=timeout_s)


def _options(words: RowWords) -> LookupOptions:
    asked = {name: value for name, value in words.items() if name not in _OF_THE_CALL}
    options = LookupOptions(**asked)  # type: ignore[arg-type]  # a TypedDict of these very fields, and of those of the call
    options.check()
    return options if options.features is None else options._replace(features=list(options.features))


_OF_THE_CALL = frozenset({"timeout_s", *FreshnessWords.__annotations__})


def _cache_control(words: FreshnessWords) -> list[tuple[bytes, bytes]]:
    """The header that says how fresh stored rows must be (RFC 9111 §5.2.1), in whole seconds, to the strict side."""
    min_fresh_s, max_stale_s = words.get("min_fresh_s"), words.get("max_stale_s")
    check_limits(min_fresh_s=min_fresh_s, max_stale_s=max_stale_s)
    asked = [
        name for name, said in (("no-cache", words.get("no_cache")), ("only-if-cached", words.get("only_if_cached"))) if said
    ]
    asked += [] if min_fresh_s is None else [f"min-fresh={math.ceil(min_fresh_s)}"]
    asked += [] if max_stale_s is None else [f"max-stale={math.floor(max_stale_s)}"]
    return [(b"Cache-Control", ", ".join(asked).encode())] if asked else []


def key_list(keys: Any) -> list[Any]:
    """Keys as JSON takes them: of a list, or of what numpy, pandas, pyarrow or polars hold.

    Raises:
        RequestError: one key, where a list of keys belongs.
    """
    if isinstance(keys, (str, bytes)):
        raise RequestError(f"keys is a list of keys, got {type(keys).__name__}: write [{keys!r}]", code="bad_key")
    for convert in ("to_pylist", "tolist", "to_list"):
        if hasattr(keys, convert):
            keys = getattr(keys, convert)()
            break
    try:
        return list(keys)
    except TypeError as exc:
        raise RequestError(f"keys is a list of keys, got {type(keys).__name__}: write [{keys!r}]", code="bad_key") from exc


def encoded(body: Any) -> bytes:
    """A request's body as JSON; a number of numpy as the number it is.

    Raises:
        RequestError: not something JSON can carry.
    """
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:
        # half of a surrogate pair, which JSON can spell: among keys it is one bad key
        return json.dumps(body, default=_plain).encode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as exc:
        raise RequestError(f"not something JSON can carry: {exc}") from exc


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain)

# ---- what comes back

_decode_lookup = msgspec.json.Decoder(wire.LookupAnswer).decode
_decode_row = msgspec.json.Decoder(wire.ViewRow).decode
_decode_search = msgspec.json.Decoder(wire.SearchAnswer).decode
_decode_several = msgspec.json.Decoder(wire.MultiLookupAnswer).decode
_decode_problem = msgspec.json.Decoder(wire.Problem).decode


def _read_several(content: bytes) -> list[wire.ViewAnswer]:
    return _decode_several(content).responses


def _read_table(content: bytes) -> Any:
    # loads Arrow, which takes longer than all else here together
    from store.client.tables import read_table

    return read_table(content)


def refusal(reply: Reply, asked: str) -> PrecomputeError:
    """The error that an answer of another status than 2xx stands for; ``asked`` names the server."""
    try:
        problem = _decode_problem(reply.content)
    except (msgspec.MsgspecError, ValueError):
        text = reply.content[:200].decode(errors="replace")
        if 400 <= reply.status < 500 and reply.status not in (401, 403, 429):
            return RequestError(text, status=reply.status, code="http_error")
        problem = wire.Problem(
            "", "", reply.status, f"{asked} answered {reply.status}, and something else than this API: {text!r}"
        )
    code, detail = problem.type.rpartition(":")[2] or "http_error", problem.detail
    if problem.model is not msgspec.UNSET:
        return MissingRowError(detail, status=reply.status, code=code)
    if reply.status in (401, 403):
        return DeniedError(detail, status=reply.status, code=code)
    if code == "store_unavailable":
        return OnlineStoreError(detail)
    if reply.status in (429, 503):
        return OverloadedError(detail, retry_after_s=retry_after_s(reply))
    if code in ("internal_error", "http_error"):
        return NoAnswerError(detail)
    return RequestError(detail, status=reply.status, code=code)


def retry_after_s(reply: Reply) -> float | None:
    """``Retry-After`` (RFC 9110 §10.2.3) in seconds, from now; None where there is none, or none that can be read."""
    value = reply.header(b"retry-after")
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    # an HTTP date, which this server sends none of; a proxy may
    import time
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(value.decode("latin-1")).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
