"""QAT (quantisation-aware training): a text encoder of its teacher's shape whose weights learn to
give the same vectors when they and what they multiply are rounded to 8 bits (Jacob et al. 2017).

MiniLM by int8-dynamic on the rows of :mod:`precompute.students.distil`, as it is and after 78 s on
two cores: recall@10 into the teacher's index 0.9885 and 0.989, among its own vectors 0.982 and
0.981. Where rounding went around 0, it learned more: 0.977 and 0.982.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from precompute.model import digest
from precompute.students.encoder_folder import trainable, transformer_of, write_encoder
from precompute.students.lesson import Lesson, Made, Recipe
from precompute.students.text_lesson import TextLesson, refusal
from precompute.students.training import Course, train
from precompute.techniques.machine import has_int8_products
from precompute.techniques.onednn import STEPS, TINY, fitted, middle_and_scale
from precompute.techniques.technique import with_linear

FITTED_BATCHES = 4
"""That show which inputs of layers are outlying."""
LEARNING_RATE = 4e-6
"""MiniLM's recall@10 into the teacher's index: 0.9885 as it is, 0.989 after 78 s by this rate, and
0.986 after 148 s by 2e-5."""


@dataclass(frozen=True, slots=True)
class Int8Aware:
    """The recipe of a student that is computed by ``int8-dynamic-onednn``.

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
        course = Course(
            self.name,
            digest(recipe=self.name, lesson=text.digest, steps=self.steps),
            lesson.checkpoints / f"{self.name}.safetensors",
            lesson.announce,
            lesson.until,
            self.steps,
            LEARNING_RATE,
        )
        trained = train(student, lambda step, _: text.loss(student, step), course)
        made = write_encoder(lesson, trainable(teacher.config, weights), folder)
        course.checkpoint.unlink(missing_ok=True)
        return replace(made, technique="int8-dynamic-onednn", earlier_s=trained.earlier_s)


RECIPES: tuple[Recipe, ...] = (Int8Aware(),)


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
