"""The log of publishings: what was live, and from when on, whatever a crash or damage leaves of
it."""

from __future__ import annotations

from pathlib import Path

import pytest

from precompute.store.errors import SnapshotError
from precompute.store.offline import refs
from precompute.store.offline.refs import Publishing, PublishingLog, Refs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that is looked at is a second later."""
    times = iter(f"2026-01-01T00:00:{second:02d}Z" for second in range(60))
    monkeypatch.setattr(refs, "utc_now", lambda: next(times))


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02d}Z"


def published(view: Refs, snapshot: int, epoch: int) -> None:
    ref = view.live()
    view.move_live(
        snapshot, expected_epoch=0 if ref is None else ref.epoch, epoch=epoch, reason="run"
    )


def lived(view: Refs) -> list[tuple[int, int | None]]:
    return [(entry.epoch, entry.snapshot) for entry in view.publishings()]


@pytest.mark.usefixtures("clock")
def test_publishings_renewals_rollbacks_and_drops_come_in_their_order(tmp_path: Path) -> None:
    view = Refs(tmp_path, "numbers")
    view.end_live()
    assert view.publishings() == []
    published(view, 4, 1)
    published(view, 5, 3)
    ref = view.live()
    assert ref is not None
    view.renew_live(ref, 77)
    view.resume_live()
    published(view, 4, 4)
    for _ in range(2):
        view.end_live()
    published(view, 5, 5)
    expected = [
        Publishing(1, 4, at(0), at(0), None, "run"),
        Publishing(3, 5, at(1), at(1), None, "run"),
        Publishing(3, 5, at(2), at(1), 77, "run"),
        Publishing(4, 4, at(3), at(3), None, "run"),
        Publishing(4, None, at(4), at(4), None, "drop"),
        Publishing(5, 5, at(5), at(5), None, "run"),
    ]
    assert view.publishings() == expected == view.log.entries()


def test_what_is_live_counts_where_the_log_has_it_not_yet(tmp_path: Path) -> None:
    view, path = Refs(tmp_path, "numbers"), tmp_path / "publishings.jsonl"
    published(view, 4, 1)
    whole = path.read_bytes()
    for lost in (b"", whole[:-1], whole[:9], bytes(len(whole))):
        path.write_bytes(lost)
        assert lived(view) == [(1, 4)], "torn, or never written"
    published(view, 5, 2)
    assert lived(view) == [(1, 4), (2, 5)]
    # what was live is a gap in the log no more than its pointer's loss is
    (tmp_path / "live.json").write_bytes(b"{")
    assert lived(view) == [(1, 4), (2, 5)]
    view.move_live(6, expected_epoch=0, epoch=3, reason="run")
    assert lived(view) == [(1, 4), (2, 5), (3, 6)]


def test_a_log_that_cannot_be_written_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Refs(tmp_path, "numbers")
    published(view, 4, 1)
    add = refs.PublishingLog.add

    def refused(log: refs.PublishingLog, *entries: Publishing, durably: bool = True) -> None:
        if not durably:
            raise OSError(28, "No space left on device")
        add(log, *entries, durably=durably)

    with monkeypatch.context() as patched:
        patched.setattr(refs.PublishingLog, "add", refused)
        published(view, 5, 2)
    published(view, 6, 3)
    assert lived(view) == [(1, 4), (2, 5), (3, 6)]


def test_a_damaged_line_is_an_error_and_does_not_stop_publishing(tmp_path: Path) -> None:
    view, path = Refs(tmp_path, "numbers"), tmp_path / "publishings.jsonl"
    for epoch in (1, 2):
        published(view, epoch + 3, epoch)
    path.write_bytes(path.read_bytes().replace(b'"snapshot": 5', b'"snapshot": 4'))
    with pytest.raises(
        SnapshotError,
        match=r"publishings.jsonl: line 2 is damaged .*nobody knows what was live then",
    ):
        view.publishings()
    published(view, 6, 3)
    path.write_bytes(
        b"".join(
            line for number, line in enumerate(path.read_bytes().splitlines(True)) if number != 1
        )
    )
    assert lived(view) == [(1, 4), (2, 5), (3, 6)]


def test_publishings_of_snapshots_that_are_gone_are_thinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Refs(tmp_path, "numbers")
    for epoch in range(1, 8):
        published(view, epoch, epoch)
    view.thin_log({1, 4, 7})
    assert len(view.publishings()) == 7, "so few are not worth rewriting"
    monkeypatch.setattr(refs, "THINNED_BYTES", 1)
    view.thin_log({1, 4, 7})
    assert lived(view) == [(1, 1), (2, 2), (4, 4), (5, 5), (7, 7)]
    published(view, 8, 8)
    assert lived(view)[-2:] == [(7, 7), (8, 8)]
    view.end_live()
    for epoch in (9, 10, 11):
        published(view, epoch, epoch)
    view.thin_log({7, 8, 11})
    # one that is gone is not taken for the end of the view before it
    assert lived(view)[-5:] == [(7, 7), (8, 8), (8, None), (9, 9), (11, 11)]


def files(folder: Path) -> dict[str, int]:
    """Name → lines of the log's files."""
    return {
        path.name: len(path.read_bytes().splitlines())
        for path in sorted(folder.glob("publishings*"))
    }


def test_a_long_log_grows_by_files_that_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refs, "NEWEST_BYTES", 1060)
    monkeypatch.setattr(refs, "MOST_AGAIN", 2)
    view, expected = Refs(tmp_path, "numbers"), list[tuple[int, int | None]]()
    for epoch in range(1, 13):
        published(view, epoch, epoch)
        expected.append((epoch, epoch))
        assert lived(view) == expected
    older = tmp_path / "publishings-000001.jsonl"
    assert files(tmp_path) == {
        "publishings-000001.jsonl": 4,
        "publishings-000002.jsonl": 4,
        "publishings.jsonl": 5,
    }
    # a file that is older: its damage is reported, and its loss
    whole = older.read_bytes()
    older.write_bytes(whole.replace(b'"snapshot": 2', b'"snapshot": 3'))
    with pytest.raises(SnapshotError, match=r"publishings-000001.jsonl: line 2 is damaged"):
        view.publishings()
    older.unlink()
    with pytest.raises(SnapshotError, match=r"publishings-000001.jsonl is not there: restore it"):
        view.publishings()
    older.write_bytes(whole)
    # the line that says which they are: removed, they would be forgotten
    newest = tmp_path / "publishings.jsonl"
    lines = newest.read_bytes().splitlines(True)
    newest.write_bytes(b"".join([b"x", *lines]))
    with pytest.raises(SnapshotError, match=r"line 1 is damaged .*, or put this line in") as damage:
        view.publishings()
    newest.write_bytes(
        b"".join([str(damage.value).rpartition("place: ")[2].encode(), b"\n", *lines[1:]])
    )
    assert lived(view) == expected
    # thinned, they are one; what a crash left of those before is in nobody's way
    monkeypatch.setattr(refs, "THINNED_BYTES", 1)
    view.thin_log({1, 12})
    assert lived(view) == [(1, 1), (2, 2), (12, 12)]
    assert files(tmp_path) == {"publishings.jsonl": 4}
    for epoch in range(13, 17):
        published(view, epoch, epoch)
    assert lived(view) == [(1, 1), (2, 2), *((n, n) for n in range(12, 17))]
    assert "publishings-000003.jsonl" in files(tmp_path)


def test_a_crash_between_two_files_of_the_log_leaves_no_line_twice_or_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refs, "NEWEST_BYTES", 500)
    monkeypatch.setattr(refs, "MOST_AGAIN", 1)
    log, entries = PublishingLog(tmp_path), list[Publishing]()
    before = b""
    for epoch in range(1, 9):
        entries.append(Publishing(epoch, epoch, at(epoch), at(epoch)))
        log.add(*entries[-1:])
        path = tmp_path / "publishings.jsonl"
        if len(path.read_bytes()) < len(before):
            # what was written before the newest file was, stays
            path.write_bytes(before)
            assert log.entries() == entries[:-1]
            log.add(*entries[-1:])
        before = path.read_bytes()
        assert log.entries() == entries
    assert len(files(tmp_path)) > 3
