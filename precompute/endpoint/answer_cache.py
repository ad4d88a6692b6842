"""Answer cache: what an endpoint answered, by the hash of what was sent, so that nothing is paid
twice: in SQLite, each answer committed as it comes."""

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
WRONG_S = 3600.0
"""How long an answer that did not fit is cached: a service that answers nonsense is mended, and
what a killed run has paid is known until the next."""
MOST_KEYS = 500
"""Of one query."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, until INTEGER, tries INTEGER, wrong"
    " TEXT, answer BLOB, sum INTEGER) WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered: its content; or what was ``wrong`` with it, the last of so many
    ``tries``."""

    content: bytes
    wrong: str | None = None
    tries: int = 1


class AnswerCache:
    """A folder with one file, which several views and processes may share; one thread of each reads
    and one writes. An answer is safe from the end of its process and the machine's when :meth:`put`
    returns.

    Args:
        folder: made where there is none.
        days: an answer that is put here expires so long after it came.

    Raises:
        ModelError: the folder or file cannot be made, or is none of ours.
    """

    def __init__(self, folder: Path, days: float) -> None:
        self._path, self._days = folder / NAME, days
        with contextlib.ExitStack() as opened:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                # one for each thread: who reads waits for nobody who writes
                self._writing = opened.enter_context(contextlib.closing(self._connected()))
                self._writing.execute("PRAGMA journal_mode = WAL")
                self._writing.execute("PRAGMA synchronous = FULL")
                self._writing.execute(_TABLE)
                self._writing.execute("DELETE FROM answers WHERE until < ?", (int(time.time()),))
                self._reading = opened.enter_context(contextlib.closing(self._connected()))
            except (OSError, sqlite3.Error) as exc:
                raise ModelError(
                    f"the answers' cache {self._path} cannot be opened: {exc}; let it be written"
                    " to, or name another folder (cache: ./…). If it is damaged, put a backup in"
                    " its place: without it all is paid again"
                ) from exc
            self._opened = opened.pop_all()

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=WAIT_S, check_same_thread=False, isolation_level=None
        )

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        """Those of the keys that are there.

        Raises:
            ModelError: the file cannot be read.
        """
        found, now = dict[bytes, Answer](), int(time.time())
        with self._trouble():
            for first in range(0, len(keys), MOST_KEYS):
                part = keys[first : first + MOST_KEYS]
                query = (
                    "SELECT key, tries, wrong, answer, sum FROM answers WHERE until >= ? AND key"
                    f" IN ({','.join('?' * len(part))})"
                )
                for key, tries, wrong, content, checksum in self._reading.execute(
                    query, (now, *part)
                ):
                    # what does not vouch for itself is requested again
                    if checksum == _sum(key, tries, wrong, content):
                        found[key] = Answer(content, wrong, tries)
        return found

    def put(self, answers: Sequence[tuple[bytes, Answer]]) -> None:
        """Store answers, by key; they are committed when this returns.

        Raises:
            ModelError: they cannot be written: what is answered from now on would be paid again.
        """
        now = time.time()
        until = {False: int(now + self._days * 86400), True: int(now + WRONG_S)}
        rows = [
            (
                key,
                until[a.wrong is not None],
                a.tries,
                a.wrong,
                a.content,
                _sum(key, a.tries, a.wrong, a.content),
            )
            for key, a in answers
        ]
        # the connection commits at the end, or rolls back what has not ended by itself
        with self._trouble(), self._writing:
            self._writing.execute("BEGIN IMMEDIATE")
            self._writing.executemany(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)", rows
            )

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    @contextlib.contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as exc:
            raise ModelError(
                f"the answers' cache {self._path} cannot be used: {exc}. Nothing more is requested,"
                " since its answers would be paid again: make room, or, of a damaged file, move it"
                " away"
            ) from exc


def _sum(key: bytes, tries: int, wrong: str | None, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(f"{tries} {wrong}".encode(), zlib.crc32(key)))
