"""Child: what the processes of a server have in common: each is told on its stdin what it is to be, ends when that ends, and says all it says on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import IO, Any

from precompute.store.answer import MAX_DEADLINE_S
from precompute.store.log import log_to_stderr
from precompute.workers.frames import framed, read_message
from precompute.workers.process import ChildProcess, die_with_parent, python_module

DRAIN_S = MAX_DEADLINE_S + 1
"""How long the requests at hand may take once a server was told to end: no request's deadline is further off."""


def started(module: str, spec: Mapping[str, Any], files: Collection[int], **variables: str) -> ChildProcess:
    """A process that runs ``main()`` of a module of ours.

    Args:
        module: its dotted name.
        spec: plain JSON, what :func:`begin` returns there.
        files: descriptors that it has, too.
        variables: of its environment, beside ours.

    Raises:
        OSError: it cannot be started.
    """
    command, environment = python_module(module)
    child = ChildProcess(command, output="piped", environment=environment | variables, files=files)
    stdin, stdout = child.pipes()
    # what is printed there goes to stderr
    stdout.close()
    # into the pipe, which holds more than that: nobody waits for a process to start
    stdin.write(framed(spec))
    stdin.flush()
    return child


def tell(child: ChildProcess, message: Mapping[str, Any]) -> None:
    """Tell a process that :func:`started` returned more; one that has ended hears nothing.

    Args:
        child: the process.
        message: plain JSON, of less than a pipe holds.
    """
    with contextlib.suppress(OSError):
        stdin, _ = child.pipes()
        stdin.write(framed(message))
        stdin.flush()


def begin(on_message: Callable[[dict[str, Any]], None] = lambda message: None) -> dict[str, Any]:
    """In the child, first of all: what it is to be. It is gone as soon as who started it is.

    Args:
        on_message: called in a thread of its own with all that :func:`tell` tells it later.
    """
    die_with_parent()
    source = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # also what a model prints below Python
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    log_to_stderr()
    message = read_message(source)
    if message is None:
        sys.exit(1)
    threading.Thread(target=_end_with, args=(source, on_message), name="parent", daemon=True).start()
    return message[0]


def _end_with(source: IO[bytes], on_message: Callable[[dict[str, Any]], None]) -> None:
    while (message := read_message(source)) is not None:
        on_message(message[0])
    os._exit(1)
