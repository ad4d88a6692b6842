"""Bad keys: whatever stands among the keys of a request, the others are answered as if it did
not."""

from __future__ import annotations

import datetime
import json
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from precompute.store.client import ViewLookupRequest, calls
from precompute.store.errors import RequestError
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import SearchWords
from tests.store.test_api import arrow
from tests.store.test_every_way import ask
from tests.world import LOOKUP, SEARCH, World

NUMBERS = st.from_regex(
    r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,4})?([eE][+-]?[0-9]{1,4})?", fullmatch=True
)
TEXTS = st.text(st.characters(), max_size=8).map(json.dumps)
"""JSON's own spelling, of halves of surrogate pairs too."""
VALUES = st.recursive(
    st.one_of(
        NUMBERS,
        TEXTS,
        st.sampled_from(
            ["null", "true", "false", "1" + "0" * 700, "-" + "9" * 5000, '"' + "k" * 600 + '"']
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(st.tuples(TEXTS, inner), max_size=3).map(
            lambda pairs: f"{{{','.join(f'{k}:{v}' for k, v in pairs)}}}"
        ),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(
        tmp_path_factory.mktemp("world"), {"new": 1.0, "old": 9.0, "gone": 20.0}, fallback=False
    )


@settings(max_examples=15, deadline=None)
@given(bad=VALUES, at=st.integers(0, 3))
@example("1e400", 1)
@example(r'"\ud800"', 0)
@example(r'[["a\udc00b"]]', 3)
@example("9" * 5000, 2)
@example("[" * 900 + "]" * 900, 1)
def test_no_value_that_json_can_have_changes_the_answer_of_another_key(
    world: World, bad: str, at: int
) -> None:
    good = ['"new"', '"gone"', '"old"']
    alone = world.post(LOOKUP, f'{{"keys":[{",".join(good)}]}}'.encode()).json["rows"]
    mixed = f'"keys":[{",".join([*good[:at], bad, *good[at:]])}]'
    inputs = (
        f'"fallback":false,"inputs":{{{bad}:{{"x":1}}}}' if bad.startswith('"') else '"inputs":null'
    )
    several = f'{{"requests":[{{"view":"things",{mixed}}},{{"view":{json.dumps(bad)},{mixed}}},{{"view":"things",{mixed}}}]}}'
    table = world.post(LOOKUP, f"{{{mixed}}}".encode(), accept=bodies.ARROW).arrow
    first, unknown, last = world.post("/v1/lookup", several.encode()).json["responses"]
    assert unknown["problem"]["status"] == 404
    for rows in (
        world.post(LOOKUP, f"{{{mixed},{inputs}}}".encode()).json["rows"],
        first["rows"],
        last["rows"],
    ):
        assert rows[:at] + rows[at + 1 :] == alone
        assert len(rows) == 4
        assert rows[at]["status"] == "missing" or rows[at] in alone
    told = list(
        zip(
            table["key"].to_pylist(),
            table["status"].to_pylist(),
            table["double"].to_pylist(),
            strict=True,
        )
    )
    assert told[:at] + told[at + 1 :] == [
        ("new", "fresh", 2.0),
        ("gone", "missing", None),
        ("old", "fresh", 2.0),
    ]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        *[
            (text, 400)
            for text in (
                "NaN",
                "-Infinity",
                "nul",
                "[1,]",
                '"\x01"',
                r'"\x"',
                "1e",
                "01",
                '"\ud800"',
            )
        ],
        # JSON, and no key: the body's own fields are refused as ever
        (r'1],"fallback":1e400,"keys":[1', 422),
        (r'"\ud800"],"fallback":1,"keys":[1', 422),
        (r'1],"deadline_ms":1e400,"keys":[1', 422),
        (r'1],"deadline_ms":60001,"keys":[1', 400),
        (r'1],"deadline_ms":"\ud800","keys":[1', 400),
        (r'1],"features":["\ud800"],"keys":[1', 400),
        (r'1],"\ud800":1,"keys":[1', 400),
        (r'1],"inputs":{"1":{"\ud800":1}},"keys":[1', 400),
        (r'1],"inputs":{"1":"\ud800"},"keys":[1', 400),
    ],
)
def test_what_is_no_json_and_what_no_field_can_be_is_refused_whole(
    world: World, wrong: str, status: int
) -> None:
    body = b'{"keys":["new",%b]}' % wrong.encode(errors="surrogatepass")
    world.post(LOOKUP, body).check_problem(status)
    several = world.post("/v1/lookup", b'{"requests":[{"view":"things",%b}]}' % body[1:-1])
    assert (several.json["responses"][0]["problem"] if several.status == 200 else several.json)[
        "status"
    ] == status


def test_a_view_named_by_half_a_surrogate_pair_is_one_unknown_view(world: World) -> None:
    body = rb'{"requests":[{"view":"\ud800","keys":[1]},{"view":"things","keys":["new"]}]}'
    unknown, known = world.post("/v1/lookup", body).json["responses"]
    assert (unknown["view"], unknown["problem"]["status"], known["rows"][0]["status"]) == (
        "?",
        404,
        "fresh",
    )


def test_a_body_of_very_many_values_is_read_once(world: World) -> None:
    numbers = b",".join([b"1"] * (bodies.MAX_VALUES // 5))
    body = b'{"keys":["new",%b],"fallback":false,"inputs":{"new":{"x":[' + numbers + b"]}}}"
    assert world.post(LOOKUP, body % b'"\\u0000"').status == 200
    world.post(LOOKUP, body % rb'"\ud800"').check_problem(400, "bad_json")


KEYS = ["new", None, "old"]


@pytest.mark.parametrize(
    "keys",
    [
        pa.array(KEYS),
        pa.array(KEYS, pa.string_view()),
        pa.array([*KEYS, None], pa.large_string()).dictionary_encode().slice(0, 3),
        pa.DictionaryArray.from_arrays([0, 1, 2], KEYS),
        pa.nulls(3, pa.int64()),
        pa.nulls(3, pa.string()).dictionary_encode(),
    ],
    ids=lambda keys: str(keys.type),
)
def test_a_null_of_an_arrow_body_is_one_bad_key(world: World, keys: pa.Array) -> None:
    rows = world.post(LOOKUP, arrow(keys), content_type=bodies.ARROW).json["rows"]
    assert [row.get("reason") for row in rows] == [
        None if key else "bad_key" for key in keys.to_pylist()
    ]


@pytest.mark.parametrize(
    "bad", [r'"\ud800"', "1e400", "9" * 5000, "1.5", r'["\ud800"]', '""', "null"]
)
def test_a_search_refuses_what_no_key_can_be(world: World, bad: str) -> None:
    wherever = [f'"key":"new","only":[{bad}]', f'"key":"new","exclude":[{bad}]']
    for asked in (*wherever, f'"key":{bad}') if bad != "null" else wherever:
        world.post(SEARCH, f"{{{asked}}}".encode()).check_problem(400, "bad_key")


def test_bad_keys_are_shown_as_they_were_written(world: World) -> None:
    keys = ["1e400", "-2e400", '["w1", 1e999]', "[null, true]", "1" + "0" * 5000, "2" + "0" * 5000]
    shown = [
        row["key"]
        for row in world.post(LOOKUP, f'{{"keys":[{",".join(keys)}]}}'.encode()).json["rows"]
    ]
    assert shown[:4] == keys[:4]
    assert [text[:3] for text in shown[4:]] == ["100", "200"]


def test_the_page_takes_any_text_for_a_key(world: World) -> None:
    for question in ("q=%ED%A0%80", "q=%ff&do=near", "q=%ED%A0%80&do=text", "q=1e400"):
        assert world.get(f"/?view=things&{question}").status in (200, 400, 404), question


# ---- the same keys in process and by the client


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("numbers"), {"1": 1.0, "2": 1.0}, fallback=False)


def answers(world: World, keys: Any) -> list[tuple[Any, ...]]:
    """Key, status and reason of each, the same on every way."""
    columns = ["key", "status", "reason"]
    table = world.lookup.get("things", keys)
    assert ask(world, calls.table("things", keys, {})).select(columns) == table.select(columns)
    (several,) = ask(world, calls.several([ViewLookupRequest(view="things", keys=keys)], None, {}))
    for rows in (ask(world, calls.rows("things", keys, {})).rows, several.rows):
        assert [(row.key, row.status, row.reason or None) for row in rows] == list(
            zip(*(table[name].to_pylist() for name in columns), strict=True)
        )
    return [
        (key, reason)
        for key, reason in zip(table["key"].to_pylist(), table["reason"].to_pylist(), strict=True)
    ]


NESTED: list[Any] = [1]
for _ in range(3000):
    NESTED = [NESTED]
ONE, TWO, NULL = ("1", None), ("2", None), ("null", "bad_key")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (np.array([1, 2]), [ONE, TWO]),
        (np.array([1, None], object), [ONE, NULL]),
        (np.array([1], "m8[s]"), [('{"timedelta64": "np.timedelta64(1,\'s\')"}', "bad_key")]),
        ([np.int64(1), np.uint8(2), np.str_("1"), np.float64("nan")], [ONE, TWO, ONE, NULL]),
        ([[np.int64(1)], np.array(["2"]), pa.scalar(1), pa.array([2])], [ONE, TWO, ONE, TWO]),
        (pa.array([1, None, 2]), [ONE, NULL, TWO]),
        (pa.chunked_array([["1"], [None]]), [ONE, NULL]),
        (pd.Series([1, 2], dtype="Int64"), [ONE, TWO]),
        (pd.Series([1, None, 2], dtype="Int64"), [ONE, NULL, TWO]),
        (pd.Series(["1", None], dtype="string"), [ONE, NULL]),
        (pd.Series(["1", np.nan]), [ONE, NULL]),
        (pd.Index([1, 2]), [ONE, TWO]),
        ([1, pd.NaT, "\ud800", 2], [ONE, NULL, ("?", "bad_key"), TWO]),
        ([1, b"1", "\ud800"], [ONE, ('{"bytes": "b\'1\'"}', "bad_key"), ("?", "bad_key")]),
        (
            [datetime.date(2026, 1, 2), "\ud800"],
            [('{"date": "datetime.date(2026, 1, 2)"}', "bad_key"), ("?", "bad_key")],
        ),
        ([1, NESTED], [ONE, ("[[[[[[[...]]]]]]]", "bad_key")]),
        ([1, 10**5000, 2], [ONE, ('{"int": "16610 bits"}', "bad_key"), TWO]),
        (
            [True, 1.5, float("inf")],
            [("true", "bad_key"), ("1.5", "bad_key"), ('{"float": "inf"}', "bad_key")],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_keys_of_whatever_holds_them_are_answered_alike(
    numbers: World, keys: Any, told: list[Any]
) -> None:
    assert answers(numbers, keys) == told


def test_a_generator_is_read_once(numbers: World) -> None:
    def once() -> Any:
        return (key for key in (1, 2))

    assert numbers.lookup.get("things", once())["key"].to_pylist() == ["1", "2"]
    assert ask(numbers, calls.table("things", once(), {}))["key"].to_pylist() == ["1", "2"]
    found = numbers.lookup.search(
        "things", vector=[1, 2], only=once(), exclude=(key for key in [np.int64(2)])
    )
    assert [row["key"] for row in found["rows"]] == ["1"]
    words: SearchWords = {"vector": [1, 2], "only": once(), "exclude": np.array([2])}
    assert [row.key for row in ask(numbers, calls.search("things", words)).rows] == ["1"]


def test_one_key_may_be_numpys_and_arrows(numbers: World) -> None:
    for key in (np.int64(1), pa.scalar(1), [np.int64(1)], np.array([1])):
        assert numbers.lookup.row("things", key)["status"] == "fresh"
        assert ask(numbers, calls.row("things", key, {})).status == "fresh"
        near = numbers.lookup.search("things", key=key)["rows"]
        assert (
            [row["key"] for row in near]
            == [row.key for row in ask(numbers, calls.search("things", {"key": key})).rows]
            == ["2"]
        )
    for key in (b"1", None, 1.5):
        with pytest.raises(RequestError) as caught:
            ask(numbers, calls.row("things", key, {}))
        assert caught.value.code == "bad_key"


@pytest.mark.parametrize("keys", ["1", b"1", 1, None, np.int64(1), np.array("ab")])
def test_one_key_is_no_list_of_keys(numbers: World, keys: Any) -> None:
    for get in (numbers.lookup.get, lambda view, keys: calls.table(view, keys, {})):
        with pytest.raises(RequestError, match="keys is a list of keys"):
            get("things", keys)
