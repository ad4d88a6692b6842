"""Models that raise what no program expects, or leave a thread behind: a row is one bad row, and a
command that is done ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.documents import PRECOMPUTE
from tests.fixtures import MakeProject

MODEL = """
import sys
import threading
import time

import numpy as np

class Panic(BaseException):
    "What a library in Rust raises of a panic."

def leave():
    threading.Thread(target=time.sleep, args=(600,), name="pool-of-mine").start()

class Unruly:
    def __init__(self, raises="", leaves=False):
        self.raises = raises
        if leaves:
            leave()

    def fingerprint(self):
        return "unruly"

    def compute(self, batch):
        x = np.asarray(batch.column("x"))
        if 13.0 in x:
            if self.raises == "exit":
                sys.exit("no licence")
            if self.raises == "generator":
                raise GeneratorExit("closed")
            if self.raises == "panic":
                raise Panic("index out of bounds")
        return {"double": x * 2}
"""
ROWS = [(i, float(i)) for i in range(40)]
RAISED = {
    "exit": "SystemExit: no licence",
    "generator": "GeneratorExit: closed",
    "panic": "Panic: index out of bounds",
}
LINES = {"exit": "sys.exit(", "generator": "raise Gen", "panic": "raise Panic"}


def view(**args: object) -> dict[str, object]:
    return {
        "model": {"use": "mine:Unruly", "args": args},
        "features": {"double": {"dtype": "float64"}},
        "max_rejected": 0.1,
    }


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("raises", RAISED)
def test_what_no_program_expects_is_one_bad_row(
    make_project: MakeProject, raises: str, workers: int
) -> None:
    settings = {"view": view(raises=raises), "project": {"engine": {"workers": workers}}}
    folder = make_project(ROWS, **settings).folder
    (folder / "mine.py").write_text(MODEL)
    scene = make_project(ROWS, **settings)
    report = scene.run()
    assert (report.status, report.counts["rejected"]) == ("published", 1)
    rejected = scene.snapshot().rejected
    assert rejected is not None
    (row,) = pq.read_table(scene.store.file(rejected)).to_pylist()
    line = 1 + next(n for n, text in enumerate(MODEL.splitlines()) if LINES[raises] in text)
    assert (row["key"], row["stage"]) == ("13", "model")
    assert row["error"] == f"{RAISED[raises]} (mine.py:{line})"
    assert scene.doubles() == {key: 2 * x for key, x in ROWS if x != 13.0}


def test_a_thread_that_a_model_left_keeps_no_command_alive(
    make_project: MakeProject, tmp_path: Path
) -> None:
    folder = make_project(ROWS, view=view(leaves=True)).folder
    (folder / "mine.py").write_text(MODEL)
    done = subprocess.run(
        [*PRECOMPUTE, "-c", str(folder), "run", "numbers"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "numbers: published, snapshot 1, 40 of 40 rows" in done.stdout
    assert "a thread that the model left goes on (pool-of-mine): the command is done" in done.stderr
