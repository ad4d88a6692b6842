"""Notify: what the operator's command receives, and that whatever it does, the run's outcome stays
what it was."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.run import report as notify_module
from precompute.jobs.run.report import notify
from precompute.store.errors import GateError, RejectedError, SourceError
from precompute.store.offline.runs import Report
from tests.fixtures import MakeProject
from tests.scene import Scene

NAMES = ("VIEW", "STATUS", "COMMAND", "RUN", "SNAPSHOT", "EPOCH", "ERROR")


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def writing(received: Path) -> list[str]:
    """A command that appends what it receives to a file, as a line of JSON."""
    return python(
        "import json, os\n"
        f"with open({str(received)!r}, 'a') as file:\n"
        f"    file.write(json.dumps({{n: os.environ['NOTIFY_' + n] for n in {NAMES!r}}}) + '\\n')"
    )


def lines(received: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in received.read_text().splitlines()]
        if received.exists()
        else []
    )


def project_of(
    make_project: MakeProject, command: list[str], x: float | None = 1.0, **view: Any
) -> Scene:
    return make_project(
        [(1, x), (2, 2.0)], project={"notify": command}, view={"gates": {"rejected": 0.0}} | view
    )


def test_a_publishing_a_refusal_and_a_failure_are_told(
    make_project: MakeProject, tmp_path: Path
) -> None:
    received = tmp_path / "received"
    project = project_of(make_project, writing(received))
    report = project.run()
    assert lines(received) == [
        {
            "VIEW": "numbers",
            "STATUS": "published",
            "COMMAND": "run",
            "RUN": report.run,
            "SNAPSHOT": "1",
            "EPOCH": "1",
            "ERROR": "",
        }
    ]
    project.run()  # nothing to do, nothing to tell
    assert len(lines(received)) == 1
    project = project_of(make_project, writing(received), x=None)
    with pytest.raises(GateError) as refused:
        project.run()
    line = lines(received)[1]
    assert (line["STATUS"], line["SNAPSHOT"], line["ERROR"]) == ("refused", "2", str(refused.value))
    project = project_of(make_project, writing(received), x=None, max_rejected=0.0)
    with pytest.raises(RejectedError):
        project.run(retry_rejected=True)
    (project.folder / "data.parquet").unlink()
    with pytest.raises(SourceError):
        project.run()
    assert [line["STATUS"] for line in lines(received)] == [
        "published",
        "refused",
        "rejected",
        "failed",
    ]


def test_a_materialize_is_told_only_when_it_fails(
    make_project: MakeProject, tmp_path: Path
) -> None:
    received = tmp_path / "received"
    project = project_of(make_project, writing(received))
    project.materialize()
    assert lines(received) == []
    project.publish()
    assert [line["COMMAND"] for line in lines(received)] == ["publish"]


FAILING = {
    "no such command": ["/no/such/command"],
    "another status": python("import sys; print('gone wrong', file=sys.stderr); sys.exit(3)"),
    "not UTF-8": python("import sys; sys.stdout.buffer.write(bytes(range(128, 256))); sys.exit(1)"),
    "reads": python("import sys; sys.stdin.read()"),
}


@pytest.mark.parametrize("how", FAILING)
def test_a_command_that_fails_does_not_fail_the_run(
    make_project: MakeProject, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    project = project_of(make_project, FAILING[how])
    report = project.run()
    assert (report.status, report.error) == ("published", None)
    warned = [
        r.getMessage()
        for r in caplog.records
        if r.name == "precompute.jobs.run.report" and r.levelno == logging.WARNING
    ]
    assert len(warned) == (how != "reads")
    if how == "another status":
        assert "status 3: gone wrong" in warned[0]


def test_a_command_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify_module, "TIMEOUT_S", 0.2)
    notify(python("import time; time.sleep(100)"), Report("id", "numbers", "run"), Path())
    assert "timed out after 0.2 seconds" in caplog.text


@pytest.mark.parametrize("error", ["a\0b", "x" * 200_000, "é – \ud800", "a\nb"])
def test_any_error_can_be_told(tmp_path: Path, error: str) -> None:
    received = tmp_path / "received"
    notify(
        writing(received), Report("id", "numbers", "run", status="failed", error=error), tmp_path
    )
    (line,) = lines(received)
    assert (line["VIEW"], line["STATUS"], line["ERROR"][:1]) == ("numbers", "failed", error[:1])


def test_its_output_is_not_the_reports(
    make_project: MakeProject, capfd: pytest.CaptureFixture[str]
) -> None:
    project = project_of(make_project, python("print('hello')"))
    assert project.cli("run", "numbers", "--json") == 0
    assert json.loads(capfd.readouterr().out)["status"] == "published"
