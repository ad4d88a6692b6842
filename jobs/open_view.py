"""Open view: a feature view's source, model and fingerprint, ready to compute. The batch job and the fallback open it here alike, so that
both have the same SQL, the same inputs and the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jobs.config import model_queries
from precompute.model import Model, load_model, model_fingerprint
from precompute.source import Files, Source, referenced_views
from store.errors import ConfigError, SourceError
from store.feature_view import FeatureView
from store.layers import Layers
from store.offline_store import OfflineStore
from store.partition import Partition

PRECISIONS = {"auto": "fp32", "fp32": "fp32"}


@dataclass(slots=True)
class OpenView:
    """Close its source when done.

    ``inputs`` maps each view that was read to its snapshot's number; ``source`` reads exactly these.
    """

    view: FeatureView
    source: Source
    model: Model
    fingerprint: str
    inputs: Mapping[str, int]

    def __enter__(self) -> OpenView:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()


def open_view(
    view: FeatureView,
    store: OfflineStore,
    *,
    pinned: Mapping[str, int] | None = None,
    partition: Partition | None = None,
    memory_mb: int = 1024,
    load: Callable[[str, Mapping[str, Any]], Model] = load_model,
) -> OpenView:
    """Open a view's source and load its model.

    Args:
        view: its ``definition`` holds source SQL and model.
        store: where other views' snapshots are.
        pinned: snapshot numbers of the views it reads, as a manifest recorded them; the live ones by default.
        partition: of a partitioned view: what ``$start`` and ``$end`` stand for.
        memory_mb: DuckDB's memory.
        load: makes the model from ``use`` and args; a server passes one that shares models between views.

    Raises:
        ConfigError: bad SQL, or a model that cannot be made as configured.
        SourceError: a file is missing, or a view it reads was never published.
        ModelError: the model failed to load.
    """
    sql, model = view.definition["source"], view.definition["model"]
    queries = model_queries(model["args"])
    wanted = sorted({name for text in (sql, *queries.values()) for name in referenced_views(text)})
    inputs = {name: pinned[name] if pinned is not None else _live_number(store, name, view.name) for name in wanted}
    live = {name: files_of(store.layers(store.snapshot(name, number))) for name, number in inputs.items()}
    bounds = None if partition is None else (partition.start, partition.end)
    try:
        source = Source(sql, view.entity, live, bounds=bounds, memory_mb=memory_mb)
    except ConfigError as exc:
        raise ConfigError(f"view {view.name!r}: source.sql: {exc}") from exc
    except SourceError as exc:
        raise SourceError(f"view {view.name!r}: {exc}") from exc
    try:
        tables: dict[str, pa.Table] = {}
        for name, text in queries.items():
            try:
                tables[name] = source.table(text)
            except ConfigError as exc:
                raise ConfigError(f"view {view.name!r}: model.args.{name}.sql: {exc}") from exc
        try:
            loaded = load(model["use"], {**model["args"], **tables})
        except ConfigError as exc:
            raise ConfigError(f"view {view.name!r}: model: {exc}") from exc
        fingerprint = model_fingerprint(loaded, model["use"], PRECISIONS[model["precision"]], tables)
    except BaseException:
        source.close()
        raise
    return OpenView(view, source, loaded, fingerprint, inputs)


def files_of(layers: Layers) -> Files:
    """A snapshot's files as a source takes them."""
    return Files(layers.paths, layers.dead)


def _live_number(store: OfflineStore, name: str, reader: str) -> int:
    ref = store.live(name)
    if ref is None:
        raise SourceError(f"view {reader!r} reads live.{name}, which was never published: run `precompute run {name}` first")
    return ref.snapshot
