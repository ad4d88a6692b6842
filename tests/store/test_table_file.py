"""Table files: what is written is read; what is damaged is reported, and never absent or another
row."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from precompute.store.errors import OnlineStoreError, OtherFormatError
from precompute.store.online import kernels
from precompute.store.online.kernels import (
    ABSENT,
    DAMAGED,
    FOUND,
    Packed,
    RowBatch,
    hash_of,
    hashes,
    line_checks,
    pack,
    verified,
)
from precompute.store.online.table_file import (
    BLOCK_BYTES,
    TableFile,
    TableWriter,
    header_of,
    index_start,
)
from tests.store.test_kernels import SNAPSHOT, TAG, row_of

MEMORY_BYTES = 2**20


def batch_of(rows: Mapping[bytes, bytes]) -> RowBatch:
    keys = Packed.of(list(rows))
    return RowBatch(keys, Packed.of(list(rows.values())), hashes(keys))


def write(path: Path, *batches: Mapping[bytes, bytes], memory_bytes: int = MEMORY_BYTES) -> Path:
    with TableWriter(path, {"view": "numbers", "snapshot": 7}, memory_bytes) as writer:
        for rows in batches:
            writer.add(batch_of(rows))
        writer.finish()
    return path


def read(file: TableFile, keys: Sequence[bytes]) -> dict[bytes, bytes | int]:
    """Of each key its row, or the state without one: one after the other, few at once and many at
    once, which agree."""
    found: dict[bytes, bytes | int] = {}
    for many in (list(keys), [*keys] * 13) if len(keys) < 13 else (list(keys),):
        packed, key_hashes = pack(many)
        rows, states = file.records.read(packed, key_hashes)
        assert len(rows) == len(states) == len(many)
        worth, _ = verified(rows, key_hashes, TAG, [SNAPSHOT], 24, exact=False)
        before, found = found, {}
        for key, row, state, whole in zip(
            many, rows.strings(), states.tolist(), worth.tolist(), strict=True
        ):
            assert bool(len(row)) == (state == FOUND)
            assert file.find(key) == {ABSENT: None, FOUND: row.tobytes(), DAMAGED: b""}[state]
            found[key] = (
                ABSENT
                if state == ABSENT
                else DAMAGED
                if DAMAGED in (state, whole)
                else row.tobytes()
            )
        assert before in ({}, found)
    return found


def numbered(start: int, stop: int, size: int = 40) -> dict[bytes, bytes]:
    keys = [str(i).encode() for i in range(start, stop)]
    return {key: row_of(key, key.ljust(size, b".")) for key in keys}


def test_rows_come_back(tmp_path: Path) -> None:
    rows = numbered(0, 3000) | numbered(3000, 3300, size=1537)
    with TableWriter(
        tmp_path / "rows.table", {"view": "ünits", "at": [1, None]}, MEMORY_BYTES
    ) as writer:
        items = list(rows.items())
        for at in range(0, len(items), 700):
            writer.add(batch_of(dict(items[at : at + 700])))
        written = writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.table"]
    file = TableFile(tmp_path / "rows.table")
    assert (file.rows, file.meta) == (3300, {"view": "ünits", "at": [1, None]})
    size_bytes = (tmp_path / "rows.table").stat().st_size
    assert (file.rows, written, file.size_bytes) == (3300, 3300, size_bytes)
    assert read(file, list(rows)) == rows
    for few in (1, 11, 13, 100):
        some = list(rows)[-few:]
        assert read(file, some) == {key: rows[key] for key in some}
    absent = [b"x%d" % i for i in range(3000)]
    assert read(file, absent) == dict.fromkeys(absent, ABSENT)
    mixed = [b"1", b"x", b"3299", b"1", b"", *absent[:30]]
    assert read(file, mixed) == {b"1": rows[b"1"], b"3299": rows[b"3299"]} | dict.fromkeys(
        [b"x", b"", *absent[:30]], ABSENT
    )
    assert file.check() == []
    assert 0 < file.warm(2**30) < file.size_bytes
    assert file.warm(100) == 100


@pytest.mark.usefixtures("kernel")
def test_the_first_table_that_has_something_answers(tmp_path: Path) -> None:
    """Rows of one size and of several, in one table over the other; a tombstone stands, and so does
    damage."""
    for size in (40, 60):
        base, newer = numbered(0, 200), numbered(0, 60, size=size)
        newer = {key: row for key, row in newer.items() if int(key) % 3 == 0}
        newest = {b"7": row_of(b"7", b"newest"), b"9": row_of(b"9", b"")}
        files = [
            TableFile(write(tmp_path / f"{i}", rows)).records
            for i, rows in enumerate([newest, newer, base])
        ]
        for tables, above in ((files[1:], newer), (files, newer | newest)):
            for keys in (
                list(base),
                [b"0", b"1", b"none"],
                [b"199", b"none", b"9", b"7", b"7"] * 9,
                [b"none"] * 30,
            ):
                packed, key_hashes = pack(keys)
                rows, states = tables[0].read(packed, key_hashes, tables[1:])
                assert [row.tobytes() for row in rows.strings()] == [
                    above.get(key, base.get(key, b"")) for key in keys
                ]
                assert states.tolist() == [FOUND if key in base else ABSENT for key in keys]
    data = bytearray((tmp_path / "1").read_bytes())
    lines = -(-len(newer) * 2 // 7) + 1
    data[-16 - 64 * lines : -16] = bytes(64 * lines)
    (tmp_path / "1").write_bytes(data)
    packed, key_hashes = pack([b"0", b"1"] * 20)
    for count in (2, 40):
        some = packed.slice(0, count)
        assert (
            TableFile(tmp_path / "1").records.read(some, key_hashes[:count], files[2:])[1]
            == DAMAGED
        ).all()


def test_keys_of_every_byte_and_length(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    keys = (
        [bytes([value]) for value in range(256)]
        + [rng.bytes(size) for size in range(2, 512)]
        + [b"", b"\0", b"\0\0", bytes(8), bytes(9)]
    )
    keys = list(dict.fromkeys(keys))
    rows = {key: row_of(key, rng.bytes(int(rng.integers(100)))) for key in keys}
    file = TableFile(write(tmp_path / "t", rows))
    assert read(file, keys) == rows
    others = [key + b"\0" for key in keys if key + b"\0" not in rows] + [
        key[:-1] for key in keys if key and key[:-1] not in rows
    ]
    assert read(file, others) == dict.fromkeys(others, ABSENT)


# ---- the index


def keys_at_home(line: int, home_lines: int, count: int) -> list[bytes]:
    keys = [b"%d" % i for i in range(home_lines * count * 4)]
    return [key for key in keys if (hash_of(key) >> 32) * home_lines >> 32 == line][:count]


@pytest.mark.parametrize(("line", "count"), [(0, 7), (0, 15), (5, 8), (9, 14), (9, 35)])
def test_a_line_that_is_full_goes_on_in_the_next(line: int, count: int, tmp_path: Path) -> None:
    home_lines = 10
    keys = keys_at_home(line, home_lines, count)
    # 35 rows make ten lines; the last ten lines run over the end
    assert len(keys) == count
    others = [b"other %d" % i for i in range(35 - count)]
    rows = {key: row_of(key, key) for key in [*keys, *others]}
    file = TableFile(write(tmp_path / "t", rows))
    assert read(file, list(rows)) == rows
    strangers = [b"%d?" % i for i in range(2000)]
    assert read(file, strangers) == dict.fromkeys(strangers, ABSENT)


def same_tag(count: int) -> list[list[bytes]]:
    """Pairs of keys whose hashes end in the same 24 bits."""
    by_tag: dict[int, list[bytes]] = {}
    for i in range(60_000):
        by_tag.setdefault(hash_of(b"%d" % i) & 2**24 - 1, []).append(b"%d" % i)
    return [keys for keys in by_tag.values() if len(keys) > 1][:count]


@pytest.mark.usefixtures("kernel")
def test_a_key_of_the_same_tag_is_another_key(tmp_path: Path) -> None:
    pairs = same_tag(40)
    assert len(pairs) == 40
    for first, second in pairs[:3]:
        rows = {first: row_of(first, b"first"), second: row_of(second, b"second")}
        assert read(TableFile(write(tmp_path / "both", rows)), [first, second]) == rows
        del rows[second]
        # one home line: the search meets the first key's record
        file = TableFile(write(tmp_path / "one", rows))
        assert read(file, [first, second]) == rows | {second: ABSENT}
        assert read(file, [*([second] * 20), first]) == rows | {second: ABSENT}


def test_a_record_that_does_not_vouch_for_itself_ends_no_search(tmp_path: Path) -> None:
    [first, second] = same_tag(1)[0]
    path = write(tmp_path / "t", {first: row_of(first, b"first")})
    data = bytearray(path.read_bytes())
    data[data.index(b"first")] ^= 1
    path.write_bytes(data)
    assert read(TableFile(path), [first, second, *([second] * 20)]) == {
        first: DAMAGED,
        second: DAMAGED,
    }


# ---- building


def test_what_passes_the_memory_gives_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at = os.pread
    # at most so many at once, as the system reads 2 GiB of more
    monkeypatch.setattr(os, "pread", lambda file, size, at: read_at(file, min(size, 100), at))
    batches = [numbered(at, at + 500) for at in range(0, 20_000, 500)]
    whole = write(tmp_path / "whole", *batches, memory_bytes=2**30)
    spilled = write(tmp_path / "spilled", *batches, memory_bytes=0)
    assert spilled.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spilled", "whole"]


@pytest.mark.parametrize(("memory_bytes", "at"), [(0, 4999), (2**30, 0)])
def test_a_key_that_comes_twice_is_named(memory_bytes: int, at: int, tmp_path: Path) -> None:
    with pytest.raises(
        OnlineStoreError, match=rf"t: the key '{at}' is there twice among the rows to load"
    ):
        write(
            tmp_path / "t",
            numbered(0, 5000),
            numbered(at, at + 1, size=5),
            memory_bytes=memory_bytes,
        )
    assert list(tmp_path.iterdir()) == []


def test_equal_hashes_of_two_keys_are_no_repetition(tmp_path: Path) -> None:
    rows = numbered(0, 30)
    keys = Packed.of(list(rows))
    with TableWriter(tmp_path / "t", {}, MEMORY_BYTES) as writer:
        writer.add(
            RowBatch(keys, Packed.of(list(rows.values())), np.full(30, hash_of(b"3"), np.uint64))
        )
        assert writer.finish() == 30
    # found, since the search begins at its home; the others' records have tags that are not their
    # keys'
    assert TableFile(tmp_path / "t").find(b"3") in (rows[b"3"], b"")


def test_a_writer_that_is_left_leaves_nothing(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "t", {}, 0) as writer:
        writer.add(batch_of(numbered(0, 3000)))
        assert [path.name for path in tmp_path.iterdir()] == [f".t.{os.getpid()}.tmp"]
    assert list(tmp_path.iterdir()) == []
    with TableWriter(tmp_path / "t", {}, 0) as writer:
        writer.finish()
    writer.abort()
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


# ---- disks and processes


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Within, no file of this process grows beyond; Python ignores the signal, so that a write
    fails with EFBIG."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize("size_bytes", [0, 4096, 120_000, 297_000])
def test_a_full_disk_leaves_nothing(size_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "t"
    message = (
        f"no space left while writing {path}; free some and run again (what is live is untouched)"
    )
    with files_of_at_most(size_bytes), pytest.raises(OnlineStoreError, match=re.escape(message)):
        write(path, *(numbered(at, at + 500) for at in range(0, 3000, 500)), memory_bytes=0)
    assert list(tmp_path.iterdir()) == []


# ---- damage


def small_rows() -> dict[bytes, bytes]:
    """Some that fill lines: of every kind of record, one whose size a flipped bit makes 0, and two
    of one tag."""
    rows = (
        numbered(0, 5, size=3)
        | numbered(5, 6, size=40)
        | {
            b"gone": row_of(b"gone", b""),
            b"a key of 20 bytes...": row_of(b"a key of 20 bytes...", bytes(9)),
        }
    )
    return rows | {key: row_of(key, b"tag") for key in same_tag(1)[0]}


def test_every_flipped_bit_is_seen_or_changes_nothing(tmp_path: Path) -> None:
    rows = small_rows()
    path = write(tmp_path / "t", rows)
    data = path.read_bytes()
    strangers = [b"stranger %d" % i for i in range(8)]
    seen = unseen = 0
    # the header's zeros are as good as its other bytes: each 67th is tried
    for bit in (*range(8 * 80), *range(8 * 80, 8 * 4088, 8 * 67), *range(8 * 4088, 8 * len(data))):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            file = TableFile(path)
        except OnlineStoreError:
            seen += 1
            continue
        assert file.check() != [], bit
        found = read(file, list(rows))
        assert all(found[key] in (row, DAMAGED) for key, row in rows.items()), bit
        assert all(state in (ABSENT, DAMAGED) for state in read(file, strangers).values()), bit
        seen += found != rows
        unseen += found == rows
    assert seen > unseen > 0


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t", small_rows())
    data = path.read_bytes()
    for size in [*range(0, 4200, 37), *range(4200, len(data))]:
        path.write_bytes(data[:size])
        with pytest.raises(OnlineStoreError, match=r"cannot read .*t: .*; publish the view again"):
            TableFile(path)
    path.write_bytes(data + b"\0" * 8)
    with pytest.raises(OnlineStoreError, match="bytes, and should have"):
        TableFile(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for name, data in {
        "empty": b"",
        "text": b"hello" * 2000,
        "zeros": bytes(8192),
        "mdb": b"\xde\xc0\xef\xbe" * 3000,
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(OnlineStoreError, match=f"{name}: "):
            TableFile(tmp_path / name)
    with pytest.raises(OnlineStoreError, match="cannot read"):
        TableFile(tmp_path)


ABSURD = [
    (36, 800, 3, 5),
    (10, 804, 3, 5),
    (10, 800, 0, 5),
    (10, 800, 5, 5),
    (10, 800, 3, 2**64 - 1),
    (10, 2**64 - 8, 3, 5),
]


@pytest.mark.parametrize(("rows", "records_bytes", "home_lines", "lines"), ABSURD)
def test_a_header_that_is_not_consistent(
    rows: int, records_bytes: int, home_lines: int, lines: int, tmp_path: Path
) -> None:
    header = header_of({}, rows, records_bytes, home_lines, lines)
    size_bytes = index_start(len(header) + records_bytes) + 64 * lines + 16
    feasible = size_bytes < 10_000
    (tmp_path / "t").write_bytes(header.ljust(size_bytes if feasible else 10_000, b"\0"))
    with pytest.raises(
        OnlineStoreError,
        match="is not consistent" if feasible else r"is not consistent|t: it has 10,000 bytes",
    ):
        TableFile(tmp_path / "t")


def test_other_formats_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.store.online.table_file.FORMAT", 2)
    path = write(tmp_path / "t", numbered(0, 10))
    monkeypatch.undo()
    with pytest.raises(OtherFormatError, match=r"/t is of format 2, .* reads format 3 alone"):
        TableFile(path)


def relined(data: bytes, slots: Sequence[int]) -> bytes:
    """The file with its first line of the index replaced, and verified for: what no flipped bit
    makes."""
    file = bytearray(data)
    at = len(data) - 16 - 2 * 64
    words = np.array([slots], np.uint64)
    check = int(line_checks(words, np.zeros(1, np.uint64))[0])
    file[at : at + 64] = words.tobytes() + check.to_bytes(8, "little")
    return bytes(file)


@pytest.mark.parametrize("position", [1, 511, 2**40 - 1, 520])
def test_slots_that_point_anywhere(position: int, tmp_path: Path) -> None:
    rows = numbered(0, 3)
    path = write(tmp_path / "t", rows)
    tags = [hash_of(key) & 2**24 - 1 for key in rows]
    path.write_bytes(relined(path.read_bytes(), [tag << 40 | position for tag in tags] + [0] * 4))
    for keys in (list(rows), [*rows, *rows, *rows, *rows, *rows]):
        assert read(TableFile(path), keys) == dict.fromkeys(rows, DAMAGED)


@pytest.mark.parametrize("head", [2**32 - 1, 0xFFFF << 32, 10_000, 200])
def test_records_of_any_size(head: int, tmp_path: Path) -> None:
    rows = numbered(0, 3)
    path = write(tmp_path / "t", rows)
    data = path.read_bytes()
    path.write_bytes(data[:4096] + head.to_bytes(8, "little") + data[4104:])
    damaged = rows | {b"0": DAMAGED}
    for keys in (list(rows), [*rows, *rows, *rows, *rows, *rows]):
        assert read(TableFile(path), keys) == damaged


def test_lines_that_are_all_full_end_the_search(tmp_path: Path) -> None:
    path = write(tmp_path / "t", numbered(0, 3))
    file = bytearray(path.read_bytes())
    for number in (0, 1):
        words = np.arange(1, 8, dtype=np.uint64)[None] + np.uint64(2**50)
        at = len(file) - 16 - (2 - number) * 64
        check = int(line_checks(words, np.array([number], np.uint64))[0])
        file[at : at + 64] = words.tobytes() + check.to_bytes(8, "little")
    path.write_bytes(file)
    assert read(TableFile(path), [b"0", b"x"]) == {b"0": DAMAGED, b"x": DAMAGED}


def test_a_file_of_whole_blocks_has_no_checksum_too_many(tmp_path: Path) -> None:
    # one record, and an index of two lines
    row = row_of(b"k", bytes(BLOCK_BYTES - 2 * 64 - 8 - 8 - 24))
    file = TableFile(write(tmp_path / "t", {b"k": row}))
    assert file.size_bytes == 4096 + BLOCK_BYTES + 16
    assert (file.find(b"k"), file.check()) == (row, [])


def test_check_names_the_block(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t", *(numbered(at, at + 1000, size=3000) for at in range(0, 2000, 1000))
    )
    file = TableFile(path)
    assert (file.check(), file.size_bytes > 5 * BLOCK_BYTES) == ([], True)
    data = bytearray(path.read_bytes())
    for at in (4096 + BLOCK_BYTES, 4096 + 3 * BLOCK_BYTES - 1):
        data[at] ^= 16
    path.write_bytes(data)
    assert TableFile(path).check() == [
        f"{path}: bytes 1,052,672 to 2,101,248 are damaged",
        f"{path}: bytes 2,101,248 to 3,149,824 are damaged",
    ]
    data[-8] ^= 1
    path.write_bytes(data)
    assert TableFile(path).check() == [f"{path}: its checksums are damaged"]


def random_tables() -> Iterator[tuple[int, dict[bytes, bytes]]]:
    rng = np.random.default_rng(3)
    for seed in range(60):
        keys = {rng.bytes(int(rng.integers(1, 20))) for _ in range(int(rng.integers(1, 60)))}
        yield seed, {key: row_of(key, rng.bytes(int(rng.integers(0, 70)))) for key in keys}


def test_torn_files_never_give_another_row_by_either_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes overwritten at random, many at once, with those of other places too."""
    for seed, rows in random_tables():
        rng = np.random.default_rng(seed)
        data = bytearray(write(tmp_path / "t", rows).read_bytes())
        for _ in range(int(rng.integers(1, 6))):
            size = int(rng.integers(1, 200))
            to, origin = rng.integers(4096, len(data) - size, 2).tolist()
            data[to : to + size] = (
                rng.bytes(size) if rng.random() < 0.5 else data[origin : origin + size]
            )
        (tmp_path / "t").write_bytes(data)
        found = read(TableFile(tmp_path / "t"), list(rows))
        assert all(row in (rows[key], DAMAGED) for key, row in found.items()), seed
        with monkeypatch.context() as plain:
            plain.setattr(kernels, "native", None)
            assert read(TableFile(tmp_path / "t"), list(rows)) == found, seed
