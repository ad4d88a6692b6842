"""Inductor: the module compiled to C++ (or to Triton on a GPU) when it is first called.

Measured with MiniLM in float32 on two AVX2 cores, where eager's matrix products reach 70 % of the
machine's peak: 1.0 to 1.1 times eager's rate, after half a minute of compiling; in bfloat16 on an
H100 1.18 times, after 13 s. It pays where memory and Python are the limit, not products. Compiled
ahead of time into a file (AOTInductor) it had 0.8 times eager's rate on that CPU, and on that GPU a
file could not be loaded (torch 2.11): there is no such technique.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from precompute.models.device import Device
from precompute.models.graphs import Graphed, check_rows
from precompute.models.torch_model import TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques.machine import computes_in, missing_compiler, on_a_gpu_only
from precompute.techniques.technique import Batches, Forward, Technique, elements, module_of


class Compiled(Technique):
    """fp32, bf16 and fp16 by ``torch.compile``, again in each process. MiniLM in bfloat16 reached 3
    (AMX), 5.2 (AMD Zen) and 7.4 times (H100) eager float32's rate."""

    convert_s = 40.0
    options: Mapping[str, Any] = {}
    """Options of Inductor, beside freezing."""

    def missing(self, device: Device) -> str:
        return missing_compiler(device)

    def gain(self, device: Device, model: TorchModel) -> float:
        if missing_compiler(device) or not computes_in(self.dtype, device):
            return 0.0
        return 1.4 if self.dtype == torch.float32 else 4.0

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        module = module_of(model, self.dtype, batches)
        forward: Forward = model.laid_out(
            module, self.dtype, functools.partial(compiled, **self.options)
        )
        return forward


class Tuned(Compiled):
    """The same with products by the kernels that are quickest of those that Inductor has for each,
    measured while it compiles: minutes of it."""

    convert_s = 240.0
    options: Mapping[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True}

    def missing(self, device: Device) -> str:
        return on_a_gpu_only(self.name, device) or missing_compiler(device)

    def gain(self, device: Device, model: TorchModel) -> float:
        # after all that takes less time
        return min(super().gain(device, model), 1.3) if device.is_cuda else 0.0


class Recorded(Compiled):
    """The same, played back as CUDA graphs where shapes repeat: for small batches of small models,
    whose launches take longer than their computing."""

    def missing(self, device: Device) -> str:
        return on_a_gpu_only(self.name, device) or missing_compiler(device)

    def gain(self, device: Device, model: TorchModel) -> float:
        return super().gain(device, model) if device.is_cuda else 0.0

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        reason = check_rows(model.module, batches)
        if reason:
            raise ConfigError(reason)
        # an entry for each row, which texts laid end to end have not
        forward = compiled(module_of(model, self.dtype, batches), **self.options)
        graphed = Graphed(forward, model.device.torch)
        with torch.inference_mode():
            # what cannot be recorded is refused here, and not among the rows of a run
            graphed.check(max(batches, key=elements))
        return graphed


def compiled(module: torch.nn.Module, **options: Any) -> Forward:
    """``torch.compile`` with weights frozen into the kernels, one kernel for all shapes.

    Sizes are variables in the compiled code (``dynamic``): compiled for each shape instead, the
    ninth would silently run eagerly (``recompile_limit``). Only a size of 1 is compiled again, when
    it first comes. Inductor's own CUDA graphs are off: it records one for every shape there is.
    """
    _keep_apart()
    fixed: dict[str, Any] = {"freezing": True, "triton.cudagraphs": False}
    if any(parameter.is_cuda for parameter in module.parameters()):
        return torch.compile(module, dynamic=True, options={**fixed, **options})
    # in as many threads as the one that calls has, since several may compute at once, each with a
    # share
    fixed |= {"cpp.dynamic_threads": True, "guard_filter_fn": _but_for_threads}
    forward = torch.compile(module, dynamic=True, options={**fixed, **options})
    known: set[tuple[bool, ...]] = set()
    compiling = threading.Lock()

    def one_by_one(*inputs: torch.Tensor) -> Any:
        """Threads that all come with a first size of 1 would each compile it, until the limit is
        reached."""
        kind = tuple(size == 1 for tensor in inputs for size in tensor.shape)
        if kind in known:
            return forward(*inputs)
        with compiling:
            out = forward(*inputs)
            known.add(kind)
            return out

    return one_by_one


def _but_for_threads(guards: Sequence[Any]) -> list[bool]:
    """Which guards of compiled code to keep: all but that of the process's state, of which the
    number of threads is a part; the code does not depend on it."""
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]


def _keep_apart() -> None:
    """Give each instruction set a cache of its own: code that Inductor retained for AVX-512 and
    took up again under ``ATEN_CPU_CAPABILITY=avx2`` computed other values (torch 2.13: 30 % of an
    MLP's outputs, off by up to 0.36). A folder that the environment names is left as it is.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    shared = default_cache_dir()
    # torch notes its default there, too
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared) == shared:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
            f"{shared}_{torch.backends.cpu.get_cpu_capability().lower()}"
        )
