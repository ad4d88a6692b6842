"""What every name of the doors leads to; and a house without a power, or without any: it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from precompute.store.doors import KNOWN, Door
from precompute.store.errors import ConfigError
from tests import REPOSITORY
from tests.doors.conftest import EVERY, POWERS, Install, weeks
from tests.server import make_folder


def test_every_name_leads_somewhere_and_every_power_has_a_name() -> None:
    """Of the powers that are here."""
    for door, ways in KNOWN.items():
        for name, way in ways.items():
            if way.power in POWERS:
                found = Door[Any](door).open(name)
                assert (door == "online") == (hasattr(found, "miss_cache")), name
                assert (door == "command") == way.target.startswith("command:"), name
    assert {way.power for ways in KNOWN.values() for way in ways.values()} >= set(POWERS)


def test_a_name_that_no_door_has_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^no command 'plam'; did you mean 'plan'\?$"):
        Door[Any]("command").open("plam")


@pytest.mark.parametrize("house", [EVERY], indirect=True)
def test_a_house_without_any_power_starts(house: tuple[str, Path], tmp_path: Path) -> None:
    """And serves. Of one without a single power architecture's arrows tell: no power imports
    another, and no room imports one."""
    _, copy = house
    make_folder(tmp_path, {"numbers": {}})
    weeks(copy, copy, tmp_path)


WRONG = """
from precompute.store import doors
for door in [one for one in vars(doors).values() if isinstance(one, doors.Door)]:
    try:
        print(door.name, door.open("wrong"))
    except doors.ConfigError as exc:
        print(exc)
"""


def test_what_another_packages_name_leads_to_is_looked_at(install: Install, tmp_path: Path) -> None:
    """A name may mean anything, and a route is looked at where they are put together."""
    points = "".join(f"{door.replace(' ', '-')}.wrong = others:wrong\n" for door in KNOWN)
    site = install({"others.py": "wrong = 3\n"}, points)
    done = subprocess.run(
        [sys.executable, "-P", "-c", WRONG],
        env=os.environ | {"PYTHONPATH": f"{site}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = dict(line.split(" 'wrong' ") for line in done.stdout.splitlines() if "'wrong'" in line)
    assert done.stderr == ""
    assert {*KNOWN} - {*told} == {"name", "route"}
    for door, line in told.items():
        assert line.startswith("leads to others:wrong, which is none: it has no "), door
        assert line.endswith("; mend that package, or take it out"), door
