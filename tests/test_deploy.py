"""The files of examples/deploy: their commands, settings, paths and probes are ours, and what
orchestrators call does what it says."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from precompute.jobs.cli import _parser
from precompute.jobs.config.project import Project
from precompute.store.http.openapi import openapi_document
from tests import REPOSITORY
from tests.fixtures import MakeProject

DEPLOY = REPOSITORY / "examples/deploy"
FILES = sorted(
    path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts
)
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
ENDED_BADLY = {
    "model": {"use": "tests.models:Doubler", "args": {"nan_on": 2.0}},
    "max_rejected": 0.0,
}


def commands() -> Iterator[list[str]]:
    """Every command line of ours in these files."""
    yield from ([COMPOSE["services"][name]["command"]] for name in ("api", "scheduler"))
    for kind in KUBERNETES:
        spec = kind["spec"].get("jobTemplate", kind)["spec"].get("template")
        yield from (
            container["args"]
            for container in (spec or {"spec": {"containers": []}})["spec"]["containers"]
        )
    for path in FILES:
        if path.suffix not in (".yaml", ".py") and path.name != "logrotate":
            lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
            for line in lines:
                yield from (
                    shlex.split(found)[1:]
                    for found in re.findall(
                        r"\bprecompute (?!run_)[a-z][\w %-]*", line.split("Description=")[0]
                    )
                )


def test_every_command_in_them_is_one() -> None:
    found = [command for command in commands() if command]
    assert {command[0] for command in found} == {"serve", "schedule", "run", "gc", "status"}
    for command in found:
        _parser().parse_args([word.replace("%i", "view") for word in command])


def test_every_setting_and_every_file_that_they_name_is_there(make_project: MakeProject) -> None:
    texts = {path: path.read_text() for path in FILES}
    named = set().union(*(re.findall(r"\bPRECOMPUTE_[A-Z_]+", text) for text in texts.values()))
    settings = {
        "ONLINE": "table:/data/online",
        "ROOT": "/data/root",
        "SERVE__BIND": "0.0.0.0:8080",
        "SERVE__TOKENS": "/project/tokens",
    }
    assert named == {f"PRECOMPUTE_{name}" for name in (*settings, "CONFIG", "LOG")}
    project = Project(
        make_project([]).home, {f"PRECOMPUTE_{name}": value for name, value in settings.items()}
    )
    assert (str(project.root), project.online, project.settings.serve.bind) == (
        "/data/root",
        settings["ONLINE"],
        "0.0.0.0:8080",
    )
    mounted = [
        mount.split(":")[0]
        for service in COMPOSE["services"].values()
        for mount in service.get("volumes", ())
        if mount[0] == "."
    ]
    copied = [
        line[1:]
        for line in texts[DEPLOY / "Dockerfile.dockerignore"].splitlines()
        if line.startswith("!")
    ]
    assert [path for path in mounted if not (DEPLOY / path).exists()] == []
    assert [path for path in copied if not (REPOSITORY / path).exists()] == []


def test_probes_ask_for_routes_that_need_no_token() -> None:
    container = next(kind for kind in KUBERNETES if kind["kind"] == "Deployment")["spec"][
        "template"
    ]["spec"]["containers"][0]
    asked = {
        container[probe]["httpGet"]["path"]
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
    }
    assert asked == {"/livez", "/readyz"} <= set(openapi_document()["paths"])
    assert "8080/livez" in (DEPLOY / "Dockerfile").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_in_the_units() -> None:
    units = [str(path) for path in FILES if path.parent.name == "systemd"]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if "is not executable" not in line] == []


@pytest.fixture
def deploy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules as they lie side by side, and our command on the PATH."""
    monkeypatch.syspath_prepend(DEPLOY)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    yield
    for name in ("precompute_run", "airflow_operator", "dagster_assets"):
        sys.modules.pop(name, None)


def test_a_run_from_an_orchestrator_reports_or_says_whether_to_try_again(
    make_project: MakeProject, deploy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("precompute_run")
    project, log = make_project([(1, 1.0), (2, 2.0)]), list[str]()
    assert module.run_view(str(project.home), "numbers", log=log.append)["status"] == "published"
    assert "materialize numbers: 2 rows" in log
    make_project([(1, 1.0), (3, 2.0)], view=ENDED_BADLY)
    for view, message in (
        ("numbers", "exit status 3: .*rejected"),
        ("nothing", "exit status 2: no view 'nothing'"),
    ):
        with pytest.raises(module.Refused, match=message):
            module.run_view(str(project.home), view, log=log.append)
    monkeypatch.setenv("PRECOMPUTE_ROOT", "/dev/null/root")
    with pytest.raises(module.Failed, match="exit status 1: "):
        module.run_view(str(project.home), "numbers", log=log.append)
    # more than a pipe holds
    command = project.folder / "precompute"
    command.write_text(f"#!{sys.executable}\nprint('[' + '0, ' * 100_000 + '1]')\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(project.folder))
    assert len(module.run_view(str(project.home), "numbers")) == 100_001


def test_airflow_and_dagster_call_it(
    make_project: MakeProject, deploy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By stand-ins of what is imported from them; the modules were tried with Airflow 3.3 and
    Dagster 1.13 themselves."""

    class Operator:
        def __init__(self, task_id: str) -> None:
            self.log = SimpleNamespace(info=lambda line: None)

    class Stop(Exception):
        def __init__(self, message: str, allow_retries: bool = True) -> None:
            super().__init__(message)
            self.allow_retries = allow_retries

    def stand_in(name: str, **members: Any) -> None:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__dict__.update(members)

    stand_in("airflow")
    stand_in("airflow.sdk", BaseOperator=Operator)
    stand_in("airflow.sdk.exceptions", AirflowFailException=Stop)
    stand_in(
        "dagster",
        asset=lambda **options: lambda function: SimpleNamespace(function=function, **options),
        Failure=Stop,
        MaterializeResult=SimpleNamespace,
        AssetsDefinition=SimpleNamespace,
        AssetExecutionContext=SimpleNamespace,
    )
    home = str(make_project([(1, 1.0)]).home)
    task = importlib.import_module("airflow_operator").PrecomputeRun(
        task_id="t", config=home, view="numbers"
    )
    assets = importlib.import_module("dagster_assets").view_assets(
        home, {"numbers": [], "top_k": ["numbers"]}
    )
    context = SimpleNamespace(log=SimpleNamespace(info=lambda line: None))
    assert task.execute({})["status"] == "published"
    assert [(asset.name, asset.deps) for asset in assets] == [
        ("numbers", []),
        ("top_k", ["numbers"]),
    ]
    assert assets[0].function(context).metadata["precompute/source"] == 1
    make_project([(2, 2.0)], view=ENDED_BADLY)
    with pytest.raises(Stop, match="exit status 3") as stopped:
        assets[0].function(context)
    assert not stopped.value.allow_retries


def test_a_backup_that_is_copied_while_runs_go_on_is_restored(
    make_project: MakeProject, tmp_path: Path
) -> None:
    """As docs/deploy.md says: pointers first, all else after them, and the online store from the
    copy."""
    project, copy = make_project([(1, 1.0), (2, 2.0)]), tmp_path / "copy"
    project.cli("run", "numbers")
    notes = [
        path.relative_to(project.root)
        for path in project.root.rglob("notes/**/*")
        if path.is_file()
    ]
    for path in notes:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(project.root / path, copy / path)
    make_project([(1, 10.0), (2, 2.0)])
    project.cli("run", "numbers")
    for path in project.root.rglob("*"):
        at = path.relative_to(project.root)
        if path.is_file() and "notes" not in at.parts and "online" not in at.parts:
            (copy / at).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy / at)
    shutil.rmtree(project.root)
    shutil.copytree(copy, project.root)
    assert project.cli("publish", "numbers", "--reload") == 0
    assert project.cli("verify", "numbers") == 0
    with contextlib.closing(project.open_lookup()) as lookup:
        assert sorted(lookup.get("numbers", ["1", "2"]).column("double").to_pylist()) == [4.0, 20.0]
