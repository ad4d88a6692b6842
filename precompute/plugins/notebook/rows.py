"""Rows: tables as a notebook and a terminal show them, with few rows, short values, all of it
escaped."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import pyarrow as pa

from precompute.jobs.commands.run import describe_report
from precompute.store.errors import ConfigError
from precompute.store.offline.runs import Report
from precompute.store.times import duration, shown_time

if TYPE_CHECKING:
    import pandas
    import polars

MOST_ROWS, MOST_NUMBERS, MOST_CHARACTERS = 20, 4, 60
"""What is shown at most: rows of a table, numbers of a vector, characters of a text."""


def shown(value: Any, column: str = "") -> str:
    """A value in a cell; of a column whose name ends with ``_s`` as a time, and of a fingerprint
    its beginning, as the command line has them."""
    if value is None:
        return "–"
    if column == "model":
        return str(value)[:12]
    if column.endswith("_s") and isinstance(value, (int, float)):
        return duration(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return shown_time(value) if value.tzinfo else f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, (list, tuple)):
        first = ", ".join(map(shown, value[:MOST_NUMBERS]))
        return f"[{first}, …] ({len(value)})" if len(value) > MOST_NUMBERS else f"[{first}]"
    if isinstance(value, Mapping):
        value = ", ".join(f"{name}: {shown(one)}" for name, one in value.items())
    text = " ".join(str(value).split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def counted(number: int, what: str) -> str:
    """``1 row``, ``2,500 rows``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


class Shown(NamedTuple):
    """What is shown of an answer, for people."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """Of values; the first :data:`MOST_ROWS` are shown."""
    notes: Sequence[str] = ()
    """What needs attention, below the table."""

    def lines(self) -> list[list[str]]:
        """The head and the rows, each value as a text."""
        rows = (
            [shown(value, name) for name, value in zip(self.head, row, strict=True)]
            for row in self.rows[:MOST_ROWS]
        )
        return [list(self.head), *rows] if self.head else []

    def below(self) -> list[str]:
        """Lines below the table."""
        more = len(self.rows) - MOST_ROWS
        return [*([f"… {more:,} more"] if more > 0 else []), *self.notes]

    def as_text(self) -> str:
        """For ``repr``."""
        lines = self.lines()
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        table = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
        return "\n".join([self.caption, *table, *self.below()])

    def as_html(self) -> str:
        """For ``_repr_html_``: a plain table."""
        table = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>"
            for line in self.lines()
        )
        below = "".join(f"<div>{html.escape(line)}</div>" for line in self.below())
        return f"<div>{html.escape(self.caption)}</div><table>{table}</table>{below}"


# ---- Ran: what a run did, as a program reads it and as a person does.


class Ran:
    """A run that did what it was for; ``report`` is all that is known of it.

    Args:
        report: as it was written.
    """

    def __init__(self, report: Report) -> None:
        self.report = report

    @property
    def status(self) -> str:
        """``published``, ``committed`` (computed, and not published) or ``current`` (nothing to
        do)."""
        return self.report.status

    @property
    def snapshot(self) -> int | None:
        """Number of the snapshot that was made, or that there is."""
        return self.report.snapshot

    @property
    def counts(self) -> dict[str, int]:
        """Rows: ``source`` = ``written`` + ``unchanged`` + ``rejected``; ``removed`` ones
        besides."""
        return dict(self.report.counts)

    def __repr__(self) -> str:
        return "\n".join([describe_report(self.report), *self.report.attention])


# ---- Rows: what a project answers with, as Arrow holds it and as a notebook shows it; a
# DataFrame of whichever library is one call away.


class Rows:
    """Rows of one answer; ``len``, iteration and ``rows[0]`` are of dicts, ``rows["age_s"]`` is a
    column.

    Whatever takes Arrow takes it as it is (``polars.DataFrame(rows)``, ``pyarrow.table(rows)``,
    DuckDB).

    Args:
        table: the rows.
        caption: what they are, for people.
        hidden: columns that are the same in every row, or of little interest: not shown.
        notes: what else is to be said of them, for people.
    """

    def __init__(
        self,
        table: pa.Table,
        caption: str,
        *,
        hidden: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.table = table
        """The rows as a ``pyarrow.Table``."""
        self._caption, self._hidden, self._notes = caption, frozenset(hidden), list(notes)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], caption: str, **options: Any) -> Rows:
        """The table of some dicts; ``options`` as of the class. What Arrow has no type for is
        text."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        return cls(
            pa.table({name: _column([row.get(name) for row in rows]) for name in names}),
            caption,
            **options,
        )

    @property
    def columns(self) -> list[str]:
        """The columns' names."""
        return list(self.table.column_names)

    def to_arrow(self) -> pa.Table:
        """A ``pyarrow.Table``."""
        return self.table

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame of pandas.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            return self.table.to_pandas()
        except ModuleNotFoundError as exc:
            raise _not_installed(exc) from exc

    def to_polars(self) -> polars.DataFrame:
        """A DataFrame of polars.

        Raises:
            ConfigError: polars is not installed.
        """
        try:
            import polars
        except ModuleNotFoundError as exc:
            raise _not_installed(exc) from exc
        return polars.DataFrame(self.table)

    def to_pylist(self) -> list[dict[str, Any]]:
        """A dict for each row."""
        rows: list[dict[str, Any]] = self.table.to_pylist()
        return rows

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The rows as an Arrow stream (the PyCapsule interface)."""
        return self.table.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_pylist())

    @overload
    def __getitem__(self, which: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, which: str) -> pa.ChunkedArray: ...

    def __getitem__(self, which: int | str) -> Any:
        if isinstance(which, str):
            return self.table.column(which)
        number = which + len(self) if which < 0 else which
        return self.table.slice(number, 1).to_pylist()[0]

    def __repr__(self) -> str:
        return self._shown().as_text()

    def _repr_html_(self) -> str:
        return self._shown().as_html()

    def _shown(self) -> Shown:
        names = [name for name in self.columns if name not in self._hidden]
        first = self.table.select(names).slice(0, MOST_ROWS).to_pylist()
        rows: list[list[Any]] = [list(row.values()) for row in first]
        # those that are not shown are only counted
        return Shown(self._caption, names, [*rows, *([[]] * (len(self) - len(rows)))], self._notes)


def _column(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError):
        return pa.array([None if value is None else str(value) for value in values], pa.string())


def _not_installed(exc: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"{exc.name} is not installed: pip install {exc.name}, or take .to_arrow() or .to_pylist()"
    )
