"""One text per key: the same from columns, from JSON and from a URL, and never the same for two
keys."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from precompute.store.errors import RequestError
from precompute.store.keys import (
    MAX_KEY_BYTES,
    bad_keys,
    check_key,
    key_column,
    key_from_path,
    key_text,
)

PARTS = [
    "a",
    "42",
    "a/b",
    "a/",
    "/b",
    "a//b",
    "%",
    "50%",
    "%2F",
    "%25",
    "%252F",
    "é€😀",
    " ",
    "x y",
    "?#&=+",
    ".",
    "..",
    "\n\t",
    "*?[]\\",
]
parts = st.sampled_from(PARTS) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
ONE, TWO, THREE = ("id",), ("a", "b"), ("a", "b", "c")


def column_texts(rows: list[tuple[Any, ...]]) -> list[str | None]:
    """Key texts as a batch job makes them, from columns."""
    names = [f"k{i}" for i in range(len(rows[0]))]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(list(column)) for column in zip(*rows, strict=True)], names
    )
    return key_column(batch, names).to_pylist()


def path_of(key: tuple[Any, ...]) -> bytes:
    """The last part of a row's URL, as any client writes it."""
    return "/".join(quote(str(part), safe="") for part in key).encode()


def test_an_integer_key_is_its_decimal_text() -> None:
    numbers = [0, -1, 42, 2**63 - 1, -(2**63)]
    assert column_texts([(n,) for n in numbers]) == [str(n) for n in numbers]
    assert [key_text(n, ONE) for n in numbers] == [str(n) for n in numbers]
    assert column_texts([(7, "a/b"), (-8, "%")]) == ["7/a%2Fb", "-8/%25"]
    assert [key_text(list(key), TWO) for key in ((7, "a/b"), (-8, "%"))] == ["7/a%2Fb", "-8/%25"]
    assert [
        key_text(("w/1", part), TWO) for part in (np.int64(1), pa.scalar(1), HTTPStatus.OK)
    ] == [
        "w%2F1/1",
        "w%2F1/1",
        "w%2F1/200",
    ]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (("a", "b"), "a/b"),
        (("a/b", "c"), "a%2Fb/c"),
        (("a", "b/c"), "a/b%2Fc"),
        (("50%", "%2F"), "50%25/%252F"),
        (("", ""), "/"),
        (("", "a"), "/a"),
        (("a", "", "/"), "a//%2F"),
        (("é", "😀"), "é/😀"),
    ],
)
def test_a_key_of_several_columns_is_its_escaped_parts_joined(
    key: tuple[str, ...], text: str
) -> None:
    assert column_texts([key]) == [text]
    assert key_text(key, TWO if len(key) == 2 else THREE) == text
    assert key_text(list(key), TWO if len(key) == 2 else THREE) == text


@given(st.lists(parts, min_size=1, max_size=3))
@example(["/", "%2F"])
@example(["%", "25"])
def test_columns_json_and_url_agree_on_the_key(key: list[str]) -> None:
    entity = (ONE, TWO, THREE)[len(key) - 1]
    (text,) = column_texts([tuple(key)])
    assert text is not None
    assert len(key) > 1 or text == key[0], "a key of one column is its text as it stands"
    if not 0 < len(text.encode()) <= MAX_KEY_BYTES:
        return
    assert key_text(key, entity) == text
    assert key_from_path(path_of(tuple(key)), entity) == text
    assert key_text(text, entity) == text  # a key that came out of an answer goes back in as it is


@given(st.lists(parts, min_size=2, max_size=2), st.lists(parts, min_size=2, max_size=2))
@example(["a/b", "c"], ["a", "b/c"])
@example(["a%2Fb", "c"], ["a/b", "c"])
@example(["", "/"], ["/", ""])
def test_two_keys_of_several_columns_never_share_a_text(one: list[str], other: list[str]) -> None:
    first, second = column_texts([tuple(one), tuple(other)])
    assert (first == second) == (one == other)


def test_keys_come_out_of_a_table_of_several_chunks_in_its_order() -> None:
    table = pa.table(
        {"a": pa.chunked_array([["x"], ["y/", "z"]]), "b": pa.chunked_array([[1, 2], [3]])}
    )
    assert key_column(table, TWO).to_pylist() == ["x/1", "y%2F/2", "z/3"]
    assert key_column(table.slice(1), ("b", "a")).to_pylist() == ["2/y%2F", "3/z"]
    assert key_column(table, ("b",)).to_pylist() == ["1", "2", "3"]


def test_a_key_with_a_null_part_is_null() -> None:
    assert column_texts([("a", None), (None, "b"), ("a", "b")]) == [None, None, "a/b"]
    assert column_texts([(None,), ("a",)]) == [None, "a"]


# ---- keys no store could hold

LONGEST = ["x" * 511, "é" * 255 + "x", "😀" * 127 + "xyz"]
TOO_LONG = ["x" * 512, "é" * 256, "😀" * 128]


def test_the_longest_key_has_511_bytes_of_utf8() -> None:
    assert [len(k.encode()) for k in LONGEST + TOO_LONG] == [511] * 3 + [512] * 3
    assert bad_keys(pa.array(LONGEST + TOO_LONG)) == dict.fromkeys(
        (3, 4, 5), "key longer than 511 bytes"
    )
    for key in LONGEST:
        assert check_key(key) == key_text(key, ONE) == key_from_path(path_of((key,)), ONE) == key


@pytest.mark.parametrize(
    "key", [*TOO_LONG, "", "\0", "a\0b", "a\0", "\ud800", "a\udfff"], ids=lambda k: repr(k[:4])
)
def test_a_key_no_store_could_hold_is_refused_at_every_door(key: str) -> None:
    for door in (check_key, lambda k: key_text(k, ONE), lambda k: key_text([k], ONE)):
        with pytest.raises(RequestError) as refused:
            door(key)
        assert (refused.value.status, refused.value.code) == (400, "bad_key")
        assert len(str(refused.value)) < 300  # whatever was sent, the message stays short
        str(refused.value).encode()  # and can be sent back
    if not key.startswith(("\ud800", "a\udfff")):
        with pytest.raises(RequestError):
            key_from_path(path_of((key,)), ONE)


def test_each_bad_key_of_a_batch_has_its_reason() -> None:
    keys = pa.array(["a", None, "", "x" * 512, "a\0b", "é", "\0" * 600])
    assert bad_keys(keys) == {
        1: "null key",
        2: "empty key",
        3: "key longer than 511 bytes",
        4: "key with a NUL byte",
        6: "key longer than 511 bytes",
    }
    assert bad_keys(keys.slice(5, 1)) == {}
    assert bad_keys(pa.array([], pa.string())) == {}


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        1.0,
        1.5,
        b"a",
        {"a": 1},
        {"a"},
        ["a", None],
        ["a", True],
        ["a", ["b"]],
        ["a", 1.0],
    ],
)
def test_a_key_is_a_string_or_an_integer_and_nothing_else(value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        key_text(value, TWO)
    assert refused.value.code == "bad_key"


@pytest.mark.parametrize(
    ("value", "entity"),
    [([], ONE), (["a", "b"], ONE), (["a"], TWO), (["a", "b", "c"], TWO), ((), TWO)],
)
def test_a_key_of_another_number_of_parts_is_refused(value: Any, entity: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match=", ".join(entity)) as refused:
        key_text(value, entity)
    assert refused.value.code == "bad_key"


@pytest.mark.parametrize(
    ("raw", "entity", "text"),
    [
        (b"a%2Fb", ONE, "a/b"),
        (b"a/b", ONE, "a/b"),
        (b"%252F", ONE, "%2F"),
        (b"a+b", ONE, "a+b"),
        (b"100%", ONE, "100%"),
        (b"a%2Fb/c", TWO, "a%2Fb/c"),
        (b"%2525/x", TWO, "%2525/x"),
        (b"/x", TWO, "/x"),
    ],
)
def test_a_url_is_decoded_exactly_once(raw: bytes, entity: tuple[str, ...], text: str) -> None:
    assert key_from_path(raw, entity) == text
