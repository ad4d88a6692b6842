"""Variants: the ways to compute a model by other numbers and other kernels, and which of them this machine has."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from precompute.models.device import Device
from precompute.models.torch_model import TorchModel
from precompute.precision import onnx
from store.errors import ConfigError

EMULATED_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Instruction sets by which oneDNN says that it supports bfloat16, and emulates it; by lesser ones it says that it does not."""


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
    worthwhile = [Variant(precision, backend) for backend in backends for precision in precisions]
    if not _missing_onnx(device):
        worthwhile += [Variant("fp32", "onnx")]
        worthwhile += [Variant("int8", "onnx", "static")] if linear and not device.is_cuda else []
    if not _missing_compiler(device):
        compilers = ["compile"] if device.is_cuda else ["compile", "aoti"]
        worthwhile += [Variant(precision, backend) for backend in compilers for precision in precisions]
    return worthwhile


def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 by itself (AVX512-BF16, AMX, or ARM's), and torch and oneDNN may use that: ``ATEN_CPU_CAPABILITY``
    and ``ONEDNN_MAX_CPU_ISA`` let a newer CPU compute as an older one."""
    # what the CPU has, whether it may be used or not
    flags = torch.cpu.get_capabilities()
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


def check_device(device: Device, variant: Variant) -> None:
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
