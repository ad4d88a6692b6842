"""Standing: which snapshots count, and for what, of one view with a snapshot of each
kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.store.disk.record import replace
from precompute.store.errors import GateError, SnapshotError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.refs import LiveRef
from precompute.store.offline.snapshot import Counts, Snapshot, Verdict
from precompute.store.offline.standing import ROLLED_BACK, Standing, keeps_live
from precompute.store.offline.view_store import OfflineStore, ViewStore

VIEW = FeatureView("numbers", ("id",), (Feature("double", "float64"),), ttl_s=1.0, stale_for_s=1.0)
REFUSAL = Verdict("rows", False, -0.5, 0.2, "half of the rows")
DAYS = ("2026-01-01T00:00Z/2026-01-02T00:00Z", "2026-01-02T00:00Z/2026-01-03T00:00Z")

GOOD, BAD, ON_BAD, SAME, COPIED, REFUSED, ACCEPTED, DAMAGED, COPIED_BEFORE, LOOKED_AT = range(1, 11)
KINDS: dict[int, dict[str, Any]] = {
    GOOD: {"content": "one"},
    BAD: {"kind": "delta", "parent": GOOD, "counts": Counts(2, 1, unchanged=1), "content": "two"},
    ON_BAD: {
        "kind": "delta",
        "parent": BAD,
        "counts": Counts(3, 1, unchanged=2),
        "content": "three",
    },
    SAME: {"content": "two"},
    COPIED: {"bases": (BAD,), "content": "four"},
    REFUSED: {"gates": (REFUSAL,), "content": "five"},
    ACCEPTED: {"gates": (REFUSAL,), "accepted": ("rows",), "content": "six"},
    DAMAGED: {"content": "seven"},
    COPIED_BEFORE: {"bases": (DAMAGED,), "content": "eight"},
    LOOKED_AT: {
        "gates": (replace(REFUSAL, gate=ROLLED_BACK),),
        "accepted": (ROLLED_BACK,),
        "content": "two",
    },
}


def commit(store: ViewStore, number: int, rows: int = 1, **kind: Any) -> Snapshot:
    table = pa.table({"id": [1], "double": [1.0 * number]}).slice(0, rows)
    part = store.write_part(f"run{number}", "part-00000.parquet", table)
    made = Snapshot(
        VIEW,
        f"run{number}",
        "model",
        Counts(rows, rows),
        (part,),
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
    store.mark_bad(BAD, "rolled back from", back_to=GOOD)
    store.mark_bad(DAMAGED, "its files are damaged", rows=False)
    return store


def snapshots(store: ViewStore) -> dict[int, Snapshot]:
    return {number: store.snapshot(number) for number in store.numbers()}


def test_which_is_bad_and_by_which_other_one(store: ViewStore) -> None:
    expected = {BAD: BAD, ON_BAD: BAD, SAME: BAD, COPIED: BAD, DAMAGED: DAMAGED}
    for standing in (Standing(store), Standing(store, snapshots(store))):
        found = {number: standing.bad(snapshot) for number, snapshot in snapshots(store).items()}
        assert found == dict.fromkeys(KINDS) | expected
        below = {
            number: standing.bad_below(snapshot) for number, snapshot in snapshots(store).items()
        }
        assert below == dict.fromkeys(KINDS) | expected | {SAME: None}


def test_what_publishing_refuses_is_void_and_nothing_else(store: ViewStore) -> None:
    standing = Standing(store)
    void = {
        number: why
        for number, s in snapshots(store).items()
        if (why := standing.why_void(s)) is not None
    }
    another = "it builds on snapshot 2 or holds the very same rows: rolled back from"
    assert void == {
        BAD: "rolled back from",
        ON_BAD: another,
        SAME: another,
        COPIED: another,
        REFUSED: "refused by rows",
        DAMAGED: "its files are damaged",
    }
    for number, snapshot in snapshots(store).items():
        if number in void:
            with pytest.raises(GateError, match=f"snapshot {number}|snapshot {BAD} is marked bad"):
                standing.check_publishable(snapshot)
        else:
            standing.check_publishable(snapshot)


def test_the_newest_by_what_it_is_wanted_for(store: ViewStore) -> None:
    """To build on, to measure by, to publish, to go back to."""
    # what was live before may have been made later
    assert Standing(store).before(LiveRef(2, GOOD, LOOKED_AT, "", "", ())) == LOOKED_AT
    answers = []
    for bad in (None, LOOKED_AT, COPIED_BEFORE, ACCEPTED, REFUSED):
        if bad is not None:
            store.mark_bad(bad, "rolled back from")
        standing = Standing(store)
        newest, measured = standing.newest(), standing.newest(refused=False)
        assert newest is not None
        assert measured is not None
        back = standing.before(LiveRef(1, LOOKED_AT, 2, "", "", ()))
        answers.append((newest.number, measured.number, standing.newest_publishable(), back))
    assert answers == [
        (LOOKED_AT, LOOKED_AT, LOOKED_AT, COPIED_BEFORE),
        (COPIED_BEFORE, COPIED_BEFORE, COPIED_BEFORE, COPIED_BEFORE),
        (ACCEPTED, ACCEPTED, ACCEPTED, ACCEPTED),
        (REFUSED, SAME, GOOD, GOOD),
        (SAME, SAME, GOOD, GOOD),
    ]
    assert Standing(store).newest_publishable(accept=["rows"]) == GOOD


def test_a_rollback_of_a_partition_goes_to_no_later_one(tmp_path: Path) -> None:
    """An operator published the first day again, by hand: a later day is no earlier state, though
    it was made, and live, before."""
    store = OfflineStore(tmp_path / "root").view("numbers")
    for partition in (DAYS[0], DAYS[1], DAYS[0]):
        commit(store, store.numbers()[-1] + 1 if store.numbers() else 1, partition=partition)
    assert Standing(store).before(LiveRef(3, 3, 2, "", "", ())) == 1
    assert Standing(store).before(LiveRef(3, 2, 3, "", "", ())) == 3
    with pytest.raises(SnapshotError, match="no good snapshot before 1 to go back to"):
        Standing(store).before(LiveRef(4, 1, 2, "", "", ()))


def test_a_snapshot_that_nobody_can_read_stands_for_nothing(store: ViewStore) -> None:
    (store.manifest_path(BAD)).unlink()
    on_bad, known = store.snapshot(ON_BAD), snapshots(store)
    for standing in (Standing(store), Standing(store, known)):
        with pytest.raises(SnapshotError, match="snapshot 2"):
            standing.bad(on_bad)
        assert standing.why_void(on_bad) is None  # reading it says what is missing
    assert Standing(store).at_fault(known) == set()
    assert Standing(store).at_fault({*known, BAD}) == {BAD, GOOD}


def test_what_a_run_computed_goes_live_unless_held_or_older(tmp_path: Path) -> None:
    store = OfflineStore(tmp_path / "root").view("numbers")
    assert Standing(store).numbers_text() == "none"
    early, late = (commit(store, number, partition=day) for number, day in enumerate(DAYS, 1))
    empty = commit(store, 3, rows=0, partition=DAYS[1])
    assert (keeps_live(late), keeps_live(empty)) == (False, True)

    def why(snapshot: Snapshot) -> str | None:
        return Standing(store).why_unpublished(snapshot)

    assert [why(snapshot) for snapshot in (early, late)] == [None, None]
    store.refs.move_live(1, expected_epoch=0, epoch=1, reason="run")
    assert why(late) is None
    store.refs.move_live(2, expected_epoch=1, epoch=2, reason="run")
    assert (why(early), why(late)) == (
        f"partition {DAYS[0]} is older than the live {DAYS[1]}",
        None,
    )
    assert why(empty) == f"partition {DAYS[1]} has no rows: it is done, and what is live stays"
    assert Standing(store).newest_publishable() == 2
    store.refs.move_live(1, expected_epoch=2, epoch=3, reason="rollback", held="to look at it")
    assert why(late) == "the view is held (to look at it): `precompute resume numbers` ends that"
