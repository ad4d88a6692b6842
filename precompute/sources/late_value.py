"""Late value: the one by which a column of a CSV or of JSON is of another type than most of its
values, or than its first ones: looked for when somebody stumbles over that type, and not before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from precompute.sources.database import Database, quoted

_TEXTS = ("VARCHAR", "JSON")


@dataclass(frozen=True, slots=True)
class Reading:
    """How values are read as one type: ``fits`` is SQL, true where a value is one of it, and
    ``cast`` SQL of what a cast makes of a value, null where it makes nothing."""

    fits: str
    cast: str


@dataclass(frozen=True, slots=True)
class NearType:
    """A type that a column would have but for a few of its values: how many these are, how many of
    them a cast to it would change rather than make null, and how many values there are."""

    type: str
    cast: str
    others: int
    changed: int
    values: int

    def error(self, place: str, column: str, value: str, kind: str, given: bool = False) -> str:
        """What is said of the first of the others, and what can be done.

        Args:
            place: file and line.
            kind: the column's type.
            given: the SQL gives the column its type, so that the value does not.
        """
        most = self.values - self.others
        mend = f"mend it and write {self.type} in the SQL" if given else "mend it"
        if kind not in _TEXTS:
            remedy = f"{mend}, if it is a mistake"
        elif self.changed and self.type != "VARCHAR":
            remedy = f"{mend}, or have the column as text: a cast to {self.type} would change "
            remedy += "it" if self.others == 1 else f"{self.changed:,} of such values"
        else:
            made = "text of all" if self.type == "VARCHAR" else "null of it"
            remedy = f"{mend}, or write {self.cast} AS {quoted(column)} in the SQL, which makes"
            remedy += f" {made}"
        return (
            f"{place}: {column} is {shown(value)},"
            f" {'and the SQL has' if given else 'which makes'} the whole column {kind}; {most:,} of"
            f" its {self.values:,} values are {self.type}: {remedy}"
        )


def narrower(kind: str, kinds: Sequence[str]) -> Sequence[str]:
    """Those of some types, the narrowest first, that a column of a type may have been but for a few
    values."""
    return kinds[: kinds.index(kind)] if kind in kinds else kinds


def near_type(
    database: Database,
    read: str,
    there: str,
    readings: Mapping[str, Reading],
    first: str,
    wanted: str,
    kind: str,
) -> NearType | None:
    """The type that most values of a column have that is text, or that the first ones have of any;
    the one that is wanted before others. None where there is none.

    Args:
        read: SQL of the rows.
        there: SQL, true of a row that has a value.
        readings: of the types that are looked at, the narrowest first.
        first: the type of the first values.
        wanted: the type that the column is wanted to have; empty for any.
        kind: the column's type.
    """
    counts = "".join(
        f", count(*) FILTER ({there} AND {one.fits} IS NOT TRUE) AS o{at}, count(*) FILTER ({there}"
        f" AND {one.fits} IS NOT TRUE AND {one.cast} IS NOT NULL) AS c{at}"
        for at, one in enumerate(readings.values())
    )
    sql = f"SELECT count(*) FILTER ({there}) AS n{counts} FROM {read}"
    row = database.query_aside(sql).to_pylist()[0]
    found = [
        NearType(name, one.cast, row[f"o{at}"], row[f"c{at}"], row["n"])
        for at, (name, one) in enumerate(readings.items())
    ]
    near = [
        one
        for one in found
        if 0 < one.others < one.values
        and (one.type == first or (kind in _TEXTS and 2 * one.others <= one.values))
    ]
    return min(near, key=lambda one: (one.type != wanted, one.others), default=None)


def shown(value: str) -> str:
    """A value as messages quote it."""
    return repr(value if len(value) <= 60 else f"{value[:57]}…")
