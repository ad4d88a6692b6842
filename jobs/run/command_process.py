"""Command process: what every command shares of its process: how signals end it, log, progress,
output that survives a closed pipe or a full disk, and pandas, not imported unless needed.

SIGTERM and SIGINT end a command within seconds, and its report says so.
A call into C delays Python's signal handlers, so a thread reads the signal from a pipe
(:func:`signal.set_wakeup_fd`), interrupts DuckDB, and after :data:`GRACE_S` ends the process. Only
SIGKILL helps where something holds the interpreter's lock all the time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pwd
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from select import select
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from precompute.store.disk.lease import release_leases
from precompute.store.errors import PrecomputeError
from precompute.store.times import shown_time

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)

GRACE_S = 3.5
"""How long a command may take to end by itself. The rest of five seconds is for its report, on a
slow machine."""

LAST_WORDS_S = 5.0
"""How long the callbacks of :func:`last_words` may take: the mount that a command hangs on may have
its report and leases, too."""

STOP_GRACE_S = GRACE_S + LAST_WORDS_S + 1.5
"""How long a command of ours, ended by SIGTERM, is waited for before it is killed: it may take all
of both, on a slow machine. Killing is safe: nothing of a run is visible before its manifest, and
the next load resumes or drops what was loaded."""

INTERRUPT_EVERY_S = 0.2
"""How often DuckDB is interrupted: after the first query another one may begin."""

_STOP = b"\0"


def operator() -> str:
    """Who gave this command: ``user@host``."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        # a container's user need not have a name
        user = str(os.geteuid())
    return f"{user}@{os.uname().nodename}"


class Terminated(KeyboardInterrupt):
    """A signal ends the process; the argument is its number. A KeyboardInterrupt is the one thing
    that a row is never blamed for: a model may raise anything else, a SystemExit or a panic."""


class _State:
    end_signal: int | None = None
    raised = False
    last_words: list[Callable[[], None]] = []  # noqa: RUF012 - one per process, as signals are
    unwritten: str | None = None
    """Why some of the answer could not be written."""


def end_signal() -> int | None:
    """The signal that came since the last :func:`ends_on_signal` began, or None. Any exception
    after it is caused by it: DuckDB raises its own for an interrupted query."""
    return _State.end_signal


def _interrupt_sources() -> None:
    """Interrupt the queries of this process, if DuckDB was imported, which takes 0.16 s."""
    database: Any = sys.modules.get("precompute.sources.database")
    if database is not None:
        database.interrupt_sources()


def signal_text(number: int) -> str:
    """What a signal did to a command, as error text: the report of the run has it."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


@contextlib.contextmanager
def last_words(say: Callable[[], None]) -> Iterator[None]:
    """Have ``say`` called, in any thread, if the process is ended before this block was left."""
    _State.last_words.append(say)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            _State.last_words.remove(say)


@contextlib.contextmanager
def on_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the block :data:`SIGNALS` call ``handler``, and nothing else comes of them, so that
    none comes between two steps. Does nothing in other threads than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def ends_on_signal() -> Iterator[None]:
    """Let :data:`SIGNALS` raise :class:`Terminated` in the main thread, once, and end the process
    if it does not end by that. Does nothing in other threads, which get no signals.

    Raises:
        PrecomputeError: at its end, if some of the command's answer could not be written.
    """
    _State.end_signal, _State.raised = None, False
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    handlers = {number: signal.signal(number, _raise) for number in SIGNALS}
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(read,), name="termination", daemon=True)
    watcher.start()
    try:
        yield
        if _State.unwritten is not None:
            raise PrecomputeError(
                f"stdout cannot be written: {_State.unwritten}; what the command did stands, and"
                " its answer is lost"
            )
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(write, _STOP)
        watcher.join()
        os.close(read)
        os.close(write)
        if end_signal() is not None:
            _say_last_words()


def _say_last_words() -> None:
    """Call the callbacks of blocks that had no time to end, and release leases."""
    while _State.last_words:
        say = _State.last_words.pop()
        # the process ends in any case
        with contextlib.suppress(Exception):
            say()
    release_leases()


def _raise(number: int, _: FrameType | None) -> None:
    _State.end_signal = number
    # a second signal must not interrupt the cleaning up after the first
    if not _State.raised:
        _State.raised = True
        raise Terminated(number)


def _watch(read: int) -> None:
    limit = None
    while True:
        if limit is not None and time.monotonic() >= limit:
            break
        if select([read], [], [], None if limit is None else INTERRUPT_EVERY_S)[0]:
            number = os.read(read, 1)
            if number == _STOP:
                return
            # not while another handler is installed, such as a backfill's
            if limit is None and signal.getsignal(number[0]) is _raise:
                _State.end_signal, limit = number[0], time.monotonic() + GRACE_S
        if limit is not None:
            _interrupt_sources()
    assert _State.end_signal is not None
    last = threading.Thread(target=_say_last_words, name="last words", daemon=True)
    last.start()
    last.join(LAST_WORDS_S)
    report_error(f"{signal_text(_State.end_signal)}, and did not end within {GRACE_S} s")
    sys.stderr.flush()
    os._exit(128 + _State.end_signal)


class UnfailingStream:
    """A text stream whose writes never raise: what comes after its reader is gone is discarded, and
    what a full disk does not take is lost, which :func:`ends_on_signal` reports of an answer."""

    def __init__(self, stream: TextIO, *, is_log: bool = False) -> None:
        self._stream, self._is_log, self._fails = stream, is_log, False

    def write(self, text: str) -> int:
        """As a text stream's."""
        try:
            return self._stream.write(text)
        except OSError as exc:
            self._note(exc)
            return len(text)

    def flush(self) -> None:
        """As a text stream's."""
        try:
            self._stream.flush()
            self._fails = False
        except OSError as exc:
            self._note(exc)

    def end(self) -> None:
        """Flush it, or discard what the interpreter would else try to write once more, and fail."""
        self.flush()
        if self._fails:
            self._discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _note(self, exc: OSError) -> None:
        if isinstance(exc, BrokenPipeError):
            self._discard()
            return
        self._fails = True
        if not self._is_log:
            _State.unwritten = exc.strerror or str(exc)

    def _discard(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        # what is still buffered goes there, too
        os.dup2(null, self._stream.fileno())
        os.close(null)


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """Within the block stdout and stderr raise nothing when their reader is gone or their disk
    full."""
    streams, _State.unwritten = (sys.stdout, sys.stderr), None
    out, err = UnfailingStream(sys.stdout), UnfailingStream(sys.stderr, is_log=True)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        out.end()
        err.end()
        sys.stdout, sys.stderr = streams


_json_out: TextIO | UnfailingStream | None = None


@contextlib.contextmanager
def stdout_for_json_only(for_good: bool) -> Iterator[None]:
    """Within the block all that is printed goes to stderr, by a model or a library in C, too, so
    that stdout has only what :func:`show` prints.

    Args:
        for_good: after the block, too: libraries may print when the process ends.
    """
    global _json_out
    stdout, saved, json_out = sys.stdout, None, None
    # a caller of main() may have replaced it by something that is no file
    with contextlib.suppress(OSError, AttributeError):
        number = stdout.fileno()
        stdout.flush()
        saved = os.fdopen(os.dup(number), "w", encoding=stdout.encoding, errors=stdout.errors)
        os.dup2(sys.stderr.fileno(), number)
        json_out = UnfailingStream(saved)
    _json_out, sys.stdout = json_out or stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, _json_out = stdout, None
        if saved is not None and json_out is not None:
            json_out.end()
            stdout.flush()
            if not for_good:
                os.dup2(saved.fileno(), number)
            saved.close()


def show(text: str) -> None:
    """Print a command's answer to stdout: for what the user asked for, text or JSON."""
    print(text, file=_json_out or sys.stdout, flush=True)


class _NoPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("not imported where nothing needs it", name=name)


def avoid_importing_pandas() -> None:
    """Keep pyarrow from importing pandas (0.15 s and 45 MB) to check whether a value is of it. Only
    for processes that run no code of users."""
    import pyarrow as pa

    sys.meta_path.insert(0, _NoPandas)
    try:
        # its C++ and its Python part check once each
        pa.array([None])
        _ = pa.lib._pandas_api.have_pandas
    finally:
        sys.meta_path.remove(_NoPandas)


_run = ""


@contextlib.contextmanager
def logged_as(run: str) -> Iterator[None]:
    """Within the block a run's id is on every line of a JSON log, from any thread: a process has
    one run at a time."""
    global _run
    before, _run = _run, run
    try:
        yield
    finally:
        _run = before


class _JsonLine(logging.Formatter):
    """A record as one line of JSON: ``at`` (ISO 8601, UTC), ``level``, ``logger``, ``message``,
    ``pid``, of a run also ``run``, and ``error`` with the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if _run:
            line["run"] = _run
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _TextLine(logging.Formatter):
    """A record as a line for people: time, level, logger and message."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return shown_time(datetime.fromtimestamp(record.created, UTC))


def logs_json() -> bool:
    """Whether stderr is to be lines of JSON."""
    return os.environ.get("PRECOMPUTE_LOG") == "json"


def log_to_stderr() -> None:
    """Log to stderr: our loggers from INFO, those of libraries from WARNING; with
    ``PRECOMPUTE_LOG=json`` as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonLine() if logs_json() else _TextLine("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("precompute").setLevel(logging.INFO)


def say(message: str) -> None:
    """Print a message to stderr, in the log's format: for what a user is told beside the answer."""
    if logs_json():
        log.info(message)
    else:
        print(message, file=sys.stderr, flush=True)


def report_error(message: str) -> None:
    """Print the error that ended a command to stderr, in the log's format: for the command line."""
    if logs_json():
        log.error(message)
    else:
        print(f"precompute: {message}", file=sys.stderr)


# ---- Progress: rate and ETA of long work, as a bar on a terminal and as plain lines anywhere else.

LINE_EVERY_S = 5.0


class Progress:
    """Is called with the beginning, progress and end of long work. This one shows nothing: for
    ``--json``, and for work inside other work."""

    def begin(self, what: str, total: int) -> None:
        """Work on ``total`` rows begins."""

    def advance(self, rows: int, retried: int = 0) -> None:
        """``rows`` more are done; ``retried`` rows are tried again, so no time left is shown."""

    def note(self, text: str) -> None:
        """What else is known of it, until the next note."""

    def end(self) -> None:
        """The work of the last ``begin`` is done, or has failed."""


Silent = Progress


class Bar(Progress):
    """A progress bar on stderr by rich, which is imported when a bar begins: it takes 40 ms."""

    def __init__(self) -> None:
        self._rich: RichProgress | None = None

    def begin(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.end()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._rich = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._rich.add_task(what, total=total, rate="")
        self._started, self._done, self._note = time.monotonic(), 0, ""
        self._rich.start()

    def advance(self, rows: int, retried: int = 0) -> None:
        self._done += rows
        if self._rich is not None:
            rate = self._done / max(time.monotonic() - self._started, 1e-9)
            shown = f"{rate:,.0f} rows/s" + _retrying(retried) + self._note
            self._rich.update(self._task, completed=self._done, rate=shown)

    def note(self, text: str) -> None:
        self._note = f" ({text})"

    def end(self) -> None:
        if self._rich is not None:
            self._rich.stop()
            self._rich = None


class Lines(Progress):
    """A line every few seconds, for logs.

    Args:
        say: called with each line.
        every_s: seconds between two of them.
    """

    def __init__(self, say: Callable[[str], None], every_s: float = LINE_EVERY_S) -> None:
        self._say, self._every_s = say, every_s

    def begin(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._note = what, total, 0, ""
        self._started = self._last = time.monotonic()
        self._say(f"{what}: {total:,} rows")

    def advance(self, rows: int, retried: int = 0) -> None:
        self._done += rows
        now = time.monotonic()
        if now - self._last >= self._every_s and self._done < self._total:
            self._last = now
            rate = self._done / max(now - self._started, 1e-9)
            left = (self._total - self._done) / rate if rate else float("inf")
            line = f"{self._what}: {self._done:,} of {self._total:,} rows, {rate:,.0f} rows/s"
            self._say(line + (_retrying(retried) or f", {left:,.0f} s left") + self._note)

    def note(self, text: str) -> None:
        self._note = f" ({text})"


def _retrying(rows: int) -> str:
    return f", retrying {rows:,} row{'s' * (rows != 1)}" if rows else ""


def progress_for(quiet: bool) -> Progress:
    """A bar when stderr is a terminal, else lines, nothing when ``quiet``; with a JSON log always
    lines."""
    if quiet and not logs_json():
        return Silent()
    return Bar() if sys.stderr.isatty() and not logs_json() else Lines(say)
