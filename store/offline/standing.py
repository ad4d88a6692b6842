"""Standing: whether a snapshot of a view is usable, bad, or refused by gates, and which one is the
newest for what. Decided here and nowhere else.

Bad is one that was rolled back from or whose files are damaged, and one that has a segment that
such a mark names, or copied its rows; nothing builds on it. What a gate refused and nobody accepted
is not published and is no best known history; its rows are right by themselves, so the next run may
build on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from precompute.store.errors import GateError, SnapshotError
from precompute.store.offline.log import BadMark, Hold, LiveRef, Publishing
from precompute.store.offline.snapshot import ANNOUNCED, NEIGHBOURS, Entry, Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import shown_time

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usable:
    """It may be published and built on."""


@dataclass(frozen=True, slots=True)
class Bad:
    """It is marked, builds on a marked one or has rows of one: snapshot ``number``, for
    ``reason``."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """These gates refused it, and nobody accepted that."""

    gates: tuple[str, ...]


Found = Usable | Bad | Refused
"""What :meth:`Standing.verdict` finds."""


def keeps_live(snapshot: Snapshot) -> bool:
    """Whether a snapshot is a partition without rows, which takes the place of nothing unless its
    view says ``empty: publish``."""
    return (
        snapshot.partition is not None
        and not snapshot.rows
        and snapshot.view.definition.empty != "publish"
    )


def is_earlier(snapshot: Snapshot, live: Snapshot) -> bool:
    """Whether a snapshot is an earlier state of its view than the live one: of an earlier
    partition, or of the same and made before."""
    if snapshot.partition is None or live.partition is None:
        return snapshot.number < live.number
    return (snapshot.partition, snapshot.number) < (live.partition, live.number)


def _ways_out(snapshot: Snapshot, gates: Collection[str], *, unchanged: bool) -> str:
    """What to type about a snapshot that these gates refuse; ``unchanged``: it was there before
    the run, which found that nothing changed."""
    view, is_frame = snapshot.view.name, snapshot.frame is not None
    accept = " ".join(f"--accept {gate}" for gate in gates)
    text = (
        "If that is right from now on: precompute publish"
        f" {view} --snapshot {snapshot.number} {accept}."
    )
    if set(gates) <= {*ANNOUNCED}:
        at = (snapshot.partition or "").partition("/")[0]
        expect = f"precompute run {view}{at and f' --partition {at}'} --expect {','.join(gates)}"
        if is_frame:
            of = at and f", partition={at!r}"
            expect = f"precompute.open(…).run({view!r}, frame=df{of}, expect={[*gates]})"
        text += f" If for some days alone: {expect}."
    what, full, retry = "source", "--full", "--retry-rejected"
    if is_frame:
        what, full, retry = "frame", "full=True", "retry_rejected=True"
    text += f" If it is wrong: mend the {what} or the model, and run again"
    if unchanged:
        text += f", by {full} where neither input nor fingerprint shows what was mended"
    if "url" in snapshot.view.definition.model.args:
        # a service, whose answers are kept
        text += (
            f". A service is asked again by {full} {retry} for what was rejected, and for all by"
            f" {full} with another `cache` in model.args"
        )
    return text


def are_alike(one: Snapshot, other: Snapshot) -> bool:
    """Whether rows of both can be served as one set: of one model, also of the views that they
    were computed from, of one entity and the same features."""
    return (
        one.made_by == other.made_by
        and one.view.entity == other.view.entity
        and one.view.features == other.view.features
    )


def marks_of(marks: Mapping[int, BadMark], snapshot: Snapshot) -> list[int]:
    """Numbers of the marks that make a snapshot bad: it is the one, which comes first, or has a
    segment at fault, or rows copied of one, the newest first."""
    names = {*snapshot.names}
    # of one whose files broke later, the copied rows are good
    copied = names.union(*(segment.merged for segment in snapshot.segments))

    def is_bad(number: int, mark: BadMark) -> bool:
        found = copied if mark.rows else names
        if mark.segments is None:
            return any(name.startswith(f"{number}-") for name in found)
        return not found.isdisjoint(mark.segments)

    found = sorted((n for n, mark in marks.items() if is_bad(n, mark)), reverse=True)
    own = [snapshot.number] if snapshot.number in marks else []
    return [*own, *(number for number in found if number != snapshot.number)]


@dataclass(frozen=True, slots=True)
class Held:
    """A view that is held; which snapshot waits, if any, and the one that was rolled back from
    whose very rows that one has again."""

    view: str
    hold: Hold
    waits: int | None
    repeats: int | None

    def __str__(self) -> str:
        resume = f"`precompute resume {self.view}`"
        text = f"held since {shown_time(self.hold.at)} by {self.hold.by}: {self.hold.reason}; "
        if self.waits is None:
            return f"{text}nothing newer waits; {resume} lets runs publish again"
        again = (
            ""
            if self.repeats is None
            else f", with the very rows of snapshot {self.repeats}, which was rolled back from"
        )
        return f"{text}snapshot {self.waits} waits{again}: {resume}"


class Standing:
    """The snapshots of one view, as marks and live pointer stand when they are first read;
    made again for each decision.

    Args:
        store: of the view.
        left: marks that count beside those there are: what a rollback is about to leave.
    """

    def __init__(self, store: ViewStore, left: Mapping[int, BadMark] | None = None) -> None:
        self._store, self._left = store, left or {}

    @cached_property
    def marks(self) -> dict[int, BadMark]:
        """Numbers of the snapshots that are not to be used → why."""
        return {**self._left, **self._store.log.bad()}

    @cached_property
    def _accepted(self) -> Mapping[int, tuple[str, ...]]:
        return self._store.log.state().accepted

    # ---- one snapshot

    def verdict(self, snapshot: Snapshot) -> Found:
        """Whether a snapshot is usable, bad, or refused by gates.

        Raises:
            UnreadableError: something cannot be read now, so that it is not known.
        """
        for number in self._marked(snapshot):
            return Bad(number, self.marks[number].reason)
        gates = self.refused_by(snapshot)
        return Refused(gates) if gates else Usable()

    def refused_by(self, snapshot: Snapshot | Entry) -> tuple[str, ...]:
        """The gates that refuse a snapshot and that nobody accepted for it."""
        failed = snapshot.failed_gates
        accepted = self._accepted.get(snapshot.number, ()) if failed else ()
        return tuple(gate for gate in failed if gate not in accepted)

    def why_void(self, snapshot: Snapshot) -> str | None:
        """Why a snapshot is no best known history: what publishing would refuse is none. None where
        it is."""
        match self.verdict(snapshot):
            case Bad(number, reason):
                builds = "" if number == snapshot.number else f"it builds on snapshot {number}: "
                return f"{builds}{reason}"
            case Refused(gates) if NEIGHBOURS in gates:
                return "not compared yet with the partitions before it"
            case Refused(gates):
                return f"refused by {', '.join(gates)}"
            case Usable():
                again = self.repeats(snapshot)
                if again is None:
                    return None
                return f"it has the very rows of snapshot {again}: {self.marks[again].reason}"

    def repeats(self, snapshot: Snapshot) -> int | None:
        """Number of the snapshot before it that was rolled back from and whose very rows it has;
        None where there is none."""
        same = (
            number
            for number, mark in self.marks.items()
            if number < snapshot.number and mark.content and mark.content == snapshot.content
        )
        return max(same, default=None)

    def check_publishable(self, snapshot: Snapshot, *, unchanged: bool = False) -> None:
        """Refuse what is not to be published.

        Args:
            snapshot: committed.
            unchanged: of a run that found that nothing changed since it was refused, and is told
                how to have all rows computed.

        Raises:
            GateError: a gate refused the snapshot and nobody accepted that, or it is bad.
            UnreadableError: something cannot be read now.
        """
        number, view = snapshot.number, self._store.name
        match self.verdict(snapshot):
            case Bad(bad, reason):
                how = "" if number == bad else f", and snapshot {number} builds on it"
                on_purpose = (
                    f"; if its rows are right after all: precompute publish {view} --snapshot"
                    f" {number}"
                    if self.marks[bad].rows
                    else ""
                )
                raise GateError(
                    f"view {view!r}: snapshot {bad} is marked bad ({reason}){how}; the live one"
                    f" stays. Mend the source or the model, and run the view again{on_purpose}"
                )
            case Refused(gates) if NEIGHBOURS in gates:
                at = str(snapshot.partition).partition("/")[0]
                raise GateError(
                    f"view {view!r}: snapshot {number} of partition {snapshot.partition} is not"
                    " published: the backfill that computed it ended before it was compared with"
                    f" the partitions before it: precompute backfill {view} --from {at} --to {at}"
                )
            case Refused(gates):
                said = "; ".join(
                    f"{verdict.gate}: {verdict.message}"
                    + ("" if verdict.figures else f" (limit {verdict.limit:g})")
                    for verdict in snapshot.failed
                    if verdict.gate in gates
                )
                if any(verdict.figures for verdict in snapshot.failed if verdict.gate in gates):
                    said += f". Beside its nights: precompute gates {view} --snapshot {number}"
                raise GateError(
                    f"view {view!r}: snapshot {number} is not published, the live one stays."
                    f" {said}. {_ways_out(snapshot, gates, unchanged=unchanged)}"
                )

    def rolled_back(self, snapshot: Snapshot) -> list[int]:
        """Numbers of the snapshots that were rolled back from and that it is, builds on or has rows
        of; what is damaged is none of them.

        Raises:
            UnreadableError: as :meth:`verdict`.
        """
        return [number for number in self._marked(snapshot) if self.is_left(number)]

    def _marked(self, snapshot: Snapshot) -> Iterator[int]:
        """Numbers of the marked snapshots that it is, builds on, or has rows of."""
        yield from marks_of(self.marks, snapshot)
        yield from (number for number in snapshot.members.values() if self.is_left(number))

    def is_left(self, number: int) -> bool:
        """Whether a snapshot was rolled back from."""
        return number in self.marks and self.marks[number].rows

    def why_unpublished(self, snapshot: Snapshot) -> str | None:
        """Why what a run or a backfill computed does not go live by itself, its gates aside; None
        where it does. What an operator publishes always does."""
        if keeps_live(snapshot):
            return f"partition {snapshot.partition} has no rows: it is done, and what is live stays"
        return self.why_stays(snapshot.partition)

    def why_stays(self, partition: str | None) -> str | None:
        """Why what is live stays, whatever a run of this partition (None: of a view that has none)
        computes; None where it does not."""
        ref = self._store.log.readable_live()
        if (held := self.held(ref)) is not None:
            return f"the view is {held}"
        if ref is None:
            return None
        live = self._live(ref)
        if (
            live is not None
            and live.partition is not None
            and partition is not None
            and live.partition > partition
        ):
            return f"partition {partition} is older than the live {live.partition}"
        return None

    def held(self, ref: LiveRef | None) -> Held | None:
        """That the view is held, and what waits; None where it is not. That it is held is known
        where what is live is not (``ref`` is None)."""
        hold = self._store.log.held() if ref is None else ref.held
        if hold is None:
            return None
        waits = None if ref is None else self.waiting(ref)
        if waits is None:
            return Held(self._store.name, hold, None, None)
        return Held(self._store.name, hold, waits.number, self.repeats(waits))

    def waiting(self, ref: LiveRef) -> Snapshot | None:
        """The snapshot that would be published were the view not held: the newest usable one, if it
        is a later state than what is live, and than what was rolled back from since; None without
        any."""
        live, found = self._live(ref), None
        if live is not None and live.members:
            served = live.members
            new = [
                snapshot
                for partition, snapshot in self.newest_of_each().items()
                if snapshot.number > served.get(partition, 0)
            ]
            found = max(new, key=lambda snapshot: snapshot.number, default=None)
        else:
            found = self._newest_publishable(())
            if found is None or keeps_live(found) or found.number == ref.snapshot:
                return None
            if live is not None and is_earlier(found, live):
                return None
        entries = self._store.catalog().entries
        for number, mark in self.marks.items():
            left = entries.get(number)
            if mark.rows and found is not None and left is not None:
                # made before what was rolled back from, it is no news
                superseded = left.partition == found.partition and number > found.number
                found = None if superseded else found
        return found

    def _live(self, ref: LiveRef) -> Snapshot | None:
        try:
            return self._store.snapshot(ref.snapshot)
        except SnapshotError:
            # What is live is lost: a reason to replace it.
            return None

    # ---- one of all

    def newest(
        self,
        partition: str | None = None,
        *,
        refused: bool = True,
        computation: str | None = None,
    ) -> Snapshot | None:
        """The newest snapshot of a partition (None: of a view that has none) that is not bad and
        whose files are all there; one that a gate refused counts only with ``refused``: its rows
        are good to build on, not to measure by. With ``computation`` those alone count whose rows
        were made so.
        """
        numbers = self._store.numbers()
        # One of thousands: the others' manifests are not read.
        if partition is not None or computation is not None:
            entries = self._store.catalog().entries
            numbers = [
                number
                for number in numbers
                if number not in entries
                or (
                    entries[number].partition == partition
                    and computation in (None, entries[number].computation)
                )
            ]
        for snapshot in self._readable(reversed(numbers)):
            try:
                if snapshot.partition != partition or snapshot.members:
                    continue
                found = self.verdict(snapshot)
                if isinstance(found, Usable) or (refused and isinstance(found, Refused)):
                    self._store.layers(snapshot)
                    return snapshot
            except SnapshotError as exc:
                log.warning("%s", exc)
        return None

    def nights_before(self, snapshot: Snapshot) -> Iterator[Snapshot]:
        """The snapshots before one that were made as it was, with rows, and that are not bad nor
        refused, the newest first: by them is known what is usual. Of a view that has no
        partitions."""
        number = snapshot.number or math.inf
        return self._made_as(snapshot, lambda one: one.partition is None and one.number < number)

    def earlier_partitions(self, snapshot: Snapshot) -> Iterator[Snapshot]:
        """Of each partition before that of ``snapshot``, the latest first, the newest snapshot that
        was made as this one, with rows, and that is not bad nor refused."""
        seen, before = set[str](), snapshot.partition or ""
        for found in self._made_as(snapshot, lambda entry: "" < (entry.partition or "") < before):
            if found.partition is not None and found.partition not in seen:
                seen.add(found.partition)
                yield found

    def _made_as(self, snapshot: Snapshot, fits: Callable[[Entry], bool]) -> Iterator[Snapshot]:
        """The usable snapshots with rows that were made as this one, the newest of the latest
        partition first."""
        numbers = [
            entry.number
            for entry in sorted(
                self._store.catalog().entries.values(),
                key=lambda entry: (entry.partition or "", entry.number),
                reverse=True,
            )
            if entry.rows
            and not entry.members
            and entry.computation == snapshot.computation
            and not self.refused_by(entry)
            and fits(entry)
        ]
        for found in self._readable(numbers):
            if found.made_by == snapshot.made_by and isinstance(self.verdict(found), Usable):
                yield found

    def newest_publishable(self, accept: Collection[str] = ()) -> int:
        """Number of the newest snapshot of the newest partition that is not bad and that no gate
        refused but those in ``accept``; the newest of all when there is none such, to say why it
        cannot be published.

        Raises:
            SnapshotError: there is no snapshot, or only partitions without rows.
        """
        numbers = self._store.numbers()
        if not numbers:
            raise SnapshotError(
                f"view {self._store.name!r} has no snapshot yet: run `precompute run"
                f" {self._store.name}`"
            )
        found = self._newest_publishable(accept)
        if found is None:
            return self._without_assembled()[-1]
        if keeps_live(found):
            raise SnapshotError(
                f"view {self._store.name!r}: no partition that may be published has rows; to"
                " publish one without, name it with --snapshot"
            )
        return found.number

    def _newest_publishable(self, accept: Collection[str]) -> Snapshot | None:
        """None where there is none; a partition without rows only where none has any."""
        numbers = self._without_assembled()
        last = next(
            (s for s in self._readable(reversed(numbers)) if self._may_be_published(s, accept)),
            None,
        )
        # A view that lost or got its partitions: what it has now counts.
        if last is None or last.partition is None:
            return last
        for snapshot in self._readable(number for _, number in self._days()):
            if self._may_be_published(snapshot, accept) and not keeps_live(snapshot):
                return snapshot
        return last

    def _days(self) -> list[tuple[str, int]]:
        """Partition and number of each snapshot of one, the newest partition first."""
        every = self._store.catalog().entries.values()
        days = ((one.partition, one.number) for one in every if one.partition is not None)
        return sorted(days, reverse=True)

    def _without_assembled(self) -> list[int]:
        numbers = self._store.numbers()
        assembled = {
            entry.number for entry in self._store.catalog().entries.values() if entry.members
        }
        return [number for number in numbers if number not in assembled] or numbers

    def newest_of_each(
        self, accept: Collection[str] = (), like: Snapshot | None = None
    ) -> dict[str, Snapshot]:
        """Partition → its newest snapshot that is not bad and that no gate refused but those in
        ``accept``, in the order of the partitions. One without rows that takes the place of nothing
        is left out, and with ``like`` all those of another model, entity or features: rows of both
        are no one set.
        """
        newest: dict[str, Snapshot] = {}
        for partition, number in self._days():
            if partition not in newest:
                for snapshot in self._readable([number]):
                    alike = like is None or are_alike(like, snapshot)
                    if (
                        alike
                        and not keeps_live(snapshot)
                        and self._may_be_published(snapshot, accept)
                    ):
                        newest[partition] = snapshot
        return dict(sorted(newest.items()))

    def before(self, ref: LiveRef, publishings: Sequence[Publishing], *, only: bool = False) -> int:
        """Number of the snapshot to go back to from what is live: the last usable one of
        ``publishings``, the oldest first, or else the newest usable one below. With ``only`` it is
        none below, and what is live itself where it is the last one. One of a later partition is
        no earlier state.

        Raises:
            SnapshotError: there is none; names those there are.
            UnreadableError: something cannot be read now, so that it is not known.
        """
        entries = self._store.catalog().entries
        live = entries.get(ref.snapshot)
        day, assembled = (None, False) if live is None else (live.partition, bool(live.members))
        below = [
            entry
            for entry in entries.values()
            if entry.number < ref.snapshot and not only and (not assembled or entry.members)
        ]
        below.sort(key=lambda entry: (entry.partition or "", entry.number))
        earlier = [*(entry.number for entry in below), *(p.snapshot for p in publishings)]
        for number in dict.fromkeys(reversed(earlier)):
            entry = entries.get(number or 0)
            if entry is None or (entry.number == ref.snapshot and not only):
                continue
            if day is not None and (entry.partition or "") > day:
                continue
            for snapshot in self._readable([entry.number]):
                was_live = any(p.snapshot == entry.number for p in publishings)
                if self._may_be_published(snapshot, ()) and (was_live or not keeps_live(snapshot)):
                    return entry.number
        raise SnapshotError(
            f"view {self._store.name!r} has no good snapshot before {ref.snapshot} to go back to"
            f" (there are: {self.numbers_text()})"
        )

    # ---- all

    def numbers_text(self) -> str:
        """The numbers there are, for a message."""
        return (
            ", ".join(f"{n} (bad)" if n in self.marks else str(n) for n in self._store.numbers())
            or "none"
        )

    def _may_be_published(self, snapshot: Snapshot, accept: Collection[str]) -> bool:
        found = self.verdict(snapshot)
        return isinstance(found, Usable) or (
            isinstance(found, Refused) and not set(found.gates).difference(accept)
        )

    def _readable(self, numbers: Iterable[int]) -> Iterable[Snapshot]:
        for number in numbers:
            try:
                yield self._store.snapshot(number)
            except SnapshotError as exc:
                log.warning("%s", exc)
