"""Techniques by their door, where the power is not here."""

from __future__ import annotations

import re
from pathlib import Path

from precompute.store.doors import KNOWN
from precompute.techniques.table import words
from tests.doors.conftest import Install, called, called_each, names_of, without_each_of
from tests.fixtures import MakeProject
from tests.jobs.test_converted_view import LOOSE, ROWS, torch_project
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


# ---- another package's


EAGER = """
from precompute.techniques.technique import Technique, module_of
class Eager(Technique):
    def missing(self, device): return ""
    def gain(self, device, model): return 1.1
    def converted(self, model, batches, folder): return module_of(model, self.dtype, batches)
"""


def test_another_packages_technique_is_one_like_ours(
    install: Install, make_project: MakeProject
) -> None:
    site = install(
        {"others_technique.py": EAGER},
        "technique.bf16-mine = others_technique:Eager\n"
        "technique.bf16-gone = others_technique:nothing_of_this_name\n",
    )
    said = dict[str, str]()
    for backend, commands in (("mine", ["validate", "run"]), ("gone", ["validate"])):
        chosen = {"precision": "bf16", "backend": backend, "accuracy": LOOSE}
        project = torch_project(make_project, ROWS, view=chosen)
        given = [("-c", str(project.folder), command, "numbers") for command in commands]
        validated, *ran = called_each(site, *given, folder=project.folder)
        for done in (validated, *ran):
            assert done.returncode == (0 if backend == "mine" else 2), done.stdout + done.stderr
        (said[backend],) = [line for line in validated.stdout.splitlines() if "bf16-" in line]
        if ran:
            use = project.snapshot().view.definition.model
            assert (use.precision, use.backend) == ("bf16", "mine")
            assert len(project.rows()) == len(ROWS)
    assert said["mine"].endswith("; in float32, where a run computes by bf16-mine")
    assert re.sub(r".*views/numbers.yaml:\d+: ", "", said["gone"]) == (
        "model.backend: technique 'bf16-gone' of others_technique:nothing_of_this_name cannot be"
        " loaded: AttributeError: module 'others_technique' has no attribute"
        " 'nothing_of_this_name'; mend that package, or take it out"
    )
