"""Feast's side of :mod:`benchmarks.online_feast`, and of :mod:`benchmarks.serve_feast`: rows
materialized into its online store, and read back, or to be served. Runs in an environment of
Feast's own, so it imports nothing of ours.

    python feast_online.py FOLDER PARTS ONLINE [served]

FOLDER has ``requests.npy`` (int64 [requests, keys]) and gets ``feast.arrow``, the answers in that
order; or, ``served``, gets what ``feast serve`` reads. PARTS is the folder of the Parquet files,
ONLINE the online store's settings as JSON.

As Feast's guide to performance and the descriptions of its settings say: one feature view and one
feature service, the registry held in memory and refreshed by a thread, writes without the check of
what is there already (``skip_dedup``), all rows of the interval taken (they are unique) and written
in batches of 10,000.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from feast import (
    Entity,
    FeatureService,
    FeatureStore,
    FeatureView,
    Field,
    FileSource,
    RepoConfig,
    ValueType,
)
from feast.types import Array, Float32


def settings(folder: Path, online: dict[str, Any]) -> dict[str, Any]:
    """What ``feature_store.yaml`` has."""
    return {
        "project": "items",
        "provider": "local",
        "registry": {
            "path": str(folder / "registry.db"),
            "cache_mode": "thread",
            "cache_ttl_seconds": 300,
        },
        "online_store": online,
        "offline_store": {"type": "dask"},
        "entity_key_serialization_version": 3,
        "materialization": {"online_write_batch_size": 10_000},
    }


def opened(folder: Path, parts: str, online: dict[str, Any]) -> tuple[Any, Any]:
    """(the store, its feature service), registered."""
    store = FeatureStore(config=RepoConfig(**settings(folder, online)))
    item = Entity(name="item", join_keys=["id"], value_type=ValueType.INT64)
    view = FeatureView(
        name="items",
        entities=[item],
        ttl=timedelta(days=1),
        schema=[
            Field(name="vector", dtype=Array(Float32)),
            *(Field(name=name, dtype=Float32) for name in "abc"),
        ],
        source=FileSource(path=parts, timestamp_field="computed_at"),
    )
    service = FeatureService(name="all", features=[view])
    store.apply([item, view, service])
    return store, service


def main() -> None:
    """Materialize, read where it is not to be served, and print the figures."""
    folder, online = Path(sys.argv[1]), json.loads(sys.argv[3])
    store, service = opened(folder, sys.argv[2], online)
    now = datetime.now(UTC)
    started, used = time.perf_counter(), time.process_time()
    store.materialize(now - timedelta(days=1), now + timedelta(days=1))
    figures = {"load_s": time.perf_counter() - started, "load_cpu_s": time.process_time() - used}
    if sys.argv[4:]:
        # JSON is YAML
        (folder / "feature_store.yaml").write_text(json.dumps(settings(folder, online)))
        print(json.dumps(figures))
        return
    entities = [{"id": ids} for ids in np.load(folder / "requests.npy").tolist()]

    def read(entity: dict[str, list[int]]) -> Any:
        return store.get_online_features(features=service, entity_rows=entity)

    answers = pa.concat_tables([read(entity).to_arrow() for entity in entities])
    with (
        pa.OSFile(str(folder / "feast.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, answers.schema) as writer,
    ):
        writer.write_table(answers)
    seconds: dict[str, list[float]] = {"get": [], "get_cpu": [], "to_arrow": []}
    for entity in entities:  # one after the other, so that a noisy neighbour hits both
        started, used = time.perf_counter(), time.process_time()
        read(entity).to_dict()
        seconds["get"].append(time.perf_counter() - started)
        seconds["get_cpu"].append(time.process_time() - used)
        started = time.perf_counter()
        read(entity).to_arrow()
        seconds["to_arrow"].append(time.perf_counter() - started)
    print(
        json.dumps(
            figures
            | {f"{kind}_us": statistics.median(times) * 1e6 for kind, times in seconds.items()}
        )
    )


if __name__ == "__main__":
    main()
