"""What `status` says of partitions whose rows are not those of today's source or model, and that
what it names mends them."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

import precompute.jobs.run.run_view
from precompute.store.disk.record import replace
from precompute.store.times import containing
from tests.fixtures import MakeProject
from tests.jobs.test_serve_all import DAYS, SQL, Corpus, serving

Captured = pytest.CaptureFixture[str]
NAMES = [str(containing("day", day)) for day in DAYS]


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute.jobs.run.run_view, "LATE_ROWS_LEAST_S", 10.0)


@pytest.fixture
def corpus(make_project: MakeProject) -> Corpus:
    """Three days of two keys each, of a view whose newest partition is served."""
    corpus = Corpus(make_project)
    corpus.write(partition=serving(serve="newest"))
    for day in range(3):
        corpus.run(day, {10 * day: 1.0, 10 * day + 1: 2.0})
    return corpus


def status(corpus: Corpus, capsys: Captured) -> tuple[dict[str, Any], list[str]]:
    """The partitions of the view's line, and the commands that are named below the table."""
    capsys.readouterr()
    assert corpus.scene.cli("status", "--json") == 0
    partitions = json.loads(capsys.readouterr().out)[0]["partitions"]
    assert corpus.scene.cli("status") == 0
    return partitions, re.findall(r"`precompute (backfill [^`]+)`", capsys.readouterr().out)


def test_late_rows_are_found_by_the_next_run_and_healed_as_status_says(
    corpus: Corpus, capsys: Captured
) -> None:
    corpus.write(partition=serving(serve="all"))
    assert (corpus.run(2).looked_at, corpus.run(2).late) == ([NAMES[1], NAMES[0]], [])
    corpus.write(0, corpus.days[0] | {5: 5.0})
    corpus.write(1, corpus.days[1] | {11: 7.0})
    assert status(corpus, capsys)[1] == []
    report = corpus.run(2)
    assert report.status == "current"
    assert report.looked_at == [NAMES[1], NAMES[0]]
    assert report.late == [NAMES[1], NAMES[0]]
    partitions, commands = status(corpus, capsys)
    assert (partitions["looked_at"], partitions["late"], partitions["older"]) == (2, NAMES[:2], [])
    dates = [day.date().isoformat() for day in DAYS]
    assert commands == [
        f"backfill numbers --from {dates[0]} --to {dates[1]} --reprocess stale --check-inputs"
    ]
    assert corpus.scene.cli(*shlex.split(commands[0])) == 0
    assert status(corpus, capsys)[1] == []
    assert corpus.run(2).late == []
    assert corpus.served(30) == {0: 1.0, 1: 2.0, 5: 5.0, 10: 1.0, 11: 7.0, 20: 1.0, 21: 2.0}


def test_partitions_of_an_older_model_are_counted_and_mended(
    corpus: Corpus, capsys: Captured
) -> None:
    corpus.write(model={"use": "tests.models:Doubler", "args": {"version": "2"}})
    # the view's file alone says so
    assert status(corpus, capsys)[0]["older"] == NAMES[:3]
    assert corpus.run(2).looked_at == []
    partitions, commands = status(corpus, capsys)
    assert (partitions["older"], partitions["late"]) == (NAMES[:2], [])
    assert corpus.scene.cli(*shlex.split(commands[0])) == 0
    partitions, commands = status(corpus, capsys)
    assert (partitions["older"], commands) == ([], [])


def test_looking_ends_with_its_time(
    corpus: Corpus, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.write(1, corpus.days[1] | {11: 7.0})
    monkeypatch.setattr(precompute.jobs.run.run_view, "LATE_ROWS_LEAST_S", 0.0)
    monkeypatch.setattr(precompute.jobs.run.run_view, "LATE_ROWS_SHARE", 0.0)
    report = corpus.run(2)
    assert (report.looked_at, report.late) == ([], [])
    assert status(corpus, capsys)[0]["looked_at"] == 2  # of the run before


def test_what_a_run_saw_counts_until_a_later_one_looks_again(
    corpus: Corpus, capsys: Captured
) -> None:
    corpus.write(0, corpus.days[0] | {5: 5.0})
    assert corpus.run(2).late == [NAMES[0]]
    runs = corpus.scene.offline.view("numbers").runs
    later = replace(
        runs.reports()[0], run="99990101T000000.000000Z-000000", looked_at=[NAMES[1]], late=[]
    )
    runs.write(later)
    assert status(corpus, capsys)[0]["late"] == [NAMES[0]]


def test_sources_that_were_let_go_of_or_cannot_be_read_are_not_late(corpus: Corpus) -> None:
    corpus.write(
        3, {30: 1.0}, source={"sql": SQL + " AND CASE WHEN x > 6 THEN error('no') ELSE true END"}
    )
    assert all(corpus.run(day).finished for day in range(4))
    corpus.write(0, {1: 1.0})
    corpus.write(1, {})
    corpus.write(2, {11: 7.0})
    report = corpus.run(3)
    assert report.status == "current"
    assert report.looked_at == [NAMES[0]]
    assert report.late == [NAMES[0]]
    assert report.error is None
