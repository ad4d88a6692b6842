"""Verify: every kind of damage to what is live is found, and named for what it is."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from precompute.jobs.ops.verify import Check, verify
from precompute.store.disk.lease import take
from precompute.store.disk.record import plain, replace
from precompute.store.offline.log import PUBLISH_LEASE
from precompute.store.offline.runs import Report
from precompute.store.online.codec import RowCodec
from precompute.store.online.online_store import OnlineStore
from precompute.store.online.table_file import TableWriter
from precompute.store.online.url import open_online_store
from tests.fixtures import MakeProject, Prepared
from tests.online import batch_of, of_number
from tests.online_rig import rigged
from tests.scene import UNJUDGED, Scene

CHECKS = ["manifest", "checksums", "rows", "online pointer", "online rows", "index", "account"]
ROWS = 60
INDEXED = {"index": {"on": "vector", "metric": "l2"}}


def chain(make_project: MakeProject, online: str = "table:./online", **view: Any) -> Scene:
    """A view whose live snapshot is two deltas on a full one."""
    for step in range(3):
        rows = [(i, i + 0.5 if i < step else float(i)) for i in range(ROWS)]
        project = make_project(rows, project={"online": online}, view=INDEXED | view)
        project.run()
    return project


def bad(project: Scene) -> dict[str, str]:
    """Check → what was found, of those that are not ok."""
    return {c.check: c.found for c in verify(project, "numbers") if not c.ok}


def parts(project: Scene) -> list[Path]:
    """Of the live snapshot: the lowest segment's first."""
    return [project.root / "numbers" / part.path for part in project.live_snapshot().parts]


def test_all_is_well(prepared: Prepared, online: str, capsys: pytest.CaptureFixture[str]) -> None:
    project = prepared(chain, online)
    capsys.readouterr()
    assert project.cli("verify", "numbers") == 0
    lines = capsys.readouterr().out.splitlines()
    named = ", ".join(project.live_snapshot().names)
    assert lines[0] == f"ok   numbers: manifest: snapshot 3, epoch 3; segments: {named}"
    assert lines[1].startswith("ok   numbers: checksums: 3 parts, ")
    assert lines[2:4] == [
        "ok   numbers: rows: 60 rows, as the manifest says",
        "ok   numbers: online pointer: snapshot 3, epoch 3, segments "
        + ", ".join(project.live_snapshot().names),
    ]
    found_themselves = re.fullmatch(
        r"ok   numbers: index: 60 vectors; (\d+) sampled ones find themselves", lines[5]
    )
    assert found_themselves
    assert (
        16 <= int(found_themselves[1]) <= 32
    )  # of the part of two rows, both may be drawn once more
    # of all views where none is named
    assert project.cli("verify", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], [(c["view"], c["check"]) for c in found["checks"]]) == (
        True,
        [("numbers", check) for check in CHECKS],
    )


def test_a_view_without_an_index_and_one_with_texts(make_project: MakeProject) -> None:
    project = make_project([("a/b", 1.0), ("é", 2.0)])
    project.run()
    assert verify(project, "numbers")[-2] == Check(
        "online rows", True, "2 sampled rows equal those in Parquet"
    )


def test_vectors_that_are_all_alike_verify(make_project: MakeProject) -> None:
    rows = [(i, 1.0) for i in range(50)]
    for metric in ("l2", "cosine", "dot"):
        project = make_project(
            rows,
            view={
                "index": {"on": "vector", "metric": metric},
                "gates": {"first": None, "contract": None},
            },
        )
        project.run(full=True)
        assert bad(project) == {}


def test_what_was_published_while_it_was_verified_is_verified_again(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project([(1, 1.0)])
    project.run()
    published = list[Report]()

    def opened(url: Any) -> OnlineStore:
        if not published:
            published.append(make_project([(1, 2.0)]).run())
        return open_online_store(url)

    monkeypatch.setattr("precompute.jobs.ops.verify.open_online_store", opened)
    assert bad(project) == {}
    assert [report.snapshot for report in published] == [2]


def test_a_pointer_that_is_about_to_follow_the_other_is_waited_for(
    make_project: MakeProject,
) -> None:
    """Whoever publishes moves one after the other."""
    project = make_project([(1, 1.0)])
    project.run()
    pointer, store = project.pointer(), project.store
    with (
        project.online_store() as online,
        take(store.leases, PUBLISH_LEASE, "a publishing", ttl_s=60),
    ):
        ref = store.log.move_live(1, expected_epoch=1, reason="loaded again")
        follows = threading.Timer(0.2, online.flip, [replace(pointer, epoch=2, at=ref.at)])
        follows.start()
        found = bad(project)
        follows.join()
    assert found == {}
    store.log.move_live(1, expected_epoch=2, reason="and nobody publishes")
    assert list(bad(project)) == ["online pointer"]


def test_exit_status_and_json_for_alerting(
    prepared: Prepared, capsys: pytest.CaptureFixture[str]
) -> None:
    project = prepared(chain)
    parts(project)[0].unlink()
    capsys.readouterr()
    assert project.cli("verify", "numbers", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert next(c["check"] for c in found["checks"] if not c["ok"]) == "checksums"
    assert project.cli("verify", "numbers") == 1
    assert "BAD  numbers: checksums: " in capsys.readouterr().out
    assert project.cli("verify", "nothing") == 2


def test_a_view_that_is_not_published(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)])
    assert verify(project, "numbers") == [
        Check("manifest", False, "nothing is live: precompute run numbers")
    ]


# ---- offline


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [gone, cut, flipped])
@pytest.mark.parametrize("name", ["part-00000.parquet", "kills.parquet"])
def test_a_damaged_file_of_a_segment_is_found_and_named(
    prepared: Prepared, name: str, damage: Callable[[Path], None]
) -> None:
    project = prepared(chain)
    store = project.store
    path = project.root / "numbers" / "data" / store.snapshot(2).run / name
    damage(path)
    assert str(path) in bad(project)["checksums"]


@pytest.mark.parametrize(("number", "damage"), [(1, gone), (2, cut), (3, flipped)])
def test_a_damaged_record_of_a_segment_or_manifest_is_found(
    prepared: Prepared, number: int, damage: Callable[[Path], None]
) -> None:
    project = prepared(chain)
    path = project.root / "numbers" / project.live_snapshot().segments[number - 1].record.path
    damage(path)
    found = bad(project)
    assert list(found) == ["manifest"]
    assert str(path) in found["manifest"]
    project.run(full=True)
    # of older snapshots it is told, as by status, until they are given up
    (told,) = bad(project).values()
    assert told == project.status()["attention"][0]
    for older in range(number, 4):
        assert f"gc --forget numbers {older}" in told
        project.cli("gc", "--forget", "numbers", str(older))
    assert bad(project) == {}
    damage(project.store.manifest_path(4))
    found = bad(project)
    assert list(found) == ["manifest"]
    assert "4.json" in found["manifest"] or "no snapshot 4" in found["manifest"]


# ---- online


def held_by(key: bytes) -> int:
    """The number of the segment that holds a row of :func:`chain`: upper ones have those that
    changed."""
    return {b"0": 2, b"1": 3}.get(key, 1)


def put(project: Scene, key: bytes, value: bytes | None) -> None:
    """Writes a row into a live segment behind the store's back; None removes it."""
    number = held_by(key)
    if project.online.startswith("table:"):
        folder = Path(project.online.removeprefix("table:")) / "numbers"
        path = of_number(folder, number, ".table")
        with project.online_store() as store:
            keys = [b"%d" % i for i in range(ROWS)]
            (segment,) = (s for s in store.segments("numbers") if s.number == number)
            found = store.read_segments("numbers", [segment.name], keys).values
        table = {k: bytes(v) for k, v in zip(keys, found, strict=True) if v is not None}
        table = {k: v for k, v in (table | {key: value}).items() if v is not None}
        with TableWriter(path, plain(segment) | {"view": "numbers"}, 2**20) as writer:
            writer.add(batch_of(table))
            writer.finish()
    else:
        rigged(project.online).put(project.online, "numbers", number, key, value)


def row(project: Scene, key: bytes) -> bytes:
    with project.online_store() as store:
        names = [s.name for s in store.segments("numbers") if s.number == held_by(key)]
        (found,) = store.read_segments("numbers", names, [key]).values
        assert found is not None
        return bytes(found)


def test_a_changed_online_row_is_found_and_named(prepared: Prepared, online: str) -> None:
    project = prepared(chain, online)
    for key in (b"0", b"17", b"59"):  # of each layer
        right = row(project, key)
        for wrong in (
            right[:-1] + bytes([right[-1] ^ 1]),
            right[:-1],
            b"x",
            bytes([right[0] ^ 1]) + right[1:],
        ):
            put(project, key, wrong)
            found = bad(project)
            assert list(found) == ["online rows"]
            assert found["online rows"].startswith(
                f"key {key.decode()!r} of view 'numbers' has other bytes than in Parquet in the online store: precompute publish numbers"
            )
        put(project, key, right)
    assert bad(project) == {}


def test_an_online_row_of_another_time_is_found(prepared: Prepared, online: str) -> None:
    """Its values are right, and its checksum is: readers would take it for younger than it is."""
    project = prepared(chain, online)
    base = project.snapshot(1)
    (table,) = project.store.batches(base)
    later = pc.add(table.column("computed_at"), pa.scalar(1_000_000, pa.duration("us")))
    rows = RowCodec(base.view).row_batch(
        table.set_column(table.schema.get_field_index("computed_at"), "computed_at", later),
        base.view.entity,
        base.number,
    )
    at = table.column("id").to_pylist().index(17)
    put(project, b"17", bytes(rows.rows.at(at)))
    assert list(bad(project)) == ["online rows"]


def test_a_missing_online_row_is_found_and_named(prepared: Prepared, online: str) -> None:
    project = prepared(chain, online)
    put(project, b"17", None)
    found = bad(project)
    assert list(found) == ["online rows"]
    assert found["online rows"].startswith(
        "key '17' of view 'numbers' is missing in the online store: precompute publish numbers"
    )
    remedy = found["online rows"].partition(": precompute ")[2].split()
    assert project.cli(*remedy) == 0
    assert bad(project) == {}


def test_an_online_pointer_that_is_behind_is_found(prepared: Prepared, online: str) -> None:
    project = prepared(chain, online)
    store = project.store
    ref, reason = project.live(), "a crash between the two pointers"
    store.log.move_live(2, expected_epoch=3, reason=reason, indexes=ref.previous_indexes)
    found = bad(project)
    assert found["online pointer"] == (
        "the online store serves snapshot 3, epoch 3, live is snapshot 2, epoch 4: precompute publish numbers --snapshot 2"
    )
    assert project.cli("publish", "numbers", "--snapshot", "2") == 0
    assert bad(project) == {}


# ---- the index


def index_folder(project: Scene, number: int = 3) -> Path:
    return of_number(project.root / "numbers" / "index", number)


@pytest.mark.parametrize(
    "name", ["vectors.faiss", "rows.arrow", "hashes.arrow", "gone.arrow", "meta.json"]
)
@pytest.mark.parametrize("damage", [gone, cut, flipped])
def test_a_damaged_index_is_found(
    prepared: Prepared, name: str, damage: Callable[[Path], None]
) -> None:
    project = prepared(chain)
    damage(index_folder(project) / name)
    found = bad(project)
    assert list(found) == ["index"]
    assert str(index_folder(project)) in found["index"]


def test_another_segments_index_in_its_place_is_found(
    make_project: MakeProject, prepared: Prepared
) -> None:
    project = prepared(chain)
    make_project(
        [(i, float(i)) for i in range(50)], project={"online": "table:./online"}, view=INDEXED
    ).run()
    first, last = (index_folder(project, number) for number in (1, 4))
    shutil.rmtree(last)
    shutil.copytree(first, last)
    assert f"(it is the index numbers/{first.name})" in bad(project)["index"]


@pytest.mark.parametrize(("metric", "rows"), [("cosine", 6), ("dot", 60), ("l2", 6)])
def test_an_index_of_another_snapshot_with_as_many_rows_is_found(
    make_project: MakeProject, metric: str, rows: int
) -> None:
    view = {
        "index": {"on": "vector", "metric": metric},
        # all numbers change their signs
        "gates": UNJUDGED,
    }
    for sign in (1.0, -1.0):
        project = make_project([(i, sign * (i * i + 1)) for i in range(rows)], view=view)
        project.run()
    assert bad(project) == {}
    first, second = (index_folder(project, number) for number in (1, 2))
    shutil.rmtree(second)
    shutil.copytree(first, second)
    assert list(bad(project)) == ["index"]
