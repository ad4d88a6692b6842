"""Peak: what MFU is a share of is what the machine can do with products of the model's shapes, and
never less than the model did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from precompute.engine.ahead import Meter
from precompute.models import device as peak
from precompute.models.device import ROWS, PackedLinear, probed, shapes_of
from precompute.techniques.conversion import convert
from precompute.techniques.machine import has_int8_products
from precompute.techniques.technique import technique
from tests.precompute.test_precision import mlp, some_rows


def test_the_shapes_are_those_of_the_layers_with_the_most_to_compute() -> None:
    layers = [torch.nn.Linear(*shape) for shape in ((4, 4), (8, 64), (64, 8), (8, 64), (32, 32))]
    assert shapes_of(torch.nn.Sequential(*layers)) == ((32, 32), (8, 64), (64, 8))
    assert shapes_of(torch.nn.ReLU()) == ((1024, 1024),)
    assert mlp().device.shapes == ((8, 8), (8, 4))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "precompute"


def test_every_way_is_probed_and_the_best_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {torch.nn.Linear: 2.0, PackedLinear: 0.5}
    monkeypatch.setattr(peak, "_known", {})
    monkeypatch.setattr(
        peak, "_seconds", lambda layer, x, *, mean=False: 4.0 if mean else took[type(layer)]
    )
    monkeypatch.setattr(peak, "compute_threads", lambda: 2)
    assert probed([(16, 8)], torch.float32) == 2 * ROWS * 16 * 8 / 0.5
    monkeypatch.setattr(
        peak, "_seconds", lambda layer, x, *, mean=False: 0.4 if mean else took[type(layer)]
    )
    assert probed([(16, 8)], torch.float32) == 2 * ROWS * 16 * 8 / 0.5  # once a process
    assert probed([(8, 16)], torch.float32) == pytest.approx(
        2 * ROWS * 16 * 8 / 0.2
    )  # two at once, 0.4 s each


def test_what_a_technique_computes_in_is_probed_as_that() -> None:
    model = mlp()
    assert (model.device.dtype, model.device.pack, model.device.peak_flops() > 1e6) == (
        torch.float32,
        None,
        True,
    )
    convert(model, technique("bf16-eager"), some_rows)
    assert (model.device.dtype, model.device.pack) == (torch.bfloat16, None)
    if has_int8_products():
        convert(model, technique("int8-dynamic-onednn"), some_rows)
        eight, restore = model.device.pack, model.restorer()
        assert eight is technique("int8-dynamic-onednn").pack is not None
        assert model.device.peak_flops() > 1e6
        model.use(model.module)
        assert model.device.pack is None
        restore()
        assert model.device.pack is eight


def test_no_model_does_more_than_its_peak() -> None:
    meter = Meter(flops=9e9, forward_s=2.0, landing_s=1.0)
    assert meter.peak_figures(6e9) == {"peak_flops": 6e9, "mfu": 0.5}
    assert meter.peak_figures(2e9) == {"peak_flops": 3e9, "mfu": 1.0}
    assert Meter().peak_figures(2e9) == {"peak_flops": 2e9, "mfu": 0.0}


def test_a_batchs_milliseconds_are_reported_to_a_percent() -> None:
    meter = Meter()
    assert meter.batch_ms() == {}
    for number in range(1000):
        meter.batch_took((1 + number) / 1000)
    assert meter.batch_ms() == {
        name: pytest.approx(ms, rel=0.011)
        for name, ms in (("p50", 500), ("p95", 950), ("p99", 990))
    }
    assert meter.to_json(1)["batch_ms"] == meter.batch_ms()
