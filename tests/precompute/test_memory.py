"""What a process holds of its machine: compute threads, memory, and what its errors hold."""

from __future__ import annotations

import subprocess
import sys
import traceback
import weakref
from pathlib import Path

import pytest

from precompute.engine import resources
from precompute.engine.resources import available_bytes, without_locals

SHOW = """
import os, threading, time, torch
from precompute.engine.resources import release_threads

torch.set_num_threads(3)

def team():
    torch.set_num_threads(3)  # of the calling thread
    before = len(os.listdir("/proc/self/task"))
    torch.randn(512, 512) @ torch.randn(512, 512)
    return len(os.listdir("/proc/self/task")) - before

started = len(os.listdir("/proc/self/task"))
found = [team(), team()]
release_threads()
time.sleep(0.2)  # they end by themselves
found.append(len(os.listdir("/proc/self/task")) - started)
thread = threading.Thread(target=lambda: found.append(team()))
thread.start()
thread.join()
time.sleep(0.2)
found += [team(), float((torch.ones(512, 512) @ torch.ones(512, 512)).sum())]
print(*found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_threads_team_is_let_go_and_comes_back() -> None:
    """In a process of its own, where nothing else starts and ends threads."""
    run = subprocess.run([sys.executable, "-c", SHOW], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["2", "0", "0", "2", "2", str(512.0**3)]


def test_without_openmp_nothing_happens() -> None:
    code = "import sys; from precompute.engine.resources import release_threads; release_threads(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("limit", "stat", "available"),
    [
        (f"{10 * 2**20}\n", "", 2**20),
        (f"{10 * 2**20}\n", f"active_file 5\ninactive_file {4 * 2**20}\n", 5 * 2**20),
        (f"{8 * 2**20}\n", "", 0),
        ("max\n", "", None),
    ],
)
def test_files_that_were_read_take_none_of_a_containers_memory(
    limit: str, stat: str, available: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    for name, text in (("max", limit), ("current", f"{9 * 2**20}\n"), ("stat", stat)):
        (tmp_path / f"memory.{name}").write_text(text)
    if available is None:
        assert available_bytes() > 10 * 2**20
    else:
        assert available_bytes() == available


def test_an_error_that_is_stored_holds_no_activations() -> None:
    class Activation:
        """What a forward holds."""

    alive: list[weakref.ref[Activation]] = []

    def forward(depth: int) -> None:
        activation = Activation()
        alive.append(weakref.ref(activation))
        try:
            if depth == 0:
                raise ValueError("bad")
            forward(depth - 1)
        except (ValueError, RuntimeError) as exc:
            raise RuntimeError(f"in layer {depth}") from exc

    try:
        forward(3)
    except RuntimeError as exc:
        stored = without_locals(exc)
    assert [ref() for ref in alive] == [None] * 4
    assert [str(error) for error in (stored, stored.__cause__)] == ["in layer 3", "in layer 2"]
    # the line that raised it can still be reported
    assert traceback.extract_tb(stored.__traceback__)[-1].name == "forward"
