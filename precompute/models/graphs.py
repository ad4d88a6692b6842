"""Graphs: a forward whose launches are recorded once for each shape that repeats, and played back
as one (CUDA graphs). The host's part of a small batch, some hundred launches, becomes one; large
batches gain nothing.

A graph reads and writes memory of its own: inputs are copied into it and outputs out of it, all on
the stream that computes. A shape that cannot be recorded is launched as if there were no graphs.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from precompute.engine.resources import first_line, is_device_lost
from precompute.store.errors import ConfigError

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
    """A forward whose inputs and outputs all have one entry for each row, by graphs where shapes
    repeat.
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
