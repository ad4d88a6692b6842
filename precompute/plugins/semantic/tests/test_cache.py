"""The semantic cache: a miss is answered by the row of the entity whose input is nearest, or by the
model, and says which; and what that would cost, measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.config.gates import AccuracyConfig
from precompute.jobs.ops.retention import drop
from precompute.jobs.serve.fallback import ViewFallback
from precompute.plugins.semantic import cache
from precompute.plugins.semantic.cache import SemanticCache
from precompute.plugins.semantic.figures import SemanticFigures
from precompute.plugins.semantic.thresholds import agreement_of, thresholds
from precompute.store.answers.answer import Answer
from precompute.store.answers.lookup import Lookup
from precompute.store.doors import VIEW_KEYS
from precompute.store.errors import ConfigError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.http.app import create_app
from precompute.store.http.telemetry.instruments import Instrument
from precompute.store.wire.lookup_options import CacheControl, LookupOptions
from tests.asgi import call
from tests.fixtures import MakeProject
from tests.jobs.test_formats import contents, make_all_earlier
from tests.scene import UNJUDGED, Scene

HERE = "precompute.plugins.semantic.tests.test_cache"
TEXTS = {1: "aaaa", 2: "bbbb", 3: "aaab", 4: "abbb", 5: "cccc"}
"""As counts of letters, 1 and 3 have a cosine of 3/√10, 2 and 4 too; 3 and 4 one of 6/10; 5 is like
none."""
table_only = pytest.mark.parametrize("online", ["table:./online"])
"""For what another store does not change."""


class Letters:
    """``vector``: how often the letters a, b and c stand in ``text``.

    Args:
        path: a file whose content belongs to the fingerprint.
        slow: takes so many seconds for a text with an x.
    """

    def __init__(self, path: str, slow: float = 0.0) -> None:
        self._content, self._slow = Path(path).read_text(), slow

    def fingerprint(self) -> str:
        return f"letters {self._content}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        texts = batch.column("text").to_pylist()
        if any("x" in text for text in texts):
            time.sleep(self._slow)
        counts = np.array([[text.count(letter) for letter in "abc"] for text in texts], np.float32)
        return {"vector": pa.FixedSizeListArray.from_arrays(counts.ravel(), 3)}


class Labeller:
    """``label``: the letter that most of a text are, ``length``: how many there are. Writes a line
    for every batch.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def fingerprint(self) -> str:
        return "labeller 1"

    def compute(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        texts = batch.column("text").to_pylist()
        with open(self._path, "a") as file:
            file.write(f"{texts}\n")
        return {
            "label": pa.array([max(text, key=text.count) for text in texts]),
            "length": pa.array(list(map(len, texts))),
        }


def write_texts(folder: Path, texts: dict[int, str]) -> None:
    """The source's file."""
    pq.write_table(
        pa.table({"id": list(texts), "text": list(texts.values())}), folder / "texts.parquet"
    )


MakeTexts = Callable[..., Scene]


@pytest.fixture
def make_texts(make_project: MakeProject, tmp_path: Path, online: str) -> MakeTexts:
    """Makes a project of ``labels``, whose misses ``vectors`` looks into; ``labels`` and
    ``vectors`` replace keys of either, None removes one."""

    def make(
        *, labels: dict[str, Any] | None = None, vectors: dict[str, Any] | None = None
    ) -> Scene:
        (tmp_path / "calls").write_text("")
        (tmp_path / "weights").write_text("1")
        common = {
            "entity": ["id"],
            "source": {"sql": "SELECT * FROM read_parquet('${data}/texts.parquet')"},
            "ttl": "1h",
            "stale_for": "1d",
            "fallback": {"enabled": True, "deadline": "20s"},
            "gates": UNJUDGED,
        }
        labelled = {
            "model": {"use": f"{HERE}:Labeller", "args": {"path": str(tmp_path / "calls")}},
            "features": {"label": {"dtype": "string"}, "length": {"dtype": "int64"}},
            "semantic_cache": {"view": "vectors", "threshold": 0.94},
        }
        embedded = {
            "model": {"use": f"{HERE}:Letters", "args": {"path": str(tmp_path / "weights")}},
            "features": {"vector": {"dtype": "float32", "dim": 3}},
            "index": {"on": "vector"},
        }
        views = {}
        for name, own, over in (("labels", labelled, labels), ("vectors", embedded, vectors)):
            view = common | own | (over or {})
            views[name] = {key: value for key, value in view.items() if value is not None}
        scene = make_project([(1, 1.0)], views=views, project={"online": online})
        write_texts(scene.folder, TEXTS)
        return scene

    return make


def published(scene: Scene) -> Scene:
    scene.publish_all("vectors", "labels")
    calls(scene).write_text("")
    return scene


def calls(scene: Scene) -> Path:
    """Where the labeller writes what it computes."""
    return scene.folder.parent / "calls"


MEASURED = 2
"""Batches that a pace is measured by."""


def computed(scene: Scene) -> list[str]:
    """The batches that the labeller computed since publishing, but for those that its pace was
    measured by when it was opened."""
    return calls(scene).read_text().splitlines()[MEASURED:]


@contextlib.contextmanager
def asking(scene: Scene, **options: Any) -> Iterator[tuple[Lookup, Counter[str]]]:
    """A lookup with both models behind it, and what came of the misses that were looked into."""
    fallback = ViewFallback(scene.offline, scene.home, memory_mb=64)
    with contextlib.closing(fallback), scene.lookup(fallback, **options) as lookup:
        outcomes = Counter[str]()

        def count(name: str, amount: int, view: str, *labels: str) -> None:
            if name == cache.ROWS:
                outcomes[labels[0]] += amount

        lookup.miss_reports.count = count
        yield lookup, outcomes


def cache_of(lookup: Lookup) -> SemanticCache:
    assert lookup._misses is not None
    handler = lookup._misses._handler(SemanticCache)
    assert isinstance(handler, SemanticCache)
    return handler


def asked(
    lookup: Lookup,
    text: str,
    key: str = "9",
    *,
    cache_control: CacheControl | None = None,
    **words: Any,
) -> dict[str, Any]:
    """The row of a key whose text comes along, without what is the same in every row."""
    options = LookupOptions(inputs={key: {"text": text}}, **words)
    answer = lookup.begin("labels", [key], options, cache_control=cache_control)
    answer.wait()
    (row,) = answer.rows()
    return row


def short(row: dict[str, Any]) -> tuple[Any, ...]:
    """Status, source, whose it is, and the label."""
    features = row["features"] or {}
    return row["status"], row["source"], row.get("nearest"), features.get("label")


COMPUTED = ("computed", "fallback", None)


def test_the_nearest_stored_input_answers_from_the_threshold_on(make_texts: MakeTexts) -> None:
    scene = published(make_texts())
    with asking(scene) as (lookup, outcomes):
        stored = lookup.row("labels", 1)
        row = asked(lookup, "aaaaaaaa")
        # the cosine is 0.9487, and the letters are counted exactly
        nearly = asked(lookup, "aabb" * 2 + "aaaa", "8")
        far = asked(lookup, "aabb", "7")
        table = lookup.get(
            "labels", [1, "9", "7", 77], inputs={"9": {"text": "aa"}, "7": {"text": "abc"}}
        )
    assert "similarity" not in stored
    assert row == stored | {
        "key": "9",
        "source": "cache",
        "similarity": 1.0,
        "nearest": "1",
        "age_s": row["age_s"],
    }
    assert row["age_s"] >= stored["age_s"] > 0
    assert (short(nearly), nearly["features"]["length"]) == (("fresh", "cache", "3", "a"), 4)
    assert nearly["similarity"] == pytest.approx((8 * 3 + 4) / (80 * 10) ** 0.5, abs=1e-6)
    assert (short(far), far["features"]) == ((*COMPUTED, "a"), {"label": "a", "length": 4})
    assert "similarity" not in far
    assert computed(scene) == ["['aabb']", "['abc']"]
    assert table.column("nearest").to_pylist() == [None, "1", None, None]
    assert table.column("similarity").to_pylist() == [None, 1.0, None, None]
    assert table.column("source").to_pylist() == ["store", "cache", "fallback", None]
    assert table.column("label").to_pylist() == ["a", "a", "a", None]
    # 77 is in no source
    assert +outcomes == {"hit": 3, "far": 2, "no_vector": 1}


@table_only
def test_a_row_of_another_grows_old_as_it_does(make_texts: MakeTexts) -> None:
    scene = published(make_texts())
    # found unchanged: as old as that, and no older
    scene.run("labels")
    now = time.time()
    clock = {"ahead": 0.0}
    with asking(scene, clock=lambda: now + clock["ahead"], monotonic=lambda: 0.0) as (lookup, _):
        assert asked(lookup, "aaa")["age_s"] == lookup.row("labels", 1)["age_s"]
        found = []
        for clock["ahead"] in (0.0, 2 * 3600.0, 26 * 3600.0):
            row = asked(lookup, "aaa")
            found.append((short(row), row["age_s"] == pytest.approx(clock["ahead"], abs=60)))
        clock["ahead"] = 60.0
        too_old = asked(lookup, "aaa", max_age_s=30.0)
    assert found == [
        (("fresh", "cache", "1", "a"), True),
        (("stale", "cache", "1", "a"), True),
        ((*COMPUTED, "a"), True),
    ]
    assert short(too_old) == (*COMPUTED, "a")


@table_only
def test_who_wants_the_origin_gets_no_other_row(make_texts: MakeTexts) -> None:
    scene = published(make_texts())
    with asking(scene) as (lookup, outcomes):
        assert short(asked(lookup, "aaa", cache_control=CacheControl(no_cache=True))) == (
            *COMPUTED,
            "a",
        )
        assert short(asked(lookup, "aaa", cache_control=CacheControl(only_if_cached=True))) == (
            "missing",
            None,
            None,
            None,
        )
        assert short(asked(lookup, "aaa", fallback=False)) == ("missing", None, None, None)
        assert short(asked(lookup, "aaa", cache_control=CacheControl(max_age_s=100.0))) == (
            "fresh",
            "cache",
            "1",
            "a",
        )
        assert +outcomes == {"hit": 1}


# ---- what is amiss


def _drop(scene: Scene) -> None:
    drop(scene, "vectors", data=False)


def _another_model(scene: Scene) -> None:
    (scene.folder.parent / "weights").write_text("2")


def _damaged(scene: Scene) -> None:
    index = scene.pointer("vectors").index
    assert index is not None
    (scene.root / index / "vectors.faiss").write_bytes(b"")


@table_only
@pytest.mark.parametrize(
    ("amiss", "outcome"),
    [(_drop, "unusable"), (_damaged, "unusable"), (_another_model, "no_vector")],
    ids=["not published", "damaged index", "another fingerprint"],
)
def test_whatever_is_amiss_the_model_answers(
    make_texts: MakeTexts,
    amiss: Callable[[Scene], None],
    outcome: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = published(make_texts())
    amiss(scene)
    with asking(scene) as (lookup, outcomes):
        assert short(asked(lookup, "aaaa")) == (*COMPUTED, "a")
        assert +outcomes == {outcome: 1}
    assert computed(scene) == ["['aaaa']"]


@table_only
def test_an_encoder_that_is_too_slow_leaves_the_model_its_time(
    make_texts: MakeTexts, tmp_path: Path
) -> None:
    slow = {"use": f"{HERE}:Letters", "args": {"path": str(tmp_path / "weights"), "slow": 0.5}}
    scene = published(
        make_texts(vectors={"model": slow, "fallback": {"enabled": True, "deadline": "100ms"}})
    )
    with asking(scene) as (lookup, outcomes):
        row = asked(lookup, "aaaax")
    assert short(row) == (*COMPUTED, "a")
    assert +outcomes == {"no_vector": 1}


def test_of_the_near_ones_the_first_with_a_row_answers(
    make_texts: MakeTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_texts(
        labels={
            "source": {"sql": "SELECT * FROM read_parquet('${data}/texts.parquet') WHERE id <> 1"}
        }
    )
    published(scene)
    with asking(scene) as (lookup, _):
        assert short(asked(lookup, "aaaaab")) == ("fresh", "cache", "3", "a")
        # only 1 is near enough
        assert short(asked(lookup, "aaaaaaaaaa" * 2 + "b", "8")) == ("fresh", "cache", "3", "a")
        assert short(asked(lookup, "cca", "7")) == (*COMPUTED, "c")
        # itself is none of them
        monkeypatch.setattr(cache, "NEAREST", 1)
        assert short(asked(lookup, "aaaa", "1")) == ("fresh", "cache", "3", "a")


@table_only
def test_a_key_without_inputs_is_looked_up_only_where_sources_are_one(
    make_texts: MakeTexts,
) -> None:
    other = {"source": {"sql": "SELECT * FROM read_parquet('${data}/texts.parquet') WHERE true"}}
    for labels, wanted in (({}, ("fresh", "cache", "1", "a")), (other, (*COMPUTED, "a"))):
        scene = make_texts(labels=labels)
        published(scene)
        write_texts(scene.folder, TEXTS | {6: "aaaaa"})
        with asking(scene) as (lookup, _):
            assert short(lookup.row("labels", 6)) == wanted
            assert lookup.row("labels", 66)["reason"] == "unknown_entity"


@table_only
def test_another_views_rows_are_a_source_only_of_the_same_snapshot(make_texts: MakeTexts) -> None:
    source = {"source": {"sql": "SELECT id, repeat('a', double::BIGINT) AS text FROM live.numbers"}}
    scene = make_texts(labels=source, vectors=source)
    scene.publish_all("numbers", "vectors", "labels")
    pq.write_table(pa.table({"id": [1, 6], "x": [1.0, 2.0]}), scene.folder / "data.parquet")
    # `labels` still reads the numbers that it was computed from
    scene.publish_all("numbers", "vectors")
    with asking(scene) as (lookup, outcomes):
        assert lookup.row("labels", 6)["reason"] == "unknown_entity"
        assert +outcomes == {"no_vector": 1}
        assert short(asked(lookup, "aa", "6")) == ("fresh", "cache", "1", "a")


@table_only
def test_a_row_of_a_later_publishing_is_not_mixed_in(make_texts: MakeTexts) -> None:
    scene = published(make_texts())
    with asking(scene) as (lookup, outcomes):
        semantic, begin = cache_of(lookup), lookup.begin

        def published_meanwhile(
            view: str,
            keys: Sequence[Any],
            options: LookupOptions = LookupOptions(),  # noqa: B008
            **more: Any,
        ) -> Answer:
            write_texts(scene.folder, TEXTS | {1: "aaaaaa"})
            scene.run("labels")
            return begin(view, keys, options, **more)

        tools = semantic._tools
        semantic._tools = dataclasses.replace(tools, begin=published_meanwhile)
        row = asked(lookup, "aaa")
        assert (short(row), row["snapshot"]) == ((*COMPUTED, "a"), 1)
        assert +outcomes == {"no_row": 1}
        semantic._tools = tools
        row = asked(lookup, "aaa", "8")
        assert (short(row), row["snapshot"], row["features"]["length"]) == (
            ("fresh", "cache", "1", "a"),
            2,
            6,
        )


@table_only
def test_beyond_a_number_of_requests_at_once_the_model_answers(
    make_texts: MakeTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "AT_ONCE", 1)
    scene = published(make_texts())
    with asking(scene) as (lookup, outcomes):
        with cache_of(lookup)._room:
            assert short(asked(lookup, "aaaa")) == (*COMPUTED, "a")
        # nor is one looked into, then or later, for which the system had no thread
        usual = threading.stack_size(2**46)
        assert short(asked(lookup, "aaaa", "7")) == (*COMPUTED, "a")
        threading.stack_size(usual)
        assert short(asked(lookup, "aaaa", "8")) == ("fresh", "cache", "1", "a")
        assert +outcomes == {"busy": 1, "hit": 1}


# ---- over HTTP


def test_over_http_a_row_says_whose_it_is(make_texts: MakeTexts) -> None:
    scene = published(make_texts())
    with asking(scene) as (lookup, _):
        app = create_app(lookup)
        body = {"keys": ["9", 2], "inputs": {"9": {"text": "aaaaaa"}}}
        rows = call(app, "POST", "/v1/views/labels/lookup", body).json["rows"]
        write_texts(scene.folder, TEXTS | {6: "bb", 7: "bbbbbbbbba"})
        one = call(app, "GET", "/v1/views/labels/rows/6")
        same = call(app, "GET", "/v1/views/labels/rows/6", if_none_match=one.headers["etag"])
        less = call(app, "GET", "/v1/views/labels/rows/7", if_none_match=one.headers["etag"])
        views = {
            view["view"]: view["semantic_cache"]
            for view in call(app, "GET", "/v1/views").json["views"]
        }
        metrics = call(app, "GET", "/metrics").body.decode()
    assert [(row["source"], row.get("similarity"), row.get("nearest")) for row in rows] == [
        ("cache", 1.0, "1"),
        ("store", None, None),
    ]
    assert "nearest" not in rows[1]
    assert (one.json["nearest"], one.json["features"]["label"]) == ("2", "b")
    assert one.headers["cache-status"].startswith("precompute; hit")
    assert same.status == 304
    # the same row, less near
    assert (less.status, less.json["nearest"], less.json["similarity"] < 1.0) == (200, "2", True)
    assert views == {"labels": {"view": "vectors", "threshold": 0.94}, "vectors": None}
    assert 'precompute_semantic_cache_rows_total{outcome="hit",view="labels"} 4.0' in metrics
    assert 'precompute_semantic_cache_similarity_total{view="labels"} 3.99' in metrics


COUNTED = {
    ("films", "hit"): 4.0,
    ("films", "far"): 3.0,
    ("films", "no_row"): 1.0,
    ("others", "far"): 2.0,
    ("films",): 3.8,
}
"""Labels → number: of one instrument two, of the other one."""


def test_operators_are_shown_what_it_saves_and_why_not_more() -> None:
    def counts(instrument: Instrument, *labels: str) -> dict[tuple[str, ...], float]:
        series = [key for key in COUNTED if len(key) == len(instrument.labels)]
        own = [key for key in series if key[: len(labels)] == labels]
        return {key[len(labels) :]: COUNTED[key] for key in own}

    details = "calls saved at a similarity of 0.950; 3 far; 1 no_row"
    assert list(SemanticFigures.caches(counts)) == [
        ("similar inputs of", "films", 4.0, 4.0, "calls saved", details),
        ("similar inputs of", "others", 0.0, 2.0, "calls saved", "calls saved; 2 far"),
    ]
    words = SemanticCache.words({"view": "vectors", "threshold": 0.94})
    assert words == "rows whose inputs are alike: by 0.94 or more in vectors"


# ---- the configuration


@pytest.mark.parametrize(
    ("labels", "vectors", "message"),
    [
        (
            {"semantic_cache": {"view": "vector", "threshold": 0.9}},
            {},
            r"labels\.yaml:\d+: semantic_cache\.view: 'vector': no such view; did you mean 'vectors'\?",
        ),
        ({"semantic_cache": {"view": "labels", "threshold": 0.9}}, {}, "in its own stead"),
        ({}, {"entity": ["text"]}, "its key is text, and this view's id"),
        ({}, {"index": None}, "it has no index"),
        ({}, {"index": {"on": "vector", "metric": "l2"}}, "compares by l2"),
        ({}, {"fallback": {"enabled": False}}, "view 'vectors' has no fallback"),
        ({"fallback": {"enabled": False}}, {}, "view 'labels' has no fallback"),
        (
            {},
            {"features": {"vector": {"dtype": "float32", "dim": 3, "packed": "binary"}}},
            "packed as binary",
        ),
        pytest.param(
            {},
            {"fallback": {"enabled": True, "model": "students/small"}},
            r"its misses are computed by another model \(students/small\)",
            marks=pytest.mark.skipif(
                not VIEW_KEYS.is_here("fallback.model"), reason="nothing here has such models"
            ),
        ),
        ({}, {"semantic_cache": {"view": "labels", "threshold": 0.9}}, "a circle"),
        (
            {"semantic_cache": {"view": "vectors", "threshold": 1.1}},
            {},
            r"semantic_cache\.threshold: 1\.1",
        ),
        ({"features": {"nearest": {"dtype": "string"}}}, {}, "a column 'nearest' of their own"),
    ],
)
@table_only
def test_what_cannot_work_is_refused_when_the_project_is_read(
    make_texts: MakeTexts, labels: dict[str, Any], vectors: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_texts(labels=labels, vectors=vectors).view("labels")


# ---- measured


@table_only
def test_what_it_would_save_and_cost_is_measured_on_the_views_own_rows(
    make_texts: MakeTexts,
) -> None:
    scene = make_texts()
    texts = {i: "a" * 10 + "b" * (i % 3) for i in range(300)} | {
        1000 + i: "b" * (8 + i % 2) + "c" for i in range(100)
    }
    write_texts(scene.folder, texts | {2000: "c"})
    published(scene)
    measured = thresholds(scene, "labels")
    lines = {line["threshold"]: line for line in measured["thresholds"]}
    assert {k: measured[k] for k in ("view", "by", "rows", "answerable", "agreement")} == {
        "view": "labels", "by": "vectors", "rows": 401, "answerable": 401, "agreement": 0.95
    }  # fmt: skip
    # its own threshold among the others; all but the lone c have a twin
    assert sorted(lines) == sorted({*lines, 0.94})
    assert lines[0.94]["answered"] == 400
    assert lines[0.94]["saved"] == 400 / 401
    assert lines[0.94]["agree"] == 1.0
    assert 0.97 < lines[0.94]["at_least"] < 1.0
    assert measured["suggested"] == 0.7
    assert computed(scene) == []


@table_only
def test_an_earlier_root_is_not_measured(
    make_texts: MakeTexts, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = published(make_texts())
    make_all_earlier(scene, "var", "online")
    before = contents(scene, "var", "online")
    assert scene.cli("thresholds", "labels") == 1
    said = capsys.readouterr().err
    assert said.count("is of format before 3, and this version reads format 3 alone") == 1
    assert contents(scene, "var", "online") == before


@table_only
def test_where_no_threshold_is_sure_enough_that_is_said(
    make_texts: MakeTexts, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = published(make_texts())
    assert scene.cli("thresholds", "labels") == 0
    assert (
        "No threshold surely keeps 0.95: 4 answers are too few to be sure."
        in capsys.readouterr().out
    )
    assert scene.cli("thresholds", "labels", "--json", "--agreement", "0.1", "--rows", "5") == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["suggested"] is not None
    near = next(line for line in measured["thresholds"] if line["threshold"] == 0.94)
    # 1 and 3 are both a's, 2 and 4 both b's
    assert (near["answered"], near["saved"], near["agree"]) == (4, 0.8, 1.0)
    assert scene.cli("thresholds", "labels", "--agreement", "1.5") == 2
    assert "--agreement: 1.5: between 0 and 1" in capsys.readouterr().err
    assert scene.cli("thresholds", "vectors") == 2
    assert (
        "view 'vectors' has no semantic_cache: say which view embeds the same text, as in --by"
        " item_vectors"
    ) in capsys.readouterr().err


ALL = FeatureView(
    "all",
    ("id",),
    (
        Feature("label", "string"),
        Feature("score", "float32"),
        Feature("vector", "float32", dim=2),
        Feature("items", "string", max_items=4),
    ),
    1.0,
    1.0,
)


@pytest.mark.parametrize(
    ("changed", "agreement"),
    [
        ({}, 1.0),
        ({"label": "b"}, 0.0),
        ({"label": None}, 0.0),
        ({"score": 2.05}, 1.0),
        ({"score": 2.2}, 0.0),
        ({"score": float("nan")}, 0.0),
        ({"vector": [1.01, 0.02]}, 1.0),
        ({"vector": [2.0, 0.02]}, 0.0),
        ({"vector": [1.0, 1.0]}, 0.0),
        ({"vector": None}, 0.0),
        ({"items": ["z", "y", "x"]}, 1.0),
        ({"items": ["x", "y", "w", "v"]}, 0.5),
        ({"items": ["x", "y", "w", "v"], "label": "b"}, 0.0),
    ],
)
def test_how_far_a_row_is_the_right_answer_in_anothers_place(
    changed: dict[str, Any], agreement: float
) -> None:
    wanted = {"label": "a", "score": 2.0, "vector": [1.0, 0.0], "items": ["x", "y", "z"]}
    rows = [
        pa.RecordBatch.from_pylist([values], ALL.feature_schema())
        for values in (wanted, wanted | changed)
    ]
    assert agreement_of(rows[0], rows[1], ALL, AccuracyConfig()) == agreement
    assert agreement_of(rows[1], rows[0], ALL, AccuracyConfig()) == agreement
