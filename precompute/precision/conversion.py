"""Conversion: a model made to compute by a variant.

The reference is always the module in float32, run eagerly: a conversion leaves it as it is, so that both can be computed and compared by
:mod:`precompute.precision.accuracy`.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from precompute.engine.batching import batches_by_cost
from precompute.model import CheckingModel, Model, digest
from precompute.models.torch_model import Tensors, TorchModel
from precompute.precision import inductor, onednn, onnx
from precompute.precision.variants import REFERENCE, Variant, check_device, has_vnni, parse
from store.errors import ConfigError, ModelError, PrecomputeError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.float32}
"""What a model's large products are measured against (:meth:`Device.peak_flops`): torch multiplies no 8-bit integers on a CPU."""

CODE_VERSION = 1
"""Raised by whoever changes what is written into the folder; part of the files' names."""

NOT_TORCH = "this model computes in its own way; only torch models (text_encoder, top_k, torch_module) have other precisions"


def use_variant(model: Model, variant: str, sample: Callable[[], pa.Table], folder: Path | None) -> None:
    """:func:`convert` a model as it was loaded, by the name of a variant; nothing is done when it computes by that already.

    Args:
        model: must be a torch model.
        variant: its name.
        sample: makes some hundred rows of the source: shapes to expect, and the scales of a static int8. The same rows each time.
        folder: as for :func:`convert`.

    Raises:
        ConfigError: it cannot be done with this model or on this machine.
    """
    wanted = parse(variant)
    if not isinstance(model, TorchModel):
        raise ConfigError(f"precision {variant}: {NOT_TORCH}")
    if model.variant == variant:
        return

    convert(model, wanted, lambda: _examples(model, sample()), folder)
    model.variant = variant


def _examples(model: TorchModel, rows: pa.Table) -> Sequence[Tensors]:
    """Batches of those rows that the model can take.

    Raises:
        ConfigError: there are none.
    """
    batches: list[Tensors] = []
    for batch in rows.combine_chunks().to_batches():
        bad = model.unusable(batch) if isinstance(model, CheckingModel) else {}
        good = [row for row in range(batch.num_rows) if row not in bad]
        if good:
            prepared = model.prepare(batch.take(pa.array(good)))
            usable = np.setdiff1d(np.arange(len(good)), list(prepared.bad))
            chosen = [usable[positions] for positions in batches_by_cost(prepared.costs[usable], model.start_cost)]
            # one number of rows would be taken for a constant
            if len({len(positions) for positions in chosen}) == 1:
                chosen.append(np.append(chosen[0], chosen[0][:1]))
            batches += [model.tensors(prepared, positions) for positions in chosen]
    if not batches:
        if not rows.num_rows:
            raise ConfigError("the source has no rows, to show the conversion; what needs none is float32")
        raise ConfigError(
            f"none of the source's first {rows.num_rows:,} rows is usable, to show the conversion: let its SQL leave out "
            "or order last what is bad, or compute in float32"
        )
    return batches


def convert(model: TorchModel, variant: Variant, examples: Callable[[], Sequence[Tensors]], folder: Path | None = None) -> None:
    """Let a model compute by a variant from now on. Its ``module``, the reference, stays as it is; float32 weights are shared with it.

    Args:
        model: its ``forward`` is replaced, see :meth:`TorchModel.use`.
        variant: which way.
        examples: makes some batches as :meth:`TorchModel.tensors` does, for the reference; not called for the reference itself. A dimension
            that differs between them is compiled as variable, so there should be two or more, of different sizes. For ``static`` their rows
            give the scales: some hundred rows, of all lengths.
        folder: keeps what took long to make (aoti, onnx), in files named by the model's fingerprint, its weights, the versions and the CPU. A
            ``static`` one keeps its scales, whatever the examples are later. What lies there is trusted, machine code included. Without a
            folder it is made anew each time.

    Raises:
        ConfigError: it cannot be done on this machine, or not with this module; the model then computes the reference.
    """
    try:
        with warnings.catch_warnings(), _quiet():
            # torch's exporter deprecates parts of itself
            warnings.simplefilter("ignore")
            _convert(model, variant, examples, folder)
    except PrecomputeError as exc:
        raise ConfigError(f"precision {variant.name}: {exc}") from exc
    except Exception as exc:
        # a compiler or an exporter may raise anything about a module it does not know
        cause = (str(exc).strip().splitlines() or [""])[0]
        raise ConfigError(f"precision {variant.name} does not work with this model: {type(exc).__name__}: {cause}") from exc


def _convert(model: TorchModel, variant: Variant, examples: Callable[[], Sequence[Tensors]], folder: Path | None) -> None:
    # before examples are made: a model may lay out its inputs by what computes them
    model.use(model.module)
    if variant == REFERENCE:
        return
    check_device(model.device, variant)
    batches = [model.device.put(example) for example in examples()]
    if not batches:
        raise ConfigError("there are no examples to convert with")
    dtype = DTYPES[variant.precision]
    half = dtype in (torch.bfloat16, torch.float16)
    module = copied(model.module, dtype if half else torch.float32)
    if half and any(t.is_floating_point() for t in batches[0]):
        module = _Cast(module, dtype)
    forward: Callable[..., Any]
    if variant.backend == "eager":
        forward = module
    elif variant.backend == "onednn":
        forward = onednn.packed(module)
    elif variant.backend == "compile":
        forward = inductor.compiled(module, batches)
    elif folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            forward = _loaded(model, variant, module, batches, Path(temporary))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        forward = _loaded(model, variant, module, batches, folder)
    with torch.inference_mode():
        # the first calls compile; and a module that reads its layers' weights fails here, not in the run
        for batch in (max(batches, key=_elements), min(batches, key=_elements)):
            forward(*batch)
    model.use(forward, dtype)


def copied(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The module anew, as deep as its structure, with its tensors shared; those in float32 converted where ``dtype`` is another."""
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
        return out.float() if isinstance(out, torch.Tensor) else tuple(t.float() if t.is_floating_point() else t for t in out)


def _loaded(
    model: TorchModel, variant: Variant, module: torch.nn.Module, batches: Sequence[Tensors], folder: Path
) -> Callable[..., Any]:
    """The forward of the variant's file in the folder, which is written where it is not there yet."""
    path = folder / f"{variant.name}-{_digest(model, variant, batches)}.{'pt2' if variant.backend == 'aoti' else 'onnx'}"
    if not path.exists():
        # a file appears whole or not at all
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary) / path.name
            if variant.backend == "aoti":
                inductor.package(module, batches, made)
            elif variant.precision == "fp32":
                onnx.write(module, batches, made)
            else:
                _loaded(model, Variant("fp32", "onnx"), module, batches, folder)
                source = folder / path.name.replace(variant.name, "fp32-onnx")
                onnx.quantise(source, made, batches, reduce_range=not has_vnni())
            with made.open("rb+") as file:
                # a name without its bytes would be taken for the whole file, run after run
                os.fsync(file.fileno())
            os.replace(made, path)
    if variant.backend == "aoti":
        return _guarded(inductor.load(path), variant, batches)
    with torch.inference_mode():
        single = isinstance(model.module(*min(batches, key=_elements)), torch.Tensor)
    return _guarded(onnx.load(path, single, model.device.torch), variant, batches)


def _guarded(forward: Callable[..., Any], variant: Variant, batches: Sequence[Tensors]) -> Callable[..., Any]:
    """The forward of a file that was written for ``batches``: AOTInductor computes something, whatever sizes it is given."""
    constant = inductor.constant(batches)

    def guarded(*inputs: torch.Tensor) -> Any:
        for position, axis, size in constant:
            now = inputs[position].shape[axis]
            if now != size:
                what = (
                    f"dimension {axis} of input {position} was {size} in all rows that the conversion was shown, and is {now} now"
                )
                raise ModelError(f"precision {variant.name}: {what}: choose fp32-compile or fp32-eager, which take any")
        return forward(*inputs)

    return guarded


def _digest(model: TorchModel, variant: Variant, batches: Sequence[Tensors]) -> str:
    """What a compiled file depends on (16 hex digits of a SHA-256)."""
    weights = hashlib.sha256()
    for name, tensor in model.module.state_dict().items():
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        weights.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    runtime = onnx.version() if variant.backend == "onnx" else ""
    gpu = torch.cuda.get_device_name(model.device.torch) if model.device.is_cuda else ""
    facts = digest(
        code=CODE_VERSION,
        model=model.fingerprint(),
        module=repr(model.module),
        weights=weights.hexdigest(),
        inputs=[str(t.dtype) for t in batches[0]],
        varying=sorted(inductor.varying(batches)),
        constant=inductor.constant(batches),
        versions=[torch.__version__, runtime],
        # compiled code has the number of threads in it
        machine=[dict(torch.cpu.get_capabilities()), torch.get_num_threads(), gpu],
    )
    return facts[:16]


def _elements(batch: Tensors) -> int:
    return sum(t.numel() for t in batch)


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters and quantisers log advice for their own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
