"""Roots by the scheme of a URL: ours where the power is not here, and another package's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from precompute.store.doors import KNOWN, ROOTS
from tests import REPOSITORY
from tests.doors.conftest import EVERY, Install, called, names_of, weeks, without_each_of
from tests.doors.test_keys import write_key
from tests.server import make_folder

COMMANDS = (["validate"], ["run", "numbers"], ["lookup", "numbers", "1"], ["status"])


@without_each_of("root")
def test_its_urls_are_told_in_a_line_with_file_and_line(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    without, copy = house
    for scheme, command in zip(names_of(without, "root"), COMMANDS, strict=False):
        url, power = f"{scheme}://bucket/prefix", KNOWN["root"][scheme].power
        make_folder(tmp_path, {"numbers": {}})
        where = write_key(tmp_path / "project.yaml", "root", url)
        done = called(copy, *command, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"precompute: {tmp_path}/{where}{url!r}: root {scheme!r} comes with the plug-in"
            f" {power}, which is not installed here (no folder precompute/plugins/{power}):"
            f" install precompute-store again, which has it, or do without {scheme!r}\n"
        )


# ---- another package's


ELSEWHERE = """
import shutil
from contextlib import nullcontext
from pathlib import Path
from precompute.store.disk.storage import LOCAL, is_mounted, mount

class Elsewhere:
    local = False
    def __init__(self, here, there): self.here, self.there = here, there
    def at(self, path): return self.there / path.relative_to(self.here)
    def items(self, folder):
        found = LOCAL.items(self.at(folder))
        return [item._replace(folder=folder) for item in found]
    def logs(self, folder, name):
        found, there = LOCAL.logs(self.at(folder), name), self.at(folder)
        return [item._replace(folder=folder / item.folder.relative_to(there)) for item in found]
    def shown(self, path): return f"mem+file://{self.at(path)}"
    def look(self, root, folders=None): return nullcontext()
    def put(self, paths):
        for path in paths: copy(path, self.at(path))
    def fetch(self, files, *, again=False):
        for file in files:
            if again or not file.path.exists() or file.path.stat().st_size != file.size_bytes:
                copy(self.at(file.path), file.path)
        return True

def copy(path, other):
    other.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, other)

def moved(name):
    def call(self, path, *args, **options):
        return getattr(LOCAL, name)(self.at(path), *args, **options)
    return call

for name in ("append appended changed_ns check_writable create delete delete_all end_log names"
             " afresh now_s read read_ahead size_bytes stat update write").split():
    setattr(Elsewhere, name, moved(name))

class Diary:
    def __init__(self, store, online): self.store = store
    def say(self, *words): tell(self.store.offline.root, *words)
    def publish(self, pointer, loaded=()): self.say("publish", pointer.view.name, pointer.snapshot)
    def is_behind(self, epoch): return False
    def follow(self, *, again=False): return False
    def drop_all_but(self, keep): self.say("keep", *(n.split("-")[0] for n in sorted(keep)))
    def end(self): self.say("end")
    @staticmethod
    def follower(offline, online, names): return Reader(offline.root, names)

class Reader:
    restore_files = None
    def __init__(self, root, names):
        self.root = root
        tell(root, "follow", *names)
    def stop(self): tell(self.root, "stop")

def tell(root, *words):
    with open(root.parent / "diary", "a") as file: print(*words, file=file)

def mounted(url, home, keys):
    here = home / "cache"
    if not is_mounted(here):
        mount(here, Elsewhere(here, Path(url.partition("://")[2])))
    return here
"""


@pytest.fixture
def package(install: Install) -> Path:
    return install(
        {"others_root.py": ELSEWHERE},
        "root.mem+file = others_root:mounted\nroot.broken = others_root:no_root\n"
        "followers.diary = others_root:Diary\n",
    )


def over(root: str, folder: Path) -> None:
    """A project over a root that this process may not know."""
    make_folder(folder, {"numbers": {}}, online="table:./online")
    write_key(folder / "project.yaml", "root", root)


def check_manifests(root: Path) -> None:
    """There is one snapshot, and nothing of it lies in the project."""
    manifests = (root / "numbers" / "manifests").glob("0*.json")
    assert [path.name for path in manifests] == [f"{1:020d}.json"]
    assert [*(root / "numbers").glob("data/*/*.parquet")] != []


@pytest.mark.parametrize("house", [EVERY], indirect=True)
def test_another_packages_root_needs_none_of_ours(
    house: tuple[str, Path], package: Path, tmp_path: Path
) -> None:
    _, copy = house
    over(f"mem+file://{tmp_path}/there", tmp_path)
    # both stand before all else on the path
    weeks(Path(f"{package}:{copy}"), copy, tmp_path)
    check_manifests(tmp_path / "there")


def test_another_packages_root_is_one_like_ours(package: Path, tmp_path: Path) -> None:
    over(f"mem+file://{tmp_path}/there", tmp_path)
    weeks(package, REPOSITORY, tmp_path)
    check_manifests(tmp_path / "there")
    said = (tmp_path / "diary").read_text().splitlines()
    # a segment, and its index
    assert said == ["keep", "publish numbers 1", "keep 1 1", "follow numbers", "stop"]
    # a host that has nothing of it, and what was fetched
    for folder in ("cache", "online"):
        shutil.rmtree(tmp_path / folder)
    (line,) = json.loads(called(package, "status", "--json", folder=tmp_path).stdout)
    assert (line["view"], line["snapshot"], line["online"]) == ("numbers", 1, False)
    done = called(package, "publish", "numbers", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "double: 2" in called(package, "lookup", "numbers", "1", folder=tmp_path).stdout
    over("mem+fiel://there", tmp_path)
    (line,) = called(package, "status", folder=tmp_path).stderr.splitlines()
    here = "".join(f", or {ROOTS.what(name)}" for name in KNOWN["root"] if ROOTS.is_here(name))
    assert line.endswith(f": root: 'mem+fiel://there': give a folder{here}")
    over("broken://there", tmp_path)
    (line,) = called(package, "run", "numbers", folder=tmp_path).stderr.splitlines()
    assert line == (
        "precompute: root 'broken' of others_root:no_root cannot be loaded: AttributeError: module"
        " 'others_root' has no attribute 'no_root'; mend that package, or take it out"
    )
