"""Device: the CPU or GPU that torch computes on: copies to it and back, launches that are recorded
and played back (CUDA graphs), and how fast products of a model's shapes can be there. On a GPU
copies run beside the computing; on a CPU there is nothing to copy."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from precompute.engine.resources import (
    Lanes,
    ResidentPeak,
    available_bytes,
    first_line,
    is_device_lost,
)
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
        ConfigError: another name, or no such GPU.
    """

    def __init__(self, name: str | None = None) -> None:
        gpus = gpu_count()
        self.wanted = ("cuda" if gpus else "cpu") if name is None else str(name)
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.wanted):
            raise ConfigError(f"device is cpu, cuda or cuda:N, got {name!r}")
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
        (:func:`probed`), on a GPU large ones."""
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


# ---- Graphs


log = logging.getLogger(__name__)

Tensors = tuple[torch.Tensor, ...]

DIFFERENCE = 0.01
"""Largest difference of a graph's outputs from those of the same kernels launched one by one, as a
share of the largest: sums may be added up in another order."""

REPEATS = 3
"""A shape is recorded when it comes so often: each takes about as long as three batches, and keeps
memory."""
MOST_SHAPES = 64
"""Recorded at most, those that cannot be among them; what comes later runs without."""
STEPS = 4
"""Numbers of rows that are distinguished between a power of two and the next: of what is
computed a fifth at most is padding."""

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Lengths that texts are filled up to, so that shapes repeat; beyond, multiples of the last."""


def bucketed_length(length: int) -> int:
    """The length that one of so many tokens is filled up to."""
    return next(
        (bucket for bucket in LENGTHS if length <= bucket), -(-length // LENGTHS[-1]) * LENGTHS[-1]
    )


def bucketed_rows(rows: int) -> int:
    """The number of rows that so many are filled up to."""
    step = max(1, (1 << (rows - 1).bit_length()) // (2 * STEPS))
    return -(-rows // step) * step


@dataclass(slots=True)
class _Recorded:
    graph: Any
    inputs: Tensors
    outputs: Tensors
    single: bool


class Graphed:
    """A forward whose launches are recorded once for each shape that repeats, and played back as
    one (CUDA graphs); its inputs and outputs all have one entry for each row. The host's part of a
    small batch, some hundred launches, becomes one; large batches gain nothing.

    A graph reads and writes memory of its own: inputs are copied into it and outputs out of it, all
    on the stream that computes. A shape that cannot be recorded is launched as if there were no
    graphs.
    """

    def __init__(self, forward: Callable[..., Any], device: torch.device) -> None:
        self._forward, self._device = forward, device
        self.module = forward if isinstance(forward, torch.nn.Module) else None
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorded: dict[tuple[Any, ...], _Recorded | None] = {}
        """None of a shape that cannot be recorded."""
        self._pool: Any = None
        self._aside: Any = None
        self.counts = {"recorded": 0, "replayed": 0, "launched": 0, "failed": 0}
        """Batches by graphs that were recorded for them, by graphs that were there, and without;
        and of these, those that failed to be recorded, one for each such shape."""

    def __call__(self, *inputs: torch.Tensor) -> Any:
        rows = len(inputs[0])
        filled = bucketed_rows(rows)
        shape = (filled, *((t.shape[1:], t.dtype) for t in inputs))
        recorded = self._recorded.get(shape)
        if recorded is not None:
            self.counts["replayed"] += 1
            return _replayed(recorded, inputs)
        self._seen[shape] += 1
        if (
            self._seen[shape] < REPEATS
            or shape in self._recorded
            or len(self._recorded) >= MOST_SHAPES
        ):
            return self._launched(inputs)
        try:
            recorded = self._record(inputs, filled)
        except Exception as exc:
            # whatever a driver or a compiled module says of it, but for a GPU that is lost
            failure = _lost(exc) or exc
            if is_device_lost(failure):
                raise failure from None
            # what raises here too is the rows' fault, and no reason to record no others
            made = self._launched(inputs)
            self._give_up(shape, failure)
            return made
        self._recorded[shape] = recorded
        self.counts["recorded"] += 1
        return _replayed(recorded, inputs)

    def check(self, inputs: Tensors) -> None:
        """Record these inputs' shape, play it back with their rows in another order, and forget it.

        Raises:
            ConfigError: what is played back is not what the forward computes.
            Exception: whatever recording raises; the forward computes on without.
        """
        recorded = self._record(inputs, bucketed_rows(len(inputs[0])))
        others = tuple(t.roll(1, 0) for t in inputs)
        found, expected = _replayed(recorded, others), self._forward(*others)
        if recorded.single:
            found, expected = (found,), (expected,)
        for one, other in zip(found, expected, strict=True):
            most = other.float().abs().amax()
            if not bool(((one.float() - other.float()).abs() <= DIFFERENCE * most).all()):
                raise ConfigError(
                    "what its graph plays back is not what it computes: it decides on the host by"
                    " what its inputs hold, or writes to tensors of its own"
                )

    def _launched(self, inputs: Tensors) -> Any:
        made = self._forward(*inputs)
        self.counts["launched"] += 1
        return made

    def _give_up(self, shape: tuple[Any, ...], failure: BaseException) -> None:
        self._recorded[shape] = None
        self.counts["failed"] += 1
        if self.counts["failed"] == 1:
            log.warning(
                "a batch of %d rows cannot be recorded as a graph, and is launched without, as all"
                " of its shape from now on; the report counts further ones (engine.graphs): %s: %s",
                shape[0],
                type(failure).__name__,
                first_line(failure),
            )

    def _record(self, inputs: Tensors, rows: int) -> _Recorded:
        places = tuple(t.new_zeros((rows, *t.shape[1:])) for t in inputs)
        for place, given in zip(places, inputs, strict=True):
            place[: len(given)].copy_(given)
        computing = torch.cuda.current_stream(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # graphs share the memory of a pool that they took on the same stream
            self._aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside = self._aside
        aside.wait_stream(computing)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(aside):
                # the libraries' own memory is taken before, and what compiles has compiled
                self._forward(*places)
            with self._recording(graph, computing):
                made = self._forward(*places)
        finally:
            # where that failed, the inputs' memory is given to others, who must come after
            computing.wait_stream(aside)
        single = isinstance(made, torch.Tensor)
        return _Recorded(graph, places, (made,) if single else tuple(made), single)

    @contextlib.contextmanager
    def _recording(self, graph: Any, computing: Any) -> Iterator[None]:
        """As :class:`torch.cuda.graph`, but for what that leaves behind where the capture was
        invalidated (torch 2.13: ``capture_end`` raises before it gives the pool back, and
        ``__exit__`` before it leaves the stream): later launches would go to the wrong stream, and
        memory that several streams use would never be free again."""
        pool = self._pool
        try:
            # other threads go on copying to and from the device
            with torch.cuda.graph(
                graph, pool=pool, stream=self._aside, capture_error_mode="thread_local"
            ):
                yield
        except BaseException:
            torch.cuda.set_stream(computing)
            # of a capture that was ended it is closed already, which raises
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(computing.device.index, pool)
            # the next one begins with neither what this one took nor its stream
            self._pool = self._aside = None
            raise


def _replayed(recorded: _Recorded, inputs: Tensors) -> Any:
    rows = len(inputs[0])
    for place, given in zip(recorded.inputs, inputs, strict=True):
        # rows beyond hold what was there before: no row depends on another
        place[:rows].copy_(given)
    recorded.graph.replay()
    # the next one writes to the same memory
    outputs = tuple(t[:rows].clone() for t in recorded.outputs)
    return outputs[0] if recorded.single else outputs


def _lost(exc: BaseException | None) -> BaseException | None:
    """The error that says that the GPU is lost, among one and those during whose handling it was
    raised: ending a capture raises another one over it."""
    while exc is not None and not is_device_lost(exc):
        exc = exc.__context__
    return exc


def check_rows(forward: Callable[..., Any], batches: Sequence[Tensors]) -> str:
    """Why graphs are not for this module; an empty text where they are: the host knows all its
    inputs' sizes, and each has an entry a row."""
    batch = min(batches, key=lambda tensors: sum(t.numel() for t in tensors))
    made = forward(*batch)
    outputs = (made,) if isinstance(made, torch.Tensor) else tuple(made)
    # of inputs in all batches: that of some may be as long as it has rows by chance
    for what, tensors, rows in (
        *(("input", given, len(given[0])) for given in batches),
        ("output", outputs, len(batch[0])),
    ):
        for position, tensor in enumerate(tensors):
            if not tensor.dim() or len(tensor) != rows:
                return (
                    f"{what} {position} has shape {list(tensor.shape)} for {rows} rows: a graph"
                    " needs one entry a row"
                )
    return ""
