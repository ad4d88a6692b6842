"""OpenVINO: its graphs compute the reference's values in the precision that was requested, whatever
the sizes and the threads; integers are near, and a row does not depend on another; what is missing
is named; nothing is reported to anybody."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from precompute.models.device import Device
from precompute.models.torch_model import Tensors
from precompute.plugins.openvino import technique as openvino
from precompute.store.errors import ConfigError
from precompute.techniques import onednn
from precompute.techniques.conversion import candidates, convert
from precompute.techniques.machine import has_bf16, has_int8_products
from precompute.techniques.row_errors import relative_errors, tolerance
from precompute.techniques.technique import technique
from tests.precompute.test_precision import (
    Arithmetic,
    bert,
    check,
    check_any_inputs,
    check_lost_bit,
    mlp,
    outputs,
    rows,
    some_rows,
    some_texts,
    texts,
)

WITH_BF16 = pytest.mark.skipif(not has_bf16(), reason="no products of bfloat16")
WITH_VNNI = pytest.mark.skipif(not has_int8_products(), reason="no products of 8-bit integers")
INTEGERS = ("int8-static-openvino", "int8-dynamic-openvino")


def deep(hard: bool = False) -> Arithmetic:
    """12 layers of 64; of a hard one the sixth has weights that 8 bits do not hold: in each group
    of inputs those of one are 300 times as large, and what they are multiplied with nearly 0."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(12)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(1.7)
        if hard:
            layers[5].weight[:, ::32] *= 300
            layers[4].weight[::32] *= 1e-4
            layers[4].bias[::32] *= 1e-4
    parts = [part for layer in layers for part in (layer, torch.nn.Tanh())]
    return Arithmetic(torch.nn.Sequential(*parts[:-1]), Device("cpu"))


def deep_rows(count: int, seed: int = 0) -> Tensors:
    return (torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)),)


def some_deep_rows() -> list[Tensors]:
    return [deep_rows(64), deep_rows(33, 1)]


def layers_of(path: Path) -> list[str]:
    """What each linear layer of a graph's file is multiplied with."""
    graph: Any = openvino.read(path)
    found = []
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "MatMul":
            kind = node.input_value(1).get_node().get_type_name()
            found.append("float" if kind == "Constant" else "integers")
    return found


# What is computed


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where each graph is made once."""
    return tmp_path_factory.mktemp("openvino")


def test_float32_is_float32_whatever_the_cpu_has(graphs: Path) -> None:
    """By itself OpenVINO takes bfloat16 where a CPU has it, and stores weights in float16."""
    check(mlp(), "fp32-openvino", [*some_rows(), rows(1)], 1e-6, graphs)
    check(bert(), "fp32-openvino", [*some_texts(), texts(1, 2), texts(3, 16)], 1e-5, graphs)


@WITH_BF16
def test_bfloat16_is_bfloat16(graphs: Path) -> None:
    check(bert(), "bf16-openvino", [*some_texts(), texts(1, 2), texts(3, 16)], 0.05, graphs)
    model = mlp()
    exact = outputs(model, rows(64))[0]
    convert(model, technique("bf16-openvino"), some_rows, graphs)
    assert model.device.dtype == torch.bfloat16
    error = relative_errors(exact, outputs(model, rows(64))[0])
    assert 1e-4 < np.median(error) < 1e-2


@WITH_VNNI
@pytest.mark.parametrize(("name", "median"), [(INTEGERS[0], 0.1), (INTEGERS[1], 0.02)])
def test_integers_come_near_and_no_row_depends_on_another(
    name: str, median: float, tmp_path: Path
) -> None:
    model = deep()
    (exact,) = outputs(model, deep_rows(200, 2))
    convert(model, technique(name), some_deep_rows, tmp_path)
    (found,) = outputs(model, deep_rows(200, 2))
    assert 1e-4 < np.median(relative_errors(exact, found)) < median
    (x,) = deep_rows(5)
    (alone,) = outputs(model, (x[2:3],))
    (among,) = outputs(model, (torch.cat([1e4 * x[:2], x[2:3], torch.zeros(2, 64)]),))
    assert relative_errors(alone, among[2:3])[0] <= tolerance(name, "float32").known
    assert np.isfinite(among).all()


@WITH_VNNI
def test_the_layers_that_rounding_changes_most_stay_in_float32(tmp_path: Path) -> None:
    convert(deep(hard=True), technique("int8-dynamic-openvino"), some_deep_rows, tmp_path)
    (path,) = tmp_path.glob("int8-dynamic-openvino-*.zip")
    found = layers_of(path)
    assert found[5] == "float"
    assert found.count("float") == 12 // onednn.LEFT_IN_FLOAT
    convert(deep(hard=True), technique("int8-static-openvino"), some_deep_rows, tmp_path)
    (path,) = tmp_path.glob("int8-static-openvino-*.zip")
    assert layers_of(path) == ["integers"] * 12


@WITH_VNNI
def test_scales_stay_those_of_the_first_examples(tmp_path: Path) -> None:
    model, rows_ = deep(), deep_rows(9, 3)
    convert(model, technique("int8-static-openvino"), some_deep_rows, tmp_path)
    first = outputs(model, rows_)
    other = [(100 * x,) for (x,) in some_deep_rows()]
    convert(model, technique("int8-static-openvino"), lambda: other, tmp_path)
    assert outputs(model, rows_)[0].tobytes() == first[0].tobytes()
    assert sorted(p.name.rsplit("-", 2)[0] for p in tmp_path.iterdir()) == [
        "fp32-openvino",
        "int8-static-openvino",
    ]


def test_threads_compute_side_by_side(graphs: Path) -> None:
    """A request has room for one call."""
    model = bert()
    batches = [texts(1 + n % 7, 2 + n % 5) for n in range(60)]
    with torch.inference_mode():
        expected = [model.module(*batch) for batch in batches]
    convert(model, technique("fp32-openvino"), some_texts, graphs)

    def compute(batch: Tensors) -> Any:
        return model.forward(*batch)

    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for found, wanted in zip(pool.map(compute, batches), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


# What is refused


def test_a_file_is_made_again_for_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, files in (("1", 1), ("1", 1), ("2", 2)):
        monkeypatch.setattr(openvino, "_version", lambda version=version: version)
        convert(mlp(), technique("fp32-openvino"), some_rows, tmp_path)
        assert len(list(tmp_path.iterdir())) == files


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    convert(mlp(), technique("fp32-openvino"), some_rows, tmp_path)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[data.index(b"model.bin") + 50] ^= 1
    path.write_bytes(data)
    message = r"^precision fp32-openvino: .*fp32-openvino-\w+-\w+\.zip differs from the checksum in its name: .* remove it, and the next run converts the model again$"
    with pytest.raises(ConfigError, match=message):
        convert(mlp(), technique("fp32-openvino"), some_rows, tmp_path)


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("bf16-openvino", "has_bf16", "this CPU has no products in bfloat16, or may not use them: choose fp32-openvino"),
        *(
            (name, "has_int8_products", r"this CPU has no products of 8-bit integers \(VNNI\): choose fp32-openvino")
            for name in INTEGERS
        ),
    ],
)  # fmt: skip
def test_what_this_cpu_has_not_is_refused_and_not_proposed(
    name: str, what: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino, what, lambda: False)
    monkeypatch.setattr("precompute.techniques.machine.has_bf16", lambda: what != "has_bf16")
    with pytest.raises(ConfigError, match=f"^precision {name}: {message}$"):
        convert(mlp(), technique(name), some_rows)
    found = [one.name for one in candidates(Device("cpu"), mlp())]
    assert name not in found
    assert "fp32-openvino" in found


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "openvino" else found(name)
    )
    message = r"^precision fp32-openvino: openvino is not installed: pip install 'precompute-store\[openvino\]'$"
    with pytest.raises(ConfigError, match=message):
        convert(mlp(), technique("fp32-openvino"), some_rows)
    assert not [one for one in candidates(Device("cpu"), mlp()) if one.backend == "openvino"]


def test_a_layer_of_few_inputs_has_no_groups() -> None:
    with pytest.raises(ConfigError, match=r"such integers: choose fp32-openvino|no products"):
        convert(mlp(), technique("int8-dynamic-openvino"), some_rows)


def test_nothing_is_reported_to_anybody(tmp_path: Path) -> None:
    """What reports puts an identifier into the home folder first."""
    code = "import precompute.plugins.openvino.technique as o; print(o._openvino().Core().available_devices)"
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    subprocess.run(
        [sys.executable, "-c", code], env=environment | {"HOME": str(tmp_path)}, check=True
    )
    assert list(tmp_path.iterdir()) == []


def test_a_module_of_any_number_of_inputs_is_exported(tmp_path: Path) -> None:
    check_any_inputs("fp32-openvino", tmp_path)


def test_a_graph_that_lost_a_bit_is_not_computed_by(tmp_path: Path) -> None:
    check_lost_bit("fp32-openvino", tmp_path)
