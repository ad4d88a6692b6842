"""Another package's model behind a view's misses: a key of ``fallback``, what the run tries and
judges, and what rows say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doors.conftest import Install, called
from tests.server import make_folder, write_numbers

DICE = """
import pyarrow as pa
from precompute.jobs.config.open_section import Keys
from precompute.jobs.run.rows.substitute import Agreed, Comparison
from precompute.model import model_fingerprint
from precompute.registry import load_with_fingerprint
from precompute.store.answers.fallback import Column
from precompute.store.errors import ConfigError
from precompute.store.feature_view import ModelUse, Substitute

KEY, USE = "fallback.dice", "tests.models:Doubler"

class DiceKeys(Keys):
    '''A die behind misses.'''
    dice: int | None = None

    def spec(self):
        return {} if self.dice is None else {KEY: self.dice}

    def columns(self):
        return ["pips"]

    def misses_by(self):
        return KEY

    @classmethod
    def substitute(cls, view, folder):
        if view.powers[KEY] > 6:
            raise ConfigError("fallback.dice: a die has six sides")
        return Die(view)

class CoinKeys(DiceKeys):
    dice: None = None
    coin: int | None = None

    def spec(self):
        return {} if self.coin is None else {"fallback.coin": self.coin}

    def columns(self):
        return ["heads"]

    def misses_by(self):
        return "fallback.coin"

class Die:
    def __init__(self, view):
        self.pips, self.view = view.powers[KEY], view

    @property
    def use(self):
        args = {"version": 10 + self.pips}
        _, own = load_with_fingerprint(USE, args, None)
        agreed = dict.fromkeys(self.view.feature_names, 0.5)
        return Substitute(ModelUse(USE, args), model_fingerprint(own, USE, "fp32", {}), agreed)

    def check_approximates(self, fingerprint):
        pass

    def check_fits(self, opened, source):
        pass

    def compare_rows(self, opened, source, sample):
        bad = self.pips == 1
        return Comparison(len(sample), agreed=[Agreed("double", 0.9, 0.8, not bad, "it rolled")])

    def words(self):
        return f"a die that fell on {self.pips}"

class DiceMisses:
    columns = (Column("pips", pa.int64(), "of a row that a die computed: how it fell"),)

    def __init__(self, tools):
        pass

    def submit(self, pointer, keys, inputs, deadline, oldest_s, rest):
        return rest(keys, inputs)

    def close(self):
        pass

    @staticmethod
    def says(pointer):
        return {"pips": pointer.view.powers[KEY]}

    @staticmethod
    def words(spec):
        return f"a die ({spec})"
"""


@pytest.fixture
def package(install: Install) -> Path:
    return install(
        {"dice.py": DICE},
        "view-key.fallback.dice = dice:DiceKeys\nmisses.fallback.dice = dice:DiceMisses\n"
        "view-key.fallback.coin = dice:CoinKeys\n",
    )


def test_another_packages_model_computes_misses(package: Path, tmp_path: Path) -> None:
    def have(pips: int) -> None:
        fallback = {"enabled": True, "deadline": "20s", "dice": pips}
        few = {"first": None, "rows": None}
        make_folder(tmp_path, {"numbers": {"fallback": fallback, "gates": few, "index": None}})

    def said(*arguments: str) -> list[str]:
        done = called(package, *arguments, folder=tmp_path)
        return [str(done.returncode), *(done.stdout + done.stderr).splitlines()]

    write_numbers(tmp_path, range(200))
    have(7)
    assert said("run", "numbers") == [
        "2",
        "precompute: view 'numbers': fallback.dice: a die has six sides",
    ]
    have(1)
    status, *told = said("run", "numbers")
    assert status == "3"
    assert any("parity: it rolled" in line for line in told)
    have(2)
    assert any("a die that fell on 2" in line for line in said("validate", "numbers"))
    assert said("run", "numbers")[0] == "0"
    write_numbers(tmp_path, range(201))

    def row(key: str) -> dict[str, Any]:
        done = called(package, "lookup", "numbers", key, "--fallback", "--json", folder=tmp_path)
        (found,) = json.loads(done.stdout)["rows"]
        return found

    stored, computed = row("7"), row("200")
    assert (stored["status"], "pips" in stored) == ("fresh", False)
    assert (computed["status"], computed["pips"]) == ("computed", 2)
    assert computed["model"] != stored["model"]
    silent = DICE.replace('return {"pips"', 'raise RuntimeError("lost")\n        return {"pips"')
    (package / "dice.py").write_text(silent)
    computed = row("200")
    assert (computed["status"], computed.get("pips")) == ("computed", None)


def test_two_that_would_compute_the_same_misses_are_refused(package: Path, tmp_path: Path) -> None:
    fallback = {"enabled": True, "dice": 2, "coin": 1}
    make_folder(tmp_path, {"numbers": {"fallback": fallback}})
    (line,) = called(package, "validate", "numbers", folder=tmp_path).stdout.splitlines()
    assert "computes misses in the model's stead: take one out" in line
    assert "numbers.yaml:" in line
