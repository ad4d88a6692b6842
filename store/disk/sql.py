"""SQL: how DuckDB is opened, how it reads our files, and where it spills what does not fit in
memory.

A spill folder is gone with its process, however that dies: it is locked for as long as its process
lives; a process that makes one removes those that no process holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from precompute.store.disk.durable_file import limit_of
from precompute.store.disk.storage import OBJECT_STORES
from precompute.store.errors import ConfigError, PrecomputeError

if TYPE_CHECKING:
    import duckdb

VECTOR_ROWS = 2048
"""Rows that DuckDB handles at a time (``STANDARD_VECTOR_SIZE``)."""

_PREFIX = "precompute-duckdb-"
_LOCK = "held"
_UNLOCKED_S = 3600.0
"""A folder without a lock file is just being made, or was left between the two steps: it is left
alone for an hour."""


class SpillFolder:
    """A folder of one's own under the system's temporary folder (``TMPDIR``)."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        new = self.path / f"{_LOCK}.new"
        self._file = new.open("ab")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # it has its name once it is locked: who finds it unlocked removes the folder
        new.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove it; closing twice is no error."""
        self._file.close()
        shutil.rmtree(self.path, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of processes that died."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Somebody else's, or gone meanwhile.
        with contextlib.suppress(OSError):
            if not (folder / _LOCK).exists():
                dead = time.time() - folder.stat().st_mtime > _UNLOCKED_S
            else:
                with (folder / _LOCK).open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                dead = True
            if dead:
                shutil.rmtree(folder, ignore_errors=True)


# ---- SQL: how DuckDB is opened, and reads files of ours.


_SETTINGS = (
    # no surprises at 2 a.m.: nothing is fetched from the network
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    # the hash of a time must not depend on the machine
    "TimeZone = 'UTC'",
    # who opened it fits it to what is read; a source is one SELECT, which sets nothing
    "allowed_configs = ['memory_limit', 'threads', 'disable_parquet_prefetching']",
)
"""Settings that are made before :data:`_LOCKED`."""
_BEFORE_2 = ("enable_external_file_cache = false",)
"""DuckDB 1.5 takes a file that is replaced within a second for the one before, and reads the new
one's bytes by the old one's footer."""
_SINCE_2 = ("disabled_optimizers = 'type_pushdown'",)
"""DuckDB 2.0 has a CSV's reader make the type of a TRY_CAST, which is an error then where it would
be null."""
_LOCKED = "lock_configuration = true"
"""Nothing in a source's SQL can change the settings."""


def open_duckdb(
    spill: SpillFolder,
    memory_mb: int,
    threads: int | None = None,
    prepare: Callable[[duckdb.DuckDBPyConnection], None] = lambda _: None,
) -> duckdb.DuckDBPyConnection:
    """A DuckDB of its own, with settings that are locked.

    Args:
        spill: where it puts what does not fit; to be closed after the connection. Closed here where
            there is none.
        memory_mb: its memory limit.
        threads: of its own; one per core by default.
        prepare: called before the settings are locked.
    """
    # who only has a spill folder, as a server has, does without
    import duckdb

    config: dict[str, Any] = {
        "memory_limit": f"{memory_mb}MB",
        "temp_directory": str(spill.path),
        # none of the user's that lie at home
        "secret_directory": str(spill.path / "secrets"),
    }
    try:
        with memory_wanted():
            connection = duckdb.connect(
                config=config if threads is None else config | {"threads": threads}
            )
            for setting in (*_SETTINGS, *(_BEFORE_2 if duckdb.__version__ < "2" else _SINCE_2)):
                connection.execute(f"SET {setting}")
            prepare(connection)
            connection.execute(f"SET {_LOCKED}")
            return connection
    except BaseException:
        spill.close()
        raise


@lru_cache(1)
def _without_data() -> duckdb.DuckDBPyConnection:
    import duckdb

    with memory_wanted():
        return duckdb.connect(config={"threads": 1})


def without_data() -> duckdb.DuckDBPyConnection:
    """A connection for what concerns SQL alone. They share a database, which is opened once in a
    process: that takes 12 ms, and DuckDB's own default connection 18."""
    return _without_data().cursor()


@contextlib.contextmanager
def memory_wanted() -> Iterator[None]:
    """Within, DuckDB opens, or answers of itself alone.

    Raises:
        PrecomputeError: the process has no memory or threads for that.
    """
    import duckdb

    try:
        yield
    except (duckdb.OutOfMemoryException, MemoryError) as exc:
        limit = limit_of(MemoryError())
        raise PrecomputeError(
            f"DuckDB cannot be opened ({str(exc).partition(chr(10))[0]}): {limit}"
        ) from exc


def parquet_sql(paths: Sequence[Path]) -> str:
    """DuckDB's SQL for the columns that files of ours have: a folder above them, ``env=prod``, is
    no partition, and ``v[1]`` no pattern."""
    plain = (re.sub(r"[*?\[]", r"[\g<0>]", str(path)).replace("'", "''") for path in paths)
    listed = ", ".join(f"'{path}'" for path in plain)
    return f"read_parquet([{listed}], hive_partitioning = false)"


REMOTE = tuple(f"{scheme}://" for scheme in OBJECT_STORES)
"""How a file in an object store begins."""


class RemoteReader(Protocol):
    """What is known of files in object stores, see
    :class:`precompute.store.disk.remote_files.RemoteFiles`."""

    def glob(self, path: str) -> list[str]:
        """URLs of the files that a pattern finds."""

    def modified(self, path: str) -> datetime:
        """When a file was last written."""

    def tag(self, path: str) -> str:
        """What changes with a file's content."""

    def size(self, path: str) -> int:
        """Size of a file, in bytes."""

    def open(self, path: str) -> Any:
        """A file, to be read from."""


def read_remote_files(
    connection: duckdb.DuckDBPyConnection, files: Sequence[str]
) -> RemoteReader | None:
    """Have a DuckDB read files in object stores; None where none of ``files`` lies there.

    Raises:
        ConfigError: obstore is not installed.
    """
    remote = next((file for file in files if any(one in file for one in REMOTE)), None)
    if remote is None:
        return None
    try:
        from precompute.store.disk.remote_files import RemoteFiles
    except ImportError as exc:
        raise ConfigError(
            f"{remote}: obstore is not installed: pip install 'precompute-store[s3]'"
        ) from exc
    reader: RemoteReader = RemoteFiles()
    connection.register_filesystem(reader)
    return reader
