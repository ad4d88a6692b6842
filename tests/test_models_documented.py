"""docs/models.md is true: its views run as they stand, over small models and sources, and
answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.cli import main
from tests import REPOSITORY

VIEWS = dict(
    re.findall(
        r"^```yaml\n# views/(\w+)\.yaml\n(.*?)^```",
        (REPOSITORY / "docs/models.md").read_text(encoding="utf-8"),
        re.M | re.S,
    )
)
ROWS = 30


def pair_score(folder: Path) -> str:
    import lightgbm

    rng = np.random.default_rng(0)
    users = pd.DataFrame(
        {"user_id": range(6), "age": rng.integers(18, 80, 6), "country": ["fr", "de", "it"] * 2}
    )
    items = pd.DataFrame(
        {
            "item_id": range(5),
            "price": rng.random(5),
            "genre": ["drama", "comedy", "drama", "horror", "comedy"],
        }
    )
    pairs = users[["user_id"]].merge(items[["item_id"]], how="cross")
    for name, frame in (("users", users), ("items", items), ("pairs", pairs)):
        pq.write_table(
            pa.Table.from_pandas(frame, preserve_index=False), folder / f"{name}.parquet"
        )
    frame = (
        pairs.merge(users)
        .merge(items)[["age", "country", "price", "genre"]]
        .astype({"country": "category", "genre": "category"})
    )
    data = lightgbm.Dataset(
        frame, frame["age"] > 40, params={"min_data_in_leaf": 1, "min_data_in_bin": 1}
    )
    lightgbm.train(
        {"objective": "binary", "verbose": -1, "min_data_in_leaf": 1}, data, 3
    ).save_model(folder / "model.txt")
    return "3/2"


def user_segment(folder: Path) -> str:
    import warnings

    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame = pd.DataFrame(
        {
            "user_id": range(ROWS),
            "age": np.arange(ROWS) + 18.0,
            "genre": ["drama", "comedy", "horror"] * (ROWS // 3),
        }
    )
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), folder / "users.parquet")
    encoders = [("age", StandardScaler(), ["age"]), ("genre", OneHotEncoder(), ["genre"])]
    pipeline = make_pipeline(ColumnTransformer(encoders), LogisticRegression())
    pipeline.fit(frame.astype({"genre": object}), np.where(frame["age"] > 30, "old", "young"))
    types = [("age", FloatTensorType([None, 1])), ("genre", StringTensorType([None, 1]))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (folder / "segment.onnx").write_bytes(
            to_onnx(pipeline, initial_types=types).SerializeToString()
        )
    return "3"


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


def photo_vector(folder: Path) -> str:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from tests.precompute.test_image_encoder import VISION, encoded, picture, saved

    saved(folder / "clip-vit-base-patch32")
    for name in ("config.json", "model.safetensors"):
        (folder / "clip-vit-base-patch32" / name).unlink()
    # the size that the view has
    tower = CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION, projection_dim=512))
    tower.save_pretrained(folder / "clip-vit-base-patch32")
    (folder / "photos").mkdir()
    for row in range(8):
        (folder / "photos" / f"p{row}.jpg").write_bytes(encoded(picture(row), "JPEG"))
    return "p3"


MADE: dict[str, Callable[[Path], str]] = {
    "pair_score": pair_score,
    "user_segment": user_segment,
    "review_sentiment": review_sentiment,
    "title_vector": title_vector,
    "photo_vector": photo_vector,
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
