"""TensorRT: the module's ONNX graph by NVIDIA's compiler, through ONNX Runtime, for a range of
shapes. Making an engine takes minutes: it is stored, with the times of the kernels it chose among.

Not tried on a GPU yet: options are those of ONNX Runtime's documentation ("TensorRT Execution
Provider").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from precompute.model import digest
from precompute.models.device import Device
from precompute.models.graphs import check_rows
from precompute.models.torch_model import TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques.artifacts import retained, varying
from precompute.techniques.eager import in_tf32
from precompute.techniques.machine import on_a_gpu_only
from precompute.techniques.onnx import Exported, available, input_names, missing_packages, version
from precompute.techniques.technique import Batches, Forward, elements

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
