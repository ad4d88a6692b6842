"""Shapes: which sizes of a model's inputs vary, by examples, and the module as one graph for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from precompute.models.torch_model import Tensors


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
