"""Resources: what a process is short of is reported in one line, with the remedy, and never taken
for damage."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import pyarrow.parquet as pq
import pytest

from precompute.store.errors import UnreadableError
from tests.fixtures import MakeProject


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.EAGAIN])
def test_a_file_unreadable_for_now_is_not_called_damaged(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nor is its snapshot marked bad: what is wanted is a right, a handle, memory, a thread."""
    project = make_project([(i, float(i)) for i in range(5)])
    project.materialize()

    def refused(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as short:
        short.setattr(pq, "read_metadata", refused)
        with pytest.raises(UnreadableError, match=r"ulimit|the right to"):
            project.publish()
    assert (project.store.log.bad(), project.publish().status) == ({}, "published")


def test_what_a_process_has_no_memory_or_threads_for_is_one_line(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_project([(1, 1.0)])
    for short in (
        duckdb.OutOfMemoryException("Allocation failure"),
        MemoryError(),
        RuntimeError("can't start new thread"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(duckdb, "connect", mock.Mock(side_effect=short))
            assert project.cli("run", "numbers") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "this process " in line
        assert "ulimit" in line
