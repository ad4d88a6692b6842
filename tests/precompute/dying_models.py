"""Models that end their process, or do other things that only a process of their own survives; what
they compute is arithmetic."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.model import Prepared
from precompute.store.errors import ModelError
from tests.models import Doubler


class Dying(Doubler):
    """A :class:`tests.models.Doubler` that does ``how`` when ``on`` is in the batch, or for
    every batch.

    Args:
        how: name of a method.
        on: value of x.
        once: a file that is made the first time; there is no second time.
        arguments: the Doubler's.
    """

    def __init__(
        self, how: str, on: float | None = None, once: str | None = None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.how, self.on, self.once = how, on, once

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        if (self.on is None or self.on in batch.column("x").to_pylist()) and not (
            self.once and Path(self.once).exists()
        ):
            if self.once:
                Path(self.once).touch()
            getattr(self, self.how)()
        return super().compute(batch)

    def leave(self) -> None:
        sys.stderr.write("something went wrong\nlast words\n\n")
        sys.stderr.flush()
        os._exit(3)

    def exit(self) -> None:
        sys.exit("enough")

    def crash(self) -> None:
        ctypes.string_at(0)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def hang(self) -> None:
        while True:
            time.sleep(0.01)

    def speak(self) -> None:
        print("printed by Python")
        os.write(1, b"printed below it\n")
        os.write(1, b"\0" * 100_000)
        assert sys.stdin.read() == ""

    def start_another(self) -> None:
        subprocess.Popen(["sleep", "60"])

    def refuse(self) -> None:
        raise ModelError("this source is not for me")


class Waiting(Doubler):
    """A :class:`tests.models.Doubler` that takes ``waits`` seconds for these values of x."""

    def __init__(self, waits: Mapping[str, float]) -> None:
        super().__init__()
        self.waits = waits

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        time.sleep(sum(self.waits.get(str(x), 0.0) for x in batch.column("x").to_pylist()))
        return super().compute(batch)


class Poisoned(Doubler):
    """CUDA's context in its process is gone once ``on`` was in a batch: whatever comes then, the
    same error comes of it."""

    ASSERTED = """CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""

    def __init__(self, on: float) -> None:
        super().__init__()
        self.on, self.lost = on, False

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        self.lost |= self.on in batch.column("x").to_pylist()
        if self.lost:
            raise RuntimeError(self.ASSERTED)
        return super().compute(batch)


class Unloadable(Doubler):
    """Does ``how`` while it loads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "raise":
            raise ValueError("no weights")
        if how == "exit":
            sys.exit("no licence")
        sys.stderr.write("no memory\n")
        sys.stderr.flush()
        os._exit(7)


class SlowToLoad(Doubler):
    """The first process that loads it has it at once; all others take a while, or ``fail``."""

    def __init__(self, folder: str, sleep_s: float = 0.02, *, fail: bool = False) -> None:
        super().__init__(sleep_s=sleep_s)
        try:
            os.mkdir(folder)
        except FileExistsError:
            if fail:
                os._exit(7)
            time.sleep(0.5)


class Told:
    """What the process was told, as text: ``said`` = the worker's arguments, the table's sum, its
    environment and its CPUs; one that sees GPU 7 takes a fifth of the others' time."""

    def __init__(self, table: pa.Table, device: str | None = None) -> None:
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RAYON_NUM_THREADS")
        self.said = " ".join(
            [
                str(device),
                str(sum(table.column("n").to_pylist())),
                *(os.environ.get(n, "-") for n in names),
            ]
        )
        self.said += f" on {','.join(map(str, sorted(os.sched_getaffinity(0))))}"

    def fingerprint(self) -> str:
        return "told"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        time.sleep(0.02 if os.environ.get("CUDA_VISIBLE_DEVICES") == "7" else 0.1)
        return {"said": pa.array([self.said] * batch.num_rows)}


class Launching(Doubler):
    """A staged model on a device that is two batches ahead, and cannot take negative x."""

    cost_unit, start_cost, max_cost = "rows", 4, 4

    @property
    def device(self) -> _Ahead:
        return _Ahead()

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        return {
            row: "x is negative" for row, x in enumerate(batch.column("x").to_pylist()) if x < 0
        }

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        return Prepared(np.ones(batch.num_rows, np.int64), batch)

    def inputs(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
        return prepared.payload.take(pa.array(rows))

    def launch(self, inputs: pa.RecordBatch) -> pa.RecordBatch:
        return inputs

    def land(self, launched: pa.RecordBatch) -> dict[str, np.ndarray]:
        return self.compute(launched)

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        return 10.0 * len(rows)


class _Ahead:
    name, depth = "ahead", 2

    def free_bytes(self) -> int:
        return 2**30

    def peak_bytes(self, reset: bool = False) -> int:
        return 0

    def release(self) -> None:
        pass

    def peak_flops(self) -> float:
        return 1e8


class Hanging(Doubler):
    """A :class:`tests.models.Doubler` that does ``how`` for ten minutes and says so on stderr,
    when it is loaded or for every batch."""

    def __init__(self, how: str, at: str = "load") -> None:
        super().__init__()
        self.how, self.at = how, at
        if at == "load":
            self._hang()

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        self._hang()
        return super().compute(batch)

    def _hang(self) -> None:
        print("hangs", file=sys.stderr, flush=True)
        getattr(self, self.how)(time.monotonic() + 600)

    def in_c(self, _: float) -> None:
        hashlib.pbkdf2_hmac(
            "sha256", b"", b"", 2**31 - 1
        )  # lets go of the interpreter, and is not ended by a signal

    def unmoved(self, limit: float) -> None:
        while time.monotonic() < limit:
            with contextlib.suppress(BaseException):
                time.sleep(600)
