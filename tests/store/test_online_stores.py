"""One suite holds every online store to the contract."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.store.disk.record import content_of, replace, sealed
from precompute.store.errors import ConfigError, ConflictError, OnlineStoreError
from precompute.store.online.kernels import Rows
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.online.url import open_online_store
from tests.memory_store import MemoryStore
from tests.online import (
    TABLE,
    Stopped,
    back_to,
    batch_of,
    found_in,
    load,
    named,
    numbers,
    over,
    plain,
    pointer,
    publish,
    publish_over,
    rows_of,
    segment,
    torn,
    values,
)
from tests.online_rig import rigs

OpenStore = Callable[[], OnlineStore]


CONTRACTS = {kind: fixtures for rig in rigs().values() for kind, fixtures in rig.contract.items()}
"""Of each power that brings an online store: kind → its fixtures, the last of them a URL."""


@pytest.fixture(params=["memory", "table", *CONTRACTS])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Opens the same store once more, as another reader would; memory has only one."""
    opened: list[OnlineStore] = []
    url = f"table:{tmp_path / 'online'}"
    for fixture in CONTRACTS.get(request.param, ()):
        url = request.getfixturevalue(fixture)

    def another() -> OnlineStore:
        if request.param == "memory":
            opened[:] = opened or [MemoryStore()]
        else:
            opened.append(open_online_store(url))
        return opened[-1]

    yield another
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: OpenStore) -> OnlineStore:
    return open_store()


# ---- the end of a view


def test_a_forgotten_view_is_gone_for_old_readers_and_can_begin_again(
    open_store: OpenStore,
) -> None:
    writer, reader = open_store(), open_store()
    for epoch in (7, 8):
        publish(writer, epoch, TABLE)
    publish(writer, 1, TABLE, "numbers_2")
    assert values(reader.read("numbers", [b"a"])) == [b"1"]
    for _ in range(2):  # doing it twice is no error
        writer.forget("numbers")
        assert (reader.read("numbers", [b"a"]), reader.live("numbers"), reader.views()) == (
            None,
            None,
            ["numbers_2"],
        )
        assert (numbers(reader), found_in(reader, 8, [b"a"])) == (
            [],
            [None],
        )
    assert values(reader.read("numbers_2", [b"b"])) == [b"22"]
    publish(writer, 1, {b"a": b"new"})
    assert values(reader.read("numbers", [b"a"])) == [b"new"]


# ---- loading and reading


def test_what_was_loaded_is_read_in_the_keys_order_once_it_is_live(
    open_store: OpenStore,
) -> None:
    writer, reader = open_store(), open_store()
    assert (reader.read("numbers", [b"a"]), reader.live("numbers"), reader.views()) == (
        None,
        None,
        [],
    )
    assert load(writer, 1, TABLE) == 4
    assert (reader.read("numbers", [b"a"]), reader.live("numbers"), reader.views()) == (
        None,
        None,
        [],
    )
    assert (numbers(reader), numbers(reader, "others")) == ([1], [])
    writer.flip(pointer(1))
    found = reader.read("numbers", [b"d", b"nothing", b"a", b"c", b"a", b"b"])
    assert found is not None
    assert found[0] == reader.live("numbers") == writer.live("numbers") == pointer(1)
    assert plain(found[1]) == [TABLE[b"d"], None, b"1", b"3", b"1", b"22"]
    assert values(reader.read("numbers", [])) == []
    assert values(reader.read("numbers", [b"x", b"y"])) == [None, None]
    assert found_in(reader, 1, [b"b", b"x", b"b"]) == [b"22", None, b"22"]
    assert found_in(reader, 1, []) == []
    assert found_in(reader, 9, [b"a", b"b"]) == [None, None]
    assert (reader.read("others", [b"a"]), reader.views()) == (None, ["numbers"])


def test_a_row_that_was_read_stays_after_its_segment_is_gone(store: OnlineStore) -> None:
    publish(store, 1, TABLE)
    found = store.read("numbers", [b"d", b"b"])
    publish(store, 2, {b"b": b"new"})
    store.drop("numbers", named(1))
    publish(store, 3, {b"d": b"newer"})
    assert values(found) == [TABLE[b"d"], b"22"]
    assert values(store.read("numbers", [b"d", b"b"])) == [b"newer", None]


def test_an_empty_segment_can_be_live(store: OnlineStore) -> None:
    empty: list[Rows] = [[], [batch_of({})]]
    for number, rows in enumerate(empty, start=1):
        assert store.load("numbers", segment(number), rows) == 0
        store.flip(pointer(number))
        assert values(store.read("numbers", [b"a"])) == [None]
        assert values(store.read("numbers", [b"a", b"b"])) == [None, None]
    assert numbers(store) == [1, 2]


HARD_KEYS = [
    b"*", b"?", b"[a]", b"[^a]", b"\\*", b"a*", b"a:b", b"{a}", b"a}b{", b"a b", b"\n", b"\r\n", b"\t", b"'\"", b"%s", b"$3\r\nfoo",
    "é€😀".encode(), b"/", b"..", b"../live.json", b"meta", b"views", b"rows:1", b"x" * 511, b"x" * 510, b"1", b"1:a", b"01",
]  # fmt: skip


def test_a_key_is_its_bytes_and_no_pattern(store: OnlineStore) -> None:
    table = {key: b"value of " + key for key in HARD_KEYS}
    publish(store, 1, table)
    assert values(store.read("numbers", HARD_KEYS)) == list(table.values())
    publish(store, 11, {key: b"other " + key for key in HARD_KEYS})
    store.drop("numbers", named(1))  # a segment's number is a prefix of the other's
    assert values(store.read("numbers", HARD_KEYS)) == [b"other " + key for key in HARD_KEYS]
    assert found_in(store, 1, HARD_KEYS) == [None] * len(HARD_KEYS)


def test_a_segment_says_what_it_is(open_store: OpenStore) -> None:
    store, reader = open_store(), open_store()
    loaded = [
        segment(3),
        segment(7, upper=True),
        segment(13),
    ]
    for one in reversed(loaded):
        store.load("numbers", one, rows_of(TABLE))
    assert reader.segments("numbers") == loaded
    assert reader.loaded("numbers", [named(13), named(3), named(1)]) == [loaded[0], loaded[2]]


# ---- moving the pointer


def test_the_pointer_moves_on_and_never_back(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    for epoch in (3, 5, 7):
        load(writer, epoch, {b"a": b"%d" % epoch})
    writer.flip(pointer(5))
    assert values(reader.read("numbers", [b"a"])) == [b"5"]
    with pytest.raises(ConflictError, match="epoch 5, past 3"):
        reader.flip(pointer(3))
    assert reader.live("numbers") == writer.live("numbers") == pointer(5)
    writer.flip(pointer(7))
    assert values(reader.read("numbers", [b"a"])) == [b"7"]
    for late in (3, 5):
        with pytest.raises(ConflictError):
            writer.flip(pointer(late))
    assert (values(reader.read("numbers", [b"a"])), reader.live("numbers")) == ([b"7"], pointer(7))


def test_a_flip_can_be_repeated_and_the_last_words_stand(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    publish(writer, 2, TABLE)
    assert values(reader.read("numbers", [b"a"])) == [b"1"]
    writer.flip(pointer(2))
    assert reader.live("numbers") == pointer(2)
    again = replace(pointer(2, snapshot=9), at="later")
    writer.flip(again)
    found = reader.read("numbers", [b"a"])
    assert found is not None
    assert (found[0], plain(found[1]), reader.live("numbers")) == (again, [b"1"], again)


def test_a_segment_that_is_not_loaded_whole_cannot_go_live(store: OnlineStore) -> None:
    with pytest.raises(OnlineStoreError, match="not loaded whole"):
        store.flip(pointer(1))
    assert (store.live("numbers"), store.views()) == (None, [])
    publish(store, 1, TABLE)
    for gone in (2, 10):
        with pytest.raises(OnlineStoreError, match="not loaded whole"):
            store.flip(pointer(gone))
    load(store, 2, TABLE)
    load(store, 3, TABLE, "others")
    store.drop("numbers", named(2))
    for gone in (2, 3):
        with pytest.raises(OnlineStoreError, match="not loaded whole"):
            store.flip(pointer(gone))
    assert store.live("numbers") == pointer(1)
    assert values(store.read("numbers", [b"a"])) == [b"1"]


def test_a_pointer_may_go_back_to_an_older_segment_under_a_higher_epoch(
    open_store: OpenStore,
) -> None:
    writer, reader = open_store(), open_store()
    publish(writer, 1, {b"a": b"old", b"b": b"old"})
    assert values(reader.read("numbers", [b"a"])) == [b"old"]
    publish(writer, 2, {b"a": b"bad"})
    assert values(reader.read("numbers", [b"a", b"b"])) == [b"bad", None]
    writer.flip(back_to(1, 3))
    found = reader.read("numbers", [b"a", b"b"])
    assert found is not None
    assert (found[0], plain(found[1])) == (back_to(1, 3), [b"old", b"old"])
    assert (found[0].epoch, found[0].numbers) == (3, (1,))
    assert reader.live("numbers") == writer.live("numbers") == back_to(1, 3)
    for late in (pointer(2), back_to(2, 2), back_to(1, 1)):
        with pytest.raises(ConflictError, match="epoch 3, past"):
            writer.flip(late)
    writer.flip(back_to(2, 4))
    assert values(reader.read("numbers", [b"a", b"b"])) == [b"bad", None]
    assert (open_store().read("numbers", [b"a"]) or (None,))[0] == back_to(2, 4)


# ---- lists of segments


def test_the_highest_segment_that_has_a_key_answers(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    publish(writer, 1, TABLE)
    assert values(reader.read("numbers", list(TABLE))) == list(TABLE.values())
    publish_over(writer, 2, 1, {b"a": b"changed", b"new": b"came", b"c": b"tombstone"})
    found = reader.read("numbers", [b"new", b"d", b"a", b"nothing", b"c", b"b", b"a"])
    assert found is not None
    assert found[0] == over(1, 2) == reader.live("numbers")
    assert values(found) == [
        b"came",
        TABLE[b"d"],
        b"changed",
        None,
        b"tombstone",
        b"22",
        b"changed",
    ]
    for key, row in ((b"a", b"changed"), (b"b", b"22"), (b"x", None)):
        assert values(reader.read("numbers", [key])) == [row]
    # no key of the upper one, and only such
    assert values(reader.read("numbers", [b"b", b"d"])) == [b"22", TABLE[b"d"]]
    assert values(reader.read("numbers", [b"new", b"a"])) == [b"came", b"changed"]
    assert found_in(reader, 1, [b"a", b"new"]) == [b"1", None]
    assert found_in(reader, 2, [b"a", b"b"]) == [b"changed", None]


def test_a_list_goes_on_and_back_and_gives_way_to_another(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    publish(writer, 1, TABLE)
    publish_over(writer, 2, 1, {b"a": b"two"})
    publish_over(writer, 3, 1, {b"b": b"three"})
    assert values(reader.read("numbers", [b"a", b"b"])) == [b"1", b"three"]
    writer.flip(pointer(4, segments=(named(1), named(2))))
    assert values(reader.read("numbers", [b"a", b"b"])) == [b"two", b"22"]
    writer.flip(back_to(1, 5))
    assert values(reader.read("numbers", [b"a", b"b"])) == [b"1", b"22"]
    publish(writer, 6, {b"a": b"six"})
    assert values(reader.read("numbers", [b"a", b"b"])) == [b"six", None]
    assert numbers(writer) == [1, 2, 3, 6]


def test_segments_in_use_cannot_be_dropped(store: OnlineStore) -> None:
    publish(store, 1, TABLE)
    publish_over(store, 2, 1, {b"a": b"two"})
    for number in (1, 2):
        with pytest.raises(
            ConflictError, match=f"segment {named(number)} of view 'numbers' is live"
        ):
            store.drop("numbers", named(number))
    for missing in (over(1, 3), over(9, 3), pointer(3, segments=(named(9), named(1)))):
        with pytest.raises(OnlineStoreError, match="not loaded whole"):
            store.flip(missing)
    assert values(store.read("numbers", [b"a", b"b"])) == [b"two", b"22"]
    store.flip(back_to(1, 4))
    for view, number in (("numbers", 2), ("numbers", 2), ("numbers", 77), ("unheard_of", 1)):
        store.drop(view, named(number))
    assert numbers(store) == [1]
    assert values(store.read("numbers", list(TABLE))) == list(TABLE.values())


def test_a_view_of_another_project_is_not_taken_over(open_store: OpenStore) -> None:
    store, other = open_store(), open_store()
    load(store, 1, TABLE)
    store.flip(replace(pointer(1), owner="one"))
    for refused in (
        lambda: other.prepare("numbers", segment(2), 1, 100, "two"),
        lambda: other.flip(back_to(1, 2, owner="two")),
    ):
        with pytest.raises(
            ConflictError, match=r"published by another project \(one, this one is two\)"
        ):
            refused()
    assert other.live("numbers") == replace(pointer(1), owner="one")
    # the owner itself, and one from before there were owners
    for owner in ("one", ""):
        assert store.prepare("numbers", segment(2), 1, 100, owner) == 0
    assert store.doubts("numbers") == []


def test_an_unfinished_load_is_not_seen_and_can_be_done_again(open_store: OpenStore) -> None:
    store, reader = open_store(), open_store()
    publish(store, 1, TABLE)
    with pytest.raises(Stopped):
        store.load(
            "numbers",
            segment(2),
            torn({b"a": b"whole", b"b": b"whole"}, Stopped()),
        )
    assert numbers(reader) == [1]
    assert values(reader.read("numbers", [b"a", b"b"])) == [b"1", b"22"]
    with pytest.raises(OnlineStoreError, match="not loaded whole"):
        store.flip(pointer(2))
    assert load(store, 2, {b"a": b"whole", b"b": b"whole", b"c": b"whole"}) == 3
    store.flip(pointer(2))
    assert values(reader.read("numbers", [b"a", b"b", b"c", b"d"])) == [b"whole"] * 3 + [None]


def test_views_do_not_see_each_other(store: OnlineStore) -> None:
    for view in ("numbers", "a", "numbers_1", "z9"):
        publish(store, 1, {b"k": view.encode(), b"of " + view.encode(): b"-"}, view)
    load(store, 1, TABLE, "loaded_only")
    assert store.views() == ["a", "numbers", "numbers_1", "z9"]
    publish(store, 2, {b"k": b"new"}, "numbers")
    store.drop("numbers", named(1))
    for view in ("a", "numbers_1", "z9"):
        assert values(store.read(view, [b"k", b"of " + view.encode(), b"of numbers"])) == [
            view.encode(),
            b"-",
            None,
        ]
        assert (store.live(view), numbers(store, view)) == (pointer(1, view), [1])
    assert values(store.read("numbers", [b"k", b"of numbers"])) == [b"new", None]


def test_a_name_that_is_no_views_is_no_view(store: OnlineStore) -> None:
    publish(store, 1, TABLE)
    for view in ("", "../numbers", "NUMBERS", "num*", "{numbers}", "a\0b", "x" * 300, "numbers\n"):
        assert (store.read(view, [b"a"]), store.live(view)) == (None, None)


# ---- readers while somebody publishes


def test_a_request_never_mixes_segments_while_others_are_published(
    open_store: OpenStore,
) -> None:
    """Every row says its segment; the publisher leaves the live one and the one before, and
    drops the rest."""
    keys = [b"k%d" % i for i in range(200)]
    writer, readers = open_store(), [open_store(), open_store()]
    publish(writer, 1, dict.fromkeys(keys, b"1"))
    done = threading.Event()
    seen: list[list[int]] = [[] for _ in readers]
    wrong: list[Any] = []

    def read(reader: OnlineStore, epochs: list[int]) -> None:
        last_one = False
        try:
            while not last_one:
                last_one = done.is_set()
                found = reader.read("numbers", keys)
                assert found is not None
                epochs.append(found[0].epoch)
                rows = set(values(found))
                if rows != {b"%d" % found[0].epoch}:
                    wrong.append((found[0].epoch, rows))
                # the publisher needs Python's lock, too
                time.sleep(0.001)
        except Exception as exc:  # a thread's exception would be lost
            wrong.append(exc)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, seen, strict=True)]
    for thread in threads:
        thread.start()
    epoch = 1
    try:
        while (
            not wrong
            and epoch < 20_000
            and (epoch < 30 or min(len(set(epochs)) for epochs in seen) < 10)
        ):
            epoch += 1
            if epoch % 3 == 1:
                publish(writer, epoch, dict.fromkeys(keys, b"%d" % epoch))
            else:
                publish_over(
                    writer, epoch, epoch - (epoch - 1) % 3, dict.fromkeys(keys, b"%d" % epoch)
                )
            live = writer.live("numbers")
            assert live is not None
            for number in numbers(writer):
                if number not in (*live.numbers, epoch - 1, epoch - 1 - (epoch - 2) % 3):
                    writer.drop("numbers", named(number))
    finally:
        done.set()
        for thread in threads:
            thread.join(timeout=30)
    assert not wrong
    for epochs in seen:
        assert epochs == sorted(epochs)
        assert epochs[-1] == epoch
        assert len(set(epochs)) >= 10, "the readers hardly met a publish: the test proves nothing"


def test_racing_flips_leave_the_largest_epoch_live(open_store: OpenStore) -> None:
    store = open_store()
    epochs = range(1, 21)
    for epoch in epochs:
        load(store, epoch, {b"a": b"%d" % epoch})
    gate = threading.Barrier(4)
    unexpected: list[Exception] = []

    def flip(mine: list[int]) -> None:
        other = open_store()
        gate.wait()
        for epoch in mine:
            try:
                other.flip(pointer(epoch))
            except ConflictError:
                continue
            except Exception as exc:
                unexpected.append(exc)

    threads = [
        threading.Thread(target=flip, args=([e for e in epochs if e % 4 == i],)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not unexpected
    assert store.live("numbers") == pointer(20)
    assert values(store.read("numbers", [b"a"])) == [b"20"]


# ---- pointers


def test_a_pointer_comes_back_equal_from_its_bytes() -> None:
    for epoch in (1, 2):
        assert Pointer.from_bytes(pointer(epoch).to_bytes()) == pointer(epoch)
    view = dataclasses.replace(pointer(1).view, index=None)
    bare = Pointer(view, 1, 1, "m", 0, 0, "now", None, segments=(named(1),))
    assert Pointer.from_bytes(bare.to_bytes()) == bare
    whole = back_to(7, 9, partition="2026-01-01T00:00Z/2026-01-02T00:00Z", renewed_at_us=2**53 + 1)
    lists = (named(7), named(8), named(9))
    whole = replace(whole, segments=lists, changed_index="i", owner="me", lossy=True)
    assert Pointer.from_bytes(whole.to_bytes()) == whole
    assert (whole.numbers, pointer(3).numbers) == ((7, 8, 9), (3,))


@pytest.mark.parametrize("names", [(), ("../x",), ("1",), ("1-0123456",), (named(1), "1-../../x")])
def test_a_pointer_names_segments_and_nothing_else(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="names no segments"):
        Pointer.from_bytes(pointer(1, segments=names).to_bytes())


def test_a_pointer_of_a_later_version_is_read_an_unsealed_one_is_not() -> None:
    body = content_of(pointer(4).to_bytes(), "a pointer") | {"from_the_future": 1}
    assert Pointer.from_bytes(sealed(body)) == pointer(4)
    with pytest.raises(ValueError, match="not those that were written"):
        Pointer.from_bytes(json.dumps(body).encode())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory",
        "table:",
        "table://x",
        "table://./x",
        "http://x",
        "redis",
        "file:///x",
        "sqlite:x",
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"online: '.*' names no (online store|folder): write "):
        open_online_store(url)
