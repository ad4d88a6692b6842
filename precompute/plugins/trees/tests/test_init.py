"""A new view over a file of trees: which column is which, and what is said of other files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest

from precompute.jobs.cli import main
from precompute.jobs.config.project import Project
from precompute.store import doors
from precompute.store.doors import COMMANDS

if not COMMANDS.is_here("init"):
    pytest.skip("init is not installed here", allow_module_level=True)


def test_a_model_file_is_matched_with_the_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, whatever the name is in SQL; what it reads and the file has not is one message, and
    nothing is written."""
    model = doors.FOLDER / "init" / "templates" / "book_price.txt"
    data = {
        "id": [1, 2, 3],
        "Jahr": [1900, 1950, None],
        "pages": [100.0, 600.0, 300.0],
        "name": ["a", "b", "c"],
    }
    (tmp_path / "m.txt").write_text(model.read_text().replace("pages year", "pages Jahr"))
    path, folder = tmp_path / "items.csv", tmp_path / "p"
    pyarrow.csv.write_csv(pa.table(data), path)
    given = ["init", str(folder), "--from", str(path), "--json", "--model"]
    assert main([*given, str(model)]) == 2
    assert (
        "book_price.txt reads 'year', and items.csv has no such column"
        in json.loads(capsys.readouterr().out)["error"]["message"]
    )
    assert main([*given, str(path)]) == 2
    assert "pickles are never read" in json.loads(capsys.readouterr().out)["error"]["message"]
    for name, content, said in (
        ("m.onnx", b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        ("m.pkl", b"\x80\x04\x95", "a pickle"),
        ("m.joblib", b"\x78\x9c", "joblib's pickles"),
        ("m.cbm", b"CBM1", "save_model('model.json', format='json')"),
        ("m.bst", b"binf", "save_model('model.json')"),
        ("m.txt.gz", b"\x1f\x8b", "compressed by gzip"),
        ("m.json", b"<html>", "a web page"),
        ("empty.txt", b"", "is empty"),
    ):
        (tmp_path / name).write_bytes(content)
        assert main([*given, str(tmp_path / name)]) == 2
        message = json.loads(capsys.readouterr().out)["error"]["message"]
        assert said in message
        assert "LightGBM's text (save_model('model.txt'))" in message
    assert not folder.exists()
    assert main([*given, str(tmp_path / "m.txt")]) == 0
    assert (
        "empty values are missing values to the model: Jahr (1 of 3)"
        in json.loads(capsys.readouterr().out)["notes"]
    )
    view = Project(folder).view("item_score")
    assert (view.model.use, view.model.args) == (
        "lightgbm",
        {"path": "../m.txt", "columns": {"Jahr": "jahr"}},
    )
    assert main(["-c", str(folder), "run", "item_score", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["written"] == 3
