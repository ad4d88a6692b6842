"""Code that changes under the same fingerprint: told, decided by unchanged rows, refused where they
come out otherwise, on this host and on others."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from precompute.jobs.run.shards import coordinator as coordinator_module
from precompute.jobs.run.shards import worker as worker_module
from precompute.jobs.run.shards.worker import work
from precompute.jobs.serve.fallback import ViewFallback
from precompute.store.errors import ConfigError, GateError
from precompute.store.times import Partition
from tests.fixtures import MakeProject
from tests.scene import Scene

MODEL = """
import numpy as np
import factors

class Times:
    def fingerprint(self):
        return "times {version}"

    def compute(self, batch):
        return {{"double": np.asarray(batch.column("x")) * factors.FACTOR}}
"""
ROWS = [(i, float(i)) for i in range(200)]
VIEW = {
    "model": {"use": "mine:Times"},
    "features": {"double": {"dtype": "float64"}},
    "gates": {"moved": None, "shift": None},
}


def write(folder: Path, factor: str = "2", version: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(MODEL.format(version=version))
    (folder / "factors.py").write_text(f"FACTOR = {factor}\n")


def day(text: str) -> Partition:
    start = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return Partition(start, start + timedelta(days=1))


@pytest.fixture
def scene(make_project: MakeProject) -> Scene:
    write(make_project(ROWS, view=VIEW).folder)
    scene = make_project(ROWS, view=VIEW)
    scene.run()
    assert {*scene.snapshot().code} == {"mine.py", "factors.py", "numpy"}
    return scene


def test_equal_values_are_told_and_the_run_goes_on(scene: Scene, make_project: MakeProject) -> None:
    write(scene.folder, "1 + 1")
    told = (
        "the code of the model changed (factors.py changed), and its fingerprint did not: 64"
        " unchanged rows of snapshot 1 were computed again, and are equal"
    )
    # told once, though nothing is to be computed, so that no manifest has the new code
    for attention in ([told], [], []):
        report = scene.run()
        assert (report.status, report.attention) == ("current", attention)
        assert ("code" in report.stages_s) == (attention != [])
        assert report.code != scene.snapshot().code
    # another one is told again, and that one is known when it is back
    for factor, attention in (("3 - 1", [told]), ("1 + 1", []), ("3 - 1", [])):
        write(scene.folder, factor)
        assert scene.reread().run().attention == attention
    # what was told is no licence for other values
    write(scene.folder, "3")
    with pytest.raises(GateError, match="come out otherwise"):
        scene.reread().run()
    write(scene.folder, "4 - 2")
    report = make_project([*ROWS, (200, 7.0)], view=VIEW).run()
    assert (report.status, report.counts["written"], report.attention) == ("published", 1, [told])
    assert scene.doubles()[200] == 14.0
    # the new snapshot has the new code
    assert make_project([*ROWS, (200, 8.0)], view=VIEW).run().attention == []


def test_other_values_are_refused_and_both_ways_out_work(
    scene: Scene, make_project: MakeProject
) -> None:
    write(scene.folder, "3")
    for rows in (ROWS, [*ROWS, (200, 7.0)]):
        with pytest.raises(
            GateError,
            match=r"the code of the model changed \(factors\.py changed\), and its fingerprint did"
            r" not: of 64 unchanged rows of snapshot 1 that were computed again 6[34] come out"
            r" otherwise \(the first, key '\d+': double .*\)\. Nothing was computed, and the live"
            r" snapshot stays\. Have fingerprint\(\) of mine:Times return another text, .* or put"
            r" the code back as it was$",
        ):
            make_project(rows, view=VIEW).run()
    assert (scene.numbers(), scene.live().snapshot) == ([1], 1)
    assert scene.cli("run", "numbers") == 3
    # back as it was
    write(scene.folder)
    assert make_project([*ROWS, (200, 7.0)], view=VIEW).run().counts["written"] == 1
    # or another fingerprint
    write(scene.folder, "3", version=2)
    report = scene.reread().run()
    assert (report.counts["written"], report.attention) == (201, [])
    assert scene.doubles() == {key: x * 3 for key, x in [*ROWS, (200, 7.0)]}


def test_a_run_that_is_killed_while_it_compares_is_as_if_it_had_not_begun(
    scene: Scene, make_project: MakeProject
) -> None:
    """Each time; and the run after it compares, tells and commits."""
    live, flag = scene.live(), scene.folder / "kill"
    write(scene.folder, "1 + 1")
    model = scene.folder / "mine.py"
    model.write_text(
        model.read_text().replace(
            "        return {",
            f"        if __import__('os').path.exists({str(flag)!r}):\n"
            "            __import__('os').kill(__import__('os').getpid(), 9)\n        return {",
        )
    )
    command = [
        sys.executable,
        "-m",
        "precompute.jobs.cli",
        "-c",
        str(scene.folder),
        "run",
        "numbers",
    ]
    flag.touch()
    project = make_project([*ROWS, (200, 7.0)], view=VIEW)
    for _ in range(2):
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (killed.returncode, killed.stdout) == (-9, "")
        assert (project.live(), project.numbers()) == (live, [1])
        assert project.status()["last_run"]["status"] == "killed"
    flag.unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "64 unchanged rows of snapshot 1 were computed again, and are equal" in done.stderr
    assert project.doubles() == {key: x * 2 for key, x in [*ROWS, (200, 7.0)]}
    assert project.cli("verify") == 0


def test_every_row_by_the_new_code_needs_no_comparison(scene: Scene) -> None:
    write(scene.folder, "3")
    report = scene.run(full=True)
    assert (report.counts["written"], report.attention) == (200, [])
    assert scene.doubles() == {key: x * 3 for key, x in ROWS}


def test_a_new_partition_is_compared_with_the_last_one(make_project: MakeProject) -> None:
    view = {
        **VIEW,
        "source": {"sql": "SELECT i AS id, i::DOUBLE AS x FROM range(80) t(i) WHERE $start < $end"},
        "partition": {"by": "day", "start": "2026-01-01"},
    }
    write(make_project(view=view).folder)
    scene = make_project(view=view)
    scene.run(partition=day("2026-01-01"))
    write(scene.folder, "2.0 * 1")
    report = scene.run(partition=day("2026-01-02"))
    assert report.attention == [
        "the code of the model changed (factors.py changed), and its fingerprint did not: 64"
        " unchanged rows of snapshot 1 were computed again, and are equal"
    ]
    assert scene.run(partition=day("2026-01-03")).attention == []
    write(scene.folder, "3")
    with pytest.raises(GateError, match=r"6[34] come out otherwise"):
        scene.run(partition=day("2026-01-04"))


def test_a_host_with_other_code_does_not_work(
    make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "FEW_ROWS", 1)
    monkeypatch.setattr(worker_module, "SHARD_LOOK_S", 0.1)
    view = {**VIEW, "shards": 4}
    write(make_project(ROWS, view=view).folder)
    scene = make_project(ROWS, view=view)
    other = tmp_path / "other"
    write(other, "3")
    for name in ("project.yaml", "views"):
        (other / name).symlink_to(scene.home / name)
    refused: list[str | None] = []
    open_model = worker_module._open

    def opened(project: Scene, *rest: object) -> object:
        # while the run goes on, a host with older code comes by
        if not refused and project.folder != other:
            refused.append(None)
            with pytest.raises(ConfigError) as raised:
                open_model(Scene(other, {}), *rest)  # type: ignore[arg-type]
            refused[0] = str(raised.value)
        return open_model(project, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_module, "_open", opened)
    scene = make_project(ROWS, view=view, project={"engine": {"on": "elsewhere"}})
    done = threading.Thread(target=lambda: work(scene, "numbers", wait_s=30))
    done.start()
    scene.run()
    done.join(30)
    assert scene.doubles() == {key: x * 2 for key, x in ROWS}
    assert refused[0] is not None
    assert "this host's code of the model differs from that of run" in refused[0]
    assert "(factors.py changed), under the same fingerprint" in refused[0]


def test_a_server_with_other_code_says_so(
    make_project: MakeProject, caplog: pytest.LogCaptureFixture
) -> None:
    view = {**VIEW, "fallback": {"enabled": True, "deadline": "10s"}}
    write(make_project(ROWS, view=view).folder)
    scene = make_project(ROWS, view=view)
    scene.run()
    write(scene.folder, "1 + 1")
    with (
        contextlib.closing(ViewFallback(scene.offline, scene.home, memory_mb=64)) as fallback,
        scene.lookup(fallback) as lookup,
    ):
        table = lookup.get("numbers", ["999"], inputs={"999": {"x": 21.0}})
    assert (table["status"].to_pylist(), table["double"].to_pylist()) == (["computed"], [42.0])
    assert [
        record.message for record in caplog.records if "code of the model" in record.message
    ] == [
        "view 'numbers': this host's code of the model differs from what computed snapshot 1"
        " (factors.py changed), under the same fingerprint: if its values differ, so do misses from"
        " rows; `precompute run` compares 64 of them"
    ]
