"""Technique: the base class of a technique, a way to compute a model by other numbers or kernels
than the reference; and the files that several of them make: exported graphs, engines. One file of
this wing is one technique, or a few that differ by their numbers; its line in
:mod:`precompute.techniques.table` makes it known to views and the accuracy gate."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from precompute.model import digest
from precompute.models.device import Device, Pack
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.disk.durable_file import disk_message
from precompute.store.doors import TECHNIQUES
from precompute.store.errors import ConfigError, ModelError
from precompute.techniques.table import BACKENDS, NAMES, OWN, PRECISIONS, words

Forward = Callable[..., Any]
Batches = Sequence[Tensors]
"""Examples of what a model is called with."""

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""First word of a name → what its numbers are. What has another first word takes and gives
float32."""


class Technique(ABC):
    """One way to compute a model, known by its ``name`` in a table and a fingerprint.

    ``precision`` and ``backend`` are a view's words for it. ``dtype`` is what large products are
    computed in, and so what a model's FLOP/s are measured against. ``convert_s`` is about how long
    converting MiniLM took on two cores, in seconds.
    """

    calibrates = False
    """Whether its values come from the rows that a conversion is shown, which then are rows from
    all over the source; others learn shapes from them, for which the first rows do."""
    convert_s = 1.0
    pack: Pack | None = None
    """Makes of a layer in float32 what it is computed by, for the peak that a model's FLOP/s are a
    share of; None where that is a product of ``dtype``, as torch computes it by default."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.precision, self.backend = words(name)
        self.dtype = FLOATS.get(name.partition("-")[0], torch.float32)

    @abstractmethod
    def missing(self, device: Device) -> str:
        """What it needs of this machine and is not there, and what to do, in words; an empty text
        when all is."""

    @abstractmethod
    def gain(self, device: Device, model: TorchModel) -> float:
        """The rate as a multiple of the reference's, about, where it was measured on such a
        machine; 0 where it is not worth trying. It decides what is tried first and what is left out
        when time is short, and is never more than a guess."""

    @abstractmethod
    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        """The model's forward by this technique. The model's ``module``, the reference, stays as it
        is.

        Args:
            batches: examples, at least one, on the model's device; see
                :func:`precompute.techniques.conversion.convert`.
            folder: keeps what took long to make; None where nothing is stored.

        Raises:
            Exception: whatever a compiler or exporter raises about a module it does not know.
        """


def technique(name: str) -> Technique:
    """The technique of a name.

    Raises:
        ConfigError: there is none, the message lists them; or what it comes with is not installed.
    """
    if name not in NAMES:
        precision, backend = words(name)
        # a view's word for a precision may be short: its name is no technique's then
        if (
            precision in PRECISIONS
            and backend in BACKENDS
            and (precision, backend) not in map(words, NAMES)
        ):
            backends, precisions = (
                [words(one)[1 - i] for one in NAMES if words(one)[i] == words(name)[i]]
                for i in (0, 1)
            )
            raise ConfigError(
                f"precision {precision} has no backend {backend}: it has {', '.join(backends)};"
                f" {backend} there is of {', '.join(precisions)}"
            )
        raise ConfigError(f"unknown precision {name!r}: write one of {', '.join(NAMES)}")
    if name not in OWN:
        kept: Technique = TECHNIQUES.open(name)(name)
        return kept
    file, _, kind = OWN[name].partition(":")
    made: Technique = getattr(import_module(f"precompute.techniques.{file}"), kind)(name)
    return made


def module_of(model: TorchModel, dtype: torch.dtype, batches: Batches) -> torch.nn.Module:
    """The model's module again for a conversion (:func:`copied`), between float32 inputs and
    float32 outputs whatever ``dtype`` is."""
    module = copied(model.module, dtype)
    if dtype != torch.float32 and any(t.is_floating_point() for t in batches[0]):
        return _Cast(module, dtype)
    return module


def copied(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The module again, as deep as its structure, with its tensors shared; those in float32
    converted where ``dtype`` is another."""
    tensors: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype == dtype or not tensor.is_floating_point():
            tensors[id(tensor)] = tensor
        elif isinstance(tensor, torch.nn.Parameter):
            tensors[id(tensor)] = torch.nn.Parameter(tensor.detach().to(dtype), requires_grad=False)
        else:
            tensors[id(tensor)] = tensor.to(dtype)
    # what the memo holds is taken for a copy made already
    return copy.deepcopy(module, dict(tensors))


class _Cast(torch.nn.Module):
    """A module in half precision between float32 inputs and float32 outputs."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *inputs: torch.Tensor) -> Any:
        out = self.module(*(t.to(self.dtype) if t.is_floating_point() else t for t in inputs))
        return (
            out.float()
            if isinstance(out, torch.Tensor)
            else tuple(t.float() if t.is_floating_point() else t for t in out)
        )


def with_linear(
    module: torch.nn.Module, make: Callable[[torch.nn.Linear], torch.nn.Module]
) -> torch.nn.Module:
    """The module with each of its linear layers replaced by what ``make`` makes of it, once each,
    in place; the module itself may be one."""
    done: dict[int, torch.nn.Module] = {}

    def replaced(part: torch.nn.Module) -> torch.nn.Module:
        # a subclass may compute something else, or be read by its owner
        if type(part) is torch.nn.Linear:
            if id(part) not in done:
                done[id(part)] = make(part)
            return done[id(part)]
        # named_children() leaves out a layer's second name
        for name, child in list(part._modules.items()):
            if child is not None:
                setattr(part, name, replaced(child))
        return part

    return replaced(module)


def has_linear(model: TorchModel) -> bool:
    """Whether the module has linear layers that can be replaced."""
    return any(type(part) is torch.nn.Linear for part in model.module.modules())


def elements(batch: Tensors) -> int:
    """Numbers in a batch's tensors."""
    return sum(t.numel() for t in batch)


# ---- A module as a graph, and files of converted models: each is made once, and named by all that
# it depends on


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
    """Where files of converted models are. Each has the SHA-256 of its content in its name, and is
    compared with it before it is read; a folder, to which its library adds, is trusted.

    Args:
        path: is made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def file(
        self,
        name: str,
        suffix: str,
        model: TorchModel,
        batches: Sequence[Tensors],
        runtime: str,
        write: Callable[[Path], object],
    ) -> Path:
        """The file of a technique for this model, its weights, the sizes in its examples, the
        versions and the CPU.

        Args:
            runtime: version of what computes it, beside torch's own.
            write: writes it to a path, where it is not there yet; a file, or a folder of files.

        Raises:
            ModelError: it cannot be written.
            ConfigError: it is damaged.
        """
        begin = f"{name}-{_facts(model, batches, runtime)[:16]}"
        try:
            # two processes may have made it at once
            found = min(self._path.glob(f"{begin}*{suffix}"), default=None)
            if found is None:
                return self._written(begin, suffix, write)
            whole = found.is_dir() or found.name == f"{begin}-{_content_of(found)}{suffix}"
        except OSError as exc:
            path = self._path / f"{begin}{suffix}"
            raise ModelError(disk_message(path, exc, "the model was not converted")) from exc
        if not whole:
            # not made again by itself: scales of 8 bits come of other rows each time
            raise ConfigError(
                f"{found} differs from the checksum in its name: the converted model was damaged or"
                " changed; remove it, and the next run converts the model again"
            )
        return found

    def _written(self, begin: str, suffix: str, write: Callable[[Path], object]) -> Path:
        self._path.mkdir(parents=True, exist_ok=True)
        # a file appears whole or not at all
        with tempfile.TemporaryDirectory(dir=self._path) as temporary:
            made = Path(temporary) / f"{begin}{suffix}"
            write(made)
            for part in made.iterdir() if made.is_dir() else (made,):
                with part.open("rb+") as file:
                    # a name without its bytes would be taken for the whole file, run after run
                    os.fsync(file.fileno())
            content = "" if made.is_dir() else f"-{_content_of(made)}"
            path = self._path / f"{begin}{content}{suffix}"
            try:
                os.replace(made, path)
            except OSError:
                # a folder takes no other's place: another process may have been quicker
                if not path.is_dir():
                    raise
            return path


def _content_of(file: Path) -> str:
    """The first 16 hex digits of a file's SHA-256."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]


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
