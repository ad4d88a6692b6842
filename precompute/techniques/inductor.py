"""Inductor: the module compiled to C++ (or to Triton on a GPU), when it is first called or ahead of time into a file.

Measured with MiniLM in float32 on two AVX2 cores, where eager's matrix products reach 70 % of the machine's peak: 1.0 to 1.1 (compile) and 0.8 times (aoti)
eager's rate, after half a minute and more of compiling. It pays where memory and Python are the limit, not products.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.techniques.kept import guarded, kept
from precompute.techniques.machine import computes_in, missing_compiler
from precompute.techniques.shapes import exported
from precompute.techniques.technique import Forward, Technique, module_of

GRAPHED_SHAPES = 8
"""A CUDA graph is recorded for each shape, and each keeps memory of its own: they are used up to so many shapes among the examples."""


class Compiled(Technique):
    """fp32, bf16 and fp16 by ``torch.compile``, anew in each process. MiniLM in bfloat16 reached 3 (AMX) to 5.2 times (AMD Zen) eager float32's rate."""

    convert_s = 40.0

    def missing(self, device: Device) -> str:
        return missing_compiler(device)

    def gain(self, device: Device, model: TorchModel) -> float:
        if missing_compiler(device) or not computes_in(self.dtype, device):
            return 0.0
        return 1.4 if self.dtype == torch.float32 else 4.0

    def converted(self, model: TorchModel, batches: Sequence[Tensors], folder: Path | None) -> Forward:
        return compiled(module_of(model, self.dtype, batches), batches)


class Packaged(Technique):
    """fp32, bf16 and fp16 compiled ahead of time into a file that is kept."""

    convert_s = 60.0

    def missing(self, device: Device) -> str:
        return missing_compiler(device)

    def gain(self, device: Device, model: TorchModel) -> float:
        if device.is_cuda or missing_compiler(device) or not computes_in(self.dtype, device):
            return 0.0
        return 1.1 if self.dtype == torch.float32 else 3.2

    def converted(self, model: TorchModel, batches: Sequence[Tensors], folder: Path | None) -> Forward:
        def write(path: Path) -> None:
            package(module_of(model, self.dtype, batches), batches, path)

        with kept(folder) as place:
            return guarded(load(place.file(self.name, ".pt2", model, batches, "", write)), self.name, batches)


def compiled(module: torch.nn.Module, examples: Sequence[Tensors]) -> Forward:
    """``torch.compile`` with weights frozen into the kernels, one kernel for all shapes.

    Sizes are variables in the compiled code (``dynamic``): compiled for each shape instead, the ninth would silently run eagerly
    (``recompile_limit``). Only a size of 1 is compiled anew, when it first comes.
    """
    _keep_apart()
    on_gpu = examples[0][0].is_cuda
    shapes = {tuple(t.shape for t in example) for example in examples}
    graphs = on_gpu and len(shapes) <= GRAPHED_SHAPES
    forward = torch.compile(module, dynamic=True, options={"freezing": True, "triton.cudagraphs": graphs})
    if not graphs:
        return forward

    def graphed(*inputs: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        out = forward(*inputs)
        # the graph writes its next outputs to the same memory
        return out.clone() if isinstance(out, torch.Tensor) else tuple(t.clone() for t in out)

    return graphed


def _keep_apart() -> None:
    """Give each instruction set a cache of its own: code that Inductor kept for AVX-512 and took up again under ``ATEN_CPU_CAPABILITY=avx2`` computed
    other values (torch 2.13: 30 % of an MLP's outputs, off by up to 0.36). A folder that the environment names is left as it is."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    shared = default_cache_dir()
    # torch notes its default there, too
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared) == shared:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{shared}_{torch.backends.cpu.get_cpu_capability().lower()}"


def package(module: torch.nn.Module, examples: Sequence[Tensors], path: Path) -> None:
    """Compile ahead of time (AOTInductor) into ``path``, a ``.pt2`` file, weights included."""
    _keep_apart()
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            exported(module, examples), package_path=str(path), inductor_configs={"freezing": True}
        )


def load(path: Path) -> Forward:
    """The forward of a file that :func:`package` wrote. It is machine code: only from a folder that nobody else can write to."""
    loaded: Forward = torch._inductor.aoti_load_package(str(path))
    return loaded
