"""Unpadded: attention over texts laid end to end, and the transformers that compute by it: those
whose layers let another attention take the place of their own and add nothing to its scores."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn

CAPABILITY = (8, 0)
"""Least compute capability of the GPUs that FlashAttention 2 has kernels for: Ampere's and later
ones."""
MOST_DIM = 256
"""Dimension of a head in its kernels at most; it must be a multiple of 8."""
LEAST_COSINE = 0.98
"""Least cosine of each token to the same in a padded text; two ways of computing the same in half
precision have 0.999."""
PROBED_TOKENS = 200
"""Tokens of the longer of two texts that are compared: beyond the windows of a model that has
some."""
NAME = "precompute_unpadded"
"""Name by which transformers knows the attention here. It makes no mask for what has no way to make
one of that name."""

TRANSFORMERS = (
    "albert",
    "bert",
    "distilbert",
    "electra",
    "ernie",
    "eurobert",
    "gemma3_text",
    "gte",
    "llama",
    "mistral",
    "modernbert",
    "nomic_bert",
    "qwen2",
    "qwen3",
)
"""``model_type`` of transformers' models that can. MPNet and DeBERTa cannot: what they add to the
scores by how far apart two tokens are, no such kernel takes. RoBERTa's kinds are read by
:mod:`precompute.text.bert`; where that does not understand one, it is padded, since transformers
would count its positions through all texts."""


class UnpaddedTransformer(nn.Module):
    """Texts laid end to end → the last hidden state.

    Args:
        transformer: a :class:`precompute.text.bert.Bert`, or transformers' of one of
            :data:`TRANSFORMERS`; it stays as it is, and its weights are shared.
    """

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        tensors = (*transformer.parameters(), *transformer.buffers())
        self.transformer: Any = copy.deepcopy(transformer, {id(t): t for t in tensors})
        config = self.transformer.config
        if hasattr(config, "_attn_implementation"):
            from transformers import AttentionInterface

            AttentionInterface.register(NAME, _attention)
            config._attn_implementation = NAME

    def forward(
        self, ids: torch.Tensor, place: torch.Tensor, starts: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """
        Args:
            ids: int64 [1, tokens].
            place: int64 [1, tokens]: of each in its text, from 0.
            starts: int32 [texts + 1]: text ``i`` is tokens ``starts[i]`` to ``starts[i + 1]``.
            longest: tokens of the longest text.

        Returns:
            [tokens, width].
        """
        hidden: torch.Tensor = self.transformer(
            input_ids=ids, position_ids=place, starts=starts, longest=longest
        ).last_hidden_state
        return hidden[0]


def understood(transformer: Any) -> bool:
    """Whether a transformer is one for :class:`UnpaddedTransformer`."""
    # ours has no such setting
    return (
        not hasattr(transformer.config, "_attn_implementation")
        or transformer.config.model_type in TRANSFORMERS
    )


def has_unpadded_attention(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether torch has kernels for attention without padding on this GPU, for heads of ``dim``
    numbers."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and dim <= MOST_DIM
        and dim % 8 == 0
        and torch.cuda.get_device_capability(device) >= CAPABILITY
    )


@torch.inference_mode()
def computes_the_same(
    unpadded: UnpaddedTransformer, padded: Any, longest: int, device: torch.device
) -> bool:
    """Whether two texts come out laid end to end as they do padded; by trying it."""
    lengths = (min(longest, PROBED_TOKENS), 2)
    tokens = torch.arange(sum(lengths)) % 7 + 5
    mask = torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    ids[mask] = tokens
    place = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    given = (t.to(device) for t in (tokens[None], place[None], starts))
    try:
        found = unpadded(*given, lengths[0])
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        # a build without it, or another signature: texts are padded
        return False
    expected = padded(
        input_ids=ids.to(device), attention_mask=mask.long().to(device)
    ).last_hidden_state
    pairs = found.cpu().float(), expected.cpu().float()[mask]
    return bool(nn.functional.cosine_similarity(*pairs, dim=1).min() >= LEAST_COSINE)


def unpadded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Softmax attention within each text (Vaswani et al. 2017; laid out as FlashAttention's
    ``varlen``, Dao 2023).

    Args:
        query: [1, heads, tokens, dim]; ``key`` and ``value`` likewise, perhaps of fewer heads, each
            for as many of the query's.
        starts: int32 [texts + 1]: text ``i`` is tokens ``starts[i]`` to ``starts[i + 1]``.
        longest: tokens of the longest text.
        scale: of the scores; 1 / √dim by default.
        window: tokens before and behind each that it attends to; -1 for all.

    Returns:
        [1, tokens, heads, dim].
    """
    if not query.is_cuda:
        return _text_by_text(query, key, value, starts, scale, window)
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [tokens, heads, dim]
    out = varlen_attn(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=window,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    *,
    starts: torch.Tensor,
    longest: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls an attention of :data:`NAME`."""
    if softcap is not None:
        raise ValueError("scores with a cap are computed in padded texts")
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    before = -1 if sliding_window is None else sliding_window - 1
    window = (before, 0 if causal else before)
    return unpadded_attention(
        query, key, value, starts, longest, scale=scaling, window=window
    ), None


def _text_by_text(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """[1, heads, tokens, dim] each → [1, tokens, heads, dim]."""
    texts = []
    for a, b in itertools.pairwise(starts.tolist()):
        mask = None
        if window != (-1, -1):
            behind = torch.arange(b - a)[:, None] - torch.arange(b - a)
            before, after = (b if size < 0 else size for size in window)
            mask = (behind <= before) & (-behind <= after)
        q, k, v = (t[:, :, a:b] for t in (query, key, value))
        texts.append(
            nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(texts, dim=2).transpose(1, 2)
