"""Generated: the pages of the reference that are written from the code, each time the site is
built.

Configuration from the pydantic models, commands from the argparse parsers, HTTP from the OpenAPI
document, Python from the docstrings of what :mod:`precompute` makes public, and what is read of
models' files from the tables of their readers. What needs more words than a line stands in
``docs/reference.md``.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import precompute
from precompute import foreign_file
from precompute.foreign_file import KnownKeys
from precompute.jobs.cli import _parser
from precompute.jobs.commands.command import Parser
from precompute.jobs.config.project import ProjectConfig
from precompute.jobs.config.section import Section, descriptions, parse_duration
from precompute.jobs.config.serve import ServiceConfig
from precompute.jobs.config.view import ViewConfig
from precompute.store.doors import COMMANDS, NAMES
from precompute.store.http.openapi import openapi_document
from precompute.store.times import duration

_WORDS: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    datetime: "time",
    Any: "any",
}
_LIMITS = {
    "ge": "≥ {:,}",
    "gt": "> {:,}",
    "le": "≤ {:,}",
    "lt": "< {:,}",
    "min_length": "at least {}",
    "max_length": "at most {}",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; a cell's own bars and markup are text."""
    lines = [head, ["---"] * len(head), *(list(map(_cell, row)) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def _cell(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    return "".join(
        p if p.startswith("`") else p.replace("<", "&lt;").replace("*", "\\*") for p in parts
    )


# ---- configuration


def configuration() -> str:
    """Every key of ``project.yaml``, of a view and of a service."""
    text = (
        "# Configuration\n\nEvery key, with its type, its default and its limits."
        " [Reference](../reference.md) explains the keys that need more than a line. An environment"
        " variable overrides each of them: `PRECOMPUTE_SERVE__BIND` stands for `serve.bind`,"
        " `PRECOMPUTE_VIEWS__BOOK_EMBEDDING__TTL` for `ttl` of the view `book_embedding`.\n\n"
    )
    for title, model in (
        ("A project: `project.yaml`", ProjectConfig),
        ("A view: `views/<name>.yaml`", ViewConfig),
        ("A service: `services/<name>.yaml`", ServiceConfig),
    ):
        text += f"## {title}\n\n" + "".join(_section(model, ""))
    return text


def _section(model: type[Section], path: str) -> Iterator[str]:
    """A table of a section's keys, then each section in it, below a heading of its own."""
    rows, inner, described = [], [], descriptions(model)
    for name, field in model.known().items():
        sections = list(_sections(field.annotation, f"{path}{name}"))
        inner += sections
        links = ", ".join(
            f"[`{where}`](#{re.sub('[^a-z0-9_-]', '', where)})" for where, _ in sections
        )
        # what a section is for, its own docstring says
        what = described.get(name) or (sections[0][1].__doc__ or "" if sections else "")
        rows.append(
            [
                f"`{path}{name}`",
                links or _type(field.annotation, field.metadata),
                _default(field, bool(sections)),
                what,
            ]
        )
    yield table(("key", "type", "default", "what it is"), rows)
    for where, section in inner:
        yield f"### `{where}`\n\n{_plain(inspect.getdoc(section) or '')}\n\n"
        yield from _section(section, f"{where}.")


def _sections(annotation: Any, path: str) -> Iterator[tuple[str, type[Section]]]:
    """(path, section) of a key that is one, or whose values are."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield path, annotation
    elif get_origin(annotation) is dict:
        yield from _sections(get_args(annotation)[1], f"{path}.<name>")
    elif get_origin(annotation) is not Literal:
        for part in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
            yield from _sections(part, path)


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its limits."""
    inside = [
        found for m in metadata for found in (m.metadata if isinstance(m, FieldInfo) else [m])
    ]
    limits = [
        words.format(getattr(m, name))
        for m in inside
        for name, words in _LIMITS.items()
        if getattr(m, name, None) is not None
    ]
    return ", ".join([_word(annotation, metadata), *limits])


def _word(annotation: Any, metadata: Sequence[Any]) -> str:
    if any(getattr(m, "func", None) is parse_duration for m in metadata):
        return "duration"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], parts[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in parts if part is not type(None))
    if origin is list:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return f"mapping to {_type(parts[1])}"
    return _WORDS.get(annotation, "any")


def _default(field: FieldInfo, section: bool) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel) or (section and not value):
        return ""
    if _type(field.annotation, field.metadata).startswith("duration"):
        return f"`{_written(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _written(seconds: float) -> str:
    """A duration as a configuration spells it."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:g}ms"
    return duration(seconds).replace(" min", "m").replace(" ", "")


# ---- commands


def commands() -> str:
    """Every command with its arguments, as ``--help`` has them."""
    parser = _parser()
    text = (
        f"# Commands\n\n{_plain(parser.description or '')} `precompute COMMAND --help` prints the"
        " same.\n\n"
    )
    text += (
        "[Exit status, several views, what a difference is](../reference.md#command-line).\n\n##"
        " Before the command\n\n"
    )
    text += _arguments(parser)
    for name, command in _commands(parser):
        formatter = argparse.HelpFormatter(command.prog, width=100)
        formatter.add_usage(
            command.usage, command._actions, command._mutually_exclusive_groups, prefix=""
        )
        text += f"## `{name}`\n\n{_described(command)}\n\n```text\n{formatter.format_help().strip()}\n```\n\n{_arguments(command)}"  # noqa: E501
    return text


def _commands(
    parser: argparse.ArgumentParser, prefix: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name, parser) of each command, those of a command below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                if COMMANDS.has(name) and not COMMANDS.is_here(name):
                    continue
                if isinstance(command, Parser):
                    command.filled()  # what comes in by a door
                yield f"{prefix}{name}", command
                yield from _commands(command, f"{prefix}{name} ")


def _described(command: argparse.ArgumentParser) -> str:
    """What a command does; a paragraph of columns stays one."""
    what = (command.description or "").strip()
    paragraphs = (what[:1].upper() + what[1:]).split("\n\n")
    return "\n\n".join(f"```text\n{p}\n```" if re.search(r"\S  +\S", p) else p for p in paragraphs)


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows, formatter = [], parser._get_formatter()
    for action in parser._actions:
        if isinstance(
            action, (argparse._HelpAction, argparse._SubParsersAction)
        ) or action.help in (None, argparse.SUPPRESS):
            continue
        value = (
            ""
            if action.nargs == 0
            else (
                f" {formatter._format_args(action, formatter._get_default_metavar_for_optional(action))}"  # noqa: E501
            )
        )
        named = (
            ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{value.strip()}`"
        )
        rows.append([named, formatter._expand_help(action)])
    return table(("argument", "what it is"), rows) if rows else ""


# ---- HTTP


def http() -> str:
    """Every route with its parameters, bodies and answers."""
    document = openapi_document()
    text = (
        f"# HTTP\n\n{document['info']['description']} [Reference](../reference.md#over-http)"
        " explains what a lookup and a search answer.\n\n"
    )
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            text += (
                f"## `{method.upper()} {path}`\n\n{_plain(operation['summary'])}."
                f" {_plain(operation.get('description', ''))}\n\n"
            )
            text += _operation(operation, document["components"])
    text += "## Bodies\n\n"
    for name, schema in document["components"]["schemas"].items():
        text += f"### `{name}`\n\n{_plain(schema.get('description', ''))}\n\n"
        required = schema.get("required", [])
        rows = [
            [
                f"`{key}`",
                _schema(value),
                _told(key in required, value),
                _plain(value.get("description", "")),
            ]
            for key, value in schema.get("properties", {}).items()
        ]
        text += (
            table(("field", "type", "default", "what it is"), rows)
            if rows
            else f"{_schema(schema)}\n\n"
        )
    return text


def _told(required: bool, schema: dict[str, Any]) -> str:
    if required:
        return "always there"
    default = schema.get("default")
    return "none" if default is None else f"`{json.dumps(default)}`"


def _operation(operation: dict[str, Any], components: dict[str, Any]) -> str:
    text = ""
    if operation.get("parameters"):
        rows = [
            [
                f"`{p['name']}`",
                p["in"] + (", required" if p["required"] else ""),
                _schema(p["schema"]),
                _plain(p.get("description", "")),
            ]
            for p in operation["parameters"]
        ]
        text += table(("parameter", "in", "type", "what it is"), rows)
    if "requestBody" in operation:
        text += f"Body: {_content(operation['requestBody'])}\n\n"
    rows = []
    for status, answer in operation["responses"].items():
        found = _resolved(answer, components)
        rows.append([f"`{status}`", _content(found), _plain(found["description"])])
    return text + table(("status", "answer", "when"), rows)


def _resolved(answer: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (
        components["responses"][answer["$ref"].rpartition("/")[2]] if "$ref" in answer else answer
    )
    return found


def _content(part: dict[str, Any]) -> str:
    return ", or ".join(
        f"{_schema(c['schema'])} as `{kind}`" if "$ref" in c["schema"] else f"`{kind}`"
        for kind, c in part.get("content", {}).items()
    )


def _schema(schema: dict[str, Any]) -> str:
    """A JSON Schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema or "oneOf" in schema:
        words = " or ".join(
            _schema(one)
            for one in schema.get("anyOf", schema.get("oneOf", ()))
            if one != {"type": "null"}
        )
    elif schema.get("type") == "array":
        words = f"list of {_schema(schema.get('items', {}))}"
    elif isinstance(schema.get("type"), list):
        words = " or ".join(schema["type"])
    else:
        words = schema.get("type", "any")
    limits = {
        "minimum": "≥ {:,}",
        "maximum": "≤ {:,}",
        "minItems": "at least {:,}",
        "maxItems": "at most {:,}",
    }
    return ", ".join(
        [words, *(text.format(schema[name]) for name, text in limits.items() if name in schema)]
    )


# ---- Python


def python() -> str:
    """Every public name of :mod:`precompute` with its docstring, and those of its methods."""
    text = (
        f"# Python\n\n{_plain(inspect.getdoc(precompute) or '')}\n\n[Reference](../reference.md#in-python)"  # noqa: E501
        " has examples.\n\n"
    )
    absent = {name for name in NAMES.known() if not NAMES.is_here(name)}
    here = [name for name in precompute.__all__ if f"precompute.{name}" not in absent]
    public = {name: getattr(precompute, name) for name in here}
    errors = {
        name
        for name, thing in public.items()
        if isinstance(thing, type) and issubclass(thing, Exception)
    }
    for name in sorted(public.keys() - errors, key=str.lower):
        text += _name(name, public[name], "##")
    text += "## Errors\n\n"
    for name in sorted(errors):
        base = public[name].__mro__[1].__name__
        text += f"### `{name}`\n\nA `{base}`. {_docstring(public[name])}\n\n"
    return text


def _name(name: str, thing: Any, level: str) -> str:
    text = f"{level} `{name}`\n\n"
    if not isinstance(thing, property):
        text += f"```python\n{_signature(name, thing)}\n```\n\n"
    text += f"{_docstring(thing)}\n\n"
    if isinstance(thing, type):
        for method, found in _methods(thing):
            text += _name(f"{name}.{method}", found, "###")
    return text


def _methods(thing: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, in the order they were written; those of its bases after
    them."""
    seen = set[str]()
    for base in thing.__mro__:
        if not base.__module__.startswith("precompute"):
            continue
        for name, found in vars(base).items():
            function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
            if (
                name not in seen
                and not name.startswith("_")
                and (inspect.isfunction(function) or isinstance(found, property))
            ):
                seen.add(name)
                yield name, function


class _Annotation(str):
    """An annotation as it was written, without quotes and modules."""

    def __repr__(self) -> str:
        return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", str(self))


def _signature(name: str, thing: Any) -> str:
    """How it is called, a parameter a line where that is long."""
    signature = inspect.signature(thing)
    written: list[str] = []
    for parameter in signature.parameters.values():
        words = _words(thing, parameter)
        if (
            parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
            and "*" not in "".join(written)
            and (words or parameter.kind is parameter.KEYWORD_ONLY)
        ):
            written.append("*")
        if parameter.name not in ("self", "cls"):
            written += words or [
                str(parameter.replace(annotation=_annotation(parameter.annotation)))
            ]
    ends = signature.replace(
        parameters=(),
        return_annotation=(
            signature.empty if isinstance(thing, type) else _annotation(signature.return_annotation)
        ),
    )
    written = [re.sub(r"<built-in function (\w+)>", r"\1", line) for line in written]
    whole = f"{name}({', '.join(written)}{str(ends).removeprefix('(')}"
    if len(whole) <= 100:
        return whole
    return (
        f"{name}(\n" + "".join(f"    {line},\n" for line in written) + str(ends).removeprefix("(")
    )


def _annotation(annotation: Any) -> Any:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def _words(function: Any, parameter: inspect.Parameter) -> list[str]:
    """The keywords that ``**words: Unpack[Words]`` stands for."""
    named = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
    words = getattr(inspect.getmodule(function), named[1], None) if named else None
    if words is None:
        return []
    kinds = {
        name: getattr(kind, "__forward_arg__", kind) for name, kind in words.__annotations__.items()
    }
    return [f"{name}: {_annotation(kind)!r} = ..." for name, kind in kinds.items()]


def _docstring(thing: Any) -> str:
    """A docstring in Markdown: its sections as lists."""
    paragraphs, heading = [], False
    for line in (inspect.getdoc(thing) or "").splitlines():
        if re.fullmatch(r"(Args|Raises|Returns|Yields|Attributes):", line):
            paragraphs.append(f"\n**{line[:-1]}**\n")
            heading = True
        elif heading and (item := re.fullmatch(r"    (\*{0,2}[\w, ]+): (.*)", line)):
            paragraphs.append(f"- `{item[1]}`: {item[2]}")
        elif heading and line.startswith("    "):
            paragraphs.append(f"  {line.strip()}")
        else:
            heading = heading and not line.strip()
            paragraphs.append(re.sub(r"[.\s]*::$", ":", line))
    return _plain("\n".join(paragraphs))


def _plain(text: str) -> str:
    """Docstrings' markup as Markdown's."""
    text = re.sub(r":\w+:`~?(?:[a-z_0-9]+\.)*([\w.]+)`", r"`\1`", text)
    return text.replace("``", "`")


# ---- models' files


def model_files() -> str:
    """What is known of the keys and tensors of every format of a model."""
    text = (
        "# What is read of models' files\n\nA model's files were written by others. Each key and"
        " each tensor of them is read, is harmless for a reason, or is refused by name: nothing is"
        " passed over. What is in no table of its file is refused, too. `*` stands for any"
        " text. [Models people have](../models.md) says which `model.use` reads which files.\n\n"
    )
    for module, tables in known_keys().items():
        what = (inspect.getdoc(module) or "").partition(":")[0]
        text += f"## {what}\n\n"
        for keys in tables:
            text += f"### {keys.file[:1].upper()}{keys.file[1:]}\n\n"
            text += table(["key", ""], list(_known(keys)))
    return text


def known_keys() -> dict[ModuleType, list[KnownKeys]]:
    """The tables of each module of :mod:`precompute` that has some, in their order."""
    found: dict[ModuleType, list[KnownKeys]] = {}
    room = Path(foreign_file.__file__).parent
    for path in sorted(room.rglob("*.py")):
        if path.name == "foreign_file.py" or "KnownKeys(" not in path.read_text(encoding="utf-8"):
            continue
        name = ".".join(("precompute", *path.relative_to(room).with_suffix("").parts))
        module = importlib.import_module(name)
        tables = [value for value in vars(module).values() if isinstance(value, KnownKeys)]
        own = [value for value in tables if not any(value in seen for seen in found.values())]
        if own:
            found[module] = own
    return found


def _known(keys: KnownKeys) -> Iterator[tuple[str, str]]:
    """(names with the same reason, what becomes of them)."""
    reasons: dict[str, list[str]] = {}
    for name in keys.used:
        reasons.setdefault("read", []).append(name)
    for name, values in keys.fixed.items():
        only = " or ".join(f"`{value!r}`" for value in values)
        reasons.setdefault(f"only {only} is computed", []).append(name)
    for name, why in keys.harmless.items():
        reasons.setdefault(f"harmless: {why}", []).append(name)
    for name, remedy in keys.refused.items():
        reasons.setdefault(f"refused: {remedy}", []).append(name)
    for reason, names in reasons.items():
        # a name with a blank is words
        yield ", ".join(n if " " in n else f"`{n}`" for n in names), reason


PAGES: dict[str, Callable[[], str]] = {
    "reference/configuration.md": configuration,
    "reference/commands.md": commands,
    "reference/http.md": http,
    "reference/python.md": python,
    "reference/model-files.md": model_files,
}
"""Page of the site → what writes it."""
