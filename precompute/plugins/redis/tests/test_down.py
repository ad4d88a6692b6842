"""A Redis that does not answer: what it costs who reads, and what the files know all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from precompute.jobs.ops.status import project_status
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import OnlineStoreError
from tests.fixtures import MakeProject
from tests.jobs.test_cli import ROWS, Captured
from tests.server import free_port


def test_a_store_that_does_not_answer_is_its_own_error(tmp_path: Path) -> None:
    lookup = Lookup.open(f"redis://127.0.0.1:{free_port()}/0", tmp_path)
    for call in (
        lambda: lookup.get("things", ["a"]),
        lambda: lookup.get("things", [1]),
        lambda: lookup.row("things", "a"),
        lambda: lookup.search("things", key="a"),
        lookup.views,
    ):
        with pytest.raises(OnlineStoreError):
            call()
    lookup.close()


def test_an_online_store_that_does_not_answer_is_status_1(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = make_project(ROWS, project={"online": "redis://:hunter2@127.0.0.1:1/0"})
    for command in (
        ["run", "numbers"],
        ["lookup", "numbers", "1"],
        ["status"],
        ["status", "--json"],
    ):
        assert project.cli(*command) == 1
        captured = capsys.readouterr()
        assert "is it running?" in (captured.out if command[0] == "status" else captured.err)
        assert "hunter2" not in captured.err + captured.out
    assert "hunter2" not in "".join(
        p.read_text() for p in (project.root / "numbers" / "runs").iterdir()
    )


def test_what_the_files_know_shows_though_the_online_store_is_down(
    make_project: MakeProject,
) -> None:
    project = make_project([(1, 1.0)])
    project.run()
    (known,), (line,) = (
        project_status(project),
        project_status(make_project(project={"online": "redis://127.0.0.1:1/0"})),
    )
    assert line["attention"][0].startswith(
        "whether it is served is not known: Redis at redis://127.0.0.1:1/0 does not answer"
    )
    differing = {
        "age_s": line["age_s"],
        "source_age_s": line["source_age_s"],
        "attention": line["attention"],
    }
    assert line == known | differing | {"online": None}
