"""Account: the record of what is known of all that is live of a view: its pointers, rows, indexes,
files and records, and whether each is whole.

One checker writes it (:mod:`precompute.store.account.checker`), among the view's notes, and all
others read it. It is derived: where its file is gone or damaged, nothing was looked at yet.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from precompute.store.disk.durable_file import make_folder, replace_undurably
from precompute.store.disk.record import Record, field, read_record, replace, sealed
from precompute.store.disk.storage import storage_of
from precompute.store.errors import OtherFormatError, UnreadableError
from precompute.store.offline.log import Log
from precompute.store.times import duration

log = logging.getLogger(__name__)

NAME = "account.json"
ROWS = "rows"
"""What a finding of rows, or of the segments that they lie in, is of."""


class State(StrEnum):
    """What something that is live is."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    MISSING = "missing"
    FOREIGN = "foreign"
    OTHER_FORMAT = "other format"
    """It is whole, and this version does not read it."""
    UNREADABLE = "unreadable"
    """It cannot be read now: nothing is known of it."""


class Act(StrEnum):
    """The act that heals a finding. All but the last two are done by ``reconcile``, and so by the
    scheduler."""

    NOTHING = "nothing"
    REMOVE = "remove it"
    POINT = "move the pointer"
    INDEX = "build the index again"
    LOAD = "load again"
    RUN = "run the view"
    PERSON = "a person decides"


HEALING = (Act.REMOVE, Act.POINT, Act.INDEX, Act.LOAD)
"""Acts that ``reconcile`` does, the largest last. What is removed is made again on next use."""


class Finding(Record, frozen=True):
    """Something live that is not whole: ``what`` names it, ``found`` says in a sentence what was
    found and what to do. ``keys`` are of rows that were read and were not whole, a few of them:
    they are read again until they are, or something else is live. ``segments`` are the names of
    those at fault in the online store; None where that is not known."""

    what: str
    state: State
    act: Act
    found: str
    keys: tuple[str, ...] = ()
    segments: tuple[str, ...] | None = None


class Turn(Record, frozen=True):
    """How far the moving window over the rows of what has ``base`` as its lowest segment is: the
    next row group is number ``group`` of file number ``file`` of the snapshot's. ``rows`` were read
    since ``began_us``; ``before_us`` is when the turn before began that read all, 0 where none
    did."""

    base: str = ""
    file: int = 0
    group: int = 0
    rows: int = 0
    began_us: int = 0
    before_us: int = 0


class Account(Record, frozen=True):
    """What is known of a view; times are µs since 1970, 0 for never.

    ``epoch`` and ``snapshot`` are what was live (0: nothing) when it was last looked, at ``at_us``.
    ``rows`` is how many the snapshot has. ``files`` maps what has a checksum, by its path, to when
    that was last compared; ``files_bytes`` is their size. ``doubts`` are the online store's own
    that were looked into, and nothing was found. ``unread`` says in words what the last look did
    not look at.
    """

    view: str
    epoch: int = 0
    snapshot: int = 0
    at_us: int = 0
    rows: int = 0
    findings: tuple[Finding, ...] = ()
    turn: Turn = Turn()
    files: dict[str, int] = field(default_factory=dict)
    files_bytes: int = 0
    doubts: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def trouble(self) -> list[str]:
        """A sentence for each finding."""
        return [finding.found for finding in self.findings]

    @property
    def other_format(self) -> bool:
        """Whether anything is of another format."""
        return any(finding.state is State.OTHER_FORMAT for finding in self.findings)

    @property
    def kinds(self) -> list[str]:
        """What sort of things are not whole, without a word of where they lie."""
        return sorted({_kind(finding.what) for finding in self.findings})

    @property
    def is_other(self) -> bool:
        """Whether it is another version's, which looks in this one's stead."""
        return any(finding.what == NAME for finding in self.findings)

    @property
    def act(self) -> Act:
        """The one act that heals all that ``reconcile`` can heal."""
        return max(
            (f.act for f in self.findings if f.act in HEALING),
            key=HEALING.index,
            default=Act.NOTHING,
        )

    def looked_at(self, now_us: int) -> str:
        """What was looked at of what is live, and when, and what was not, in words."""
        if not self.epoch:
            return "nothing is live"
        left = "".join(f"; not looked at: {said}" for said in self.unread)
        return self._looked_at(now_us) + left

    def _looked_at(self, now_us: int) -> str:
        turn = self.turn
        if turn.before_us:
            read = (
                f"all {self.rows:,} rows read in the last"
                f" {duration((now_us - turn.before_us) / 1e6)}"
            )
        elif turn.rows:
            read = (
                f"{min(turn.rows, self.rows):,} of {self.rows:,} rows read in the last"
                f" {duration((now_us - turn.began_us) / 1e6)}"
            )
        elif turn.began_us or not self.files:
            read = f"0 of {self.rows:,} rows read"
        else:
            # of a root elsewhere: rows are known by their files
            read = ""
        if not self.files:
            return read
        oldest = duration((now_us - min(self.files.values())) / 1e6)
        return (
            f"{read}{'; ' if read else ''}{len(self.files)} files,"
            f" {self.files_bytes / 1e6:,.1f} MB, by their checksums in the last {oldest}"
        )


def _kind(what: str) -> str:
    if "/" not in what:
        return what
    sorts = {"/index/": "index", "/data/": "files", "data/": "files", ".table": ROWS}
    return next((sort for part, sort in sorts.items() if part in what), "records")


def read_account(notes: Path, view: str) -> Account:
    """The account of a view, whose notes lie in that folder; of one that was never checked, or
    whose file is damaged, an empty one. One of another format is another version's, which looks:
    that is all that is known of it."""
    path = notes / NAME
    try:
        return read_record(Account, path.read_bytes(), path)
    except OtherFormatError as exc:
        found = Finding(NAME, State.OTHER_FORMAT, Act.PERSON, str(exc))
        return Account(view, at_us=time.time_ns() // 1000, findings=(found,))
    except (OSError, ValueError) as exc:
        if not isinstance(exc, FileNotFoundError):
            log.warning("the account of view %r is begun again: %s", view, exc)
        return Account(view)


def write_account(notes: Path, account: Account) -> None:
    """Write an account, not durably: what is lost is looked at once more. Where it cannot be
    written, the caller has it, and a warning is logged."""
    try:
        make_folder(notes)
        replace_undurably(notes / NAME, sealed(account))
    except OSError as exc:
        log.warning(
            "the account of view %r cannot be written: %s", account.view, exc.strerror or exc
        )


FOLLOWED = "followed.json"
BEHIND_S = 15.0
"""Seconds without a note after which a host that follows a root is behind: it notes every few
seconds that it follows."""


class Followed(Record, frozen=True):
    """The record of a host that follows a root elsewhere: when it last served what the
    root says, ``why`` it has not since, and when that was noted; times are µs since 1970."""

    at_us: int
    why: str = ""
    noted_at_us: int = 0

    def behind_s(self, now_us: int) -> float | None:
        """How long it has been behind the root, in s; None while it is not."""
        behind_s = (now_us - self.at_us) / 1e6
        return behind_s if behind_s > BEHIND_S else None


def read_followed(notes: Path) -> Followed | None:
    """What a host noted of a view; None where it does not follow, or the note is damaged, or of
    another format: whoever follows notes it again in seconds."""
    path = notes / FOLLOWED
    try:
        return read_record(Followed, path.read_bytes(), path)
    except (OSError, ValueError, OtherFormatError):
        return None


def write_followed(notes: Path, followed: Followed) -> None:
    """Write the note; what is lost, or has no folder yet, is noted again in seconds."""
    with contextlib.suppress(OSError):
        noted = replace(followed, noted_at_us=time.time_ns() // 1000)
        replace_undurably(notes / FOLLOWED, sealed(noted))


def is_live_by_log(folder: Path) -> bool:
    """Whether the log in a view's folder says that the view is live; where it cannot be read now,
    it is taken to. Of a root elsewhere no host but those that write there knows."""
    if not storage_of(folder).local:
        return False
    try:
        return Log(folder / "log", folder.name).state().live is not None
    except UnreadableError:
        return True


# ---- Sightings: what readers found damaged or missing, for the checker to look at first. Written
# among the view's notes, where that can be; lost, they cost nothing but time.


NOTES = "notes"
"""Folder of a view, below the root, that has its leases and what is known of what is live."""
_SIGHTINGS = "sightings.jsonl"
_MOST_BYTES = 65536
"""A file that no checker takes grows no further: the next look reads all that it can anyway."""
_EVERY_S = 1.0
"""Seconds between two lines of one view and process: a damaged row may be requested a thousand
times a second."""
_MOST_KEYS = 16

_last: dict[Path, float] = {}
_lock = threading.Lock()


def note_sighting(notes: Path, keys: Sequence[str] = ()) -> None:
    """Note rows that were read and are damaged, by their keys; without any, a vector index that
    does not open or search. Where nothing can be written nothing happens."""
    now_s = time.monotonic()
    with _lock:
        if now_s < _last.get(notes, -_EVERY_S) + _EVERY_S:
            return
        _last[notes] = now_s
    with contextlib.suppress(OSError), (notes / _SIGHTINGS).open("ab") as file:
        if file.tell() < _MOST_BYTES:
            file.write(json.dumps(list(keys[:_MOST_KEYS])).encode() + b"\n")


def has_sightings(notes: Path) -> bool:
    """Whether any were noted."""
    return (notes / _SIGHTINGS).exists()


def take_sightings(notes: Path) -> list[list[str]] | None:
    """The keys of each note, which is gone with that; None where there is none."""
    taken = notes / f".{_SIGHTINGS}.tmp"
    try:
        (notes / _SIGHTINGS).replace(taken)
        lines = taken.read_bytes().splitlines()
        taken.unlink()
    except OSError:
        return None
    sightings = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, list):
                sightings.append([key for key in found if isinstance(key, str)])
    return sightings
