"""Preflight: what would keep a run from publishing is reported before its model computes a row; and
what publishes nothing needs no online store."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.commands.command import FAILED, REJECTED
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    GateError,
    OnlineStoreError,
    PrecomputeError,
)
from tests.fixtures import MakeProject
from tests.models import Doubler
from tests.scene import Scene

ROWS = [(1, 1.0), (2, 2.0)]
DAYS = {
    "source": {"sql": "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE $start < $end"},
    "partition": {"by": "day", "start": "2026-01-01"},
}


class Counted(Doubler):
    """Counts what is computed in this process."""

    rows = 0

    def compute(self, batch: Any) -> Any:
        Counted.rows += batch.num_rows
        return super().compute(batch)


COUNTED = {"model": {"use": "tests.jobs.test_preflight:Counted"}}


def refused(project: Scene, error: type[PrecomputeError], message: str, **options: Any) -> None:
    """A run that computes nothing, and whose report says why."""
    before = Counted.rows
    with pytest.raises(error, match=message):
        project.run(**options)
    assert Counted.rows == before
    assert project.report().error is not None


def test_a_store_that_is_not_there_or_cannot_be_written(
    make_project: MakeProject, tmp_path: Path
) -> None:
    make_project(ROWS)
    (tmp_path / "file").write_text("")
    # below a file there is nothing, and below /proc nothing is made, by whomever
    for folder in (tmp_path / "file", "/proc"):
        unwritable = make_project(project={"online": f"table:{folder}/online"}, view=COUNTED)
        refused(
            unwritable,
            OnlineStoreError,
            f"{folder}/online/numbers.*(No such file|Not a directory|Permission|Read-only)",
        )
    assert unwritable.numbers() == []


def test_nothing_stays_of_what_was_tried(make_project: MakeProject) -> None:
    project = make_project(ROWS, project={"online": "table:./none/online"})
    with project.online_store() as store:
        store.check_writable("numbers", "me")
    assert not (project.folder / "none").exists()


def test_a_view_of_another_project(make_project: MakeProject, tmp_path: Path, online: str) -> None:
    make_project(ROWS, view=COUNTED, project={"online": online}).run()
    other = make_project(view=COUNTED, project={"online": online, "root": "./another"})
    refused(
        other, ConflictError, "published by another project .*`precompute run numbers --take-over`"
    )
    assert other.cli("run", "numbers", "--take-over") == 0


def test_a_broken_contract(make_project: MakeProject, capsys: pytest.CaptureFixture[str]) -> None:
    make_project(ROWS, view=COUNTED).run()
    view = COUNTED | {"features": {"vector": {"dtype": "float32", "dim": 4}}}
    project = make_project([(1, 3.0), (2, 4.0)], view=view)
    message = "nothing was computed, the live snapshot stays. contract: .*feature 'double' is gone.*precompute run numbers --accept contract"
    refused(project, GateError, message)
    assert project.cli("run", "numbers") == REJECTED
    # what is not published breaks nobody
    assert project.materialize().status == "committed"
    assert project.run(accept=["contract"]).status == "published"


def test_an_index_that_nothing_here_builds(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(ROWS, view=COUNTED | {"index": {"on": "vector"}})
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "faiss" else find(name, *more),
    )
    refused(project, ConfigError, "index: FAISS, which builds it, is not installed: pip install")


def test_a_run_that_publishes_nothing_needs_no_online_store(
    make_project: MakeProject, online: str, away: str
) -> None:
    first = {"online": online}
    project = make_project(ROWS, view=DAYS, project=first)
    for day in ("2026-01-03", "2026-01-02"):
        assert project.cli("run", "numbers", "--partition", day) == 0
    down = make_project(view=DAYS, project={"online": away})
    assert down.cli("run", "numbers", "--partition", "2026-01-01") == 0
    assert down.cli("run", "numbers", "--partition", "2026-01-04") == FAILED
    assert down.cli("backfill", "numbers", "--from", "2026-01-05", "--to", "2026-01-05") == FAILED
    assert (
        down.cli(
            "backfill",
            "numbers",
            "--from",
            "2026-01-04",
            "--to",
            "2026-01-05",
            "--reprocess",
            "failed",
            "--no-publish",
        )
        == 0
    )
    days = sorted(str(down.snapshot(number).partition)[:10] for number in down.numbers())
    assert days == ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04", "2026-01-05"]
