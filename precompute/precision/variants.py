"""Precision: the same module with other numbers and other kernels. What can be tried on this machine, and the conversion.

The reference is always the module in float32, run eagerly: a conversion leaves it as it is, so that both can be computed and compared by
:mod:`precompute.precision.accuracy`. What is not offered, and why: 8-bit integers by torch itself (``torch._int_mm`` measured 7 to 40 times slower
than a float32 product on AVX2; torch.ao is deprecated; torchao computes 1.6 times a plain float32 loop unless compiled), weight-only
integers (0.91 times: the products stay in floats), TorchScript (deprecated), float16 and bfloat16 by ONNX Runtime (its CPU kernels are few).
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from precompute.engine.batching import batches_by_cost
from precompute.model import CheckingModel, Model, digest
from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.precision import inductor, onednn, onnx
from store.errors import ConfigError, ModelError, PrecomputeError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.float32}
"""What a model's large products are measured against (:meth:`Device.peak_flops`): torch multiplies no 8-bit integers on a CPU."""

EMULATED_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Instruction sets by which oneDNN says that it supports bfloat16, and emulates it; by lesser ones it says that it does not."""

CODE_VERSION = 1
"""Raised by whoever changes what is written into the folder; part of the files' names."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a model, known by its :attr:`name` in a configuration, a table and a fingerprint.

    ``precision`` is fp32, bf16, fp16 or int8, ``backend`` eager, onednn, compile, aoti or onnx; ``scheme``, for int8 only, says where the
    scales of a layer's inputs come from: ``static``, the examples.

    Raises:
        ConfigError: no such combination.
    """

    precision: str
    backend: str
    scheme: str | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"unknown precision {self.name!r}: write one of {', '.join(NAMES)}")

    @property
    def name(self) -> str:
        """For example ``bf16-onednn`` or ``int8-static-onnx``."""
        return "-".join(part for part in (self.precision, self.scheme, self.backend) if part)


NAMES = (
    *(f"{precision}-{backend}" for precision in ("fp32", "bf16", "fp16") for backend in ("eager", "onednn", "compile", "aoti")),
    "fp32-onnx",
    "int8-static-onnx",
)
"""Every variant there is."""

REFERENCE = Variant("fp32", "eager")


def parse(name: str) -> Variant:
    """The variant of a name.

    Raises:
        ConfigError: there is none; the message lists them.
    """
    if name not in NAMES:
        raise ConfigError(f"unknown precision {name!r}: write one of {', '.join(NAMES)}")
    precision, *scheme, backend = name.split("-")
    return Variant(precision, backend, *scheme)


def candidates(device: Device, model: TorchModel) -> list[Variant]:
    """What is worth trying here, the cheapest to convert first; the reference is the first.

    By what the machine has: half precision where there are instructions for it (bfloat16 emulated on AVX2 is 10 times slower than float32),
    compiled code where there is a compiler, ONNX Runtime where it is installed. More can be forced by name.
    """
    linear = any(type(m) is torch.nn.Linear for m in model.module.modules())
    if device.is_cuda:
        # before Ampere, bfloat16 is emulated
        halves = ["bf16", "fp16"] if torch.cuda.get_device_capability(device.torch) >= (8, 0) else ["fp16"]
        backends = ["eager"]
    else:
        halves = ["bf16"] if has_bf16() else []
        backends = ["eager", "onednn"] if linear and torch.backends.mkldnn.is_available() else ["eager"]  # type: ignore[no-untyped-call]
    precisions = ["fp32", *halves]
    found = [Variant(precision, backend) for backend in backends for precision in precisions]
    if not _missing_onnx(device):
        found += [Variant("fp32", "onnx")]
        found += [Variant("int8", "onnx", "static")] if linear and not device.is_cuda else []
    if not _missing_compiler(device):
        compilers = ["compile"] if device.is_cuda else ["compile", "aoti"]
        found += [Variant(precision, backend) for backend in compilers for precision in precisions]
    return found


def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 by itself (AVX512-BF16, AMX, or ARM's), and torch and oneDNN may use that: ``ATEN_CPU_CAPABILITY``
    and ``ONEDNN_MAX_CPU_ISA`` let a newer CPU compute as an older one."""
    flags = torch.cpu.get_capabilities()  # what the CPU has, whether it may be used or not
    if any(flags.get(flag) for flag in ("avx512_bf16", "amx_bf16")):
        isa = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
        used = torch.backends.cpu.get_cpu_capability() == "AVX512" and isa not in EMULATED_BF16
    else:
        used = any(flags.get(flag) for flag in ("bf16", "sve_bf16"))
    return used and torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


def has_vnni() -> bool:
    """Whether this CPU adds up products of 8-bit integers in 32 bits: AVX-VNNI, AVX512-VNNI, AMX, or ARM's."""
    flags = torch.cpu.get_capabilities()
    return any(flags.get(flag) for flag in ("avx_vnni", "avx512_vnni", "amx_int8", "dot", "i8mm"))


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

    def examples() -> Sequence[Tensors]:
        found: list[Tensors] = []
        for batch in sample().combine_chunks().to_batches():
            bad = model.unusable(batch) if isinstance(model, CheckingModel) else {}
            good = [row for row in range(batch.num_rows) if row not in bad]
            if good:
                prepared = model.prepare(batch.take(pa.array(good)))
                usable = np.setdiff1d(np.arange(len(good)), list(prepared.bad))
                chosen = [usable[rows] for rows in batches_by_cost(prepared.costs[usable], model.start_cost)]
                if len({len(rows) for rows in chosen}) == 1:  # one number of rows would be taken for a constant
                    chosen.append(np.append(chosen[0], chosen[0][:1]))
                found += [model.tensors(prepared, rows) for rows in chosen]
        if not found:
            rows = sample().num_rows
            if not rows:
                raise ConfigError("the source has no rows, to show the conversion; what needs none is float32")
            raise ConfigError(
                f"none of the source's first {rows:,} rows is usable, to show the conversion: let its SQL leave out "
                "or order last what is bad, or compute in float32"
            )
        return found

    convert(model, wanted, examples, folder)
    model.variant = variant


NOT_TORCH = "this model computes in its own way; only torch models (text_encoder, top_k, torch_module) have other precisions"


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
            warnings.simplefilter("ignore")  # torch's exporter deprecates parts of itself
            _convert(model, variant, examples, folder)
    except PrecomputeError as exc:
        raise ConfigError(f"precision {variant.name}: {exc}") from exc
    except Exception as exc:  # a compiler or an exporter may raise anything about a module it does not know
        cause = (str(exc).strip().splitlines() or [""])[0]
        raise ConfigError(f"precision {variant.name} does not work with this model: {type(exc).__name__}: {cause}") from exc


def _convert(model: TorchModel, variant: Variant, examples: Callable[[], Sequence[Tensors]], folder: Path | None) -> None:
    model.use(model.module)  # before examples are made: a model may lay out its inputs by what computes them
    if variant == REFERENCE:
        return
    _check(model.device, variant)
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
    return copy.deepcopy(module, dict(tensors))  # what the memo holds is taken for a copy made already


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
        with tempfile.TemporaryDirectory(dir=folder) as temporary:  # a file appears whole or not at all
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
                os.fsync(file.fileno())  # a name without its bytes would be taken for the whole file, run after run
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
            found = inputs[position].shape[axis]
            if found != size:
                what = f"dimension {axis} of input {position} was {size} in all rows that the conversion was shown, and is {found} now"
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
        machine=[
            dict(torch.cpu.get_capabilities()),
            torch.get_num_threads(),
            gpu,
        ],  # compiled code has the number of threads in it
    )
    return facts[:16]


def _elements(batch: Tensors) -> int:
    return sum(t.numel() for t in batch)


def _check(device: Device, variant: Variant) -> None:
    """Refuse what this machine lacks.

    Raises:
        ConfigError: it says what.
    """
    if device.is_cuda and (variant.backend == "onednn" or variant.precision == "int8"):
        raise ConfigError(f"{variant.name} computes on a CPU, this model runs on {device.name}: choose bf16, or fp32 and compile")
    reason = ""
    if variant.name == "bf16-onednn" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        reason = "oneDNN packs layers in bfloat16 only for a CPU with AVX-512 or ARM's bfloat16: choose bf16-eager, which is emulated, or fp32-onednn"
    elif variant.backend == "onnx":
        reason = _missing_onnx(device)
    elif variant.backend in ("compile", "aoti"):
        reason = _missing_compiler(device)
    if reason:
        raise ConfigError(reason)


def _missing_onnx(device: Device) -> str:
    """What ONNX needs and is not here; an empty text when all is."""
    packages = [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
    if packages:
        return f"{', '.join(packages)} not installed: pip install 'precompute[onnx]'"
    if not onnx.providers(device.torch):
        return f"onnxruntime computes on a CPU only, this model runs on {device.name}: pip install onnxruntime-gpu in its place"
    return ""


def _missing_compiler(device: Device) -> str:
    """What Inductor needs and is not here; an empty text when all is."""
    if device.is_cuda and importlib.util.find_spec("triton") is None:
        return "Triton is not installed, which compiles for a GPU"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r}: install one, or name it in CXX"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's header files are not installed (python3-dev)"
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters and quantisers log advice for their own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
