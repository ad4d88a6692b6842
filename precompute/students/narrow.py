"""Narrow: a text encoder with fewer numbers a token, which begins as its teacher seen along the
directions in which token vectors differ most, and learns to give the teacher's vectors.

Heads and neurons go as in :mod:`precompute.students.prune`, at once. What is left is turned into
the principal directions of the token vectors (as Ashkboos et al. 2024 do where no LayerNorm
shifts and scales them); what writes token vectors is then fitted to the teacher's by least squares,
layer by layer. A last linear layer makes the vectors as long as the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from precompute.model import digest
from precompute.students.encoder_folder import trainable, transformer_of, write_encoder
from precompute.students.lesson import Lesson, Made, Recipe
from precompute.students.prune import cut, masked, take_out
from precompute.students.text_lesson import TextLesson, refusal
from precompute.students.training import Course, half_products, train
from precompute.text.bert import Bert, Output

FITTED_BATCHES = 8
"""Batches whose token vectors a student begins by: 16,000 tokens, in memory for all layers (0.6 GB
of MiniLM)."""
RIDGE = 0.03
"""Share of the mean square that is added to each, so that few tokens are not learned by heart: the
loss of MiniLM's student at the start was 2.92 by 0.001, 2.76 by 0.01 and 2.67 by 0.1 with six
batches, 2.11 by 0.01 with twelve; without any fitting 10.8, of three layers of six 8.2."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """The recipe of a student of ``width`` numbers a token, with as many heads and neurons fewer.

    Args:
        width: a multiple of the size of the teacher's heads, and smaller than the teacher's.
        steps: of training; by default as many as there is time for.
    """

    width: int
    steps: int | None = None
    by: str = "distil"

    @property
    def name(self) -> str:
        return f"width-{self.width}"

    def refuses(self, lesson: Lesson) -> str:
        if reason := refusal(lesson):
            return reason
        teacher: Any = lesson.model
        config = transformer_of(lesson).config
        if config.hidden_size <= self.width or self.width % config.head_dim:
            return (
                f"the teacher has {config.hidden_size} numbers a token, in heads of"
                f" {config.head_dim}"
            )
        modes = teacher.module.head.modes
        if len(modes) > 1 or modes[0] in ("max", "mean_sqrt_len_tokens"):
            return f"no linear layer goes behind its pooling ({', '.join(modes)})"
        if not (teacher.folder / "modules.json").is_file():
            return "the teacher's folder has no modules.json, which would name one layer more"
        return ""

    def make(self, lesson: Lesson, folder: Path) -> Made:
        teacher, text = transformer_of(lesson), TextLesson(lesson)
        student = narrowed(teacher, text, self.width)
        course = Course(
            self.name,
            digest(recipe=self.name, lesson=text.digest, steps=self.steps),
            lesson.checkpoints / f"{self.name}.safetensors",
            lesson.announce,
            lesson.until,
            self.steps,
        )
        trained = train(student, lambda step, _: text.loss(student, step), course)
        made = write_encoder(lesson, student.transformer, folder, student.lift)
        course.checkpoint.unlink(missing_ok=True)
        return replace(made, earlier_s=trained.earlier_s)


RECIPES: tuple[Recipe, ...] = (Narrow(256),)
"""MiniLM on the rows of :mod:`precompute.students.distil`, with 256 of 384 numbers a token: after
20 minutes on two cores that others used as well the cosine was 0.929, the recall@10 into the
teacher's index 0.871, among its own vectors 0.836; by bf16-encoder it computes 1.98 times the
rows, and the encoder alone 2.2 times."""


class Lifted(torch.nn.Module):
    """A transformer whose token vectors are as long as its teacher's; called as a
    :class:`~precompute.text.bert.Bert`.

    Its tables are not trained, and are buffers, too, in the same memory: a training that continues
    takes them from its checkpoint, since directions that are found again may be others.
    """

    def __init__(self, transformer: Bert, lift: torch.nn.Linear) -> None:
        super().__init__()
        self.transformer, self.lift = transformer, lift
        for name, part in transformer.embeddings.named_children():
            if isinstance(part, torch.nn.Embedding):
                self.register_buffer(name, part.weight.data)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Output:
        hidden = self.transformer(input_ids, attention_mask).last_hidden_state
        return Output(self.lift(hidden))


def narrowed(teacher: Bert, text: TextLesson, width: int) -> Lifted:
    """A student as it begins."""
    old = teacher.config
    config = old._replace(
        num_attention_heads=width // old.head_dim,
        intermediate_size=old.intermediate_size * width // old.hidden_size,
    )
    parts = trainable(old, teacher.state_dict())
    weights, masks = parts.state_dict(), masked(parts)
    take_out(text, parts, masks, config, 1.0, 0)
    batches = [text.inputs(step) for step in range(FITTED_BATCHES)]
    wanted = _flows(teacher, batches, _normalised(teacher), ("LayerNorm",))
    directions = _directions([flow.out for flow in wanted], width)
    turned = _turned(cut(weights, masks), directions)
    student = trainable(config._replace(hidden_size=width), turned)
    student.embeddings.LayerNorm.requires_grad_(True)
    lift = torch.nn.Linear(width, old.hidden_size, device=text.device)
    with torch.no_grad():
        for name, flow in zip(_normalised(student), wanted, strict=True):
            _fit(student, name, batches, flow.total @ directions, flow.out @ directions)
        (last,) = _flows(student, batches, _normalised(student)[-1:])
        lift.weight[:], lift.bias[:] = directions, 0.0
        _improve(lift, last.out, wanted[-1].out)
    return Lifted(student, lift)


class Flow(NamedTuple):
    """What goes through a LayerNorm and the linear layer before it: the ``given`` of that and what
    it ``added`` to make the ``total``, None of the first LayerNorm; and what comes ``out``. Float32
    [tokens, numbers]."""

    given: torch.Tensor | None
    added: torch.Tensor | None
    total: torch.Tensor
    out: torch.Tensor


def _normalised(bert: Bert) -> list[str]:
    """Names of the parts that end in a LayerNorm, in their order."""
    return [
        name.removesuffix(".LayerNorm")
        for name, _ in bert.named_modules()
        if name.endswith(".LayerNorm")
    ]


@torch.no_grad()
def _flows(
    bert: Bert,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    names: Sequence[str],
    layers: Sequence[str] = ("dense", "LayerNorm"),
) -> list[Flow]:
    """What goes through these parts, or through some of their layers, when batches are computed."""
    found: dict[str, list[torch.Tensor]] = {}

    def note(name: str) -> Callable[[Any, tuple[torch.Tensor], torch.Tensor], None]:
        def hook(_: Any, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
            found.setdefault(f"{name} given", []).append(given[0][seen].float())
            found.setdefault(f"{name} out", []).append(out[seen].float())

        return hook

    parts = dict(bert.named_modules())
    hooks = [
        parts[part].register_forward_hook(note(part))
        for name in names
        for part in (f"{name}.{layer}" for layer in layers)
        if part in parts
    ]
    try:
        with half_products(batches[0][0].device.type):
            for ids, mask in batches:
                seen = mask > 0
                bert(ids, mask)
    finally:
        # the teacher computes on, whatever becomes of this student
        for one in hooks:
            one.remove()
    all_of = {name: torch.cat(tensors) for name, tensors in found.items()}
    return [
        Flow(
            all_of.get(f"{name}.dense given"),
            all_of.get(f"{name}.dense out"),
            all_of[f"{name}.LayerNorm given"],
            all_of[f"{name}.LayerNorm out"],
        )
        for name in names
    ]


def _directions(outputs: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Orthonormal [teacher's width, width]: the principal directions of all token vectors, each
    LayerNorm's counted alike."""
    squares = torch.stack([out.T @ out / out.square().sum() for out in outputs]).sum(0)
    vectors: torch.Tensor = torch.linalg.eigh(squares.double())[1]
    return vectors[:, -width:].float()


def _turned(
    weights: Mapping[str, torch.Tensor], directions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Weights of a transformer that reads and writes token vectors along these directions."""
    turned = {}
    for name, value in weights.items():
        reads = ".self." in name or ".intermediate." in name
        if "LayerNorm" in name:
            turned[name] = torch.full_like(directions[0], float(name.endswith("weight")))
        elif "embeddings" in name or (reads and value.dim() > 1):
            turned[name] = value @ directions
        else:
            turned[name] = value if reads else directions.T @ value
    return turned


def _fit(
    student: Bert,
    name: str,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    total: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Set the linear layer and the LayerNorm of a part, so that it gives what is wanted of what the
    student has before it."""
    (flow,), part = _flows(student, batches, [name]), dict(student.named_modules())[name]
    found = flow.total
    if flow.given is not None and flow.added is not None:
        rest = flow.total - flow.added
        _improve(part.dense, flow.given, total - rest)
        found = rest + part.dense(flow.given)
    normal = torch.nn.functional.layer_norm(found, found.shape[1:])
    mean, aim = normal.mean(0), out.mean(0)
    gain = ((normal - mean) * (out - aim)).mean(0) / (normal - mean).square().mean(0)
    part.LayerNorm.weight[:], part.LayerNorm.bias[:] = gain, aim - gain * mean


def _improve(linear: torch.nn.Linear, given: torch.Tensor, wanted: torch.Tensor) -> None:
    """Change a linear layer so that it comes nearest to what is wanted, by least squares of what is
    missing, where small changes cost less (ridge regression)."""
    ones = torch.ones(len(given), 1, device=given.device)
    inputs = torch.cat([given, ones], dim=1).double()
    squares = inputs.T @ inputs
    squares += RIDGE * squares.diagonal().mean() * torch.eye(len(squares), device=given.device)
    missing = (wanted - linear(given)).double()
    change = torch.linalg.solve(squares, inputs.T @ missing).float()
    linear.weight.add_(change[:-1].T)
    linear.bias.add_(change[-1])
