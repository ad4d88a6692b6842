"""Answer cache: what an endpoint answered, by the hash of what was sent, so that nothing is paid twice: in SQLite, each answer committed as it comes."""

from __future__ import annotations

import contextlib
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from precompute.store.errors import ModelError

NAME = "answers.sqlite"
WAIT_S = 30.0
"""How long another process's write is waited for."""
MOST_KEYS = 500
"""Of one query."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, at INTEGER, tries INTEGER, wrong TEXT, answer BLOB, sum INTEGER)"
    " WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered: its content; or what was ``wrong`` with it, the last of so many ``tries``."""

    content: bytes
    wrong: str | None = None
    tries: int = 1


class AnswerCache:
    """A folder with one file, which several views and processes may share. An answer is safe from the end of its process when :meth:`put`
    returns, and from the machine's within a second or so.

    Args:
        folder: made where there is none.
        days: an answer is let go of so long after it came.

    Raises:
        ModelError: the folder or file cannot be made, or is none of ours.
    """

    def __init__(self, folder: Path, days: float) -> None:
        self._path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # for one thread, that of the event loop; it is made in another
            self._connection = sqlite3.connect(self._path, timeout=WAIT_S, check_same_thread=False, isolation_level=None)
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = NORMAL")
                self._connection.execute(_TABLE)
                self._connection.execute("DELETE FROM answers WHERE at < ?", (int(time.time() - days * 86400),))
            except BaseException:
                self._connection.close()
                raise
        except (OSError, sqlite3.Error) as exc:
            raise ModelError(
                f"the answers' cache {self._path} cannot be opened: {exc}; name a folder that can be written to: cache: ./…"
            ) from exc

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        """Those of the keys that are there.

        Raises:
            ModelError: the file cannot be read.
        """
        found = dict[bytes, Answer]()
        with self._trouble():
            for first in range(0, len(keys), MOST_KEYS):
                part = keys[first : first + MOST_KEYS]
                query = f"SELECT key, tries, wrong, answer, sum FROM answers WHERE key IN ({','.join('?' * len(part))})"
                for key, tries, wrong, content, checksum in self._connection.execute(query, part):
                    # what does not vouch for itself is requested again
                    if checksum == _sum(key, tries, wrong, content):
                        found[key] = Answer(content, wrong, tries)
        return found

    def put(self, key: bytes, answer: Answer) -> None:
        """Keep an answer; it is committed when this returns.

        Raises:
            ModelError: it cannot be written: what is answered from now on would be paid again.
        """
        row = (key, int(time.time()), answer.tries, answer.wrong, answer.content)
        with self._trouble():
            self._connection.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)",
                (*row, _sum(key, answer.tries, answer.wrong, answer.content)),
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextlib.contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as exc:
            raise ModelError(
                f"the answers' cache {self._path} cannot be used: {exc}. Nothing more is requested, since its answers would be paid again: make room, "
                "or, of a damaged file, move it away"
            ) from exc


def _sum(key: bytes, tries: int, wrong: str | None, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(f"{tries} {wrong}".encode(), zlib.crc32(key)))
