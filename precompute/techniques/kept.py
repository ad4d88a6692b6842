"""Kept: files of converted models, made once: compiled code, exported graphs. Their names say all that they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from precompute.model import digest
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ModelError
from precompute.techniques.shapes import constant, varying
from precompute.techniques.technique import Forward

CODE_VERSION = 1
"""Raised by whoever changes what is written into the folder; part of the files' names."""


class Folder:
    """Where they are. What lies there is trusted, machine code included.

    Args:
        path: is made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path

    def file(
        self, name: str, suffix: str, model: TorchModel, batches: Sequence[Tensors], runtime: str, write: Callable[[Path], None]
    ) -> Path:
        """The file of a technique for this model, its weights, the sizes in its examples, the versions and the CPU.

        Args:
            name: the technique's.
            suffix: of the file, with its dot.
            model: the model.
            batches: its examples.
            runtime: version of what computes it, beside torch's own.
            write: writes it to a path, where it is not there yet.
        """
        path = self._path / f"{name}-{_facts(model, batches, runtime)[:16]}{suffix}"
        if not path.exists():
            # a file appears whole or not at all
            with tempfile.TemporaryDirectory(dir=self._path) as temporary:
                made = Path(temporary) / path.name
                write(made)
                with made.open("rb+") as file:
                    # a name without its bytes would be taken for the whole file, run after run
                    os.fsync(file.fileno())
                os.replace(made, path)
        return path


@contextlib.contextmanager
def kept(folder: Path | None) -> Iterator[Folder]:
    """The folder, or one that is gone afterwards."""
    if folder is not None:
        yield Folder(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Folder(Path(temporary))


def guarded(forward: Forward, name: str, batches: Sequence[Tensors]) -> Forward:
    """The forward of a technique's file that was written for ``batches``: AOTInductor computes something, whatever sizes it is given."""
    same = constant(batches)

    def checked(*inputs: torch.Tensor) -> Any:
        for position, axis, size in same:
            now = inputs[position].shape[axis]
            if now != size:
                what = (
                    f"dimension {axis} of input {position} was {size} in all rows that the conversion was shown, and is {now} now"
                )
                raise ModelError(f"precision {name}: {what}: choose fp32-compile or fp32-eager, which take any")
        return forward(*inputs)

    return checked


def _facts(model: TorchModel, batches: Sequence[Tensors], runtime: str) -> str:
    """What a file depends on (hex digits of a SHA-256)."""
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
        # compiled code has the number of threads in it
        machine=[dict(torch.cpu.get_capabilities()), torch.get_num_threads(), gpu],
    )
