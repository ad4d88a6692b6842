"""PyTorch: the module as torch itself computes it: layer by layer (eager), in float32 the reference
itself, in fewer bits on a GPU with products and on a CPU with weights; or compiled by Inductor to
C++ (on a GPU to Triton) when it is first called."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from precompute.models.device import Device, Graphed, Layer, check_rows
from precompute.models.torch_model import TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques.machine import (
    check_layers,
    computes_in,
    missing_compiler,
    on_a_cpu_only,
    on_a_gpu_only,
    products_in,
)
from precompute.techniques.technique import (
    Batches,
    Forward,
    Technique,
    elements,
    has_linear,
    module_of,
    with_linear,
)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of it: 4 bits of exponent, 3 of mantissa (Micikevicius et al. 2022)."""
FP8_STEP = 16
"""Sizes of a layer that its products can have are multiples of it."""


class Eager(Technique):
    """fp32, bf16 and fp16. In bfloat16 MiniLM reached 2.6 (AMX), 4.7 (AMD Zen) and 6.3 times (H100)
    float32's rate."""

    convert_s = 0.5

    def missing(self, device: Device) -> str:
        """Nothing: what a CPU cannot multiply is emulated."""
        return ""

    def gain(self, device: Device, model: TorchModel) -> float:
        if self.dtype == torch.float32:
            return 1.0
        return 3.0 if computes_in(self.dtype, device) else 0.0

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        return module_of(model, self.dtype, batches)


class Tf32(Technique):
    """Float32 whose products take 10 bits of each mantissa, on GPUs from Ampere on: as exact as
    float16, in float32's range."""

    convert_s = 0.5

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pack = in_tf32

    def missing(self, device: Device) -> str:
        return on_a_gpu_only(self.name, device, (8, 0))

    def gain(self, device: Device, model: TorchModel) -> float:
        return 0.0 if self.missing(device) else 2.0

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        return in_tf32(model.module)


class Fp8(Technique):
    """Linear layers in 8-bit floats on a GPU from Hopper on, everything else in bfloat16: a scale
    for each row of inputs, so that no row depends on its neighbours, and for each output. The
    quantising costs more than the products of a small model gain: one of MiniLM's size had 0.79
    (compiled) and 0.3 times (eager) bfloat16's rate on an H100.
    """

    convert_s = 1.0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.dtype = torch.bfloat16
        self.pack = fp8_product

    def missing(self, device: Device) -> str:
        reason = on_a_gpu_only(self.name, device, (9, 0))
        return reason or (missing_compiler(device) if self.backend == "compile" else "")

    def gain(self, device: Device, model: TorchModel) -> float:
        return 0.0 if self.missing(device) or not has_linear(model) else 2.5

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        probe_fp8(model.device.torch)
        module = in_fp8(module_of(model, self.dtype, batches))
        if self.backend != "compile":
            return module
        forward: Forward = model.laid_out(module, self.dtype, compiled)
        return forward


def in_tf32(forward: Callable[..., Any]) -> Forward:
    """The forward with TF32 allowed while it is launched: what else this process computes is as it
    was."""

    def allowed(*inputs: torch.Tensor) -> Any:
        with products_in("tf32"):
            return forward(*inputs)

    return allowed


class Fp8Linear(torch.nn.Module):
    """``x @ weight.T + bias`` with both sides in 8-bit floats and the sums in float32."""

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        quantised, scales = quantised_rows(linear.weight.detach())
        self.register_buffer("weight", quantised)
        self.register_buffer("scales", scales.T)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [..., in] bfloat16 → [..., out] bfloat16."""
        out = self.product(*quantised_rows(input.reshape(-1, input.shape[-1])))
        return out.reshape(*input.shape[:-1], -1)

    def product(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The product, [n, out] bfloat16, of inputs by :func:`quantised_rows`."""
        out = torch._scaled_mm(
            rows,
            self.weight.T,
            scale_a=scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            # sums stay in the tensor core's own registers, of some 14 bits (DeepSeek-AI 2024,
            # section 3.3.2), instead of being moved to float32 every few products: a fraction of
            # what 3 bits of mantissa lose, and what the peak that GPUs are sold by is measured with
            use_fast_accum=True,
        )
        assert isinstance(out, torch.Tensor)
        return out


def fp8_product(linear: torch.nn.Linear) -> Layer:
    """The layer's product alone, for a peak: inputs are quantised when they first come."""
    layer, known = Fp8Linear(linear.to(torch.bfloat16)), functools.cache(quantised_rows)
    return lambda x: layer.product(*known(x))


def quantised_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(8-bit floats [n, m], float32 [n, 1]), whose product is nearly ``x`` [n, m]: each row's
    largest becomes the largest number there is."""
    scales = (
        x.abs().amax(1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny) / FP8_MAX
    )
    return (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def in_fp8(module: torch.nn.Module) -> torch.nn.Module:
    """The module, in place, with its linear layers so, of those whose sizes allow it; the module
    itself may be one."""

    def made(linear: torch.nn.Linear) -> torch.nn.Module:
        fits = not (linear.in_features % FP8_STEP or linear.out_features % FP8_STEP)
        return Fp8Linear(linear) if fits else linear

    return with_linear(module, made)


@torch.inference_mode()
def probe_fp8(device: torch.device) -> None:
    """Compare a small product with torch's own, of powers of two, which 8 bits hold, and with
    another scale each row and each output.

    Raises:
        ConfigError: this torch or this GPU has no such operator, or it computes something else.
    """
    powers = 2.0 ** -(torch.arange(FP8_STEP)[:, None] % 3 + torch.arange(FP8_STEP) % 5)
    linear = torch.nn.Linear(FP8_STEP, FP8_STEP).requires_grad_(False).to(device, torch.bfloat16)
    linear.weight.copy_(powers.tril() - powers.triu(1))
    linear.bias.fill_(2.0)
    x = torch.diag(powers[0]).to(device, torch.bfloat16)
    check_layers(
        "8-bit float",
        lambda: torch.allclose(Fp8Linear(linear)(x), linear(x), rtol=0.01),
        "bf16-eager",
    )


# ---- Weights of fewer bits


INPUTS, OUTPUTS = 32, 16
"""A layer's inputs and outputs are multiples of these, or it stays in bfloat16: torch 2.13's kernel
for 8 bits reads past the end of others (33 inputs gave NaN, and once a crash)."""
TINY = 1e-12


class WeightOnly(Technique):
    """int8-weights: linear layers whose weights are stored in 8 bits and computed in bfloat16 as
    the rest is, on a CPU, in a quarter of float32's memory.

    For one row at a time of layers larger than the cache, and where memory is short; with many rows
    at once the products are what costs, and stay in floats. One AMD Zen 5 core, 384 × 1,536, times
    float32's rate eager: 3.4 for one row, 1.4 for 1,024, where oneDNN's packed float32 has 2.4.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.dtype = torch.bfloat16

    def missing(self, device: Device) -> str:
        return on_a_cpu_only(self.name, device)

    def gain(self, device: Device, model: TorchModel) -> float:
        return (
            1.2
            if not device.is_cuda and has_linear(model) and computes_in(torch.bfloat16, device)
            else 0.0
        )

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        probe_weights()
        changed: list[torch.nn.Linear] = []

        def replaced(linear: torch.nn.Linear) -> torch.nn.Module:
            if linear.in_features % INPUTS or linear.out_features % OUTPUTS:
                return linear
            changed.append(linear)
            return Int8Linear(linear)

        module = with_linear(module_of(model, torch.bfloat16, batches), replaced)
        if not changed:
            raise ConfigError(
                f"no linear layer has multiples of {INPUTS} inputs and {OUTPUTS} outputs: choose"
                " bf16-eager"
            )
        return module


class Int8Linear(torch.nn.Module):
    """``x @ weight.T + bias`` with the weight in 8 bits, symmetric, a scale each output."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1).clamp_(min=TINY).div_(127)
        self.weight = (weight / scales[:, None]).round_().to(torch.int8)
        self.scales, self.bias = scales.bfloat16(), linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` bfloat16 [..., in] → bfloat16 [..., out]."""
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        return _shaped(
            torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales), self.bias, input
        )


def _shaped(out: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    if bias is not None:
        out = out.add_(bias)
    return out.view(*x.shape[:-1], -1)


@torch.inference_mode()
def probe_weights() -> None:
    """Compare a small product with torch's own. It is exact: scales are powers of two, another one
    each output, and sums are of two weights.

    Raises:
        ConfigError: this torch has no such operator, or it computes something else.
    """
    output, inputs = torch.arange(OUTPUTS)[:, None], torch.arange(2 * INPUTS)
    numbers = (output * 5 + inputs * 17) % 254 - 127
    # both ends of what 8 bits hold, so that a scale is what it was made with
    numbers[:, ::INPUTS], numbers[:, 1::INPUTS] = -127, 127
    linear = torch.nn.Linear(2 * INPUTS, OUTPUTS).requires_grad_(False).bfloat16()
    linear.weight.copy_(numbers * 2.0 ** (output % 3))
    x = torch.eye(2 * INPUTS) + torch.eye(2 * INPUTS).roll(INPUTS, 1)
    wanted = (x @ linear.weight.float().T).bfloat16() + linear.bias
    check_layers(
        "8-bit", lambda: torch.equal(Int8Linear(linear)(x.bfloat16()), wanted), "bf16-eager"
    )


# ---- Compiled by Inductor


class Compiled(Technique):
    """fp32, bf16 and fp16 by ``torch.compile``, again in each process. MiniLM in bfloat16 reached 3
    (AMX), 5.2 (AMD Zen) and 7.4 times (H100) eager float32's rate.

    It pays where memory and Python are the limit, not products: in float32 on two AVX2 cores, where
    eager's products reach 70 % of the machine's peak, MiniLM had 1.0 to 1.1 times eager's rate,
    after half a minute of compiling; in bfloat16 on an H100 1.18 times, after 13 s. Compiled ahead
    of time into a file (AOTInductor) it had 0.8 times eager's rate on that CPU, and on that GPU a
    file could not be loaded (torch 2.11): there is no such technique.
    """

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


CAPABILITIES = ("default", "vsx", "z vector", "no avx", "avx2", "avx512", "sve256")
"""What ``torch.backends.cpu.get_cpu_capability`` names, by its documentation, in small letters."""


def _keep_apart() -> None:
    """Give each instruction set a cache of its own: code that Inductor cached for AVX-512 and
    took up again under ``ATEN_CPU_CAPABILITY=avx2`` computed other values (torch 2.13: 30 % of an
    MLP's outputs, off by up to 0.36). A folder that the environment names is left as it is.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    shared = default_cache_dir()
    # torch notes its default there, too, and a parent process its own
    ours = {shared, *(f"{shared}_{name}" for name in CAPABILITIES)}
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared) in ours:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
            f"{shared}_{torch.backends.cpu.get_cpu_capability().lower()}"
        )
