"""ONNX Runtime: the module as an ONNX graph, in float32, or on a CPU in 8-bit integers. The extra
``onnx`` installs it; on a GPU it takes ``onnxruntime-gpu`` in its place: inputs and outputs stay on
the GPU, and TensorRT is used before CUDA where its libraries load."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques.artifacts import Folder, exported, guarded, retained
from precompute.techniques.machine import has_int8_products, has_vnni, on_a_cpu_only
from precompute.techniques.onednn import PerRowLinear
from precompute.techniques.technique import (
    Batches,
    Forward,
    Technique,
    elements,
    has_linear,
    module_of,
)

ONNX_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(int16)": torch.int16,
    "tensor(int8)": torch.int8,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}
"""ONNX Runtime's name of a type → torch's."""

QUANTISED = ["MatMul", "Gemm"]
"""Operators computed in 8 bits, where one side is a constant: linear layers, not attention's
products."""


class Exported(Technique):
    """fp32 by ONNX Runtime: MiniLM at 0.94 (AVX2) to 2.7 times (AMD Zen, fused) eager's rate."""

    convert_s = 15.0

    def missing(self, device: Device) -> str:
        return missing_packages(device)

    def gain(self, device: Device, model: TorchModel) -> float:
        return 0.0 if missing_packages(device) else 1.2

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        with retained(folder) as place:
            return self._loaded(self.graph(place, model, batches), model, batches)

    @staticmethod
    def graph(place: Folder, model: TorchModel, batches: Batches) -> Path:
        """The float32 graph's file."""

        def made(path: Path) -> None:
            write(module_of(model, torch.float32, batches), batches, path)

        return place.file("fp32-onnx", ".onnx", model, batches, version(), made)

    def _loaded(self, path: Path, model: TorchModel, batches: Batches) -> Forward:
        with torch.inference_mode():
            single = isinstance(model.module(*min(batches, key=elements)), torch.Tensor)
        return guarded(load(path, single, model.device.torch), self.name, batches)


class Static(Exported):
    """8-bit integers by ONNX Runtime on a CPU, with the inputs' scales taken from examples: 1.2 to
    1.7 times eager float32's rate, and a mean cosine of 0.93 for MiniLM."""

    calibrates = True
    convert_s = 25.0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # ONNX Runtime's own products cannot be had alone
        self.pack = PerRowLinear if has_int8_products() else None

    def missing(self, device: Device) -> str:
        return on_a_cpu_only(self.name, device) or missing_packages(device)

    def gain(self, device: Device, model: TorchModel) -> float:
        return 0.0 if self.missing(device) or not has_linear(model) else 1.4

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        with retained(folder) as place:

            def made(path: Path) -> None:
                quantise(
                    self.graph(place, model, batches), path, batches, reduce_range=not has_vnni()
                )

            return self._loaded(
                place.file(self.name, ".onnx", model, batches, version(), made), model, batches
            )


def missing_packages(device: Device) -> str:
    """What ONNX needs and is not here; an empty text when all is."""
    packages = [
        name
        for name in ("onnx", "onnxruntime", "onnxscript")
        if importlib.util.find_spec(name) is None
    ]
    if packages:
        return f"{', '.join(packages)} not installed: pip install 'precompute-store[onnx]'"
    if not providers(device.torch):
        return (
            f"onnxruntime computes on a CPU only, this model runs on {device.name}: pip install"
            " onnxruntime-gpu in its place"
        )
    return ""


def write(module: torch.nn.Module, examples: Sequence[Tensors], path: Path) -> None:
    """Export to ``path``, float32, weights included."""
    program = torch.onnx.export(
        exported(module, examples), dynamo=True, optimize=True, verbose=False
    )
    assert program is not None
    program.save(path)


def quantise(source: Path, path: Path, examples: Sequence[Tensors], reduce_range: bool) -> None:
    """Rewrite ``source`` with 8-bit linear layers: weights symmetric, one scale an output channel;
    their inputs by the range that the examples show, one scale a layer.

    Args:
        source: what :func:`write` wrote.
        path: file to write.
        examples: the calibration's inputs.
        reduce_range: 7-bit weights, for a CPU without VNNI, where sums of two 8-bit products
            overflow 16 bits (Intel's VPMADDUBSW).
    """
    import onnx
    from onnxruntime import quantization

    exact = onnx.load(source)
    # the quantiser transposes weights and trips over the shapes noted for them
    del exact.graph.value_info[:]

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        """One example at a time."""

        def __init__(self, feeds: Iterable[Mapping[str, npt.NDArray[Any]]]) -> None:
            self._feeds = iter(feeds)

        def get_next(self) -> Mapping[str, npt.NDArray[Any]] | None:
            """The next example's inputs by name; None at the end."""
            return next(self._feeds, None)

    names = [i.name for i in _session(source, torch.device("cpu")).get_inputs()]
    feeds = [
        {name: t.numpy() for name, t in zip(names, example, strict=True)} for example in examples
    ]
    quantization.quantize_static(
        exact,
        path,
        Reader(feeds),
        op_types_to_quantize=QUANTISED,
        per_channel=True,
        reduce_range=reduce_range,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True, "WeightSymmetric": True},
    )


def load(path: Path, single: bool, device: torch.device) -> Callable[..., torch.Tensor | Tensors]:
    """The forward of a file that :func:`write` or :func:`quantise` wrote, with as many threads as
    torch has.

    Args:
        path: the ``.onnx`` file; it is not needed afterwards.
        single: whether the module returns one tensor, not a tuple.
        device: where it computes, and where its inputs and outputs are.
    """
    session = _session(path, device)
    bound = Bound(session, device)

    def forward(*inputs: torch.Tensor) -> torch.Tensor | Tensors:
        outputs = bound(inputs)
        return outputs[0] if single else outputs

    return forward


class Bound:
    """A session that reads its inputs and writes its outputs where torch has them.

    Args:
        session: of ONNX Runtime.
        device: of the tensors.
    """

    def __init__(self, session: Any, device: torch.device) -> None:
        self._session, self._device = session, device
        self._inputs = [(i.name, i.shape) for i in session.get_inputs()]
        self._outputs = [(o.name, o.shape, ONNX_TYPES[o.type]) for o in session.get_outputs()]
        known = {size for _, shape in self._inputs for size in shape if isinstance(size, str)}
        self.sized = all(
            isinstance(size, int) or size in known
            for _, shape, _ in self._outputs
            for size in shape
        )
        """Whether the outputs' sizes are known by the inputs'; else they come by way of the
        host."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        inputs = [t.contiguous() for t in inputs]
        if not self.sized:
            feeds = {
                name: t.cpu().numpy() for (name, _), t in zip(self._inputs, inputs, strict=True)
            }
            return tuple(
                torch.from_numpy(a).to(self._device) for a in self._session.run(None, feeds)
            )
        sizes: dict[str, int] = {}
        binding = self._session.io_binding()
        for (name, shape), tensor in zip(self._inputs, inputs, strict=True):
            sizes |= {
                size: found
                for size, found in zip(shape, tensor.shape, strict=True)
                if isinstance(size, str)
            }
            self._bind(binding.bind_input, name, tensor)
        outputs = []
        for name, shape, dtype in self._outputs:
            sized = [size if isinstance(size, int) else sizes[size] for size in shape]
            outputs.append(torch.empty(sized, dtype=dtype, device=self._device))
            self._bind(binding.bind_output, name, outputs[-1])
        if self._device.type == "cuda":
            # it computes on a stream of its own, and is done when it returns
            torch.cuda.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(binding)
        return tuple(outputs)

    def _bind(self, bind: Callable[..., None], name: str, tensor: torch.Tensor) -> None:
        numbers = torch.empty(0, dtype=tensor.dtype).numpy().dtype.type
        bind(
            name,
            self._device.type,
            self._device.index or 0,
            numbers,
            list(tensor.shape),
            tensor.data_ptr(),
        )


def providers(device: torch.device) -> list[Any]:
    """Execution providers for a device, the one to try first before the others; empty when this
    build of ONNX Runtime has none for it."""
    import onnxruntime

    if device.type == "cpu":
        return ["CPUExecutionProvider"]
    there = onnxruntime.get_available_providers()
    options = {"device_id": str(device.index or 0)}
    return [
        (name, options)
        for name in ("TensorrtExecutionProvider", "CUDAExecutionProvider")
        if name in there
    ]


def version() -> str:
    """ONNX Runtime's, whichever of its packages is installed."""
    import onnxruntime

    return str(onnxruntime.__version__)


def _session(path: Path, device: torch.device) -> Any:
    """Raises:
    ConfigError: it would compute on the CPU, where the model runs on a GPU.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # errors: warnings about what its optimiser left out help nobody here
    options.log_severity_level = 3
    wanted = providers(device)
    session = onnxruntime.InferenceSession(str(path), options, providers=wanted, enable_fallback=0)
    # it leaves out what does not load, without an error
    if device.type != "cpu" and session.get_providers()[0] == "CPUExecutionProvider":
        names = " and ".join(name for name, _ in wanted)
        raise ConfigError(
            f"ONNX Runtime could not load {names}: are CUDA's and cuDNN's libraries of its version"
            " installed?"
        )
    return session
