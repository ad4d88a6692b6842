"""The past is what was served: random histories of real runs, told as lookups were answered
meanwhile."""

from __future__ import annotations

import datetime as dt
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.store_as_of import History
from precompute.store.history import get_historical_features, read, snapshot_at
from precompute.store.history.versions import Values
from precompute.store.times import containing
from tests.fixtures import MakeProject


@pytest.mark.parametrize("seed", range(2))
def test_what_is_told_of_the_past_is_what_lookups_were_answered(seed: int, tmp_path: Path) -> None:
    history = History(tmp_path / "project", seed)
    history.play(12)
    assert any(recorded.rows for recorded in history.recorded)
    assert list(history.differences()) == []


def test_history_passes_over_a_day_without_rows_as_publishing_does(
    make_project: MakeProject,
) -> None:
    days = [dt.date(2024, 1, day) for day in (1, 2)]
    project = make_project(
        pa.table({"id": [1, 2], "x": [1.0, 2.0], "day": pa.array([days[0]] * 2, pa.date32())}),
        view={
            "source": {
                "sql": "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE day >= $start AND day < $end"
            },
            "partition": {"by": "day", "start": "2024-01-01", "empty": "keep"},
            "gates": {"coverage": None, "rows": None},
        },
    )
    for day in days:
        project.run(partition=containing("day", datetime(day.year, day.month, day.day, tzinfo=UTC)))
    now = datetime.now(UTC)
    assert project.numbers() == [1, 2]
    assert project.live().snapshot == 1
    assert project.served((1, 2)) == (1, [2.0, 4.0])
    assert sorted(read(project.store, now)["double"].to_pylist()) == [2.0, 4.0]
    assert snapshot_at(project.store, now).number == 1
    assert snapshot_at(project.store, now, values="best_known").number == 1
    # in data time until ttl and stale_for, 25 hours together, have passed since the partition's end
    end = datetime(2024, 1, 2, tzinfo=UTC)
    asked: list[tuple[Values, datetime, list[float | None]]] = [
        ("served", now, [2.0, 4.0, None]),
        ("best_known", end + timedelta(hours=25), [2.0, 4.0, None]),
        ("best_known", end + timedelta(hours=25, microseconds=1), [None] * 3),
        ("best_known", now, [None] * 3),
    ]
    for values, at, expected in asked:
        wanted = pa.table({"id": [1, 2, 3], "event_timestamp": pa.array([at] * 3)})
        found = get_historical_features(project.offline, wanted, ["numbers"], values=values)
        assert found["numbers__double"].to_pylist() == expected


def test_training_says_which_partitions_a_gate_refused(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    days = [dt.date(2024, 1, day) for day in (1, 2, 3, 4)]
    rows = [(1, 1.0, days[0]), (1, None, days[1]), (2, 2.0, days[1]), (1, 4.0, days[3])]
    project = make_project(
        pa.table(
            {
                "id": [id for id, _, _ in rows],
                "x": [x for _, x, _ in rows],
                "day": pa.array([day for _, _, day in rows], pa.date32()),
            }
        ),
        view={
            "source": {
                "sql": "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE day >= $start AND day < $end"
            },
            "partition": {"by": "day", "start": "2024-01-01", "empty": "keep"},
            "gates": {"coverage": 1.0, "rows": None},
        },
    )
    (project.folder / "services").mkdir()
    (project.folder / "services" / "all.yaml").write_text(
        "name: all\nentity: [id]\nviews: {numbers: [double]}\n"
    )
    scene = project.reread()
    assert scene.cli("backfill", "numbers", "--from", "2024-01-01", "--to", "2024-01-02") == 3
    assert scene.cli("backfill", "numbers", "--from", "2024-01-04", "--to", "2024-01-04") == 0
    # ttl and stale_for are 25 hours together
    labels, out = project.folder / "labels.csv", project.folder / "out.parquet"
    times = ["2024-01-02T12:00", "2024-01-03T01:00", "2024-01-03T12:00", "2024-01-04T12:00"]
    labels.write_text("".join(f"{line}\n" for line in ["id,at", *(f"1,{at}" for at in times)]))
    command = ["training", "all", str(labels), "--timestamp", "at", "--to", str(out)]
    capsys.readouterr()
    assert scene.cli(*command, "--best-known") == 0
    assert pq.read_table(out)["numbers__double"].to_pylist() == [2.0, 2.0, None, None]
    told = capsys.readouterr()
    assert "  numbers: 2 rows were there at their time, the others are null" in told.out
    said = (
        "3 rows ask for partitions without good rows: 2 of them are null, 1 have those of an earlier"
        " partition, within ttl and stale_for; 1 refused by coverage (2024-01-02); 1 not computed"
        " (2024-01-03)\n"
    )
    assert f"    {said}" in told.out
    assert scene.cli(*command, "--best-known", "--replace", "--json") == 0
    assert json.loads(capsys.readouterr().out)["gaps"] == {
        "numbers": {
            "rows": 3,
            "null": 2,
            "partitions": {"refused by coverage": ["2024-01-02"], "not computed": ["2024-01-03"]},
        }
    }
