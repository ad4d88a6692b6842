"""Answer: the rows of one request, each with its status, source, age and snapshot; as an Arrow
table or as plain Python."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.answers.fallback import Computed, Likeness, Miss
from precompute.store.feature_view import SIMILAR_FIELDS, Feature, FeatureView, status_of
from precompute.store.keys import parts_hint
from precompute.store.online.codec import RowCodec, State
from precompute.store.online.found_rows import ColumnReader, FoundRows, PackedKeys, WholeColumns
from precompute.store.online.online_store import Pointer
from precompute.store.online.packed import Buffer, Packed
from precompute.store.times import (
    AHEAD_US,
    AnswerSource,
    Reason,
    Sighting,
    Status,
    age_s,
    as_datetime,
)
from precompute.store.wire.lookup_options import MAX_DEADLINE_MS, MAX_KEYS


def default_row(view: FeatureView, codec: RowCodec) -> bytes | None:
    """The view's default values, packed, of no key, time or snapshot; features that it does not
    name are null. None for a view without.

    Raises:
        ValueError: a value is none of its feature's type.
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


MAX_DEADLINE_S = MAX_DEADLINE_MS / 1000
"""Longest a request waits for the fallback, whatever deadline its view has."""

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

_WHOLE = int(State.WHOLE)
"""An enumeration's member takes longer to get at than to compare with."""
_WHOLE_BYTE = bytes([_WHOLE])

_TIMESTAMP = pa.timestamp("us", tz="UTC")
_FLOAT64 = pa.float64()
_STRING = pa.string()


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
        self.snapshots = frozenset((*pointer.snapshots, pointer.snapshot))
        self.absent = (
            Reason.NOT_IN_STORE if pointer.lossy or pointer.degraded else Reason.UNKNOWN_ENTITY
        )
        self.features = features
        if defaults is not None:
            self.default: bytes | None = fitting_row(view, self.codec, defaults)
        else:
            self.default = default_row(view, self.codec) if alike is None else alike.default
        self.similar_fields = () if view.semantic_cache is None else SIMILAR_FIELDS
        self.own_columns = len(ANSWER_FIELDS) + len(self.similar_fields)
        """Of every answer, before the features."""
        wanted = view.features if features is None else [view.feature(name) for name in features]
        self.base64 = base64_types(wanted) if base64 else {}
        self.schema = pa.schema(
            [pa.field(name, kind) for name, kind in ANSWER_FIELDS + self.similar_fields]
            + [pa.field(f.name, f.arrow_type) for f in wanted],
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
    """What :meth:`AnswerPlan.constants` gives, of the longest answer: 0.1 MB a view."""
    return [
        pa.repeat(str(Status.FRESH), MAX_KEYS),
        pa.repeat(str(AnswerSource.STORE), MAX_KEYS),
        pa.nulls(MAX_KEYS, pa.string()),
        pa.repeat(pa.scalar(float(pointer.view.ttl_s)), MAX_KEYS),
        pa.repeat(pa.scalar(pointer.snapshot, pa.int64()), MAX_KEYS),
        pa.repeat(pointer.model, MAX_KEYS),
    ]


@dataclass(slots=True)
class Answer:
    """The rows of one request, some perhaps still in flight.

    ``sighting`` is what bounds the rows' ages; ``look`` gives both again, for a pointer. ``bad``
    are the numbers of the keys that no entity can have. ``pending`` maps a row's number to the
    future that computes it; :meth:`wait` settles them.
    """

    plan: AnswerPlan
    keys: list[str]
    found: FoundRows
    now_us: int
    sighting: Sighting
    look: Callable[[Pointer], tuple[int, Sighting]]
    bad: Collection[int] = ()
    oldest_s: float | None = None
    """The largest age of a row that counts, whatever the TTL says."""
    deadline: float = 0.0
    pending: dict[int, Future[Computed]] = field(default_factory=dict)
    _computed_at: Sequence[int] = ()
    """Of each row, µs since 1970; 0 for a missing one."""
    _columns: WholeColumns | None = None
    _statuses: list[Status] | None = None
    """None: all fresh from the store, the common case."""
    _reasons: dict[int, Reason] = field(default_factory=dict)
    _computed: dict[int, bytes] = field(default_factory=dict)
    """Row's number → the packed row that the fallback made, now or before."""
    _cached: set[int] = field(default_factory=set)
    """Those that it made before."""
    likes: dict[int, Likeness] = field(default_factory=dict)
    """Number of a row that is another entity's → whose, and how near its input is."""
    _in_error: set[int] = field(default_factory=set)
    """Rows that have expired and are served, since the model failed."""
    details: dict[int, str] = field(default_factory=dict)
    """Number of a missing row → what its reason does not say: what the model said, which is for
    nobody over HTTP, or of how many parts a key is."""
    wanted: dict[int, Reason] = field(default_factory=dict)
    """Number of a row that the model computed → why it was requested."""
    damaged: int = 0
    """Rows that the store has, and that do not vouch for themselves."""
    retry_after_s: float = 0.0
    """Before then it is in vain to ask again for what the fallback did not compute; 0 where nobody
    knows."""
    read_s: float = 0.0
    """Seconds that the store took for the packed rows; then to verify and judge them; then, for who
    waits on a loop, for those in flight."""
    verify_s: float = 0.0
    wait_s: float = 0.0

    @property
    def pointer(self) -> Pointer:
        """The pointer the whole answer was read under."""
        return self.plan.pointer

    def judge(self, columnar: bool = False) -> list[int]:
        """Verify every row, give it its status and drop what has expired; returns the numbers of
        the rows that are missing and could be had.

        Args:
            columnar: :meth:`table` or :meth:`whole_columns` will be requested: the rows' values are
                read on the way.
        """
        plan = self.plan
        states: Sequence[int]
        if len(self.keys) == 1:
            state, computed_at = self.found.verified_one(plan.codec, plan.snapshots)
            states, self._computed_at = [state], [computed_at]
            whole, oldest = state == _WHOLE, computed_at
        else:
            if columnar and plan.reader is not None:
                self._columns = columns = self.found.columns(plan.reader)
                checked, times = columns.states, columns.computed_at_us
            else:
                checked, times = self.found.verified(plan.codec, plan.snapshots)
            self._computed_at = times.tolist()
            # of a list: numpy takes longer for the hundreds that are requested
            whole, oldest = checked.tobytes() == _WHOLE_BYTE * len(checked), min(self._computed_at)
            states = [] if whole else checked.tolist()
        if whole and self._all_fresh(oldest):
            return []
        states = states or [_WHOLE] * len(self.keys)
        self._statuses = [
            self._judged(i, state, computed_at)
            for i, (state, computed_at) in enumerate(zip(states, self._computed_at, strict=True))
        ]
        missing = list(self._reasons)
        self._reasons.update(dict.fromkeys(self.bad, Reason.BAD_KEY))
        return [i for i in missing if i not in self.bad] if self.bad else missing

    def judge_again(self) -> None:
        """Judge the stored rows by what time it is now: since they were read, others were waited
        for."""
        self.now_us, self.sighting = self.look(self.pointer)
        if self._statuses is None:
            if self._all_fresh(min(self._computed_at)):
                return
            self._statuses = [Status.FRESH] * len(self.keys)
        for i, status in enumerate(self._statuses):
            if i in self._cached and status is not Status.MISSING:
                self._statuses[i] = self._judged_by(i, self.age_s(i))
            elif status in (Status.FRESH, Status.STALE) and i not in self._in_error:
                self._statuses[i] = self._judged(i, _WHOLE, self._computed_at[i])

    def _all_fresh(self, oldest_us: int) -> bool:
        """Whether rows are that were computed at ``oldest_us`` and later."""
        ttl_s = self.plan.view.ttl_s
        limit_s = ttl_s if self.oldest_s is None else min(ttl_s, self.oldest_s)
        return self.sighting.age_us(oldest_us, self.now_us) <= limit_s * 1e6

    def _judged(self, i: int, state: int, computed_at_us: int) -> Status:
        if state == _WHOLE:
            return self._judged_by(i, self._age_s(computed_at_us))
        self._reasons[i] = Reason.DAMAGED if state == State.DAMAGED else self.plan.absent
        self.damaged += state == State.DAMAGED
        return Status.MISSING

    def of_all_parts(self, missing: Iterable[int]) -> list[int]:
        """Those of ``missing`` whose key has as many parts as the view's; the others are bad keys:
        no entity can have them."""
        for i in missing:
            if hint := parts_hint(self.keys[i], self.plan.view.entity):
                self._reasons[i], self.details[i] = Reason.BAD_KEY, hint
        return [i for i in missing if i not in self.details]

    def damaged_keys(self) -> list[str]:
        """Keys of the rows that are damaged, before the fallback or what was cached stands in for
        them."""
        return [self.keys[i] for i, reason in self._reasons.items() if reason is Reason.DAMAGED]

    def stale_rows(self) -> list[int]:
        """Numbers of the rows that are stale."""
        return [i for i, status in enumerate(self._statuses or ()) if status is Status.STALE]

    def take_cached(self, i: int, row: bytes | None) -> bool:
        """Answer row ``i``, which is missing or stale, by what was cached of it, if that is whole,
        fresher, and as young as the request wants it; None: there is no such entity. Returns
        whether that settles the row."""
        assert self._statuses is not None
        if row is None:
            # it may be that old, and a request may want to know better
            old = self.oldest_s is not None and self.oldest_s < self.plan.view.keep_missing_s
            if old or self._reasons.get(i) is not self.plan.absent:
                return False
            self._reasons[i] = Reason.UNKNOWN_ENTITY
            return True
        state, at_us = self._verified(i, row)
        if state != _WHOLE or not self._computed_at[i] < at_us <= self.now_us + AHEAD_US:
            return False
        status = status_of(self.plan.view, age_s(at_us, self.now_us), self.oldest_s)
        if status is Status.MISSING:
            return False
        self._cached.add(i)
        self._computed[i], self._computed_at[i], self._statuses[i] = row, at_us, status  # type: ignore[index]
        self._reasons.pop(i, None)
        return status is Status.FRESH

    def _verified(self, i: int, row: bytes) -> tuple[State, int]:
        found = FoundRows([self.found.keys[i]], [row])
        return found.verified_one(self.plan.codec, self.plan.snapshots)

    def _judged_by(self, i: int, age_s: float) -> Status:
        status = status_of(self.plan.view, age_s, self.oldest_s)
        if status is Status.MISSING:
            self._reasons[i] = Reason.EXPIRED
        return status

    def _served_in_error(self, i: int) -> bool:
        """Whether row ``i``, which has expired and could not be computed again, is served as stale
        all the same."""
        view, at_us = self.plan.view, self._computed_at[i]
        old = (
            self._reasons.get(i) is Reason.EXPIRED
            and view.stale_if_error_s > 0
            and self.oldest_s is None
        )
        if not old or self._age_s(at_us) > view.ttl_s + view.stale_for_s + view.stale_if_error_s:
            return False
        self._in_error.add(i)
        assert self._statuses is not None
        self._statuses[i] = Status.STALE
        del self._reasons[i]
        return True

    def wait(self) -> None:
        """Wait for the rows in flight, at most until the deadline, then :meth:`settle`."""
        if self.pending:
            wait(self.pending.values(), timeout=max(0.0, self.deadline - time.monotonic()))
            self.settle()

    def settle(self, not_done: Reason = Reason.DEADLINE) -> None:
        """Take what the futures hold now, and judge all rows by the time it is now; a row that is
        not done is missing for that reason."""
        assert self._statuses is not None or not self.pending
        for i, future in self.pending.items():
            error = (
                future.exception() if future.done() and not future.cancelled() else Miss(not_done)
            )
            if (
                error is None
                and future.result().like is None
                and self._verified(i, future.result().row)[0] != _WHOLE
            ):
                # the pointer is not what the model was opened for: another one wrote it
                error = Miss(Reason.MODEL_ERROR, "the model makes other rows than the pointer says")
            if error is not None:
                if not isinstance(error, Miss):
                    raise error
                if error.reason is Reason.UNKNOWN_ENTITY or not self._served_in_error(i):
                    self._reasons[i] = error.reason
                    if str(error) != error.reason:
                        self.details[i] = str(error)
                    self.retry_after_s = max(self.retry_after_s, error.retry_after_s)
                continue
            computed = future.result()
            self._computed[i], self._computed_at[i] = computed.row, computed.computed_at_us  # type: ignore[index]
            reason = self._reasons.pop(i)
            if computed.like is None:
                self._statuses[i] = Status.COMPUTED  # type: ignore[index]
                self.wanted[i] = reason
            else:
                # of a published row, to be judged as any
                self._statuses[i] = Status.FRESH  # type: ignore[index]
                self.likes[i] = computed.like
        self.pending = {}
        self.judge_again()

    def row_counts(self) -> dict[tuple[str, str, str], int] | None:
        """(status, source, reason) → rows; None where all are fresh rows of the store."""
        if self._statuses is None:
            return None
        labels = (
            (str(status), str(self.source(i) or ""), str(self._reasons.get(i, "")))
            for i, status in enumerate(self._statuses)
        )
        return dict(Counter(labels))

    def status(self, i: int) -> Status:
        """Status of row ``i``."""
        return Status.FRESH if self._statuses is None else self._statuses[i]

    def reason(self, i: int) -> Reason | None:
        """Why row ``i`` is missing; None when it is not."""
        return self._reasons.get(i)

    def hints(self, explained: Callable[[str], str]) -> list[str]:
        """For people, of missing rows: what their reasons do not say, or what explains a key that
        is unknown; a line of each kind, up to three."""
        lines: dict[str, str] = {}
        for i, reason in self._reasons.items():
            if i in self.details:
                lines.setdefault(self.details[i], f"{self.keys[i]}: {self.details[i]}")
            elif reason is Reason.UNKNOWN_ENTITY:
                lines.setdefault(
                    "",
                    f"whether {self.keys[i]} was rejected, or removed: {explained(self.keys[i])}",
                )
        return list(lines.values())[:3]

    def default_row(self, i: int) -> bytes | None:
        """What stands in for row ``i``, packed; None where it is there, or nothing does."""
        return None if self._reasons.get(i) in (None, Reason.BAD_KEY) else self.plan.default

    def source(self, i: int) -> AnswerSource | None:
        """Where row ``i`` came from; None of a missing one that nothing stands in for."""
        if i in self._reasons:
            return None if self.default_row(i) is None else AnswerSource.DEFAULT
        if self.status(i) is Status.COMPUTED:
            return AnswerSource.FALLBACK
        return AnswerSource.CACHE if i in self._cached or i in self.likes else AnswerSource.STORE

    def packed_row(self, i: int) -> Buffer | None:
        """Row ``i`` as it is packed, its checksum first; None for a missing one."""
        return None if i in self._reasons else self._computed.get(i) or self.found.values[i]

    def age_s(self, i: int) -> float:
        """Age of row ``i`` in seconds; 0 for a missing one."""
        if i in self._reasons:
            return 0.0
        if i in self._computed and i not in self.likes:
            return age_s(self._computed_at[i], self.now_us)
        return self._age_s(self._computed_at[i])

    def age_us(self, i: int) -> int:
        """Age in µs of row ``i``, which came from the store."""
        return self.sighting.age_us(self._computed_at[i], self.now_us)

    def _age_s(self, computed_at_us: int) -> float:
        """Age of what was published as computed then, or was found unchanged since."""
        return self.sighting.age_us(computed_at_us, self.now_us) / 1e6

    def future_rows(self) -> int:
        """Rows that say they were computed in the future: a clock was wrong."""
        limit = self.now_us + AHEAD_US
        if not self._computed_at or max(self._computed_at) <= limit:
            return 0
        return sum(us > limit and i not in self._reasons for i, us in enumerate(self._computed_at))

    def computed_at_us(self, i: int) -> int:
        """When row ``i`` was computed, µs since 1970."""
        return self._computed_at[i]

    def whole_columns(self) -> WholeColumns | None:
        """The rows' values as columns, where all rows are fresh ones of the store, and were read
        so."""
        return self._columns if self._statuses is None else None

    def table(self) -> pa.Table:
        """The answer as Arrow: the columns of :data:`ANSWER_FIELDS`, then one per feature."""
        return pa.Table.from_arrays([self._key_column(), *self.columns()], schema=self.plan.schema)

    def columns(self) -> list[pa.Array]:
        """The columns of :meth:`table` behind the key's."""
        plan, rows = self.plan, len(self.keys)
        present = None
        if self._reasons:
            present = np.ones(rows, np.bool_)
            present[list(self._reasons)] = False
        times, features = self._values(present)
        ages = self.sighting.ages_us(times, self.now_us) / 1e6
        for i in self._computed:
            ages[i] = self.age_s(i)
        valid = None if present is None else pa.array(present).buffers()[1]
        status, source, reason, ttl, snapshot, model = plan.constants(rows)
        if self._statuses is not None:
            status = pa.array([str(s) for s in self._statuses], pa.string())
            source = pa.array([self.source(i) for i in range(rows)], pa.string())
            reason = pa.array([self._reasons.get(i) for i in range(rows)], pa.string())
        return [
            status,
            source,
            reason,
            # from_buffers: pa.array() of a timestamp with a time zone costs 12 µs, this 1.3
            pa.Array.from_buffers(_TIMESTAMP, rows, [valid, pa.py_buffer(times)]),
            pa.Array.from_buffers(_FLOAT64, rows, [valid, pa.py_buffer(ages)]),
            ttl,
            snapshot,
            model,
            *self._similar_columns(),
            *features,
        ]

    def _similar_columns(self) -> list[pa.Array]:
        """Of :data:`SIMILAR_FIELDS`, where the view has them."""
        if not self.plan.similar_fields:
            return []
        if not self.likes:
            return [pa.nulls(len(self.keys), kind) for _, kind in self.plan.similar_fields]
        likes = [None if i in self._reasons else self.likes.get(i) for i in range(len(self.keys))]
        found = (
            [None if like is None else like.similarity for like in likes],
            [None if like is None else like.key for like in likes],
        )
        return [
            pa.array(values, kind)
            for values, (_, kind) in zip(found, self.plan.similar_fields, strict=True)
        ]

    def _key_column(self) -> pa.Array:
        keys = self.found.keys
        if not isinstance(keys, PackedKeys):
            return pa.array(self.keys, _STRING)
        # a quarter of pa.array's time
        offsets = pa.py_buffer(keys.packed.offsets.astype(np.int32))
        return pa.Array.from_buffers(
            _STRING, len(keys), [None, offsets, pa.py_buffer(keys.packed.data)]
        )

    def _values(
        self, present: npt.NDArray[np.bool_] | None
    ) -> tuple[npt.NDArray[np.int64], list[pa.Array]]:
        """When each row was computed, int64 [n] µs, 0 for a missing one; and its features'
        columns."""
        plan, columns = self.plan, self._columns
        made = self._computed
        if plan.default is not None and self._reasons and present is not None:
            made = made | {
                i: row for i in self._reasons if (row := self.default_row(i)) is not None
            }
            present = present.copy()
            present[list(made)] = True
        if columns is None or plan.reader is None or made:
            packed = self.found.packed
            if made:
                packed = Packed.of(
                    [made.get(i, value) or b"" for i, value in enumerate(self.found.values)]
                )
            decoded = plan.codec.decode(packed, present, plan.features)
            return decoded.computed_at_us, decoded.columns
        times = (
            columns.computed_at_us
            if present is None
            else np.where(present, columns.computed_at_us, 0)
        )
        return times, plan.reader.arrays(columns, present)

    def rows(self) -> list[dict[str, Any]]:
        """The answer as plain Python, one dict a row, the features under ``features``: the JSON of
        the HTTP API."""
        return [self._row(i) for i in range(len(self.keys))]

    def _row(self, i: int) -> dict[str, Any]:
        plan = self.plan
        source, default = self.source(i), self.default_row(i)
        row: dict[str, Any] = {
            "key": self.keys[i],
            "status": str(self.status(i)),
            "source": source and str(source),
        }
        if i in self._reasons:
            row |= {"reason": str(self._reasons[i]), "computed_at": None, "age_s": None}
            features = None if default is None else plan.codec.decode_one(default, plan.features)[1]
        else:
            value = self.packed_row(i)
            assert value is not None
            us, features = plan.codec.decode_one(value, plan.features)
            if (like := self.likes.get(i)) is not None:
                row |= {"similarity": like.similarity, "nearest": like.key}
            row |= {"computed_at": as_datetime(us), "age_s": self.age_s(i)}
        row |= {
            "ttl_s": plan.view.ttl_s,
            "snapshot": plan.pointer.snapshot,
            "model": plan.pointer.model,
            "features": features,
        }
        return row
