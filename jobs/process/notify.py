"""Notify: the operator's own command, informed of what became of a run. It may fail; the run does
not."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from precompute.store.offline.runs import Report

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0


def notify(command: Sequence[str], report: Report, folder: Path) -> None:
    """Run ``command`` in the project's ``folder``, with the run in its environment:
    ``NOTIFY_VIEW``, ``_STATUS``, ``_COMMAND``, ``_RUN``, ``_SNAPSHOT``, ``_EPOCH``, ``_ERROR``. An
    empty command does nothing; one that fails, or takes longer than :data:`TIMEOUT_S`, is logged.
    """
    if not command:
        return
    message = {
        "VIEW": report.view,
        "STATUS": report.status,
        "COMMAND": report.command,
        "RUN": report.run,
        "SNAPSHOT": report.snapshot,
        "EPOCH": report.epoch,
        "ERROR": report.error,
    }
    # the kernel takes neither NUL nor more than 128 KiB in one variable
    texts = {
        name: "" if value is None else str(value).replace("\0", "\\0")[:10_000]
        for name, value in message.items()
    }
    texts = {name: text.encode(errors="replace").decode() for name, text in texts.items()}
    environment = os.environ | {f"NOTIFY_{name}": text for name, text in texts.items()}
    try:
        done = subprocess.run(
            list(command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        log.warning("notify: %s cannot be run: %s", command[0], exc)
        return
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-500:]
        log.warning("notify: %s ended with status %d: %s", command[0], done.returncode, said)
