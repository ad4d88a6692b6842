"""Frame types: the columns of a frame whose values would be changed on their way into Parquet and
DuckDB, refused by name: Python's values of two kinds in one column, and types that one of the two
has not."""

from __future__ import annotations

import datetime as dt
import numbers
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.store.errors import SourceError

_MISSING = ("NoneType", "NAType", "NaTType")
"""Types of what pandas and Python have where there is no value."""

_TOGETHER = ({"whole numbers", "floats"}, {"whole numbers", "Decimals"})
"""Kinds that are one column all the same: Arrow refuses what a float would change."""

_LARGEST = 38
"""Digits of a decimal of DuckDB's, which makes floats of others."""


def column_of(name: str, values: Sequence[Any]) -> pa.Array:
    """Python's values as a column.

    Raises:
        SourceError: they are of two kinds, or none of Arrow's types has them all.
    """
    check_values(name, values)
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
        raise _unlike(name, str(exc)) from exc


def check_values(name: str, values: Iterable[Any]) -> None:
    """See that Python's values, lists and dicts of them too, are of one kind: Arrow takes the type
    of the first for all, 10:30 of a day for the day, and an hour without a zone for one of UTC.

    Raises:
        SourceError: they are of two.
    """
    examples = dict[str, Any]()
    inner, fields = list[Iterable[Any]](), dict[str, list[Any]]()
    values = list(values)
    # by type, of which there are few: a look at each value takes ten times as long
    for kind in dict.fromkeys(map(type, values)):
        of_kind: list[Any] = [value for value in values if type(value) is kind]
        if kind.__name__ in _MISSING or (
            # what pandas has for nothing
            issubclass(kind, (float, np.floating)) and all(v != v for v in of_kind)
        ):
            continue
        if issubclass(kind, np.ndarray):
            examples.setdefault("lists", of_kind[0])
            inner += [v if v.dtype == object else v.reshape(-1)[:1] for v in of_kind]
        elif issubclass(kind, (list, tuple)):
            examples.setdefault("lists", of_kind[0])
            inner += of_kind
        elif issubclass(kind, Mapping):
            examples.setdefault("dicts", of_kind[0])
            for field, value in chain.from_iterable(one.items() for one in of_kind):
                fields.setdefault(str(field), []).append(value)
        elif issubclass(kind, (dt.datetime, dt.time)):
            for value in of_kind:
                examples.setdefault(_time_kind(name, value), value)
        else:
            examples.setdefault(_kind(kind), of_kind[0])
            if _kind(kind) == "whole numbers":
                _check_whole(name, of_kind)
    if len(examples) > 1 and set(examples) not in _TOGETHER:
        shown = " and ".join(f"{what} ({str(one)[:40]!r})" for what, one in examples.items())
        raise _unlike(name, f"it holds {shown}")
    if inner:
        check_values(f"{name}[]", chain.from_iterable(inner))
    for field, of_field in fields.items():
        check_values(f"{name}.{field}", of_field)


def _check_whole(name: str, values: Sequence[Any]) -> None:
    for value in (min(values), max(values)):
        if not -(2**63) <= value < 2**63:
            raise SourceError(
                f"column {name!r} of the frame has {value}, a whole number beyond 64 bits, signed:"
                " make all of them texts, or a column of type uint64"
            )


def _kind(kind: type) -> str:
    kinds: tuple[tuple[tuple[type, ...], str], ...] = (
        ((bool, np.bool_), "truths"),
        ((numbers.Integral, np.integer), "whole numbers"),
        ((float, np.floating), "floats"),
        ((Decimal,), "Decimals"),
        ((str,), "texts"),
        ((bytes, bytearray, memoryview), "bytes"),
        ((dt.date,), "dates"),
    )
    return next((what for of, what in kinds if issubclass(kind, of)), f"{kind.__name__}s")


def _time_kind(name: str, value: Any) -> str:
    if getattr(value, "nanosecond", 0):
        raise SourceError(
            f"column {name!r} of the frame: {value} has nanoseconds, which are dropped in a column"
            f" of objects: make it a column of its type first, pd.to_datetime(df[{name!r}])"
        )
    if isinstance(value, dt.datetime):
        return "times without a zone" if value.tzinfo is None else "times with a zone"
    if value.tzinfo is not None:
        raise SourceError(
            f"column {name!r} of the frame: {value} is a time of day with a zone, which would be"
            " dropped: make texts of it, or whole timestamps"
        )
    return "times of a day"


def _unlike(name: str, why: str) -> SourceError:
    text = " ".join(why.encode(errors="replace").decode().split())[:300]
    return SourceError(
        f"column {name!r} of the frame is no column of one type: {text}: make all of its values"
        " texts, or all of them numbers, or times of one kind"
    )


def check_type(name: str, kind: pa.DataType) -> None:
    """See that Parquet and DuckDB have a column's type.

    Raises:
        SourceError: they have not; with what to make of it.
    """
    remedy = _remedy(kind)
    if remedy:
        raise SourceError(
            f"column {name!r} of the frame is {kind}, which is not kept as it is: {remedy}"
        )
    if pa.types.is_nested(kind):
        # a struct's fields, a list's items, a map's keys and values
        for at in range(kind.num_fields):
            field = kind.field(at)
            check_type(f"{name}.{field.name}", field.type)
    elif pa.types.is_dictionary(kind):
        check_type(name, kind.value_type)


def _remedy(kind: pa.DataType) -> str:
    """What to make of a type that is not kept; empty of others."""
    types = pa.types
    if types.is_duration(kind):
        return "its unit would be lost; make a number of it, as in dt.total_seconds()"
    if types.is_interval(kind):
        return "make a number of days or seconds of it"
    if types.is_decimal(kind) and kind.precision > _LARGEST:
        return f"a decimal has up to {_LARGEST} digits; round it, or make it text"
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name not in _EXTENSIONS:
        return "make text or numbers of it"
    if types.is_union(kind) or types.is_run_end_encoded(kind):
        return "make it text, or a column of its plain type"
    return ""


_EXTENSIONS = ("arrow.uuid", "arrow.json")
