"""Records: one codec; every shape that was ever written is read, and what a later version adds is not looked at."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precompute.jobs.schedule.backfill_state import Backfill, Item, Options
from precompute.store.disk.lease import Holder
from precompute.store.offline.journal import Finished
from precompute.store.offline.refs import BadMark, LiveRef, Place
from precompute.store.offline.row_figures import RowFigures, VectorFigures
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Part, Verdict
from precompute.store.record import Record, plain, read_record, record_of, sealed, written

PART: dict[str, Any] = {"path": "data/r/part-00000.parquet", "rows": 3, "size_bytes": 7, "sha256": "ab"}

SHAPES: list[tuple[type[Any], dict[str, Any], Any]] = [
    # as the first version wrote it, and each later shape that has another field
    (
        Report,
        {"run": "r", "view": "v", "command": "run", "status": "published", "snapshot": 2, "counts": {"source": 3}, "inputs": {}},
        Report("r", "v", "run", "published", snapshot=2, counts={"source": 3}),
    ),
    (
        Report,
        {"run": "r", "view": "v", "command": "run", "stages_s": {"open": 1}, "gates": [{"gate": "rows", "passed": True}]},
        Report("r", "v", "run", stages_s={"open": 1.0}, gates=[Verdict("rows", True)]),
    ),
    (
        Report,
        {"run": "r", "view": "v", "command": "materialize", "partition": "p", "backfill": "b", "due": "d", "parents": {"a": 3}},
        Report("r", "v", "materialize", partition="p", backfill="b", due="d", parents={"a": 3}),
    ),
    (
        LiveRef,
        {"epoch": 3, "snapshot": 2, "previous": 1, "reason": "run", "at": "now"},
        LiveRef(3, 2, 1, "run", "now"),
    ),
    (
        LiveRef,
        {"epoch": 3, "snapshot": 2, "previous": None, "reason": "run", "at": "now", "generation": 2, "renewed_at": 5},
        LiveRef(3, 2, None, "run", "now", renewed_at=5, place=Place(2, 2)),
    ),
    (
        LiveRef,
        {"epoch": 3, "snapshot": 2, "previous": 1, "reason": "run", "at": "now", "generation": 3, "previous_generation": 2},
        LiveRef(3, 2, 1, "run", "now", place=Place(3, 2), previous_place=Place(2, 1)),
    ),
    (
        LiveRef,
        {
            "epoch": 3,
            "snapshot": 2,
            "previous": 1,
            "reason": "run",
            "at": "now",
            "generation": 2,
            "previous_generation": 2,
            "place": {"generation": 2, "base_snapshot": 1, "overlays": [[3, 2]], "lossy": True},
            "previous_place": {"generation": 2, "base_snapshot": 1},
        },
        LiveRef(3, 2, 1, "run", "now", place=Place(2, 1, ((3, 2),), True), previous_place=Place(2, 1)),
    ),
    (BadMark, {"reason": "rolled back from"}, BadMark("rolled back from")),
    (BadMark, {"reason": "x", "at": "now", "content": "c", "rows": False}, BadMark("x", "now", "c", False)),
    (Holder, {"fence": 1, "holder": "run", "host": "h", "pid": 2, "ttl_s": 60}, Holder(1, "run", "h", 2, 60.0)),
    (Finished, {"part": PART, "rejected": None}, Finished(Part(**PART), None)),
    (
        Finished,
        {
            "part": None,
            "rejected": PART,
            "figures": {
                "rows": 3,
                "not_finite": 0,
                "valueless": 1,
                "nulls": {"x": 1},
                "vectors": {"e": {"rows": 2, "zero": 0, "norm_sum": 2, "norms": {"2032": 2}}},
            },
        },
        Finished(None, Part(**PART), RowFigures(3, 0, 1, {"x": 1}, {"e": VectorFigures(2, 0, 2.0, {2032: 2})})),
    ),
    (
        Backfill,
        {
            "id": "1",
            "view": "v",
            "options": {"first": "2026-01-01", "last": "2026-01-02"},
            "items": [{"partition": "p", "why": "missing"}, {"partition": "q", "why": "failed", "state": "done", "rows": 3}],
            "created_at": "now",
        },
        Backfill(
            "1",
            "v",
            Options("2026-01-01", "2026-01-02"),
            [Item("p", "missing"), Item("q", "failed", "done", rows=3)],
            created_at="now",
        ),
    ),
]
"""Manifests and online pointers have tests of their own, since they have a checksum, or travel to other machines."""


@pytest.mark.parametrize(("kind", "shape", "record"), SHAPES)
def test_every_released_shape_is_read(kind: type[Any], shape: dict[str, Any], record: Any) -> None:
    assert read_record(kind, json.dumps(shape).encode()) == record
    assert read_record(kind, json.dumps(shape | {"of a later version": [1]}).encode()) == record
    assert read_record(kind, written(record)) == record
    assert read_record(kind, sealed(record)) == record


class Sample(Record, frozen=True):
    name: str
    share: float = 0.5
    counts: dict[str, int] = {}  # noqa: RUF012 - copied for each record


@pytest.mark.parametrize(
    "data", [b"", b"{", b"7", b"\xff", b"{}", b"[" * 100_000, b'{"name": 7}', b'{"name": "a", "counts": {"x": 1.5}}']
)
def test_what_is_no_such_record_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_record(Sample, data)


def test_a_flipped_bit_of_what_is_sealed_is_told_or_changes_nothing() -> None:
    sample = Sample("é\n", math.inf, {"x": 10, "y": -1})
    whole = sealed(sample)
    assert read_record(Sample, sealed(json.loads(written(sample)) | {"of a later version": [1.5]})) == sample
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ValueError):
            assert read_record(Sample, bytes(flipped)) == sample


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match=r"Expected `str`, got `int` - at `\$\.name`"):
        record_of(Sample, {"name": 7})


def test_numbers_that_are_none_come_back_and_foreign_values_are_written_plainly() -> None:
    back = read_record(Sample, written(Sample("a", math.nan)))
    assert math.isnan(back.share)
    assert read_record(Sample, written(Sample("a", math.inf))).share == math.inf
    mixed = {"path": Path("x"), "number": np.float64(0.5), "record": Sample("a")}
    assert plain(mixed) == {"path": "x", "number": 0.5, "record": {"name": "a", "share": 0.5, "counts": {}}}
