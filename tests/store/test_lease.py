"""Leases: one holder at a time; a dead one is known at once, a silent one after its TTL, and a late
one is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from precompute.store.disk.durable_file import replace_durably
from precompute.store.disk.lease import Holder, holder, is_held, take
from precompute.store.disk.record import sealed
from precompute.store.errors import ConflictError, FencedError, SnapshotError, UnreadableError
from tests import REPOSITORY

HOLD = """
import sys
from pathlib import Path
from precompute.store.errors import FencedError
from precompute.store.disk.lease import take
lease = take(Path(sys.argv[1]), "run", "child", ttl_s=float(sys.argv[2]))
print(lease.record.fence, flush=True)
for _ in sys.stdin:
    try:
        lease.check()
        print("mine", flush=True)
    except FencedError as exc:
        print(f"fenced: {exc}", flush=True)
lease.release()
print("released", flush=True)
"""


class Child:
    """A process that holds the lease ``run``, and says at every line it is sent whether it still
    does."""

    def __init__(self, folder: Path, ttl_s: float) -> None:
        command = [sys.executable, "-c", HOLD, str(folder), str(ttl_s)]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.fence = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        return line.strip()

    def check(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("check\n")
        self.process.stdin.flush()
        return self._line()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> str:
        """Let it release and end."""
        out, _ = self.process.communicate(timeout=30)
        return out.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def child(folder: Path) -> Iterator[Callable[[float], Child]]:
    children: list[Child] = []

    def start(ttl_s: float) -> Child:
        children.append(Child(folder, ttl_s))
        return children[-1]

    yield start
    for one in children:
        one.process.kill()
        one.process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def until(met: Callable[[], bool], what: str) -> None:
    """Wait for something that takes its time, on a busy machine too."""
    limit = time.monotonic() + 30
    while not met():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


# ---- take and release


def test_one_holds_it_until_it_lets_go(folder: Path) -> None:
    assert (holder(folder, "run"), is_held(folder, "run")) == (None, False)
    lease = take(folder, "run", "me", ttl_s=45.0)
    assert (
        lease.record
        == holder(folder, "run")
        == Holder(1, "me", lease.record.host, os.getpid(), 45.0)
    )
    assert lease.record.host.startswith(os.uname().nodename)
    assert is_held(folder, "run")
    assert names(folder) == [".lease-run.1.held", ".lock", "lease-run.json"]
    lease.check()
    with pytest.raises(
        ConflictError, match=rf"^lease 'run' is held \(by me, process {os.getpid()}\)$"
    ):
        take(folder, "run", "you")
    with pytest.raises(ConflictError, match=r"^view 'v' is busy \(by me, process "):
        take(folder, "run", "run", busy="view 'v' is busy")
    lease.check()
    lease.release()
    lease.release()
    assert not is_held(folder, "run")
    assert holder(folder, "run") == lease.record  # who was last stays known
    assert names(folder) == [".lock", "lease-run.json"]


def test_the_fence_rises_with_every_taking(folder: Path) -> None:
    for fence in (1, 2, 3):
        with take(folder, "run", f"holder {fence}") as lease:
            assert lease.record.fence == fence
            assert names(folder) == [f".lease-run.{fence}.held", ".lock", "lease-run.json"]
    assert json.loads((folder / "lease-run.json").read_text())["fence"] == 3


def test_leases_of_other_names_and_folders_are_free(folder: Path) -> None:
    """And taking one leaves the files of names that begin alike."""
    names = ("run-1", "run", "run-20260101T0000Z", "run_", "publish", "R1", "r")
    with ExitStack() as held:
        for name in names:
            assert held.enter_context(take(folder, name, "me")).record.fence == 1
        assert held.enter_context(take(folder.parent / "elsewhere", "run", "me")).record.fence == 1
        for name in names:
            with pytest.raises(ConflictError):
                take(folder, name, "you")
    assert not any(is_held(folder, name) for name in names)


# ---- a holder that died, stopped, or sits on another machine


def test_a_killed_holder_is_known_at_once(folder: Path, child: Callable[[float], Child]) -> None:
    held = child(3600.0)
    with pytest.raises(ConflictError, match=f"by child, process {held.process.pid}"):
        take(folder, "run", "me")
    assert (held.check(), is_held(folder, "run")) == ("mine", True)
    held.signal(signal.SIGKILL)
    held.process.wait()
    assert not is_held(folder, "run")
    with take(folder, "run", "me") as lease:
        assert lease.record.fence == held.fence + 1
        assert names(folder) == [".lease-run.2.held", ".lock", "lease-run.json"]


def test_a_stopped_holder_is_overtaken_after_its_ttl_and_fenced(
    folder: Path, child: Callable[[float], Child]
) -> None:
    held = child(0.6)
    held.signal(signal.SIGSTOP)
    until(lambda: not is_held(folder, "run"), "a holder that gives no sign of life keeps its lease")
    with take(folder, "run", "me") as lease:
        assert lease.record.fence == 2
        held.signal(signal.SIGCONT)
        said = held.check()
        assert said.startswith("fenced: child was silent")
        assert "lost its lease 'run' to me" in said
        assert held.end() == "released"  # which must not let go of what is not its own
        lease.check()
        assert is_held(folder, "run")
        with pytest.raises(ConflictError):
            take(folder, "run", "third")


def test_the_heartbeat_keeps_it_alive_past_its_ttl(
    folder: Path, child: Callable[[float], Child]
) -> None:
    held = child(3.0)
    for _ in range(2):
        os.utime(folder / ".lease-run.1.held", (0, 0))
        until(lambda: is_held(folder, "run"), "nobody touches the file")
    with pytest.raises(ConflictError):
        take(folder, "run", "me")
    assert held.check() == "mine"


def test_it_beats_no_more_once_it_is_let_go(folder: Path) -> None:
    before = set(threading.enumerate())
    lease = take(folder, "run", "me", ttl_s=0.03)
    assert {t.name for t in set(threading.enumerate()) - before} == {"lease-run"}
    lease.release()
    assert set(threading.enumerate()) <= before


def far_away(folder: Path, ttl_s: float = 0.4) -> Path:
    """The file that a holder on another machine touches; its flock cannot be seen from here."""
    take(folder, "run", "me").release()
    record = Holder(7, "far away", "another machine", os.getpid(), ttl_s)
    replace_durably(folder / "lease-run.json", sealed(record))
    path = folder / ".lease-run.7.held"
    path.touch()
    return path


def test_a_holder_on_another_machine_is_believed_until_its_ttl_is_over(folder: Path) -> None:
    far_away(folder)
    assert is_held(folder, "run")
    with pytest.raises(ConflictError, match="far away"):
        take(folder, "run", "me")
    until(lambda: not is_held(folder, "run"), "it is believed though it is not heard of")
    with take(folder, "run", "me") as lease:
        assert lease.record.fence == 8


@pytest.mark.parametrize("off_s", [-900, 900])
def test_signs_of_life_count_whatever_time_they_bear(folder: Path, off_s: float) -> None:
    """Of a host whose clock is off, or after this one's was set; also for who looks for the first
    time, and takes what seems silent, but is watched."""
    path, stop = far_away(folder, 3.0), threading.Event()

    def beats() -> None:
        while not stop.wait(0.05):
            os.utime(path, (time.time() + off_s, time.time() + off_s))

    beating = threading.Thread(target=beats)
    beating.start()
    try:
        with pytest.raises(ConflictError, match="far away"):
            take(folder, "run", "me")
        assert is_held(folder, "run")
    finally:
        stop.set()
        beating.join()


def test_a_holder_elsewhere_that_was_silent_for_an_hour_is_not_watched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, slept = far_away(folder, 60.0), list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert not is_held(folder, "run")
    with take(folder, "run", "me") as lease:
        assert (lease.record.fence, slept) == (8, [])


# ---- force


def test_force_takes_it_from_its_holder_who_releases_nothing_of_others(folder: Path) -> None:
    first = take(folder, "run", "first")
    second = take(folder, "run", "second", force=True)
    assert second.record.fence == 2
    for _ in range(2):
        with pytest.raises(FencedError, match="lost its lease 'run' to second"):
            first.check()
        with pytest.raises(ConflictError, match="second"):
            take(folder, "run", "third")
        first.release()
        second.check()
    second.release()
    with pytest.raises(FencedError, match="second"):
        first.check()
    with take(folder, "run", "third") as third:
        assert third.record.fence == 3


# ---- files


@pytest.mark.parametrize("flipped", [False, True])
def test_whatever_became_of_a_record_a_lease_is_taken_and_held_by_its_lock(
    folder: Path, flipped: bool
) -> None:
    """Nobody is taken for its holder because of a bit, and nobody who lives loses it."""
    path, fence = folder / "lease-run.json", 0
    take(folder, "run", "me").release()
    for at in range(0, len(path.read_bytes()), 7):
        whole = path.read_bytes()
        path.write_bytes(
            whole[:at] + (bytes([whole[at] ^ 2]) + whole[at + 1 :] if flipped else b"")
        )
        assert not is_held(folder, "run")
        with take(folder, "run", "me") as lease:
            assert lease.record.fence > fence
            fence, whole = lease.record.fence, path.read_bytes()
            path.write_bytes(
                whole[:at] + (bytes([whole[at] ^ 2]) + whole[at + 1 :] if flipped else b"")
            )
            assert is_held(folder, "run")
            with pytest.raises(ConflictError, match="is held"):
                take(folder, "run", "another")
            # by its holder it is written once more
            lease.check()
            assert holder(folder, "run") == lease.record
    for other in [b"null", b"[]", b"{}", b"7", b"\xff"]:
        path.write_bytes(other)
        take(folder, "run", "me").release()


def test_a_lease_whose_files_are_gone_is_lost(folder: Path) -> None:
    with take(folder, "run", "me") as lease:
        (folder / ".lease-run.1.held").unlink()
        assert not is_held(folder, "run")
        with take(folder, "run", "you"), pytest.raises(FencedError, match="to you"):
            lease.check()
        (folder / "lease-run.json").unlink()
        with pytest.raises(FencedError, match="to nobody: its file is gone"):
            lease.check()


def test_files_that_cannot_be_made_written_or_read_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SnapshotError, match=r"cannot write .*lease-run.json"):
        take(tmp_path / "file" / "notes", "run", "me")
    (tmp_path / "notes" / "lease-run.json").mkdir(parents=True)
    with pytest.raises(UnreadableError, match="cannot be read"):
        take(tmp_path / "notes", "run", "me")
    folder = tmp_path / "held"
    (folder / ".lease-run.1.held").mkdir(parents=True)
    with pytest.raises(SnapshotError, match="cannot write"):
        take(folder, "run", "me")
    assert not is_held(folder, "run")
    take(folder, "other", "me").release()
    (folder / ".lease-other.1.held").mkdir()
    with pytest.raises(UnreadableError, match=r"\.lease-other\.1\.held"):
        is_held(folder, "other")


# ---- races

TURNS = """
import sys, time
from pathlib import Path
from precompute.store.errors import ConflictError
from precompute.store.disk.lease import take
folder, counter, turns = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
done = 0
while done < turns:
    try:
        with take(folder, "run", "racer", ttl_s=3600) as lease:
            number = int(counter.read_text())
            time.sleep(0.001)
            counter.write_text(str(number + 1))
            lease.check()
            done += 1
    except ConflictError:
        time.sleep(0.0005)
"""


def test_taking_turns_no_two_are_ever_inside_at_once(folder: Path, tmp_path: Path) -> None:
    """A counter that is read, and written later, loses counts as soon as two are inside."""
    counter, turns = tmp_path / "counter", 40
    counter.write_text("0")
    command = [sys.executable, "-c", TURNS, str(folder), str(counter), str(turns)]
    racers = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(3)]
    assert [racer.wait(timeout=60) for racer in racers] == [0, 0, 0]
    assert counter.read_text() == str(3 * turns)
    last = holder(folder, "run")
    assert last is not None
    assert last.fence == 3 * turns
