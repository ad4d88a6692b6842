"""Record: base of what is written as JSON with a checksum (its seal) and read again. One codec for
all of them.

Each bears the number of its format, and the names of what a reader **needs** to know beside that.
One of another format, or that needs what is not known, is refused; a field that is new within a
format is not looked at by who does not know it, so it needs a name where that would be wrong.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import field
from msgspec.structs import force_setattr, replace

from precompute.store.errors import OtherFormatError

__all__ = [
    "FORMAT",
    "Record",
    "check_format",
    "content_of",
    "digest_of",
    "field",
    "force_setattr",
    "other_format",
    "plain",
    "read_record",
    "record_of",
    "replace",
    "schema_of",
    "sealed",
    "whole_record",
    "with_format",
]

Record = msgspec.Struct
"""What a record inherits from: fields with types, as a dataclass has them; ``frozen=True`` where it
never changes."""

FORMAT = 3
"""Number of the format of all that is stored: records, manifests, table files, packed rows, vector
indexes. A number is never used again; what has none is older than 3."""
KNOWN: frozenset[str] = frozenset()
"""Names of what a record may need that this version knows."""

_R = TypeVar("_R")
_FORMAT, _NEEDS, _SEAL = "format", "needs", "blake2b"
_EARLIER_SEAL = "seal"
"""What the seal was called before there were formats. Who knows that name alone finds no seal, and
refuses what is newer."""

_resolved: set[Any] = set()
"""Types whose fields msgspec knows."""
_resolving = threading.Lock()


def plain(record: Any) -> Any:
    """A record, or anything made of records, dataclasses and mappings, as dicts, lists and scalars
    that JSON knows."""
    return msgspec.to_builtins(record, str_keys=True, enc_hook=_plain)


def sealed(record: Any, *, indent: int | None = None, needs: Collection[str] = ()) -> bytes:
    """A record as JSON with its format and a seal: its checksum, so that a reader finds any changed
    bit. Floats that are not finite stand as Python's ``json`` writes them.

    Args:
        record: what :func:`plain` takes.
        indent: spaces for each level; None: all in one line.
        needs: names of what a reader has to know so as not to read it wrongly.
    """
    body = with_format(plain(record), needs)
    return json.dumps(
        body | {_SEAL: digest_of(json.dumps(body, sort_keys=True).encode())}, indent=indent
    ).encode()


def with_format(body: Mapping[str, Any], needs: Collection[str] = ()) -> dict[str, Any]:
    """A record's fields, with those that :func:`check_format` looks at."""
    return {**body, _FORMAT: FORMAT} | ({_NEEDS: sorted(needs)} if needs else {})


def check_format(body: dict[str, Any], where: Path | str) -> None:
    """Take format and needs from a record whose checksum was compared.

    Args:
        body: its fields, from which these two are taken.
        where: what it is, for messages.

    Raises:
        OtherFormatError: this version does not read it.
    """
    number, needs = body.pop(_FORMAT, None), body.pop(_NEEDS, [])
    if number != FORMAT:
        raise other_format(where, number)
    names = needs if isinstance(needs, list) else [needs]
    if unknown := sorted(set(map(str, names)) - KNOWN):
        raise other_format(where, number, unknown)


def other_format(
    where: Path | str, number: object, unknown: Collection[str] = ()
) -> OtherFormatError:
    """The error for what is whole and of another format; ``number`` is None of what has none, and
    ``unknown`` are the names that it needs and that are not known."""
    which = f"before {FORMAT}" if number is None else str(number)
    needs = f" that needs {', '.join(map(repr, unknown))}, unknown here" if unknown else ""
    return OtherFormatError(
        f"{where} is of format {which}{needs}, and this version reads format {FORMAT}"
        " alone: it is whole, and left as it is. Use the version that wrote it, or give this one a"
        " root and an online store of its own"
    )


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


def read_record(kind: type[_R], data: bytes, where: Path | str) -> _R:
    """A record from what :func:`sealed` made of it; ``where`` is what it is, for messages.

    Raises:
        ValueError: no JSON, not what its seal was made for, or as :func:`record_of` raises it.
        OtherFormatError: as :func:`check_format`.
    """
    return record_of(kind, content_of(data, where))


def whole_record(kind: type[_R], data: bytes | None, where: Path | str) -> _R | None:
    """As :func:`read_record`; None where there is none, and where it is damaged.

    Raises:
        OtherFormatError: as :func:`check_format`.
    """
    try:
        return None if data is None else read_record(kind, data, where)
    except ValueError:
        return None


def content_of(data: bytes, where: Path | str) -> dict[str, Any]:
    """The fields that :func:`sealed` wrote; ``where`` is what they are of, for messages.

    Raises:
        ValueError: no JSON object, or not what its seal was made for.
        OtherFormatError: as :func:`check_format`.
    """
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError("it is no JSON object")
        seal = body.pop(_SEAL, None) or body.pop(_EARLIER_SEAL, None)
        whole = seal == digest_of(json.dumps(body, sort_keys=True).encode())
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if not whole:
        raise ValueError("its bytes are not those that were written")
    check_format(body, where)
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)
