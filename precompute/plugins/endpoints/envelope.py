"""Envelope: the JSON around what an endpoint is asked and answers, out of the bytes that came, and
the failure that stands in it, in any of the forms in which services and gateways say one, whatever
the status of HTTP says."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from precompute.plugins.endpoints.transport import MOST_ANSWER_BYTES


def body_of(fields: Mapping[str, Any]) -> bytes:
    """The body of a request with these fields."""
    return msgspec.json.encode(fields)


class NoEnvelopeError(Exception):
    """An answer's body is no JSON. ``page`` is whether it is a web page, which no model wrote and
    nobody is billed for, ``of_all`` whether all other answers will be no better."""

    def __init__(self, reason: str, *, page: bool = False, of_all: bool = False) -> None:
        super().__init__(reason)
        self.page, self.of_all = page, of_all


def plain_body(body: bytes, encoding: str) -> bytes:
    """A body as it was before a proxy compressed it.

    Args:
        body: as it came.
        encoding: its ``Content-Encoding``: codings in the order in which they were applied.

    Raises:
        NoEnvelopeError: it is damaged, cut, too large, or of a coding that is not read here.
    """
    for coding in reversed([name.strip().lower() for name in encoding.split(",")]):
        if coding in ("", "identity"):
            continue
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise NoEnvelopeError(
                f"it has Content-Encoding {coding:.40}, which is not read here (gzip and deflate"
                " are): have the proxy before the service send answers as they are",
                of_all=True,
            )
        # a deflate without zlib's head is common, though no standard has it
        bare = coding == "deflate" and (body[:1] or b"\x78")[0] & 15 != 8
        unpacking = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
        try:
            body = unpacking.decompress(body, MOST_ANSWER_BYTES + 1)
        except zlib.error as exc:
            raise NoEnvelopeError(f"it is damaged {coding}: {exc}") from exc
        if len(body) > MOST_ANSWER_BYTES:
            raise NoEnvelopeError(f"it has more than {MOST_ANSWER_BYTES >> 20} MB")
        if not unpacking.eof:
            raise NoEnvelopeError(f"its {coding} is cut")
    return body


_PAGE = re.compile(rb"\s*<(?:!doctype|html|head|\?xml)", re.IGNORECASE)
_EVENTS = re.compile(rb"\s*(?:event|data|id|retry)?:")


def envelope_of(body: bytes) -> Any:
    """The JSON of a body: with a byte order mark, with NaN in it, or as server-sent events, of
    which the one that says an error counts.

    Raises:
        NoEnvelopeError: it is none.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        pass
    if _PAGE.match(body):
        title = re.search(rb"<title[^>]*>([^<]*)", body, re.IGNORECASE)
        named = f" ({title[1].decode(errors='replace').strip()})" if title else ""
        raise NoEnvelopeError(f"it is a web page{named}, as a proxy or a login shows", page=True)
    if _EVENTS.match(body):
        return _last_event(body.decode(errors="replace"))
    try:
        # Python's parser takes NaN, other encodings of Unicode, and half a surrogate pair
        return json.loads(body)
    except (ValueError, RecursionError) as exc:
        what = "it is empty" if not body.strip() else f"it is no whole JSON: {exc}"
        raise NoEnvelopeError(what) from exc


def _last_event(text: str) -> Any:
    """The event that says an error, of those of a stream."""
    for line in text.splitlines():
        name, _, data = line.partition(":")
        if name.strip() == "data" and data.strip().startswith("{"):
            try:
                event = json.loads(data)
            except (ValueError, RecursionError) as exc:
                raise NoEnvelopeError(f"it is a stream of events, and one is cut: {exc}") from exc
            if failure_in(event) is not None:
                return event
    raise NoEnvelopeError(
        "it is a stream of events, which was not asked for: params: {stream: false} may help"
    )


# ---- failures


@dataclass(frozen=True, slots=True)
class Failure:
    """What a service says instead of an answer: the ``status`` that it has, or would have in HTTP,
    its words, and how long it asks to wait, in s."""

    status: int
    said: str
    wait_s: float | None = None
    loading: bool = False
    """Whether its model is still being loaded."""
    quota: bool = False
    """Whether there is no more money, for which no waiting helps."""
    input_refused: bool = False
    """Whether it is what the input says that is not answered, whatever the status."""


_STATUS_KEYS = ("code", "status", "status_code", "statusCode", "http_status", "http_code")
_NAME_KEYS = (*_STATUS_KEYS, "type", "error_type", "title", "reason")
_TEXT_KEYS = ("message", "msg", "detail", "error", "description", "title", "faultstring")
_NO_ANSWER = frozenset(
    {"error", "errors", "detail", "fault", "message", "msg", "error_message", "title"}
)
_NAMES: tuple[tuple[str, int], ...] = (
    ("insufficientquota|insufficientcredit|paymentrequired|billing", 402),
    ("invalidapikey|incorrectapikey|authentication|unauthori[sz]ed|unauthenticated|autherror", 401),
    ("contextlength|contentfilter|contentpolicy|contextwindow|stringaboveman|exceedcontext", 400),
    ("toolarge|toolong", 413),
    ("ratelimit|toomanyrequests|throttl|exhausted|overload|capacity|slowdown|quota", 429),
    ("loading|unavailable|notready|starting", 503),
    ("permission|forbidden|accessdenied", 403),
    ("notfound|nosuchmodel", 404),
    ("timeout|timedout|deadline", 504),
    ("badgateway|upstream|provider", 502),
    ("unprocessable|validation", 422),
    ("invalid|badrequest|refus", 400),
)
"""Words in the name of an error, of which only letters count, and the status that they mean; the
first that is found."""
_OWN_CODES = {3006: 413, 3007: 408, 3008: 408, 3036: 429, 3040: 429, 5004: 400, 5007: 404}
_OWN_CODES |= {10000: 401, 40301: 404, 40302: 400, 40303: 400}
"""Cloudflare's codes, and those of FastChat, which vLLM once had, that are no status with two
digits more."""
_STATUS = re.compile(
    r"(?:status|code|http|error)\W{0,4}(?:code\W{0,3})?([45]\d\d)\b|^\W*([45]\d\d)\b", re.I
)
_LOADING = re.compile(
    r"\b(?:is|still|currently|server) loading\b|\bbeing loaded\b|^\W*loading model"
    r"|\bmodel loading\b|\bwarming up\b|\bwaiting for .{0,40} to start\b",
    re.IGNORECASE,
)
_BUSY = re.compile(r"rate.?limit|too many requests|overloaded|server busy|try again later", re.I)
_FLAGGED = re.compile(r"moderation|flagged|content.?(?:policy|filter|management)", re.IGNORECASE)
UNKNOWN = 502
"""The status of an error that names none: as of a gateway whose service failed."""


def failure_in(envelope: Any) -> Failure | None:
    """The failure that an answer of status 200 has in it; None of one that is an answer."""
    if not isinstance(envelope, Mapping):
        return None
    stated = envelope.get("error") or envelope.get("errors")
    choices = envelope.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not stated and isinstance(choice, Mapping):
        stated = choice.get("error")
        if not stated and str(choice.get("finish_reason")).lower() == "error":
            stated = {"message": "finish_reason is error, and no reason stands beside it"}
    if not stated and "choices" not in envelope and "data" not in envelope:
        is_error = envelope.get("object") == "error" or _NO_ANSWER & set(envelope)
        stated = envelope if is_error else None
    return failure_of(stated, None, envelope) if stated else None


def failure_of(stated: Any, status: int | None, whole: Any = None) -> Failure:
    """A failure by what is said of it.

    Args:
        stated: JSON, or a text.
        status: of HTTP, where it says more than 200.
        whole: the envelope around it.
    """
    parts = [part for part in _objects(stated, 3) if isinstance(part, Mapping)]
    said = _words(stated)
    names = [
        re.sub("[^a-z]", "", str(part[key]).lower())
        for part in parts
        for key in _NAME_KEYS
        if isinstance(part.get(key), str)
    ]
    text = json.dumps(stated, default=str)
    wait_s = next(filter(None, (_wait_s(part) for part in _objects([stated, whole], 4))), None)
    return Failure(
        status or _status_of([*parts, *_objects(whole, 0)], names, said),
        said,
        wait_s,
        loading=bool(_LOADING.search(said)),
        quota="insufficient_quota" in text,
        input_refused=bool(_FLAGGED.search(text)),
    )


def _status_of(parts: list[Any], names: list[str], said: str) -> int:
    for part in parts:
        for key in _STATUS_KEYS if isinstance(part, Mapping) else ():
            found = part.get(key)
            number = int(found) if isinstance(found, str) and found.isdecimal() else found
            if not isinstance(number, int) or isinstance(number, bool):
                continue
            number = _OWN_CODES.get(number, number // 100 if 40_000 <= number < 60_000 else number)
            if 400 <= number < 600:
                return number
    if any(isinstance(part, Mapping) and "loc" in part for part in parts):
        # the fields that FastAPI refuses
        return 422
    for name in names:
        for words, status in _NAMES:
            if re.search(words, name):
                return status
    if (written := _STATUS.search(said)) is not None:
        return int(written[1] or written[2])
    if _LOADING.search(said):
        return 503
    return 429 if _BUSY.search(said) else UNKNOWN


def _objects(value: Any, depth: int) -> Iterator[Any]:
    """The value, and the objects and lists in it, so deep at most, the outer ones first."""
    yield value
    inner = value.values() if isinstance(value, Mapping) else value
    if depth and isinstance(value, Mapping | list):
        for one in inner:
            if isinstance(one, Mapping | list):
                yield from _objects(one, depth - 1)


def _words(stated: Any) -> str:
    """The reason, in the service's words."""
    if isinstance(stated, list):
        return "; ".join(filter(None, map(_words, stated[:3])))
    if not isinstance(stated, Mapping):
        return "" if stated is None else str(stated)
    said = next((_words(stated[key]) for key in _TEXT_KEYS if stated.get(key)), "")
    if (where := stated.get("loc")) and isinstance(where, list):
        # of a field that FastAPI refused
        said = f"{'.'.join(map(str, where))}: {said}"
    more = stated.get("metadata")
    if isinstance(more, Mapping):
        raw, by = more.get("raw"), more.get("provider_name")
        said += f": {raw}" if raw else ""
        said += f" (by {by})" if by else ""
    return said or json.dumps(stated, default=str)


_WAITS = {"retryafter": 1.0, "retryafterseconds": 1.0, "retryafterms": 1e-3, "estimatedtime": 1.0}
_WAITS |= {"retrydelay": 1.0, "retryafters": 1.0}


def _wait_s(part: Any) -> float | None:
    """The seconds to wait that an object of an error names."""
    for key, value in part.items() if isinstance(part, Mapping) else ():
        unit_s = _WAITS.get(re.sub("[^a-z]", "", str(key).lower()))
        number = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*s?\s*", str(value))
        if unit_s is not None and number is not None:
            return float(number[1]) * unit_s
    return None
