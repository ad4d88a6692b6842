"""Session: sends inputs to an endpoint, each once, from a thread of its own. What is answered is
cached by the hash of what was sent, in SQLite, as it comes: nothing is paid twice."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from precompute.models.endpoint.endpoint import BadAnswer, Endpoint
from precompute.store.errors import ModelError

NAME = "answers.sqlite"
WAIT_S = 30.0
"""How long another process's write is waited for."""
WRONG_S = 3600.0
"""How long an answer that did not fit is cached: a service that answers nonsense is mended, and
what a killed run has paid is known until the next."""
MOST_KEYS = 500
"""Keys of one query, at most."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, until INTEGER, tries INTEGER, wrong"
    " TEXT, answer BLOB, sum INTEGER) WITHOUT ROWID"
)
DELETED_S = 90 * 86400
"""Seconds since its expiry after which an answer is no longer deleted: by a clock that is years
ahead all expired longer ago, and they were paid for."""
# where all have expired it may be the clock that is wrong, too
_EXPIRED = (
    "DELETE FROM answers WHERE until BETWEEN ?1 - ?2 AND ?1 - 1 AND EXISTS (SELECT 1 FROM answers"
    " WHERE until >= ?1)"
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
                # one for each thread: readers do not wait for writers
                self._writing = opened.enter_context(contextlib.closing(self._connected()))
                self._writing.execute("PRAGMA journal_mode = WAL")
                self._writing.execute("PRAGMA synchronous = FULL")
                self._writing.execute(_TABLE)
                self._writing.execute(_EXPIRED, (int(time.time()), DELETED_S))
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


# ---- requests


FAILED_S, MOST_FAILED = 60.0, 10_000
"""Seconds for which an input without an answer is remembered, and how many are: the engine looks
for the bad row of a batch by halves."""


@dataclass(frozen=True, slots=True)
class Input:
    """What one row sends: its text, and the hash of all that is sent."""

    key: bytes
    text: str


Answers = Callable[[Sequence[Input]], Awaitable[Mapping[bytes, bytes | BadAnswer | ModelError]]]
"""Sends the inputs of one request → what is answered to each, by key: checked, and as it is
cached."""


class Session:
    """One endpoint's requests in this process, of ``group`` inputs each. Its thread begins with the
    first."""

    def __init__(
        self, endpoint: Endpoint, cache_folder: Path, cache_days: float, group: int
    ) -> None:
        self.endpoint = endpoint
        self._cache_folder, self._cache_days, self._group = cache_folder, cache_days, group
        self.committed = 0
        """Answers that are in the cache since this began."""
        self._under_way = dict[bytes, asyncio.Future[bytes]]()
        self._groups = set[asyncio.Task[None]]()
        self._failed = OrderedDict[bytes, tuple[float, BadAnswer]]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cache: AnswerCache
        self._writer = ThreadPoolExecutor(1, "answers")
        self._unwritten: tuple[list[tuple[bytes, Answer]], asyncio.Future[None]] | None = None
        self._writes: asyncio.Task[None] | None = None
        self._starting = threading.Lock()

    def contents(
        self, inputs: Sequence[Input], answers: Answers
    ) -> Future[list[bytes | BaseException]]:
        """What is answered to each input, or what is wrong, in their order.

        Raises:
            ModelError: the answers' cache cannot be opened.
        """
        loop = self._running()
        return asyncio.run_coroutine_threadsafe(self._contents(inputs, answers), loop)

    def stop(self, why: ModelError) -> None:
        """Send nothing more, wait for what is in flight, which is paid, and be ready for another
        try."""
        loop = self._running()
        asyncio.run_coroutine_threadsafe(self._stop(why), loop).result()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._cache = AnswerCache(self._cache_folder, self._cache_days)
                loop = self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="endpoint", daemon=True)
                thread.start()
                weakref.finalize(
                    self, _close, loop, thread, self.endpoint, self._cache, self._writer
                )
            return self._loop

    async def _stop(self, why: ModelError) -> None:
        self.endpoint.stop(why)
        try:
            if self._groups:
                await asyncio.wait(set(self._groups))
        finally:
            self.endpoint.stop(None)

    async def _contents(
        self, inputs: Sequence[Input], answers: Answers
    ) -> list[bytes | BaseException]:
        # up to the first await nothing comes between: an input is cached, or under way, or sent
        self._forget()
        failed = {i.key: self._failed[i.key][1] for i in inputs if i.key in self._failed}
        unknown = {i.key: i for i in inputs if i.key not in self._under_way and i.key not in failed}
        try:
            cached = self._cache.get(list(unknown))
        except ModelError as exc:
            return [exc] * len(inputs)
        known = {
            key: outcome
            for key, answer in cached.items()
            if (outcome := self._outcome(answer)) is not None
        }
        self.endpoint.counts.cached += len(known)
        self._send([i for i in unknown.values() if i.key not in known], cached, answers)
        waited = {
            i.key: self._under_way[i.key]
            for i in inputs
            if i.key not in known and i.key not in failed
        }
        made = await asyncio.gather(*waited.values(), return_exceptions=True)
        outcomes: dict[bytes, bytes | BaseException] = {
            **failed,
            **known,
            **dict(zip(waited, made, strict=True)),
        }
        return [outcomes[i.key] for i in inputs]

    def _forget(self) -> None:
        oldest = time.monotonic() - FAILED_S
        while self._failed and (
            len(self._failed) > MOST_FAILED or next(iter(self._failed.values()))[0] < oldest
        ):
            self._failed.popitem(last=False)

    def _outcome(self, answer: Answer) -> bytes | BadAnswer | None:
        """A cached answer as an outcome; None of one that did not fit and may be tried again."""
        if answer.wrong is None:
            return answer.content
        return (
            BadAnswer(answer.wrong) if answer.tries >= self.endpoint.limits.answer_tries else None
        )

    def _send(
        self, inputs: Sequence[Input], cached: Mapping[bytes, Answer], answers: Answers
    ) -> None:
        loop = asyncio.get_running_loop()
        for first in range(0, len(inputs), self._group):
            part = inputs[first : first + self._group]
            self._under_way |= {i.key: loop.create_future() for i in part}
            task = loop.create_task(
                self._answer(part, {key: answer.tries for key, answer in cached.items()}, answers)
            )
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    async def _answer(
        self, inputs: Sequence[Input], tried: dict[bytes, int], answers: Answers
    ) -> None:
        """Send one group, keep what comes, and hand it to all who wait for it."""
        outcomes: Mapping[bytes, bytes | BaseException]
        try:
            outcomes = await self._answered(inputs, tried, answers)
        except asyncio.CancelledError:
            for i in inputs:
                self._under_way.pop(i.key).cancel()
            raise
        except Exception as exc:
            # what goes wrong belongs to those who wait
            outcomes = {i.key: exc for i in inputs}
        for i in inputs:
            waiting, outcome = self._under_way.pop(i.key), outcomes[i.key]
            if isinstance(outcome, bytes):
                waiting.set_result(outcome)
                continue
            if isinstance(outcome, BadAnswer):
                self._failed[i.key] = (time.monotonic(), outcome)
            waiting.set_exception(outcome)

    async def _answered(
        self, inputs: Sequence[Input], tried: dict[bytes, int], answers: Answers
    ) -> dict[bytes, bytes | BaseException]:
        outcomes, left = dict[bytes, bytes | BaseException](), list(inputs)
        while left:
            again, paid = set[bytes](), list[tuple[bytes, Answer]]()
            for key, outcome in (await answers(left)).items():
                outcomes[key] = outcome
                if isinstance(outcome, bytes):
                    paid.append((key, Answer(outcome)))
                elif isinstance(outcome, BadAnswer) and outcome.content is not None:
                    tried[key] = tried.get(key, 0) + 1
                    paid.append((key, Answer(outcome.content, str(outcome), tried[key])))
                    if tried[key] < self.endpoint.limits.answer_tries:
                        again.add(key)
            if paid:
                await self._keep(paid)
                self.committed += len(paid)
            left = [i for i in left if i.key in again]
        return outcomes

    def _keep(self, answers: Sequence[tuple[bytes, Answer]]) -> asyncio.Future[None]:
        """Commit answers, together with all that came while those before were committed."""
        loop = asyncio.get_running_loop()
        if self._unwritten is None:
            self._unwritten = ([], loop.create_future())
        rows, written = self._unwritten
        rows.extend(answers)
        if self._writes is None:
            self._writes = loop.create_task(self._write())
        return written

    async def _write(self) -> None:
        try:
            while self._unwritten is not None:
                (rows, written), self._unwritten = self._unwritten, None
                try:
                    await asyncio.get_running_loop().run_in_executor(
                        self._writer, self._cache.put, rows
                    )
                except Exception as exc:
                    # it belongs to those who wait
                    written.set_exception(exc)
                else:
                    written.set_result(None)
        finally:
            self._writes = None


def _close(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    endpoint: Endpoint,
    cache: AnswerCache,
    writer: ThreadPoolExecutor,
) -> None:
    if thread is threading.current_thread():
        # the last to hold the session was one of its own tasks, which is the last
        loop.call_soon(loop.stop)
        return
    asyncio.run_coroutine_threadsafe(_ended(endpoint), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    writer.shutdown()
    cache.close()


async def _ended(endpoint: Endpoint) -> None:
    own = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not own]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await endpoint.aclose()
