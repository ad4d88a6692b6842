"""Sources on DuckDB 1.5.5, the oldest that is promised and the newest that has packages of
extensions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.precompute.oldest_duckdb import run_on_oldest

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


@pytest.mark.timeout(600)
def test_sources_are_the_same_on_the_oldest_duckdb(tmp_path: Path) -> None:
    folder = Path("tests", "precompute")
    left_out = [f"--deselect={folder / name}" for name in OF_DUCKDB_2]
    run_on_oldest(tmp_path, *left_out, *(str(folder / name) for name in FILES))
