"""Run one view of a project from an orchestrator: a process of its own, its report, and what its
exit status means."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any


class Failed(Exception):
    """The run failed; another try may do, and takes over what was computed."""


class Refused(Exception):
    """The configuration is wrong, rows were rejected past the threshold, or a gate refused to
    publish: another try changes nothing."""


def run_view(
    config: str, view: str, partition: str | None = None, *, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run ``precompute run``.

    Args:
        config: the project's folder.
        view: its name.
        partition: the interval of data time, such as ``2026-11-24``; None for a view without
            partitions.
        log: given each line of the run's log.

    Returns:
        the run's report: snapshot, counts, stages_s, gates …

    Raises:
        Failed: exit status 1, or a signal.
        Refused: exit status 2 or 3.
    """
    command = ["precompute", "-c", config, "run", view, "--json"]
    if partition is not None:
        command += ["--partition", partition]
    # its report goes to a file: nobody reads a pipe of it until the log has ended
    with (
        tempfile.TemporaryFile("w+") as file,
        subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PRECOMPUTE_LOG": "json"},
        ) as process,
    ):
        assert process.stderr is not None
        last = ""
        try:
            for line in process.stderr:
                last = _message(line)
                log(last)
            status = process.wait()
        except BaseException:
            # an orchestrator that stops the task: the run closes its report and lets go of its
            # lease
            process.terminate()
            process.wait()
            raise
        file.seek(0)
        output = file.read()
    if status == 0:
        report: dict[str, Any] = json.loads(output)
        return report
    raise (Refused if status in (2, 3) else Failed)(
        f"precompute run {view}: exit status {status}: {last}"
    )


def _message(line: str) -> str:
    """What a line of the log says; a line that is no JSON, such as what a model prints, as it
    is."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line.strip()
