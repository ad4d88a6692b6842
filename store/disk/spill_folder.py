"""Spill folder: where DuckDB puts what does not fit in memory. Gone with its process, however that
dies.

A folder is locked for as long as its process lives; anyone who makes one removes those that nobody
holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "precompute-duckdb-"
_LOCK = "held"
_UNLOCKED_S = 3600.0
"""A folder without a lock file is just being made, or was left between the two steps: it is left
alone for an hour."""


class SpillFolder:
    """A folder of one's own under the system's temporary folder (``TMPDIR``)."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._file = (self.path / _LOCK).open("ab")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove it; closing twice is no error."""
        self._file.close()
        shutil.rmtree(self.path, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of processes that died."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Somebody else's, or gone meanwhile.
        with contextlib.suppress(OSError):
            if not (folder / _LOCK).exists():
                dead = time.time() - folder.stat().st_mtime > _UNLOCKED_S
            else:
                with (folder / _LOCK).open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                dead = True
            if dead:
                shutil.rmtree(folder, ignore_errors=True)
