"""Cached source: the rows of a small source by key, in memory, until a file that it reads changes.
A row costs 50 µs, where DuckDB plans and scans for 1.4 ms and more."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa

from precompute.registry import Stamp, stamp_of
from precompute.sources.database import Database
from precompute.sources.file_names import is_pattern, is_remote
from precompute.store.errors import PrecomputeError

MOST_ROWS = 100_000
MOST_BYTES = 32 * 2**20
"""Bytes of a source that is cached, at most."""

SETTLED_S = 2.0
"""Seconds since a file's last change before it is cached: a file system's clock has steps of up to
two seconds, so a later change may have the same time."""

AGAIN_S = 10.0
"""Seconds before a source is read again whose files have changed, or were too new to cache. One
that is too large is read again when its files change."""

_UNSTEADY = (
    "age",
    "getenv",
    "getvariable",
    "current_setting",
    "nextval",
    "currval",
    "tablesample",
    "sample",
)
"""Names in SQL that may yield other rows from the same files, beside the functions that DuckDB
itself marks so."""


class CachedSource:
    """Reads the source in a thread of its own; answers nothing before that is done, or when a file
    may have changed.

    Args:
        database: of the source, open as long as this is.
        sql: yields a column ``key`` with the key's text, and the source's columns.
        given: the SQL's parameters.
        files: all that it reads, absolute.
    """

    def __init__(
        self, database: Database, sql: str, given: dict[str, object], files: Sequence[str]
    ) -> None:
        self._database, self._sql, self._given, self._files = database, sql, given, files
        self._lock = threading.Lock()
        self._entry: tuple[list[Stamp], dict[str, int], pa.Table] | None = None
        self._not_cached: list[Stamp] | None = None
        """Stamps of the files when they were last read and not cached."""
        self._reading, self._again_at = False, 0.0
        self._may_be = bool(files) and not any(
            is_pattern(file) or is_remote(file) for file in files
        )

    def rows(self, keys: Sequence[str]) -> pa.Table | None:
        """As :meth:`precompute.sources.source.Source.rows`; None where the source has to be
        queried."""
        if not self._may_be:
            return None
        retained, stamps = self._entry, _stamps(self._files)
        if retained is None or stamps is None or retained[0] != stamps:
            if stamps is None or stamps != self._not_cached:
                self._begin()
            return None
        _, position, table = retained
        return table.take(pa.array([position[key] for key in keys if key in position], pa.int64()))

    def _begin(self) -> None:
        with self._lock:
            if self._reading or time.monotonic() < self._again_at:
                return
            self._reading = True
        threading.Thread(target=self._read_once, name="cache input", daemon=True).start()

    def _read_once(self) -> None:
        try:
            self._read()
        finally:
            self._again_at, self._reading = time.monotonic() + AGAIN_S, False

    def _read(self) -> None:
        # the source was closed, or the next reader reports it
        with contextlib.suppress(PrecomputeError):
            self._may_be = not unsteady(self._database, self._sql)
            before = _stamps(self._files)
            if (
                not self._may_be
                or before is None
                or max(stamp.changed for stamp in before) > time.time_ns() - SETTLED_S * 1e9
            ):
                return
            self._not_cached = before
            table = self._database.query_aside(
                f"SELECT * FROM ({self._sql}\n) LIMIT {MOST_ROWS + 1}", self._given
            )
            if table.num_rows > MOST_ROWS or table.nbytes > MOST_BYTES:
                return
            position = {
                key: row
                for row, key in enumerate(table.column("key").to_pylist())
                if key is not None
            }
            # a key with two rows is an error, which the source raises; a file that changed
            # meanwhile has another stamp by now
            if len(position) == table.num_rows - table.column("key").null_count:
                self._entry, self._not_cached = (before, position, table), None


def _stamps(files: Sequence[str]) -> list[Stamp] | None:
    """Those of all files; None where one is not there."""
    found = [stamp for file in files if (stamp := stamp_of(Path(file))) is not None]
    return found if len(found) == len(files) else None


def unsteady(database: Database, sql: str) -> bool:
    """Whether SQL names anything that may give other rows from the same files, such as the time or
    chance."""
    names = database.query_aside(
        "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability IS NOT NULL AND"
        " stability <> 'CONSISTENT'"
    )
    words = set(re.findall(r"\w+", sql.lower()))
    return any(name in words for name in chain(names.column(0).to_pylist(), _UNSTEADY))
