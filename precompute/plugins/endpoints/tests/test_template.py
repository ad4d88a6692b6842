"""The view that init makes of an endpoint's template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from precompute.jobs.cli import main
from precompute.store.doors import COMMANDS

if not COMMANDS.is_here("init"):
    pytest.skip("init is not installed here", allow_module_level=True)


def test_an_endpoint_that_is_not_there_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "p"), "--template", "chat_endpoint"]) == 0
    assert "url and model in the view are examples" in capsys.readouterr().out
    view = tmp_path / "p" / "views" / "book_label.yaml"
    view.write_text(
        view.read_text()
        .replace("localhost:11434/v1  ", "127.0.0.1:1/v1")
        .replace("limits: {", "limits: {tries: 1, ")
    )
    assert main(["-c", str(tmp_path / "p"), "validate", "--json"]) == 1
    bad = [check for check in json.loads(capsys.readouterr().out)["checks"] if not check["ok"]]
    assert [check["check"] for check in bad] == ["model"]
    assert "no answer from http://127.0.0.1:1/v1" in bad[0]["found"]
