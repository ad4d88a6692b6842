"""Feast's side of :mod:`benchmarks.service_feast`: the rows of the views materialized into its
online store, and a feature service over them read by its SDK. Runs in an environment of Feast's
own, so it imports nothing of ours.

    python feast_service.py FOLDER VIEWS ONLINE

FOLDER has ``requests.npy`` (int64 [requests, keys]). VIEWS are JSON, view → {"parts": folder of its
Parquet files, "features": {name: length of a vector or list, 0 for a number}}; ONLINE the online
store's settings. Prints a JSON line for each line that it is sent, which is a request's number: the
seconds that it took, and those of CPU; before, the values of the first.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
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


def opened(folder: Path, views: dict[str, Any], online: dict[str, Any]) -> tuple[Any, Any]:
    """(the store, its feature service), registered."""
    settings = {
        "project": "ranking",
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
    store = FeatureStore(config=RepoConfig(**settings))
    entity = Entity(name="item", join_keys=["id"], value_type=ValueType.INT64)
    made = [
        FeatureView(
            name=name,
            entities=[entity],
            ttl=timedelta(days=1),
            schema=[
                Field(name=feature, dtype=Array(Float32) if length else Float32)
                for feature, length in view["features"].items()
            ],
            source=FileSource(path=view["parts"], timestamp_field="computed_at"),
        )
        for name, view in views.items()
    ]
    service = FeatureService(name="ranking", features=made)
    store.apply([entity, *made, service])
    return store, service


def main() -> None:
    """Materialize, then answer request by request."""
    folder = Path(sys.argv[1])
    store, service = opened(folder, json.loads(sys.argv[2]), json.loads(sys.argv[3]))
    now = datetime.now(UTC)
    store.materialize(now - timedelta(days=1), now + timedelta(days=1))
    requests = [{"id": keys} for keys in np.load(folder / "requests.npy").tolist()]

    def read(number: int) -> Any:
        return store.get_online_features(
            features=service, entity_rows=requests[number], full_feature_names=True
        )

    print(
        json.dumps({name: values for name, values in read(0).to_dict().items() if name != "id"}),
        flush=True,
    )
    for line in sys.stdin:
        started, used = time.perf_counter(), time.process_time()
        read(int(line)).to_dict()
        print(json.dumps([time.perf_counter() - started, time.process_time() - used]), flush=True)


if __name__ == "__main__":
    main()
