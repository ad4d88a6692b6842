"""What was rolled back from does not return: not as a whole, not row by row through a delta, a
compaction, another partition, a full run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from precompute.store.errors import GateError
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import OfflineStore
from precompute.store.times import containing
from tests.fixtures import MakeProject, Prepared
from tests.scene import Scene

GATES = dict.fromkeys(("rows", "norm", "duplicates", "drift", "moved"))
VIEW: dict[str, Any] = {"gates": GATES}
GOOD = {i: float(i) for i in range(40)}
BAD = {i: x + 0.5 for i, x in GOOD.items()}
NEW = {i: x + 0.25 for i, x in GOOD.items()}
PARTITIONED = {
    "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet') WHERE $start < $end"},
    "partition": {"by": "day", "start": "2026-01-01"},
}


def run(
    make_project: MakeProject,
    rows: Mapping[int, float],
    view: Mapping[str, Any] = VIEW,
    **options: Any,
) -> Report:
    return make_project(list(rows.items()), view=dict(view)).run(**options)


def back(make_project: MakeProject, **options: Any) -> Report:
    return make_project(view=VIEW).rollback(**options)


def gone_back(make_project: MakeProject) -> Scene:
    """From :data:`BAD`, which is snapshot 2, to :data:`GOOD`."""
    run(make_project, GOOD)
    run(make_project, BAD)
    back(make_project)
    return make_project(view=VIEW)


def test_a_rollback_is_not_undone_by_the_next_run_when_a_row_changed(
    make_project: MakeProject, prepared: Prepared, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(gone_back)
    with pytest.raises(
        GateError,
        match=r"snapshot 2 is marked bad .*holds the very same rows.*--accept rolled_back",
    ):
        run(make_project, BAD)
    for changed in (1, 2):  # built on what was refused last: its rows are what they are
        with pytest.raises(
            GateError,
            match=f"rolled_back: {40 - changed} of the 40 rows come again that snapshot 2 had computed",
        ):
            run(make_project, BAD | {i: NEW[i] for i in range(changed)})
    project = make_project(view=VIEW)
    assert project.snapshot().number == 5
    assert project.snapshot().counts.written == 1
    assert project.live_snapshot().number == 1
    assert project.snapshot().quality["rolled_back"] == 38 / 40
    with pytest.raises(GateError, match="rolled_back: 38 of the 40"):
        run(make_project, BAD | {i: NEW[i] for i in range(2)}, full=True)
    assert project.cli("publish", "numbers", "--accept", "rolled_back", "--snapshot", "5") == 0
    assert (
        run(make_project, BAD | {i: NEW[i] for i in range(3)}).status == "published"
    )  # what is live is no news


def test_the_very_same_rows_can_be_accepted_by_name(
    make_project: MakeProject, prepared: Prepared
) -> None:
    prepared(gone_back)
    assert run(make_project, BAD, accept=["rolled_back"]).status == "published"
    assert run(make_project, BAD).status == "current"
    assert run(make_project, BAD | {0: 7.0}).status == "published"


def test_what_was_refused_is_published_later_without_its_number(
    make_project: MakeProject, prepared: Prepared
) -> None:
    prepared(gone_back)
    with pytest.raises(GateError, match="snapshot 2 is marked bad"):
        run(make_project, BAD)
    project = make_project(view=VIEW)
    assert project.publish(accept=["rolled_back"]).status == "published"
    assert project.served([1]) == (project.numbers()[-1], [2 * BAD[1]])


@pytest.mark.parametrize(("again", "passes"), [(4, True), (5, False)])
def test_a_mended_source_passes_though_some_rows_are_as_they_were_there(
    make_project: MakeProject, prepared: Prepared, again: int, passes: bool
) -> None:
    """Some that changed rightly on the bad day come again, up to a tenth of what it computed."""
    prepared(gone_back)
    mended = NEW | {i: BAD[i] for i in range(again)}
    if passes:
        assert run(make_project, mended).status == "published"
        return
    with pytest.raises(GateError, match=f"rolled_back: {again} of the 40 rows"):
        run(make_project, mended)
    assert (
        run(make_project, mended, VIEW | {"gates": GATES | {"rolled_back": 0.2}}).status
        == "published"
    )


def test_a_mended_model_passes(make_project: MakeProject, prepared: Prepared) -> None:
    prepared(gone_back)
    mended = {"model": {"use": "tests.models:Doubler", "args": {"version": 2}}}
    assert run(make_project, BAD | {0: 7.0}, VIEW | mended).status == "published"


def test_null_switches_it_off_and_other_damage_is_no_reason(
    make_project: MakeProject, prepared: Prepared
) -> None:
    prepared(gone_back)
    off = VIEW | {"gates": GATES | {"rolled_back": None}}
    report = run(make_project, BAD | {0: 7.0}, off)
    assert report.status == "published"
    assert make_project(view=VIEW).snapshot().quality["rolled_back"] == 39 / 40
    project = make_project(view=VIEW)
    project.store.mark_bad(project.live_snapshot().number, "damaged: …", rows=False)
    assert run(make_project, BAD | {0: 7.0, 1: 8.0}).status == "published"


@pytest.mark.parametrize(("changed", "full"), [(5, False), (20, True)])
def test_what_the_bad_one_took_over_from_the_good_one_is_not_at_fault(
    make_project: MakeProject, changed: int, full: bool
) -> None:
    run(make_project, GOOD)
    bad = GOOD | {i: BAD[i] for i in range(changed)}
    run(make_project, bad)
    back(make_project)
    with pytest.raises(GateError, match=f"rolled_back: {changed} of the {changed} rows"):
        run(make_project, bad | {39: 7.0}, full=full)
    mended = bad | {i: NEW[i] for i in range(changed)} | {39: 8.0}
    assert run(make_project, mended, full=full).status == "published"


def test_rows_of_snapshots_between_good_and_bad_are_at_fault_too(make_project: MakeProject) -> None:
    run(make_project, GOOD)
    between = GOOD | {i: BAD[i] for i in range(4)}
    run(make_project, between, command="materialize")
    run(make_project, between | {4: BAD[4]})
    back(make_project, to=1)
    with pytest.raises(
        GateError, match="rolled_back: 4 of the 5 rows come again that snapshot 3 had computed"
    ):
        run(make_project, between | {9: 7.0})
    # whose segment is at fault
    assert make_project(view=VIEW).snapshot().parent == 1


def test_the_rows_at_fault_are_known_after_gc_and_a_full_run(make_project: MakeProject) -> None:
    """What the good one held is no part of them, however much of it changed since."""
    project = {"retention": {"keep": 1, "grace": "0s"}}

    def day(rows: Mapping[int, float], **options: Any) -> Report:
        return make_project(list(rows.items()), view=VIEW, project=project).run(**options)

    day(GOOD)
    day(GOOD | {0: BAD[0], 1: BAD[1]}, full=True)
    make_project(view=VIEW, project=project).rollback()
    for later in (NEW, {i: x + 0.125 for i, x in NEW.items()}):
        rows = later | {i: GOOD[i] for i in range(8)}
        assert day(rows, full=True).status == "published"
    with pytest.raises(
        GateError, match="rolled_back: 2 of the 2 rows come again that snapshot 2 had computed"
    ):
        day(rows | {0: BAD[0], 1: BAD[1]})


def test_the_worst_of_several_counts(make_project: MakeProject) -> None:
    run(make_project, GOOD)
    for rows in (BAD, NEW):
        run(make_project, rows)
        back(make_project)
    with pytest.raises(
        GateError, match="rolled_back: 39 of the 40 rows come again that snapshot 2 had computed"
    ):
        run(make_project, BAD | {0: NEW[0]})


def slice_of(first: int, last: int) -> dict[int, float]:
    return {i: BAD[i] for i in range(first, last)}


def test_they_do_not_return_in_slices(make_project: MakeProject, prepared: Prepared) -> None:
    """A tenth of them may, over all that is published since; what was accepted is none of these."""
    prepared(gone_back)
    assert run(make_project, NEW | slice_of(0, 3)).status == "published"
    for last in (6, 5):
        with pytest.raises(
            GateError,
            match=f"rolled_back: {last} of the 40 rows come again .*, 3 of them live already",
        ):
            run(make_project, NEW | slice_of(0, last))
    assert run(make_project, NEW | slice_of(0, 4)).status == "published"
    assert (
        run(make_project, NEW | slice_of(3, 7)).status == "published"
    )  # 4 again: others of them are gone
    assert run(make_project, NEW | slice_of(0, 20), accept=["rolled_back"]).status == "published"
    assert run(make_project, NEW | slice_of(0, 24)).status == "published"
    assert run(make_project, NEW | slice_of(0, 24) | {39: 7.0}).status == "published"
    with pytest.raises(
        GateError, match=r"rolled_back: 5 of the 40 rows come again .*, 4 of them live already"
    ):
        run(make_project, NEW | slice_of(0, 25))
    with pytest.raises(
        GateError, match="rolled_back: 11 of the 40 rows come again"
    ):  # others in place of what was accepted
        run(make_project, NEW | slice_of(20, 35))


def test_rows_that_what_was_gone_back_to_has_too_are_no_slice(make_project: MakeProject) -> None:
    run(make_project, GOOD)
    run(make_project, GOOD | slice_of(0, 10))
    back(make_project)
    for changed in range(1, 5):
        assert (
            run(make_project, GOOD | {30 + i: NEW[i] for i in range(changed)}).status == "published"
        )
    assert make_project(view=VIEW).snapshot().returned == {2: 0}


def test_another_partition_does_not_bring_them_back(make_project: MakeProject) -> None:
    view = VIEW | PARTITIONED

    def day(number: int, rows: Mapping[int, float]) -> Report:
        return run(
            make_project,
            rows,
            view,
            partition=containing("day", datetime(2026, 1, number, tzinfo=UTC)),
        )

    day(1, GOOD)
    day(2, GOOD | {i: BAD[i] for i in range(30)})
    assert make_project(view=view).rollback().snapshot == 1
    with pytest.raises(GateError, match="rolled_back: 30 of the 30 rows"):
        day(3, GOOD | {i: BAD[i] for i in range(30)} | {39: 7.0})
    assert day(3, GOOD | {i: NEW[i] for i in range(30)}).status == "published"


def test_a_bad_one_that_is_gone_or_damaged_holds_nobody_up(
    make_project: MakeProject, prepared: Prepared
) -> None:
    prepared(gone_back)
    project = make_project(view=VIEW)
    store = project.store
    for path in store.part_paths(store.snapshot(2)):
        path.write_bytes(b"nothing")
    assert run(make_project, BAD | {0: 7.0}).status == "published"


def test_what_cannot_be_recognised_after_a_change_of_hash_is_refused(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another DuckDB."""
    for rows in (GOOD, BAD):
        run(make_project, rows)
    back(make_project)
    monkeypatch.setattr("precompute.sources.source.hash_kind", lambda: "duckdb-another")
    for changed in (1, 2):
        with pytest.raises(
            GateError,
            match=r"the rows of snapshot 2, .* cannot be recognised after the change of hash.*look",
        ):
            run(make_project, BAD | {i: NEW[i] for i in range(changed)}, full=True)
    project = make_project(view=VIEW)
    assert (project.snapshot().quality["rolled_back"], project.live_snapshot().number) == (1.0, 1)
    assert run(make_project, NEW, full=True, accept=["rolled_back"]).status == "published"
    assert (
        run(make_project, NEW | {0: 7.0}).status == "published"
    )  # somebody looked: it is not refused again
    back(make_project)
    with pytest.raises(GateError, match="rolled_back: 1 of the 1 rows come again"):  # hashed as now
        run(make_project, NEW | {0: 7.0, 1: 8.0})


FEW = GOOD | {i: BAD[i] for i in range(5)}


@pytest.mark.parametrize(
    ("damaged", "again", "said"),
    [
        (
            1,
            FEW,
            "39 of the 40 rows come again that snapshot 3",
        ),  # nobody can tell which of them were good before
        (2, FEW, "5 of the 5 rows come again that snapshot 3"),
        (3, NEW, "39 of the 40 rows come again that snapshot 2"),
    ],
)
def test_damage_of_one_does_not_hide_the_rows_of_another(
    make_project: MakeProject, damaged: int, again: dict[int, float], said: str
) -> None:
    run(make_project, GOOD)
    for rows in (NEW, FEW):
        run(make_project, rows, full=True)
        back(make_project)
    store = OfflineStore(make_project(view=VIEW).root).view("numbers")
    for path in store.part_paths(store.snapshot(damaged)):
        path.write_bytes(b"nothing")
    with pytest.raises(GateError, match=f"rolled_back: {said} had computed"):
        run(make_project, again | {39: 7.0}, full=True)


@pytest.mark.parametrize("damaged", [[2], [2, 3]])
def test_lost_kills_hide_no_rows_that_were_at_fault(
    make_project: MakeProject, damaged: list[int]
) -> None:
    run(make_project, GOOD)
    run(make_project, GOOD | {39: NEW[39]})
    bad = GOOD | {39: NEW[39]} | {i: BAD[i] for i in range(5)}
    run(make_project, bad)
    back(make_project)
    store = OfflineStore(make_project(view=VIEW).root).view("numbers")
    for number in damaged:
        snapshot = store.snapshot(number)
        assert snapshot.own is not None
        assert snapshot.own.kills is not None
        (store.folder / snapshot.own.kills.path).unlink()
    with pytest.raises(
        GateError, match="rolled_back: 5 of the 5 rows come again that snapshot 3 had computed"
    ):
        run(make_project, bad | {38: 7.0})
