"""What every name of the doors leads to; and a house without a power, or without any: it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from precompute.store.doors import KNOWN, Door
from precompute.store.errors import ConfigError
from tests.doors.conftest import POWERS, weeks
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


def test_a_house_without_it_starts(house: tuple[str, Path], tmp_path: Path) -> None:
    _, copy = house
    make_folder(tmp_path, {"numbers": {}})
    weeks(copy, copy, tmp_path)
