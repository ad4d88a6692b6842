"""Vectors as base64 in JSON: by every route the very numbers of the store, what else there is as it
was, and never the one form for the other."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.store.answers.lookup import Lookup
from precompute.store.client import calls
from precompute.store.errors import RequestError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.http.app import create_app
from precompute.store.online.codec import RowCodec
from precompute.store.online.online_store import Pointer
from precompute.store.online.table_store import TableStore
from precompute.store.wire import bodies
from tests.asgi import call
from tests.online import named, segment
from tests.world import World

VECTORS = {"v": ("float32", 3), "h": ("float16", 2), "p": ("float32", 4)}
"""The last is packed, and beside other types alone."""
ROW, LOOKUP = "/v1/views/things/rows/", "/v1/views/things/lookup"


@pytest.fixture(params=[True, False], ids=["vectors alone", "beside other types"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Rows ``a`` and ``b``, and ``null`` without vectors; beside them a list, a text, and a vector
    of another type, which hinder columns."""
    rng = np.random.default_rng(1)
    columns: dict[str, pa.Array] = {
        "id": pa.array(["a", "b", "null"]),
        "t": pa.array([1_000_000] * 3, pa.int64()),
    }
    there = np.array([True, True, False])
    features = []
    for name, (dtype, dim) in list(VECTORS.items())[: 2 if request.param else 3]:
        values = rng.standard_normal((3, dim)).astype(dtype)
        nulls = pa.array(~there)
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), dim, mask=nulls)
        features.append(Feature(name, dtype, dim=dim, packed="int8" if name == "p" else None))
    if not request.param:
        columns |= {
            "d": pa.FixedSizeListArray.from_arrays(pa.array([0.5] * 6), 2),
            "s": pa.array(["x"] * 3),
        }
        columns["l"] = pa.array([[1.5], [], [2.5, 0.25]], pa.list_(pa.float32()))
        features += [
            Feature("d", "float64", dim=2),
            Feature("s", "string"),
            Feature("l", "float32", max_items=2),
        ]
    columns["computed_at"] = columns.pop("t")
    view = FeatureView("things", ("id",), tuple(features), ttl_s=10, stale_for_s=0)
    store = TableStore(tmp_path)
    store.load(
        "things",
        segment(1),
        iter([RowCodec(view).row_batch(pa.record_batch(columns), ("id",), 1)]),
    )
    store.flip(Pointer(view, 1, 1, "m", 3, 3, "at 1", 1_000_000, segments=(named(1),)))
    return create_app(Lookup(store, clock=lambda: 2.0, monotonic=lambda: 2.0))


def read(answer: Any, row: Any) -> Any:
    """A row's features as they would be as numbers, from their bytes; digits are float32's, of a
    float16 too."""
    features = dict(row["features"])
    assert answer["base64"] == {
        name: dtype for name, (dtype, _) in VECTORS.items() if name in features
    }
    for name, dtype in answer["base64"].items():
        if features[name] is not None:
            numbers = np.frombuffer(
                base64.b64decode(features[name], validate=True), np.dtype(dtype).newbyteorder("<")
            )
            features[name] = json.loads("[" + ",".join(map(str, numbers.astype(np.float32))) + "]")
    return features


def test_every_route_has_the_same_numbers_in_either_form(app: Any) -> None:
    for keys in (["a", "b"], ["a", "null"], ["b"]):
        plain = call(app, "POST", LOOKUP, {"keys": keys}).json
        assert "base64" not in plain
        wanted = [row["features"] for row in plain["rows"]]
        body = {"keys": keys, "encoding_format": "base64"}
        for path, sent in ((LOOKUP, body), (LOOKUP + "?encoding_format=base64", {"keys": keys})):
            answer = call(app, "POST", path, sent).json
            assert [read(answer, row) for row in answer["rows"]] == wanted
        (several,) = call(
            app, "POST", "/v1/lookup", {"requests": [{"view": "things", **body}]}
        ).json["responses"]
        assert [read(several, row) for row in several["rows"]] == wanted
    answer = call(
        app, "POST", LOOKUP, {"keys": ["a"], "features": ["h"], "encoding_format": "base64"}
    ).json
    assert list(answer["base64"]) == list(answer["rows"][0]["features"]) == ["h"]


def test_a_row_that_is_cached_in_one_form_is_not_given_in_the_other(app: Any) -> None:
    etags = set()
    for _ in range(2):
        for key in ("a", "null"):
            plain, encoded = (
                call(app, "GET", f"{ROW}{key}{query}") for query in ("", "?encoding_format=base64")
            )
            assert "base64" not in plain.json
            assert read(encoded.json, encoded.json) == plain.json["features"]
            etags |= {plain.headers["etag"], encoded.headers["etag"]}
            # what is as it was in one form is not in the other
            same = call(app, "GET", ROW + key, if_none_match=plain.headers["etag"])
            other = call(
                app,
                "GET",
                f"{ROW}{key}?encoding_format=base64",
                if_none_match=plain.headers["etag"],
            )
            assert (same.status, other.status) == (304, 200)
    assert len(etags) == 4


def test_what_is_no_form_is_refused(app: Any) -> None:
    call(app, "GET", ROW + "a?encoding_format=hex").check_problem(400, "bad_request")
    call(app, "POST", LOOKUP, {"keys": ["a"], "encoding_format": "hex"}).check_problem(
        422, "bad_request"
    )


def test_what_a_search_finds_and_what_the_client_makes_of_it(tmp_path: Path) -> None:
    world = World(tmp_path, {"a": 1.0, "b": 2.0, "c": 3.0}, fallback=False)
    body = {"vector": [1, 0], "features": ["vector", "double"], "k": 2}
    path = "/v1/views/things/search"
    plain = call(world.app, "POST", path, body)
    encoded = call(world.app, "POST", path, body | {"encoding_format": "base64"})
    assert (plain.json.get("base64"), encoded.json["base64"]) == (None, {"vector": "float32"})
    rows = (
        calls.search("things", {"vector": [1, 0], "features": ["vector"]}).read(encoded.body).rows
    )
    assert [row.features for row in rows] == [row["features"] for row in plain.json["rows"]]


def test_keys_of_many_bytes_are_refused_before_they_are_made_into_objects() -> None:
    long = list(range(100_000, 100_000 + 20_000))
    for decoder, body in (
        (bodies.decode_lookup, {"keys": ["a", long]}),
        (bodies.decode_multi, {"requests": [{"view": "things", "keys": [long]}]}),
        (bodies.decode_search, {"key": long}),
        (bodies.decode_search, {"vector": [1.0], "only": [long]}),
        (bodies.decode_search, {"vector": [1.0], "exclude": [long]}),
    ):
        with pytest.raises(
            RequestError, match="a key of several parts has at most 8,192 bytes of JSON, got 1"
        ) as caught:
            bodies.decode(decoder, json.dumps(body).encode())
        assert (caught.value.status, caught.value.code) == (413, "key_too_long")
    # one bad key beside others: a text, and what many rows are computed from
    wanted = bodies.decode(
        bodies.decode_lookup,
        json.dumps({"keys": ["x" * 100_000], "inputs": {"a": {"v": long}}}).encode(),
    )
    assert (len(wanted.keys[0]), wanted.inputs) == (100_000, {"a": {"v": long}})
