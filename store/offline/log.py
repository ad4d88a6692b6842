"""Log: what happened to a view's snapshots, an event at a time: which was published, held, marked
bad, pinned, accepted. What the events come to is what is live.

<root>/<view>/log/<number>.json              one event, created exactly once and never changed
<root>/<view>/log/state-<number>.json        derived: what the events up to that number come to
<root>/<view>/log/past-<first>-<last>.jsonl  events of more than 30 days ago, for history alone
"""

from __future__ import annotations

import getpass
import hashlib
import logging
import os
import re
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.lease import Lease
from precompute.store.disk.record import (
    FORMAT,
    Record,
    field,
    other_format,
    read_record,
    replace,
    sealed,
    whole_record,
)
from precompute.store.disk.storage import storage_of
from precompute.store.errors import ConflictError, SnapshotError, UnreadableError
from precompute.store.times import parsed_time, utc_now

log = logging.getLogger(__name__)

PUBLISH_LEASE = "publish"
"""Name of the lease that publishing, rolling back and removing snapshots hold."""
DROP_LEASE = "drop"
"""Name of the lease that the end of a view holds, besides: no run begins meanwhile."""

STATE_EVERY = 8
"""Events after which the state is written down at the latest: who looks for the first time reads at
most so many."""
LISTED_S = 60.0
"""How long a reader of a root elsewhere trusts that the number after its last one is the next: what
it missed may have gone into an archive."""
PAST_S = 30 * 86400.0
"""Age at which events may go into an archive."""
NEWEST_EVENTS = 100
"""Events that stay, however old: readers go on from them."""
PAST_EVENTS = 256
"""Events that are worth an archive."""
EVENTS = "events"
"""What an operator gives up events of a view by, which cannot be read any more."""
MOST_ARCHIVES = 16
"""Archives that are left apart; more are made one, without what cannot be read any more."""

_EVENT = re.compile(r"(\d{20})\.json")
_STATE = re.compile(r"state-(\d{20})\.json")
_PAST = re.compile(r"past-(\d{20})-(\d{20})\.jsonl")


def run_lease(partition: str | None) -> str:
    """Name of the lease that a run of the partition (None: of a view that has none) holds."""
    return "run" if partition is None else "run-" + partition.partition("/")[0].replace(":", "")


BACKFILLS = "backfills"
"""Folder of a view where its backfills keep their records."""


def backfill_lease(id: str) -> str:
    """Name of the lease that the process of a backfill holds."""
    return f"backfill-{id}"


class Publishing(Record, frozen=True):
    """What readers are served from ``since`` (ISO 8601 in UTC) until the next one.

    ``snapshot`` is None where the view was dropped, and where it is not known what was live: then
    ``unknown`` says why. ``published_at`` is when the event ``epoch`` made it live, which is
    ``since`` unless a later run found nothing changed: then ``renewed_at`` says when (µs since
    1970), and ``since`` when readers were given. ``run`` is the id of the command that published
    it; a backfill has one for all its publishings.
    """

    epoch: int
    snapshot: int | None
    since: str
    published_at: str
    renewed_at: int | None = None
    reason: str = ""
    run: str = ""
    unknown: str = ""


class Hold(Record, frozen=True):
    """A view whose runs publish nothing until somebody resumes it: since when (ISO 8601 in UTC),
    by which command and whom, and why."""

    at: str
    by: str
    reason: str


class BadMark(Record, frozen=True, omit_defaults=True):
    """Why a snapshot is not to be used: it was rolled back from, or its files are damaged. ``rows``
    says whether its rows are at fault, as after a rollback, and then ``content`` is their digest,
    if it is known. ``segments`` are the names of the segments at fault: each snapshot that names
    one is bad, too. Where that is not known (None), the one that was made for the snapshot is.
    """

    reason: str
    at: str = ""
    content: str = ""
    rows: bool = True
    segments: tuple[str, ...] | None = None


class LiveRef(Record, frozen=True, omit_defaults=True):
    """Which snapshot is live. ``epoch`` is the number of the event that made it so, and fences late
    writers; 0 means never published.

    ``indexes`` are the names of the folders of its vector index: the base's, and that of the rows
    that changed since, if any. ``previous`` and ``previous_indexes`` are what was live before.
    ``run`` is the id of the command that published it; a backfill has one for all its publishings.
    """

    epoch: int
    snapshot: int
    previous: int | None
    reason: str
    at: str
    indexes: tuple[str, ...] = ()
    previous_indexes: tuple[str, ...] = ()
    renewed_at: int | None = None
    """When a later run found nothing changed, µs since 1970."""
    renewal_noted_at: str | None = None
    """When that was written here for readers, ISO 8601 in UTC."""
    held: Hold | None = None
    """Since when, by whom and why runs publish nothing for now; None when they do."""
    run: str = ""

    def publishing(self) -> Publishing:
        """What it says of what readers are served."""
        return Publishing(
            self.epoch,
            self.snapshot,
            self.renewal_noted_at or self.at,
            self.at,
            self.renewed_at,
            self.reason,
            self.run,
        )


class Event(Record, frozen=True, omit_defaults=True):
    """One thing that happened. ``kind`` says what, and which of the other fields count:

    publish   ``snapshot`` is live, searched by ``indexes``; ``held``: why runs publish nothing
              after it (None: they do); ``marks``: what it leaves that is bad from then on
    renew     a run found nothing changed, at ``renewed_at`` (µs since 1970)
    drop      nothing is live any more
    resume    runs publish again
    bad       ``marks``: number of a snapshot → why it is not to be used
    accept    what ``gates`` refused of ``snapshot`` is accepted; those ``unmarked`` are bad no
              more; that the events ``given_up`` are lost is accepted
    pin, unpin  ``snapshot`` stays, or not, whatever its age
    skip      the numbers up to ``until`` are given to no event
    lost      of an archive: what happened then cannot be read any more, ``reason`` says why
    """

    number: int = 0
    kind: str = ""
    at: str = ""
    """ISO 8601 in UTC. Numbers say what came after what, whatever the clocks said."""
    view: str = ""
    """Whose log it is of: another view's has the same numbers."""
    nonce: str = ""
    """By which a writer whose write failed knows its own."""
    before: int = 0
    """Number of the event before it; 0 for none."""
    run: str = ""
    """Of the command."""
    by: str = ""
    """Who did it."""
    reason: str = ""
    snapshot: int | None = None
    indexes: tuple[str, ...] = ()
    """Names of the folders of its vector index: the base's, and that of the changed rows."""
    held: Hold | None = None
    renewed_at: int | None = None
    marks: dict[int, BadMark] = field(default_factory=dict)
    unmarked: tuple[int, ...] = ()
    gates: tuple[str, ...] = ()
    given_up: tuple[tuple[int, int], ...] = ()
    """First and last number of events that cannot be read any more."""
    until: int = 0

    @property
    def next(self) -> int:
        """Number that the following event has."""
        return max(self.number, self.until) + 1

    def precedes(self, before: int) -> bool:
        """Whether the event after it may name ``before`` as the one before: of several that are
        lost it is the last."""
        return before in (self.number, self.until if self.kind == "lost" else self.number)


class State(Record, frozen=True, omit_defaults=True):
    """What the events up to ``number`` come to; that after it has the number ``next``.

    ``unknown`` says why it is not known what is live: an event since the last publishing cannot be
    read. ``live`` is what was known before it then.
    """

    number: int = 0
    next: int = 1
    view: str = ""
    """Whose log it is of."""
    live: LiveRef | None = None
    held: Hold | None = None
    """Since when, by whom and why runs publish nothing for now; None when they do."""
    unknown: str = ""
    bad: dict[int, BadMark] = field(default_factory=dict)
    pins: dict[int, str] = field(default_factory=dict)
    accepted: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Snapshot → gates whose refusal was accepted, sorted."""


class _Past(Record, frozen=True):
    """The first line of an archive: the view, the event ``before`` those in it, the number after
    them, and the SHA-256 (hex) of the lines."""

    view: str
    before: int
    next: int
    sha256: str


class _Known(NamedTuple):
    """What a process knows: the state, when the file of its last event changed (ns), and when the
    folder was listed (s of the monotonic clock)."""

    state: State
    changed_ns: int | None
    listed_s: float


# ---- what events come to


def folded(state: State, event: Event) -> State:
    """What an event makes of a state.

    Raises:
        OtherFormatError: this version does not know such events.
    """
    fold = _FOLDS.get(event.kind)
    if fold is None:
        raise other_format(f"event {event.number}", FORMAT, [event.kind])
    view = event.view or state.view
    return replace(fold(state, event), number=event.number, next=event.next, view=view)


def _published(state: State, event: Event) -> State:
    before, snapshot = state.live, event.snapshot or 0
    live = LiveRef(
        event.number,
        snapshot,
        None,
        event.reason,
        event.at,
        indexes=event.indexes,
        run=event.run,
    )
    if before is not None and before.snapshot != snapshot:
        live = replace(live, previous=before.snapshot, previous_indexes=before.indexes)
    elif before is not None:
        # Loaded again: what was before it is still what to go back to, its rows are as they were
        # found to be, and the command that brought them is the same.
        live = replace(
            live,
            previous=before.previous,
            previous_indexes=before.previous_indexes,
            renewed_at=before.renewed_at,
            run=before.run,
        )
    return replace(_marked(state, event), live=live, held=event.held, unknown="")


def _renewed(state: State, event: Event) -> State:
    if state.live is None:
        return state
    return replace(
        state,
        live=replace(state.live, renewed_at=event.renewed_at, renewal_noted_at=event.at),
    )


def _marked(state: State, event: Event) -> State:
    new = {n: _both(state.bad.get(n), mark) for n, mark in event.marks.items()}
    return replace(state, bad=state.bad | new) if new else state


def _both(first: BadMark | None, second: BadMark) -> BadMark:
    """One mark in place of two: the first stays, unless only the second says that the rows are at
    fault; the segments of both are."""
    if first is None:
        return second
    known = [mark.segments for mark in (first, second) if mark.segments is not None]
    segments = tuple(dict.fromkeys(name for names in known for name in names)) if known else None
    return replace(second if second.rows and not first.rows else first, segments=segments)


def _accepted(state: State, event: Event) -> State:
    number = event.snapshot or 0
    gates = tuple(sorted({*event.gates, *state.accepted.get(number, ())}))
    return replace(
        state,
        bad={n: mark for n, mark in state.bad.items() if n not in event.unmarked},
        accepted=state.accepted | {number: gates} if gates else state.accepted,
    )


_FOLDS: Mapping[str, Callable[[State, Event], State]] = {
    "publish": _published,
    "renew": _renewed,
    "drop": lambda state, _: replace(state, live=None, held=None, unknown=""),
    "resume": lambda state, _: replace(state, held=None),
    "bad": _marked,
    "pin": lambda state, event: replace(
        state, pins=state.pins | {event.snapshot or 0: event.reason}
    ),
    "unpin": lambda state, event: replace(
        state, pins={n: why for n, why in state.pins.items() if n != event.snapshot}
    ),
    "accept": _accepted,
    "skip": lambda state, _: state,
    "lost": lambda state, event: replace(state, unknown=event.reason),
}


# ---- the log


class Log:
    """The log of one view.

    Args:
        folder: where its files are; made by the first write.
        view: the view's name, for messages.
    """

    def __init__(self, folder: Path, view: str) -> None:
        self._folder, self._view, self._storage = folder, view, storage_of(folder)
        self._known: _Known | None = None

    def path(self, number: int) -> Path:
        """The file of an event."""
        return self._folder / f"{number:020d}.json"

    def _state_path(self, number: int) -> Path:
        return self._folder / f"state-{number:020d}.json"

    # ---- looking

    def state(self, *, sure: bool = False) -> State:
        """What all events come to; after the first call each looks for the next number alone.

        Args:
            sure: of a root elsewhere, look too whether the last event is still what it was, as it
                is not in a view that was dropped and made anew; else that is seen within a minute.

        Raises:
            UnreadableError: an event cannot be read now, or is of another format.
        """
        if (known := self._known) is not None and self._goes_on(known, sure):
            return self._walked(known, ())
        state = self._looked_up()
        # an event that is gone may have gone into an archive since the folder was listed
        return self._looked_up() if state.unknown else state

    def _goes_on(self, known: _Known, sure: bool) -> bool:
        """Whether what is known is still the log's: where its last event is there, those after it
        are, too."""
        if not known.state.number or known.state.unknown:
            return False
        if not self._storage.local and not sure:
            return time.monotonic() < known.listed_s + LISTED_S
        item = self._storage.stat(self.path(known.state.number))
        return item is not None and item.modified_ns == known.changed_ns

    def _looked_up(self) -> State:
        """The state by the newest one that was written down, and the events after it."""
        now_s, names = time.monotonic(), self._storage.names(self._folder)
        state = next(self._written_down(names), None)
        if state is None:
            state = State()
            for event in self._past(names):
                state = folded(state, event)
        return self._walked(_Known(state, None, now_s), _numbers(_EVENT, names))

    def _written_down(self, names: Sequence[str]) -> Iterator[State]:
        """The states that were written down and are whole, the newest first."""
        for number in reversed(_numbers(_STATE, names)):
            try:
                yield self._read_state(number)
            except FileNotFoundError:
                continue
            except ValueError as exc:
                path = self._state_path(number)
                log.warning("%s is damaged (%s): events are read in its place", path, exc)

    def _read_state(self, number: int) -> State:
        """Raises:
        FileNotFoundError: it was not written down.
        ValueError: it is damaged.
        """
        path = self._state_path(number)
        state = read_record(State, self._storage.read(path, immutable=True), path)
        self._check_own(state, number)
        return state

    def _check_own(self, record: Event | State, number: int) -> None:
        if (record.view, record.number) != (self._view, number):
            raise ValueError(f"it is number {record.number} of view {record.view!r}")

    def _walked(self, known: _Known, numbers: Sequence[int]) -> State:
        """What is known and the events after it come to, which is remembered; ``numbers`` are those
        of all events, ascending, where they were listed."""
        state = known.state
        while True:
            try:
                event = self._event(state.next, state.number)
            except FileNotFoundError:
                later = _after(numbers, state.next)
                if later is None:
                    break
                event = _gap(state.number, state.next, later, f"{self.path(state.next)} is gone")
            state = folded(state, event)
        changed_ns = known.changed_ns
        if state.number and (changed_ns is None or state.number != known.state.number):
            item = self._storage.stat(self.path(state.number))
            changed_ns = None if item is None else item.modified_ns
        self._known = _Known(state, changed_ns, known.listed_s)
        return state

    def _event(self, number: int, before: int) -> Event:
        """An event; one that is damaged is ``lost``.

        Raises:
            FileNotFoundError: there is none of that number.
            UnreadableError: it cannot be read now.
        """
        path = self.path(number)
        data = self._storage.read(path, immutable=True)
        try:
            event = read_record(Event, data, path)
            self._check_own(event, number)
        except ValueError as exc:
            later = _after(_numbers(_EVENT, self._storage.names(self._folder)), number)
            return _gap(before, number, later or number + 1, f"{path} is damaged ({exc})")
        return event

    # ---- adding

    def append(
        self,
        make: Callable[[State], Event | None],
        *,
        lease: Lease | None = None,
        above: int = 0,
    ) -> State:
        """Add an event after all others, durably.

        Args:
            make: given the state, returns the event, of which number, time and nonce are set here;
                None where there is nothing to add. It is called again where another writer was
                first; what it raises adds nothing.
            lease: held by the writer.
            above: the event's number is larger.

        Returns:
            the state after it.

        Raises:
            SnapshotError: the file system failed; nothing was added.
            UnreadableError: whether it was added is not known.
            FencedError: the lease was lost.
        """
        while True:
            state = self.state(sure=True)
            if lease is not None:
                lease.check()
            event = make(state)
            if event is None:
                return state
            passes_over = above >= state.next
            if passes_over:
                event = Event(kind="skip", until=above)
            event = replace(
                event,
                number=state.next,
                before=state.number,
                at=utc_now(),
                view=self._view,
                nonce=uuid.uuid4().hex,
                by=event.by or _who(),
            )
            if self._created(event):
                state = self._after(state, event)
                if not passes_over:
                    return state

    def _created(self, event: Event) -> bool:
        """Whether an event was created; False where another one has its number.

        Raises:
            SnapshotError: the file system failed, and it is not there, or that is not known.
        """
        path = self.path(event.number)
        try:
            self._storage.create(path, sealed(event), point="log")
        except FileExistsError:
            return self._is_there(event)
        except OSError as exc:
            try:
                is_there = self._is_there(event)
            except UnreadableError as unread:
                state = f"whether it is there is not known: {unread}"
                raise SnapshotError(disk_message(path, exc, state)) from exc
            if not is_there:
                raise SnapshotError(disk_message(path, exc)) from exc
            log.warning("%s", disk_message(path, exc, "it is there all the same"))
        return True

    def _is_there(self, event: Event) -> bool:
        try:
            path = self.path(event.number)
            found = whole_record(Event, self._storage.read(path), path)
        except FileNotFoundError:
            return False
        return found is not None and found.nonce == event.nonce

    def _after(self, before: State, event: Event) -> State:
        """The state after an event that was created. It is written down now and then; and at once
        where the event said more than what is live, so that no bit takes a hold or a mark."""
        state, plain = folded(before, event), event.kind in ("publish", "renew", "skip")
        if (
            not plain
            or event.held is not None
            or event.marks
            or state.number // STATE_EVERY > before.number // STATE_EVERY
        ):
            self._write_down(state)
        item = self._storage.stat(self.path(event.number))
        listed_s = time.monotonic() if self._known is None else self._known.listed_s
        self._known = _Known(state, None if item is None else item.modified_ns, listed_s)
        return state

    def _write_down(self, state: State) -> None:
        path = self._state_path(state.number)
        try:
            crashpoint("log.state")
            # one that may be mended by restoring a file is not for good
            if not state.unknown:
                self._storage.update(path, lambda _: sealed(state), durably=False)
        except (OSError, ConflictError) as exc:
            # it is derived: who looks reads more events
            log.warning("%s cannot be written: %s", path, exc)

    # ---- all events

    def events(self) -> list[Event]:
        """All events, in order; where some are damaged or gone there is one in their place that is
        ``lost``, and bears the time of the event before them, and ``by`` whom it was given up.

        Raises:
            UnreadableError: an event or an archive cannot be read now.
        """
        found = list(self._all())
        if any(event.kind == "lost" for event in found):
            # they may have gone into an archive since the folder was listed
            self._storage.afresh(self._folder)
            found = list(self._all())
        return _known_to_be_lost(found)

    def _all(self) -> Iterator[Event]:
        self._storage.read_ahead(self._folder)
        names = self._storage.names(self._folder)
        last = Event()
        for event in self._past(names):
            yield event
            last = event
        for number in _numbers(_EVENT, names):
            if number < last.next:
                continue
            try:
                event = self._event(number, last.number)
            except FileNotFoundError:
                continue
            if not last.precedes(event.before):
                first = last.next
                why = f"events {first} to {number - 1} are gone from {self._folder}"
                yield _gap(last.number, first, number, why, last.at)
            last = replace(event, at=last.at) if event.kind == "lost" else event
            yield last
        written = max(_numbers(_STATE, names), default=0)
        if written >= last.next:
            why = f"events {last.next} to {written} are gone from {self._folder}"
            yield _gap(last.number, last.next, written + 1, why, last.at)

    def _past(self, names: Sequence[str]) -> Iterator[Event]:
        """The events of the archives."""
        last = Event()
        for path, first, end in self._archives(names):
            head, events = self._read_archive(path)
            if head is None:
                why = f"{path} is damaged or gone: restore it"
                events = [_gap(last.number, first, end + 1, why, last.at)]
            elif not last.precedes(head.before):
                why = f"an archive of the events {last.next} to {first - 1} is gone"
                yield _gap(last.number, last.next, first, why, last.at)
            yield from events
            last = events[-1]

    def _archives(self, names: Sequence[str]) -> list[tuple[Path, int, int]]:
        """Path, first and last number of each archive; of those made one the others are left
        out."""
        found = sorted(
            (int(name[1]), -int(name[2]), name[0]) for name in map(_PAST.fullmatch, names) if name
        )
        archives: list[tuple[Path, int, int]] = []
        for first, negative, name in found:
            if not archives or -negative > archives[-1][2]:
                archives.append((self._folder / name, first, -negative))
        return archives

    def _read_archive(self, path: Path) -> tuple[_Past | None, list[Event]]:
        """The first line of an archive and its events; None and none of one that is damaged."""
        try:
            data = self._storage.read(path, immutable=True)
            line, _, body = data.partition(b"\n")
            head = read_record(_Past, line, path)
            if hashlib.sha256(body).hexdigest() != head.sha256:
                raise ValueError("its lines are not those that were written")
            if head.view != self._view:
                raise ValueError(f"it is of view {head.view!r}")
            return head, [read_record(Event, each, path) for each in body.splitlines()]
        except (FileNotFoundError, ValueError) as exc:
            log.warning("%s cannot be used: %s", path, exc)
            return None, []

    # ---- what is past

    def thin(self, snapshots: Collection[int], now_s: float | None = None) -> None:
        """Put old events into an archive, that was written and read back before they go; and many
        archives into one, without publishings that cannot be read any more: of those in a row
        whose snapshots are gone the first one stays, so that its time does not count for the one
        before it.

        Args:
            snapshots: numbers of those that are there.
            now_s: seconds since 1970; now by default.

        Raises:
            SnapshotError: the file system failed.
            UnreadableError: something cannot be read now.
        """
        state, names = self.state(), self._storage.names(self._folder)
        try:
            for number in _numbers(_STATE, names)[:-2]:
                self._storage.delete(self._state_path(number))
            archives, numbers = self._archives(names), _numbers(_EVENT, names)
            # of those that are in an archive a crash may have left some
            left = archives and numbers and numbers[0] <= archives[-1][2]
            if len(numbers) < PAST_EVENTS + NEWEST_EVENTS and not left:
                return
            # what is damaged stays where it can be restored
            told = {event.number for event in _told(self.events())}
            if state.unknown or any(first in told for _, first, _ in archives):
                return
            past = [_noted(event) for event in self._past(names)]
            old = self._old(names, past[-1] if past else Event(), now_s)
            if len(old) >= PAST_EVENTS:
                self._write_down(state)
                before = past[-1].number if past else 0
                archives.append((self._archive(before, old), old[0].number, old[-1].number))
                past += old
            if len(archives) > MOST_ARCHIVES:
                self._archive(0, _readable(past, snapshots))
                for path, _, _ in archives:
                    self._storage.delete(path)
            for number in numbers:
                if past and number <= past[-1].number:
                    self._storage.delete(self.path(number))
        except OSError as exc:
            raise SnapshotError(disk_message(self._folder, exc)) from exc

    def _old(self, names: Sequence[str], last: Event, now_s: float | None) -> list[Event]:
        """The events after ``last`` that are for an archive."""
        limit = datetime.fromtimestamp((time.time() if now_s is None else now_s) - PAST_S, UTC)
        events = list(self._all())
        # by the last one that says what is live others read what that is
        moves = [event.number for event in events if event.kind in ("publish", "renew", "drop")]
        end = min([*_numbers(_EVENT, names)[-NEWEST_EVENTS:], *moves[-1:]], default=0)
        old: list[Event] = []
        for event in events:
            at = parsed_time(event.at)
            if event.number >= end or (at is not None and at > limit):
                break
            if event.number > last.number:
                old.append(_noted(event))
        return old

    def _archive(self, before: int, events: Sequence[Event]) -> Path:
        """Write an archive, and read it back."""
        lines = b"".join(sealed(event) + b"\n" for event in events)
        head = _Past(self._view, before, events[-1].next, hashlib.sha256(lines).hexdigest())
        path = self._folder / f"past-{events[0].number:020d}-{events[-1].number:020d}.jsonl"
        data = sealed(head) + b"\n" + lines
        # one that is there was left by a crash
        self._storage.write(path, data)
        if self._storage.read(path) != data:
            raise SnapshotError(f"{path} is read other than it was written: look at the disk")
        return path

    def damage(self, *, newest: bool = False) -> dict[Path, str]:
        """The files that are damaged, or gone, each with a sentence.

        Args:
            newest: only what a first look reads is read: the states that were written down, and as
                many events as one is written down after, twice.

        Raises:
            UnreadableError: one cannot be read now.
        """
        names, found = self._storage.names(self._folder), dict[Path, str]()
        for number in _numbers(_STATE, names):
            try:
                self._read_state(number)
            except FileNotFoundError:
                continue
            except ValueError as exc:
                path = self._state_path(number)
                found[path] = f"{path} is damaged ({exc}): it is derived from the events"
        if newest:
            events = _known_to_be_lost(
                [self._event(number, 0) for number in _numbers(_EVENT, names)[-2 * STATE_EVERY :]]
            )
        else:
            events = self.events()
        for event in _told(events):
            found[self.path(event.number)] = (
                f"{event.reason}: restore it from a backup; without it nobody knows what view"
                f" {self._view!r} served from then until the publishing after it, nor what else it"
                f" said. Where there is none: precompute gc --forget {self._view} {EVENTS}"
            )
        return found

    def give_up(self, lease: Lease | None = None) -> None:
        """Note that events which cannot be read are lost for good. Their files stay where they
        are, and what others say counts as before.

        Args:
            lease: held by the writer.

        Raises:
            SnapshotError: none is, or it is not known what is live: that is said first.
            UnreadableError: an event cannot be read now.
        """

        def given_up(state: State) -> Event:
            self.live()
            lost = _told(self.events())
            if not lost:
                raise SnapshotError(
                    f"every event of view {self._view!r} can be read: there is nothing to forget"
                )
            said = "; ".join(event.reason for event in lost)
            spans = tuple((event.number, event.until) for event in lost)
            return Event(kind="accept", given_up=spans, reason=f"given up: {said}")

        self.append(given_up, lease=lease)

    def size_bytes(self) -> int:
        """What all files of the log take."""
        return sum(item.size_bytes for item in self._storage.items(self._folder))

    # ---- what is live

    def live(self) -> LiveRef | None:
        """What is live, or None when the view was never published.

        Raises:
            SnapshotError: it is not known: an event since the last publishing is damaged.
            UnreadableError: an event cannot be read now.
        """
        state = self.state()
        if state.unknown:
            raise SnapshotError(
                f"what is live of view {self._view!r} is not known, since {state.unknown}; readers"
                f" keep what they have. Restore the file, or `precompute reconcile {self._view}`"
                " says once more what readers are served"
            )
        return self._ref(state)

    def readable_live(self) -> LiveRef | None:
        """As :meth:`live`, and None where it is not known: what a writer needs, whose event says
        it anew.

        Raises:
            UnreadableError: an event cannot be read now.
        """
        state = self.state()
        return None if state.unknown else self._ref(state)

    @staticmethod
    def _ref(state: State) -> LiveRef | None:
        return None if state.live is None else replace(state.live, held=state.held)

    def held(self) -> Hold | None:
        """Since when, by whom and why runs publish nothing for now; None when they do.

        Raises:
            UnreadableError: an event cannot be read now.
        """
        return self.state().held

    def publishings(self) -> list[Publishing]:
        """What readers were served: each publishing, renewal and drop in the order of the events,
        the last one counting until now; what is not known is said so, and logged.

        Raises:
            UnreadableError: an event cannot be read now.
        """
        found, state = list[Publishing](), State()
        for event in self.events():
            state = folded(state, event)
            if event.kind == "lost":
                if not event.by:
                    log.warning("view %r: what was live is not known: %s", self._view, event.reason)
                if found:
                    found.append(
                        Publishing(event.number, None, event.at, event.at, unknown=event.reason)
                    )
            elif event.kind in ("publish", "renew") and state.live and not state.unknown:
                found.append(state.live.publishing())
            elif event.kind == "drop":
                found.append(Publishing(event.number, None, event.at, event.at, reason="drop"))
        return found

    def move_live(
        self,
        snapshot: int,
        *,
        expected_epoch: int,
        reason: str,
        indexes: Sequence[str] = (),
        held: Hold | None = None,
        marks: Mapping[int, BadMark] | None = None,
        lease: Lease | None = None,
        above: int = 0,
        run: str = "",
    ) -> LiveRef:
        """Make a snapshot live, by compare-and-swap, and mark what it leaves bad, in one event.

        Args:
            snapshot: number of a committed snapshot.
            expected_epoch: the epoch the caller saw, 0 for none.
            reason: one phrase for the operator.
            indexes: names of the folders of its vector index, the base's first; none without one.
            held: since when and why runs are to publish nothing after this.
            marks: numbers of the snapshots that are bad from then on → why.
            lease: held by the writer.
            above: the new epoch is larger: that of a root that was restored from a backup is past
                what the online store has.
            run: of the command.

        Raises:
            ConflictError: another process published since.
            FencedError: the lease was lost.
            SnapshotError: the file system failed.
        """

        def published(state: State) -> Event:
            last = 0 if state.unknown or state.live is None else state.live.epoch
            if last != expected_epoch:
                raise ConflictError(
                    f"the live pointer of {self._view!r} moved from epoch {expected_epoch} to"
                    f" {last} meanwhile; look at `status` and publish again if still wanted"
                )
            return Event(
                kind="publish",
                snapshot=snapshot,
                indexes=tuple(indexes),
                held=held,
                marks=dict(marks or {}),
                reason=reason,
                run=run,
            )

        ref = self._ref(self.append(published, lease=lease, above=above))
        assert ref is not None
        return ref

    def renew_live(self, expected: LiveRef, renewed_at: int, lease: Lease | None = None) -> LiveRef:
        """Note that a run found nothing changed, at ``renewed_at`` (µs since 1970).

        Raises:
            ConflictError: what is live is not ``expected`` any more.
            FencedError: the lease was lost.
            SnapshotError: the file system failed.
        """

        def renewed(state: State) -> Event:
            if state.unknown or self._ref(state) != expected:
                raise ConflictError(
                    f"the live pointer of {self._view!r} moved meanwhile; nothing was renewed"
                )
            return Event(kind="renew", snapshot=expected.snapshot, renewed_at=renewed_at)

        ref = self._ref(self.append(renewed, lease=lease))
        assert ref is not None
        return ref

    def resume_live(self, run: str = "") -> LiveRef:
        """Let runs publish again.

        Raises:
            SnapshotError: the view was never published, or what is live is not known.
        """

        def resumed(state: State) -> Event | None:
            if self.live() is None:
                raise SnapshotError(
                    f"view {self._view!r} was never published: there is nothing to resume"
                )
            return None if state.held is None else Event(kind="resume", run=run)

        ref = self._ref(self.append(resumed))
        assert ref is not None
        return ref

    def end_live(self) -> None:
        """Have nothing be live any more: the view is published no more, its snapshots stay. Where
        nothing is, that is no error.

        Raises:
            SnapshotError: the file system failed.
        """
        self.append(
            lambda state: Event(kind="drop", reason="drop") if state.live or state.unknown else None
        )

    # ---- marks

    def bad(self) -> dict[int, BadMark]:
        """Numbers of the snapshots that are not to be used → why.

        Raises:
            UnreadableError: an event cannot be read now.
        """
        return dict(self.state().bad)

    def mark_bad(self, number: int, mark: BadMark) -> None:
        """Mark a snapshot bad. Of two marks the first stays, unless only the second says
        that the rows are at fault; the segments of both are.

        Raises:
            SnapshotError: the file system failed.
        """

        def marked(state: State) -> Event | None:
            first = state.bad.get(number)
            if first is not None and _both(first, mark) == first:
                return None
            return Event(kind="bad", snapshot=number, marks={number: mark}, reason=mark.reason)

        self.append(marked)

    def unmark(self, numbers: Collection[int]) -> None:
        """Take the marks of these snapshots away; one that is not there is no error.

        Raises:
            SnapshotError: the file system failed.
        """

        def unmarked(state: State) -> Event | None:
            there = tuple(sorted(number for number in numbers if number in state.bad))
            return Event(kind="accept", unmarked=there) if there else None

        self.append(unmarked)

    def accept(self, number: int, gates: Collection[str], by: str, reason: str) -> None:
        """Note that what gates refused of a snapshot is accepted, beside those accepted before.

        Args:
            number: of the snapshot.
            gates: their names.
            by: which command, and who gave it.
            reason: one phrase for the operator.

        Raises:
            SnapshotError: the file system failed.
        """
        names = tuple(sorted(gates))
        event = Event(kind="accept", snapshot=number, gates=names, by=by, reason=reason)
        self.append(lambda _: event)

    def accepted(self, number: int) -> frozenset[str]:
        """Gates that were accepted for a snapshot.

        Raises:
            UnreadableError: an event cannot be read now.
        """
        return frozenset(self.state().accepted.get(number, ()))

    def pins(self) -> set[int]:
        """Numbers of the pinned snapshots."""
        return set(self.state().pins)

    def pin(self, number: int, reason: str) -> None:
        """Keep a snapshot whatever its age; pinning it twice is no error.

        Raises:
            SnapshotError: the file system failed.
        """
        self.append(
            lambda state: (
                None if number in state.pins else Event(kind="pin", snapshot=number, reason=reason)
            )
        )

    def unpin(self, number: int) -> None:
        """Let go of a pin; one that is not there is no error.

        Raises:
            SnapshotError: the file system failed.
        """
        self.append(
            lambda state: Event(kind="unpin", snapshot=number) if number in state.pins else None
        )


def _numbers(pattern: re.Pattern[str], names: Sequence[str]) -> list[int]:
    """The numbers in the names that fit, ascending."""
    return sorted(int(name[1]) for name in map(pattern.fullmatch, names) if name)


def _after(numbers: Sequence[int], number: int) -> int | None:
    """The first of some ascending numbers that is larger."""
    at = bisect_right(numbers, number)
    return numbers[at] if at < len(numbers) else None


def _gap(before: int, number: int, later: int, why: str, at: str = "") -> Event:
    """An event in place of those from ``number`` up to but not with ``later``, which are lost."""
    return Event(number, "lost", at, before=before, reason=why, until=later - 1)


def _told(events: Iterable[Event]) -> list[Event]:
    """Those that are lost, and that nobody gave up."""
    return [event for event in events if event.kind == "lost" and not event.by]


def _known_to_be_lost(events: list[Event]) -> list[Event]:
    """The events; those that were given up bear who did that."""
    spans = [(*span, event.by) for event in events for span in event.given_up]

    def known(event: Event) -> Event:
        if event.kind != "lost" or event.by:
            return event
        by = (by for first, last, by in spans if first <= event.number and event.until <= last)
        return replace(event, by=next(by, ""))

    return list(map(known, events)) if spans else events


def _noted(event: Event) -> Event:
    """An event as it goes into an archive: one that is lost is known to be, from then on."""
    return event if event.by else replace(event, by=_who())


def _readable(events: Sequence[Event], snapshots: Collection[int]) -> list[Event]:
    """The events without skips, and of publishings in a row whose snapshots are gone only the
    first; the first and the last of all stay, since they name the archive."""
    stay: list[Event] = []
    for at, event in enumerate(events):
        gone = _is_gone(event, snapshots)
        if at in (0, len(events) - 1) or not (
            event.kind == "skip" or (gone and _is_gone(stay[-1], snapshots))
        ):
            stay.append(event)
    return stay


def _is_gone(event: Event, snapshots: Collection[int]) -> bool:
    moves = event.kind in ("publish", "renew") and not event.marks
    return moves and event.snapshot not in snapshots


@lru_cache(1)
def _who() -> str:
    """The user and the machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{os.uname().nodename}"
