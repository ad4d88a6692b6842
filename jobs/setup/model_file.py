"""Model file: a file of trees or an ONNX graph that somebody brings, looked at: which built-in
computes it, which columns it reads, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.jobs.setup.data_file import Column, DataFile, number_text, slug_of
from precompute.model import Model, ReadingModel
from precompute.registry import load_model
from precompute.sources.database import quoted
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, ModelError, did_you_mean

TRIED_ROWS = 100
"""Of the data, until one is computed."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that was looked at: ``use`` is the built-in, ``inputs`` maps what it reads to how
    many columns that is, ``outputs`` are those of a graph."""

    path: Path
    use: str
    inputs: Mapping[str, int]
    outputs: Sequence[str] = ()

    def columns_of(self, data: DataFile, keys: Sequence[Column]) -> dict[str, Column]:
        """Input → the column of its name, as in the file or as in the view; ``input[0]``, … of one
        that is several.

        Raises:
            ConfigError: there is none.
        """
        known = {column.alias: column for column in data.columns} | {
            column.name: column for column in data.columns
        }
        numbers = [column for column in data.columns if column.is_number and column not in keys]
        wanted = [
            name if count == 1 else f"{name}[{i}]"
            for name, count in self.inputs.items()
            for i in range(count)
        ]
        if not any(name in known for name in wanted) and len(wanted) == len(numbers):
            return dict(zip(wanted, numbers, strict=True))
        for name, count in self.inputs.items():
            if count > 1:
                raise ConfigError(
                    f"{self.path.name} takes {count} columns as {name!r}, and {data.path.name} has"
                    f" {len(numbers)} columns of numbers beside its key: leave the model's own in"
                    " the file, in the model's order"
                )
            if name not in known:
                why = (
                    data.unusable.get(name)
                    or f"it has: {', '.join(column.name for column in data.columns)}"
                )
                raise ConfigError(
                    f"{self.path.name} reads {name!r}, and {data.path.name} has no such"
                    f" column{did_you_mean(name, known)} ({why}): name it so in the file"
                )
        return {name: known[name] for name in self.inputs}

    def args(self, chosen: Mapping[str, Column]) -> dict[str, Any]:
        """The model's arguments beside its path."""
        if self.use != "onnx":
            other = {name: column.alias for name, column in chosen.items() if name != column.alias}
            return {"columns": other} if other else {}
        columns = iter(column.alias for column in chosen.values())
        inputs = {
            name: [next(columns) for _ in range(count)] for name, count in self.inputs.items()
        }
        plain = all(names == [name] for name, names in inputs.items())
        return ({} if plain else {"inputs": inputs}) | {
            "outputs": {slug_of(name) or f"output_{i}": name for i, name in enumerate(self.outputs)}
        }

    def sql_of(self, column: Column, rows: int) -> str:
        """A column as the model takes it: a graph has no missing values."""
        if self.use != "onnx" or column.values - column.odd == rows:
            return quoted(column.name)
        return (
            f"coalesce({column.finite_sql},"
            f" {number_text(column.mean) if column.is_number else repr('')})"
        )

    def features(self, args: Mapping[str, Any], sql: str, key: Sequence[str]) -> dict[str, str]:
        """Feature → what a view declares of it, by the first row that the model computes.

        Raises:
            ConfigError: it computes none.
        """
        with Source(sql, key, {}) as source:
            rows = source.head(TRIED_ROWS).combine_chunks().to_batches()[0]
        model, why = (
            _loaded(
                self.use, self.path, {name: value for name, value in args.items() if name != "path"}
            ),
            "",
        )
        for row in range(rows.num_rows):
            try:
                return {
                    name: _declared(values)
                    for name, values in model.compute(rows.slice(row, 1)).items()
                }
            except ModelError as exc:
                raise ConfigError(f"{self.path.name} does not fit the data: {exc}") from exc
            except Exception as exc:
                # a bad row, in a library's own words
                why = why or str(exc)
        raise ConfigError(
            f"{self.path.name} computes none of the first {rows.num_rows} rows: {why}"
        )


def look_at_model(path: Path) -> ModelFile:
    """Look at a model's file.

    Raises:
        ConfigError: there is none, it is of no kind that is read, or its library is not installed.
    """
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"--model {path}:"
            f" {'is a folder' if path.is_dir() else 'no such file'}{did_you_mean(path.name, beside)}"  # noqa: E501
        )
    use = _kind(path)
    if use == "onnx":
        from precompute.models.tabular.onnx_model import names_of

        inputs, outputs = names_of(path)
        return ModelFile(path, use, inputs, outputs)
    model = _loaded(use, path, {})
    assert isinstance(model, ReadingModel)
    return ModelFile(path, use, dict.fromkeys(model.reads(), 1))


def _kind(path: Path) -> str:
    if path.suffix.lower() == ".onnx":
        return "onnx"
    head = path.read_bytes()[:65536]
    if head.startswith(b"tree"):
        return "lightgbm"
    if head.lstrip().startswith(b"{"):
        for use, word in (
            ("xgboost", b'"learner"'),
            ("catboost", b'"features_info"'),
            ("catboost", b'"ctr_data"'),
        ):
            if word in head:
                return use
    raise ConfigError(
        f"--model {path}: is none of LightGBM's text (save_model('model.txt')), XGBoost's JSON"
        " (save_model('model.json')), CatBoost's (save_model('model.json', format='json')) and"
        " ONNX (.onnx): save it as one; pickles are never read"
    )


def _loaded(use: str, path: Path, args: Mapping[str, Any]) -> Model:
    try:
        return load_model(use, {"path": str(path.absolute()), **args})
    except ModelError as exc:
        raise ConfigError(f"--model {path}: {exc}") from exc


def _declared(values: Any) -> str:
    if isinstance(values, pa.Array):
        return "{dtype: string}"
    kind = np.asarray(values)
    dtype = "float32" if kind.dtype.kind == "f" else "bool" if kind.dtype.kind == "b" else "int64"
    return f"{{dtype: {dtype}, dim: {kind.shape[1]}}}" if kind.ndim == 2 else f"{{dtype: {dtype}}}"
