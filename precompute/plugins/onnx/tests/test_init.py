"""A new view over a graph: inputs are columns, which have no missing values, and outputs features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper

from precompute.jobs.cli import main
from precompute.jobs.config.project import Project


def test_a_graph_is_matched_with_the_columns(tmp_path: Path) -> None:
    """``x`` by its name, a null of it as the mean."""
    given, made = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 1]) for name in ("x", "y 1")
    )
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y 1"])], "g", [given], [made])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "model.onnx",
    )
    rows = pa.table({"id": [1, 2, 3], "x": [1.0, None, 3.0], "name": ["a", "b", "c"]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    folder = tmp_path / "new"
    files = ["--from", str(tmp_path / "rows.parquet"), "--model", str(tmp_path / "model.onnx")]
    assert main(["init", str(folder), *files]) == 0
    (view,) = Project(folder).views.values()
    assert (view.model.use, view.model.args) == (
        "onnx",
        {"path": "../model.onnx", "outputs": {"y_1": "y 1"}},
    )
    assert main(["-c", str(folder), "run", view.name]) == 0
    store = Project(folder).store(view.name)
    made_rows = pa.Table.from_batches(store.batches(store.snapshot(1))).sort_by("id")
    assert np.asarray(made_rows["y_1"]).tolist() == [-1.0, -2.0, -3.0]
