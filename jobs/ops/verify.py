"""Verify: re-read what is live and compare it with itself: checksums, counts, the online rows, the index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.config.project import Project
from precompute.precision.same_value import tolerance
from store.entity_key import key_column
from store.errors import OnlineStoreError, PrecomputeError, SnapshotError, VectorIndexError
from store.offline.refs import LiveRef
from store.offline.snapshot import Snapshot
from store.offline.view_store import ViewStore
from store.online.codec import RowCodec
from store.online.online_store import OnlineStore
from store.online.online_url import open_online_store
from store.online.vector_index import VectorIndex

SAMPLE_ROWS = 2048
"""Rows compared byte by byte with the online store."""
SEARCHED_ROWS = 32
"""Rows looked for in the vector index by their own vector."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, whether it is as it should be, and what was found."""

    check: str
    ok: bool
    found: str


def verify(project: Project, name: str) -> list[Check]:
    """Verify what is live of a view.

    Returns:
        every check that could be made, in order; all are ``ok`` when nothing is wrong.

    Raises:
        ConfigError: there is no such view.
    """
    store = project.stored(name)
    checks: list[Check] = []

    def check(what: str, look: Callable[[], str]) -> bool:
        try:
            checks.append(Check(what, True, look()))
        except PrecomputeError as exc:
            checks.append(Check(what, False, str(exc)))
        return checks[-1].ok

    ref: LiveRef | None = None
    snapshot: Snapshot | None = None

    def manifest() -> str:
        nonlocal ref, snapshot
        ref = store.refs.live()
        if ref is None:
            raise SnapshotError(f"nothing is live: precompute run {name}")
        snapshot = store.snapshot(ref.snapshot)
        chain = ", ".join(f"{layer.number} ({layer.kind})" for layer in store.chain(snapshot))
        return f"snapshot {snapshot.number}, epoch {ref.epoch}; chain: {chain}"

    if not check("manifest", manifest) or snapshot is None or ref is None:
        return checks
    live, at = snapshot, ref

    def checksums() -> str:
        store.check_parts(live)
        layers = store.layers(live)
        return f"{len(layers.paths)} parts, {sum(path.stat().st_size for path in layers.paths):,} bytes"

    if check("checksums", checksums):
        check("rows", lambda: _rows(store, live))
    try:
        online = open_online_store(project.online)
    except PrecomputeError as exc:
        return [*checks, Check("online", False, str(exc))]
    try:
        if check("online pointer", lambda: _pointer(online, name, at)):
            check("online rows", lambda: _online_rows(store, online, live, at))
    finally:
        online.close()
    if live.view.index is not None:
        check("index", lambda: _index(store, live, at))
    return checks


def _rows(store: ViewStore, snapshot: Snapshot) -> str:
    rows = sum(batch.num_rows for batch in store.batches(snapshot, list(snapshot.view.entity), 65536))
    if rows != snapshot.rows:
        raise SnapshotError(f"{rows} rows can be read, the manifest says {snapshot.rows}")
    return f"{rows:,} rows, as the manifest says"


def _pointer(online: OnlineStore, name: str, ref: LiveRef) -> str:
    pointer = online.live(name)
    found = None if pointer is None else (pointer.snapshot, pointer.epoch, pointer.generation)
    if found != (ref.snapshot, ref.epoch, ref.generation):
        raise OnlineStoreError(
            f"the online store serves {'nothing' if pointer is None else f'snapshot {pointer.snapshot}, epoch {pointer.epoch}'}, live is "
            f"snapshot {ref.snapshot}, epoch {ref.epoch}: precompute publish {name} --snapshot {ref.snapshot}"
        )
    return f"snapshot {ref.snapshot}, epoch {ref.epoch}, generation {ref.generation}"


def _online_rows(store: ViewStore, online: OnlineStore, snapshot: Snapshot, ref: LiveRef) -> str:
    name, codec, compared = snapshot.view.name, RowCodec(snapshot.view), 0
    for batch in store.sample(snapshot, SAMPLE_ROWS).to_batches():
        keys = pc.cast(key_column(batch, snapshot.view.entity), pa.binary()).to_pylist()
        computed_at = np.asarray(batch.column("computed_at").cast(pa.int64()))
        packed = [bytes(row) for row in codec.encode(batch, computed_at, snapshot.number).rows()]
        for start in range(0, len(keys), 500):
            found = online.read_generation(name, ref.generation, keys[start : start + 500])
            for key, row, got in zip(keys[start : start + 500], packed[start : start + 500], found, strict=True):
                if got is None or bytes(got) != row:
                    what = "is missing" if got is None else "has other bytes than in Parquet"
                    raise OnlineStoreError(
                        f"key {key.decode()!r} {what}: precompute publish {name} --snapshot {snapshot.number} --reload"
                    )
        compared += len(keys)
    return f"{compared:,} sampled rows equal those in Parquet"


def _index(store: ViewStore, snapshot: Snapshot, ref: LiveRef) -> str:
    view = snapshot.view
    assert view.index is not None
    index = VectorIndex(store.index_folder(ref.generation))
    vectors = snapshot.rows - int(snapshot.quality.get("nulls", 0))
    if len(index) != vectors:
        raise VectorIndexError(f"it holds {len(index)} vectors, the snapshot {vectors}: precompute publish {view.name} --reload")
    sample = store.sample(snapshot, SEARCHED_ROWS)
    sample = sample.filter(sample.column(view.index.on).is_valid())  # a row without a vector cannot be found by it
    keys = key_column(sample, view.entity).to_pylist()
    allowed = tolerance(None, "float32").limit  # the index computes in float32, of the same vectors
    for key, vector in list(zip(keys, sample.column(view.index.on).to_pylist(), strict=True))[:SEARCHED_ROWS]:
        found, scores = index.search(vector, 10, frozenset())
        if not found:  # vectors that are no numbers any more are near to nothing
            raise VectorIndexError(f"nothing is found by the vector of key {key!r}: precompute publish {view.name} --reload")
        square = float(np.square(np.asarray(vector, np.float64)).sum())
        score = scores[found.index(key)] if key in found else scores[0]  # one just like it may stand before it
        right = {"cosine": 1.0, "l2": 0.0, "dot": square}[view.index.metric]
        if abs(score - right) > allowed * (1.0 if view.index.metric == "cosine" else square) and not (
            view.index.metric == "dot" and key not in found
        ):  # a longer one may be nearer by dot
            raise VectorIndexError(f"key {key!r} is not found by its own vector: precompute publish {view.name} --reload")
    return f"{len(index):,} vectors; {min(len(keys), SEARCHED_ROWS)} sampled ones find themselves"
