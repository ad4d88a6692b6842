"""Readers that never rest while segments, alone and over others, are published, dropped, and their
loaders killed: every row of every answer must be what the answer's version says.

    python -m tests.faults.online_soak [URL] [--reads 1000000] [--publishings 200] [--seed 0]
    [--narrow]

Prints one line of JSON: reads, and how many were wrong, mixed or lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.store.answers.lookup import Lookup
from precompute.store.errors import OnlineStoreError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import RowBatch
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.online.url import open_online_store
from precompute.store.times import utc_now
from tests.online import named, segment

KEYS = 20_000
BATCH_KEYS = 100
BASE_EVERY = 5
"""Of so many publishings one loads all rows; the others lie over it."""
NARROW = "--narrow" in sys.argv
"""Rows of one number, which Redis keeps in buckets; the processes that publish are reported,
too."""
FEATURES = (
    (Feature("x", "float64"),) if NARROW else (Feature("x", "float64"), Feature("v", "float32", 32))
)
VIEW = FeatureView("soak", ("id",), FEATURES, ttl_s=86400, stale_for_s=0)
CODEC = RowCodec(VIEW)


def base_of(snapshot: int) -> int:
    """The snapshot whose rows the base of ``snapshot`` has."""
    return snapshot - (snapshot - 1) % BASE_EVERY


def changed_at(key: int, snapshot: int) -> int:
    """The snapshot that wrote the row of ``key``, as ``snapshot`` has it: its base's, or the last
    one since that changes one key in 50."""
    changes = (s for s in range(snapshot, base_of(snapshot), -1) if (key + s) % 50 == 0)
    return next(changes, base_of(snapshot))


def gone(key: int, snapshot: int) -> bool:
    """Whether ``snapshot`` has no row of ``key``: one in 97 has left since its base."""
    return any((key + s) % 97 == 0 for s in range(base_of(snapshot) + 1, snapshot + 1))


def batches(snapshot: int) -> Iterator[RowBatch]:
    """All rows of a snapshot, or those that make the one below it this one."""
    base = base_of(snapshot)
    whole = snapshot == base
    keys = [
        k
        for k in range(KEYS)
        if not gone(k, snapshot) and (whole or changed_at(k, snapshot) != base)
    ]
    left = [] if whole else [k for k in range(KEYS) if gone(k, snapshot)]
    if left:
        yield CODEC.tombstones(
            pa.array(map(str, left), pa.string()), time.time_ns() // 1000, snapshot
        )
    for start in range(0, len(keys), 1000):
        part = np.array(keys[start : start + 1000])
        x = np.array([1000.0 * changed_at(int(k), snapshot) + k for k in part])
        v = np.repeat(x.astype(np.float32), 32)
        columns = {
            "id": pa.array(part),
            "x": pa.array(x),
            "v": pa.FixedSizeListArray.from_arrays(pa.array(v), 32),
            "computed_at": pa.array(
                np.full(len(part), time.time_ns() // 1000), pa.timestamp("us", tz="UTC")
            ),
        }
        yield CODEC.row_batch(pa.record_batch(columns), VIEW.entity, snapshot)


def publish(store: OnlineStore, snapshot: int, pause_s: float) -> None:
    """Load, flip, and drop what is neither live nor was."""
    base = base_of(snapshot)
    before = store.live(VIEW.name)
    if before is not None and before.epoch == snapshot:
        # the one before was killed after its flip
        return
    loaded = segment(snapshot, upper=snapshot != base)
    done = store.prepare(VIEW.name, loaded, KEYS, KEYS * 300, "soak", CODEC.fixed_bytes)

    def slowly() -> Iterator[RowBatch]:
        for batch in batches(snapshot):
            time.sleep(pause_s)
            yield batch

    store.load(VIEW.name, loaded, _without(slowly(), done), done)
    names = [named(number) for number in dict.fromkeys((base, snapshot))]
    store.flip(
        Pointer(
            VIEW,
            snapshot,
            snapshot,
            "m",
            KEYS,
            KEYS,
            utc_now(),
            None,
            segments=tuple(names),
            owner="soak",
        )
    )
    keep = {*names, *(() if before is None else before.segments)}
    for old in store.segments(VIEW.name):
        if old.name not in keep:
            store.drop(VIEW.name, old.name)
    store.sweep(VIEW.name)


def _without(rows: Iterator[RowBatch], first: int) -> Iterator[RowBatch]:
    for batch in rows:
        if first >= len(batch):
            first -= len(batch)
            continue
        yield RowBatch(
            batch.keys.slice(first, len(batch)),
            batch.rows.slice(first, len(batch)),
            batch.hashes[first:],
        )
        first = 0


class Reader:
    """Reads and checks until it is to stop."""

    def __init__(self, url: str, seed: int) -> None:
        self.rows = self.wrong = self.lost = 0
        self.snapshots: set[int] = set()
        self.first_wrong: Any = None
        self._lookup, self._random = Lookup(open_online_store(url)), random.Random(seed)
        self._expected: dict[int, np.ndarray[Any, Any]] = {}

    def run(self, stop: threading.Event) -> None:
        """Until ``stop`` is set."""
        while not stop.is_set():
            keys = [self._random.randrange(KEYS) for _ in range(BATCH_KEYS)]
            self.check(keys, self._lookup.begin(VIEW.name, list(map(str, keys))))

    def check(self, keys: list[int], answer: Any) -> None:
        """Compare every row with what the version of the answer says."""
        snapshot, table = answer.pointer.snapshot, answer.table()
        if snapshot not in self._expected:
            known = [
                np.nan if gone(k, snapshot) else 1000.0 * changed_at(k, snapshot) + k
                for k in range(KEYS)
            ]
            self._expected = {snapshot: np.array(known)}
        expected = self._expected[snapshot][keys]
        x = table["x"].to_numpy(zero_copy_only=False)
        vectors = x.astype(np.float32)[:, None]
        if not NARROW:
            vectors = np.array(
                [np.full(32, np.nan) if v is None else v for v in table["v"].to_pylist()],
                np.float32,
            )
        self.lost += int((np.isnan(x) & ~np.isnan(expected)).sum())
        right = np.isnan(x) & np.isnan(expected) | (x == expected)
        whole = np.isnan(expected) | (vectors == expected.astype(np.float32)[:, None]).all(1)
        self.wrong += int((~(right & whole)).sum())
        if not (right & whole).all() and self.first_wrong is None:
            at = int(np.argmin(right & whole))
            self.first_wrong = [snapshot, keys[at], float(x[at]), float(expected[at])]
        self.rows += len(keys)
        self.snapshots.add(snapshot)


def killed_or_done(url: str, snapshot: int, kill_after_s: float | None) -> bool:
    """Publish in a process of its own; whether it came to its end."""
    command = [
        sys.executable,
        "-m",
        "tests.faults.online_soak",
        url,
        "--publish",
        str(snapshot),
        *(["--narrow"] if NARROW else []),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(kill_after_s)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    _, error = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        raise OnlineStoreError(error[-2000:])
    return process.returncode == 0


def soak(url: str, reads: int, publishings: int, seed: int) -> dict[str, Any]:
    """Publish and read at once; what was counted."""
    with contextlib.closing(open_online_store(url)) as store:
        publish(store, 1, 0.0)
    readers, stop = [Reader(url, seed + i) for i in range(2)], threading.Event()
    threads = [threading.Thread(target=reader.run, args=(stop,)) for reader in readers]
    for thread in threads:
        thread.start()
    draw, snapshot, kills = random.Random(seed), 1, 0
    try:
        while snapshot < publishings or sum(reader.rows for reader in readers) < reads:
            kill = draw.random() < 0.2
            if killed_or_done(url, snapshot + 1, draw.uniform(0.3, 1.2) if kill else None):
                snapshot += 1
            else:
                kills += 1
            if not all(thread.is_alive() for thread in threads):
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    counted = {
        name: sum(getattr(reader, name) for reader in readers) for name in ("rows", "wrong", "lost")
    }
    seen = len(set[int]().union(*(reader.snapshots for reader in readers)))
    first = next((reader.first_wrong for reader in readers if reader.first_wrong), None)
    return counted | {
        "publishings": snapshot,
        "killed": kills,
        "versions_seen": seen,
        "first_wrong": first,
    }


def main() -> None:
    """As the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "url", nargs="?", help="of the online store; table files in a temporary folder by default"
    )
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--publishings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--narrow", action="store_true")
    parser.add_argument("--publish", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish is not None:
        with contextlib.closing(open_online_store(options.url)) as store:
            publish(store, options.publish, 0.01)
        return
    with tempfile.TemporaryDirectory() as folder:
        counted = soak(
            options.url or f"table:{folder}", options.reads, options.publishings, options.seed
        )
    print(json.dumps(counted))
    sys.exit(bool(counted["wrong"] or counted["lost"]))


if __name__ == "__main__":
    main()
