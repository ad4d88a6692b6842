"""Process: starts child processes, each at the head of a group of its own, signals and ends them
with all they started, and says how they ended; and the messages between our processes, each a JSON
header and a body of bytes or rows, over pipes or sockets.

A group's number is used only while it is certainly its own: the kernel gives it to another process
once the first of the group and all others are gone. So a child that ended is reaped only after what
it left behind was killed; until then the kernel keeps its number.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa

log = logging.getLogger(__name__)

POLL_S = 0.02
"""How often a process that is waited for is checked for its end."""

PIPE_BYTES = 2**20
"""Size of each pipe, the most that Linux allows without privileges. Windows of 13 MB went through
1.2 times as fast as with its usual 64 KiB."""

TAIL_BYTES = 2**16
"""Bytes of stderr that are held for its last line."""

ECHO_S = 1.0
"""How long the end of a dead process's stderr is waited for: what left its group may hold it
open."""

KILL_S = 5.0
"""How long a process that was killed is waited for; one that a driver holds in the kernel is left
behind."""

AUTOGROUP_TRIES, AUTOGROUP_WAIT_S = 10, 0.15
"""Tries of a write to autogroup, and the pause between: Linux takes one in 0.1 s, of all that are
not privileged."""

Output = Literal["inherited", "captured", "piped"]
"""Where a child's output goes. ``inherited``: where ours does. ``captured``: stderr to a file
without a name, which a child can still write to that outlives us, stdout nowhere. ``piped``: stdin
and stdout are pipes of ours, stderr is held and passed on to ours."""


class ChildProcess:
    """A process that we start, and what it started, in a session and a group with its number; stdin
    is empty, unless piped.

    Args:
        command: program and arguments.
        output: where what it says goes.
        environment: all of its variables; ours by default.
        files: descriptors of ours that it has, too, under the same numbers.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: Output = "inherited",
        environment: Mapping[str, str] | None = None,
        files: Collection[int] = (),
    ) -> None:
        self._reaping = threading.Lock()
        self._tail = b""
        self._echo: threading.Thread | None = None
        with contextlib.ExitStack() as unless_started:
            self._retained = (
                unless_started.enter_context(tempfile.TemporaryFile())
                if output == "captured"
                else None
            )
            nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE
            stdin, stdout, stderr = {
                "inherited": (nowhere, None, None),
                "captured": (nowhere, nowhere, self._retained),
                "piped": (pipe, pipe, pipe),
            }[output]
            self._popen = subprocess.Popen(
                list(command),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                pass_fds=tuple(files),
                start_new_session=True,
            )
            unless_started.pop_all()
        self.pid = self._popen.pid
        if self._popen.stderr is not None:
            for file in self.pipes():
                # the user's limit is reached, or this is not Linux
                with contextlib.suppress(OSError, AttributeError):
                    fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._echo = threading.Thread(
                target=self._pass_on,
                args=(self._popen.stderr,),
                name=f"stderr of {self.pid}",
                daemon=True,
            )
            try:
                self._echo.start()
            except RuntimeError as exc:
                self._popen.kill()
                self._popen.wait()
                for file in (*self.pipes(), self._popen.stderr):
                    file.close()
                raise OSError(errno.EAGAIN, str(exc)) from exc

    @property
    def status(self) -> int | None:
        """Its exit status, or the signal that ended it, below zero; None until :meth:`ended` has
        seen its end."""
        return self._popen.returncode

    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Its stdin, to write to, and its stdout, to read from, of a child that is piped; whatever
        uses them closes them."""
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout

    def ended(self) -> bool:
        """Whether the process has ended; reaps it, and kills what it left behind in its group."""
        with self._reaping:
            if (
                self.status is None
                and self._over()
                and self._popen.poll() is not None
                and self._retained is not None
            ):
                with self._retained as retained:
                    retained.seek(max(0, retained.seek(0, os.SEEK_END) - TAIL_BYTES))
                    self._tail = retained.read()
            return self.status is not None

    def signal(self, number: int) -> None:
        """Send a signal to the whole group; to none that was reaped, whose number may be
        another's."""
        with self._reaping:
            if self.status is None:
                _signal_group(self.pid, number)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait for its end, at most so long; returns whether it ended."""
        limit = time.monotonic() + timeout_s
        while not self.ended():
            left_s = limit - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(POLL_S, left_s))
        return True

    def how_it_ended(self) -> str:
        """As :func:`end_in_words`; of one that failed with what it said last."""
        words = self.last_words() if (self.status or 0) > 0 else ""
        return end_in_words(self.status) + (f": {words}" if words else "")

    def last_words(self) -> str:
        """The last line of its stderr that says something, of what ended and is not ``inherited``,
        of a command of ours without the command's name; what is no UTF-8 shows as ``�``."""
        if self._echo is not None:
            self._echo.join(ECHO_S)
        lines = [
            line.strip()
            for line in self._tail.decode(errors="replace").splitlines()
            if line.strip()
        ]
        return lines[-1].removeprefix("precompute: ") if lines else ""

    def _over(self) -> bool:
        """Whether it ended. What it left behind is killed then, by the number that is its own until
        it is reaped."""
        # macOS, before Python 3.13
        if not hasattr(os, "waitid"):
            return True
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
        # another thread or process reaped it
        except ChildProcessError:
            return True
        _signal_group(self.pid, signal.SIGKILL)
        return True

    def _pass_on(self, file: IO[bytes]) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        with file:
            while data := os.read(file.fileno(), 65536):
                self._tail = (self._tail + data)[-TAIL_BYTES:]
                # our own may be closed, or a file on a full disk: no reason for the child's prints
                # to fail
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(decode(data))


def installed_module(module: str) -> list[str]:
    """Command of a module of ours as a program, as it is installed: whatever lies in the working
    directory is not looked at. The environment stays as it is, since such a program may start the
    operator's own."""
    return [sys.executable, "-P", "-m", module]


def python_module(module: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a module of ours as a program: it finds modules where this process
    finds them, and nowhere else."""
    return installed_module(module), {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
    }


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends (Linux), also in the middle of
    a native call that lets no other thread see the end of its input."""
    if sys.platform == "linux":
        import ctypes

        # PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def be_nicer(by: int) -> None:
    """Let others have the processor first: this process with all its threads, and the session at
    whose head it is, where the kernel shares cores out among sessions (Linux's autogroup, ``man 7
    sched``): there the nice value of a process says nothing to those of another session.
    """
    nice = os.nice(by)
    if sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            # it has ended by now
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)
        for _ in range(AUTOGROUP_TRIES):
            try:
                Path("/proc/self/autogroup").write_text(str(nice))
            except BlockingIOError:
                time.sleep(AUTOGROUP_WAIT_S)
            # this kernel has none
            except OSError:
                break
            else:
                break
        else:
            log.warning(
                "others took this machine's turns to change a session's nice value: what this"
                " process computes does not give way to other sessions"
            )


def end_in_words(status: int | None) -> str:
    """How a process ended, as the end of a sentence, by its status as
    :attr:`ChildProcess.status` has it: ``exited with status 3``, ``was ended by signal 15
    (SIGTERM)``; None of one that was killed and goes on: ``cannot be killed``."""
    if status is None:
        return "cannot be killed"
    if status >= 0:
        return f"exited with status {status}"
    if status == -signal.SIGKILL:
        return "was ended by signal 9 (SIGKILL), as by a system that is out of memory"
    # real-time signals have no names
    with contextlib.suppress(ValueError):
        return f"was ended by signal {-status} ({signal.Signals(-status).name})"
    return f"was ended by signal {-status}"


def end_all(processes: Collection[ChildProcess], grace_s: float, kill_s: float = KILL_S) -> None:
    """SIGTERM to each, and SIGKILL to those that have not ended within ``grace_s``; these are
    waited for at most ``kill_s``, and the log tells of those that go on."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, kill_s)):
        for process in processes:
            process.signal(number)
        limit = time.monotonic() + patience_s
        for process in processes:
            process.wait(limit - time.monotonic())
    for process in processes:
        if not process.ended():
            log.error(
                "process %d %s: a driver may hold it in the kernel; it is left behind",
                process.pid,
                end_in_words(None),
            )


def _signal_group(number: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal_number)


# ---- Messages: a JSON header, and a body of bytes or rows.

_LENGTHS = struct.Struct(">IQ")


def framed(header: Mapping[str, Any], body_bytes: int = 0) -> bytes:
    """All of a message that comes before its body."""
    text = json.dumps(header, default=dict).encode()
    return _LENGTHS.pack(len(text), body_bytes) + text


def write_frame(
    file: IO[bytes], header: Mapping[str, Any], body: pa.RecordBatch | pa.Table | None = None
) -> None:
    """Write one message.

    Args:
        file: the pipe.
        header: JSON.
        body: rows, if there are any to send.

    Raises:
        OSError: the pipe has no reader any more.
    """
    data: Any = b""
    if body is not None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, body.schema) as writer:
            writer.write(body)
        data = memoryview(sink.getvalue())
    file.write(framed(header, len(data)))
    file.write(data)
    file.flush()


def read_frame(file: IO[bytes]) -> tuple[dict[str, Any], pa.RecordBatchReader] | None:
    """As :func:`read_message`, with a reader of the body's batches (None, where it is empty)."""
    message = read_message(file)
    if message is None:
        return None
    header, body = message
    return header, pa.ipc.open_stream(body) if body.size else None


def read_message(file: IO[bytes]) -> tuple[dict[str, Any], pa.Buffer] | None:
    """The header and the body of one message; None at the end of the file, also when it ends within
    a message."""
    lengths = file.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    text_bytes, body_bytes = _LENGTHS.unpack(lengths)
    text = file.read(text_bytes)
    body = pa.allocate_buffer(body_bytes)
    if len(text) < text_bytes or (body_bytes and file.readinto(memoryview(body)) < body_bytes):  # type: ignore[attr-defined]
        return None
    return json.loads(text), body


def take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Take, in a child and first of all, its stdin and stdout for messages alone; what is printed,
    in Python or below it, goes to stderr. It ends with its parent."""
    die_with_parent()
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return source, sink
