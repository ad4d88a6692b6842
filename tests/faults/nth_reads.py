"""The n-th read below a root fails, for every n: what cannot be read now is not damaged, so the
command is refused, or goes on as if nothing had been; nothing is decided by it.

    python -m tests.faults.nth_reads [--every 1]

A read is a file that is opened for reading, by Python or pyarrow, a listing, or a stat. Prints a
line for each command; ends with 1 where anything was decided wrongly.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

from tests.faults.harness import VIEW, FaultScene, changed, small_chunks

COMMANDS = {
    "rollback": ["rollback", VIEW],
    "publish": ["publish", VIEW],
    "status": ["status"],
    "gc": ["gc"],
    "run": ["run", VIEW],
    "reconcile": ["reconcile", VIEW],
}
AFTER = {"rollback": 2, "publish": 4, "run": 4}
"""The snapshot that is live when a command is done; of the others what is live stays."""


@dataclass
class Failing:
    """Counts the reads of what lies in a folder; the ``nth`` raises ``number``."""

    folder: Path
    nth: int
    number: int
    calls: int = 0
    what: str = ""

    def check(self, path: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(str(self.folder)):
            self.calls += 1
            if self.calls == self.nth:
                self.what = str(path)
                raise OSError(self.number, os.strerror(self.number), str(path))

    @contextlib.contextmanager
    def active(self) -> Iterator[Failing]:
        with contextlib.ExitStack() as patches:
            for of, name in (
                (os, "listdir"),
                (os, "scandir"),
                (os, "stat"),
                (pq, "ParquetFile"),
                (pq, "read_metadata"),
                (pq, "read_schema"),
            ):
                patches.enter_context(mock.patch.object(of, name, self._wrapped(getattr(of, name))))
            opened = io.open

            def reading(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
                if not set(mode) & set("wax+"):
                    self.check(file)
                return opened(file, mode, *more, **named)

            patches.enter_context(mock.patch.object(io, "open", reading))
            yield self

    def _wrapped(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*of: Any, **named: Any) -> Any:
            self.check(of[0] if of else None)
            return read(*of, **named)

        return checked


def made(folder: Path) -> FaultScene:
    """Snapshots 1 to 3 were published, the third is live, a delta; the fourth is committed."""
    scene = FaultScene(folder, settings={"retention": {"keep": 2, "grace": "0s"}})
    rows = {key: key * 10 for key in range(40)}
    with small_chunks():
        for change, full in (([], False), ([1, 2], True), ([3], False)):
            scene.write(changed(scene.rows, change) if scene.rows else rows)
            scene.run(full=full)
        scene.write(changed(scene.rows, [5], gone=[7]))
        scene.run(command="materialize")
    return scene


@dataclass
class Tried:
    """What became of one command whose n-th read failed; ``reads`` is how many it made."""

    reads: int
    wrong: list[str] = field(default_factory=list)


def tried(scene: FaultScene, command: str, nth: int, number: int) -> Tried:
    """Call a command on a scene of its own, and look at what it decided."""
    store = scene.project().offline.view(VIEW)
    numbers, ref = store.numbers(), store.log.live()
    assert ref is not None
    done, text, found = None, "", Tried(0)
    said = io.StringIO()
    with Failing(scene.folder / "var", nth, number).active() as failing:
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                done = scene.project().cli(*COMMANDS[command])
        except BaseException as exc:
            text = "".join(traceback.format_exception(exc))
    found.reads = failing.calls
    where = f"{command}, read {nth} ({failing.what.removeprefix(str(scene.folder))}), exit {done}"
    if text:
        found.wrong.append(f"{where}: traceback: {text}")
    store = scene.copied(scene.folder).project().offline.view(VIEW)
    now, marks = store.log.live(), store.log.bad()
    assert now is not None
    moved = now.snapshot != ref.snapshot
    if moved and now.snapshot != AFTER.get(command):
        found.wrong.append(f"{where}: snapshot {now.snapshot} is live")
    if done == 0 and command in AFTER and not moved:
        found.wrong.append(f"{where}: nothing moved: {said.getvalue()[-300:]}")
    wanted = {ref.snapshot} if command == "rollback" and moved else set()
    if set(marks) != wanted or any("damaged" in mark.reason for mark in marks.values()):
        found.wrong.append(f"{where}: marks {marks}")
    gone = set(numbers) - set(store.numbers())
    if not gone <= {2} or (command in ("status", "rollback", "reconcile") and gone):
        found.wrong.append(f"{where}: snapshots {sorted(gone)} are gone")
    for left in store.numbers():
        store.layers(store.snapshot(left))
    return found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began, wrong = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory() as name:
        stage = Path(name) / "stage"
        made(stage)
        stage.rename(Path(name) / "prepared")
        for command in COMMANDS:
            reads = tried(copied(Path(name)), command, 0, errno.EIO).reads
            tries = range(1, reads + 1, arguments.every)
            before = len(wrong)
            for nth in tries:
                number = (errno.EIO, errno.EMFILE)[nth // arguments.every % 2]
                wrong += tried(copied(Path(name)), command, nth, number).wrong
            print(f"{command}: {len(tries)} of {reads} reads failed, {len(wrong) - before} wrong")
    print(f"{time.monotonic() - began:.0f} s")
    print("\n".join(wrong[:20]))
    sys.exit(bool(wrong))


def copied(folder: Path) -> FaultScene:
    """A fresh copy of ``prepared`` in that folder, where it was made."""
    import shutil

    shutil.rmtree(folder / "stage", ignore_errors=True)
    shutil.copytree(folder / "prepared", folder / "stage")
    scene = FaultScene(folder / "stage", settings={"retention": {"keep": 2, "grace": "0s"}})
    scene.rows = {key: key * 10 for key in range(40)}
    return scene


if __name__ == "__main__":
    main()
