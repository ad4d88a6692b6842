"""Host: the CPU, as the device of models that libraries other than torch compute."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.cores import allowed, usable_threads
from precompute.engine.memory import ResidentPeak, available_bytes
from precompute.model import Features, Prepared, StagedModel
from precompute.store.errors import ConfigError


class Host:
    """A :class:`precompute.model.ComputeDevice`: launching means computing, with as many threads as
    the process may use, or fewer in a lane."""

    name = "cpu"
    depth = 0

    def __init__(self) -> None:
        self._resident = ResidentPeak()
        self._lane = threading.local()

    def free_bytes(self) -> int:
        return available_bytes()

    def peak_bytes(self, reset: bool = False) -> int:
        return self._resident.lap() if reset else self._resident.bytes()

    def release(self) -> None:
        """Nothing to free."""

    def threads(self) -> int:
        """Threads that the calling thread computes with: its lane's, or ``OMP_NUM_THREADS``, or one
        for each CPU."""
        said = os.environ.get("OMP_NUM_THREADS", "")
        return getattr(self._lane, "threads", None) or usable_threads(
            int(said) if said.isdigit() and int(said) else allowed()
        )

    def compute_with(self, threads: int) -> None:
        self._lane.threads = threads

    def peak_flops(self) -> float:
        """Unknown: what these models compute is no matrix product."""
        return 0.0


class HostModel:
    """Base of models that such a library computes: a row costs 1, and lanes compute at the same
    time."""

    cost_unit = "rows"
    max_cost: int | None = None
    concurrent = True

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """Unknown, or none: comparisons are no such operations."""
        return 0.0

    def compute(self: StagedModel, batch: pa.RecordBatch) -> Features:
        """All rows of a batch at once; one that cannot be used raises ValueError."""
        prepared = self.prepare(batch)
        for reason in prepared.bad.values():
            raise ValueError(reason)
        return self.land(self.launch(prepared.payload))


@contextlib.contextmanager
def installed(extra: str) -> Iterator[None]:
    """Translate the errors of importing a library of an extra.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    try:
        yield
    except ImportError as exc:
        raise ConfigError(f"{extra}: {exc}: pip install 'precompute-store[{extra}]'") from exc
    except OSError as exc:
        # of a library in C that it needs, such as OpenMP's
        raise ConfigError(f"{extra} is installed, and does not load: {exc}") from exc
