"""Prune: a text encoder with fewer heads and fewer neurons in its feed-forward layers, the least
important taken out in rounds and the rest trained to make up for them.

Weights that are zero here and there save nothing: a product multiplies them like others. So what
goes are whole heads and neurons, and what comes out are smaller matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from precompute.model import digest
from precompute.students.encoder_folder import trainable, transformer_of, write_encoder
from precompute.students.lesson import Lesson, Made, Recipe
from precompute.students.text_lesson import TextLesson, refusal
from precompute.students.training import Course, train
from precompute.text.bert import Bert, BertConfig
from precompute.text.encoder import PANEL

LEARNING_RATE = 2e-4
ROUNDS = (0.0, 0.1, 0.2, 0.3)
"""Points of the training, as shares of it; at each a quarter of what goes is taken out."""
JUDGED_BATCHES = 16
"""Batches that importance is measured on, in each round."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """The recipe of a student whose layers lack ``heads`` percent of their heads and ``neurons``
    percent of their neurons, as many in each.

    Args:
        name: of the student.
        heads, neurons: 0 to 99; at least one is left, and of neurons a multiple of 32 where the
            teacher's is, as the encoder's kernels want it.
        steps: of training; by default as many as there is time for.
    """

    name: str
    heads: int
    neurons: int
    steps: int | None = None
    by: str = "prune"

    def refuses(self, lesson: Lesson) -> str:
        return refusal(lesson)

    def make(self, lesson: Lesson, folder: Path) -> Made:
        teacher, text = transformer_of(lesson), TextLesson(lesson)
        config = smaller(teacher.config, self.heads, self.neurons)
        student = trainable(teacher.config, teacher.state_dict())
        # by the names they had before, in the same memory
        weights = student.state_dict()
        masks = masked(student)
        course = Course(
            self.name,
            digest(
                recipe=self.name,
                lesson=text.digest,
                steps=self.steps,
                sizes=[config.num_attention_heads, config.intermediate_size],
            ),
            lesson.checkpoints / f"{self.name}.safetensors",
            lesson.announce,
            lesson.until,
            self.steps,
            LEARNING_RATE,
        )

        def loss(step: int, progress: float) -> torch.Tensor:
            due = sum(progress >= begins for begins in ROUNDS)
            take_out(text, student, masks, config, due / len(ROUNDS), step)
            return text.loss(student, step)

        trained = train(student, loss, course)
        # time may be over before the last round
        take_out(text, student, masks, config, 1.0, trained.steps)
        made = write_encoder(lesson, trainable(config, cut(weights, masks)), folder)
        course.checkpoint.unlink(missing_ok=True)
        return replace(made, earlier_s=trained.earlier_s)


RECIPES: tuple[Recipe, ...] = (Pruned("pruned-30", 17, 29),)
"""MiniLM on the rows of :mod:`precompute.students.distil`, without two of twelve heads and 448 of
1,536 neurons in each layer: after 20 minutes on two cores that others used as well the cosine was
0.981, the recall@10 into the teacher's index 0.924, among its own vectors 0.907. By bf16-encoder it
computes 1.33 times the rows. Without 44 % of the neurons and no head (1.35 times the rows) it came
to 0.920 and 0.899 in 12 quiet minutes."""


class Masked(torch.nn.Module):
    """A linear layer of which some inputs count as 0.

    Args:
        linear: the layer.
        size: inputs that go together: a head's, or 1. ``mask`` is float [inputs / size], 1 of
            those that are left.
    """

    mask: torch.Tensor

    def __init__(self, linear: torch.nn.Linear, size: int) -> None:
        super().__init__()
        self.linear, self.size = linear, size
        count = linear.in_features // size
        self.register_buffer("mask", torch.ones(count, device=linear.weight.device))

    def left(self) -> torch.Tensor:
        """Indices of the inputs that are left, ascending."""
        return self.mask.repeat_interleave(self.size).nonzero()[:, 0]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(input * self.mask.repeat_interleave(self.size))
        return out


def masked(bert: Bert) -> list[Masked]:
    """Put masks before what follows each attention and before the second half of each feed-forward
    layer; in this order, layer by layer."""
    layers: Any = bert.encoder.layer
    for layer in layers:
        layer.attention.output.dense = Masked(layer.attention.output.dense, bert.config.head_dim)
        layer.output.dense = Masked(layer.output.dense, 1)
    return [part.dense for layer in layers for part in (layer.attention.output, layer.output)]


def smaller(config: BertConfig, heads: int, neurons: int) -> BertConfig:
    """The settings of a BERT without these percentages of its heads and neurons."""
    inner = config.intermediate_size
    unit = PANEL if inner % PANEL == 0 else 1
    return config._replace(
        num_attention_heads=max(round(config.num_attention_heads * (100 - heads) / 100), 1),
        intermediate_size=max(round(inner * (100 - neurons) / 100 / unit), 1) * unit,
    )


def take_out(
    text: TextLesson,
    student: Bert,
    masks: Sequence[Masked],
    config: BertConfig,
    share: float,
    step: int,
) -> None:
    """Mask what is least important, where that was not done.

    Args:
        text: what importance is measured by.
        student: that has the masks.
        masks: of :func:`masked`.
        config: of what is to be left in the end.
        share: of what is to go by then, that goes now.
        step: whose batches are the first to be measured on.
    """
    remaining = (config.num_attention_heads, config.intermediate_size) * (len(masks) // 2)
    goals = [
        len(one.mask) - round((len(one.mask) - left) * share)
        for one, left in zip(masks, remaining, strict=True)
    ]
    if all(int(one.mask.sum()) <= goal for one, goal in zip(masks, goals, strict=True)):
        return
    found = importances(text, student, masks, step)
    for one, goal, importance in zip(masks, goals, found, strict=True):
        importance = importance.masked_fill(one.mask == 0, -1.0)
        one.mask.zero_()[importance.topk(goal).indices] = 1.0


def importances(
    text: TextLesson, student: Bert, masks: Sequence[Masked], step: int
) -> list[torch.Tensor]:
    """How much each head and neuron matters to the embeddings: the expected square of what its
    removal changes, to the first order (Molchanov et al. 2019). The loss itself says nothing while
    the student is its teacher, for its gradient is 0 then; so embeddings are projected on random
    signs, whose squared gradient is in expectation that of all their numbers."""
    sums = [torch.zeros_like(masked.mask) for masked in masks]
    signs = torch.Generator(device=sums[0].device).manual_seed(step)
    for masked in masks:
        masked.mask.requires_grad_(True)
    for batch in range(JUDGED_BATCHES):
        found = text.embeddings(student, step + batch)
        chance = torch.rand(found.shape, generator=signs, device=found.device)
        projected = (found * (chance.round() * 2 - 1)).sum()
        gradients = torch.autograd.grad(projected, [masked.mask for masked in masks])
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient.square()
    for masked in masks:
        masked.mask.requires_grad_(False)
    return sums


def cut(weights: Mapping[str, torch.Tensor], masks: Sequence[Masked]) -> dict[str, torch.Tensor]:
    """Smaller matrices instead of masks; ``weights`` by the names of a BERT without masks."""
    made = dict(weights)
    for at in range(len(masks) // 2):
        layer = f"encoder.layer.{at}."
        heads, neurons = masks[2 * at].left(), masks[2 * at + 1].left()
        inputs = [f"attention.self.{name}" for name in ("query", "key", "value")]
        for part, left in (*((one, heads) for one in inputs), ("intermediate.dense", neurons)):
            for name in ("weight", "bias"):
                made[f"{layer}{part}.{name}"] = made[f"{layer}{part}.{name}"][left]
        for part, left in (("attention.output.dense", heads), ("output.dense", neurons)):
            made[f"{layer}{part}.weight"] = made[f"{layer}{part}.weight"][:, left]
    return made
