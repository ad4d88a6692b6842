"""Record: what is written as JSON and read again, by this version, by older and by newer ones. One codec for all of them.

Fields that a newer version added are not looked at; those that an older one had not take their defaults.
"""

from __future__ import annotations

import hashlib
import json
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
    "sealed",
    "written",
]

Record = msgspec.Struct
"""What a record inherits from: fields with types, as a dataclass has them; ``frozen=True`` where it never changes."""

_R = TypeVar("_R")
_SEAL = "seal"


def plain(record: Any) -> Any:
    """A record, or anything made of records, dataclasses and mappings, as dicts, lists and scalars that JSON knows."""
    return msgspec.to_builtins(record, str_keys=True, enc_hook=_plain)


def written(record: Any, *, indent: int | None = None) -> bytes:
    """A record as JSON; floats that are not finite as Python's ``json`` writes them."""
    return json.dumps(plain(record), indent=indent).encode()


def sealed(record: Any, *, indent: int | None = None) -> bytes:
    """As :func:`written`, with a seal by which who reads it knows that no bit of it is another: for what says which rows are live, and how old they may be."""
    body = plain(record)
    return json.dumps(body | {_SEAL: digest_of(json.dumps(body, sort_keys=True).encode())}, indent=indent).encode()


def digest_of(data: bytes) -> str:
    """Digest of some bytes (BLAKE2b, 12 bytes, hex)."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def record_of(kind: type[_R], data: object) -> _R:
    """A record from what :func:`plain` made of it.

    Raises:
        ValueError: a field is missing that always was there, or is of another type; says which.
    """
    return msgspec.convert(data, kind, str_keys=True)


def read_record(kind: type[_R], data: bytes) -> _R:
    """A record from what :func:`written` or :func:`sealed` made of it.

    Raises:
        ValueError: no JSON, not what its seal was made for, or as :func:`record_of` raises it.
    """
    body, _ = content_of(data)
    return record_of(kind, body)


def content_of(data: bytes) -> tuple[Any, bool]:
    """What stands in JSON, but for its seal, and whether it has one.

    Raises:
        ValueError: no JSON, or not what its seal was made for.
    """
    try:
        body = json.loads(data)
        seal = body.pop(_SEAL, None) if isinstance(body, dict) else None
        whole = seal is None or seal == digest_of(json.dumps(body, sort_keys=True).encode())
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if not whole:
        raise ValueError("its bytes are not those that were written")
    return body, seal is not None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)
