"""World: one published view under a clock of the tests' own, its model, and the API over both, with
no socket between."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.store.answers.fallback import Computed, Miss
from precompute.store.answers.lookup import Lookup
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.store.http.app import create_app
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import Packed, RowBatch
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.times import Reason
from precompute.store.vectors.index_build import build_index
from tests.asgi import call
from tests.memory_store import MemoryStore
from tests.online import named, segment
from tests.server import Reply

PUBLISHED = 1_700_000_000.0
TTL, STALE_FOR = 10.0, 5.0
FEATURES = (Feature("double", "float64"), Feature("vector", "float32", dim=2))
ROW, LOOKUP, SEARCH = "/v1/views/things/rows/", "/v1/views/things/lookup", "/v1/views/things/search"


def batch(
    keys: Sequence[Any], computed_at_us: list[int], entity: Sequence[str] = ("id",)
) -> pa.RecordBatch:
    """Rows of these keys, of several columns where ``entity`` has them, all of the same values."""
    parts = [key if isinstance(key, tuple) else (key,) for key in keys]
    return pa.record_batch(
        {
            **{name: pa.array([part[n] for part in parts]) for n, name in enumerate(entity)},
            "double": pa.array([2.0] * len(keys)),
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array([1.0, 2.0] * len(keys), pa.float32()), 2
            ),
            "computed_at": pa.array(computed_at_us, pa.int64()),
        }
    )


@dataclass
class Model:
    """Stands behind misses: takes ``seconds`` of the world's time, knows the keys ``known``."""

    world: World
    seconds: float = 0.0
    known: frozenset[str] = frozenset()
    asked: list[str] = field(default_factory=list)

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Any,
        deadline: float,
        *,
        query: bool = False,
    ) -> list[Future[Computed]]:
        self.world.now_s += self.seconds
        self.asked += keys
        futures = []
        for key in keys:
            future: Future[Computed] = Future()
            if key in self.known:
                now_us = round(self.world.now_s * 1e6)
                rows = (
                    RowCodec(pointer.view)
                    .row_batch(batch([key], [now_us]), ("id",), pointer.snapshot)
                    .rows
                )
                future.set_result(Computed(rows.at(0), now_us))
            else:
                future.set_exception(
                    Miss(Reason.DEADLINE if key == "late" or query else Reason.UNKNOWN_ENTITY)
                )
            futures.append(future)
        return futures


class World:
    """A published view of rows with an age at its publishing, some ``damaged``, its model, the API
    over both, and the time."""

    def __init__(
        self,
        root: Path,
        ages_s: Mapping[Any, float],
        *,
        fallback: bool = True,
        entity: tuple[str, ...] = ("id",),
        damaged: Collection[str] = (),
        online: OnlineStore | None = None,
        powers: Mapping[str, Any] | None = None,
    ) -> None:
        self.now_s = PUBLISHED
        view = FeatureView(
            "things",
            entity,
            FEATURES,
            ttl_s=TTL,
            stale_for_s=STALE_FOR,
            index=IndexSpec("vector", "l2"),
            fallback=fallback,
            powers=powers or {},
        )
        times = [round(PUBLISHED * 1e6) - round(age_s * 1e6) for age_s in ages_s.values()]
        rows = batch(list(ages_s), times, entity)
        online = MemoryStore() if online is None else online
        packed = RowCodec(view).row_batch(rows, entity, 1)
        flipped = [
            bytes(row[:-1]) + bytes([row[-1] ^ 1]) if key in damaged else bytes(row)
            for key, row in zip(ages_s, packed.rows.strings(), strict=True)
        ]
        packed = RowBatch(packed.keys, Packed.of(flipped), packed.hashes)
        online.load("things", segment(1), iter([packed]))
        build_index(root / "index", [rows], view, model="m")
        published = "2023-11-14T22:13:20Z"
        online.flip(
            Pointer(
                view,
                1,
                1,
                "m",
                len(times),
                len(times),
                published,
                min(times),
                {"x": "double"},
                index="index",
                segments=(named(1),),
            )
        )
        self.model = Model(self)
        self.lookup = Lookup(
            online, root, self.model, clock=lambda: self.now_s, monotonic=lambda: self.now_s
        )
        self.app = create_app(self.lookup)
        # seen for the first time, since no age is larger than what is known
        self.lookup.begin("things", [*ages_s][:1])

    def get(self, path: str, **headers: str) -> Reply:
        return call(self.app, "GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return call(self.app, "POST", path, body, **headers)
