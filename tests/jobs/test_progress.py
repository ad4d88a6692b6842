"""Progress: a bar on a terminal, plain lines anywhere else, nothing when quiet."""

from __future__ import annotations

import io
import os
import re
import sys
from functools import partial

import pytest

from precompute.jobs.run.command_process import Bar, Lines, Silent, progress_for


def test_lines_tell_the_total_and_how_far_it_is() -> None:
    out = io.StringIO()
    lines = Lines(partial(print, file=out), every_s=0)
    lines.begin("load numbers", 3000)
    for _ in range(3):
        lines.advance(1000)
    lines.end()
    printed = out.getvalue().splitlines()
    assert printed[0] == "load numbers: 3,000 rows"
    pattern = r"load numbers: (1,000|2,000) of 3,000 rows, [\d,]+ rows/s, [\d,]+ s left"
    assert [re.fullmatch(pattern, line) is not None for line in printed[1:]] == [True, True]


def test_lines_are_silent_between_their_moments_and_at_the_end() -> None:
    out = io.StringIO()
    lines = Lines(partial(print, file=out), every_s=3600)
    for total in (10, 0):
        lines.begin("load", total)
        for _ in range(total):
            lines.advance(1)
        lines.end()
    assert out.getvalue() == "load: 10 rows\nload: 0 rows\n"


def test_no_time_is_shown_while_rows_are_tried_again() -> None:
    out = io.StringIO()
    lines = Lines(partial(print, file=out), every_s=0)
    lines.begin("load", 4000)
    lines.advance(2999, 1000)
    lines.advance(1000, 1)
    assert [line.split(" rows/s, ")[1] for line in out.getvalue().splitlines()[1:]] == [
        "retrying 1,000 rows",
        "retrying 1 row",
    ]


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert type(progress_for(quiet=True)) is Silent
    assert isinstance(progress_for(quiet=False), Lines)
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert isinstance(progress_for(quiet=False), Bar)
        assert type(progress_for(quiet=True)) is Silent
    os.close(reader)


def test_a_bar_draws_on_stderr_and_can_be_ended_at_any_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    bar = Bar()
    bar.end()
    bar.begin("load numbers", 10)
    bar.advance(4)
    bar.begin("load others", 0)
    bar.end()
    bar.end()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "load numbers" in captured.err
    assert "4/10" in captured.err
