"""Columns student: students of models over columns of numbers, vectors and categories, such as
rankers: a small MLP, or trees (LightGBM) of one score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors.torch import save

from precompute.model import ReadingModel, table_digest
from precompute.models.exported_program import parse_inputs
from precompute.store.doors import MODELS
from precompute.store.errors import ModelError
from precompute.students.mlp import Mlp
from precompute.students.training import MODEL, Lesson, Made, course_of, train

MOST_VALUES = 300
"""Different texts of a column that is taken for a category: they are values of the source, and go
into the student's record, the snapshot's manifest and its pointer, which everyone reads."""
TREES = "lightgbm"
"""The model that computes trees."""
TRAINING_S = 120.0
BATCH_ROWS = 1024
WIDTH = 128
RIDGE = 1e-3
"""Penalty, for each row, of the linear way that training begins with: of 1,475 rows of 384 numbers,
with 18 scores that are linear in them, gradients alone reached a rank correlation of 0.77 in
20 s."""
LEARNING_RATE = 3e-3


@dataclass(slots=True)
class Columns:
    """What a student reads: ``inputs`` as ``torch_module`` takes them, how wide each is, how many
    values each category has, and why others cannot be read."""

    inputs: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SmallMlp:
    """The recipe of an MLP.

    Args:
        width: of its hidden layer.
        steps: of training; by default as many as there is time for.
    """

    width: int = WIDTH
    steps: int | None = None
    name: str = "mlp"
    by: str = "distil"

    def refuses(self, lesson: Lesson) -> str:
        return _refusal(lesson)

    def make(self, lesson: Lesson, folder: Path) -> Made:
        columns, targets = columns_of(lesson), _targets(lesson)
        outputs = {name: values.shape[1] for name, values in targets.items()}
        torch.manual_seed(lesson.seed)
        mlp = Mlp(columns.numbers, columns.categories, outputs, self.width)
        inputs = {
            one.name: one.tensor({name: _chunk(lesson.rows[name]) for name in one.columns})
            for one in parse_inputs(columns.inputs, {})
        }
        wanted = _begun(mlp, inputs, targets)

        def loss(step: int, _: float) -> torch.Tensor:
            chance = np.random.default_rng([lesson.seed, step])
            rows = torch.from_numpy(chance.integers(0, len(wanted), BATCH_ROWS))
            found = mlp.standard({name: values[rows] for name, values in inputs.items()})
            return torch.nn.functional.mse_loss(found, wanted[rows])

        facts = {
            "teacher": lesson.model.fingerprint(),
            "rows": table_digest(lesson.rows),
            "width": self.width,
            "seed": lesson.seed,
        }
        with course_of(
            lesson, self.name, self.steps, facts, TRAINING_S, learning_rate=LEARNING_RATE
        ) as course:
            trained = train(mlp, loss, course)
            place = folder / MODEL
            place.mkdir(parents=True, exist_ok=True)
            (place / "mlp.safetensors").write_bytes(save(mlp.state_dict()))
        return Made(
            "torch_module",
            {
                "module": f"{Mlp.__module__}:{Mlp.__name__}",
                "args": {
                    "numbers": columns.numbers,
                    "categories": columns.categories,
                    "outputs": outputs,
                    "width": self.width,
                },
                "inputs": columns.inputs,
                "outputs": {name: name for name in targets},
                "weights": f"./{MODEL}/mlp.safetensors",
                "concurrent": True,
            },
            earlier_s=trained.earlier_s,
        )


@dataclass(frozen=True, slots=True)
class Trees:
    """The recipe of gradient-boosted trees.

    Args:
        rounds: trees at most.
    """

    rounds: int = 400
    name: str = "trees"
    by: str = "distil"

    def refuses(self, lesson: Lesson) -> str:
        if why := _refusal(lesson):
            return why
        columns = columns_of(lesson)
        if len(lesson.view.features) != 1 or lesson.view.features[0].dim is not None:
            return "trees give one score, and the view has other features"
        if columns.categories or set(columns.inputs) - {"numbers"}:
            return "trees read columns of numbers alone here"
        if not MODELS.is_here(TREES):
            return MODELS.absence(TREES)
        return str(_trees().missing())

    def make(self, lesson: Lesson, folder: Path) -> Made:
        names = columns_of(lesson).inputs["numbers"]["columns"]
        # LightGBM takes few letters in names, and changes some
        numbered = [f"column_{at}" for at in range(len(names))]
        (feature,) = lesson.view.features
        matrix = np.column_stack([_numbers(lesson.rows[name]) for name in names])
        scores = _targets(lesson)[feature.name][:, 0]
        text = _trees().fitted(matrix, scores, numbered, self.rounds, lesson.seed)
        place = folder / MODEL
        place.mkdir(parents=True, exist_ok=True)
        (place / "trees.txt").write_text(text, encoding="utf-8")
        args = {"path": f"./{MODEL}/trees.txt", "columns": names, "output": feature.name}
        return Made(TREES, args)


def _trees() -> Any:
    """The class that computes trees, which has what fits them, too."""
    return MODELS.open(TREES)


def columns_of(lesson: Lesson) -> Columns:
    """The columns that a student reads: those that the teacher says it reads, or else all but the
    key."""
    found, matrix = Columns(), []
    model, view = lesson.model, lesson.view
    features = set(view.feature_names)
    names = (
        list(model.reads())
        if isinstance(model, ReadingModel)
        else [n for n in lesson.rows.column_names if n not in features and n not in view.entity]
    )
    # inputs are numbered: a column may have any name, one of Python's or of torch's included
    for at, name in enumerate(names):
        column, one = lesson.rows[name], f"column_{at}"
        kind = column.type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            matrix.append(name)
        elif pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            sizes = pc.unique(pc.list_value_length(column).drop_null()).to_pylist()
            if column.null_count or pc.list_flatten(column).null_count:
                found.unread.append(f"{name} has nulls, which nothing fills in a vector")
            elif len(sizes) == 1 and sizes[0] and pa.types.is_floating(kind.value_type):
                found.inputs[one] = {"column": name, "dim": sizes[0]}
                found.numbers[one] = sizes[0]
            else:
                found.unread.append(f"{name} has lists of several lengths, or of no floats")
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            values = sorted(pc.unique(column.drop_null()).to_pylist())
            if not values:
                found.unread.append(f"{name} has no text in any row")
            elif len(values) > min(MOST_VALUES, len(column) // 2):
                found.unread.append(
                    f"{name} has {len(values):,} different texts, which are no categories (at most"
                    f" {MOST_VALUES}, and half as many as there are rows)"
                )
            else:
                found.inputs[one] = {"column": name, "vocabulary": values}
                found.categories[one] = len(values)
        else:
            found.unread.append(f"{name} is {kind}")
    if matrix:
        found.inputs = {"numbers": {"columns": matrix, "fill": 0}, **found.inputs}
        found.numbers = {"numbers": len(matrix), **found.numbers}
    return found


def _refusal(lesson: Lesson) -> str:
    for feature in lesson.view.features:
        if feature.max_items is not None or not feature.dtype.startswith("float"):
            what = "lists" if feature.max_items is not None else feature.dtype
            return f"feature {feature.name} holds {what}, and floats can be approximated"
    columns = columns_of(lesson)
    if columns.unread:
        return f"column {columns.unread[0]}"
    return "" if columns.inputs else "the teacher reads no column"


def _targets(lesson: Lesson) -> dict[str, npt.NDArray[np.float32]]:
    """Feature → float32 [rows, dim].

    Raises:
        ModelError: a value is not finite.
    """
    found = {}
    for feature in lesson.view.features:
        column = _chunk(lesson.rows[feature.name])
        values = column.flatten() if feature.dim is not None else column
        matrix = np.asarray(values, np.float32).reshape(len(column), -1)
        if not np.isfinite(matrix).all():
            raise ModelError(f"feature {feature.name}: a value to learn from is not finite")
        found[feature.name] = matrix
    return found


def _begun(
    mlp: Mlp, inputs: Mapping[str, torch.Tensor], targets: Mapping[str, npt.NDArray[np.float32]]
) -> torch.Tensor:
    """Set the network's means and spreads, and its straight way to the best linear one; returns the
    targets in these spreads, float32 [rows, numbers]. A vector has one spread, so that directions
    stay what they are."""
    first = 0
    wanted = torch.from_numpy(np.concatenate(list(targets.values()), axis=1))
    for values in targets.values():
        some = slice(first, first + values.shape[1])
        mlp.out_shift[some] = wanted[:, some].mean(0)
        mlp.out_scale[some] = (wanted[:, some] - mlp.out_shift[some]).std().clamp(min=1e-12)
        first += values.shape[1]
    wanted = (wanted - mlp.out_shift) / mlp.out_scale
    parts = [inputs[name].float().reshape(len(wanted), -1) for name in mlp.numbers]
    for layer in (mlp.around, mlp.last):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    if parts:
        x = torch.cat(parts, dim=1)
        mlp.shift.copy_(x.mean(0))
        mlp.scale.copy_(x.std(0).clamp(min=1e-6))
        x = ((x - mlp.shift) / mlp.scale).double()
        squares = x.T @ x + RIDGE * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
        mlp.around.weight.data = torch.linalg.solve(squares, x.T @ wanted.double()).T.float()
    return wanted


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    # whole numbers beyond 2^53 are rounded, as where the trees compute
    numbers = _chunk(column).cast(pa.float64(), safe=False)
    return np.asarray(numbers.fill_null(float("nan")))


def _chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks()
