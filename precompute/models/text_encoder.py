"""Text encoder: text → embedding, by a transformer and what its folder says comes after it.

A sentence-transformers folder is computed as sentence-transformers computes it: its pooling, Dense
layers, normalising, longest input and prompts (see :mod:`precompute.text.sentence_folder`). A plain
transformers folder says nothing of that: it gets the mean over the tokens of the last hidden state,
then x / |x| (Reimers & Gurevych 2019). Text beyond the longest input is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from precompute.model import (
    Features,
    OwnLibrary,
    Prepared,
    Verbatim,
    absolute_path,
    digest,
    resolve_path,
)
from precompute.models.device import Device, Graphed, bucketed_length
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError
from precompute.text.sentence_folder import Head, SentenceFolder, read_sentence_folder
from precompute.text.tokens import (
    TextTokenizer,
    TokenCache,
    Tokens,
    beyond_the_table,
    texts,
    unusable_texts,
)
from precompute.text.transformer import (
    DECODERS,
    START_TOKENS,
    TOKENIZER_FILES,
    load_transformer,
    longest_input,
    model_files,
    model_type,
    transformer_flops,
)
from precompute.text.unpadded import (
    UnpaddedTransformer,
    computes_the_same,
    has_unpadded_attention,
    understood,
)

CODE_VERSION = 2
"""Raised with each change of the values that this code computes; part of the fingerprint."""

PLAIN_MAX_TOKENS = 256
"""Longest input of a folder that names none."""


class Encoder(torch.nn.Module):
    """Token ids → embeddings [B, D], float32, whatever the transformer's precision.

    Args:
        transformer: its output has ``last_hidden_state``.
        head: what comes after it; the mean over the tokens, of norm 1, by default.
    """

    def __init__(self, transformer: Any, head: Head | None = None) -> None:
        super().__init__()
        self.transformer = transformer
        self.head = Head(transformer.config.hidden_size) if head is None else head

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Padded at the end: ``ids`` and ``mask`` (1 where there is a token, 2 where its prompt is
        left out of the pooling) int64 [B, T]."""
        seen = mask.clamp(max=1) if self.head.leaves_out_prompt else mask
        hidden = self.transformer(input_ids=ids, attention_mask=seen).last_hidden_state  # [B, T, D]
        out: torch.Tensor = self.head(hidden, mask)
        return out


class UnpaddedEncoder(torch.nn.Module):
    """The same for texts laid end to end, without padding; no prompt is left out."""

    def __init__(self, transformer: Callable[..., torch.Tensor], head: Head) -> None:
        super().__init__()
        self.transformer, self.head = transformer, head

    def forward(
        self, ids: torch.Tensor, starts: torch.Tensor, longest: torch.Tensor
    ) -> torch.Tensor:
        """``ids`` int64 [1, tokens], ``starts`` int32 [B + 1], ``longest`` int64 [] on the host."""
        lengths, tokens = starts.diff(), torch.arange(ids.shape[1], device=ids.device)
        texts = torch.repeat_interleave(
            torch.arange(len(lengths), device=ids.device), lengths, output_size=ids.shape[1]
        )
        places = tokens - starts[texts]
        hidden = self.transformer(ids, places[None], starts, int(longest))  # [tokens, D]
        padded = hidden.new_zeros(len(lengths), int(longest), hidden.shape[1])
        padded[texts, places] = hidden
        out: torch.Tensor = self.head(
            padded, (torch.arange(int(longest), device=ids.device) < lengths.unsqueeze(1)).long()
        )
        return out


class TextEncoder(TorchModel):
    """Embeds one text column.

    Rows are documents: their text gets the document's prompt. :meth:`for_queries` is the same model
    for what is searched by.

    Args:
        path: folder with ``config.json``, ``model.safetensors`` and ``tokenizer.json``, and of a
            sentence-transformers model with ``modules.json`` and what it names;
            ``package:name/folder`` inside a package.
        column: the source's text column: string, or binary holding UTF-8.
        output: name of the feature.
        max_tokens: longest input, special tokens and prompt included; by default what the folder
            says, and 256 of a plain transformers model.
        max_cost: tokens in one batch; by default what the engine finds best.
        token_cache: folder that keeps tokens by content between runs; by default nowhere.
        too_long: what becomes of a text beyond ``max_tokens``: ``cut``, or ``bad`` to treat its row
            as a bad one.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.
        prompt: put before every text; by default the folder's prompt for documents. An empty one is
            none.
        query_prompt: put before a text that is searched by; by default the folder's prompt for
            queries.
        truncate_dim: numbers retained of each vector, without normalising again; by default what
            the folder says.

    Raises:
        ConfigError: no such folder or file, something in it that is not understood, or an argument
            out of bounds.
        ModelError: the weights do not load.
    """

    cost_unit = "tokens"
    concurrent = True

    def __init__(
        self,
        path: str,
        column: str = "text",
        output: str = "embedding",
        max_tokens: int | None = None,
        max_cost: int | None = None,
        too_long: str = "cut",
        token_cache: str | None = None,
        device: str | None = None,
        prompt: str | None = None,
        query_prompt: str | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        folder = self.folder = resolve_path(path)
        """What it was loaded from."""
        self._given: dict[str, Any] = {
            "path": str(folder),
            "column": column,
            "output": output,
            "max_tokens": max_tokens,
            "plain": False,
            "prompt": prompt,
            "truncate_dim": truncate_dim,
        }
        self._column, self._output, self.max_cost = column, output, max_cost
        if too_long not in ("cut", "bad"):
            raise ConfigError(f"text_encoder: too_long is cut or bad, got {too_long!r}")
        self._refuse_long = too_long == "bad"
        own = read_sentence_folder(folder)
        recipe = own or SentenceFolder(folder)
        self._files = model_files(recipe.transformer)
        kind = model_type(recipe.transformer / "config.json")
        if own is None and kind in DECODERS:
            raise ConfigError(
                f"text_encoder: {folder} is a decoder ({kind}) without modules.json, which would"
                " say how it is pooled: save it with sentence-transformers"
            )
        transformer, tokenizer = load_transformer(recipe.transformer)
        self._config = transformer.config
        self.max_tokens = longest_input(
            max_tokens, recipe.max_tokens if own else PLAIN_MAX_TOKENS, transformer, tokenizer
        )
        self._tokenizer = TextTokenizer(
            tokenizer, self.max_tokens, lowercase=recipe.lowercase, keep_long=self._refuse_long
        )
        if own is None:
            # nothing but this module says how long an input may be
            self._given |= {"plain": True, "max_tokens": self.max_tokens}
        head = _head(recipe, self._config.hidden_size, truncate_dim)
        self.dim, self._leaves_out_prompt = head.dim, head.leaves_out_prompt
        self._prompt = recipe.prompt if prompt is None else prompt
        self._query_prompt = recipe.query_prompt if query_prompt is None else query_prompt
        self._facts = {
            **recipe.facts(),
            "max_tokens": self.max_tokens,
            "dim": self.dim,
            "prompts": Verbatim({"document": self._prompt, "query": self._query_prompt}),
        }
        self._flops = transformer_flops(transformer)
        super().__init__(Encoder(transformer, head), Device(device))
        self.start_cost = START_TOKENS[self.device.torch.type]
        self._unpadded = self._bucketed = False
        self._cache = (
            None
            if token_cache is None
            else self._cache_in(absolute_path(token_cache), recipe.lowercase)
        )
        self._begin_with(self._prompt)

    def _cache_in(self, folder: Path, lowercase: bool) -> TokenCache:
        facts = {
            "code": CODE_VERSION,
            "prompt": Verbatim(self._prompt),
            "max_tokens": self.max_tokens,
            "too_long": "bad" if self._refuse_long else "cut",
            "lowercase": lowercase,
            "tokenizer": {
                name: path for name, path in self._files.items() if name in TOKENIZER_FILES
            },
        }
        return TokenCache(folder, digest(**facts))

    def _begin_with(self, prompt: str) -> None:
        self._prefix = prompt
        self._prompt_tokens = (
            self._tokenizer.prompt_length(prompt) if prompt and self._leaves_out_prompt else 0
        )

    @property
    def tokenizer_file(self) -> Path:
        """Its ``tokenizer.json``."""
        return self._files["tokenizer.json"]

    @property
    def has_prompt(self) -> bool:
        """Whether something is put before every text."""
        return self._prefix != ""

    def for_queries(self) -> TextEncoder:
        if self._prefix == self._query_prompt:
            return self
        other = copy.copy(self)
        # a file for each query would be no use
        other._cache = None
        other._begin_with(self._query_prompt)
        return other

    def fingerprint(self) -> str:
        return digest(
            code=CODE_VERSION,
            column=self._column,
            recipe=self._facts,
            files=self._files,
            **({"too_long": "bad"} if self._refuse_long else {}),
        )

    def own_library(self) -> OwnLibrary:
        by = "precompute.models.text_encoder:by_sentence_transformers"
        return OwnLibrary(
            "sentence-transformers",
            by,
            self._given,
            tuple(self._files.values()),
            ("sentence_transformers",),
        )

    def reads(self) -> tuple[str]:
        return (self._column,)

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        return unusable_texts(batch.column(self._column), self._column, "text_encoder")

    def use(
        self, forward: Callable[..., torch.Tensor | Tensors], dtype: torch.dtype = torch.float32
    ) -> None:
        """Compute by another forward. On a GPU in half precision texts are laid end to end instead
        of padded, if it can; by graphs, they are padded to few lengths."""
        if isinstance(forward, Encoder):
            forward = self.laid_out(forward, dtype)
        self._unpadded = isinstance(forward, UnpaddedEncoder)
        self._bucketed = isinstance(forward, Graphed)
        super().use(forward, dtype)

    def laid_out(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype,
        compiled: Callable[[torch.nn.Module], Any] = lambda module: module,
    ) -> Any:
        """See the base class: on a GPU in half precision, of texts laid end to end."""
        config, device = self._config, self.device.torch
        if (
            isinstance(module, Encoder)
            and dtype in (torch.float16, torch.bfloat16)
            and not module.head.leaves_out_prompt
            and understood(module.transformer)
        ):
            heads = config.num_attention_heads
            dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            if has_unpadded_attention(device, dtype, dim):
                other = UnpaddedTransformer(module.transformer)
                if computes_the_same(other, module.transformer, self.max_tokens, device):
                    return UnpaddedEncoder(compiled(other), module.head)
        return compiled(module)

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Token ids; a row costs its tokens."""
        ids, lengths = self._tokenized(
            [self._prefix + text for text in texts(batch.column(self._column))]
        )
        # a text that is refused for its length was stored as one token more than any may have
        bad = {
            int(row): f"{self._column} has more than {self.max_tokens} tokens"
            for row in np.flatnonzero(lengths > self.max_tokens)
        }
        bad |= beyond_the_table(ids, lengths, self._config.vocab_size, self._column)
        return Prepared(lengths, Tokens(ids, np.cumsum(lengths) - lengths, lengths), bad)

    def _tokenized(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(ids of all texts in a row, how many of each), retained where there is a cache."""
        if self._cache is None:
            return self._tokenizer.tokenized(texts)
        key = self._cache.key(texts)
        tokens = self._cache.get(key)
        if tokens is None:
            tokens = self._tokenizer.tokenized(texts)
            self._cache.put(key, *tokens)
        return tokens

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        tokens: Tokens = prepared.payload
        lengths = tokens.lengths[rows]
        if len(rows) == 1 and not self._unpadded and not self._bucketed and not self._prompt_tokens:
            # as below, in a fifth of the time
            first = int(tokens.starts[rows[0]])
            alone = torch.from_numpy(tokens.ids[None, first : first + int(lengths[0])])
            return alone, torch.ones_like(alone)
        longest = int(lengths.max())
        row = np.repeat(np.arange(len(rows)), lengths)
        starts = np.cumsum(lengths) - lengths
        # of each token, counted from the beginning of its text
        place = np.arange(int(lengths.sum())) - starts[row]
        ids = tokens.ids[tokens.starts[rows][row] + place]
        if self._unpadded:
            bounds = np.append(starts, len(ids)).astype(np.int32)
            return torch.from_numpy(ids[None]), torch.from_numpy(bounds), torch.tensor(longest)
        if self._bucketed:
            longest = min(bucketed_length(longest), max(longest, self.max_tokens))
        padded = np.full((len(rows), longest), self._tokenizer.padding, np.int64)  # [B, T]
        mask = np.zeros((len(rows), longest), np.int64)
        padded[row, place] = ids
        mask[row, place] = np.where(place < self._prompt_tokens, 2, 1)
        return torch.from_numpy(padded), torch.from_numpy(mask)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return {self._output: outputs[0]}

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        return self._flops(prepared.payload.lengths[rows])


def _head(recipe: SentenceFolder, hidden_size: int, truncate_dim: int | None) -> Head:
    """What comes after the transformer, cut to the numbers that are retained.

    Raises:
        ConfigError: ``truncate_dim`` is more than it has, or none.
    """
    head = Head(hidden_size, recipe.pooling, recipe.layers)
    retained = recipe.truncate_dim if truncate_dim is None else truncate_dim
    if truncate_dim is not None and not 0 < truncate_dim <= head.dim:
        raise ConfigError(
            f"text_encoder: truncate_dim is {truncate_dim}, this model's vectors have 1 to"
            f" {head.dim} numbers"
        )
    head.dim = min(retained or head.dim, head.dim)
    return head


# ---- the same by the library itself


def by_sentence_transformers(
    path: str,
    column: str,
    output: str,
    max_tokens: int | None,
    plain: bool,
    prompt: str | None,
    truncate_dim: int | None,
) -> Callable[[pa.RecordBatch], Features]:
    """Documents as ``SentenceTransformer`` embeds them, on the CPU in float32, with what a view
    says besides the folder; of a plain transformers folder with what :class:`TextEncoder` adds."""
    from sentence_transformers import SentenceTransformer

    more: dict[str, Any] = {} if truncate_dim is None else {"truncate_dim": truncate_dim}
    model: Any = SentenceTransformer(path, device="cpu", local_files_only=True, **more).float()
    if max_tokens is not None:
        model.max_seq_length = max_tokens
    # encode_document() puts nothing first where the folder's default is the documents' prompt
    # under another name than "document", with which encode() begins
    default = model.default_prompt_name
    by_default = not model.prompts.get("document") and default not in (None, "query")
    encode = model.encode if by_default else model.encode_document
    said: dict[str, Any] = {} if prompt is None else {"prompt": prompt}

    def predict(batch: pa.RecordBatch) -> Features:
        rows = texts(batch.column(column))
        return {output: encode(rows, show_progress_bar=False, normalize_embeddings=plain, **said)}

    return predict
