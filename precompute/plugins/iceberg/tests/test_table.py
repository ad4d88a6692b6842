"""The Iceberg table beside a view's snapshots: what pyiceberg reads of each version is what we
read of the snapshot of that number."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import polars
import pyarrow as pa
import pytest
from pyiceberg.table import StaticTable

from precompute.jobs.ops.retention import gc
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rollback import reconcile
from precompute.jobs.run.run_view import check_before
from precompute.plugins.iceberg.keys import IcebergKeys
from precompute.plugins.iceberg.table import _METADATA, HINT, MOST_METADATA, Hook
from precompute.store.account import checker
from precompute.store.account.checker import check_live
from precompute.store.disk.storage import LocalStorage
from precompute.store.doors import ROOTS
from precompute.store.errors import ConfigError
from precompute.store.offline.segment import read_kills
from tests import REPOSITORY
from tests.fixtures import MakeProject
from tests.jobs.test_serve_all import Corpus
from tests.object_store import KEYS, ObjectStore
from tests.scene import UNJUDGED, Scene

WANTED = {"iceberg": ["numbers"]}
GATES = UNJUDGED | {"rows": None}
Log = pytest.LogCaptureFixture


def metadata(scene: Scene) -> Path:
    return scene.root / "numbers" / "iceberg" / "metadata"


def table_of(scene: Scene, **properties: str) -> StaticTable:
    """As a reader without a catalog finds it."""
    storage = scene.store.storage
    number = storage.read(metadata(scene) / "version-hint.text").decode()
    shown = storage.shown(metadata(scene) / f"v{number}.metadata.json")
    return StaticTable.from_metadata(shown, properties)


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=str)


def check(scene: Scene, **properties: str) -> list[int]:
    """Compare each version with our own reading; returns the versions."""
    table = table_of(scene, **properties)
    numbers = [snapshot.snapshot_id for snapshot in table.metadata.snapshots]
    for number in numbers:
        read = table.scan(snapshot_id=number).to_arrow().to_pylist()
        assert ordered(read) == ordered(scene.rows(number))
    ref, current = scene.store.log.live(), table.current_snapshot()
    assert (current and current.snapshot_id) == (ref and ref.snapshot)
    return numbers


def make(make_project: MakeProject, rows: Any, project: dict[str, Any] | None = None) -> Scene:
    return make_project(rows, view={"gates": GATES}, project=WANTED | (project or {}))


def test_each_version_is_the_snapshot_of_its_number(make_project: MakeProject) -> None:
    rows = [(i, float(i)) for i in range(400)]
    scene = make(make_project, rows)
    scene.run()
    for step in range(1, 8):
        # a delta of changed, new and removed rows; the last one is so large that it is compacted
        rows = [(i, x + (i % 40 == step or step == 7)) for i, x in rows if i % 100 != step]
        make(make_project, [*rows, (1000 + step, 0.0)]).run()
    assert check(scene) == scene.numbers() == list(range(1, 9))
    kinds = [scene.snapshot(number).kind for number in scene.numbers()]
    assert (kinds[0], kinds[-1], kinds.count("delta")) == ("full", "full", 6)
    scene.rollback()
    assert check(scene) == list(range(1, 9))
    log = [entry.snapshot_id for entry in table_of(scene).metadata.snapshot_log]
    assert log == [1, 2, 3, 4, 5, 6, 7, 8, 7]
    assert len(list(metadata(scene).glob("v*.json"))) == MOST_METADATA


def test_a_damaged_list_of_one_version_tells_the_next_nothing(make_project: MakeProject) -> None:
    rows = [(i, float(i)) for i in range(400)]
    scene = make(make_project, rows)
    scene.run()
    for step in (1, 2):
        rows = [(i, x + (i % 40 == step)) for i, x in rows]
        make(make_project, rows).run()
        if step == 1:
            listed = metadata(scene) / f"{2:020d}-list.avro"
            data = listed.read_bytes()
            listed.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = table_of(scene).scan(snapshot_id=3).to_arrow()
    ids, doubles = (found.column(name).to_pylist() for name in ("id", "double"))
    assert dict(zip(ids, doubles, strict=True)) == scene.doubles(3)


def test_a_segment_that_only_removes_keys_is_read_as_any_other(make_project: MakeProject) -> None:
    """One whose kills name rows, and a merged one whose kills are tombstones alone: the rows that
    they removed were merged away with their parts."""
    rows = [(i, float(i)) for i in range(400)]
    make(make_project, rows).run()
    for step in range(6):
        # the key that came with the last run goes, and no row of the first segment does
        scene = make(make_project, [*rows, (1000 + step, 0.0)])
        scene.run()
    merged = [s for n in scene.numbers() for s in scene.snapshot(n).segments if s.merged]
    named = [read_kills(scene.store.folder / s.kills.path) for s in merged if s.kills is not None]
    assert {} in named
    scene = make(make_project, rows[10:])
    scene.run()
    last = scene.snapshot().segments[-1]
    assert (last.rows, last.kills is not None) == (0, True)
    assert check(scene) == scene.numbers()


def test_a_reader_prunes_and_picks_as_of_any_table(make_project: MakeProject) -> None:
    scene = make(make_project, [(i, float(i)) for i in range(100)])
    scene.run()
    table = table_of(scene)
    found = table.scan(row_filter="id = 7", selected_fields=("id", "vector")).to_arrow()
    assert found.to_pylist() == [{"id": 7, "vector": [7.0, 8.0, 9.0, 10.0]}]
    assert not list(table.scan(row_filter="id > 500").plan_files())


@pytest.mark.filterwarnings("ignore:.*reader_override.*considered unstable")
def test_polars_reads_it_by_itself_or_through_pyiceberg(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors in the latter way alone: a Parquet list of fixed size is none of Iceberg to it."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    view = {"features": {"double": {"dtype": "float64"}}, "gates": GATES}
    for rows in ([(1, 1.0), (2, 2.0)], [(2, 3.0), (3, 1.0)]):
        scene = make_project(rows, view=view, project=WANTED)
        scene.run()
    make(make_project, [(5, 1.0)]).run()
    shown = table_of(scene).metadata_location
    for number in scene.numbers():
        readers: tuple[Literal["native", "pyiceberg"], ...] = ("native", "pyiceberg")
        for reader in readers[number == 3 :]:
            found = polars.scan_iceberg(shown, snapshot_id=number, reader_override=reader)
            assert ordered(found.collect().to_dicts()) == ordered(scene.rows(number))


def test_the_documents_reader_reads_it(make_project: MakeProject) -> None:
    scene = make(make_project, [(1, 1.0), (2, 2.0), (300, 3.0)])
    scene.run()
    text = (REPOSITORY / "docs" / "reading.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    code = code.replace("var/movielens/item_vector", str(scene.root / "numbers"))
    exec(compile(code.replace("item_id", "id"), "docs/reading.md", "exec"), names)
    assert names["items"].column("id").to_pylist() == [1, 2]


def test_what_is_committed_and_not_live_is_a_version_and_not_main(
    make_project: MakeProject,
) -> None:
    scene = make(make_project, [(1, 1.0), (2, 2.0)])
    scene.materialize()
    assert check(scene) == [1]
    assert table_of(scene).scan().to_arrow().num_rows == 0
    scene.publish()
    make(make_project, [(1, 1.0), (2, 3.0)]).materialize()
    assert check(scene) == [1, 2]


def test_what_is_collected_leaves_the_table_first(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(make_project, [(1, 1.0)], {"retention": {"keep": 1, "grace": "0s"}})
    for x in (1.0, 2.0, 3.0, 4.0):
        make(make_project, [(1, x)], {"retention": {"keep": 1, "grace": "0s"}})
        scene.run(full=True)
    assert gc(scene.reread(), forgotten=None, dry_run=False)[1] == []
    assert check(scene) == scene.numbers()
    assert len(scene.numbers()) < 4
    named = {path.name.rpartition("-")[0] for path in metadata(scene).glob("*.avro")}
    lists = {f"{number:020d}" for number in scene.numbers()}
    assert named == lists | {name for n in scene.numbers() for name in scene.snapshot(n).names}
    # killed between the two: no version is in the table whose files are gone
    monkeypatch.setattr("precompute.store.offline.gc._remove", lambda *_: 1 / 0)
    make(make_project, [(1, 5.0)], {"retention": {"keep": 1, "grace": "0s"}})
    scene.materialize(full=True)
    make(make_project, [(1, 6.0)], {"retention": {"keep": 1, "grace": "0s"}})
    scene.materialize(full=True)
    with pytest.raises(ZeroDivisionError):
        gc(scene.reread(), forgotten=None, dry_run=False)
    assert set(check(scene)) < set(scene.numbers())


DAMAGE = {
    "torn": lambda text: text[:100],
    "a number": lambda text: text.replace('"rows": "3"', '"rows": "7"'),
    "a column": lambda text: text.replace('"type": "double"', '"type": "float"'),
    "no object": lambda text: "[]",
    "nested": lambda text: "[" * 100_000,
}
"""What became of the newest metadata, of which the next is made."""


@pytest.mark.parametrize("lost", ["v*.metadata.json", "*.avro", *DAMAGE])
def test_a_table_that_is_lost_or_torn_is_made_again(make_project: MakeProject, lost: str) -> None:
    scene = make(make_project, [(1, 1.0), (2, 2.0), (3, 3.0)])
    scene.run()
    make(make_project, [(1, 1.0), (2, 5.0)]).run()
    if lost in DAMAGE:
        newest = max(
            metadata(scene).glob("v*.json"), key=lambda path: int(path.name[1:].split(".")[0])
        )
        whole = newest.read_text()
        newest.write_text(DAMAGE[lost](whole))
        assert newest.read_text() != whole
    else:
        for path in metadata(scene).glob(lost):
            path.unlink()
    make(make_project, [(1, 1.0), (2, 6.0)]).run()
    assert check(scene) == [1, 2, 3]
    last = max(metadata(scene).glob("v*.json"), key=lambda path: int(path.name[1:].split(".")[0]))
    said = json.loads(last.read_text())
    assert [one["summary"]["rows"] for one in said["snapshots"]] == ["3", "2", "2"]
    assert '"type": "float"' not in last.read_text()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit at its start": lambda data: bytes([data[0] ^ 4]) + data[1:],
    "a bit in its middle": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
    ),
    "a bit at its end": lambda data: data[:-1] + bytes([data[-1] ^ 4]),
    "cut": lambda data: data[: len(data) // 2],
    "emptied": lambda _: b"",
    "gone": lambda data: data,
    "another's": lambda data: data,
}
FILES = ("*.json", "version-hint.text", "*-list.avro", "*-data.avro", "*-deletes.avro", "*.parquet")


@pytest.mark.parametrize("kind", FILES)
def test_damage_of_a_file_is_seen_by_a_look_and_healed(
    make_project: MakeProject, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "OFTEN_S", -1.0)
    scene, rows = make(make_project, [(1, 1.0), (2, 2.0), (3, 3.0)]), [(1, 1.0), (2, 4.0)]
    scene.run()
    for x in (1.0, 7.0):
        make(make_project, [*rows, (3, x)]).run()
    folder = metadata(scene).parent
    files = sorted(folder.rglob(kind), key=lambda path: path.stat().st_mtime_ns)
    whole = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    path, other = files[-1], (files[:-1] or [metadata(scene) / "v1.metadata.json"])[-1]
    for name, damaged in DAMAGES.items():
        path.write_bytes((other if name == "another's" else path).read_bytes())
        path.write_bytes(damaged(path.read_bytes()))
        if name == "gone":
            path.unlink()
        with scene.online_store() as online:
            (told,) = check_live(scene.store, online).trouble
        # the newest metadata is missed by what names it
        named = metadata(scene) / HINT if (kind, name) == ("*.json", "gone") else path
        assert f"{named} of the Iceberg table" in told, name
        if name == "another's":
            assert scene.status()["attention"] == [told]
            assert [check.found for check in scene.faults()] == [told]
        assert reconcile(scene, "numbers", Silent()) is not None
        assert check(scene) == [1, 2, 3]
        after = {one.name: one.read_bytes() for one in folder.rglob("*") if one.is_file()}
        assert {n: data for n, data in after.items() if _METADATA.fullmatch(n) is None} == {
            n: data for n, data in whole.items() if _METADATA.fullmatch(n) is None
        }, "what has one name has the same bytes"
    assert (scene.status()["attention"], scene.faults()) == ([], [])


def test_a_killed_run_leaves_the_table_to_the_next(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(make_project, [(1, 1.0), (2, 2.0)])
    scene.run()
    make(make_project, [(1, 1.0), (2, 5.0)])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Hook, "committed", killed)
        with pytest.raises(KeyboardInterrupt):
            scene.run()
    assert check(scene) == [1]
    assert scene.run().status == "published"
    assert check(scene) == [1, 2]


def test_a_table_is_whole_wherever_its_writer_stops(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(make_project, [(1, 1.0), (2, 2.0)])
    scene.run()
    make(make_project, [(1, 1.0), (2, 5.0)])
    with monkeypatch.context() as patched:
        for heard in ("committed", "published", "going"):
            patched.setattr(Hook, heard, lambda *_: None)
        scene.run()
    writes: dict[str, Callable[..., None]] = {
        "create": LocalStorage.create,
        "write": LocalStorage.write,
        "put": LocalStorage.put,
    }
    stopped = list[int]()
    for stop in range(100):
        left = iter(range(stop))

        def writing(name: str, left: Iterator[int] = left) -> Callable[..., None]:
            def write(*args: Any, **options: Any) -> None:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                writes[name](*args, **options)

            return write

        with monkeypatch.context() as patched:
            for name in writes:
                patched.setattr(LocalStorage, name, writing(name))
            try:
                assert Hook().committed(scene.store, True) == []
                break
            except KeyboardInterrupt:
                stopped.append(stop)
        table = table_of(scene)
        for version in table.metadata.snapshots:
            read = table.scan(snapshot_id=version.snapshot_id).to_arrow().to_pylist()
            assert ordered(read) == ordered(scene.rows(version.snapshot_id))
    # the deletes, their manifest, that of the parts, the list, the metadata, the hint
    assert stopped == list(range(6))
    assert check(scene) == [1, 2]


def test_a_damaged_snapshot_and_what_builds_on_it_is_no_version(make_project: MakeProject) -> None:
    scene = make(make_project, [(i, float(i)) for i in range(50)])
    scene.run()
    make(make_project, [(i, float(i) + (i == 3)) for i in range(50)]).run()
    shutil.rmtree(scene.root / "numbers" / "iceberg")
    part = scene.root / "numbers" / scene.snapshot(1).parts[0].path
    part.write_bytes(b"x")
    wrong = Hook().committed(scene.store, True)
    told = [sentence.partition(":")[0] for sentence in wrong]
    assert told == [f"snapshot {number} is no version of it" for number in (1, 2)]
    assert json.loads((metadata(scene) / "v1.metadata.json").read_text())["snapshots"] == []


def test_where_what_is_live_is_no_version_main_is_behind(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(make_project, [(1, 1.0), (2, 2.0)])
    scene.run()
    make(make_project, [(1, 1.0), (2, 5.0)])
    with monkeypatch.context() as patched:
        # as on a host without pyiceberg
        patched.setitem(sys.modules, "precompute.plugins.iceberg.files", None)
        patched.setattr(IcebergKeys, "preflight", lambda *_: None)
        report = scene.run()
    assert any("pyiceberg is not installed" in line for line in report.attention)
    assert table_of(scene).scan().to_arrow().num_rows == 2
    current = table_of(scene).current_snapshot()
    assert current is not None
    assert current.snapshot_id == 1
    assert scene.run().status == "current"
    assert check(scene) == [1, 2]


def test_each_version_has_its_own_columns(
    make_project: MakeProject,
) -> None:
    features = {"double": {"dtype": "float64"}}
    more = features | {"vector": {"dtype": "float32", "dim": 4}}
    for n, of_view in enumerate((features, more, features)):
        view = {"features": of_view, "gates": GATES | {"contract": None}}
        scene = make_project([(1, float(n))], view=view, project=WANTED)
        scene.run()
    assert check(scene) == [1, 2, 3]
    make_project(
        pa.table({"id": ["1"], "x": [1.0]}),
        view={"features": more, "gates": GATES | {"contract": None}},
        project=WANTED,
    ).run()
    assert check(scene) == [1, 2, 3, 4]


def test_all_partitions_together_are_one_version(make_project: MakeProject) -> None:
    corpus = Corpus(make_project)
    corpus.project |= WANTED
    # the second day has key 2 anew, so that the first one's row of it is dead
    for day, rows in enumerate([{1: 1.0, 2: 2.0}, {2: 5.0, 3: 3.0}, {4: 4.0}]):
        corpus.run(day, rows)
    assert check(corpus.scene) == corpus.scene.numbers()
    assert len(corpus.scene.live_snapshot().members) == 3
    assert table_of(corpus.scene).scan().to_arrow().num_rows == 4


def test_a_view_that_is_taken_out_has_no_table_left(make_project: MakeProject) -> None:
    scene = make(make_project, [(1, 1.0)])
    scene.run()
    make_project(project={"iceberg": None})
    scene.reread().run()
    assert not (scene.root / "numbers" / "iceberg").exists()
    Hook().published(scene.store)
    assert not (scene.root / "numbers" / "iceberg").exists()


def test_what_cannot_be_in_a_table_is_refused(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = {"features": {"double": {"dtype": "float16"}}, "gates": GATES}
    scene = make_project([(1, 1.0)], view=half, project=WANTED)
    with pytest.raises(
        ConfigError, match=r"numbers.yaml:\d+: features.double: Iceberg has no float16"
    ):
        scene.run()
    with pytest.raises(
        ConfigError, match=r"project.yaml:\d+: iceberg: no such view 'number'; did you mean"
    ):
        make_project(project={"iceberg": ["number"]})
    scene = make(make_project, [(1, 1.0)])
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "pyiceberg" else found(name)
    )
    with pytest.raises(ConfigError, match="pip install 'precompute-store"):
        check_before(scene, "numbers")


def test_a_table_that_cannot_be_written_fails_no_run(
    make_project: MakeProject, caplog: Log
) -> None:
    scene = make(make_project, [(1, 1.0)])
    (scene.root / "numbers").mkdir(parents=True)
    (scene.root / "numbers" / "iceberg").write_text("in the way")
    report = scene.run()
    assert report.status == "published"
    (line,) = [line for line in report.attention if "Iceberg" in line]
    assert line.startswith("the Iceberg table is behind until the next run: ")
    (scene.root / "numbers" / "iceberg").unlink()
    scene.run()
    assert check(scene) == [1]


@pytest.mark.skipif(not ROOTS.is_here("s3"), reason="there are no roots in object stores here")
def test_a_table_lies_where_an_object_root_lies(
    bucket: ObjectStore, make_project: MakeProject
) -> None:
    root = {"root": bucket.root, "online": "table:./online"}
    scene = make(make_project, [(i, float(i)) for i in range(50)], root)
    scene.run()
    make(make_project, [(i, float(i) + (i == 3)) for i in range(1, 50)], root)
    scene.run()
    properties = {
        "s3.endpoint": bucket.url,
        "s3.access-key-id": KEYS["AWS_ACCESS_KEY_ID"],
        "s3.secret-access-key": KEYS["AWS_SECRET_ACCESS_KEY"],
        "s3.region": "us-east-1",
    }
    assert check(scene, **properties) == [1, 2]
