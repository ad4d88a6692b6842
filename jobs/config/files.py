"""Configuration files: YAML read strictly, environment overrides laid over it, ``${name}`` put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from precompute.store.errors import ConfigError

PREFIX = "PRECOMPUTE_"
OWN_VARIABLES = frozenset({"PRECOMPUTE_CONFIG", "PRECOMPUTE_CRASH"})
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
