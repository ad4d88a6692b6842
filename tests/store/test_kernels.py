"""Kernels, each of both kinds: equal to the published hash, on every length, and to each other."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from precompute.store.online import kernels
from precompute.store.online.kernels import (
    ABSENT,
    DAMAGED,
    FOUND,
    LARGEST_KEY,
    Packed,
    hashes,
    lay_out,
    pack,
    pack_texts,
    verified,
)

pytestmark = pytest.mark.usefixtures("kernel")


def test_hashes_are_xxh3_64_of_every_length() -> None:
    rng = np.random.default_rng(0)
    strings = [rng.bytes(size) for size in range(2101)]
    packed = Packed.of(strings)
    assert hashes(packed).tolist() == [xxhash.xxh3_64_intdigest(s) for s in strings]
    for skip in (1, 8, 3000):
        assert hashes(packed, skip).tolist() == [
            xxhash.xxh3_64_intdigest(s[skip:]) for s in strings
        ]
    assert hashes(packed.slice(1000, 1003)).tolist() == [
        xxhash.xxh3_64_intdigest(s) for s in strings[1000:1003]
    ]
    assert hashes(Packed.of([])).dtype == np.uint64


def test_strings_are_packed_and_hashed() -> None:
    for strings in ([], [b""], [b"a\0b", b"", b"c" * 300], [b"%d" % i for i in range(100)]):
        packed, found = pack(strings)
        assert [bytes(s) for s in packed.strings()] == strings
        assert found.tolist() == [xxhash.xxh3_64_intdigest(s) for s in strings]
        assert (str(packed.offsets.dtype), str(found.dtype)) == ("int64", "uint64")
        assert pack(tuple(strings))[1].tolist() == found.tolist()
    with pytest.raises(TypeError):
        pack([b"a", "b"])  # type: ignore[list-item]


def test_texts_are_packed_hashed_and_checked_whether_they_are_keys() -> None:
    for texts, keys in (
        ([], True),
        (["a"], True),
        (["é" * 4, "a", "😀😀"], True),
        ([str(i) for i in range(100)], True),
        (["a", ""], False),
        (["a\0b", "c"], False),
        (["\0"], False),
        (["a", "é" * 4 + "b"], False),
    ):
        packed, found, are_keys = pack_texts(texts, 8)
        expected = [text.encode() for text in texts]
        assert ([bytes(s) for s in packed.strings()], are_keys) == (expected, keys)
        assert found.tolist() == [xxhash.xxh3_64_intdigest(s) for s in expected]
        assert (str(packed.offsets.dtype), str(found.dtype)) == ("int64", "uint64")
    for wrong in (["a", b"b"], ["a", 1], ["a", None], 7):
        with pytest.raises(TypeError):
            pack_texts(wrong, 8)  # type: ignore[arg-type]
    with pytest.raises(UnicodeEncodeError):
        pack_texts(["a", "\ud800"], 8)


def test_registers_of_every_width_give_the_same_hashes() -> None:
    if kernels.native is None:
        pytest.skip("numpy has one width")
    rng = np.random.default_rng(1)
    packed = Packed.of([rng.bytes(size) for size in [*range(200, 2400), 65_536, 100_003]])
    # the same bytes at another address: nothing is aligned
    shifted = Packed(np.concatenate((np.zeros(3, np.uint8), packed.data)), packed.offsets + 3)
    expected = [xxhash.xxh3_64_intdigest(s) for s in packed.strings()]
    widths = kernels.native.widths()
    assert widths[-1] == "portable"
    try:
        for width in widths:
            kernels.native.use(width)
            assert hashes(packed).tolist() == hashes(shifted).tolist() == expected, width
    finally:
        kernels.native.use(widths[0])
    with pytest.raises(ValueError, match="this CPU has no sse1"):
        kernels.native.use("sse1")


def test_the_extension_refuses_what_does_not_fit() -> None:
    """What numpy would raise on; in C it would be read outside of the arrays."""
    native = kernels.native
    if native is None:
        pytest.skip("numpy checks its arrays itself")
    data, out, snapshots = np.zeros(100, np.uint8), np.zeros(2, np.uint64), np.zeros(1, np.uint32)
    states, times = np.zeros(2, np.uint8), np.zeros(2, np.int64)
    for offsets in ([0, 50, 101], [0, 60, 50], [-8, 0, 50], [0, 50, -1], [0, 2**62, 50]):
        for call in (
            lambda o: native.hashes(data, o, 0, out),
            lambda o: native.verified(data, o, out, 0, snapshots, 24, True, states, times),
            lambda o: native.lay_out(data, o, data, np.array([0, 0, 0]), np.zeros(16, np.uint8)),
            lambda o: native.lay_out(data, np.array([0, 0, 0]), data, o, np.zeros(16, np.uint8)),
        ):
            with pytest.raises(ValueError, match="offsets must ascend within the data"):
                call(np.array(offsets))
    two = np.array([0, 1, 2])
    for short in (
        lambda: native.hashes(data, two, 0, out[:1]),
        lambda: native.verified(data, two, out[:1], 0, snapshots, 24, True, states, times),
        lambda: native.verified(data, two, out, 0, snapshots, 24, True, states[:1], times),
        lambda: native.verified(data, two, out, 0, snapshots, 24, True, states, times[:1]),
        lambda: native.lay_out(data, two, data, two[:2], np.zeros(48, np.uint8)),
    ):
        with pytest.raises(ValueError, match="an array of"):
            short()
    with pytest.raises(ValueError, match="do not fit their records"):
        native.lay_out(data, two, data, two, np.zeros(47, np.uint8))
    with pytest.raises(ValueError, match="offsets must ascend"):
        native.hashes(data, np.zeros(0, np.int64), 0, np.zeros(0, np.uint64))
    tables = [native.Records(np.zeros(64, np.uint8), 0, 0, 0, 1, 1, 0)]
    for below in ((None,), (object(),), (tables,)):
        with pytest.raises(TypeError, match="tables of records"):
            tables[0].read(below, data, two, out, np.zeros(3, np.int64), states)
    with pytest.raises(ValueError, match="an array of"):
        tables[0].read((), data, two, out, two[:2], states)
    for layout in (
        (8, 0, 8, 1, 2, 0),
        (0, 64, 0, 1, 1, 0),
        (0, 0, 0, 1, 2, 0),
        (0, 0, 64, 0, 0, 0),
        (0, 0, 0, 2, 1, 0),
        (0, 0, 2**63, 1, 1, 0),
    ):
        with pytest.raises(ValueError, match="must lie in the mapping"):
            native.Records(data, *layout)


def test_the_extension_refuses_columns_that_make_no_rows() -> None:
    native = kernels.native
    if native is None:
        pytest.skip("numpy checks its arrays itself")
    columns, two, out = (
        (np.zeros((2, 1), np.uint8), np.zeros((2, 5), np.uint8)),
        np.zeros(2, np.uint64),
        np.zeros(60, np.uint8),
    )
    snapshots, widths = np.zeros(2, np.uint32), np.array([1, 5], np.uint64)
    native.assemble(columns, widths, two, two, snapshots, 0, out)
    native.assemble((), widths[:0], two, two, snapshots, 0, out[:48])
    native.assemble((out[:0],), widths[:1], two[:0], two[:0], snapshots[:0], 0, out[:0])
    for wrong in (
        (columns, widths[:1], two, two, snapshots, 0, out),
        (columns, widths, two[:1], two, snapshots, 0, out),
        (columns, widths, two, two[:1], snapshots, 0, out),
        (columns, widths, two, two, snapshots[:1], 0, out),
        (columns, widths, two, two, snapshots, 0, out[:59]),
        (columns[:1], widths[:1], two, two, snapshots, 0, out),
        ((columns[0], columns[1][:1]), widths, two, two, snapshots, 0, out),
        (columns, np.array([1, 2**63], np.uint64), two, two, snapshots, 0, out),
        (columns, np.array([2**64 - 19, 24], np.uint64), two, two, snapshots, 0, out),
    ):
        with pytest.raises(ValueError, match=r"an array of|do not fit each other"):
            native.assemble(*wrong)
    with pytest.raises(TypeError):
        native.assemble((columns[0], "text"), widths, two, two, snapshots, 0, out)


COMPUTED_AT, SNAPSHOT, TAG = 1_700_000_000_000_000, 3, 2**32 - 7


def row_of(
    key: bytes,
    values: bytes,
    computed_at: int = COMPUTED_AT,
    snapshot: int = SNAPSHOT,
    tag: int = TAG,
) -> bytes:
    """A row that vouches for itself."""
    rest = struct.pack("<qII", computed_at, snapshot, tag) + values
    return (xxhash.xxh3_64_intdigest(rest) ^ xxhash.xxh3_64_intdigest(key)).to_bytes(
        8, "little"
    ) + rest


def states_of(
    rows: Sequence[bytes], keys: Sequence[bytes], size: int = 24, exact: bool = False
) -> list[int]:
    """What rows are worth under keys; and that only those that are found have a time."""
    states, times = verified(
        Packed.of(rows), hashes(Packed.of(keys)), TAG, [SNAPSHOT, 5], size, exact
    )
    assert times.tolist() == [COMPUTED_AT if state == FOUND else 0 for state in states.tolist()]
    return states.tolist()


def test_a_row_vouches_for_itself_and_its_key() -> None:
    rows = {
        row_of(b"a", bytes(9)): FOUND,
        row_of(b"a", bytes(9), snapshot=5): FOUND,
        row_of(b"a", bytes(9), snapshot=4): DAMAGED,
        row_of(b"a", bytes(9), tag=TAG + 1): DAMAGED,
        row_of(b"b", bytes(9)): DAMAGED,
        row_of(b"a", bytes(9))[:-1]: DAMAGED,
        row_of(b"a", bytes(9)) + b"\0": DAMAGED,
        row_of(b"a", b"")[:23]: DAMAGED,
        b"1": DAMAGED,
        b"": ABSENT,
        row_of(b"a", b""): ABSENT,
        row_of(b"b", b""): DAMAGED,
        row_of(b"a", b"", snapshot=4): DAMAGED,
        row_of(b"a", bytes(10)): FOUND,
        row_of(b"a", bytes(8)): DAMAGED,
    }
    expected = list(rows.values())
    assert states_of(list(rows), [b"a"] * len(rows), size=33) == expected
    expected[-2] = DAMAGED
    assert states_of(list(rows), [b"a"] * len(rows), size=33, exact=True) == expected
    # rows in the middle of a buffer, of one size, few and many
    alike = [row_of(b"%d" % i, bytes(9)) for i in range(100)]
    packed, key_hashes = (
        Packed.of([b"before", *alike, b"after"]),
        hashes(Packed.of([b"%d" % i for i in range(100)])),
    )
    for count in (1, 100):
        states, times = verified(
            packed.slice(1, count + 1), key_hashes[:count], TAG, {SNAPSHOT}, 33, True
        )
        assert (states.tolist(), times.tolist()) == ([FOUND] * count, [COMPUTED_AT] * count)
    assert (
        verified(packed.slice(1, 3), key_hashes[:2], TAG, (), 33, True)[0].tolist() == [DAMAGED] * 2
    )
    assert states_of([], []) == []
    assert states_of([b""], [b""]) == [ABSENT]


def test_records_are_laid_out_on_words() -> None:
    keys, rows = [b"", b"1234567", b"12345678", b"123456789"], [b"r" * 24, b"", b"R" * 33, b"x"]
    data, starts = lay_out(
        Packed.of([b"before", *keys]).slice(1, 5), Packed.of([*rows, b"after"]).slice(0, 4)
    )
    expected = b""
    for key, row, start in zip(keys, rows, starts.tolist(), strict=True):
        assert start == len(expected)
        expected += len(row).to_bytes(4, "little") + len(key).to_bytes(2, "little") + b"\0\0"
        expected += key.ljust(-(-len(key) // 8) * 8, b"\0") + row.ljust(
            -(-len(row) // 8) * 8, b"\0"
        )
    assert data.tobytes() == expected
    data, starts = lay_out(Packed.of([]), Packed.of([]))
    assert (len(data), len(starts)) == (0, 0)


def test_a_key_that_is_too_large_for_a_record() -> None:
    largest = bytes(LARGEST_KEY)
    assert (
        lay_out(Packed.of([largest]), Packed.of([b""]))[0].tobytes()
        == b"\0\0\0\0\xff\xff\0\0" + largest + b"\0"
    )
    with pytest.raises(ValueError, match="keys of 65536 and rows of 0 bytes; at most 65535"):
        lay_out(Packed.of([bytes(LARGEST_KEY + 1)]), Packed.of([b""]))


def test_an_extension_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules,
        "precompute.store.online._kernels",
        SimpleNamespace(VERSION=kernels._VERSION - 1),
    )
    monkeypatch.delenv("PRECOMPUTE_KERNELS", raising=False)
    assert kernels._extension() is None
    monkeypatch.setitem(
        sys.modules, "precompute.store.online._kernels", SimpleNamespace(VERSION=kernels._VERSION)
    )
    assert kernels._extension() is not None


def test_the_environment_has_a_say_in_which_kernels_run() -> None:
    code = "from precompute.store.online import kernels; print(kernels.COMPILED)"
    environment = os.environ | {"PRECOMPUTE_KERNELS": "python"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
