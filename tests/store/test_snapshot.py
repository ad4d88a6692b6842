"""A manifest comes back as it was written, or is refused: torn, edited, or of another format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from precompute.store.disk.record import FORMAT, replace
from precompute.store.errors import OtherFormatError, SnapshotError
from precompute.store.feature_view import (
    Definition,
    Feature,
    FeatureView,
    IndexSpec,
    LibraryCheck,
    ModelUse,
    Substitute,
)
from precompute.store.offline.segment import Part, Segment
from precompute.store.offline.snapshot import Counts, Snapshot, Verdict

VIEW = FeatureView(
    "numbers",
    ("id",),
    (Feature("double", "float64"), Feature("vector", "float32", dim=4)),
    ttl_s=3600.0,
    stale_for_s=60.5,
    index=IndexSpec("vector"),
    definition=Definition('SELECT \'é, "zz_sha256": "\'', ModelUse("x")),
)
LOW, _ = Segment(
    0, "20240101T000000-aa", "e" * 64, 7, (Part("data/q/part-00000.parquet", 3, 123, "f" * 64),)
).numbered(11)
OWN, RECORD = Segment(
    0,
    "20250101T000000-ab",
    "e" * 64,
    7,
    (
        Part("data/r/part-00000.parquet", 3, 1234, "a" * 64),
        Part("data/r/part-00001.parquet", 2, 99, "b" * 64),
    ),
    Part("data/r/kills.parquet", 3, 20, "d" * 64),
    own_kills=1,
    removed=1,
    merged=("10-abcdefab",),
).numbered(12)
SEGMENTS = {one.name: one for one in (LOW, OWN)}


def segment_of(name: str, sha256: str) -> Segment:
    assert SEGMENTS[name].sha256 == sha256
    return SEGMENTS[name]


FULL = Snapshot(
    view=VIEW,
    run="20250101T000000-ab",
    model="f" * 64,
    counts=Counts(source=6, written=4, rejected=1, unchanged=1, removed=1, duplicates=2),
    segments=(LOW, OWN),
    rejected=Part("data/r/rejected.parquet", 1, 10, "c" * 64),
    created_at="2025-01-01T00:00:00.000001+00:00",
    computed_at_min=-1,
    computed_at_max=2**62,
    inputs={"other": 3},
    input_columns={"x": "double"},
    timings_s={"model": 0.125},
    versions={"torch": "1"},
    number=12,
    parent=11,
    recipe="e" * 64,
    content="e:6-1",
    partition="2025-01-01T00:00Z/2025-01-02T00:00Z",
    renewed_at=2**53 + 1,
    quality={"vector.zero": 0.0},
    limits={"vector.zero": (None, 0.25)},
    nights=Part("data/r/nights.json", 9, 100, "1" * 64),
    anchors=(
        Part("data/q/anchor.parquet", 512, 100, "2" * 64),
        Part("data/r/anchor.parquet", 512, 100, "3" * 64),
    ),
    announced="a sale, by gates.expect",
    gates=(
        Verdict("coverage", False, 0.5, 0.8, "é"),
        Verdict("null", True, 0.5, 0.1, "é", warned=True, figures=("vector.zero",)),
    ),
    substitute=Substitute(
        ModelUse("mine:Small", {"path": "./students/a"}), "a" * 64, {"vector": 0.75}
    ),
    fence=3,
    code={"mine.py": "ab" * 8, "numpy": "2.0"},
    library=LibraryCheck("equal", "numpy", "equal to numpy 2.0 in 8 rows (3e-6)", "2.0", 8, 3e-6),
)
SMALL = Snapshot(VIEW, "r", "m", Counts(0, 0), (), None, "now", None, None)


def resealed(manifest: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The manifest as another version of the writer would have made it: changed, and with the right
    checksum."""
    body = json.loads(manifest)
    del body["zz_sha256"]
    change(body)
    text = json.dumps(body, indent=1, sort_keys=True)[: -len("\n}")]
    return f'{text},\n "zz_sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()


@pytest.mark.parametrize("snapshot", [FULL, SMALL], ids=["full", "small"])
def test_a_snapshot_comes_back_equal_from_its_manifest(snapshot: Snapshot) -> None:
    manifest = snapshot.to_bytes()
    back = Snapshot.from_bytes(manifest, "here", segment_of)
    assert back == snapshot
    assert back.to_bytes() == manifest


def test_a_manifest_is_plain_json_for_anybody() -> None:
    body = json.loads(FULL.to_bytes())
    assert body["format"] == FORMAT
    assert body["view_fingerprint"] == VIEW.fingerprint()
    assert body["segments"] == [{"name": one.name, "sha256": one.sha256} for one in (LOW, OWN)]
    assert set(body) - {"format", "view_fingerprint", "zz_sha256"} == set(
        Snapshot.__struct_fields__
    )


def test_the_bytes_of_a_manifest_are_pinned() -> None:
    """A change here is a change of the format: its readers must still understand it, or the number
    goes up."""
    assert FORMAT == 3
    assert (
        hashlib.sha256(FULL.to_bytes()).hexdigest()
        == "567021df6b6566721b0b416a001204cc81d8757f76d0b3358a159f8175c3ba2e"
    )


@pytest.mark.parametrize(
    ("gates", "failed"),
    [
        ([("a", True)], ()),
        ([("a", False), ("b", True), ("c", False), ("a", False)], ("a", "c")),
    ],
)
def test_which_gates_refused_a_snapshot(
    gates: list[tuple[str, bool]], failed: tuple[str, ...]
) -> None:
    verdicts = tuple(Verdict(name, passed) for name, passed in gates)
    assert replace(SMALL, gates=verdicts).failed_gates == failed


def test_a_manifest_torn_or_changed_in_any_way_is_refused() -> None:
    whole = FULL.to_bytes()
    damaged = [
        *(whole[:length] for length in range(len(whole))),
        *(
            whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
            for at in range(len(whole))
            for flip in (0x01, 0x20, 0x80, 0xFF)
        ),
        whole + b"\n",
        whole.replace(b'"number": 12', b'"number": 13'),
        json.dumps(json.loads(whole)).encode(),
        b"\0" * len(whole),
        b',\n "zz_sha256": "' + hashlib.sha256(b"").hexdigest().encode() + b'"\n}\n',
    ]
    for data in damaged:
        with pytest.raises(SnapshotError, match="/some/where is torn or was edited"):
            Snapshot.from_bytes(data, "/some/where", segment_of)


@pytest.mark.parametrize(
    "said", [{"format": 0}, {"format": 4}, {"format": "3"}, {"format": 3.5}, {"needs": ["x"]}]
)
def test_a_manifest_of_a_format_this_version_does_not_know_is_refused(said: Any) -> None:
    newer = resealed(FULL.to_bytes(), lambda body: body.update(said))
    with pytest.raises(OtherFormatError, match=r"^here is of format .* whole, and left as it is"):
        Snapshot.from_bytes(newer, "here", segment_of)


@pytest.mark.parametrize(
    "change", [{"counts": None}, {"segments": [{"name": 7}]}, {"view": {"name": "items"}}]
)
def test_a_manifest_that_says_something_else_is_refused(change: dict[str, Any]) -> None:
    other = resealed(FULL.to_bytes(), lambda body: body.update(change))
    with pytest.raises(
        SnapshotError, match=r"here is of format 3, and not as that has it .*\$\..*run the view"
    ):
        Snapshot.from_bytes(other, "here", segment_of)


@pytest.mark.parametrize(
    "path",
    [
        (),
        ("counts",),
        ("segments", 0),
        ("view", "features", 0),
    ],
    ids=lambda path: ".".join(map(str, path)) or "top",
)
def test_fields_of_a_later_minor_version_are_ignored(path: tuple[Any, ...]) -> None:
    def add(body: dict[str, Any]) -> None:
        node: Any = body
        for step in path:
            node = node[step]
        node["from_the_future"] = {"a": 1}

    assert Snapshot.from_bytes(resealed(FULL.to_bytes(), add), "here", segment_of) == FULL


def test_counts_add_up_or_a_row_was_lost_or_doubled() -> None:
    for right in (
        Counts(5, 1, rejected=2, unchanged=2, removed=1),
        Counts(0, 0, removed=7),
        Counts(1, 1, duplicates=9),
    ):
        right.check()
    for wrong in (
        Counts(4, 5),
        Counts(5, 5, rejected=1),
        Counts(6, 1, rejected=2, unchanged=2, removed=1),
        Counts(5, 4, removed=1),
        Counts(5, 4, duplicates=1),
    ):
        with pytest.raises(SnapshotError, match=f"{wrong.source} rows came from the source"):
            wrong.check()


# ---- the record of a segment


def test_a_segment_comes_back_equal_from_its_record() -> None:
    digest = hashlib.sha256(RECORD).hexdigest()
    assert (OWN.sha256, OWN.size_bytes, OWN.name) == (digest, len(RECORD), f"12-{digest[:8]}")
    assert Segment.from_bytes(RECORD, "here", digest) == OWN
    assert OWN.to_bytes() == RECORD
    assert (OWN.rows, OWN.weight, json.loads(RECORD)["weight"]) == (5, 8, 8)
    assert OWN.record == Part(f"segments/{OWN.name}.json", 0, len(RECORD), digest)
    assert (FULL.own, FULL.names, FULL.kind) == (OWN, (LOW.name, OWN.name), "delta")
    assert FULL.parts == LOW.parts + OWN.parts
    assert FULL.files == (*FULL.parts, OWN.kills)


def test_a_record_torn_or_changed_is_refused_before_it_is_parsed() -> None:
    for data in (
        *(RECORD[:length] for length in range(len(RECORD))),
        *(RECORD[:at] + bytes([RECORD[at] ^ 1]) + RECORD[at + 1 :] for at in range(len(RECORD))),
        RECORD + b"\n",
    ):
        with pytest.raises(SnapshotError, match="here differs from its checksum in the manifest"):
            Segment.from_bytes(data, "here", OWN.sha256)


def test_a_record_of_another_shape_is_refused_and_later_fields_pass() -> None:
    body = json.loads(RECORD)
    for change, said in (({"parts": [{"path": 7}]}, "other"), ({"later": 1}, None)):
        data = json.dumps(body | change).encode()
        digest = hashlib.sha256(data).hexdigest()
        if said is None:
            known = Segment.from_bytes(data, "here", digest)
            assert replace(known, sha256=OWN.sha256, size_bytes=OWN.size_bytes) == OWN
            # its name stays that of its bytes
            assert known.sha256 == digest
            continue
        with pytest.raises(SnapshotError, match=r"here is of format 3, and not as that has it"):
            Segment.from_bytes(data, "here", digest)
    data = json.dumps(body | {"format": 4}).encode()
    with pytest.raises(OtherFormatError, match=r"^here is of format 4"):
        Segment.from_bytes(data, "here", hashlib.sha256(data).hexdigest())
