"""Log: how every process of ours tells what it does, a line each on stderr."""

from __future__ import annotations

import logging
import sys


def log_to_stderr() -> None:
    """Have the rooms' loggers say what is worth knowing, and those of libraries what went wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for room in ("jobs", "precompute", "store"):
        logging.getLogger(room).setLevel(logging.INFO)
