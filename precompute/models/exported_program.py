"""Exported program: a file of ``torch.export.save``, loaded without its pickles, and the inputs
that it or a module takes.

A ``.pt2`` is packed again before it is loaded: the program and its raw tensors go in, pickled
objects do not. It is code all the same, as a module's class is: torch evaluates what it says of its
sizes.
"""

from __future__ import annotations

import io
import math
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
from torch.utils.dlpack import from_dlpack

from precompute.foreign_file import KnownKeys, key_paths, parsed_json, what_it_is
from precompute.store.errors import ConfigError, ModelError, PrecomputeError

_COPIED = ("archive_format", "archive_version", "byteorder", ".data/version", "models/model.json")
_WEIGHTS, _CONSTANTS, _SAMPLES = "data/weights/", "data/constants/", "data/sample_inputs/model.pt"
_CONFIGS = (f"{_WEIGHTS}model_weights_config.json", f"{_CONSTANTS}model_constants_config.json")
PROGRAM_ARCHIVE = KnownKeys(
    "the archive of an exported program",
    used=(*_COPIED, *_CONFIGS, f"{_WEIGHTS}weight_*", f"{_CONSTANTS}tensor_*"),
    harmless={
        _SAMPLES: "a pickle of the inputs that it was exported with: it is left out",
        ".data/serialization_id": "the archive's own number",
        "extra/*": "files of whoever saved it, which no program reads",
    },
    refused={"data/aotinductor/*": "code for one machine: save the program with torch.export.save"},
)
PROGRAM_JSON = KnownKeys(
    "an exported program",
    used=(
        "graph_module",
        "opset_version",
        "range_constraints",
        "schema_version",
        "verifiers",
        "guards_code",
        *(
            f"graph_module.{key}"
            for key in (
                "graph",
                "signature",
                "module_call_graph",
                "metadata",
                "treespec_namedtuple_fields",
            )
        ),
    ),
    harmless={"torch_version": "the schema's version is what torch compares"},
)
"""What is in a graph is torch's own schema, which torch reads by its version."""
PROGRAM_TENSORS = KnownKeys(
    "the tensors of an exported program",
    used=(
        "config",
        "config{}.path_name",
        "config{}.is_param",
        "config{}.use_pickle",
        "config{}.tensor_meta",
        *(
            f"config{{}}.tensor_meta.{key}"
            for key in (
                "dtype",
                "sizes",
                "sizes[].as_int",
                "strides",
                "strides[].as_int",
                "storage_offset",
                "storage_offset.as_int",
                "layout",
            )
        ),
    ),
    harmless={
        "config{}.tensor_meta.requires_grad": "nothing is trained",
        "config{}.tensor_meta.device*": "where it was exported; it is moved to where it is run",
    },
)


def load_program(path: Path) -> torch.export.ExportedProgram:
    """Load what ``torch.export.save`` wrote, packed again without its pickles.

    Raises:
        ConfigError: it holds what is not known.
        ModelError: it is no such file, of an older format, damaged, or refused for its pickles.
    """
    packed = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w") as out:
            files = {name.partition("/")[2]: name for name in archive.namelist()}
            missing = [name for name in ("models/model.json", *_CONFIGS) if name not in files]
            if missing:
                raise ModelError(
                    f"torch_module: {path} has no {missing[0]}: save it with torch.export.save of"
                    " torch 2.9 or later"
                )
            raw = _raw_tensors(
                path,
                {
                    name: parsed_json(archive.read(files[name]), path, "torch_module")
                    for name in _CONFIGS
                },
            )
            _check_members(path, archive.namelist(), raw)
            program = parsed_json(archive.read(files["models/model.json"]), path, "torch_module")
            inner = {f"graph_module.{key}": 0 for key in program["graph_module"]}
            PROGRAM_JSON.check({**program, **inner}, path, "torch_module")
            for name in (*_COPIED, *_CONFIGS, *sorted(raw)):
                if name in files:
                    out.writestr(f"archive/{name}", archive.read(files[name]))
            out.writestr(f"archive/{_SAMPLES}", b"")
        packed.seek(0)
        loaded = torch.export.load(packed)
    except PrecomputeError:
        raise
    except Exception as exc:
        # zipfile, json and torch raise whatever a damaged file makes them
        is_a = what_it_is(path)
        if is_a is None or is_a.startswith("a zip"):
            is_a = f"{type(exc).__name__}: {exc}"
        else:
            is_a = f"it is {is_a}"
        raise ModelError(f"torch_module: {path} does not load: {is_a}") from exc
    _check_types(path, loaded)
    return loaded


def _check_members(path: Path, members: Sequence[str], raw: set[str]) -> None:
    """Raises:
    ConfigError: an archive has what is not known, or a tensor that its program has not.
    ModelError: it has a member twice.
    """
    names = [name.partition("/")[2] for name in members]
    if len(set(names)) < len(names):
        raise ModelError(f"torch_module: {path} is damaged: it has a member twice")
    PROGRAM_ARCHIVE.check(names, path, "torch_module")
    tensors = {name for name in names if name.startswith((_WEIGHTS, _CONSTANTS))} - {*_CONFIGS}
    if extra := sorted(tensors - raw):
        raise ConfigError(
            f"torch_module: {path} has {extra[0]}, which its program does not name: save it again"
            " with torch.export.save"
        )


def _check_types(path: Path, program: torch.export.ExportedProgram) -> None:
    """Raises:
    ModelError: a tensor is of another type or shape than the program computes with: the bytes
        would be read as other numbers.
    """
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in names:
            continue
        name, wanted = names[node.name], node.meta["val"]
        tensor = program.state_dict.get(name, program.constants.get(name))
        if tensor is None or (tensor.dtype, tensor.shape) != (wanted.dtype, wanted.shape):
            raise ModelError(
                f"torch_module: {path} is damaged: the program takes {name} as {wanted.dtype}"
                f" {list(wanted.shape)}, and its tensor is another"
            )


def _raw_tensors(path: Path, configs: Mapping[str, Any]) -> set[str]:
    """Files of tensors that are stored as plain bytes."""
    names = set()
    for config, body in configs.items():
        PROGRAM_TENSORS.check(key_paths(body, maps=("config",)), path, "torch_module")
        for name, entry in body["config"].items():
            if entry["use_pickle"] or not entry["path_name"].startswith(("weight_", "tensor_")):
                raise ModelError(
                    f"torch_module: {path} is refused: {name!r} is a pickled object. Export a"
                    " module of plain operators, or give its class and a safetensors file"
                )
            names.add(config.rpartition("/")[0] + "/" + entry["path_name"])
    return names


def takes(
    program: torch.export.ExportedProgram, path: Path
) -> tuple[list[str], list[str], int | None]:
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
            f"torch_module: {path} takes something other than tensors; export a module whose"
            " forward takes only those"
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
                f"torch_module: {path} takes at least {bounds.lower} rows of {name}: export it with"
                " torch.export.Dim('rows')"
            )
        if bounds.upper < 2**31:
            limit = min(int(bounds.upper), limit or 2**31)
    # a program knows the names of its keyword arguments itself; their placeholders may be called
    # otherwise
    keywords = list(named.context or [])
    return list(names[: len(names) - len(keywords)]), keywords, limit


def program_flops(program: torch.export.ExportedProgram) -> float:
    """Operations for one row: 2 for each weight of a linear layer."""
    weights = [
        n.args[1].meta["val"] for n in program.graph.nodes if str(n.target) == "aten.linear.default"
    ]
    return sum(2.0 * math.prod(map(int, w.shape)) for w in weights)


def is_pure(program: torch.export.ExportedProgram) -> bool:
    """Whether it writes nothing but what it returns: then it may run in several threads at once."""
    return not any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for node in program.graph.nodes
    ) and not (program.graph_signature.buffers_to_mutate)


_LISTS = frozenset(
    kind.id for kind in (pa.list_(pa.null()), pa.large_list(pa.null()), pa.list_(pa.null(), 1))
)

FLOAT32_MAX = float(np.finfo(np.float32).max)

UNKNOWN = 0
"""Id of null, and of what the vocabulary has not."""

Columns = Mapping[str, pa.Array]
"""A batch's, by name."""


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the module.

    ``matrix`` tells [rows, columns] from the one column's own shape; ``vocabulary`` maps text to
    its id; ``dim`` is the length of a list.
    """

    name: str
    columns: tuple[str, ...]
    matrix: bool = False
    fill: float | None = None
    vocabulary: Mapping[str, int] | None = None
    dim: int | None = None

    def check(self, schema: pa.Schema) -> None:
        """Raises:
        ModelError: a column is of a type that this input does not take.
        """
        for name in self.columns:
            kind = schema.field(name).type
            if problem := self._misfit(kind):
                raise ModelError(
                    f"torch_module: inputs.{self.name}: column {name!r} is {kind}{problem}"
                )

    def unusable(self, columns: Columns) -> dict[int, str]:
        """Row → why it makes no tensor: a null that nothing fills, or a list of another length."""
        bad: dict[int, str] = {}
        if self.vocabulary is not None or self.fill is not None:
            return bad
        for name in self.columns:
            column = columns[name]
            if column.null_count:
                bad |= dict.fromkeys(
                    pc.indices_nonzero(column.is_null()).to_pylist(), f"{name} is null"
                )
            if is_list(column.type):
                bad |= _broken_lists(name, column, self.dim)
        return bad

    def tensor(self, columns: Columns) -> torch.Tensor:
        """The input for all rows; shares the column's memory where its type is the tensor's."""
        column = columns[self.columns[0]]
        if self.matrix:
            matrix = np.empty((len(column), len(self.columns)), np.float32)
            # a number too large for float32 is infinite
            with np.errstate(over="ignore"):
                for place, name in enumerate(self.columns):
                    matrix[:, place] = _as_numbers(_without_nulls(columns[name]))
                    self._fill(matrix[:, place], columns[name])
            return torch.from_numpy(matrix)
        if self.vocabulary is not None:
            return _ids(column, self.vocabulary)
        if is_list(column.type):
            return _numbers(column.flatten()).view(len(column), -1)
        made = _numbers(_without_nulls(column))
        self._fill(made.numpy(), column)
        return made

    def _fill(self, made: npt.NDArray[Any], column: pa.Array) -> None:
        """Write ``fill`` where the column has a null; by itself a column's type may not hold it."""
        if self.fill is not None and column.null_count:
            made[np.asarray(column.is_null())] = self.fill

    def _misfit(self, kind: pa.DataType) -> str:
        """What is wrong with a column of this type, to stand after it; empty when it fits."""
        if self.vocabulary is not None:
            return (
                ""
                if _is_category(kind)
                else ", not text or whole numbers: CAST it AS VARCHAR in the source"
            )
        if is_list(kind):
            if self.matrix:
                return ", a list among columns of numbers: make it an input of its own"
            if self.fill is not None:
                return ", and a list cannot be filled: COALESCE it in the source"
            if not _is_number(kind.value_type):
                return ", not a list of numbers"
            if pa.types.is_fixed_size_list(kind):
                return (
                    ""
                    if self.dim in (None, kind.list_size)
                    else f", not of {self.dim} numbers, as its dim says"
                )
            return (
                ""
                if self.dim is not None
                else f": say how long it is, as in {{column: {self.columns[0]}, dim: 64}}"
            )
        if self.dim is not None:
            return ", not a list, which its dim says it is"
        if _is_number(kind):
            whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
            if whole and not self.matrix and self.fill is not None and self.fill % 1:
                return f", whole numbers, and its fill {self.fill} is none: CAST it AS FLOAT"
            if whole and not self.matrix and not -(2**63) <= (self.fill or 0) < 2**63:
                return f", whole numbers of 64 bits, which cannot hold its fill {self.fill}"
            return ""
        if (
            pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_dictionary(kind)
        ):
            return (
                f", not numbers: give a vocabulary, as in {{column: {self.columns[0]}, vocabulary:"
                " [a, b]}"
            )
        return ", not numbers: CAST it in the source"


def parse_inputs(inputs: Mapping[str, Any], vocabularies: Mapping[str, Any]) -> tuple[Input, ...]:
    """What a view says of the module's arguments.

    Args:
        inputs: argument → a column, a list of columns or a mapping.
        vocabularies: name → list of values, or a table of one column.

    Raises:
        ConfigError: it says what is wrong, and where.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise ConfigError(
            "torch_module: inputs maps forward's arguments to columns, as in {x: [price, age]};"
            f" got {inputs!r}"
        )
    for name, values in vocabularies.items():
        if not isinstance(values, (list, tuple, pa.Table)):
            raise ConfigError(
                f"torch_module: unknown argument {name!r}; a further argument is a vocabulary: a"
                " list, or {sql: SELECT …} of one column"
            )
    named = {name: _vocabulary(name, values) for name, values in vocabularies.items()}
    made = tuple(_input(name, spec, named) for name, spec in inputs.items())
    used = {
        spec["vocabulary"]
        for spec in inputs.values()
        if isinstance(spec, Mapping) and isinstance(spec.get("vocabulary"), str)
    }
    for name in named:
        if name not in used:
            raise ConfigError(
                f"torch_module: no input names the vocabulary {name!r}: inputs: {{…: {{column: …,"
                f" vocabulary: {name}}}}}"
            )
    return made


def _input(name: str, spec: Any, vocabularies: Mapping[str, Mapping[str, int]]) -> Input:
    where = f"torch_module: inputs.{name}"
    if isinstance(spec, (str, list, tuple)):
        spec = {"column" if isinstance(spec, str) else "columns": spec}
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{where} is a column, a list of columns or a mapping, got {spec!r}")
    unknown = sorted(
        map(str, set(spec).difference(("column", "columns", "fill", "vocabulary", "dim")))
    )
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r}; there are column, columns, fill, vocabulary"
            " and dim"
        )
    if ("column" in spec) == ("columns" in spec):
        raise ConfigError(f"{where}: write one of both, column or columns")
    matrix = "columns" in spec
    columns = spec["columns"] if matrix else [spec["column"]]
    if (
        not isinstance(columns, (list, tuple))
        or not columns
        or not all(isinstance(c, str) for c in columns)
    ):
        raise ConfigError(
            f"{where}: {'columns is a list of names' if matrix else 'column is a name'}, got"
            f" {spec.get('columns', spec.get('column'))!r}"
        )
    fill, dim, words = spec.get("fill"), spec.get("dim"), spec.get("vocabulary")
    if fill is not None and (
        isinstance(fill, bool)
        or not isinstance(fill, (int, float))
        # nor is NaN
        or not abs(fill) <= FLOAT32_MAX
    ):
        raise ConfigError(f"{where}: fill is a number that float32 holds, got {fill!r:.80}")
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 1):
        raise ConfigError(f"{where}: dim is a length from 1, got {dim!r}")
    if sum(option is not None for option in (fill, dim, words)) > 1 or (
        matrix and (dim is not None or words is not None)
    ):
        raise ConfigError(
            f"{where}: fill is for numbers, dim for one list column and vocabulary for one text"
            f" column, where null is {UNKNOWN} anyway; they do not go together"
        )
    if words is None:
        return Input(name, tuple(columns), matrix, fill, dim=dim)
    if isinstance(words, str):
        if words not in vocabularies:
            raise ConfigError(
                f"{where}: there is no vocabulary {words!r}; add `{words}: {{sql: SELECT …}}` to"
                " the model's args"
            )
        return Input(name, tuple(columns), vocabulary=vocabularies[words])
    return Input(name, tuple(columns), vocabulary=_vocabulary(f"inputs.{name}.vocabulary", words))


def _vocabulary(name: str, values: Any) -> dict[str, int]:
    """Text of each value → 1, 2, …; 0 is :data:`UNKNOWN`."""
    if isinstance(values, pa.Table):
        if values.num_columns != 1:
            raise ConfigError(
                f"torch_module: {name} has {values.num_columns} columns; a vocabulary is one column"
                " of values"
            )
        if not _is_category(values.column(0).type):
            raise ConfigError(
                f"torch_module: {name} is {values.column(0).type}; a vocabulary holds text or whole"
                " numbers"
            )
        values = pc.cast(values.column(0), pa.string()).to_pylist()
    if not isinstance(values, (list, tuple)) or not all(
        isinstance(v, (str, int)) and not isinstance(v, bool) for v in values
    ):
        raise ConfigError(f"torch_module: {name} is a list of text or whole numbers without nulls")
    ids = {str(value): number for number, value in enumerate(values, UNKNOWN + 1)}
    if not ids:
        raise ConfigError(
            f"torch_module: {name} is empty; a vocabulary's first value has the id {UNKNOWN + 1},"
            f" {UNKNOWN} is null and unknown"
        )
    if len(ids) != len(values):
        twice = next(text for text, times in Counter(map(str, values)).items() if times > 1)
        raise ConfigError(
            f"torch_module: {name} has a value twice, {twice!r}: ids are places in the vocabulary,"
            " so each value has one (SELECT DISTINCT … ORDER BY 1)"
        )
    return ids


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds a list in each row."""
    return kind.id in _LISTS


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def _is_category(kind: pa.DataType) -> bool:
    # what DuckDB's ENUM comes as
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)
    )


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


def _numbers(column: pa.Array) -> torch.Tensor:
    """int64 of whole numbers, else float32."""
    kind = column.type
    # even a cast to its own type takes 2 µs
    if kind not in (pa.int64(), pa.float32()):
        if pa.types.is_boolean(kind):
            column = pc.cast(column, pa.uint8())
        column = (
            pc.cast(column, pa.int64())
            if pa.types.is_integer(column.type)
            else pc.cast(column, pa.float32(), safe=False)
        )
    return from_dlpack(column)


def _as_numbers(column: pa.Array) -> npt.NDArray[Any]:
    """What numpy makes float32 of as Arrow does; three columns of 8,192 rows take a seventh of the
    time so, and those of one row a ninth."""
    if pa.types.is_decimal(column.type):
        column = pc.cast(column, pa.float32(), safe=False)
    numbers: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return numbers


def _without_nulls(column: pa.Array) -> pa.Array:
    """With 0 for each: of a column with nulls numpy would make floats."""
    if not column.null_count:
        return column
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.uint8())
    return pc.fill_null(column, pa.scalar(0, column.type))


def _ids(column: pa.Array, vocabulary: Mapping[str, int]) -> torch.Tensor:
    """int64 [rows]; only the batch's different values are looked up, since Arrow's own index_in
    hashes the whole vocabulary on every call."""
    encoded = pc.dictionary_encode(pc.cast(column, pa.string()))
    ids = np.array(
        [vocabulary.get(value, UNKNOWN) for value in encoded.dictionary.to_pylist()] + [UNKNOWN],
        np.int64,
    )
    return torch.from_numpy(ids[np.asarray(pc.fill_null(encoded.indices, -1))])
