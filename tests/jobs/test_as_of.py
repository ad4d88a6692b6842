"""The past is what was served: random histories of real runs, told as lookups were answered
meanwhile."""

from __future__ import annotations

import datetime as dt
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.store_as_of import History
from precompute.store.history import get_historical_features, read, snapshot_at
from precompute.store.history.versions import Values
from precompute.store.times import containing
from tests.conftest import MakeProject


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
