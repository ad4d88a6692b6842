"""Announcement: a change that is expected, of some days, features and gates: that night the gates
that compare warn, and what they warn of is published."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator

from precompute.jobs.config.section import Name, Section
from precompute.store.disk.record import replace
from precompute.store.offline.snapshot import ANNOUNCED, Snapshot, Verdict
from precompute.store.times import Partition

COMPARING = tuple(gate for gate in ANNOUNCED if gate != "rows")
"""Gates that compare a feature with what it was. They are what is announced where none is named."""
_OF_ONE = ("computed", "moved", "rows")


class Days(NamedTuple):
    """From ``first`` to ``last``, both included."""

    first: date
    last: date

    @classmethod
    def of(cls, partition: Partition) -> Days:
        """The days that a partition lies in."""
        return cls(partition.start.date(), (partition.end - timedelta(microseconds=1)).date())

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


_HOW = "write a date, as 2026-11-27, a list of dates, or {from: 2026-11-20, to: 2026-11-30}"


def _date(value: Any) -> date:
    try:
        return date.fromisoformat(str(value))
    except ValueError:
        raise ValueError(_HOW) from None


def _days(value: Any) -> tuple[Days, ...]:
    if isinstance(value, Mapping):
        if value.keys() != {"from", "to"}:
            raise ValueError(_HOW)
        days = Days(_date(value["from"]), _date(value["to"]))
        if days.first > days.last:
            raise ValueError(f"{days.first} is after {days.last}: write the earlier day first")
        return (days,)
    given = value if isinstance(value, list) else [value]
    if not given:
        raise ValueError(_HOW)
    return tuple(Days(day, day) for day in map(_date, given))


class ExpectConfig(Section):
    """A change that is expected: on these days the gates that compare warn, and the night tells
    nothing of what is usual."""

    on: Annotated[
        tuple[Days, ...],
        PlainValidator(
            _days, json_schema_input_type=str | list[str] | dict[Literal["from", "to"], str]
        ),
    ]
    """a date, a list of dates, or {from, to}: of a partition those that it lies in, else the day of
    the run, in UTC"""
    features: list[Name] | None = Field(default=None, min_length=1)
    """which; by default all"""
    gates: list[str] | None = Field(default=None, min_length=1)
    """which, of shape, computed, moved, anchor, never and rows; by default all but rows"""
    reason: str = ""
    """why, for people: the run's report and the manifest have it"""


class Announced(NamedTuple):
    """What was announced of a snapshot: gate → its features, None for all; and ``why``, and by
    whom, for people. Both are empty where nothing was."""

    gates: Mapping[str, frozenset[str] | None] = {}
    why: str = ""

    def told(self, verdict: Verdict) -> Verdict:
        """The verdict of a gate that judges no feature: where it refuses and was announced, it
        warns."""
        if verdict.passed or self.gates.get(verdict.gate, frozenset()) is not None:
            return verdict
        return replace(verdict, passed=True, warned=True)

    def back_from(self, before: Snapshot | None) -> Announced:
        """The same with the way back: what compares with one snapshot alone warns where it warned
        of that, and that was announced. The night tells what is usual all the same."""
        if before is None or not before.announced:
            return self
        of_one = {one.gate for one in before.gates if one.warned}.intersection(_OF_ONE)
        return self._replace(gates={**self.gates, **dict.fromkeys(sorted(of_one))})


UNANNOUNCED = Announced()


def announced(
    expected: Sequence[ExpectConfig],
    days: Iterable[Days],
    asked: Collection[str] = (),
    by: str = "",
) -> Announced:
    """What is announced of a snapshot.

    Args:
        expected: as the view has it.
        days: of the snapshot; one of them is enough.
        asked: gates that its run was given by ``--expect``, for all features.
        by: who gave them.
    """
    gates: dict[str, frozenset[str] | None] = dict.fromkeys(asked)
    why = [f"{', '.join(gates)}, by --expect of {by}"] if gates else []
    days = list(days)
    for one in expected:
        on = [own for own in one.on if any(_overlap(own, other) for other in days)]
        if not on:
            continue
        why.append(f"{one.reason or on[0]}, by gates.expect")
        for gate in one.gates or COMPARING:
            before = gates.get(gate, frozenset())
            every = before is None or one.features is None
            gates[gate] = None if every else frozenset(before or ()).union(one.features or ())
    return Announced(gates, "; ".join(why))


def _overlap(one: Days, other: Days) -> bool:
    return one.first <= other.last and other.first <= one.last
