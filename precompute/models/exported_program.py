"""Exported program: what ``torch.export.save`` wrote, loaded without running anything of it.

``torch.export.load`` of torch 2.13 runs what it reads (docs/architecture.md, "What is loaded"). So a ``.pt2`` is packed anew before it is loaded: only
the program, its raw tensors and text of the narrow forms that an export of plain operators has go in; anything else is refused.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from precompute.store.errors import ModelError

_COPIED = ("archive_format", "archive_version", "byteorder", ".data/version", "models/model.json")
_WEIGHTS, _CONSTANTS, _SAMPLES = "data/weights/", "data/constants/", "data/sample_inputs/model.pt"
_CONFIGS = (f"{_WEIGHTS}model_weights_config.json", f"{_CONSTANTS}model_constants_config.json")

_OPERATORS = "getitem|add|sub|mul|floordiv|truediv|mod|pow|neg|eq|ne|lt|le|gt|ge"
_FORMS = {
    "target": re.compile(rf"torch\.ops\.aten\.(?!from_file)\w+\.\w+|_operator\.({_OPERATORS})|torch\.sym_\w+|math\.\w+"),
    # of a size, as sympy.srepr writes it
    "expr_str": re.compile(
        r"(?:Symbol\('[a-z]+\d+'(?:, [a-z]+=True)*\)|(?:Integer|Add|Mul|Pow|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv)\(|[-\d, )])*"
    ),
    "guards_code": re.compile(
        r"(?:L(?:\['\w+'\]|\[\d\])+\.(?:size\(\)\[\d\]|stride\(\)\[\d\]|storage_offset\(\))|and |or |not |[-+*/%()<>=!\d ])*"
    ),
    "as_string": re.compile(r"[\w .,>-]*"),
    "type": re.compile(r"builtins\.(tuple|list|dict)|collections\.OrderedDict|cpu|cuda|none"),
}
_NAME = re.compile(r"(?!__)[\w.+-]*")
"""Every other text, and every key."""


def load_program(path: Path) -> torch.export.ExportedProgram:
    """Load what ``torch.export.save`` wrote, after packing it anew without anything that would be run while loading.

    Raises:
        ModelError: it is no such file, of an older format, exported in training mode, or refused for what it holds.
    """
    packed = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w") as out:
            files = {name.partition("/")[2]: name for name in archive.namelist()}
            missing = [name for name in ("models/model.json", *_CONFIGS) if name not in files]
            if missing:
                raise ModelError(
                    f"torch_module: {path} has no {missing[0]}: save it with torch.export.save of torch 2.9 or later"
                )
            raw = _raw_tensors(path, {name: json.loads(archive.read(files[name])) for name in _CONFIGS})
            for name in (*_COPIED, *_CONFIGS, *sorted(raw)):
                if name in files:
                    data = archive.read(files[name])
                    out.writestr(f"archive/{name}", _checked_program(path, data) if name == "models/model.json" else data)
            out.writestr(f"archive/{_SAMPLES}", b"")
        packed.seek(0)
        program = torch.export.load(packed)
    except ModelError:
        raise
    except Exception as exc:
        # zipfile, json and torch raise whatever a damaged file makes them
        raise ModelError(f"torch_module: {path} does not load: {type(exc).__name__}: {exc}") from exc
    for node in program.graph.nodes:
        arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
        if any(a.name in ("train", "training") and value is True for a, value in zip(arguments, node.args, strict=False)):
            raise ModelError(
                f"torch_module: {path} was exported in training mode ({node.target}): call eval() before torch.export.export"
            )
    return program


def _refused(path: Path, what: str) -> ModelError:
    return ModelError(
        f"torch_module: {path} is refused, since loading it could run code: {what}. Export a module of plain operators, or give its class and "
        "a safetensors file"
    )


def _raw_tensors(path: Path, configs: Mapping[str, Any]) -> set[str]:
    """Files of tensors that are stored as plain bytes."""
    names = set()
    for config, body in configs.items():
        _check_text(path, body, "")
        for name, entry in body["config"].items():
            if entry["use_pickle"] or not entry["path_name"].startswith(("weight_", "tensor_")):
                raise _refused(path, f"{name!r} is a pickled object")
            names.add(config.rpartition("/")[0] + "/" + entry["path_name"])
    return names


def _checked_program(path: Path, data: bytes) -> bytes:
    """The program, without stack traces and other notes."""
    body = json.loads(data)
    for node in body["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {}
    body["graph_module"]["metadata"] = {}
    _check_text(path, body, "")
    return json.dumps(body).encode()


def _check_text(path: Path, value: Any, key: str) -> None:
    if isinstance(value, Mapping):
        for inner, below in value.items():
            if inner in ("as_operator", "as_graph", "as_custom_obj", "custom_obj") or not _NAME.fullmatch(inner):
                raise _refused(path, f"it holds {inner!r}")
            _check_text(path, below, inner)
    elif isinstance(value, list):
        for below in value:
            _check_text(path, below, key)
    elif isinstance(value, str) and key in ("in_spec", "out_spec", "context"):
        # JSON inside JSON
        if value:
            _check_text(path, json.loads(value), "")
    elif isinstance(value, str) and not _FORMS.get(key, _NAME).fullmatch(value):
        raise _refused(path, f"{key or 'a text'} {value[:80]!r}")


def takes(program: torch.export.ExportedProgram, path: Path) -> tuple[list[str], list[str], int | None]:
    """What a program takes: (arguments by position, arguments by name, most rows of a batch).

    Raises:
        ModelError: arguments that are no plain tensors, or a number of rows that is fixed.
    """
    positional, named = program.call_spec.in_spec.children()
    names = program.graph_signature.user_inputs
    if not all(spec.is_leaf() for spec in (*positional.children(), *named.children())) or not all(
        isinstance(n, str) for n in names
    ):
        raise ModelError(
            f"torch_module: {path} takes something other than tensors; export a module whose forward takes only those"
        )
    limit = None
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for name in names:
        shape = placeholders[name].meta["val"].shape
        if not shape or isinstance(shape[0], int):
            raise ModelError(
                f"torch_module: {path} takes {name} of shape {list(shape)} only: export it with "
                f"dynamic_shapes={{{name!r}: {{0: torch.export.Dim('rows')}}, …}}"
            )
        bounds = program.range_constraints.get(shape[0].node.expr)
        if bounds is None:
            continue
        # 2 is what torch writes for "any, but 0 and 1 were not tried"
        if bounds.lower > 2:
            raise ModelError(
                f"torch_module: {path} takes at least {bounds.lower} rows of {name}: export it with torch.export.Dim('rows')"
            )
        if bounds.upper < 2**31:
            limit = min(int(bounds.upper), limit or 2**31)
    # a program knows the names of its keyword arguments itself; their placeholders may be called otherwise
    keywords = list(named.context or [])
    return list(names[: len(names) - len(keywords)]), keywords, limit


def program_flops(program: torch.export.ExportedProgram) -> float:
    """Of one row: 2 for each weight of a linear layer."""
    weights = [n.args[1].meta["val"] for n in program.graph.nodes if str(n.target) == "aten.linear.default"]
    return sum(2.0 * math.prod(map(int, w.shape)) for w in weights)


def is_pure(program: torch.export.ExportedProgram) -> bool:
    """Whether it writes nothing but what it returns: then it may run in several threads at once."""
    return not any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in program.graph.nodes) and not (
        program.graph_signature.buffers_to_mutate
    )
