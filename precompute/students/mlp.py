"""MLP: a small network over columns of numbers, vectors and categories, which approximates scores
and vectors of any model; ``torch_module`` computes it."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Mlp(torch.nn.Module):
    """Columns → features: one hidden layer, and a straight way around it.

    Args:
        numbers: name of an input → how many numbers a row of it has.
        categories: name of an input → how many values it knows; a row has the number of one from 1,
            or 0 for any other.
        outputs: feature → how many numbers a row of it has.
        width: of the hidden layer.
    """

    def __init__(
        self,
        numbers: Mapping[str, int],
        categories: Mapping[str, int],
        outputs: Mapping[str, int],
        width: int,
    ) -> None:
        super().__init__()
        self.numbers, self.categories = tuple(numbers), tuple(categories)
        self.sizes = dict(outputs)
        inputs, made = sum(numbers.values()), sum(outputs.values())
        self.shift = torch.nn.Buffer(torch.zeros(inputs))
        self.scale = torch.nn.Buffer(torch.ones(inputs))
        self.out_shift = torch.nn.Buffer(torch.zeros(made))
        self.out_scale = torch.nn.Buffer(torch.ones(made))
        self.around = torch.nn.Linear(inputs, made)
        self.first = torch.nn.Linear(inputs, width)
        # a category's row adds to both, as a column of one-hot numbers would
        self.tables = torch.nn.ModuleDict(
            {name: _table(count + 1, width + made) for name, count in categories.items()}
        )
        self.last = torch.nn.Linear(width, made)

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Float32 [rows] or [rows, dim] of each of ``numbers``, int64 [rows] of each of
        ``categories``; float32 [rows, dim] of each feature."""
        made = self.standard(inputs) * self.out_scale + self.out_shift
        parts = torch.split(made, list(self.sizes.values()), dim=1)
        return dict(zip(self.sizes, parts, strict=True))

    def standard(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """All features beside each other, float32 [rows, numbers], of mean 0 and spread 1."""
        rows = len(next(iter(inputs.values())))
        columns = [inputs[name].float().reshape(rows, -1) for name in self.numbers]
        x = torch.cat(columns, dim=1) if columns else self.shift.new_zeros(rows, 0)
        x = (x - self.shift) / self.scale
        hidden, around = self.first(x), self.around(x)
        for name in self.categories:
            added = self.tables[name](inputs[name])
            hidden = hidden + added[:, : hidden.shape[1]]
            around = around + added[:, hidden.shape[1] :]
        out: torch.Tensor = around + self.last(torch.nn.functional.gelu(hidden))
        return out


def _table(rows: int, width: int) -> torch.nn.Embedding:
    return torch.nn.Embedding(rows, width, _weight=torch.randn(rows, width) * 0.05)
