"""Section: a section of a configuration file, read strictly: an error names the file or environment
variable, key, value and remedy. Files are YAML, with environment overrides and ``${name}`` put in.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.fields import FieldInfo

from precompute.store.errors import ConfigError, did_you_mean, nearest, nearest_or_all
from precompute.store.feature_view import NAME
from precompute.store.online.url import shown_url

PREFIX = "PRECOMPUTE_"
OWN_VARIABLES = frozenset({"PRECOMPUTE_CONFIG", "PRECOMPUTE_CRASH", "PRECOMPUTE_LOG"})
"""Environment variables with our prefix that are no configuration values."""


_NULL = "tag:yaml.org,2002:null"


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice instead of keeping the last, and reads only true and
    false as booleans, as YAML 1.2 does: in YAML 1.1 the key of ``index: {on: embedding}`` is
    ``True``. The key of ``gates: {null: 2}`` is a text."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    lines: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == _NULL and key_node.value == "null":
            # a name: of a gate
            key_node.tag = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
        # one that cannot be a key is refused below
        key = (
            loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else key_node
        )
        if key in lines:
            twice = f"key {key!r} is given twice, the first time on line {lines[key]}: remove one"
            raise yaml.constructor.ConstructorError(None, None, twice, key_node.start_mark)
        lines[key] = key_node.start_mark.line + 1
    return loader.construct_mapping(node, deep=True)


# The plain scalars of YAML 1.2's core schema, and no others: no `on` for true, no 26:00 for 1,560,
# no dates.
_UniqueKeyLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$",
        list("-+.0123456789"),
    ),
):
    _UniqueKeyLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first
    )
_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """A file's keys and values.

    Raises:
        ConfigError: missing, unreadable, not YAML, a key given twice, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        other = path.with_suffix(".yml")
        instead = f"; rename {other.name} to {path.name}" if other.is_file() else ""
        raise ConfigError(
            f"{path}: no such file; a project is a folder with project.yaml and"
            f" views/<name>.yaml{instead}"
        ) from exc
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8: byte 0x{exc.object[exc.start]:02x}; save it as UTF-8"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    try:
        data = yaml.load(text, _UniqueKeyLoader)  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        at, problem = _yaml_problem(exc, text)
        raise ConfigError(
            f"{path}{'' if at is None else f':{at}'}: not valid YAML: {problem}"
        ) from exc
    if not isinstance(data, dict):
        held = "nothing" if data is None else "a list" if isinstance(data, list) else repr(data)
        raise ConfigError(f"{path}: holds {held}, not keys and values as in `name: value`")
    return data


_REMEDIES = {
    "character '\\t'": "indent with spaces",
    "cannot start any token": "put a text that begins with it in quotes",
    "mapping values are not allowed": (
        "put a text with a colon in quotes, and give keys of one section one indentation"
    ),
    "expected <block end>": "give keys of one section one indentation",
    "could not find expected ':'": "write `key: value`, with a space",
    "while scanning a quoted scalar": "close the quote",
    "while parsing a flow": "close the bracket, and put a text with a comma or colon in quotes",
    "undefined alias": "put a text that begins with * in quotes",
    "recursive": "an alias cannot stand inside what it names",
    "unhashable key": "a key is a text",
    "for the tag": "write the value alone, without a tag (!…)",
    "single document": "a file is one view, or the project: remove the line ---",
}
"""A part of YAML's words → what to do."""

_BEGUN = (
    "while scanning a quoted scalar",
    "while scanning a simple key",
    "while parsing a flow mapping",
    "while parsing a flow sequence",
)
"""What is wrong where it began, and not where YAML sees it."""


def _yaml_problem(exc: Exception, text: str) -> tuple[int | None, str]:
    """The line, counted from 1, and what is wrong there."""
    if isinstance(exc, yaml.reader.ReaderError):
        return (
            text.count("\n", 0, exc.position) + 1,
            f"{exc.reason} (#x{ord(text[exc.position]):04x})",
        )
    if not isinstance(exc, yaml.MarkedYAMLError):
        return None, str(exc) or type(exc).__name__
    mark = (
        exc.context_mark if exc.context in _BEGUN or exc.problem_mark is None else exc.problem_mark
    )
    problem = ", ".join(part for part in (exc.context, exc.problem) if part)
    remedy = next((f"; {remedy}" for words, remedy in _REMEDIES.items() if words in problem), "")
    # the end of a file is its last line
    return (
        None if mark is None else min(mark.line + 1, len(text.rstrip().splitlines()))
    ), f"{problem}{remedy}"


def line_of(path: Path, location: Sequence[int | str]) -> int | None:
    """The line of a file, counted from 1, on which the key at a location stands, or the deepest
    above it that is there; None without any."""
    try:
        node, line = _composed(path.read_text(encoding="utf-8")), None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    for part in location:
        found: tuple[yaml.Node, yaml.Node] | None = None
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == str(part)), None)
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value)
        ):
            found = (node.value[part], node.value[part])
        if found is not None:
            line, node = found[0].start_mark.line + 1, found[1]
    return line


@lru_cache(2)
def _composed(text: str) -> yaml.Node | None:
    """What stands where in a file; a file may have hundreds of mistakes."""
    node: yaml.Node | None = yaml.compose(text, _UniqueKeyLoader)
    return node


def place(path: Path, location: Sequence[int | str]) -> str:
    """``path:line`` of a key, for a message."""
    line = line_of(path, location)
    return str(path) if line is None else f"{path}:{line}"


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
                raise ConfigError(
                    f"environment {variable}: contradicts {PREFIX}{'__'.join(path).upper()}; set"
                    " one of them"
                )
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
        result[key] = (
            merged(current, value)
            if isinstance(value, Mapping) and isinstance(current, Mapping)
            else value
        )
    return result


def substituted(
    value: Any, variables: Mapping[str, str], path: Path, at: tuple[int | str, ...] = ()
) -> Any:
    """``${name}`` replaced throughout; ``at`` is where the value stands in a view's file."""
    if isinstance(value, dict):
        return {k: substituted(v, variables, path, (*at, k)) for k, v in value.items()}
    if isinstance(value, list):
        return [substituted(v, variables, path, (*at, number)) for number, v in enumerate(value)]
    if not isinstance(value, str):
        return value

    def one(match: re.Match[str]) -> str:
        name = match[1]
        if name not in variables:
            raise ConfigError(
                f"{place(path, at)}: {_dotted(at)}: ${{{name}}}: no such variable: add `vars:"
                f" {{{name}: …}}` to project.yaml, or set"
                f" {PREFIX}VARS__{name.upper()}{nearest_or_all(name, variables)}"
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
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value < float("inf")
    ):
        return float(value)
    match = _DURATION.match(str(value))
    if match is None or match[2] not in _UNITS:
        raise ValueError("write a number with a unit: 100ms, 30s, 15m, 26h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def parse_time(value: Any) -> datetime:
    """``2026-01-31``, ``2026-01-31 06:00`` or an ISO 8601 time, in UTC unless it says otherwise →
    aware datetime in UTC.

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
        raise ValueError(
            "a name has lower-case letters, digits and _, starts with a letter, and is at most 63"
            " long"
        )
    return value


Name = Annotated[str, BeforeValidator(lambda v: _name(v) if isinstance(v, str) else v)]

Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=str | float)]


class Section(BaseModel):
    """What every section is: unknown keys are refused, and no value is taken for another type's.
    The text below a key is its description in the JSON Schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def parts(cls) -> tuple[type[Section], ...]:
        """The classes whose fields are its keys."""
        return (cls,)

    @classmethod
    def known(cls) -> dict[str, FieldInfo]:
        """What it may have."""
        return {key: field for part in cls.parts() for key, field in part.model_fields.items()}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        keys = handler.resolve_ref_schema(schema)["properties"]
        for part in cls.parts()[1:]:
            added = handler.resolve_ref_schema(handler(part.__pydantic_core_schema__))
            keys |= added["properties"]
        for key, text in descriptions(cls).items():
            keys[key]["description"] = text
        return schema


def config_files(folder: Path) -> list[Path]:
    """The YAML files of a folder, sorted, without hidden ones: an editor's lock on one
    (``.#name.yaml``) and what macOS puts beside it into an archive (``._name.yaml``)."""
    return sorted(folder.glob("[!.]*.yaml"))


def descriptions(section: type[Section]) -> dict[str, str]:
    """Key → the text below it. Pydantic's own ``use_attribute_docstrings`` would parse the file for
    every command."""
    classes = (
        one
        for part in section.parts()
        for one in reversed(part.__mro__)
        if issubclass(one, Section) and one is not Section
    )
    return {key: text for one in classes for key, text in _descriptions(one).items()}


def _descriptions(section: type[Section]) -> dict[str, str]:
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    written = {
        name: field.description
        for name, field in section.model_fields.items()
        if field.description is not None
    }
    return written | {
        key.target.id: " ".join(ast.literal_eval(text.value).split())
        for key, text in pairwise(node.body)
        if isinstance(key, ast.AnnAssign)
        and isinstance(key.target, ast.Name)
        # none of a class's own variables, as of an open section
        and key.target.id in section.model_fields
        and isinstance(text, ast.Expr)
    }


@contextlib.contextmanager
def as_mistake(where: str = "") -> Iterator[None]:
    """What refuses a value in words of ours, as pydantic wants it: a ValueError."""
    try:
        yield
    except ConfigError as exc:
        raise ValueError(f"{where}{exc}") from exc


class Several(ValueError):
    """Mistakes that pydantic found (``errors``, as it reports them) where a section was read in
    parts."""

    def __init__(self, errors: Sequence[Any]) -> None:
        super().__init__("; ".join(error["msg"] for error in errors))
        self.errors = errors


_Kind = TypeVar("_Kind", bound="Section")


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
        raise ConfigError("\n".join(_lines(kind, data, path, over, prefix, exc))) from exc


def _lines(
    kind: type[Section],
    data: Mapping[str, Any],
    path: Path,
    over: Mapping[str, Any],
    prefix: tuple[str, ...],
    exc: ValidationError,
) -> list[str]:
    """A line for each mistake; what all kinds of values that a key may have say of one is one
    mistake."""
    mistakes: dict[Any, list[Any]] = {}
    located = [_located(error, data) for error in _errors(exc.errors())]
    meant = [
        (*error["loc"][:-1], nearest(str(error["loc"][-1]), _keys_at(kind, error["loc"][:-1])))
        for error in located
        if error["type"] == "extra_forbidden"
    ]
    # a key that is missing, and another one in its place, are one mistake
    for error in (
        error for error in located if error["type"] != "missing" or error["loc"] not in meant
    ):
        mistakes.setdefault(error["loc"], []).append(error)
    lines = []
    for errors in mistakes.values():
        # the only value of a literal is no reason to list them
        words = (
            [error for error in errors if error["type"] == "literal_error"]
            if len(errors) > 1
            else []
        )
        others = [error for error in errors if error not in words] or errors
        also = f", or {words[0]['ctx']['expected']}" if words and others is not errors else ""
        lines += [
            f"{origin(path, error['loc'], over, prefix)}: {_message(kind, error)}{also}"
            for error in others
        ]
    return lines


def _errors(found: Sequence[Any]) -> Iterator[Any]:
    """Mistakes as pydantic reports them, each of :class:`Several` by itself."""
    for error in found:
        several = error.get("ctx", {}).get("error")
        if isinstance(several, Several):
            for one in _errors(several.errors):
                yield one | {"loc": (*error["loc"], *one["loc"])}
        else:
            yield error


def _located(mistake: Any, data: Any) -> dict[str, Any]:
    """A mistake that says where it stands in the file, without what pydantic puts between, which
    kind of value was tried; and what stands there, as it is written. What a check of a whole
    section says begins with the key that is wrong."""
    error, found = dict(mistake), list[int | str]()
    error["msg"] = error["msg"].removeprefix("Value error, ")
    for number, part in enumerate(error["loc"]):
        inside = (
            part in data
            if isinstance(data, Mapping)
            else isinstance(data, list) and isinstance(part, int)
        )
        if inside:
            data = data[part]
        if inside or (
            number + 1 == len(error["loc"]) and error["type"] in ("missing", "invalid_key")
        ):
            found.append(part)
    named = re.match(r"([a-z_0-9]+(?:\.[A-Za-z_0-9]+)*): (?=.)", error["msg"])
    parts = [] if named is None else named[1].split(".")
    if named is not None and isinstance(data, Mapping) and parts[0] in data:
        at = (int(part) if part.isdigit() else part for part in parts)
        found, error["msg"] = [*found, *at], error["msg"][named.end() :]
    elif isinstance(error["input"], (int, float, str)) and isinstance(data, (int, float, str)):
        error["input"] = data
    return error | {"loc": tuple(found)}


def origin(
    path: Path,
    location: tuple[int | str, ...],
    over: Mapping[str, Any],
    prefix: tuple[str, ...] = (),
) -> str:
    """The file in which the value of a key stands, and the line; or the environment variable.
    Arguments as of :func:`checked`."""
    for end in range(len(location), 0, -1):
        node: Any = over
        for part in (*prefix, *location[:end]):
            node = node.get(part) if isinstance(node, Mapping) else None
        if (
            node is not None
            and node != {}
            and (end == len(location) or not isinstance(node, Mapping))
        ):
            return f"environment {PREFIX}{_dotted((*prefix, *location[:end]), '__').upper()}"
    return place(path, location)


def _dotted(location: Sequence[int | str], separator: str = ".") -> str:
    return separator.join(
        text if (text := str(part)).isprintable() else repr(part) for part in location
    )


def _message(kind: type[Section], error: Any) -> str:
    where, given, text = _dotted(error["loc"]), error["input"], error["msg"]
    if error["type"] == "extra_forbidden" and given is None and " " in where:
        return (
            f"{where}: unknown key; inside {{ }} a comma ends a value, so put the text before it in"
            " quotes"
        )
    if error["type"] == "extra_forbidden":
        return (
            f"{where}: unknown"
            f" key{nearest_or_all(str(error['loc'][-1]), _keys_at(kind, error['loc'][:-1]))}"
        )
    if error["type"] == "invalid_key":
        return f"{where}: a key is a text: write '{where}' in quotes"
    if error["type"] == "missing":
        return f"{where}: missing; add it, for it has no default"
    if error["type"] == "literal_error":
        allowed = re.findall(r"'([^']+)'", text)
        near = did_you_mean(str(given), allowed)
        return f"{where}: {str(given)!r} is not one of {', '.join(allowed)}{near}"
    value = _PLAIN.get(id(given), repr(given))
    if where == "online":
        value = repr(shown_url(str(given)))
    if error["type"] == "list_type" and isinstance(given, str):
        text = f"write a list, [{', '.join(re.split('[ ,]+', given))}]"
    elif error["type"] in ("model_type", "dict_type"):
        text = f"write keys and values{_as_section(kind, error)}"
    elif error["type"] in _WORDS:
        text = _WORDS[error["type"]].format(**error.get("ctx", {}))
    value = (
        ""
        if isinstance(given, dict) or value in text
        else f" {value if len(value) <= 120 else value[:117] + '...'}:"
    )
    return (
        f"{where}{':' if where else ''}{value}"
        f" {text[0].lower() + text[1:] if text.startswith('Input') else text}".lstrip()
    )


_WORDS = {
    "bool_type": "write true or false",
    "float_type": "write a number",
    "int_type": "write a whole number",
    "string_type": "write a text, in quotes where it looks like something else",
    "list_type": "write a list, as in [a, b]",
    "finite_number": "write a finite number",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "greater_than": "must be more than {gt:g}",
    "too_short": "needs at least {min_length}",
    "too_long": "has at most {max_length}",
}
"""Pydantic's name of a mistake → what to do about it."""

_PLAIN = {id(None): "null", id(True): "true", id(False): "false"}


def _as_section(kind: type[Section], error: Any) -> str:
    """How a value would be written that stands where a section is expected: under the section's one
    key that must be there, if that is all it has to have."""
    section, given = _section_at(kind, error["loc"]), error["input"]
    if section is None:
        return ""
    # of a source the text is most likely its SQL, though a frame may take its place
    keys = [
        name
        for name, field in section.known().items()
        if field.is_required() or (name == "sql" and isinstance(given, str))
    ]
    if isinstance(given, bool) and "enabled" in section.known():
        keys, given = ["enabled"], _PLAIN[id(given)]
    if error["type"] == "dict_type":
        return f", for each name {{{', '.join(f'{key}: …' for key in keys)}}}"
    if len(keys) == 1 and isinstance(given, (str, int)):
        return f", {{{keys[0]}: {given}}}"
    return f" (the keys: {', '.join(section.known())})"


def _keys_at(kind: type[Section], location: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at a place in the file."""
    section = _section_at(kind, location)
    return list(section.known()) if section is not None else []


def _section_at(kind: type[Section], location: tuple[int | str, ...]) -> type[Section] | None:
    """The section at a place in the file."""
    current: Any = kind
    parts = iter(location)
    for part in parts:
        field = (
            current.known().get(str(part))
            if isinstance(current, type) and issubclass(current, Section)
            else None
        )
        if field is None:
            continue
        models = [
            t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, Section)
        ]
        current = models[0] if models else None
        if getattr(field.annotation, "__origin__", None) is dict:
            # a name, such as a feature's
            next(parts, None)
    found: type[Section] | None = current
    return found


def _types(annotation: Any) -> Iterator[Any]:
    arguments = getattr(annotation, "__args__", None)
    if arguments is None:
        yield annotation
    else:
        for argument in arguments:
            yield from _types(argument)
