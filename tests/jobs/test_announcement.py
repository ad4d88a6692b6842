"""Announcing: what is expected of a day, or of one run, is told and published; and a view's gates
are checked when its file is read."""

import json
import re
from datetime import date
from typing import Any

import pyarrow as pa
import pytest

from precompute.jobs.config.announcement import Announced, Days, ExpectConfig, announced
from precompute.jobs.config.section import parse_time
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.command_process import operator
from precompute.jobs.run.judge.nights import nights_after
from precompute.store.errors import ConfigError, GateError
from precompute.store.times import Partition, utc_now
from tests.fixtures import MakeProject
from tests.scene import Scene

USUAL = [(i, float(i)) for i in range(60)]
OTHER = [(i, 1000.0 - 7 * i) for i in range(60)]
"""Other numbers of the same keys: by each gate that compares something is wrong."""
FEATURES = {
    "double": {"dtype": "float64"},
    "vector": {"dtype": "float32", "dim": 4},
}


def test_days_overlap_and_what_is_announced_of_them_is_one() -> None:
    friday = Days(date(2026, 11, 27), date(2026, 11, 27))
    one = ExpectConfig.model_validate(
        {"on": "2026-11-27", "features": ["spend"], "gates": ["shape"], "reason": "Black Friday"}
    )
    other = ExpectConfig.model_validate(
        {"on": {"from": "2026-11-20", "to": "2026-11-30"}, "features": ["visits"]}
    )
    every = ExpectConfig.model_validate({"on": ["2026-12-01", "2026-11-27"], "gates": ["rows"]})
    spend, visits, both = (
        frozenset(names) for names in (["spend"], ["visits"], ["spend", "visits"])
    )
    others = dict.fromkeys(("computed", "moved", "anchor", "never"), visits)
    assert announced([one], [friday]) == Announced(
        {"shape": spend}, "Black Friday, by gates.expect"
    )
    assert announced([one, other, every], [friday]) == Announced(
        {"shape": both, **others, "rows": None},
        "Black Friday, by gates.expect; 2026-11-20 to 2026-11-30, by gates.expect;"
        " 2026-11-27, by gates.expect",
    )
    assert announced([one, every], [Days(date(2026, 11, 28), date(2026, 11, 30))]) == ({}, "")
    assert announced([one], [friday], ["shape", "moved"], "ann@desk") == Announced(
        {"shape": None, "moved": None},
        "shape, moved, by --expect of ann@desk; Black Friday, by gates.expect",
    )
    # a partition's days end before its end
    week = Days.of(Partition.parse("2026-11-23T00:00Z/2026-11-30T00:00Z"))
    assert week == Days(date(2026, 11, 23), date(2026, 11, 29))
    assert announced([one], [week]).why
    assert not announced([one], [Days.of(Partition.parse("2026-11-28T00:00Z/2026-11-29T00:00Z"))])[
        0
    ]


BOUNDS = {
    "features: {doubel: {}}": "gates.features.doubel: there is no feature 'doubel'; did you mean"
    " 'double'?",
    "features: {vector: {range: [0, 1]}}": "gates.features.vector.range: 'vector' is a vector, and"
    " range is of single values",
    "features: {tags: {unique: true}}": "gates.features.tags.unique: 'tags' is a list, and unique"
    " is of single values",
    "features: {country: {range: [0, 1]}}": "gates.features.country.range: 'country' is a text, and"
    " range is of numbers",
    "features: {flag: {range: [0, 1]}}": "gates.features.flag.range: 'flag' is true or false, and"
    " range is of numbers",
    "features: {double: {values: [1]}}": "gates.features.double.values: 'double' is a float, which"
    " has no list of values: write range: [least, largest]",
    "features: {country: {values: [DE, 1]}}": "gates.features.country.values: 1 cannot be one,"
    " since 'country' is a text",
    "features: {number: {values: [1, true]}}": "gates.features.number.values: True cannot be one,"
    " since 'number' is a whole number",
    "features: {double: {range: [2, 1]}}": "gates.features.double.range: [2, 1]: 2 is more than 1:"
    " write the least first",
    "features: {double: {distinct: 3}}": "gates.features.double.distinct: 3: write the least and"
    " the largest, as in [0, 100]",
    "features: {double: {distinct: [-1, 3]}}": "gates.features.double.distinct.0: -1: must be at"
    " least 0",
    "features: {double: {null_share: 60}}": "gates.features.double.null_share: 60: must be at most"
    " 1",
    "features: {double: {shap: 2}}": "gates.features.double.shap: unknown key; did you mean"
    " 'shape'?",
    "shape: 0": "gates.shape: must be more than 0",
    "moved_by: 0.1": "gates.moved_by: unknown key; did you mean 'moved'?",
    "by: contry": "gates.by: there is no feature or column of the entity 'contry'; did you mean"
    " 'country'?",
    "by: vector": "gates.by: 'vector' is a list or vector, and rows are told apart by single"
    " values (there are: country, double, flag, number, id)",
    "expect: [{on: 2026-13-01}]": "gates.expect.0.on: '2026-13-01': write a date, as 2026-11-27, a"
    " list of dates, or {from: 2026-11-20, to: 2026-11-30}",
    "expect: [{on: {from: 2026-11-30}}]": "gates.expect.0.on: write a date, as 2026-11-27, a list"
    " of dates, or {from: 2026-11-20, to: 2026-11-30}",
    "expect: [{on: {from: 2026-11-30, to: 2026-11-27}}]": "gates.expect.0.on: 2026-11-30 is after"
    " 2026-11-27: write the earlier day first",
    "expect: [{features: [double]}]": "gates.expect.0.on: missing; add it, for it has no default",
    "expect: [{on: 2026-11-27}, {on: 2026-11-28, features: [doubel]}]": "gates.expect.1.features:"
    " there is no feature 'doubel'; did you mean 'double'?",
    "expect: [{on: 2026-11-27, gates: [movd]}]": "gates.expect.0.gates: movd: there is no such"
    " gate; it is one of shape, computed, moved, anchor, never, rows; did you mean 'moved'?",
    "expect: [{on: 2026-11-27, gates: [moved, constant]}]": "gates.expect.0.gates: constant: one"
    " value for all is of no use to readers, which no announcement makes right, so it stays on any"
    " day; what can be announced is shape, computed, moved, anchor, never, rows. What it refuses is"
    " published by --accept constant",
    "expect: [{on: 2026-11-27, features: [double], gates: [rows]}]": "gates.expect.0.gates: rows"
    " judges no feature: announce it in an entry without features",
}
KINDS = FEATURES | {
    "country": {"dtype": "string"},
    "number": {"dtype": "int32"},
    "flag": {"dtype": "bool"},
    "tags": {"dtype": "string", "max_items": 3},
}


def with_gates(project: Scene, gates: str) -> ViewConfig:
    """The view as it is read with these lines, as a person writes them."""
    path = project.folder / "views" / "numbers.yaml"
    before = path.read_text()
    path.write_text(before + f"gates:\n  {gates}\n")
    try:
        return project.reread().view("numbers")
    finally:
        path.write_text(before)


def test_what_a_view_says_of_its_gates_is_checked_when_it_is_read(
    make_project: MakeProject,
) -> None:
    project = make_project(view={"features": KINDS, "gates": None})
    for gates, message in BOUNDS.items():
        with pytest.raises(ConfigError) as raised:
            with_gates(project, gates)
        assert re.sub(r"^\S+numbers\.yaml:\d+: ", "", str(raised.value)) == message
    config = with_gates(
        project,
        "null: 1.5\n  by: id\n  features: {double: {null: null, range: [0, 1e6]}, number: {values:"
        " [1, 2], distinct: [1, 2]}}",
    ).gates
    # the name of that gate is no null to YAML
    assert (config.null, config.features["double"].null) == (1.5, None)
    assert config.features["double"].range == (0.0, 1e6)
    assert config.features["number"].distinct == (1, 2)


PLAIN: dict[str, Any] = {"gates": {"first": None}}
"""The vectors of a test's model all point the same way."""


def expecting(**entry: Any) -> dict[str, Any]:
    expected = {"on": utc_now()[:10], "reason": "a new price"} | entry
    return {"gates": PLAIN["gates"] | {"expect": [expected]}}


def warned(project: Scene) -> list[str]:
    return [verdict.gate for verdict in project.snapshot().gates if verdict.warned]


def test_what_is_expected_of_a_day_is_told_and_published(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    make_project(USUAL, view=PLAIN).run()
    # of another day, or of another feature, nothing is announced
    for entry in ({"on": ["2026-01-01"]}, {"features": ["vector"]}):
        with pytest.raises(GateError, match="double: "):
            make_project(OTHER, view=expecting(**entry)).run()
    project = make_project(OTHER, view=expecting())
    capsys.readouterr()
    # what was refused is judged again, and computed no more
    assert project.cli("run", "numbers") == 0
    said, snapshot = capsys.readouterr().out, project.snapshot()
    assert "60 of 60 rows (60 unchanged)" in said
    assert (project.live().snapshot, snapshot.failed_gates) == (snapshot.number, ())
    assert {"shape", "moved"} <= set(warned(project))
    why = "a new price, by gates.expect"
    for verdict in snapshot.gates:
        line = f"  announced ({why}): {verdict.gate}: {verdict.message} – published\n"
        assert (line in said) == verdict.warned
    assert (snapshot.announced, project.report().announced) == (why, why)
    # the night tells nothing of what is usual
    assert nights_after(project.store, snapshot)[-1].announced == why


def test_what_judges_rows_alone_stays_whatever_is_announced(make_project: MakeProject) -> None:
    make_project(USUAL, view=PLAIN).run()
    with pytest.raises(GateError) as raised:
        make_project([(i, 5.0) for i in range(60)], view=expecting()).run()
    assert "constant: " in str(raised.value)
    assert "shape: " not in str(raised.value)


def test_a_run_is_told_what_to_expect(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    make_project(USUAL, view=PLAIN).run()
    project = make_project(OTHER[:22], view=PLAIN)
    with pytest.raises(GateError):
        project.run()
    refused = project.snapshot().failed_gates
    assert "rows" in refused
    stays = (
        "precompute: --expect null: a value that is lacking is of no use to readers, which no"
        " announcement makes right, so it stays on any day; what can be announced is shape,"
        " computed, moved, anchor, never, rows. What it refuses is published by --accept null\n"
    )
    for given, said in {
        "null": stays,
        "moved,shpe": "precompute: --expect shpe: there is no such gate; it is one of shape,"
        " computed, moved, anchor, never, rows; did you mean 'shape'?\n",
    }.items():
        capsys.readouterr()
        assert project.cli("run", "numbers", "--expect", given) == 2
        assert capsys.readouterr().err.replace("error: ", "") == said
    assert project.cli("run", "--all", "--expect", "moved") == 2
    capsys.readouterr()
    # a part of it is not enough
    assert project.cli("run", "numbers", "--expect", "rows") == 3
    capsys.readouterr()
    assert project.cli("run", "numbers", "--json", "--expect", ",".join(refused)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "published"
    assert {one["gate"] for one in report["gates"] if one["warned"]} == set(refused)
    by = f"{', '.join(refused)}, by --expect of {operator()}"
    assert (report["announced"], project.snapshot().announced) == (by, by)
    # the next night is an ordinary one
    assert make_project([(i, 1000.5 - 7 * i) for i in range(22)], view=PLAIN).run().announced == ""
    assert warned(project) == []


def daily(make_project: MakeProject, gates: dict[str, Any]) -> Scene:
    """Three days, of which the second is other than those beside it, and one row of the second and
    third has no value."""
    rows = [(day, *row) for day, of in enumerate((USUAL, OTHER, USUAL), 1) for row in of]
    none = [(2, 60, None), (3, 60, None)]
    table = pa.table(
        {
            "id": [key for _, key, _ in (*rows, *none)],
            "x": pa.array([x for _, _, x in (*rows, *none)], pa.float64()),
            "day": [date(2024, 1, day) for day, _, _ in (*rows, *none)],
        }
    )
    sql = "SELECT * FROM read_parquet('${data}/data.parquet') WHERE day >= $start AND day < $end"
    return make_project(
        table,
        view={
            "source": {"sql": sql},
            "partition": {"by": "day", "column": "day", "start": "2024-01-01"},
            "gates": PLAIN["gates"] | gates,
        },
    )


def compute(project: Scene, *days: int) -> None:
    for day in days:
        partition = project.view("numbers").partition_of(parse_time(f"2024-01-0{day}"), "")
        project.materialize(partition=partition)


def verdicts(project: Scene) -> list[tuple[list[str], list[str], set[str], str]]:
    """Of each snapshot: the gates that refuse it, those that warn, those that were accepted, and
    what was announced."""
    return [
        (
            project.refused_by(number),
            [verdict.gate for verdict in project.snapshot(number).gates if verdict.warned],
            set(project.store.log.accepted(number)),
            project.snapshot(number).announced,
        )
        for number in project.numbers()
    ]


@pytest.mark.parametrize("order", [(), ("--backwards",)])
def test_a_backfill_accepts_and_announces_for_each_of_its_days(
    make_project: MakeProject, order: tuple[str, ...]
) -> None:
    """Also of a day that is compared once those before it are there."""
    project = daily(make_project, {"coverage": 1.0})
    compute(project, 1)
    span = ("--from", "2024-01-01", "--to", "2024-01-03")
    said = ("--accept", "coverage", "--expect", "moved, shape", "--expect", "shape")
    assert project.cli("backfill", "numbers", *span, *said, *order) == 0
    why = f"moved, shape, by --expect of {operator()}"
    of_days = zip(project.numbers(), verdicts(project), strict=True)
    newest = {project.snapshot(number).partition: told for number, told in of_days}
    assert [newest[day] for day in sorted(map(str, newest))] == [
        ([], [], set(), ""),
        ([], ["shape", "moved"], {"coverage"}, why),
        # in shape as on the first day: what was announced tells nothing of what is usual
        ([], ["moved"], {"coverage"}, why),
    ]
    assert project.live().snapshot == max(project.numbers())
    assert project.cli("backfill", "numbers", *span, "--expect", "null") == 2


def test_what_is_expected_of_a_partition_is_of_its_own_day(make_project: MakeProject) -> None:
    project = daily(make_project, {"expect": [{"on": "2024-01-02", "reason": "a sale"}]})
    compute(project, 1, 2, 3)
    assert verdicts(project) == [
        ([], [], set(), ""),
        ([], ["shape", "moved"], set(), "a sale, by gates.expect"),
        # the way back
        ([], ["moved"], set(), ""),
    ]


def test_a_run_that_is_late_has_the_day_it_was_due(make_project: MakeProject) -> None:
    """A run of the schedule that is tried again after midnight."""
    make_project(USUAL, view=PLAIN).run()
    project = make_project(OTHER, view=expecting(on="2026-01-01"))
    assert project.run(due="2026-01-01T23:30:00Z").announced == "a new price, by gates.expect"
    assert project.live().snapshot == 2
