"""Artifacts: files of converted models, made once: exported graphs, engines, named by all that they
depend on; and which sizes of their inputs vary."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from precompute.model import digest
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ModelError
from precompute.techniques.technique import Forward


def varying(examples: Sequence[Tensors]) -> set[tuple[int, int]]:
    """(input, dimension) of every size that differs between examples."""
    return {
        (p, axis)
        for p, axis in _axes(examples)
        if len({example[p].shape[axis] for example in examples}) > 1
    }


def constant(examples: Sequence[Tensors]) -> list[tuple[int, int, int]]:
    """(input, dimension, size) of every size that is the same in all examples."""
    axes = varying(examples)
    return [
        (p, axis, examples[0][p].shape[axis])
        for p, axis in _axes(examples)
        if (p, axis) not in axes
    ]


def _axes(examples: Sequence[Tensors]) -> list[tuple[int, int]]:
    return [(position, axis) for position, t in enumerate(examples[0]) for axis in range(t.dim())]


def exported(module: torch.nn.Module, examples: Sequence[Tensors]) -> torch.export.ExportedProgram:
    """The module as a graph for all sizes: a dimension that differs between examples is a variable,
    from 1 up.

    Raises:
        Exception: whatever torch.export raises about a module that is no single graph.
    """
    axes = varying(examples)
    dynamic: tuple[Any, ...] = tuple(
        {
            axis: torch.export.Dim.DYNAMIC(min=1)
            for axis in range(t.dim())
            if (position, axis) in axes
        }
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


CODE_VERSION = 1
"""Raised with each change of what is written into the folder; part of the files' names."""


class Folder:
    """Where they are. What lies there is trusted.

    Args:
        path: is made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path

    def file(
        self,
        name: str,
        suffix: str,
        model: TorchModel,
        batches: Sequence[Tensors],
        runtime: str,
        write: Callable[[Path], None],
    ) -> Path:
        """The file of a technique for this model, its weights, the sizes in its examples, the
        versions and the CPU.

        Args:
            runtime: version of what computes it, beside torch's own.
            write: writes it to a path, where it is not there yet; a file, or a folder of files.
        """
        path = self._path / f"{name}-{_facts(model, batches, runtime)[:16]}{suffix}"
        if not path.exists():
            # a file appears whole or not at all
            with tempfile.TemporaryDirectory(dir=self._path) as temporary:
                made = Path(temporary) / path.name
                write(made)
                for part in made.iterdir() if made.is_dir() else (made,):
                    with part.open("rb+") as file:
                        # a name without its bytes would be taken for the whole file, run after run
                        os.fsync(file.fileno())
                try:
                    os.replace(made, path)
                except OSError:
                    # a folder takes no other's place: another process may have been quicker
                    if not path.is_dir():
                        raise
        return path


@contextlib.contextmanager
def retained(folder: Path | None) -> Iterator[Folder]:
    """The folder, or one that is gone afterwards."""
    if folder is not None:
        yield Folder(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Folder(Path(temporary))


def guarded(forward: Forward, name: str, batches: Sequence[Tensors]) -> Forward:
    """The forward of a technique's file that was written for ``batches``, and refuses other
    sizes: a graph may compute something, whatever it is given."""
    same = constant(batches)

    def checked(*inputs: torch.Tensor) -> Any:
        for position, axis, size in same:
            now = inputs[position].shape[axis]
            if now != size:
                what = (
                    f"dimension {axis} of input {position} was {size} in all rows that the"
                    f" conversion was shown, and is {now} now"
                )
                raise ModelError(
                    f"precision {name}: {what}: choose fp32-compile or fp32-eager, which take any"
                )
        return forward(*inputs)

    return checked


def _facts(model: TorchModel, batches: Sequence[Tensors], runtime: str) -> str:
    weights = hashlib.sha256()
    for name, tensor in model.module.state_dict().items():
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        weights.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    gpu = torch.cuda.get_device_name(model.device.torch) if model.device.is_cuda else ""
    return digest(
        code=CODE_VERSION,
        model=model.fingerprint(),
        module=repr(model.module),
        weights=weights.hexdigest(),
        inputs=[str(t.dtype) for t in batches[0]],
        varying=sorted(varying(batches)),
        constant=constant(batches),
        versions=[torch.__version__, runtime],
        machine=[dict(torch.cpu.get_capabilities()), gpu],
    )
