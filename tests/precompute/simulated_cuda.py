"""A stand-in for CUDA that computes on the CPU and finds races: every stream, and the host, has a
vector clock, and what touches memory must come after all that it depends on by an event that was
waited for (Mattern 1989; as race detectors for threads do, Flanagan & Freund 2009). So an order
that is missing is found whatever a real GPU's timing would have been.

What torch does for its user is taken for granted: a stream's work is done in order, a launch comes
after what the host did before, and pinned memory that a copy reads is not given to others before
that copy is done.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

HOST = "host"
GPU = torch.device("cuda", 0)
Clock = dict[str, int]


@dataclass
class Memory:
    """A block of a device's or of pinned memory, and who touched it when."""

    machine: Machine
    owner: str
    what: str
    write: tuple[str, int] | None = None
    reads: Clock = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)

    def __del__(self) -> None:
        self.machine.freed(self)


class Machine:
    """Streams, their clocks, and what went wrong."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {HOST: {HOST: 0}}
        self.streams: dict[int, Stream] = {}
        """By address; torch's own, the first, has 0."""
        self.races: list[str] = []
        self.waits: list[str] = []
        """Of the host, for the device, that no call names."""
        self.replays = 0
        self.blocks: dict[int, Memory] = {}
        self.pinned: list[torch.Tensor] = []
        """Pinned memory: the number of one that is gone may be another's."""
        self.current = self.stream("computing")
        self.recording: Graph | None = None
        self.under_way = 0
        """Events that were recorded, and that the host has not waited for."""
        self.behind: list[int] = []
        """For each event that the host waited for, how many others were under way."""
        self.open_pools: list[Any] = []
        """Of graphs: memory in these is given out to what is recorded."""

    def stream(self, name: str) -> Stream:
        found = f"{name} {len(self.clocks)}" if name in self.clocks else name
        self.clocks[found] = {}
        made = Stream(self, found, GPU, len(self.streams))
        self.streams[made.cuda_stream] = made
        return made

    def join(self, one: str, other: Clock) -> None:
        mine = self.clocks[one]
        for who, at in other.items():
            mine[who] = max(mine.get(who, 0), at)

    def before(self, access: tuple[str, int], who: str) -> bool:
        return self.clocks[who].get(access[0], 0) >= access[1]

    def touch(self, who: str, reads: list[Memory], writes: list[Memory], what: str) -> None:
        clock = self.clocks[who]
        if who != HOST:
            self.join(who, self.clocks[HOST])
        clock[who] = clock.get(who, 0) + 1
        for block in reads:
            if block.write is not None and not self.before(block.write, who):
                self.races.append(
                    f"{what} by {who} reads {block.what} before {block.write[0]} has written it"
                )
            block.reads[who] = clock[who]
        for block in writes:
            pending = [
                access
                for access in (*block.reads.items(), *([block.write] if block.write else []))
                if not self.before(access, who)
            ]
            if pending:
                self.races.append(
                    f"{what} by {who} writes {block.what} while {pending[0][0]} is at it"
                )
            block.write, block.reads = (who, clock[who]), {}

    def freed(self, block: Memory) -> None:
        """It is given to the next that takes memory, in the order of the stream that took it and of
        those that were recorded."""
        if block.owner == HOST:
            return
        for who, at in (*block.reads.items(), *([block.write] if block.write else [])):
            if who not in (block.owner, HOST, *block.recorded) and not self.before(
                (who, at), block.owner
            ):
                self.races.append(f"{block.what} is freed while {who} is at it")

    def block_of(self, tensor: torch.Tensor) -> Memory | None:
        return self.blocks.get(tensor.untyped_storage()._cdata)


@dataclass
class Stream:
    machine: Machine
    name: str
    device: torch.device
    cuda_stream: int

    def wait_stream(self, other: Stream) -> None:
        self.machine.join(self.name, self.machine.clocks[other.name])

    def synchronize(self) -> None:
        self.machine.join(HOST, self.machine.clocks[self.name])


@dataclass
class Event:
    machine: Machine
    clock: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(self.machine.clocks[(stream or self.machine.current).name])
        self.machine.under_way += 1

    def synchronize(self) -> None:
        assert self.clock is not None, "an event that was not recorded"
        self.machine.under_way -= 1
        self.machine.behind.append(self.machine.under_way)
        self.machine.join(HOST, self.clock)


class OnGpu(torch.Tensor):
    """A tensor that says it is on the GPU, around one that is not."""

    plain: torch.Tensor
    block: Memory
    machine: Machine

    @staticmethod
    def __new__(cls, inner: torch.Tensor, block: Memory) -> OnGpu:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            dtype=inner.dtype,
            device=GPU,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
        )
        made.plain, made.block, made.machine = inner, block, block.machine
        found: OnGpu = made
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} went past the stand-in")

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.recorded.add(stream.name)


ATTRIBUTES = ("device", "is_cuda", "requires_grad", "grad_fn", "plain", "block")
"""Told by the tensor itself, and not by what is inside."""
WAITING = (
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "unique",
    "masked_select",
)
"""What the host cannot know before the device has computed."""


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, tree)
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def launch(machine: Machine, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of torch on the current stream, or a copy between host and device; the host
    waits where torch would have it wait."""
    known: dict[int, Memory] = {}
    for t in _tensors((args, kwargs)):
        block = t.block if isinstance(t, OnGpu) else machine.block_of(t)
        if block is not None:
            known[_storage(t.plain if isinstance(t, OnGpu) else t)] = block
        assert isinstance(t, OnGpu) or not t.dim() or name == "copy_", (
            f"{name} of the GPU's and the host's tensors"
        )
    if not args and "tensor" in kwargs:
        # as torch.nn.init passes it on
        kwargs = dict(kwargs)
        args = (kwargs.pop("tensor"),)
    plain = tree_map(_plain, (args, kwargs))
    run = varlen if "_varlen_attn" in name else func
    out = run(*plain[0], **plain[1])
    results, who = _tensors(out), machine.current.name
    given_out = plain[1].get("out")
    in_place = (
        (name.endswith("_") and not name.startswith("__"))
        or name == "__setitem__"
        or given_out is not None
    )
    target = plain[0][0] if given_out is None and plain[0] else given_out
    mutated = (
        [known[_storage(target)]]
        if in_place and isinstance(target, torch.Tensor) and _storage(target) in known
        else []
    )
    made = {_storage(t): Memory(machine, who, name) for t in results if _storage(t) not in known}
    reads = [block for block in known.values() if block not in mutated]
    waits = name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None)
    if made or mutated or waits:
        machine.touch(who, reads, [*made.values(), *mutated], name)
        if machine.recording is not None:
            if waits:
                machine.recording.broken = True
                raise RuntimeError(
                    f"CUDA error: operation not permitted when stream is capturing ({name})"
                )
            writes = [*made.values(), *mutated]
            machine.recording.calls.append(
                lambda: again(machine, name, run, plain, out, reads, writes)
            )
    if waits:
        machine.waits.append(name)
        machine.join(HOST, machine.clocks[who])
    known |= made
    hosts = name == "copy_" and not isinstance(args[0], OnGpu)
    if in_place and given_out is None and isinstance(args[0], OnGpu):
        return args[0]
    return tree_map(
        lambda v: OnGpu(v, known[_storage(v)]) if isinstance(v, torch.Tensor) and not hosts else v,
        out,
    )


def _plain(value: Any) -> Any:
    return (
        value.plain
        if isinstance(value, OnGpu)
        else torch.device("cpu")
        if isinstance(value, torch.device)
        else value
    )


def again(
    machine: Machine,
    name: str,
    run: Any,
    plain: Any,
    out: Any,
    reads: list[Memory],
    writes: list[Memory],
) -> None:
    """A function of a graph, into the same memory."""
    for place, value in zip(_tensors(out), _tensors(run(*plain[0], **plain[1])), strict=True):
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)
    machine.touch(machine.current.name, reads, writes, f"{name} of a graph")


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    _: torch.Tensor,
    longest: int,
    *rest: Any,
) -> Any:
    """What FlashAttention computes: [tokens, heads, dim]; of what comes after the lengths,
    ``is_causal``, ``scale`` and ``window_size`` count."""
    causal, scale, (before, after) = rest[1], rest[2], rest[3]
    assert causal == ((before, after) == (-1, 0))
    bounds = starts.tolist()
    texts = []
    for a, b in itertools.pairwise(bounds):
        assert b - a <= longest
        one, two, three = (t[a:b].transpose(0, 1).float() for t in (q, k, v))
        behind = torch.arange(b - a)[:, None] - torch.arange(b - a)
        mask = (behind <= (b if before < 0 else before)) & (-behind <= (b if after < 0 else after))
        texts.append(
            torch.nn.functional.scaled_dot_product_attention(
                one, two, three, attn_mask=mask, scale=scale, enable_gqa=len(one) != len(two)
            ).transpose(0, 1)
        )
    return torch.cat(texts).to(q.dtype), torch.empty(0), torch.empty(0)


class Graph:
    """What was launched while it was recorded."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.calls: list[Callable[[], None]] = []
        self.broken = False
        """What was recorded is not valid, as after a wait; then ending it raises as well."""

    def replay(self) -> None:
        self.machine.replays += 1
        for call in self.calls:
            call()


class _Mode(TorchFunctionMode):
    """What names a device or pinned memory, and would reach for the driver."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__"):
            if name != "__get__" or func.__self__.__name__ in ATTRIBUTES:
                return func(*args, **kwargs)
            name = func.__self__.__name__
        if name == "pin_memory":
            return self.pinned(args[0].clone())
        if name in ("to", "cpu") and (moved := self.moved(name, func, args, kwargs)) is not None:
            return moved
        if name == "numpy" and (block := self.machine.block_of(args[0])) is not None:
            self.machine.touch(HOST, [block], [], "numpy")
        if name == "record_stream":
            return args[0].record_stream(args[1])
        if kwargs.pop("pin_memory", False):
            return self.pinned(func(*args, **kwargs))
        device = kwargs.get("device")
        if any(isinstance(t, OnGpu) for t in _tensors((args, kwargs))) or (
            device is not None and torch.device(device).type == "cuda"
        ):
            return launch(
                self.machine,
                name,
                func,
                args,
                kwargs | ({"device": torch.device("cpu")} if device is not None else {}),
            )
        return func(*args, **kwargs)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        block = Memory(self.machine, HOST, "pinned memory")
        self.machine.blocks[tensor.untyped_storage()._cdata] = block
        self.machine.pinned.append(tensor)
        return tensor

    def moved(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """A copy to or from the GPU; None of what stays where it is."""
        tensor = args[0]
        wanted = kwargs.get(
            "device", next((a for a in args[1:] if isinstance(a, (str, torch.device))), None)
        )
        here = torch.device("cpu" if name == "cpu" else tensor.device if wanted is None else wanted)
        if here.type == tensor.device.type:
            rest = [a for a in args[1:] if isinstance(a, (torch.dtype, torch.Tensor))]
            if name == "cpu" or not (rest or {"dtype", "other"} & set(kwargs)):
                return tensor
            if not isinstance(tensor, OnGpu):
                return None
            kwargs.pop("device", None)
            return launch(self.machine, name, func, (tensor, *rest), kwargs)
        waits = not (kwargs.get("non_blocking") or (len(args) > 3 and args[3]))
        dtype = next(
            (a for a in (kwargs.get("dtype"), *args[1:]) if isinstance(a, torch.dtype)),
            tensor.dtype,
        )
        machine, who = self.machine, self.machine.current.name
        source = tensor.plain if isinstance(tensor, OnGpu) else tensor
        block = tensor.block if isinstance(tensor, OnGpu) else machine.block_of(source)
        target = Memory(machine, who if here.type == "cuda" else HOST, f"a copy to the {here.type}")
        machine.touch(who, [block] if block is not None else [], [target], "copy")
        if waits or (here.type == "cuda" and block is None):
            # from memory that is not pinned, the copy is done when the call returns
            machine.join(HOST, machine.clocks[who])
        copy = source.detach().clone().to(dtype)
        return OnGpu(copy, target) if here.type == "cuda" else copy


@contextlib.contextmanager
def simulated_cuda(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)
) -> Iterator[Machine]:
    """One GPU, for what this thread does within."""
    machine = Machine()

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, machine.current = machine.current, stream
        try:
            yield
        finally:
            machine.current = before

    def synchronize(*_: Any) -> None:
        for clock in list(machine.clocks.values()):
            machine.join(HOST, clock)

    def set_stream(stream: Stream) -> None:
        machine.current = stream

    def end_pool(_: int, pool: Any) -> None:
        if pool not in machine.open_pools:
            raise RuntimeError("not currently recording to mempool_id")
        machine.open_pools.remove(pool)

    @contextlib.contextmanager
    def record(graph: Graph, pool: Any, stream: Stream, **_: Any) -> Iterator[None]:
        # torch waits for the device before it records, and what is recorded is not computed
        synchronize()
        before, machine.current = machine.current, stream
        machine.recording = graph
        machine.open_pools.append(pool)
        try:
            yield
        finally:
            machine.recording = None
            if graph.broken:
                # torch 2.13 then leaves its stream current and the pool open
                raise RuntimeError(
                    "CUDA error: operation failed due to a previous error during capture"
                )
            machine.open_pools.remove(pool)
            machine.current = before
        synchronize()

    stand_in = {
        "Stream": lambda *_: machine.stream("a stream"),
        "Event": lambda **_: Event(machine),
        "CUDAGraph": lambda: Graph(machine),
        "graph_pool_handle": lambda: (0, 0),
        "current_stream": lambda *_: machine.current,
        "stream": on,
        "graph": record,
        "set_stream": set_stream,
        "synchronize": synchronize,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: "a simulated GPU",
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (2**33, 2**34),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 1,
        "reset_peak_memory_stats": lambda *_: None,
    }
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_pool)
    # a module's parameters become others when it moves
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda *_: False)
    with _Mode(machine):
        yield machine
