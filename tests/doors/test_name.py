"""What users import of ``precompute`` by the door of names, and what it says without the power."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from precompute.store.doors import NAMES
from tests import REPOSITORY
from tests.doors.conftest import names_of, without_each_of
from tests.server import make_folder

OPENS = """
import precompute
from precompute import *
print(Client.__name__)
for tried in (lambda: precompute.open(".").views, lambda: precompute.OpenProject.__name__):
    try:
        print(tried())
    except precompute.ConfigError as exc:
        print(exc)
"""


@without_each_of("name")
def test_a_project_is_opened_or_says_in_a_line_that_it_is_not_here(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    without, copy = house
    make_folder(tmp_path, {"numbers": {}})
    done = subprocess.run(
        [sys.executable, "-P", "-c", OPENS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{copy}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told = (
        "name 'precompute.OpenProject' comes with the plug-in notebook, which is not installed here"
        " (no folder precompute/plugins/notebook): install precompute-store again, which has it, or do without"
        " 'precompute.OpenProject'"
    )
    name = "precompute.OpenProject"
    is_here = NAMES.is_here(name) and name not in names_of(without, "name")
    said = [told, told] if not is_here else ["['numbers']", "OpenProject"]
    assert (done.stdout.splitlines(), done.stderr) == (["Client", *said], "")
