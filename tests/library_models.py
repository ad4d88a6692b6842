"""Libraries that are asked for features in a process of their own, as those of models are."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

Predict = Callable[[pa.RecordBatch], dict[str, Any]]


def doubling(factor: float) -> Predict:
    """``double``, after it printed a lot; a negative ``x`` is none of its own."""

    def predict(batch: pa.RecordBatch) -> dict[str, Any]:
        print("a progress bar")
        os.write(1, b"a line of C's\n")
        os.write(2, b"a warning of C's\n")
        print("a warning", file=sys.stderr)
        x = np.asarray(batch.column("x"))
        if (x < 0).any():
            raise ValueError("x is negative")
        return {"double": factor * x, "vector": x[:, None] + np.arange(4, dtype=np.float32)}

    return predict


def raising() -> Predict:
    raise RuntimeError("no such file in 3.1")


def sleeping() -> Predict:
    time.sleep(60)
    raise AssertionError


def out_of_memory() -> Predict:
    np.empty(2**60, np.uint8)
    raise AssertionError


def exiting() -> Predict:
    sys.exit("a license is missing")


def leaving() -> Predict:
    """Ends without a word to anybody."""
    os._exit(0)


def killed() -> Predict:
    """As by the kernel, where memory runs out: it is asked to take this process first."""
    assert Path("/proc/self/oom_score_adj").read_text() == "1000\n"
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def dying() -> Predict:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def waiting(told: str) -> Predict:
    """Tells its process's number in a file, and has no answer."""
    file = Path(told)
    file.with_suffix(".tmp").write_text(str(os.getpid()))
    file.with_suffix(".tmp").rename(file)
    return sleeping()
