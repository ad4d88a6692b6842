"""What the gates judged by is shown as they judged: each figure with its limits and its nights, and
which rows are at fault."""

from __future__ import annotations

import json
import math
from datetime import date, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.jobs.commands.review import describe_gates
from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.ops.gate_history import GateFigure, GateHistory, gate_history
from precompute.jobs.run import materialize
from precompute.jobs.run.judge.judgement import Evidence, judge
from precompute.jobs.run.judge.nights import Night
from precompute.jobs.run.judge.rows_at_fault import KEY_LETTERS, rows_at_fault
from precompute.store.feature_view import Feature, FeatureView
from tests.fixtures import MakeProject, Prepared
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]
FIRST = date(2026, 11, 2)
ROWS = 60
OFF = dict.fromkeys(("first", "moved", "computed", "anchor"))
VIEW = {"gates": OFF, "fallback": {"enabled": False}}


def four_nights(make_project: MakeProject) -> Scene:
    """``numbers`` of four nights of normal values; tonight's are twice as large."""
    random = np.random.default_rng(45)
    with pytest.MonkeyPatch.context() as patched:
        for n in range(4):
            at = f"{FIRST + timedelta(days=n)}T02:00:00Z"
            patched.setattr(materialize, "utc_now", lambda at=at: at)
            values = random.normal(10, 2, ROWS) * (2.0 if n == 3 else 1.0)
            project = make_project(list(enumerate(values.round(3).tolist())), view=VIEW)
            assert project.cli("run", "numbers") == (3 if n == 3 else 0)
    return project


def shown(project: Scene, capsys: Captured, *command: str) -> Any:
    capsys.readouterr()
    assert project.cli(*command, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_each_figure_is_shown_with_the_limits_that_judged_it(
    prepared: Prepared, capsys: Captured
) -> None:
    project = prepared(four_nights)
    found = shown(project, capsys, "gates")
    head = [found[name] for name in ("view", "snapshot", "day", "rows", "nights", "since")]
    assert head == ["numbers", 4, "2026-11-05", ROWS, 3, "2026-11-02"]
    assert (found["fixed_bounds"], found["left_out"]) == (True, [])
    refused = [one for one in found["figures"] if one["state"]]
    assert [one["state"] for one in refused] == ["refused"] * len(refused)
    # refused ones first, and those that the judge named
    assert found["figures"][: len(refused)] == refused
    judged = project.snapshot(4)
    names = {name for verdict in judged.failed for name in verdict.figures}
    assert {f"{one['feature']}.{one['figure']}" for one in refused} == names
    assert {"double.p50", "vector.norm.p50"} <= names
    for one in found["figures"]:
        low = -math.inf if one["low"] is None else one["low"]
        high = math.inf if one["high"] is None else one["high"]
        assert (low <= one["value"] <= high) is not bool(one["state"]), one
    median = next(one for one in refused if one["figure"] == "p50")
    before = [project.snapshot(n).quality["double.p50"] for n in range(1, 4)]
    assert [night["value"] for night in median["nights"]] == before
    assert [night["day"] for night in median["nights"]][::2] == ["2026-11-02", "2026-11-04"]
    assert median["value"] == judged.quality["double.p50"] > median["high"]
    capsys.readouterr()
    assert project.cli("gates", "--feature", "double") == 0
    first, said, _, columns, *lines = capsys.readouterr().out.splitlines()
    assert first == (
        "snapshot 4 of numbers (2026-11-05), judged by the 3 nights before it, since 2026-11-02;"
        " below 7 by fixed bounds around the last one"
    )
    assert said.startswith("REFUSED: shape: double: ")
    assert columns.split("  ")[-1] == "3 nights, then tonight"
    assert all("  double  " in line for line in lines)
    assert lines[0].startswith("REFUSED  double")
    assert lines[0][-2:] == " █"
    # the log says once between what it passes
    assert project.cli("log", project.report().run) == 0
    logged = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  gate ")]
    shape = next(verdict for verdict in judged.gates if verdict.gate == "shape")
    assert f"  gate shape: REFUSED: {shape.message}" in logged
    assert "  gate rejected: passed, 0 of 0.5: 0 of 60 rows rejected" in logged
    # where the terminal has no such letters
    dots = describe_gates(gate_history(project.store, judged), blocks=False)
    assert "█" not in dots
    assert " %\n" in dots


def test_status_says_of_how_many_nights_and_what_is_not_compared_yet(
    prepared: Prepared, capsys: Captured
) -> None:
    project = prepared(four_nights)
    assert project.status()["gates"] == {"nights": 3}
    capsys.readouterr()
    project.cli("status")
    head, line = (row.split() for row in capsys.readouterr().out.splitlines()[:2])
    assert ("gates" in head, "nights" in line) == (True, True)
    # what nobody compared yet has no limits, and says so
    waits = gate_history(project.store, project.snapshot(4))._replace(waits=True)
    assert "is not compared yet with the partitions before it" in waits.said()


def test_a_view_without_nights_says_so(make_project: MakeProject, capsys: Captured) -> None:
    project = make_project([(i, float(i)) for i in range(3)], view=VIEW)
    assert project.cli("gates") == 1
    assert "has no snapshot yet, so its gates have judged nothing" in capsys.readouterr().err
    project.run()
    found = shown(project, capsys, "gates")
    assert (found["nights"], found["rows"]) == (0, 3)
    project.cli("gates")
    said = capsys.readouterr().out.splitlines()[0]
    assert "has 3 rows: below 20 its features are judged by their own bounds alone" in said
    assert project.cli("gates", "--feature", "dubble") == 2
    assert "has no feature 'dubble'; did you mean 'double'?" in capsys.readouterr().err
    assert project.cli("gates", "--snapshot", "9") == 1


SPEND = Feature("spend", "float64")
NUMBERS = FeatureView("numbers", ("id",), (SPEND,), 3600.0, 0.0)


def rows(values: Any, **columns: Any) -> pa.Table:
    return pa.table({"id": list(range(len(values))), "spend": values} | columns)


def night(number: int, level: float) -> Night:
    figures = judge(Evidence(NUMBERS, rows(spread(level)), ""), GatesConfig()).figures
    return Night(number, f"{FIRST + timedelta(days=number)}", figures)


def spread(level: float) -> list[float]:
    """200 values around ``level``."""
    return (level + np.linspace(-3, 3, 200)).tolist()


@pytest.mark.parametrize("nights", [1, 5, 9, 20])
@pytest.mark.parametrize("side", [0, 1])
def test_a_figure_passes_up_to_its_limit_and_no_further(nights: int, side: int) -> None:
    before = [night(n, 10 + 0.1 * (n % 3)) for n in range(nights)]
    day = f"{FIRST + timedelta(days=nights)}"

    def judged(level: float) -> Any:
        return judge(Evidence(NUMBERS, rows(spread(level)), day, nights=before), GatesConfig())

    limit = judged(10.0).limits["spend.p50"][side]
    assert limit is not None
    for beyond, refused in ((-1e-3, False), (1e-3, True)):
        found = judged(limit + (beyond if side else -beyond))
        named = [name for verdict in found.verdicts for name in verdict.figures]
        assert ("spend.p50" in named) is refused


def test_a_night_that_was_announced_is_shown_as_left_out() -> None:
    figure = GateFigure("spend", "p50", "median", ("shape",), 3.0, 1.0, None, [("2026", 2.0)], "")
    found = GateHistory("v", 2, "2026-11-28", 99, 1, "2026-11-26", True, [], [], [figure])
    text = describe_gates(found._replace(left_out=[("2026-11-27", "Black Friday")]))
    assert "left out, as they were announced: 2026-11-27 (Black Friday)" in text
    assert "judged by the night before it, since 2026-11-26; below 7 by fixed bounds" in text
    assert (figure.passes(), figure._replace(low=None).passes()) == ("from 1", "-")
    assert figure._replace(high=5.0).used == pytest.approx(1 / 3)


def test_a_refusal_says_which_rows() -> None:
    countries = ["DE", "FR", "US", "IT"] * 50
    before = rows(spread(10.0), country=countries)
    moved = [
        2 * v if country == "DE" else v for v, country in zip(spread(10.0), countries, strict=True)
    ]
    after = rows(moved, country=countries)
    pairs = (after, before)
    said = rows_at_fault(after, pairs, SPEND, "p50", ["id"], "country")
    head, *keys = said.split("; ")[1:]
    assert head == "most in country = DE: 100% of its 50 rows, 0% elsewhere"
    assert keys[:2] == ["keys 196: 12.91 → 25.82", "192: 12.79 → 25.58"]
    assert len(keys) == 10
    # of a view without such a column, or none
    alone = rows_at_fault(after, pairs, SPEND, "p50", ["id"], "city")
    assert alone == rows_at_fault(after, pairs, SPEND, "p50", ["id"]) == f"; {'; '.join(keys)}"


def test_a_share_is_of_rows_that_have_it() -> None:
    countries = ["DE", "FR"] * 30
    lost = rows([None if i < 12 and i % 2 else 1.0 for i in range(60)], country=countries)
    assert rows_at_fault(lost, None, SPEND, "null", ["country", "id"], "country") == (
        "; most in country = FR: 20% of its 30 rows, 0% elsewhere"
        "; keys FR/1; FR/3; FR/5; FR/7; FR/9; FR/11"
    )
    everywhere = rows([None if i % 4 < 2 else 1.0 for i in range(60)], country=countries)
    said = rows_at_fault(everywhere, None, SPEND, "null", ["id"], "country")
    assert said.startswith("; about alike in every country; keys 0; 1; 4; 5")
    then = replace_values(everywhere, [1.0] * 60)
    said = rows_at_fault(everywhere, (everywhere, then), SPEND, "null", ["id"])
    assert said.startswith("; keys 0: 1 → null; 1: 1 → null")
    # nothing moved, and no share of it
    same = (lost, lost)
    assert rows_at_fault(lost, same, SPEND, "p50", ["id"], "country") == ""


def replace_values(table: pa.Table, values: list[float]) -> pa.Table:
    return table.set_column(1, "spend", pa.array(values))


def test_vectors_and_lists_at_fault() -> None:
    vector = Feature("v", "float32", dim=2)
    kind = vector.arrow_type
    now, then = ([[1.0, 0.0], [0.0, 2.0], None], [[1.0, 0.0], [2.0, 0.0], [1.0, 1.0]])
    tables = [pa.table({"id": [1, 2, 3], "v": pa.array(v, kind)}) for v in (now, then)]
    assert rows_at_fault(tables[0], (tables[0], tables[1]), vector, "norm.p50", ["id"]) == (
        "; keys 3: [1, 1] → null; 2: cosine 0.00, length 2 → 2"
    )
    items = Feature("l", "string", max_items=3)
    lists = [pa.table({"id": [1], "l": pa.array([v], items.arrow_type)}) for v in (["b"], ["a"])]
    assert rows_at_fault(lists[0], (lists[0], lists[1]), items, "length", ["id"]) == (
        "; keys 1: ['a'] → ['b']"
    )


def test_a_refusal_is_one_line_whatever_keys_and_values_are() -> None:
    texts, numbers = Feature("t", "string"), Feature("n", "int64")
    kept = 2**63 - 1
    now, then = (
        pa.table({"id": ["a\n\x1b[31m", "k" * 5000], "t": [t, "v" * 50], "n": [n, n]})
        for t, n in (("p\nq", -(2**63)), ("r", kept))
    )
    long = f"{'k' * KEY_LETTERS}…"
    assert rows_at_fault(now, (now, then), texts, "common", ["id"]) == (
        r"; keys a\n\x1b[31m: 'r' → 'p\nq'"
    )
    assert rows_at_fault(now, None, numbers, "negative", ["id"], "id") == (
        rf"; keys a\n\x1b[31m; {long}"
    )
    said = rows_at_fault(pa.concat_tables([now] * 5), None, numbers, "negative", ["n"], "id")
    assert said.startswith(r"; about alike in every id; keys -9223372036854775808")
