"""What a run records of what it took: seconds by stage, cores, bytes, memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.run import report as report_module
from precompute.jobs.run.report import usage_line
from precompute.jobs.run.rows import chunks
from precompute.store.offline.view_store import ViewStore
from tests.fixtures import MakeProject

Captured = pytest.CaptureFixture[str]
ROWS = [(i, float(i)) for i in range(40)]
MATERIALIZED = {
    *("open", "source", "plan", "read", "model", "write", "audit", "gates", "commit", "other"),
}
PUBLISHED = {"check", "load", "verify", "flip", "gc"}


def test_a_run_records_what_it_took(make_project: MakeProject) -> None:
    began_s = time.process_time()
    project = make_project(ROWS)
    full = project.run()
    taken_s = time.process_time() - began_s
    make_project([(i, x + (i == 3)) for i, x in ROWS if i < 39])
    delta, current, published = project.run(), project.run(), project.publish(reload=True)
    of = full.usage
    assert of.cpu_s.keys() == MATERIALIZED | PUBLISHED
    assert all(said in usage_line(full) for said in ("CPU s of", "peak", "loaded"))
    assert 0 < sum(of.cpu_s.values()) <= taken_s + 0.001 * len(of.cpu_s)
    assert (of.workers_cpu_s, of.workers, of.worker_peak_bytes, of.gpu_s) == ({}, 0, 0, 0.0)
    files = [*(project.store.data / full.run).iterdir()]
    assert (of.device, of.written_bytes) == ("cpu", sum(file.stat().st_size for file in files))
    assert min(of.cores, of.peak_bytes, of.read_bytes, of.written_bytes, of.loaded_bytes) > 0
    kinds = [(r.usage.kind, r.usage.loaded_rows, r.usage.upper_only) for r in (full, delta)]
    # one row by another value, and one that left
    assert kinds == [("full", 40, False), ("delta", 2, True)]
    assert (current.status, current.usage.kind, current.usage.loaded_rows) == ("current", None, 0)
    # two segments, as they were
    assert (published.usage.kind, published.usage.loaded_rows) == (None, 42)
    assert project.report() == published


def test_cpu_seconds_are_of_the_stage_that_computed(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that computes for 0.3 s a window, while the run's own thread waits for a disk."""
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 20)
    monkeypatch.setattr(chunks, "PART_BYTES", 1)
    write_part = ViewStore.write_part

    def slow(store: ViewStore, *of: Any) -> Any:
        time.sleep(0.2)
        return write_part(store, *of)

    monkeypatch.setattr(ViewStore, "write_part", slow)
    project = make_project(ROWS, view={"model": {"use": "tests.jobs.test_usage:Busy"}})
    report = project.materialize()
    cpu_s = report.usage.cpu_s
    assert report.stages_s["write"] > 0.4
    assert report.usage.source_bytes > 0
    assert cpu_s["model"] > 0.5
    assert max(cpu_s["write"], cpu_s["read"], cpu_s["commit"]) < 0.1


def test_workers_seconds_are_told_apart(make_project: MakeProject) -> None:
    busy = {"model": {"use": "tests.jobs.test_usage:Busy"}}
    report = make_project(ROWS, view=busy, project={"engine": {"workers": 1}}).materialize()
    used = report.usage
    assert used.workers_cpu_s.keys() == {"model"}
    assert used.workers_cpu_s["model"] > 0.25
    assert used.cpu_s["model"] < 0.25
    assert (used.workers, used.worker_peak_bytes > 2**20) == (1, True)


class Busy:
    """``x`` → ``double`` and ``vector``, after 0.3 s of computing."""

    def fingerprint(self) -> str:
        return "busy"

    def compute(self, batch: Any) -> dict[str, Any]:
        from tests.models import Doubler

        began_s = time.thread_time()
        while time.thread_time() < began_s + 0.3:
            pass
        return Doubler().compute(batch)


def test_a_system_that_does_not_tell_ends_no_run(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("_STAT", "_IO"):
        monkeypatch.setattr(report_module, name, tmp_path / "no such file")
    report = make_project(ROWS).run()
    used = report.usage
    assert (report.status, used.idle, used.steal, used.read_bytes) == ("published", None, None, 0)
    assert "idle" not in usage_line(report)
