"""A file that somebody else wrote: what it is where it is none of its format, its JSON, and what is
known of its keys. Each is understood, harmless for a reason, or refused by name with the remedy:
nothing is passed over."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any

from precompute.store.errors import ConfigError, ModelError

_HEADS = {
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself: run git lfs pull",
    b"\x1f\x8b": "compressed by gzip: unpack it first",
    b"BZh": "compressed by bzip2: unpack it first",
    b"\xfd7zXZ": "compressed by xz: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it first",
    b"PK\x03\x04": "a zip archive, which is what torch.save writes, too: it is never loaded; save"
    " the model in the format that is named here",
    **dict.fromkeys(
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        "a pickle, as pickle and joblib write, which runs code when it is loaded: save the model in"
        " the format that is named here",
    ),
    b"\x78\x9c": "compressed by zlib, as joblib's pickles are, which run code when they are loaded:"
    " save the model in the format that is named here",
    b"CBM1": "CatBoost's binary format: load it with catboost.CatBoost().load_model(file), and save"
    " it with save_model('model.json', format='json')",
    b"binf": "XGBoost's old binary format: load it with XGBoost before 3.1, and save it with"
    " save_model('model.json')",
    b"bs64": "XGBoost's old binary format: load it with XGBoost before 3.1, and save it with"
    " save_model('model.json')",
    b"\x89HDF": "HDF5: save the model in the format that is named here",
}
MOST_HEADER_BYTES = 100_000_000
"""Of safetensors, by its library."""
_PAGE = re.compile(rb"\s*(<!doctype html|<html|<\?xml|<head)", re.IGNORECASE)


def what_it_is(path: Path) -> str | None:
    """What a file is, and what to do, where it is plainly another thing than a model: empty, a
    pointer of Git LFS, a web page, an archive, a pickle; None where nothing is known by its head.
    """
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError:
        return None
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < MOST_HEADER_BYTES:
        # of safetensors, whose first bytes are a length and may be anything
        return None
    if not head:
        return "empty: it was not written to its end; fetch it again"
    if _PAGE.match(head):
        return "a web page, such as a hub shows for a login or an error: fetch the file again"
    return next((what for magic, what in _HEADS.items() if head.startswith(magic)), None)


def read_json(path: Path, use: str, kind: type = object) -> Any:
    """The JSON of a file, of whose objects no key stands twice: another parser may take the other.

    Args:
        kind: what it has to hold, such as a dict.

    Raises:
        ModelError: it cannot be read, or is none.
    """
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise ModelError(f"{use}: {path} cannot be read: {exc.strerror or exc}") from exc
    return parsed_json(content, path, use, kind)


def parsed_json(
    content: bytes, path: Path, use: str, kind: type = object, *, finite: bool = False
) -> Any:
    """The same of a file's content that was read already.

    Args:
        kind: what it has to hold, such as a dict.
        finite: refuse a number that a float has not, at which another parser may end.

    Raises:
        ModelError: it is none.
    """
    try:
        made = json.loads(
            content.decode(),
            object_pairs_hook=_once,
            parse_float=_finite if finite else None,
            parse_constant=_finite if finite else None,
        )
        if not isinstance(made, kind):
            raise ValueError(f"it holds a {type(made).__name__}, not a {kind.__name__}")
        return made
    except (ValueError, RecursionError) as exc:
        is_a = what_it_is(path)
        raise ModelError(
            f"{use}: {path} is {is_a}" if is_a else f"{use}: {path} is damaged: {exc}"
        ) from exc


def key_paths(
    of: Mapping[str, Any], maps: Collection[str] = (), recursive: Collection[str] = ()
) -> dict[str, Any]:
    """Every key of nested objects → its value, or that of the last object in a list:
    ``{"a": {"b": [{"c": 1}]}}`` has ``a``, ``a.b`` and ``a.b[].c``.

    Args:
        maps: paths of objects whose keys are data and no names: ``ctr_data{}.hash_map``.
        recursive: keys whose objects are of the kind that they stand in, such as a node's children:
            they add nothing to the paths of what is in them.
    """
    found: dict[str, Any] = {}
    todo: list[tuple[str, Any]] = [("", of)]
    while todo:
        under, value = todo.pop()
        if isinstance(value, Mapping):
            if under in maps:
                todo += [(f"{under}{{}}", inner) for inner in value.values()]
                continue
            for key, inner in value.items():
                found[f"{under}.{key}" if under else key] = inner
                inside = under if key in recursive else f"{under}.{key}" if under else key
                todo.append((inside, inner))
        elif isinstance(value, list):
            todo += [(f"{under}[]", one) for one in value if isinstance(one, (Mapping, list))]
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the key {twice!r} twice")
    return made


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


@dataclass(frozen=True)
class KnownKeys:
    """What is known of the keys, or tensors, of one file of one format. A name may be a pattern as
    of a shell's files: ``encoder.layer.*.weight``.

    Args:
        file: what messages and the documents call it: ``config.json`` of a BERT.
        used: what is read; a name that stands here whole is read whatever its value.
        harmless: pattern → why no value depends on it.
        fixed: pattern → the only values at which what is computed here is right, whatever other
            patterns say of the key.
        refused: pattern → the remedy. What is none of these four is refused as not known.
    """

    file: str
    used: tuple[str, ...] = ()
    harmless: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def check(self, keys: Mapping[str, Any] | Iterable[str], path: Path | str, use: str) -> None:
        """Refuse what is not known.

        Args:
            keys: the keys with their values; or names of tensors, of which none is ``fixed``.
            path: of the file, for the message.
            use: the model's name in ``model.use``, for the message.

        Raises:
            ConfigError: names the first key that is refused or not known, and the remedy.
        """
        for name in keys:
            self.refuse(name, path, use)
            if name in self.used:
                continue
            values = [known for pattern, known in self.fixed.items() if _matches(pattern, name)]
            if values and isinstance(keys, Mapping):
                if any(_same(keys[name], value) for value in values[0]):
                    continue
                raise ConfigError(
                    f"{use}: {path}: {name} is {str(keys[name])[:80]!r}; only"
                    f" {' or '.join(map(repr, values[0]))} is computed: write a model class of your"
                    " own"
                )
            if not any(_matches(pattern, name) for pattern in (*self.used, *self.harmless)):
                raise ConfigError(
                    f"{use}: {path} has {name}, which is not known of {self.file}: values could"
                    " differ; save the model without it, or write a model class of your own"
                )

    def refuse(self, name: str, path: Path | str, use: str) -> None:
        """Refuse one name, if it is one of ``refused``.

        Raises:
            ConfigError: names it and the remedy.
        """
        for pattern, remedy in self.refused.items():
            if _matches(pattern, name):
                raise ConfigError(f"{use}: {path} has {name}: {remedy}")

    def why_harmless(self, name: str) -> str | None:
        """Why no value depends on a name; None where that is not known."""
        return next((why for p, why in self.harmless.items() if _matches(p, name)), None)


def _same(value: Any, known: Any) -> bool:
    """Equal, and of one type: ``1`` is not ``True`` in every library."""
    return type(value) is type(known) and bool(value == known)


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or ("*" in pattern and _compiled(pattern).match(name) is not None)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # of objects in lists, and no set of letters
    return re.compile(translate(pattern.replace("[]", "[[]]")))
