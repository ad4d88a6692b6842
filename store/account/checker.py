"""Checker: looks at all that is live of a view, and writes its account, which says whether it is
whole; and the thread of a server that has it look every minute.

Each look reads pointers, small records, the headers of segments and indexes, the rows that
readers reported, a window of rows that moves over all of them, and files by their checksums: the
small ones each time, the others the longest unread first. A view of a few megabytes is read whole
each time, a large one within the hour."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from precompute.store.account.account import (
    Account,
    Act,
    Finding,
    State,
    Turn,
    has_sightings,
    read_account,
    take_sightings,
    write_account,
)
from precompute.store.account.rows import (
    DOUBTED_ROWS,
    SAMPLE_ROWS,
    MovedError,
    check_served,
    lost_rows,
    not_whole,
    read_on,
    segments_of,
    served_pointer,
)
from precompute.store.disk.lease import is_held
from precompute.store.disk.record import content_of, replace
from precompute.store.disk.storage import IDENTITIES, FileCheck, known_identity
from precompute.store.errors import (
    DamagedPointerError,
    OtherFormatError,
    PrecomputeError,
    RowsLostError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.offline import hooks
from precompute.store.offline.gc import damage as damage_of_manifests
from precompute.store.offline.log import DROP_LEASE, PUBLISH_LEASE, run_lease
from precompute.store.offline.segment import Part, Segment
from precompute.store.offline.selection import Selection, all_rows
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.online.codec import RowCodec
from precompute.store.online.codec import State as RowState
from precompute.store.online.online_store import (
    OnlineStore,
    Pointer,
    check_own_rows,
)
from precompute.store.times import AHEAD_US, clock_us, duration
from precompute.store.vectors.index_files import index_checks

log = logging.getLogger(__name__)

LOOK_S = 0.3
"""Seconds for all views of a project together, at each look: half a percent of a core where one
looks every minute. Reading an hour's share goes on past it."""
HOUR_S, HOUR_US = 3600.0, 3_600_000_000
"""The time within which every row and every file is read, where one looks every minute."""
AHEAD = 1.2
"""Factor by which a look reads more than its share of an hour, for looks that were late or met a
publishing."""
OFTEN_S = 45.0
"""Files that were compared so long ago are compared again while there is time."""
READ_BYTES_S = 1e9
"""Rate at which files are compared, about: one that would take longer than the time left waits for
the hour's share."""
SMALL_BYTES_S, OPEN_BYTES = READ_BYTES_S / 4, 65536
"""Bytes for each second of a look that the smallest files may have together, which are compared at
every look; each is counted with what opening it takes. Of one view 75 MB: most indexes, and all
that is small and damages much."""
MOST_KEYS = 16
"""Keys of rows that are not whole that a finding names; they are read again at the next look."""
NEWEST_REPORTS = 50
"""Reports of runs, the newest, whose files are read for ``status``."""
DEGRADED = "its rows are said to be degraded, and all that were compared are there"


def check_live(
    store: ViewStore,
    online: OnlineStore,
    *,
    share: float = 0.0,
    budget_s: float = LOOK_S,
    publishing: bool = False,
    here: bool = False,
) -> Account:
    """Look at what is live of a view, and write down what was found; while another one looks, or
    publishes, the account is as it was.

    Args:
        store: of the view.
        online: where it is served from.
        share: of all rows and bytes, how much is read whatever time it takes; 1: everything,
            waiting for the caller.
        budget_s: while it lasts, more is read.
        publishing: the caller holds the publishing lease, and reads the Parquet files itself where
            it builds on them: those are left out.
        here: the root is not read: what readers of this host read is looked at, and no more.

    Returns:
        the account.

    Raises:
        OnlineStoreError: the store does not answer, so that nothing new is known.
        SnapshotError: the notes cannot be written.
        UnreadableError: pointer or manifest cannot be read now: likewise.
    """
    notes = store.leases
    # what is live is told elsewhere: it is looked at without a folder for what is found, too
    if not store.folder.is_dir():
        return Account(store.name)
    with _alone(notes, wait=share >= 1.0) as alone:
        if not alone or not (publishing or here or not is_held(store.leases, PUBLISH_LEASE)):
            return read_account(notes, store.name)
        if (known := read_account(notes, store.name)).is_other:
            return known
        looking = _Look(store, online, share, budget_s, publishing)
        account = looking.copies() if here else looking.account()
        write_account(notes, account)
        return account


def share_of(interval_s: float) -> float:
    """The share of all rows and bytes that is read at each look, by looks at that interval."""
    return min(0.99, AHEAD * interval_s / HOUR_S)


@contextlib.contextmanager
def _alone(notes: Path, wait: bool) -> Iterator[bool]:
    """Whether no other process looks at the view, while this lasts."""
    try:
        lock = (notes / ".account.lock").open("ab")
    except OSError:
        # a root that is only read: each looks for itself
        yield True
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            alone = True
        except BlockingIOError:
            alone = False
        except OSError:
            # a file system without locks, or one that fails: likewise
            alone = True
        yield alone


class _Look:
    def __init__(
        self, store: ViewStore, online: OnlineStore, share: float, budget_s: float, publishing: bool
    ) -> None:
        self._store, self._online, self._share, self._publishing = store, online, share, publishing
        self._budget_s, self._now_us = budget_s, clock_us()
        self._ends_s = time.monotonic() + budget_s
        self._before = read_account(store.leases, store.name)
        if self._before.at_us > self._now_us + AHEAD_US:
            # by a clock that was wrong: what was read when is not known
            self._before = replace(self._before, files={}, turn=Turn())
        self._findings: list[Finding] = []
        self._unread: list[str] = []
        self._sighted_files: tuple[str, ...] = ()
        self._by_files = not store.storage.local and not online.blocking
        """Whether rows are known by the checksums of the files that they lie in: to compare them
        with Parquet every host would fetch all of it."""

    def account(self) -> Account:
        name, before = self._store.name, self._before
        if not self._publishing:
            self._records()
            self._log()
        try:
            ref = self._store.log.live()
        except SnapshotError as exc:
            self._add("pointer", State.DAMAGED, Act.LOAD, str(exc))
            return self._written(replace(before, snapshot=self._served() or before.snapshot))
        except OtherFormatError as exc:
            self._add("pointer", State.OTHER_FORMAT, Act.PERSON, str(exc))
            return self._written(before)
        if ref is None:
            served = 0 if self._was_dropped() else self._served()
            if served:
                found = (
                    f"the log of view {name!r} in {self._store.folder} does not say what is live,"
                    f" and readers are served snapshot {served}: restore it from a backup, or"
                    f" precompute publish {name} --snapshot {served}"
                )
                self._add("pointer", State.MISSING, Act.LOAD, found)
            return self._written(Account(name, snapshot=served))
        try:
            snapshot = self._store.snapshot(ref.snapshot)
        except SnapshotError as exc:
            self._add("live snapshot", State.DAMAGED, Act.RUN, str(exc))
            return self._written(before)
        except OtherFormatError as exc:
            self._add("live snapshot", State.OTHER_FORMAT, Act.PERSON, str(exc))
            return self._written(before)
        account = replace(
            before, epoch=ref.epoch, snapshot=ref.snapshot, rows=snapshot.rows, doubts=()
        )
        pointer = served_pointer(self._store, self._online, ref, snapshot.names)
        if isinstance(pointer, Finding):
            self._findings.append(pointer)
            pointer = None
        elif pointer is not None:
            for damage in self._online.record_damage(name):
                self._add("records online", State.DAMAGED, Act.POINT, damage)
        # what an object store takes to answer is no work of ours
        self._ends_s = time.monotonic() + self._budget_s
        if pointer is not None and self._by_files:
            self._met(pointer)
            if pointer.degraded and not self._findings:
                self._add("online pointer", State.DAMAGED, Act.POINT, DEGRADED)
        elif pointer is not None:
            with contextlib.suppress(MovedError):
                account = self._rows(account, pointer, snapshot)
        checks = [
            *self._online_checks(snapshot.names, pointer),
            *self._part_checks(snapshot),
            *self._log_checks(),
            *self._derived_checks(),
        ]
        return self._written(self._files(account, checks))

    def copies(self) -> Account:
        """What is known now of the files of this host alone, where they are copies of the root's:
        the root is looked at by who writes there."""
        name = self._store.name
        try:
            pointer = self._online.live(name)
        except DamagedPointerError as exc:
            self._add("online pointer", State.DAMAGED, Act.POINT, str(exc))
            return self._written(self._before)
        except OtherFormatError as exc:
            self._add("online pointer", State.OTHER_FORMAT, Act.PERSON, str(exc))
            return self._written(self._before)
        if pointer is None:
            return self._written(Account(name))
        account = replace(
            self._before, epoch=pointer.epoch, snapshot=pointer.snapshot, rows=pointer.rows
        )
        try:
            check_own_rows(pointer, self._online.loaded(name, pointer.segments))
        except RowsLostError as exc:
            self._findings.append(lost_rows(State.MISSING, str(exc), exc.segments))
        else:
            self._met(pointer)
        checks = self._online_checks(pointer.segments, pointer)
        return self._written(self._files(account, list(checks)))

    def _met(self, pointer: Pointer) -> None:
        """Rows that readers met, and those of the last look, where they are damaged: the files that
        they lie in are compared at once."""
        keys, known = self._sighted(), {key for f in self._before.findings for key in f.keys}
        read = self._online.read(pointer.view.name, keys) if keys else None
        if read is None or read[0].publishing != pointer.publishing:
            return
        states, _ = read[1].verified(RowCodec(pointer.view), pointer.numbers)
        # one that is not there may be of what was live before
        wrong = [keys[i] for i in np.flatnonzero(states == RowState.DAMAGED).tolist()]
        if wrong:
            self._add_rows(pointer.rows, wrong, [], None)
        if {key.decode() for key in wrong} - known:
            self._sighted_files += (".table",)

    def _records(self) -> None:
        """Small files that bear a seal; what is live is looked at by others."""
        folder, root, name = self._store.leases, self._store.offline.root, self._store.name
        again = f"precompute reconcile {name} removes it, and who needs it makes it again"
        # of partitions there may be thousands, and a damaged one is written again by who takes it
        leases = [
            folder / f"lease-{lease}.json" for lease in (PUBLISH_LEASE, DROP_LEASE, run_lease(None))
        ]
        groups: list[tuple[Iterable[Path], Act, str]] = [
            (
                [
                    *leases,
                    *(root / name for name in IDENTITIES),
                ],
                Act.REMOVE,
                again,
            ),
            (
                map(self._store.runs.path, self._store.runs.ids()[:NEWEST_REPORTS]),
                Act.REMOVE,
                f"it is one run's report; {again}",
            ),
        ]
        for paths, act, remedy in groups:
            for path in paths:
                try:
                    content_of(self._store.storage.read(path), path)
                except FileNotFoundError:
                    continue
                except ValueError as exc:
                    self._add(str(path), State.DAMAGED, act, f"{path} is damaged ({exc}); {remedy}")
                except OtherFormatError as exc:
                    self._add(str(path), State.OTHER_FORMAT, Act.PERSON, str(exc))
                except UnreadableError as exc:
                    if not self._store.storage.local:
                        raise
                    self._add(str(path), State.UNREADABLE, Act.PERSON, str(exc))

    def _log(self) -> None:
        """What a first look reads of the log; the rest is read as files are."""
        try:
            for path, found in self._store.log.damage(newest=True).items():
                self._add(str(path), State.DAMAGED, _act_of(path), found)
        except OtherFormatError as exc:
            self._add("log", State.OTHER_FORMAT, Act.PERSON, str(exc))
        except UnreadableError as exc:
            if not self._store.storage.local:
                raise
            self._add("log", State.UNREADABLE, Act.PERSON, str(exc))

    def _log_checks(self) -> Iterator[tuple[FileCheck, Act]]:
        """The checks of all events, those in archives too, and of all manifests."""
        store = self._store
        known = {finding.what for finding in self._findings}

        def damage() -> str | None:
            found = store.log.damage().items()
            return "; ".join(said for path, said in found if str(path) not in known) or None

        def manifests() -> str | None:
            return "; ".join(damage_of_manifests(store)) or None

        for name, check in (("log", damage), ("manifests", manifests)):
            if self._reads("of the " + name):
                items = store.storage.items(store.folder / name)
                path, size_bytes = str(store.folder / name), sum(one.size_bytes for one in items)
                yield FileCheck(path, size_bytes, check), Act.PERSON

    def _derived_checks(self) -> Iterator[tuple[FileCheck, Act]]:
        """The checks of what powers derive from the snapshots."""
        if self._reads("of what is derived from them"):
            found, said = hooks.checks(self._store)
            self._unread += said
            yield from ((check, Act.REMOVE) for check in found)

    def _reads(self, what: str) -> bool:
        """Whether all files are read that who publishes does not read, and of which elsewhere each
        is a request."""
        elsewhere = not self._store.storage.local and self._share < 1.0
        if elsewhere:
            self._unread.append(f"the files {what}, which lie elsewhere: precompute verify does")
        return not elsewhere and not self._publishing

    def _served(self) -> int:
        """The snapshot that readers are served; 0 for none, and where that is not known."""
        try:
            pointer = self._online.live(self._store.name)
        except DamagedPointerError:
            return 0
        ours = ("", known_identity(self._store.offline.root))
        return 0 if pointer is None or pointer.owner not in ours else pointer.snapshot

    def _was_dropped(self) -> bool:
        return any(event.kind == "drop" for event in self._store.log.events())

    def _written(self, account: Account) -> Account:
        found = tuple(self._findings)
        return replace(account, at_us=self._now_us, findings=found, unread=tuple(self._unread))

    def _add(
        self,
        what: str,
        state: State,
        act: Act,
        found: str,
        segments: tuple[str, ...] | None = None,
    ) -> None:
        self._findings.append(Finding(what, state, act, found, segments=segments))

    # ---- rows

    def _rows(self, account: Account, pointer: Pointer, snapshot: Snapshot) -> Account:
        """What readers met, what the store doubts, and the next rows of the window.

        Raises:
            MovedError: something else is live.
        """
        doubts, hour = self._online.doubts(self._store.name), self._now_us // HOUR_US
        doubted = pointer.degraded or (bool(doubts) and doubts != list(self._before.doubts))
        new = self._before.epoch != account.epoch or self._before.at_us // HOUR_US != hour
        try:
            selection = all_rows(self._store.layers(snapshot))
            wrong = self._again(account, pointer, selection, self._sighted())
            if doubted or (new and not self._publishing):
                # with their values, of others every hour; the window has the rows vouch for
                # themselves
                rows = DOUBTED_ROWS if doubted else SAMPLE_ROWS
                check_served(self._store, self._online, pointer, snapshot, rows, turn=hour)
            turn, more = self._window(account.turn, pointer, snapshot, selection)
            wrong = list(dict.fromkeys([*wrong, *more]))
        except RowsLostError as exc:
            self._check_moved(pointer)
            said = "; ".join([str(exc), *doubts])
            self._findings.append(lost_rows(State.DAMAGED, said, exc.segments))
            return account
        except SnapshotError as exc:
            self._add("live snapshot", State.DAMAGED, Act.RUN, str(exc))
            return account
        if wrong:
            of = segments_of(self._store, snapshot, wrong)
            self._add_rows(account.rows, wrong, doubts, of)
        elif pointer.degraded:
            self._add("online pointer", State.DAMAGED, Act.POINT, DEGRADED)
        return replace(account, turn=turn, doubts=tuple(doubts))

    def _add_rows(
        self, rows: int, wrong: list[bytes], doubts: list[str], of: frozenset[str] | None
    ) -> None:
        name, keys = self._store.name, tuple(key.decode() for key in wrong[:MOST_KEYS])
        found = (
            f"{len(wrong):,} of {rows:,} rows of view {name!r} are missing or damaged in"
            f" the online store, that of key {keys[0]!r} for one: precompute publish {name}"
            " --reload"
        )
        said = "; ".join([found, *doubts])
        self._findings.append(lost_rows(State.DAMAGED, said, of, keys))

    def _check_moved(self, pointer: Pointer) -> None:
        now = self._online.live(pointer.view.name)
        if now is None or now.publishing != pointer.publishing:
            raise MovedError

    def _sighted(self) -> list[bytes]:
        """Keys of rows that readers met, and of those that were not whole at the last look; what
        they met of an index has its files read again."""
        notes = take_sightings(self._store.leases)
        self._sighted_files = ("/index/",) if notes is not None and [] in notes else ()
        keys = [key for finding in self._before.findings for key in finding.keys]
        return [
            key.encode()
            for key in dict.fromkeys([*keys, *(key for note in notes or () for key in note)])
        ]

    def _again(
        self, account: Account, pointer: Pointer, rows: Selection, keys: list[bytes]
    ) -> list[bytes]:
        """Those of some keys whose rows are not whole; of an account of what was live before, those
        that the snapshot still has."""
        wrong = not_whole(self._online, pointer, RowCodec(pointer.view), keys, None) if keys else []
        if not wrong or self._before.epoch == account.epoch:
            return wrong
        known = rows.find(pa.array([key.decode() for key in wrong]), pointer.view.entity)
        return [key for key in wrong if key.decode() in set(known.to_pylist())]

    def _window(
        self, turn: Turn, pointer: Pointer, snapshot: Snapshot, rows: Selection
    ) -> tuple[Turn, list[bytes]]:
        """Read on from where the last look ended: the turn as it is then, and keys of rows that are
        not whole."""
        if turn.base != pointer.segments[0]:
            turn = Turn(pointer.segments[0], began_us=self._now_us)
        least = self._share * snapshot.rows
        if self._publishing and time.monotonic() >= self._ends_s:
            return turn, []
        if self._share >= 1.0:
            turn = replace(turn, file=0, group=0, rows=0, began_us=self._now_us)
            least = math.inf
        # the other half is the files'
        ends_s = self._ends_s - self._budget_s / 2
        return read_on(turn, self._online, pointer, rows, least, ends_s, self._now_us)

    # ---- files

    def _files(self, account: Account, checks: list[tuple[FileCheck, Act]]) -> Account:
        """Compare files with their checksums: the small ones, and those that were found damaged,
        then the longest unread."""
        known, read, left = self._before.files, 0, list[FileCheck]()
        damaged = {finding.what: finding for finding in self._before.findings}
        files = {check.path: known.get(check.path, 0) for check, _ in checks}
        small = self._small(checks)
        total = sum(check.size_bytes for check, _ in checks if check.path not in small)
        # what was damaged, or never read, has no time, and comes first
        for number, (check, act) in enumerate(
            sorted(checks, key=lambda one: (one[0].path not in small, files[one[0].path]))
        ):
            left_s, is_small = self._ends_s - time.monotonic(), check.path in small
            enough = read >= self._share * total and (
                left_s <= 0 or check.size_bytes > READ_BYTES_S * left_s
            )
            sighted = any(part in check.path for part in self._sighted_files)
            first = number == len(small) and self._share > 0
            just_now = files[check.path] > self._now_us - OFTEN_S * 1e6
            if (
                self._share < 1.0
                and not sighted
                # what was loaded again since is whole
                and not (self._publishing and check.path in damaged)
                and not is_small
                and (just_now or (enough and not first))
            ):
                self._findings += [damaged[check.path]] if check.path in damaged else []
                left += [] if just_now else [check]
                continue
            read += 0 if is_small else check.size_bytes
            try:
                damage = check.damage()
            except UnreadableError as exc:
                other = isinstance(exc, OtherFormatError)
                state = State.OTHER_FORMAT if other else State.UNREADABLE
                self._add(check.path, state, Act.PERSON, str(exc))
                files[check.path] = 0
                continue
            files[check.path] = self._now_us if damage is None else 0
            if damage is not None:
                of = None if check.segment is None else (check.segment,)
                self._add(check.path, State.DAMAGED, act, damage, of)
        if left:
            oldest_us = min(files[check.path] for check in left)
            ago = duration((self._now_us - oldest_us) / 1e6)
            self._unread.append(
                f"{len(left)} files, {sum(check.size_bytes for check in left) / 1e6:,.1f} MB, for"
                f" want of time, {f'the longest for {ago}' if oldest_us else 'some of them never'}"
            )
        seen = {path: at_us for path, at_us in files.items() if at_us}
        size_bytes = sum(check.size_bytes for check, _ in checks)
        return replace(account, files=seen, files_bytes=size_bytes)

    def _small(self, checks: Sequence[tuple[FileCheck, Act]]) -> set[str]:
        """Paths of the smallest files, so many as every look has the time for."""
        most, small = self._budget_s * SMALL_BYTES_S, set[str]()
        for check, _ in sorted(checks, key=lambda one: one[0].size_bytes):
            most -= check.size_bytes + OPEN_BYTES
            if most < 0:
                break
            small.add(check.path)
        return small

    def _online_checks(
        self, segments: Sequence[str], pointer: Pointer | None
    ) -> Iterator[tuple[FileCheck, Act]]:
        for check in self._online.file_checks(self._store.name, segments):
            yield check, Act.LOAD
        for folder in () if pointer is None else pointer.index_folders:
            yield from self._index_checks(self._store.offline.root / folder)

    def _part_checks(self, snapshot: Snapshot) -> Iterator[tuple[FileCheck, Act]]:
        """The checks of the files that a snapshot is made of, and the next one would be built on:
        of one of all partitions those of its members, too."""
        store = self._store
        try:
            for holder, segment, part in () if self._publishing else self._built_on(snapshot):
                if not store.storage.local and not (store.folder / part.path).is_file():
                    # compared when it is fetched
                    continue
                check = (
                    store.check_beside
                    if segment is None
                    else partial(store.check_part, holder, segment)
                )
                yield (
                    FileCheck(part.path, part.size_bytes, partial(_message, partial(check, part))),
                    Act.RUN,
                )
        except SnapshotError as exc:
            self._add("live snapshot", State.DAMAGED, Act.RUN, str(exc))

    def _built_on(self, snapshot: Snapshot) -> Iterator[tuple[Snapshot, Segment | None, Part]]:
        """The files of the snapshot, its members, and those that were committed since, each once,
        with its segment; None of what lies beside."""
        store, holders = self._store, [snapshot]
        # elsewhere each manifest is a request, and their files are compared before they are parsed
        if store.storage.local:
            holders += map(store.snapshot, snapshot.members.values())
            # a later run may build on them; those that cannot be read are told as manifests
            for number in store.numbers():
                if number > snapshot.number and number not in store.log.bad():
                    with contextlib.suppress(SnapshotError):
                        holders.append(store.snapshot(number))
        if older := set(store.numbers()) - {holder.number for holder in holders}:
            self._unread.append(f"the parts of {len(older)} other snapshots, until they are used")
        named: dict[str, tuple[Snapshot, Segment | None, Part]] = {}
        for holder in holders:
            for segment in holder.segments:
                for part in (segment.record, *segment.files):
                    named.setdefault(part.path, (holder, segment, part))
        for holder in holders:
            for beside in (holder.rejected, holder.frame_file, holder.nights, *holder.anchors):
                if beside is not None:
                    named.setdefault(beside.path, (holder, None, beside))
        yield from named.values()

    def _index_checks(self, folder: Path) -> Iterator[tuple[FileCheck, Act]]:
        name = self._store.name
        try:
            for check in index_checks(folder, name):
                yield check, Act.INDEX
        except OtherFormatError as exc:
            self._add("index", State.OTHER_FORMAT, Act.PERSON, str(exc))
        except (OSError, ValueError) as exc:
            found = (
                f"the vector index {folder} of view {name!r} cannot be opened ({exc}): precompute"
                f" publish {name} --reload builds it again"
            )
            self._add("index", State.DAMAGED, Act.INDEX, found)


def _act_of(path: Path) -> Act:
    """What to do about a damaged file of the log: a state is derived, an event is not."""
    return Act.REMOVE if path.name.startswith("state-") else Act.PERSON


def _message(check: Callable[[], None]) -> str | None:
    try:
        check()
    except SnapshotError as exc:
        return str(exc)
    return None


# ---- Rounds: in a server a thread has the checker look at what is live every minute, and sooner
# where readers met damage.


EVERY_S = 60.0
"""Seconds between two looks at a view, whichever process looks."""
SOON_S = 5.0
"""Seconds after a look before sightings are looked at: readers may meet what cannot be healed every
second, and a look takes up to a third of one."""
POLL_S = 1.0
"""How often sightings are looked for."""
NICE = 10


def is_due(store: ViewStore, every_s: float = EVERY_S, *, here: bool = False) -> bool:
    """Whether a view is to be looked at: none did for so long, or for a while and readers met
    damage since. During a publishing no process looks, but for those that look only ``here``."""
    notes = store.leases
    # a look that lies ahead was noted by a clock that was wrong
    since_s = abs(time.time() - read_account(notes, store.name).at_us / 1e6)
    if since_s < min(every_s, SOON_S) or (since_s < every_s and not has_sightings(notes)):
        return False
    return here or not is_held(store.leases, PUBLISH_LEASE)


class Rounds:
    """The thread of a server that has the checker look at its views; begins at once.

    Args:
        offline: the root; a view whose notes cannot be written is not looked at.
        open_online: opens the online store, each time it is looked.
        names: of the views.
        every_s: between two looks.
        mend: on a host that follows a root, fetches again what of a view differs from there; the
            root is not read otherwise.
    """

    def __init__(
        self,
        offline: OfflineStore,
        open_online: Callable[[], OnlineStore],
        names: Sequence[str],
        every_s: float = EVERY_S,
        mend: Callable[[str], None] | None = None,
    ) -> None:
        self._stores = [offline.view(name) for name in names]
        self._open, self._every_s, self._mend = open_online, every_s, mend
        self._stopping, self._reported = threading.Event(), dict[str, list[str]]()
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, after the look in progress."""
        self._stopping.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._stopping.wait(POLL_S):
            try:
                due = [
                    store
                    for store in self._stores
                    if os.access(store.leases, os.W_OK)
                    and is_due(store, self._every_s, here=self._mend is not None)
                ]
                if due:
                    self._look(due)
            except Exception:
                # what is looked at next time may be well again
                log.exception("looking at what is live failed")

    def _look(self, due: Sequence[ViewStore]) -> None:
        with contextlib.closing(self._open()) as online:
            for store in due:
                found = self._found(store, online)
                if found and self._mend is not None:
                    try:
                        self._mend(store.name)
                        found = self._found(store, online)
                    except PrecomputeError as exc:
                        log.error("view %r: nothing is mended: %s", store.name, exc)
                self._reported[store.name] = found
                if self._stopping.is_set():
                    return

    def _found(self, store: ViewStore, online: OnlineStore) -> list[str]:
        """Sentences about what is not whole; those that are new are logged."""
        share, budget_s = share_of(self._every_s), LOOK_S / len(self._stores)
        try:
            found = check_live(
                store, online, share=share, budget_s=budget_s, here=self._mend is not None
            ).trouble
        except PrecomputeError as exc:
            found = [f"whether what is live of view {store.name!r} is whole is not known: {exc}"]
        for sentence in found:
            if sentence not in self._reported.get(store.name, []):
                log.error("%s", sentence)
        return found
