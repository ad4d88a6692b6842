"""What all commands have in common: the project is found, ``-c`` stands anywhere, every refusal is
a JSON document too, and a shell completes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from precompute.jobs.cli import _parser, main
from precompute.jobs.commands.setup import SHELLS
from tests import REPOSITORY
from tests.conftest import MakeProject

Captured = pytest.CaptureFixture[str]
ROWS = [(1, 1.0), (2, 2.0)]


@pytest.fixture(autouse=True)
def _no_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PRECOMPUTE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_nearest_project_is_found(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    project = make_project(ROWS)
    assert main(["status"]) == 2
    assert "which project? There is no project.yaml here or above" in capsys.readouterr().err
    for folder in (project.folder, project.folder / "views", project.folder / "deep" / "er"):
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        assert main(["run", "numbers"]) == 0
        assert main(["lookup", "numbers", "1"]) == 0
    # what is named comes first, and the environment before what is found
    monkeypatch.setenv("PRECOMPUTE_CONFIG", "nowhere")
    assert main(["status"]) == 2
    assert main(["-c", str(project.folder), "status"]) == 0
    assert project.numbers() == [1]


def test_a_project_above_that_is_anothers_is_not_run(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    project = make_project(ROWS)
    monkeypatch.chdir(project.folder / "views")
    if os.geteuid() == 0:
        os.chown(project.folder / "project.yaml", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert main(["run", "numbers"]) == 2
    assert (
        f"project.yaml belongs to another user: if it is the one, name it, -c {project.folder}"
        in capsys.readouterr().err
    )
    # where one stands, one is meant to
    monkeypatch.chdir(project.folder)
    assert main(["run", "numbers"]) == 0


def test_the_folder_stands_before_or_after_the_command(make_project: MakeProject) -> None:
    folder = str(make_project(ROWS).folder)
    for command in (
        ["-c", folder, "run", "numbers"],
        ["run", "-c", folder, "numbers"],
        ["status", "--config", folder],
    ):
        assert main(command) == 0
    # the last one counts
    assert main(["-c", "nowhere", "status", "-c", folder]) == 0


REFUSALS = [
    (["run", "numbrs"], 2, "ConfigError", "did you mean 'numbers'"),
    (
        ["lookup", "numbers", "1"],
        1,
        "RequestError|OnlineStoreError|SnapshotError|ConfigError",
        "precompute run numbers",
    ),
    (["search", "numbers"], 2, "BadUsage", "--key --text is required"),
    (["profile", "numbers", "--rows", "0"], 2, "ConfigError", "--rows: 0: at least 1"),
    (["tune", "numbers", "--within", "soon"], 2, "ConfigError", "--within: 'soon'"),
    (["pin", "numbers"], 2, "ConfigError", "never published"),
    (["token", "me"], 2, "ConfigError", "serve.tokens"),
    (["serve", "--workers", "0"], 2, "ConfigError", "--workers"),
    (["new", "view", "numbers"], 2, "ConfigError", "is there"),
    (["explain", "numbers", ""], 1, "", ""),
    (["nonsense"], 2, "BadUsage", "no command 'nonsense' (there are: init, new, "),
    (["rnu"], 2, "BadUsage", "no command 'rnu'; did you mean 'run'?"),
    (["run", "numbers", "--ful"], 2, "BadUsage", "no option '--ful'; did you mean '--full'?"),
    (
        ["search", "numbers", "--texxt=a b"],
        2,
        "BadUsage",
        "no option '--texxt'; did you mean '--text'?",
    ),
    (["--json", "status"], 2, "BadUsage", "no option '--json': it stands after COMMAND"),
    (["token", "me", "--scope", "reed"], 2, "BadUsage", "no scope 'reed'; did you mean 'read'?"),
    (["diff"], 2, "ConfigError", "view 'numbers': nothing of it is live"),
    (["log"], 2, "ConfigError", "no view has a run yet"),
    (["publish", "numbers", "--snapshot", "x"], 2, "BadUsage", "invalid int"),
]


@pytest.mark.parametrize(
    ("command", "code", "kind", "message"),
    REFUSALS,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_refusal_is_one_json_document(
    make_project: MakeProject,
    capsys: Captured,
    command: list[str],
    code: int,
    kind: str,
    message: str,
) -> None:
    folder = make_project(ROWS).folder
    try:
        ended = main(["-c", str(folder), *command, "--json"])
    except SystemExit as exc:
        ended = exc.code  # type: ignore[assignment]
    out = capsys.readouterr().out
    assert ended == code
    assert out.count("\n") == 1
    document = json.loads(out)
    if "error" in document and isinstance(document["error"], dict):
        assert document["exit_status"] == code
        assert document["error"]["kind"] in kind.split("|") or not kind
        assert message in document["error"]["message"]
    else:
        # a run that failed has its report
        assert message in document["error"]


# ---- completion


def test_words_are_completed(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(make_project(ROWS, views={"letters": {}}).folder)
    named = next(
        action.choices for action in _parser()._actions if isinstance(action.choices, dict)
    )
    for words, found in (
        ([""], list(named)),
        (["pro"], ["profile"]),
        (["run", "num"], ["numbers"]),
        (["run", "numbers", ""], ["letters", "numbers"]),
        (["run", "--full", "l"], ["letters"]),
        (["run", "--re"], ["--retry-rejected"]),
        (["validate", "numbers", "l"], ["letters"]),
        (["lookup", "numbers", "1", ""], []),
        (["-c", "elsewhere", "run", ""], []),
        (["run", "-c", ""], []),
        (["backfill", "numbers", "--reprocess", ""], ["missing", "failed", "stale", "all"]),
        (["completion", "z"], ["zsh"]),
        (["--v"], ["--version"]),
        (["nonsense", "x"], []),
    ):
        assert main(["completion", "bash", "--", *words]) == 0
        assert capsys.readouterr().out.split() == found, words


@pytest.mark.parametrize("shell", SHELLS)
def test_what_a_shell_reads_completes_in_it(
    make_project: MakeProject, capsys: Captured, tmp_path: Path, shell: str
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "precompute completion " + shell in script
    if shell != "bash" or shutil.which("bash") is None:
        return
    command = tmp_path / "bin" / "precompute"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m precompute.jobs.cli "$@"\n')
    command.chmod(0o755)
    typed = f'{script}\nCOMP_WORDS=(precompute run num); COMP_CWORD=2; _precompute; echo "${{COMPREPLY[@]}}"'
    environment = os.environ | {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{REPOSITORY}",
    }
    done = subprocess.run(
        ["bash", "-c", typed],
        cwd=make_project(ROWS).folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "numbers\n"
