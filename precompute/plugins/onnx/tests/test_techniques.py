"""ONNX Runtime: a module as an ONNX graph computes the reference's values, from a file that is
whole; what is missing, or does not fit, is named."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

from precompute.models.device import Device
from precompute.plugins.onnx import technique as onnx
from precompute.store.errors import ConfigError, ModelError
from precompute.techniques.conversion import candidates, convert
from precompute.techniques.technique import technique
from tests.faults.power_loss import recorded
from tests.precompute.test_precision import (
    Arithmetic,
    check,
    check_any_inputs,
    check_lost_bit,
    check_odd,
    check_poolings,
    mlp,
    outputs,
    rows,
    some_rows,
)


def test_poolings_and_modules_of_any_inputs_are_exported(tmp_path: Path) -> None:
    check_poolings("fp32-onnx", tmp_path)
    check_any_inputs("fp32-onnx", tmp_path)


def test_a_module_that_cannot_be_exported_computes_the_reference() -> None:
    check_odd("fp32-onnx")


def test_a_graph_that_lost_a_bit_is_not_computed_by(tmp_path: Path) -> None:
    check_lost_bit("fp32-onnx", tmp_path)


def test_an_exported_file_is_made_once_and_for_these_weights(tmp_path: Path) -> None:
    first, other = mlp(), mlp()
    with torch.no_grad():
        other.module.get_parameter("out.weight").add_(1)

    def files(model: Arithmetic) -> dict[str, int]:
        """When each was written, once the model is converted."""
        convert(model, technique("fp32-onnx"), some_rows, tmp_path)
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    made = files(first)
    assert len(made) == 1
    assert files(first) == made
    of_both = files(other)
    assert len(of_both) == 2
    assert made.items() < of_both.items()


def test_onnx_computes_the_references_values_from_a_file_that_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has its bytes when it has its name, also after a loss of power, on a disk that keeps names
    before bytes; and ONNX Runtime is found whatever its package is called."""
    pytest.importorskip("onnxruntime")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)  # as with onnxruntime-gpu
    with recorded(tmp_path) as images:
        check(mlp(), "fp32-onnx", [*some_rows(), rows(1)], 1e-5, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name.rsplit("-", 2)[0] == "fp32-onnx"
    found = [image.tree[path.name] for image in images if path.name in image.tree]
    assert set(found) == {path.read_bytes()}
    assert onnx.version()[0].isdigit()


def test_a_size_that_no_example_showed_is_refused_and_not_computed(tmp_path: Path) -> None:
    model = mlp()
    convert(model, technique("fp32-onnx"), lambda: [rows(5), rows(5, 1)], tmp_path)
    assert outputs(model, rows(5, 2))[0].shape == (5, 4)
    message = "^precision fp32-onnx: dimension 0 of input 0 was 5 in all rows that the conversion was shown, and is 6 now: choose fp32-compile"
    with pytest.raises(ModelError, match=message):
        outputs(model, rows(6))


def test_a_library_that_does_not_load_is_named_and_not_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('libcudart.so.12: not there')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = [one.name for one in candidates(Device("cpu"), mlp())]
    assert "fp32-onednn" in found
    assert "fp32-onnx" not in found
    message = "^precision fp32-onnx: onnxruntime is installed, and does not load: libcudart.so.12"
    with pytest.raises(ConfigError, match=message):
        convert(mlp(), technique("fp32-onnx"), some_rows)
