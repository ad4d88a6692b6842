"""Lanes: several batches computed at once on a CPU come out as if there had been one, whatever
fails, and leave no trace in the process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from precompute.engine import resources
from precompute.engine.resources import Lanes, places, share_of_cpus, usable_threads
from precompute.engine.runner import LANE_ROWS, Runner
from precompute.models.device import compute_threads, compute_with
from precompute.store.errors import ModelError
from precompute.workers import worker
from precompute.workers.worker import WorkerSpec
from tests.precompute.test_engine import SINGLE, Staged, Times, gathered, windows


class AtOnce(Times):
    """2x; how many batches were in it at once, at each call the rows, and where its threads
    computed. With ``meet``, a batch waits for another."""

    def __init__(self, meet: bool = False, hungry: int = 0, bad: float = -99.0) -> None:
        super().__init__()
        self.meet, self.hungry, self.bad = meet, hungry, bad
        self.lock = threading.Lock()
        self.rows_inside = self.inside = self.most_at_once = 0
        self.threads: dict[str, tuple[int, frozenset[int]]] = {}
        self.full = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.current_thread().name
        with self.lock:
            self.calls += 1
            self.inside += 1
            self.rows_inside += len(x)
            self.most_at_once = max(self.most_at_once, self.inside)
            self.threads[thread] = (torch.get_num_threads(), frozenset(os.sched_getaffinity(0)))
            fits = not self.hungry or self.rows_inside <= self.hungry
        try:
            if not fits:
                self.full += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            if self.bad in x:
                raise ValueError("cannot take it")
            if self.hungry:
                time.sleep(0.002)
            deadline = time.monotonic() + 10
            while self.meet and self.most_at_once < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            return 2 * x
        finally:
            with self.lock:
                self.inside -= 1
                self.rows_inside -= len(x)


def staged(module: Times) -> Staged:
    model = Staged(module)
    model.concurrent = True
    model.max_cost = 8
    return model


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lane")]


def test_batches_are_computed_at_once_and_come_out_in_order() -> None:
    module = AtOnce(meet=True)
    xs = [float(i) for i in range(500)]
    runner = Runner(staged(module), SINGLE, lanes=3)
    pieces = list(runner.stream(windows(xs, 60)))
    assert [done.window for _, done in pieces] == sorted(done.window for _, done in pieces)
    values, errors = gathered(iter(pieces))
    assert (values, errors) == ({i: {"double": 2 * x} for i, x in enumerate(xs)}, {})
    assert 2 <= module.most_at_once <= 3
    assert set(module.threads) <= {"lane_0", "lane_1", "lane_2"}
    assert runner.state_figures()["lanes"]["count"] == 3
    assert runner.budget.settled
    assert runner.meter.batches == sum(-(-min(60, 500 - at) // 8) for at in range(0, 500, 60))
    assert runner.meter.forward_s > 0
    assert lane_threads() == []


def test_a_few_rows_are_one_batch_for_each_lane() -> None:
    module = AtOnce(meet=True)
    model = staged(module)
    model.max_cost = 100
    runner = Runner(model, SINGLE)
    (few,) = windows([float(i) for i in range(31)], 31)
    values, errors = gathered(iter([(few, runner.compute(few, lanes=2))]))
    assert (values, errors) == ({i: {"double": 2.0 * i} for i in range(31)}, {})
    assert (module.calls, module.most_at_once, set(module.threads)) == (2, 2, {"lane_0", "lane_1"})
    threads = usable_threads(compute_threads())
    least = LANE_ROWS * threads
    assert [runner.lanes_for(rows) for rows in (1, least - 1, least)] == [1, 1, threads]
    model.concurrent = False
    assert Runner(model, SINGLE).lanes_for(1000) == 1


def test_a_windows_last_batches_are_smaller_unless_the_size_is_given() -> None:
    model = staged(AtOnce())
    model.max_cost, model.start_cost = None, 100
    assert [Runner(model, SINGLE).budget.next(share) for share in (500, 70, 1)] == [100, 70, 50]
    model.max_cost = 100
    assert Runner(model, SINGLE).budget.next(1) == 100


def test_a_model_that_does_not_say_so_computes_one_batch_after_the_other() -> None:
    module = AtOnce()
    model = staged(module)
    model.concurrent = False
    runner = Runner(model, SINGLE, lanes=3)
    gathered(runner.stream(windows([1.0] * 100, 100)))
    assert set(module.threads) == {"model"}
    assert "lanes" not in runner.state_figures()


def test_torchs_threads_and_the_affinity_are_the_lanes_own() -> None:
    """The process may be a user's: what it computes with, before and after, and in threads of its
    own, stays as it was."""
    before, allowed = compute_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(4)
    try:
        module = AtOnce(meet=True)
        gathered(Runner(staged(module), SINGLE, lanes=2).stream(windows([1.0] * 200, 50)))
        others: list[int] = []
        thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (compute_threads(), others, os.sched_getaffinity(0)) == (4, [4], allowed)
        share = max(1, usable_threads(4) // 2)
        assert {threads for threads, _ in module.threads.values()} == {share}
    finally:
        torch.set_num_threads(before)


def test_each_lane_is_on_cores_of_its_own_where_it_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hardware threads a core; what may not be used is passed over, and a share of the machine
    is not pinned."""
    siblings = {0: {0, 4}, 1: {1, 5}, 4: {0, 4}, 5: {1, 5}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    monkeypatch.setattr(resources, "_siblings", lambda cpu: frozenset(siblings[cpu]))
    assert places(2) == [{0, 4}, {1, 5}]
    assert places(4) == [{0}, {1}, {4}, {5}]
    assert places(3) == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4})
    assert places(2) == [{4}, {1}] or places(2) == [{1}, {4}]
    moved: list[frozenset[int]] = []
    monkeypatch.setattr(
        "precompute.engine.resources.places", lambda total: [frozenset({n}) for n in range(total)]
    )
    monkeypatch.setattr("precompute.engine.resources.move_to", moved.append)
    lanes = Lanes(2, 2, 4, lambda threads: None)
    meeting = threading.Barrier(2)
    for future in [lanes.put(meeting.wait) for _ in range(2)]:
        future.result(10)
    lanes.close()
    assert sorted(moved, key=min) == [{0, 1}, {2, 3}]


def test_worker_processes_share_all_cores_and_keep_to_a_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two sockets whose CPUs take turns in being counted, four cores each, two hardware threads a
    core; the last core is another's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)) - {7, 15})
    for cpu in range(16):
        (tmp_path / f"cpu{cpu}" / f"node{cpu % 2}").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology").mkdir()
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(
            f"{cpu % 8},{cpu % 8 + 8}\n"
        )
    monkeypatch.setattr(resources, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(resources, "_QUOTA", tmp_path / "cpu.max")
    assert [share_of_cpus(n, 2) for n in range(2)] == [
        {0, 8, 2, 10, 4, 12},
        {6, 14, 1, 9, 3, 11, 5, 13},
    ]
    assert [share_of_cpus(n, 7) for n in (0, 3, 4, 6)] == [{0, 8}, {6, 14}, {1, 9}, {5, 13}]
    assert share_of_cpus(0, 8) == frozenset(), "one would have no core"
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert share_of_cpus(0, 2) == frozenset(), (
        "some are another's at any time, and nobody knows which"
    )


def test_no_more_threads_than_the_control_group_grants(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(resources, "_QUOTA", tmp_path / "cpu.max")
    assert usable_threads(12) == 12
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert usable_threads(12) == 3
    assert usable_threads(2) == 2
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    environment: dict[str, str] = {}
    worker._surroundings(WorkerSpec("", {}, {}, SINGLE), None, 2, environment)
    assert environment == {"OMP_NUM_THREADS": "2", "RAYON_NUM_THREADS": "2"}
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_threads(12) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_threads(20) == 16


def test_a_thread_that_begins_meanwhile_has_the_processs_threads() -> None:
    before = compute_threads()
    seen: list[int] = []

    def lane() -> None:
        compute_with(before + 1)
        seen.append(torch.get_num_threads())

    threads = [threading.Thread(target=lane) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [before + 1] * 8
    assert compute_threads() == before


def test_a_bad_row_is_one_bad_row() -> None:
    xs = [float(i) for i in range(300)]
    values, errors = gathered(
        Runner(staged(AtOnce(bad=77.0)), SINGLE, lanes=3).stream(windows(xs, 100))
    )
    assert values == {i: {"double": 2 * x} for i, x in enumerate(xs) if x != 77}
    assert errors.keys() == {77}
    assert errors[77].startswith("model: ValueError: cannot take it")


# ---- failures


def test_what_does_not_fit_beside_the_others_is_tried_again_without_them() -> None:
    """8 rows fit at once: nothing fits beside a batch of 8, and every row is computed."""
    module = AtOnce(meet=True, hungry=8)
    xs = [float(i) for i in range(400)]
    runner = Runner(staged(module), SINGLE, lanes=3)
    values, errors = gathered(runner.stream(windows(xs, 100)))
    assert (values, errors) == ({i: {"double": 2 * x} for i, x in enumerate(xs)}, {})
    assert runner.meter.out_of_memory == module.full > 0


def test_a_mistake_of_the_model_ends_the_stream_and_its_lanes() -> None:
    class Wrong(Staged):
        def features(self, outputs: Sequence[Any]) -> dict[str, Any]:
            raise ModelError("no double")

    model = Wrong()
    model.concurrent = True
    with pytest.raises(ModelError, match="double"):
        gathered(Runner(model, SINGLE, lanes=2).stream(windows([1.0] * 100, 100)))
    for thread in lane_threads():
        thread.join(10)
    assert lane_threads() == []


def test_a_stream_that_is_closed_leaves_no_lane() -> None:
    stream = Runner(staged(AtOnce()), SINGLE, lanes=2).stream(windows([1.0] * 5000, 50))
    next(stream)
    stream.close()
    for thread in lane_threads():
        thread.join(10)
    assert lane_threads() == []
