"""A section of a configuration file, read strictly: a mistake is reported with file or environment variable, key, value and remedy.
Files are YAML, with environment overrides and ``${name}`` put in."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from precompute.store.errors import ConfigError
from precompute.store.feature_view import NAME

PREFIX = "PRECOMPUTE_"
OWN_VARIABLES = frozenset({"PRECOMPUTE_CONFIG", "PRECOMPUTE_CRASH", "PRECOMPUTE_LOG"})
"""Environment variables with our prefix that are no configuration values."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice instead of keeping the last, and reads only true and false as booleans, as YAML 1.2 does:
    in YAML 1.1 the key of ``index: {on: embedding}`` is ``True``."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


# The plain scalars of YAML 1.2's core schema, and no others: no `on` for true, no 26:00 for 1,560, no dates.
_UniqueKeyLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    ("float", r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$", list("-+.0123456789")),
):
    _UniqueKeyLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """A file's keys and values.

    Raises:
        ConfigError: missing, unreadable, not YAML, a key given twice, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise ConfigError(f"{path}: no such file; a project is a folder with project.yaml and views/<name>.yaml") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    try:
        data = yaml.load(text, _UniqueKeyLoader)  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {type(data).__name__}, not keys and values")
    return data


def overrides(environment: Mapping[str, str]) -> dict[str, Any]:
    """The tree of values that ``PRECOMPUTE_A__B=value`` variables name, each value read as YAML."""
    tree: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in OWN_VARIABLES:
            continue
        *path, last = variable.removeprefix(PREFIX).lower().split("__")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ConfigError(f"environment {variable}: contradicts {PREFIX}{'__'.join(path).upper()}; set one of them")
        # texts whatever they look like: a year, a country called `no`
        node[last] = text if path[:1] == ["vars"] or path == ["schedule"] else _value(text)
    return tree


def _value(text: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, ValueError):
        return text


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid over it, mapping by mapping."""
    result = dict(base)
    for key, value in over.items():
        current = result.get(key)
        result[key] = merged(current, value) if isinstance(value, Mapping) and isinstance(current, Mapping) else value
    return result


def substituted(value: Any, variables: Mapping[str, str], path: Path) -> Any:
    """``${name}`` replaced throughout; a value with a quote is refused, since it ends up inside SQL."""
    if isinstance(value, dict):
        return {k: substituted(v, variables, path) for k, v in value.items()}
    if isinstance(value, list):
        return [substituted(v, variables, path) for v in value]
    if not isinstance(value, str):
        return value

    def one(match: re.Match[str]) -> str:
        name = match[1]
        if name not in variables:
            raise ConfigError(
                f"{path}: ${{{name}}}: no such variable; add `vars: {{{name}: …}}` to project.yaml or set {PREFIX}VARS__{name.upper()}"
            )
        if "'" in variables[name] or '"' in variables[name]:
            raise ConfigError(
                f"project.yaml: vars.{name}: {variables[name]!r} holds a quote, which cannot stand inside SQL; use a path without"
            )
        return variables[name]

    return re.sub(r"\$\{([a-zA-Z_][a-zA-Z0-9_]*)\}", one, value)


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
