"""Static table: a student of a text encoder whose vectors are means of its tokens' vectors, in a
folder that model2vec reads. It computes thousands of rows a second on one core.

As Model2Vec distils (Tulkens & van Dongen 2024), a token's first vector is what the teacher makes
of it alone, and frequent tokens weigh less (Arora et al. 2017). Then all learn from the teacher's
vectors of the rows' texts, and of pieces of these.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from safetensors.torch import save
from tokenizers import Tokenizer

from precompute.engine.runner import Runner
from precompute.model import table_digest
from precompute.models.text_encoder import TextEncoder
from precompute.plugins.students.training import MODEL, Lesson, Made, course_of, train
from precompute.store.errors import ModelError
from precompute.text.tokens import texts as as_python

PIECES = 80_000
"""Pieces of texts that the teacher computes at most: of 4,749 docstrings by MiniLM, 20,000 gave a
recall@10 into the teacher's index of 0.72 on others, 80,000 one of 0.768; so did 160,000. Tokens
for all words that came twice gained nothing."""
PIECES_A_ROW = 40
PIECE_WORDS = (12, 40)
"""Mean lengths of pieces, by turns; exponentially distributed."""
TEACHER_TIME = 0.5
"""Share of the time that is left which the teacher may take for pieces, and then for tokens."""
TEACHER_TEXTS = 4096
"""That it computes from one look at the clock to the next."""
TRAINING_S = 900.0
"""Of gradients at most."""
BATCH_ROWS = 256
BANK_ROWS = 1024
"""Of the teacher's vectors, drawn for each batch, whose order is learned."""
TEMPERATURE = 0.05
NEIGHBOURS_WEIGHT = 1.0
LEARNING_RATE = 2e-3
RARE = 1e-3
"""Share of all tokens at which a token's weight is a half (SIF's a)."""

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StaticTable:
    """The recipe of a static table.

    Args:
        pieces: that the teacher computes at most.
        steps: of training; by default as many as there is time for.
    """

    pieces: int = PIECES
    steps: int | None = None
    name: str = "static"
    by: str = "distil"

    def refuses(self, lesson: Lesson) -> str:
        model = lesson.model
        if not isinstance(model, TextEncoder):
            return f"the teacher is no text_encoder ({lesson.use})"
        if len(lesson.view.features) != 1:
            return "the view has other features than the vector"
        if model.for_queries() is not model:
            return (
                "the teacher embeds what is searched by with a prompt of its own, and a table none"
            )
        norms = np.linalg.norm(_published(lesson), axis=1)
        if np.abs(norms - 1).max(initial=0) > 0.01:
            return "the teacher's vectors have not the length 1, and means of tokens all have"
        return ""

    def make(self, lesson: Lesson, folder: Path) -> Made:
        assert isinstance(lesson.model, TextEncoder)
        column = lesson.model.reads()[0]
        tokenizer = lesson.model.tokenizer_file
        coder = Tokenizer.from_file(str(tokenizer))
        coder.no_padding()
        coder.no_truncation()
        texts, vectors = self._texts(lesson, as_python(lesson.rows[column]))
        longest = lesson.model.max_tokens - 2
        ids = [
            np.array(one.ids[:longest], np.int64)
            for one in coder.encode_batch_fast(texts, add_special_tokens=False)
        ]
        some = [row for row, tokens in enumerate(ids) if len(tokens)]
        table = Table(self._first(lesson, coder, ids))
        school = _TableLesson([ids[row] for row in some], vectors[some], lesson.seed)
        facts = {
            "teacher": lesson.model.fingerprint(),
            "rows": table_digest(lesson.rows),
            # not those that there was time for, which differ from one try to the next
            "pieces": self.pieces,
            "seed": lesson.seed,
            "rate": LEARNING_RATE,
        }
        rates = {"learning_rate": LEARNING_RATE, "weight_decay": 0.0}
        with course_of(lesson, self.name, self.steps, facts, TRAINING_S, **rates) as course:
            trained = train(table, lambda step, _: school.loss(table, step), course)
            _write(folder / MODEL, table, tokenizer, longest)
        args = {name: lesson.args[name] for name in ("column", "output") if name in lesson.args}
        return Made("static_embedding", {**args, "path": f"./{MODEL}"}, None, trained.earlier_s)

    def _texts(self, lesson: Lesson, whole: list[str]) -> tuple[list[str], _Floats]:
        pieces = _pieces(whole, min(self.pieces, PIECES_A_ROW * len(whole)), lesson.seed)
        lesson.announce(f"{self.name}: the teacher computes up to {len(pieces):,} pieces of texts")
        found = _in_time(lesson, pieces)
        return [*whole, *pieces[: len(found)]], np.concatenate([_published(lesson), found])

    def _first(
        self, lesson: Lesson, coder: Tokenizer, ids: Sequence[npt.NDArray[np.int64]]
    ) -> _Floats:
        """The table before it learns, float32 [vocabulary, dim]; the most frequent tokens are
        computed first, and those for which there is no time are near the mean of all."""
        size = max(coder.get_vocab().values()) + 1
        lesson.announce(f"{self.name}: the teacher computes {size:,} tokens")
        alone = [coder.decode([token]) or coder.id_to_token(token) or "?" for token in range(size)]
        counts = np.bincount(np.concatenate(ids), minlength=size) + 0.5
        order = np.argsort(-counts, kind="stable")
        vectors = _in_time(lesson, [alone[token] for token in order])
        known, mean = order[: len(vectors)], vectors.mean(0)
        weights = RARE / (RARE + counts[known] / counts.sum())
        table: _Floats = np.repeat(RARE * mean[None], size, 0)
        table[known] = (vectors - mean) * weights[:, None]
        return table


class Table(torch.nn.Module):
    """Token ids → the mean of their vectors, of length 1; as
    :class:`precompute.models.static_embedding.TableMean` computes it.

    Args:
        first: float32 [vocabulary, dim].
    """

    def __init__(self, first: _Floats) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag.from_pretrained(
            torch.from_numpy(first), mode="mean", freeze=False
        )

    def forward(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """``ids`` int64 [tokens] of all texts in a row, ``starts`` int64 [B]; float32 [B, dim]."""
        return torch.nn.functional.normalize(self.bag(ids, starts), dim=1)


class _TableLesson:
    """Batches of texts and how far a table is from the teacher on them; the seed and the step say
    which."""

    def __init__(self, ids: Sequence[npt.NDArray[np.int64]], vectors: _Floats, seed: int) -> None:
        self._ids, self._seed = ids, seed
        self._vectors = torch.from_numpy(vectors)

    def loss(self, table: Table, step: int) -> torch.Tensor:
        """1 - cosine, and the divergence of the similarities to a bank of vectors (Hinton et al.
        2015: softmax at a temperature)."""
        batch = min(BATCH_ROWS, len(self._ids))
        epoch, at = divmod(step, len(self._ids) // batch)
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._ids))
        rows = order[at * batch : (at + 1) * batch]
        lengths = np.array([len(self._ids[row]) for row in rows])
        flat = torch.from_numpy(np.concatenate([self._ids[row] for row in rows]))
        found = table(flat, torch.from_numpy(np.cumsum(lengths) - lengths))
        wanted = self._vectors[rows]
        drawn = np.random.default_rng([self._seed, 1, step]).integers(0, len(self._ids), BANK_ROWS)
        bank = self._vectors[drawn].T
        own, goal = (
            torch.log_softmax(vectors @ bank / TEMPERATURE, dim=1) for vectors in (found, wanted)
        )
        order_off = torch.nn.functional.kl_div(own, goal, reduction="batchmean", log_target=True)
        off: torch.Tensor = 1 - (found * wanted).sum(1).mean() + NEIGHBOURS_WEIGHT * order_off
        return off


def _published(lesson: Lesson) -> _Floats:
    feature = lesson.view.features[0]
    column = lesson.rows[feature.name].combine_chunks()
    vectors: _Floats = np.asarray(column.flatten(), np.float32).reshape(len(column), -1)
    return vectors


def _computed(lesson: Lesson, texts: Sequence[str]) -> _Floats:
    """The teacher's vectors, float32 [texts, dim]; of a text that it cannot compute, zeros."""
    model: Any = lesson.model
    feature = lesson.view.features[0]
    batch = pa.record_batch({model.reads()[0]: pa.array(texts, pa.string())})
    vectors = np.zeros((len(texts), feature.dim or 0), np.float32)
    for window, done in Runner(model, lesson.view).stream([batch]):
        assert window.num_rows == len(texts)
        made = np.asarray(done.features.column(feature.name).flatten(), np.float32)
        vectors[done.rows] = made.reshape(len(done.rows), vectors.shape[1])
    return vectors


def _in_time(lesson: Lesson, texts: Sequence[str]) -> _Floats:
    """The teacher's vectors of the first texts, as many as there is time for."""
    now = time.monotonic()
    until = now + TEACHER_TIME * (lesson.until - now)
    found = [_computed(lesson, texts[:TEACHER_TEXTS])]
    for start in range(TEACHER_TEXTS, len(texts), TEACHER_TEXTS):
        if time.monotonic() >= until:
            break
        found.append(_computed(lesson, texts[start : start + TEACHER_TEXTS]))
    return np.concatenate(found)


def _pieces(texts: Sequence[str], count: int, seed: int) -> list[str]:
    words = [some for text in texts if (some := text.split())]
    if not words:
        raise ModelError("static: no text has a word")
    chance, made = np.random.default_rng(seed), []
    for mean in itertools.islice(itertools.cycle(PIECE_WORDS), count):
        some = words[chance.integers(len(words))]
        length = min(len(some), 1 + int(chance.exponential(mean)))
        first = int(chance.integers(len(some) - length + 1))
        made.append(" ".join(some[first : first + length]))
    return made


def _write(target: Path, table: Table, tokenizer: Path, longest: int) -> None:
    """As model2vec's folders are."""
    target.mkdir(parents=True, exist_ok=True)
    weights = {"embeddings": table.bag.weight.detach().contiguous()}
    size = len(weights["embeddings"])
    if Tokenizer.from_file(str(tokenizer)).get_vocab_size() < size:
        # as model2vec wants it where some numbers are no token's
        weights["mapping"] = torch.arange(size)
    config = {"model_type": "model2vec", "normalize": True, "max_length": longest}
    (target / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (target / "tokenizer.json").write_bytes(tokenizer.read_bytes())
