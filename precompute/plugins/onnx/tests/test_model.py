"""ONNX graphs: inputs of every kind from columns, outputs as features, weights beside the file;
what does not fit is named."""

from __future__ import annotations

import hashlib
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pytest
from onnx import TensorProto, helper

from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError, PrecomputeError

TYPES = {
    "float": TensorProto.FLOAT,
    "double": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "int8": TensorProto.INT8,
    "bool": TensorProto.BOOL,
    "string": TensorProto.STRING,
}


def identity(folder: Path, kind: str, shape: list[Any], **save: Any) -> str:
    """A graph that gives its input ``x`` back as ``y``, and as ``z`` twice side by side."""
    given, *made = (
        helper.make_tensor_value_info(name, TYPES[kind], shape if name == "x" else None)
        for name in "xyz"
    )
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Concat", ["x", "x"], ["z"], axis=len(shape) - 1),
    ]
    graph = helper.make_graph(nodes, "identity", [given], made)
    path = folder / "model.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        str(path),
        **save,
    )
    return str(path)


def loaded(path: str, outputs: Any = {"y": "y"}, **args: Any) -> Any:  # noqa: B006
    return load_model("onnx", {"path": path, "outputs": outputs, **args})


VECTORS = pa.array([[1, 2], None, [3], [4, None], [5, 6]], pa.list_(pa.int64()))


@pytest.mark.parametrize(
    ("kind", "shape", "columns", "expected", "bad"),
    [
        ("float", [None], {"x": [1, 2, None]}, [1.0, 2.0], {2: "x is null"}),
        (
            "float",
            [None, 1],
            {"x": pa.array(["1.5", "2"]).cast(pa.decimal128(5, 2))},
            [1.5, 2.0],
            {},
        ),
        ("double", [None, 2], {"a": [1, 2], "b": [0.5, None]}, [[1.0, 0.5]], {1: "b is null"}),
        (
            "double",
            [None, 2],
            {"a": VECTORS},
            [[1, 2], [5, 6]],
            {1: "a is null", 2: "a has 1 values, not 2", 3: "a is null"},
        ),
        (
            "double",
            [None, "n"],
            {
                "a": pa.array([[1, 2], None, [4, None], [5, 6]], pa.list_(pa.int64(), 2)),
                "b": [9, 9, 9, 9],
            },
            [[1, 2, 9], [5, 6, 9]],
            {1: "a is null", 2: "a is null"},
        ),
        # most rows of a batch are no measure of the others
        (
            "double",
            [None, 2],
            {"a": [[3], [3], [1, 2]], "b": [9, 9, 9]},
            [[3, 9], [3, 9]],
            {2: "a has 2 values, not 1"},
        ),
        (
            "float",
            [None],
            {"x": [[1.0], [1, 2], [1, 2]]},
            [1],
            {1: "x has 2 values, not 1", 2: "x has 2 values, not 1"},
        ),
        (
            "float",
            [None, 1],
            {"x": [1.5, 1e300]},
            [1.5],
            {1: "x is 1e+300, which is not finite in float32"},
        ),
        (
            "float",
            [None, 2],
            {"a": [[1.0, -math.inf], [3e38, 2]]},
            [[np.float32(3e38), 2]],
            {0: "a is -inf, which is not finite in float32"},
        ),
        (
            "int64",
            [None, 1],
            {"x": pa.array([2**64 - 1, 7], pa.uint64())},
            [7],
            {0: f"x is {2**64 - 1}, and the graph's input 'x' takes {-(2**63)} to {2**63 - 1}"},
        ),
        (
            "int8",
            [None, 1],
            {"x": [1, 300, -128, 127]},
            [1, -128, 127],
            {1: "x is 300, and the graph's input 'x' takes -128 to 127"},
        ),
        ("bool", [None, 1], {"x": [True, None, False]}, [True, False], {1: "x is null"}),
        (
            "string",
            [None, 1],
            {"x": pa.array(["a", None, "ü"]).dictionary_encode()},
            ["a", "ü"],
            {1: "x is null"},
        ),
    ],
)
def test_columns_become_the_graphs_inputs(
    tmp_path: Path,
    kind: str,
    shape: list[Any],
    columns: dict[str, Any],
    expected: list[Any],
    bad: dict[int, str],
) -> None:
    batch = pa.record_batch(columns)
    inputs = {} if list(columns) == ["x"] else {"inputs": {"x": list(columns)}}
    model = loaded(identity(tmp_path, kind, shape), **inputs)
    prepared = model.prepare(batch)
    assert prepared.bad == bad
    good = np.array([row for row in range(batch.num_rows) if row not in bad])
    assert model.land(model.launch(model.inputs(prepared, good)))["y"].tolist() == expected
    assert model.compute(batch.take(pa.array(good)))["y"].tolist() == expected


def test_an_output_is_a_vector_or_one_of_its_numbers(tmp_path: Path) -> None:
    model = loaded(
        identity(tmp_path, "float", [None, 1]),
        {"both": "z", "second": {"output": "z", "column": 1}, "one": "y"},
    )
    made = model.compute(pa.record_batch({"x": [1.0, 2.0]}))
    assert {name: values.tolist() for name, values in made.items()} == {
        "both": [[1, 1], [2, 2]],
        "second": [1, 2],
        "one": [1, 2],
    }


def test_a_null_number_is_nan_where_the_graph_knows_it(tmp_path: Path) -> None:
    model = loaded(identity(tmp_path, "float", [None, 1]), nulls="nan")
    prepared = model.prepare(pa.record_batch({"x": [1.0, None]}))
    assert prepared.bad == {}
    assert np.array_equal(prepared.payload["x"][:, 0], [1.0, np.nan], equal_nan=True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"outputs": {}}, "outputs maps features to the graph's outputs ('y', 'z'), got {}"),
        (
            {"outputs": {"a": "YY"}},
            "outputs.a names 'YY'; the graph gives 'y', 'z'; did you mean 'y'?",
        ),
        (
            {"outputs": {"a": {"output": "z", "at": 1}}},
            "outputs.a is the name of an output, or {output: name, column: 1}",
        ),
        (
            {"outputs": {"a": {"output": "z", "column": -1}}},
            "outputs.a.column is a whole number from 0, got -1",
        ),
        ({"inputs": {"xx": "a"}}, "inputs names 'xx'; the graph takes 'x'; did you mean 'x'?"),
        ({"inputs": {"x": ["a", "b", "c"]}}, "inputs.x names 3 columns, and the graph takes 2"),
        ({"inputs": {"x": 3}}, "inputs.x is a column or a list of columns, got 3"),
        ({"nulls": "zero"}, "nulls is bad or nan, got 'zero'"),
        ({"path": "."}, "path '.' is a folder: name the .onnx file"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(
    tmp_path: Path, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"onnx: {message}")):
        loaded(**{"path": identity(tmp_path, "float", [None, 2])} | args)


def test_what_the_graph_does_not_take_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match=re.escape("input 'x' has the shape [1, 2]: export it as [None] or [None, columns]"),
    ):
        loaded(identity(tmp_path, "float", [1, 2]))
    model = loaded(identity(tmp_path, "int8", [None, 2]), inputs={"x": ["a", "b"]})
    for columns, message in (
        (
            {"a": [1], "b": [0.5]},
            "column 'b' is double, and the graph's input 'x' takes tensor(int8): CAST it in the source",
        ),
        (
            {"a": [1], "b": ["c"]},
            "column 'b' is string, and the graph's input 'x' takes tensor(int8)",
        ),
    ):
        with pytest.raises(ModelError, match=re.escape(f"onnx: {message}")):
            model.prepare(pa.record_batch(columns))
    for width, lists, message in (
        (2, {"a": [1]}, "the graph's input 'x' takes 2 numbers a row, and 'a' are 1: name them"),
        (
            2,
            {"a": pa.array([[1, 2, 3]], pa.list_(pa.int64(), 3))},
            "input 'x' takes 2 numbers a row, and 'a' are 3: name them",
        ),
        (
            3,
            {"a": pa.array([[1, 2, 3]], pa.list_(pa.int64(), 3)), "b": [[1]]},
            "and 'a', 'b' are 3 and a list: name them",
        ),
        (
            3,
            {"a": [[1, 2]], "b": [[1]]},
            "column 'a' the graph's input 'x' takes is not known: CAST(a AS BIGINT[n]) in the source",
        ),
        (
            "n",
            {"a": [[1, 2]]},
            "column 'a' the graph's input 'x' takes is not known: CAST(a AS BIGINT[n]) in the source",
        ),
    ):
        model = loaded(identity(tmp_path, "int8", [None, width]), inputs={"x": list(lists)})
        with pytest.raises(ModelError, match=re.escape(message)):
            model.prepare(pa.record_batch(lists))


def with_weights(folder: Path, name: str) -> str:
    """A graph that adds weights which lie in a file beside it."""
    folder.mkdir()
    tensor = onnx.numpy_helper.from_array(np.arange(300, dtype=np.float32), "w")
    given, made = (
        helper.make_tensor_value_info(one, TensorProto.FLOAT, [None, 300]) for one in "xy"
    )
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "add", [given], [made], [tensor]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(
        model,
        str(folder / "model.onnx"),
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    if name != "weights.bin":
        graph = onnx.load(str(folder / "model.onnx"), load_external_data=False)
        graph.graph.initializer[0].external_data[0].value = name
        (folder / "model.onnx").write_bytes(graph.SerializeToString())
    return str(folder / "model.onnx")


def test_weights_beside_the_file_count_and_none_from_elsewhere(tmp_path: Path) -> None:
    path = with_weights(tmp_path / "whole", "weights.bin")
    model = loaded(path)
    rows = pa.record_batch({"x": pa.array([[1.0] * 300])})
    assert model.compute(rows)["y"].tolist() == [[1.0 + n for n in range(300)]]
    before = model.fingerprint()
    (tmp_path / "whole" / "weights.bin").write_bytes(np.ones(300, np.float32).tobytes())
    assert loaded(path).fingerprint() != before
    for number, name in enumerate(("../whole/weights.bin", "/etc/hostname", "none.bin")):
        with pytest.raises(
            ModelError,
            match=r"names weights at .*, (which is outside its folder|where there is nothing)",
        ):
            loaded(with_weights(tmp_path / str(number), name))


# ---- what is understood, and what is refused

FLOATS = ("x", TensorProto.FLOAT, [None, 2])


def graph_of(
    folder: Path,
    nodes: list[Any],
    weights: dict[str, Any] | None = None,
    kind: int = TensorProto.FLOAT,
    domains: tuple[str, ...] = (),
    functions: tuple[Any, ...] = (),
) -> Any:
    """A graph of [rows, 2] floats ``x`` to ``y``."""
    tensors = [
        one if isinstance(one, onnx.TensorProto) else onnx.numpy_helper.from_array(one, name)
        for name, one in (weights or {}).items()
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*FLOATS)],
        [helper.make_tensor_value_info("y", kind, None)],
        tensors,
    )
    opsets = [helper.make_opsetid(name, 21 if not name else 1) for name in ("", *domains)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)
    (folder / "model.onnx").write_bytes(made.SerializeToString())
    return made


def node(name: str, inputs: str, output: str = "y", **more: Any) -> Any:
    return helper.make_node(name, inputs.split(), output.split(), **more)


def branch(*nodes: Any) -> Any:
    out = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    return helper.make_graph(list(nodes), "branch", [], [out])


SCALE = {"s": np.float32(0.5), "z": np.int8(3)}
TWICE = helper.make_function(
    "mine", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 21)]
)
NOISE = helper.make_function(
    "mine", "Noise", ["a"], ["b"], [node("RandomNormalLike", "a", "b")], TWICE.opset_import
)
NUMBERS = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("nodes", "more"),
    [
        # a quantized graph says itself what it computes
        (
            [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z")],
            {"weights": SCALE},
        ),
        (
            [node("Cast", "w", "v", to=TensorProto.FLOAT), node("Add", "x v")],
            {"weights": {"w": np.array([0.1, 2], np.float16)}},
        ),
        (
            [node("Cast", "w", "v", to=TensorProto.FLOAT), node("Add", "x v")],
            {"weights": {"w": helper.make_tensor("w", TensorProto.BFLOAT16, [2], [0.5, 2.0])}},
        ),
        (
            [node("Cast", "w", "v", to=TensorProto.FLOAT), node("Add", "x v")],
            {"weights": {"w": helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, [2], [0.5, 2.0])}},
        ),
        ([node("Twice", "x", domain="mine")], {"domains": ("mine",), "functions": (TWICE,)}),
        (
            [
                node(
                    "If",
                    "c",
                    then_branch=branch(node("Add", "x x", "inner")),
                    else_branch=branch(node("Identity", "x", "inner")),
                )
            ],
            {"weights": {"c": np.array(True)}},
        ),
        ([node("Dropout", "x")], {}),
        ([node("Dropout", "x r t")], {"weights": {"r": np.float32(0.5), "t": np.array(False)}}),
        (
            [node("BatchNormalization", "x a a a a")],
            {"weights": {"a": NUMBERS}},
        ),
        (
            [node("FusedMatMul", "x m", domain="com.microsoft")],
            {"weights": {"m": np.eye(2, dtype=np.float32)}, "domains": ("com.microsoft",)},
        ),
        ([node("Gelu", "x")], {}),
    ],
)
def test_a_graph_of_any_kind_gives_what_onnx_runtime_gives(
    tmp_path: Path, nodes: list[Any], more: dict[str, Any]
) -> None:
    made = graph_of(tmp_path, nodes, **more)
    made.metadata_props.add(key="who", value="me")
    made.doc_string = made.graph.doc_string = "a note"
    made.training_info.add()
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    session = onnxruntime.InferenceSession(made.SerializeToString())
    rows = np.array([[1, 2], [3, 0.3], [-1, 0]], np.float32)
    model = loaded(str(tmp_path / "model.onnx"), inputs={"x": ["a", "b"]})
    found = model.compute(pa.record_batch({"a": rows[:, 0], "b": rows[:, 1]}))["y"]
    assert np.array_equal(found, session.run(["y"], {"x": rows})[0])


@pytest.mark.parametrize(
    ("nodes", "more", "said"),
    [
        ([node("RandomNormalLike", "x")], {}, "has ai.onnx.RandomNormalLike: it draws at random"),
        ([node("Bernoulli", "x")], {}, "has ai.onnx.Bernoulli: it draws at random"),
        (
            [
                node(
                    "If",
                    "c",
                    then_branch=branch(node("RandomUniformLike", "x", "inner")),
                    else_branch=branch(node("Identity", "x", "inner")),
                )
            ],
            {"weights": {"c": np.array(True)}},
            "has ai.onnx.RandomUniformLike",
        ),
        (
            [node("Noise", "x", domain="mine")],
            {"domains": ("mine",), "functions": (NOISE,)},
            "has ai.onnx.RandomNormalLike",
        ),
        (
            [node("Dropout", "x r t")],
            {"weights": {"r": np.float32(0.5), "t": np.array(True)}},
            "has Dropout in its training mode",
        ),
        (
            [node("BatchNormalization", "x a a a a", "y m v", training_mode=1)],
            {"weights": {"a": NUMBERS}},
            "has BatchNormalization in its training mode",
        ),
        (
            [node("Strange", "x", domain="their.own")],
            {"domains": ("their.own",)},
            "has their.own.Strange, which is not known of ONNX's operators",
        ),
        (
            [node("Cast", "x", to=TensorProto.BFLOAT16)],
            {"kind": TensorProto.BFLOAT16},
            r"the output 'y' .* is tensor\(bfloat16\), which no feature is",
        ),
        (
            [node("Cast", "x", to=TensorProto.FLOAT8E4M3FN)],
            {"kind": TensorProto.FLOAT8E4M3FN},
            r"the output 'y' .* is tensor\(float8e4m3fn\), which no feature is",
        ),
    ],
)
def test_what_is_drawn_at_random_or_not_known_is_refused(
    tmp_path: Path, nodes: list[Any], more: dict[str, Any], said: str
) -> None:
    graph_of(tmp_path, nodes, **more)
    with pytest.raises(ConfigError, match=said):
        loaded(str(tmp_path / "model.onnx"), inputs={"x": ["a", "b"]})


def test_a_field_of_another_version_of_onnx_is_refused(tmp_path: Path) -> None:
    made = graph_of(tmp_path, [node("Identity", "x")])
    for content in (
        # field 101 of the model, of a node and of a tensor
        made.SerializeToString() + b"\xaa\x06\x03abc",
        made.SerializeToString() + b"\x3a\x08\x0a\x06\xaa\x06\x03abc",
        made.SerializeToString() + b"\x3a\x08\x2a\x06\xaa\x06\x03abc",
    ):
        (tmp_path / "model.onnx").write_bytes(content)
        with pytest.raises(
            ConfigError, match=r"has (Model|Node|Tensor)Proto field 101, which is not known"
        ):
            loaded(str(tmp_path / "model.onnx"))


@pytest.mark.parametrize(("opset", "ir"), [(99, 10), (21, 99)])
def test_a_version_that_is_too_new_is_named(tmp_path: Path, opset: int, ir: int) -> None:
    made = graph_of(tmp_path, [node("Identity", "x")])
    made.opset_import[0].version, made.ir_version = opset, ir
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(ModelError, match=f"cannot be computed by ONNX Runtime: .*{max(opset, ir)}"):
        loaded(str(tmp_path / "model.onnx"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS.* git lfs pull"),
        (b"<html><body>", "a web page"),
        (b"\x1f\x8b\x08", "compressed by gzip"),
        (b"", "empty"),
        (b"\x80\x04\x95", "a pickle"),
    ],
)
def test_what_is_no_graph_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ModelError, match=f"onnx: .*model.onnx is {said}"):
        loaded(str(tmp_path / "model.onnx"))


def test_weights_beside_the_file_that_are_others_are_refused(tmp_path: Path) -> None:
    path = with_weights(tmp_path / "whole", "weights.bin")
    weights = tmp_path / "whole" / "weights.bin"
    content = weights.read_bytes()
    for changed, said in (
        (content[:-1], "has 1199 bytes, and .* takes 1200 of it: it is cut, or of another"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    ):
        weights.write_bytes(changed)
        with pytest.raises(ModelError, match=said):
            loaded(path)
    weights.write_bytes(content)
    graph = onnx.load(path, load_external_data=False)
    entries = graph.graph.initializer[0].external_data
    entries.add(key="checksum", value=hashlib.sha1(content).hexdigest())
    Path(path).write_bytes(graph.SerializeToString())
    loaded(path)
    weights.write_bytes(content[::-1])
    with pytest.raises(ModelError, match=r"is not the one that .* names, by its checksum"):
        loaded(path)
    entries.add(key="surprise", value="1")
    Path(path).write_bytes(graph.SerializeToString())
    with pytest.raises(ConfigError, match="has surprise, which is not known of ONNX's weights"):
        loaded(path)


def test_maps_of_classes_are_in_the_order_of_the_classes(tmp_path: Path) -> None:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression

    rows = np.random.default_rng(0).random((60, 2)).astype(np.float32)
    names = np.array(["z", "ä", "b", "10", "9"])[np.arange(60) % 5]
    made = LogisticRegression().fit(rows, names)
    (tmp_path / "model.onnx").write_bytes(to_onnx(made, rows[:1]).SerializeToString())
    model = loaded(
        str(tmp_path / "model.onnx"),
        {"label": "output_label", "score": "output_probability"},
        inputs={"X": ["a", "b"]},
    )
    found = model.compute(pa.record_batch({"a": rows[:, 0], "b": rows[:, 1]}))
    assert found["label"].to_pylist() == made.predict(rows).tolist()
    assert np.allclose(found["score"], made.predict_proba(rows), atol=1e-5)


def test_a_changed_graph_is_refused_or_gives_what_onnx_runtime_gives(
    tmp_path: Path,
) -> None:
    weights = {"m": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}
    made = graph_of(tmp_path, [node("MatMul", "x m", "p"), node("Add", "p b")], weights)
    content, drawn = made.SerializeToString(), random.Random(0)
    rows = np.array([[1, 2], [3, 0.3]], np.float32)
    batch = pa.record_batch({"a": rows[:, 0], "b": rows[:, 1]})
    refused = compared = 0
    for number in range(60):
        changed = bytearray(content)
        if number % 3:
            changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
        else:
            del changed[drawn.randrange(len(changed)) :]
        (tmp_path / "model.onnx").write_bytes(changed)
        try:
            model = loaded(str(tmp_path / "model.onnx"), inputs={"x": ["a", "b"]})
            found = model.compute(batch)["y"]
        except PrecomputeError:
            refused += 1
            continue
        session = onnxruntime.InferenceSession(bytes(changed))
        assert np.array_equal(found, session.run(["y"], {"x": rows})[0], equal_nan=True)
        compared += 1
    assert refused > 20
    assert compared > 5
