"""Techniques by their door, where the power is not here."""

from __future__ import annotations

import re
from pathlib import Path

from precompute.store.doors import KNOWN
from precompute.techniques.table import words
from tests.doors.conftest import called, names_of, without_each_of
from tests.server import make_folder


@without_each_of("technique")
def test_its_techniques_say_so_at_the_key_that_names_one(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    without, copy = house
    for name in names_of(without, "technique")[:1]:
        precision, backend = words(name)
        model = {"use": "tests.models:Doubler", "precision": precision, "backend": backend}
        make_folder(tmp_path, {"numbers": {"model": model}})
        done = called(copy, "validate", "numbers", folder=tmp_path)
        assert (done.returncode, done.stderr) == (2, "")
        (line,) = done.stdout.splitlines()
        assert re.search(
            rf"numbers\.yaml:\d+: model\.backend: '{backend}': technique '{name}'", line
        ), line
        assert f"the plug-in {KNOWN['technique'][name].power}, which is not installed here" in line
