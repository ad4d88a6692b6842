"""The table as DuckDB 1.5.5 reads it, which alone has that extension from packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.precompute.oldest_duckdb import run_on_oldest


@pytest.mark.timeout(600)
def test_the_table_on_the_oldest_duckdb(tmp_path: Path) -> None:
    run_on_oldest(tmp_path, "precompute/plugins/iceberg/tests/on_duckdb_1_5.py")
