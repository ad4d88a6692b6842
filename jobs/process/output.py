"""Output: what is printed where nobody reads any more, as under ``| head``, is let go of; the command goes on, and ends as it would have."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Enduring:
    """A stream that a broken pipe does not stop: from then on what is written to it goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As a text stream's."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        """As a text stream's."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._let_go()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _let_go(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        # what it still holds goes there too
        os.dup2(null, self._stream.fileno())
        os.close(null)


@contextlib.contextmanager
def enduring_output() -> Iterator[None]:
    """Within, neither stdout nor stderr raises because its reader went away."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Enduring(sys.stdout), Enduring(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams
