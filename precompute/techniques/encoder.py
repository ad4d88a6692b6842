"""Encoder: a text encoder that is a BERT, by the C++ extension (:mod:`precompute.text.bert`):
bfloat16 products, no padding, the rest float32.

512 docstrings by MiniLM, per second of one AVX512-BF16 core without AMX (AMD Zen 5), all in turns:
315 texts, where oneDNN's packed layers computed 178 and torch.compile 197 of them: 1.6 times the
best of torch (1.59 to 1.70), 0.8 of what the core multiplies at most. Mean and least cosine to
float32 0.99999 and 0.99998. By AMX it was not measured yet, but for its values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques.machine import computes_in, on_a_cpu_only
from precompute.techniques.technique import Batches, Forward, Technique, elements
from precompute.text.bert import UnpaddedBert, kernel, not_understood

LEAST_COSINE = 0.98
"""Least cosine of each vector of the first batch to float32's; two ways of computing the same in
bfloat16 have 0.999."""


class Unpadded(Technique):
    """bf16, on a CPU with AVX512-BF16 or AMX; see :func:`precompute.text.bert.not_understood`
    for what is left to torch."""

    def missing(self, device: Device) -> str:
        if device.is_cuda:
            return on_a_cpu_only(self.name, device)
        if kernel() is None:
            return (
                "the encoder's C++ extension was not built, or this CPU has neither AVX512-BF16 nor"
                " AMX, or may not use them: choose bf16-onednn, or fp32"
            )
        return ""

    def gain(self, device: Device, model: TorchModel) -> float:
        if (
            device.is_cuda
            or kernel() is None
            or not computes_in(self.dtype, device)
            or _reason(model)
        ):
            return 0.0
        return 5.5

    def converted(self, model: TorchModel, batches: Batches, folder: Path | None) -> Forward:
        reason, chosen = _reason(model), kernel()
        if reason:
            raise ConfigError(f"{reason}: choose bf16-onednn, or fp32")
        assert chosen is not None
        encoder: Any = model.module
        forward = _Forward(UnpaddedBert(encoder.transformer, chosen), encoder.head)
        _probe(forward, encoder, min(batches, key=elements))
        return forward


class _Forward(torch.nn.Module):
    """Token ids → embeddings, as :class:`precompute.models.text_encoder.Encoder`'s; what comes
    after the transformer in float32."""

    def __init__(self, bert: UnpaddedBert, head: torch.nn.Module) -> None:
        super().__init__()
        self.bert, self.head = bert, head

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.head(self.bert(ids, mask), mask)
        return vectors


def _reason(model: TorchModel) -> str:
    transformer, head = (getattr(model.module, name, None) for name in ("transformer", "head"))
    if transformer is None or head is None or not hasattr(transformer, "config"):
        return "this model is no text encoder"
    return not_understood(transformer)


@torch.inference_mode()
def _probe(forward: Forward, reference: torch.nn.Module, batch: Tensors) -> None:
    """Compare a batch's vectors with the reference's: a version of transformers may compute
    something new under an old name.

    Raises:
        ConfigError: it does.
    """
    cosine = (
        torch.nn.functional.cosine_similarity(forward(*batch), reference(*batch), dim=1)
        .min()
        .item()
    )
    if not cosine >= LEAST_COSINE:
        raise ConfigError(
            f"the encoder computes something else than this transformer (cosine {cosine:.4f}):"
            " choose bf16-onednn, or fp32"
        )
