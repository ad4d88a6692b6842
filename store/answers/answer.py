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

from precompute.store.answers.fallback import Computed, Miss
from precompute.store.answers.plan import AnswerPlan
from precompute.store.feature_view import status_of
from precompute.store.keys import parts_hint
from precompute.store.online.codec import State
from precompute.store.online.found_rows import FoundRows, PackedKeys, WholeColumns
from precompute.store.online.kernels import Buffer, Packed
from precompute.store.online.online_store import Pointer
from precompute.store.times import (
    AHEAD_US,
    AnswerSource,
    Reason,
    Sighting,
    Status,
    age_s,
    as_datetime,
)
from precompute.store.wire.lookup_options import MAX_DEADLINE_MS

MAX_DEADLINE_S = MAX_DEADLINE_MS / 1000
"""Longest a request waits for the fallback, whatever deadline its view has."""

_WHOLE = int(State.WHOLE)
"""An enumeration's member takes longer to get at than to compare with."""
_WHOLE_BYTE = bytes([_WHOLE])

_TIMESTAMP = pa.timestamp("us", tz="UTC")
_FLOAT64 = pa.float64()
_STRING = pa.string()


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """Where a row of an answer comes from, and what is to say of it; by default a fresh one of the
    store. Of a request's hundreds nearly all are, or are stale; they share one value."""

    status: Status = Status.FRESH
    source: AnswerSource = AnswerSource.STORE
    reason: Reason | None = None
    """Why it is missing."""
    detail: str | None = None
    """What the reason of a missing row does not say: the model's message, which is not sent over
    HTTP, or how many parts a key has."""
    packed: bytes | None = None
    """The packed row that takes the place of the store's: one that the model computed, now or
    before, or another entity's."""
    says: Mapping[str, Any] | None = None
    """What it says besides (:attr:`precompute.store.answers.fallback.Computed.says`)."""
    stored: bool = False
    """Whether ``packed`` is a published row, of another entity, and as old as that."""
    wanted: Reason | None = None
    """Why the model computed the row now; None where it did not."""
    in_error: bool = False
    """Whether the row has expired, and is served because the model failed."""


_FRESH = AnswerRow()
_JUDGED = {
    Status.FRESH: _FRESH,
    Status.STALE: AnswerRow(Status.STALE),
    Status.MISSING: AnswerRow(Status.MISSING, reason=Reason.EXPIRED),
}
"""What a whole row of the store may be, by its age."""


@dataclass(slots=True)
class Answer:
    """The rows of one request, some perhaps still in flight.

    ``now_us`` and ``sighting`` bound the rows' ages; ``again`` gives both once more, for a pointer.
    ``bad`` are the numbers of the keys that no entity can have. ``pending`` maps a row's number to
    the future that computes it; :meth:`wait` settles them.
    """

    plan: AnswerPlan
    keys: list[str]
    found: FoundRows
    now_us: int
    sighting: Sighting
    again: Callable[[Pointer], tuple[int, Sighting]]
    bad: Collection[int] = ()
    oldest_s: float | None = None
    """Rows that are older count as missing; None: the view's limits alone hold."""
    deadline: float = 0.0
    pending: dict[int, Future[Computed]] = field(default_factory=dict)
    _computed_at: list[int] = field(default_factory=list)
    """When each row was computed, µs since 1970; 0 for a missing one."""
    _columns: WholeColumns | None = None
    _others: dict[int, AnswerRow] = field(default_factory=dict)
    """Number of a row → what it is, of those that are not fresh ones of the store."""
    damaged: int = 0
    """Rows that the store has, and that fail their checks."""
    retry_after_s: float = 0.0
    """Seconds before which a retry for what the fallback did not compute is in vain; 0 where that
    is not known."""
    read_s: float = 0.0
    """Seconds that the store took for the packed rows; then to verify and judge them; then, in
    an event loop, for those in flight."""
    verify_s: float = 0.0
    wait_s: float = 0.0

    @property
    def pointer(self) -> Pointer:
        """The pointer the whole answer was read under."""
        return self.plan.pointer

    def row(self, i: int) -> AnswerRow:
        """Where row ``i`` comes from."""
        return self._others.get(i, _FRESH)

    def judge(self, columnar: bool = False) -> list[int]:
        """Verify every row, and give it its status; returns the numbers of the rows that are
        missing and whose keys are valid.

        Args:
            columnar: :meth:`table` or :meth:`whole_columns` will be called: the rows' values are
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
            # of a list: numpy takes longer for the hundreds of rows of a request
            whole, oldest = checked.tobytes() == _WHOLE_BYTE * len(checked), min(self._computed_at)
            states = [] if whole else checked.tolist()
        if whole and self._all_fresh(oldest):
            return []
        for i, state in enumerate(states or [_WHOLE] * len(self.keys)):
            if state == _WHOLE:
                self._judge(i, self._age_s(self._computed_at[i]))
            else:
                self.damaged += state == State.DAMAGED
                reason = Reason.DAMAGED if state == State.DAMAGED else plan.absent
                self._others[i] = AnswerRow(Status.MISSING, reason=reason)
        missing = [i for i, row in self._others.items() if row.reason is not None]
        self._others |= dict.fromkeys(self.bad, AnswerRow(Status.MISSING, reason=Reason.BAD_KEY))
        return [i for i in missing if i not in self.bad] if self.bad else missing

    def judge_again(self) -> None:
        """Judge the stored rows by the time it is now, since waiting for the others took time."""
        self.now_us, self.sighting = self.again(self.pointer)
        if not self._others and self._all_fresh(min(self._computed_at)):
            return
        for i, at_us in enumerate(self._computed_at):
            row = self._others.get(i)
            if row is None:
                self._judge(i, self._age_s(at_us))
            elif row.status in (Status.FRESH, Status.STALE) and not row.in_error:
                self._judge(i, self.age_s(i))

    def _all_fresh(self, oldest_us: int) -> bool:
        """Whether every row that was computed at ``oldest_us`` or later is fresh."""
        ttl_s = self.plan.view.ttl_s
        limit_s = ttl_s if self.oldest_s is None else min(ttl_s, self.oldest_s)
        return self.sighting.age_us(oldest_us, self.now_us) <= limit_s * 1e6

    def _judge(self, i: int, age_s: float) -> None:
        status = status_of(self.plan.view, age_s, self.oldest_s)
        row = self._others.get(i, _FRESH)
        if row.status is not status:
            judged = _JUDGED[status]
            self._others[i] = (
                judged if row.packed is None else replace(row, status=status, reason=judged.reason)
            )

    def of_whole_keys(self, missing: Iterable[int]) -> list[int]:
        """Those of ``missing`` whose key has a value for each of the entity's columns; the others
        are marked as bad keys: no entity can have them."""
        valid = []
        for i in missing:
            if hint := parts_hint(self.keys[i], self.plan.view.entity):
                self._others[i] = AnswerRow(Status.MISSING, reason=Reason.BAD_KEY, detail=hint)
            else:
                valid.append(i)
        return valid

    def damaged_keys(self) -> list[str]:
        """Keys of the rows that are damaged, before the fallback or what was cached stands in for
        them."""
        return [self.keys[i] for i, row in self._others.items() if row.reason is Reason.DAMAGED]

    def stale_rows(self) -> list[int]:
        """Numbers of the rows that are stale."""
        return [i for i, row in self._others.items() if row.status is Status.STALE]

    def take_cached(self, i: int, packed: bytes | None) -> bool:
        """Answer row ``i``, which is missing or stale, by what was cached of it, if that is whole,
        fresher, and as young as the request wants it; None: there is no such entity. Returns
        whether that settles the row."""
        row = self._others[i]
        if packed is None:
            # it may be that old, and a request may want to know better
            old = self.oldest_s is not None and self.oldest_s < self.plan.view.keep_missing_s
            if old or row.reason is not self.plan.absent:
                return False
            self._others[i] = replace(row, reason=Reason.UNKNOWN_ENTITY)
            return True
        state, at_us = self._verified(i, packed)
        if state != _WHOLE or not self._computed_at[i] < at_us <= self.now_us + AHEAD_US:
            return False
        status = status_of(self.plan.view, age_s(at_us, self.now_us), self.oldest_s)
        if status is Status.MISSING:
            return False
        self._computed_at[i] = at_us
        self._others[i] = AnswerRow(status, AnswerSource.CACHE, packed=packed)
        return status is Status.FRESH

    def _verified(self, i: int, packed: bytes) -> tuple[State, int]:
        found = FoundRows([self.found.keys[i]], [packed])
        return found.verified_one(self.plan.codec, self.plan.snapshots)

    def _served_in_error(self, i: int) -> bool:
        """Whether row ``i``, which has expired and could not be computed again, is served as stale
        all the same."""
        view, row = self.plan.view, self._others[i]
        old = row.reason is Reason.EXPIRED and view.stale_if_error_s > 0 and self.oldest_s is None
        most_s = view.ttl_s + view.stale_for_s + view.stale_if_error_s
        if not old or self._age_s(self._computed_at[i]) > most_s:
            return False
        self._others[i] = replace(row, status=Status.STALE, reason=None, in_error=True)
        return True

    def wait(self) -> None:
        """Wait for the rows in flight, at most until the deadline, then :meth:`settle`."""
        if self.pending:
            wait(self.pending.values(), timeout=max(0.0, self.deadline - time.monotonic()))
            self.settle()

    def settle(self, not_done: Reason = Reason.DEADLINE) -> None:
        """Take what the futures hold now, and judge all rows by the time it is now; a row that is
        not done is missing for that reason."""
        for i, future in self.pending.items():
            done = future.done() and not future.cancelled()
            error = future.exception() if done else Miss(not_done)
            if error is None:
                error = self._take_computed(i, future.result())
            if error is not None:
                if not isinstance(error, Miss):
                    raise error
                self._missed(i, error)
        self.pending = {}
        self.judge_again()

    def _take_computed(self, i: int, computed: Computed) -> Miss | None:
        """Row ``i`` is what the fallback gave; or why it is not."""
        if computed.stored:
            # to be judged as any published row
            row = AnswerRow(
                source=AnswerSource.CACHE, packed=computed.row, says=computed.says, stored=True
            )
        elif self._verified(i, computed.row)[0] == _WHOLE:
            wanted = self._others[i].reason
            row = AnswerRow(
                Status.COMPUTED,
                AnswerSource.FALLBACK,
                packed=computed.row,
                says=computed.says,
                wanted=wanted,
            )
        else:
            # the pointer is not what the model was opened for: another one wrote it
            return Miss(Reason.MODEL_ERROR, "the model makes other rows than the pointer says")
        self._others[i], self._computed_at[i] = row, computed.computed_at_us
        return None

    def _missed(self, i: int, miss: Miss) -> None:
        if miss.reason is not Reason.UNKNOWN_ENTITY and self._served_in_error(i):
            return
        detail = str(miss) if str(miss) != miss.reason else None
        self._others[i] = AnswerRow(Status.MISSING, reason=miss.reason, detail=detail)
        self.retry_after_s = max(self.retry_after_s, miss.retry_after_s)

    def row_counts(self) -> dict[tuple[str, str, str], int] | None:
        """(status, source, reason) → rows; None where all are fresh rows of the store."""
        if not self._others:
            return None
        counts = Counter(
            (str(row.status), str(self.source(i) or ""), str(row.reason or ""))
            for i, row in self._others.items()
        )
        if len(self._others) < len(self.keys):
            fresh = str(Status.FRESH), str(AnswerSource.STORE), ""
            counts[fresh] += len(self.keys) - len(self._others)
        return dict(counts)

    def hints(self, explained: Callable[[str], str]) -> list[str]:
        """Lines for people about missing rows: what their reasons do not say, or what explains a
        key that is unknown; one of each kind, up to three."""
        lines: dict[str, str] = {}
        for i, row in self._others.items():
            if row.detail is not None:
                lines.setdefault(row.detail, f"{self.keys[i]}: {row.detail}")
            elif row.reason is Reason.UNKNOWN_ENTITY:
                lines.setdefault(
                    "",
                    f"whether {self.keys[i]} was rejected, or removed: {explained(self.keys[i])}",
                )
        return list(lines.values())[:3]

    def default_row(self, i: int) -> bytes | None:
        """What stands in for row ``i``, packed; None where it is there, or nothing does."""
        return None if self.row(i).reason in (None, Reason.BAD_KEY) else self.plan.default

    def source(self, i: int) -> AnswerSource | None:
        """Where row ``i`` came from; None of a missing one that nothing stands in for."""
        row = self.row(i)
        if row.reason is None:
            return row.source
        return None if self.default_row(i) is None else AnswerSource.DEFAULT

    def packed_row(self, i: int) -> Buffer | None:
        """Row ``i`` as it is packed, its checksum first; None for a missing one."""
        row = self.row(i)
        return None if row.reason is not None else row.packed or self.found.values[i]

    def is_computed(self, i: int) -> bool:
        """Whether what computes misses made row ``i``, now or before: what the store has, of this
        entity or another, is the model's."""
        row = self.row(i)
        return row.packed is not None and not row.stored and row.reason is None

    def age_s(self, i: int) -> float:
        """Age of row ``i`` in seconds; 0 for a missing one."""
        row = self.row(i)
        if row.reason is not None:
            return 0.0
        if row.packed is not None and not row.stored:
            return age_s(self._computed_at[i], self.now_us)
        return self._age_s(self._computed_at[i])

    def age_us(self, i: int) -> int:
        """Age in µs of row ``i``, which came from the store."""
        return self.sighting.age_us(self._computed_at[i], self.now_us)

    def _age_s(self, computed_at_us: int) -> float:
        """Age of what was published as computed then, or was found unchanged since."""
        return self.sighting.age_us(computed_at_us, self.now_us) / 1e6

    def rows_ahead(self) -> int:
        """How many rows say they were computed in the future: a clock was wrong."""
        limit = self.now_us + AHEAD_US
        if not self._computed_at or max(self._computed_at) <= limit:
            return 0
        return sum(
            us > limit and self.row(i).reason is None for i, us in enumerate(self._computed_at)
        )

    def computed_at_us(self, i: int) -> int:
        """When row ``i`` was computed, µs since 1970."""
        return self._computed_at[i]

    def whole_columns(self) -> WholeColumns | None:
        """The rows' values as columns, where all rows are fresh ones of the store, and were read
        so."""
        return None if self._others else self._columns

    def table(self) -> pa.Table:
        """The answer as Arrow: the columns of :data:`precompute.store.answers.plan.ANSWER_FIELDS`,
        those of :attr:`precompute.store.answers.plan.AnswerPlan.more_fields`, then one per
        feature."""
        return pa.Table.from_arrays([self._key_column(), *self.columns()], schema=self.plan.schema)

    def columns(self) -> list[pa.Array]:
        """The columns of :meth:`table` behind the key's."""
        plan, rows, others = self.plan, len(self.keys), self._others
        present = None
        if missing := [i for i, row in others.items() if row.reason is not None]:
            present = np.ones(rows, np.bool_)
            present[missing] = False
        times, features = self._values(present)
        ages = self.sighting.ages_us(times, self.now_us) / 1e6
        for i, row in others.items():
            if row.packed is not None:
                ages[i] = self.age_s(i)
        valid = None if present is None else pa.array(present).buffers()[1]
        status, source, reason, ttl, snapshot, model = plan.constants(rows)
        if others:
            all_rows = [others.get(i, _FRESH) for i in range(rows)]
            sources: list[AnswerSource | None] = [row.source for row in all_rows]
            for i in missing:
                sources[i] = self.source(i)
            status = pa.array([row.status for row in all_rows], _STRING)
            source = pa.array(sources, _STRING)
            reason = pa.array([row.reason for row in all_rows], _STRING)
            if plan.miss_model != plan.pointer.model:
                model = pa.array([self.model(i) for i in range(rows)], _STRING)
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
            *self._more_columns(),
            *features,
        ]

    def _more_columns(self) -> list[pa.Array]:
        fields = self.plan.more_fields
        values = [self.more(i) for i in range(len(self.keys))] if fields else []
        return [pa.array([row.get(name) for row in values], kind) for name, kind in fields]

    def more(self, i: int) -> dict[str, Any]:
        """What row ``i`` says of itself that others do not: column → value, of
        :attr:`precompute.store.answers.plan.AnswerPlan.more_fields`."""
        if not self.plan.more_fields:
            return {}
        row = self.row(i)
        said = {} if row.reason is not None else dict(row.says or {})
        if self.is_computed(i):
            said |= self.plan.computed_says
        return said

    def model(self, i: int) -> str:
        """Fingerprint of what computed row ``i``."""
        return self.plan.miss_model if self.is_computed(i) else self.pointer.model

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
        plan, columns, made = self.plan, self._columns, dict[int, bytes]()
        for i, row in self._others.items():
            packed = row.packed if row.reason is None else self.default_row(i)
            if packed is not None:
                made[i] = packed
        if made and present is not None:
            present = present.copy()
            present[list(made)] = True
        if columns is None or plan.reader is None or made:
            packed_rows = self.found.packed
            if made:
                packed_rows = Packed.of(
                    [made.get(i, value) or b"" for i, value in enumerate(self.found.values)]
                )
            decoded = plan.codec.decode(packed_rows, present, plan.features)
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
        return [self._as_dict(i) for i in range(len(self.keys))]

    def _as_dict(self, i: int) -> dict[str, Any]:
        plan, row, source = self.plan, self.row(i), self.source(i)
        packed = self.packed_row(i) if row.reason is None else self.default_row(i)
        us, features = (0, None) if packed is None else plan.codec.decode_one(packed, plan.features)
        shown: dict[str, Any] = {
            "key": self.keys[i],
            "status": str(row.status),
            "source": source and str(source),
        }
        if row.reason is not None:
            shown |= {"reason": str(row.reason), "computed_at": None, "age_s": None}
        else:
            shown |= self.more(i) | {"computed_at": as_datetime(us), "age_s": self.age_s(i)}
        return shown | {
            "ttl_s": plan.view.ttl_s,
            "snapshot": plan.pointer.snapshot,
            "model": self.model(i),
            "features": features,
        }
