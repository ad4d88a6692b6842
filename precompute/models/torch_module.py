"""Torch module: any :class:`torch.nn.Module`, or a program that ``torch.export.save`` wrote, over columns of numbers, vectors and categories.

A ranking MLP or a tower is a few lines of a view, and no new model class::

    use: torch_module
    args:
      module: mine.ranker:Ranker            # or ${models}/ranker.pt2, which holds its own weights
      args: {hidden: 256}
      weights: ${models}/ranker.safetensors
      genres: {sql: SELECT DISTINCT genre FROM read_parquet('${data}/items.parquet') ORDER BY genre}
      inputs:
        x: [price, age, score]              # several columns: one matrix, float32 [rows, 3]
        item: item_id                       # one column: int64 or float32 [rows]; a fixed-size list [rows, dim]
        history: {column: recent, dim: 20}  # a list, which must have 20 numbers in every row
        genre: {column: genre, vocabulary: genres}  # text: 1, 2, … in the vocabulary's order, 0 for null and unknown
        stock: {column: stock, fill: 0}     # without fill, a null makes its row unusable
      outputs: {relevance: 0}               # feature: position in the returned tuple, or key in the returned dict

``torch.export.load`` of torch 2.13 runs what it reads: it unpickles sample inputs, and weights and constants that are marked so, passes sizes
to sympy's ``eval``, makes Python code of names and guards, resolves any ``torch.…`` name as an operator and loads native code. So a ``.pt2`` is
packed anew before it is loaded: only the program, its raw tensors and text of the narrow forms that an export of plain operators
has go in; anything else is refused. That keeps accidents and known tricks out, but it is no sandbox.
"""

from __future__ import annotations

import inspect
import io
import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch.utils.dlpack import from_dlpack

from precompute.model import Prepared, Verbatim, digest, resolve_path
from precompute.models.device import Device, Fetch
from precompute.models.torch_model import Tensors, TorchModel
from precompute.project_module import import_module, plain_name, told
from precompute.project_path import project_folder
from store.errors import ConfigError, ModelError

CODE_VERSION = 1
"""Raised by whoever changes the values this code computes; part of the fingerprint."""

UNKNOWN = 0
"""Id of null, and of what the vocabulary has not."""


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the module.

    ``matrix`` tells [rows, columns] from the one column's own shape; ``vocabulary`` maps text to its id; ``dim`` is the length of a list.
    """

    name: str
    columns: tuple[str, ...]
    matrix: bool = False
    fill: float | None = None
    vocabulary: Mapping[str, int] | None = None
    dim: int | None = None


class Called(torch.nn.Module):
    """A module behind one face: tensors in the order of the inputs → a tuple of tensors in the order of ``wanted``.

    Args:
        module: takes the first ``len(inputs) - len(keywords)`` tensors by position and the rest by name.
        keywords: those names.
        wanted: position or key of each output.
        program: whether it is an exported program, which has no training mode to leave.
    """

    def __init__(self, module: torch.nn.Module, keywords: Sequence[str], wanted: Sequence[int | str], *, program: bool) -> None:
        super().__init__()
        self.module, self.keywords, self.wanted, self.program = module, tuple(keywords), tuple(wanted), program

    def train(self, mode: bool = True) -> Called:
        """See :class:`torch.nn.Module`; a program stays as it was exported."""
        return self if self.program else super().train(mode)

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        """Raises:
        ModelError: the module returns something other than ``outputs`` names.
        """
        split = len(tensors) - len(self.keywords)
        returned = self.module(*tensors[:split], **dict(zip(self.keywords, tensors[split:], strict=True)))
        if isinstance(returned, torch.Tensor):
            returned = (returned,)
        if isinstance(returned, Mapping):
            found: Mapping[Any, Any] = returned
        elif isinstance(returned, (tuple, list)):
            found = dict(enumerate(returned))
        else:
            raise ModelError(
                f"torch_module: the module returns {type(returned).__name__}, not a tensor, a tuple or a dict of them"
            )
        for key in self.wanted:
            if key not in found:
                raise ModelError(
                    f"torch_module: outputs names {key!r}, but the module returns {', '.join(map(repr, found)) or 'nothing'}"
                )
            if not isinstance(found[key], torch.Tensor):
                raise ModelError(f"torch_module: the module's output {key!r} is {type(found[key]).__name__}, not a tensor")
        return tuple(found[key] for key in self.wanted)


class TorchModule(TorchModel):
    """Runs a module over columns; see this file's head for how a view writes it.

    Args:
        module: ``package.module:Class`` of a :class:`torch.nn.Module`, or a path ending in ``.pt2``; ``package:name/file.pt2`` inside a package.
        inputs: the names that ``forward`` gives its arguments → a column, a list of columns, or a mapping with ``column`` or ``columns`` and
            ``fill`` (a number in place of nulls), ``vocabulary`` (a list, or the name of one of ``vocabularies``) or ``dim``.
        outputs: feature → position in the tuple or key in the dict that the module returns; 0 of a single tensor. [rows] and [rows, 1] are one
            value a row, [rows, dim] is a vector.
        args: keyword arguments of the class.
        weights: safetensors file of its state; leave it out for a module that has none.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.
        max_cost: rows in one batch; by default what the engine finds best.
        vocabularies: any other argument: a list of values, or a table of one column (``{sql: SELECT …}``), for inputs to name. Its first value has the
            id 1, the second 2, and so on in its order; 0 is null and what it has not. So an embedding of n values has n + 1 rows.

    Raises:
        ConfigError: an argument that is wrong in itself, no such class or file, or inputs that ``forward`` does not take.
        ModelError: the class, the weights or the program does not load; a program that is refused, or that takes a fixed number of rows.
    """

    def __init__(
        self,
        module: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, int | str],
        args: Mapping[str, Any] | None = None,
        weights: str | None = None,
        device: str | None = None,
        max_cost: int | None = None,
        **vocabularies: Any,
    ) -> None:
        self._inputs = _inputs(inputs, vocabularies)
        if not isinstance(outputs, Mapping) or not outputs:
            raise ConfigError(
                f"torch_module: outputs maps features to positions or keys, as in {{relevance: 0}}; got {outputs!r}"
            )
        for feature, key in outputs.items():
            if isinstance(key, bool) or not isinstance(key, (int, str)) or (isinstance(key, int) and key < 0):
                raise ConfigError(f"torch_module: outputs.{feature} is a position from 0 or a key, got {key!r}")
        if max_cost is not None and (isinstance(max_cost, bool) or not isinstance(max_cost, int) or max_cost < 1):
            raise ConfigError(f"torch_module: max_cost is a number of rows from 1, got {max_cost!r}")
        self._features = tuple(outputs)
        self._facts: dict[str, Any] = {
            "inputs": Verbatim(dict(inputs)),
            "outputs": Verbatim(dict(outputs)),
            "vocabularies": Verbatim(_lists(vocabularies)),
        }
        self.max_cost = max_cost
        names, found = [i.name for i in self._inputs], Device(device)
        self._files: dict[str, Path] = {}
        if module.endswith(".pt2"):
            if args or weights is not None:
                raise ConfigError(
                    "torch_module: a .pt2 holds its own weights and takes no arguments: leave out `args` and `weights`"
                )
            path = self._files["program"] = resolve_path(module)
            program = load_program(path)
            positional, keywords, limit = _takes(program, path)
            names = [*positional, *keywords]
            if sorted(names) != sorted(i.name for i in self._inputs):
                raise ConfigError(
                    f"torch_module: {path} takes {', '.join(names)}; inputs names {', '.join(i.name for i in self._inputs)}"
                )
            if limit is not None:
                self.max_cost = min(limit, max_cost or limit)
            self._flops = _program_flops(program)
            if found.is_cuda:
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, found.torch)
            inner: torch.nn.Module = program.module()
        else:
            inner = _constructed(module, args or {})
            keywords = names
            _check_takes(module, inner, names)
            _load_state(module, inner, weights)
            self._facts |= {"class": module, "args": dict(args or {})}
            self._files |= {f"source of {owner}": file for owner, file in _sources(inner).items()}
            if weights is not None:
                self._files["weights"] = resolve_path(weights)
            self._flops = sum(2.0 * m.weight.numel() for m in inner.modules() if isinstance(m, torch.nn.Linear))
        self._inputs = tuple(next(i for i in self._inputs if i.name == name) for name in names)
        self._checked: pa.Schema | None = None
        super().__init__(Called(inner, keywords, tuple(outputs.values()), program=module.endswith(".pt2")), found)

    def fingerprint(self) -> str:
        """Weights, class (its dotted path, and the bytes of the file that it and each class of its parts stands in, torch's own apart) or program,
        arguments, inputs, outputs and code version. A table of a vocabulary is added by the caller, as of every table argument."""
        return digest(code=CODE_VERSION, files=self._files, **self._facts)

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """2 for each weight of a linear layer, a row; what other layers need is not counted."""
        return self._flops * len(rows)

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Rows with a null that nothing fills, or a list of another length.

        Raises:
            ModelError: a column is missing, or of a type that its input does not take.
        """
        self._check(batch.schema)
        bad: dict[int, str] = {}
        for given in self._inputs:
            if given.vocabulary is not None or given.fill is not None:
                continue
            for name in given.columns:
                column = batch.column(name)
                if column.null_count:
                    bad |= dict.fromkeys(pc.indices_nonzero(column.is_null()).to_pylist(), f"{name} is null")
                if _is_list(column.type):
                    bad |= _broken_lists(name, column, given.dim)
        return bad

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """The tensors of all rows; each row costs 1.

        Measured for 8,192 rows: 0.02 ms for an id, 0.13 ms for three numbers as a matrix, 0.2 ms for text of 20 values and 3 ms for text that is
        different in every row.
        """
        bad = self.unusable(batch)
        if bad:  # they stand in the way of whole columns: another row's values take their places, and are not computed
            good = np.setdiff1d(np.arange(batch.num_rows), list(bad))
            if not len(good):
                return Prepared(np.ones(batch.num_rows, np.int64), (), bad)
            rows = np.full(batch.num_rows, good[0])
            rows[good] = good
            batch = batch.take(pa.array(rows))
        return Prepared(np.ones(batch.num_rows, np.int64), tuple(_tensor(given, batch) for given in self._inputs), bad)

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        """In the order of the module's arguments; neighbouring rows are views of what was prepared."""
        whole: Tensors = prepared.payload
        first = int(rows[0])
        if int(rows[-1]) - first == len(rows) - 1 and (np.diff(rows) == 1).all():
            return tuple(t[first : first + len(rows)] for t in whole)
        chosen = torch.from_numpy(rows)
        return tuple(t[chosen] for t in whole)

    def launch(self, inputs: Tensors) -> Fetch:
        """See :class:`precompute.models.torch_model.TorchModel`.

        Raises:
            ModelError: the module changed its input: that is the source's own memory, and what a second try would compute from.
        """
        before = [t._version for t in inputs]
        launched = super().launch(inputs)
        for given, tensor, version in zip(self._inputs, inputs, before, strict=True):
            if tensor._version != version:
                raise ModelError(f"torch_module: the module writes into its input {given.name!r}: let it work on a clone()")
        return launched

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Each feature, [rows] or [rows, dim], of the module's dtype.

        Raises:
            ModelError: an output of another shape.
        """
        made = {}
        for feature, values in zip(self._features, outputs, strict=True):
            if values.ndim not in (1, 2):
                raise ModelError(f"torch_module: output {feature!r} has shape {list(values.shape)}, not [rows] or [rows, dim]")
            made[feature] = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        return made

    def _check(self, schema: pa.Schema) -> None:
        if schema is self._checked or (self._checked is not None and schema.equals(self._checked)):
            return
        for given in self._inputs:
            for name in given.columns:
                if name not in schema.names:
                    raise ModelError(
                        f"torch_module: the input has no column {name!r} (it has: {', '.join(schema.names)}); name it in the source with AS, or "
                        f"correct inputs.{given.name}"
                    )
                problem = _misfit(given, schema.field(name).type)
                if problem:
                    raise ModelError(f"torch_module: inputs.{given.name}: column {name!r} is {schema.field(name).type}{problem}")
        self._checked = schema


# ---- what a view says


def _inputs(inputs: Mapping[str, Any], vocabularies: Mapping[str, Any]) -> tuple[Input, ...]:
    if not isinstance(inputs, Mapping) or not inputs:
        raise ConfigError(f"torch_module: inputs maps forward's arguments to columns, as in {{x: [price, age]}}; got {inputs!r}")
    for name, values in vocabularies.items():
        if not isinstance(values, (list, tuple, pa.Table)):
            raise ConfigError(
                f"torch_module: unknown argument {name!r}; a further argument is a vocabulary: a list, or {{sql: SELECT …}} of one column"
            )
    named = {name: _vocabulary(name, values) for name, values in vocabularies.items()}
    made = tuple(_input(name, spec, named) for name, spec in inputs.items())
    used = {
        spec["vocabulary"] for spec in inputs.values() if isinstance(spec, Mapping) and isinstance(spec.get("vocabulary"), str)
    }
    for name in named:
        if name not in used:
            raise ConfigError(
                f"torch_module: no input names the vocabulary {name!r}: inputs: {{…: {{column: …, vocabulary: {name}}}}}"
            )
    return made


def _input(name: str, spec: Any, vocabularies: Mapping[str, Mapping[str, int]]) -> Input:
    where = f"torch_module: inputs.{name}"
    if isinstance(spec, (str, list, tuple)):
        spec = {"column" if isinstance(spec, str) else "columns": spec}
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{where} is a column, a list of columns or a mapping, got {spec!r}")
    unknown = sorted(map(str, set(spec).difference(("column", "columns", "fill", "vocabulary", "dim"))))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; there are column, columns, fill, vocabulary and dim")
    if ("column" in spec) == ("columns" in spec):
        raise ConfigError(f"{where}: write one of both, column or columns")
    matrix = "columns" in spec
    columns = spec["columns"] if matrix else [spec["column"]]
    if not isinstance(columns, (list, tuple)) or not columns or not all(isinstance(c, str) for c in columns):
        raise ConfigError(
            f"{where}: {'columns is a list of names' if matrix else 'column is a name'}, got {spec.get('columns', spec.get('column'))!r}"
        )
    fill, dim, words = spec.get("fill"), spec.get("dim"), spec.get("vocabulary")
    if fill is not None and (isinstance(fill, bool) or not isinstance(fill, (int, float)) or not math.isfinite(fill)):
        raise ConfigError(f"{where}: fill is a number, got {fill!r}")
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 1):
        raise ConfigError(f"{where}: dim is a length from 1, got {dim!r}")
    if sum(option is not None for option in (fill, dim, words)) > 1 or (matrix and (dim is not None or words is not None)):
        raise ConfigError(
            f"{where}: fill is for numbers, dim for one list column and vocabulary for one text column, where null is {UNKNOWN} anyway; "
            "they do not go together"
        )
    if words is None:
        return Input(name, tuple(columns), matrix, fill, dim=dim)
    if isinstance(words, str):
        if words not in vocabularies:
            raise ConfigError(f"{where}: there is no vocabulary {words!r}; add `{words}: {{sql: SELECT …}}` to the model's args")
        return Input(name, tuple(columns), vocabulary=vocabularies[words])
    return Input(name, tuple(columns), vocabulary=_vocabulary(f"inputs.{name}.vocabulary", words))


def _vocabulary(name: str, values: Any) -> dict[str, int]:
    """Text of each value → 1, 2, …; 0 is :data:`UNKNOWN`."""
    if isinstance(values, pa.Table):
        if values.num_columns != 1:
            raise ConfigError(f"torch_module: {name} has {values.num_columns} columns; a vocabulary is one column of values")
        if not _is_category(values.column(0).type):
            raise ConfigError(f"torch_module: {name} is {values.column(0).type}; a vocabulary holds text or whole numbers")
        values = pc.cast(values.column(0), pa.string()).to_pylist()
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, (str, int)) and not isinstance(v, bool) for v in values):
        raise ConfigError(f"torch_module: {name} is a list of text or whole numbers without nulls")
    ids = {str(value): number for number, value in enumerate(values, UNKNOWN + 1)}
    if not ids:
        raise ConfigError(
            f"torch_module: {name} is empty; a vocabulary's first value has the id {UNKNOWN + 1}, {UNKNOWN} is null and unknown"
        )
    if len(ids) != len(values):
        twice = next(text for text, times in Counter(map(str, values)).items() if times > 1)
        raise ConfigError(
            f"torch_module: {name} has a value twice, {twice!r}: ids are places in the vocabulary, so each value has one (SELECT DISTINCT … ORDER BY 1)"
        )
    return ids


def _lists(vocabularies: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in vocabularies.items() if not isinstance(values, pa.Table)}


# ---- columns → tensors


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind))


def _is_category(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):  # what DuckDB's ENUM comes as
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind))


def _misfit(given: Input, kind: pa.DataType) -> str:
    """What is wrong with a column of this type, to stand after it; empty when it fits."""
    if given.vocabulary is not None:
        return "" if _is_category(kind) else ", not text or whole numbers: CAST it AS VARCHAR in the source"
    if _is_list(kind):
        if given.matrix:
            return ", a list among columns of numbers: make it an input of its own"
        if given.fill is not None:
            return ", and a list cannot be filled: COALESCE it in the source"
        if not _is_number(kind.value_type):
            return ", not a list of numbers"
        if pa.types.is_fixed_size_list(kind):
            return "" if given.dim in (None, kind.list_size) else f", not of {given.dim} numbers, as its dim says"
        return "" if given.dim is not None else f": say how long it is, as in {{column: {given.columns[0]}, dim: 64}}"
    if given.dim is not None:
        return ", not a list, which its dim says it is"
    if _is_number(kind):
        return ""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        return f", not numbers: give a vocabulary, as in {{column: {given.columns[0]}, vocabulary: [a, b]}}"
    return ", not numbers: CAST it in the source"


def _broken_lists(name: str, column: pa.Array, dim: int | None) -> dict[int, str]:
    bad: dict[int, str] = {}
    if dim is not None and not pa.types.is_fixed_size_list(column.type):
        lengths = pc.list_value_length(column)
        for row in pc.indices_nonzero(pc.fill_null(pc.not_equal(lengths, dim), False)).to_pylist():
            bad[row] = f"{name} has {lengths[row]} numbers, not {dim}"
    values = column.flatten()
    if values.null_count:
        rows = pc.list_parent_indices(column).filter(values.is_null())
        bad |= dict.fromkeys(pc.unique(rows).to_pylist(), f"{name} holds a null")
    return bad


def _tensor(given: Input, batch: pa.RecordBatch) -> torch.Tensor:
    """See :class:`Input`; shares the column's memory where its type is the tensor's."""
    if given.matrix:
        columns = [_filled(batch.column(name), given.fill) for name in given.columns]
        return torch.stack([from_dlpack(_as_float(column)) for column in columns], dim=1)
    column = batch.column(given.columns[0])
    if given.vocabulary is not None:
        return _ids(column, given.vocabulary)
    if _is_list(column.type):
        return _numbers(column.flatten()).view(len(column), -1)
    return _numbers(_filled(column, given.fill))


def _numbers(column: pa.Array) -> torch.Tensor:
    """int64 of whole numbers, else float32."""
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        return from_dlpack(pc.cast(column, pa.int64()))
    return from_dlpack(_as_float(column))


def _as_float(column: pa.Array) -> pa.Array:
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.uint8())
    return pc.cast(column, pa.float32(), safe=False)


def _filled(column: pa.Array, fill: float | None) -> pa.Array:
    if fill is None or not column.null_count:
        return column
    if pa.types.is_decimal(column.type):
        column = pc.cast(column, pa.float64())
    return pc.fill_null(column, pa.scalar(fill).cast(column.type))


def _ids(column: pa.Array, vocabulary: Mapping[str, int]) -> torch.Tensor:
    """int64 [rows]; only the batch's different values are looked up, since Arrow's own index_in hashes the whole vocabulary on every call."""
    encoded = pc.dictionary_encode(pc.cast(column, pa.string()))
    known = np.array([vocabulary.get(value, UNKNOWN) for value in encoded.dictionary.to_pylist()] + [UNKNOWN], np.int64)
    return torch.from_numpy(known[np.asarray(pc.fill_null(encoded.indices, -1))])


# ---- a class and its weights


def _constructed(path: str, args: Mapping[str, Any]) -> torch.nn.Module:
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise ConfigError(f"torch_module: module is package.module:Class or a file ending in .pt2, got {path!r}")
    try:
        factory = getattr(import_module(name, project_folder()), attribute, None)
    except Exception as exc:  # a user's module may fail in any way, a syntax error included
        raise ConfigError(f"torch_module: {path!r} cannot be imported: {told(exc)}") from exc
    if not (isinstance(factory, type) and issubclass(factory, torch.nn.Module)):
        raise ConfigError(
            f"torch_module: {path!r}: "
            + (f"module {name!r} has no class {attribute!r}" if factory is None else "not a torch.nn.Module")
        )
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as exc:
        raise ConfigError(f"torch_module: {path} does not take these args ({', '.join(args) or 'none'}): {exc}") from exc
    try:
        return factory(**args)
    except Exception as exc:  # a user's class may raise anything
        raise ModelError(f"torch_module: {path} failed to load: {told(exc)}") from exc


def _check_takes(path: str, module: torch.nn.Module, names: Sequence[str]) -> None:
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as exc:
        raise ConfigError(f"torch_module: {path} has forward{signature}; inputs names {', '.join(names)}: {exc}") from exc


def _load_state(path: str, module: torch.nn.Module, weights: str | None) -> None:
    if weights is None:
        state = list(module.state_dict())
        if state:
            raise ConfigError(
                f"torch_module: {path} has weights ({_some(state)}) and none were given: set `weights` to a safetensors file"
            )
        return
    file = resolve_path(weights)
    try:
        missing, unexpected = load_model(module, file, strict=False)
    except (OSError, RuntimeError, SafetensorError) as exc:  # RuntimeError: weights of another shape, by name
        raise ModelError(f"torch_module: {file} does not load into {path}: {exc}") from exc
    for names, what in ((missing, "has no weights for"), (unexpected, f"has weights that {path} does not:")):
        if names:
            raise ModelError(f"torch_module: {file} {what} {_some(names)}; give the class, args and weights of one model")


def _some(names: Sequence[str] | set[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _sources(module: torch.nn.Module) -> dict[str, Path]:
    """The file of each class that makes up the module, torch's own apart."""
    found = {}
    for owner in {c for part in module.modules() for c in type(part).__mro__}:
        if owner.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        try:
            file = inspect.getsourcefile(owner)
        except TypeError:  # made in a running program
            continue
        if file is not None and Path(file).is_file():
            found[f"{plain_name(owner.__module__)}:{owner.__qualname__}"] = Path(file)
    return found


# ---- an exported program

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
    """Load what ``torch.export.save`` wrote, after packing it anew without anything that would be run while loading; see this file's head.

    Raises:
        ModelError: it is no such file, of an older format, exported in training mode, or refused for what it holds.
    """
    packed = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w") as out:
            found = {name.partition("/")[2]: name for name in archive.namelist()}
            missing = [name for name in ("models/model.json", *_CONFIGS) if name not in found]
            if missing:
                raise ModelError(
                    f"torch_module: {path} has no {missing[0]}: save it with torch.export.save of torch 2.9 or later"
                )
            raw = _raw_tensors(path, {name: json.loads(archive.read(found[name])) for name in _CONFIGS})
            for name in (*_COPIED, *_CONFIGS, *sorted(raw)):
                if name in found:
                    data = archive.read(found[name])
                    out.writestr(f"archive/{name}", _checked_program(path, data) if name == "models/model.json" else data)
            out.writestr(f"archive/{_SAMPLES}", b"")
        packed.seek(0)
        program = torch.export.load(packed)
    except ModelError:
        raise
    except Exception as exc:  # zipfile, json and torch raise whatever a damaged file makes them
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
    elif isinstance(value, str) and key in ("in_spec", "out_spec", "context"):  # JSON inside JSON
        if value:
            _check_text(path, json.loads(value), "")
    elif isinstance(value, str) and not _FORMS.get(key, _NAME).fullmatch(value):
        raise _refused(path, f"{key or 'a text'} {value[:80]!r}")


def _takes(program: torch.export.ExportedProgram, path: Path) -> tuple[list[str], list[str], int | None]:
    """(arguments by position, arguments by name, most rows of a batch).

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
        if bounds.lower > 2:  # 2 is what torch writes for "any, but 0 and 1 were not tried"
            raise ModelError(
                f"torch_module: {path} takes at least {bounds.lower} rows of {name}: export it with torch.export.Dim('rows')"
            )
        if bounds.upper < 2**31:
            limit = min(int(bounds.upper), limit or 2**31)
    # a program knows the names of its keyword arguments itself; their placeholders may be called otherwise
    keywords = list(named.context or [])
    return list(names[: len(names) - len(keywords)]), keywords, limit


def _program_flops(program: torch.export.ExportedProgram) -> float:
    weights = [n.args[1].meta["val"] for n in program.graph.nodes if str(n.target) == "aten.linear.default"]
    return sum(2.0 * math.prod(map(int, w.shape)) for w in weights)
