"""Eager: the module as torch computes it, layer by layer; in float32 the reference itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.techniques.machine import computes_in
from precompute.techniques.technique import Forward, Technique, module_of


class Eager(Technique):
    """fp32, bf16 and fp16. In bfloat16 MiniLM reached 2.6 (AMX) to 4.7 times (AMD Zen) float32's rate."""

    convert_s = 0.5

    def missing(self, device: Device) -> str:
        """Nothing: what a CPU cannot multiply is emulated."""
        return ""

    def gain(self, device: Device, model: TorchModel) -> float:
        if self.dtype == torch.float32:
            return 1.0
        return 3.0 if computes_in(self.dtype, device) else 0.0

    def converted(self, model: TorchModel, batches: Sequence[Tensors], folder: Path | None) -> Forward:
        return module_of(model, self.dtype, batches)
