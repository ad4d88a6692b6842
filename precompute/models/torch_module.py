"""Torch module: any :class:`torch.nn.Module`, or a program that ``torch.export.save`` wrote, over
columns of numbers, vectors and categories. How a view writes it: docs/reference.md."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from safetensors.torch import load_model

from precompute.engine.rows import side_by_side
from precompute.foreign_file import KnownKeys
from precompute.model import Prepared, Verbatim, digest, plain_name, project_folder, resolve_path
from precompute.models.device import Device, Fetch
from precompute.models.exported_program import (
    Columns,
    is_list,
    is_pure,
    load_program,
    parse_inputs,
    program_flops,
    takes,
)
from precompute.models.torch_model import Tensors, TorchModel
from precompute.registry import classes_of, described, import_module, modules_beside, unfit_argument
from precompute.safetensors_file import SCALES, opened
from precompute.store.errors import ConfigError, ModelError, did_you_mean, nearest_or_all

CODE_VERSION = 2
"""Raised with each change of the values that this code computes; part of the fingerprint. 2: a
fraction fills the nulls of truth values as it is."""

_QUANTIZED = "its weights are quantized: save them as floats, multiplied by their scales"
TORCH_METADATA = KnownKeys(
    "the metadata of a module's safetensors",
    harmless={"*": "a note, or the name of a tensor that is another one, too"},
    fixed={"format": ("pt", "np")},
)
TORCH_WEIGHTS = KnownKeys(
    "a module's safetensors",
    used=("*",),
    refused=dict.fromkeys((*SCALES, "*scale", "*scales", "*scale_inv"), _QUANTIZED),
)
"""Of tensors that the module has not; those that it has are its own."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls a type → torch's; any other is of no module that is loaded here."""


class Called(torch.nn.Module):
    """A module behind one face: tensors in the order of the inputs → a tuple of tensors in the
    order of ``wanted``.

    Args:
        module: takes the first ``len(inputs) - len(keywords)`` tensors by position and the rest by
            name.
        keywords: those names.
        wanted: position or key of each output.
        program: whether it is an exported program, which has no training mode to leave.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        keywords: Sequence[str],
        wanted: Sequence[int | str],
        *,
        program: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self.keywords = tuple(keywords)
        self.wanted = tuple(wanted)
        self.program = program

    def train(self, mode: bool = True) -> Called:
        """A program stays as it was exported."""
        return self if self.program else super().train(mode)

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        """Raises:
        ModelError: the module returns something other than ``outputs`` names.
        """
        split = len(tensors) - len(self.keywords)
        returned = self.module(
            *tensors[:split], **dict(zip(self.keywords, tensors[split:], strict=True))
        )
        outputs: Mapping[Any, Any]
        if isinstance(returned, torch.Tensor):
            if self.wanted == (0,):
                return (returned,)
            outputs = {0: returned}
        elif isinstance(returned, (tuple, list)):
            outputs = dict(enumerate(returned))
        elif isinstance(returned, Mapping):
            outputs = returned
        else:
            raise ModelError(
                f"torch_module: the module returns {type(returned).__name__}, not a tensor, a tuple"
                " or a dict of them"
            )
        for key in self.wanted:
            if key not in outputs:
                raise ModelError(
                    f"torch_module: outputs names {key!r}, but the module returns"
                    f" {', '.join(map(repr, outputs)) or 'nothing'}"
                )
            if not isinstance(outputs[key], torch.Tensor):
                raise ModelError(
                    f"torch_module: the module's output {key!r} is {type(outputs[key]).__name__},"
                    " not a tensor"
                )
        return tuple([outputs[key] for key in self.wanted])


class TorchModule(TorchModel):
    """Runs a module over columns; see docs/reference.md for how a view writes it.

    Args:
        module: ``package.module:Class`` of a :class:`torch.nn.Module`, or a path ending in
            ``.pt2``; ``package:name/file.pt2`` inside a package.
        inputs: the names that ``forward`` gives its arguments → a column, a list of columns, or a
            mapping with ``column`` or ``columns`` and ``fill`` (a number in place of nulls),
            ``vocabulary`` (a list, or the name of one of ``vocabularies``) or ``dim``.
        outputs: feature → position in the tuple or key in the dict that the module returns; 0 of a
            single tensor. [rows] and [rows, 1] are one value a row, [rows, dim] is a vector.
        args: keyword arguments of the class.
        weights: safetensors file of its state; leave it out for a module that has none.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.
        max_cost: rows in one batch; by default what the engine finds best.
        concurrent: whether its forward may run in several threads at once, since it keeps nothing
            from one call to the next: on a CPU the engine then tries several batches at once. By
            default false of a class, which alone knows, and seen in a program.
        vocabularies: any other argument: a list of values, or a table of one column (``{sql: SELECT
            …}``), for inputs to name. Its first value has the id 1, the second 2, and so on in its
            order; 0 is null and what it has not. So an embedding of n values has n + 1 rows.

    Raises:
        ConfigError: an argument that is wrong in itself, no such class or file, or inputs that
            ``forward`` does not take.
        ModelError: the class, the weights or the program does not load; a program that is refused,
            or that takes a fixed number of rows.
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
        concurrent: bool | None = None,
        **vocabularies: Any,
    ) -> None:
        self._inputs = parse_inputs(inputs, vocabularies)
        _check_outputs(outputs)
        if max_cost is not None and (
            isinstance(max_cost, bool) or not isinstance(max_cost, int) or max_cost < 1
        ):
            raise ConfigError(
                f"torch_module: max_cost is a number of rows from 1, got {max_cost!r}"
            )
        runs_on, names = Device(device), [i.name for i in self._inputs]
        is_program = module.endswith(".pt2")
        if is_program:
            if args or weights is not None:
                raise ConfigError(
                    "torch_module: a .pt2 holds its own weights and takes no arguments: leave out"
                    " `args` and `weights`"
                )
            loaded = _from_program(resolve_path(module), names, runs_on)
        else:
            loaded = _from_class(module, args or {}, weights, names)
        self.max_cost = (
            max_cost
            if loaded.max_rows is None
            else min(loaded.max_rows, max_cost or loaded.max_rows)
        )
        if concurrent not in (None, True, False):
            raise ConfigError(f"torch_module: concurrent is true or false, got {concurrent!r}")
        self.concurrent = loaded.pure if concurrent is None else concurrent
        self._flops, self._files = loaded.flops, loaded.files
        self._features = tuple(outputs)
        self._facts = loaded.facts | {
            "inputs": Verbatim(dict(inputs)),
            "outputs": Verbatim(dict(outputs)),
            "vocabularies": Verbatim(
                {n: list(v) for n, v in vocabularies.items() if not isinstance(v, pa.Table)}
            ),
        }
        self._inputs = tuple(
            next(i for i in self._inputs if i.name == name) for name in loaded.arguments
        )
        self._checked: pa.Schema | None = None
        self._lists = False
        super().__init__(
            Called(loaded.module, loaded.keywords, tuple(outputs.values()), program=is_program),
            runs_on,
        )

    def fingerprint(self) -> str:
        """Weights, class (its dotted path, and the bytes of the file that it and each class of its
        parts stands in, torch's own apart) or program, arguments, inputs, outputs and code version.
        A table of a vocabulary is added by the caller, as of every table argument.
        """
        return digest(code=CODE_VERSION, files=self._files, **self._facts)

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """2 for each weight of a linear layer, a row; what other layers need is not counted."""
        return self._flops * len(rows)

    def reads(self) -> list[str]:
        return [name for argument in self._inputs for name in argument.columns]

    def _columns(self, batch: pa.RecordBatch) -> Columns:
        schema = batch.schema
        if self._checked is None or not schema.equals(self._checked):
            for argument in self._inputs:
                argument.check(schema)
            self._lists = any(
                is_list(schema.field(name).type)
                for argument in self._inputs
                for name in argument.columns
            )
            # last: another thread goes by it
            self._checked = schema
        return {name: batch.column(name) for argument in self._inputs for name in argument.columns}

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """The tensors of all rows; each row costs 1. Bad are those with a null that nothing fills,
        or a list of another length.

        Measured for 8,192 rows: 0.02 ms for an id, 0.03 ms for three numbers as a matrix, 0.2 ms
        for text of 20 values and 3 ms for text that is different in every row.

        Raises:
            ModelError: a column is of a type that its input does not take.
        """
        columns = self._columns(batch)
        bad: dict[int, str] = {}
        if self._lists or any(column.null_count for column in columns.values()):
            for argument in self._inputs:
                bad |= argument.unusable(columns)
        if bad:
            # they stand in the way of whole columns: another row's values take their places, and
            # are not computed
            good = np.setdiff1d(np.arange(batch.num_rows), list(bad))
            if not len(good):
                return Prepared(np.ones(batch.num_rows, np.int64), (), bad)
            rows = np.full(batch.num_rows, good[0])
            rows[good] = good
            columns = self._columns(batch.take(pa.array(rows)))
        return Prepared(
            np.ones(batch.num_rows, np.int64),
            tuple([argument.tensor(columns) for argument in self._inputs]),
            bad,
        )

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        """The tensors in the order of the module's arguments; neighbouring rows are views of what
        was prepared."""
        whole: Tensors = prepared.payload
        if len(rows) == len(prepared.costs) == 1:
            return whole
        chosen = side_by_side(rows) or torch.from_numpy(rows)
        return tuple([t[chosen] for t in whole])

    def launch(self, inputs: Tensors) -> Fetch:
        """Raises:
        ModelError: the module changed its input: that is the source's own memory, and what a second
            try would compute from.
        """
        before = [t._version for t in inputs]
        launched = super().launch(inputs)
        for argument, tensor, version in zip(self._inputs, inputs, before, strict=True):
            if tensor._version != version:
                raise ModelError(
                    f"torch_module: the module writes into its input {argument.name!r}: let it work"
                    " on a clone()"
                )
        return launched

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Each feature, [rows] or [rows, dim], of the module's dtype.

        Raises:
            ModelError: an output of another shape.
        """
        made = {}
        for feature, values in zip(self._features, outputs, strict=True):
            if values.ndim not in (1, 2):
                raise ModelError(
                    f"torch_module: output {feature!r} has shape {list(values.shape)}, not [rows]"
                    " or [rows, dim]"
                )
            made[feature] = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        return made


def _check_outputs(outputs: Any) -> None:
    if not isinstance(outputs, Mapping) or not outputs:
        raise ConfigError(
            "torch_module: outputs maps features to positions or keys, as in {relevance: 0}; got"
            f" {outputs!r}"
        )
    for feature, key in outputs.items():
        if (
            isinstance(key, bool)
            or not isinstance(key, (int, str))
            or (isinstance(key, int) and key < 0)
        ):
            raise ConfigError(
                f"torch_module: outputs.{feature} is a position from 0 or a key, got {key!r}"
            )


@dataclass(slots=True)
class _Loaded:
    """A module as it was loaded, and what is to be known of it: its ``arguments`` in their order,
    of which the last are ``keywords``; the ``files`` and ``facts`` of its fingerprint; ``flops`` of
    one row; ``max_rows`` of a batch; and whether it was seen to be ``pure``.
    """

    module: torch.nn.Module
    arguments: Sequence[str]
    keywords: Sequence[str]
    files: dict[str, Path]
    facts: dict[str, Any]
    flops: float
    max_rows: int | None = None
    pure: bool = False


def _from_program(path: Path, names: Sequence[str], device: Device) -> _Loaded:
    program = load_program(path)
    positional, keywords, max_rows = takes(program, path)
    arguments = [*positional, *keywords]
    if sorted(arguments) != sorted(names):
        raise ConfigError(
            f"torch_module: {path} takes {', '.join(arguments)}; inputs names {', '.join(names)}"
        )
    flops = program_flops(program)
    if device.is_cuda:
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device.torch)
    return _Loaded(
        program.module(),
        arguments,
        keywords,
        {"program": path},
        {},
        flops,
        max_rows,
        is_pure(program),
    )


def _from_class(
    path: str, args: Mapping[str, Any], weights: str | None, names: Sequence[str]
) -> _Loaded:
    module = _constructed(path, args)
    _check_takes(path, module, names)
    _load_state(path, module, weights)
    files = {f"source of {owner}": file for owner, file in _sources(module).items()}
    if weights is not None:
        files["weights"] = resolve_path(weights)
    flops = sum(2.0 * m.weight.numel() for m in module.modules() if isinstance(m, torch.nn.Linear))
    return _Loaded(module, names, names, files, {"class": path, "args": dict(args)}, flops)


def _constructed(path: str, args: Mapping[str, Any]) -> torch.nn.Module:
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise ConfigError(
            f"torch_module: module is package.module:Class or a file ending in .pt2, got {path!r}"
        )
    try:
        imported = import_module(name, project_folder())
        factory = getattr(imported, attribute, None)
    except Exception as exc:
        # a user's module may fail in any way, a syntax error included
        beside = (
            modules_beside(name, project_folder()) if isinstance(exc, ModuleNotFoundError) else []
        )
        near = did_you_mean(name, beside)
        raise ConfigError(
            f"torch_module: {path!r} cannot be imported: {described(exc)}{near}"
        ) from exc
    if not (isinstance(factory, type) and issubclass(factory, torch.nn.Module)):
        near = nearest_or_all(attribute, classes_of(imported, ("forward",)))
        what = (
            f"module {name!r} has no class {attribute!r}{near}"
            if factory is None
            else "not a torch.nn.Module"
        )
        raise ConfigError(f"torch_module: {path!r}: {what}")
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as exc:
        raise ConfigError(
            f"torch_module: args: {path} {unfit_argument(factory, args) or exc}"
        ) from exc
    try:
        return factory(**args)
    except Exception as exc:
        # a user's class may raise anything
        raise ModelError(f"torch_module: {path} failed to load: {described(exc)}") from exc


def _check_takes(path: str, module: torch.nn.Module, names: Sequence[str]) -> None:
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as exc:
        raise ConfigError(
            f"torch_module: {path} has forward{signature}; inputs names {', '.join(names)}: {exc}"
        ) from exc


def _load_state(path: str, module: torch.nn.Module, weights: str | None) -> None:
    if weights is None:
        state = list(module.state_dict())
        if state:
            raise ConfigError(
                f"torch_module: {path} has weights ({_some(state)}) and none were given: set"
                " `weights` to a safetensors file"
            )
        return
    file = resolve_path(weights)
    _check_types(path, module, file)
    try:
        missing, unexpected = load_model(module, file, strict=False)
    except RuntimeError as exc:
        # weights of another shape, by name
        raise ModelError(f"torch_module: {file} does not load into {path}: {exc}") from exc
    TORCH_WEIGHTS.check(unexpected, file, "torch_module")
    for names, what in (
        (missing, "has no weights for"),
        (unexpected, f"has weights that {path} does not:"),
    ):
        if names:
            raise ModelError(
                f"torch_module: {file} {what} {_some(names)}; give the class, args and weights of"
                " one model"
            )


def _check_types(path: str, module: torch.nn.Module, file: Path) -> None:
    """Refuse weights that the module could not hold as they are: torch casts them in silence.

    Raises:
        ConfigError: a type that is not the module's, nor a narrower one of its kind.
        ModelError: the file is damaged, or no safetensors file.
    """
    own = module.state_dict()
    with opened(file, "torch_module") as weights:
        TORCH_METADATA.check(weights.metadata() or {}, file, "torch_module")
        given = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    for name in sorted(given.keys() & own.keys()):
        kind, wanted = DTYPES.get(given[name]), own[name].dtype
        if kind is None or (
            kind != wanted
            and (
                torch.bool in (kind, wanted)
                or kind.is_floating_point != wanted.is_floating_point
                or torch.promote_types(kind, wanted) != wanted
            )
        ):
            raise ConfigError(
                f"torch_module: {file}: {name} is {given[name]}, and {path} has it as"
                f" {str(wanted).removeprefix('torch.')}: a cast would lose digits, or the weights"
                " are quantized. Save them in the module's type, or let the class make it theirs"
            )


def _some(names: Sequence[str] | set[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _sources(module: torch.nn.Module) -> dict[str, Path]:
    """The file of each class that makes up the module, torch's own apart."""
    files = {}
    for owner in {c for part in module.modules() for c in type(part).__mro__}:
        if owner.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        try:
            file = inspect.getsourcefile(owner)
        except TypeError:
            # made in a running program
            continue
        if file is not None and Path(file).is_file():
            files[f"{plain_name(owner.__module__)}:{owner.__qualname__}"] = Path(file)
    return files
