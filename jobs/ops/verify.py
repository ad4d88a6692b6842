"""Verify: what is live, read again and compared with itself: checksums, counts, the online rows,
the index."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from precompute.jobs.config.project import Project
from precompute.store.account.checker import check_live
from precompute.store.account.rows import check_served
from precompute.store.disk.lease import is_held
from precompute.store.errors import (
    OnlineStoreError,
    PrecomputeError,
    SnapshotError,
    VectorIndexError,
)
from precompute.store.keys import key_column
from precompute.store.offline.log import PUBLISH_LEASE, LiveRef
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.online_store import OnlineStore
from precompute.store.online.url import open_online_store
from precompute.store.vectors.vector_index import VectorIndex
from precompute.techniques.row_errors import tolerance

SAMPLE_ROWS = 2048
"""Rows compared byte by byte with the online store."""
TRIES = 5
"""Tries where something else goes live meanwhile: what is read is of one publishing, or it says
nothing."""
FLIP_S = 2.0
"""How long the online pointer may stay behind that of the root, during a publishing."""
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
    for _ in range(TRIES):
        before = store.log.readable_live()
        checks = _checks(project, store)
        if all(check.ok for check in checks) or store.log.readable_live() == before:
            break
    return checks


def _checks(project: Project, store: ViewStore) -> list[Check]:
    try:
        ref, live, segments = _live(store)
    except PrecomputeError as exc:
        return [Check("manifest", False, str(exc))]
    found = f"snapshot {live.number}, epoch {ref.epoch}; segments: {segments}"
    checks = [Check("manifest", True, found)]

    def check(what: str, look: Callable[[], str]) -> bool:
        try:
            checks.append(Check(what, True, look()))
        except PrecomputeError as exc:
            checks.append(Check(what, False, str(exc)))
        return checks[-1].ok

    if check("checksums", lambda: _checksums(store, live)):
        check("rows", lambda: _rows(store, live))
    try:
        online = open_online_store(project.online)
    except PrecomputeError as exc:
        return [*checks, Check("online", False, str(exc))]
    with contextlib.closing(online):
        if check("online pointer", lambda: _pointer(store, online, live, ref)):
            check("online rows", lambda: _online_rows(store, online, live))
        if live.view.index is not None:
            check("index", lambda: _index(store, live, ref))
        if all(check.ok for check in checks):
            check("account", lambda: _account(store, online))
    return checks


def _account(store: ViewStore, online: OnlineStore) -> str:
    account = check_live(store, online, share=1.0)
    if account.findings:
        raise OnlineStoreError("; ".join(account.trouble))
    return account.looked_at(time.time_ns() // 1000)


def _live(store: ViewStore) -> tuple[LiveRef, Snapshot, str]:
    """The live pointer, its snapshot, and in words, what that is made of."""
    ref = store.log.live()
    if ref is None:
        raise SnapshotError(f"nothing is live: precompute run {store.name}")
    snapshot = store.snapshot(ref.snapshot)
    return (
        ref,
        snapshot,
        ", ".join(snapshot.names),
    )


def _checksums(store: ViewStore, snapshot: Snapshot) -> str:
    store.check_parts(snapshot)
    paths = store.layers(snapshot).paths
    return f"{len(paths)} parts, {sum(path.stat().st_size for path in paths):,} bytes"


def _rows(store: ViewStore, snapshot: Snapshot) -> str:
    rows = sum(
        batch.num_rows for batch in store.batches(snapshot, list(snapshot.view.entity), 65536)
    )
    if rows != snapshot.rows:
        raise SnapshotError(f"{rows} rows can be read, the manifest says {snapshot.rows}")
    return f"{rows:,} rows, as the manifest says"


def _pointer(store: ViewStore, online: OnlineStore, snapshot: Snapshot, ref: LiveRef) -> str:
    name, ends_s = store.name, time.monotonic() + FLIP_S
    while True:
        pointer = online.live(name)
        served = None if pointer is None else (pointer.snapshot, pointer.epoch, pointer.segments)
        right = served == (ref.snapshot, ref.epoch, snapshot.names)
        # a publisher moves one pointer after the other
        if right or not is_held(store.leases, PUBLISH_LEASE) or time.monotonic() > ends_s:
            break
        time.sleep(0.05)
    if not right:
        raise OnlineStoreError(
            "the online store serves"
            f" {'nothing' if pointer is None else f'snapshot {pointer.snapshot}, epoch {pointer.epoch}'},"  # noqa: E501
            f" live is snapshot {ref.snapshot}, epoch {ref.epoch}: precompute publish {name}"
            f" --snapshot {ref.snapshot}"
        )
    return f"snapshot {ref.snapshot}, epoch {ref.epoch}, segments {', '.join(snapshot.names)}"


def _online_rows(store: ViewStore, online: OnlineStore, snapshot: Snapshot) -> str:
    pointer = online.live(store.name)
    if pointer is None:
        raise OnlineStoreError(f"view {store.name!r} was taken out of the online store meanwhile")
    return (
        f"{check_served(store, online, pointer, snapshot, SAMPLE_ROWS):,} sampled rows equal those"
        " in Parquet"
    )


def _index(store: ViewStore, snapshot: Snapshot, ref: LiveRef) -> str:
    view = snapshot.view
    assert view.index is not None
    if not ref.indexes:
        raise VectorIndexError(f"it was published without one: precompute publish {view.name}")
    index = VectorIndex(*map(store.index_folder, ref.indexes))
    vectors = snapshot.rows - int(snapshot.quality.get("nulls", 0))
    if len(index) != vectors:
        raise VectorIndexError(
            f"it holds {len(index)} vectors, the snapshot {vectors}: precompute publish {view.name}"
            " --reload"
        )
    sample = store.sample(snapshot, SEARCHED_ROWS)
    # a row without a vector cannot be found by it
    sample = sample.filter(sample.column(view.index.on).is_valid())
    keys = key_column(sample, view.entity).to_pylist()
    for key, vector in list(zip(keys, sample.column(view.index.on).to_pylist(), strict=True))[
        :SEARCHED_ROWS
    ]:
        _check_found(index, key, vector, f"precompute publish {view.name} --reload")
    return f"{len(index):,} vectors; {min(len(keys), SEARCHED_ROWS)} sampled ones find themselves"


def _check_found(index: VectorIndex, key: str, vector: Sequence[float], remedy: str) -> None:
    """Raises:
    VectorIndexError: a key is not found by its own vector.
    """
    neighbours, scores, _ = index.search(vector, 10)
    if not neighbours:
        # vectors that are no numbers any more are near to nothing
        raise VectorIndexError(f"nothing is found by the vector of key {key!r}: {remedy}")
    if index.metric == "dot" and key not in neighbours:
        # a longer one may be nearer by dot
        return
    square = float(np.square(np.asarray(vector, np.float64)).sum())
    # one just like it may stand before it
    score = scores[neighbours.index(key)] if key in neighbours else scores[0]
    right = {"cosine": 1.0, "l2": 0.0, "dot": square}[index.metric]
    # the index computes in float32, of the same vectors or of these in float16
    allowed = tolerance(None, index.dtype).limit * (1.0 if index.metric == "cosine" else square)
    if abs(score - right) > allowed:
        raise VectorIndexError(f"key {key!r} is not found by its own vector: {remedy}")
