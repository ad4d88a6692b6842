"""Device: where torch computes. Copies to it and back run beside the computing on a GPU; on a CPU there is nothing to copy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from precompute.engine.memory import ResidentPeak, available_bytes
from precompute.model import stays_on_host
from precompute.models.peak import Pack, probed
from precompute.models.threads import compute_threads, compute_with
from precompute.store.errors import ConfigError

LAUNCHED_AHEAD = 2
"""Batches on a GPU's way at once: one computing, one being copied in or out."""


class Device:
    """One CPU or one GPU.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one. Within :func:`precompute.model.on_host` it is the CPU, and
            ``wanted`` tells what it would be elsewhere.

    Raises:
        ConfigError: no such GPU.
    """

    def __init__(self, name: str | None = None) -> None:
        gpus = gpu_count()
        self.wanted = name or ("cuda" if gpus else "cpu")
        if torch.device(self.wanted).type == "cuda" and (torch.device(self.wanted).index or 0) >= gpus:
            raise ConfigError(f"device {name!r}: torch {torch.__version__} finds {gpus or 'no'} GPUs on this machine")
        self.torch = torch.device("cpu" if stays_on_host() else self.wanted)
        self.name = str(self.torch)
        self.is_cuda = self.torch.type == "cuda"
        self.depth = LAUNCHED_AHEAD if self.is_cuda else 0
        self.dtype = torch.float32
        """What large products are computed in; set by whoever converts the model."""
        self.shapes: Sequence[tuple[int, int]] = ((1024, 1024),)
        """(inputs, outputs) of the model's layers with the most to compute."""
        self.pack: Pack | None = None
        """Makes a layer in float32 what the model computes it by, where that is no float."""
        self._resident = ResidentPeak()
        self._copies_in = torch.cuda.Stream(self.torch) if self.is_cuda else None  # type: ignore[no-untyped-call]
        self._copies_out = torch.cuda.Stream(self.torch) if self.is_cuda else None  # type: ignore[no-untyped-call]

    def pin(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """In memory that a GPU can copy from while it computes."""
        return tuple(t.pin_memory() if t.dim() else t for t in tensors) if self.is_cuda else tuple(tensors)

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """On the device; the copy runs beside what computes, and what computes next waits for it. A tensor without dimensions is a size, which
        the host wants to know: it stays."""
        if not self.is_cuda:
            return tuple(tensors)
        assert self._copies_in is not None
        with torch.cuda.stream(self._copies_in):
            moved = tuple(t.to(self.torch, non_blocking=True) if t.dim() else t for t in tensors)
        computing = torch.cuda.current_stream(self.torch)
        computing.wait_stream(self._copies_in)
        for tensor in moved:
            if tensor.is_cuda:
                tensor.record_stream(computing)
        return moved

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """Begin to copy to the host; bfloat16, which numpy does not know, becomes float32."""
        tensors = [t.float() if t.dtype == torch.bfloat16 else t for t in tensors]
        if not self.is_cuda:
            return Fetch(tensors, None)
        assert self._copies_out is not None
        self._copies_out.wait_stream(torch.cuda.current_stream(self.torch))
        hosts = []
        with torch.cuda.stream(self._copies_out):
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                hosts.append(host.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._copies_out)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._copies_out)
        return Fetch(hosts, done)

    def free_bytes(self) -> int:
        """Memory that can still be taken on the device."""
        if not self.is_cuda:
            return available_bytes()
        free, _ = torch.cuda.mem_get_info(self.torch)
        cached = torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)
        return int(free + cached)

    def peak_bytes(self, reset: bool = False) -> int:
        """Largest memory in use: a GPU's own, or the process's."""
        if not self.is_cuda:
            return self._resident.lap() if reset else self._resident.bytes()
        peak = int(torch.cuda.max_memory_allocated(self.torch))
        if reset:
            torch.cuda.reset_peak_memory_stats(self.torch)
        return peak

    def release(self) -> None:
        """Give cached memory back."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def threads(self) -> int:
        """Threads that torch computes with on a CPU; 1 on a GPU."""
        return 1 if self.is_cuda else compute_threads()

    def compute_with(self, threads: int) -> None:
        """Let the calling thread, a new one, compute with so many."""
        compute_with(threads)

    def peak_flops(self) -> float:
        """FLOP/s of matrix products, the best of a few: what a perfect model could reach here. On a CPU of the model's own shapes, packed
        (:mod:`precompute.models.peak`), on a GPU large ones."""
        if not self.is_cuda:
            return probed(self.shapes, self.dtype, self.pack)
        size = 8192
        with torch.inference_mode():
            a = torch.randn(size, size, device=self.torch).to(self.dtype)
            best = float("inf")
            for _ in range(6):
                started = time.perf_counter()
                torch.nn.functional.linear(a, a)
                torch.cuda.synchronize(self.torch)
                best = min(best, time.perf_counter() - started)
        return 2 * size**3 / best


def gpu_count() -> int:
    """GPUs that torch can use, as the driver's own library (NVML) counts them: asking CUDA would make this process one that has a context on each."""
    return torch.cuda.device_count()


@dataclass(slots=True)
class Fetch:
    """Tensors on their way to the host."""

    tensors: Sequence[torch.Tensor]
    done: Any

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Wait for them."""
        if self.done is not None:
            self.done.synchronize()
        return [np.asarray(t.numpy()) for t in self.tensors]


@contextlib.contextmanager
def traced(path: Path) -> Iterator[None]:
    """Record what torch does inside, in this thread, and write it to ``path`` as a Chrome trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if gpu_count():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        yield
    recorded.export_chrome_trace(str(path))
