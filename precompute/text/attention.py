"""Attention without padding: texts of any lengths laid end to end in one row, each attending to itself only.

One place for ``torch.nn.attention.varlen``, whose signature still moves between torch versions. It runs on CUDA in half precision; anywhere
else the same sums are done text by text, so that the laying out can be tested on a CPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "precompute_unpadded"
"""What a transformers model is told as its ``attn_implementation``."""


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
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [tokens, heads, dim]
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling)
        assert isinstance(out, torch.Tensor)
        return out.unsqueeze(0), None
    bounds = starts.tolist()
    texts = []
    for a, b in itertools.pairwise(bounds):
        one = [t[a:b].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]  # [1, heads, length, dim]
        texts.append(torch.nn.functional.scaled_dot_product_attention(one[0], one[1], one[2], scale=scaling))
    return torch.cat(texts, dim=2).transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers makes no mask where there is no padding."""


AttentionInterface.register(NAME, unpadded_attention)
AttentionMaskInterface.register(NAME, _no_mask)
