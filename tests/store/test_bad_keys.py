"""Bad keys: whatever stands among the keys of a request, the others are answered as if it did not."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from store.api import wire
from tests.store.test_api import arrow
from tests.store.test_http_freshness import LOOKUP, ROW, SEARCH, World

NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,4})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)
TEXTS = st.text(st.characters(), max_size=8).map(json.dumps)
"""JSON's own spelling, of halves of surrogate pairs too."""
VALUES = st.recursive(
    st.one_of(
        NUMBERS, TEXTS, st.sampled_from(["null", "true", "false", "1" + "0" * 700, "-" + "9" * 5000, '"' + "k" * 600 + '"'])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(st.tuples(TEXTS, inner), max_size=3).map(lambda pairs: f"{{{','.join(f'{k}:{v}' for k, v in pairs)}}}"),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), {"new": 1.0, "old": 9.0, "gone": 20.0}, fallback=False)


@settings(max_examples=15, deadline=None)
@given(bad=VALUES, at=st.integers(0, 3))
@example("1e400", 1)
@example(r'"\ud800"', 0)
@example(r'[["a\udc00b"]]', 3)
@example("9" * 5000, 2)
def test_no_value_that_json_can_have_changes_the_answer_of_another_key(world: World, bad: str, at: int) -> None:
    good = ['"new"', '"gone"', '"old"']
    alone = world.post(LOOKUP, f'{{"keys":[{",".join(good)}]}}'.encode()).json["rows"]
    mixed = f'"keys":[{",".join([*good[:at], bad, *good[at:]])}]'
    inputs = f'"inputs":{{{bad}:{{"x":1}}}}' if bad.startswith('"') else '"inputs":null'
    several = f'{{"requests":[{{"view":"things",{mixed}}},{{"view":{json.dumps(bad)},{mixed}}},{{"view":"things",{mixed}}}]}}'
    table = world.post(LOOKUP, f"{{{mixed}}}".encode(), accept=wire.ARROW).arrow
    first, unknown, last = world.post("/v1/lookup", several.encode()).json["responses"]
    assert unknown["problem"]["status"] == 404
    for rows in (world.post(LOOKUP, f"{{{mixed},{inputs}}}".encode()).json["rows"], first["rows"], last["rows"]):
        assert rows[:at] + rows[at + 1 :] == alone
        assert len(rows) == 4
        assert rows[at]["status"] == "missing" or rows[at] in alone
    told = list(zip(table["key"].to_pylist(), table["status"].to_pylist(), table["double"].to_pylist(), strict=True))
    assert told[:at] + told[at + 1 :] == [("new", "fresh", 2.0), ("gone", "missing", None), ("old", "fresh", 2.0)]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        *[(text, 400) for text in ("NaN", "-Infinity", "nul", "[1,]", '"\x01"', r'"\x"', "1e", "01", '"\ud800"')],
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
def test_what_is_no_json_and_what_no_field_can_be_is_refused_whole(world: World, wrong: str, status: int) -> None:
    body = b'{"keys":["new",%b]}' % wrong.encode(errors="surrogatepass")
    world.post(LOOKUP, body).check_problem(status)
    several = world.post("/v1/lookup", b'{"requests":[{"view":"things",%b}]}' % body[1:-1])
    assert (several.json["responses"][0]["problem"] if several.status == 200 else several.json)["status"] == status


def test_a_view_named_by_half_a_surrogate_pair_is_one_unknown_view(world: World) -> None:
    body = rb'{"requests":[{"view":"\ud800","keys":[1]},{"view":"things","keys":["new"]}]}'
    unknown, known = world.post("/v1/lookup", body).json["responses"]
    assert (unknown["view"], unknown["problem"]["status"], known["rows"][0]["status"]) == ("?", 404, "fresh")


def test_a_body_of_very_many_values_is_read_once(world: World) -> None:
    numbers = b",".join([b"1"] * (wire.MAX_VALUES // 5))
    body = b'{"keys":["new",%b],"inputs":{"new":{"x":[' + numbers + b"]}}}"
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
    rows = world.post(LOOKUP, arrow(keys), content_type=wire.ARROW).json["rows"]
    assert [row.get("reason") for row in rows] == [None if key else "bad_key" for key in keys.to_pylist()]


@pytest.mark.parametrize("key", ["%ED%A0%80", "%ff", "%00", "k" * 600, ""])
def test_a_url_that_ends_in_no_key_is_a_problem_of_its_own(world: World, key: str) -> None:
    world.get(ROW + key).check_problem(400, "bad_key")


@pytest.mark.parametrize("bad", [r'"\ud800"', "1e400", "9" * 5000, "1.5", r'["\ud800"]', '""', "null"])
def test_a_search_refuses_what_no_key_can_be(world: World, bad: str) -> None:
    wherever = [f'"key":"new","only":[{bad}]', f'"key":"new","exclude":[{bad}]']
    for asked in (*wherever, f'"key":{bad}') if bad != "null" else wherever:
        world.post(SEARCH, f"{{{asked}}}".encode()).check_problem(400, "bad_key")


@pytest.mark.parametrize(
    ("asked", "status"), [('"vector":[1e400,1]', 422), (r'"key":"new","filter":{"double":"\ud800"}', 400), ('"key":null', 400)]
)
def test_a_search_by_nothing_is_refused(world: World, asked: str, status: int) -> None:
    world.post(SEARCH, f"{{{asked}}}".encode()).check_problem(status)


def test_bad_keys_are_shown_as_they_were_written(world: World) -> None:
    keys = ["1e400", "-2e400", '["w1", 1e999]', "[null, true]", "1" + "0" * 5000, "2" + "0" * 5000]
    shown = [row["key"] for row in world.post(LOOKUP, f'{{"keys":[{",".join(keys)}]}}'.encode()).json["rows"]]
    assert shown[:4] == keys[:4]
    assert [text[:3] for text in shown[4:]] == ["100", "200"]


def test_the_page_takes_any_text_for_a_key(world: World) -> None:
    for question in ("q=%ED%A0%80", "q=%ff&do=near", "q=%ED%A0%80&do=text", "q=1e400"):
        assert world.get(f"/?view=things&{question}").status in (200, 400, 404), question
