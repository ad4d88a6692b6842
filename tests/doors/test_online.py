"""Online stores by the scheme of a URL: ours where the power is not here, and another package's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from precompute.store.doors import KNOWN
from tests import REPOSITORY
from tests.doors.conftest import Install, called, names_of, weeks, without_each_of
from tests.server import make_folder


def over(url: str, folder: Path) -> None:
    """A project over an online store that this process may not know."""
    make_folder(folder, {"numbers": {}})
    text = (folder / "project.yaml").read_text()
    (folder / "project.yaml").write_text(text.replace("table:./var/online", url))


LOOKS_UP = """
import sys
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import ConfigError
for url in sys.argv[1:]:
    try:
        Lookup.open(url)
    except ConfigError as exc:
        print(exc)
"""


@without_each_of("online")
def test_its_urls_are_told_in_a_line_with_file_and_line(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    without, copy = house
    schemes = names_of(without, "online")
    urls = [f"{scheme}://:hunter2@host:6379/0" for scheme in schemes]
    absent = [
        f"online: '{scheme}://…@host:6379/0': online '{scheme}' comes with the plug-in"
        f" {KNOWN['online'][scheme].power}, which is not installed here (no folder"
        f" precompute/plugins/{KNOWN['online'][scheme].power}): install precompute-store again, which has it,"
        f" or do without '{scheme}'"
        for scheme in schemes
    ]
    opened = subprocess.run(
        [sys.executable, "-P", "-c", LOOKS_UP, *urls],
        env=os.environ | {"PYTHONPATH": f"{copy}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (opened.stdout.splitlines(), opened.stderr) == (absent, "")
    for url, told in zip(urls[:1], absent, strict=False):
        over(url, tmp_path)
        (line,) = (
            number
            for number, text in enumerate((tmp_path / "project.yaml").read_text().splitlines(), 1)
            if text.startswith("online:")
        )
        done = called(copy, "status", folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"precompute: {tmp_path}/project.yaml:{line}: {told}\n"


# ---- another package's


JSON_STORE = """
import json
from pathlib import Path
from precompute.store.disk.record import plain
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.miss_cache import MissCacheFile
from precompute.store.online.online_store import (
    OnlineStore, Pointer, Segment, check_epoch, check_loaded, check_not_live, check_taken)

class JsonStore(OnlineStore):
    def __init__(self, path): self.path = path
    def whole(self): return json.loads(self.path.read_text()) if self.path.exists() else {}
    def of(self, view): return self.whole().get(view, {"pointer": None, "tables": {}})
    def put(self, view, of):
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.whole() | {view: of}))
        new.replace(self.path)
    def load(self, view, segment, rows, rows_done=0):
        table, of = {}, self.of(view)
        for batch in rows:
            for key, row in zip(batch.keys.strings(), batch.rows.strings()):
                table[bytes(key).hex()] = bytes(row).hex()
        of["tables"][segment.name] = [plain(segment), table]
        self.put(view, of)
        return len(table)
    def flip(self, pointer):
        of, live = self.of(pointer.view.name), self.live(pointer.view.name)
        check_loaded(pointer, of["tables"])
        check_taken(live, pointer)
        check_epoch(live, pointer)
        self.put(pointer.view.name, of | {"pointer": pointer.to_bytes().decode()})
    def live(self, view):
        text = self.of(view)["pointer"]
        return None if text is None else Pointer.from_bytes(text.encode(), view)
    def read(self, view, keys):
        pointer = self.live(view)
        return pointer and (pointer, self.read_segments(view, pointer.segments, keys))
    def read_segments(self, view, names, keys):
        tables, table = self.of(view)["tables"], {}
        for name in names: table |= tables.get(name, [None, {}])[1]
        rows = [table.get(bytes(key).hex()) for key in keys]
        return FoundRows(keys, [None if row is None else bytes.fromhex(row) for row in rows])
    def segments(self, view):
        found = [Segment(**record) for record, _ in self.of(view)["tables"].values()]
        return sorted(found, key=lambda segment: segment.number)
    def drop(self, view, name, keys=None):
        check_not_live(self.live(view), view, name)
        of = self.of(view)
        of["tables"].pop(name, None)
        self.put(view, of)
    def forget(self, view): self.put(view, {"pointer": None, "tables": {}})
    def views(self): return sorted(view for view, of in self.whole().items() if of["pointer"])
    def close(self): pass

def absolute(url, base):
    return f"json:{(base / url.partition(':')[2]).absolute()}"

def open(url, base, memory_mb):
    return JsonStore((base or Path()) / url.partition(":")[2])

def miss_cache(url, limits, base):
    return MissCacheFile(((base or Path()) / url.partition(":")[2]).with_suffix(".misses"), limits)
"""


@pytest.fixture
def package(install: Install) -> Path:
    return install(
        {"others_online.py": JSON_STORE},
        "online.json = others_online\nonline.broken = others_online:no_store\n",
    )


def test_another_packages_online_store_is_one_like_ours(package: Path, tmp_path: Path) -> None:
    over("json:./online.json", tmp_path)
    weeks(package, REPOSITORY, tmp_path)
    # beside project.yaml, wherever it is called from
    tables = json.loads((tmp_path / "online.json").read_text())["numbers"]["tables"]
    assert [name.partition("-")[0] for name in tables] == ["1"]
    over("jsno:./online.json", tmp_path)
    told = called(package, "status", folder=tmp_path).stderr
    assert "'jsno:./online.json' names no online store: write table:./folder" in told
    assert told.endswith("did you mean 'json'?\n")
    over("broken:./online", tmp_path)
    (line,) = called(package, "run", "numbers", folder=tmp_path).stderr.splitlines()
    assert line == (
        "precompute: online 'broken' of others_online:no_store cannot be loaded: AttributeError: module"
        " 'others_online' has no attribute 'no_store'; mend that package, or take it out"
    )
