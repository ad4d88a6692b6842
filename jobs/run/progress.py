"""Progress: rate and ETA of long work, as a bar on a terminal and as plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from precompute.jobs.run.command_process import logs_json, say

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

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
