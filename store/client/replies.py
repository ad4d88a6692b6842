"""Replies: a server's answer, read: whether it answers the call, and which error it stands for."""

from __future__ import annotations

import struct
import time
from binascii import a2b_base64
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from precompute.store.errors import (
    DeniedError,
    MissingRowError,
    NoAnswerError,
    OnlineStoreError,
    OverloadedError,
    PrecomputeError,
    RequestError,
)
from precompute.store.keys import join_key, shown_key
from precompute.store.wire import bodies

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
