"""A graph as people have one: a pipeline of scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.people import ROWS, Made, table_of_books, training


def onnx(folder: Path) -> Made:
    """A scikit-learn pipeline of several named inputs, which raises of a category that it does not
    know."""
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame, target = training()
    frame = frame.astype({"age": float, "genre": object})
    encoders = [
        ("numbers", StandardScaler(), ["age", "price"]),
        ("genre", OneHotEncoder(), ["genre"]),
    ]
    model = make_pipeline(ColumnTransformer(encoders), LogisticRegression(max_iter=300)).fit(
        frame, np.where(target > 4, "high", "low")
    )
    types = [
        ("age", FloatTensorType([None, 1])),
        ("price", FloatTensorType([None, 1])),
        ("genre", StringTensorType([None, 1])),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (folder / "model.onnx").write_bytes(to_onnx(model, initial_types=types).SerializeToString())
    table = table_of_books().set_column(
        3, "genre", pa.array(["drama", "comedy", None, "horror"] * (ROWS // 4))
    )
    known = table.select(["age", "price", "genre"]).to_pandas().fillna({"age": 0, "genre": "drama"})
    expected = {"rating": model.predict(known).tolist(), "score": model.predict_proba(known)[:, 1]}
    args = {
        "path": "./model.onnx",
        "outputs": {
            "rating": "output_label",
            "score": {"output": "output_probability", "column": 1},
        },
    }
    features = {"rating": {"dtype": "string"}, "score": {"dtype": "float32"}}
    bad = {
        row: f"{name} is null"
        for name in ("age", "genre")
        for row, x in enumerate(table[name].to_pylist())
        if x is None
    }
    other = {
        "outputs": {
            "rating": "output_label",
            "score": {"output": "output_probability", "column": 0},
        }
    }
    return Made(args, features, table, expected, bad, "model.onnx", [other, {"nulls": "nan"}])


CASES: dict[str, Callable[[Path], Made]] = {"onnx": onnx}


def user_segment(folder: Path) -> str:
    import pandas as pd
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame = pd.DataFrame(
        {
            "user_id": range(30),
            "age": np.arange(30) + 18.0,
            "genre": ["drama", "comedy", "horror"] * (30 // 3),
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


DOCUMENTED = {"user_segment": user_segment}
"""View of docs/models.md → what makes its model and its source, and returns a key."""
