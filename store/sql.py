"""SQL: how DuckDB is opened, and reads files of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb

from precompute.store.disk.durable_file import limit_of
from precompute.store.disk.spill_folder import SpillFolder
from precompute.store.errors import PrecomputeError

_SETTINGS = (
    # no surprises at 2 a.m.: nothing is fetched from the network
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    # the hash of a time must not depend on the machine
    "TimeZone = 'UTC'",
    # nothing in a source's SQL can change these settings
    "lock_configuration = true",
)


def open_duckdb(
    spill: SpillFolder, memory_mb: int, threads: int | None = None
) -> duckdb.DuckDBPyConnection:
    """A DuckDB of its own, with settings that are locked.

    Args:
        spill: where it puts what does not fit; to be closed after the connection. Closed here where
            there is none.
        memory_mb: its memory limit.
        threads: of its own; one per core by default.
    """
    config: dict[str, Any] = {"memory_limit": f"{memory_mb}MB", "temp_directory": str(spill.path)}
    try:
        with memory_wanted():
            connection = duckdb.connect(
                config=config if threads is None else config | {"threads": threads}
            )
            for setting in _SETTINGS:
                connection.execute(f"SET {setting}")
            return connection
    except BaseException:
        spill.close()
        raise


@contextlib.contextmanager
def memory_wanted() -> Iterator[None]:
    """Within, DuckDB opens, or answers of itself alone.

    Raises:
        PrecomputeError: the process has no memory or threads for that.
    """
    try:
        yield
    except (duckdb.OutOfMemoryException, MemoryError) as exc:
        limit = limit_of(MemoryError())
        raise PrecomputeError(
            f"DuckDB cannot be opened ({str(exc).partition(chr(10))[0]}): {limit}"
        ) from exc


def parquet_sql(paths: Sequence[Path]) -> str:
    """DuckDB's SQL for the columns that files of ours have: a folder above them, ``env=prod``, is
    no partition."""
    listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
    return f"read_parquet([{listed}], hive_partitioning = false)"
