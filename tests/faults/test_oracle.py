"""The oracle itself: it sees a row that is lost, doubled or of another state; a child starts clean;
the script of random kills runs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.store.disk.record import replace
from tests.faults import random_kills
from tests.faults.conftest import ROWS
from tests.faults.harness import (
    VIEW,
    FaultScene,
    changed,
    check_online_is_tidy,
    check_snapshots,
    recover,
    state_of,
    values_of,
)

FEW = dict(list(ROWS.items())[:20])


def test_rows_of_no_one_state_are_seen(scene: FaultScene) -> None:
    scene.write(FEW)
    scene.write(changed(FEW, [3, 4]))
    old, new = values_of(scene.history[-2]), values_of(scene.history[-1])
    assert state_of(scene, new, "x") == scene.history[-1]
    lost = {key: row for key, row in new.items() if key != 7}
    mixed = new | {3: old[3]}
    for wrong in (lost, mixed, new | {99: (0.0, ())}, {}):
        with pytest.raises(AssertionError, match="those of no state"):
            state_of(scene, wrong, "x")


def test_the_script_counts_what_is_wrong(scene: FaultScene) -> None:
    scene.write(FEW)
    scene.write(changed(FEW, [3, 4]))
    old, new = values_of(scene.history[-2]), values_of(scene.history[-1])
    tally = random_kills.Tally()
    random_kills.compare(tally, scene, new)
    random_kills.compare(tally, scene, old)
    assert tally.wrong == 0
    random_kills.compare(tally, scene, new | {3: old[3]})
    assert (tally.lost, tally.mixed) == (0, 1)
    random_kills.compare(tally, scene, {key: row for key, row in new.items() if key != 7})
    assert (tally.lost, tally.mixed) == (1, 1)


def test_a_doubled_row_is_seen(scene: FaultScene) -> None:
    scene.write(FEW)
    recover(scene)
    part = scene.store.part_paths(scene.store.snapshot(1))[0]
    table = pq.read_table(part)
    doubled = pa.concat_tables(
        [table.slice(0, 1), table.slice(0, 1), table.slice(2)]
    )  # as many rows as the manifest says
    pq.write_table(doubled, part)
    body = scene.store.snapshot(1)
    parts = tuple(
        replace(p, size_bytes=part.stat().st_size) if part.name in p.path else p for p in body.parts
    )
    segment, data = replace(body.segments[0], parts=parts).numbered(1)
    (scene.view_folder / segment.record.path).write_bytes(data)
    manifest = scene.view_folder / "manifests" / f"{1:020d}.json"
    manifest.write_bytes(replace(body, segments=(segment,)).to_bytes())
    with pytest.raises(AssertionError, match="20 rows, 19 keys"):
        check_snapshots(scene)


def test_what_is_left_in_the_online_store_is_seen(scene: FaultScene) -> None:
    scene.write(FEW)
    recover(scene)
    check_online_is_tidy(scene)
    (scene.folder / "var" / "online" / VIEW / ".9-00000000.table.99999999.tmp").write_bytes(b"x")
    with pytest.raises(AssertionError, match="left in the online store"):
        check_online_is_tidy(scene)


def test_random_kills(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert random_kills.main(["--kills", "4", "--seed", "1", "--folder", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("seed 1, ")
    assert "4 kills, " in said
    assert "0 lost, 0 doubled, 0 mixed" in said
