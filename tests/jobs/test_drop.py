"""Drop: a view is ended as a whole, whatever stops it on the way, and nothing of another view goes
with it."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.ops import retention as drop_module
from precompute.jobs.ops.retention import drop
from precompute.store.disk.lease import take
from precompute.store.errors import ConflictError, RequestError, RowsLostError
from precompute.store.offline.log import Log, run_lease
from precompute.store.offline.view_store import ViewStore
from tests.fixtures import MakeProject
from tests.jobs.test_run_all import view as doubled
from tests.online_rig import KINDS, rig_of, url_of
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]


@pytest.fixture(params=KINDS)
def published(request: pytest.FixtureRequest, make_project: MakeProject) -> Callable[..., Scene]:
    """A project of ``numbers`` and ``others``, both live; ``views`` replaces the others'
    definition."""
    online = url_of(request, request.param, "table:./var/online")

    def make(**others: Any) -> Scene:
        index = {"index": {"on": "vector", "metric": "l2"}}
        project = make_project(
            [(1, 1.0), (2, 2.0)],
            view=index,
            project={"online": online},
            views={"others": doubled() | others},
        )
        for name in ("numbers", "others"):
            project.run(name)
        return project

    return make


def served(project: Scene) -> list[str]:
    """Views whose row of key 1 is answered; every other one is unknown, or lost while this
    project's root says that it is live."""
    lookup = project.open_lookup()
    found: list[str] = []
    for name in ("numbers", "others"):
        if name in lookup.online.views():
            assert lookup.row(name, 1)["features"]["double"] == 2.0
            found.append(name)
        else:
            lost = project.offline.view(name).log.live() is not None
            error, words = (
                (RowsLostError, "has no pointer of view")
                if lost
                else (RequestError, f"no view '{name}' is live")
            )
            with pytest.raises(error, match=words):
                lookup.row(name, 1)
    lookup.close()
    return found


def test_a_dropped_view_is_unknown_to_all_readers_and_its_snapshots_stay(
    published: Callable[..., Scene], capsys: Captured
) -> None:
    project = published()
    (project.folder / "views" / "numbers.yaml").unlink()
    project = project.reread()
    reader = project.open_lookup()
    assert reader.row("numbers", 1)["status"] == "fresh"
    assert project.cli("drop", "numbers", "--yes", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["served"], said["configured"], said["snapshots"], said["data"]) == (
        True,
        False,
        1,
        False,
    )
    with pytest.raises(RequestError, match="no view 'numbers' is live"):
        reader.row("numbers", 1)
    reader.close()
    assert served(project) == ["others"]
    store = project.offline
    assert (
        store.view("numbers").log.live(),
        store.view("numbers").numbers(),
        (project.root / "numbers" / "index").exists(),
    ) == (None, [1], False)
    assert project.cli("drop", "numbers", "--yes") == 0
    assert "numbers: not served; 1 snapshot(s), " in capsys.readouterr().out
    assert project.cli("drop", "numbers", "--data", "--yes") == 0
    assert not (project.root / "numbers").exists()
    assert store.views() == ["others"]
    capsys.readouterr()
    assert project.cli("drop", "numbers", "--yes") == 2
    assert "no view 'numbers'" in capsys.readouterr().err


def test_a_drop_that_was_stopped_on_the_way_is_finished_by_the_next(
    published: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers know no such view from the first step on."""

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    project = published()
    rig = rig_of(project.online)
    where = (
        *(() if rig is None else (rig.removal,)),
        (shutil, "rmtree"),
        (Log, "end_live"),
        (ViewStore, "remove"),
        (Path, "rename"),
    )
    for owner, name in where:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopped)
            assert project.cli("drop", "numbers", "--data", "--yes") != 0
            assert served(project) == ["others"]
        if not (project.root / "numbers").exists():
            project.run()
    assert project.cli("drop", "numbers", "--data", "--yes") == 0
    assert [path.name for path in project.root.iterdir() if "numbers" in path.name] == []
    project.run()
    assert served(project) == ["numbers", "others"]


def test_a_removal_that_was_stopped_is_finished_without_the_views_file(
    published: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    project, really = published(), shutil.rmtree
    (project.folder / "views" / "numbers.yaml").unlink()

    def stopped(path: Path, *args: Any, **options: Any) -> None:
        if path.name == ".removed-numbers":
            raise KeyboardInterrupt
        really(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stopped)
        assert project.cli("drop", "numbers", "--data", "--yes") == 130
    assert (project.root / ".removed-numbers").is_dir()
    assert project.cli("drop", "numbers", "--data", "--yes") == 0
    assert [path.name for path in project.root.iterdir() if "numbers" in path.name] == []
    capsys.readouterr()
    assert project.cli("drop", "numbers", "--data", "--yes") == 2
    assert "no view 'numbers'" in capsys.readouterr().err


def test_what_is_in_use_is_not_dropped(published: Callable[..., Scene], capsys: Captured) -> None:
    project = published(source={"sql": "SELECT id, double / 2 AS x FROM live.numbers"})
    assert project.cli("drop", "numbers", "--yes") == 2
    assert "read by others, as live.numbers" in capsys.readouterr().err
    store = project.offline
    with take(store.view("others").leases, run_lease(None), "a run"):
        assert project.cli("drop", "others", "--yes") == 1
    assert "is being computed" in capsys.readouterr().err
    assert served(project) == ["numbers", "others"]
    assert project.cli("drop", "others", "--yes") == 0
    assert "still configured" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["a typo", "gone"])
def test_the_inputs_of_a_live_view_are_not_dropped(
    published: Callable[..., Scene], capsys: Captured, broken: str
) -> None:
    project = published(source={"sql": "SELECT id, double / 2 AS x FROM live.numbers"})
    path = project.folder / "views" / "others.yaml"
    written = path.read_text()
    if broken == "gone":
        path.unlink()
    else:
        path.write_text(written + "tttl: 1h\n")
    assert project.cli("drop", "numbers", "--data", "--yes") == 2
    assert "read by others, as live.numbers" in capsys.readouterr().err
    assert served(project) == ["numbers", "others"]
    path.write_text(
        written.replace(
            "double / 2 AS x FROM live.numbers", "x FROM read_parquet('${data}/data.parquet')"
        )
    )
    assert project.cli("drop", "numbers", "--yes") == 2  # what is live reads it until the next run
    project.reread().run("others")
    assert project.cli("drop", "numbers", "--data", "--yes") == 0
    assert served(project) == ["others"]


@pytest.mark.parametrize("data", [False, True])
def test_no_run_begins_while_a_view_is_dropped(
    published: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, data: bool
) -> None:
    project, checked = published(), drop_module._check_idle

    def then_a_run(*arguments: Any) -> None:
        checked(*arguments)
        with pytest.raises(ConflictError, match="view 'numbers' is being dropped"):
            project.run(full=True)

    monkeypatch.setattr(drop_module, "_check_idle", then_a_run)
    drop(project, "numbers", data=data)
    assert (served(project), project.store.log.live()) == (["others"], None)
    assert project.numbers() == ([] if data else [1])
    assert project.run().status == "published"
    assert served(project) == ["numbers", "others"]


def test_it_asks_first(
    published: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    project = published()
    assert project.cli("drop", "numbers") == 2
    assert "say --yes" in capsys.readouterr().err
    # without a line end: the end of the input, Ctrl-D
    for typed, status in (("n\n", 1), ("\n", 1), ("", 1), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        assert served(project) == ["numbers", "others"]
        assert project.cli("drop", "numbers") == status, typed
    assert served(project) == ["others"]


@pytest.mark.parametrize("name", ["../numbers", "numbrs", ".removed-numbers", ""])
def test_a_name_that_is_no_views_is_refused(
    make_project: MakeProject, capsys: Captured, name: str
) -> None:
    project = make_project([(1, 1.0)])
    assert project.cli("drop", name, "--yes") == 2
    assert "no view" in capsys.readouterr().err


@pytest.mark.parametrize("beside", ["with snapshots of its own", "new"])
def test_no_command_of_another_project_changes_what_is_served(
    published: Callable[..., Scene], tmp_path: Path, beside: str
) -> None:
    """Two projects whose online store and names of views are the same; the second one has computed
    its own, or has not begun."""
    first = published()
    first.run(full=True)
    folder = tmp_path / "second"
    shutil.copytree(first.folder, folder, ignore=shutil.ignore_patterns("var"))
    if first.online.startswith("table"):
        settings = (
            (folder / "project.yaml")
            .read_text()
            .replace("table:./var/online", f"table:{first.root}/online")
        )
        (folder / "project.yaml").write_text(settings)
    second = Scene(folder, {})
    if beside == "with snapshots of its own":
        second.materialize()
        second.materialize(full=True)
        with contextlib.closing(second.open_online()) as online:
            # as if it had been published there before the first project took the view over
            second.store.log.move_live(
                1,
                expected_epoch=0,
                above=online.live("numbers").epoch + 2,  # type: ignore[union-attr]
                reason="publish",
            )
    before = everything(first)
    said = []
    for command in (
        ["run", "numbers"],
        ["publish", "numbers"],
        ["publish", "numbers", "--reload"],
        ["rollback", "numbers", "--to", "1"],
        ["reconcile", "numbers"],
        ["resume", "numbers"],
        ["gc"],
        ["verify", "numbers"],
        ["drop", "numbers", "--yes"],
        ["drop", "numbers", "--yes", "--data"],
    ):
        said.append((command[0], second.cli(*command)))
        assert everything(first) == before, command
    assert ("run", 1) in said
    assert said[-2:] == [("drop", 1), ("drop", 1)]
    assert second.cli("drop", "numbers", "--yes", "--take-over") == 0
    assert served(first) == ["others"]


def everything(project: Scene) -> tuple[Any, ...]:
    """Pointer and segments of ``numbers`` in the online store, and the rows it gives."""
    with contextlib.closing(project.open_online()) as online:
        pointer, segments = online.live("numbers"), online.segments("numbers")
        assert pointer is not None
        return (
            pointer,
            segments,
            project.served(),
            [online.read_segments("numbers", [s.name], [b"1"]).packed.at(0) for s in segments],
        )
