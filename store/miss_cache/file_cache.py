"""File cache: rows cached beside table files, in SQLite: processes write and read it side by side,
and none waits for another's disk."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from precompute.store.miss_cache.miss_cache import MissCache, MissCacheLimits, Space, clock_us

log = logging.getLogger(__name__)

WAIT_S = 0.05
"""How long another process's write is waited for."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS computed (view TEXT, slot INTEGER, over INTEGER, record BLOB,"
    " PRIMARY KEY (view, slot)) WITHOUT ROWID"
)


class MissCacheFile(MissCache):
    """One file for all views.

    Args:
        folder: for the file; made when it is first needed.
        limits: of each view.
        clock: as of :class:`MissCache`.
    """

    def __init__(
        self, folder: Path, limits: MissCacheLimits, clock: Callable[[], int] = clock_us
    ) -> None:
        super().__init__(limits, clock)
        self._path = folder / "rows.sqlite"
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._opened_identity: tuple[int, int] | None = None
        self._made = False

    def _get(self, space: Space, slots: Sequence[int]) -> dict[int, bytes]:
        marks, found = ",".join("?" * len(slots)), dict[int, bytes]()
        with self._lock, self._trouble():
            query = f"SELECT slot, record FROM computed WHERE view = ? AND slot IN ({marks})"
            connection = self._opened(make=False)
            if connection is not None:
                found |= connection.execute(query, (space.view, *slots)).fetchall()
        return found

    def _put(self, space: Space, records: dict[int, tuple[bytes, int]]) -> bool:
        rows = [(space.view, slot, over_us, record) for slot, (record, over_us) in records.items()]
        written = False
        with self._lock, self._trouble():
            connection = self._opened(make=True)
            assert connection is not None
            with connection:
                connection.executemany("INSERT OR REPLACE INTO computed VALUES (?, ?, ?, ?)", rows)
            written = True
        return written

    def close(self) -> None:
        with self._lock:
            self._close()

    def _opened(self, make: bool) -> sqlite3.Connection | None:
        """The file that lies there now: another process may have let go of the one before. None
        where there is none and none is made: who reads waits for nobody who writes."""
        identity = self._identity()
        if self._connection is not None and identity != self._opened_identity:
            self._close()
        if self._connection is None and (make or identity is not None):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self._path, timeout=WAIT_S, check_same_thread=False)
            self._opened_identity, self._made = self._identity(), False
        if self._connection is not None and make and not self._made:
            self._begin(self._connection)
            self._made = True
        return self._connection

    def _begin(self, connection: sqlite3.Connection) -> None:
        # what is lost with the machine is computed once more, and each row vouches for itself
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        with connection:
            connection.execute(_TABLE)
            connection.execute("DELETE FROM computed WHERE over < ?", (self._now_us(),))

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    @contextlib.contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as exc:
            # busy, or the disk is full or gone
            log.debug("cached rows: %s", exc)
        except (sqlite3.Error, OSError) as exc:
            log.warning("what was cached in %s is let go of: %s", self._path, exc)
            self._close()
            # it may be somebody else's, or the disk read-only
            with contextlib.suppress(OSError):
                for path in self._path.parent.glob(self._path.name + "*"):
                    path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
