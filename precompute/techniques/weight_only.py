"""Weight only: linear layers whose weights are stored in 8 or 4 bits and computed in bfloat16, on a
CPU, in a quarter and an eighth of float32's memory.

For one row at a time of layers larger than the cache, and where memory is short; with many rows at
once the products are what costs, and stay in floats. One AMD Zen 5 core, 384 × 1,536, times
float32's rate eager: 3.4 and 3.4 for one row, 1.4 and 1.8 for 1,024, where oneDNN's packed float32
has 2.4.
"""

from __future__ import annotations

from pathlib import Path

import torch

from precompute.models.device import Device
from precompute.models.torch_model import TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques.machine import check_layers, computes_in, on_a_cpu_only
from precompute.techniques.technique import (
    Batches,
    Forward,
    Technique,
    has_linear,
    module_of,
    with_linear,
)

INPUTS, OUTPUTS = 32, 16
"""A layer's inputs and outputs are multiples of these, or it stays in bfloat16: torch 2.13's kernel
for 8 bits reads past the end of others (33 inputs gave NaN, and once a crash), that for 4 bits
packs 16 outputs."""
GROUP = 32
"""Weights of an output that share a scale and a zero, in 4 bits."""
TINY = 1e-12


class WeightOnly(Technique):
    """int8-weights and int4-weights, the rest in bfloat16."""

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
        kind = Int8Linear if self.name.startswith("int8") else Int4Linear
        probe(kind)
        changed: list[torch.nn.Linear] = []

        def replaced(linear: torch.nn.Linear) -> torch.nn.Module:
            if linear.in_features % INPUTS or linear.out_features % OUTPUTS:
                return linear
            changed.append(linear)
            return kind(linear)

        module = with_linear(module_of(model, torch.bfloat16, batches), replaced)
        if not changed:
            raise ConfigError(
                f"no linear layer has multiples of {INPUTS} inputs and {OUTPUTS} outputs: choose"
                " bf16-eager"
            )
        return module


class Int8Linear(torch.nn.Module):
    """``x @ weight.T + bias`` with the weight in 8 bits, symmetric, a scale each output.

    Args:
        linear: the layer in bfloat16, on the CPU; it stays as it is.
    """

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


class Int4Linear(torch.nn.Module):
    """``x @ weight.T + bias`` with the weight in 4 bits, a scale and a zero each :data:`GROUP` of
    an output.

    Args:
        linear: the layer in bfloat16, on the CPU; it stays as it is.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        groups = linear.weight.detach().float().view(linear.out_features, -1, GROUP)
        low, high = groups.amin(2), groups.amax(2)
        scales = (high - low).clamp_(min=TINY).div_(15)
        numbers = ((groups - low[..., None]) / scales[..., None]).round_().clamp_(0, 15)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            numbers.flatten(1).to(torch.int32), 1
        )
        # the kernel takes 8 for nothing, so the zero is what 8 stands for
        self.scales = (
            torch.stack([scales, low + 8 * scales], 2).transpose(0, 1).contiguous().bfloat16()
        )
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` bfloat16 [..., in] → bfloat16 [..., out]."""
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        return _shaped(
            torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales),
            self.bias,
            input,
        )


def _shaped(out: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    if bias is not None:
        out = out.add_(bias)
    return out.view(*x.shape[:-1], -1)


@torch.inference_mode()
def probe(kind: type[Int8Linear | Int4Linear]) -> None:
    """Compare a small product with torch's own. It is exact: scales are powers of two, another one
    each output, and in 4 bits each group, whose zeros differ, too; and sums are of two weights.

    Raises:
        ConfigError: this torch has no such operators, or they compute something else.
    """
    bits = 8 if kind is Int8Linear else 4
    output = torch.arange(OUTPUTS)[:, None]
    group = torch.arange(2 * GROUP) // GROUP
    steps = 2**bits - 2
    numbers = (output * 5 + torch.arange(2 * GROUP) * 17) % steps - steps // 2
    # both ends of what bits hold, so that a scale is what it was made with
    numbers[:, ::GROUP], numbers[:, 1::GROUP] = (-127, 127) if bits == 8 else (-8, 7)
    if bits == 4:
        numbers, output = numbers + 8 * group, output + group
    linear = torch.nn.Linear(2 * GROUP, OUTPUTS).requires_grad_(False).bfloat16()
    linear.weight.copy_(numbers * 2.0 ** (output % 3))
    x = torch.eye(2 * GROUP) + torch.eye(2 * GROUP).roll(GROUP, 1)
    wanted = (x @ linear.weight.float().T).bfloat16() + linear.bias
    check_layers(
        f"{bits}-bit", lambda: torch.equal(kind(linear)(x.bfloat16()), wanted), "bf16-eager"
    )
