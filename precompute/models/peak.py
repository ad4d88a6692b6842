"""Peak: FLOP/s that a CPU reaches in products of a model's own shapes, by the best way there is: what MFU is a share of.

An unpacked float32 product of 1,024³ told 180 GFLOP/s of a CPU whose packed ones reach 420; a model beside such a peak looks done when it is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from precompute.engine.cores import allowed, idle_s, usable_threads
from precompute.engine.lanes import Lanes
from precompute.model import digest
from precompute.models.packed_linear import PackedLinear
from precompute.models.threads import compute_threads, compute_with

ROWS = 1024
"""Of a product, at once: tokens of a batch or rows of an MLP's. Four times as many were no quicker."""
LAYERS = 3
"""Shapes that are probed, those with the most to compute."""
PROBE_S = 0.02
"""Each shape in each way, after a first product: with all of them some 0.2 s, once a machine."""

Layer = Callable[[torch.Tensor], torch.Tensor]
Pack = Callable[[torch.nn.Linear], torch.nn.Module]

QUIET = 0.1
"""Share of the CPUs' time that others may take meanwhile, for what was probed to be kept: beside neighbours it is less than the machine can do."""

_known: dict[object, float] = {}
"""What this process knows: a machine does not change, and a scheduler runs a view every hour."""


def shapes_of(module: torch.nn.Module) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the linear layers with the most to compute; a large square of a module that has none."""
    found = {(part.in_features, part.out_features) for part in module.modules() if isinstance(part, torch.nn.Linear)}
    return tuple(sorted(found, key=lambda shape: (-shape[0] * shape[1], shape))[:LAYERS]) or ((1024, 1024),)


def probed(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, pack: Pack | None = None) -> float:
    """The most FLOP/s of products of these shapes: as torch computes them, packed by oneDNN, or by ``pack``; all compute threads in one, or each
    in one of its own. Probed once in a process, and on a machine once while nobody else computes: from then on it is kept in
    ``$XDG_CACHE_HOME/precompute`` (``~/.cache``), by what it depends on.

    Args:
        shapes: (inputs, outputs) of layers.
        dtype: what they are computed in.
        pack: makes a layer in float32 what a technique computes by, where that is no float.
    """
    key = (tuple(shapes), dtype, pack, compute_threads())
    if key not in _known:
        file = _file(shapes, dtype, pack)
        _known[key] = _kept(file) or _measured(shapes, dtype, pack, file)
    return _known[key]


def _measured(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, pack: Pack | None, file: Path) -> float:
    began, own_s, free_s = time.monotonic(), time.process_time(), idle_s()
    with torch.inference_mode():
        rates = [(_flops(layer, x) / _seconds(layer, x), layer, x) for layer, x in _ways(shapes, dtype, pack)]
        best, layer, x = max(rates, key=lambda rate: rate[0])
        flops = max(best, _in_lanes(layer, x))
    all_s = (time.monotonic() - began) * allowed()
    others_s = all_s - (time.process_time() - own_s) - (idle_s() - free_s)
    # relative where there is no home
    if others_s <= QUIET * all_s and file.is_absolute():
        # a home that cannot be written to
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_suffix(f".{os.getpid()}")
            beside.write_text(json.dumps({"flops": flops}))
            beside.replace(file)
    return flops


def _kept(file: Path) -> float | None:
    try:
        flops = json.loads(file.read_text())["flops"]
    except (OSError, ValueError, KeyError, TypeError):
        # there is none, or it is damaged
        return None
    return flops if isinstance(flops, float) and 0 < flops < float("inf") else None


def _file(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, pack: Pack | None) -> Path:
    folder = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "precompute"
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    facts = digest(
        shapes=[list(shape) for shape in shapes],
        computed=[str(dtype), getattr(pack, "__name__", "")],
        cpu=[_cpu(), dict(torch.cpu.get_capabilities()), torch.backends.cpu.get_cpu_capability()],
        threads=[compute_threads(), usable_threads(allowed())],
        versions=[torch.__version__, *(os.environ.get(name, "") for name in names)],
        probe=[ROWS, PROBE_S],
    )
    return folder / f"peak-{facts[:16]}.json"


def _cpu() -> str:
    """The CPU's name; "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


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
