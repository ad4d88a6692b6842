"""Standing: which snapshots count, and for what, of one view with a snapshot of each
kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.store.disk.record import replace
from precompute.store.errors import GateError, SnapshotError, UnreadableError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.log import BadMark, Hold, LiveRef, Publishing
from precompute.store.offline.segment import Segment
from precompute.store.offline.snapshot import Counts, Snapshot, Verdict
from precompute.store.offline.standing import (
    Bad,
    Found,
    Refused,
    Standing,
    Usable,
    is_earlier,
    keeps_live,
)
from precompute.store.offline.view_store import OfflineStore, ViewStore

VIEW = FeatureView("numbers", ("id",), (Feature("double", "float64"),), ttl_s=1.0, stale_for_s=1.0)
REFUSAL = Verdict("rows", False, -0.5, 0.2, "half of the rows")
HOLD = Hold("2026-01-05T03:12:00Z", "rollback (ann@host)", "went back from 2")
DAYS = ("2026-01-01T00:00Z/2026-01-02T00:00Z", "2026-01-02T00:00Z/2026-01-03T00:00Z")

GOOD, BAD, ON_BAD, SAME, COPIED, REFUSED, ACCEPTED, DAMAGED, COPIED_BEFORE, LAST = range(1, 11)
KINDS: dict[int, dict[str, Any]] = {
    GOOD: {"content": "one"},
    BAD: {"over": GOOD, "counts": Counts(2, 1, unchanged=1), "content": "two"},
    ON_BAD: {
        "over": BAD,
        "counts": Counts(3, 1, unchanged=2),
        "content": "three",
    },
    SAME: {"content": "two"},
    COPIED: {"merged": BAD, "content": "four"},
    REFUSED: {"gates": (REFUSAL,), "content": "five"},
    ACCEPTED: {"gates": (REFUSAL,), "content": "six"},
    DAMAGED: {"content": "seven"},
    COPIED_BEFORE: {"merged": DAMAGED, "content": "eight"},
    LAST: {"content": "two"},
}
LEFT, BROKEN = "rolled back from", "its files are damaged"


def commit(
    store: ViewStore,
    number: int,
    rows: int = 1,
    *,
    over: int | None = None,
    merged: int | None = None,
    **kind: Any,
) -> Snapshot:
    below = () if over is None else store.snapshot(over).segments
    names = () if merged is None else store.snapshot(merged).names
    table = pa.table({"id": [1], "double": [1.0 * number]}).slice(0, rows)
    part = store.write_part(f"run{number}", "part-00000.parquet", table)
    made = Snapshot(
        VIEW,
        f"run{number}",
        "model",
        Counts(rows, rows),
        (*below, Segment(0, f"run{number}", "recipe", 7, (part,), merged=names)),
        None,
        "2026-01-03T00:00:00+00:00",
        None,
        None,
    )
    return store.commit(replace(made, **kind))


@pytest.fixture
def store(tmp_path: Path) -> ViewStore:
    store = OfflineStore(tmp_path / "root").view("numbers")
    for number, kind in KINDS.items():
        commit(store, number, **kind)
    store.mark_bad(BAD, LEFT)
    store.mark_bad(DAMAGED, BROKEN, rows=False)
    store.log.accept(ACCEPTED, ["rows"], "publish (ann@host)", "as it should be")
    return store


def snapshots(store: ViewStore) -> dict[int, Snapshot]:
    return {number: store.snapshot(number) for number in store.numbers()}


def live(store: ViewStore, number: int, **more: Any) -> LiveRef:
    ref = store.log.live()
    epoch = 0 if ref is None else ref.epoch
    return store.log.move_live(number, expected_epoch=epoch, reason="run", **more)


def test_each_snapshot_has_one_verdict(store: ViewStore) -> None:
    """Of the very same rows as a bad one nothing is said: whether they are right a person knows."""
    bad: dict[int, Found] = dict.fromkeys((BAD, ON_BAD, COPIED), Bad(BAD, LEFT))
    expected = dict.fromkeys(KINDS, Usable()) | bad
    expected |= {REFUSED: Refused(("rows",)), DAMAGED: Bad(DAMAGED, BROKEN)}
    standing = Standing(store)
    found = {number: standing.verdict(s) for number, s in snapshots(store).items()}
    assert found == expected
    left = {number: standing.rolled_back(s) for number, s in snapshots(store).items()}
    assert {number for number, of in left.items() if of} == set(bad)
    refused = {number for number, s in snapshots(store).items() if standing.refused_by(s)}
    assert refused == {REFUSED}
    # what a rollback is about to leave
    about = Standing(store, left={GOOD: BadMark(LEFT)})
    assert about.verdict(store.snapshot(GOOD)) == Bad(GOOD, LEFT)
    assert about.rolled_back(store.snapshot(ON_BAD)) == [BAD, GOOD]


def test_what_publishing_refuses_is_void_and_what_repeats_what_was_left(store: ViewStore) -> None:
    standing = Standing(store)
    void = {
        number: why
        for number, s in snapshots(store).items()
        if (why := standing.why_void(s)) is not None
    }
    another = "it builds on snapshot 2: rolled back from"
    again = "it has the very rows of snapshot 2: rolled back from"
    assert {number: void.pop(number) for number in (SAME, LAST)} == {SAME: again, LAST: again}
    assert void == {
        BAD: LEFT,
        ON_BAD: another,
        COPIED: another,
        REFUSED: "refused by rows",
        DAMAGED: BROKEN,
    }
    for number, snapshot in snapshots(store).items():
        if number not in void:
            standing.check_publishable(snapshot)
            continue
        with pytest.raises(GateError, match=f"snapshot {number}|snapshot {BAD} is") as refused:
            standing.check_publishable(snapshot)
        on_purpose = f"precompute publish numbers --snapshot {number}" in str(refused.value)
        assert on_purpose == (number != DAMAGED)


def test_a_refusal_says_what_to_type(store: ViewStore) -> None:
    """Of what compares and what stands by itself; of a partition; of a frame."""
    null = Verdict("null", False, 0.9, 0.1, "none left")
    for more, said in (
        (
            {},
            "rows: half of the rows (limit 0.2). If that is right from now on: precompute publish"
            " numbers --snapshot 11 --accept rows. If for some days alone: precompute run numbers"
            " --expect rows. If it is wrong: mend the source or the model, and run again",
        ),
        (
            {"gates": (REFUSAL, null)},
            "none left (limit 0.1). If that is right from now on: precompute publish numbers"
            " --snapshot 12 --accept rows --accept null. If it is wrong: mend",
        ),
        ({"partition": DAYS[0]}, "run numbers --partition 2026-01-01T00:00Z --expect rows. If"),
        (
            {"frame": "data/run/frame.parquet"},
            "precompute.open(…).run('numbers', frame=df, expect=['rows']). If",
        ),
    ):
        snapshot = commit(store, LAST + 1, **{"gates": (REFUSAL,)} | more)
        for unchanged in (True, False):
            with pytest.raises(GateError) as refused:
                Standing(store).check_publishable(snapshot, unchanged=unchanged)
            assert said in str(refused.value)
            full = "full=True" if more.get("frame") else "--full"
            assert (f"run again, by {full} where" in str(refused.value)) is unchanged


def test_the_newest_by_what_it_is_wanted_for(store: ViewStore) -> None:
    """To build on, to measure by, to publish, to go back to."""
    answers = []
    for bad in (None, LAST, COPIED_BEFORE, ACCEPTED, REFUSED):
        if bad is not None:
            store.mark_bad(bad, LEFT)
        standing = Standing(store)
        newest, measured = standing.newest(), standing.newest(refused=False)
        assert newest is not None
        assert measured is not None
        back = standing.before(LiveRef(1, LAST, 2, "", ""), [])
        answers.append((newest.number, measured.number, standing.newest_publishable(), back))
    assert answers == [
        (LAST, LAST, LAST, COPIED_BEFORE),
        (COPIED_BEFORE, COPIED_BEFORE, COPIED_BEFORE, COPIED_BEFORE),
        (ACCEPTED, ACCEPTED, ACCEPTED, ACCEPTED),
        (REFUSED, SAME, SAME, SAME),
        (SAME, SAME, SAME, SAME),
    ]
    store.mark_bad(SAME, LEFT)
    assert Standing(store).newest_publishable() == GOOD
    store.log.unmark([REFUSED])
    assert Standing(store).newest_publishable(accept=["rows"]) == REFUSED


def went_live(*numbers: int) -> list[Publishing]:
    return [
        Publishing(epoch, number, "2026-01-01", "2026-01-01")
        for epoch, number in enumerate(numbers, 1)
    ]


def test_back_goes_the_way_it_came_and_else_to_what_lies_below(store: ViewStore) -> None:
    standing = Standing(store)

    def before(number: int, *numbers: int, only: bool = False) -> int:
        ref = LiveRef(9, number, None, "", "")
        return standing.before(ref, went_live(*numbers), only=only)

    assert before(SAME, GOOD, LAST, SAME) == LAST  # made later, and live before
    assert before(SAME, LAST, GOOD, BAD, REFUSED, DAMAGED, SAME, 99) == GOOD
    assert before(SAME) == GOOD
    with pytest.raises(SnapshotError, match=r"before 4 .*1, 2 \(bad\), 3, .*8 \(bad\)"):
        before(SAME, BAD, only=True)


def test_a_rollback_of_a_partition_goes_to_no_later_one(tmp_path: Path) -> None:
    """An operator published the first day again, by hand: a later day is no earlier state, though
    it was made, and live, before."""
    store = OfflineStore(tmp_path / "root").view("numbers")
    for number, partition in enumerate((DAYS[0], DAYS[1], DAYS[0]), 1):
        commit(store, number, partition=partition)

    def before(number: int, *numbers: int) -> int:
        ref = LiveRef(9, number, None, "", "")
        return Standing(store).before(ref, went_live(*numbers))

    assert before(3, 1, 2, 3) == before(3) == 1
    assert before(2, 1, 2, 3, 2) == 3
    assert before(2) == 1
    with pytest.raises(SnapshotError, match="no good snapshot before 1 to go back to"):
        before(1, 2, 1)


def test_a_snapshot_that_nobody_can_read_stands_for_nothing(store: ViewStore) -> None:
    (store.manifest_path(BAD)).unlink()
    on_bad, known = store.snapshot(ON_BAD), snapshots(store)
    # whose segment it names all the same
    assert Standing(store).verdict(on_bad) == Bad(BAD, LEFT)
    store.log.unmark([BAD])
    assert Standing(store).verdict(on_bad) == Usable()
    assert known.keys() == {*KINDS} - {BAD}


def test_what_cannot_be_read_now_is_not_passed_over(
    store: ViewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = store.storage.read
    path = store.manifest_path(COPIED_BEFORE)

    def failing(of: Path, **more: Any) -> bytes:
        if of == path:
            raise UnreadableError("an I/O error")
        return read(of, **more)

    standing, ref = Standing(store), LiveRef(9, LAST, None, "", "")
    monkeypatch.setattr(store.storage, "read", failing)
    store.mark_bad(LAST, LEFT)
    for ask in (
        standing.newest,
        standing.newest_publishable,
        lambda: standing.before(ref, []),
        lambda: standing.before(ref, went_live(GOOD, COPIED_BEFORE, LAST)),
        lambda: standing.waiting(ref),
    ):
        with pytest.raises(UnreadableError, match="I/O"):
            ask()


def test_what_a_run_computed_goes_live_unless_held_or_older(tmp_path: Path) -> None:
    store = OfflineStore(tmp_path / "root").view("numbers")
    assert Standing(store).numbers_text() == "none"
    early, late = (commit(store, number, partition=day) for number, day in enumerate(DAYS, 1))
    empty = commit(store, 3, rows=0, partition=DAYS[1])
    assert (keeps_live(late), keeps_live(empty)) == (False, True)

    def why(snapshot: Snapshot) -> str | None:
        return Standing(store).why_unpublished(snapshot)

    assert [why(snapshot) for snapshot in (early, late)] == [None, None]
    live(store, 1)
    assert why(late) is None
    live(store, 2)
    assert (why(early), why(late)) == (
        f"partition {DAYS[0]} is older than the live {DAYS[1]}",
        None,
    )
    assert why(empty) == f"partition {DAYS[1]} has no rows: it is done, and what is live stays"
    assert Standing(store).newest_publishable() == 2
    live(store, 1, held=HOLD)
    assert why(late) == (
        "the view is held since 2026-01-05T03:12:00Z by rollback (ann@host): went back from 2;"
        " snapshot 2 waits: `precompute resume numbers`"
    )


def test_what_waits_of_a_view_that_is_held(tmp_path: Path) -> None:
    """The newest usable one, a later state than what is live and than what was rolled back from."""
    store = OfflineStore(tmp_path / "root").view("numbers")
    assert Standing(store).held(None) is None

    def waits() -> tuple[int | None, int | None]:
        held = Standing(store).held(store.log.live())
        assert held is not None
        return held.waits, held.repeats

    commit(store, 1, content="one")
    assert Standing(store).held(live(store, 1)) is None
    commit(store, 2, content="candidate")
    commit(store, 3, content="three")
    live(store, 3)
    live(store, 1, held=HOLD, marks={3: store.bad_mark(3, LEFT)})
    assert waits() == (None, None)  # 2 was made before what was left
    assert str(Standing(store).held(store.log.live())) == (
        "held since 2026-01-05T03:12:00Z by rollback (ann@host): went back from 2; nothing newer"
        " waits; `precompute resume numbers` lets runs publish again"
    )
    commit(store, 4, content="three")
    assert waits() == (4, 3)
    assert str(Standing(store).held(store.log.live())).endswith(
        "snapshot 4 waits, with the very rows of snapshot 3, which was rolled back from:"
        " `precompute resume numbers`"
    )
    commit(store, 5, gates=(REFUSAL,), content="five")
    assert waits() == (4, 3)
    store.log.accept(5, ["rows"], "publish", "")
    assert waits() == (5, None)


def test_of_partitions_a_later_one_waits(tmp_path: Path) -> None:
    store = OfflineStore(tmp_path / "root").view("numbers")
    for number, day in enumerate((DAYS[0], DAYS[1], DAYS[1], DAYS[0]), 1):
        commit(store, number, partition=day)
    last = live(store, 3, held=HOLD)
    assert Standing(store).waiting(last) is None
    first = live(store, 1, held=HOLD, marks={3: BadMark(LEFT)})
    assert Standing(store).waiting(first) is None  # 2 is what 3 took the place of
    commit(store, 5, partition=DAYS[1])
    waits = Standing(store).waiting(first)
    assert waits is not None
    assert waits.number == 5
    assert [is_earlier(store.snapshot(n), store.snapshot(3)) for n in (1, 2, 4, 5)] == [
        True,
        True,
        True,
        False,
    ]
