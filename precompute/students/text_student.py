"""Text student: students of text encoders: with fewer layers, with fewer numbers a token, with
fewer heads and neurons, or with weights for 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from precompute.students.text_lesson import (
    TextLesson,
    refusal,
    trainable,
    transformer_of,
    write_encoder,
)
from precompute.students.training import Lesson, Made, Recipe, course_of, half_products, train
from precompute.techniques.machine import has_int8_products
from precompute.techniques.onednn import STEPS, TINY, fitted, middle_and_scale
from precompute.techniques.technique import with_linear
from precompute.text.bert import PANEL, Bert, BertConfig, Output


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


# ---- Fewer numbers a token


TURNED_BATCHES = 8
"""Batches whose token vectors a student begins by: 16,000 tokens, in memory for all layers (0.6 GB
of MiniLM)."""
RIDGE = 0.03
"""Share of the mean square that is added to each, so that few tokens are not learned by heart: the
loss of MiniLM's student at the start was 2.92 by 0.001, 2.76 by 0.01 and 2.67 by 0.1 with six
batches, 2.11 by 0.01 with twelve; without any fitting 10.8, of three layers of six 8.2."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """The recipe of a student of ``width`` numbers a token, with as many heads and neurons fewer:
    it begins as its teacher seen along the directions in which token vectors differ most, and
    learns to give the teacher's vectors.

    Heads and neurons go as of :class:`Pruned`, at once. What is left is turned into the principal
    directions of the token vectors (as Ashkboos et al. 2024 do where no LayerNorm shifts and scales
    them); what writes token vectors is then fitted to the teacher's by least squares, layer by
    layer. A last linear layer makes the vectors as long as the teacher's.

    MiniLM on the rows of :class:`FewerLayers`, with 256 of 384 numbers a token: after 20 minutes on
    two cores that others used as well the cosine was 0.929, the recall@10 into the teacher's index
    0.871, among its own vectors 0.836; by bf16-encoder it computes 1.98 times the rows, and the
    encoder alone 2.2 times.

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
        facts = {"recipe": self.name, "lesson": text.digest}
        with course_of(lesson, self.name, self.steps, facts) as course:
            trained = train(student, lambda step, _: text.loss(student, step), course)
            made = write_encoder(lesson, student.transformer, folder, student.lift)
        return replace(made, earlier_s=trained.earlier_s)


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
    batches = [text.inputs(step) for step in range(TURNED_BATCHES)]
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


# ---- Fewer heads and neurons


PRUNING_RATE = 2e-4
ROUNDS = (0.0, 0.1, 0.2, 0.3)
"""Points of the training, as shares of it; at each a quarter of what goes is taken out."""
JUDGED_BATCHES = 16
"""Batches that importance is measured on, in each round."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """The recipe of a student whose layers lack ``heads`` percent of their heads and ``neurons``
    percent of their neurons, as many in each: the least important are taken out in rounds, and the
    rest is trained to make up for them.

    Weights that are zero here and there save nothing: a product multiplies them like others. So
    what goes are whole heads and neurons, and what comes out are smaller matrices.

    MiniLM on the rows of :class:`FewerLayers`, without two of twelve heads and 448 of 1,536 neurons
    in each layer: after 20 minutes on two cores that others used as well the cosine was 0.981, the
    recall@10 into the teacher's index 0.924, among its own vectors 0.907. By bf16-encoder it
    computes 1.33 times the rows. Without 44 % of the neurons and no head (1.35 times the rows) it
    came to 0.920 and 0.899 in 12 quiet minutes.

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

        def loss(step: int, progress: float) -> torch.Tensor:
            due = sum(progress >= begins for begins in ROUNDS)
            take_out(text, student, masks, config, due / len(ROUNDS), step)
            return text.loss(student, step)

        sizes = [config.num_attention_heads, config.intermediate_size]
        facts = {"recipe": self.name, "lesson": text.digest, "sizes": sizes}
        with course_of(lesson, self.name, self.steps, facts, learning_rate=PRUNING_RATE) as course:
            trained = train(student, loss, course)
            # time may be over before the last round
            take_out(text, student, masks, config, 1.0, trained.steps)
            made = write_encoder(lesson, trainable(config, cut(weights, masks)), folder)
        return replace(made, earlier_s=trained.earlier_s)


class Masked(torch.nn.Module):
    """A linear layer of which some inputs count as 0.

    Args:
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


RECIPES: tuple[Recipe, ...] = (
    FewerLayers(3),
    Narrow(256),
    Pruned("pruned-30", 17, 29),
    Int8Aware(),
)
