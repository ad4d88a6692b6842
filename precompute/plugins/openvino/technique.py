"""OpenVINO: the module as an OpenVINO graph on a CPU, in float32 or bfloat16, or with linear layers
in 8-bit integers. The extra ``openvino`` installs it.

MiniLM over docstrings by one AMD Zen 5 core (avx2 avx512f avx512_bf16 avx512_vnni, no AMX), times
the rate of float32 eager: float32 2.0 to 2.3, bfloat16 3.6 to 4.0, 8 bits by groups 2.8, static
ones 4.8.
"""

from __future__ import annotations

import importlib.util
import queue
import sys
import tempfile
import threading
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques.machine import (
    computes_in,
    has_bf16,
    has_int8_products,
    on_a_cpu_only,
)
from precompute.techniques.onednn import (
    LEFT_IN_FLOAT,
    ROWS_COMPARED,
    STEPS,
    TINY,
    PerRowLinear,
)
from precompute.techniques.technique import (
    Batches,
    Folder,
    Forward,
    Technique,
    elements,
    exported,
    guarded,
    has_linear,
    module_of,
    retained,
)

PARTS = ("model.xml", "model.bin")
"""Files of a graph: its structure and its weights."""


class Graph(Technique):
    """fp32 and bf16."""

    convert_s = 5.0
    settings: Mapping[str, Any] = MappingProxyType({})
    """What it is compiled with, beside threads and precision."""

    def missing(self, device: Device) -> str:
        if device.is_cuda:
            return on_a_cpu_only(self.name, device)
        if importlib.util.find_spec("openvino") is None:
            return "openvino is not installed: pip install 'precompute-store[openvino]'"
        if self.dtype == torch.bfloat16 and not has_bf16():
            return "this CPU has no products in bfloat16, or may not use them: choose fp32-openvino"
        return ""

    def gain(self, device: Device, model: TorchModel) -> float:
        if self.missing(device) or not computes_in(self.dtype, device):
            return 0.0
        return 1.7 if self.dtype == torch.float32 else 4.0

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        with torch.inference_mode():
            single = isinstance(model.module(*min(batches, key=elements)), torch.Tensor)
        with retained(folder) as place:
            graph = read(self.file(place, model, batches))
        precision = {torch.float32: "f32", torch.bfloat16: "bf16"}[self.dtype]
        settings = {"INFERENCE_PRECISION_HINT": precision, **self.settings}
        return guarded(Compiled(graph, settings, single), self.name, batches)

    def file(self, place: Folder, model: TorchModel, batches: Batches) -> Path:
        """The graph's file; it is one for both."""

        def made(path: Path) -> None:
            program = exported(module_of(model, torch.float32, batches), batches)
            write(_openvino().convert_model(program), path)

        return place.file("fp32-openvino", ".zip", model, batches, _version(), made)


class Integers(Graph):
    """Linear layers in 8-bit integers, the rest in float32, for a CPU with VNNI."""

    calibrates = True
    convert_s = 8.0
    gains = (1.0, 1.0)
    """Gain on a CPU with bfloat16, which is nearer to float32, and on one without."""
    multiple = 1
    """Number that a layer's inputs must be a multiple of."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # OpenVINO's own products cannot be had alone
        self.pack = PerRowLinear if has_int8_products() else None

    def missing(self, device: Device) -> str:
        missing = super().missing(device)
        if not missing and not has_int8_products():
            return "this CPU has no products of 8-bit integers (VNNI): choose fp32-openvino"
        return missing

    def gain(self, device: Device, model: TorchModel) -> float:
        if self.missing(device) or not has_linear(model):
            return 0.0
        return self.gains[0] if has_bf16() else self.gains[1]

    def file(self, place: Folder, model: TorchModel, batches: Batches) -> Path:
        def made(path: Path) -> None:
            graph = read(Graph.file(self, place, model, batches))
            layers = [
                layer
                for layer in linear_layers(graph)
                if layer.input_value(1).get_shape()[1] % self.multiple == 0
            ]
            if not layers:
                raise ConfigError("no linear layer has such integers: choose fp32-openvino")
            self.quantise(graph, layers, batches)
            graph.validate_nodes_and_infer_types()
            write(graph, path)

        return place.file(self.name, ".zip", model, batches, _version(), made)

    @abstractmethod
    def quantise(self, graph: Any, layers: Sequence[Any], batches: Batches) -> None:
        """Let layers of the graph multiply integers."""


GROUP = 32
"""Inputs of a layer that share a scale, each row's and each output's weights'. 16 take a fifth
longer, and with one scale an output for the weights recall@10 is 0.009 lower."""


class Grouped(Integers):
    """int8-dynamic: each row of a layer's inputs, and each output's weights, with a scale for every
    32 of their numbers, so that no row depends on another; a quarter of the layers in float32, by
    how much rounding changes them on the view's rows.

    1,024 docstrings by MiniLM: cosine 0.99987 and recall@10 0.988 at 1.5 times OpenVINO's float32
    rate (AMD Zen 5); without layers in float32 0.99971 and 0.984 at 1.6 times.
    """

    gains = (1.5, 2.5)
    multiple = GROUP
    settings = MappingProxyType({"DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP})

    def quantise(self, graph: Any, layers: Sequence[Any], batches: Batches) -> None:
        weights = [weight_of(layer) for layer in layers]
        rounded = [dequantised(*quantised(weight, GROUP)) for weight in weights]
        changed, whole = torch.zeros(len(layers)), torch.full([len(layers)], TINY)
        for number, rows in inputs_of(graph, layers, batches):
            rows = rows[:: len(rows) // ROWS_COMPARED + 1]
            exact = rows @ weights[number].T
            found = dequantised(*quantised(rows, GROUP)) @ rounded[number].T
            changed[number] += (found - exact).square().sum()
            whole[number] += exact.square().sum()
        for number in (changed / whole).argsort()[: len(layers) - len(layers) // LEFT_IN_FLOAT]:
            replace_weight(layers[number], weights[number], GROUP)


SMOOTHED = 0.85
"""How much of the differences between a layer's inputs goes to its weights, 0 to 1 (α of Xiao et
al. 2023, SmoothQuant, equation 4). MiniLM's recall@10 over samples of 384 docstrings by 0.5,
0.7, 0.85 and 0.95: 0.887, 0.943, 0.951, 0.952; without any 0.930; by the best of each layer 0.948;
by 1.25 times the range that rows showed 0.942, and by its quantiles 0.9999 0.935."""


class Static(Integers):
    """int8: one scale for all inputs of a layer, by the least and the largest that the view's rows
    showed, after outlying ones were made smaller and their weights larger (SmoothQuant).

    An MLP (64 → 256 → 256 → 1) 7 times float32 eager's rate (bfloat16 by oneDNN 4.3), scores 0.022
    off. 384 docstrings by MiniLM: cosine 0.9973, recall@10 0.951 at 2.4 times OpenVINO's float32
    rate; a third of the layers in float32 adds 0.01 and takes 1.4 times as long.
    """

    gains = (3.0, 3.5)

    def quantise(self, graph: Any, layers: Sequence[Any], batches: Batches) -> None:
        least: dict[int, torch.Tensor] = {}
        largest: dict[int, torch.Tensor] = {}
        for number, rows in inputs_of(graph, layers, batches):
            low, high = rows.amin(0), rows.amax(0)
            least[number] = torch.minimum(least.get(number, low), low)
            largest[number] = torch.maximum(largest.get(number, high), high)
        for number, layer in enumerate(layers):
            weight = weight_of(layer)
            inputs = torch.maximum(largest[number], -least[number]).clamp(min=1e-5)
            smoothed = inputs**SMOOTHED / weight.abs().amax(0).clamp(min=1e-5) ** (1 - SMOOTHED)
            if layer.get_output_partial_shape(0).rank.get_length() == 2:
                # OpenVINO 2026.4 joins such a division with the rounding, and loses by it: an MLP's
                # scores were 13 % off in place of 3 %, and undivided 2 %
                smoothed = torch.ones_like(inputs)
            low = (least[number] / smoothed).amin().clamp(max=0)
            high = (largest[number] / smoothed).amax().clamp(min=TINY)
            round_input(layer, smoothed, low, high)
            replace_weight(layer, weight * smoothed, weight.shape[1])


def linear_layers(graph: Any) -> list[Any]:
    """Products with constant weights of [outputs, inputs]."""
    return [
        node
        for node in graph.get_ordered_ops()
        if node.get_type_name() == "MatMul"
        and node.input_value(1).get_node().get_type_name() == "Constant"
        and len(node.input_value(1).get_shape()) == 2
        and node.get_attributes()["transpose_b"]
        and not node.get_attributes()["transpose_a"]
    ]


def weight_of(layer: Any) -> torch.Tensor:
    """[outputs, inputs]."""
    return torch.from_numpy(layer.input_value(1).get_node().data.copy())


def inputs_of(
    graph: Any, layers: Sequence[Any], batches: Batches
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each layer's number and the float32 rows that it is multiplied with, batch by batch."""
    sources = [layer.input_value(0) for layer in layers]
    watched = _openvino().Model(sources, graph.get_parameters(), "inputs of layers")
    compute = Compiled(watched, {"INFERENCE_PRECISION_HINT": "f32"}, single=False)
    for batch in batches:
        for number, found in enumerate(compute(*batch)):
            yield number, found.reshape(-1, found.shape[-1])


def quantised(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] as int8 [n, k / group, group] and float32 scales [n, k / group, 1], symmetric."""
    grouped = rows.reshape(len(rows), -1, group)
    scales = grouped.abs().amax(2, keepdim=True).clamp(min=TINY) / STEPS
    return (grouped / scales).round().to(torch.int8), scales


def dequantised(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 [n, k] of what :func:`quantised` returned."""
    return (numbers * scales).flatten(1)


def replace_weight(layer: Any, weight: torch.Tensor, group: int) -> None:
    """Multiply with integers and scales in place of float32 [outputs, inputs]."""
    op = _openvino().opset13
    numbers, scales = quantised(weight, group)
    if group == weight.shape[1]:
        numbers, scales = numbers[:, 0], scales[:, 0]
    now = op.multiply(op.convert(op.constant(numbers.numpy()), "f32"), op.constant(scales.numpy()))
    if numbers.dim() == 3:
        now = op.reshape(now, op.constant(np.array(weight.shape)), special_zero=False)
    layer.input(1).replace_source_output(now.output(0))


def round_input(layer: Any, divisors: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    """Divide the layer's input by ``divisors`` [inputs] and round it to 8 bits from ``low`` to
    ``high``."""
    op = _openvino().opset13
    least, largest = (op.constant(limit.numpy()) for limit in (low, high))
    divided = op.multiply(layer.input_value(0), op.constant((1 / divisors).numpy()))
    rounded = op.fake_quantize(divided, least, largest, least, largest, 2 * STEPS + 2)
    layer.input(0).replace_source_output(rounded.output(0))


class Compiled:
    """A graph's forward, by as many threads as torch has in the one that calls: compiled once for
    each such number, with room for others beside it as far as the process has threads.

    Args:
        graph: of OpenVINO.
        settings: what it is compiled with, beside threads.
        single: whether it returns one tensor, not a tuple.
    """

    def __init__(self, graph: Any, settings: Mapping[str, Any], single: bool) -> None:
        self._graph, self._settings, self._single = graph, settings, single
        self._threads = torch.get_num_threads()
        self._compiled: dict[int, tuple[Any, queue.SimpleQueue[Any]]] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | Tensors:
        compiled, idle = self._with(torch.get_num_threads())
        try:
            request = idle.get_nowait()
        except queue.Empty:
            request = compiled.create_infer_request()
        arrays = [tensor.contiguous().numpy() for tensor in inputs]
        for position, array in enumerate(arrays):
            request.set_input_tensor(position, _openvino().Tensor(array, shared_memory=True))
        request.infer()
        # the next call writes where this one did
        outputs = tuple(
            torch.from_numpy(request.get_output_tensor(number).data.copy())
            for number in range(len(compiled.outputs))
        )
        idle.put(request)
        return outputs[0] if self._single else outputs

    def _with(self, threads: int) -> tuple[Any, queue.SimpleQueue[Any]]:
        with self._lock:
            if threads not in self._compiled:
                at_once = max(1, self._threads // threads)
                settings = {
                    "NUM_STREAMS": at_once,
                    "INFERENCE_NUM_THREADS": at_once * threads,
                    "ENABLE_CPU_PINNING": False,
                    **self._settings,
                }
                compiled = _openvino().Core().compile_model(self._graph, "CPU", settings)
                self._compiled[threads] = compiled, queue.SimpleQueue()
            return self._compiled[threads]


def write(graph: Any, path: Path) -> None:
    """A graph into one file, a ZIP archive without compression."""
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        xml, weights = (Path(temporary) / name for name in PARTS)
        _openvino().save_model(graph, xml, compress_to_fp16=False)
        with zipfile.ZipFile(path, "w") as archive:
            for part in (xml, weights):
                archive.write(part, part.name)


def read(path: Path) -> Any:
    """A graph that :func:`write` wrote; its file is not needed afterwards."""
    with zipfile.ZipFile(path) as archive:
        structure, weights = (archive.read(name) for name in PARTS)
    return _openvino().Core().read_model(structure, weights)


def _version() -> str:
    return str(_openvino().__version__)


def _openvino() -> Any:
    """OpenVINO, imported without what reports each import and each conversion to Google
    Analytics."""
    if "openvino" not in sys.modules:
        # a module of None is one that cannot be imported
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
        try:
            import openvino
        finally:
            del sys.modules["openvino_telemetry"]
    import openvino

    return openvino
