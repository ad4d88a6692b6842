"""View draft: a view's file from a template and a data file: key, SQL, model, and comments that say
what each line is for."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precompute.model import TemplateKind, ViewTemplate
from precompute.plugins.init.data_file import (
    YAML_WORDS,
    Column,
    DataFile,
    is_key,
    number_text,
    slug_of,
)
from precompute.plugins.init.model_file import (
    FOLDER,
    filled,
    look_at_model,
    path_from,
    text_model,
)
from precompute.sources.database import quoted
from precompute.store.doors import MODELS
from precompute.store.errors import ConfigError, did_you_mean
from precompute.store.feature_view import RESERVED

TEMPLATES = ("embeddings", "scores", "features", "model")
"""Those of ours; models that come in by their door may bring others."""

MOST_WEIGHTS = 8
MOST_TOLD = 4
"""Columns that are told of two rows with one key."""

_TITLE = re.compile(r"(?i).*(title|titel|name|subject|headline|heading|label)")


@dataclass(frozen=True, slots=True)
class Draft:
    """A view that is to be written.

    ``module`` is the template with its model's class, or the model itself, None for a built-in;
    ``example`` a key of the data, ``searched`` the feature that a search names, ``notes`` facts
    about the data for the user.
    """

    name: str
    text: str
    module: str | None = None
    example: str = ""
    searched: str = ""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Shape:
    """What all templates need of a file: its key, and the SQL around the model's columns."""

    data: DataFile
    keys: list[Column]
    made_key: bool = False
    used: dict[str, str] = field(default_factory=dict)
    """Column → what becomes of it."""
    renamed: set[str] = field(default_factory=set)
    """Columns that stand in the SELECT by the names that they get in the view."""
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
        return _singular(slug_of(self.data.path.name.partition(".")[0])) or "row"

    def select(self, columns: Mapping[str, str], wanted: str | None = None) -> str:
        """The SELECT: the key and ``columns``, name → SQL, of the rows for which ``wanted`` is
        true."""
        keys = [_as(quoted(column.name), column.alias, column.name) for column in self.keys]
        if self.made_key:
            keys = [
                f"md5(row({', '.join(quoted(c.name) for c in self.data.columns)})::VARCHAR) AS"
                " row_id"
            ]
        selected = [*keys, *(_as(sql, name) for name, sql in columns.items())]
        lines = ["SELECT", ",\n".join(f"  {one}" for one in selected), f"FROM {self.data.read}"]
        # of a text that is empty there is no key either
        there = [
            f"{quoted(c.name)} {is_key(c)}"
            for c in self.keys
            if c.values < self.data.rows or c.is_empty_somewhere
        ]
        if there:
            self.notes.append(
                f"rows without {' or '.join(repr(c.name) for c in self.keys)} are left out"
            )
        conditions = [*there, *([wanted] if wanted else [])]
        lines += [f"WHERE {' AND '.join(conditions)}"] if conditions else []
        self._note_doubled()
        return "\n".join(lines)

    def _note_doubled(self) -> None:
        """A note on two rows of one key, of which a run would have to choose one: which, the user
        says."""
        pair = self.data.doubled(self.keys) if self.keys else None
        if pair is None:
            return
        # the key, and where they differ
        columns = self.data.columns
        told = [at for at, column in enumerate(columns) if column in self.keys]
        told += [at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b]
        one, two = (
            ", ".join(f"{columns[at].name} {_short(row[at])}" for at in told[:MOST_TOLD])
            for row in pair
        )
        of = ", ".join(quoted(column.name) for column in self.keys)
        time = next((column.name for column in columns if column.type in _TIMES), None)
        order, first = (f"{quoted(time)} DESC", "newest") if time else ("…", "first in that order")
        self.notes.append(
            f"several rows have the same {' and '.join(repr(c.name) for c in self.keys)}, such as"
            f" ({one}) and ({two}): a run refuses them until you choose. At the end of the SQL,"
            f" QUALIFY row_number() OVER (PARTITION BY {of} ORDER BY {order}) = 1 takes the"
            f" {first}; SELECT any_value(…) and GROUP BY {of} take any; init with --key"
            f" {','.join(c.name for c in self.keys)},… makes another key"
        )

    @property
    def summary(self) -> list[str]:
        """A line on how the file's columns are used, and which were renamed."""
        columns = self.data.columns
        uses = {column.name: self._use(column) for column in columns} | {
            n: f"left out ({w})" for n, w in self.data.unusable.items()
        }
        parts = [
            f"{use}: {', '.join(name for name in uses if uses[name] == use)}"
            for use in dict.fromkeys(uses.values())
        ]
        lines = [f"{len(uses)} columns: {'; '.join(parts)}"]
        made = {
            c.name: c.alias
            for c in columns
            if c.name != c.alias and (c in self.keys or c.name in self.renamed)
        }
        return lines + [
            f"names for SQL and answers: {', '.join(f'{n!r} is {a}' for n, a in made.items())}"
        ] * bool(made)

    def note_texts(self) -> None:
        """A note on numbers that the file has as texts, and on a value that made a type wider."""
        for column in self.data.columns:
            name, others = column.name, column.written - column.numeric
            if column.commas and column not in self.keys:
                self.notes.append(
                    f"{name!r} has decimal commas, so it is text here:"
                    f" replace(replace({quoted(name)}, '.', ''), ',', '.')::DOUBLE reads it"
                )
            elif column.late and column not in self.keys:
                self.notes.append(column.late.replace("${", "$ {"))
            elif 0 < others <= column.written / 2 and column not in self.keys:
                self.notes.append(
                    f"{name!r} is text, since {others} of its {column.written} values are no"
                    f" numbers: TRY_CAST({quoted(name)} AS DOUBLE) makes them null"
                )

    def note_nulls(self, columns: Sequence[Column], become: str) -> None:
        """A note on those of ``columns`` that have nulls."""
        empty = {c.name: self.data.rows - c.values + c.odd for c in columns}
        some = ", ".join(
            f"{name} ({count:,} of {self.data.rows:,})" for name, count in empty.items() if count
        )
        self.notes += [f"empty values {become}: {some}"] if some else []

    def described(self) -> str:
        """The file and its columns, as comments, and what was noted of them."""
        head = (
            f"{self.data.path.name}: {self.data.rows:,} {'row' if self.data.rows == 1 else 'rows'}"
        )
        rows = [(column.name, column.type, self._use(column)) for column in self.data.columns]
        rows += [(name, "", f"left out: {why}") for name, why in self.data.unusable.items()]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        lines = [
            f"#   {a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}".rstrip() for a, b, c in rows
        ]
        return "\n".join([f"# {head}", *lines, *(f"# note: {note}" for note in self.notes)])

    def _use(self, column: Column) -> str:
        return "the key" if column in self.keys else self.used.get(column.name, "not used")


def checked_template(template: str) -> None:
    """Look whether there is such a template.

    Raises:
        ConfigError: there is none, or its model has no plug-in here.
    """
    if template in TEMPLATES or (MODELS.has(template) and _brought(template) is not None):
        return
    known = [*TEMPLATES, *(name for name, kind in MODELS.all() if isinstance(kind, TemplateKind))]
    raise ConfigError(
        f"--template {template}: is not one of {', '.join(known)}{did_you_mean(template, known)}"
    )


def _brought(template: str) -> ViewTemplate | None:
    kind: Any = MODELS.open(template)
    return kind.template if isinstance(kind, TemplateKind) else None


def draft(
    template: str,
    data: DataFile,
    project: Path,
    *,
    key: Sequence[str] = (),
    name: str | None = None,
    encoder: str | None = None,
    model: Path | None = None,
) -> Draft:
    """The view of a template over a file.

    Args:
        template: one that :func:`checked_template` knows.
        key: the columns that make the key; found where none is named.
        name: of the view; by default after what a row is about.
        encoder: a sentence-transformers folder, or ``package:name/folder``.
        model: of the template ``model``, its file.

    Raises:
        ConfigError: the file lacks what the template needs, or ``encoder`` is no encoder.
    """
    shape = _shape(template, data, key)
    shape.note_texts()
    if template == "features":
        return _features(shape, name or f"{shape.noun}_features")
    if template == "model":
        assert model is not None
        return _model(shape, project, name or f"{shape.noun}_score", model)
    if template == "embeddings":
        return _embeddings(shape, project, name or f"{shape.noun}_embedding", encoder)
    if template == "scores":
        return _scores(shape, name or f"{shape.noun}_score")
    brought = _brought(template)
    assert brought is not None
    return _of_texts(shape, brought, name or f"{shape.noun}_{brought.makes}")


def suited(data: DataFile) -> str:
    """The template that fits a file best."""
    if any(column.is_text and column.letters > 20 for column in data.columns):
        return "embeddings"
    return (
        "scores"
        if data.pair() or any(c.is_number and c != data.key() for c in data.columns)
        else "embeddings"
    )


def _shape(template: str, data: DataFile, key: Sequence[str]) -> _Shape:
    if key:
        keys = [data.column(name) for name in key]
        for column in keys:
            if not column.may_be_key:
                raise ConfigError(
                    f"--key: {column.name!r} is {column.type}: a key is an integer or a short text"
                )
        return _Shape(data, keys)
    found, pair = data.key(), data.pair() if template == "scores" else None
    if pair is not None and (found is None or data.distinct([found]) < data.rows):
        return _Shape(data, list(pair))
    if found is not None:
        return _Shape(data, [found])
    note = (
        "no column is a key, so each row's is a digest of all its columns (row_id): another row"
        " wherever one of them changes. --key names one"
    )
    return _Shape(data, [], made_key=True, notes=[note])


def _texts(shape: _Shape) -> list[Column]:
    """The columns that say what a row is: the longest text, and before it a title where there is
    one."""
    texts = sorted(
        (c for c in shape.data.columns if c.is_text and c not in shape.keys),
        key=lambda c: c.letters,
        reverse=True,
    )
    # a table of words, say, whose only text is the key
    texts = texts or [column for column in shape.keys if column.is_text]
    if not texts:
        have = ", ".join(f"{column.name} {column.type}" for column in shape.data.columns)
        raise ConfigError(
            f"{shape.data.path.name} has no column with text (it has: {have}): --template scores"
            " takes numbers"
        )
    titles = [column for column in texts[1:] if _TITLE.match(column.name)]
    return [*titles[:1], texts[0]]


def _embeddings(shape: _Shape, project: Path, name: str, encoder: str | None) -> Draft:
    chosen = _texts(shape)
    shape.used |= {column.name: "in the text" for column in chosen}
    sql = (
        quoted(chosen[0].name)
        if len(chosen) == 1
        else f"concat_ws(': ', {', '.join(quoted(c.name) for c in chosen)})"
    )
    empty = max(column.written for column in chosen) < shape.data.rows
    wanted = f"trim(coalesce({sql}, '')) <> ''" if empty else None
    if empty:
        shape.notes.append("rows without text are left out")
    model, dim, module = text_model(project, encoder)
    values = {"sql": shape.select({"text": sql}, wanted), "model": model, "dim": str(dim)}
    return _draft("embeddings", name, shape, values, module=module, searched='--text "…"')


def _scores(shape: _Shape, name: str) -> Draft:
    numbers = [c for c in shape.data.columns if c.is_number and c not in shape.keys]
    # another table's key is a number that measures nothing
    numbers = ([c for c in numbers if not c.is_called_key] or numbers)[:MOST_WEIGHTS]
    shape.used |= {column.name: "a number of the score" for column in numbers}
    shape.renamed = {column.name for column in numbers}
    shape.note_nulls(numbers, "count as the mean of their column")
    inputs = {
        c.alias: (f"coalesce({c.number_sql}, {number_text(c.mean)})::DOUBLE", c.mean, c.spread)
        for c in numbers
    }
    if not inputs:
        inputs = _counted(shape)
    weights = {
        name: 1 / len(inputs) / (spread or abs(mean) or 1.0)
        for name, (_, mean, spread) in inputs.items()
    }
    bias = -sum(weight * inputs[name][1] for name, weight in weights.items())
    values = {
        "sql": shape.select({name: sql for name, (sql, _, _) in inputs.items()}),
        "bias": number_text(bias),
        "weights": "\n".join(f"{name}: {number_text(weight)}" for name, weight in weights.items()),
    }
    return _draft("scores", name, shape, values, module="linear_score.py")


def _counted(shape: _Shape) -> dict[str, tuple[str, float, float]]:
    """Numbers to score in a file without any: how long its texts are, or how often each id of a
    pair occurs."""
    texts = [c for c in shape.data.columns if c.is_text and c not in shape.keys][:MOST_WEIGHTS]
    if texts:
        shape.used |= {column.name: "its length, for the score" for column in texts}
        shape.notes.append("there is no column of numbers: the lengths of texts are scored")
        return {
            f"{c.alias}_letters": (f"coalesce(length({quoted(c.name)}), 0)::DOUBLE", c.letters, 0.0)
            for c in texts
        }
    if len(shape.keys) > 1:
        shape.notes.append("there is no column of numbers: how often each id comes is scored")
        counts = {c: shape.data.rows / max(1, shape.data.distinct([c])) for c in shape.keys}
        return {
            f"{c.alias}_rows": (
                f"(count(*) OVER (PARTITION BY {quoted(c.name)}))::DOUBLE",
                mean,
                0.0,
            )
            for c, mean in counts.items()
        }
    raise ConfigError(
        f"{shape.data.path.name} has no column beside its key ({', '.join(shape.names)}): there is"
        " nothing to score"
    )


_NAMES = {
    "int8": "TINYINT",
    "int16": "SMALLINT UTINYINT",
    "int32": "INTEGER USMALLINT",
    "int64": "BIGINT UINTEGER UBIGINT HUGEINT UHUGEINT",
    "float32": "FLOAT",
    "float64": "DOUBLE DECIMAL",
    "string": "VARCHAR UUID ENUM",
}
_TYPES = {name: dtype for dtype, names in _NAMES.items() for name in names.split()}
_TIMES: tuple[str, ...] = ("DATE", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE")
_TIMES += ("TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP_NS")
_ALONE = {"BOOLEAN": "bool"} | dict.fromkeys(_TIMES, "string")
"""DuckDB's name of a type → the feature's; of these no lists."""


def _feature(column: Column, rows: int) -> str | None:
    """The declaration of a column as a feature; None for a type that no feature has."""
    found = re.fullmatch(r"([A-Z_ ]+)(\(.*\))?(\[(\d*)\])?", column.type, re.DOTALL)
    if found is None:
        return None
    kind, is_list, dim = found[1], found[3] is not None, found[4]
    dtype = _TYPES.get(kind) if is_list else _TYPES.get(kind) or _ALONE.get(kind)
    if dtype is None:
        return None
    # a vector is never null; Parquet's own have no length in their type
    dim = dim or (
        column.items if is_list and column.shortest == column.items > 1 and "float" in dtype else ""
    )
    if dim and dtype != "string" and column.values == rows:
        return f"{{dtype: {dtype}, dim: {dim}}}"
    return (
        f"{{dtype: {dtype}, max_items: {dim or max(10, 2 * column.items)}}}"
        if is_list
        else f"{{dtype: {dtype}}}"
    )


def _features(shape: _Shape, name: str) -> Draft:
    data = shape.data
    declared = {
        c.name: kind
        for c in data.columns
        if c not in shape.keys and (kind := _feature(c, data.rows))
    }
    chosen = [column for column in data.columns if column.name in declared]
    if not chosen:
        raise ConfigError(
            f"{data.path.name} has no column beside its key ({', '.join(shape.names)}): there is"
            " nothing to serve"
        )
    shape.used |= {column.name: "a feature" for column in chosen}
    shape.used |= {
        c.name: f"left out (no feature is {c.type})"
        for c in data.columns
        if c not in (*shape.keys, *chosen)
    }
    shape.note_nulls(chosen, "are null")
    if times := [c.name for c in chosen if _ALONE.get(c.type) == "string"]:
        shape.notes.append(
            "dates and times are texts (epoch_ms(…) in the SQL makes an int64 of one):"
            f" {', '.join(times)}"
        )
    names: dict[str, Column] = {}
    for column in chosen:
        # of the names that other templates' features have
        own = column.alias.removeprefix("own_")
        taken = own in (*RESERVED, *YAML_WORDS, *shape.names, *names) or own != slug_of(column.name)
        names[column.alias if taken else own] = column
    if other := [
        f"{column.name!r} is {alias}" for alias, column in names.items() if alias != column.name
    ]:
        shape.notes.append(f"names for SQL and answers: {', '.join(other)}")
    values = {
        "sql": shape.select({alias: column.finite_sql for alias, column in names.items()}),
        "features": "\n".join(
            f"{alias}: {declared[column.name]}" for alias, column in names.items()
        ),
    }
    return _draft("features", name, shape, values)


def _model(shape: _Shape, project: Path, name: str, path: Path) -> Draft:
    file = look_at_model(path)
    chosen = file.columns_of(shape.data, shape.keys)
    columns = list(dict.fromkeys(chosen.values()))
    shape.used |= {column.name: "the model's" for column in columns}
    shape.renamed = {column.name for column in columns}
    if all(name not in (column.name, column.alias) for name, column in chosen.items()):
        shape.notes.append(
            "the model's inputs have no names of columns: columns of numbers stand for them in the"
            " file's order; look whether it is theirs"
        )
    shape.note_nulls(
        columns,
        (
            "count as the mean of their column"
            if file.outputs
            else "are missing values to the model"
        ),
    )
    sql = shape.select(
        {c.alias: file.sql_of(c, shape.data.rows) for c in columns if c not in shape.keys}
    )
    args = {
        "path": f"./{path.name}" if path.parent == FOLDER else path_from(path, project)
    } | file.args(chosen)
    features = file.features(args, shape.data.absolute(sql), shape.names)
    values = {
        "sql": sql,
        "use": file.use,
        "args": "\n".join(
            f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in args.items()
        ),
        "features": "\n".join(f"{feature}: {kind}" for feature, kind in features.items()),
        # scores of classes are no embeddings
        "gates": (
            "gates: {first: null, constant: null}     # rows that are alike to the model have the"
            " very same scores"
            if any("dim:" in kind for kind in features.values())
            else ""
        ),
    }
    return _draft("model", name, shape, values, module=path.name if path.parent == FOLDER else None)


def _of_texts(shape: _Shape, template: ViewTemplate, name: str) -> Draft:
    """The view of a template that a model brings."""
    chosen = _texts(shape)
    shape.used |= {column.name: template.use for column in chosen}
    shape.renamed = {column.name for column in chosen}
    there = " OR ".join(f"trim({quoted(column.name)}) <> ''" for column in chosen)
    empty = max(column.written for column in chosen) < shape.data.rows
    if empty:
        shape.notes.append("rows without text are left out")
    texts = {
        c.alias: f"coalesce({quoted(c.name)}, '')" if c.values < shape.data.rows else quoted(c.name)
        for c in chosen
        if c not in shape.keys
    }
    shape.notes += template.notes
    values = {"sql": shape.select(texts, f"({there})" if empty else None)}
    values |= template.values([column.alias for column in chosen])
    return _draft(template.text, name, shape, values)


def _draft(
    template: str | Path,
    name: str,
    shape: _Shape,
    values: dict[str, str],
    *,
    module: str | None = None,
    searched: str = "",
) -> Draft:
    example = shape.data.example(shape.keys) if shape.keys else ""
    # a line break of the data would be one of the view's file
    example = example if example.isprintable() else ""
    common = {
        "view": name,
        "noun": shape.noun.replace("_", " "),
        "key": ", ".join(shape.names),
        "columns": shape.described(),
        "example": shlex.quote(example) if example else "…",
    }
    file = f"{template}.yaml" if isinstance(template, str) else template
    return Draft(
        name,
        filled(file, common | values),
        module,
        example,
        searched,
        (*shape.summary, *shape.notes),
    )


def _singular(stem: str) -> str:
    return stem.removesuffix("s") if len(stem) > 3 and not stem.endswith("ss") else stem


def _short(value: str | None) -> str:
    """A value in a note, on one line."""
    text = json.dumps(value, ensure_ascii=False)
    return (text if len(text) <= 30 else f"{text[:29]}…").replace("${", "$ {")


def _as(sql: str, name: str, own: str | None = None) -> str:
    return sql if own == name and sql == quoted(name) else f"{sql} AS {name}"
