"""Keys: from URLs, JSON, Python and columns to the one text every store uses.

A key of one column is that column's text as it stands (``42``, ``a/b``). One of several columns is
its parts joined with ``/``, with ``%`` and ``/`` inside a part written ``%25`` and ``%2F``. The
UTF-8 of that text is the key in the stores, the ``key`` of every answer, and, percent-encoded, the
end of a row's URL.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from precompute.store.errors import RequestError

if TYPE_CHECKING:
    # a client over HTTP has no Arrow
    import pyarrow as pa

CHUNK = "chunk"
"""The last column of a key in a view of long texts: which of a text's chunks, from 0."""
MAX_KEY_BYTES = 511
"""Longest entity key, in UTF-8 bytes."""


def key_text(value: Any, entity: Sequence[str]) -> str:
    """The key text of one key as a program gives it: a string, an integer, or a list of these for
    several columns; numpy's and Arrow's too.

    Raises:
        RequestError: another type, the wrong number of parts, empty, too long, or with a NUL.
    """
    return check_key(join_key(value, entity))


def join_key(value: Any, entity: Sequence[str]) -> str:
    """As :func:`key_text`, without a look at whether a store could hold it.

    Raises:
        RequestError: another type, the wrong number of parts, or a lone surrogate.
    """
    if not isinstance(value, (str, int, list, tuple)):
        value = plain_key(value)
    if isinstance(value, (list, tuple)):
        if len(value) != len(entity):
            raise RequestError(_other_parts(entity, len(value), shown_key(value)), code="bad_key")
        parts = [_part(part) for part in value]
        return (
            parts[0]
            if len(parts) == 1
            else "/".join(p.replace("%", "%25").replace("/", "%2F") for p in parts)
        )
    return _part(value)


def _other_parts(entity: Sequence[str], parts: int, shown: str) -> str:
    chunk = (
        f"; {CHUNK} counts the chunks of a text from 0, as in …/0" if entity[-1] == CHUNK else ""
    )
    return (
        f"a key of this view has {len(entity)} part(s) ({', '.join(entity)}), got {parts}:"
        f" {shown}{chunk}"
    )


def parts_hint(text: str, entity: Sequence[str]) -> str:
    """Why a key text is none of this entity's, by the number of its parts; empty where that is
    right, as it is of one column's in any case."""
    parts = text.count("/") + 1
    return "" if len(entity) in (1, parts) else _other_parts(entity, parts, _short(text))


def split_key(text: str, entity: Sequence[str]) -> list[str]:
    """The parts of a key text, as :func:`join_key` joins them; of a key that is none of this
    entity, another number of parts."""
    return (
        [text]
        if len(entity) == 1
        else [part.replace("%2F", "/").replace("%25", "%") for part in text.split("/")]
    )


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
        raise RequestError(
            "the key in the URL is not UTF-8 after percent-decoding", code="bad_key"
        ) from exc
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
            f"a key has 1 to {MAX_KEY_BYTES} bytes of UTF-8 without NUL, got {size} bytes:"
            f" {_short(text)}",
            code="bad_key",
        )
    return text


def key_list(keys: Any) -> list[Any]:
    """Keys, of a list or another iterable, which is read once, or of what numpy, pandas, pyarrow or
    polars hold; each key is left as it is.

    Raises:
        RequestError: one key, where a list of keys belongs.
    """
    if isinstance(keys, (list, tuple)):
        return list(keys)
    if is_table(keys):
        raise RequestError(
            f"keys is a list of keys, got {type(keys).__name__}, whose columns are no keys: give"
            " one of them, frame[column]",
            code="bad_key",
        )
    # tolist would make integers of numpy's times, and these could be keys
    names = () if _holds_times(keys) else ("to_pylist", "tolist", "to_list")
    convert = next((getattr(keys, name) for name in names if hasattr(keys, name)), None)
    held = keys if convert is None else convert()
    if isinstance(held, (str, bytes)) or not hasattr(held, "__iter__"):
        raise RequestError(
            f"keys is a list of keys, got {type(keys).__name__}: write [{_short(plain_key(keys))}]",
            code="bad_key",
        )
    return list(held)


def _column_names(value: Any) -> Any:
    return (
        value
        if isinstance(value, dict)
        else getattr(value, "column_names", getattr(value, "columns", None))
    )


def is_table(value: Any) -> bool:
    """Whether a value is a mapping of columns, or a table of pyarrow, pandas or polars."""
    names = _column_names(value)
    return names is not None and not callable(names)


def key_columns(columns: Any) -> dict[str, list[Any]]:
    """Column → keys, of a mapping or of what pyarrow, pandas or polars hold as a table; each key is
    left as it is.

    Raises:
        RequestError: no columns, two of one name, or one that is no list of keys.
    """
    names = _column_names(columns)
    if not is_table(columns):
        raise RequestError(
            f"entities are columns of keys, got {type(columns).__name__}: write {{column:"
            f" [{_short(plain_key(columns))}]}}",
            code="bad_entities",
        )
    if twice := [name for name, count in Counter(map(str, names)).items() if count > 1]:
        raise RequestError(
            f"entities have several columns {twice[0][:80]!r}: leave one of them",
            code="bad_entities",
        )
    return {str(name): key_list(columns[name]) for name in names}


def plain_key(value: Any, level: int = 0) -> Any:
    """A key as JSON carries it: of a scalar or an array of numpy or Arrow its value, of what is
    null (NaN and NaT, too) None.

    What can be no key and is not JSON either (bytes, a date, an infinity) is known by an object,
    ``{type: repr}``, which can be no key: so it is one bad key over HTTP as it is in process, under
    the same name. What came out of this or of JSON stays as it is.
    """
    if (
        value is None
        or type(value) in (str, bool)
        or (type(value) is int and -(2**63) <= value < 2**64)
    ):
        return value
    for convert in () if _holds_times(value) else ("as_py", "tolist"):
        if hasattr(value, convert) and level <= _SHOWN_LEVELS:
            return plain_key(getattr(value, convert)(), level + 1)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return _plain_number(value)
    if level > _SHOWN_LEVELS or type(value).__name__ in _NULLS:
        return None
    if isinstance(value, (list, tuple)):
        return [plain_key(part, level + 1) for part in value]
    if isinstance(value, dict):
        names = [name if isinstance(name, str) else _short(name) for name in value]
        return {
            name: plain_key(part, level + 1)
            for name, part in zip(names, value.values(), strict=True)
        }
    return {type(value).__name__: _short(value)}


def _plain_number(value: float) -> Any:
    if isinstance(value, int):
        try:
            int.__repr__(value)
        except ValueError:
            # more digits than Python writes
            return {"int": f"{int.bit_length(value)} bits"}
        return int(value)
    if math.isnan(value):
        return None
    # one past float64 of a body shows itself as it was written
    return (
        value
        if math.isfinite(value) or type(value).__repr__ is not float.__repr__
        else {"float": repr(value)}
    )


_SHOWN_LEVELS = reprlib.aRepr.maxlevel
"""Levels of lists within each other that are shown: what lies deeper :func:`shown_key` leaves
out."""
_NULLS = frozenset({"NAType", "NaTType"})
"""Names of the types of pandas' nulls, which is not loaded for them."""


def _holds_times(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", None) in ("m", "M")


def _part(value: Any) -> str:
    if not isinstance(value, (str, int)):
        value = plain_key(value)
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise RequestError("a key is not valid UTF-8", code="bad_key")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**64:
            raise RequestError("an integer key has at most 64 bits", code="bad_key")
        # of an enumeration's member str() is its name
        return int.__repr__(value)
    raise RequestError(
        f"a key is a string or an integer, got {type(value).__name__}: {_short(value)}",
        code="bad_key",
    )


def shown_key(value: Any) -> str:
    """What stands as the ``key`` of an answer for a value that is none: the text itself, its lone
    surrogates replaced, or the value as :func:`plain_key` has it, shortened."""
    if isinstance(value, (list, tuple)):
        # no more than is shown, of which the last tells that there are more
        value = value[: reprlib.aRepr.maxlist + 1]
    value = plain_key(value)
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
            value if len(value) <= 2 * half else f"{value[:half]}...{value[-half:]}",
            ensure_ascii=not value.isprintable(),
        )


_short = _AsJson().repr


# ---- Entity keys: of whole columns, vectorised, to the texts that
# :mod:`precompute.store.keys` tells of.


def key_column(batch: pa.RecordBatch | pa.Table, entity: Sequence[str]) -> pa.Array:
    """The key text of every row, vectorised.

    Args:
        batch: rows with the entity's columns, each int64 or string.
        entity: names of the key columns.

    Returns:
        string array [rows]; null where any part is null.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [pc.cast(_one_chunk(batch.column(name)), pa.string()) for name in entity]
    if len(parts) == 1:
        return parts[0]
    escaped = [pc.replace_substring(pc.replace_substring(p, "%", "%25"), "/", "%2F") for p in parts]
    return pc.binary_join_element_wise(*escaped, pa.scalar("/"))


def bad_keys(keys: pa.Array) -> dict[int, str]:
    """Row number → reason, for keys no store could hold: null, empty, too long or with a NUL
    byte."""
    import pyarrow.compute as pc

    reasons: dict[int, str] = {}
    length = pc.binary_length(keys)
    for reason, mask in (
        ("null key", pc.is_null(keys)),
        ("empty key", pc.equal(length, 0)),
        (f"key longer than {MAX_KEY_BYTES} bytes", pc.greater(length, MAX_KEY_BYTES)),
        ("key with a NUL byte", pc.match_substring(keys, "\0")),
    ):
        for row in pc.indices_nonzero(pc.fill_null(mask, False)).to_pylist():
            reasons.setdefault(row, reason)
    return reasons


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
