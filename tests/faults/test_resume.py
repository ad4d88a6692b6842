"""Resume: what an interrupted run computed is taken over once, whatever changed meanwhile, and
never anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from precompute.store.disk import crashpoint
from precompute.store.disk.crashpoint import InjectedError
from tests.faults.conftest import ROWS, MakeScene
from tests.faults.harness import (
    WINDOW_ROWS,
    Child,
    FaultScene,
    changed,
    check_everything,
    read_snapshot,
    recover,
    small_chunks,
    values_of,
)

FEW = dict(list(ROWS.items())[:40])
"""Five chunks."""


def interrupted(scene: FaultScene, chunks: int, **options: Any) -> FaultScene:
    """A run killed after this many chunks were finished."""
    assert Child(scene, crash=("journal.append", chunks, "kill"), **options).ended().signal == 9
    assert scene.computed() >= chunks * WINDOW_ROWS  # the engine computes ahead of what is written
    return scene


@pytest.mark.parametrize("finished", [1, 5])
def test_a_killed_run_is_taken_over(finished: int, scene: FaultScene) -> None:
    interrupted(scene.write(FEW), finished)
    report = recover(scene)
    assert report.resumed == finished * WINDOW_ROWS
    assert report.counts["written"] == len(FEW)
    assert scene.computed() == len(FEW) - report.resumed
    assert read_snapshot(scene, 1) == values_of((FEW, 1))
    check_everything(scene)


@pytest.mark.parametrize(("window_rows", "part_bytes"), [(3, 1), (8192, 64 * 2**20)])
def test_chunks_of_another_size_are_taken_over(
    window_rows: int, part_bytes: int, scene: FaultScene
) -> None:
    interrupted(scene.write(FEW), 3)
    with small_chunks(window_rows, part_bytes):
        report = scene.run()
    assert (report.status, report.resumed, scene.computed()) == ("published", 24, 16)
    check_everything(scene)


def test_a_source_that_changed_since_is_taken_over_where_it_did_not(scene: FaultScene) -> None:
    """In another order, too."""
    interrupted(scene.write(FEW), 3)
    scene.write(dict(reversed(changed(FEW, change=[0, 30], new=[99], gone=[1, 31]).items())))
    report = recover(scene)
    assert report.resumed == 22  # of 24, 0 changed and 1 left
    assert scene.computed() == len(scene.rows) - 22
    check_everything(scene)


def test_a_row_changed_between_two_killed_runs_is_of_the_right_one(scene: FaultScene) -> None:
    interrupted(scene.write(FEW), 2)
    scene.write(changed(FEW, change=[0, 1]))
    interrupted(scene, 1)  # computes 0, 1 and six that were never begun
    scene.write(FEW)
    report = recover(scene)
    assert (report.resumed, scene.computed()) == (22, 18)
    check_everything(scene)


def test_nothing_is_taken_over_by_another_model(scene: FaultScene) -> None:
    interrupted(scene.write(FEW), 3)
    scene.write(version=2)
    report = recover(scene)
    assert (report.resumed, scene.computed()) == (0, len(FEW))
    check_everything(scene)


def test_nothing_is_taken_over_by_a_full_run_but_from_a_full_run(scene: FaultScene) -> None:
    scene.write(FEW)
    recover(scene)
    scene.write(changed(FEW, change=range(24)))
    scene.computed()
    interrupted(scene, 2)
    interrupted(scene, 1, full=True)
    report = recover(scene, full=True)
    assert (report.resumed, scene.computed()) == (8, 32)
    check_everything(scene)


def test_a_full_run_that_was_completed_is_not_taken_over_by_the_next_one(scene: FaultScene) -> None:
    scene.settings = {"retention": {"keep": 3, "grace": "1h"}}
    scene.write(FEW)
    recover(scene)
    scene.computed()
    interrupted(scene, 2, full=True)
    assert recover(scene, full=True).resumed == 16
    scene.computed()
    report = recover(scene, full=True)
    assert (report.resumed, scene.computed()) == (0, len(FEW))
    check_everything(scene)


def test_a_chunk_that_was_committed_is_not_taken_over_again(scene: FaultScene) -> None:
    """Its file is a part of a snapshot by now: a row of it that changes, or leaves, and comes back
    is computed again; also where a kill right after the commit left the journal."""
    scene.settings = {"retention": {"keep": 3, "grace": "1h"}}
    interrupted(scene.write(FEW), 2)
    (journal,) = scene.store.data.glob("*/journal.jsonl")
    lines = journal.read_bytes()
    recover(scene)
    journal.write_bytes(lines)
    scene.write(changed(FEW, change=[6], gone=[5]))
    recover(scene)
    scene.write(FEW)
    scene.computed()
    report = recover(scene)
    assert (report.resumed, scene.computed()) == (0, 2)
    check_everything(scene)


def test_a_delta_interrupted_takes_over_and_drops_what_changed_again(
    delta_to_come: MakeScene,
) -> None:
    scene = interrupted(delta_to_come(), 2)
    scene.write(changed(scene.rows, change=[20, 21, 300], gone=[301]))
    report = recover(scene)
    assert report.resumed == 12  # of 20 to 31 and 300 to 303, three changed again and one left
    check_everything(scene)


def test_rejected_rows_are_not_tried_again_after_a_kill(scene: FaultScene) -> None:
    scene.view = {
        "max_rejected": 0.5,
        "model": {
            "use": "tests.faults.harness:Counted",
            "args": {"log": str(scene.log), "nan_at": 1},
        },
    }
    scene.write(FEW)
    assert Child(scene, crash=("journal.append", 2, "kill")).ended().signal == 9
    scene.computed()
    scene.history = [({key: x for key, x in FEW.items() if key != 0}, 1)]
    scene.view["model"]["args"]["nan_at"] = 0
    scene.write_configuration()
    report = recover(scene)
    assert (report.resumed, report.counts["rejected"], scene.computed()) == (15, 1, 24)
    assert read_snapshot(scene, 1) == values_of(scene.history[0])
    with small_chunks():
        assert scene.run(retry_rejected=True).counts["written"] == 1


@pytest.mark.parametrize(
    ("delta", "column"), [(False, "id"), (False, "vector.list.element"), (True, "double")]
)
def test_a_chunk_that_was_flipped_on_the_disk_is_computed_again_at_once(
    delta: bool, column: str, scene: FaultScene, delta_to_come: MakeScene
) -> None:
    """Whether its keys tell when the run is planned, or only its values, which nobody reads
    then."""
    scene = interrupted(delta_to_come() if delta else scene.write(FEW), 3)
    _, flipped, _ = sorted(
        path for path in scene.view_folder.glob("data/*/part-*.parquet") if journaled(path)
    )
    flip_a_byte(flipped, column)
    report = recover(scene)
    assert (report.status, report.resumed) == ("published", 2 * WINDOW_ROWS)
    assert scene.computed() == report.counts["written"] - 2 * WINDOW_ROWS
    assert read_snapshot(scene, report.snapshot or 0) == values_of(scene.history[-1])
    check_everything(scene)


def journaled(path: Path) -> bool:
    return path.with_name("journal.jsonl").exists()


def flip_a_byte(path: Path, column: str) -> None:
    """Change one byte in the middle of a column's data."""
    with pq.ParquetFile(path) as file:
        group = file.metadata.row_group(0)
        (chunk,) = (
            group.column(n)
            for n in range(group.num_columns)
            if group.column(n).path_in_schema == column
        )
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 0xFF
    path.write_bytes(data)


def test_an_error_in_process_leaves_the_same_to_take_over(scene: FaultScene) -> None:
    scene.write(FEW)
    crashpoint.arm("journal.append", 3, "raise")
    with small_chunks(), pytest.raises(InjectedError):
        scene.run()
    crashpoint.disarm()
    scene.computed()
    assert recover(scene).resumed == 24
    assert scene.computed() == 16
    check_everything(scene)
