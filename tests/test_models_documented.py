"""docs/models.md is true: its views run as they stand, over small models and sources, and
answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from precompute.jobs.cli import main
from precompute.registry import built_in
from tests import REPOSITORY
from tests.people import of_plugins

VIEWS = {
    name: text
    for name, text in re.findall(
        r"^```yaml\n# views/(\w+)\.yaml\n(.*?)^```",
        (REPOSITORY / "docs/models.md").read_text(encoding="utf-8"),
        re.M | re.S,
    )
    if yaml.safe_load(text)["model"]["use"] in built_in()
}
"""Name → the file, of those whose model is here."""
ROWS = 30


def review_sentiment(folder: Path) -> str:
    from safetensors.numpy import load_file, save_file
    from transformers import AutoModelForSequenceClassification

    from tests.precompute.sentence_models import transformer
    from tests.precompute.test_text_classifier import logits

    labels = {0: "bad", 1: "fair", 2: "good"}
    transformer(
        folder / "sentiment",
        "bert",
        AutoModelForSequenceClassification,
        num_labels=3,
        id2label=labels,
    )
    texts = write_texts(folder / "reviews.parquet", "review_id", "text")
    # no label is all texts' one
    file = folder / "sentiment" / "model.safetensors"
    tensors = load_file(file)
    tensors["classifier.bias"] = -logits(folder / "sentiment", texts).mean(0)
    save_file(tensors, file, metadata={"format": "pt"})
    return "3"


def title_vector(folder: Path) -> str:
    from tests.precompute.test_static_embedding import saved

    saved(
        folder / "potion-base-8M",
        embeddings=np.random.default_rng(0).normal(size=(75, 256)).astype(np.float32),
    )
    write_texts(folder / "items.parquet", "item_id", "title")
    return "3"


def write_texts(file: Path, key: str, column: str) -> list[str]:
    """Thirty different ones."""
    words = ["a", "heist", "in", "the", "snow", "film", "cold"]
    texts = [" ".join(words[(row // 7**place) % 7] for place in range(3)) for row in range(ROWS)]
    pq.write_table(pa.table({key: range(ROWS), column: texts}), file)
    return texts


MADE: dict[str, Callable[[Path], str]] = {
    "review_sentiment": review_sentiment,
    "title_vector": title_vector,
    **of_plugins("DOCUMENTED"),
}
"""View → what makes its model and its source, and returns a key."""


def test_each_view_has_its_test() -> None:
    assert set(VIEWS) == set(MADE)
    for text in VIEWS.values():
        assert len(text.splitlines()) < 20


@pytest.mark.parametrize("view", MADE)
def test_the_view_runs_as_it_stands(
    tmp_path: Path, view: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "views").mkdir()
    (tmp_path / "views" / f"{view}.yaml").write_text(VIEWS[view])
    (tmp_path / "project.yaml").write_text("root: ./var\nonline: table:./var/online\n")
    key = MADE[view](tmp_path)
    assert main(["-c", str(tmp_path), "run", view]) == 0, capsys.readouterr().err
    assert main(["-c", str(tmp_path), "lookup", view, key]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^{view}: published, snapshot 1, (\d+) of \1 rows", printed, re.M), printed
    assert f"{key}: fresh from store" in printed
