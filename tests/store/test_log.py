"""The log of a view: what its events come to, whatever a crash, a full disk, another writer or
damage leaves of them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precompute.store.disk import crashpoint
from precompute.store.disk.lease import take
from precompute.store.disk.record import plain, read_record, replace, sealed
from precompute.store.disk.storage import LocalStorage, no_answer
from precompute.store.errors import (
    ConflictError,
    FencedError,
    OtherFormatError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.offline import log as log_module
from precompute.store.offline.log import (
    STATE_EVERY,
    BadMark,
    Event,
    Hold,
    LiveRef,
    Log,
    Publishing,
    State,
    folded,
)

DAY_S = 86400.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that is looked at is a second later."""
    times = iter(f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}Z" for second in range(3600))
    monkeypatch.setattr(log_module, "utc_now", lambda: next(times))


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    yield
    crashpoint.disarm()


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02d}Z"


def log_in(folder: Path) -> Log:
    """A handle that knows nothing yet, as another process's."""
    return Log(folder, "numbers")


def published(log: Log, *snapshots: int) -> None:
    for snapshot in snapshots:
        ref = log.readable_live()
        log.move_live(snapshot, expected_epoch=0 if ref is None else ref.epoch, reason="run")


def live(log: Log) -> LiveRef:
    ref = log.live()
    assert ref is not None
    return ref


def lived(log: Log) -> list[tuple[int, int | None]]:
    return [(entry.epoch, entry.snapshot) for entry in log.publishings()]


def flip(path: Path, part: float = 0.5) -> None:
    """A bit, as a disk loses it: no time of the file changes."""
    data, stat = bytearray(path.read_bytes()), path.stat()
    data[int(len(data) * part)] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def names(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


# ---- what events come to


@pytest.mark.usefixtures("clock")
def test_the_state_is_what_the_events_come_to(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    assert (log.state(), log.live(), log.bad(), log.pins()) == (State(), None, {}, set())
    log.end_live()
    assert names(tmp_path) == [], "nothing ends where nothing is live"
    first = log.move_live(4, expected_epoch=0, reason="run", run="r1")
    assert first == LiveRef(1, 4, None, "run", at(0), run="r1")
    second = log.move_live(5, expected_epoch=1, reason="run")
    assert second == LiveRef(2, 5, 4, "run", at(1))
    renewed = log.renew_live(second, 77)
    assert (renewed.renewed_at, renewed.renewal_noted_at, renewed.epoch) == (77, at(2), 2)
    # loaded again: what was before it stays what to go back to
    again = log.move_live(5, expected_epoch=2, reason="reload")
    assert again == LiveRef(4, 5, 4, "reload", at(3), renewed_at=77)
    mark, hold = BadMark("rolled back from", at(9), "digest"), Hold(at(4), "rollback", "why")
    back = log.move_live(4, expected_epoch=4, reason="rollback from 5", held=hold, marks={5: mark})
    assert (back.snapshot, back.held, log.held(), log.bad()) == (4, hold, hold, {5: mark})
    log.pin(4, "the audit")
    log.pin(4, "again")
    log.pin(7, "no more")
    log.unpin(7)
    log.unpin(9)
    log.mark_bad(5, BadMark("damaged", rows=False))
    log.mark_bad(6, BadMark("damaged", rows=False))
    log.mark_bad(6, BadMark("its rows, too"))
    assert log.resume_live() == replace(back, held=None)
    log.resume_live()
    assert log.bad() == {5: mark, 6: BadMark("its rows, too")}
    assert log.pins() == {4}
    log.accept(7, ["moved", "rows"], "publish (me)", "by --accept")
    log.accept(7, ["shape"], "publish (me)", "by --accept")
    log.unmark([6, 9])
    log.unmark([9])
    assert log.accepted(7) == {"moved", "rows", "shape"}
    assert log.accepted(8) == frozenset()
    assert log.bad() == {5: mark}
    for _ in range(2):
        log.end_live()
    assert (log.live(), log.state().number) == (None, 15)
    assert [event.kind for event in log.events()] == [
        *("publish", "publish", "renew", "publish", "publish", "pin", "pin", "unpin", "bad", "bad"),
        *("resume", "accept", "accept", "accept", "drop"),
    ]
    assert [event.before for event in log.events()] == [*range(15)]
    assert {len(event.nonce) for event in log.events()} == {32}
    by = [event.by for event in log.events()]
    assert [by[11], "@" in by[0]] == ["publish (me)", True]
    assert log.events()[0].run == "r1"
    assert log_in(tmp_path).state() == log.state()


@pytest.mark.usefixtures("clock")
def test_publishings_renewals_rollbacks_and_drops_come_in_their_order(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    assert log.publishings() == []
    log.move_live(4, expected_epoch=0, reason="run", run="r1")
    published(log, 5)
    log.renew_live(live(log), 77)
    log.pin(4, "nobody reads that")
    published(log, 4)
    log.end_live()
    published(log, 5)
    assert log.publishings() == [
        Publishing(1, 4, at(0), at(0), None, "run", "r1"),
        Publishing(2, 5, at(1), at(1), None, "run"),
        Publishing(2, 5, at(2), at(1), 77, "run"),
        Publishing(5, 4, at(4), at(4), None, "run"),
        Publishing(6, None, at(5), at(5), None, "drop"),
        Publishing(7, 5, at(6), at(6), None, "run"),
    ]


def test_an_event_of_a_newer_kind_is_refused_in_words(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    published(log, 4)
    log.path(2).write_bytes(sealed(Event(2, "split", view="numbers", before=1)))
    for use in (Log.state, Log.live, Log.publishings, lambda log: log.pin(4, "why")):
        with pytest.raises(OtherFormatError, match="event 2 is of format 3 that needs 'split'"):
            use(log_in(tmp_path))


def test_numbers_that_are_passed_over_are_given_to_no_other(tmp_path: Path) -> None:
    """A root restored from a backup: what readers follow is numbered higher."""
    log, other = log_in(tmp_path), log_in(tmp_path)
    published(log, 4)
    ref = log.move_live(5, expected_epoch=1, reason="run", above=41)
    assert ref.epoch == 42
    assert live(other) == live(log_in(tmp_path)) == ref
    published(other, 6)
    assert live(log).epoch == 43
    assert log.move_live(7, expected_epoch=43, reason="run", above=7).epoch == 44
    expected = [(1, 4), (42, 5), (43, 6), (44, 7)]
    assert lived(log) == lived(other) == lived(log_in(tmp_path)) == expected
    assert [event.number for event in log.events()] == [1, 2, 42, 43, 44]
    # where the event that says so is damaged, those after it are found by their names
    flip(log.path(2))
    assert live(log_in(tmp_path)) == live(log)
    assert [(entry.epoch, bool(entry.unknown)) for entry in log.publishings()] == [
        *((1, False), (2, True), (42, False), (43, False), (44, False)),
    ]


# ---- compare and swap


def test_who_was_not_first_is_refused_and_adds_nothing(tmp_path: Path) -> None:
    log, other = log_in(tmp_path), log_in(tmp_path)
    published(log, 4)
    ref = live(other)
    published(log, 5)
    with pytest.raises(ConflictError, match="moved from epoch 1 to 2 meanwhile"):
        other.move_live(6, expected_epoch=1, reason="run")
    with pytest.raises(ConflictError, match="nothing was renewed"):
        other.renew_live(ref, 77)
    with pytest.raises(SnapshotError, match="never published: there is nothing to resume"):
        log_in(tmp_path / "other").resume_live()
    assert names(tmp_path) == [log.path(n).name for n in (1, 2)]


def test_an_event_between_look_and_write_has_the_next_number_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = log_in(tmp_path), log_in(tmp_path)
    published(log, 4)
    create, meanwhile = LocalStorage.create, iter([7, 8])

    def late(storage: LocalStorage, path: Path, data: bytes, *, point: str | None = None) -> None:
        if (number := next(meanwhile, None)) is not None:
            with monkeypatch.context() as patched:
                patched.setattr(LocalStorage, "create", create)
                other.pin(number, "first")
        create(storage, path, data, point=point)

    monkeypatch.setattr(LocalStorage, "create", late)
    ref = log.move_live(5, expected_epoch=1, reason="run")
    assert (ref.epoch, log.pins()) == (4, {7, 8})


def test_a_writer_that_lost_its_lease_adds_nothing(tmp_path: Path) -> None:
    log = log_in(tmp_path / "log")
    notes = tmp_path / "notes"
    with (
        take(notes, "publish", "first") as first,
        take(notes, "publish", "second", force=True),
        pytest.raises(FencedError, match="lost its lease 'publish' to second"),
    ):
        log.move_live(4, expected_epoch=0, reason="run", lease=first)
    assert log.state() == State()


WRITER = """
import sys
from pathlib import Path
from precompute.store.offline.log import Log
log, me = Log(Path(sys.argv[1]), "numbers"), int(sys.argv[2])
for number in range(int(sys.argv[3])):
    log.pin(me * 1000 + number, f"writer {me}")
    print(me * 1000 + number, flush=True)
"""


def writer(folder: Path, me: int, events: int, crash: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(me), str(events)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ({"PRECOMPUTE_CRASH": crash} if crash else {}),
    )


def test_eight_writers_add_every_event_once_and_leave_no_number_out(tmp_path: Path) -> None:
    children = [writer(tmp_path, me, 40) for me in range(8)]
    said = [line for child in children for line in child.communicate()[0].splitlines()]
    assert [child.returncode for child in children] == [0] * 8
    events = log_in(tmp_path).events()
    assert [event.number for event in events] == [*range(1, 321)]
    assert {str(event.snapshot) for event in events} == {*said}
    assert log_in(tmp_path).pins() == {me * 1000 + n for me in range(8) for n in range(40)}


@pytest.mark.parametrize("point", ["log.write", "log.link", "log.dirsync", "log.state"])
def test_what_was_acknowledged_outlives_writers_that_are_killed(point: str, tmp_path: Path) -> None:
    children = [
        writer(tmp_path, me, 20, f"{point}:{2 if point == 'log.state' else 5 + me}:kill" * (me < 3))
        for me in range(4)
    ]
    said = [line.split()[0] for child in children for line in child.communicate()[0].splitlines()]
    killed = [child.returncode == -signal.SIGKILL for child in children]
    # each eighth event is another one's
    assert point == "log.state" or killed == [True] * 3 + [False]
    events = log_in(tmp_path).events()
    assert [event.number for event in events] == [*range(1, len(events) + 1)]
    there = [str(event.snapshot) for event in events]
    assert len({*there}) == len(there)
    assert {*said} <= {*there}
    # one that a kill left without its word may be there, or not
    assert len(there) - len(said) <= sum(killed)


# ---- writes that fail


@pytest.mark.parametrize("mode", ["eio", "enospc"])
def test_a_write_that_fails_before_the_link_adds_nothing(mode: str, tmp_path: Path) -> None:
    log = log_in(tmp_path)
    published(log, 4)
    before = log.state()
    crashpoint.arm("log.write", mode=mode)
    words = "no space left while writing" if mode == "enospc" else "Input/output error"
    with pytest.raises(SnapshotError, match=rf"{words}.*live snapshot is untouched"):
        published(log, 5)
    assert log.state() == log_in(tmp_path).state() == before
    assert names(tmp_path) == [log.path(1).name], "not even a temporary file"
    published(log, 5)
    assert lived(log) == [(1, 4), (2, 5)]


@pytest.mark.parametrize("point", ["log.link", "log.dirsync"])
def test_an_event_that_stands_after_an_error_is_ones_own(
    point: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_in(tmp_path)
    crashpoint.arm(point, mode="eio")
    published(log, 4)
    assert "it is there all the same" in caplog.text
    assert lived(log_in(tmp_path)) == [(1, 4)]
    published(log, 5)
    assert lived(log_in(tmp_path)) == [(1, 4), (2, 5)]


def test_whether_an_event_stands_may_not_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_in(tmp_path)
    published(log, 4)

    def refused(storage: LocalStorage, path: Path, *, immutable: bool = False) -> bytes:
        if not immutable:
            raise no_answer(path, OSError(errno.EIO, "Input/output error"))
        return path.read_bytes()

    crashpoint.arm("log.link", mode="eio")
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "read", refused)
        with pytest.raises(SnapshotError, match=r"whether it is there is not known: .*no answer"):
            published(log, 5)
    assert lived(log) == [(1, 4), (2, 5)]


def test_a_state_that_cannot_be_written_down_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_in(tmp_path)
    crashpoint.arm("log.state", mode="enospc")
    published(log, *range(1, STATE_EVERY + 1))
    assert names(tmp_path, "state-*") == []
    assert "cannot be written" in caplog.text
    assert log_in(tmp_path).state() == log.state()
    published(log, *range(STATE_EVERY + 1, 2 * STATE_EVERY + 1))
    assert names(tmp_path, "state-*") == [f"state-{16:020d}.json"]


def test_what_a_loss_of_power_left_of_a_state_counts_for_nothing(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    published(log, *range(1, 20))
    for path in tmp_path.glob("state-*"):
        path.write_bytes(path.read_bytes()[:100])
    assert log_in(tmp_path).state() == log.state()


def test_clocks_that_fall_change_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([at(30), at(10), at(20), at(5)])
    monkeypatch.setattr(log_module, "utc_now", lambda: next(times))
    log = log_in(tmp_path)
    published(log, 4, 5, 6)
    log.renew_live(live(log), 77)
    assert lived(log) == [(1, 4), (2, 5), (3, 6), (3, 6)]
    assert live(log_in(tmp_path)).snapshot == 6


# ---- damage


def test_a_damaged_event_makes_what_is_live_unknown(
    tmp_path: Path,
) -> None:
    log, reader = log_in(tmp_path), log_in(tmp_path)
    published(log, 4, 5)
    log.renew_live(live(log), 77)
    before = live(reader)
    whole = log.path(3).read_bytes()
    flip(log.path(3))
    assert live(reader) == before, "who has seen it keeps what it has"
    other = log_in(tmp_path)
    for handle in (other, log_in(tmp_path)):
        with pytest.raises(
            SnapshotError,
            match=r"what is live of view 'numbers' is not known, since .*3.json is damaged .*"
            r"readers keep what they have\. Restore the file, or `precompute reconcile numbers`",
        ):
            handle.live()
        assert handle.readable_live() is None
        with pytest.raises(SnapshotError, match="is not known"):
            handle.resume_live()
    log.path(3).write_bytes(whole)
    assert other.live() == before, "restored, it counts again"
    flip(log.path(3))
    other = log_in(tmp_path)
    ref = other.move_live(5, expected_epoch=0, reason="reconcile")
    assert (ref.epoch, ref.snapshot, ref.previous) == (4, 5, 4)
    assert live(log_in(tmp_path)) == ref
    [entry] = [entry for entry in other.publishings() if entry.unknown]
    assert (entry.epoch, entry.snapshot, "3.json is damaged" in entry.unknown) == (3, None, True)
    assert entry.since == other.events()[1].at, "from the event before it on"
    assert [*other.damage()] == [*other.damage(newest=True)] == [log.path(3)]
    assert "nobody knows what view 'numbers' served" in other.damage()[log.path(3)]


def test_no_bit_takes_a_hold_a_mark_or_a_pin(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    published(log, 4, 5)
    hold, marks = Hold(at(4), "rollback", "why"), {5: BadMark("wrong")}
    ref = log.move_live(4, expected_epoch=2, reason="rollback", held=hold, marks=marks)
    log.pin(4, "the audit")
    for path in sorted(tmp_path.glob("*.json")):
        whole = path.read_bytes()
        flip(path)
        other = log_in(tmp_path)
        assert (other.live(), other.bad(), other.pins(), other.held()) == (ref, marks, {4}, hold)
        path.write_bytes(whole)
    # nor does a later one that is damaged
    published(log, 6)
    hold = Hold(at(5), "publish", "earlier")
    log.move_live(4, expected_epoch=5, reason="publish", held=hold)
    ref = log.renew_live(live(log), 77)
    flip(log.path(7))
    other = log_in(tmp_path)
    assert (other.readable_live(), other.held(), other.bad(), other.pins()) == (
        *(None, hold, marks, {4}),
    )


def test_what_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_in(tmp_path)
    published(log, 4, 5)
    read = LocalStorage.read

    def refused(storage: LocalStorage, path: Path, *, immutable: bool = False) -> bytes:
        if path == log.path(2):
            raise no_answer(path, OSError(errno.EIO, "Input/output error"))
        return read(storage, path, immutable=immutable)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "read", refused)
        for look in (Log.live, Log.readable_live, Log.publishings, Log.held, Log.damage):
            with pytest.raises(UnreadableError, match=r"2\.json cannot be read"):
                look(log_in(tmp_path))
        with pytest.raises(UnreadableError):
            published(log_in(tmp_path), 6)
    assert lived(log_in(tmp_path)) == [(1, 4), (2, 5)]


def test_an_event_that_is_gone_is_a_gap_and_counts_as_one_that_is_damaged(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    published(log, 4, 5, 6)
    log.renew_live(live(log), 77)
    log.path(3).unlink()
    other = log_in(tmp_path)
    with pytest.raises(SnapshotError, match=r"3\.json is gone"):
        other.live()
    assert [(entry.snapshot, bool(entry.unknown)) for entry in other.publishings()] == [
        (4, False),
        (5, False),
        (None, True),
    ]
    published(other, 7)
    assert live(log_in(tmp_path)).snapshot == 7


def test_one_bit_in_any_file_is_found_and_never_believed(tmp_path: Path) -> None:
    log = many_events(tmp_path)
    log.thin({*range(5000)}, now_s=time.time() + 40 * DAY_S)
    published(log, 9)
    state, events = log_in(tmp_path).state(), log.events()
    assert log.damage() == log_in(tmp_path).damage(newest=True) == {}
    last = log.path(state.number)
    for number, path in enumerate(sorted(tmp_path.glob("*.json*"))):
        # of the events each eighth one: they are alike
        if path.stem.isdigit() and number % 8 and path != last:
            continue
        whole = path.read_bytes()
        for part in (0.01, 0.3, 0.7, 0.99):
            flip(path, part)
            other = log_in(tmp_path)
            damaged = {found.name for found in other.damage()}
            if path.name.startswith("past-"):
                assert path.name in next(iter(other.damage().values()))
                assert len(damaged) == 1
            else:
                assert damaged == {path.name}
            after = [event for event in other.events() if event.kind != "lost"]
            assert after == [event for event in events if event in after], "none is another"
            # all but the last one are vouched for by what was written down
            if path == last:
                assert path.name in other.state().unknown
            else:
                assert other.state() == state
            path.write_bytes(whole)
    assert log_in(tmp_path).events() == events


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a bit at its start": lambda path, _: flip(path, 0.0),
    "a bit in its middle": lambda path, _: flip(path, 0.5),
    "a bit at its end": lambda path, _: flip(path, 0.99),
    "cut": lambda path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path, _: path.write_bytes(b""),
    "gone": lambda path, _: path.unlink(),
    "another's": lambda path, _: shutil.copy(_like(path), path),
    "another view's": lambda path, others: shutil.copy(others / path.name, path),
}


def _like(path: Path) -> Path:
    """Another file there of its kind; of an archive, where there is one, an event."""
    begins = path.name.partition("0")[0]
    like = [one for one in path.parent.glob("*.json*") if one.name.partition("0")[0] == begins]
    return next((one for one in like if one != path), path.with_name(f"{9:020d}.json"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_a_file_of_the_log_is_told(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "PAST_EVENTS", 5)
    monkeypatch.setattr(log_module, "NEWEST_EVENTS", 3)
    for view in ("numbers", "others"):
        log = Log(tmp_path / view, view)
        for number in range(1, 9):
            log.pin(number, "")
        published(log, 1)
        log.thin(set(), now_s=time.time() + 40 * DAY_S)
        published(log, 2)
        log.unpin(1)
    log, folder = Log(tmp_path / "numbers", "numbers"), tmp_path / "numbers"
    state, files = log.state(), sorted(folder.glob("*.json*"))
    kinds = {path.name.partition("0")[0] for path in files}
    assert (kinds, log.damage()) == ({"", "past-", "state-"}, {})
    for path in files:
        whole = path.read_bytes()
        DAMAGE[damage](path, tmp_path / "others")
        told = Log(folder, "numbers").damage()
        # a state is derived, and those that are not there are not missed
        assert bool(told) == (damage != "gone" or path.name[0] != "s"), path
        assert Log(folder, "numbers").state() == state
        path.write_bytes(whole)
    assert log.damage() == {}


# ---- many events


def many_events(folder: Path, count: int = 600) -> Log:
    """A log of publishings a minute apart, that took no syncs."""
    folder.mkdir(exist_ok=True)
    log, state = log_in(folder), State()
    for number in range(1, count + 1):
        moment = time.strftime(
            "%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 60 * (count - number))
        )
        event = Event(
            number,
            "publish",
            moment,
            "numbers",
            f"{number:032d}",
            number - 1,
            by="me@here",
            reason="run",
            snapshot=number,
        )
        log.path(number).write_bytes(sealed(event))
        state = folded(state, event)
        if number % STATE_EVERY == 0:
            (folder / f"state-{number:020d}.json").write_bytes(sealed(state))
    return log


def counted(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> int:
    """How many files are read."""
    read, files = LocalStorage.read, list[Path]()

    def noted(storage: LocalStorage, path: Path, *, immutable: bool = False) -> bytes:
        data = read(storage, path, immutable=immutable)
        files.append(path)
        return data

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "read", noted)
        do()
    return len(files)


def test_ten_thousand_events_cost_a_first_look_no_more_than_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = many_events(tmp_path, 10_003)
    assert counted(monkeypatch, lambda: log_in(tmp_path).state()) == 1 + 3
    assert log.state() == log_in(tmp_path).state()
    assert counted(monkeypatch, log.state) == 0, "the next number alone is looked for"
    assert live(log) == LiveRef(
        10_003,
        10_003,
        10_002,
        "run",
        log.events()[-1].at,
    )
    assert max(path.stat().st_size for path in tmp_path.glob("state-*")) < 500
    now_s = time.time() + 40 * DAY_S
    log.thin({10_000}, now_s=now_s)
    assert len(names(tmp_path, "0*")) == 100
    assert len(names(tmp_path, "state-*")) <= 3
    assert len(lived(log)) == 10_003
    assert counted(monkeypatch, log.publishings) == 1 + 100


def test_old_events_go_into_archives_and_no_reader_loses_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = many_events(tmp_path)
    events, state = log.events(), log.state()
    idle, early = log_in(tmp_path), log_in(tmp_path)
    idle.state()
    early._known = log_module._Known(State(5, 6), early.path(5).stat().st_mtime_ns, 0.0)
    log.thin(set())
    assert len(names(tmp_path, "0*")) == 600, "none is 30 days old"
    later_s = time.time() + 40 * DAY_S
    log.thin({*range(601)}, now_s=later_s)
    assert len(names(tmp_path, "0*")) == 100
    assert names(tmp_path, "past-*") == [f"past-{1:020d}-{500:020d}.jsonl"]
    assert log_in(tmp_path).events() == events
    for handle in (log, idle, early, log_in(tmp_path)):
        assert handle.state() == state
    published(early, 7)
    assert live(idle).snapshot == live(log_in(tmp_path)).snapshot == 7
    # without the states that were written down
    for path in tmp_path.glob("state-*"):
        path.unlink()
    assert log_in(tmp_path).state() == log.state()
    # an archive that is lost is a gap, told, and what is live is known
    [archive] = tmp_path.glob("past-*")
    whole = archive.read_bytes()
    archive.unlink()
    assert live(log_in(tmp_path)).snapshot == 7
    assert [event.kind for event in log_in(tmp_path).events()] == ["lost"] + ["publish"] * 101
    assert len(log_in(tmp_path).damage()) == 1
    archive.write_bytes(whole)
    assert log_in(tmp_path).events()[:600] == events


def test_a_crash_while_events_are_archived_leaves_none_twice_or_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, later_s = many_events(tmp_path), time.time() + 40 * DAY_S
    events, delete, left = log.events(), LocalStorage.delete, [0]

    def dying(storage: LocalStorage, path: Path) -> None:
        if path.name.startswith("0"):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, "Input/output error")
        delete(storage, path)

    monkeypatch.setattr(LocalStorage, "delete", dying)
    for left[0] in (0, 1, 250):
        with pytest.raises(SnapshotError, match="Input/output error"):
            log.thin({*range(601)}, now_s=later_s)
        assert log_in(tmp_path).events() == events
    left[0] = 1000
    log.thin({*range(601)}, now_s=later_s)
    assert log_in(tmp_path).events() == events
    assert len(names(tmp_path, "0*")) == 100


def test_an_archive_that_cannot_be_read_back_takes_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, read = many_events(tmp_path), LocalStorage.read

    def wrong(storage: LocalStorage, path: Path, *, immutable: bool = False) -> bytes:
        data = read(storage, path, immutable=immutable)
        return data[:-1] if path.name.startswith("past-") else data

    monkeypatch.setattr(LocalStorage, "read", wrong)
    with pytest.raises(SnapshotError, match="is read other than it was written"):
        log.thin(set(), now_s=time.time() + 40 * DAY_S)
    assert len(names(tmp_path, "0*")) == 600


def test_many_archives_become_one_without_what_cannot_be_read_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "NEWEST_EVENTS", 2)
    monkeypatch.setattr(log_module, "PAST_EVENTS", 4)
    monkeypatch.setattr(log_module, "MOST_ARCHIVES", 3)
    log, later_s = log_in(tmp_path), time.time() + 40 * DAY_S
    stay = {3, 9, 10, 24, 25, 26}
    for number in range(1, 27):
        if number == 7:
            log.mark_bad(2, BadMark("wrong"))
        published(log, number)
        log.thin(stay, now_s=later_s)
    assert len(names(tmp_path, "past-*")) <= 3
    read = [entry.snapshot for entry in log.publishings()]
    assert [number for number in read if number in stay] == sorted(stay)
    assert read[:5] == [1, 3, 4, 7, 9], "one that is gone is not taken for the one before it"
    assert log.bad() == {2: BadMark("wrong")}
    assert not any(entry.unknown for entry in log.publishings())
    for path in tmp_path.glob("state-*"):
        path.unlink()
    other = log_in(tmp_path)
    assert (other.live(), other.bad()) == (log.live(), log.bad())


def test_a_damaged_event_that_is_archived_stays_a_gap_and_is_told_no_more(tmp_path: Path) -> None:
    log = many_events(tmp_path)
    flip(log.path(50))
    assert [*log.damage()] == [log.path(50)]
    log.thin({*range(601)}, now_s=time.time() + 40 * DAY_S)
    assert log.damage() == {}
    [entry] = [entry for entry in log_in(tmp_path).publishings() if entry.unknown]
    assert entry.epoch == 50


def test_events_that_are_lost_for_good_are_given_up_by_an_event(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    published(log, 4, 5, 6, 7)
    with pytest.raises(SnapshotError, match="there is nothing to forget"):
        log.give_up()
    flip(log.path(4))
    with pytest.raises(SnapshotError, match=r"`precompute reconcile numbers` says once more"):
        log_in(tmp_path).give_up()
    log_in(tmp_path).move_live(7, expected_epoch=0, reason="reconcile")
    whole = log.path(2).read_bytes()
    flip(log.path(2))
    other = log_in(tmp_path)
    told, state = other.damage(), other.state()
    assert [*told] == [log.path(2), log.path(4)]
    assert told[log.path(2)].endswith("precompute gc --forget numbers events")
    other.give_up()
    for handle in (other, log_in(tmp_path)):
        assert handle.damage() == handle.damage(newest=True) == {}
        assert replace(handle.state(), number=5, next=6) == state, "only what was read counts"
    [*_, said] = other.events()
    assert (said.kind, said.given_up) == ("accept", ((2, 2), (4, 4)))
    for number in (2, 4):
        assert f"{log.path(number)} is damaged" in said.reason
    assert [(e.number, e.by) for e in other.events() if e.kind == "lost"] == [
        (2, said.by),
        (4, said.by),
    ]
    # what is lost besides is told; what is restored counts again
    flip(log.path(3))
    assert [*log_in(tmp_path).damage()] == [log.path(3)]
    log.path(2).write_bytes(whole)
    assert log_in(tmp_path).events()[1].snapshot == 5


def test_an_archive_that_was_given_up_stops_no_other(tmp_path: Path) -> None:
    log, later_s = many_events(tmp_path), time.time() + 40 * DAY_S
    log.thin({*range(601)}, now_s=later_s)
    [archive] = tmp_path.glob("past-*")
    flip(archive)
    published(log, *range(601, 1000))
    log.thin({*range(1000)}, now_s=later_s)
    assert len(names(tmp_path, "past-*")) == 1, "it may be restored"
    log_in(tmp_path).give_up()
    log.thin({*range(1000)}, now_s=later_s)
    assert len(names(tmp_path, "past-*")) == 2
    assert log_in(tmp_path).damage() == {}
    assert [event.until for event in log_in(tmp_path).events() if event.kind == "lost"] == [500]


def test_a_view_that_was_dropped_and_made_anew_is_another(tmp_path: Path) -> None:
    log, reader = log_in(tmp_path), log_in(tmp_path)
    published(log, 4, 5)
    assert live(reader).snapshot == 5
    for path in tmp_path.iterdir():
        path.unlink()
    assert reader.live() is None
    published(log, 4, 5)
    live(reader)
    for path in tmp_path.iterdir():
        path.unlink()
    published(log_in(tmp_path), 1, 2, 3)
    assert live(reader) == live(log)
    assert (live(reader).snapshot, lived(reader)) == (3, [(1, 1), (2, 2), (3, 3)])


def test_a_state_says_what_it_holds_and_no_past(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    published(log, *range(1, 9))
    [path] = tmp_path.glob("state-*")
    assert read_record(State, path.read_bytes(), path) == log.state()
    assert plain(log.state()).keys() == {"number", "next", "view", "live"}
