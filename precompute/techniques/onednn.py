"""oneDNN: the linear layers of a module on a CPU, with weights laid out once in the order that its
kernels read.

Private operators of torch (``torch.ops.mkldnn``): torch.compile with freezing finds the same
kernels by itself, but needs a C++ compiler and minutes. So they are probed on a small product
before use. Measured with MiniLM in float32: 1.2 times eager on AVX2, 2.1 times on AVX512.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save

from precompute.models.device import Device, PackedLinear
from precompute.models.torch_model import TorchModel
from precompute.techniques.machine import (
    check_layers,
    computes_in,
    has_bf16,
    has_int8_products,
    has_onednn,
    on_a_cpu_only,
)
from precompute.techniques.technique import (
    Batches,
    Forward,
    Technique,
    has_linear,
    module_of,
    retained,
    with_linear,
)


class Packed(Technique):
    """fp32, bf16 and fp16, on a CPU. MiniLM in bfloat16 reached 2.5 (AMX) to 5.2 times (AMD Zen)
    eager float32's rate."""

    def missing(self, device: Device) -> str:
        if device.is_cuda:
            return on_a_cpu_only(self.name, device)
        if self.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return (
                "oneDNN packs layers in bfloat16 only for a CPU with AVX-512 or ARM's bfloat16:"
                " choose bf16-eager, which is emulated, or fp32-onednn"
            )
        return ""

    def gain(self, device: Device, model: TorchModel) -> float:
        if (
            device.is_cuda
            or not has_onednn()
            or not has_linear(model)
            or not computes_in(self.dtype, device)
        ):
            return 0.0
        return 1.5 if self.dtype == torch.float32 else 3.5

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        return packed(module_of(model, self.dtype, batches))


def packed(module: torch.nn.Module) -> torch.nn.Module:
    """The module with all its linear layers packed, in place; the module itself may be one.

    Raises:
        ConfigError: this torch has no such operators, or they compute something else.
    """
    probe()
    return with_linear(module, PackedLinear)


@torch.inference_mode()
def probe() -> None:
    """Compare a small product with torch's own.

    Raises:
        ConfigError: see :func:`packed`.
    """
    linear = torch.nn.Linear(3, 2).requires_grad_(False)
    x = torch.arange(12, dtype=torch.float32).reshape(2, 2, 3)
    check_layers(
        "oneDNN", lambda: torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5), "eager"
    )


# ---- Per row: 8-bit integers, each row of the inputs with a middle and a scale of its own, so that
# no row depends on another.

STEPS = 127
"""Steps of a scale, to either side."""
TINY = 1e-12
"""Least magnitude of a row: one of equal numbers is its middle."""


class PerRow(Technique):
    """int8-dynamic, the rest in float32: for CPUs that add up products of 8-bit integers (VNNI) and
    have no bfloat16. A quarter of the layers is in float32, too, and others have their outlying
    inputs made smaller and the weights of these larger, as the view's rows show (:func:`fitted`).

    One AMD Zen 5 core, 1,024 × 384 × 1,536: 1.6 ms and 0.2 for rounding the inputs, against 2.8
    (bfloat16), 5.5 (float32) packed, and 13 eager. An MLP of 256 × 256 in one thread: 1.9 times
    float32's rate (packed 1.3, bfloat16 2.9), and within the default accuracy.
    """

    calibrates = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pack = PerRowLinear

    def missing(self, device: Device) -> str:
        if device.is_cuda:
            return on_a_cpu_only(self.name, device)
        return (
            ""
            if has_int8_products()
            else "this CPU has no products of 8-bit integers (VNNI): choose fp32-onednn"
        )

    def gain(self, device: Device, model: TorchModel) -> float:
        if self.missing(device) or not has_linear(model):
            return 0.0
        # which is quicker, and nearer
        return 1.3 if has_bf16() else 1.6

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        probe_per_row()
        probe()
        module = module_of(model, torch.float32, batches)
        with retained(folder) as place:
            file = place.file(
                self.name,
                ".safetensors",
                model,
                batches,
                "1",
                # by bytes: of a full disk the library raises an error of its own
                lambda path: path.write_bytes(save(fitted(module, batches))),
            )
            divisors = load_file(file)
        names = {id(part): name for name, part in module.named_modules()}
        return with_linear(module, lambda linear: rounded(linear, divisors.get(names[id(linear)])))


LEFT_IN_FLOAT = 4
"""One of so many layers stays in float32: those whose outputs rounding changes most."""
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Of the differences between a layer's inputs that may go to its weights (α of Xiao et al. 2023,
SmoothQuant, equation 4)."""
ROWS_COMPARED = 512
"""Of each batch, to see which is best."""


@torch.no_grad()
def fitted(module: torch.nn.Module, batches: Batches) -> dict[str, torch.Tensor]:
    """By name of a linear layer what its inputs are best divided by before they are rounded, and
    its weights multiplied with, [inputs]; without those that had better stay in float32.

    MiniLM over docstrings, recall@10 into an index of float32's: 0.989, and 0.985 where nothing is
    divided; with a quarter of the layers in float32 0.991.
    """
    layers = {name: part for name, part in module.named_modules() if type(part) is torch.nn.Linear}
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

    def seen(name: str, values: torch.Tensor) -> None:
        rows = values.reshape(-1, values.shape[-1])
        inputs[name].append(rows[:: len(rows) // ROWS_COMPARED + 1].clone())

    # a caller may name the input
    watches = [
        part.register_forward_pre_hook(
            lambda _, given, named, name=name: seen(name, [*given, *named.values()][0]),
            with_kwargs=True,
        )
        for name, part in layers.items()
    ]
    try:
        for batch in batches:
            module(*batch)
    finally:
        for watch in watches:
            watch.remove()
    found, changed = {}, {}
    for name, part in layers.items():
        rows = torch.cat(inputs[name]) if inputs[name] else torch.zeros(1, part.in_features)
        exact = torch.nn.functional.linear(rows, part.weight, part.bias)
        largest, weight = (of.abs().amax(0).clamp(min=1e-5) for of in (rows, part.weight))
        tried = [torch.ones_like(largest)]
        tried += [largest**share / weight ** (1 - share) for share in SHARES]
        errors = [
            float((PerRowLinear(part, divisors)(rows) - exact).square().sum()) for divisors in tried
        ]
        changed[name] = min(errors) / max(float(exact.square().sum()), TINY)
        found[name] = tried[errors.index(min(errors))]
    worst = sorted(changed, key=lambda name: -changed[name])[: len(layers) // LEFT_IN_FLOAT]
    return {name: divisors for name, divisors in found.items() if name not in worst}


def rounded(linear: torch.nn.Linear, divisors: torch.Tensor | None) -> torch.nn.Module:
    """A layer in 8 bits, or packed in float32 where :func:`fitted` left it."""
    return PackedLinear(linear) if divisors is None else PerRowLinear(linear, divisors)


class PerRowLinear(torch.nn.Module):
    """``x @ weight.T + bias`` in 8-bit integers: weights symmetric with a scale each output, rows
    around the middle of their range with a scale each row; the middle's own product is the sum of
    the weights. oneDNN takes unsigned inputs, so 128 is added to them and taken off again (signed
    ones it computes by a reference that is 10,000 times slower).

    Args:
        linear: the layer, on the CPU; it stays as it is.
        divisors: [in], of its inputs, with which its weights are multiplied; by default 1.
    """

    def __init__(self, linear: torch.nn.Linear, divisors: torch.Tensor | None = None) -> None:
        super().__init__()
        weight, self.factors = linear.weight.detach(), None
        if divisors is not None:
            weight, self.factors = weight * divisors, divisors.reciprocal()
        self.scales = weight.abs().amax(1).clamp_(min=TINY).div_(STEPS)
        rounded = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach()
        # of the rounded weights: by others the middle would be multiplied with their errors
        self.sums = rounded.sum(1) * self.scales

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` float32 [..., in] → float32 [..., out]."""
        rows = input.reshape(-1, input.shape[-1])
        if self.factors is not None:
            rows = rows * self.factors
        middle, scale = middle_and_scale(rows)
        # by int8, since torch rounds to uint8 at a fifth of the speed; flipping the sign's bit adds
        # 128
        numbers = (
            ((rows - middle).mul_(scale.reciprocal()).round_().to(torch.int8))
            .view(torch.uint8)
            .bitwise_xor_(128)
        )
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            numbers,
            1.0,
            128,
            self.packed,
            self.scales,
            self.zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        out = torch.addcmul(self.bias, out, scale).addcmul_(middle, self.sums)
        return out.view(*input.shape[:-1], -1)


def middle_and_scale(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., k] → the middle of each row's range and its scale, [..., 1]: the half of the range is
    :data:`STEPS` of it. Numbers behind GELU are nearly all positive, and those of a transformer
    have an outlier to one side, so that rounding around 0 wastes up to half of the steps: MiniLM's
    recall@10 into an index of float32's docstrings is 0.984 around it and 0.975 around 0."""
    # aminmax takes twenty times as long
    least, largest = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    return (largest + least).mul_(0.5), (largest - least).mul_(0.5).clamp_(min=TINY).div_(STEPS)


@torch.inference_mode()
def probe_per_row() -> None:
    """Compare a small product, exact in 8 bits, with torch's own.

    Raises:
        ConfigError: this torch has no such operators, or they compute something else.
    """
    linear = torch.nn.Linear(2, 3, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.tensor([[127.0, -127.0], [1.0, 127.0], [-127.0, -127.0]]))
    x = torch.tensor([[127.0, -127.0], [-27.0, 227.0], [0.0, 0.0], [5.0, 5.0]])
    check_layers("8-bit", lambda: torch.equal(PerRowLinear(linear)(x), linear(x)), "fp32-onednn")
