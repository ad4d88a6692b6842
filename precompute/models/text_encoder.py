"""Text encoder: text → embedding, by a transformer and what its folder says comes after it.

A sentence-transformers folder is computed as sentence-transformers computes it: its pooling, Dense layers, normalising, longest input and prompts (see
:mod:`precompute.models.sentence_folder`). A plain transformers folder says nothing of that: it gets the mean over the tokens of the last hidden
state, then x / |x| (Reimers & Gurevych 2019). Text beyond the longest input is cut.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from tokenizers import Tokenizer, normalizers
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from precompute.model import Prepared, Verbatim, digest, resolve_path
from precompute.models import attention
from precompute.models.device import Device
from precompute.models.sentence_folder import SentenceFolder, read_sentence_folder
from precompute.models.sentence_head import Head
from precompute.models.token_cache import TokenCache
from precompute.models.torch_model import Tensors, TorchModel
from precompute.project_path import absolute_path
from store.errors import ConfigError, ModelError

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a run has its own progress; this one ends up in logs

CODE_VERSION = 2
"""Raised by whoever changes the values this code computes; part of the fingerprint."""

ENCODERS = (
    "albert",
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "eurobert",
    "gte",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
)
DECODERS = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the transformers whose values were compared with sentence-transformers' in batches padded at the end. What is padding is masked, or
comes after all that can see it, and a decoder's positions are relative: nothing changes, whatever side its tokenizer pads on."""

PLAIN_MAX_TOKENS = 256
"""Longest input of a folder that names none."""

CHARS_PER_TOKEN = 16
"""Of a text, ``max_tokens × 16`` characters are tokenised at first, and the rest only when they did not fill ``max_tokens``: a megabyte of words in one
row costs no more than a page."""

START_TOKENS = {"cpu": 1024, "cuda": 16384}
"""First batches: on a CPU small ones stay in its cache, a GPU wants large ones. The engine searches on from here."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt")


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
        """Padded at the end: ``ids`` and ``mask`` (1 where there is a token, 2 where its prompt is left out of the pooling) int64 [B, T]."""
        seen = mask.clamp(max=1) if self.head.leaves_out_prompt else mask
        hidden = self.transformer(input_ids=ids, attention_mask=seen).last_hidden_state  # [B, T, D]
        out: torch.Tensor = self.head(hidden, mask)
        return out


class UnpaddedEncoder(torch.nn.Module):
    """The same of texts laid end to end, without padding; no prompt is left out."""

    def __init__(self, transformer: Any, head: Head) -> None:
        super().__init__()
        transformer.set_attn_implementation(attention.NAME)
        self.transformer, self.head = transformer, head

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, longest: torch.Tensor) -> torch.Tensor:
        """``ids`` and ``positions`` int64 [1, tokens], ``starts`` int32 [B + 1], ``longest`` int64 [] on the host."""
        hidden = self.transformer(input_ids=ids, position_ids=positions, starts=starts, longest=int(longest)).last_hidden_state[
            0
        ]  # [tokens, D]
        lengths = starts.diff()
        texts = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths, output_size=ids.shape[1])
        padded = hidden.new_zeros(len(lengths), int(longest), hidden.shape[1])
        padded[texts, positions[0]] = hidden
        out: torch.Tensor = self.head(padded, (torch.arange(int(longest), device=ids.device) < lengths.unsqueeze(1)).long())
        return out


@dataclass(slots=True)
class _Tokens:
    """Token ids of all rows in a row, int64; row ``i`` is ``ids[starts[i]:starts[i] + lengths[i]]``."""

    ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class TextEncoder(TorchModel):
    """Embeds one text column.

    Rows are documents: their text gets the document's prompt. :meth:`for_queries` is the same model for what is searched by.

    Args:
        path: folder with ``config.json``, ``model.safetensors`` and ``tokenizer.json``, and of a sentence-transformers model with
            ``modules.json`` and what it names; ``package:name/folder`` inside a package.
        column: the source's text column: string, or binary holding UTF-8.
        output: name of the feature.
        max_tokens: longest input, special tokens and prompt included; by default what the folder says, and 256 of a plain transformers model.
        max_cost: tokens in one batch; by default what the engine finds best.
        token_cache: folder that keeps tokens by content between runs; by default nowhere.
        too_long: what becomes of a text beyond ``max_tokens``: ``cut``, or ``bad`` to treat its row as a bad one.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.
        prompt: put before every text; by default the folder's prompt for documents. An empty one is none.
        query_prompt: put before a text that is searched by; by default the folder's prompt for queries.
        truncate_dim: numbers kept of each vector, without normalising again; by default what the folder says.

    Raises:
        ConfigError: no such folder or file, something in it that is not understood, or an argument out of bounds.
        ModelError: the weights do not load.
    """

    cost_unit = "tokens"

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
        folder = resolve_path(path)
        self._column, self._output, self.max_cost = column, output, max_cost
        if too_long not in ("cut", "bad"):
            raise ConfigError(f"text_encoder: too_long is cut or bad, got {too_long!r}")
        self._refuse_long = too_long == "bad"
        found = read_sentence_folder(folder)
        recipe = found or SentenceFolder(folder)
        self._files = _files(recipe.transformer)
        kind = _kind(recipe.transformer / "config.json")
        if found is None and kind in DECODERS:
            raise ConfigError(
                f"text_encoder: {folder} is a decoder ({kind}) without modules.json, which would say how it is pooled: save it with sentence-transformers"
            )
        transformer, tokenizer = _load(recipe.transformer)
        self._config = transformer.config
        self.max_tokens = _max_tokens(max_tokens, recipe.max_tokens if found else PLAIN_MAX_TOKENS, transformer, tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        self._padding = int(tokenizer.pad_token_id or 0)
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.max_tokens)
        if recipe.lowercase:
            _lowercase(self._tokenizer)
        head = Head(self._config.hidden_size, recipe.pooling, recipe.layers)
        kept = recipe.truncate_dim if truncate_dim is None else truncate_dim
        if truncate_dim is not None and not 0 < truncate_dim <= head.dim:
            raise ConfigError(f"text_encoder: truncate_dim is {truncate_dim}, this model's vectors have 1 to {head.dim} numbers")
        head.dim = min(kept or head.dim, head.dim)
        self.dim = head.dim
        self._prompt, self._query_prompt = (
            folders if given is None else given
            for given, folders in ((prompt, recipe.prompt), (query_prompt, recipe.query_prompt))
        )
        self._facts = {
            **recipe.facts(),
            "max_tokens": self.max_tokens,
            "dim": self.dim,
            "prompts": Verbatim({"document": self._prompt, "query": self._query_prompt}),
        }
        self._flops = _flops(transformer)
        super().__init__(Encoder(transformer, head), Device(device))
        self.start_cost = START_TOKENS[self.device.torch.type]
        self._unpadded = False
        self._leaves_out_prompt = head.leaves_out_prompt
        self._cache = None
        if token_cache is not None:
            facts = {
                "code": CODE_VERSION,
                "prompt": Verbatim(self._prompt),
                "max_tokens": self.max_tokens,
                "too_long": too_long,
                "lowercase": recipe.lowercase,
                "tokenizer": {name: path for name, path in self._files.items() if name in _TOKENIZER_FILES},
            }
            self._cache = TokenCache(absolute_path(token_cache), digest(**facts))
        self._begin_with(self._prompt)

    def _begin_with(self, prompt: str) -> None:
        """Put this before every text from now on."""
        self._prefix, self._prompt_tokens = prompt, 0
        if prompt and self._leaves_out_prompt:  # counted as sentence-transformers does (``Transformer._get_prompt_length``)
            ids = self._tokenizer.encode(prompt).ids
            self._prompt_tokens = len(ids) - (ids[-1] in self._special if ids else 0)

    def for_queries(self) -> TextEncoder:
        """See :class:`precompute.model.QueryModel`: the same weights, precision and device, with the query's prompt."""
        if self._prefix == self._query_prompt:
            return self
        other = copy.copy(self)
        other._cache = None  # a file for each query would help nobody
        other._begin_with(self._query_prompt)
        return other

    def fingerprint(self) -> str:
        """Weights, config, tokenizer, pooling and what follows it, both prompts, length limit and code version."""
        return digest(
            code=CODE_VERSION,
            column=self._column,
            recipe=self._facts,
            files=self._files,
            **({"too_long": "bad"} if self._refuse_long else {}),
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
        """See :class:`precompute.models.torch_model.TorchModel`; on a GPU in half precision, texts are laid end to end instead of padded."""
        half = dtype in (torch.float16, torch.bfloat16)
        positions = getattr(self._config, "model_type", "") == "bert"  # which others count in ways of their own
        if self.device.is_cuda and half and positions and isinstance(forward, Encoder) and not forward.head.leaves_out_prompt:
            forward = UnpaddedEncoder(forward.transformer, forward.head)
        self._unpadded = isinstance(forward, UnpaddedEncoder)
        super().use(forward, dtype)

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Token ids; a row costs its tokens."""
        texts = [self._prefix + (t.decode() if isinstance(t, bytes) else t) for t in self._text(batch).to_pylist()]
        key = None if self._cache is None else self._cache.key(texts)
        found = None if self._cache is None or key is None else self._cache.get(key)
        if found is None:
            found = self._tokenized(texts)
            if self._cache is not None and key is not None:
                self._cache.put(key, *found)
        ids, lengths = found
        # a text that is refused for its length was kept as one token more than any may have
        bad = {
            int(row): f"{self._column} has more than {self.max_tokens} tokens"
            for row in np.flatnonzero(lengths > self.max_tokens)
        }
        return Prepared(lengths, _Tokens(ids, np.cumsum(lengths) - lengths, lengths), bad)

    def _tokenized(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(ids of all texts in a row, how many of each)."""
        heads = [_head(text, self.max_tokens * CHARS_PER_TOKEN) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(heads)
        # what does not fill the longest input is not all there is
        short = [row for row, text in enumerate(texts) if len(heads[row]) < len(text) and not encodings[row].overflowing]
        for row, encoding in zip(short, self._tokenizer.encode_batch_fast([texts[row] for row in short]), strict=True):
            encodings[row] = encoding
        lists = [e.ids for e in encodings]
        if self._refuse_long:
            lists = [
                ids + [0] * (self.max_tokens + 1 - len(ids)) if encoding.overflowing else ids
                for ids, encoding in zip(lists, encodings, strict=True)
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
        padded = np.full((len(rows), longest), self._padding, np.int64)  # [B, T]
        mask = np.zeros((len(rows), longest), np.int64)
        padded[row, place] = ids
        mask[row, place] = np.where(place < self._prompt_tokens, 2, 1)
        return torch.from_numpy(padded), torch.from_numpy(mask)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """``output`` → float32 [rows, dim]."""
        return {self._output: outputs[0]}

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """Of the matrix products: per token 2 for each weight of a linear layer, and 4 · length · width of attention in each layer
        (Kaplan et al. 2020, table 1, forward only; a decoder's and a window's unseen half is counted)."""
        lengths = prepared.payload.lengths[rows].astype(np.float64)
        per_token, per_pair = self._flops
        return float(per_token * lengths.sum() + per_pair * (lengths**2).sum())

    def _text(self, batch: pa.RecordBatch) -> pa.Array:
        if self._column not in batch.schema.names:
            raise ModelError(
                f"text_encoder: the input has no column {self._column!r} (it has: {', '.join(batch.schema.names)}); "
                "name it in the source with AS, or set `column` in the model's args"
            )
        return batch.column(self._column)


def _head(text: str, limit: int) -> str:
    """About ``limit`` characters of a text, up to the end of a word: half a word has other tokens than the whole."""
    if len(text) <= limit:
        return text
    words = text[:limit].rsplit(None, 1)
    return words[0] if len(words) == 2 else text[:limit]


def _files(folder: Path) -> dict[str, Path]:
    """The transformer's and the tokenizer's files, by name.

    Raises:
        ConfigError: one is missing.
    """
    weights = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / weights[0]).is_file():  # a large model's, in several files
        try:
            weights = [index.name, *sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as exc:
            raise ModelError(f"text_encoder: {index} is damaged: {exc}") from exc
    needed = ["config.json", *weights, "tokenizer.json"]
    for name in needed:
        if not (folder / name).is_file():
            raise ConfigError(f"text_encoder: {folder} has no {name}; give the folder of a model saved with safetensors")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"text_encoder: {folder} is an adapter (adapter_config.json) on another model: merge the two and save the result"
        )
    return {name: folder / name for name in (*needed, *_TOKENIZER_FILES) if (folder / name).is_file()}


def _kind(file: Path) -> str:
    """The ``model_type`` of a ``config.json``.

    Raises:
        ConfigError: it is none that is known to come out right here.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = str(config["model_type"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ModelError(f"text_encoder: {file} is damaged: it names no model_type ({exc})") from exc
    if "AutoModel" in (config.get("auto_map") or {}):  # transformers' own code for the same model_type may be another model
        raise ConfigError(
            f"text_encoder: {file}: the model's own code (auto_map: {config['auto_map']['AutoModel']}) is never run: write a model class of your own, "
            f"or remove auto_map where transformers' own {kind!r} is meant"
        )
    if kind not in (*ENCODERS, *DECODERS):
        raise ConfigError(
            f"text_encoder: {file}: model_type {kind!r} is not known to come out right in batches; {', '.join((*ENCODERS, *DECODERS))} are: "
            "write a model class of your own"
        )
    return kind


def _load(folder: Path) -> tuple[Any, Any]:
    """(transformer in float32, transformers' tokenizer).

    Raises:
        ConfigError: the tokenizer works in a way that is not followed here.
        ModelError: a file is damaged, or weights are missing.
    """
    try:
        Tokenizer.from_file(str(folder / "tokenizer.json"))  # transformers makes up one from other files when this is damaged
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        transformer, found = AutoModel.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as exc:  # the tokenizers library raises a bare Exception, safetensors one of its own
        raise ModelError(f"text_encoder: {folder} does not load: {exc}") from exc
    # transformers makes up what is missing, at random; only the pooler is not used here
    missing = sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise ModelError(f"text_encoder: {folder} has no weights for {', '.join(missing[:3])}")
    if tokenizer.truncation_side != "right":
        raise ConfigError(
            f"text_encoder: {folder}/tokenizer_config.json: truncation_side is {tokenizer.truncation_side}; only right is understood"
        )
    if getattr(transformer.config, "use_cache", False):
        transformer.config.use_cache = False  # nothing is generated
    return transformer, tokenizer


def _max_tokens(given: int | None, folders: int | None, transformer: Any, tokenizer: Any) -> int:
    """The longest input: as given; else as the folder says; else as ``sentence_transformers…Transformer`` finds it.

    Raises:
        ConfigError: the model cannot take it, or nobody says.
    """
    config = transformer.config
    declared = getattr(config, "max_position_embeddings", -1)
    table = _positions(transformer)
    if given is not None:
        most = table or max(declared, folders or 0)
        if not 2 < given <= most:
            raise ConfigError(f"text_encoder: max_tokens is {given}, this model takes 3 to {most}")
        return given
    found = folders
    if found is None:
        found = tokenizer.model_max_length if declared == -1 else min(tokenizer.model_max_length, declared)
    found = min(found, table or found)
    if not 2 < found < 2**24:  # transformers writes 1e30 for none
        raise ConfigError(
            f"text_encoder: the folder names no longest input that can be used ({found}): set max_tokens in the model's args"
        )
    return int(found)


def _positions(transformer: Any) -> int | None:
    """Tokens that a learned table of positions has room for, of which RoBERTa's kind begins behind the padding's; None without a table."""
    for module in transformer.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding):
            padding = getattr(module, "padding_idx", None)
            return table.num_embeddings - (padding + 1 if isinstance(padding, int) else 0)
    return None


def _lowercase(tokenizer: Tokenizer) -> None:
    """What sentence-transformers makes of ``do_lower_case``."""
    old = tokenizer.normalizer
    own = [] if old is None else [old]
    parts = [old[at] for at in range(len(old))] if isinstance(old, normalizers.Sequence) else own
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


def _flops(transformer: Any) -> tuple[float, float]:
    """(per token, per pair of tokens), of the matrix products."""
    config = transformer.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    weights = sum(
        module.weight.numel()
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith("pooler")
    )
    shared = config.num_hidden_layers // getattr(config, "num_hidden_groups", config.num_hidden_layers)  # ALBERT's layers are one
    return 2.0 * weights * shared, 4.0 * config.num_hidden_layers * width
