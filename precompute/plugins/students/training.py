"""Training: what a student learns from, its lesson; the protocol of a recipe, which makes a model
of it; and gradient descent for as long as there is time, in steps that continue after a kill.

The trainers of transformers and sentence-transformers write their optimiser's state by torch.save
and read it by torch.load, pickles, which nothing here reads; and they plan by epochs, not by time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from precompute.model import Model, digest
from precompute.store.disk.durable_file import disk_message, replace_durably
from precompute.store.errors import ModelError
from precompute.store.feature_view import FeatureView
from precompute.techniques.machine import has_bf16

MODEL = "model"
"""Folder of the model's files, in the student's."""
MAX_ROWS = 200_000
"""Rows of a lesson at most: they lie in memory, with their features."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a student learns from.

    Args:
        model: the teacher, loaded; it computes as its view says, and its module is float32.
        use, args: what made the teacher (``model`` of the view), its paths absolute.
        rows: the teacher's input columns and its features, by the view's names; only rows that the
            student will not be judged on, at most :data:`MAX_ROWS`.
        seed: of all that is drawn by chance.
        until: when training ends at the latest, by :func:`time.monotonic`.
        checkpoints: folder for what a recipe needs to continue after it was stopped.
    """

    view: FeatureView
    model: Model
    use: str
    args: Mapping[str, Any]
    rows: pa.Table
    seed: int
    until: float
    checkpoints: Path
    announce: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Made:
    """What makes a student's model: ``model.use`` and ``model.args`` of a view. A text among the
    arguments that begins with ``./`` is a path in the folder that the recipe wrote into.
    ``technique`` is the one that it was made for, by which it is judged; None of a student for
    any. ``earlier_s`` is what its training took in processes before this one, seconds."""

    use: str
    args: Mapping[str, Any]
    technique: str | None = None
    earlier_s: float = 0.0


class Recipe(Protocol):
    """A way of making a student; a row's recipe, which is a digest, is another thing."""

    @property
    def name(self) -> str:
        """Of the student, such as ``layers-3``."""

    @property
    def by(self) -> str:
        """``distil``, ``prune`` or ``qat``."""

    def refuses(self, lesson: Lesson) -> str:
        """Why no student can be made of this lesson, in words; an empty text where it can."""

    def make(self, lesson: Lesson, folder: Path) -> Made:
        """Make a student until ``lesson.until``, and write its model into the folder, which is
        empty or has what was left of an earlier try.

        Raises:
            ModelError: a checkpoint or the model cannot be written, for want of space.
        """


# ---- Gradient descent


WARM_UP = 0.05
"""Share of the training in which the learning rate rises, along a line; then it falls to 0 along a
cosine (Loshchilov & Hutter 2016)."""
CLIP = 1.0
"""Norm of the gradient at most."""
BETAS = (0.9, 0.98)
CHECKPOINT_S = 60.0
ANNOUNCED_S = 10.0
SMOOTHING = 0.05
"""Weight of the newest step in the mean of losses that is announced."""
TIMED_STEPS, LEAST_TIMED = 32, 4
UNTIMED_STEPS = 1000
"""Steps assumed to remain until :data:`LEAST_TIMED` were timed: the first takes longer."""


@dataclass(frozen=True, slots=True)
class Course:
    """The settings of a training.

    Args:
        digest: of all that decides what is learned: a checkpoint of another digest is left alone.
        checkpoint: the file that training continues from; its folder is there.
        until: when it ends, by :func:`time.monotonic`.
        steps: how many there are; by default as many as there is time for.
        learning_rate: of AdamW (Loshchilov & Hutter 2017), the highest.
        weight_decay: of AdamW, of matrices.
        checkpoint_s: seconds from one checkpoint to the next.
    """

    name: str
    digest: str
    checkpoint: Path
    announce: Callable[[str], None]
    until: float = math.inf
    steps: int | None = None
    learning_rate: float = 6e-4
    weight_decay: float = 0.01
    checkpoint_s: float = CHECKPOINT_S


@contextlib.contextmanager
def course_of(
    lesson: Lesson,
    name: str,
    steps: int | None,
    facts: Mapping[str, Any],
    longest_s: float = math.inf,
    **rates: float,
) -> Iterator[Course]:
    """The course of a student's training, of ``longest_s`` seconds at most; its checkpoint is
    removed at the end of the block, in which the model is written. ``facts`` are all that decides
    what is learned, beside the ``steps``; ``rates`` those of a :class:`Course`."""
    course = Course(
        name,
        digest(**facts, steps=steps),
        lesson.checkpoints / f"{name}.checkpoint",
        lesson.announce,
        min(lesson.until, time.monotonic() + longest_s),
        steps,
        **rates,
    )
    yield course
    course.checkpoint.unlink(missing_ok=True)


class Trained(NamedTuple):
    """What came of a training: its ``steps``, and the seconds that it took before it was continued
    in this process."""

    steps: int
    earlier_s: float


def train(
    module: torch.nn.Module, loss: Callable[[int, float], torch.Tensor], course: Course
) -> Trained:
    """Train a module's parameters that require a gradient.

    Where the course has a checkpoint, training goes on from it: with a fixed number of steps the
    result is that of a training that was never stopped, to the last bit.

    Args:
        module: its buffers, too, are part of a checkpoint.
        loss: (step from 0, share of the training that is done) → the loss of that step's batch.

    Raises:
        ModelError: a loss is no finite number, a checkpoint cannot be written, or there was no time
            for a single step.
    """
    optimizer = _optimizer(module, course)
    at = _restored(module, optimizer, course) or _At()
    earlier_s = at.spent_s
    with _tensors_are_plain():
        return Trained(_trained(module, loss, course, optimizer, at), earlier_s)


@dataclass(slots=True)
class _At:
    """How far a training is."""

    step: int = 0
    progress: float = 0.0
    loss: float = math.nan
    spent_s: float = 0.0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED_STEPS))
    saved: float = field(default_factory=time.monotonic)
    announced: float = 0.0


def _trained(
    module: torch.nn.Module,
    loss: Callable[[int, float], torch.Tensor],
    course: Course,
    optimizer: torch.optim.Optimizer,
    at: _At,
) -> int:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    now = time.monotonic()
    while at.progress < 1.0 and (course.steps is not None or now < course.until):
        remaining = _remaining(at, course, now)
        done = at.progress + (1.0 - at.progress) / remaining
        for group in optimizer.param_groups:
            group["lr"] = course.learning_rate * _rate(done)
        value = loss(at.step, at.progress)
        value.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(weights, CLIP)
        found = value.item()
        if not (math.isfinite(found) and math.isfinite(norm.item())):
            raise ModelError(
                f"{course.name}: the loss of step {at.step} is {found}, its gradient's norm"
                f" {norm.item()}: look for rows whose inputs or outputs are not finite in float32"
            )
        optimizer.step()
        optimizer.zero_grad()
        before, now = now, time.monotonic()
        at.step, at.progress = at.step + 1, 1.0 if remaining <= 1 else done
        at.loss = found if math.isnan(at.loss) else at.loss + SMOOTHING * (found - at.loss)
        at.seconds.append(now - before)
        at.spent_s += now - before
        if now - at.saved >= course.checkpoint_s:
            _save(module, optimizer, course, at)
            at.saved = now
        if now - at.announced >= ANNOUNCED_S:
            course.announce(f"{course.name}: {at.progress:.0%}, loss {at.loss:.4f}")
            at.announced = now
    if not at.step:
        raise ModelError(f"{course.name}: no time was left to train it: give it more (--within)")
    return at.step


def _remaining(at: _At, course: Course, now: float) -> float:
    """Steps that are still to be made; by the median of the last ones' seconds, for one that also
    measures or saves something takes many times as long, and a machine's load changes."""
    if course.steps is not None:
        return course.steps - at.step
    if len(at.seconds) < LEAST_TIMED:
        return UNTIMED_STEPS
    return max((course.until - now) / statistics.median(at.seconds), 1.0)


def _rate(progress: float) -> float:
    return min(1.0, progress / WARM_UP) * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def _optimizer(module: torch.nn.Module, course: Course) -> torch.optim.AdamW:
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    return torch.optim.AdamW(
        [
            {
                "params": [weight for weight in weights if weight.dim() > 1],
                "weight_decay": course.weight_decay,
            },
            {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
        ],
        lr=course.learning_rate,
        betas=BETAS,
        fused=True,
    )


@contextlib.contextmanager
def _tensors_are_plain() -> Iterator[None]:
    """Gradients are computed, whatever the caller's mode was."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def half_products(device: str) -> Iterator[None]:
    """Products within are bfloat16's on a GPU, and where this CPU multiplies it by itself: three
    layers of MiniLM learned 7,400 tokens a CPU second instead of 2,600 (AMD Zen 5). Attention is
    computed by plain products: in bfloat16 the backward of torch 2.13's own takes two fifths of a
    step (5,100 tokens)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with (
        sdpa_kernel(SDPBackend.MATH),
        torch.autocast(device, torch.bfloat16, enabled=device != "cpu" or has_bf16()),
    ):
        yield


# ---- Checkpoints: safetensors after their SHA-256, for safetensors have none of their own.

_DIGEST_BYTES = hashlib.sha256().digest_size


def _save(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, course: Course, at: _At
) -> None:
    tensors = {f"buffer {name}": value for name, value in module.named_buffers()}
    for name, weight in _trainable(module):
        state = optimizer.state[weight]
        tensors[f"weight {name}"] = weight
        tensors[f"mean {name}"], tensors[f"square {name}"] = state["exp_avg"], state["exp_avg_sq"]
    plain = {name: value.detach().contiguous() for name, value in tensors.items()}
    about = {
        "digest": course.digest,
        "step": at.step,
        "progress": at.progress,
        "spent_s": at.spent_s,
    }
    body = save(plain, {"training": json.dumps(about)})
    try:
        replace_durably(course.checkpoint, hashlib.sha256(body).digest() + body)
    except OSError as exc:
        raise ModelError(
            disk_message(course.checkpoint, exc, "training continues from the last checkpoint")
        ) from exc


def _restored(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, course: Course
) -> _At | None:
    """Set the module and the optimiser to a checkpoint's state; None where there is none of this
    course."""
    if not course.checkpoint.is_file():
        return None
    try:
        data = course.checkpoint.read_bytes()
        body = data[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
            raise ValueError("it differs from its checksum")
        # safetensors' own loader of bytes gives no metadata
        head = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        about, tensors = json.loads(head["__metadata__"]["training"]), load(body)
        if about.get("digest") != course.digest:
            course.announce(f"{course.name}: {course.checkpoint} is of another training: left out")
            return None
        at = _At(int(about["step"]), float(about["progress"]), spent_s=float(about["spent_s"]))
        with torch.no_grad():
            for name, value in module.named_buffers():
                value.copy_(tensors[f"buffer {name}"])
            for name, weight in _trainable(module):
                weight.copy_(tensors[f"weight {name}"])
                optimizer.state[weight] = {
                    "step": torch.tensor(float(at.step)),
                    "exp_avg": tensors[f"mean {name}"],
                    "exp_avg_sq": tensors[f"square {name}"],
                }
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(
            f"{course.name}: {course.checkpoint} is damaged ({exc}): remove it, and training begins"
            " from the start"
        ) from exc
    course.announce(f"{course.name}: continues at {at.progress:.0%}")
    return at


def _trainable(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return (pair for pair in module.named_parameters() if pair[1].requires_grad)
