"""Text classifier: a text, or a pair of them, → scores and a label, by a transformer with a
classification head: sentiment, topics, and cross-encoders that rerank.

A folder is computed as transformers computes ``AutoModelForSequenceClassification``, and a
cross-encoder's as sentence-transformers computes ``CrossEncoder.predict`` (6.2's source is the
reference).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from precompute.foreign_file import KnownKeys
from precompute.model import Features, OwnLibrary, Prepared, Verbatim, digest, resolve_path
from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError
from precompute.text.sentence_folder import ACTIVATIONS as KNOWN
from precompute.text.sentence_folder import CrossEncoderFolder, activation_class, read_cross_encoder
from precompute.text.tokens import (
    PairTokenizer,
    PairTokens,
    beyond_the_table,
    texts,
    unusable_texts,
)
from precompute.text.transformer import (
    ENCODERS,
    START_TOKENS,
    load_classifier,
    longest_input,
    model_files,
    model_type,
    transformer_flops,
)

CODE_VERSION = 2
"""Raised with each change of the values that this code computes; part of the fingerprint."""

_USE = "text_classifier"

ACTIVATIONS = ("none", "sigmoid", "softmax")

ENTRY = KnownKeys(
    "sentence_transformers in the config.json of a cross-encoder",
    used=("activation_fn",),
    harmless={"version": "what wrote it"},
)


class Classifier(torch.nn.Module):
    """Token ids → scores [B, labels], float32, or [B] of one label.

    Args:
        activation: of the logits: one of :data:`ACTIVATIONS`, or a class of ``torch.nn`` that is
            made without arguments.
    """

    def __init__(self, transformer: Any, activation: str) -> None:
        super().__init__()
        self.transformer, self.activation = transformer, activation

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Padded at the end: ``ids``, ``mask`` (1 where there is a token) and ``types`` (of which
        text a token is) int64 [B, T]."""
        more = {} if types is None else {"token_type_ids": types}
        logits: torch.Tensor = self.transformer(
            input_ids=ids, attention_mask=mask, **more
        ).logits.float()
        if self.activation == "sigmoid":
            logits = logits.sigmoid()
        elif self.activation == "softmax":
            logits = logits.softmax(-1)
        elif self.activation != "none":
            logits = getattr(torch.nn, self.activation)()(logits)
        return logits.squeeze(-1) if logits.shape[-1] == 1 else logits


class TextClassifier(TorchModel):
    """Scores one text column, or two as a pair.

    Args:
        path: folder with ``config.json``, ``model.safetensors`` and ``tokenizer.json``;
            ``package:name/folder`` inside a package.
        columns: the source's text column, or a list of two: a query and a document.
        output: name of the feature: a number of a model of one label, else a vector of as many as
            there are labels, in the folder's order.
        label: name of a second feature: the label with the highest score, as the folder names it
            (``id2label``).
        activation: ``none``, ``sigmoid`` or ``softmax`` of the logits; by default what a
            cross-encoder's folder names, without which it is the sigmoid of one label and none of
            several. Of any other classifier it is the sigmoid of one label or of several that may
            hold at once (``problem_type``), nothing of a regression, and the softmax of all others.
        prompt: put before each text, of a pair before the first; by default what a cross-encoder's
            folder says. An empty one is none.
        max_tokens: longest input, special tokens included; by default what the folder says.
        max_cost: tokens in one batch; by default what the engine finds best.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.

    Raises:
        ConfigError: no such folder or file, a model that is none of these, or an argument out of
            bounds.
        ModelError: the weights do not load.
    """

    cost_unit = "tokens"
    concurrent = True

    def __init__(
        self,
        path: str,
        columns: str | Sequence[str] = "text",
        output: str = "score",
        label: str | None = None,
        activation: str | None = None,
        max_tokens: int | None = None,
        max_cost: int | None = None,
        device: str | None = None,
        prompt: str | None = None,
    ) -> None:
        self._columns = _checked_columns(columns, output, label, activation)
        folder = resolve_path(path)
        own = read_cross_encoder(folder)
        recipe = own or CrossEncoderFolder()
        self._files = model_files(folder, "text_classifier")
        kind = model_type(folder / "config.json", "text_classifier")
        if kind not in ENCODERS:
            raise ConfigError(
                f"text_classifier: {folder} is a decoder ({kind}), whose last token is looked at:"
                f" {', '.join(ENCODERS)} are computed"
            )
        transformer, tokenizer = load_classifier(folder)
        config = transformer.config
        self.max_tokens = longest_input(
            max_tokens, recipe.max_tokens, transformer, tokenizer, "text_classifier"
        )
        before = recipe.prompt if prompt is None else prompt
        self._tokenizer = PairTokenizer(tokenizer, self.max_tokens, before, recipe.lowercase)
        self._types = (
            "token_type_ids" in tokenizer.model_input_names
            and "token_type_ids" in inspect.signature(transformer.forward).parameters
        )
        self._labels = pa.array(
            [str(config.id2label[n]) for n in range(config.num_labels)], pa.string()
        )
        if label is not None and config.num_labels == 1:
            raise ConfigError(
                f"text_classifier: {folder} has one label, which is a score: leave out `label`"
            )
        self._output, self._label, self.max_cost = output, label, max_cost
        self._given: dict[str, Any] = {
            "path": str(folder),
            "columns": self._columns,
            "output": output,
            "label": label,
            "activation": activation,
            "max_tokens": max_tokens,
            "prompt": prompt,
        }
        self._is_cross_encoder = _is_cross_encoder(config, own)
        chosen = activation or _activation(config, own, folder)
        self._facts = {
            "activation": chosen,
            "max_tokens": self.max_tokens,
            "columns": Verbatim(self._columns),
            "label": Verbatim(label),
            "prompt": Verbatim(before),
            "lowercase": recipe.lowercase,
        }
        self._vocabulary = config.vocab_size
        self._flops = transformer_flops(transformer)
        super().__init__(Classifier(transformer, chosen), Device(device))
        self.start_cost = START_TOKENS[self.device.torch.type]

    def fingerprint(self) -> str:
        return digest(code=CODE_VERSION, recipe=self._facts, files=self._files)

    def own_library(self) -> OwnLibrary:
        name = "sentence-transformers" if self._is_cross_encoder else "transformers"
        by = f"precompute.models.text_classifier:by_{name.replace('-', '_')}"
        files = tuple(self._files.values())
        return OwnLibrary(name, by, self._given, files, (name.replace("-", "_"),))

    def reads(self) -> tuple[str, ...]:
        return self._columns

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        bad: dict[int, str] = {}
        for name in reversed(self._columns):
            bad |= unusable_texts(batch.column(name), name, "text_classifier")
        return bad

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Token ids; a row costs its tokens."""
        columns = [texts(batch.column(name)) for name in self._columns]
        tokens = self._tokenizer.tokenized(
            columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        )
        bad = beyond_the_table(
            tokens.ids, tokens.lengths, self._vocabulary, " and ".join(self._columns)
        )
        return Prepared(tokens.lengths, tokens, bad)

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        tokens: PairTokens = prepared.payload
        lengths = tokens.lengths[rows]
        row = np.repeat(np.arange(len(rows)), lengths)
        place = np.arange(int(lengths.sum())) - (np.cumsum(lengths) - lengths)[row]
        at = tokens.starts[rows][row] + place
        shape = len(rows), int(lengths.max())
        made = [np.full(shape, self._tokenizer.padding, np.int64), np.zeros(shape, np.int64)]
        made[0][row, place], made[1][row, place] = tokens.ids[at], 1
        if self._types:
            made.append(np.zeros(shape, np.int64))
            made[2][row, place] = tokens.types[at]
        return tuple([torch.from_numpy(one) for one in made])

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
        """``output`` → float32 [rows] or [rows, labels]; and the label's name, a text for each
        row."""
        scores = outputs[0]
        if self._label is None:
            return {self._output: scores}
        return {self._output: scores, self._label: self._labels.take(pa.array(scores.argmax(1)))}

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        return self._flops(prepared.payload.lengths[rows])


def _checked_columns(
    columns: str | Sequence[str], output: str, label: str | None, activation: str | None
) -> tuple[str, ...]:
    """The text columns.

    Raises:
        ConfigError: an argument is out of bounds.
    """
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if len(names) not in (1, 2) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"text_classifier: columns is a text column, or a list of two, got {columns!r}"
        )
    if activation not in (None, *ACTIVATIONS):
        raise ConfigError(
            f"text_classifier: activation is {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    if label == output:
        raise ConfigError(
            f"text_classifier: label and output are both {output!r}: give them two names"
        )
    return names


def _is_cross_encoder(config: Any, own: CrossEncoderFolder | None) -> bool:
    """Whether sentence-transformers wrote a folder: then ``CrossEncoder`` is what people load it
    by, else a pipeline of transformers."""
    entries = ("sentence_transformers", "sbert_ce_default_activation_function")
    return own is not None or any(getattr(config, name, None) is not None for name in entries)


def _activation(config: Any, own: CrossEncoderFolder | None, folder: Path) -> str:
    """What a folder says, or what its kind of labels wants.

    Raises:
        ConfigError: it names one that is not known here, or is a cross-encoder whose labels
            sentence-transformers takes otherwise.
    """
    entry = getattr(config, "sentence_transformers", None)
    older = getattr(config, "sbert_ce_default_activation_function", None)
    if not _is_cross_encoder(config, own):
        if config.problem_type == "regression":
            return "none"
        several = config.problem_type == "multi_label_classification"
        return "sigmoid" if config.num_labels == 1 or several else "softmax"
    if entry is not None:
        ENTRY.check(entry if isinstance(entry, dict) else {str(entry): None}, folder, _USE)
    heads = [name for name in config.architectures or () if "ForSequenceClassification" in name]
    if config.num_labels > 1 and not heads:
        raise ConfigError(
            f"{_USE}: {folder}/config.json: architectures is {config.architectures}, of which"
            f" sentence-transformers makes a cross-encoder of one label, and it has"
            f" {config.num_labels}: save it with its class, …ForSequenceClassification"
        )
    named = None if own is None else own.activation
    if named is None:
        named = entry.get("activation_fn") if entry and "activation_fn" in entry else older
    if named is None:
        return "sigmoid" if config.num_labels == 1 else "none"
    known = activation_class(str(named))
    if known is None:
        raise ConfigError(
            f"{_USE}: {folder} names the activation {named!r}; {', '.join(KNOWN)} of torch.nn are"
            " known: set `activation`"
        )
    return {"Identity": "none", "Sigmoid": "sigmoid"}.get(known, known)


# ---- the same by the library itself


def by_sentence_transformers(
    path: str,
    columns: Sequence[str],
    output: str,
    label: str | None,
    activation: str | None,
    max_tokens: int | None,
    prompt: str | None,
) -> Callable[[pa.RecordBatch], Features]:
    """Scores as ``CrossEncoder`` predicts them, on the CPU in float32."""
    if len(columns) == 1:
        raise ValueError("a CrossEncoder takes pairs of texts, and the view has one")
    from sentence_transformers import CrossEncoder

    model: Any = CrossEncoder(path, device="cpu", local_files_only=True, max_length=max_tokens)
    model.float()
    given_by: dict[str | None, dict[str, Any]] = {
        None: {},
        "none": {"activation_fn": torch.nn.Identity()},
        "sigmoid": {"activation_fn": torch.nn.Sigmoid()},
        "softmax": {"activation_fn": torch.nn.Softmax(-1)},
    }
    more = given_by[activation]
    if prompt is not None:
        more["prompt"] = prompt

    def predict(batch: pa.RecordBatch) -> Features:
        rows = list(zip(*(texts(batch.column(name)) for name in columns), strict=True))
        scores = model.predict(rows, show_progress_bar=False, **more)
        return _labelled(scores, output, label, model.config.id2label)

    return predict


def by_transformers(
    path: str,
    columns: Sequence[str],
    output: str,
    label: str | None,
    activation: str | None,
    max_tokens: int | None,
    prompt: str | None,
) -> Callable[[pa.RecordBatch], Features]:
    """Scores as transformers' pipeline ``text-classification`` has them, on the CPU in float32."""
    from transformers import pipeline

    pipe: Any = pipeline(
        "text-classification", model=path, device=-1, dtype=torch.float32, top_k=None
    )
    more: dict[str, Any] = {} if activation is None else {"function_to_apply": activation}
    more |= {} if max_tokens is None else {"max_length": max_tokens}
    named = pipe.model.config.id2label

    def predict(batch: pa.RecordBatch) -> Features:
        first, *second = (texts(batch.column(name)) for name in columns)
        rows = zip([(prompt or "") + text for text in first], *second, strict=True)
        found = [
            # one after the other: a batch of them needs a padding token
            pipe(dict(zip(("text", "text_pair"), row, strict=False)), truncation=True, **more)
            for row in rows
        ]
        by_name = [{one["label"]: one["score"] for one in scores} for scores in found]
        order = [named[place] for place in range(len(named))]
        scores = np.array([[one[name] for name in order] for one in by_name], np.float32)
        return _labelled(scores[:, 0] if len(order) == 1 else scores, output, label, named)

    return predict


def _labelled(
    scores: npt.NDArray[Any], output: str, label: str | None, named: Mapping[int, str]
) -> Features:
    if label is None:
        return {output: scores}
    return {output: scores, label: pa.array([named[int(place)] for place in scores.argmax(1)])}
