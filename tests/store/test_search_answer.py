"""What a search answers over HTTP: the rows that a lookup answers, number by number, and no more
bytes than allowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from precompute.store.answers.lookup import Lookup
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.store.http.app import create_app
from precompute.store.online.codec import RowCodec
from precompute.store.online.online_store import Generation, Pointer
from precompute.store.vectors.index_build import build_index
from tests.asgi import call
from tests.memory_store import MemoryStore

NOW_S = 1_700_000_000.25
FEATURES = (
    Feature("vector", "float32", dim=3),
    Feature("share", "float32"),
    Feature("half", "float16"),
    Feature("whole", "int64"),
    Feature("exact", "float64"),
    Feature("some", "float32", max_items=4),
    Feature("title", "string"),
)
SEARCH = "/v1/views/things/search"


@pytest.fixture
def lookup(tmp_path: Path) -> Lookup:
    view = FeatureView(
        "things", ("id",), FEATURES, ttl_s=10, stale_for_s=5, index=IndexSpec("vector", "l2")
    )
    rows = pa.record_batch(
        {
            "id": pa.array(["a", "b"]),
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array([0.1, 1e-45, 3e18, 0.7, -0.0, 1 / 3], pa.float32()), 3
            ),
            "share": pa.array([0.1, None], pa.float32()),
            "half": pa.array(np.array([0.1, np.nan], np.float16)),
            "whole": pa.array([2**63 - 1, -(2**63)]),
            "exact": pa.array([0.1, float("inf")]),
            "some": pa.array([[0.1, 0.2], []], pa.list_(pa.float32())),
            "title": pa.array(['"é\u2028', None]),
            "computed_at": pa.array([1_700_000_000_000_001] * 2, pa.int64()),
        }
    )
    online = MemoryStore()
    online.load("things", Generation(1, 1), iter([RowCodec(view).row_batch(rows, ("id",), 1)]))
    build_index(tmp_path / "index", [rows], view, model="m")
    online.flip(Pointer(view, 1, 1, "m", 2, 2, "then", 1_700_000_000_000_001, index="index"))
    return Lookup(online, tmp_path, clock=lambda: NOW_S, monotonic=lambda: 0.0)


def test_a_row_that_is_found_reads_as_one_that_is_looked_up(lookup: Lookup) -> None:
    app = create_app(lookup)
    names = [feature.name for feature in FEATURES]
    found = call(app, "POST", SEARCH, {"vector": [0.1, 0, 0], "k": 2, "features": names})
    assert (found.status, found.headers["content-type"]) == (200, "application/json")
    assert {name: found.json[name] for name in ("view", "snapshot", "model", "metric")} == {
        "view": "things",
        "snapshot": 1,
        "model": "m",
        "metric": "l2",
    }
    assert sorted(row["key"] for row in found.json["rows"]) == ["a", "b"]
    for row in found.json["rows"]:
        alone = call(app, "GET", f"/v1/views/things/rows/{row['key']}")
        # digit by digit: json.loads would read 0.1 and 0.10000000149011612 as two numbers, and as
        # one float32
        assert alone.body.partition(b'"features":')[2] in found.body
        del row["score"]
        assert row == {name: value for name, value in alone.json.items() if name != "view"}


def test_a_search_that_finds_too_many_bytes_is_refused_early(lookup: Lookup) -> None:
    app = create_app(lookup, answer_bytes=600)
    body = {"vector": [0.1, 0, 0], "k": 2}
    call(app, "POST", SEARCH, body | {"features": ["vector"]}).check_problem(
        413, "answer_too_large"
    )
    assert call(app, "POST", SEARCH, body).status == 200
