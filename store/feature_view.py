"""FeatureView: named features of one entity, made by one model from one source, with a time to
live.

Frozen, no I/O. It travels: the config builds it, the manifest stores it, the online pointer carries
it, so a reader needs no configuration to know what it reads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.store.disk.record import plain, record_of
from precompute.store.keys import CHUNK as CHUNK
from precompute.store.times import Status

NAME = re.compile(r"\A[a-z][a-z0-9_]{0,62}\Z")
"""Views, features and entity columns: one allow-list, so that no name can leave its folder or its
key space."""

RESERVED = frozenset(
    {
        "key",
        "status",
        "source",
        "computed_at",
        "age_s",
        "ttl_s",
        "snapshot",
        "model",
        "reason",
        "input_hash",
    }
    | {"filename", "file_index", "file_row_number"}
)
"""Columns every answer or snapshot has beside its features, and those by which DuckDB tells where
in a Parquet file a row is; no feature and no key column may take one of these names. A search's
``score`` is none of them: it stands beside ``features``, not among them."""

SCALAR_TYPES: dict[str, pa.DataType] = {
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "bool": pa.bool_(),
    "string": pa.string(),
}


@dataclass(frozen=True, slots=True)
class Feature:
    """One named output of a view.

    A scalar (``dim`` and ``max_items`` unset), a vector of exactly ``dim`` numbers (Arrow
    FixedSizeList), or a list of at most ``max_items`` values (Arrow List), which is how a top-k
    list is stored.

    ``packed`` is how the online store keeps a vector of float16 or float32: ``int8`` or ``binary``
    with a scale a row, None as it is. Parquet and the vector index have the full values whatever it
    says, and readers get the declared dtype.
    """

    name: str
    dtype: str
    dim: int | None = None
    max_items: int | None = None
    packed: str | None = None

    @property
    def arrow_type(self) -> pa.DataType:
        """The column's type in Parquet, in answers and in the model's checked output."""
        scalar = SCALAR_TYPES[self.dtype]
        if self.dim is not None:
            return pa.list_(scalar, self.dim)
        return pa.list_(scalar) if self.max_items is not None else scalar


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Which vector feature is searchable, by which metric, and the recall the index must reach; an
    exact one reaches 1."""

    on: str
    metric: str = "cosine"
    recall_at_10: float = 0.95


@dataclass(frozen=True, slots=True)
class ModelUse:
    """Which model and how, as configured: a name or dotted path, its arguments, the precision and
    back end it computes in."""

    use: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "auto"
    backend: str = "auto"


@dataclass(frozen=True, slots=True)
class Substitute:
    """Another model that computes a view's misses in its model's stead, as it was published: what
    makes it, its fingerprint, and by feature how well it agreed then with the rows of the
    snapshot."""

    model: ModelUse
    fingerprint: str
    agreement: Mapping[str, float] = field(default_factory=dict)

    @property
    def least(self) -> float:
        """The agreement of the feature that it approximates worst."""
        return min(self.agreement.values())

    def shown(self) -> dict[str, Any]:
        """What answers say of it: its fingerprint, and how well it agrees."""
        return {"fingerprint": self.fingerprint, "agreement": dict(self.agreement)}


@dataclass(frozen=True, slots=True)
class LibraryCheck:
    """How a model's values compare with those of its own library, on a few rows of its view.

    ``verdict`` is ``equal``, ``differs``, ``itself`` (that library is what computes) or ``not
    checked``; ``version`` is the library's, where it answered, on ``rows`` rows, of which the
    ``worst`` is off by so much of its size; ``said`` has all of it in words. ``accepted``: an
    operator let a difference pass.
    """

    verdict: str
    library: str
    said: str
    version: str = ""
    rows: int = 0
    worst: float = 0.0
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """How a column of long texts is cut: each source row becomes rows of its key and a chunk's
    number, :data:`CHUNK`, from 0."""

    column: str
    tokens: int
    overlap: int
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Definition:
    """How a view's rows come about, as configured: source SQL, model, what becomes of bad rows
    (``reject``, ``null``, ``fail``), whether a partition without rows goes live (``publish``) or
    what is live stays (``keep``), and how a long text becomes several rows.
    """

    source: str = ""
    model: ModelUse = field(default_factory=ModelUse)
    bad_rows: str = "reject"
    empty: str = "keep"
    chunk: ChunkSpec | None = None


@dataclass(frozen=True, slots=True)
class FeatureView:
    """What is computed and how long it is good for; nothing about when or where.

    Durations are seconds. ``entity_types`` are Arrow type names (``int64`` or ``string``), known
    once the source was read.
    """

    name: str
    entity: tuple[str, ...]
    features: tuple[Feature, ...]
    ttl_s: float
    stale_for_s: float
    index: IndexSpec | None = None
    fallback: bool = False
    fallback_deadline_s: float = 0.1
    definition: Definition = field(default_factory=Definition)
    """Retained in the manifest for provenance and for the fallback."""
    keep_s: float = 600.0
    """How long a row that the fallback computed is stored, beside what is published."""
    keep_missing_s: float = 30.0
    """How long it is remembered that there is no such entity."""
    stale_if_error_s: float = 0.0
    """Past ``stale_for_s``: how long a row is still served, as stale, where the model fails."""
    fallback_default: Mapping[str, Any] | None = None
    """Feature → value: what stands in for a missing row."""
    misses_by: str | None = None
    """Key among ``powers`` of the one that has another model compute misses; None: the model."""
    powers: Mapping[str, Any] = field(default_factory=dict)
    """Key of a power (:data:`precompute.store.doors.VIEW_KEYS`) → what that keeps, plain JSON: who
    reads it without that power, tells so."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The features' names, in declared order."""
        return tuple(f.name for f in self.features)

    def feature(self, name: str) -> Feature:
        """The feature called ``name``.

        Raises:
            KeyError: there is none.
        """
        for feature in self.features:
            if feature.name == name:
                return feature
        raise KeyError(name)

    def feature_schema(self) -> pa.Schema:
        """The features alone, as Arrow fields in declared order."""
        return pa.schema([pa.field(f.name, f.arrow_type) for f in self.features])

    def to_json(self) -> dict[str, Any]:
        """A plain dict that :meth:`from_json` reads back to an equal view."""
        body: dict[str, Any] = plain(self)
        return body

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FeatureView:
        """The view that :meth:`to_json` wrote."""
        return record_of(cls, data)

    def fingerprint(self) -> str:
        """SHA-256 (hex) over the whole definition: two views with one fingerprint are the same
        view."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def find_bad(view: FeatureView, feature: Feature, column: pa.Array, bad: dict[int, str]) -> None:
    """Put row → error into ``bad``: of those with NaN, infinities and, in a vector that is searched
    by cosine, zero norm. No vector may be null."""
    if not feature.dtype.startswith("float"):
        return
    scalar = feature.dim is None and feature.max_items is None
    if scalar and column.null_count:
        column = column.fill_null(pa.scalar(0.0).cast(column.type))
    numbers = np.asarray(column if scalar else column.flatten())
    index = view.index
    if index is not None and (index.on, index.metric) == (feature.name, "cosine") and feature.dim:
        for row in np.flatnonzero(~numbers.reshape(-1, feature.dim).any(axis=1)).tolist():
            bad.setdefault(row, f"{feature.name} is all zeros, which has no direction for cosine")
    is_finite = np.isfinite(numbers)
    # as good as always
    if is_finite.all():
        return
    rows = np.flatnonzero(~is_finite)
    if feature.dim is not None:
        rows = np.unique(rows // feature.dim)
    elif feature.max_items is not None:
        # takes a while to import
        import pyarrow.compute as pc

        rows = np.unique(np.asarray(pc.list_parent_indices(column))[rows])
    for row in rows.tolist():
        bad.setdefault(row, f"{feature.name} is not finite")


def status_of(view: FeatureView, age: float, max_age_s: float | None = None) -> Status:
    """``fresh`` up to the TTL, then ``stale`` for ``stale_for``, then ``missing``.

    Args:
        view: whose TTL counts.
        age: in seconds.
        max_age_s: the caller's own limit; an older row is ``missing`` whatever the TTL says.
    """
    if max_age_s is not None and age > max_age_s:
        return Status.MISSING
    if age <= view.ttl_s:
        return Status.FRESH
    return Status.STALE if age <= view.ttl_s + view.stale_for_s else Status.MISSING
