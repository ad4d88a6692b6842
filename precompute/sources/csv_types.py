"""CSV types: the type of each column by all values of all files, none of which a cast may change;
and where a value stands that does not fit.

DuckDB itself types a CSV by its first lines, and casts what comes later: 19.99 to 20, ``0025002``
to 25002. Here all values are read once as text, by all threads, and each is held against the
sampled type; ``sample_size = -1`` would read them in one thread, at several times the cost.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from precompute.sources.database import Database, quoted
from precompute.sources.file_names import escaped
from precompute.sources.late_value import Reading, narrower, near_type, shown
from precompute.sources.reader_call import OF_ROWS, ReaderCall, is_named, literal
from precompute.sources.text_lines import lines_of
from precompute.store.errors import ConfigError, SourceError

CANDIDATES = ("BOOLEAN", "BIGINT", "DOUBLE", "TIME", "DATE", "TIMESTAMP", "TIMESTAMPTZ")
"""Types of a column that the SQL gives none, the narrowest first; all others are text."""

SMALL = 1_000_000
"""Below it, a number of 16 or 17 digits differs from its double in the 11th digit behind the point
or later."""

SAMPLED = 20_480
"""Lines that DuckDB types a file by."""

_OF_TYPES = ("types", "columns", "auto_type_candidates", "sample_size", "all_varchar")
_OF_MANY = ("union_by_name", "files_to_sniff", "names")

_LOSING = {
    "ignore_errors": "drops the lines that do not fit",
    "store_rejects": "drops the lines that do not fit",
    "rejects_table": "drops the lines that do not fit",
    "rejects_scan": "drops the lines that do not fit",
}

_NUMBER = "-?(0|[1-9][0-9]*)?([.][0-9]*)?([eE][+-]?[0-9]+)?"
_ZERO = "-?[0.]+([eE].*)?"
_CLOCK = "[0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?"
_DAY = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_ANY_DAY = "[0-9]+[-/][0-9]+[-/][0-9]+"
_ZONE = " ?(Z|[+-][0-9]{2}(:?[0-9]{2})?)"
_INTEGERS = tuple(
    f"{u}{one}" for one in ("TINYINT", "SMALLINT", "BIGINT", "HUGEINT") for u in ("", "U")
)
_INTEGERS += ("INTEGER", "UINTEGER")
_FRACTION = {"TIMESTAMP_S": 0, "TIMESTAMP_MS": 3, "TIMESTAMP_NS": 9}


@dataclass(frozen=True, slots=True)
class Misfit:
    """How many values of a column do not fit its type."""

    column: str
    type: str
    given: bool
    values: int


def exact_sql(text: str, kind: str, value: str = "") -> str:
    """SQL, true where a text is a value of a type as the type itself would have it: no digit, sign,
    space, zone or leading zero is lost. For types of :data:`CANDIDATES`; ``value`` is the text's
    cast to it, where it stands in a column."""
    # a CASE goes on with those rows alone that are not decided, where AND and OR look at all
    value = value or f"TRY_CAST({text} AS {kind})"
    match kind:
        case "BOOLEAN":
            return (
                f"CASE WHEN {text} IN ('true', 'false') THEN true ELSE"
                f" lower({text}) IN ('true', 'false') END"
            )
        case "DOUBLE":
            return exact_double_sql(text, value)
        case "TIMESTAMP" | "TIMESTAMPTZ" | "TIME":
            day = (
                f"{_DAY}[ T]{_CLOCK}{_ZONE}" if kind == "TIMESTAMPTZ" else f"{_DAY}([ T]{_CLOCK})?"
            )
            form = _CLOCK if kind == "TIME" else day
            # what is written as it is shown needs no second look; 24:00 is the next day's
            return (
                f"CASE WHEN {value} IS NULL THEN false WHEN {value}::VARCHAR = {text} THEN {text} <"
                f" ':' ELSE regexp_full_match({text}, '{form}') AND NOT contains({text}, '24:00')"
                " END"
            )
        case _:
            # 'infinity' is a date
            return f"({value}::VARCHAR = {text} AND {text} < ':')"


def exact_double_sql(text: str, value: str) -> str:
    """:func:`exact_sql` of DOUBLE: written with as many digits as the text has, the number is the
    text again. Of up to 15 digits each is; of up to 17 a number below a million is a double's own,
    as ``repr`` writes it, which takes as long to see as to read several others."""
    own = f"strlen({text}) <= 18 + ({value} < 0)::INTEGER + (abs({value}) < 1)::INTEGER"
    own += f" AND abs({value}) < {SMALL}"
    digits = f"ltrim(regexp_replace({text}, '[eE].*$|[-.]', '', 'g'), '0')"
    written = f"format('{{:.' || greatest(length({digits}) - 1, 0) || 'e}}', abs({value}))"
    written = f"replace(split_part({written}, 'e', 1), '.', '')"
    # what the cast took has a number's form, but for spaces, underscores and how it begins
    begun = (
        f"CASE WHEN {text} >= '1' THEN {text} < ':' WHEN {text} >= '0.' AND {text} < '0/' THEN true"
        f" WHEN {text} >= '-1' AND {text} < '-:' THEN true"
        f" ELSE regexp_full_match({text}, '{_NUMBER}') END"
    )
    return (
        f"CASE WHEN isfinite({value}) IS NOT TRUE THEN lower({text}) = 'nan' WHEN"
        f" contains({text}, '_') OR ({text})[-1] < '.' THEN false WHEN NOT {begun} THEN false"
        f" WHEN {value} = 0 THEN regexp_full_match({text}, '{_ZERO}')"
        f" WHEN strlen({text}) <= 15 THEN true WHEN {own} THEN true WHEN {value}::VARCHAR = {text}"
        f" THEN true WHEN length({digits}) > 40 THEN false ELSE {written} = {digits} END"
    )


def given_sql(text: str, kind: str, options: Mapping[str, Any], value: str = "") -> str:
    """SQL, true where a text has a value of a type that the user gave: ``+7``, ``1e3`` and ``31 ``
    are whole numbers then, 19.99 and ``007`` are none; arguments as of :func:`exact_sql`."""
    value, bare = value or f"TRY_CAST({text} AS {kind})", f"trim({text})"
    number = f"regexp_full_match({bare}, '[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?')"
    whole = f"regexp_full_match({bare}, '[+-]?(0|[1-9][0-9]*)')"
    form = options.get("dateformat" if kind == "DATE" else "timestampformat")
    if kind == "VARCHAR":
        return "true"
    if form and kind in ("DATE", "TIMESTAMP"):
        return f"(try_strptime({text}, '{form.replace(chr(39), chr(39) * 2)}') IS NOT NULL)"
    if kind in _INTEGERS:
        # a zero in front is of a name
        fits = f"{number} AND TRY_CAST({bare} AS DECIMAL(38, 9)) = {value}"
        fits += f" AND NOT regexp_matches({bare}, '^[+-]?0[0-9]')"
        fits = f"WHEN {value}::VARCHAR = {text} THEN true WHEN {whole} THEN true ELSE {fits}"
    elif kind in ("FLOAT", "DOUBLE"):
        same = f"TRY_CAST({bare} AS HUGEINT) = TRY_CAST({value} AS HUGEINT)"
        fits = (
            f"WHEN contains({text}, '_') THEN false WHEN isinf({value}) THEN NOT {number} WHEN"
            f" strlen({text}) > 15 AND {whole} THEN {same} ELSE true"
        )
    elif decimal := re.fullmatch(r"DECIMAL\(\d+, ?(\d+)\)", kind):
        fraction = f"length(rtrim(split_part({bare}, '.', 2), '0'))"
        plain = f"regexp_full_match({bare}, '[+-]?[0-9]*[.]?[0-9]*')"
        fits = f"ELSE {plain} AND {fraction} <= {decimal[1]}"
    elif kind == "DATE":
        fits = f"ELSE regexp_full_match({bare}, '{_ANY_DAY}')"
    elif kind.startswith("TIME"):
        most = _FRACTION.get(kind, 6)
        fits = f"WHEN regexp_matches({text}, '[.][0-9]{{{most}}}[0-9]*[1-9]') THEN false "
        if "ZONE" in kind:
            fits += "ELSE true"
        elif kind == "TIME":
            fits += f"ELSE regexp_full_match({bare}, '[0-9:.]+')"
        else:
            # a zone would be dropped
            fits += f"ELSE regexp_full_match({bare}, '{_ANY_DAY}([ T]+[0-9:.]+)?')"
    elif kind in ("BOOLEAN", "UUID", "BLOB") or kind.startswith("ENUM"):
        fits = "ELSE true"
    else:
        fits = f"ELSE replace({value}::VARCHAR, ' ', '') = replace({text}, ' ', '')"
    return f"CASE WHEN {value} IS NULL THEN false {fits} END"


class CsvTypes:
    """The columns of the CSV files of a call, each of a type that all of its values have.

    Args:
        names: the columns that the SQL may read, lower case; None for all.

    Raises:
        ConfigError: an option of the call drops what does not fit.
        SourceError: a value does not fit the type that the call gives, two files have other
            columns, or a line was cut.
    """

    def __init__(self, database: Database, call: ReaderCall, names: frozenset[str] | None) -> None:
        self._database, self._call, self._names = database, call, names
        for option, what in _LOSING.items():
            if call.options.get(option):
                raise ConfigError(
                    f"{call.files[0]}: {option} {what}, and says nothing: mend them, or read with"
                    " all_varchar = true and choose rows and types in the SQL, by TRY_CAST"
                )
        if call.options.get("strict_mode") is False and not call.options.get("null_padding"):
            raise ConfigError(
                f"{call.files[0]}: strict_mode = false drops values and quotes that do not fit, and"
                " says nothing: mend the file, or give its delim, quote and escape"
            )
        self.files = call.files_of(database)
        self.types: dict[str, str] = {}
        self._pins: dict[str, Any] = {}
        self._proven: dict[str, tuple[str, bool]] = {}
        if self.files:
            self._type()

    def sql(self) -> str:
        """The call, with the types."""
        if "columns" in self._call.options or self._call.options.get("all_varchar"):
            return self._call.sql(**self._pins)
        types = {"types": self.types} if self.types else {}
        return self._call.sql(("types", "auto_type_candidates"), **self._pins, **types)

    def prove(self, files: list[str]) -> None:
        """Hold all values against the types once more, of files that are other ones now.

        Raises:
            SourceError: one does not fit, or a file has other columns.
        """
        self.files = files
        if not files:
            return
        self._check_heads()
        for misfit in self._misfits(self._proven):
            raise self._error(misfit, "the type that it had until now", "")

    def widened(self) -> set[str]:
        """Columns of a wider type than their first lines have."""
        first = {n: k for n, k in self._sniffed.items() if k} if self.files else {}
        return {n for n, k in self.types.items() if first.get(n, k) != k}

    def late_value(self, column: str, wanted: str = "") -> str | None:
        """Why a column has a wider type than most of its values, or than its first ones: the first
        value that is of another, file and line, and what to write; None where no value is why, or
        the call gives a type that is no text. Reads all values again.

        Args:
            wanted: the type that the column is wanted to have, of :data:`CANDIDATES`; empty for the
                one that most values have.

        Raises:
            SourceError: a file cannot be read.
        """
        name = next((n for n in self.types if n.lower() == column.lower()), None)
        if name is None:
            return None
        kind, given = self.types[name], name in self._given([*self.types])
        if given and kind != "VARCHAR":
            return None
        readings = {
            one: Reading(self._fits(name, one, False), self._cast(name, one))
            for one in narrower(kind, self._candidates)
        }
        first, there = self._sniffed.get(name, ""), f"{quoted(name)} IS NOT NULL"
        near = near_type(self._database, self._as_text(), there, readings, first, wanted, kind)
        found = None if near is None else self._first_misfit(name, near.type, False)
        if near is None or found is None:
            return None
        file, row, value = found
        place = f"{file}, {self._line(file, row, value)}"
        return near.error(place, name, value, kind, given)

    def _type(self) -> None:
        options = self._call.options
        self._sniff()
        self._check_heads()
        text = self._as_text()
        names = list(self._database.described(f"SELECT * FROM {text}")[0])
        given = self._given(names)
        wanted = [name for name in names if is_named(name, self._names)]
        if options.get("all_varchar"):
            return
        empty = self._empty([n for n in wanted if n not in given])
        guesses = {
            n: "" if n in empty else self._sniffed.get(n, "") for n in wanted if n not in given
        }
        types = {n: (k, True) for n, k in given.items() if n in wanted}
        types |= {n: (k, False) for n, k in guesses.items() if k and k != "VARCHAR"}
        misfits = self._misfits(types)
        for misfit in misfits:
            if misfit.column in given:
                narrow = self._narrowest([misfit.column])[misfit.column]
                raise self._error(misfit, "the type that its call gives", narrow)
        again = [m.column for m in misfits] + [n for n, k in guesses.items() if not k]
        self.types = dict.fromkeys(names, "VARCHAR") | given
        self.types |= {n: k or "VARCHAR" for n, k in guesses.items()} | self._narrowest(again)
        self._proven = {
            n: (k, n in given) for n, k in self.types.items() if n in wanted and k != "VARCHAR"
        }

    def _sniff(self) -> None:
        """The dialect of the first file and the types of its first lines."""
        options, first = self._call.options, self.files[0]
        sniffing = self._call.over(
            (escaped(first),),
            (*OF_ROWS, *_OF_TYPES, *_OF_MANY, "auto_detect"),
            name="sniff_csv",
            sample_size=SAMPLED,
        )
        try:
            found = self._database.query(
                "SELECT Delimiter, Quote, Escape, SkipRows, HasHeader, Comment, Columns FROM"
                f" {sniffing}"
            ).to_pylist()[0]
        except SourceError as exc:
            plain = options.keys() <= {"delim", "quote", "escape", "header", "types", *OF_ROWS}
            plain = plain and options.get("header", True) and options.get("quote", '"') == '"'
            delim = str(options.get("delim", ""))
            if plain and "no CSV" in str(exc) and (line := ragged(first, options, delim)):
                raise SourceError(f"{first}: {line}") from exc
            raise
        self._sniffed = {one["name"]: _candidate(one["type"]) for one in found["Columns"]}
        if (chosen := options.get("auto_type_candidates")) is not None:
            chosen = {_candidate(str(one).upper()) for one in chosen}
            self._candidates = tuple(k for k in CANDIDATES if k in chosen)
            self._sniffed = {n: k for n, k in self._sniffed.items() if k in chosen}
        else:
            self._candidates = CANDIDATES
        if options.get("auto_detect") is False:
            self._delim = str(options.get("delim", ","))
            self._has_head, self._skip = bool(options.get("header")), int(options.get("skip", 0))
            self._comment, self._quote = str(options.get("comment", "")), '"'
            return
        none = "(empty)"
        self._delim = found["Delimiter"]
        self._quote = '"' if found["Quote"] == none else found["Quote"]
        self._has_head, self._skip = bool(found["HasHeader"]), int(found["SkipRows"])
        self._comment = "" if found["Comment"] == none else found["Comment"]
        pins = {"delim": self._delim, "header": self._has_head, "skip": self._skip}
        if self._comment:
            pins["comment"] = self._comment
        if not (options.keys() & {"quote", "escape"}):
            # where no quote is among the first lines, DuckDB would take later ones for text
            pins["quote"] = self._quote
            pins["escape"] = self._quote if found["Escape"] == none else found["Escape"]
        self._pins = {k: v for k, v in pins.items() if k not in options}

    def _check_heads(self) -> None:
        """All files have the columns of the first one.

        Raises:
            SourceError: one lacks a column, or has another; or the first was cut.
        """
        options = self._call.options
        compared = self.files if self._is_compared() else self.files[:1]
        heads = [self._head(file) for file in compared]
        first = heads[0]
        if first is None:
            return
        names = self._cells(first)
        alone = len(self._sniffed) == 1 and "delim" not in options
        if alone and re.search(r"[,;\t|]", first) and (line := ragged(self.files[0], options)):
            raise SourceError(f"{self.files[0]}: {line}")
        columns = options.get("columns")
        if columns and "header" not in options and self._has_head and names != list(columns):
            raise SourceError(
                f"{self.files[0]}: its first line, {first[:80]!r}, has other names than columns"
                " gives, so that it may be a row: write header = true, or header = false"
            )
        for file, head in zip(self.files, heads, strict=False):
            if head is None or head == first or sorted(self._cells(head)) == sorted(names):
                continue
            other = self._cells(head)
            lacks = [name for name in names if name not in other]
            more = [name for name in other if name not in names and is_named(name, self._names)]
            if not lacks and not more:
                continue
            what = f"lacks {lacks[0]!r}" if lacks else f"has one more column, {more[0]!r}"
            raise SourceError(
                f"{file} {what}: its first line is {head[:80]!r}, and that of {self.files[0]} is"
                f" {first[:80]!r}: with union_by_name = true a column that a file lacks is null; a"
                " file of another delimiter needs a read_csv of its own, by UNION ALL BY NAME"
            )

    def _is_compared(self) -> bool:
        return self._has_head and not self._call.options.get("union_by_name")

    def _cells(self, line: str) -> list[str]:
        return next(csv.reader([line], delimiter=self._delim, quotechar=self._quote), [])

    def _head(self, file: str) -> str | None:
        """The line of a file that names its columns; None where it cannot be read here."""
        lines = lines_of(file, self._call.options)
        if lines is None:
            # what Python does not read, DuckDB does
            whole = {
                k: v for k, v in self._call.options.items() if k in ("compression", "encoding")
            }
            read = ReaderCall("read_csv", (escaped(file),), whole).sql(
                columns={"l": "VARCHAR"}, delim="\x01", quote="", escape="", header=False,
                auto_detect=False,
            )  # fmt: skip
            found = self._database.query_aside(f"SELECT l FROM {read} LIMIT {self._skip + 100}")
            lines = (line or "" for line in found.column(0).to_pylist())
        for number, line in enumerate(lines):
            comment = self._comment and line.startswith(self._comment)
            if number >= self._skip and line.strip() and not comment:
                return line.rstrip("\r\n")
        return ""

    def _as_text(self, files: tuple[str, ...] = ()) -> str:
        """The call, of all files or some, with all columns as text."""
        columns, files = self._call.options.get("columns"), files or self._call.files
        if columns:
            return self._call.over(
                files,
                (*OF_ROWS, *_OF_TYPES),
                **self._pins,
                columns=dict.fromkeys(columns, "VARCHAR"),
                hive_partitioning=False,
            )
        return self._call.over(
            files, (*OF_ROWS, *_OF_TYPES), **self._pins, all_varchar=True, hive_partitioning=False
        )

    def _given(self, names: Sequence[str]) -> dict[str, str]:
        """Column → type, of those that the call gives one."""
        types = self._call.options.get("columns") or self._call.options.get("types") or {}
        if isinstance(types, (list, tuple)):
            types = dict(zip(names, types, strict=False))
        by_name = {str(name).lower(): str(kind) for name, kind in types.items()}
        given = {n: by_name[n.lower()] for n in names if n.lower() in by_name}
        if not given:
            return {}
        # by DuckDB's own names
        nulls = ", ".join(f"NULL::{kind} AS {quoted(n)}" for n, kind in given.items())
        return self._database.described(f"SELECT {nulls}")[0]

    def _empty(self, columns: Sequence[str]) -> set[str]:
        """Those of some columns of which the first lines have no value to type them by."""
        columns = [name for name in columns if name in self._sniffed]
        if not columns:
            return set()
        counts = ", ".join(f"count({quoted(n)}) AS {quoted(n)}" for n in columns)
        few = f"SELECT * FROM {self._as_text((escaped(self.files[0]),))} LIMIT {SAMPLED}"
        found = self._database.query(f"SELECT {counts} FROM ({few})").to_pylist()[0]
        return {name for name, count in found.items() if not count}

    def _text(self, column: str, kind: str) -> str:
        """SQL of a column's text, a number's with its point and nothing between thousands."""
        text, options = quoted(column), self._call.options
        if kind in (*_INTEGERS, "FLOAT", "DOUBLE") or kind.startswith("DECIMAL"):
            if thousands := options.get("thousands"):
                text = f"replace({text}, {literal(thousands)}, '')"
            if options.get("decimal_separator", ".") != ".":
                text = f"replace({text}, {literal(options['decimal_separator'])}, '.')"
        return text

    def _cast(self, column: str, kind: str) -> str:
        """SQL of a value of a column as another type, null where it is none."""
        form = {"DATE": "dateformat", "TIMESTAMP": "timestampformat"}.get(kind, "")
        if self._call.options.get(form):
            return f"try_strptime({quoted(column)}, {literal(self._call.options[form])})"
        return f"TRY_CAST({self._text(column, kind)} AS {kind})"

    def _fits(self, column: str, kind: str, given: bool, value: str = "") -> str:
        text, options = self._text(column, kind), self._call.options
        if not given and (
            (kind == "DATE" and options.get("dateformat"))
            or (kind == "TIMESTAMP" and options.get("timestampformat"))
        ):
            given = True
        if given:
            return given_sql(text, kind, options, value)
        return exact_sql(text, kind, value)

    def _misfits(self, types: Mapping[str, tuple[str, bool]]) -> list[Misfit]:
        """Those of some columns (type, and whether it was given) that have values of another
        type."""
        if not types:
            return []
        # cast once, under a name that no column of a file has
        values = {n: quoted(f"value {at} of precompute") for at, n in enumerate(types)}
        counts = ", ".join(
            f"count({quoted(n)}) - count({quoted(n)}) FILTER ({self._fits(n, *of, values[n])})"
            f" AS {quoted(n)}"
            for n, of in types.items()
        )
        casts = ", ".join(
            f"TRY_CAST({self._text(n, kind)} AS {kind}) AS {values[n]}"
            for n, (kind, _) in types.items()
        )
        texts = ", ".join(quoted(n) for n in types)
        read = f"(SELECT {texts}, {casts} FROM {self._as_text()})"
        found = self._database.query(f"SELECT {counts} FROM {read}").to_pylist()[0]
        return [Misfit(name, *types[name], count) for name, count in found.items() if count]

    def _narrowest(self, columns: Sequence[str]) -> dict[str, str]:
        """Column → the narrowest type that all of its values have."""
        if not columns:
            return {}
        kinds = self._candidates
        counts = ", ".join(
            [
                f"count(*) FILTER ({quoted(name)} IS NOT NULL AND {self._fits(name, kind, False)}"
                f' IS NOT TRUE) AS "{at} {kind}"'
                for at, name in enumerate(columns)
                for kind in kinds
            ]
            + [f'count({quoted(name)}) AS "{at} values"' for at, name in enumerate(columns)]
        )
        found = self._database.query(f"SELECT {counts} FROM {self._as_text()}").to_pylist()[0]
        return {
            name: next(
                (k for k in kinds if found[f"{at} values"] and not found[f"{at} {k}"]), "VARCHAR"
            )
            for at, name in enumerate(columns)
        }

    def _error(self, misfit: Misfit, whose: str, narrow: str) -> SourceError:
        """The error of a column's first value that does not fit: its file, line and value."""
        found = self._first_misfit(misfit.column, misfit.type, misfit.given)
        if found is None:
            return SourceError(f"{self.files[0]} changed while it was read: run again")
        file, row, value = found
        others = f" ({misfit.values:,} such values)" if misfit.values > 1 else ""
        remedy = narrow if narrow and narrow != misfit.type else "VARCHAR"
        return SourceError(
            f"{file}, {self._line(file, row, value)}: {misfit.column} is {shown(value)}, and"
            f" {whose} is {misfit.type}, which would change it{others}: mend the value, or write"
            f" types = {{'{misfit.column}': '{remedy}'}} in its {self._call.name}"
        )

    def _first_misfit(self, column: str, kind: str, given: bool) -> tuple[str, int, str] | None:
        """The first value of a column that is none of a type: its file, the number of its row in
        that, from 1, and its text; None where there is none."""
        name = quoted(column)
        bad = f"{name} IS NOT NULL AND {self._fits(column, kind, given)} IS NOT TRUE"
        for file in self.files:
            rows = self._database.query_aside(
                f"SELECT n, v FROM (SELECT row_number() OVER () AS n, {name} AS v, {bad} AS bad"
                f" FROM {self._as_text((escaped(file),))}) WHERE bad ORDER BY n LIMIT 1"
            ).to_pylist()
            if rows:
                return file, rows[0]["n"], rows[0]["v"]
        return None

    def _line(self, file: str, row: int, value: str) -> str:
        """The line where a row of a file begins; its number without the header where that cannot be
        told here, or the row that is found has no such value."""
        lines = lines_of(file, self._call.options)
        begins = 0

        def kept() -> Iterator[str]:
            nonlocal begins
            for number, line in enumerate(lines or (), 1):
                if number > self._skip and not (self._comment and line.startswith(self._comment)):
                    begins = begins or number
                    yield line

        reader = csv.reader(kept(), delimiter=self._delim, quotechar=self._quote)
        left = row + int(self._has_head)
        # a value that is longer than Python's csv takes
        with contextlib.suppress(csv.Error):
            for cells in reader:
                # a line without anything is a row where there is one column
                left -= bool(cells) or len(self._sniffed) == 1
                if not left:
                    return f"line {begins}" if value in cells else f"row {row}"
                begins = 0
        return f"row {row}"


def ragged(file: str, options: Mapping[str, Any], delimiter: str = "") -> str:
    """The first line of a CSV that has more or fewer values than its header, as a message; empty
    where all have as many, or it cannot be read here."""
    lines = lines_of(file, options)
    head = next(lines, "") if lines is not None else ""
    if lines is None or not head:
        return ""
    rows = csv.reader(chain([head], lines), delimiter=delimiter or max(",;\t|", key=head.count))
    found = ""
    try:
        wanted = len(next(rows, []))
        for row in rows:
            if row and found:
                return found
            if row and len(row) != wanted:
                found = (
                    f"the row that ends on line {rows.line_num} has {len(row)} values, and the"
                    f" header {wanted}: mend that line"
                )
    except csv.Error:
        # a value that is longer than Python's csv takes
        return found
    return found and f"{found}; it is the last one: was the file cut?"


def _candidate(kind: str) -> str:
    return {"TIMESTAMP WITH TIME ZONE": "TIMESTAMPTZ"}.get(kind, kind)
