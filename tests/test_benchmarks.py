"""Benchmarks that need what this machine lacks are walked through here, in miniature: one that runs
nowhere measures nothing."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, engine_gpu, gpu_parts, online_table, run_memory, source_types
from precompute.jobs.config.project import Project
from precompute.store.doors import ONLINE
from precompute.techniques.technique import technique

TINY = gpu_parts.Size(24, 6, (64, 256), 100, 20, 200, 60, 1, 64)


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (
            "minilm",
            [
                "machine",
                "model only, bf16-eager",
                "engine, tokens at hand",
                "engine, from text",
                "sentence-transformers, bfloat16",
                "bare torch, padded, bfloat16",
            ],
        ),
        ("parquet", ["text to Parquet", "sentence-transformers to Parquet"]),
        ("techniques", ["fp32-eager", "bf16-eager", "tf32-eager"]),
        ("top_k", ["top_k", "torch matmul and topk", "FAISS flat"]),
        (
            "faiss",
            [
                "built and searched on the GPU",
                "built and searched on the CPU",
                "FAISS flat, all queries at once",
            ],
        ),
        ("lost", ["a row that breaks the context"]),
    ],
)
def test_the_gpu_benchmark_walks_all_its_way(
    part: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ("fp32-eager", "bf16-eager", "tf32-eager")
    monkeypatch.setattr(gpu_parts, "NAMES", some)
    monkeypatch.setattr(gpu_parts, "candidates", lambda *_: [technique("fp32-eager")])
    into = tmp_path / "notes"
    gpu_parts.PARTS[part](gpu_parts.Notes(into, time.monotonic() + 60), "cpu", TINY)
    notes = engine_gpu._read(into)
    assert list(notes) == names
    assert [name for name, note in notes.items() if "error" in note] == []
    if part == "techniques":
        assert notes["bf16-eager"]["min_cosine"] > 0.99
        assert notes["bf16-eager"]["mfu"] > 0
        assert "computes on a GPU" in notes["tf32-eager"]["missing"]
    if part == "lost":
        # on a GPU it is the worker's end that blames it
        assert notes["a row that breaks the context"].startswith(
            "row 37 rejected at stage 'model', 63 others computed: IndexError"
        )


SCRIPT = """
import json, os, sys, time
part, device, into, seconds, *known = sys.argv[1:]
def note(name): open(into, "a").write(json.dumps({name: {"known": len(known)}}) + "\\n")
if part == "techniques" and len(known) < 2:
    note(f"technique {len(known)}"); sys.exit(3)
if part == "bert":
    note("soon")
    if os.fork() == 0: time.sleep(600)
    time.sleep(600)
if part == "lost": sys.exit("it failed")
note("all of it")
"""


def test_a_part_of_it_is_ended_by_the_clock_and_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_gpu, "COMMAND", (sys.executable, "-c", SCRIPT))

    def measured(part: str, seconds: float) -> dict[str, Any]:
        found = engine_gpu.measured(part, "cpu", time.monotonic() + seconds)
        found.pop("seconds")
        return found

    began = time.monotonic()
    assert measured("bert", 2) == {"ended": "its time was over", "notes": {"soon": {"known": 0}}}
    assert time.monotonic() - began < 30
    assert measured("minilm", 60) == {"notes": {"all of it": {"known": 0}}}
    assert measured("lost", 60) == {
        "ended": "exit status 1: ['it failed']",
        "notes": {},
    }
    assert measured("minilm", -1) == {"notes": {"left out": "no time"}}
    # what ended its process is known to the next, which goes on after it
    assert measured("techniques", 60) == {
        "notes": {
            "technique 0": {"known": 0},
            "technique 1": {"known": 1},
            "all of it": {"known": 2},
        }
    }


def test_what_a_part_leaves_those_after_it_have() -> None:
    found = engine_gpu.deadlines({"a": 3, "b": 1}, 100.0, 10.0)
    assert found == pytest.approx({"a": 107.2, "b": 109.6})
    assert sum(engine_gpu.SHARES.values()) == pytest.approx(1)
    assert set(engine_gpu.SHARES) == set(gpu_parts.PARTS)
    notes = {"x": {"rows_per_s": 12345.6, "mfu": 0.4321}, "y": "left out"}
    assert engine_gpu.lines({"a": {"seconds": 2, "ended": "failed", "notes": notes}}) == [
        "a: 2 s, failed",
        "  x: rows_per_s 12,346, mfu 0.4321",
        "  y: left out",
    ]


def test_table_files_are_measured_where_lmdb_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    for name, value in {"HAS_LMDB": False, "ROWS": 600, "PART_ROWS": 300, "ROUNDS": 1}.items():
        monkeypatch.setattr(online_table, name, value)
    monkeypatch.setattr(online_table, "median_us", lambda work, requests: len(work(requests[0])))
    (written, sizes), figures = online_table.writing(tmp_path)
    assert "LMDB" not in written + sizes
    assert set(figures["write_s"]) == {"decode", "table"}
    lines, figures = online_table.reading(tmp_path)
    assert "table file" in lines[0]
    assert list(figures) == ["read_1_us", "read_100_us", "read_500_us"]


def test_types_of_sources_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(source_types, "ROUNDS", 1)
    monkeypatch.setattr(source_types, "MEMORY_MB", 256)
    monkeypatch.setattr(sys, "argv", ["source_types", "300", "200", "3"])
    source_types.main()
    out = capsys.readouterr().out
    for line in ("csv, ", "jsonl, ", "parquet, 3 files: compared in "):
        assert line in out
    figures = json.loads((tmp_path / "source_types.json").read_text())
    for kind in ("csv", "json"):
        assert set(figures[kind]) == {"read_s", "types_s", "ratio", "mb"}
    assert set(figures["parquet"]) == {"files", "compared_s", "clock_s"}


WALKS = {(s.does, s.before, s.kind, s.at): name for name, s in run_memory.SHAPES.items()}


@pytest.mark.parametrize("name", WALKS.values())
def test_every_way_of_large_rows_is_walked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(_module: str, _child: str, folder: Path, memory_mb: int, step: str) -> Any:
        run_memory.STEPS[step](Project(folder, {"PRECOMPUTE_MEMORY_MB": str(memory_mb)}))
        return {"refused": "", "first_mb": [0, 0], "own_mb": 1, "files_mb": 0}

    shape = run_memory.SHAPES[name]
    if shape.at == "redis" and not ONLINE.is_here("redis"):
        pytest.skip("the benchmark's online store is not here")
    small = {"a": ("'a' || i", run_memory.TEXT)}
    columns = shape.columns if shape.view else small
    walked = replace(shape, rows=120, columns=columns, memory_mb=256, settings=None)
    monkeypatch.setitem(run_memory.SHAPES, name, walked)
    monkeypatch.setattr(run_memory, "child", here)
    monkeypatch.chdir(tmp_path)
    found = run_memory.measured_shape(name, 1.0)
    assert run_memory.line_of(name, found) == (
        f"120 {name} at memory_mb 256: 1 MB of its own at most, 556 granted; done"
    )
    assert min(run_memory.resident_mb()) > 1
