"""Benchmarks that need what this machine lacks are walked through here, in miniature: one that runs
nowhere measures nothing."""

from __future__ import annotations

import json

import pytest

from benchmarks import engine_gpu
from precompute.techniques.technique import technique


def test_the_gpu_benchmark_walks_all_its_way_and_names_what_it_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("bf16-eager", "fp32-compile")
    monkeypatch.setattr(engine_gpu, "candidates", lambda *_: [technique(name) for name in names])
    lines, figures = engine_gpu.measure(
        "cpu",
        texts=40,
        longest=12,
        layers=1,
        dim=64,
        budgets=(64, 256),
        rounds=1,
        limit_s=technique("fp32-compile").convert_s,
    )
    assert len(lines) == 6
    assert "40 texts" in lines[0]
    assert "budgets: 64 " in lines[1]
    assert figures["engine"]["rows"] == 40
    assert figures["tokens_per_s"] > 0
    assert figures["engine_ratio"] > 0
    assert list(figures["techniques"]) == ["bf16-eager"]
    assert figures["techniques"]["bf16-eager"]["min_cosine"] > 0.99
    assert figures["left_out"] == ["fp32-compile"]
    # on a GPU it is the worker's end that blames it
    assert figures["lost"].startswith(
        "row 37 rejected at stage 'model', 63 others computed: IndexError"
    )
    assert json.loads(json.dumps(figures)) == figures
