"""DuckDB's spill folder is one's own while one lives, and gone afterwards, however one died; and it
reads the files that it is given."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.store.disk.sql import SpillFolder, parquet_sql, sweep, without_data


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_removed_when_closed(folder: Path) -> None:
    spill = SpillFolder()
    (spill.path / "block").write_bytes(b"x")
    assert spill.path.parent == folder
    spill.close()
    spill.close()
    assert list(folder.iterdir()) == []


def test_that_of_a_living_process_stays_and_that_of_a_killed_one_goes(folder: Path) -> None:
    code = "import time; from precompute.store.disk.sql import SpillFolder; s = SpillFolder(); print(s.path, flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    SpillFolder().close()
    assert theirs.is_dir()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    SpillFolder().close()
    assert list(folder.iterdir()) == []


def test_one_that_is_about_to_be_locked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that begins just then looks for folders of dead ones."""
    flock = fcntl.flock

    def after_the_others_sweep(file: Any, how: int) -> None:
        if how == fcntl.LOCK_EX:
            sweep()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_others_sweep)
    spill = SpillFolder()
    sweep()
    assert spill.path.is_dir()
    spill.close()


def test_one_that_is_being_made_is_left_alone_for_an_hour(folder: Path) -> None:
    made = folder / "precompute-duckdb-abc"
    made.mkdir()
    SpillFolder().close()
    assert made.is_dir()
    os.utime(made, (0, 0))
    SpillFolder().close()
    assert not made.exists()


def test_a_file_is_read_by_its_path_and_never_by_a_pattern(folder: Path) -> None:
    names = ["ab", "axb", "a*b", "a?b", "a[b]", "a[", "a]", "a[[]b", "a{b,c}", "it's"]
    for number, name in enumerate(names):
        (folder / name).mkdir()
        pq.write_table(pa.table({"x": [number]}), folder / name / "part.parquet")
    read = [
        without_data().sql(f"SELECT x FROM {parquet_sql([folder / name / 'part.parquet'])}")
        for name in names
    ]
    assert [rows.fetchall() for rows in read] == [[(number,)] for number in range(len(names))]
