"""oneDNN: the linear layers of a module on a CPU, with weights laid out once in the order that its
kernels read.

Private operators of torch (``torch.ops.mkldnn``): torch.compile with freezing finds the same
kernels by itself, but needs a C++ compiler and minutes. So they are probed on a small product
before use. Measured with MiniLM in float32: 1.2 times eager on AVX2, 2.1 times on AVX512.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from precompute.models.device import Device, PackedLinear
from precompute.models.torch_model import Tensors, TorchModel
from precompute.techniques.machine import check_layers, computes_in, has_onednn, on_a_cpu_only
from precompute.techniques.technique import Forward, Technique, has_linear, module_of, with_linear


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

    def converted(
        self, model: TorchModel, batches: Sequence[Tensors], folder: Path | None
    ) -> Forward:
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
