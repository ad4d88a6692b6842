"""Data file: what a CSV or Parquet file of the user's has: its columns, which of them may be the
key, and what the others hold."""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from precompute.sources.csv_types import CsvTypes, ragged
from precompute.sources.database import Database, quoted
from precompute.sources.reader_call import CSV, ReaderCall
from precompute.sources.source import RESERVED as SOURCE_RESERVED
from precompute.sources.text_lines import line_of_no_utf_8
from precompute.store.errors import ConfigError, SourceError, did_you_mean
from precompute.store.feature_view import RESERVED
from precompute.store.keys import join_key

READERS = {
    ".parquet": "read_parquet",
    ".csv": "read_csv",
    ".tsv": "read_csv",
    ".csv.gz": "read_csv",
    ".tsv.gz": "read_csv",
}
"""How a file's name ends → DuckDB's function that reads it."""

LONGEST_KEY = 200
"""Characters of a key at most: what is longer is a text."""

YAML_WORDS = ("true", "false", "null")
"""Names that are no texts as keys of a view's file."""

MOSTLY_DIFFERENT = 0.5
"""Values as a share of the rows below which a column that is called a key is another table's."""

_KEY_NAME = re.compile(
    r"(?i)(^|.*[^a-z])(id|key|uuid|guid|code|sku|isbn|asin|slug|nr|no|number)$|.*[a-z](Id|ID|Key)$"
)
_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
_TEXTS = ("VARCHAR", "UUID")
_COMMA = "[+-]?[0-9.]+,[0-9]"
_NUMBERS = re.compile(r"(U?(TINY|SMALL|BIG|HUGE)INT|U?INTEGER|FLOAT|DOUBLE|BOOLEAN|DECIMAL\(.*\))")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name in the file and the one it gets in the view, DuckDB's name of its type,
    and what it holds.

    ``values`` are those that are not null, ``letters`` the mean length of a text, ``longest`` the
    greatest, ``mean`` and ``spread`` (the standard deviation) those of finite numbers, ``odd`` how
    many are not finite; ``written`` are texts with something else than spaces, ``numeric`` and
    ``commas`` those of them that are numbers, with a decimal point or a comma; ``items`` and
    ``shortest`` are the lengths of the longest and the shortest list; ``late`` says which value
    made its type a wider one, where one did.
    """

    name: str
    alias: str
    type: str
    values: int
    written: int = 0
    letters: float = 0.0
    longest: int = 0
    mean: float = 0.0
    spread: float = 0.0
    odd: int = 0
    numeric: int = 0
    commas: int = 0
    items: int = 0
    shortest: int = 0
    late: str = ""

    @property
    def is_text(self) -> bool:
        """Whether there is text in it."""
        return self.type == "VARCHAR" and self.written > 0

    @property
    def is_number(self) -> bool:
        """Whether there are numbers in it."""
        return _NUMBERS.fullmatch(self.type) is not None and self.values > 0

    @property
    def is_empty_somewhere(self) -> bool:
        """Whether a text in it is empty, or spaces."""
        return self.type == "VARCHAR" and self.written < self.values

    @property
    def finite_sql(self) -> str:
        """SQL of its value; a number that is not finite is null."""
        column = quoted(self.name)
        return f"CASE WHEN isfinite({column}) THEN {column} END" if self.odd else column

    @property
    def number_sql(self) -> str:
        """SQL of its value as a number, true is 1; one that is not finite is null."""
        return f"{quoted(self.name)}::TINYINT" if self.type == "BOOLEAN" else self.finite_sql

    @property
    def may_be_key(self) -> bool:
        """Whether its type and length are those of a key."""
        return self.values > 0 and (
            self.type in _INTEGERS or (self.type in _TEXTS and self.longest <= LONGEST_KEY)
        )

    @property
    def is_called_key(self) -> bool:
        """Whether its name says that it is one."""
        return _KEY_NAME.match(self.name) is not None


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that was looked at. ``read`` is the SQL that reads it from the project's folder;
    ``unusable`` says of other columns why they are not among ``columns``."""

    path: Path
    read: str
    rows: int
    columns: tuple[Column, ...]
    unusable: dict[str, str]
    _from: str

    def column(self, name: str) -> Column:
        """The column of a name, as in the file or as in the view.

        Raises:
            ConfigError: there is none.
        """
        for column in self.columns:
            if name in (column.name, column.alias):
                return column
        names = [column.name for column in self.columns]
        raise ConfigError(
            f"{self.path.name} has no column {name!r}{did_you_mean(name, names)} (it has:"
            f" {', '.join(names)})"
        )

    def absolute(self, sql: str) -> str:
        """SQL over the file, for a project whose folder is not there yet."""
        return sql.replace(self.read, self._from)

    def distinct(self, columns: Sequence[Column]) -> int:
        """How many values some columns have together, rows with a null among them not counted."""
        names = ", ".join(quoted(column.name) for column in columns)
        there = " AND ".join(f"{quoted(column.name)} IS NOT NULL" for column in columns)
        with closing(Database(1024, 2)) as database:
            return database.number(
                f"SELECT count(*) FROM (SELECT DISTINCT {names} FROM {self._from} WHERE {there})"
            )

    def example(self, columns: Sequence[Column]) -> str:
        """The key of one row, as a lookup names it."""
        texts = ", ".join(f"CAST({quoted(column.name)} AS VARCHAR)" for column in columns)
        there = " AND ".join(f"{quoted(column.name)} IS NOT NULL" for column in columns)
        with closing(Database(1024, 2)) as database:
            found = (
                database.query(f"SELECT [{texts}] FROM {self._from} WHERE {there} LIMIT 1")
                .column(0)
                .to_pylist()
            )
        return join_key(found[0], [column.alias for column in columns]) if found else ""

    def doubled(self, columns: Sequence[Column]) -> tuple[list[str], list[str]] | None:
        """Two rows, their values as texts in the order of :attr:`columns`, that have one key and
        differ; None where no two do."""
        key = ", ".join(quoted(column.name) for column in columns)
        there = " AND ".join(f"{quoted(column.name)} {is_key(column)}" for column in columns)
        texts = ", ".join(f"CAST({quoted(column.name)} AS VARCHAR)" for column in self.columns)
        with closing(Database(1024, 2)) as database:
            found = database.query(
                f"SELECT min(v) AS a, max(v) AS b FROM (SELECT {key}, [{texts}] AS v FROM"
                f" {self._from} WHERE {there}) GROUP BY {key} HAVING min(v) <> max(v) ORDER BY"
                f" {key} LIMIT 1"
            ).to_pylist()
        return (found[0]["a"], found[0]["b"]) if found else None

    def key(self) -> Column | None:
        """The column that is most likely the key of a row: one that is called so, or else the first
        whose values are all different; None without any. One that is called so and comes twice now
        and then is still it."""
        called = {c: self.distinct([c]) for c in self.columns if c.may_be_key and c.is_called_key}
        best = max(called, key=lambda c: called[c], default=None)
        if best is not None and called[best] >= MOSTLY_DIFFERENT * self.rows:
            return next(column for column in called if called[column] == called[best])
        others = (
            column
            for column in self.columns
            if column.may_be_key and column not in called and column.values == self.rows
        )
        return next((column for column in others if self.distinct([column]) == self.rows), best)

    def pair(self) -> tuple[Column, Column] | None:
        """The two columns that are most likely the key of a pair; None without two that are called
        so and come more than once."""
        called = [column for column in self.columns if column.may_be_key and column.is_called_key]
        repeated = [column for column in called if self.distinct([column]) < self.rows]
        return (repeated[0], repeated[1]) if len(repeated) > 1 else None


def look_at(path: Path, project: Path) -> DataFile:
    """Look at all of a file's rows.

    Args:
        project: the folder that relative names in its SQL will start from.

    Raises:
        ConfigError: it is not there, of another kind, has no rows, or cannot be read; or its name
            cannot stand in SQL.
    """
    suffix = _checked(path)
    name = name_from(path, project)
    # DuckDB would take a folder like day=1 for a column
    options: dict[str, Any] = {"hive_partitioning": False} if "=" in str(path.absolute()) else {}
    if suffix != ".parquet":
        options = {"header": True, "skip": 0} | options
    call = ReaderCall(READERS[suffix], (str(path.absolute()),), options)
    try:
        found = _looked(path, name, call)
        if suffix == ".parquet":
            return found
        if len(found.columns) == 1 and (line := ragged(str(path), {})):
            raise ConfigError(line)
        if any(0 < column.commas == column.written for column in found.columns):
            commas = ReaderCall(call.name, call.files, options | {"decimal_separator": ","})
            other = _looked(path, name, commas)
            # where some columns have points, the comma is the others' and theirs would be texts
            if {c.name for c in found.columns if c.is_number} < {
                c.name for c in other.columns if c.is_number
            }:
                return other
        return found
    except (SourceError, ConfigError) as exc:
        if "utf-8" in str(exc).lower():
            number = line_of_no_utf_8(str(path)) if suffix != ".parquet" else None
            place = f"{path}, line {number}" if number else str(path)
            raise ConfigError(
                f"{place}: is not UTF-8: convert it, as in iconv -f latin1 -t utf-8 FILE > NEW"
            ) from exc
        line = "" if suffix == ".parquet" else ragged(str(path), {})
        raise ConfigError(f"{path}: {line or exc}") from exc


def _looked(path: Path, name: str, call: ReaderCall) -> DataFile:
    with closing(Database(1024, 2)) as database:
        absolute, seen = call.sql(), None
        if call.format == CSV:
            # those of all lines, which the view's file then says
            seen = CsvTypes(database, call, None)
            named = {"types": {n: k for n, k in seen.types.items() if _is_usable(n)}}
            call = ReaderCall(call.name, call.files, {**call.options, **named})
            # as a run reads it: a quote that comes late is one, too
            absolute = seen.sql()
        read = call.over((name,))
        types, _ = database.described(f"SELECT * FROM {absolute}")
        usable = {name: kind for name, kind in types.items() if _is_usable(name)}
        unusable = {
            repr(name): "its name cannot stand in SQL here" for name in types if name not in usable
        }
        sums = ", ".join(_sums(name, kind) for name, kind in usable.items())
        found = database.query(
            f"SELECT {{'rows': count(*)}}{', ' if sums else ''}{sums} FROM {absolute}"
        ).to_pylist()[0]
        of_all, *figures = found.values()
        late = {} if seen is None else _late(seen, path, dict(zip(usable, figures, strict=True)))
    if of_all["rows"] == 0:
        raise ConfigError(
            "has no rows: there is nothing to look at; give a file with one row at least"
        )
    columns = []
    for (name, kind), alias, of in zip(usable.items(), aliases(usable), figures, strict=True):
        known = {
            key: value for key, value in of.items() if value is not None and math.isfinite(value)
        }
        column = Column(name, alias, kind, late=late.get(name, ""), **known)
        if column.values == 0 or (kind == "VARCHAR" and column.written == 0):
            unusable[name] = (
                "nothing but nulls" if column.values == 0 else "nothing but empty texts"
            )
        else:
            columns.append(column)
    if not columns:
        raise ConfigError("no column has a value: there is nothing to compute from")
    return DataFile(path, read, of_all["rows"], tuple(columns), unusable, absolute)


def _late(seen: CsvTypes, path: Path, figures: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Column → which value made its type a wider one, of those whose first lines have another, and
    of texts most of which are numbers."""
    numbers = {
        n for n, of in figures.items() if 2 * (of.get("numeric") or 0) > (of.get("written") or 0)
    }
    names = sorted((seen.widened() | numbers) & figures.keys())
    found = {name: seen.late_value(name) for name in names}
    return {
        name: why.replace(str(path.absolute()), path.name).replace(
            # the view's file then says the types
            ": mend it",
            ": mend it and run init again",
        )
        for name, why in found.items()
        if why
    }


def is_key(column: Column) -> str:
    """SQL, after a column's name: whether a row has a key there."""
    return "<> ''" if column.type == "VARCHAR" else "IS NOT NULL"


def _is_usable(name: str) -> bool:
    return name.isprintable() and "${" not in name and bool(name.strip())


def _sums(name: str, kind: str) -> str:
    """SQL of what is counted of one column: a struct with names of :class:`Column`."""
    column, of = quoted(name), {"values": f"count({quoted(name)})"}
    if kind in _TEXTS:
        text = f"CAST({column} AS VARCHAR)"
        of |= {
            "written": f"count(*) FILTER (trim({text}) <> '')",
            "letters": f"avg(length({text}))",
            "longest": f"max(strlen({text}))",
            "numeric": f"count(TRY_CAST(trim({text}) AS DOUBLE))",
            # 1,234 alone may be a thousand
            "commas": (
                f"count(*) FILTER (regexp_full_match(trim({text}), '{_COMMA}+')) * "
                f"coalesce(bool_or(regexp_full_match(trim({text}), '{_COMMA}{{1,2}}'))::INTEGER, 0)"
            ),
        }
    elif _NUMBERS.fullmatch(kind):
        number = f"CAST({column} AS DOUBLE)"
        of |= {
            k: f"{f}({number}) FILTER (isfinite({number}))"
            for k, f in (("mean", "avg"), ("spread", "stddev_pop"))
        }
        of["odd"] = f"count(*) FILTER (NOT isfinite({number}))"
    elif kind.endswith("[]"):
        of |= {"items": f"max(len({column}))", "shortest": f"min(len({column}))"}
    return "{" + ", ".join(f"'{key}': {sql}" for key, sql in of.items()) + "}"


def aliases(names: Iterable[str]) -> Iterator[str]:
    """A name for each column that a view may use: lower-case letters, digits and _; no two alike,
    and none that answers have themselves."""
    taken = {
        *RESERVED,
        *SOURCE_RESERVED,
        "text",
        "embedding",
        "score",
        "seen",
        "related",
        "scores",
        *YAML_WORDS,
    }
    for number, name in enumerate(names, 1):
        slug = slug_of(name) or f"column_{number}"
        further = (f"{slug}_{n}" for n in count(2))
        alias = next(a for a in chain((slug, f"own_{slug}"), further) if a not in taken)
        taken.add(alias)
        yield alias


def slug_of(text: str) -> str:
    """Lower-case letters, digits and _ in place of any other, starting with a letter; empty where
    there is no letter of the Latin alphabet."""
    plain = (
        unicodedata.normalize("NFKD", text.replace("ß", "ss")).encode("ascii", "ignore").decode()
    )
    # CamelCase has words, too
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain)
    return (
        re.sub(r"^[^a-z]+", "", re.sub(r"[^a-z0-9]+", "_", plain.lower()))
        .strip("_")[:40]
        .strip("_")
    )


def _checked(path: Path) -> str:
    """How the file's name ends.

    Raises:
        ConfigError: it is not there, or its name is none that DuckDB takes for a data file of one
            of :data:`READERS`.
    """
    suffix = next(
        (
            suffix
            for suffix in sorted(READERS, key=len, reverse=True)
            if path.name.lower().endswith(suffix)
        ),
        None,
    )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"{path}: {what}{did_you_mean(path.name, beside)}; give a file: {', '.join(READERS)}"
        )
    if suffix is None:
        raise ConfigError(
            f"{path}: its name ends with none of {', '.join(READERS)}: rename or convert it"
        )
    if path.stat().st_size == 0:
        raise ConfigError(
            f"{path}: is empty: there is nothing to look at; give a file with a head line and one"
            " row at least"
        )
    return suffix


def near(path: Path, project: Path) -> str:
    """A path from the project's folder: relative where both lie near each other, so that they can
    be moved together."""
    relative = os.path.relpath(path.absolute(), project.absolute())
    return str(path.absolute()) if relative.startswith("../../..") else relative


def name_from(path: Path, project: Path) -> str:
    """The file's name as the SQL has it.

    Raises:
        ConfigError: it has a character that means something else in SQL or in a view's file.
    """
    absolute, name = path.absolute(), near(path, project)
    found = re.search(
        r"[*?\[\\]|\$\{", str(absolute) if os.path.isabs(name) else name
    ) or re.search(r"[*?\[\\]", str(absolute))
    if found is not None or not str(absolute).isprintable():
        what = repr(found[0]) if found is not None else "a character that cannot be printed"
        raise ConfigError(
            f"{path}: its name has {what}, which is no plain name to DuckDB: rename it, or copy it"
            " elsewhere"
        )
    return name


def number_text(value: Any) -> str:
    """A number as YAML and SQL read it, with some four digits."""
    text = f"{float(value):.4g}"
    return repr(float(text)) if "e" in text else text
