"""Device: the CPU or GPU that torch computes on: copies to it and back, and how fast products of a
model's shapes can be there. On a GPU copies run beside the computing; on a CPU there is nothing to
copy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from precompute.engine.resources import Lanes, ResidentPeak, available_bytes
from precompute.model import stays_on_host
from precompute.store.errors import ConfigError

_changing = threading.Lock()


def compute_threads() -> int:
    """Threads that torch computes with: what ``torch.set_num_threads`` or ``OMP_NUM_THREADS`` say,
    or one for each core."""
    return torch.get_num_threads()


def compute_with(count: int) -> None:
    """Let torch compute with so many threads in the calling thread, which must be one that has
    computed nothing yet, and in no other.

    ``torch.set_num_threads`` is of the thread that calls it, and of threads that begin later: those
    get back what they had, by a thread that does nothing else.
    """
    with _changing:
        # the first call in a thread sets what the process has, so it must come before
        process = torch.get_num_threads()
        torch.set_num_threads(count)
        restoring = threading.Thread(
            target=torch.set_num_threads, args=(process,), name="restore threads"
        )
        restoring.start()
        restoring.join()


LAUNCHED_AHEAD = 2
"""Batches on a GPU's way at once: one computing, one being copied in or out."""


class Device:
    """One CPU or one GPU.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one. Within
            :func:`precompute.model.on_host` it is the CPU, and ``wanted`` names what it would be
            elsewhere.

    Raises:
        ConfigError: no such GPU.
    """

    def __init__(self, name: str | None = None) -> None:
        gpus = gpu_count()
        self.wanted = name or ("cuda" if gpus else "cpu")
        if (
            torch.device(self.wanted).type == "cuda"
            and (torch.device(self.wanted).index or 0) >= gpus
        ):
            raise ConfigError(
                f"device {name!r}: torch {torch.__version__} finds {gpus or 'no'} GPUs on this"
                " machine"
            )
        self.torch = torch.device("cpu" if stays_on_host() else self.wanted)
        self.name = str(self.torch)
        self.is_cuda = self.torch.type == "cuda"
        self.depth = LAUNCHED_AHEAD if self.is_cuda else 0
        self.dtype = torch.float32
        """What large products are computed in; set by the conversion of a model."""
        self.shapes: Sequence[tuple[int, int]] = ((1024, 1024),)
        """(inputs, outputs) of the model's layers with the most to compute."""
        self.pack: Pack | None = None
        """Makes a layer in float32 what the model computes it by, where ``dtype`` does not say
        that."""
        self._resident = ResidentPeak()
        self._copies_in = torch.cuda.Stream(self.torch) if self.is_cuda else None  # type: ignore[no-untyped-call]
        self._copies_out = torch.cuda.Stream(self.torch) if self.is_cuda else None  # type: ignore[no-untyped-call]

    def pin(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors in memory that a GPU can copy from while it computes."""
        return (
            tuple(t.pin_memory() if t.dim() else t for t in tensors)
            if self.is_cuda
            else tuple(tensors)
        )

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors on the device; the copy runs beside what computes, and what computes next
        waits for it. A tensor without dimensions is a size, which the host wants to know: it
        stays."""
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
        if self.is_cuda:
            torch.cuda.empty_cache()

    def threads(self) -> int:
        return 1 if self.is_cuda else compute_threads()

    def compute_with(self, threads: int) -> None:
        compute_with(threads)

    def peak_flops(self) -> float:
        """FLOP/s of matrix products in what the model computes in, the best of a few: what a
        perfect model could reach here. On a CPU of the model's own shapes, packed
        (:mod:`precompute.models.device`), on a GPU large ones."""
        if not self.is_cuda:
            return probed(self.shapes, self.dtype, self.pack)
        size = PEAK_SIZE
        with torch.inference_mode():
            linear = torch.nn.Linear(size, size, bias=False, device=self.torch)
            dtype = torch.float32 if self.pack else self.dtype
            layer: Layer = self.pack(linear) if self.pack else linear.to(dtype)
            x = torch.randn(size, size, device=self.torch).to(dtype)
            best = float("inf")
            for _ in range(6):
                started = time.perf_counter()
                layer(x)
                torch.cuda.synchronize(self.torch)
                best = min(best, time.perf_counter() - started)
        return 2 * size**3 / best


def gpu_count() -> int:
    """GPUs that torch can use, as the driver's own library (NVML) counts them: a call of CUDA would
    give this process a context on each."""
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


class PackedLinear(torch.nn.Module):
    """``x @ weight.T + bias`` with the weight packed; values as :class:`torch.nn.Linear`'s up to
    the order of the sums.

    Args:
        linear: the layer, on the CPU; it stays as it is.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [..., in] → [..., out], of the weight's dtype. Named as the layer's own is:
        callers may name it."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.packed, self.bias, "none", [], ""
        )
        return out


ROWS = 1024
"""Rows of a product: tokens of a batch or rows of an MLP's. Four times as many were no
quicker."""
LAYERS = 3
"""Shapes that are probed, those with the most to compute."""
PROBE_S = 0.02
"""Seconds for each shape in each way, after a first product: with all of them some 0.2 s, once a
process."""

Layer = Callable[[torch.Tensor], torch.Tensor]
Pack = Callable[[torch.nn.Linear], Layer]
PEAK_SIZE = 8192
"""Size of the square product by which a GPU's peak is measured: a millisecond or so of an H100 in
bfloat16."""

_known: dict[object, float] = {}
"""Rates that this process has measured: a machine does not change, and a scheduler runs a view
every hour."""


def shapes_of(module: torch.nn.Module) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the linear layers with the most to compute; a large square of a module
    that has none."""
    found = {
        (part.in_features, part.out_features)
        for part in module.modules()
        if isinstance(part, torch.nn.Linear)
    }
    return tuple(sorted(found, key=lambda shape: (-shape[0] * shape[1], shape))[:LAYERS]) or (
        (1024, 1024),
    )


@torch.inference_mode()
def probed(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, pack: Pack | None = None
) -> float:
    """The most FLOP/s of products of these shapes, probed once in a process: as torch computes
    them, packed by oneDNN, or by ``pack``; all compute threads in one, or each in one of its own.

    Args:
        shapes: (inputs, outputs) of layers.
        dtype: what they are computed in.
        pack: makes a layer in float32 what a technique computes by, where that is no float.
    """
    key = (tuple(shapes), dtype, pack, compute_threads())
    if key not in _known:
        rates = [
            (flops / _seconds(layer, x), layer, x, flops)
            for layer, x, flops in _ways(shapes, dtype, pack)
        ]
        best, layer, x, flops = max(rates, key=lambda rate: rate[0])
        _known[key] = max(best, _in_lanes(layer, x, flops))
    return _known[key]


def _ways(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, pack: Pack | None
) -> Iterator[tuple[Layer, torch.Tensor, float]]:
    """Each way, its input, and the FLOP of one product."""
    for inputs, outputs in shapes:
        flops = 2.0 * ROWS * inputs * outputs
        linear = torch.nn.Linear(inputs, outputs).requires_grad_(False)
        x = torch.randn(ROWS, inputs)
        if pack is not None:
            yield pack(linear), x, flops
            continue
        linear, x = linear.to(dtype), x.to(dtype)
        yield linear, x, flops
        # no oneDNN, or none of this dtype on this CPU
        with contextlib.suppress(AttributeError, RuntimeError):
            yield PackedLinear(linear), x, flops


def _in_lanes(layer: Layer, x: torch.Tensor, flops: float) -> float:
    """FLOP/s of a product, which takes ``flops``, in each compute thread at once; 0 where there is
    one thread."""
    threads = compute_threads()
    if threads == 1:
        return 0.0
    lanes = Lanes(threads, 1, threads, compute_with)
    try:
        together = threading.Barrier(threads)
        alone = [lanes.put(partial(_seconds_of_one, layer, x, together)) for _ in range(threads)]
        return flops * sum(1 / one.result() for one in alone)
    finally:
        lanes.close()


def _seconds_of_one(layer: Layer, x: torch.Tensor, together: threading.Barrier) -> float:
    with torch.inference_mode():
        layer(x)
        together.wait()
        return _seconds(layer, x, mean=True)


def _seconds(layer: Layer, x: torch.Tensor, *, mean: bool = False) -> float:
    """Seconds of the quickest product, or, where others compute meanwhile, of one on average."""
    layer(x)
    times: list[float] = []
    began = time.perf_counter()
    while not times or time.perf_counter() - began < PROBE_S:
        started = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - started)
    return sum(times) / len(times) if mean else min(times)
