"""Rows: what a project answers with, as Arrow holds it and as a notebook shows it; a DataFrame of
whichever library is one call away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import pyarrow as pa

from precompute.jobs.notebook.display import MOST_ROWS, table_html, table_text
from precompute.store.errors import ConfigError

if TYPE_CHECKING:
    import pandas
    import polars


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
        """Of dicts; ``options`` as of the class. What Arrow has no type for is text."""
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
        if not 0 <= number < len(self):
            raise IndexError(f"row {which} of {len(self)}")
        return self.table.slice(number, 1).to_pylist()[0]

    def __repr__(self) -> str:
        return table_text(*self._shown(), self._notes)

    def _repr_html_(self) -> str:
        return table_html(*self._shown(), self._notes)

    def _shown(self) -> tuple[str, list[str], list[list[Any]]]:
        names = [name for name in self.columns if name not in self._hidden]
        first = self.table.select(names).slice(0, MOST_ROWS).to_pylist()
        rows: list[list[Any]] = [list(row.values()) for row in first]
        # those that are not shown are only counted
        return self._caption, names, [*rows, *([[]] * (len(self) - len(rows)))]


def _column(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError):
        return pa.array([None if value is None else str(value) for value in values], pa.string())


def _not_installed(exc: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"{exc.name} is not installed: pip install {exc.name}, or take .to_arrow() or .to_pylist()"
    )
