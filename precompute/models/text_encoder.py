"""Text encoder: text → L2-normalised embedding, by a BERT-like transformer with mean pooling (sentence-transformers' recipe).

Mean over the tokens that are not padding of the last hidden state, then x / |x| (Reimers & Gurevych 2019, and the model's own
``1_Pooling/config.json``). Text beyond ``max_tokens`` is cut, as sentence-transformers does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from tokenizers import Tokenizer
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from precompute import attention
from precompute.device import Device
from precompute.model import Prepared, digest, resolve_path
from precompute.token_cache import TokenCache
from precompute.torch_model import Tensors, TorchModel
from store.errors import ConfigError, ModelError

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a run has its own progress; this one ends up in logs

CODE_VERSION = 1
"""Raised by whoever changes the values this code computes; part of the fingerprint."""

CHARS_PER_TOKEN = 16
"""Text is cut to ``max_tokens × 16`` characters before it is tokenised: a megabyte in one row costs no more than a page."""

START_TOKENS = {"cpu": 1024, "cuda": 16384}
"""First batches: on a CPU small ones stay in its cache, a GPU wants large ones. The engine searches on from here."""


class Encoder(torch.nn.Module):
    """Token ids → embeddings [B, D], float32, each of norm 1, whatever the transformer's precision."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Padded: ``ids`` and ``mask`` (1 where there is a token) int64 [B, T]."""
        hidden = self.transformer(input_ids=ids, attention_mask=mask).last_hidden_state.float()  # [B, T, D]
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(pooled, dim=1)


class UnpaddedEncoder(torch.nn.Module):
    """The same of texts laid end to end, without padding."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        transformer.set_attn_implementation(attention.NAME)
        self.transformer = transformer

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, longest: torch.Tensor) -> torch.Tensor:
        """``ids`` and ``positions`` int64 [1, tokens], ``starts`` int32 [B + 1], ``longest`` int64 [] on the host."""
        hidden = (
            self.transformer(input_ids=ids, position_ids=positions, starts=starts, longest=int(longest))
            .last_hidden_state[0]
            .float()
        )  # [tokens, D]
        lengths = starts.diff()
        texts = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths, output_size=ids.shape[1])
        pooled = torch.zeros(len(lengths), hidden.shape[1], device=ids.device).index_add_(0, texts, hidden)
        return torch.nn.functional.normalize(pooled / lengths.unsqueeze(1), dim=1)


@dataclass(slots=True)
class _Tokens:
    """Token ids of all rows in a row, int64; row ``i`` is ``ids[starts[i]:starts[i] + lengths[i]]``."""

    ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class TextEncoder(TorchModel):
    """Embeds one text column.

    Args:
        path: folder with ``config.json``, ``model.safetensors`` and ``tokenizer.json``; ``package:name/folder`` inside a package.
        column: the source's text column: string, or binary holding UTF-8.
        output: name of the feature.
        max_tokens: longest input, special tokens included.
        max_cost: tokens in one batch; by default what the engine finds best.
        token_cache: folder that keeps tokens by content between runs; by default nowhere.
        too_long: what becomes of a text beyond ``max_tokens``: ``cut``, or ``bad`` to treat its row as a bad one.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.

    Raises:
        ConfigError: no such folder or file, or an argument out of bounds.
        ModelError: the weights do not load.
    """

    cost_unit = "tokens"

    def __init__(
        self,
        path: str,
        column: str = "text",
        output: str = "embedding",
        max_tokens: int = 256,
        max_cost: int | None = None,
        too_long: str = "cut",
        token_cache: str | None = None,
        device: str | None = None,
    ) -> None:
        self._folder = resolve_path(path)
        self._column, self._output = column, output
        self.max_tokens, self.max_cost = max_tokens, max_cost
        if too_long not in ("cut", "bad"):
            raise ConfigError(f"text_encoder: too_long is cut or bad, got {too_long!r}")
        self._refuse_long = too_long == "bad"
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            if not (self._folder / name).is_file():
                raise ConfigError(
                    f"text_encoder: {self._folder} has no {name}; give the folder of a model saved with safetensors"
                )
        try:
            self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
            transformer, found = AutoModel.from_pretrained(
                self._folder,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
            )
        except Exception as exc:  # the tokenizers library raises a bare Exception, safetensors one of its own
            raise ModelError(f"text_encoder: {self._folder} does not load: {exc}") from exc
        # transformers makes up what is missing, at random; only the pooler is not used here
        missing = sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))
        if missing:
            raise ModelError(f"text_encoder: {self._folder} has no weights for {', '.join(missing[:3])}")
        self._config = transformer.config
        positions = getattr(self._config, "max_position_embeddings", max_tokens)
        if not 2 < max_tokens <= positions:
            raise ConfigError(f"text_encoder: max_tokens is {max_tokens}, this model takes 3 to {positions}")
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)
        self.dim: int = self._config.hidden_size
        super().__init__(Encoder(transformer), Device(device))
        self.start_cost = START_TOKENS[self.device.torch.type]
        self._unpadded = False
        self._cache = None
        if token_cache is not None:
            facts = digest(max_tokens=max_tokens, too_long=too_long, tokenizer=self._folder / "tokenizer.json")
            self._cache = TokenCache(Path(token_cache), facts)

    def fingerprint(self) -> str:
        """Weights, config, tokenizer, pooling, length limit and code version."""
        return digest(
            code=CODE_VERSION,
            pooling="mean, l2",
            max_tokens=self.max_tokens,
            column=self._column,
            **({"too_long": "bad"} if self._refuse_long else {}),
            **{name: self._folder / name for name in ("config.json", "model.safetensors", "tokenizer.json")},
        )

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        """Null, empty and not UTF-8 texts."""
        column = self._text(batch)
        bad: dict[int, str] = {}
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            for row, value in enumerate(column.to_pylist()):
                if value is not None:
                    try:
                        if not value.decode().strip():
                            bad[row] = f"{self._column} is empty"
                    except UnicodeDecodeError as exc:
                        bad[row] = f"{self._column} is not UTF-8: {exc.reason} at byte {exc.start}"
        elif not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise ModelError(
                f"text_encoder: column {self._column!r} is {column.type}, not text: CAST it AS VARCHAR in the source"
            )
        else:
            blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0)
            for row in pc.indices_nonzero(pc.fill_null(blank, False)).to_pylist():
                bad[row] = f"{self._column} is empty"
        for row in pc.indices_nonzero(column.is_null()).to_pylist():
            bad[row] = f"{self._column} is null"
        return bad

    def use(self, forward: Callable[..., torch.Tensor | Tensors], dtype: torch.dtype = torch.float32) -> None:
        """See :class:`precompute.torch_model.TorchModel`; on a GPU in half precision, texts are laid end to end instead of padded."""
        half = dtype in (torch.float16, torch.bfloat16)
        positions = getattr(self._config, "model_type", "") == "bert"  # which others count in ways of their own
        if self.device.is_cuda and half and positions and isinstance(forward, Encoder):
            forward = UnpaddedEncoder(forward.transformer)
        self._unpadded = isinstance(forward, UnpaddedEncoder)
        super().use(forward, dtype)

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Token ids; a row costs its tokens."""
        limit = self.max_tokens * CHARS_PER_TOKEN
        texts = [t.decode() if isinstance(t, bytes) else t for t in self._text(batch).to_pylist()]
        cut = [text.lstrip()[: limit + 1] for text in texts]  # one character more tells that there was more
        key = None if self._cache is None else self._cache.key(cut)
        found = None if self._cache is None or key is None else self._cache.get(key)
        if found is None:
            found = self._tokenized(cut, limit)
            if self._cache is not None and key is not None:
                self._cache.put(key, *found)
        ids, lengths = found
        # a text that is refused for its length was kept as one token more than any may have
        bad = {
            int(row): f"{self._column} has more than {self.max_tokens} tokens"
            for row in np.flatnonzero(lengths > self.max_tokens)
        }
        return Prepared(lengths, _Tokens(ids, np.cumsum(lengths) - lengths, lengths), bad)

    def _tokenized(self, texts: Sequence[str], limit: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(ids of all texts in a row, how many of each)."""
        encodings = self._tokenizer.encode_batch_fast([text[:limit] for text in texts])
        lists = [e.ids for e in encodings]
        if self._refuse_long:
            lists = [
                ids + [0] * (self.max_tokens + 1 - len(ids)) if encoding.overflowing or len(text) > limit else ids
                for ids, encoding, text in zip(lists, encodings, texts, strict=True)
            ]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return np.fromiter(itertools.chain.from_iterable(lists), np.int64, int(lengths.sum())), lengths

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        """See :class:`Encoder` and :class:`UnpaddedEncoder`."""
        tokens: _Tokens = prepared.payload
        lengths = tokens.lengths[rows]
        longest = int(lengths.max())
        row = np.repeat(np.arange(len(rows)), lengths)
        starts = np.cumsum(lengths) - lengths
        place = np.arange(int(lengths.sum())) - starts[row]  # of each token in its text
        ids = tokens.ids[tokens.starts[rows][row] + place]
        if self._unpadded:
            bounds = np.append(starts, len(ids)).astype(np.int32)
            flat = (torch.from_numpy(a) for a in (ids[None], place[None], bounds))
            return (*flat, torch.tensor(longest))
        padded = np.zeros((len(rows), longest), np.int64)  # [B, T]; token 0 is [PAD], and masked anyway
        mask = np.zeros((len(rows), longest), np.int64)
        padded[row, place] = ids
        mask[row, place] = 1
        return torch.from_numpy(padded), torch.from_numpy(mask)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """``output`` → float32 [rows, dim], each of norm 1."""
        return {self._output: outputs[0]}

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """Of the matrix products: per token 2 for each weight of a layer, and 4 · length · dim of attention in each layer
        (Kaplan et al. 2020, table 1, forward only)."""
        lengths = prepared.payload.lengths[rows].astype(np.float64)
        inner = getattr(self._config, "intermediate_size", 4 * self.dim)
        layers = getattr(self._config, "num_hidden_layers", 1)
        weights = layers * (4 * self.dim**2 + 2 * self.dim * inner)
        return float(2 * weights * lengths.sum() + 4 * layers * self.dim * (lengths**2).sum())

    def _text(self, batch: pa.RecordBatch) -> pa.Array:
        if self._column not in batch.schema.names:
            raise ModelError(
                f"text_encoder: the input has no column {self._column!r} (it has: {', '.join(batch.schema.names)}); "
                "name it in the source with AS, or set `column` in the model's args"
            )
        return batch.column(self._column)
