"""Crash points: the steps of the commit protocol by name; at each a test can make the process die,
stop or fail.

Nothing happens unless one is armed, by :func:`arm` or the environment
(``PRECOMPUTE_CRASH=manifest.link:2:kill``, the second time). A point stands right after its step:
an ``eio`` there is the step failing with EIO, a ``kill`` is power lost just after it.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

POINTS = (
    "part.write",
    "part.fsync",
    "part.rename",
    "dir.fsync",
    "journal.append",
    "verify",
    "manifest.write",
    "manifest.link",
    "manifest.dirsync",
    "online.load",
    "online.verify",
    "index.build",
    "log.write",
    "log.link",
    "log.dirsync",
    "log.state",
    "online.flip",
    "notify",
    "gc",
)
"""Steps of the commit protocol, in its order. The fault suite hits each of them, with every mode,
at every time it is passed."""

MODES = ("kill", "raise", "eio", "enospc", "torn", "stop")
"""``torn`` cuts the file at hand in half and dies; ``stop`` is SIGSTOP, for a writer that sleeps
past its lease."""


class InjectedError(Exception):
    """What mode ``raise`` raises: an error nobody foresaw."""


@dataclass(slots=True)
class _Armed:
    name: str
    nth: int
    mode: str
    hits: dict[str, int] = field(default_factory=dict)


_armed: _Armed | None = None


def arm(name: str, nth: int = 1, mode: str = "kill") -> None:
    """Make the ``nth`` passing of ``name`` end as ``mode`` says; an empty name only counts
    passings.

    Raises:
        ValueError: no such point or mode.
    """
    global _armed
    if (name and name not in POINTS) or mode not in MODES or nth < 1:
        raise ValueError(
            f"crash point {name}:{nth}:{mode}: points are {', '.join(POINTS)}; modes are"
            f" {', '.join(MODES)}"
        )
    _armed = _Armed(name, nth, mode)


def disarm() -> dict[str, int]:
    """Back to doing nothing; returns how often each point was passed since :func:`arm`."""
    global _armed
    hits, _armed = {} if _armed is None else _armed.hits, None
    return hits


def crashpoint(name: str, path: Path | None = None) -> None:
    """Pass a point.

    Args:
        name: one of :data:`POINTS`.
        path: the file just written, for mode ``torn``.

    Raises:
        OSError, InjectedError: if armed so.
    """
    if _armed is None:
        return
    assert name in POINTS, name
    _armed.hits[name] = _armed.hits.get(name, 0) + 1
    if name == _armed.name and _armed.hits[name] == _armed.nth:
        _fail(_armed.mode, name, path)


def _fail(mode: str, name: str, path: Path | None) -> None:
    if mode == "raise":
        raise InjectedError(f"injected at {name}")
    if mode in ("eio", "enospc"):
        number = errno.EIO if mode == "eio" else errno.ENOSPC
        raise OSError(number, os.strerror(number), None if path is None else str(path))
    if mode == "torn" and path is not None:
        os.truncate(path, path.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGSTOP if mode == "stop" else signal.SIGKILL)


if os.environ.get("PRECOMPUTE_CRASH"):
    _name, _, _rest = os.environ["PRECOMPUTE_CRASH"].partition(":")
    _nth, _, _mode = _rest.partition(":")
    arm(_name, int(_nth or 1), _mode or "kill")
