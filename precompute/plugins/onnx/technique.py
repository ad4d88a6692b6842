"""ONNX Runtime: the module as an ONNX graph, in float32, or by NVIDIA's TensorRT. The extra
``onnx`` installs it, and for a GPU ``onnxruntime-gpu`` in its place: inputs and outputs stay on the
GPU, and the host waits for none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from precompute.model import digest
from precompute.models.device import Device, check_rows
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques.machine import on_a_gpu_only
from precompute.techniques.pytorch import in_tf32
from precompute.techniques.technique import (
    Batches,
    Folder,
    Forward,
    Technique,
    elements,
    exported,
    guarded,
    module_of,
    retained,
    varying,
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
    try:
        there = available(device.torch)
    except (ImportError, OSError) as exc:
        return f"onnxruntime is installed, and does not load: {exc}"
    if not there:
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


# ---- TensorRT: the graph by NVIDIA's compiler, for a range of shapes. Making an engine takes
# minutes: it is stored, with the times of the kernels it chose among. Not tried on a GPU yet:
# options are those of ONNX Runtime's documentation ("TensorRT Execution Provider").


MOST_PLACES = 2**17
"""Tokens of a batch that an engine is made for, or rows of a model whose rows have no length:
memory for its largest shapes is taken when it is loaded, a gigabyte or two of BERT-base's size."""

Shape = tuple[int, ...]


class Engine(Exported):
    """fp16, and tf32: TensorRT takes float32 for TF32 from Ampere on, and ONNX Runtime 1.31 has no
    option against that. Batches with more rows than an engine takes are computed in parts."""

    convert_s = 240.0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pack = in_tf32 if self.precision == "tf32" else None

    def missing(self, device: Device) -> str:
        """It needs ONNX Runtime, too, and a GPU that has such numbers."""
        reason = on_a_gpu_only(self.name, device, (8, 0) if self.precision == "tf32" else (0, 0))
        if reason or (reason := missing_packages(device)):
            return reason
        if available(device.torch, "TensorrtExecutionProvider"):
            return ""
        return "this build of ONNX Runtime has no TensorRT: pip install onnxruntime-gpu"

    def gain(self, device: Device, model: TorchModel) -> float:
        if self.missing(device):
            return 0.0
        return 4.2 if self.dtype == torch.float16 else 2.2

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        if reason := check_rows(model.module, batches):
            raise ConfigError(reason)
        with retained(folder) as place:
            graph = self.graph(place, model, batches)
            shapes = profile(batches, getattr(model, "max_tokens", 0))
            options = {
                **profile_options(input_names(graph), shapes),
                "trt_engine_cache_enable": "True",
                "trt_timing_cache_enable": "True",
                "trt_fp16_enable": str(self.dtype == torch.float16),
                # variances are sums of squares, beyond float16's range
                "trt_layer_norm_fp32_fallback": "True",
            }

            def build(path: Path) -> None:
                path.mkdir()
                # engines appear in the folder as they are made: where that is cut short, in none
                self._loaded(graph, model, batches, _in(path, options))

            runtime = f"{version()} {digest(options=options)}"
            engines = place.file(self.name, ".engines", model, batches, runtime, build)
            forward = self._loaded(graph, model, batches, _in(engines, options))
        return in_parts(forward, shapes[-1][0][0])


def profile(batches: Batches, max_tokens: int) -> tuple[list[Shape], list[Shape], list[Shape]]:
    """The least, the usual and the largest shape of each input that an engine is made for: from one
    row, and one token, to :data:`MOST_PLACES` of them.

    Args:
        batches: examples, with an entry a row in each input.
        max_tokens: of the longest text, which no example may have; 0 where there is no such limit.
    """
    usual = max(batches, key=elements)
    # axes but the rows'
    lengths = {(p, axis) for p, axis in varying(batches) if axis}
    most = {
        (p, axis): max(max_tokens, *(batch[p].shape[axis] for batch in batches))
        for p, axis in lengths
    }
    rows = max(1, MOST_PLACES // max(most.values(), default=1))

    def shapes(row_count: int, of_length: Callable[[tuple[int, int], int], int]) -> list[Shape]:
        return [
            (
                row_count,
                *(
                    of_length((p, axis), size) if (p, axis) in lengths else size
                    for axis, size in enumerate(t.shape[1:], 1)
                ),
            )
            for p, t in enumerate(usual)
        ]

    return (
        shapes(1, lambda *_: 1),
        shapes(min(rows, len(usual[0])), lambda _, size: size),
        shapes(rows, lambda place, _: most[place]),
    )


def profile_options(names: Sequence[str], shapes: tuple[list[Shape], ...]) -> dict[str, str]:
    """The profile as TensorRT's options, by the names of the graph's inputs."""
    return {
        f"trt_profile_{which}_shapes": ",".join(
            f"{name}:{'x'.join(map(str, shape))}" for name, shape in zip(names, found, strict=True)
        )
        for which, found in zip(("min", "opt", "max"), shapes, strict=True)
    }


def in_parts(forward: Forward, rows: int) -> Forward:
    """The forward of batches with any number of rows, by so many at most."""

    def parts(*inputs: torch.Tensor) -> Any:
        if len(inputs[0]) <= rows:
            return forward(*inputs)
        made = [
            forward(*part) for part in zip(*(torch.split(t, rows) for t in inputs), strict=True)
        ]
        if isinstance(made[0], torch.Tensor):
            return torch.cat(made)
        return tuple(torch.cat(each) for each in zip(*made, strict=True))

    return parts


def _in(folder: Path, options: dict[str, str]) -> dict[str, str]:
    return {
        **options,
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_path": str(folder),
    }
