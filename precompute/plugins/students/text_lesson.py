"""Text lesson: what a student of a text encoder learns from: batches of texts and of spans of them,
the teacher's token vectors and embeddings, and how far the student's are from these; and the folder
that the student is written to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from safetensors.torch import save

from precompute.model import Prepared, digest, table_digest
from precompute.models.text_encoder import TextEncoder
from precompute.plugins.students.training import MODEL, Lesson, Made, half_products
from precompute.store.disk.durable_file import disk_message, make_folder, replace_durably
from precompute.store.errors import ModelError
from precompute.text.bert import Bert, BertConfig, UnpaddedBert, kernel, not_understood
from precompute.text.sentence_folder import TRANSFORMER_CONFIGS, read_sentence_folder
from precompute.text.tokens import Tokens
from precompute.text.transformer import TOKENIZER_FILES

BATCH_TOKENS = 2048
SORTED_BATCHES = 16
"""Batches whose texts are sorted by length together, so that little is padding."""
SPANS = 0.5
"""Share of texts of which a span is learned instead of the whole: 8 tokens at least."""
LEAST_SPAN = 8
BANK_ROWS = 4096
"""Of the teacher's published vectors, whose order by similarity the student learns, at most."""
TEMPERATURE = 0.05
MIN_ROWS = 50
"""Rows that a transformer is trained by, at least."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the parts of the loss: token vectors, embeddings, the order of neighbours. Token vectors
    teach the most at first, and are not what is judged: three layers of MiniLM that had learned by
    4, 1, 1 for 690 CPU seconds came from a cosine of 0.938 to 0.949, and from 0.790 to 0.816 of
    their neighbours, in 200 more by 1, 4, 2."""

    tokens: float = 1.0
    vectors: float = 4.0
    neighbours: float = 2.0


def refusal(lesson: Lesson) -> str:
    """Why no transformer can be trained by this lesson, in words; an empty text where one can."""
    model = lesson.model
    if not isinstance(model, TextEncoder):
        return f"the teacher is no text_encoder ({lesson.use})"
    if not isinstance(model.module.transformer, Bert):
        kind = type(model.module.transformer).__name__
        return f"the teacher's transformer is no plain BERT ({kind})"
    if lesson.rows.num_rows < MIN_ROWS:
        return f"there are {lesson.rows.num_rows} rows to learn from, and {MIN_ROWS} are needed"
    return ""


class TextLesson:
    """A :class:`~precompute.plugins.students.training.Lesson` whose teacher is a text encoder.

    Args:
        lesson: that :func:`refusal` does not refuse.
        weights: of the loss's parts.
        spans: share of texts of which a span is learned.

    Raises:
        ModelError: a row of the teacher's is not finite, or none can be used.
    """

    def __init__(self, lesson: Lesson, weights: Weights = Weights(), spans: float = SPANS) -> None:
        assert isinstance(lesson.model, TextEncoder)
        self._model, self._weights = lesson.model, weights
        self._encoder: Any = lesson.model.module
        self.device = lesson.model.device.torch
        (column,) = lesson.model.reads()
        batches = lesson.rows.select([column]).combine_chunks().to_batches()
        prepared = [self._model.prepare(batch) for batch in batches]
        self._tokens = _joined([one.payload for one in prepared])
        self._seed = lesson.seed
        # a prompt is put before every text, and stays whole
        self._spans = 0.0 if lesson.model.has_prompt else spans
        self._bank = self._bank_of(lesson)
        transformer = self._encoder.transformer
        fast = None if self.device.type != "cpu" or not_understood(transformer) else kernel()
        self._fast = None if fast is None else UnpaddedBert(transformer, fast)
        self.digest = digest(
            teacher=lesson.model.fingerprint(),
            rows=table_digest(lesson.rows),
            seed=lesson.seed,
            weights=[weights.tokens, weights.vectors, weights.neighbours],
            spans=spans,
        )
        self._batches: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())
        self._next = -1

    def _bank_of(self, lesson: Lesson) -> torch.Tensor:
        """Float32 [at most :data:`BANK_ROWS`, dim], of norm 1."""
        column = lesson.rows.column(lesson.view.features[0].name).combine_chunks()
        rows = np.random.default_rng(lesson.seed).permutation(len(column))[:BANK_ROWS]
        chosen = column.take(pa.array(np.sort(rows)))
        vectors = np.array(chosen.flatten(), np.float32).reshape(len(rows), -1)
        if not np.isfinite(vectors).all():
            raise ModelError(f"{lesson.view.name}: a vector to learn from is not finite")
        return torch.nn.functional.normalize(torch.from_numpy(vectors), dim=1).to(self.device)

    def loss(self, student: torch.nn.Module, step: int) -> torch.Tensor:
        """How far a student is from the teacher on the batch of a step: the squared distance of
        token vectors and of embeddings, as shares of the teacher's squares, and the divergence of
        the similarities to the bank (Hinton et al. 2015: softmax at a temperature)."""
        ids, mask = self._batch(step)
        with torch.no_grad():
            tokens = self._teacher_tokens(ids, mask)
            wanted = self._encoder.head(tokens, mask)
        hidden, found = self._computed(student, ids, mask)
        seen = (mask > 0)[:, :, None]
        weights = self._weights
        return (
            weights.tokens * _share((hidden - tokens) * seen, tokens * seen)
            + weights.vectors * _share(found - wanted, wanted)
            + weights.neighbours * self._divergence(found, wanted)
        )

    def inputs(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask of the batch of a step, as a transformer takes them."""
        ids, mask = self._batch(step)
        return ids, mask.clamp(max=1)

    def embeddings(self, student: torch.nn.Module, step: int) -> torch.Tensor:
        """A student's, of the batch of a step: float32 [B, dim]."""
        return self._computed(student, *self._batch(step))[1]

    def _computed(
        self, student: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token vectors, embeddings), float32."""
        with half_products(self.device.type):
            hidden = student(ids, mask.clamp(max=1)).last_hidden_state.float()
        return hidden, self._encoder.head(hidden, mask)

    def _teacher_tokens(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Float32 [B, T, width]."""
        if self._fast is not None:
            return self._fast(ids, mask)
        hidden: torch.Tensor = self._encoder.transformer(ids, mask.clamp(max=1)).last_hidden_state
        return hidden

    def _divergence(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        normal = torch.nn.functional.normalize
        own, goal = (
            torch.log_softmax(normal(vectors, dim=1) @ self._bank.T / TEMPERATURE, dim=1)
            for vectors in (found, wanted)
        )
        return torch.nn.functional.kl_div(own, goal, reduction="batchmean", log_target=True)

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step != self._next:
            self._batches = self._from(step)
        self._next = step + 1
        return next(self._batches)

    def _from(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(ids, mask) of the batches from a step on; they depend on the seed alone."""
        epoch = 0
        while True:
            first, lengths, batches = self._epoch(epoch)
            for rows in batches[step:]:
                ids, mask = self._model.tensors(*self._cut(rows, first, lengths))
                yield ids.to(self.device), mask.to(self.device)
            step = max(0, step - len(batches))
            epoch += 1

    def _epoch(
        self, epoch: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
        """(where each text's span begins, tokens of each, the rows of each batch)."""
        rng = np.random.default_rng([self._seed, epoch])
        whole = self._tokens.lengths
        inner = whole - 2
        shortest = np.minimum(inner, LEAST_SPAN)
        spans = shortest + (rng.random(len(whole)) * (inner - shortest + 1)).astype(np.int64)
        spans = np.where(rng.random(len(whole)) < self._spans, spans, inner)
        first = (rng.random(len(whole)) * (inner - spans + 1)).astype(np.int64)
        lengths = spans + 2
        order = rng.permutation(len(whole))
        windows = np.cumsum(lengths[order]) // (SORTED_BATCHES * BATCH_TOKENS)
        batches = []
        for window in np.split(order, np.flatnonzero(np.diff(windows)) + 1):
            rows = window[np.argsort(lengths[window], kind="stable")]
            parts = np.cumsum(lengths[rows]) // BATCH_TOKENS
            batches += np.split(rows, np.flatnonzero(np.diff(parts)) + 1)
        return first, lengths, [batches[at] for at in rng.permutation(len(batches))]

    def _cut(
        self,
        rows: npt.NDArray[np.int64],
        first: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> tuple[Prepared, npt.NDArray[np.int64]]:
        """The spans of these rows, between the tokens that every text begins and ends with."""
        texts = []
        for row in rows:
            start, length = self._tokens.starts[row], self._tokens.lengths[row]
            ids = self._tokens.ids[start : start + length]
            texts += [ids[:1], ids[1 + first[row] : first[row] + lengths[row] - 1], ids[-1:]]
        sizes = lengths[rows]
        tokens = Tokens(np.concatenate(texts), np.cumsum(sizes) - sizes, sizes)
        return Prepared(sizes, tokens), np.arange(len(rows))


def _joined(parts: Sequence[Tokens]) -> Tokens:
    lengths = np.concatenate([part.lengths for part in parts])
    return Tokens(
        np.concatenate([part.ids for part in parts]), np.cumsum(lengths) - lengths, lengths
    )


def _share(difference: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return difference.square().sum() / whole.square().sum()


# ---- The folder of a text encoder whose transformer is another than its teacher's: the tokenizer,
# the pooling and what comes after it are the teacher's.


_OF_ITS_TEACHER = ("path", "token_cache", "max_cost")
"""Arguments that a student does not take over."""


def write_encoder(lesson: Lesson, bert: Bert, folder: Path) -> Made:
    """Write a student's model, and return what makes it.

    Args:
        folder: of the student; the model comes into :data:`MODEL` below it.

    Raises:
        ModelError: it cannot be written.
    """
    assert isinstance(lesson.model, TextEncoder)
    source, target = lesson.model.folder, folder / MODEL
    parts = read_sentence_folder(source)
    transformer = (source if parts is None else parts.transformer).relative_to(source)
    config = json.loads((source / transformer / "config.json").read_text(encoding="utf-8"))
    weights = {name: value.contiguous() for name, value in bert.state_dict().items()}
    files = {path: (source / path).read_bytes() for path in _taken_over(source, transformer)}
    config |= bert.config._asdict()
    files[transformer / "config.json"] = json.dumps(config, indent=2).encode()
    files[transformer / "model.safetensors"] = save(weights, {"format": "pt"})
    try:
        _write(target, files)
    except OSError as exc:
        raise ModelError(disk_message(target, exc, "the student was not made")) from exc
    args = {name: value for name, value in lesson.args.items() if name not in _OF_ITS_TEACHER}
    return Made("text_encoder", {**args, "path": f"./{MODEL}"})


def _write(target: Path, files: Mapping[Path, bytes]) -> None:
    for path, data in files.items():
        make_folder((target / path).parent)
        replace_durably(target / path, data)


def _taken_over(source: Path, transformer: Path) -> Iterator[Path]:
    """The teacher's files that are the student's, too, relative to its folder."""
    names = [transformer / name for name in (*TOKENIZER_FILES, *TRANSFORMER_CONFIGS)]
    if (source / "modules.json").is_file():
        names += [Path("modules.json"), Path("config_sentence_transformers.json")]
        for module in json.loads((source / "modules.json").read_text(encoding="utf-8"))[1:]:
            names += [Path(module["path"], name) for name in ("config.json", "model.safetensors")]
    yield from (name for name in dict.fromkeys(names) if (source / name).is_file())


def transformer_of(lesson: Lesson) -> Bert:
    """The teacher's transformer."""
    model: Any = lesson.model
    bert: Bert = model.module.transformer
    return bert


def trainable(config: BertConfig, weights: Mapping[str, torch.Tensor]) -> Bert:
    """A transformer with copies of these weights, ready to be trained: all but the embeddings,
    which are most of a small model's numbers, and hold words that no row of the lesson has."""
    bert = Bert(config)
    bert.load_state_dict(weights)
    bert.to(next(iter(weights.values())).device)
    bert.embeddings.requires_grad_(False)
    return bert
