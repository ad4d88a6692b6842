"""Memory: a vector index in dictionaries, and the rows of a stand-in's view."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.answers.plan import default_row
from precompute.store.errors import ConfigError
from precompute.store.feature_view import (
    NAME,
    RESERVED,
    SCALAR_TYPES,
    Feature,
    FeatureView,
    ModelUse,
    Substitute,
    find_bad,
)
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import Packed, RowBatch
from precompute.store.online.online_store import (
    Pointer,
)
from precompute.store.vectors.index_rows import RowFilter, filterable
from precompute.store.vectors.vector_index import Found, Neighbours, VectorIndex

# ---- Memory index: the nearest rows among a few, each compared; in place of the vector index
# on disk.


class MemoryIndex(VectorIndex):
    """Answers as :class:`VectorIndex` does, of rows as they are now.

    Args:
        view: has an index.
        model: fingerprint of who made the vectors.
        rows: key → features.
        computed_at_us: key → µs since 1970.
    """

    def __init__(
        self,
        view: FeatureView,
        model: str,
        rows: Mapping[str, Mapping[str, Any]],
        computed_at_us: Mapping[str, int],
    ) -> None:
        assert view.index is not None
        feature = view.feature(view.index.on)
        assert feature.dim is not None
        self.metric = view.index.metric
        self.dim = feature.dim
        self.dtype = feature.dtype
        self.model = model
        # one that is null is in no index
        self._keys = [key for key, features in rows.items() if features[feature.name] is not None]
        self._times = [computed_at_us[key] for key in self._keys]
        self._row = {key: i for i, key in enumerate(self._keys)}
        held = pa.array([rows[key][feature.name] for key in self._keys], feature.arrow_type)
        vectors = np.asarray(held.flatten(), np.float32).reshape(-1, feature.dim)
        if self.metric == "cosine":
            vectors = vectors / np.maximum(
                np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny
            )
        self._vectors = vectors
        scalars = {
            name: pa.array([rows[key][name] for key in self._keys], kind)
            for name, kind in filterable(view).items()
        }
        self._scalars = pa.table(scalars) if scalars else None

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> Found | None:
        """As :meth:`VectorIndex.find`."""
        row = self._row.get(key)
        return None if row is None else Found(self._vectors[row], self._times[row])

    def search(
        self,
        vector: npt.ArrayLike,
        k: int,
        *,
        exclude: Collection[str] = (),
        only: Collection[str] | None = None,
        where: RowFilter | None = None,
    ) -> Neighbours:
        """As :meth:`VectorIndex.search`, exact."""
        query = self._checked(vector)
        wanted = np.array(
            [key not in exclude and (only is None or key in only) for key in self._keys], np.bool_
        )
        if where is not None and self._scalars is not None:
            wanted &= where.admits(self._scalars)
        near = self.metric == "l2"
        scores = np.square(self._vectors - query).sum(axis=1) if near else self._vectors @ query
        order = np.argsort(scores if near else -scores, kind="stable")
        best = [int(i) for i in order if wanted[i]][:k]
        return Neighbours(
            [self._keys[i] for i in best],
            [float(scores[i]) for i in best],
            [self._times[i] for i in best],
        )


# ---- Rows of a view: checked and packed.


SNAPSHOT = 1


Model = Callable[[str, Mapping[str, Any] | None], Mapping[str, Any] | None]
"""Key, and the inputs that came with the request → features; None where there is no such entity. To
raise TimeoutError is to be too slow, anything else to fail."""


class RowsOfAView:
    """One view's rows: key text → features, and when they were computed (µs since 1970)."""

    def __init__(
        self, view: FeatureView, model: Model | None, agreement: float | None = None
    ) -> None:
        self.view, self.model, self.codec = view, model, RowCodec(view)
        self.substitute = None
        if agreement is not None:
            found = dict.fromkeys(view.feature_names, agreement)
            self.substitute = Substitute(ModelUse(), "substitute", found)
        self.rows: dict[str, Mapping[str, Any]] = {}
        self.values: dict[str, bytes] = {}
        """The same, packed."""
        self.computed_at_us: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.index: tuple[Pointer, VectorIndex] | None = None
        """Made of the rows as they were under this pointer."""

    def batch(self) -> RowBatch:
        """Packed, for an online store."""
        # a damaged row does not vouch for itself
        rows = [
            row[:-1] + bytes([row[-1] ^ 1]) if key in self.damaged else row
            for key, row in self.values.items()
        ]
        names = Packed.of([key.encode() for key in self.values])
        return RowBatch(names, Packed.of(rows), kernels.hashes(names))

    def packed(
        self, rows: Mapping[str, Mapping[str, Any]], at_us: int, codec: RowCodec | None = None
    ) -> dict[str, bytes]:
        """Rows, packed.

        Raises:
            ConfigError: a value is none of its feature's type, or that no model may return, or a
                feature is not the view's.
        """
        view = self.view
        for features in rows.values():
            unknown = [name for name in features if name not in view.feature_names]
            if unknown:
                raise ConfigError(
                    f"view {view.name!r} has no feature {unknown[0]!r} (it has:"
                    f" {', '.join(view.feature_names)})"
                )
        columns = []
        for feature in view.features:
            try:
                values = [features.get(feature.name) for features in rows.values()]
                if feature.dtype.startswith(("int", "uint")) and any(
                    isinstance(value, float) for value in values
                ):
                    raise TypeError(
                        f"a value is a float, and the feature is {feature.dtype}: give"
                        f" features={{{feature.name!r}: {{'dtype': 'float64'}}}}"
                    )
                columns.append(pa.array(values, feature.arrow_type))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
                if len(rows) > 1:
                    # says which
                    for key, features in rows.items():
                        self.packed({key: features}, at_us)
                raise ConfigError(
                    f"view {view.name!r}, key {next(iter(rows))!r}: {feature.name}: {exc}"
                ) from exc
        batch = pa.RecordBatch.from_arrays(columns, schema=view.feature_schema())
        if (misfit := _misfit(view, batch)) is not None:
            raise ConfigError(f"view {view.name!r}, key {list(rows)[misfit[0]]!r}: {misfit[1]}")
        hashes = kernels.hashes(Packed.of([key.encode() for key in rows]))
        packed = (codec or self.codec).encode(
            batch, hashes, np.full(len(rows), at_us, np.int64), SNAPSHOT
        )
        return dict(zip(rows, map(bytes, packed.strings()), strict=True))


def _misfit(view: FeatureView, batch: pa.RecordBatch) -> tuple[int, str] | None:
    """The first row that no model may return, and why; one of nothing but nulls may be in a
    view."""
    held = np.flatnonzero(~np.all([column.is_null() for column in batch.columns], axis=0))
    for feature, column in zip(view.features, batch.take(pa.array(held)).columns, strict=True):
        bad = dict[int, str]()
        if feature.dim is not None:
            bad = dict.fromkeys(
                pc.indices_nonzero(column.is_null()).to_pylist(),
                f"{feature.name} is null, and a vector",
            )
        elif feature.max_items is not None:
            long = pc.fill_null(pc.greater(pc.list_value_length(column), feature.max_items), False)
            bad = dict.fromkeys(
                pc.indices_nonzero(long).to_pylist(),
                f"{feature.name} has more than {feature.max_items} items",
            )
        if hasattr(column.type, "value_type"):
            nulls = pc.list_parent_indices(column).filter(column.flatten().is_null())
            bad |= dict.fromkeys(nulls.to_pylist(), f"{feature.name} holds a null")
        if not bad:
            find_bad(view, feature, column, bad)
        if bad:
            row, reason = min(bad.items())
            return int(held[row]), reason
    return None


def features_of(
    view: str,
    rows: Mapping[Any, Mapping[str, Any]],
    features: Mapping[str, Mapping[str, Any]] | None,
) -> tuple[Feature, ...]:
    """The features of a view: those that are declared, else as the rows' values are.

    Raises:
        ConfigError: a declaration that is none, or rows that no feature fits.
    """
    if features is not None:
        try:
            return tuple(Feature(name, **said) for name, said in features.items())
        except TypeError as exc:
            raise ConfigError(
                f"view {view!r}: features: each has a dtype, and dim or max_items: {exc}"
            ) from exc
    first = next(iter(rows.values()), None)
    if first is None:
        raise ConfigError(
            f"view {view!r}: without a row its features are not known: give features={{name:"
            " {'dtype': …}}"
        )
    return tuple(_feature(view, name, value) for name, value in plain_features(first).items())


def _feature(view: str, name: str, value: Any) -> Feature:
    kinds = {bool: "bool", int: "int64", float: "float64", str: "string"}
    if type(value) in kinds:
        return Feature(name, kinds[type(value)])
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(item, float) for item in value):
            return Feature(name, "float32", dim=len(value))
        if type(value[0]) in kinds:
            return Feature(name, kinds[type(value[0])], max_items=65536)
    raise ConfigError(
        f"view {view!r}: what feature {name!r} is cannot be seen from {value!r}: give"
        f" features={{{name!r}: {{'dtype': …}}}}"
    )


def plain_features(features: Mapping[str, Any]) -> dict[str, Any]:
    """Features, those of numpy as Python's."""
    return {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in features.items()
    }


def check_view(view: FeatureView) -> None:
    """Raises:
    ConfigError: a name, a time or a metric that no view could have, or an index on what is no
        vector of floats.
    """
    for name, seconds in (
        ("ttl_s", view.ttl_s),
        ("stale_for_s", view.stale_for_s),
        ("deadline_s", view.fallback_deadline_s),
    ):
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"view {view.name!r}: {name} is {seconds}: give seconds, 0 or more")
    for name in (view.name, *view.entity, *view.feature_names):
        if not NAME.match(name) or (name != view.name and name in RESERVED):
            raise ConfigError(
                f"view {view.name!r}: {name!r} is no name of a view, a key column or a feature"
            )
    for feature in view.features:
        if feature.dtype not in SCALAR_TYPES:
            raise ConfigError(
                f"view {view.name!r}: {feature.name}: {feature.dtype!r} is none of"
                f" {', '.join(SCALAR_TYPES)}"
            )
    on = None if view.index is None else view.index.on
    vectors = [
        feature.name
        for feature in view.features
        if feature.dim is not None and feature.dtype.startswith("float")
    ]
    if on is not None and on not in vectors:
        raise ConfigError(f"view {view.name!r}: index.on: {on!r} is no vector of floats")
    if view.index is not None and view.index.metric not in ("cosine", "dot", "l2"):
        raise ConfigError(
            f"view {view.name!r}: index.metric: {view.index.metric!r} is none of cosine, dot, l2"
        )
    try:
        default_row(view, RowCodec(view))
    except (ValueError, TypeError, pa.ArrowException) as exc:
        raise ConfigError(f"view {view.name!r}: default: {exc}") from exc
