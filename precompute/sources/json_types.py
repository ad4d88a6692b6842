"""JSON types: the type of each column by all values of all JSON files, none of which a cast may
change. DuckDB types JSON by its first lines and its first files; here by all, and what its types
still would change (an integer beside a fraction, a UUID's letters) is text, or an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from precompute.sources.csv_types import SMALL, exact_sql, given_sql
from precompute.sources.database import Database, quoted, type_of
from precompute.sources.late_value import Reading, narrower, near_type, shown
from precompute.sources.reader_call import OF_ROWS, ReaderCall, is_named
from precompute.sources.text_lines import lines_of
from precompute.store.errors import ConfigError, SourceError

_ALL = 2**31 - 1
_OF_TYPES = (
    *("columns", "sample_size", "maximum_sample_files", "union_by_name", "schema"),
    *("field_appearance_threshold", "map_inference_threshold", "maximum_depth"),
    "convert_strings_to_integers",
)
_TIMES: tuple[str, ...] = ("DATE", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE", "TIMESTAMP_NS")
_UNPROVEN: tuple[str, ...] = ("DOUBLE", "UUID", *_TIMES)
"""Types that DuckDB gives values, all of which it saw, that it would yet change."""

_SAMPLED = frozenset({"BIGINT", "BOOLEAN", "VARCHAR", *_UNPROVEN})
"""Types that are those of all records where they fit all."""

_NARROWER = ("BOOLEAN", "BIGINT", "DOUBLE", *_TIMES[:4], "VARCHAR")
"""Types that a column may have but for a few of its values, the narrowest first."""

_INTEGER = re.compile(r"(U?(TINY|SMALL|BIG|HUGE)INT|U?INTEGER)")
DIGITS = 17
"""Digits of a number with a fraction, at most: a double that is written with these is the same
again. Of more, each is compared."""

_LONG_NUMBERS = (
    f"[1-9][0-9.]{{{DIGITS + 1}}}",
    "[^0-9.][1-9][0-9]{15}",
    "|".join(f"[0-9]{{{n},}}[.][0-9]{{{16 - n},}}" for n in range(7, 16)),
)
"""Text of numbers, or of what may be one in a string, of more digits than a double may have: as one
pattern they take six times as long."""


class JsonTypes:
    """The columns of the JSON files of a call, each of a type that all of its values have.

    Args:
        names: the columns that the SQL may read, lower case; None for all.

    Raises:
        ConfigError: an option of the call drops what does not fit.
        SourceError: a value does not fit the type that the call gives, or any that JSON's have.
    """

    def __init__(self, database: Database, call: ReaderCall, names: frozenset[str] | None) -> None:
        self._database, self._call, self._names = database, call, names
        if call.options.get("ignore_errors"):
            raise ConfigError(
                f"{call.files[0]}: ignore_errors drops what does not fit, and says nothing: mend"
                " the file, or read it by read_json_objects and choose in the SQL"
            )
        self._given = call.options.get("columns")
        self.types: dict[str, str] = {}
        if call.files_of(database) and not self._fit_sampled():
            self.types = self._described()
            self._prove(settled=False)

    def mixed(self) -> set[str]:
        """Columns of texts and numbers, or of objects, whose text is JSON's."""
        return set() if self._given else {n for n, k in self.types.items() if k == "JSON"}

    def first_text(self, column: str) -> str | None:
        """Of a column of JSON in which texts stand among other values, so that a text has its
        quotes: the first one, with file and line or record, and what to write; None where there is
        none, or the call gives the type. Reads all values again.

        Raises:
            SourceError: a file cannot be read.
        """
        name = next((n for n in self.types if n.lower() == column.lower()), None)
        if name is None or self._given or "JSON" not in self.types[name]:
            return None
        kind, value = self.types[name], quoted(name)
        alone = kind == "JSON"
        # of one inside of lists and objects its column's first value is shown
        found = self._first_misfit(name, f"json_type({value}) <> 'VARCHAR'" if alone else "false")
        if found is None:
            return None
        file, record, raw = found
        remedy = (
            f"write {value}->>'$' AS {value} in the SQL for texts without quotes, or"
            f" {value}::VARCHAR AS {value} for their JSON"
            if alone
            else f"mend it, or write columns = {{…, '{name}': 'JSON'}} in its {self._call.name}"
        )
        return (
            f"{file}, {self._place(file, record)}: {name} is {shown(raw)}, and the whole column"
            f" {kind}, since its values are of several types, so that a text would have its quotes:"
            f" {remedy}"
        )

    def sql(self) -> str:
        """The call, with the types."""
        if not self.types or self._given:
            return self._call.sql()
        return self._call.sql(_OF_TYPES, columns=self.types)

    def prove(self, files: list[str]) -> None:
        """Hold all values against the types once more.

        Raises:
            SourceError: one does not fit, or there is a column that was not there.
        """
        if not files or self._fit_sampled():
            return
        if not self._given:
            new = [n for n in self._described() if n not in self.types]
            if new and self._names is None:
                raise SourceError(
                    f"{files[0]}: there is a column {new[0]!r} now, which was not there when the"
                    " source was opened: run again"
                )
        self._prove(settled=True)

    def late_value(self, column: str, wanted: str = "") -> str | None:
        """Why a column has a wider type than most of its values, or than its first ones: the first
        value that is of another, file and line or record, and what to write; None where no value is
        why, or the call gives the type. Reads all values again.

        Args:
            wanted: the type that the column is wanted to have, such as BIGINT; empty for the one
                that most values have.

        Raises:
            SourceError: a file cannot be read.
        """
        name = next((n for n in self.types if n.lower() == column.lower()), None)
        if name is None or self._given:
            return None
        kind, value = self.types[name], quoted(name)
        text = f"{value}->>'$'"
        readings = {
            one: Reading(
                self._fits(name, one, sampled=True),
                f"({text})" if one == "VARCHAR" else f"TRY_CAST({text} AS {one})",
            )
            for one in narrower(kind, _NARROWER)
        }
        sampled = self._call.sql(OF_ROWS, hive_partitioning=False)
        first = self._database.described(f"SELECT * FROM {sampled}")[0].get(name, "")
        there = f"{value}::VARCHAR <> 'null'"
        near = near_type(
            self._database, self._as_json([name]), there, readings, first, wanted, kind
        )
        found = None if near is None else self._first_misfit(name, readings[near.type].fits)
        if near is None or found is None:
            return None
        if kind == "VARCHAR":
            # where the SQL reads it, it is no JSON
            near = replace(near, cast=near.cast.replace(text, value))
        file, record, raw = found
        return near.error(f"{file}, {self._place(file, record)}", name, raw, kind)

    def _fit_sampled(self) -> bool:
        """Whether all records fit the types of the first ones, which are those of all then, and
        which DuckDB tells in a tenth of the time. Of what holds others, and of columns without a
        value among the first records, all are looked at."""
        if self._given or self._call.options.keys() & set(_OF_TYPES):
            return False
        sampled = self._call.sql(OF_ROWS, hive_partitioning=False)
        types = self._database.described(f"SELECT * FROM {sampled}")[0]
        wanted = {n: k for n, k in types.items() if is_named(n, self._names)}
        if (self.types and types != self.types) or not set(wanted.values()) <= _SAMPLED:
            return False
        counts = ", ".join(
            f"count(*) FILTER ({quoted(n)}::VARCHAR <> 'null') - count(*) FILTER"
            f" ({self._fits(n, k, sampled=True)}){_two_forms(n, k)} AS {quoted(n)}"
            for n, k in wanted.items()
        )
        # by names, and each a text as it stands; a name that is not among them is an error
        read = self._call.sql(OF_ROWS, maximum_depth=1, hive_partitioning=False)
        texts = ", ".join(f"{quoted(n)}::VARCHAR AS {quoted(n)}" for n in wanted)
        read = f"(SELECT {texts or '*'} FROM {read})"
        try:
            found = self._database.query(f"SELECT {counts or 'count(*) AS n'} FROM {read}")
        except SourceError:
            return False
        if wanted and any(found.to_pylist()[0].values()):
            return False
        self.types = types
        self._check_long()
        return True

    def _described(self) -> dict[str, str]:
        if self._given:
            nulls = ", ".join(f"NULL::{k} AS {quoted(n)}" for n, k in self._given.items())
            return self._database.described(f"SELECT {nulls}")[0]
        read = self._call.sql(
            OF_ROWS, sample_size=-1, maximum_sample_files=_ALL, hive_partitioning=False
        )
        found = self._database.described(f"SELECT * FROM {read}")[0]
        # inside of others a time or an id stays the text that it is
        texts = (*_TIMES, "UUID")
        return {
            n: k if k in texts else _as_text(type_of(k), texts.__contains__)
            for n, k in found.items()
        }

    def _as_json(self, names: Iterable[str], **options: Any) -> str:
        columns = dict.fromkeys(names, "JSON")
        return self._call.sql(
            (*OF_ROWS, *_OF_TYPES), columns=columns, hive_partitioning=False, **options
        )

    def _prove(self, settled: bool) -> None:
        """Hold all values against the types; what was not given becomes text where that is all
        that it can be, unless ``settled``."""
        checks = {
            n: self._fits(n, k)
            for n, k in self.types.items()
            if is_named(n, self._names) and (settled or self._given or k in _UNPROVEN)
        }
        checks = {n: fits for n, fits in checks.items() if fits}
        if checks:
            counts = ", ".join(
                f"count(*) FILTER ({quoted(n)} IS NOT NULL AND {quoted(n)}::VARCHAR <> 'null' AND"
                f" {fits} IS NOT TRUE){_two_forms(n, self.types[n])} AS {quoted(n)}"
                for n, fits in checks.items()
            )
            found = self._database.query(
                f"SELECT {counts} FROM {self._as_json(checks)}"
            ).to_pylist()[0]
            for name, count in found.items():
                text = self.types[name] in (*_TIMES, "UUID") and not self._given
                if count and text and not settled:
                    self.types[name] = "VARCHAR"
                elif count:
                    raise self._error(name, checks[name], count)
        self._check_long()

    def _fits(self, column: str, kind: str, sampled: bool = False) -> str:
        """SQL, true where the JSON of a column is a value of the type; empty where it always is,
        unless the type is of some records alone."""
        raw, text = f"{quoted(column)}::VARCHAR", f"({quoted(column)}->>'$')"
        is_text = f"starts_with({raw}, '\"')"
        if sampled and kind == "VARCHAR":
            return is_text
        if kind in ("VARCHAR", "JSON"):
            return ""
        if _INTEGER.fullmatch(kind):
            return f"(TRY_CAST({raw} AS {kind})::VARCHAR = {raw})"
        if kind in ("DOUBLE", "FLOAT"):
            value = f"TRY_CAST({raw} AS {kind})"
            whole = f"TRY_CAST({raw} AS HUGEINT) = TRY_CAST({value} AS HUGEINT)"
            return (
                f"CASE WHEN {is_text} OR isfinite({value}) IS NOT TRUE THEN false WHEN"
                f" strlen({raw}) <= 15 THEN true WHEN regexp_matches({raw}, '[.eE]') THEN true ELSE"
                f" {whole} END"
            )
        if kind == "BOOLEAN":
            return f"({raw} IN ('true', 'false'))"
        if kind in _TIMES or kind == "UUID":
            if self._given:
                return f"({is_text} AND {given_sql(text, kind, self._call.options)})"
            if self._call.options.keys() & {"dateformat", "timestampformat"}:
                return f"({is_text} AND {given_sql(text, kind, self._call.options)})"
            own = "TIMESTAMPTZ" if "ZONE" in kind else kind
            # in none of these is anything escaped
            inside = f"substr({raw}, 2, strlen({raw}) - 2)"
            fits = f"{is_text} AND {exact_sql(inside, own)}"
            # of dates beside times DuckDB makes timestamps or texts, as its threads meet them
            return f"({fits} AND strlen({raw}) > 12)" if kind == "TIMESTAMP" else f"({fits})"
        if "(" in kind or "[" in kind:
            if kind.startswith("DECIMAL("):
                return given_sql(raw, kind, {})
            # their numbers are looked at in _check_long, and what a cast of them would change here
            if not self._given:
                return ""
            # whole numbers as they are written, beside what becomes of them
            as_written = _as_text(type_of(kind), _INTEGER.fullmatch)
            value = f"TRY_CAST({quoted(column)} AS {kind})"
            return f"({value}::{as_written} = TRY_CAST({quoted(column)} AS {as_written}))"
        return f"({given_sql(text, kind, {})})"

    def _check_long(self) -> None:
        """No number has more digits than its double.

        Raises:
            SourceError: one has.
        """
        named = {n: k for n, k in self.types.items() if is_named(n, self._names)}
        floats = {n: k for n, k in named.items() if "DOUBLE" in k or "FLOAT" in k}
        if not floats:
            return
        objects = {"read_json": "read_json_objects", "read_json_auto": "read_json_objects_auto"}
        name = objects.get(self._call.name, "read_ndjson_objects")
        kept = {k: v for k, v in self._call.options.items() if k in _OF_OBJECTS}
        read = ReaderCall(name, self._call.files, kept).sql(hive_partitioning=False, filename=True)
        long = " ".join(f"WHEN regexp_matches(json, '{one}') THEN true" for one in _LONG_NUMBERS)
        # a fraction that DuckDB writes as it stands is a double's own; whole numbers that are a
        # column's are held against theirs already
        own = "WHEN replace(json(json)::VARCHAR, ' ', '') = replace(json, ' ', '') THEN false"
        own = own if set(floats.values()) <= {"DOUBLE", "FLOAT"} else ""
        rows = self._database.stream(
            f"SELECT filename, json FROM (SELECT filename, json::VARCHAR AS json FROM {read}) WHERE"
            f" CASE {own} {long} ELSE false END",
            1024,
        )
        for batch in rows:
            for row in batch.to_pylist():
                record = json.loads(row["json"], parse_float=_Text, parse_int=_Text)
                for column, kind in floats.items():
                    if isinstance(record, dict) and column in record:
                        for number in _changed(record[column], type_of(kind)):
                            raise SourceError(
                                f"{row['filename']}: {column} has the number {number}, and a"
                                f" {kind} would change it: write it as a text in the file"
                            )

    def _error(self, name: str, fits: str, count: int) -> SourceError:
        found = self._first_misfit(name, fits)
        if found is None:
            return SourceError(f"{self._call.files[0]} changed while it was read: run again")
        file, record, value = found
        kind = self.types[name]
        others = f" ({count:,} such values)" if count > 1 else ""
        whose = "the type that its call gives" if self._given else "the type of all its values"
        remedy = (
            f"write columns = {{…, '{name}': 'VARCHAR'}} in its {self._call.name}, or 'JSON'"
            if self._given
            else "write whole numbers of more than 15 digits as texts in the file, or read it with"
            f" columns = {{…, '{name}': 'JSON'}}"
        )
        return SourceError(
            f"{file}, {self._place(file, record)}: {name} is {shown(value)}, and {whose} is {kind},"
            f" which would change it{others}: {remedy}"
        )

    def _first_misfit(self, name: str, fits: str) -> tuple[str, int, str] | None:
        """The first value of a column of which ``fits``, SQL, is not true: its file, the number of
        its record in that, from 1, and its JSON; None where there is none."""
        column, read = quoted(name), self._as_json([name], filename="precompute_file")
        found = self._database.query_aside(
            f"SELECT f, v, n FROM (SELECT precompute_file AS f, {column}::VARCHAR AS v,"
            f" row_number() OVER () AS n, {fits} AS fits FROM {read}) WHERE v IS NOT NULL AND"
            " v <> 'null' AND fits IS NOT TRUE ORDER BY n LIMIT 1"
        ).to_pylist()
        if not found:
            return None
        file = found[0]["f"]
        before = self._database.query_aside(
            "SELECT count(*) AS n FROM (SELECT precompute_file AS f, row_number() OVER () AS n"
            f" FROM {read}) WHERE f = $file AND n <= $n",
            {"file": file, "n": found[0]["n"]},
        ).to_pylist()[0]["n"]
        return file, before, found[0]["v"]

    def _place(self, file: str, record: int) -> str:
        """Where a record stands: its line, where each line before it is a record, or empty; else
        its number."""
        lines = lines_of(file, self._call.options)
        count = 0
        for number, line in enumerate(lines or (), 1):
            if line.strip():
                try:
                    json.loads(line)
                except ValueError:
                    break
                count += 1
                if count == record:
                    return f"line {number}"
        return f"record {record}"


_OF_OBJECTS = ("format", "compression", "maximum_object_size")


def _two_forms(column: str, kind: str) -> str:
    """SQL that adds one where timestamps have two forms (a T or a space, with or without digits of
    a second): of both DuckDB makes timestamps or texts, as its threads meet them."""
    if kind != "TIMESTAMP":
        return ""
    raw = f"{quoted(column)}::VARCHAR"
    form = f"CASE WHEN {raw} <> 'null' THEN substr({raw}, 12, 1) || strlen({raw}) END"
    return f" + coalesce((min({form}) <> max({form}))::BIGINT, 0)"


class _Text(str):
    """A number as it is written."""


def _children(kind: Any) -> Mapping[str, Any]:
    return dict(kind.children) if kind.id in ("struct", "list", "map", "array") else {}


def _as_text(kind: Any, wanted: Callable[[str], object]) -> str:
    """A type with text in place of those inside that are ``wanted``, by their names."""
    inner = {n: _as_text(k, wanted) for n, k in _children(kind).items()}
    if kind.id == "struct":
        return f"STRUCT({', '.join(f'{quoted(n)} {k}' for n, k in inner.items())})"
    if kind.id == "list":
        return f"{inner['child']}[]"
    if kind.id == "map":
        return f"MAP({inner['key']}, {inner['value']})"
    return "VARCHAR" if wanted(str(kind)) else str(kind)


def _changed(value: Any, kind: Any) -> Iterator[str]:
    """The numbers of a value, as written, that its type would change."""
    children = _children(kind)
    if isinstance(value, dict):
        for name, inner in value.items():
            if (of := children.get(name, children.get("value"))) is not None:
                yield from _changed(inner, of)
    elif isinstance(value, list):
        for inner in value:
            yield from _changed(inner, children.get("child", kind))
    elif isinstance(value, _Text) and str(kind) in ("DOUBLE", "FLOAT"):
        digits = re.sub(r"[eE].*|[-.]", "", value).lstrip("0")
        whole = value.lstrip("-").isdigit()
        if (whole and int(float(value)) != int(value)) or (
            not whole
            and len(digits) > (15 if abs(float(value)) >= SMALL else DIGITS)
            and f"{Decimal(float(value)):.{len(digits) - 1}e}"
            != f"{Decimal(value):.{len(digits) - 1}e}"
        ):
            yield value
