"""Records: one codec; what a later version adds within a format is not looked at, and what it needs
is."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest

from precompute.store.disk import record
from precompute.store.disk.record import (
    FORMAT,
    Record,
    check_format,
    plain,
    read_record,
    record_of,
    sealed,
    whole_record,
)
from precompute.store.errors import OtherFormatError


class Sample(Record, frozen=True):
    name: str
    share: float = 0.5
    counts: dict[str, int] = {}  # noqa: RUF012 - copied for each record


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"7",
        b"\xff",
        b"{}",
        b"[" * 100_000,
        b'{"name": 7}',
        b'{"name": "a", "counts": {"x": 1.5}}',
    ],
)
def test_what_is_no_such_record_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_record(Sample, data, "a sample")


def test_a_flipped_bit_of_what_is_sealed_is_seen_or_changes_nothing() -> None:
    sample = Sample("é\n", math.inf, {"x": 10, "y": -1})
    whole = sealed(sample)
    assert read_record(Sample, sealed(plain(sample) | {"of a later version": [1.5]}), "") == sample
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ValueError):
            assert read_record(Sample, bytes(flipped), "a sample") == sample


def test_what_a_record_needs_has_to_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    needy = sealed(Sample("a"), needs=("colours", "kills"))
    with pytest.raises(OtherFormatError, match="that needs 'colours', 'kills', unknown here"):
        read_record(Sample, needy, "a sample")
    monkeypatch.setattr(record, "KNOWN", frozenset({"kills"}))
    with pytest.raises(OtherFormatError, match="that needs 'colours', unknown here"):
        whole_record(Sample, needy, "a sample")
    monkeypatch.setattr(record, "KNOWN", frozenset({"kills", "colours"}))
    assert read_record(Sample, needy, "a sample") == Sample("a")
    assert whole_record(Sample, needy[:-1], "a sample") is None
    for odd in (7, "kill", {"a": 1}, [["kills"]]):
        with pytest.raises(OtherFormatError, match="unknown here"):
            check_format({"format": FORMAT, "needs": odd}, "a sample")


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match=r"Expected `str`, got `int` - at `\$\.name`"):
        record_of(Sample, {"name": 7})


def test_nan_and_infinity_come_back_and_foreign_values_are_plain() -> None:
    back = read_record(Sample, sealed(Sample("a", math.nan)), "a sample")
    assert math.isnan(back.share)
    assert read_record(Sample, sealed(Sample("a", math.inf)), "a sample").share == math.inf
    mixed = {"path": Path("x"), "number": np.float64(0.5), "record": Sample("a")}
    assert plain(mixed) == {
        "path": "x",
        "number": 0.5,
        "record": {"name": "a", "share": 0.5, "counts": {}},
    }
