"""Session: sends inputs to an endpoint, each once, from a thread of its own. What is answered is
cached by the hash of what was sent, in SQLite, as it comes: nothing is paid twice."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import threading
import time
import uuid
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from precompute.plugins.endpoints.endpoint import BadAnswer, Endpoint, NoAnswer, Tokens
from precompute.store.errors import ModelError

NAME = "answers.sqlite"
WAIT_S = 30.0
"""How long another process's write is waited for."""
WRONG_S = 3600.0
"""How long an answer that did not fit, or is suspect, is cached: a service that answers nonsense is
mended, and what a killed run has paid is known until the next."""
SHARED = "other texts were answered the same"
"""Why an answer is suspect that the view accepts."""
BY_VIEW = "misfit: "
"""How the reason begins where the view has something against an answer, and not the model."""
SHARED_BY, MOST_SHARED = 3, 10_000
"""Different inputs with the very same answer from which on it is suspect, and how many answers are
remembered for that: the ones that came last."""
ONCE_MORE = "run --retry-rejected sends it once more"
"""What helps where a row has no answer, or none that fits, once the service is mended."""
WRITER = "answers"
"""The name of the thread that writes the cache begins so."""
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
    ``tries``. Of what a view alone refused the content is cached, too: another one may accept it.
    Without a try nothing was answered at all."""

    content: bytes
    wrong: str | None = None
    tries: int = 1
    until: float = 0.0
    """When it expires, in s since the epoch; known of what was read."""

    @property
    def is_kept(self) -> bool:
        """Whether it is cached for as long as the view says."""
        return self.wrong is None or not self.tries

    @property
    def may_fit(self) -> bool:
        """Whether it depends on the view whether it fits."""
        return self.wrong is None or self.wrong == SHARED or self.wrong.startswith(BY_VIEW)


Accepts = Callable[[Sequence[bytes]], Sequence[str | None]]
"""What a view has against each of some contents; None against one that it accepts. Called in
several threads."""


@dataclass(frozen=True, slots=True)
class Asking:
    """For whom inputs are sent: what the view ``accepts`` is kept, and of what an earlier run was
    answered and rejected, what came before ``again_before`` (s since the epoch) is sent again."""

    accepts: Accepts = lambda contents: [None] * len(contents)
    again_before: float = 0.0
    bill: bytes | None = None
    """Of a run: the key under which its spending is noted, so that the run after one that was
    killed counts what that one has paid."""


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
                    f"the answers' cache {self._path} cannot be opened: {exc}; make room, let it be"
                    " written to, or name another folder (cache: ./…). If it is damaged, put a"
                    " backup in its place: without it all is paid again"
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
                    "SELECT key, tries, wrong, answer, sum, until FROM answers WHERE until >= ? AND"
                    f" key IN ({','.join('?' * len(part))})"
                )
                for key, tries, wrong, content, checksum, until in self._reading.execute(
                    query, (now, *part)
                ):
                    # what does not vouch for itself is requested again
                    if checksum == _sum(key, tries, wrong, content):
                        found[key] = Answer(content, wrong, tries, until)
        return found

    def put(self, answers: Sequence[tuple[bytes, Answer]]) -> None:
        """Store answers, by key; they are committed when this returns.

        Raises:
            ModelError: they cannot be written: what is answered from now on would be paid again.
        """
        now = time.time()
        # to the fraction of a second: what came before a run began is told by it
        until = {True: int(now + self._days * 86400), False: now + WRONG_S}
        rows = [
            (
                key,
                until[a.is_kept],
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


def _remembered(wrong: str) -> str:
    """What was wrong with an answer, for a row that nothing was sent for now."""
    if ONCE_MORE in wrong:
        return wrong
    return f"{wrong} (as answered before: {ONCE_MORE})"


def _with_way_out(bad: BadAnswer) -> BadAnswer:
    """What is wrong with a row that was sent now, and how it is sent again."""
    said = str(bad)
    if ONCE_MORE in said:
        return bad
    return type(bad)(f"{said} ({ONCE_MORE})", bad.content)


def _sum(key: bytes, tries: int, wrong: str | None, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(f"{tries} {wrong}".encode(), zlib.crc32(key)))


# ---- requests


FAILED_S, MOST_FAILED = 60.0, 10_000
"""Seconds for which an input without an answer is remembered, and how many are: the engine looks
for the bad row of a batch by halves."""


@dataclass(frozen=True, slots=True)
class Input:
    """What one row sends: its text, and the hash of all that is sent. ``unanswered`` is whether
    nothing was answered to it in an earlier run."""

    key: bytes
    text: str
    unanswered: bool = False


Answers = Callable[[Sequence[Input]], Awaitable[Mapping[bytes, bytes | BadAnswer | ModelError]]]
"""Sends the inputs of one request → what is answered to each, by key: checked, and as it is
cached."""


_PROCESS = uuid.uuid4().hex
"""Of this process alone, whoever has its number next."""


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


_Row = tuple[bytes, Answer, Asking]
"""An answer by its key, and for whom it was sent."""


class Session:
    """One endpoint's requests in this process, of ``group`` inputs each. Its thread begins with the
    first.

    Args:
        differ: whether different inputs have different answers, as a rule.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        cache_folder: Path,
        cache_days: float,
        group: int,
        differ: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self._differ, self._alike = differ, OrderedDict[bytes, list[bytes]]()
        self._notes = list[tuple[bytes, Answer]]()
        self._bills = set[bytes]()
        self._cache_folder, self._cache_days, self._group = cache_folder, cache_days, group
        self.committed = 0
        """Answers that are in the cache since this began."""
        self._under_way = dict[bytes, asyncio.Future[bytes]]()
        self._groups = set[asyncio.Task[None]]()
        self._failed = OrderedDict[bytes, tuple[float, BadAnswer]]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cache: AnswerCache
        self._writer = ThreadPoolExecutor(1, WRITER)
        self._unwritten: tuple[list[_Row], asyncio.Future[Mapping[bytes, str]]] | None = None
        self._writes: asyncio.Task[None] | None = None
        self._starting = threading.Lock()

    def contents(
        self, inputs: Sequence[Input], answers: Answers, asking: Asking
    ) -> Future[list[bytes | BaseException]]:
        """What is answered to each input, or what is wrong, in their order. What the view does not
        accept is among it: the engine says what is wrong with it.

        Raises:
            ModelError: the answers' cache cannot be opened.
        """
        loop = self._running()
        return asyncio.run_coroutine_threadsafe(self._contents(inputs, answers, asking), loop)

    def noted(self, key: bytes) -> bytes | None:
        """What an earlier run has noted, in the session's thread."""
        found = self._cache.get([key]).get(key)
        return None if found is None else found.content

    def note(self, key: bytes, content: bytes) -> None:
        """Keep a note of the endpoint with the next answers, in the session's thread."""
        self._notes.append((key, Answer(content)))

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
                    self,
                    _close,
                    loop,
                    thread,
                    self.endpoint,
                    self._cache,
                    self._writer,
                    self._bills,
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
        self, inputs: Sequence[Input], answers: Answers, asking: Asking
    ) -> list[bytes | BaseException]:
        # up to the first await nothing comes between: an input is cached, or under way, or sent
        self._forget()
        failed = {i.key: self._failed[i.key][1] for i in inputs if i.key in self._failed}
        unknown = {i.key: i for i in inputs if i.key not in self._under_way and i.key not in failed}
        try:
            if asking.bill is not None and asking.bill not in self._bills:
                self._take_over(asking.bill)
            cached = self._cache.get(list(unknown))
        except ModelError as exc:
            return [exc] * len(inputs)
        known, accepted = self._known(cached, asking)
        self.endpoint.counts.cached += len(known)
        self._send([i for i in unknown.values() if i.key not in known], cached, answers, asking)
        waited = {
            i.key: self._under_way[i.key]
            for i in inputs
            if i.key not in known and i.key not in failed
        }
        if accepted:
            await self._keep([(key, answer, asking) for key, answer in accepted.items()])
        made = await asyncio.gather(*waited.values(), return_exceptions=True)
        outcomes: dict[bytes, bytes | BaseException] = {
            **failed,
            **known,
            **dict(zip(waited, made, strict=True)),
        }
        return [outcomes[i.key] for i in inputs]

    def _take_over(self, key: bytes) -> None:
        """Count what a run has spent that was killed: one that ended has closed its bill."""
        self._bills.add(key)
        noted = self.noted(key)
        if not noted:
            return
        process, pid, *used = noted.decode().split()
        if process != _PROCESS and (int(pid) == os.getpid() or not _is_there(int(pid))):
            self.endpoint.spending.take_over(Tokens(*map(int, used)))

    def _known(
        self, cached: Mapping[bytes, Answer], asking: Asking
    ) -> tuple[dict[bytes, bytes | BadAnswer], dict[bytes, Answer]]:
        """The outcomes of cached answers, but for those that may be sent again; and which of them
        another view had refused, and this one accepts."""
        known, accepted = dict[bytes, bytes | BadAnswer](), dict[bytes, Answer]()
        # what is kept is judged, too: an earlier version kept all, and other views keep theirs
        judged = {
            key: answer.content
            for key, answer in cached.items()
            if answer.may_fit and (answer.wrong is not None or asking.again_before)
        }
        against = dict(zip(judged, asking.accepts(list(judged.values())), strict=True))
        for key, answer in cached.items():
            wrong = against.get(key, answer.wrong)
            if not answer.tries or self._is_sent_again(answer, wrong, asking):
                continue
            if wrong is None and answer.wrong not in (None, SHARED):
                accepted[key] = Answer(answer.content)
            known[key] = answer.content if answer.may_fit else BadAnswer(_remembered(str(wrong)))
        return known, accepted

    def _is_sent_again(self, answer: Answer, wrong: str | None, asking: Asking) -> bool:
        if wrong is None and answer.wrong != SHARED:
            return False
        if asking.again_before and (answer.is_kept or answer.until - WRONG_S < asking.again_before):
            return True
        # what is kept was right for another view, which this one may be mistaken about
        return (
            wrong is not None
            and not answer.is_kept
            and answer.tries < self.endpoint.limits.answer_tries
        )

    def _forget(self) -> None:
        oldest = time.monotonic() - FAILED_S
        while self._failed and (
            len(self._failed) > MOST_FAILED or next(iter(self._failed.values()))[0] < oldest
        ):
            self._failed.popitem(last=False)

    def _send(
        self,
        inputs: Sequence[Input],
        cached: Mapping[bytes, Answer],
        answers: Answers,
        asking: Asking,
    ) -> None:
        loop = asyncio.get_running_loop()
        tried = {key: 0 if asking.again_before else a.tries for key, a in cached.items()}
        unanswered = {key for key, answer in cached.items() if not answer.tries}
        for first in range(0, len(inputs), self._group):
            part = [
                replace(i, unanswered=i.key in unanswered)
                for i in inputs[first : first + self._group]
            ]
            self._under_way |= {i.key: loop.create_future() for i in part}
            task = loop.create_task(self._answer(part, tried, answers, asking))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    async def _answer(
        self, inputs: Sequence[Input], tried: dict[bytes, int], answers: Answers, asking: Asking
    ) -> None:
        """Send one group, keep what comes, and hand it to all who wait for it."""
        outcomes: Mapping[bytes, bytes | BaseException]
        try:
            outcomes = await self._answered(inputs, tried, answers, asking)
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
        self, inputs: Sequence[Input], tried: dict[bytes, int], answers: Answers, asking: Asking
    ) -> dict[bytes, bytes | BaseException]:
        outcomes, left = dict[bytes, bytes | BaseException](), list(inputs)
        while left:
            again, rows = set[bytes](), list[_Row]()
            for key, outcome in (await answers(left)).items():
                outcomes[key] = (
                    _with_way_out(outcome) if isinstance(outcome, BadAnswer) else outcome
                )
                if isinstance(outcome, NoAnswer):
                    # it takes the place of no answer that was paid
                    if key not in tried:
                        rows.append((key, Answer(b"", str(outcome), 0), asking))
                elif isinstance(outcome, bytes) or (
                    isinstance(outcome, BadAnswer) and outcome.content is not None
                ):
                    tried[key] = tried.get(key, 0) + 1
                    wrong = None if isinstance(outcome, bytes) else str(outcome)
                    content = outcome if isinstance(outcome, bytes) else b""
                    rows.append((key, Answer(content, wrong, tried[key]), asking))
            if rows:
                refused = await self._keep(rows)
                self.committed += sum(answer.tries > 0 for _, answer, _ in rows)
                # others' answers were committed together with these
                again = {
                    key
                    for key, _, _ in rows
                    if key in refused and tried[key] < self.endpoint.limits.answer_tries
                }
            left = [i for i in left if i.key in again]
        return outcomes

    def _keep(self, rows: Sequence[_Row]) -> asyncio.Future[Mapping[bytes, str]]:
        """Judge and commit answers, together with all that came while those before were committed;
        returns what is wrong with those of all these that did not fit."""
        loop = asyncio.get_running_loop()
        if self._unwritten is None:
            self._unwritten = ([], loop.create_future())
        waiting, written = self._unwritten
        waiting.extend(rows)
        if self._writes is None:
            self._writes = loop.create_task(self._write())
        return written

    async def _write(self) -> None:
        try:
            while self._unwritten is not None:
                (rows, written), self._unwritten = self._unwritten, None
                notes, self._notes = [*self._notes, *self._bill()], []
                try:
                    refused = await asyncio.get_running_loop().run_in_executor(
                        self._writer, self._commit, rows, notes
                    )
                except Exception as exc:
                    # it belongs to those who wait
                    written.set_exception(exc)
                else:
                    written.set_result(refused)
        finally:
            self._writes = None

    def _bill(self) -> list[tuple[bytes, Answer]]:
        used = self.endpoint.spending.used
        bill = f"{_PROCESS} {os.getpid()} {used.input} {used.output}"
        return [(key, Answer(bill.encode())) for key in self._bills]

    def _commit(
        self, rows: Sequence[_Row], notes: Sequence[tuple[bytes, Answer]]
    ) -> Mapping[bytes, str]:
        """In the writer's thread: what no view has accepted yet is not kept."""
        judged, answers = dict[bytes, str | None](), dict(notes)
        for asking in {id(asking): asking for _, _, asking in rows}.values():
            own = {k: a.content for k, a, by in rows if by is asking and a.wrong is None}
            judged |= dict(zip(own, asking.accepts(list(own.values())), strict=True))
        for key, answer, _ in rows:
            against = judged.get(key)
            wrong = answer.wrong if against is None else f"{BY_VIEW}{against}"
            answers[key] = replace(answer, wrong=wrong)
            if wrong is None and self._differ:
                shared = self._shared(key, answer.content)
                answers |= {k: Answer(answer.content, SHARED) for k in shared}
        self._cache.put(list(answers.items()))
        return {
            key: str(answers[key].wrong)
            for key, _, _ in rows
            if answers[key].tries and answers[key].wrong not in (None, SHARED)
        }

    def _shared(self, key: bytes, content: bytes) -> Sequence[bytes]:
        """The inputs that were answered the same, where there are several."""
        name = hashlib.blake2b(content, digest_size=16).digest()
        keys = self._alike.setdefault(name, [])
        self._alike.move_to_end(name)
        if key not in keys:
            keys.append(key)
        if len(self._alike) > MOST_SHARED:
            self._alike.popitem(last=False)
        if len(keys) < SHARED_BY:
            return ()
        # the others are known by now
        del keys[: len(keys) - SHARED_BY]
        return tuple(keys)


def _close(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    endpoint: Endpoint,
    cache: AnswerCache,
    writer: ThreadPoolExecutor,
    bills: Collection[bytes],
) -> None:
    if thread is threading.current_thread():
        # the last to hold the session was one of its own tasks, which is the last
        loop.call_soon(loop.stop)
        return
    if threading.current_thread().name.startswith(WRITER):
        # garbage was collected in the writer's thread, which cannot wait for itself
        given = (loop, thread, endpoint, cache, writer, bills)
        threading.Thread(target=_close, args=given, name="endpoint closes").start()
        return
    asyncio.run_coroutine_threadsafe(_ended(endpoint), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    writer.shutdown()
    if bills:
        # a full disk fails no run that is over
        with contextlib.suppress(ModelError):
            cache.put([(key, Answer(b"")) for key in bills])
    cache.close()


async def _ended(endpoint: Endpoint) -> None:
    own = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not own]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await endpoint.aclose()
