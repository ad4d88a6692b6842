"""Inductor: the module compiled to C++ (or to Triton on a GPU), when it is first called or ahead of time into a file.

Measured with MiniLM in float32 on two AVX2 cores, where eager's matrix products reach 70 % of the machine's peak: 1.0 to 1.1 (compile) and 0.8 times (aoti)
eager's rate, after half a minute and more of compiling. It pays where memory and Python are the limit, not products.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[..., Any]

GRAPHED_SHAPES = 8
"""A CUDA graph is recorded for each shape, and each keeps memory of its own: they are used up to so many shapes among the examples."""


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


def varying(examples: Sequence[Tensors]) -> set[tuple[int, int]]:
    """(input, dimension) of every size that differs between examples."""
    return {(p, axis) for p, axis in _axes(examples) if len({example[p].shape[axis] for example in examples}) > 1}


def constant(examples: Sequence[Tensors]) -> list[tuple[int, int, int]]:
    """(input, dimension, size) of every size that is the same in all examples."""
    axes = varying(examples)
    return [(p, axis, examples[0][p].shape[axis]) for p, axis in _axes(examples) if (p, axis) not in axes]


def _axes(examples: Sequence[Tensors]) -> list[tuple[int, int]]:
    return [(position, axis) for position, t in enumerate(examples[0]) for axis in range(t.dim())]


def exported(module: torch.nn.Module, examples: Sequence[Tensors]) -> torch.export.ExportedProgram:
    """The module as a graph for all sizes: a dimension that differs between examples is a variable, from 1 up.

    Raises:
        Exception: whatever torch.export raises about a module that is no single graph.
    """
    axes = varying(examples)
    dynamic: tuple[Any, ...] = tuple(
        {axis: torch.export.Dim.DYNAMIC(min=1) for axis in range(t.dim()) if (position, axis) in axes}
        for position, t in enumerate(examples[0])
    )
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    # what *args takes is one argument to torch.export, a tuple
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        named = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        dynamic = (*dynamic[:named], dynamic[named:])
    # a size of 1 would be taken for a constant
    example = max(examples, key=lambda e: min((e[p].shape[axis] for p, axis in axes), default=0))
    with torch.no_grad():
        return torch.export.export(module, example, dynamic_shapes=dynamic)


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
