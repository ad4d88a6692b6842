"""A new view over a graph: inputs are columns without missing values, outputs are features."""

from __future__ import annotations

from pathlib import Path

import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper

from precompute.jobs.cli import main
from precompute.jobs.config.project import Project
from precompute.store.doors import COMMANDS

if not COMMANDS.is_here("init"):
    pytest.skip("init is not installed here", allow_module_level=True)


def test_a_graph_is_matched_with_the_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    capsys.readouterr()
    for key, value in (("1", -1.0), ("2", -2.0)):
        assert main(["-c", str(folder), "lookup", view.name, key, "--json"]) == 0
        assert f'"y_1": {value}' in capsys.readouterr().out
