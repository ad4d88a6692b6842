"""Diff: a source's loaded rows compared with what was computed before; only those that need a value
go to the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.sources.database import Files, quoted
from precompute.sources.source import Source
from precompute.store.disk.sql import parquet_sql
from precompute.store.errors import ConfigError, SnapshotError, SourceError

BLOCK_ROWS = 1 << 19
"""Rows compared with what was computed before at a time, where keys ascend; more where that would
open more than :data:`MAX_OPENED` files. Of a row it is the key, a hash and where it lies that
DuckDB holds, 268 MB of the longest keys, within its limit and on disk beyond."""

MAX_OPENED = 2048
"""Files opened for a comparison: blocks times files."""


@dataclass(frozen=True, slots=True)
class Diff:
    """What becomes of the source's rows, compared with what was computed before.

    ``new``, ``changed`` and ``expired`` (past their TTL) rows need a value, but for ``resumed``
    ones, which an interrupted run computed, and ``refused`` ones, which the model rejected with the
    same input before; ``retried`` counts those of them that are to be computed once more all the
    same. ``removed`` counts rows that left the source; ``oldest_us`` and ``newest_us`` (µs since
    1970) when the rows that are taken over were computed, None without any.
    """

    new: int
    changed: int = 0
    expired: int = 0
    unchanged: int = 0
    removed: int = 0
    resumed: int = 0
    refused: int = 0
    retried: int = 0
    oldest_us: int | None = None
    newest_us: int | None = None

    @property
    def compute(self) -> int:
        """Rows for the model."""
        return self.new + self.changed + self.expired - self.resumed - self.refused


def compare(
    source: Source,
    known: Files | None = None,
    finished: Files | None = None,
    refused: Sequence[Path] = (),
    *,
    expired_before_us: int | None = None,
    retry_rejected: bool = False,
) -> Diff:
    """Compare the loaded rows with earlier results; :meth:`Source.batches` then yields only those
    that need a value.

    Args:
        source: loaded.
        known: files of the snapshot to build on: unique keys, ``computed_at``, ``input_hash``, same
            recipe.
        finished: files of interrupted runs: the same columns; a key may come several times.
        refused: Parquet files of rejected rows, by ``key`` text and ``input_hash``.
        expired_before_us: a known row computed before this (µs since 1970) is computed again.
        retry_rejected: compute the refused ones, too.

    Raises:
        SnapshotError: one of these files cannot be read.
    """
    expired = -(2**62) if expired_before_us is None else int(expired_before_us)
    columns = (
        f"{_key_columns(source)}, input_hash AS hash, epoch_us(computed_at) AS us,"
        " file_index::INTEGER AS f, file_row_number AS r"
    )
    with _earlier_results():
        known_sql = source.scan(known or Files(), "known", columns)
        finished_sql = source.scan(finished or Files(), "finished", columns)
        source.database.execute(f"CREATE OR REPLACE TEMP TABLE finished AS {finished_sql}")
        _plan(source, known_sql, 0 if known is None else len(known.paths), expired)
        _take(source, expired)
        _refuse(source, refused)
        source.database.execute(
            "CREATE OR REPLACE TEMP TABLE todo AS SELECT i FROM plan WHERE state < 3 AND i NOT IN"
            " (SELECT i FROM taken)"
            + ("" if retry_rejected else " AND i NOT IN (SELECT i FROM refused)")
        )
        counted = _counted(source, known_sql, retry_rejected)
    source.narrowed = counted.compute < source.database.number("SELECT count(*) FROM input")
    return counted


def _plan(source: Source, known_sql: str, files: int, expired: int) -> None:
    """Table ``plan``: of every row that is not just taken over, its number ``i``, the known row's
    file ``f`` and row ``r``, the known key, and a ``state``: 0 new, 1 changed, 2 expired, 4
    removed."""
    key_columns = ", ".join(f"o.{quoted('key_' + c)}" for c in source.entity)
    for number, (here, there, bounds) in enumerate(_blocks(source, files)):
        source.database.execute(
            ("INSERT INTO plan " if number else "CREATE OR REPLACE TEMP TABLE plan AS ")
            + f"SELECT * FROM (SELECT i.rowid AS i, o.f, o.r, {key_columns}, (CASE WHEN i.rowid IS"
            " NULL THEN 4 WHEN o.f IS NULL THEN 0 WHEN o.hash <> i.input_hash THEN 1 WHEN o.us <"
            f" {expired} THEN 2 ELSE 3 END)::UTINYINT AS state FROM (SELECT rowid,"
            f" {', '.join(quoted(c) for c in source.entity)}, input_hash FROM input{here}) i FULL"
            f" JOIN (SELECT * FROM ({known_sql}){there}) o ON {_same_key(source)}) WHERE state"
            " <> 3",
            bounds,
        )


def _take(source: Source, expired: int) -> None:
    """Table ``taken``: of planned rows that an interrupted run finished, the oldest of what it
    wrote."""
    source.database.execute(
        "CREATE OR REPLACE TEMP TABLE taken AS SELECT p.i, min({'f': o.f, 'r': o.r, 'us': o.us})"
        f" AS pick FROM finished o JOIN input i ON {_same_key(source)} AND o.hash = i.input_hash"
        f" JOIN plan p ON p.i = i.rowid WHERE p.state < 3 AND o.us >= {expired} GROUP BY p.i"
    )


def _refuse(source: Source, refused: Sequence[Path]) -> None:
    """Table ``refused``: planned rows that were rejected before with the same input, and are not
    taken."""
    source.database.execute(
        "CREATE OR REPLACE TEMP TABLE refused (i BIGINT, key VARCHAR, stage VARCHAR, error VARCHAR,"
        " input_hash BIGINT, attempts INTEGER)"
    )
    if refused:
        source.database.execute(
            "INSERT INTO refused SELECT i.rowid, min(o.key), min(o.stage), min(o.error),"
            " min(o.input_hash), max(o.attempts) FROM (SELECT key, input_hash, min(stage) AS"
            f" stage, min(error) AS error, max(attempts) AS attempts FROM {parquet_sql(refused)}"
            f" GROUP BY key, input_hash) o JOIN (SELECT rowid, input_hash, {source.key_text_sql()}"
            " AS key FROM input) i ON i.key IS NOT DISTINCT FROM o.key AND i.input_hash ="
            " o.input_hash JOIN plan p ON p.i = i.rowid WHERE p.state < 3 AND i.rowid NOT IN"
            " (SELECT i FROM taken) GROUP BY i.rowid"
        )


def _counted(source: Source, known_sql: str, retry_rejected: bool) -> Diff:
    database = source.database
    counts = database.query("SELECT state, count(*) AS n FROM plan GROUP BY state").to_pylist()
    states = dict.fromkeys(range(5), 0) | {row["state"]: row["n"] for row in counts}
    unchanged = database.number("SELECT count(*) FROM input") - states[0] - states[1] - states[2]
    retained = (
        f"SELECT us FROM ({known_sql}) o ANTI JOIN plan p ON o.f = p.f AND o.r = p.r UNION ALL "
        if unchanged
        else ""
    )
    ages = database.query(
        f"SELECT min(us) AS oldest, max(us) AS newest FROM ({retained}SELECT pick.us FROM taken)"
    ).to_pylist()[0]
    again = database.number("SELECT count(*) FROM refused")
    return Diff(
        new=states[0],
        changed=states[1],
        expired=states[2],
        unchanged=unchanged,
        removed=states[4],
        resumed=database.number("SELECT count(*) FROM taken"),
        refused=0 if retry_rejected else again,
        retried=again if retry_rejected else 0,
        oldest_us=ages["oldest"],
        newest_us=ages["newest"],
    )


def _blocks(source: Source, files: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The blocks that are compared one by one: conditions in SQL, of the loaded rows and of the
    known ones, and their parameters. No row is left out, nor a pair of one key. Where keys ascend,
    each is a range of them, whose hash table fits into the caches and does not spill; else there is
    one, of all rows.
    """
    block_rows = max(BLOCK_ROWS, -(-source.rows_read * files // MAX_OPENED))
    if not source.ascends or source.rows_read <= block_rows:
        yield "", "", {}
        return
    key, known_key = quoted(source.entity[0]), quoted("key_" + source.entity[0])
    firsts = ", ".join(map(str, range(block_rows, source.rows_read, block_rows)))
    bounds = source.database.query(
        f"SELECT {key} AS k FROM input WHERE rowid IN ({firsts}) ORDER BY rowid"
    )["k"].to_pylist()
    for number, (low, high) in enumerate(zip([None, *bounds], [*bounds, None], strict=True)):
        first = number * block_rows
        ends = {name: bound for name, bound in (("low", low), ("high", high)) if bound is not None}
        there = " AND ".join(
            f"{known_key} {'>=' if name == 'low' else '<'} ${name}" for name in ends
        )
        yield f" WHERE rowid >= {first} AND rowid < {first + block_rows}", f" WHERE {there}", ends


def find_deletes(source: Source) -> pa.Table:
    """Rows of the compared files that are no rows of the result: ``file`` (position among the known
    files, then the finished ones; int32), ``row`` (int64), ``finished`` (bool), ``removed`` (bool:
    the key left the source) and the entity's columns with ``key_`` before their names.
    """
    columns = ", ".join(f"o.{quoted('key_' + c)}" for c in source.entity)
    return source.database.query(
        f'SELECT o.f AS file, o.r AS "row", false AS finished, state = 4 AS removed, {columns} FROM'
        f" plan o WHERE state IN (1, 2, 4) UNION ALL SELECT o.f, o.r, true, false, {columns} FROM"
        " finished o LEFT JOIN taken t ON o.f = t.pick.f AND o.r = t.pick.r WHERE t.i IS NULL"
        ' ORDER BY finished, file, "row"'
    )


def rejected_rows(source: Source) -> pa.Table:
    """The rows that were rejected before with the same input: ``key``, ``stage``, ``error``,
    ``input_hash``, ``attempts``."""
    return source.database.query(
        "SELECT key, stage, error, input_hash, attempts FROM refused ORDER BY i"
    )


def _key_columns(source: Source) -> str:
    return ", ".join(f"{quoted(c)} AS {quoted('key_' + c)}" for c in source.entity)


def _same_key(source: Source) -> str:
    return " AND ".join(f"i.{quoted(c)} = o.{quoted('key_' + c)}" for c in source.entity)


@contextlib.contextmanager
def _earlier_results() -> Iterator[None]:
    """Translate errors within into those of an earlier result: the source itself lies in a table of
    ours by now."""
    try:
        yield
    except (SourceError, ConfigError) as exc:
        raise SnapshotError(f"earlier results cannot be read: {exc}") from exc
