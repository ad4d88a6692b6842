"""What a server runs is what its own files say, whatever stands in the online store."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.serve.fallback import ViewFallback
from precompute.jobs.serve.live_view import check_confirmed
from precompute.jobs.serve.remote_fallback import socket_path
from precompute.store.disk.record import replace
from precompute.store.errors import ConfigError, DamagedPointerError
from precompute.store.feature_view import Definition, FeatureView, ModelUse
from precompute.store.online.online_store import Pointer
from tests.fixtures import MakeProject
from tests.scene import Scene

FALLBACK = {"fallback": {"enabled": True, "deadline": "20s", "keep": 0, "keep_missing": 0}}
Change = Callable[[FeatureView, Path], FeatureView]


def _defined(view: FeatureView, **changes: Any) -> FeatureView:
    return dataclasses.replace(view, definition=dataclasses.replace(view.definition, **changes))


def _touches(view: FeatureView, canary: Path) -> FeatureView:
    return _defined(view, model=ModelUse("subprocess:run", {"args": ["touch", str(canary)]}))


def _copies(view: FeatureView, canary: Path) -> FeatureView:
    return _defined(view, source=f"COPY (SELECT 1) TO '{canary}'")


FORGED: dict[str, Change] = {
    "another class": _touches,
    "another SQL": _copies,
    "other arguments": lambda view, _: _defined(
        view, model=dataclasses.replace(view.definition.model, args={"version": 1})
    ),
    "another entity": lambda view, _: dataclasses.replace(view, entity=('id" FROM x --',)),
    "other features": lambda view, _: dataclasses.replace(view, features=view.features[::-1]),
    "nothing at all": lambda view, _: dataclasses.replace(view, definition=Definition()),
}


@pytest.fixture
def project(make_project: MakeProject) -> Scene:
    project = make_project([(1, 1.0), (2, 2.0)], view=FALLBACK)
    project.publish_all()
    return make_project([(1, 1.0), (2, 2.0), (9, 9.0)], view=FALLBACK)


def reported(project: Scene) -> list[tuple[str, str | None]]:
    """Of a row that is stored, and one that is not."""
    with project.answering() as lookup:
        table = lookup.get("numbers", [1, 9], features=[])
    return list(zip(table["status"].to_pylist(), table["reason"].to_pylist(), strict=True))


def forge(project: Scene, view: FeatureView, **changes: Any) -> None:
    """As who may write to the online store, and to nothing else."""
    pointer = project.pointer()
    with project.online_store() as store:
        store.flip(replace(pointer, view=view, epoch=pointer.epoch + 1, **changes))


COMPUTED, OFF = [("fresh", None), ("computed", None)], [("fresh", None), ("missing", "model_error")]


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
def test_what_only_the_online_store_says_is_served_and_not_run(
    project: Scene, change: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    view, canary = project.pointer().view, tmp_path / "canary"
    forge(project, dataclasses.replace(view, ttl_s=7200))
    # what is not run may be as it likes
    assert reported(project) == COMPUTED
    forge(project, change(view, canary))
    with caplog.at_level(logging.ERROR):
        # other features are other rows, which the store has not
        assert reported(project)[1] == OFF[1]
    assert "names SQL or a model that neither the manifest of snapshot 1" in caplog.text
    assert not canary.exists()
    with (
        project.answering() as lookup,
        contextlib.closing(ViewFallback(project.offline, project.home)) as fallback,
    ):
        pointer = lookup.online.live("numbers")
        assert pointer is not None
        fallback.begin_warm(pointer, time.monotonic() + 20).exception()
        assert not fallback.ready(pointer)


def test_a_name_that_leads_out_of_the_root_confirms_nothing(project: Scene) -> None:
    """A manifest that somebody else could write, such as in the system's temporary folder."""
    pointer = project.pointer()
    check_confirmed(pointer, project.offline, project.home)
    shutil.copytree(project.root / "numbers", project.root.parent / "elsewhere")
    forged = replace(pointer, view=dataclasses.replace(pointer.view, name="../elsewhere"))
    with pytest.raises(ConfigError, match="names SQL or a model that neither"):
        check_confirmed(forged, project.offline, project.home)


def test_what_an_open_model_makes_is_no_row_of_another_pointer(project: Scene) -> None:
    """Of the same publishing, as it is named, so that the model is open already; the store answers
    all the same, and what is missing is reported row by row."""
    with project.answering() as lookup:
        assert lookup.get("numbers", [9])["status"].to_pylist() == ["computed"]
        view, pointer = project.pointer().view, project.pointer()
        swapped = replace(pointer, view=dataclasses.replace(view, features=view.features[::-1]))
        with project.online_store() as store:
            store.flip(swapped)
        for keys in ([1, 9], [9]):
            table = lookup.get("numbers", keys)
            assert table["status"].to_pylist() == ["missing"] * len(keys)
            assert table["reason"].to_pylist() == ["model_error"] * len(keys)


def test_a_server_without_manifests_goes_by_its_own_view_files(
    project: Scene, make_project: MakeProject
) -> None:
    manifests, view = (
        project.store.manifest_path(1).parent,
        project.folder / "views" / "numbers.yaml",
    )
    shutil.move(manifests, project.folder / "elsewhere")
    assert reported(project) == COMPUTED
    text = view.read_text()
    view.write_text(text.replace("tests.models:Doubler", "tests.models:Elsewhere"))
    assert text != view.read_text()
    assert reported(project) == OFF
    view.unlink()
    assert reported(project) == OFF
    # where both are there, either will do
    shutil.move(project.folder / "elsewhere", manifests)
    assert reported(project) == COMPUTED
    manifest = project.store.manifest_path(1)
    manifest.write_bytes(manifest.read_bytes().replace(b"Doubler", b"doubler"))
    assert reported(project) == OFF
    view.write_text(text)
    assert reported(project) == COMPUTED


def test_a_pointer_leads_nowhere_but_to_its_own(project: Scene, tmp_path: Path) -> None:
    pointer = project.pointer()
    body = pointer.to_bytes()
    assert Pointer.from_bytes(body, "numbers") == pointer
    with pytest.raises(ValueError, match="another view's"):
        Pointer.from_bytes(body, "others")
    for index in ("/etc/index", "../../index", "numbers/../../index"):
        for changes in ({"index": index}, {"changed_index": index}):
            forge(project, pointer.view, **changes)
            with (
                project.online_store() as store,
                pytest.raises(DamagedPointerError, match="not below the root"),
            ):
                store.live("numbers")
            (Path(project.online.removeprefix("table:")) / "numbers" / "live.json").write_bytes(
                body
            )
    assert {socket_path(tmp_path, model).parent for model in ("a" * 64, "../../x", "/etc/x\0")} == {
        tmp_path
    }
