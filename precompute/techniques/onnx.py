"""ONNX Runtime: the module as an ONNX graph, in float32. The extra ``onnx`` installs it, and for a
GPU ``onnxruntime-gpu`` in its place: inputs and outputs stay on the GPU, and the host waits for
none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques.artifacts import Folder, exported, guarded, retained
from precompute.techniques.technique import (
    Batches,
    Forward,
    Technique,
    elements,
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

    def _loaded(
        self,
        path: Path,
        model: TorchModel,
        batches: Batches,
        tensorrt: Mapping[str, str] | None = None,
    ) -> Forward:
        with torch.inference_mode():
            single = isinstance(model.module(*min(batches, key=elements)), torch.Tensor)
        return guarded(load(path, single, model.device.torch, tensorrt), self.name, batches)


def missing_packages(device: Device) -> str:
    """What ONNX needs and is not here; an empty text when all is."""
    packages = [
        name
        for name in ("onnx", "onnxruntime", "onnxscript")
        if importlib.util.find_spec(name) is None
    ]
    if packages:
        return f"{', '.join(packages)} not installed: pip install 'precompute-store[onnx]'"
    if not available(device.torch):
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


def input_names(path: Path) -> list[str]:
    """Names of the inputs of a graph's file, in their order."""
    return [i.name for i in _session(path, providers(torch.device("cpu"), 0)).get_inputs()]


def load(
    path: Path, single: bool, device: torch.device, tensorrt: Mapping[str, str] | None = None
) -> Callable[..., torch.Tensor | Tensors]:
    """The forward of a file that :func:`write` wrote, with as many threads as torch has.

    Args:
        path: the ``.onnx`` file; it is not needed afterwards.
        single: whether the module returns one tensor, not a tuple.
        device: where it computes, and where its inputs and outputs are.
        tensorrt: options of TensorRT, for what it is to compute; None for CUDA alone.

    Raises:
        ConfigError: it would compute by something else.
    """
    # its default stream would be another one's: 0 is taken for none
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    wanted = providers(device, 0 if stream is None else stream.cuda_stream, tensorrt)
    bound = Bound(_session(path, wanted), device, stream)

    def forward(*inputs: torch.Tensor) -> torch.Tensor | Tensors:
        outputs = bound(inputs)
        return outputs[0] if single else outputs

    return forward


class Bound:
    """A session that reads its inputs and writes its outputs where torch has them.

    Args:
        session: of ONNX Runtime.
        device: of the tensors.
        stream: of a GPU, which the session computes on.
    """

    def __init__(self, session: Any, device: torch.device, stream: Any = None) -> None:
        self._session, self._device, self._stream = session, device, stream
        self._inputs = [(i.name, i.shape) for i in session.get_inputs()]
        self._outputs = [(o.name, o.shape, ONNX_TYPES[o.type]) for o in session.get_outputs()]
        self._options: Any = None
        if stream is not None:
            import onnxruntime

            # what comes next waits on the GPU, by its stream
            self._options = onnxruntime.RunOptions()
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
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
        if self._stream is None:
            self._session.run_with_iobinding(binding)
        else:
            computing = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(computing)
            self._session.run_with_iobinding(binding, self._options)
            computing.wait_stream(self._stream)
            for tensor in inputs:
                # taken by the stream that copied it, which gives it to others
                tensor.record_stream(self._stream)
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


def available(device: torch.device, provider: str = "CUDAExecutionProvider") -> bool:
    """Whether this build of ONNX Runtime computes on the device; on a GPU, by this provider."""
    import onnxruntime

    return device.type == "cpu" or provider in onnxruntime.get_available_providers()


def providers(
    device: torch.device, stream: int, tensorrt: Mapping[str, str] | None = None
) -> list[Any]:
    """Execution providers for a device, with their options (ONNX Runtime's documentation, "CUDA
    Execution Provider" and "TensorRT Execution Provider"), the one that is to compute first.

    Args:
        device: where.
        stream: of a GPU, its address; not 0.
        tensorrt: options of TensorRT, which leaves to CUDA what it does not know; None for CUDA
            alone.
    """
    if device.type == "cpu":
        return ["CPUExecutionProvider"]
    options = {"device_id": str(device.index or 0), "user_compute_stream": str(stream)}
    # by default its float32 is TF32 from Ampere on; TensorRT's always is
    cuda = ("CUDAExecutionProvider", {**options, "use_tf32": "0" if tensorrt is None else "1"})
    return (
        [cuda]
        if tensorrt is None
        else [("TensorrtExecutionProvider", {**options, **tensorrt}), cuda]
    )


def version() -> str:
    """ONNX Runtime's, whichever of its packages is installed."""
    import onnxruntime

    return str(onnxruntime.__version__)


def _session(path: Path, wanted: Sequence[Any]) -> Any:
    """Raises:
    ConfigError: it would compute by another than the first of these providers.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # errors: warnings about what its optimiser left out are no use here
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=wanted, enable_fallback=0)
    first = wanted[0] if isinstance(wanted[0], str) else wanted[0][0]
    # it leaves out what does not load, without an error
    if session.get_providers()[0] != first:
        raise ConfigError(
            f"ONNX Runtime could not load {first}: are CUDA's and cuDNN's libraries of its version"
            f" installed{', and TensorRT' if 'Tensorrt' in first else ''}?"
        )
    return session
