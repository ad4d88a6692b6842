"""Text student: students of text encoders: with fewer layers, with fewer neurons, or with weights
for 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from precompute.plugins.students.text_lesson import (
    TextLesson,
    refusal,
    trainable,
    transformer_of,
    write_encoder,
)
from precompute.plugins.students.training import Lesson, Made, Recipe, course_of, train
from precompute.techniques.machine import has_int8_products
from precompute.techniques.onednn import STEPS, TINY, fitted, middle_and_scale
from precompute.techniques.technique import with_linear
from precompute.text.bert import PANEL, Bert


@dataclass(frozen=True, slots=True)
class FewerLayers:
    """The recipe of a student with ``layers`` layers, which begin as some of its teacher's and
    learn to give the vectors of all of them (Sanh et al. 2019; hidden states as Jiao et al. 2019).

    MiniLM on 4,749 docstrings, judged on 519 others among 5,268: 3 of 6 layers compute at 1.97
    times the rate of bf16-encoder. After 690, 890 and 1,000 CPU seconds (AMD Zen 5, avx512_bf16;
    the learning rate restarted at each) the cosine was 0.938, 0.949 and 0.952; the recall@10 into
    the teacher's index 0.853, 0.866 and 0.870; among the student's own vectors 0.790, 0.816 and
    0.825.

    Args:
        layers: at least one, and fewer than the teacher's.
        steps: of training; by default as many as there is time for.
    """

    layers: int
    steps: int | None = None
    by: str = "distil"

    @property
    def name(self) -> str:
        return f"layers-{self.layers}"

    def refuses(self, lesson: Lesson) -> str:
        if reason := refusal(lesson):
            return reason
        layers = transformer_of(lesson).config.num_hidden_layers
        return f"the teacher has {layers} layers" if layers <= self.layers else ""

    def make(self, lesson: Lesson, folder: Path) -> Made:
        teacher = transformer_of(lesson)
        text = TextLesson(lesson)
        chosen = spread(teacher.config.num_hidden_layers, self.layers)
        student = with_layers(teacher, chosen)
        facts = {"recipe": self.name, "lesson": text.digest, "layers": chosen}
        with course_of(lesson, self.name, self.steps, facts) as course:
            trained = train(student, lambda step, _: text.loss(student, step), course)
            made = write_encoder(lesson, student, folder)
        return replace(made, earlier_s=trained.earlier_s)


def spread(layers: int, count: int) -> list[int]:
    """Which of a teacher's layers a student begins with."""
    return [round(at * (layers - 1) / max(count - 1, 1)) for at in range(count)]


def with_layers(teacher: Bert, chosen: Sequence[int]) -> Bert:
    """A transformer with copies of these layers of the teacher's, in this order."""
    weights: dict[str, torch.Tensor] = {}
    place = {f"encoder.layer.{old}.": f"encoder.layer.{new}." for new, old in enumerate(chosen)}
    for name, value in teacher.state_dict().items():
        layer = ".".join(name.split(".")[:3]) + "."
        if layer in place:
            weights[place[layer] + name.removeprefix(layer)] = value
        elif not name.startswith("encoder."):
            weights[name] = value
    return trainable(teacher.config._replace(num_hidden_layers=len(chosen)), weights)


# ---- Fewer neurons


PRUNING_RATE = 2e-4
ROUNDS = (0.0, 0.1, 0.2, 0.3)
"""Points of the training, as shares of it; at each a quarter of what goes is taken out."""
JUDGED_BATCHES = 16
"""Batches that importance is measured on, in each round."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """The recipe of a student whose layers lack ``neurons`` percent of the neurons of their
    feed-forward halves, as many in each: the least important are taken out in rounds, and the rest
    is trained to make up for them.

    Weights that are zero here and there save nothing: a product multiplies them like others. So
    what goes are whole neurons, and what comes out are smaller matrices. Heads would go as well,
    but nobody else reads a BERT whose heads are not as wide as it is.

    MiniLM on the rows of :class:`FewerLayers`, without 44 % of the neurons: after 12 minutes on two
    cores the recall@10 into the teacher's index was 0.920, among its own vectors 0.899. By
    bf16-encoder it computes 1.35 times the rows.

    Args:
        neurons: 1 to 99; at least one is left, and a multiple of 32 where the teacher's is, as the
            encoder's kernels want it.
        steps: of training; by default as many as there is time for.
    """

    neurons: int
    steps: int | None = None
    by: str = "prune"

    @property
    def name(self) -> str:
        return f"pruned-{self.neurons}"

    def refuses(self, lesson: Lesson) -> str:
        return refusal(lesson)

    def make(self, lesson: Lesson, folder: Path) -> Made:
        teacher, text = transformer_of(lesson), TextLesson(lesson)
        left = neurons_left(teacher.config.intermediate_size, self.neurons)
        student = trainable(teacher.config, teacher.state_dict())
        # by the names they had before, in the same memory
        weights = student.state_dict()
        masks = masked(student)

        def loss(step: int, progress: float) -> torch.Tensor:
            due = sum(progress >= begins for begins in ROUNDS)
            take_out(text, student, masks, left, due / len(ROUNDS), step)
            return text.loss(student, step)

        facts = {"recipe": self.name, "lesson": text.digest, "neurons": left}
        with course_of(lesson, self.name, self.steps, facts, learning_rate=PRUNING_RATE) as course:
            trained = train(student, loss, course)
            # time may be over before the last round
            take_out(text, student, masks, left, 1.0, trained.steps)
            config = teacher.config._replace(intermediate_size=left)
            made = write_encoder(lesson, trainable(config, cut(weights, masks)), folder)
        return replace(made, earlier_s=trained.earlier_s)


class Masked(torch.nn.Module):
    """A linear layer of which some inputs count as 0. ``mask`` is float [inputs], 1 of those that
    are left."""

    mask: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("mask", torch.ones(linear.in_features, device=linear.weight.device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(input * self.mask)
        return out


def masked(bert: Bert) -> list[Masked]:
    """Put masks before the second half of each feed-forward layer; layer by layer."""
    layers: Any = bert.encoder.layer
    for layer in layers:
        layer.output.dense = Masked(layer.output.dense)
    return [layer.output.dense for layer in layers]


def neurons_left(inner: int, neurons: int) -> int:
    """How many of ``inner`` neurons are left without this percentage."""
    unit = PANEL if inner % PANEL == 0 else 1
    return max(round(inner * (100 - neurons) / 100 / unit), 1) * unit


def take_out(
    text: TextLesson,
    student: Bert,
    masks: Sequence[Masked],
    left: int,
    share: float,
    step: int,
) -> None:
    """Mask what is least important, where that was not done.

    Args:
        text: what importance is measured by.
        left: neurons of a layer that are left in the end.
        share: of what is to go by then, that goes now.
        step: whose batches are the first to be measured on.
    """
    inner = len(masks[0].mask)
    goal = inner - round((inner - left) * share)
    if int(masks[0].mask.sum()) <= goal:
        return
    for one, importance in zip(masks, importances(text, student, masks, step), strict=True):
        importance = importance.masked_fill(one.mask == 0, -1.0)
        one.mask.zero_()[importance.topk(goal).indices] = 1.0


def importances(
    text: TextLesson, student: Bert, masks: Sequence[Masked], step: int
) -> list[torch.Tensor]:
    """How much each neuron matters to the embeddings: the expected square of what its removal
    changes, to the first order (Molchanov et al. 2019). The loss itself says nothing while the
    student is its teacher, for its gradient is 0 then; so embeddings are projected on random signs,
    whose squared gradient is in expectation that of all their numbers."""
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
    for at, one in enumerate(masks):
        layer, left = f"encoder.layer.{at}.", one.mask.nonzero()[:, 0]
        for name in ("weight", "bias"):
            made[f"{layer}intermediate.dense.{name}"] = made[f"{layer}intermediate.dense.{name}"][
                left
            ]
        made[f"{layer}output.dense.weight"] = made[f"{layer}output.dense.weight"][:, left]
    return made


# ---- 8 bits


FITTED_BATCHES = 4
"""That show which inputs of layers are outlying."""
ROUNDING_RATE = 4e-6
"""MiniLM's recall@10 into the teacher's index: 0.9885 as it is, 0.989 after 78 s by this rate, and
0.986 after 148 s by 2e-5."""


@dataclass(frozen=True, slots=True)
class Int8Aware:
    """The recipe of a student of its teacher's shape that is computed by ``int8-dynamic-onednn``:
    its weights learn to give the same vectors when they and what they multiply are rounded to 8
    bits (Jacob et al. 2017).

    MiniLM on the rows of :class:`FewerLayers`, as it is and after 78 s on two cores: recall@10 into
    the teacher's index 0.9885 and 0.989, among its own vectors 0.982 and 0.981. Where rounding went
    around 0, it learned more: 0.977 and 0.982.

    Args:
        steps: of training; by default as many as there is time for.
    """

    steps: int | None = None
    name: str = "int8-aware"
    by: str = "qat"

    def refuses(self, lesson: Lesson) -> str:
        if (reason := refusal(lesson)) or has_int8_products():
            return reason
        return "this CPU has no products of 8-bit integers (VNNI), by which it would be judged"

    def make(self, lesson: Lesson, folder: Path) -> Made:
        teacher, text = transformer_of(lesson), TextLesson(lesson)
        student = trainable(teacher.config, teacher.state_dict()).cpu()
        batches = [text.inputs(step) for step in range(FITTED_BATCHES)]
        divisors = fitted(student, [(ids.cpu(), mask.cpu()) for ids, mask in batches])
        student.to(text.device)
        # by the names they had before, in the same memory
        weights = student.state_dict()
        names = {id(part): name for name, part in student.named_modules()}

        def as_computed(linear: torch.nn.Linear) -> torch.nn.Module:
            found = divisors.get(names[id(linear)])
            return linear if found is None else RoundedLinear(linear, found.to(text.device))

        with_linear(student, as_computed)
        facts = {"recipe": self.name, "lesson": text.digest}
        with course_of(lesson, self.name, self.steps, facts, learning_rate=ROUNDING_RATE) as course:
            trained = train(student, lambda step, _: text.loss(student, step), course)
            made = write_encoder(lesson, trainable(teacher.config, weights), folder)
        return replace(made, technique="int8-dynamic-onednn", earlier_s=trained.earlier_s)


class RoundedLinear(torch.nn.Module):
    """A linear layer that computes what :class:`~precompute.techniques.onednn.PerRowLinear` will
    make of it, in floats; arguments as of that."""

    divisors: torch.Tensor

    def __init__(self, linear: torch.nn.Linear, divisors: torch.Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("divisors", divisors)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.linear.weight * self.divisors, self.linear.bias
        input = input.float() / self.divisors
        with torch.no_grad():
            middle, scale = middle_and_scale(input)
            step = weight.abs().amax(1).clamp_(min=TINY).div_(STEPS)
        # integers, which bfloat16 has up to 256
        numbers, factors = rounded((input - middle) / scale), rounded(weight / step[:, None])
        product = torch.nn.functional.linear(numbers, factors).float() * scale
        return (product + middle * factors.sum(1)) * step + (0.0 if bias is None else bias)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers; the gradient passes as if they were not (Bengio et al. 2013)."""
    return values + (values.round() - values).detach()


RECIPES: tuple[Recipe, ...] = (FewerLayers(3), Pruned(44), Int8Aware())
