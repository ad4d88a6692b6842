"""Sentence head: from a transformer's last hidden state to one vector for each text, as
sentence-transformers computes it.

Pooling, Dense layers and normalising, in the order that the model's folder names them
(:mod:`precompute.text.sentence_folder`). Everything but the products is computed in float32,
whatever the transformer's precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from precompute.store.errors import ConfigError, ModelError
from precompute.text import sentence_folder
from precompute.text.sentence_folder import Normalize, Pooling


class Head(torch.nn.Module):
    """Hidden states → embeddings [B, ``dim``], float32.

    Args:
        hidden_size: numbers in a token's vector.
        pooling: of the tokens.
        layers: what comes after.
        truncate_dim: numbers retained of each vector; all by default. What is left is not
            normalised again.

    Raises:
        ConfigError: a layer takes another number than the one before gives.
        ModelError: weights are missing, damaged, or of another shape.
    """

    def __init__(
        self,
        hidden_size: int,
        pooling: Pooling = Pooling(),  # noqa: B008 - a frozen value
        layers: Sequence[sentence_folder.Dense | Normalize] = (Normalize(),),
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.modes, self.leaves_out_prompt = pooling.modes, not pooling.include_prompt
        self.dim = hidden_size * len(self.modes)
        self.layers = torch.nn.ModuleList()
        for layer in layers:
            if isinstance(layer, Normalize):
                self.layers.append(_Normalize())
                continue
            if layer.in_features != self.dim:
                raise ConfigError(
                    f"text_encoder: {layer.weights.parent} takes {layer.in_features} numbers, and"
                    f" what comes before it gives {self.dim}"
                )
            self.layers.append(_Dense(layer))
            self.dim = layer.out_features
        self.dim = self.dim if truncate_dim is None else min(truncate_dim, self.dim)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, T, D]; ``mask`` int64 [B, T]: 1 for a token, 2 for one of a prompt that is
        left out, 0 for padding, which is at the end."""
        if self.leaves_out_prompt:
            mask = (mask == 1).long()
        tokens = hidden.float()
        vectors = torch.cat([_pooled(mode, tokens, mask) for mode in self.modes], dim=1)
        for layer in self.layers:
            vectors = layer(vectors, hidden.dtype)
        return vectors[:, : self.dim]


def _pooled(mode: str, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, D] of ``tokens`` [B, T, D]: ``sentence_transformers…Pooling`` 6.2, ``_forward_padded``,
    for padding at the end."""
    # the first and the last that counts
    if mode in ("cls", "lasttoken"):
        place = torch.arange(mask.shape[1], device=mask.device).unsqueeze(0)
        counted = mask.amax(1) > 0
        if mode == "cls":
            chosen = torch.where(counted, torch.where(mask > 0, place, mask.shape[1]).amin(1), 0)
        else:
            chosen = (place * mask).amax(1)
        vectors = tokens.gather(1, chosen.view(-1, 1, 1).expand(-1, 1, tokens.shape[2])).squeeze(1)
        return vectors if mode == "cls" else vectors * counted.unsqueeze(1)
    if mode == "max":
        return tokens.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1)
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    # Muennighoff 2022: a token's weight is its position, from 1
    if mode == "weightedmean":
        weights = weights * torch.arange(
            1, mask.shape[1] + 1, device=mask.device, dtype=tokens.dtype
        ).view(1, -1, 1)
    total = weights.sum(1).clamp(min=1e-9)
    return (tokens * weights).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


class _Normalize(torch.nn.Module):
    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=1)


class _Dense(torch.nn.Module):
    """The product in ``dtype``, which is that of the transformer and of the weights."""

    def __init__(self, layer: sentence_folder.Dense) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias)
        self.activation: torch.nn.Module = getattr(torch.nn, layer.activation)()
        self.adds_input = layer.residual
        self.residual: torch.nn.Module | None = None
        if layer.residual and layer.in_features != layer.out_features:
            self.residual = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        try:
            self.load_state_dict(
                {name: tensor.float() for name, tensor in load_file(layer.weights).items()}
            )
        except (SafetensorError, OSError, RuntimeError) as exc:
            raise ModelError(f"text_encoder: {layer.weights} does not load: {exc}") from exc

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.linear(x.to(dtype)).float())
        if not self.adds_input:
            return out
        return out + (x if self.residual is None else self.residual(x.to(dtype)).float())
