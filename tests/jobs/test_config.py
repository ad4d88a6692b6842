"""Configuration: every mistake is refused with file, key, value and remedy; every value can come from the environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from precompute.jobs.cli import main
from precompute.jobs.config.project import Project, ProjectConfig, RetentionConfig, json_schemas
from precompute.jobs.config.schedule import after
from precompute.jobs.config.section import parse_duration, parse_time
from precompute.jobs.config.view import GatesConfig, ViewConfig
from precompute.store.errors import ConfigError
from precompute.store.feature_view import Feature, IndexSpec, ModelUse
from tests.conftest import MakeProject

SHIPPED = Path(__file__).parents[2] / "configs" / "movielens"
TEXT = {"dtype": "string"}


def mistake(make: Callable[[], Project]) -> str:
    """What is wrong with a project, or with the one view of it that is wrong."""
    try:
        (error,) = make().broken.values()
    except ConfigError as exc:
        error = exc
    return str(error)


def refusal(make_project: MakeProject, **files: Any) -> str:
    return mistake(lambda: make_project(**files))


def appended(project: Project, text: str, file: str = "views/numbers.yaml") -> Project:
    with (project.folder / file).open("a") as out:
        out.write("\n" + text + "\n")
    return Project(project.folder, {})


# ---- mistakes in a view

VIEW_MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": ({"tll": "1h"}, ["tll", "unknown key", "did you mean 'ttl'"]),
    "unknown nested key": ({"fallback": {"enable": True}}, ["fallback.enable", "did you mean 'enabled'"]),
    "unknown key of a feature": ({"features": {"a": {"dtype": "int8", "dimm": 4}}}, ["features.a.dimm", "did you mean 'dim'"]),
    "unknown key like nothing": ({"qqqqqqq": 1}, ["qqqqqqq", "unknown key"]),
    "missing key": ({"ttl": None}, ["ttl", "missing"]),
    "list instead of mapping": ({"source": ["SELECT 1"]}, ["source", "SELECT 1"]),
    "text instead of list": ({"entity": "id"}, ["entity", "'id'", "list"]),
    "text instead of mapping": ({"model": "top_k"}, ["model", "'top_k'"]),
    "list instead of args": ({"model": {"use": "top_k", "args": [1]}}, ["model.args", "[1]", "dictionary"]),
    "text instead of number": ({"max_rejected": "few"}, ["max_rejected", "'few'", "number"]),
    "share above one": ({"max_rejected": 2}, ["max_rejected", "2", "less than or equal to 1"]),
    "default of no feature": ({"fallback": {"default": {"z": 1}}}, ["fallback.default", "'z'"]),
    "default of another type": (
        {"features": {"a": {"dtype": "float32", "dim": 2}}, "fallback": {"default": {"a": [1, 2, 3]}}},
        ["fallback.default"],
    ),
    "fallback that is not enabled": (
        {"fallback": {"deadline": "2s", "keep": "1m"}},
        ["fallback", "deadline, keep", "enabled: true"],
    ),
    "yes is a word": ({"fallback": {"enabled": "yes"}}, ["fallback.enabled", "'yes'", "boolean"]),
    "no feature": ({"features": {}}, ["features", "at least 1"]),
    "no entity": ({"entity": []}, ["entity", "at least 1"]),
    "entity twice": ({"entity": ["id", "id"]}, ["entity", "'id'", "twice"]),
    "entity of an answer's column": ({"entity": ["computed_at"]}, ["entity", "'computed_at'"]),
    "entity of the hash": ({"entity": ["input_hash"]}, ["entity", "'input_hash'"]),
    "entity of a row's place": ({"entity": ["file_row_number"]}, ["entity", "'file_row_number'"]),
    "name with capitals": ({"features": {"Aa": TEXT}}, ["features.Aa", "lower-case"]),
    "name with newline": ({"features": {"a\n": TEXT}}, ["features", "lower-case"]),
    "name that leaves its folder": ({"entity": ["../id"]}, ["entity", "'../id'", "lower-case"]),
    "name too long": ({"features": {"a" * 64: TEXT}}, ["a" * 64, "63"]),
    "unknown dtype": ({"features": {"a": {"dtype": "float23"}}}, ["features.a.dtype", "'float23'", "did you mean 'float32'"]),
    "dim of zero": ({"features": {"a": {"dtype": "int8", "dim": 0}}}, ["features.a.dim", "0", "greater than or equal to 1"]),
    "vector and list": ({"features": {"a": {"dtype": "int8", "dim": 2, "max_items": 2}}}, ["features.a", "exclude each other"]),
    "vector of text": ({"features": {"a": TEXT | {"dim": 2}}}, ["features.a", "max_items"]),
    "list of bool": ({"features": {"a": {"dtype": "bool", "max_items": 2}}}, ["features.a", "int8"]),
    "packed scalar": ({"features": {"a": {"dtype": "float32", "packed": "int8"}}}, ["features.a", "packed", "dim"]),
    "packed list": ({"features": {"a": {"dtype": "float32", "max_items": 3, "packed": "int8"}}}, ["features.a", "packed", "dim"]),
    "packed doubles": ({"features": {"a": {"dtype": "float64", "dim": 3, "packed": "binary"}}}, ["features.a", "float32"]),
    "packed integers": ({"features": {"a": {"dtype": "int8", "dim": 3, "packed": "int8"}}}, ["features.a", "float32"]),
    "packed otherwise": ({"features": {"a": {"dtype": "float32", "dim": 3, "packed": "int4"}}}, ["features.a.packed", "'int8'"]),
    "feature called key": ({"features": {"key": TEXT}}, ["features", "'key'", "call the feature something else"]),
    "feature called as the entity": ({"features": {"id": TEXT}}, ["features", "'id'", "call the feature something else"]),
    "feature called computed_at": ({"features": {"computed_at": TEXT}}, ["'computed_at'", "something else"]),
    "feature called input_hash": ({"features": {"input_hash": TEXT}}, ["'input_hash'", "something else"]),
    "index on a scalar": ({"index": {"on": "double"}}, ["index.on", "'double'", "dim"]),
    "index on nothing": ({"index": {"on": "vectr"}}, ["index.on", "'vectr'"]),
    "unknown metric": ({"index": {"on": "vector", "metric": "cosin"}}, ["index.metric", "'cosin'", "did you mean 'cosine'"]),
    "bad duration": ({"ttl": "1 fortnight"}, ["ttl", "'1 fortnight'", "26h"]),
    "duration without unit": ({"ttl": "90"}, ["ttl", "'90'", "unit"]),
    "negative duration": ({"ttl": -5}, ["ttl", "-5", "26h"]),
    "endless duration": ({"ttl": float("inf")}, ["ttl", "inf", "26h"]),
    "unknown model": ({"model": {"use": "text_encodr"}}, ["model.use", "'text_encodr'", "text_encoder", "package.module:Class"]),
    "unknown module": ({"model": {"use": "nowhere.at:All"}}, ["model.use", "'nowhere.at:All'", "PYTHONPATH"]),
    "unknown precision": ({"model": {"use": "top_k", "precision": "fp4"}}, ["model.precision", "'fp4'", "fp32"]),
    "bad SQL": ({"source": {"sql": "SELEC 1"}}, ["source.sql", "SELEC 1", "syntax error"]),
    "several statements": ({"source": {"sql": "SELECT 1; DROP TABLE x"}}, ["source.sql", "DROP TABLE x", "one SELECT"]),
    "DDL": ({"source": {"sql": "CREATE TABLE x AS SELECT 1"}}, ["source.sql", "CREATE TABLE x", "one SELECT"]),
    "SQL of nothing in args": (
        {"model": {"use": "top_k", "args": {"items": {"sql": None}}}},
        ["model.args.items.sql", "None", "write one SELECT"],
    ),
    "SQL of a number in args": (
        {"model": {"use": "top_k", "args": {"items": {"sql": 7}}}},
        ["model.args.items.sql", "7", "SELECT"],
    ),
    "bad SQL in args": ({"model": {"use": "top_k", "args": {"items": {"sql": ""}}}}, ["model.args.items.sql", "one SELECT"]),
    "unknown variable": ({"source": {"sql": "SELECT '${dta}'"}}, ["${dta}", "vars", "PRECOMPUTE_VARS__DTA"]),
    "another name": ({"name": "other"}, ["name", "'other'", "views/other.yaml"]),
    "unknown live view": (
        {"source": {"sql": "SELECT * FROM live.numbrs"}},
        ["live.numbrs", "no such view", "did you mean 'numbers'"],
    ),
    "unknown live view in args": (
        {"model": {"use": "top_k", "args": {"items": {"sql": "SELECT * FROM live.nmbers"}}}},
        ["live.nmbers", "did you mean 'numbers'"],
    ),
}


@pytest.mark.parametrize("mistake", VIEW_MISTAKES)
def test_a_mistake_in_a_view_names_file_key_value_and_remedy(make_project: MakeProject, mistake: str) -> None:
    change, parts = VIEW_MISTAKES[mistake]
    message = refusal(make_project, view=change)
    for part in ["views/numbers.yaml", *parts]:
        assert part in message


# ---- mistakes in project.yaml

PROJECT_MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": ({"onlin": "x"}, ["onlin", "did you mean 'online'"]),
    "unknown nested key": ({"serve": {"bnd": "x"}}, ["serve.bnd", "did you mean 'bind'"]),
    "missing root": ({"root": None}, ["root", "missing"]),
    "unknown store": ({"online": "mongodb://x"}, ["online", "mongodb://x", "table:./folder", "redis://"]),
    "store without folder": ({"online": "table:"}, ["online", "table:./folder"]),
    "a root on a network nobody reads": ({"root": "s3://bucket/x"}, ["root", "s3://bucket/x"]),
    "wrong type": ({"memory_mb": "1GB"}, ["memory_mb", "'1GB'", "integer"]),
    "too little memory": ({"memory_mb": 1}, ["memory_mb", "1", "64"]),
    "bad bind": ({"serve": {"bind": "8080"}}, ["serve.bind", "'8080'", "host:port"]),
    "bad admin": ({"serve": {"admin": "metrics"}}, ["serve.admin", "'metrics'", "host:port"]),
    "a host with a port": ({"serve": {"hosts": ["features.internal:80"]}}, ["serve.hosts.0", "features.internal:80"]),
    "no workers": ({"serve": {"workers": 0}}, ["serve.workers", "0", "1"]),
    "a certificate alone": ({"serve": {"tls": {"cert": "x.pem"}}}, ["serve.tls.key", "missing"]),
    "unknown limit": ({"serve": {"limits": {"header_bytes": 1}}}, ["serve.limits.header_bytes", "did you mean 'headers_bytes'"]),
    "no time at all": ({"serve": {"limits": {"idle_time": "0s"}}}, ["serve.limits.idle_time", "0"]),
    "no collector": ({"serve": {"tracing": {"endpoint": "collector:4318"}}}, ["serve.tracing.endpoint", "http://"]),
    "quote in a variable": ({"vars": {"data": "./it's"}}, ["vars.data", "it's", "quote"]),
    "double quote in a variable": ({"vars": {"data": 'x"y'}}, ["vars.data", 'x"y', "quote"]),
    "number as variable": ({"vars": {"data": "./", "year": 2024}}, ["vars.year", "2024", "string"]),
    "unknown view in schedule": ({"schedule": {"numbrs": "0 2 * * *"}}, ["schedule.numbrs", "did you mean 'numbers'"]),
    "bad cron": ({"schedule": {"numbers": "61 * * * *"}}, ["schedule.numbers", "'61 * * * *'", "cron"]),
    "no cron": ({"schedule": {"numbers": "daily"}}, ["schedule.numbers", "'daily'", "five cron fields", "after <view>"]),
    "six fields": ({"schedule": {"numbers": "0 0 2 * * *"}}, ["schedule.numbers", "five cron fields"]),
    "a cron line that never fires": ({"schedule": {"numbers": "0 0 30 2 *"}}, ["schedule.numbers", "never fires"]),
    "number as cron": ({"schedule": {"numbers": 5}}, ["schedule.numbers", "5", "string"]),
    "unknown time zone": (
        {"schedule": {"numbers": "0 2 * * *"}, "timezone": "Mars/Olympus"},
        ["Mars/Olympus", "Europe/Berlin"],
    ),
    "after nobody": ({"schedule": {"numbers": "after ,"}}, ["schedule.numbers", "'after ,'"]),
    "after an unknown view": ({"schedule": {"numbers": "after numbrs"}}, ["schedule.numbers", "numbrs", "not scheduled"]),
    "neither at nor after": ({"schedule": {"numbers": {"retries": 1}}}, ["schedule.numbers", "one of both", "at", "after"]),
    "at and after": ({"schedule": {"numbers": {"at": "0 2 * * *", "after": "b"}}}, ["schedule.numbers", "one of both"]),
    "bad cron, spelled out": ({"schedule": {"numbers": {"at": "61 * * * *"}}}, ["schedule.numbers", "'61 * * * *'", "cron"]),
    "after none, spelled out": ({"schedule": {"numbers": {"after": []}}}, ["schedule.numbers", "names no view"]),
    "after a number": ({"schedule": {"numbers": {"after": 5}}}, ["schedule.numbers.after", "5", "list"]),
    "after an unknown one of several": (
        {"schedule": {"numbers": {"after": ["b", "cc"]}, "b": "0 2 * * *"}},
        ["schedule.numbers", "'after b, cc'", "'cc' is not scheduled"],
    ),
    "unknown option of a schedule": (
        {"schedule": {"numbers": {"at": "0 2 * * *", "catchup": "all"}}},
        ["schedule.numbers.catchup", "unknown key", "did you mean 'catch_up'"],
    ),
    "unknown catch-up": (
        {"schedule": {"numbers": {"at": "0 2 * * *", "catch_up": "lates"}}},
        ["schedule.numbers.catch_up", "'lates'", "latest, all, none", "did you mean 'latest'"],
    ),
    "unknown catch-up for all": ({"runs": {"catch_up": "every"}}, ["runs.catch_up", "'every'", "latest, all, none"]),
    "negative retries": ({"runs": {"retries": -1}}, ["runs.retries", "-1", "greater than or equal to 0"]),
    "retries as text": ({"schedule": {"numbers": {"at": "0 2 * * *", "retries": "3"}}}, ["schedule.numbers.retries", "'3'"]),
    "too many retries": ({"runs": {"retries": 21}}, ["runs.retries", "21", "20"]),
    "no time to run": ({"runs": {"deadline": "0s"}}, ["runs.deadline", "0.0", "greater than 0"]),
    "bad wait": ({"runs": {"retry_after": "1x"}}, ["runs.retry_after", "'1x'", "26h"]),
    "a lease of no time": ({"lease": "1ms"}, ["lease", "0.001", "greater than or equal to 1"]),
    "after itself": ({"schedule": {"numbers": "after numbers"}}, ["schedule", "numbers after numbers", "circle", "cron line"]),
    "after each other": (
        {"schedule": {"numbers": "after b", "b": "after c", "c": "after numbers"}},
        ["schedule", "b after c after numbers after b", "circle"],
    ),
}


@pytest.mark.parametrize("mistake", PROJECT_MISTAKES)
def test_a_mistake_in_the_project_names_file_key_value_and_remedy(make_project: MakeProject, mistake: str) -> None:
    change, parts = PROJECT_MISTAKES[mistake]
    other = {
        "entity": ["id"],
        "source": {"sql": "SELECT 1 AS id"},
        "model": {"use": "top_k"},
        "features": {"a": TEXT},
        "ttl": "1h",
    }
    message = refusal(make_project, project=change, views={"b": other, "c": other})
    for part in ["project.yaml", *parts]:
        assert part in message


def test_all_mistakes_of_a_file_are_told_at_once(make_project: MakeProject) -> None:
    lines = refusal(make_project, view={"ttl": "soon", "tll": 1, "entity": "id"}).splitlines()
    assert len(lines) == 3
    assert all("views/numbers.yaml: " in line for line in lines)


def test_a_password_in_a_refused_url_is_not_repeated(make_project: MakeProject) -> None:
    message = refusal(make_project, environment={"PRECOMPUTE_ONLINE": "redis+sentinel://:hunter2@host:6379/0"})
    assert "online" in message
    assert "hunter2" not in message


# ---- files


@pytest.mark.parametrize(
    ("file", "text", "parts"),
    [
        ("views/numbers.yaml", "ttl: 2h", ["ttl", "twice"]),
        ("views/numbers.yaml", "fallback: {enabled: true, enabled: false}", ["enabled", "twice"]),
        ("project.yaml", "root: ./elsewhere", ["root", "twice"]),
        ("project.yaml", "\tserve: x", ["not valid YAML", "tab|\\t"]),
        ("project.yaml", "serve: {bind: ", ["not valid YAML"]),
        ("project.yaml", "timezone: 2024-13-45", ["not valid YAML|timezone"]),
        ("views/numbers.yaml", "max_rejected: 0b_", ["not valid YAML|max_rejected"]),
        ("views/numbers.yaml", "fallback: {deadline: 26:00}", ["fallback.deadline", "26h"]),
        ("views/numbers.yaml", "args: &a {b: *a}", ["recursive"]),
        ("views/numbers.yaml", "? [a]\n: b", ["not valid YAML"]),
        ("views/numbers.yaml", "1: b", ["1", "string"]),
        ("views/numbers.yaml", "x: !!python/object/apply:os.getpid []", ["not valid YAML"]),
        ("views/numbers.yaml", "x: \0", ["not valid YAML"]),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused(make_project: MakeProject, file: str, text: str, parts: list[str]) -> None:
    project = make_project()
    said = mistake(lambda: appended(project, text, file))
    assert file in said
    for part in parts:
        assert any(choice in said for choice in part.split("|"))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "NoneType|empty"), (b"[1, 2]", "list"), (b"just text", "str"), (b"\xff\xfe\xff", "cannot be read|not valid YAML")],
)
@pytest.mark.parametrize("file", ["project.yaml", "views/numbers.yaml"])
def test_a_file_that_holds_no_keys_is_refused(make_project: MakeProject, file: str, content: bytes, message: str) -> None:
    project = make_project()
    (project.folder / file).write_bytes(content)
    assert re.search(rf"{file}.*({message})", mistake(lambda: Project(project.folder, {})))


def test_a_missing_folder_file_or_view_is_refused(make_project: MakeProject, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no folder '.*/nowhere'"):
        Project(tmp_path / "nowhere", {})
    with pytest.raises(ConfigError, match=r"project\.yaml: no such file"):
        Project(tmp_path, {})
    project = make_project()
    with pytest.raises(ConfigError, match="no folder"):
        Project(project.folder / "project.yaml", {})
    (project.folder / "views" / "numbers.yaml").rename(project.folder / "views" / "numbers.txt")
    with pytest.raises(ConfigError, match=r"no view there; add views/<name>\.yaml"):
        Project(project.folder, {})
    with pytest.raises(ConfigError, match=r"no view 'numbrs'.*did you mean 'numbers'.*there are: numbers"):
        make_project().view("numbrs")


def test_on_is_a_key_and_no_truth_value(make_project: MakeProject) -> None:
    """YAML 1.1 reads the key of ``index: {on: vector}`` as True."""
    project = appended(make_project(), "index: {on: vector, metric: dot}")
    assert project.view("numbers").feature_view().index == IndexSpec("vector", "dot", 0.95)


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "y", "n", "On", "NO"])
def test_only_true_and_false_are_truth_values(make_project: MakeProject, word: str) -> None:
    project = make_project()
    (project.folder / "project.yaml").write_text(f"root: ./var\nonline: table:./online\nvars: {{data: ./, country: {word}}}\n")
    assert Project(project.folder, {}).settings.vars["country"] == word


def test_variables_stand_for_their_values_everywhere(make_project: MakeProject) -> None:
    project = make_project(
        project={"vars": {"data": "./", "x": "y", "up": "../up"}},
        view={"model": {"use": "top_k", "args": {"a": ["${x}", {"b": "${x}${x}"}], "c": 3, "d": "$x ${ x }"}}, "ttl": "1h"},
    )
    view = project.view("numbers")
    assert view.model.args == {"a": ["y", {"b": "yy"}], "c": 3, "d": "$x ${ x }"}
    assert view.source.sql == "SELECT * FROM read_parquet('.//data.parquet')"  # as it is written, wherever the project lies


def test_relative_paths_start_from_the_project(
    make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_project([(1, 1.0)], project={"root": "var", "online": "table:../online", "vars": {"data": "./"}}).folder
    seen = []
    for cwd, given in ((tmp_path, "project"), (folder, "."), (folder / "views", ".."), (Path("/"), folder)):
        monkeypatch.chdir(cwd)
        project = Project(given, {})
        seen.append((project.root.resolve(), Path(project.online.removeprefix("table:")).resolve(), project.home.resolve()))
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
                "b": {"at": "0 3 * * *", "catch_up": "all", "retries": 0, "retry_after": "5s", "deadline": "90m"},
                "c": "after numbers, b",
                "d": {"after": ["numbers", "b"], "catch_up": "none"},
                "e": {"after": "c"},
            },
            "runs": {"retries": 5, "deadline": "2h"},
        },
        views=dict.fromkeys("bcde", other),
    )
    usual = {"timezone": "Europe/Berlin", "catch_up": "latest", "retries": 5, "retry_after_s": 60.0, "deadline_s": 7200.0}
    assert {name: asdict(schedule) for name, schedule in project.schedules().items()} == {
        "numbers": usual | {"when": "0 2 * * *", "cron": "0 2 * * *", "parents": ()},
        "b": usual
        | {"when": "0 3 * * *", "cron": "0 3 * * *", "parents": ()}
        | {"catch_up": "all", "retries": 0, "retry_after_s": 5.0, "deadline_s": 5400.0},
        "c": usual | {"when": "after numbers, b", "cron": None, "parents": ("numbers", "b")},
        "d": usual | {"when": "after numbers, b", "cron": None, "parents": ("numbers", "b"), "catch_up": "none"},
        "e": usual | {"when": "after c", "cron": None, "parents": ("c",)},
    }


def test_what_is_said_nowhere_about_runs_has_a_default(make_project: MakeProject) -> None:
    project = make_project(project={"schedule": {"numbers": "0 2 * * *"}})
    assert asdict(project.schedules()["numbers"]) == {
        "when": "0 2 * * *",
        "cron": "0 2 * * *",
        "timezone": "UTC",
        "parents": (),
        "catch_up": "latest",
        "retries": 3,
        "retry_after_s": 60.0,
        "deadline_s": 21600.0,
    }
    assert project.settings.lease == 60.0
    assert make_project(project={"schedule": None}).schedules() == {}


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
        ("ONLINE", "redis://:pw@host:6379/0", "settings.online", "redis://:pw@host:6379/0"),
        ("SERVE__BIND", "unix:./api.sock", "settings.serve.bind", "unix:./api.sock"),
        ("SERVE__LIMITS__IDLE_TIME", "1m", "settings.serve.limits.idle_time", 60.0),
        ("SERVE__HOSTS", "[Features.internal, x]", "settings.serve.hosts", ["features.internal", "x"]),
        ("SERVE__TLS", "{cert: c.pem, key: k.pem}", "settings.serve.tls.client_ca", None),
        ("SERVE", "{bind: 'localhost:1'}", "settings.serve.bind", "localhost:1"),
        ("MEMORY_MB", "64", "settings.memory_mb", 64),
        ("VARS__COUNTRY", "no", "settings.vars.country", "no"),
        ("VARS__YEAR", "2024", "settings.vars.year", "2024"),
        ("VARS__DAY", "2024-02-30", "settings.vars.day", "2024-02-30"),
        ("VARS__EMPTY", "", "settings.vars.empty", ""),
        ("VARS__COLON", "a: b: c", "settings.vars.colon", "a: b: c"),
        ("SCHEDULE__NUMBERS", "0 2 * * *", "settings.schedule.numbers.at", "0 2 * * *"),
        ("SCHEDULE__NUMBERS", "*/5 * * * *", "settings.schedule.numbers.at", "*/5 * * * *"),
        ("RUNS__CATCH_UP", "all", "settings.runs.catch_up", "all"),
        ("RUNS__RETRY_AFTER", "2m", "settings.runs.retry_after", 120.0),
        ("LEASE", "5s", "settings.lease", 5.0),
        ("VIEWS__NUMBERS__TTL", "2h", "views.numbers.ttl", 7200.0),
        ("VIEWS__NUMBERS__FALLBACK__ENABLED", "true", "views.numbers.fallback.enabled", True),
        ("VIEWS__NUMBERS__MODEL__ARGS__DIM", "7", "views.numbers.model.args.dim", 7),
        ("VIEWS__NUMBERS__MODEL__ARGS__WORD", "off", "views.numbers.model.args.word", "off"),
        ("VIEWS__NUMBERS__INDEX", "{on: vector}", "views.numbers.index.on", "vector"),
        ("VIEWS__NUMBERS__INDEX__ON", "vector", "views.numbers.index.on", "vector"),
        ("VIEWS__NUMBERS__SOURCE__SQL", "SELECT '${data}' AS id", "views.numbers.source.sql", "SELECT './' AS id"),
    ],
)
def test_every_value_can_come_from_the_environment(
    make_project: MakeProject, variable: str, value: str, path: str, read: Any
) -> None:
    project = make_project(environment={f"PRECOMPUTE_{variable}": value, "OTHER_ONLINE": "x", "PRECOMPUTE_CONFIG": "x"})
    found: Any = project
    for name in path.split("."):
        found = found[name] if isinstance(found, Mapping) else getattr(found, name)
    assert found == read


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"PRECOMPUTE_ONLIN": "x"}, ["onlin", "did you mean 'online'"]),
        ({"PRECOMPUTE_SERVE__BND": "x"}, ["serve.bnd", "did you mean 'bind'"]),
        ({"PRECOMPUTE_": "x"}, ["unknown key"]),
        ({"PRECOMPUTE_VIEWS__NUMBRS__TTL": "2h"}, ["NUMBRS", "did you mean 'numbers'"]),
        ({"PRECOMPUTE_VIEWS__NUMBERS__TLL": "2h"}, ["tll", "did you mean 'ttl'"]),
        ({"PRECOMPUTE_VIEWS__NUMBERS__TTL": "soon"}, ["ttl", "'soon'"]),
        ({"PRECOMPUTE_VIEWS__NUMBERS__NAME": "other"}, ["name", "'other'"]),
        ({"PRECOMPUTE_VIEWS__NUMBERS": "x"}, ["NUMBERS|numbers"]),
        ({"PRECOMPUTE_VIEWS": "x"}, ["VIEWS|views"]),
        ({"PRECOMPUTE_SERVE": "x", "PRECOMPUTE_SERVE__BIND": "localhost:1"}, ["SERVE|serve"]),
        ({"PRECOMPUTE_SERVE": "x"}, ["serve", "'x'"]),
        ({"PRECOMPUTE_MEMORY_MB": "much"}, ["memory_mb", "'much'"]),
        ({"PRECOMPUTE_VARS__DATA": "./it's"}, ["data", "quote"]),
    ],
)
def test_a_mistake_in_the_environment_is_refused(
    make_project: MakeProject, environment: dict[str, str], parts: list[str]
) -> None:
    message = refusal(make_project, environment=environment)
    for part in parts:
        assert any(choice in message for choice in part.split("|"))


def test_the_environment_is_the_processes_by_default(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_project().folder
    monkeypatch.setenv("PRECOMPUTE_VIEWS__NUMBERS__TTL", "3h")
    assert Project(folder).view("numbers").ttl == 3 * 3600


# ---- what it says


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("100ms", 0.1),
        ("30s", 30),
        ("15m", 900),
        ("15min", 900),
        ("26h", 93600),
        ("7d", 604800),
        ("2w", 1209600),
        (" 1.5 h ", 5400),
        ("0s", 0),
        (90, 90),
        (0.25, 0.25),
    ],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "h", "1", "1 year", "-1h", "1h30m", "1H", "1e3s", True, None, float("nan"), -1])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ValueError, match="26h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("when", "views"),
    [("after a", ["a"]), ("after a, b ,c", ["a", "b", "c"]), ("0 2 * * *", None), ("afternoon", None), ("after", None)],
)
def test_after(when: str, views: list[str] | None) -> None:
    assert after(when) == views


def test_a_view_becomes_a_feature_view(make_project: MakeProject) -> None:
    project = make_project()
    definition = yaml.safe_load((project.folder / "views" / "numbers.yaml").read_text())
    definition["features"] = {"b": {"dtype": "float32", "dim": 3}, "a": {"dtype": "string", "max_items": 2}}
    (project.folder / "views" / "numbers.yaml").write_text(yaml.safe_dump(definition, sort_keys=False))
    feature_view = Project(project.folder, {}).view("numbers").feature_view()
    assert feature_view.features == (Feature("b", "float32", dim=3), Feature("a", "string", max_items=2))  # in the file's order
    assert (feature_view.entity, feature_view.ttl_s, feature_view.stale_for_s) == (("id",), 3600.0, 86400.0)
    assert feature_view.definition.model == ModelUse("tests.arithmetic:Doubler", {}, "auto", "auto")


def test_inputs_are_the_views_that_source_and_arguments_read(make_project: MakeProject) -> None:
    project = make_project(
        view={
            "source": {"sql": "SELECT * FROM live.b JOIN live.numbers USING (id)"},
            "model": {"use": "top_k", "args": {"items": {"sql": "SELECT * FROM live.c"}, "k": 3, "x": {"sql": "y", "z": 1}}},
        },
        views={
            name: {
                "entity": ["id"],
                "source": {"sql": "SELECT 1 AS id"},
                "model": {"use": "top_k"},
                "features": {"a": TEXT},
                "ttl": 1,
            }
            for name in ("b", "c")
        },
    )
    assert project.view("numbers").inputs() == ["b", "c", "numbers"]


def structure(schema: Mapping[str, Any], data: Any, root: Mapping[str, Any], where: str) -> None:
    """``data`` holds only keys that the schema knows, and every one it requires."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    for choice in schema.get("anyOf", []):
        if "$ref" in choice and isinstance(data, dict):
            return structure(choice, data, root, where)
    if "properties" in schema:
        assert isinstance(data, dict), where
        assert schema["additionalProperties"] is False, where
        assert set(schema.get("required", [])) <= set(data) <= set(schema["properties"]), where
        for key, value in data.items():
            structure(schema["properties"][key], value, root, f"{where}.{key}")
    elif isinstance(schema.get("additionalProperties"), dict):
        for key, value in data.items():
            structure(schema["additionalProperties"], value, root, f"{where}.{key}")
    return None


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


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-02-30", "31.01.2026", None, 2026, "0001-01-01T00:00+05:00", "9999-12-31T23:00-05:00"]
)
def test_what_is_no_time(text: Any) -> None:
    with pytest.raises(ValueError, match="write a date or time, such as 2026-01-31"):
        parse_time(text)


def test_gates_retention_and_renewal_have_defaults(make_project: MakeProject) -> None:
    project = make_project()
    view = project.view("numbers")
    assert (view.gates, view.renew_unchanged, view.partition) == (GatesConfig(), True, None)
    assert view.gates.model_dump() == {
        "rows": 0.2,
        "coverage": "auto",
        "rejected": "auto",
        "contract": True,
        "empty": 0.5,
        "constant": 0.999,
        "shift": 0.15,
        "mass": 0.05,
        "agreement": 0.5,
        "finite": 0.0,
        "zero": 0.01,
        "norm": 0.5,
        "duplicates": 0.5,
        "drift": 0.8,
        "moved": 0.2,
        "moved_by": 0.45,
        "packed": 0.95,
        "rolled_back": 0.1,
        "parity": 0.05,
    }
    assert (project.settings.retention, project.settings.notify) == (RetentionConfig(keep=3, grace=86400.0), [])


def test_gates_retention_and_renewal_can_be_set(make_project: MakeProject) -> None:
    gates = {"rows": None, "drift": -1, "norm": 3}
    project = make_project(
        view={"gates": gates, "renew_unchanged": False},
        project={"retention": {"keep": 1, "grace": "2h"}, "notify": ["mail", "-s", "precompute"]},
        environment={"PRECOMPUTE_VIEWS__NUMBERS__GATES__DRIFT": "0.5", "PRECOMPUTE_RETENTION__KEEP": "2"},
    )
    view = project.view("numbers")
    assert (view.gates, view.renew_unchanged) == (GatesConfig(rows=None, drift=0.5, norm=3.0), False)
    assert project.settings.retention == RetentionConfig(keep=2, grace=7200.0)
    assert project.settings.notify == ["mail", "-s", "precompute"]


@pytest.mark.parametrize(
    ("view", "parts"),
    [
        ({"gates": {"drfit": 0.5}}, ["gates.drfit", "unknown key", "did you mean 'drift'"]),
        ({"gates": {"rows": -0.1}}, ["gates.rows", "-0.1", "greater than or equal to 0"]),
        ({"gates": {"zero": 1.5}}, ["gates.zero", "1.5", "less than or equal to 1"]),
        ({"gates": {"drift": "off"}}, ["gates.drift", "'off'", "number"]),
        ({"gates": {"drift": float("nan")}}, ["gates.drift"]),
        ({"gates": {"norm": float("inf")}}, ["gates.norm"]),
        ({"renew_unchanged": "yes"}, ["renew_unchanged", "'yes'", "boolean"]),
    ],
)
def test_mistakes_in_gates_and_renewal(make_project: MakeProject, view: dict[str, Any], parts: list[str]) -> None:
    message = refusal(make_project, view=view)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("project", "parts"),
    [
        ({"retention": {"keep": 0}}, ["retention.keep", "0", "greater than or equal to 1"]),
        ({"retention": {"grace": "soon"}}, ["retention.grace", "'soon'", "number with a unit"]),
        ({"retention": {"days": 3}}, ["retention.days", "unknown key"]),
        ({"notify": "mail root"}, ["notify", "'mail root'", "list"]),
        ({"lease": 0}, ["lease", "greater than or equal to 1"]),
    ],
)
def test_mistakes_in_retention_and_notify(make_project: MakeProject, project: dict[str, Any], parts: list[str]) -> None:
    message = refusal(make_project, project=project)
    for part in parts:
        assert part in message


def test_the_json_schemas_know_every_key_and_fit_the_shipped_files() -> None:
    schemas = json.loads(json.dumps(json_schemas()))
    assert set(schemas["project"]["properties"]) == set(ProjectConfig.model_fields)
    assert set(schemas["view"]["properties"]) == set(ViewConfig.model_fields)
    files = [SHIPPED / "project.yaml", *sorted((SHIPPED / "views").glob("*.yaml"))]
    assert len(files) == 7
    for file in files:
        kind = "project" if file.name == "project.yaml" else "view"
        text = file.read_text().replace("{on: ", "{'on': ")  # PyYAML is YAML 1.1, editors are not
        structure(schemas[kind], yaml.safe_load(text), schemas[kind], file.name)


def test_the_shipped_project_is_valid() -> None:
    project = Project(SHIPPED, {})
    assert set(project.settings.schedule) == set(project.views)
    assert project.view("user_recommendations").inputs() == ["item_vector", "user_vector"]


# ---- the command line


@pytest.mark.parametrize(
    "environment",
    [{"PRECOMPUTE_VIEWS": "x"}, {"PRECOMPUTE_SERVE": "x", "PRECOMPUTE_SERVE__BIND": "y"}, {"PRECOMPUTE_VARS__D": "2024-13-45"}],
)
def test_no_variable_makes_the_command_line_raise(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    folder = make_project().folder
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["-c", str(folder), "status"]) in (0, 1, 2)  # 1: the view is not published


def test_mistakes_end_with_status_2_and_a_message_without_a_traceback(make_project: MakeProject, tmp_path: Path) -> None:
    folder = make_project().folder
    mistakes = {
        "missing": None,
        "unknown_key": "ttl: 1h\nttll: 2h",
        "not_yaml": "a: [",
        "bad_date": "ttl: 2024-13-45",
    }
    processes = {}
    for name, text in mistakes.items():
        copy = tmp_path / name
        if text is not None:
            (copy / "views").mkdir(parents=True)
            (copy / "project.yaml").write_text((folder / "project.yaml").read_text())
            (copy / "views" / "numbers.yaml").write_text(text)
        command = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(copy), "run", "numbers"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECOMPUTE_")}
        processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    for name, process in processes.items():
        out, err = process.communicate()
        assert (process.returncode, out) == (2, ""), name
        assert err.startswith("precompute: "), err
        assert "Traceback" not in err, name
        assert str(tmp_path / name) in err
