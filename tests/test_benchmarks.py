"""Benchmarks that need what this machine lacks are walked through here, in miniature: one that runs nowhere measures nothing."""

from __future__ import annotations

from benchmarks.engine_gpu import measure


def test_the_gpu_benchmark_computes_every_text_in_half_precision() -> None:
    lines, figures = measure("cpu", texts=40, longest=12, layers=1, dim=64, budgets=(64, 256), rounds=1)
    assert len(lines) == 4
    assert "40 texts" in lines[0]
    assert "budgets: 64 " in lines[1]
    assert figures["engine"]["rows"] == 40
    assert figures["tokens_per_s"] > 0
    assert figures["engine_ratio"] > 0
