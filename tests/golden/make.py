"""Make: writes the golden roots, small roots and online stores that every later version must read,
and beside each what it answered when it was made.

    python -m tests.golden.make

It writes ``tests/golden/format-<number>/<online store>.tar.xz`` and ``….json``, for each kind of
online store that is here. **When it may be run**: as long as no version of this format was released
(its number is not in ``RELEASED``), as often as the format changes; of a released format never
again, since what lies in git is then what users have. A new format has a folder of its own, beside
which the earlier ones stay.

Rows, numbers of snapshots and events, and what is done are the same each time; times, the ids of
runs and nonces are not. What would tell of this machine is replaced while it is written: its name,
its boot, the user, and the numbers of processes. Paths do not occur (``tests/golden/project.py``),
and a root or an online store in which one of these is found all the same is not packed.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import io
import json
import lzma
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from precompute.jobs.run.judge import audit
from precompute.store.disk import lease
from precompute.store.disk.record import FORMAT
from precompute.store.errors import GateError
from tests import REPOSITORY
from tests.golden.project import DAYS, Rows, answers, doubles, run, run_day, write_project
from tests.online_rig import rigs
from tests.scene import Scene

HERE = Path(__file__).parent
RELEASED: frozenset[int] = frozenset()
"""Formats of versions that were released: what was made of them is never made again."""

NAME = "golden"
"""Of the user and of the machine."""
PROCESS = 4_194_305
"""The number of every process: none has one so large."""
PLACE = Path("/tmp/golden")
"""Where roots are made: accounts name the files that were looked at by their whole paths."""
DAY_S = 86400
"""By which files are older than they are: whoever held a lease has been silent."""

FULL = {key: float(key) for key in range(24)}
NEXT = FULL | {1: 100.0, 2: 200.0}
BEGUN = {"killed": NEXT, "ahead": NEXT}
"""View → the rows of a run of it that is killed."""
POINTS = {"killed": "segment.link", "ahead": "log.dirsync"}
"""View → where."""


# ---- what is done


def build(scene: Scene) -> None:
    """Everything that a root of a few weeks may hold."""
    _numbers(scene)
    _merged(scene)
    _days(scene)
    _held(scene)
    _pinned(scene)
    _judged(scene)
    _marked(scene)
    for view in BEGUN:
        _published(scene, view, FULL)
        _kill(scene, view)


def _published(scene: Scene, view: str, rows: Rows, **options: Any) -> None:
    assert run(scene, view, rows, **options) == "published"
    assert doubles(scene, view) == dict(rows)


def _numbers(scene: Scene) -> None:
    changed = {key: x for key, x in NEXT.items() if key not in (5, 6)}
    more = changed | {1: 101.0, 30: 30.0, 31: 31.0}
    for rows in (FULL, changed, more):
        _published(scene, "numbers", rows)
    assert run(scene, "numbers", more) == "current"
    assert len(scene.live_snapshot().segments) == 3


def _merged(scene: Scene) -> None:
    rows = dict(FULL)
    for at in range(7):
        rows = {**rows, at: 50.0 + at, 24 + at: float(at)}
        rows.pop(10 + at)
        _published(scene, "merged", rows)
    snapshot = scene.live_snapshot("merged")
    assert any(segment.merged for segment in snapshot.segments)


def _days(scene: Scene) -> None:
    rows = dict(FULL)
    _published(scene, "entries", rows)
    for day in DAYS[:3]:
        assert run_day(scene, day) == "published"
    # a day once more: a row of it is another one, and a row is gone
    rows = {key: x for key, x in rows.items() if key != 9} | {5: 55.0}
    _published(scene, "entries", rows)
    assert run_day(scene, DAYS[1]) == "published"
    expected = {key: x for key, x in rows.items() if key % 4 != 3}
    assert doubles(scene, "days") == expected


def _held(scene: Scene) -> None:
    for x in (1.0, 2.0, 3.0):
        _published(scene, "held", FULL | {0: x})
    assert scene.rollback("held").status == "published"
    run(scene, "held", FULL | {0: 4.0})
    assert doubles(scene, "held") == FULL | {0: 2.0}


def _pinned(scene: Scene) -> None:
    _published(scene, "pinned", FULL)
    assert scene.cli("pin", "pinned", "--snapshot", "1") == 0
    for x in range(1, 6):
        _published(scene, "pinned", FULL | {0: float(x)}, full=True)


def _judged(scene: Scene) -> None:
    many, fewer, fewest = ({key: float(key) for key in range(n)} for n in (39, 26, 13))
    _published(scene, "judged", many)
    _refused(scene, fewer)
    assert scene.cli("publish", "judged", "--accept", "rows") == 0
    assert doubles(scene, "judged") == fewer
    _refused(scene, fewest)
    assert doubles(scene, "judged") == fewer


def _refused(scene: Scene, rows: Rows) -> None:
    with contextlib.suppress(GateError):
        raise AssertionError(run(scene, "judged", rows))


def _marked(scene: Scene) -> None:
    for x in (1.0, 2.0, 3.0):
        _published(scene, "marked", FULL | {0: x}, full=True)
    scene.rollback("marked", to=1, hold=False)
    _published(scene, "marked", FULL | {0: 4.0})
    store = scene.offline.view("marked")
    path = store.manifest_path(2)
    path.write_bytes(path.read_bytes()[:-20])
    assert scene.cli("gc", "--forget", "marked", "2") == 0


def _kill(scene: Scene, view: str) -> None:
    """Have a run of a view end as by power lost, in a process of its own."""
    command = [sys.executable, "-m", "tests.golden.make", str(scene.folder), scene.online, view]
    environment = os.environ | {"PRECOMPUTE_CRASH": f"{POINTS[view]}:1:kill"}
    ended = subprocess.run(command, env=environment, cwd=REPOSITORY, check=False)
    assert ended.returncode == -signal.SIGKILL, ended


# ---- what is packed


def make(kind: str, online: str) -> None:
    """Build a root and pack it, with what it answers."""
    rig = rigs().get(kind)
    shutil.rmtree(PLACE, ignore_errors=True)
    try:
        scene = write_project(PLACE, online)
        build(scene)
        found = answers(scene)
        if rig is not None:
            lines = sorted(rig.contents(online).items())
            encoded = (
                json.dumps([base64.b64encode(each).decode() for each in line]) for line in lines
            )
            (scene.folder / "online.jsonl").write_text("\n".join([*encoded, ""]))
        data = _packed(scene.folder)
        _check(scene.folder, kind)
    finally:
        shutil.rmtree(PLACE, ignore_errors=True)
    to = HERE / f"format-{FORMAT}"
    to.mkdir(exist_ok=True)
    (to / f"{kind}.tar.xz").write_bytes(data)
    (to / f"{kind}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{to / kind}.tar.xz: {len(data):,} bytes")


PACKED = ("var", "online", "online.jsonl")


def _stored(folder: Path) -> list[Path]:
    """All that is packed; the space that is reserved for a full disk is none of it."""
    paths = (path for name in PACKED for path in [folder / name, *(folder / name).rglob("*")])
    return sorted(path for path in paths if path.exists() and ".reserve" not in path.parts)


def _packed(folder: Path) -> bytes:
    """The root and what is online as a tar, compressed."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _stored(folder):
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=_plain)
    return lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def _plain(item: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what the machine knows of it, and a day older."""
    item.uid = item.gid = 0
    item.uname = item.gname = ""
    item.mode = 0o755 if item.isdir() else 0o644
    item.mtime -= DAY_S
    return item


def _check(folder: Path, kind: str) -> None:
    """Raises:
    SystemExit: something tells of this machine.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    told = {
        *(str(REPOSITORY), str(Path.home()), sys.prefix),
        *(f"@{_TRUE.nodename}", f'"{_TRUE.nodename}', f"{_USER}@", f'"pid": {_PID}', f".{_PID}."),
        *([boot.read_text().strip()] if boot.exists() else []),
    }
    for path in _stored(folder):
        data = path.read_bytes() if path.is_file() else b""
        if path.name == "online.jsonl":
            data = b"".join(
                base64.b64decode(x) for line in data.splitlines() for x in json.loads(line)
            )
        for word in told:
            # a few bytes may be anything where it is no text
            if path.suffix != ".json" and len(word) < 8:
                continue
            if word.encode() in data or word in str(path.relative_to(folder)):
                raise SystemExit(
                    f"{kind}: {path} tells {word!r} of this machine: nothing is packed"
                )


# ---- this machine


_TRUE, _USER, _PID = os.uname(), pwd.getpwuid(os.geteuid()).pw_name, os.getpid()


@contextlib.contextmanager
def nowhere() -> Iterator[None]:
    """What is written is written on no machine, by nobody."""
    named = os.uname_result((_TRUE.sysname, NAME, _TRUE.release, _TRUE.version, _TRUE.machine))
    user = pwd.struct_passwd((NAME, "x", 0, 0, "", "/", "/bin/sh"))
    end = os.kill

    def kill(process: int, number: int) -> None:
        end(_PID if process == PROCESS else process, number)

    with contextlib.ExitStack() as patched:
        for owner, name, value in (
            (os, "uname", lambda: named),
            (os, "getpid", lambda: PROCESS),
            (os, "kill", kill),
            (getpass, "getuser", lambda: NAME),
            (pwd, "getpwuid", lambda _: user),
            (lease, "_host", lambda: NAME),
            # how many rows are computed twice depends on the time there is
            (audit, "AUDIT_LEAST_S", 0.0),
            (audit, "AUDIT_SHARE", 0.0),
        ):
            patched.enter_context(mock.patch.object(owner, name, value))
        yield


def main(arguments: list[str]) -> None:
    """All golden roots of this version's format; or, of the maker's own processes, one run."""
    if arguments:
        folder, online, view = arguments
        with nowhere():
            run(write_project(Path(folder), online), view, BEGUN[view])
        raise SystemExit("it was to be killed")
    if FORMAT in RELEASED:
        raise SystemExit(f"format {FORMAT} was released: its golden roots are what users have")
    with nowhere():
        make("table", "table:./online")
    for kind, rig in rigs().items():
        with rig.oldest() as online, nowhere():
            make(kind, online)


if __name__ == "__main__":
    main(sys.argv[1:])
