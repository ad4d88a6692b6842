"""Doctor: what is wrong with a machine or a store is found in seconds, each with its remedy."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from precompute.engine import resources
from precompute.jobs.cli import main
from precompute.plugins.doctor import doctor
from precompute.plugins.doctor.doctor import Line, examine
from precompute.store.online import kernels
from precompute.store.online.online_store import ServerReport
from tests.fixtures import MakeProject
from tests.memory_store import MemoryStore
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]
ROWS = [(i, float(i)) for i in range(20)]


def lines(project: Scene | None) -> dict[str, Line]:
    return {line.check: line for line in examine(project)}


def test_a_machine_that_is_well(make_project: MakeProject, capsys: Captured) -> None:
    project = make_project(ROWS)
    found = lines(project)
    assert [line for line in found.values() if line.status == "bad"] == []
    assert {
        "versions",
        "libraries",
        "extension for lookups",
        "extension for text",
        "processor",
        "GPU",
        "limits",
        "memory",
    } < set(found)
    assert {
        "configuration",
        "disk (root)",
        "disk (online)",
        "disk (TMPDIR)",
        "online store",
        "clock",
    } < set(found)
    assert f"precompute-store {metadata.version('precompute-store')}" in found["versions"].found
    assert project.cli("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_without_a_project_the_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRECOMPUTE_CONFIG", raising=False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "there is no project.yaml here or above" in out
    assert "disk" not in out.partition("there is no")[0]
    (tmp_path / "project.yaml").write_text("rot: ./var\n")
    assert main(["doctor"]) == 1
    assert "rot: unknown key; did you mean 'root'" in capsys.readouterr().out


class _Disk(NamedTuple):
    f_bavail: int = 10
    f_frsize: int = 4096
    f_blocks: int = 10**6
    f_files: int = 10**6
    f_favail: int = 5


@pytest.fixture
def few_handles() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_handles")
def test_each_trouble_has_its_remedy(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, needs = metadata.version, metadata.requires("precompute-store")
    monkeypatch.setattr(kernels, "COMPILED", False)
    monkeypatch.setattr(os, "statvfs", lambda path: _Disk())
    monkeypatch.setattr(
        metadata,
        "version",
        lambda name: {"duckdb": "1.4.0", "xxhash": "5.0"}.get(name) or own(name),
    )
    monkeypatch.setattr(
        metadata,
        "requires",
        lambda name: [
            *(needs or ()),
            "nowhere-to-be>=1; extra == 'engine'",
            "none-such; extra == 'dev'",
        ],
    )
    monkeypatch.setattr(resources, "available_bytes", lambda: 100 * 2**20)
    found = lines(make_project(ROWS))
    for check, status, said, remedy in (
        (
            "libraries",
            "bad",
            r"duckdb is 1.4.0, and is to be .*>=1\.5\.5.*nowhere-to-be is not installed",
            "pip install 'precompute-store",
        ),
        ("extension for lookups", "slow", "0.6 ms more", "compiler"),
        ("limits", "bad", "512 file handles", "ulimit -n 1024"),
        ("memory", "bad", "0.1 GB available, memory_mb is 1,024", "lower memory_mb"),
        ("disk (root)", "bad", "0.0 GB of 4.1 GB free", "precompute gc"),
        ("inodes (root)", "bad", "5 free", "small files"),
        ("online store", "ok", "there, with all rights", ""),
    ):
        line = found[check]
        assert line.status == status, line
        assert re.search(said, line.found), line
        assert remedy in line.remedy, line
    assert "none-such" not in found["libraries"].found


@pytest.mark.parametrize(
    ("points", "status", "said"),
    [
        ("command.greet = a:b\nmodel.shout = a:c", "ok", "command.greet of x; model.shout of x"),
        ("comand.greet = a:b", "bad", "comand.greet of x: there is no door 'comand'; did you mean"),
        ("online.redis = a:b", "bad", "online.redis of x: 'redis' is ours, and stays so"),
    ],
)
def test_what_other_packages_bring_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: str, status: str, said: str
) -> None:
    folder = tmp_path / "x-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[precompute.plugins]\n{points}\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = lines(None)["plug-ins of others"]
    assert line.status == status
    assert line.found.startswith(said)
    assert bool(line.remedy) == (status == "bad")


def test_a_store_that_cannot_be_used(make_project: MakeProject, away: str) -> None:
    line = lines(make_project(ROWS, project={"online": away}))["online store"]
    assert (line.status, "Not a directory" in line.found) == ("bad", True)
    assert "`online` in project.yaml" in line.remedy


class _Served(MemoryStore):
    def servers(self) -> list[ServerReport]:
        return [ServerReport("Vault", "host:1", "2.0", 90.0), ServerReport("Vault", "host:2", "1")]


def test_what_a_stores_servers_say_of_themselves_is_shown(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "open_online_store", lambda _: _Served())
    told = [line for line in examine(make_project(ROWS)) if "Vault" in line.check]
    assert told == [
        Line("Vault", "ok", "host:1: 2.0"),
        Line("clock of Vault", "bad", "90.0 s ahead at host:1", told[1].remedy),
        Line("Vault", "ok", "host:2: 1"),
    ]


@pytest.mark.parametrize(("ahead_s", "status"), [(0.2, "ok"), (-5.0, "bad"), (90.0, "bad")])
def test_clocks_that_are_apart(ahead_s: float, status: str) -> None:
    line = doctor._clock_line("clock of a server", ahead_s, "at there")
    assert (line.status, bool(line.remedy)) == (status, status == "bad")
