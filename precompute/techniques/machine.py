"""Machine: what techniques need of this machine: instructions for bfloat16 and 8-bit integers, a
compiler."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from precompute.models.device import Device
from precompute.store.errors import ConfigError

EMULATED_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Instruction sets by which oneDNN says that it supports bfloat16, and emulates it; by lesser ones
it says that it does not."""
PROBED = 256
"""Rows, inputs and outputs of a product that shows how exact products are: 1 ms, and large enough
for the kernels that layers have."""
FLOAT32_ERROR = 1e-5


def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 by itself (AVX512-BF16, AMX, or ARM's), and torch and
    oneDNN may use that: ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA`` let a newer CPU compute
    as an older one."""
    # what the CPU has, whether it may be used or not
    flags = torch.cpu.get_capabilities()
    if any(flags.get(flag) for flag in ("avx512_bf16", "amx_bf16")):
        used = (
            torch.backends.cpu.get_cpu_capability() == "AVX512"
            and _onednn_isa() not in EMULATED_BF16
        )
    else:
        used = any(flags.get(flag) for flag in ("bf16", "sve_bf16"))
    return used and has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_onednn() -> bool:
    """Whether torch was built with it."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def has_vnni() -> bool:
    """Whether this CPU adds up products of 8-bit integers in 32 bits: AVX-VNNI, AVX512-VNNI, AMX,
    or ARM's."""
    flags = torch.cpu.get_capabilities()
    return any(flags.get(flag) for flag in ("avx_vnni", "avx512_vnni", "amx_int8", "dot", "i8mm"))


def has_int8_products() -> bool:
    """Whether oneDNN may use them: what ``ONEDNN_MAX_CPU_ISA`` forbids it does by a reference that
    takes seconds for a layer."""
    without = ("SSE41", "AVX", "AVX2", "AVX512_CORE")
    return has_onednn() and has_vnni() and _onednn_isa() not in without


def _onednn_isa() -> str:
    """The most that oneDNN may use, where the environment says so."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()


def instructions() -> dict[str, Any]:
    """What this CPU has and torch and oneDNN may use, of what values depend on."""
    names = (
        "ONEDNN_MAX_CPU_ISA",
        "DNNL_MAX_CPU_ISA",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "DNNL_DEFAULT_FPMATH_MODE",
    )
    limits = {name: os.environ.get(name) for name in names}
    return {
        "flags": dict(torch.cpu.get_capabilities()),
        "torch": torch.backends.cpu.get_cpu_capability(),
        **limits,
    }


def computes_in(dtype: torch.dtype, device: Device) -> bool:
    """Whether the device multiplies such floats by itself and gains by it: float16 pays on GPUs
    alone, and bfloat16, emulated on AVX2, is 10 times slower than float32."""
    if dtype == torch.float32:
        return True
    if device.is_cuda:
        # before Ampere, bfloat16 is emulated
        return dtype == torch.float16 or torch.cuda.get_device_capability(device.torch) >= (8, 0)
    return dtype == torch.bfloat16 and has_bf16()


def missing_compiler(device: Device) -> str:
    """What Inductor needs and is not here; an empty text when all is."""
    if device.is_cuda and importlib.util.find_spec("triton") is None:
        return "Triton is not installed, which compiles for a GPU"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r}: install one, or name it in CXX"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's header files are not installed (python3-dev)"
    return ""


def check_layers(kind: str, right: Callable[[], bool], instead: str) -> None:
    """Refuse linear layers made of torch's private operators, where these are not there, or compute
    something else.

    Args:
        kind: of layers.
        right: computes a small product, and whether it is torch's own.
        instead: what to choose then.

    Raises:
        ConfigError: they are refused.
    """
    try:
        is_right = right()
    except (AttributeError, RuntimeError, TypeError) as exc:
        reason = str(exc).partition("\n")[0]
        raise ConfigError(
            f"torch {torch.__version__} has no {kind} linear layers on this machine ({reason}):"
            f" choose {instead}"
        ) from exc
    if not is_right:
        raise ConfigError(
            f"the {kind} linear layers of torch {torch.__version__} compute something else: choose"
            f" {instead}"
        )


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Within, a GPU multiplies and convolves float32 by ``tf32`` or by all bits, ``ieee``, which
    cuDNN's convolutions are not by default."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [found.fp32_precision for found in settings]
    try:
        for found in settings:
            found.fp32_precision = precision
        yield
    finally:
        for found, earlier in zip(settings, before, strict=True):
            found.fp32_precision = earlier


@torch.inference_mode()
def check_float32(device: Device) -> None:
    """Refuse to take for float32 what is computed by fewer bits: by
    ``torch.set_float32_matmul_precision``, ``torch.backends``, ``ONEDNN_DEFAULT_FPMATH_MODE`` or
    whatever else. bfloat16 is off by 2e-3 of a product, TF32 by 2e-4, float32 by 3e-7.

    Raises:
        ConfigError: the device's products are none of float32.
    """
    made = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(PROBED, PROBED, generator=made) for _ in range(2))
    exact = x.double() @ weight.double().T
    found = torch.nn.functional.linear(x.to(device.torch), weight.to(device.torch)).cpu().double()
    error = ((found - exact).norm() / exact.norm()).item()
    if not error <= FLOAT32_ERROR:
        raise ConfigError(
            f"products in float32 are off by {error:.1g} on {device.name}: something lets torch"
            " compute them by fewer bits (torch.set_float32_matmul_precision,"
            " torch.backends.*.fp32_precision, ONEDNN_DEFAULT_FPMATH_MODE), and no other precision"
            " can be compared with such: take that back, or choose fp32"
        )


def on_a_cpu_only(name: str, device: Device) -> str:
    """The reason of a technique that computes on a CPU; an empty text where the device is one."""
    if not device.is_cuda:
        return ""
    return (
        f"{name} computes on a CPU, this model runs on {device.name}: choose bf16, or fp32 and"
        " compile"
    )


def on_a_gpu_only(name: str, device: Device, capability: tuple[int, int] = (0, 0)) -> str:
    """The reason of a technique that computes on a GPU, of this compute capability or a later one;
    an empty text where the device is one."""
    if not device.is_cuda:
        return f"{name} computes on a GPU, this model runs on {device.name}"
    found = torch.cuda.get_device_capability(device.torch)
    if found < capability:
        return (
            f"{name} needs a GPU of compute capability {'.'.join(map(str, capability))} or later,"
            f" {device.name} has {'.'.join(map(str, found))}"
        )
    return ""
