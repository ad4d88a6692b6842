"""Row filter: which rows a search may answer with, by the scalar features of the view."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.errors import RequestError, did_you_mean
from precompute.store.feature_view import FeatureView
from precompute.store.vectors.index_rows import filterable

MOST_CONDITIONS, MOST_VALUES = 16, 1000
"""Features that one filter may name, and values that a feature may be one of."""

_LEAST, _MOST = -(2**63), 2**63 - 1

_BOUNDS: dict[str, Callable[[Any, Any], Any]] = {
    "gte": pc.greater_equal,
    "gt": pc.greater,
    "lte": pc.less_equal,
    "lt": pc.less,
}


class RowFilter:
    """Conditions on scalar features, all of which must hold; a null meets none.

    Args:
        view: whose features they are.
        wanted: feature → a value it must equal, a list of values it must be one of, or bounds: some
            of ``gte``, ``gt``, ``lte``, ``lt``.

    Raises:
        RequestError: not of that form, a feature that is not there or no scalar, or a value of
            another type.
    """

    def __init__(self, view: FeatureView, wanted: Mapping[str, Any]) -> None:
        types = filterable(view)
        if not isinstance(wanted, Mapping) or len(wanted) > MOST_CONDITIONS:
            raise _refused(
                f"a filter is a mapping of up to {MOST_CONDITIONS} features to what they must be"
            )
        self._conditions: list[tuple[str, Callable[[Any], Any]]] = []
        for name, condition in wanted.items():
            if name not in types:
                have = ", ".join(types) or "none"
                near = did_you_mean(str(name)[:80], types)
                raise _refused(
                    f"view {view.name!r} has no scalar feature {str(name)[:80]!r} to filter by (it"
                    f" has: {have}){near}"
                )
            self._conditions.append(
                (
                    name,
                    _tests(
                        name, types[name], condition, half=view.feature(name).dtype == "float16"
                    ),
                )
            )

    def admits(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        """Whether each row meets all conditions, bool [rows]."""
        masks = [pc.fill_null(test(table.column(name)), False) for name, test in self._conditions]
        if not masks:
            return np.ones(len(table), np.bool_)
        return np.asarray(functools.reduce(pc.and_, masks), np.bool_)


def _tests(name: str, kind: pa.DataType, condition: Any, *, half: bool) -> Callable[[Any], Any]:
    """A function of a column that tells which rows meet one feature's condition."""

    def value_of(value: Any) -> pa.Scalar:
        return _value(name, kind, value, half=half)

    if isinstance(condition, Mapping):
        if not condition or not set(condition) <= set(_BOUNDS):
            raise _refused(
                f"filter: the bounds of {name!r} are some of {', '.join(_BOUNDS)}, got"
                f" {str(list(condition))[:80]}"
            )
        if pa.types.is_boolean(kind):
            raise _refused(f"filter: {name!r} is true or false, it has no bounds")
        values = {bound: value_of(value) for bound, value in condition.items()}
        if pa.types.is_integer(kind):
            bounds = [_whole(bound, value) for bound, value in values.items()]
        else:
            bounds = [(_BOUNDS[bound], value) for bound, value in values.items()]
        return lambda column: functools.reduce(
            pc.and_, [compare(column, value) for compare, value in bounds]
        )
    if isinstance(condition, (list, tuple)):
        if not 0 < len(condition) <= MOST_VALUES:
            raise _refused(
                f"filter: {name!r} may be one of 1 to {MOST_VALUES} values, got {len(condition)}"
            )
        inside = [value.cast(kind) for value in map(value_of, condition) if _fits(value, kind)]
        return lambda column: pc.is_in(column, pa.array([v.as_py() for v in inside], kind))
    value = value_of(condition)
    if not _fits(value, kind):
        return lambda column: pa.chunked_array([pa.repeat(False, len(column))])
    return lambda column: pc.equal(column, value.cast(kind))


def _whole(bound: str, value: pa.Scalar) -> tuple[Callable[[Any, Any], Any], pa.Scalar]:
    """A bound of integers as the integer that says the same: Arrow refuses to compare those beyond
    2⁵³ with a float. Beyond all of int64 it is the last of these, which all of them meet or
    none."""
    number = value.as_py()
    if bound in ("gte", "gt"):
        least = math.ceil(number) if bound == "gte" else math.floor(number) + 1
        compare, whole = (
            (pc.greater_equal, max(least, _LEAST)) if least <= _MOST else (pc.greater, _MOST)
        )
    else:
        most = math.floor(number) if bound == "lte" else math.ceil(number) - 1
        compare, whole = (pc.less_equal, min(most, _MOST)) if most >= _LEAST else (pc.less, _LEAST)
    return compare, pa.scalar(whole, pa.int64())


def _value(name: str, kind: pa.DataType, value: Any, *, half: bool) -> pa.Scalar:
    """A value to compare a feature with.

    Raises:
        RequestError: of another type than the feature, not finite, or too large.
    """
    is_text, is_bool = pa.types.is_string(kind), pa.types.is_boolean(kind)
    right = (
        isinstance(value, str)
        if is_text
        else isinstance(value, bool)
        if is_bool
        else _is_number(value)
    )
    if not right:
        what = "a text" if is_text else "true or false" if is_bool else "a finite number"
        raise _refused(f"filter: {name!r} is compared with {what}, got {str(value)[:80]!r}")
    try:
        if is_text or is_bool:
            return pa.scalar(value, kind)
        if isinstance(value, int) and pa.types.is_integer(kind):
            return pa.scalar(value, pa.int64())
        # float16 0.1 is not the 0.1 that was given, but that is what is meant
        with np.errstate(over="ignore"):
            number = float(np.float16(value)) if half else float(value)
        return pa.scalar(number, kind if pa.types.is_floating(kind) else pa.float64())
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as exc:
        raise _refused(f"filter: {name!r} cannot be compared with {str(value)[:80]!r}") from exc


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _fits(value: pa.Scalar, kind: pa.DataType) -> bool:
    """Whether a feature of that type can be equal to the value at all: 300 is no int8, 0.5 no
    integer."""
    if pa.types.is_floating(kind):
        return True
    try:
        value.cast(kind)
    except pa.ArrowException:
        return False
    return True


def _refused(message: str) -> RequestError:
    return RequestError(message, code="bad_filter")
