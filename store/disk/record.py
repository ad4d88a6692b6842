"""Record: base of what is written as JSON with a checksum (its seal) and read again. One codec for
all of them.

Fields that a newer version added are not looked at; those that have defaults may be missing.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import field
from msgspec.structs import force_setattr, replace

__all__ = [
    "Record",
    "content_of",
    "digest_of",
    "field",
    "force_setattr",
    "plain",
    "read_record",
    "record_of",
    "replace",
    "schema_of",
    "sealed",
    "whole_record",
]

Record = msgspec.Struct
"""What a record inherits from: fields with types, as a dataclass has them; ``frozen=True`` where it
never changes."""

_R = TypeVar("_R")
_SEAL = "seal"

_resolved: set[Any] = set()
"""Types whose fields msgspec knows."""
_resolving = threading.Lock()


def plain(record: Any) -> Any:
    """A record, or anything made of records, dataclasses and mappings, as dicts, lists and scalars
    that JSON knows."""
    return msgspec.to_builtins(record, str_keys=True, enc_hook=_plain)


def sealed(record: Any, *, indent: int | None = None) -> bytes:
    """A record as JSON with a seal: its checksum, so that a reader finds any changed bit. Floats
    that are not finite stand as Python's ``json`` writes them."""
    body = plain(record)
    return json.dumps(
        body | {_SEAL: digest_of(json.dumps(body, sort_keys=True).encode())}, indent=indent
    ).encode()


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of what :func:`plain` makes of a type: a record, or dicts and lists with
    types."""
    return msgspec.json.schema(kind)


def digest_of(data: bytes) -> str:
    """Digest of some bytes (BLAKE2b, 12 bytes, hex)."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def record_of(kind: type[_R], data: object) -> _R:
    """A record from what :func:`plain` made of it.

    Raises:
        ValueError: a field is missing that always was there, or is of another type; says which.
    """
    if kind not in _resolved:
        # msgspec 0.22 resolves a type's fields as it is first used, and ends the process (SIGSEGV)
        # where another thread reads by the same type meanwhile
        with _resolving:
            msgspec.json.Decoder(kind)
            _resolved.add(kind)
    return msgspec.convert(data, kind, str_keys=True)


def read_record(kind: type[_R], data: bytes) -> _R:
    """A record from what :func:`sealed` made of it.

    Raises:
        ValueError: no JSON, not what its seal was made for, or as :func:`record_of` raises it.
    """
    return record_of(kind, content_of(data))


def whole_record(kind: type[_R], data: bytes | None) -> _R | None:
    """As :func:`read_record`; None where there is none, and where it is damaged."""
    try:
        return None if data is None else read_record(kind, data)
    except ValueError:
        return None


def content_of(data: bytes) -> dict[str, Any]:
    """The JSON object that :func:`sealed` wrote, without its seal.

    Raises:
        ValueError: no JSON object, or not what its seal was made for.
    """
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError("it is no JSON object")
        seal = body.pop(_SEAL, None)
        whole = seal == digest_of(json.dumps(body, sort_keys=True).encode())
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if not whole:
        raise ValueError("its bytes are not those that were written")
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)
