"""Judgement: each row of the gates' table passes just inside its limit and refuses just outside of
it; what becomes of values is refused by the gate that is there for it; nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.run.judge import judgement
from precompute.jobs.run.judge.feature_figures import FLAG, LIST, NUMBER, NUMBERS, TEXT, VECTOR
from precompute.jobs.run.judge.gate_table import (
    ANCHOR,
    ANCHOR_LEAST,
    BOTH,
    CHECKS,
    COMPUTED,
    CORRELATION,
    COUNT,
    DOWN,
    FALL,
    FIRST,
    LEVEL,
    LOG,
    SHARE,
    UP,
    Bound,
    Check,
)
from precompute.jobs.run.judge.judgement import Evidence, Pairs, judge_rows
from precompute.jobs.run.judge.nights import Night
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.snapshot import Verdict

OF_KIND = {
    NUMBER: Feature("f", "float64"),
    FLAG: Feature("f", "bool"),
    TEXT: Feature("f", "string"),
    LIST: Feature("f", "int64", max_items=4),
    NUMBERS: Feature("f", "float32", max_items=4),
    VECTOR: Feature("f", "float32", dim=2),
}
ROWS = 400
SPREAD = 2.0
MONDAY = date(2026, 11, 2)


def day(n: int) -> str:
    return (MONDAY + timedelta(days=n)).isoformat()


def rows(feature: Feature, count: int = ROWS) -> pa.Table:
    """Rows that say nothing: the figures are given."""
    return pa.table({"id": range(count), "f": pa.nulls(count, feature.arrow_type)})


def given(
    kind: str,
    figures: Mapping[str, float],
    nights: Sequence[Mapping[str, float]] = (),
    **more: Any,
) -> Evidence:
    """What is known of a snapshot with these figures of its feature ``f`` and those before it."""
    feature = OF_KIND[kind]
    view = FeatureView("view", ("id",), (feature,), 3600.0, 0.0)
    before = [Night(n, day(n), named(figures)) for n, figures in enumerate(nights)]
    same = rows(feature)
    evidence = Evidence(
        view,
        same,
        day(len(nights)),
        live=same,
        pairs=Pairs(same.slice(0, 0), same.slice(0, 0), 0.0, ROWS, 7),
        nights=before,
    )
    evidence = replace(evidence, **more)
    vars(evidence).update(figures=named(figures), live_figures=named({"distinct": 0.1}))
    return evidence


def named(figures: Mapping[str, float]) -> dict[str, float]:
    return {f"f.{name}": value for name, value in figures.items()}


def verdict(gate: str, evidence: Evidence, **gates: Any) -> Verdict:
    """Of one gate, which there must be."""
    _, verdicts = judge_rows(evidence, GatesConfig(**gates))
    (found,) = (one for one in verdicts if one.gate == gate)
    return found


def gates_of(evidence: Evidence, **gates: Any) -> list[str]:
    """Which judged."""
    return [one.gate for one in judge_rows(evidence, GatesConfig(**gates))[1]]


# ---- just inside of a limit, and just outside


def center_of(check: Check) -> float:
    """A value that a figure may well have."""
    return {SHARE: 0.4, LEVEL: 10.0, LOG: 3.0, COUNT: 5.0, CORRELATION: 0.9, FALL: 0.6}[check.scale]


def at(check: Check, center: float, off: float) -> float:
    """The value so far off by the check's scale."""
    if check.scale == LEVEL:
        return center + off * SPREAD
    if check.scale == LOG:
        return center * math.exp(off)
    if check.scale == COUNT:
        return (1 + center) * math.exp(off) - 1
    if check.scale == CORRELATION:
        return math.tanh(math.atanh(center) + off)
    return center + off


def ends(check: Check, center: float, reach: float) -> Iterator[tuple[float, int]]:
    """Values at that distance from the center, and to which side, that the check is there for."""
    if check.side in (BOTH, UP):
        yield at(check, center, reach), 1
    if check.side in (BOTH, DOWN):
        yield at(check, center, -reach), -1


def chance(check: Check, center: float, deviations: float) -> float:
    """How far a figure of so many sampled rows may be off."""
    if check.scale == CORRELATION:
        return 4 / math.sqrt(ROWS)
    return deviations * math.sqrt(center * (1 - center) / ROWS) if check.scale == SHARE else 0.0


def passes_inside_alone(
    judged: Callable[[float], Verdict], limit: float, side: int, words: str
) -> None:
    """Whether a value just inside of a limit passes, and one just outside does not, and is told."""
    step = side * 1e-6 * max(1.0, abs(limit))
    inside, outside = judged(limit - step if limit else 0.0), judged(limit + step)
    assert inside.passed, inside.message
    assert not outside.passed, outside.message
    assert words in outside.message
    assert f"{limit + step:.4g}" in outside.message
    assert outside.measured == limit + step
    assert all(name.startswith("f.") for name in outside.figures)


def judging(
    gate: str,
    kind: str,
    figure: str,
    nights: Sequence[Mapping[str, float]] = (),
    **gates: Any,
) -> Callable[[float], Verdict]:
    """A value of the figure → the gate's verdict."""
    return lambda x: verdict(gate, given(kind, {figure: x}, nights), **gates)


def ids(checks: Sequence[Any]) -> list[str]:
    return [f"{one.gate if isinstance(one, Check) else 'first'}-{one.figure}" for one in checks]


@pytest.mark.parametrize("check", CHECKS, ids=ids(CHECKS))
def test_beside_the_views_own_nights(check: Check) -> None:
    """Of nights that were all the same: the least reach, and chance."""
    center = center_of(check)
    assert check.floor is not None
    for kind in check.kinds:
        nights = [{"spread": SPREAD, check.figure: center}] * 14
        for factor in (1.0, 1.5):
            reach = factor * (check.floor + chance(check, center, 3.5))
            for limit, side in ends(check, center, reach):
                passes_inside_alone(
                    judging(check.gate, kind, check.figure, nights, **{check.gate: factor}),
                    limit,
                    side,
                    f"f: {check.words} ",
                )
        assert check.gate not in gates_of(
            given(kind, {check.figure: center}, nights), **{check.gate: None}
        )


@pytest.mark.parametrize(("steps", "times"), [(1.0, 1.0), (4.0, 2.0), (30.0, math.sqrt(7))])
def test_after_a_gap_of_partitions(steps: float, times: float) -> None:
    """√steps times as far, of seven at most."""
    check = next(check for check in CHECKS if check.figure == "zero" and check.gate == "shape")
    nights = [{"spread": SPREAD, "zero": 0.4}] * 14
    reach = times * (0.02 + chance(check, 0.4, 3.5))

    def judged(value: float) -> Verdict:
        return verdict("shape", given(NUMBER, {"zero": value}, nights, steps=steps))

    passes_inside_alone(judged, 0.4 + reach, 1, f"f: {check.words} ")
    is_told = f"the last {steps:g} partitions ago" in judged(0.9).message
    assert is_told == (steps > 1)


def test_a_quantile_of_few_rows_may_be_what_the_one_beside_it_is() -> None:
    """A median between a crowd of zeros and other values is as it comes."""
    levels = {"p01": 0.0, "p05": 0.0, "p25": 0.0, "p50": 0.0, "p75": 8.0, "p95": 16.0, "p99": 20.0}
    nights = [{"spread": SPREAD, **levels}] * 14
    reach = 0.4 * SPREAD + 8.0 * (3.5 * math.sqrt(0.25 / ROWS)) / 0.25

    def judged(value: float) -> Verdict:
        return verdict("shape", given(NUMBER, levels | {"p50": value}, nights))

    passes_inside_alone(judged, reach, 1, "f: median ")


YOUNG = [check for check in CHECKS if check.young is not None and check.gate != "moved"]


@pytest.mark.parametrize("check", YOUNG, ids=ids(YOUNG))
def test_beside_the_last_night_while_a_view_is_young(check: Check) -> None:
    """The same bound with one night and with ten, of which all but the last were far off."""
    center, gate = center_of(check), check.gate
    assert check.young is not None
    last = {"spread": SPREAD, check.figure: center}
    far = {"spread": SPREAD, check.figure: center * (1 + (check.scale != CORRELATION))}
    for kind in check.kinds:
        for nights in ([last], [far, last]):
            reach = check.young + chance(check, center, 3.5)
            for limit, side in ends(check, center, reach):
                passes_inside_alone(
                    judging(gate, kind, check.figure, nights),
                    limit,
                    side,
                    f"f: {check.words} ",
                )
        # of no night nothing is said
        assert gate not in gates_of(given(kind, {check.figure: center}))


MOVED = [check for check in CHECKS if check.young is not None and check.gate == "moved"]


def bound(check: Check, share_chance: float, rows: int = ROWS) -> tuple[float, int]:
    """The limit of a figure by key, and to which side: a rank correlation is judged where that of
    rows that have nothing to do with each other is less."""
    assert check.young is not None
    more = share_chance if check.scale == SHARE else 0.0
    young = check.young
    if check.scale == CORRELATION and young > 0:
        young = min(max(young, 1.3 / math.sqrt(rows)), 3.0 / math.sqrt(rows))
    return (young + more, 1) if check.side == UP else (young, -1)


@pytest.mark.parametrize("check", MOVED, ids=ids(MOVED))
def test_by_key_while_a_view_is_young(check: Check) -> None:
    limit, side = bound(check, chance(check, check.young or 0.0, 3.5))
    for kind in check.kinds:
        passes_inside_alone(
            judging("moved", kind, check.figure),
            limit,
            side,
            f"f: {check.words} ",
        )
        # without anything live nothing is said
        assert "moved" not in gates_of(given(kind, {check.figure: limit}, pairs=None))


@pytest.mark.parametrize("check", FIRST, ids=ids(FIRST))
def test_of_a_first_snapshot(check: Bound) -> None:
    drawn = 3.5 * math.sqrt(check.most * (1 - check.most) / ROWS) if check.is_drawn else 0.0
    limit = check.most + drawn
    for kind in check.kinds:
        passes_inside_alone(
            judging("first", kind, check.figure),
            limit,
            1,
            f"f: {check.words} ",
        )
        far = {check.figure: limit * 1.001 + 1e-9}
        assert "first" not in gates_of(given(kind, far, [{}]))
        # of what is announced, and of another recipe, as little is known
        for more in ({"announced": {"shape": None}}, {"alike": False}):
            assert not verdict("first", given(kind, far, [{}], **more)).passed


@pytest.mark.parametrize(("factor", "most"), [(2.0, 0.55), (1.0, 0.1), (0.5, 0.05)])
def test_a_factor_of_a_share_leaves_it_a_share(factor: float, most: float) -> None:
    """Twice the way to 1, or half of what there is."""
    for share, passes in ((most - 0.001, True), (most + 0.001, False)):
        evidence = given(VECTOR, {"dead": share})
        assert verdict("first", evidence, first=factor).passed == passes


@pytest.fixture
def of_tables(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, float]]:
    """Rows of a table → the figures that are found of them."""
    found: dict[int, dict[str, float]] = {}
    monkeypatch.setattr(
        judgement,
        "figures_of",
        lambda table, _: found[table.num_rows + 2 * ("then" in table.column_names)],
    )
    monkeypatch.setattr(judgement, "moves_of", lambda table, *_: found[table.num_rows])
    monkeypatch.setattr(
        judgement, "_directions", lambda *_: [(found[ROWS]["f.direction"], center_of(DIRECTION))]
    )
    return found


DIRECTION = next(check for check in COMPUTED if check.figure == "direction")


@pytest.mark.parametrize("check", COMPUTED, ids=ids(COMPUTED))
def test_the_rows_that_a_run_computed(of_tables: dict[int, dict[str, float]], check: Check) -> None:
    center = center_of(check)
    for kind in check.kinds:
        feature = OF_KIND[kind]
        now = rows(feature, ROWS + 1)
        pairs = Pairs(now, now.append_column("then", now["id"]), 0.1, 4 * ROWS, 7)

        def judged(
            value: float, feature: Feature = feature, kind: str = kind, pairs: Any = pairs
        ) -> Verdict:
            of_tables[ROWS] = named({"direction": center_of(DIRECTION), check.figure: value})
            of_tables[ROWS + 1] = of_tables[ROWS]
            evidence = given(kind, {}, [{}], computed=rows(feature), pairs=pairs)
            vars(evidence)["live_figures"] = of_tables[ROWS + 3] = named(
                {"null": 0.0, check.figure: center, "distinct": 0.1, "p05": 4.0, "p95": 16.0}
            )
            return verdict("computed", evidence)

        if check.figure.startswith("moved"):
            p = check.young or 0.0
            rows_chance = 3.5 * math.sqrt(p * (1 - p) / (ROWS + 1)) if p > 0 else 0.0
            limits = [bound(check, rows_chance, ROWS + 1)]
        elif check.young is None:
            limits = [(16.0, 1), (4.0, -1)]
        else:
            limits = [*ends(check, center, check.young + chance(check, center, 4.0))]
        for limit, side in limits:
            passes_inside_alone(judged, limit, side, f"f of {ROWS} rows computed: {check.words} ")


def test_what_changed_may_be_as_all_live_rows_or_as_those_of_its_keys() -> None:
    """A model that works, of the newest keys, which are of another kind; and what is neither."""
    score = OF_KIND[NUMBER]
    others = pa.table({"id": range(2000), "f": [float(n % 100) for n in range(2000)]})
    newest = pa.table({"id": range(2000, 2040), "f": [1000.0 + n for n in range(40)]})
    live = pa.concat_tables([others, newest])

    def judged(become: Callable[[float], float]) -> Verdict:
        now = newest.set_column(1, "f", pa.array([become(x) for x in newest["f"].to_pylist()]))
        pairs = Pairs(now, newest, 0.1, 400, 7)
        evidence = given(NUMBER, {}, [{}], computed=now, live=live, pairs=pairs)
        del vars(evidence)["live_figures"]
        return verdict(
            "computed", replace(evidence, view=FeatureView("v", ("id",), (score,), 9, 0))
        )

    assert judged(lambda x: x + 0.5).passed
    # as everybody is
    assert judged(lambda x: (x - 1000) * 2).passed
    found = judged(lambda x: 10 * x)
    assert not found.passed
    assert "median 1.02e+04, passes from 5 to 96 (of the live rows 50.5)" in found.message


MOVED_SINCE = [check.figure for check in ANCHOR if check.figure.startswith("moved")]


@pytest.mark.parametrize("figure", MOVED_SINCE)
@pytest.mark.parametrize(("usually", "least"), [(0.02, ANCHOR_LEAST), (0.2, 0.2 * math.sqrt(5))])
def test_what_moved_in_a_week(
    of_tables: dict[int, dict[str, float]], figure: str, usually: float, least: float
) -> None:
    """More than a least share, and more than √nights times what usually moves in a night."""
    check = next(check for check in ANCHOR if check.figure == figure)
    is_less_worse = check.side == DOWN
    # chance makes next to nothing of a median
    limit = least
    if figure != "moved.turned":
        limit += 3.5 * math.sqrt(least * (1 - least) / ROWS)
    for kind in check.kinds:
        feature = OF_KIND[kind]
        nights = [{figure: 1 - usually if is_less_worse else usually}] * 8
        for value, passes in ((limit - 1e-6, True), (limit + 1e-6, False)):
            of_tables[ROWS + 2] = named({figure: 1 - value if is_less_worse else value})
            anchor = Pairs(rows(feature, ROWS + 2), rows(feature, ROWS + 2), 1.0, ROWS, 3)
            found = verdict("anchor", given(kind, {}, nights, anchor=anchor))
            assert found.passed == passes
            assert f"f: {check.words} " in found.message
            assert "since snapshot 3" in found.message


@pytest.mark.parametrize(
    ("figure", "nights", "passes", "fails"),
    [
        # √5 times a usual night's step, of which a week's least is more, and more than that
        ("spread", [1.0] * 8, math.exp(0.39), math.exp(0.41)),
        ("spread", [1.0, 1.5] * 4, 1.5 * 1.5 ** (-0.99 * math.sqrt(5)), 1.5 * 1.5**-2.3),
    ],
)
def test_what_rows_alone_were_in_the_anchors_night(
    of_tables: dict[int, dict[str, float]],
    figure: str,
    nights: list[float],
    passes: float,
    fails: float,
) -> None:
    of_tables[ROWS + 2] = {}
    feature = OF_KIND[NUMBER]
    anchor = Pairs(rows(feature, ROWS + 2), rows(feature, ROWS + 2), 1.0, ROWS, 3)
    for value, has_passed in ((passes, True), (fails, False)):
        before = [{figure: one} for one in nights]
        found = verdict("anchor", given(NUMBER, {figure: value}, before, anchor=anchor))
        assert found.passed == has_passed
        assert f"(in snapshot 3 {nights[3]:.4g})" in found.message


def test_a_share_that_never_was_0_or_1() -> None:
    def judged(value: float, *before: float) -> Verdict:
        return verdict("never", given(NUMBER, {"zero": value}, [{"zero": one} for one in before]))

    assert not judged(0.0, *[0.1] * 7).passed
    assert not judged(1.0, *[0.9] * 7).passed
    assert "share of zeros 0, which it was in none of 7 nights" in judged(0.0, *[0.1] * 7).message
    assert judged(0.001, *[0.1] * 7).passed
    assert judged(0.0, *[0.1] * 7, 0.0).passed
    # the end that it may not reach
    assert [judged(value, *[0.9] * 7).limit for value in (1.0, 0.95, 0.1, 0.0)] == [1, 1, 0, 0]
    # of amounts in cents no value is there twice: ``shape`` judges how many are
    assert "never" not in gates_of(given(NUMBER, {"distinct": 1.0}, [{"distinct": 0.9}] * 7))
    # of 400 rows, of which eight are expected, there may be none by chance
    assert judged(0.0, *[0.02] * 7).passed
    assert "never" not in gates_of(given(NUMBER, {"zero": 0.0}, [{"zero": 0.1}] * 6))
    # of which 40 are expected, and five times nine may be lacking
    assert verdict("never", given(NUMBER, {"zero": 0.0}, [{"zero": 0.1}] * 7), never=5).passed


# ---- what the configuration says of a feature


def test_a_feature_has_gates_of_its_own() -> None:
    far = given(NUMBER, {"p50": 100.0}, [{"p50": 0.0, "spread": 1.0}] * 14)
    assert not verdict("shape", far).passed
    assert "shape" not in gates_of(far, features={"f": {"shape": None}})
    assert verdict("shape", far, features={"f": {"shape": 1000}}).passed
    assert verdict("shape", far, shape=1000).passed
    # the view's hold where the feature has none
    assert not verdict("shape", far, shape=1, features={"f": {"moved": None}}).passed
    assert not verdict("shape", far, shape=None, features={"f": {"shape": 1}}).passed


BOUNDS: dict[str, tuple[dict[str, Any], Feature, list[Any], bool, str]] = {
    "in range": ({"range": [0, 5]}, OF_KIND[NUMBER], [0.0, 5.0], True, ""),
    "above": (
        {"range": [0, 5]},
        OF_KIND[NUMBER],
        [0.0, 5.1, None],
        False,
        "f: 5.1 is not within range [0, 5]; keys 1: 5.1",
    ),
    "below": (
        {"range": [0, 5]},
        OF_KIND[NUMBER],
        [5.0, -1.0, 9.5],
        False,
        "[0, 5], nor is one other; keys 2: 9.5; 1: -1",
    ),
    "eleven": (
        {"range": [0, 5]},
        OF_KIND[NUMBER],
        [0.0, *map(float, range(6, 17))],
        False,
        f"; keys {'; '.join(f'{i}: {i + 5}' for i in range(11, 1, -1))}",
    ),
    "a value": ({"values": ["a", "b"]}, OF_KIND[TEXT], ["a", "a"], True, ""),
    "others": (
        {"values": ["a"]},
        OF_KIND[TEXT],
        ["z", "y", "a"],
        False,
        "'y', 'z' are none of its values; keys 0: 'z'; 1: 'y'",
    ),
    "true": (
        {"values": [True]},
        OF_KIND[FLAG],
        [True, False, None],
        False,
        "'False' is none of its values; keys 1: False",
    ),
    "many": ({"distinct": [2, 3]}, OF_KIND[TEXT], ["a", "b", "c"], True, ""),
    "few": ({"distinct": [2, 3]}, OF_KIND[TEXT], ["a"], False, "1 different values, not 2 to 3"),
    "unique": ({"unique": True}, OF_KIND[NUMBER], [1.0, 2.0, None], True, ""),
    "twice": ({"unique": True}, OF_KIND[NUMBER], [1.0, 1.0], False, "1 of 2 values are there more"),
    "nulls": ({"null_share": 0.5}, OF_KIND[NUMBER], [None, 1.0], True, ""),
    "many nulls": (
        {"null_share": 0.4},
        OF_KIND[NUMBER],
        [None, 1.0],
        False,
        "share of nulls 0.5, more than null_share 0.4; keys 0: null",
    ),
    "all null": ({"range": [0, 1], "unique": True}, OF_KIND[NUMBER], [None], True, ""),
    "no number": ({"range": [0, 1]}, OF_KIND[NUMBER], [math.nan, math.nan], True, ""),
    "the largest": ({"range": [0, 1]}, Feature("f", "int64"), [2**63 - 1], False, "9.22337e+18 is"),
    "a list": ({"shape": 2, "null_share": 0.5}, OF_KIND[LIST], [[1], None], True, ""),
    "a vector": ({"shape": 2}, OF_KIND[VECTOR], [[1.0, 2.0]], True, ""),
    "vectors": ({"null_share": 0.4}, OF_KIND[VECTOR], [[1.0, 2.0], None], False, "of nulls 0.5"),
    "long": ({"values": ["a"]}, OF_KIND[TEXT], ["z" * 5000], False, f"'{'z' * 39}… is none of its"),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_a_features_own_bounds(case: str) -> None:
    """Of however few rows."""
    own, feature, values, passes, said = BOUNDS[case]
    table = pa.table({"id": range(len(values)), "f": pa.array(values, feature.arrow_type)})
    view = FeatureView("view", ("id",), (feature,), 3600.0, 0.0)
    _, found = judge_rows(
        Evidence(view, table, day(0)), GatesConfig.model_validate({"features": {"f": own}})
    )
    assert all(one.gate == "bounds" for one in found)
    assert all(one.passed for one in found) == passes
    message = "".join(one.message for one in found)
    assert message.endswith(said) if "keys" in said else said in message


# ---- what is announced, or of another recipe


def test_what_is_announced_warns() -> None:
    far = {"p50": 100.0, "null": 0.9}
    nights = [{"p50": 0.0, "null": 0.0, "spread": 1.0}] * 14
    for announced in ({"shape": None}, {"shape": frozenset({"f"})}):
        evidence = given(NUMBER, far, nights, announced=announced)
        shape, null = verdict("shape", evidence), verdict("null", evidence)
        assert (shape.passed, shape.warned, shape.figures) == (True, True, ("f.p50",))
        assert (null.passed, null.warned) == (False, False)
    other = given(NUMBER, far, nights, announced={"shape": frozenset({"g"})})
    assert not verdict("shape", other).passed


def test_another_recipe_is_told_what_changed_and_judged_by_itself() -> None:
    evidence = given(
        VECTOR, {"norm.p50": 9.0, "common": 0.5}, [{"norm.p50": 1.0}] * 14, alike=False
    )
    shape, first = verdict("shape", evidence), verdict("first", evidence)
    assert (shape.passed, shape.warned) == (True, True)
    assert (first.passed, first.warned) == (False, False)


def test_of_what_was_accepted_history_goes_on() -> None:
    """As far off may come again, and twice as far may not."""
    before = [Night(n, day(n), {"f.p50": 0.1 * (n % 2), "f.spread": 1.0}) for n in range(13)]
    accepted = Night(13, day(13), {"f.p50": 20.0, "f.spread": 1.0}, accepted=("f.p50",))
    for x, passes in ((20.2, True), (40.0, False), (-20.0, False), (0.1, True)):
        evidence = given(NUMBER, {"p50": x})
        nights = replace(evidence, nights=[*before, accepted], day=day(14))
        vars(nights)["figures"] = {"f.p50": x}
        assert verdict("shape", nights).passed == passes


# ---- real rows


SOUND: dict[str, tuple[Feature, Callable[[int], Any]]] = {
    "score": (Feature("score", "float32"), lambda i: float(np.sin(i * i * 7.3))),
    "count": (Feature("count", "int32"), lambda i: i * i % 7),
    "label": (Feature("label", "string"), lambda i: "abcde"[i * i % 11 % 5]),
    "flag": (Feature("flag", "bool"), lambda i: i * i % 7 < 2),
    "items": (
        Feature("items", "int64", max_items=4),
        lambda i: [i % 7, 10 + i % 11, 30 + i % 13, 50 + i % 3],
    ),
    "vector": (
        Feature("vector", "float32", dim=3),
        lambda i: [math.sin(i * i), math.cos(i * i * 3.1), math.sin(i * i * 1.7)],
    ),
    "text": (
        Feature("text", "string"),
        lambda i: f"word{i * 7 % 101} word{i * i % 53} number {i}",
    ),
}
"""Feature → its value in row ``i``."""
KEYS = 1000
Values = list[Any]

FAULTS: dict[str, tuple[str, Callable[[Values], Values], str]] = {
    # feature, what becomes of its values, and a gate that sees it, however young the view is
    "zeros": ("score", lambda v: [0.0] * len(v), "constant"),
    "nulls": ("score", lambda v: [None if i % 4 else x for i, x in enumerate(v)], "null"),
    "some nulls": ("score", lambda v: [x if i % 4 else None for i, x in enumerate(v)], "null"),
    "another sign": ("score", lambda v: [-x for x in v], "moved"),
    "times ten": ("score", lambda v: [10 * x for x in v], "shape"),
    "doubled": ("count", lambda v: [2 * x for x in v], "shape"),
    "off by one": ("score", lambda v: v[1:] + v[:1], "moved"),
    "one label": ("label", lambda v: ["a"] * len(v), "constant"),
    "no label": ("label", lambda v: [""] * len(v), "null"),
    "unknown labels": ("label", lambda v: ["unknown"] * len(v), "null"),
    "labels in another order": (
        "label",
        lambda v: ["eabcd"["abcde".index(x)] for x in v],
        "moved",
    ),
    "the other flag": ("flag", lambda v: [not x for x in v], "moved"),
    "no lists": ("items", lambda v: [[] for _ in v], "null"),
    "one list for all": ("items", lambda v: [[1, 2, 3, 4]] * len(v), "constant"),
    "lists of others": ("items", lambda v: v[1:] + v[:1], "moved"),
    "lists reversed": ("items", lambda v: [x[::-1] for x in v], "moved"),
    "lists cut": ("items", lambda v: [x[:1] for x in v], "shape"),
    "an item twice": ("items", lambda v: [x[:2] * 2 for x in v], "shape"),
    "zero vectors": ("vector", lambda v: [[0.0] * 3 for _ in v], "null"),
    "one vector": ("vector", lambda v: [v[0]] * len(v), "constant"),
    "vectors negated": ("vector", lambda v: [[-x for x in one] for one in v], "moved"),
    "a dimension negated": ("vector", lambda v: [[-a, b, c] for a, b, c in v], "moved"),
    "longer vectors": ("vector", lambda v: [[9 * x for x in one] for one in v], "shape"),
    "another key's vectors": ("vector", lambda v: v[1:] + v[:1], "moved"),
    "long texts": ("text", lambda v: [x * 9 for x in v], "shape"),
    "not a number of texts": ("text", lambda v: ["N/A"] * len(v), "constant"),
}
HISTORY = {
    # what a fixed bound allows and nights that were all the same do not
    "an offset": ("score", lambda v: [x + 0.5 for x in v], "moved"),
    "two labels for one": ("label", lambda v: ["a" if x == "b" else x for x in v], "moved"),
    "a third of others": ("vector", lambda v: v[1:334] + v[:1] + v[334:], "moved"),
    "a third of other lists": ("items", lambda v: v[1:334] + v[:1] + v[334:], "moved"),
    "other texts": ("text", lambda v: [x[::-1] for x in v], "moved"),
}


NIGHTS = 16
VIEW = FeatureView("view", ("id",), tuple(feature for feature, _ in SOUND.values()), 3600.0, 0.0)


@cache
def values_of(night: int, name: str) -> Values:
    """Of a feature in a night: scores drift a little, every fifteenth key's value is another."""
    _, of = SOUND[name]
    values = [of(i if (i + night) % 15 else i + 5000 + night) for i in range(KEYS)]
    if name == "score":
        values = [x + 0.05 * math.cos(i * night) for i, x in enumerate(values)]
    return values


def table(night: int, *names: str, become: Callable[[Values], Values] = list) -> pa.Table:
    """Of some features, or of all, the rows of a night, or what becomes of them."""
    columns: dict[str, Any] = {"id": range(KEYS)}
    for name in names or SOUND:
        values = become(list(values_of(night, name)))
        columns[name] = pa.array(values, SOUND[name][0].arrow_type)
    return pa.table(columns)


def evidence_of(now: pa.Table, live: pa.Table, nights: Sequence[Night], night: int) -> Evidence:
    """A full run, all of whose rows were computed again."""
    features = tuple(SOUND[name][0] for name in now.column_names[1:])
    pairs = Pairs(now, live, 1.0, KEYS, night - 1)
    view = replace(VIEW, features=features)
    return Evidence(view, now, day(night), now, live, pairs, None, nights)


@pytest.fixture(scope="module")
def history() -> list[Night]:
    """Sixteen ordinary nights, each of which was published."""
    nights: list[Night] = []
    live = table(0)
    first, verdicts = judge_rows(Evidence(VIEW, live, day(0)), GatesConfig())
    assert [one.message for one in verdicts if not one.passed] == []
    nights.append(Night(0, day(0), first))
    for n in range(1, NIGHTS):
        now = table(n)
        figures, verdicts = judge_rows(evidence_of(now, live, nights, n), GatesConfig())
        assert [one.message for one in verdicts if not one.passed or one.warned] == []
        nights.append(Night(n, day(n), figures))
        live = now
    return nights


@pytest.mark.parametrize("known", [1, NIGHTS], ids=["one night", "sixteen"])
def test_what_becomes_of_values_is_refused(history: list[Night], known: int) -> None:
    seen, faults = {}, FAULTS | (HISTORY if known == NIGHTS else {})
    for fault, (feature, become, _) in faults.items():
        live, now = table(known - 1, feature), table(known, feature, become=become)
        _, verdicts = judge_rows(evidence_of(now, live, history[:known], known), GatesConfig())
        seen[fault] = {one.gate for one in verdicts if not one.passed}
    assert {fault: of[2] for fault, of in faults.items() if of[2] not in seen[fault]} == {}


UNSEEN = ("some nulls", "doubled", "lists reversed", "an item twice")
"""What 40 rows may well be by chance, or are by one feature's figures alone."""


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in UNSEEN])
def test_garbage_in_a_small_delta_is_refused_in_its_first_night(
    history: list[Night], fault: str
) -> None:
    """Of 4 % of the rows, all of whose others are as they were."""
    feature, become, _ = FAULTS[fault]
    at = list(range(3, KEYS, 25))
    live = table(0, feature)
    bad = become([values_of(1, feature)[i] for i in at])
    values = list(values_of(0, feature))
    for place, value in zip(at, bad, strict=True):
        values[place] = value
    now = table(0, feature, become=lambda _: values)
    pairs = Pairs(now.take(at), live.take(at), len(at) / KEYS, KEYS, 0)
    evidence = replace(evidence_of(now, live, history[:1], 1), computed=now.take(at), pairs=pairs)
    found = verdict("computed", evidence)
    assert not found.passed
    assert f"{feature} of 40 rows computed: " in found.message


def test_a_refusal_shows_keys_and_their_values_before_and_after(history: list[Night]) -> None:
    live = table(15, "score")
    now = table(16, "score", become=lambda v: [10 * x for x in v])
    _, verdicts = judge_rows(evidence_of(now, live, history, 16), GatesConfig())
    refused = [one for one in verdicts if not one.passed]
    # once, and not by each gate that refuses the same rows
    (found,) = (one for one in refused if "; keys " in one.message)
    assert len(refused) > 1
    before, after = (of.column("score")[0].as_py() for of in (live, now))
    assert before != after
    assert " → " in found.message


@pytest.mark.parametrize("count", [0, 1, 3, 19])
def test_few_rows_are_judged_by_their_bounds_alone(count: int) -> None:
    """Whatever becomes of them, and whatever was known."""
    live, own = table(0).slice(0, count), {"features": {"score": {"range": [-2, 2]}}}
    nights = [Night(n, day(n), {"score.p50": 0.0, "label.null": 0.0}) for n in range(NIGHTS)]
    for become, passes in ((lambda v: [None] * len(v), True), (lambda v: [9.0] * len(v), False)):
        now = live.set_column(1, "score", pa.array(become(live["score"].to_pylist()), pa.float32()))
        pairs = Pairs(now, live, 1.0, count, 0)
        evidence = Evidence(VIEW, now, day(NIGHTS), now, live, pairs, pairs, nights)
        _, found = judge_rows(evidence, GatesConfig.model_validate(own))
        assert {(one.gate, one.passed) for one in found} <= {("bounds", passes)}
        assert bool(found) == (count > 0 and not passes)
        assert gates_of(evidence) == []


def test_rows_that_say_nothing_are_refused_by_nothing() -> None:
    """Of other keys, of nothing but nulls since ever."""
    nulls = table(1, "score", become=lambda v: [None] * len(v))
    nights = [Night(n, day(n), {"score.null": 1.0}) for n in range(NIGHTS)]
    found = evidence_of(nulls, nulls, nights, NIGHTS)
    assert [one for one in judge_rows(found, GatesConfig())[1] if not one.passed] == []
    none = table(0).slice(0, 0)
    others = Evidence(VIEW, table(0), day(1), table(0), table(0), Pairs(none, none, 0, 0, 0))
    assert [one for one in judge_rows(others, GatesConfig())[1] if not one.passed] == []


def test_a_feature_added_yesterday_is_as_young_as_that() -> None:
    nights = [Night(n, day(n), {"f.p50": 1.0}) for n in range(9)]
    before = [replace_figures(night, {"g.p50": 1.0}) for night in nights[:-1]] + nights[-1:]
    evidence = replace(given(NUMBER, {}), nights=before, day=day(9))
    vars(evidence)["figures"] = {"f.p50": 90.0}
    found = verdict("shape", evidence)
    assert not found.passed
    assert f"on {day(8)}" in found.message


def replace_figures(night: Night, figures: dict[str, float]) -> Night:
    return Night(night.number, night.day, figures)


def test_of_a_figure_with_gaps_the_nights_count_that_have_it() -> None:
    """Of six there is the last one alone: tonight is a Saturday, and that was a Sunday."""
    for has, said in ((7, "in all 7 nights before 1"), (6, f"on {day(6)} 1")):
        nights = [{"p50": 1.0, "spread": 1.0} if n % 2 == 0 else {} for n in range(2 * has)]
        found = verdict("shape", given(NUMBER, {"p50": 90.0}, nights))
        assert not found.passed
        assert f"({said})" in found.message
        assert verdict("shape", given(NUMBER, {"p50": 1.0}, nights)).passed
        # and what tonight has no figure of is not judged
        assert "shape" not in gates_of(given(NUMBER, {}, nights))


def test_a_weekday_that_was_always_announced_is_known_of_no_night() -> None:
    """Not announced, it is judged as the other days are; announced again, it warns."""
    usual, sale = ({"f.p50": x, "f.spread": 1.0} for x in (1.0, 90.0))
    nights = [
        Night(n, day(n), sale if n % 7 == 5 else usual, "a sale" if n % 7 == 5 else "")
        for n in range(33)
    ]
    assert date.fromisoformat(day(33)).weekday() == 5
    for figures, announced, passed, warned in (
        (sale, {}, False, False),
        (sale, {"shape": None}, True, True),
        (usual, {}, True, False),
    ):
        evidence = replace(given(NUMBER, {}), nights=nights, day=day(33), announced=announced)
        vars(evidence)["figures"] = figures
        found = verdict("shape", evidence)
        assert (found.passed, found.warned) == (passed, warned)
        assert "in all 28 nights before 1)" in found.message


def test_labels_that_all_differ_may_be_others_each_night() -> None:
    feature = Feature("f", "string")
    view = FeatureView("view", ("id",), (feature,), 3600.0, 0.0)
    then, now = (
        pa.table({"id": range(KEYS), "f": [f"label {i} of night {n}" for i in range(KEYS)]})
        for n in (1, 2)
    )
    figures, found = judge_rows(
        Evidence(view, now, day(1), now, then, Pairs(now, then, 1.0, KEYS, 1), None, ()),
        GatesConfig(),
    )
    assert figures["f.distinct"] == figures["f.moved.changed"] == figures["f.moved.unseen"] == 1
    assert [one.message for one in found if not one.passed] == []


@pytest.mark.parametrize(
    ("kind", "values"),
    [(NUMBER, [1.7e308, -1.7e308]), (NUMBERS, [[3e38, -3e38], [-3e38]])],
)
def test_the_largest_floats_have_figures(kind: str, values: list[Any]) -> None:
    """Those of scores are refused as overflows, by the first rows alone."""
    feature = OF_KIND[kind]
    view = FeatureView("view", ("id",), (feature,), 3600.0, 0.0)
    rows_now = pa.table(
        {"id": range(KEYS), "f": pa.array(values * (KEYS // 2), feature.arrow_type)}
    )
    rows_then = rows_now.set_column(1, "f", rows_now["f"].take(pa.array(range(KEYS - 1, -1, -1))))
    pairs = Pairs(rows_now, rows_then, 1.0, KEYS, 1)
    figures, found = judge_rows(
        Evidence(view, rows_now, day(1), rows_now, rows_then, pairs), GatesConfig()
    )
    assert all(map(math.isfinite, figures.values()))
    said = "f: share of overflows 1, passes up to 0.001"
    assert (said in "".join(one.message for one in found)) == (kind == NUMBER)


@pytest.mark.parametrize(
    ("keys", "rank", "passes"),
    [(30, 0.1, False), (30, 0.6, True), (100_000, 0.0, False), (100_000, 0.2, True)],
)
def test_of_many_keys_less_correlation_is_no_chance(keys: int, rank: float, passes: bool) -> None:
    """Noise that is another each night has some, rows that were mixed up have none."""
    evidence = given(NUMBER, {"moved.rank": rank})
    assert evidence.pairs is not None
    pairs = evidence.pairs
    evidence = replace(evidence, pairs=replace(pairs, common=keys))
    vars(evidence).update(figures={"f.moved.rank": rank}, live_figures={"f.distinct": 0.1})
    assert verdict("moved", evidence).passed == passes


def test_a_limit_is_no_value_that_a_figure_cannot_have() -> None:
    found = verdict("shape", given(LIST, {"length": 9.0}, [{"length": 0.2}] * 14))
    assert "mean length 9, passes up to " in found.message
    found = verdict("null", given(LIST, {"null": 0.9}, [{"null": 0.0}] * 14))
    assert "share of nulls 0.9, passes up to " in found.message
