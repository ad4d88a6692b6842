"""Golden roots: what an earlier version wrote, or this one, is opened, answers as it did, and is
run on, rolled back, let go of and cleaned up by this one."""

from __future__ import annotations

import json
import lzma
import tarfile
from base64 import b64decode
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from precompute.jobs.ops.verify import verify
from precompute.store.http.app import create_app
from tests.asgi import call
from tests.formats import make_other
from tests.golden.make import FULL, HERE, NEXT
from tests.golden.project import (
    DAYS,
    VIEWS,
    answers,
    doubles,
    frame_of,
    live_rows,
    nearest,
    run,
    run_day,
    served_at,
    vector_of,
    write_project,
)
from tests.online_rig import KINDS, rig_of, url_of
from tests.scene import Scene


class Golden(NamedTuple):
    """A golden root that was opened here, and what it must answer."""

    scene: Scene
    expected: dict[str, Any]


def opened(packed: Path, folder: Path, online: str) -> Golden:
    """Unpack a golden root into a folder, and what is online beside it or into its store."""
    with lzma.open(packed) as file, tarfile.open(fileobj=file) as tar:
        tar.extractall(folder, filter="data")
    rig = rig_of(online)
    if rig is not None:
        lines = map(json.loads, (folder / "online.jsonl").read_text().splitlines())
        rig.restore(online, {b64decode(key): b64decode(value) for key, value in lines})
    expected = json.loads(packed.with_name(packed.name.replace(".tar.xz", ".json")).read_text())
    return Golden(write_project(folder, online), expected)


ROOTS = [
    path
    for path in sorted(HERE.glob("format-*/*.tar.xz"))
    if path.name.removesuffix(".tar.xz") in KINDS
]


@pytest.fixture(params=ROOTS, ids=lambda path: f"{path.parent.name}-{path.name[:-7]}")
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    path: Path = request.param
    kind = path.name.removesuffix(".tar.xz")
    return opened(path, tmp_path, url_of(request, kind, "table:./online"))


def test_there_is_one_of_every_format_and_online_store() -> None:
    made = {(path.parent.name, path.name.removesuffix(".tar.xz")) for path in ROOTS}
    assert made == {(f"format-{number}", kind) for number in (3,) for kind in KINDS}


def test_it_answers_as_it_did(golden: Golden) -> None:
    found = json.loads(json.dumps(answers(golden.scene)))
    assert found.keys() == golden.expected.keys()
    for view, expected in golden.expected.items():
        assert found[view] == expected, view


def test_it_is_whole(golden: Golden) -> None:
    scene = golden.scene
    wrong = {view: [c.check for c in verify(scene, view) if not c.ok] for view in VIEWS}
    assert wrong == {view: [] for view in VIEWS} | {"ahead": ["online pointer"]}
    assert scene.cli("reconcile") == 0
    assert doubles(scene, "ahead") == NEXT
    assert scene.faults("ahead") == []
    wanting = {view for view in VIEWS if scene.status(view)["attention"]}
    assert wanting == {"ahead", "held", "judged", "killed"}


def test_it_is_run_on_rolled_back_and_let_go_of(golden: Golden) -> None:
    scene, expected = golden.scene, golden.expected
    # a delta: a row is another one, one is new, one is gone
    before = doubles(scene, "numbers")
    rows = {key: x for key, x in before.items() if key != 30} | {7: 700.0, 33: 33.0}
    report = scene.run("numbers", frame=frame_of("numbers", rows))
    assert (report.status, report.counts["written"]) == ("published", 2)
    assert doubles(scene, "numbers") == rows
    assert nearest(scene, 700.0)[0] == [7, 0.0]
    scene.rollback("numbers")
    assert live_rows(scene, "numbers") == expected["numbers"]["rows"]
    assert {x: nearest(scene, float(x)) for x in expected["nearest"]} == expected["nearest"]
    assert run(scene, "numbers", rows | {8: 800.0}) == "committed"
    assert scene.resume("numbers").status == "published"
    assert doubles(scene, "numbers") == rows | {8: 800.0}
    # what was held before, and what waited
    assert scene.resume("held").snapshot == 4
    assert doubles(scene, "held") == FULL | {0: 4.0}


def test_each_of_its_views_is_run_on(golden: Golden) -> None:
    scene = golden.scene
    assert run(scene, "merged", FULL | {1: 500.0}) == "published"
    assert doubles(scene, "merged") == FULL | {1: 500.0}
    days = doubles(scene, "days")
    assert run_day(scene, DAYS[3]) == "published"
    assert doubles(scene, "days") == days | {key: x for key, x in FULL.items() if key % 4 == 3}
    scene.rollback("days")
    assert doubles(scene, "days") == days
    # what was computed before the kill is taken over
    report = scene.run("killed", frame=frame_of("killed", NEXT))
    assert (report.status, report.resumed) == ("published", 2)
    assert doubles(scene, "killed") == NEXT
    # nobody flipped the pointer before
    assert run(scene, "ahead", NEXT | {3: 300.0}) == "published"
    assert doubles(scene, "ahead") == NEXT | {3: 300.0}
    assert scene.publish("judged", accept=("rows",)).snapshot == 3
    assert len(doubles(scene, "judged")) == 13
    # who names what was rolled back from takes its mark away
    assert scene.publish("marked", snapshot=3).snapshot == 3
    assert doubles(scene, "marked") == FULL | {0: 3.0}
    assert scene.offline.view("marked").log.bad().keys() == {2}
    assert run(scene, "marked", FULL) == "committed"
    scene.resume("marked")
    assert doubles(scene, "marked") == FULL
    assert [scene.faults(view) for view in VIEWS] == [[]] * len(VIEWS)


def test_what_is_collected_of_it_is_what_nothing_reads(golden: Golden) -> None:
    scene, expected = golden.scene, golden.expected
    settings = yaml.safe_load((scene.folder / "project.yaml").read_text())
    settings["retention"] = {"keep": 3, "grace": "0s"}
    (scene.folder / "project.yaml").write_text(yaml.safe_dump(settings))
    scene = scene.reread()
    assert run(scene, "pinned", FULL | {0: 9.0}) == "published"
    assert scene.cli("gc") == 0
    # of the others the last three stay, and what was live before
    assert [number for number in scene.numbers("pinned") if number <= 3] == [1]
    then = min(expected["pinned"]["then"])
    assert (
        served_at(scene, "pinned", datetime.fromisoformat(then))
        == (expected["pinned"]["then"][then])
    )
    for view in VIEWS.keys() - {"pinned"}:
        assert live_rows(scene, view) == expected[view]["rows"], view


def test_a_server_serves_it_while_it_is_run_on(golden: Golden) -> None:
    """Whichever versions wrote the root, serve it and run on it: answers are those before the
    publishing or those after it, of every view."""
    scene, expected = golden.scene, golden.expected
    with scene.lookup() as lookup:
        app = create_app(lookup)

        def row(view: str, key: int) -> Any:
            return call(app, "GET", f"/v1/views/{view}/rows/{key}").json["features"]

        found = {view: row(view, 1)["double"] for view in VIEWS}
        assert found == {view: expected[view]["rows"]["1"]["double"] for view in VIEWS}
        assert call(app, "GET", "/readyz").status == 200
        rows = doubles(scene, "numbers") | {1: 111.0}
        for do in (
            lambda: run(scene, "numbers", rows),
            lambda: scene.rollback("numbers"),
            lambda: scene.resume("numbers"),
        ):
            do()
            live = scene.live_snapshot().number
            keys = [row["id"] for row in scene.rows(live)]
            body = {"keys": keys, "features": ["double"]}
            answer = call(app, "POST", "/v1/views/numbers/lookup", body).json
            assert answer["snapshot"] == live
            told = {int(row["key"]): row["features"]["double"] for row in answer["rows"]}
            assert told == {row["id"]: row["double"] for row in scene.rows(live)}
            search = {"vector": vector_of(told[1]), "k": 1}
            [first] = call(app, "POST", "/v1/views/numbers/search", search).json["rows"]
            assert (first["key"], first["score"]) == ("1", 0.0)
        assert row("merged", 1)["double"] == expected["merged"]["rows"]["1"]["double"]


def test_a_neighbour_of_another_format_stops_no_other_view(
    golden: Golden, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after one view was run by a later version: it is refused in words and left as it is."""
    scene, expected = golden.scene, golden.expected
    manifest = max((scene.root / "held" / "manifests").glob("*.json"))
    make_other(manifest)
    data = manifest.read_bytes()
    assert run(scene, "numbers", FULL) == "published"
    assert doubles(scene, "numbers") == FULL
    assert live_rows(scene, "held") == expected["held"]["rows"]
    for command in (("status", "held"), ("resume", "held"), ("gc",), ("history", "held")):
        scene.cli(*command)
        said = "".join(capsys.readouterr())
        assert "damaged" not in said, command
        if command[0] != "history":
            assert "is of format 4, and this version reads format 3" in said, command
    assert manifest.read_bytes() == data
    assert live_rows(scene, "held") == expected["held"]["rows"]
