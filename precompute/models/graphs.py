"""Graphs: a forward whose launches are recorded once for each shape that repeats, and played back
as one (CUDA graphs). The host's part of a small batch, some hundred launches, becomes one; large
batches gain nothing.

A graph reads and writes memory of its own: inputs are copied into it and outputs out of it, all on
the stream that computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]

REPEATS = 3
"""A shape is recorded when it comes so often: each takes about as long as three batches, and keeps
memory."""
MOST_SHAPES = 64
"""Recorded at most; those that come later run without."""
STEPS = 4
"""Numbers of rows that are distinguished between a power of two and the next: what is computed and
not requested is a fifth at most."""

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

    Args:
        forward: computes on a GPU.
        device: of its inputs.
    """

    def __init__(self, forward: Callable[..., Any], device: torch.device) -> None:
        self._forward, self._device = forward, device
        self.module = forward if isinstance(forward, torch.nn.Module) else None
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}
        self._pool: Any = None
        self.counts = {"recorded": 0, "replayed": 0, "launched": 0}
        """Batches by graphs that were recorded for them, by graphs that were there, and without."""

    def __call__(self, *inputs: torch.Tensor) -> Any:
        rows = len(inputs[0])
        filled = bucketed_rows(rows)
        shape = (filled, *((t.shape[1:], t.dtype) for t in inputs))
        recorded = self._recorded.get(shape)
        if recorded is None:
            self._seen[shape] += 1
            if self._seen[shape] < REPEATS or len(self._recorded) >= MOST_SHAPES:
                self.counts["launched"] += 1
                return self._forward(*inputs)
            recorded = self._recorded[shape] = self._record(inputs, filled)
            self.counts["recorded"] += 1
        else:
            self.counts["replayed"] += 1
        for place, given in zip(recorded.inputs, inputs, strict=True):
            # rows beyond hold what was there before: no row depends on another
            place[:rows].copy_(given)
        recorded.graph.replay()
        # the next one writes to the same memory
        outputs = tuple(t[:rows].clone() for t in recorded.outputs)
        return outputs[0] if recorded.single else outputs

    def _record(self, inputs: Tensors, rows: int) -> _Recorded:
        places = tuple(t.new_zeros((rows, *t.shape[1:])) for t in inputs)
        for place, given in zip(places, inputs, strict=True):
            place[: len(given)].copy_(given)
        computing = torch.cuda.current_stream(self._device)
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(computing)
        with torch.cuda.stream(aside):
            # the libraries' own memory is taken before, and what compiles has compiled
            self._forward(*places)
        computing.wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads go on copying to and from the device
        with torch.cuda.graph(
            graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"
        ):
            made = self._forward(*places)
        single = isinstance(made, torch.Tensor)
        return _Recorded(graph, places, (made,) if single else tuple(made), single)


def check_rows(forward: Callable[..., Any], batches: Sequence[Tensors]) -> str:
    """Why graphs are not for this module; an empty text where they are: the host knows all its
    inputs' sizes, and each has an entry a row."""
    batch = min(batches, key=lambda tensors: sum(t.numel() for t in tensors))
    made = forward(*batch)
    outputs = (made,) if isinstance(made, torch.Tensor) else tuple(made)
    for what, tensors in (("input", batch), ("output", outputs)):
        for position, tensor in enumerate(tensors):
            if not tensor.dim() or len(tensor) != len(batch[0]):
                return (
                    f"{what} {position} has shape {list(tensor.shape)} for {len(batch[0])} rows: a"
                    " graph needs one entry a row"
                )
    return ""
