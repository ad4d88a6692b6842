"""Peak: FLOP/s that a CPU reaches in products of a model's own shapes, by the best way there is: what MFU is a share of.

An unpacked float32 product of 1,024³ told 180 GFLOP/s of a CPU whose packed ones reach 420; a model beside such a peak looks done when it is not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from precompute.lanes.lanes import Lanes
from precompute.models.packed_linear import PackedLinear
from precompute.models.threads import compute_threads, compute_with

ROWS = 1024
"""Of a product, at once: tokens of a batch or rows of an MLP's. Four times as many were no quicker."""
LAYERS = 3
"""Shapes that are probed, those with the most to compute."""
PROBE_S = 0.02
"""Each shape in each way, after a first product: with all of them some 0.2 s, once a process."""

Layer = Callable[[torch.Tensor], torch.Tensor]
Pack = Callable[[torch.nn.Linear], torch.nn.Module]

_known: dict[object, float] = {}
"""What was probed in this process: a machine does not change, and a scheduler runs a view every hour."""


def shapes_of(module: torch.nn.Module) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the linear layers with the most to compute; a large square of a module that has none."""
    found = {(part.in_features, part.out_features) for part in module.modules() if isinstance(part, torch.nn.Linear)}
    return tuple(sorted(found, key=lambda shape: (-shape[0] * shape[1], shape))[:LAYERS]) or ((1024, 1024),)


def probed(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, pack: Pack | None = None) -> float:
    """The most FLOP/s of products of these shapes: as torch computes them, packed by oneDNN, or by ``pack``; all compute threads in one, or each
    in one of its own. Probed once in a process.

    Args:
        shapes: (inputs, outputs) of layers.
        dtype: what they are computed in.
        pack: makes a layer in float32 what a technique computes by, where that is no float.
    """
    key = (tuple(shapes), dtype, pack, compute_threads())
    if key not in _known:
        with torch.inference_mode():
            rates = [(_flops(layer, x) / _seconds(layer, x), layer, x) for layer, x in _ways(shapes, dtype, pack)]
            best, layer, x = max(rates, key=lambda rate: rate[0])
            _known[key] = max(best, _in_lanes(layer, x))
    return _known[key]


def _ways(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, pack: Pack | None) -> Iterator[tuple[Layer, torch.Tensor]]:
    for inputs, outputs in shapes:
        linear, x = torch.nn.Linear(inputs, outputs).requires_grad_(False), torch.randn(ROWS, inputs)
        if pack is not None:
            yield pack(linear), x
            continue
        linear, x = linear.to(dtype), x.to(dtype)
        yield linear, x
        # no oneDNN, or none of this dtype on this CPU
        with contextlib.suppress(AttributeError, RuntimeError):
            yield PackedLinear(linear), x


def _flops(layer: Layer, x: torch.Tensor) -> float:
    return 2.0 * x.shape[0] * x.shape[1] * layer(x).shape[1]


def _in_lanes(layer: Layer, x: torch.Tensor) -> float:
    """FLOP/s of a product in each compute thread at once; 0 where there is one thread."""
    threads = compute_threads()
    if threads == 1:
        return 0.0
    lanes = Lanes(threads, 1, threads, compute_with)
    try:
        together = threading.Barrier(threads)
        alone = [lanes.put(partial(_seconds_of_one, layer, x, together)) for _ in range(threads)]
        return _flops(layer, x) * sum(1 / one.result() for one in alone)
    finally:
        lanes.close()


def _seconds_of_one(layer: Layer, x: torch.Tensor, together: threading.Barrier) -> float:
    with torch.inference_mode():
        layer(x)
        together.wait()
        return _seconds(layer, x, mean=True)


def _seconds(layer: Layer, x: torch.Tensor, *, mean: bool = False) -> float:
    """Of the quickest product, or, where others compute meanwhile, of one on average."""
    layer(x)
    times: list[float] = []
    began = time.perf_counter()
    while not times or time.perf_counter() - began < PROBE_S:
        started = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - started)
    return sum(times) / len(times) if mean else min(times)
