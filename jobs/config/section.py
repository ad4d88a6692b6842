"""A section of a configuration file, read strictly: a mistake is told with file or environment variable, key, value and remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from precompute.jobs.config.files import PREFIX
from precompute.store.errors import ConfigError
from precompute.store.feature_view import NAME

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*$")


def parse_duration(value: Any) -> float:
    """``100ms``, ``30s``, ``15m``, ``26h``, ``7d`` or a number of seconds → seconds.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    match = _DURATION.match(str(value))
    if match is None or match[2] not in _UNITS:
        raise ValueError("write a number with a unit: 100ms, 30s, 15m, 26h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def parse_time(value: Any) -> datetime:
    """``2026-01-31``, ``2026-01-31 06:00`` or an ISO 8601 time, in UTC unless it says otherwise → aware datetime in UTC.

    Raises:
        ValueError: anything else.
    """
    try:
        at = datetime.fromisoformat(str(value))
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("write a date or time, such as 2026-01-31 or 2026-01-31T06:00Z") from None


def _name(value: str) -> str:
    if not NAME.match(value):
        raise ValueError("a name has lower-case letters, digits and _, starts with a letter, and is at most 63 long")
    return value


Name = Annotated[str, BeforeValidator(lambda v: _name(v) if isinstance(v, str) else v)]

Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=str | float)]


class Section(BaseModel):
    """What every section is: unknown keys are refused, and no value is taken for another type's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_Kind = TypeVar("_Kind", bound=BaseModel)


def checked(
    kind: type[_Kind],
    data: Mapping[str, Any],
    path: Path,
    over: Mapping[str, Any],
    prefix: tuple[str, ...] = (),
    folder: Path | None = None,
) -> _Kind:
    """``data`` as a section of its kind.

    Args:
        kind: the section.
        data: what was written, the environment's values laid over it.
        path: the file it stands in.
        over: those of the values that came from the environment.
        prefix: under which keys they did.
        folder: where modules are looked for first.

    Raises:
        ConfigError: every mistake, a line each.
    """
    try:
        return kind.model_validate(data, context=folder)
    except ValidationError as exc:
        lines = [f"{_origin(path, (*prefix, *error['loc']), over)}{_message(kind, error)}" for error in exc.errors()]
        raise ConfigError("\n".join(lines)) from exc


def _origin(path: Path, location: tuple[int | str, ...], over: Mapping[str, Any]) -> str:
    """The file the value stands in, or the environment variable."""
    node: Any = over
    for part in location:
        node = node.get(part) if isinstance(node, Mapping) else None
    return f"{path}: " if node is None or node == {} else f"environment {PREFIX}{'__'.join(map(str, location)).upper()}: "


def _message(kind: type[BaseModel], error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"] if part != "[key]")
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key{did_you_mean(str(error['loc'][-1]), _keys_at(kind, error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"{where}: missing; it has no default"
    if error["type"] == "literal_error":
        value = str(error["input"])
        allowed = re.findall(r"'([^']+)'", text)
        return f"{where}: {value!r} is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}"
    value = repr(error["input"])
    if where == "online":
        # without what may be a password
        scheme, separator, rest = str(error["input"]).partition("?")[0].partition("//")
        value = repr(scheme + separator + rest.rpartition("@")[2])
    shown = "" if isinstance(error["input"], dict) else f" {value if len(value) <= 120 else value[:117] + '...'}:"
    return f"{where}{':' if where else ''}{shown} {text[0].lower() + text[1:] if text.startswith('Input') else text}".lstrip()


def _keys_at(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at a place in the file."""
    current: Any = kind
    for part in location:
        field = current.model_fields.get(str(part)) if isinstance(current, type) and issubclass(current, BaseModel) else None
        if field is None:
            # a key of a mapping, such as a feature's name: its values' model was taken already
            continue
        models = [t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)]
        current = models[0] if models else None
    return list(current.model_fields) if current is not None else []


def _types(annotation: Any) -> Iterator[Any]:
    arguments = getattr(annotation, "__args__", None)
    if arguments is None:
        yield annotation
    else:
        for argument in arguments:
            yield from _types(argument)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about a name that is unknown: the nearest of those there are, if one is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
