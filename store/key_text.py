"""Key texts: from URLs, JSON and Python to the one text every store uses.

A key of one column is that column's text as it stands (``42``, ``a/b``). One of several columns is its parts joined with ``/``, with ``%`` and ``/`` inside a
part written ``%25`` and ``%2F``. The UTF-8 of that text is the key in the stores, the ``key`` of every answer, and, percent-encoded, the end of a row's URL.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from store.errors import RequestError

MAX_KEY_BYTES = 511
"""Longest entity key, in UTF-8 bytes: LMDB's compiled-in limit, kept for every store so that a view can move."""


def key_text(value: Any, entity: Sequence[str]) -> str:
    """The key text of one key as a program gives it: a string, an integer, or a list of these for several columns.

    Raises:
        RequestError: another type, the wrong number of parts, empty, too long, or with a NUL.
    """
    return check_key(join_key(value, entity))


def join_key(value: Any, entity: Sequence[str]) -> str:
    """As :func:`key_text`, without a look at whether a store could hold it.

    Raises:
        RequestError: another type, the wrong number of parts, or a lone surrogate.
    """
    if isinstance(value, (list, tuple)):
        if len(value) != len(entity):
            raise RequestError(
                f"a key of this view has {len(entity)} part(s) ({', '.join(entity)}), got {len(value)}: {_short(value)}",
                code="bad_key",
            )
        parts = [_part(part) for part in value]
        return parts[0] if len(parts) == 1 else "/".join(p.replace("%", "%25").replace("/", "%2F") for p in parts)
    return _part(value)


def split_key(text: str, entity: Sequence[str]) -> list[str]:
    """The parts of a key text, as :func:`join_key` joins them; of a key that is none of this entity, another number of parts."""
    return [text] if len(entity) == 1 else [part.replace("%2F", "/").replace("%25", "%") for part in text.split("/")]


def key_from_path(raw: bytes, entity: Sequence[str]) -> str:
    """The key text from the undecoded tail of a URL path, percent-decoded exactly once.

    Raises:
        RequestError: not UTF-8, or a key :func:`check_key` refuses.
    """
    try:
        if len(entity) == 1:
            return check_key(unquote_to_bytes(raw).decode())
        parts = [unquote_to_bytes(part).decode() for part in raw.split(b"/")]
    except UnicodeDecodeError as exc:
        raise RequestError("the key in the URL is not UTF-8 after percent-decoding", code="bad_key") from exc
    return key_text(parts, entity)


def check_key(text: str) -> str:
    """``text`` itself, if a store could hold it as a key.

    Raises:
        RequestError: empty, longer than :data:`MAX_KEY_BYTES`, a NUL inside, or a lone surrogate.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as exc:
        raise RequestError("a key is not valid UTF-8", code="bad_key") from exc
    if size == 0 or size > MAX_KEY_BYTES or "\0" in text:
        raise RequestError(
            f"a key has 1 to {MAX_KEY_BYTES} bytes of UTF-8 without NUL, got {size} bytes: {_short(text)}", code="bad_key"
        )
    return text


def _part(value: Any) -> str:
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise RequestError("a key is not valid UTF-8", code="bad_key")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**64:
            raise RequestError("an integer key has at most 64 bits", code="bad_key")
        return str(value)
    raise RequestError(f"a key is a string or an integer, got {type(value).__name__}: {_short(value)}", code="bad_key")


def shown_key(value: Any) -> str:
    """What stands as the ``key`` of an answer for a value that is none: the text itself, its lone surrogates replaced, or the value, shortened."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return _short(value)


class _AsJson(reprlib.Repr):
    """Values as JSON has them, what is long shortened in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = 80

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_str(self, value: str, level: int) -> str:
        half = self.maxother // 2
        return json.dumps(
            value if len(value) <= 2 * half else f"{value[:half]}...{value[-half:]}", ensure_ascii=not value.isprintable()
        )

    def repr_tuple(self, value: tuple[Any, ...], level: int) -> str:
        return self.repr_list(list(value), level)

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:
            # more digits than Python writes
            return "int"


_short = _AsJson().repr
