"""Attention without padding: texts of any lengths laid end to end in one row, each attending to itself only.

One place for ``torch.nn.attention.varlen``, whose signature still moves between torch versions. It runs on CUDA in half precision, where :func:`is_available`;
on a CPU the same sums are done text by text, so that the laying out can be tested there.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "precompute_unpadded"
"""What a transformers model is told as its ``attn_implementation``."""

CAPABILITY = (8, 0)
"""Of the GPUs that FlashAttention 2 has kernels for: Ampere's and later ones."""
MOST_DIM = 256
"""Of a head, in its kernels; and a multiple of 8."""


def is_available(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether this GPU and this torch compute attention without padding, for heads of ``dim`` numbers; by trying it, too."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or dim > MOST_DIM or dim % 8:
        return False
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    starts = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    query, key, value = torch.linspace(-1, 1, 3 * 5 * 2 * dim, device=device).to(dtype).reshape(3, 1, 2, 5, dim)
    try:
        found, _ = unpadded_attention(torch.nn.Identity(), query, key, value, None, starts=starts, longest=3)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        # a build without it, or another signature: texts are padded
        return False
    return torch.allclose(found.float(), _text_by_text(query, key, value, starts, None).float(), atol=0.02)


def unpadded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    starts: torch.Tensor,
    longest: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax attention within each text (Vaswani et al. 2017; laid out as FlashAttention's ``varlen``, Dao 2023).

    Args:
        module: the layer; not used.
        query: [1, heads, tokens, dim]; ``key`` and ``value`` likewise.
        attention_mask: not used: there is no padding.
        starts: int32 [texts + 1]: text ``i`` is tokens ``starts[i]`` to ``starts[i + 1]``.
        longest: tokens of the longest text.
        scaling: of the products; 1/√dim by default.

    Returns:
        ([1, tokens, heads, dim], None).
    """
    if not query.is_cuda:
        return _text_by_text(query, key, value, starts, scaling), None
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [tokens, heads, dim]
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling)
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None


def _text_by_text(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """[1, heads, tokens, dim] each → [1, tokens, heads, dim]."""
    texts = [
        torch.nn.functional.scaled_dot_product_attention(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scale=scaling)
        for a, b in itertools.pairwise(starts.tolist())
    ]
    return torch.cat(texts, dim=2).transpose(1, 2)


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers makes no mask where there is no padding."""


AttentionInterface.register(NAME, unpadded_attention)
AttentionMaskInterface.register(NAME, _no_mask)
