"""Nights: what is usual of a figure, and how far from it tonight's may be."""

from __future__ import annotations

from datetime import date, timedelta

import numpy as np
import pytest

from precompute.jobs.run.judge.nights import (
    Night,
    Usual,
    Value,
    anchor_of,
    anchors_of,
    appended,
    counted,
    last_alike,
    usual,
    weekday,
)
from precompute.store.offline.segment import Part

MONDAY = date(2026, 11, 2)


def day(n: int) -> str:
    """The date of so many days after a Monday."""
    return (MONDAY + timedelta(days=n)).isoformat()


def values(*of: float) -> list[Value]:
    """One a day from a Monday on."""
    return [Value(day(n), float(value)) for n, value in enumerate(of)]


@pytest.mark.parametrize(
    ("nights", "k"),
    [(7, 17.2), (14, 7.2), (21, 6.1), (28, 5.5), (10, 17.2 - 3 / 7 * 10), (35, 5.5)],
)
def test_how_far_follows_from_the_number_of_nights(nights: int, k: float) -> None:
    """k(n) standard deviations of all nights but the farthest, from their median; and what was once
    may come again, from fourteen nights on."""
    random = np.random.default_rng(nights)
    x = np.append(random.normal(size=nights - 1), 1000.0)
    center = np.median(x)
    found = usual(values(*x), "a partition that is no date")
    reach = k * (x[:-1] - center).std(ddof=1)
    above = reach if nights < 14 else 1000.0 - center
    assert found == pytest.approx(Usual(center, reach, above, nights))


def test_nights_that_are_mostly_the_one_before_say_as_much_as_fewer() -> None:
    """A walk of 28 nights says what ten independent ones do, and so does a mean of 30 days."""
    x = np.cumsum(np.random.default_rng(5).normal(size=28))
    found = usual(values(*x), "no date")
    off = x - np.median(x)
    reach = (17.2 - 3 / 7 * 10) * np.delete(off, np.abs(off).argmax()).std(ddof=1)
    assert found == pytest.approx(Usual(float(np.median(x)), reach, reach, 28))


def test_some_figures_may_be_farther_off_than_in_the_farthest_night() -> None:
    """From fourteen nights on, to the side that it was, and not as what was accepted was."""
    nights = values(*[0.0, 0.01] * 6, 0.0, 1.0)
    plain, far = usual(nights, "no date"), usual(nights, "no date", farthest=2.5)
    assert plain is not None
    assert far is not None
    assert plain.above == pytest.approx(1.0 - 0.005)
    assert far.above == pytest.approx(2.5 * (1.0 - 0.005))
    assert far.below == plain.below < 0.1
    assert usual(nights[1:], "no date", farthest=2.5) == usual(nights[1:], "no date")


def test_of_fewer_than_seven_nights_nothing_is_usual() -> None:
    assert usual(values(*range(6)), day(6)) is None
    assert usual([], day(0)) is None
    assert usual(values(*range(7)), day(8)) is not None


def test_what_was_the_same_each_night_may_be_off_by_the_floor() -> None:
    assert usual(values(*[3.0] * 20), day(20), 0.25) == Usual(3.0, 0.25, 0.25, 20)
    assert usual(values(*[3.0] * 20), day(20)) == Usual(3.0, 0.0, 0.0, 20)


WEEK = [0.0, 0.0, 0.0, 0.0, 0.0, 10.0, 12.0]


def test_a_weekday_is_compared_with_its_own_where_that_tells_more() -> None:
    noise = np.random.default_rng(1).normal(scale=0.1, size=28)
    x = np.tile(WEEK, 4) + noise
    found = usual(values(*x), day(28 + 6), 0.01)
    assert found is not None
    assert found.center == pytest.approx(np.median(x[6::7]))
    medians = np.array([np.median(x[n::7]) for n in range(7)])
    off = x - np.tile(medians, 4)
    # a median of each of seven weekdays is taken of 28
    assert max(found.below, found.above) == pytest.approx(
        5.5 * np.delete(off, np.abs(off).argmax()).std(ddof=1) * np.sqrt(27 / 21)
    )
    # with less than two weeks, or one such day, a week is no week
    for few in (x[:13], x[:7]):
        other = usual(values(*few), day(20), 0.01)
        assert other is not None
        assert other.center == np.median(few)
    # nor where days differ as much as weekdays do
    plain = usual(values(*noise), day(28), 0.01)
    assert plain is not None
    assert plain.center == np.median(noise)


def test_what_was_accepted_may_come_again() -> None:
    """As far off as it was and as far again as any night may be, to its side alone."""
    nights = values(*np.tile([1.0, -1.0], 6), 50.0)
    plain = usual(nights, "no date", 0.5)
    accepted = usual([*nights[:-1], nights[-1]._replace(is_accepted=True)], "no date", 0.5)
    assert plain is not None
    assert accepted is not None
    assert accepted.below == plain.below == plain.above
    assert accepted.above == pytest.approx(50 - plain.center + plain.above)


def test_what_its_weekday_was_may_come_again_and_half_as_far_again() -> None:
    nights = values(*[0.0] * 8, 8.0, *[0.0] * 4)  # a Tuesday
    on_tuesday, on_sunday = (usual(nights, day(n), 0.5) for n in (15, 13))
    assert on_tuesday == Usual(0.0, 0.5, 12.0, 13)
    assert on_sunday == Usual(0.0, 0.5, 0.5, 13)


def test_the_nights_that_are_counted() -> None:
    nights = [
        Night(n, day(n), {"f": float(n)} if n % 2 else {}, "sale" if n == 5 else "")
        for n in range(70)
    ]
    found = counted(nights, "f")
    # the newest 28 with the figure that were not announced
    assert [one.value for one in found] == [float(n) for n in range(1, 70, 2) if n != 5][-28:]
    accepted = [Night(1, day(1), {"f": 1.0, "g": 2.0}, accepted=("f",))]
    assert counted(accepted, "f") == [Value(day(1), 1.0, True)]
    assert counted(accepted, "g") == [Value(day(1), 2.0)]
    assert counted(accepted, "h") == counted([], "f") == []


def test_the_last_night_like_tonight() -> None:
    week = values(*range(7))
    assert last_alike(week, day(9)).value == 2  # a Wednesday as the one before
    assert last_alike(week[:5], day(8)).value == 1
    assert last_alike(week[:3], day(4)).value == 2  # no Friday yet
    assert last_alike(week[:6], day(6)).value == 5  # a Sunday is like a Saturday
    assert last_alike(week[:4], day(5)).value == 3  # no weekend yet
    assert last_alike(values(1.0, 2.0), "no date").value == 2


def test_of_a_day_the_newest_night_is_kept_and_no_more_than_are_read() -> None:
    nights: tuple[Night, ...] = ()
    for n in range(40):
        nights = appended(nights, Night(n, day(n // 2), announced="sale" if n // 2 == 3 else ""))
    assert [one.number for one in nights] == list(range(1, 40, 2))
    for n in range(40, 100):
        nights = appended(nights, Night(n, day(n)))
    assert [one.number for one in nights] == list(range(100 - 29, 100))
    # what was announced takes no place of what counts
    for n in range(100, 110):
        nights = appended(nights, Night(n, day(n), announced="sale"))
    assert len([one for one in nights if not one.announced]) == 28


def test_a_clock_set_back_makes_a_night_of_that_day() -> None:
    nights = appended(appended((), Night(1, day(5))), Night(2, day(2)))
    assert [one.number for one in nights] == [1, 2]
    assert [one.number for one in appended(nights, Night(3, day(5)))] == [2, 3]


def part(n: int) -> Part:
    return Part(f"data/{n}/anchor.parquet", 1, 1, "")


def test_rows_are_kept_of_a_week() -> None:
    nights: tuple[Night, ...] = ()
    for n in range(12):
        nights = appended(nights, Night(n, day(n), rows=part(n)))
    assert [one.number for one in nights if one.rows is not None] == list(range(5, 12))
    # the new night's own is the seventh
    assert anchors_of(nights) == tuple(part(n) for n in range(6, 12))


def test_tonight_is_compared_with_the_same_weekday_a_week_ago() -> None:
    def anchor(*days: int, tonight: int) -> int | None:
        night = anchor_of([Night(n, day(n), rows=part(n)) for n in days], day(tonight))
        return None if night is None else night.number

    assert anchor(*range(7), tonight=7) == 0
    # before a week is over: the oldest day of the week, or of the weekend
    assert anchor(0, 1, 2, tonight=3) == 0
    assert anchor(3, 4, 5, tonight=6) is None
    assert anchor(5, 6, tonight=7) is None
    # last night is compared with by itself
    assert anchor(0, tonight=1) is None
    assert anchor_of([], day(0)) is None
    announced = [Night(n, day(n), {}, "sale" if n == 0 else "", rows=part(n)) for n in range(7)]
    assert anchor_of(announced, day(7)) is None


def test_weekdays() -> None:
    assert [weekday(day(n)) for n in (0, 6, 7)] == [0, 6, 0]
    assert weekday("2026-11-02T03:00:00Z") == 0
    assert weekday("2026-11") is None
    assert weekday("") is None
