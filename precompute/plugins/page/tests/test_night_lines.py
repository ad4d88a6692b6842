"""The nights that gates judged by, as the page and the report draw them."""

from __future__ import annotations

from precompute.jobs.ops.gate_history import gate_history
from precompute.plugins.page.figures import REPORT, ViewFigures, _with_nights
from precompute.plugins.page.night_lines import night_line
from tests.fixtures import Prepared
from tests.jobs.test_gates_shown import four_nights


def test_page_and_report_show_the_nights(prepared: Prepared) -> None:
    """Of the refused one the report draws all, the page each feature's worst."""
    project = prepared(four_nights)
    assert project.cli("report") == 0
    text = (project.root / "numbers" / REPORT).read_text(encoding="utf-8")
    figures = gate_history(project.store, project.snapshot(4)).figures
    assert text.count('class="night"') == len(figures)
    refused = sum(one.state == "refused" for one in figures)
    assert text.count('r="3.5" class="f-missing"') == refused > 0
    assert "judged by the 3 nights before it" in text
    of_page = _with_nights(ViewFigures({"view": "numbers", "snapshot": 3}), project.store)
    assert of_page.nights == 3
    assert of_page.judged.startswith("snapshot 4 of numbers (2026-11-05), judged by the 3 nights")
    assert of_page.judged.endswith("; it is not live")
    worst = [(line.feature, line.state) for line in of_page.night_lines]
    assert worst == [("double", "refused"), ("vector", "refused")]
    # a value that is far off stands at the edge, and the nights keep a third of the height
    lines = [night_line(figures[0]._replace(value=value)) for value in (1e3, 1e9)]
    assert lines[0][5:8] == lines[1][5:8]
