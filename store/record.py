"""Record: what is written as JSON and read again, by this version, by older and by newer ones. One codec for all of them.

Fields that a newer version added are not looked at; those that an older one had not take their defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import field
from msgspec.structs import force_setattr, replace

__all__ = ["Record", "field", "force_setattr", "plain", "read_record", "record_of", "replace", "written"]

Record = msgspec.Struct
"""What a record inherits from: fields with types, as a dataclass has them; ``frozen=True`` where it never changes."""

_R = TypeVar("_R")


def plain(record: Any) -> Any:
    """A record, or anything made of records, dataclasses and mappings, as dicts, lists and scalars that JSON knows."""
    return msgspec.to_builtins(record, str_keys=True, enc_hook=_plain)


def written(record: Any, *, indent: int | None = None) -> bytes:
    """A record as JSON; floats that are not finite as Python's ``json`` writes them."""
    return json.dumps(plain(record), indent=indent).encode()


def record_of(kind: type[_R], data: object) -> _R:
    """A record from what :func:`plain` made of it.

    Raises:
        ValueError: a field is missing that always was there, or is of another type; says which.
    """
    return msgspec.convert(data, kind, str_keys=True)


def read_record(kind: type[_R], data: bytes) -> _R:
    """A record from what :func:`written` made of it.

    Raises:
        ValueError: no JSON, or as :func:`record_of` raises it.
    """
    try:
        body = json.loads(data)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    return record_of(kind, body)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)
