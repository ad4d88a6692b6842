"""Plan: what all answers under one pointer and for the same features share; and the keys of a
request as the store has them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.store.answers.fallback import handlers_of
from precompute.store.errors import RequestError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.keys import MAX_KEY_BYTES, join_key, shown_key
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec
from precompute.store.online.found_rows import ColumnReader, PackedKeys
from precompute.store.online.online_store import Pointer
from precompute.store.times import AnswerSource, Reason, Status
from precompute.store.wire.lookup_options import MAX_KEYS

log = logging.getLogger(__name__)

ANSWER_FIELDS: tuple[tuple[str, pa.DataType], ...] = (
    ("key", pa.string()),
    ("status", pa.string()),
    ("source", pa.string()),
    ("reason", pa.string()),
    ("computed_at", pa.timestamp("us", tz="UTC")),
    ("age_s", pa.float64()),
    ("ttl_s", pa.float64()),
    ("snapshot", pa.int64()),
    ("model", pa.string()),
)
"""Columns of every answer, before the features."""


def default_row(view: FeatureView, codec: RowCodec) -> bytes | None:
    """The view's default values, packed, of no key, time or snapshot; features that it does not
    name are null. None for a view without.

    Raises:
        ValueError: a value is not of its feature's type.
    """
    if view.fallback_default is None:
        return None
    values = []
    for feature in view.features:
        value = view.fallback_default.get(feature.name)
        try:
            values.append(pa.array([value], feature.arrow_type))
        except (ValueError, TypeError, pa.ArrowException) as exc:
            kind = "" if feature.dim is None else f"a vector of {feature.dim} "
            kind = "a list of " if feature.max_items is not None else kind
            raise ValueError(
                f"{feature.name}: {str(value)[:80]} is not {kind}{feature.dtype}"
            ) from exc
    batch = pa.RecordBatch.from_arrays(values, schema=view.feature_schema())
    return codec.encode(batch, np.zeros(1, np.uint64), np.zeros(1, np.int64), 0).at(0)


def fits(view: FeatureView, name: str, value: Any) -> bool:
    """Whether a value may stand in for a feature that the view has."""
    try:
        default_row(replace(view, fallback_default={name: value}), RowCodec(view))
    except (ValueError, TypeError, pa.ArrowException):
        return False
    return name in view.feature_names


def fitting_row(view: FeatureView, codec: RowCodec, defaults: Mapping[str, Any]) -> bytes | None:
    """As :func:`default_row`, of a service's defaults: one that does not fit the view as it is live
    is left out, since the rows that are there must be answered; None where none is left."""
    fitting = {name: value for name, value in defaults.items() if fits(view, name, value)}
    return default_row(replace(view, fallback_default=fitting), codec) if fitting else None


class AnswerPlan:
    """What every request for the same pointer and features shares: codec, schema, and columns that
    hold one value throughout.

    Args:
        pointer: what is live.
        features: which, in which order; all by default.
        alike: a plan for the same pointer, whose codec and columns this one shares.
        defaults: feature → value of what stands in for a missing row, in place of the view's own.
        base64: whether JSON has vectors of float16 and float32 as base64; their names and dtypes
            are :attr:`base64` then.
    """

    def __init__(
        self,
        pointer: Pointer,
        features: tuple[str, ...] | None,
        alike: AnswerPlan | None = None,
        *,
        base64: bool = False,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        view = pointer.view
        self.pointer = pointer
        self.view = view
        self.codec: RowCodec = RowCodec(view) if alike is None else alike.codec
        self.snapshots = frozenset((*pointer.numbers, pointer.snapshot))
        self.absent = (
            Reason.NOT_IN_STORE if pointer.lossy or pointer.degraded else Reason.UNKNOWN_ENTITY
        )
        self.features = features
        if defaults is not None:
            self.default: bytes | None = fitting_row(view, self.codec, defaults)
        else:
            self.default = default_row(view, self.codec) if alike is None else alike.default
        self.handlers: Mapping[str, type[Any]] = (
            handlers_of(view) if alike is None else alike.handlers
        )
        """Key → what answers misses of this view before the model."""
        self.more_fields = tuple(
            (c.name, c.type) for kind in self.handlers.values() for c in kind.columns
        )
        """Columns that answers of this view have besides."""
        self.miss_model = pointer.miss_model
        """Fingerprint of what computes misses."""
        self.computed_says: Mapping[str, Any] = {}
        """What a row says that another model than the view's computed."""
        by = "" if pointer.in_stead is None else view.misses_by or ""
        if by in self.handlers:
            try:
                self.computed_says = self.handlers[by].says(pointer)
            except Exception:
                # rows are not to be lost by what is said of them
                log.exception("misses %r cannot say who computes rows of %r", by, view.name)
        self.own_columns = len(ANSWER_FIELDS) + len(self.more_fields)
        """Number of columns that every answer has before the features."""
        self.wanted = view.features if features is None else tuple(map(view.feature, features))
        """The features that are answered, in their order."""
        self.base64 = base64_types(self.wanted) if base64 else {}
        self.schema = pa.schema(
            [pa.field(name, kind) for name, kind in ANSWER_FIELDS + self.more_fields]
            + [pa.field(f.name, f.arrow_type) for f in self.wanted],
            # so that a client can tell whose answer it is
            {"view": view.name},
        )
        self.reader = (
            ColumnReader(self.codec, self.snapshots, features) if self.codec.exact else None
        )
        """What reads the features as columns in one pass; None where they have strings or lists
        among them, or beside them."""
        self._longest: list[pa.Array] = _constants(pointer) if alike is None else alike._longest
        self._cut: tuple[int, list[pa.Array]] = MAX_KEYS, self._longest

    def constants(self, rows: int) -> list[pa.Array]:
        """Columns of one value, for an answer of ``rows`` rows: fresh, store, no reason, TTL,
        snapshot, model."""
        cut = self._cut
        if cut[0] != rows:
            # of the last row count alone: all that is cached is as long as one answer
            cut = self._cut = rows, [column.slice(0, rows) for column in self._longest]
        return cut[1]


def base64_types(features: Iterable[Feature]) -> dict[str, str]:
    """Feature → dtype, of those that JSON can have as base64: vectors of float16 and float32. Lists
    and other types stay as they are."""
    return {
        f.name: f.dtype for f in features if f.dim is not None and f.dtype in ("float16", "float32")
    }


def _constants(pointer: Pointer) -> list[pa.Array]:
    """The columns of :meth:`AnswerPlan.constants`, for the longest answer: 0.1 MB a view."""
    return [
        pa.repeat(str(Status.FRESH), MAX_KEYS),
        pa.repeat(str(AnswerSource.STORE), MAX_KEYS),
        pa.nulls(MAX_KEYS, pa.string()),
        pa.repeat(pa.scalar(float(pointer.view.ttl_s)), MAX_KEYS),
        pa.repeat(pa.scalar(pointer.snapshot, pa.int64()), MAX_KEYS),
        pa.repeat(pointer.model, MAX_KEYS),
    ]


IMPOSSIBLE = b"\0"
"""The key that is looked up in place of one no entity can have, and never found: keys with a NUL
are not stored."""


def packed_keys(
    keys: list[Any], entity_of: Callable[[], tuple[str, ...]]
) -> tuple[list[str], Sequence[bytes], list[int]]:
    """The texts of a request's keys; what is looked up for each: its UTF-8, or :data:`IMPOSSIBLE`
    for what no entity can have as a key; and the numbers of those.

    Args:
        keys: texts, integers, or lists of them for an entity of several columns.
        entity_of: the view's key columns; called where not all keys are texts.
    """
    bad: list[int] = []
    texts = keys
    if len(texts) > 1:
        # the common case, as lean as it gets: 100 keys in 3 µs
        with contextlib.suppress(TypeError, UnicodeEncodeError):
            packed, hashes, right = kernels.pack_texts(texts, MAX_KEY_BYTES)
            if right:
                return texts, PackedKeys(texts, packed, hashes), bad
    try:
        raw = list(map(str.encode, texts))
    except (TypeError, UnicodeEncodeError):
        entity, texts, raw = entity_of(), [], []
        for i, key in enumerate(keys):
            try:
                text = join_key(key, entity)
                encoded = text.encode()
            except RequestError:
                text, encoded = shown_key(key), IMPOSSIBLE
                bad.append(i)
            texts.append(text)
            raw.append(encoded)
    if max(map(len, raw)) > MAX_KEY_BYTES or not all(raw) or b"\0" in b"".join(raw):
        bad = [i for i, key in enumerate(raw) if not 0 < len(key) <= MAX_KEY_BYTES or 0 in key]
        for i in bad:
            raw[i] = IMPOSSIBLE
    return texts, raw, bad
