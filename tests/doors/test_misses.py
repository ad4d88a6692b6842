"""What answers misses, and what it counts, by their doors: ours where the power is not here, and
another package's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from precompute.store.doors import KNOWN, ROUTES
from tests import REPOSITORY
from tests.doors.conftest import Install, names_of, without_each_of

ASKS = """
import json, logging, sys
from pathlib import Path
from precompute.store.answers.service import Service, ServicePart
from precompute.store.http.app import create_app
from precompute.store.wire.bodies import ARROW
from tests.world import LOOKUP, World

logging.basicConfig(stream=sys.stderr, format="%(message)s")
folder, powers, *keys = sys.argv[1:]
world = World(Path(folder), {"new": 1.0}, powers=json.loads(powers))
world.model.known = frozenset(keys)
world.app = create_app(world.lookup, fallback_ready=lambda pointer: True)
service = Service("one", ("id",), (ServicePart("things", ("double",)),))
said = ("status", "source", "guess", "whose", "coin")

def short(rows, view=""):
    return [[row.get(view + name) for name in said] for row in rows]

table = world.lookup.get("things", keys)
print(json.dumps({
    "columns": {field.name: str(field.type) for field in list(table.schema)[9:]},
    "ways": [
        short(table.to_pylist()),
        short(world.post(LOOKUP, {"keys": keys}, accept=ARROW).arrow.to_pylist()),
        short(world.post(LOOKUP, {"keys": keys}).json["rows"]),
        short(world.lookup.service(service, {"id": keys}).to_pylist(), "things__"),
    ],
    "document": world.get("/openapi.json").json["components"]["schemas"]["Row"]["properties"],
    "view": world.get("/v1/views").json["views"][0],
    "metrics": world.get("/metrics").body.decode(),
    "page": world.get("/").body.decode(),
}))
"""
"""What an application says of a view with these powers, whose model knows all keys: the columns
that its rows have behind the usual ones, the rows by each way, and what operators are shown."""


class Said(NamedTuple):
    told: dict[str, Any]
    log: list[str]


def asked(first: Path, folder: Path, powers: dict[str, Any], *keys: str) -> Said:
    """What :data:`ASKS` prints and logs, with ``first`` before all else on Python's path."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASKS, str(folder), json.dumps(powers), *keys],
        env=os.environ | {"PYTHONPATH": f"{first}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return Said(json.loads(done.stdout), done.stderr.splitlines())


STORED = ["fresh", "store", None, None, None]
COMPUTED = ["computed", "fallback", None, None, None]


@without_each_of("misses", "metrics")
def test_a_view_whose_record_names_it_is_served_without(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    without, copy = house
    for name in names_of(without, "misses"):
        told, log = asked(copy, tmp_path, {name: {"view": "others", "threshold": 0.9}}, "new", "a")
        assert told["ways"] == [[STORED, COMPUTED]] * 4
        power = KNOWN["misses"][name].power
        (line,) = log
        assert line.startswith(
            "view 'things' is served without what its record names: view key"
            f" {name!r} comes with the plug-in {power}, which is not installed here"
        )
        assert name not in told["view"]
        assert f"precompute_{name}_" not in told["metrics"]


# ---- another package's


GUESSES = """
import pyarrow as pa
from precompute.jobs.config.open_section import Keys
from precompute.store.answers.fallback import Column, Computed
from precompute.store.http.telemetry.instruments import CacheFigures, Instrument, Kind
from precompute.store.wire.lookup_options import LookupOptions

class GuessKeys(Keys):
    '''By which row misses are guessed.'''
    guess: str | None = None

    def spec(self):
        return {"guess": self.guess}

    def columns(self):
        return ["guess", "whose"]

class Guess:
    columns = (
        Column("guess", pa.float64(), "of a row that was guessed: how surely"),
        Column("whose", pa.string(), "of such a row: whose it is"),
    )

    def __init__(self, tools):
        self._tools = tools

    def submit(self, pointer, keys, inputs, deadline, oldest_s, rest):
        if "boom" in keys:
            raise RuntimeError("no guess today")
        if "few" in keys:
            return []
        near = [key for key in keys if key.startswith("near")]
        futures = dict(zip(others := [key for key in keys if key not in near], rest(others, inputs)))
        name, whose = pointer.view.name, pointer.view.powers["guess"]
        answer = self._tools.begin(name, [whose], LookupOptions(fallback=False))
        for key in near:
            says = {"guess": 0.5, "whose": whose}
            row, at_us = bytes(answer.packed_row(0)), answer.computed_at_us(0)
            futures[key] = done(Computed(row, at_us, says, stored=True))
        self._tools.count("precompute_guess_rows", len(near), name)
        return [futures[key] for key in keys]

    def close(self):
        pass

    @staticmethod
    def words(spec):
        return f"guesses by {spec}"

class Coin(Guess):
    columns = (Column("coin", pa.bool_(), "of a row that a coin decided on: how it fell"),)

    def submit(self, pointer, keys, inputs, deadline, oldest_s, rest):
        futures = rest(keys, inputs)
        return [
            done(Computed(future.result().row, future.result().computed_at_us, {"coin": True}))
            if key.startswith("coin") else future
            for key, future in zip(keys, futures)
        ]

class Taken(Guess):
    columns = (Column("status", pa.string(), "what is said already"),)

def done(computed):
    from concurrent.futures import Future
    future = Future()
    future.set_result(computed)
    return future

class GuessFigures:
    instruments = (Instrument("precompute_guess_rows", Kind.COUNTER, "Rows guessed", ("view",)),)

    @classmethod
    def caches(cls, counts):
        for (view,), rows in counts(cls.instruments[0]).items():
            yield CacheFigures("guesses of", view, rows, 0.0, "calls saved", "")

class Strange:
    instruments = (Instrument("precompute_lookup_rows", Kind.COUNTER, "Rows answered", ("view",)),)
    caches = GuessFigures.caches
"""
POINTS = """
view-key.guess = others_guess:GuessKeys
view-key.coin = others_guess:GuessKeys
view-key.taken = others_guess:GuessKeys
misses.guess = others_guess:Guess
misses.coin = others_guess:Coin
metrics.guess = others_guess:GuessFigures
"""


@pytest.fixture
def package(install: Install) -> Path:
    return install({"others_guess.py": GUESSES}, POINTS)


def test_another_packages_answer_to_misses_is_one_like_ours(package: Path, tmp_path: Path) -> None:
    told, log = asked(package, tmp_path, {"guess": "new"}, "new", "near", "far")
    assert told["ways"] == [[STORED, ["fresh", "cache", 0.5, "new", None], COMPUTED]] * 4
    assert told["columns"] == {"guess": "double", "whose": "string", "double": "double"} | {
        "vector": "fixed_size_list<item: float>[2]"
    }
    assert {name: told["document"][name] for name in ("guess", "whose")} == {
        "guess": {"description": "of a row that was guessed: how surely", "type": "number"},
        "whose": {"description": "of such a row: whose it is", "type": "string"},
    }
    assert told["view"]["guess"] == "new"
    # one in each of the four ways
    assert 'precompute_guess_rows_total{view="things"} 4.0' in told["metrics"].splitlines()
    assert log == []
    if ROUTES.is_here("/"):
        assert "the model answers misses, or guesses by new" in told["page"]
        assert "guesses of <code>things</code>" in told["page"]


def test_two_bring_their_columns_and_answer_one_after_the_other(
    package: Path, tmp_path: Path
) -> None:
    told, _ = asked(package, tmp_path, {"guess": "new", "coin": 1}, "near", "coin", "far")
    rows = [["fresh", "cache", 0.5, "new", None], [*COMPUTED[:4], True], COMPUTED]
    assert told["ways"] == [rows] * 4
    assert list(told["columns"]) == ["guess", "whose", "coin", "double", "vector"]


def test_one_that_fails_or_is_gone_leaves_misses_to_the_model(
    package: Path, tmp_path: Path
) -> None:
    for key in ("boom", "few"):
        told, log = asked(package, tmp_path, {"guess": "new"}, key)
        assert told["ways"] == [[COMPUTED]] * 4
        assert log.count("Guess cannot answer misses of view 'things'; it goes on without") == 4
    told, log = asked(REPOSITORY, tmp_path, {"guess": "new"}, "near")
    assert (told["ways"], "guess" in told["columns"]) == ([[COMPUTED]] * 4, False)
    assert log == [
        "view 'things' is served without what its record names: view key 'guess' comes with another"
        " package, which is not installed here: install that, or do without 'guess'"
    ]


def test_what_cannot_be_used_is_told_in_a_line(package: Path, tmp_path: Path) -> None:
    points = package / "others-1.0.dist-info" / "entry_points.txt"
    more = "misses.taken = others_guess:Taken\nmisses.twin = others_guess:Guess\n"
    points.write_text(f"{points.read_text()}view-key.twin = others_guess:GuessKeys\n{more}")
    told, log = asked(package, tmp_path, {"taken": 1}, "near")
    assert told["ways"] == [[COMPUTED]] * 4
    assert log == [
        "view 'things' is served without what its record names: misses 'taken': its column 'status'"
        " is there already: call it otherwise, or what has that name"
    ]
    told, log = asked(package, tmp_path, {"guess": "new", "twin": 1}, "near")
    assert list(told["columns"]) == ["guess", "whose", "double", "vector"]
    assert "misses 'twin': its column 'guess' is there already" in log[0]
    points.write_text(points.read_text().replace(":GuessFigures", ":Strange"))
    with pytest.raises(AssertionError, match="'precompute_lookup_rows' is no name for an instrum"):
        asked(package, tmp_path, {}, "near")
