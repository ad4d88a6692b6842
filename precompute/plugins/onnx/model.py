"""ONNX: any graph, such as a scikit-learn pipeline by skl2onnx, over columns of numbers, texts and
vectors, computed by ONNX Runtime on the CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.foreign_file import KnownKeys, what_it_is
from precompute.model import Features, OwnLibrary, Prepared, Verbatim, digest, resolve_path
from precompute.models.tabular_model import (
    Host,
    HostModel,
    installed,
    is_number,
    is_text,
    listed,
    numbers,
    unfit,
    value_type,
)
from precompute.store.errors import ConfigError, ModelError, PrecomputeError, did_you_mean

NUMBERS: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
    "tensor(string)": object,
}
"""ONNX Runtime's name of a type → numpy's."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the graph: [rows] (``width`` 1) or [rows, width], of these columns side by side;
    ``width`` None is any. ``nan`` lets a null number be NaN."""

    name: str
    columns: tuple[str, ...]
    kind: str
    ndim: int
    width: int | None
    nan: bool

    @property
    def is_text(self) -> bool:
        return self.kind == "tensor(string)"

    @property
    def is_whole(self) -> bool:
        return np.dtype(NUMBERS[self.kind]).kind in "iub"

    def array(self, batch: pa.RecordBatch, bad: dict[int, str]) -> npt.NDArray[Any]:
        """The tensor of a batch; rows that have no place in it are added to ``bad``, and hold
        whatever they may.

        Raises:
            ModelError: the columns' types do not tell how many values a row has, or tell another
                number than the graph takes.
        """
        sizes = self._sizes(batch.schema)
        parts = [
            self._part(name, batch.column(name), size, bad)
            for name, size in zip(self.columns, sizes, strict=True)
        ]
        made = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        return made[:, 0] if self.ndim == 1 else made

    def _sizes(self, schema: pa.Schema) -> list[int]:
        """How many values of a row each column holds: by the types, so that no row's neighbours
        decide."""
        kinds = [value_type(schema.field(name).type) for name in self.columns]
        sizes = [
            getattr(kind, "list_size", None if hasattr(kind, "value_type") else 1) for kind in kinds
        ]
        known, lists = sum(size or 0 for size in sizes), sizes.count(None)
        if lists > (self.width is not None):
            name = self.columns[sizes.index(None)]
            item = "VARCHAR" if self.is_text else "BIGINT" if self.is_whole else "DOUBLE"
            raise ModelError(
                f"onnx: how many values of column {name!r} the graph's input {self.name!r} takes is"
                f" not known: CAST({name} AS {item}[n]) in the source"
            )
        rest = (self.width or 0) - known
        if self.width is not None and (rest < 1 if lists else rest):
            raise ModelError(
                f"onnx: the graph's input {self.name!r} takes {self.width} numbers a row, and"
                f" {listed(self.columns)} are {known}{' and a list' * lists}: name them in"
                " `inputs`, or a column of vectors"
            )
        return [rest if size is None else size for size in sizes]

    def _part(
        self, name: str, column: pa.Array, size: int, bad: dict[int, str]
    ) -> npt.NDArray[Any]:
        """[rows, size]; 1 of a scalar."""
        if isinstance(column.type, pa.DictionaryType):
            column = column.cast(column.type.value_type)
        if not hasattr(column.type, "value_type"):
            return self._values(name, column, bad)[:, None]
        lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(lengths != size).tolist():
            bad[row] = (
                f"{name} is null"
                if lengths[row] < 0
                else f"{name} has {lengths[row]} values, not {size}"
            )
        good = np.flatnonzero(lengths == size)
        inner: dict[int, str] = {}
        values = self._values(name, column.take(pa.array(good)).flatten(), inner)
        bad |= {int(good[place // size]): reason for place, reason in inner.items()}
        made = (
            np.zeros((len(column), size), values.dtype)
            if not self.is_text
            else np.full((len(column), size), "", object)
        )
        made[good] = values.reshape(len(good), size)
        return made

    def _values(self, name: str, column: pa.Array, bad: dict[int, str]) -> npt.NDArray[Any]:
        """[values] of a flat column."""
        kind = NUMBERS[self.kind]
        if column.null_count and (self.is_text or self.is_whole or not self.nan):
            bad |= dict.fromkeys(
                pc.indices_nonzero(column.is_null()).to_pylist(), f"{name} is null"
            )
        if self.is_text:
            texts: npt.NDArray[Any] = np.array(
                pc.fill_null(column.cast(pa.string()), "").to_pylist(), object
            )
            return texts
        if self.is_whole:
            # as it is: of those that int64 has not, a cast would make others
            column = column if pa.types.is_uint64(column.type) else column.cast(pa.int64())
            whole = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
            if np.dtype(kind).kind != "b":
                limits = np.iinfo(kind)
                for row in np.flatnonzero((whole < limits.min) | (whole > limits.max)).tolist():
                    bad[row] = (
                        f"{name} is {whole[row]}, and the graph's input {self.name!r} takes"
                        f" {limits.min} to {limits.max}"
                    )
            made: npt.NDArray[Any] = whole.astype(kind)
            return made
        floats = numbers(column)
        bad |= unfit([name], floats[:, None], kind)
        with np.errstate(over="ignore"):
            return floats.astype(kind)


# ---- the model


CODE_VERSION = 2
"""Raised with each change of the values that this code computes; part of the fingerprint."""

EXTERNAL = 1
"""``TensorProto.EXTERNAL``: weights in a file beside the graph's."""

GIVEN = {*NUMBERS, "tensor(uint16)", "tensor(uint32)", "tensor(uint64)"} | {
    f"seq(map({key},tensor(float)))" for key in ("int64", "string")
}
"""Types of outputs that numpy has, and the maps of classes to probabilities that skl2onnx makes."""

_AT_RANDOM = "it draws at random, so that a row's value is another each time: export the graph for"
_AT_RANDOM += " inference (model.eval()), or without it"
_FOR_TRAINING = "it is for training: export the graph for inference (model.eval())"
ONNX_FIELDS = KnownKeys(
    "ONNX",
    used=(
        "ModelProto.ir_version",
        "ModelProto.opset_import",
        "ModelProto.graph",
        "ModelProto.functions",
        "OperatorSetIdProto.*",
        "FunctionProto.name",
        "FunctionProto.input",
        "FunctionProto.output",
        "FunctionProto.attribute",
        "FunctionProto.attribute_proto",
        "FunctionProto.node",
        "FunctionProto.opset_import",
        "FunctionProto.domain",
        "FunctionProto.overload",
        "GraphProto.name",
        "GraphProto.node",
        "GraphProto.initializer",
        "GraphProto.sparse_initializer",
        "GraphProto.input",
        "GraphProto.output",
        "NodeProto.name",
        "NodeProto.input",
        "NodeProto.output",
        "NodeProto.op_type",
        "NodeProto.domain",
        "NodeProto.overload",
        "NodeProto.attribute",
        "AttributeProto.*",
        "TensorProto.*",
        "SparseTensorProto.*",
    ),
    harmless={
        "*.doc_string": "a note",
        "*.metadata_props": "notes",
        "*.value_info": "types, which ONNX Runtime infers again",
        "ModelProto.producer_name": "a note",
        "ModelProto.producer_version": "a note",
        "ModelProto.domain": "a note",
        "ModelProto.model_version": "a note",
        "ModelProto.training_info": "how it is trained on; the graph alone is computed",
        "ModelProto.configuration": "on which of several devices a node may be computed",
        "NodeProto.device_configurations": "on which of several devices a node may be computed",
        "GraphProto.quantization_annotation": "notes on scales; the graph's own operators, such as"
        " QuantizeLinear, are what computes with them",
    },
)
ONNX_OPERATORS = KnownKeys(
    "ONNX's operators",
    used=("ai.onnx.*", "ai.onnx.ml.*", "com.microsoft.*"),
    refused={
        "ai.onnx.Bernoulli": _AT_RANDOM,
        "ai.onnx.Multinomial": _AT_RANDOM,
        "ai.onnx.RandomNormal": _AT_RANDOM,
        "ai.onnx.RandomNormalLike": _AT_RANDOM,
        "ai.onnx.RandomUniform": _AT_RANDOM,
        "ai.onnx.RandomUniformLike": _AT_RANDOM,
        "com.microsoft.Sampling": _AT_RANDOM,
        "com.microsoft.BiasDropout": _FOR_TRAINING,
        "com.microsoft.BitmaskDropout": _FOR_TRAINING,
        "com.microsoft.BitmaskBiasDropout": _FOR_TRAINING,
        "ai.onnx.training.*": _FOR_TRAINING,
        "ai.onnx.preview.*": "ONNX may change what it computes",
    },
)
ONNX_WEIGHTS = KnownKeys(
    "ONNX's weights beside the graph", used=("location", "offset", "length", "checksum")
)


@dataclass(frozen=True, slots=True)
class Output:
    """A feature: an output of the graph by its name, or one column of it."""

    feature: str
    name: str
    column: int | None = None


class OnnxModel(HostModel):
    """Runs a graph over columns; a :class:`precompute.model.StagedModel`.

    Args:
        path: the ``.onnx`` file.
        outputs: feature → name of one of the graph's outputs, or ``{output: name, column: 1}`` for
            one number of each row. [rows] and [rows, 1] are one value a row, [rows, dim] is a
            vector; a map of classes to probabilities, as skl2onnx makes by default, is a vector in
            the order of the classes.
        inputs: the graph's input → a column, or a list of columns, side by side; by default the
            column of its name. A column may be a vector.
        nulls: what becomes of a null number: ``bad``, or ``nan`` where the graph knows what to do
            with one.

    Raises:
        ConfigError: no such file, ONNX Runtime is not installed, or an argument that does not fit
            the graph.
        ModelError: the file is damaged, or a graph that cannot be computed here.
    """

    start_cost = 1024
    saved = "ONNX (.onnx)"

    @staticmethod
    def is_its_file(name: str, head: bytes) -> bool:
        return name.lower().endswith(".onnx")

    @staticmethod
    def names_of(path: Path) -> tuple[dict[str, int], list[str]]:
        """The inputs of a graph, each with how many columns it takes (1 where that is open), and
        its outputs.

        Raises:
            ConfigError, ModelError: as of :class:`OnnxModel`.
        """
        _, session = _loaded(path)
        widths = {
            one.name: one.shape[1] if len(one.shape) == 2 else 1 for one in session.get_inputs()
        }
        return {name: width if isinstance(width, int) else 1 for name, width in widths.items()}, [
            one.name for one in session.get_outputs()
        ]

    def __init__(
        self,
        path: str,
        outputs: Mapping[str, Any],
        inputs: Mapping[str, Any] | None = None,
        nulls: str = "bad",
    ) -> None:
        self._path = resolve_path(path)
        self.device = Host()
        if nulls not in ("bad", "nan"):
            raise ConfigError(f"onnx: nulls is bad or nan, got {nulls!r}")
        self._beside, self._session = _loaded(self._path)
        self._inputs = _inputs(self._session.get_inputs(), inputs or {}, nulls == "nan")
        self._outputs = _outputs([output.name for output in self._session.get_outputs()], outputs)
        self._wanted = list(dict.fromkeys(output.name for output in self._outputs))
        for output in self._session.get_outputs():
            if output.name in self._wanted and output.type not in GIVEN:
                raise ConfigError(
                    f"onnx: the output {output.name!r} of {self._path} is {output.type}, which no"
                    " feature is: let the graph cast it to float"
                )
        self._facts = {
            "inputs": Verbatim({i.name: list(i.columns) for i in self._inputs}),
            "outputs": Verbatim(outputs),
            "nulls": nulls,
        }
        self._checked: pa.Schema | None = None

    def fingerprint(self) -> str:
        return digest(self._path, *self._beside, code=CODE_VERSION, **self._facts)

    def own_library(self) -> OwnLibrary:
        return OwnLibrary("onnxruntime")

    def reads(self) -> list[str]:
        return list(dict.fromkeys(name for one in self._inputs for name in one.columns))

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """An array for each input; each row costs 1. Bad are those with a null, or a vector of
        another length.

        Raises:
            ModelError: a column is of a type that its input does not take, or a list whose length
                is not known.
        """
        self._check(batch.schema)
        bad: dict[int, str] = {}
        made = {one.name: one.array(batch, bad) for one in self._inputs}
        return Prepared(np.ones(batch.num_rows, np.int64), made, bad)

    def inputs(
        self, prepared: Prepared, rows: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any]]:
        return {name: values[rows] for name, values in prepared.payload.items()}

    def launch(self, inputs: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
        return list(self._session.run(self._wanted, inputs))

    def land(self, launched: list[Any]) -> Features:
        """Each feature, of the graph's own type.

        Raises:
            ModelError: an output of another shape.
        """
        given = dict(zip(self._wanted, map(_array, self._wanted, launched), strict=True))
        return {output.feature: _feature(output, given[output.name]) for output in self._outputs}

    def _check(self, schema: pa.Schema) -> None:
        if self._checked is not None and schema.equals(self._checked):
            return
        for one in self._inputs:
            for name in one.columns:
                kind = value_type(schema.field(name).type)
                item = kind.value_type if hasattr(kind, "value_type") else kind
                fits = pa.types.is_null(item) or (is_text(item) if one.is_text else is_number(item))
                if one.is_whole:
                    fits = fits and not (pa.types.is_floating(item) or pa.types.is_decimal(item))
                if not fits:
                    raise ModelError(
                        f"onnx: column {name!r} is {kind}, and the graph's input {one.name!r} takes"
                        f" {one.kind}: CAST it in the source"
                    )
        self._checked = schema


def _loaded(path: Path) -> tuple[list[Path], Any]:
    """(files of weights beside it, a session).

    Raises:
        ConfigError: it has what is not known, or gives a row another value each time.
        ModelError: it is damaged, or names files that are not beside it.
    """
    with installed("onnx"):
        import onnx
        import onnxruntime
    if not path.is_file():
        raise ConfigError(f"onnx: path {str(path)!r} is a folder: name the .onnx file")
    options = onnxruntime.SessionOptions()
    # lanes are what computes beside each other
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if is_a := what_it_is(path):
        raise ModelError(f"onnx: {path} is {is_a}")
    try:
        content = path.read_bytes()
        graph = onnx.load_model_from_string(content)
        messages = list(_messages(path, graph))
        _check_operators(path, graph, messages)
        beside = _beside(path, messages)
        session = onnxruntime.InferenceSession(
            str(path) if beside else content, options, providers=["CPUExecutionProvider"]
        )
    except PrecomputeError:
        raise
    except Exception as exc:
        # both libraries' errors have no common class
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise ModelError(
            f"onnx: {path} is damaged or cannot be computed by ONNX Runtime: {reason[:500]}"
        ) from exc
    return beside, session


def _messages(path: Path, model: Any) -> Iterator[Any]:
    """The parts of a graph, its own and those in its functions, branches and loops, each of whose
    fields is known.

    Raises:
        ConfigError: a field is not.
    """
    from google.protobuf.unknown_fields import UnknownFieldSet

    todo, seen = [model], dict[str, None]()
    while todo:
        message = todo.pop()
        kind = message.DESCRIPTOR.name
        yield message
        seen |= {f"{kind} field {one.field_number}": None for one in UnknownFieldSet(message)}
        if kind == "TensorProto":
            # its fields may be gigabytes, which listing copies
            continue
        for field, value in message.ListFields():
            seen[f"{kind}.{field.name}"] = None
            if field.message_type is None or field.name in OTHERS:
                continue
            # one message has fields, several none
            todo += [value] if hasattr(value, "ListFields") else list(value)
    ONNX_FIELDS.check(seen, path, "onnx")


OTHERS = (
    "training_info",
    "configuration",
    "device_configurations",
    "metadata_props",
    "quantization_annotation",
    "value_info",
    "input",
    "output",
    "tp",
    "type_protos",
)
"""Fields in which there is no operator and no weight."""


def _check_operators(path: Path, model: Any, messages: Sequence[Any]) -> None:
    """Raises:
    ConfigError: an operator is of no kind that is computed, or draws at random.
    """
    own = {(one.domain, one.name) for one in model.functions}
    nodes = [one for one in messages if one.DESCRIPTOR.name == "NodeProto"]
    ONNX_OPERATORS.check(
        dict.fromkeys(
            f"{node.domain or 'ai.onnx'}.{node.op_type}"
            for node in nodes
            if (node.domain, node.op_type) not in own
        ),
        path,
        "onnx",
    )
    off = {
        one.name for one in messages if one.DESCRIPTOR.name == "TensorProto" and _is_false(one)
    } | {
        node.output[0]
        for node in nodes
        if node.op_type == "Constant" and _is_false(node.attribute[0].t)
    }
    for node in nodes:
        if node.op_type == "Dropout":
            trains = len(node.input) > 2 and node.input[2] not in off | {""}
        else:
            trains = node.op_type == "BatchNormalization" and (
                len([name for name in node.output if name]) > 1
                or any(one.name == "training_mode" and one.i for one in node.attribute)
            )
        if trains and node.domain in ("", "ai.onnx"):
            raise ConfigError(
                f"onnx: {path} has {node.op_type} in its training mode, by which a row's value"
                " depends on chance or on the rows beside it: export the graph for inference"
                " (model.eval())"
            )


def _is_false(tensor: Any) -> bool:
    """Whether a tensor is the truth value false."""
    return bool(
        tensor.data_type == BOOL
        and not list(tensor.dims)
        and not any(tensor.raw_data)
        and not any(tensor.int32_data)
    )


BOOL = 9
"""``TensorProto.BOOL``."""


def _beside(path: Path, messages: Sequence[Any]) -> list[Path]:
    named: dict[str, int] = {}
    sums: dict[str, str] = {}
    for one in messages:
        if one.DESCRIPTOR.name != "TensorProto" or one.data_location != EXTERNAL:
            continue
        facts = {entry.key: entry.value for entry in one.external_data}
        ONNX_WEIGHTS.check(facts, path, "onnx")
        end = int(facts.get("offset", 0)) + int(facts.get("length", 0))
        name = facts["location"]
        named[name] = max(named.get(name, 0), end)
        if "checksum" in facts:
            sums[name] = facts["checksum"]
    for name, end in sorted(named.items()):
        file = path.parent / name
        if not file.resolve().is_relative_to(path.parent.resolve()):
            raise ModelError(
                f"onnx: {path} names weights at {str(file)!r}, which is outside its folder"
            )
        if not file.is_file():
            raise ModelError(f"onnx: {path} names weights at {str(file)!r}, where there is nothing")
        if file.stat().st_size < end:
            raise ModelError(
                f"onnx: {file} has {file.stat().st_size} bytes, and {path} takes {end} of it: it is"
                f" {what_it_is(file) or 'cut, or of another model'}"
            )
        if name in sums:
            with file.open("rb") as content:
                found = hashlib.file_digest(content, "sha1").hexdigest()
            if found != sums[name].lower():
                raise ModelError(f"onnx: {file} is not the one that {path} names, by its checksum")
    return [path.parent / name for name in sorted(named)]


def _inputs(given: Sequence[Any], named: Mapping[str, Any], nan: bool) -> list[Input]:
    names = [one.name for one in given]
    if not isinstance(named, Mapping):
        raise ConfigError(
            f"onnx: inputs maps the graph's inputs ({listed(names)}) to columns, got {named!r}"
        )
    if strange := [name for name in named if name not in names]:
        raise ConfigError(
            f"onnx: inputs names {strange[0]!r}; the graph takes"
            f" {listed(names)}{did_you_mean(str(strange[0]), names)}"
        )
    found = []
    for one in given:
        if one.type not in NUMBERS:
            raise ModelError(
                f"onnx: the graph's input {one.name!r} is {one.type}, of which there is no column"
            )
        if len(one.shape) not in (1, 2) or isinstance(one.shape[0], int):
            raise ModelError(
                f"onnx: the graph's input {one.name!r} has the shape {one.shape}: export it as"
                " [None] or [None, columns], for any number of rows"
            )
        columns = named.get(one.name, one.name)
        columns = [columns] if isinstance(columns, str) else columns
        if (
            not isinstance(columns, list)
            or not columns
            or not all(isinstance(name, str) for name in columns)
        ):
            raise ConfigError(
                f"onnx: inputs.{one.name} is a column or a list of columns, got {columns!r}"
            )
        width = one.shape[1] if len(one.shape) == 2 else 1
        if isinstance(width, int) and len(columns) > width:
            raise ConfigError(
                f"onnx: inputs.{one.name} names {len(columns)} columns, and the graph takes {width}"
            )
        found.append(
            Input(
                one.name,
                tuple(columns),
                one.type,
                len(one.shape),
                width if isinstance(width, int) else None,
                nan,
            )
        )
    return found


def _outputs(names: Sequence[str], outputs: Any) -> list[Output]:
    if not isinstance(outputs, Mapping) or not outputs:
        raise ConfigError(
            f"onnx: outputs maps features to the graph's outputs ({listed(names)}), got {outputs!r}"
        )
    found = []
    for feature, wanted in outputs.items():
        of = {"output": wanted} if isinstance(wanted, str) else wanted
        if (
            not isinstance(of, Mapping)
            or not set(of) <= {"output", "column"}
            or not isinstance(of.get("output"), str)
        ):
            raise ConfigError(
                f"onnx: outputs.{feature} is the name of an output, or {{output: name, column: 1}};"
                f" got {wanted!r}"
            )
        if of["output"] not in names:
            raise ConfigError(
                f"onnx: outputs.{feature} names {of['output']!r}; the graph gives"
                f" {listed(names)}{did_you_mean(of['output'], names)}"
            )
        column = of.get("column")
        if column is not None and (type(column) is not int or column < 0):
            raise ConfigError(
                f"onnx: outputs.{feature}.column is a whole number from 0, got {column!r}"
            )
        found.append(Output(feature, of["output"], column))
    return found


def _array(name: str, given: Any) -> npt.NDArray[Any]:
    """A tensor, or a matrix of what skl2onnx gives as maps of classes to probabilities."""
    if isinstance(given, list) and given and isinstance(given[0], dict):
        return np.array([list(row.values()) for row in given], np.float32)
    if not isinstance(given, np.ndarray):
        raise ModelError(
            f"onnx: output {name!r} is a {type(given).__name__}, neither a tensor nor maps of"
            " classes"
        )
    return given


def _feature(output: Output, values: npt.NDArray[Any]) -> Any:
    if values.ndim not in (1, 2):
        raise ModelError(
            f"onnx: output {output.name!r} has the shape {list(values.shape)}, not [rows] or [rows,"
            " dim]"
        )
    if output.column is not None:
        if values.ndim == 1 or output.column >= values.shape[1]:
            raise ModelError(
                f"onnx: outputs.{output.feature} takes column {output.column} of {output.name!r},"
                f" which has the shape {list(values.shape)}"
            )
        values = values[:, output.column]
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return (
        pa.array(values.tolist(), pa.string())
        if values.dtype.kind in "OU" and values.ndim == 1
        else values
    )
