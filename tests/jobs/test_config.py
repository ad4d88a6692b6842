"""Configuration: what its files say; every value can come from the environment. What is refused,
and how, is in :mod:`tests.jobs.test_mistakes`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from precompute.jobs.config.project import Project, ProjectConfig, json_schemas
from precompute.jobs.config.schedule import (
    RunsConfig,
    ScheduleConfig,
    check_schedules,
    spelled_out,
)
from precompute.jobs.config.section import parse_duration, parse_time
from precompute.jobs.config.view import ViewConfig
from precompute.store.errors import ConfigError
from tests.fixtures import MakeProject

SHIPPED = Path(__file__).parents[2] / "configs" / "movielens"
TEXT = {"dtype": "string"}


# ---- files


def test_only_true_and_false_are_truth_values(make_project: MakeProject) -> None:
    project = make_project()
    for word in ("on", "off", "yes", "n", "NO"):
        (project.folder / "project.yaml").write_text(
            f"root: ./var\nonline: table:./online\nvars: {{data: ./, country: {word}}}\n"
        )
        assert Project(project.folder, {}).settings.vars["country"] == word


def test_variables_stand_for_their_values_everywhere(make_project: MakeProject) -> None:
    project = make_project(
        project={"vars": {"data": "./", "x": "y", "up": "../up"}},
        view={
            "model": {
                "use": "top_k",
                "args": {"a": ["${x}", {"b": "${x}${x}"}], "c": 3, "d": "$x ${ x }"},
            },
            "ttl": "1h",
        },
    )
    view = project.view("numbers")
    assert view.model.args == {"a": ["y", {"b": "yy"}], "c": 3, "d": "$x ${ x }"}
    assert (
        view.source.sql == "SELECT * FROM read_parquet('.//data.parquet')"
    )  # as it is written, wherever the project lies


def test_relative_paths_start_from_the_project(
    make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_project(
        [(1, 1.0)], project={"root": "var", "online": "table:../online", "vars": {"data": "./"}}
    ).folder
    seen = []
    for cwd, given in (
        (tmp_path, "project"),
        (folder, "."),
        (folder / "views", ".."),
        (Path("/"), folder),
    ):
        monkeypatch.chdir(cwd)
        project = Project(given, {})
        seen.append(
            (
                project.root.resolve(),
                Path(project.online.removeprefix("table:")).resolve(),
                project.home.resolve(),
            )
        )
        assert project.root.is_absolute()
    assert set(seen) == {(folder / "var", tmp_path / "online", folder)}


# ---- the schedule


def test_a_schedule_spelled_out_and_the_short_form_are_one(make_project: MakeProject) -> None:
    other = {
        "entity": ["id"],
        "source": {"sql": "SELECT 1 AS id"},
        "model": {"use": "top_k"},
        "features": {"a": TEXT},
        "ttl": "1h",
    }
    project = make_project(
        project={
            "timezone": "Europe/Berlin",
            "schedule": {
                "numbers": "0 2 * * *",
                "b": {
                    "at": "0 3 * * *",
                    "catch_up": "all",
                    "retries": 0,
                    "retry_after": "5s",
                    "deadline": "90m",
                },
                "c": "after numbers, b",
                "d": {"after": ["numbers", "b"], "catch_up": "none"},
                "e": {"after": "c"},
            },
            "runs": {"retries": 5, "deadline": "2h"},
        },
        views=dict.fromkeys("bcde", other),
    )
    usual = {
        "timezone": "Europe/Berlin",
        "catch_up": "latest",
        "retries": 5,
        "retry_after_s": 60.0,
        "deadline_s": 7200.0,
    }
    assert {name: asdict(schedule) for name, schedule in project.schedules().items()} == {
        "numbers": usual | {"when": "0 2 * * *", "cron": "0 2 * * *", "parents": ()},
        "b": usual
        | {"when": "0 3 * * *", "cron": "0 3 * * *", "parents": ()}
        | {"catch_up": "all", "retries": 0, "retry_after_s": 5.0, "deadline_s": 5400.0},
        "c": usual | {"when": "after numbers, b", "cron": None, "parents": ("numbers", "b")},
        "d": usual
        | {
            "when": "after numbers, b",
            "cron": None,
            "parents": ("numbers", "b"),
            "catch_up": "none",
        },
        "e": usual | {"when": "after c", "cron": None, "parents": ("c",)},
    }


def test_views_that_run_after_the_same_ones_are_followed_once() -> None:
    """Forty layers of two views, each after both below: 2⁴⁰ ways from the last to the first."""
    after = {
        f"{side}{layer}": ScheduleConfig(after=[f"{one}{layer - 1}" for one in "ab"])
        for layer in range(1, 40)
        for side in "ab"
    }
    first = {f"{side}0": ScheduleConfig(at="0 2 * * *") for side in "ab"}
    schedules = spelled_out(after | first, RunsConfig(), "UTC")
    check_schedules(schedules, list(schedules), Path("project.yaml"), {})
    schedules |= spelled_out({"a0": ScheduleConfig(after=["b39"])}, RunsConfig(), "UTC")
    with pytest.raises(ConfigError, match=r"a1 after a0 after b39 .* after a1 goes round"):
        check_schedules(schedules, list(schedules), Path("project.yaml"), {})


def test_a_schedule_from_the_environment_replaces_the_files(make_project: MakeProject) -> None:
    project = make_project(
        project={"schedule": {"numbers": {"at": "0 2 * * *", "retries": 1}}},
        environment={"PRECOMPUTE_SCHEDULE__NUMBERS": "30 4 * * *", "PRECOMPUTE_RUNS__RETRIES": "2"},
    )
    schedule = project.schedules()["numbers"]
    assert (schedule.when, schedule.retries) == ("30 4 * * *", 2)


# ---- the environment


@pytest.mark.parametrize(
    ("variable", "value", "path", "read"),
    [
        ("ONLINE", "table:/srv/online", "settings.online", "table:/srv/online"),
        ("SERVE__BIND", "unix:./api.sock", "settings.serve.bind", "unix:./api.sock"),
        ("SERVE__LIMITS__IDLE_TIME", "1m", "settings.serve.limits.idle_time", 60.0),
        (
            "SERVE__HOSTS",
            "[Features.internal, x]",
            "settings.serve.hosts",
            ["features.internal", "x"],
        ),
        ("SERVE", "{bind: 'localhost:1'}", "settings.serve.bind", "localhost:1"),
        ("MEMORY_MB", "64", "settings.memory_mb", 64),
        ("VARS__COUNTRY", "no", "settings.vars.country", "no"),
        ("VARS__YEAR", "2024", "settings.vars.year", "2024"),
        ("VARS__DAY", "2024-02-30", "settings.vars.day", "2024-02-30"),
        ("VARS__EMPTY", "", "settings.vars.empty", ""),
        ("VARS__COLON", "a: b: c", "settings.vars.colon", "a: b: c"),
        ("SCHEDULE__NUMBERS", "*/5 * * * *", "settings.schedule.numbers.at", "*/5 * * * *"),
        ("RUNS__RETRY_AFTER", "2m", "settings.runs.retry_after", 120.0),
        ("VIEWS__NUMBERS__FALLBACK__ENABLED", "true", "views.numbers.fallback.enabled", True),
        ("VIEWS__NUMBERS__MODEL__ARGS__DIM", "7", "views.numbers.model.args.dim", 7),
        ("VIEWS__NUMBERS__MODEL__ARGS__WORD", "off", "views.numbers.model.args.word", "off"),
        ("VIEWS__NUMBERS__INDEX__ON", "vector", "views.numbers.index.on", "vector"),
        (
            "VIEWS__NUMBERS__SOURCE__SQL",
            "SELECT '${data}' AS id",
            "views.numbers.source.sql",
            "SELECT './' AS id",
        ),
    ],
)
def test_every_value_can_come_from_the_environment(
    make_project: MakeProject, variable: str, value: str, path: str, read: Any
) -> None:
    project = make_project(
        environment={f"PRECOMPUTE_{variable}": value, "OTHER_ONLINE": "x", "PRECOMPUTE_CONFIG": "x"}
    )
    found: Any = project
    for name in path.split("."):
        found = found[name] if isinstance(found, Mapping) else getattr(found, name)
    assert found == read


# ---- what it says


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("100ms", 0.1),
        ("15m", 900),
        ("15min", 900),
        ("26h", 93600),
        ("7d", 604800),
        ("2w", 1209600),
        (" 1.5 h ", 5400),
        ("0s", 0),
        (0, 0),
        (0.25, 0.25),
    ],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


def test_what_is_no_duration() -> None:
    nan = float("nan")
    for text in ("", "h", "1", "1 year", "-1h", "1h30m", "1H", "1e3s", True, None, nan, -1):
        with pytest.raises(ValueError, match="26h"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        (date(2026, 1, 31), datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31 06:00", datetime(2026, 1, 31, 6, tzinfo=UTC)),
        ("2026-01-31T06:00Z", datetime(2026, 1, 31, 6, tzinfo=UTC)),
        ("2026-01-31T01:30+02:00", datetime(2026, 1, 30, 23, 30, tzinfo=UTC)),
        (datetime(2026, 1, 31, 6), datetime(2026, 1, 31, 6, tzinfo=UTC)),
    ],
)
def test_times_are_in_utc_unless_they_say_otherwise(text: Any, at: datetime) -> None:
    assert parse_time(text) == at
    assert parse_time(text).tzinfo is UTC


def test_what_is_no_time() -> None:
    beyond = ("0001-01-01T00:00+05:00", "9999-12-31T23:00-05:00")
    for text in ("", "yesterday", "2026-02-30", "31.01.2026", None, 2026, *beyond):
        with pytest.raises(ValueError, match="write a date or time, such as 2026-01-31"):
            parse_time(text)


def test_the_json_schemas_know_every_key_and_fit_the_shipped_files() -> None:
    schemas = json.loads(json.dumps(json_schemas()))
    assert set(schemas["project"]["properties"]) == set(ProjectConfig.known())
    assert set(schemas["view"]["properties"]) == set(ViewConfig.known())
    files = [SHIPPED / "project.yaml", *sorted((SHIPPED / "views").glob("*.yaml"))]
    assert len(files) == 7
    for file in files:
        kind = "project" if file.name == "project.yaml" else "view"
        text = file.read_text().replace("{on: ", "{'on': ")  # PyYAML is YAML 1.1, editors are not
        jsonschema_rs.validate(schemas[kind], yaml.safe_load(text))
        with pytest.raises(jsonschema_rs.ValidationError, match="Additional properties"):
            jsonschema_rs.validate(schemas[kind], yaml.safe_load(text) | {"unknown": 1})


# ---- the command line
