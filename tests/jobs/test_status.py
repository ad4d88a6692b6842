"""Status: what is live, how old it is against its TTL, and how the last run ended."""

from __future__ import annotations

import json
import re
import shutil
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from precompute.jobs.ops.run_all import Selection, selected
from precompute.jobs.ops.status import inputs_behind, project_status, view_status
from precompute.jobs.schedule.due import LEADER, Ledger
from precompute.store.disk.lease import take
from precompute.store.disk.record import content_of, replace, sealed
from precompute.store.errors import PrecomputeError, SnapshotError
from precompute.store.offline.log import PUBLISH_LEASE, run_lease
from precompute.store.offline.runs import Report
from tests.fixtures import MakeProject
from tests.jobs.test_run_all import view as doubled
from tests.scene import Scene

OTHER = doubled("numbers") | {"ttl": "2h"}


def test_a_view_that_was_never_run(make_project: MakeProject) -> None:
    assert make_project([(1, 1.0)]).status() == {
        "view": "numbers",
        "status": "unpublished",
        "snapshot": None,
        "partition": None,
        "rows": None,
        "age_s": None,
        "ttl_s": 3600.0,
        "source_at": None,
        "source_age_s": None,
        "coverage": None,
        "rejected": None,
        "gates": None,
        "online": None,
        "index": None,
        "held": None,
        "last_run": None,
        "schedule": None,
        "next_due": None,
        "next_due_why": "not scheduled",
        "behind": [],
        "partitions": None,
        "library": None,
        "checked": "nothing is live",
        "attention": ["unpublished"],
    }


def test_a_view_that_is_live(make_project: MakeProject) -> None:
    project = make_project(
        [(1, 1.0), (2, 2.0), (3, 3.0), (4, None)], project={"schedule": {"numbers": "0 2 * * *"}}
    )
    before = time.time()
    run = project.run()
    line = project.status()
    assert 0 <= line.pop("age_s") <= time.time() - before
    assert 0 <= line.pop("source_age_s") <= time.time() - before + 1
    assert line.pop("source_at") == run.source_at
    due = datetime.fromisoformat(line.pop("next_due"))
    assert (due.hour, due.minute, due.utcoffset()) == (2, 0, timedelta(0))
    assert before < due.timestamp() <= before + 86_400
    assert line.pop("next_due_why")
    assert line.pop("checked").startswith("all 3 rows read in the last 0 s; 7 files, ")
    assert line == {
        "view": "numbers",
        "status": "fresh",
        "snapshot": 1,
        "partition": None,
        "rows": 3,
        "ttl_s": 3600.0,
        "coverage": 0.75,
        "rejected": 1,
        "gates": {"nights": 1},
        "online": True,
        "index": None,
        "held": None,
        "last_run": {
            "run": run.run,
            "command": "run",
            "status": "published",
            "started_at": run.started_at,
            "seconds": round(run.seconds, 3),
            "partition": None,
            "error": None,
        },
        "schedule": "0 2 * * *",
        "behind": [],
        "partitions": None,
        "library": None,
        "attention": [],
    }


@pytest.mark.parametrize(
    ("ttl", "stale_for", "status_"),
    [("1h", "1h", "fresh"), ("0s", "1h", "stale"), ("0s", "0s", "expired")],
)
def test_the_age_is_judged_by_the_ttl_that_is_served(
    make_project: MakeProject, ttl: str, stale_for: str, status_: str
) -> None:
    """Which is the published one: an edited TTL takes effect with the next run, here as in every
    lookup."""
    make_project([(1, 1.0)], view={"ttl": ttl, "stale_for": stale_for}).run()
    line = make_project().status()
    assert (line["status"], line["attention"]) == (status_, [] if status_ == "fresh" else [status_])


def test_a_failed_run_shows_beside_what_is_still_live(make_project: MakeProject) -> None:
    make_project([(1, 1.0)]).run()
    project = make_project([(1, 1.0), (1, 2.0)])
    with pytest.raises(PrecomputeError):
        project.run()
    line = project.status()
    assert (line["status"], line["snapshot"], line["rows"], line["online"]) == ("fresh", 1, 1, True)
    assert line["last_run"]["status"] == "failed"
    assert line["attention"] == ["the last run failed"]
    assert "unique" in line["last_run"]["error"]
    # what is live, published once more, is not what failed
    assert project.publish(reload=True).status == "published"
    assert project.status()["last_run"] == line["last_run"]
    assert selected(project, Selection(failed=True)) == ["numbers"]


@pytest.mark.parametrize("file", [f"log/{1:020d}.json", f"manifests/{1:020d}.json"])
def test_a_damaged_file_is_an_error_and_the_other_views_have_their_lines(
    make_project: MakeProject, file: str
) -> None:
    project = make_project([(1, 1.0)], views={"another": OTHER})
    project.run()
    project.run("another")
    (project.root / "numbers" / file).write_text("{torn")
    with pytest.raises(SnapshotError, match=file.rpartition("/")[2]) as caught:
        project.status()
    another, numbers = project_status(project)
    assert (another["view"], another["status"], another["attention"]) == ("another", "fresh", [])
    assert (numbers["view"], numbers["status"], numbers["attention"]) == (
        "numbers",
        "unreadable",
        [str(caught.value)],
    )
    assert (numbers["ttl_s"], numbers.keys()) == (3600.0, another.keys())
    assert {numbers[k] for k in numbers.keys() - {"view", "status", "attention", "ttl_s"}} == {None}


def test_named_views_alone_are_told_of_and_decide_the_exit_status(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_project([(1, 1.0)], views={"another": OTHER, "third": OTHER | {"name": "third"}})
    project.publish_all("numbers", "another")

    def status(*names: str) -> tuple[int, list[str]]:
        code = project.cli("status", "--json", *names)
        return code, [line["view"] for line in json.loads(capsys.readouterr().out)]

    # `third` never ran
    assert status() == (1, ["another", "numbers", "third"])
    assert status("numbers") == (0, ["numbers"])
    assert status("numbers", "another") == (0, ["another", "numbers"])
    assert status("third", "numbers") == (1, ["numbers", "third"])
    assert project.cli("status", "numbers") == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["view", "numbers"]
    assert project.cli("status", "nummers") == 2
    assert "no view 'nummers' in" in (said := capsys.readouterr().err)
    assert "did you mean 'numbers'" in said
    # served without a file, it can be named
    (project.folder / "views" / "another.yaml").unlink()
    project = project.reread()
    assert status("another") == (1, ["another"])
    assert status("numbers") == (0, ["numbers"])


def test_a_damaged_report_is_skipped_with_a_warning(
    make_project: MakeProject, caplog: pytest.LogCaptureFixture
) -> None:
    project = make_project([(1, 1.0)])
    run = project.run()
    torn = project.root / "numbers" / "runs" / "99999999T000000.000000Z-ffffff.json"
    torn.write_text("{torn")
    line = project.status()
    assert (line["last_run"]["run"], line["last_run"]["status"]) == (run.run, "published")
    (shown,) = line["attention"]
    assert shown.startswith(f"{torn} is damaged (")
    assert [str(torn) in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("command", ["materialize", "rollback"])
def test_a_killed_run_shows_as_killed_and_one_that_goes_on_as_running(
    make_project: MakeProject, command: str
) -> None:
    project = make_project([(1, 1.0)])
    project.run()
    store = project.store
    store.runs.write(Report("99999999T000000.000000Z-ffffff", "numbers", command))
    lease = run_lease(None) if command in ("run", "materialize") else PUBLISH_LEASE
    with take(store.leases, lease, command):
        line = project.status()
        assert (line["last_run"]["status"], line["attention"]) == ("running", [])
    line = project.status()
    assert (line["last_run"]["status"], line["attention"]) == ("killed", ["the last run killed"])
    assert "died without reporting why" in line["last_run"]["error"]


@pytest.mark.parametrize(
    ("ended", "attention"),
    [
        ("cancelled", []),
        ("failed", ["the last run failed"]),
        ("rejected", ["the last run rejected"]),
        ("refused", ["the last run refused"]),
    ],
)
def test_how_the_last_run_ended_needs_attention_when_it_was_badly(
    make_project: MakeProject, ended: str, attention: list[str]
) -> None:
    project = make_project([(1, 1.0)])
    project.run()
    project.store.runs.write(Report("99999999T000000.000000Z-ffffff", "numbers", "run", ended))
    assert project.status()["attention"] == attention


# ---- behind its input


def chained(make_project: MakeProject, rows: list[tuple[int, float]], **another: Any) -> Scene:
    """``another`` reads ``numbers``."""
    return make_project(rows, views={"another": OTHER | another})


def behind_and_attention(project: Scene) -> tuple[list[tuple[str, int, int]], list[str]]:
    line = view_status(project, project.offline.view("another"), project.open_online())
    for found in line["behind"]:
        assert 0 <= found["behind_s"] < 600
    attention = [text.partition(": behind for")[0] for text in line["attention"]]
    return [
        (found["input"], found["computed_from"], found["live"]) for found in line["behind"]
    ], attention


BEHIND = "computed from snapshot 1 of numbers, of which 2 is live"
TWO, ONE = [(1, 1.0), (2, 2.0)], [(1, 1.0)]


@pytest.mark.parametrize(
    ("schedule", "ttl", "attention"),
    [
        ({"numbers": "0 2 * * *", "another": "after numbers"}, "1h", []),
        ({"numbers": "0 2 * * *", "another": "0 3 * * *"}, "1h", []),
        ({"numbers": "0 2 * * *"}, "1h", [BEHIND]),
        ({"numbers": "0 2 * * *", "third": "0 2 * * *", "another": "after third"}, "1h", [BEHIND]),
        ({}, "1ms", ["stale", BEHIND]),
    ],
)
def test_a_view_behind_its_input_needs_attention_when_nothing_will_run_it(
    make_project: MakeProject, schedule: dict[str, str], ttl: str, attention: list[str]
) -> None:
    views = {
        "another": OTHER | {"ttl": ttl},
        "third": OTHER | {"source": {"sql": "SELECT 1 AS id, 1.0 AS x"}},
    }
    project = make_project(TWO, project={"schedule": schedule}, views=views)
    for name in ("numbers", "another", "third"):
        project.run(name)
    assert behind_and_attention(project) == ([], ["stale"] if ttl == "1ms" else [])
    project = make_project(ONE, project={"schedule": schedule}, views=views)
    project.run()
    assert behind_and_attention(project) == ([("numbers", 1, 2)], attention)
    project.run("another")
    assert behind_and_attention(project) == ([], ["stale"] if ttl == "1ms" else [])


def test_a_view_is_behind_since_its_input_has_other_rows(make_project: MakeProject) -> None:
    for rows in (TWO, ONE, [(1, 3.0)]):
        project = chained(make_project, rows)
        project.run()
        if rows == TWO:
            project.run("another")
    another = project.offline.view("another")
    long_ago = replace(project.live_snapshot("another"), created_at="2020-01-01T00:00:00+00:00")
    (found,) = inputs_behind(another, long_ago, [])
    assert found["behind_s"] < 600
    # the first one with other rows is gone, so it may have been there from the beginning
    project.store.manifest_path(2).unlink()
    (found,) = inputs_behind(another, long_ago, [])
    assert found["behind_s"] > 365 * 86_400


def test_views_that_read_each_other_end_the_search_for_what_runs_them(
    make_project: MakeProject,
) -> None:
    views: dict[str, Any] = {"another": OTHER}
    views |= {
        name: OTHER | {"source": {"sql": f"SELECT * FROM live.{of}"}}
        for name, of in (("third", "fourth"), ("fourth", "third"))
    }
    scheduled = {"schedule": {"third": "0 2 * * *", "another": "after third"}}
    for rows in (TWO, ONE):
        project = make_project(rows, project=scheduled, views=views)
        project.run()
        if rows == TWO:
            project.run("another")
    assert behind_and_attention(project) == ([("numbers", 1, 2)], [BEHIND])


def test_the_same_rows_under_another_number_are_nothing_to_be_behind(
    make_project: MakeProject,
) -> None:
    project = chained(make_project, TWO)
    project.run()
    project.run("another")
    project.run(full=True)
    assert behind_and_attention(project) == ([], [])


def test_a_run_that_found_its_own_rows_unchanged_has_seen_the_input(
    make_project: MakeProject,
) -> None:
    for rows in (TWO, ONE):
        project = chained(
            make_project,
            rows,
            source={"sql": "SELECT id, double AS x FROM live.numbers WHERE id = 1"},
        )
        project.run()
        if rows == TWO:
            project.run("another")
    assert behind_and_attention(project) == ([("numbers", 1, 2)], [])
    assert project.run("another").status == "current"
    assert behind_and_attention(project) == ([], [])


# ---- a schedule that is not kept


def test_a_scheduler_that_is_gone_and_a_run_that_is_overdue_need_attention(
    make_project: MakeProject,
) -> None:
    at = datetime.now(UTC) - timedelta(hours=12)  # what is due at this very minute is not late yet
    project = make_project(ONE, project={"schedule": {"numbers": f"{at:%-M %-H} * * *"}})
    project.run()
    store = project.store
    assert project.status()["attention"] == [], "it was never up, and nothing was due since the run"
    leader = take(store.offline.root / ".scheduler", LEADER, "a scheduler")
    assert project.status()["attention"] == [
        "the scheduler that is up does not know its schedule: restart it"
    ]
    Ledger(project, project.offline).see("numbers", datetime.now(UTC))
    assert project.status()["attention"] == []
    Ledger(project, project.offline).see("numbers", datetime.now(UTC) - timedelta(days=2))
    path = next((project.root / "numbers" / "runs").glob("*.json"))
    began = datetime.now(UTC) - timedelta(days=2)
    path.write_bytes(
        sealed(content_of(path.read_bytes(), path) | {"started_at": began.isoformat()})
    )
    (overdue,) = project.status()["attention"]
    assert re.fullmatch(rf"due since \d{{4}}-\d\d-\d\d {at:%H:%M}\+00:00 and not begun", overdue)
    leader.release()
    assert project.status()["attention"] == [f"{overdue}: no scheduler is up"]
    Ledger(project, project.offline).see("numbers", datetime.now(UTC))
    assert project.status()["attention"] == ["scheduled, and no scheduler is up"]
    with take(store.leases, run_lease(None), "run"):
        assert project.status()["attention"] == ["scheduled, and no scheduler is up"]
    shutil.rmtree(project.root / ".scheduler")
    (project.root / "numbers" / "notes" / "schedule.json").unlink()
    assert project.status()["attention"] == [f"{overdue}: no scheduler was ever up"]


# ---- served, and not configured


def test_a_view_that_is_served_without_a_file_has_a_line(make_project: MakeProject) -> None:
    project = make_project(TWO, views={"another": OTHER})
    for name in ("numbers", "another"):
        project.run(name)
    (project.folder / "views" / "another.yaml").unlink()
    numbers, another = project_status(project.reread())
    assert (numbers["view"], numbers["attention"]) == ("numbers", [])
    assert another == dict.fromkeys(numbers) | {
        "view": "another",
        "status": "unconfigured",
        "snapshot": 1,
        "rows": 2,
        "ttl_s": 7200.0,
        "online": True,
        "attention": [
            "served, though there is no views/another.yaml: put it back, or end the view with `precompute drop another`"
        ],
    }
    assert project.cli("status") == 1
    assert project.cli("drop", "another", "--yes") == 0
    assert project.cli("status") == 0


# ---- clocks that jump


def test_a_run_under_a_fast_clock_is_told_and_hides_no_later_run(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fast(datetime):
        """A clock two hours ahead."""

        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(hours=2)

    project = make_project(ONE)
    original = time.time_ns
    with monkeypatch.context() as patch:
        for module in ("precompute.store.times", "precompute.store.offline.runs"):
            patch.setattr(f"{module}.datetime", Fast)
        patch.setattr(time, "time_ns", lambda: original() + 7200 * 10**9)
        early = project.run()
    line = project.status()
    assert (line["status"], line["last_run"]["run"]) == ("fresh", early.run)
    shown = [re.sub(r"\d{4}-\S+Z:", "AT:", text) for text in line["attention"]]
    assert shown == [
        f"run {early.run} began 120 min ahead of this clock, AT: a clock jumped, or was wrong",
        "it was published 120 min ahead of this clock, AT: a clock jumped, or was wrong",
    ]
    failing = make_project([(1, 1.0), (1, 2.0)])
    with pytest.raises(PrecomputeError):
        failing.run()
    assert f"run {early.run} is dated 71" in caplog.text
    line = failing.status()
    assert (line["last_run"]["status"], line["attention"][0]) == ("failed", "the last run failed")
    reports = project.store.runs.reports()
    assert [report.status for report in reports] == ["failed", "published"]


def test_what_was_measured_of_the_vector_index_is_told(make_project: MakeProject) -> None:
    project = make_project(
        [(i, float(i)) for i in range(30)], view={"index": {"on": "vector", "recall_at_10": 0.9}}
    )
    run = project.run()
    index = project.status()["index"]
    assert index == run.index
    assert (index["kind"], index["promised"], index["recall_at_10"], index["recall_bound"]) == (
        "exact",
        0.9,
        1.0,
        1.0,
    )
    assert index["why"].startswith("30 rows")
