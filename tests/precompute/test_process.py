"""A child process: nothing of it is left, nobody else is signalled, and it is known how it ended
and what it said last."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from precompute.workers import process as process_module
from precompute.workers.process import (
    ChildProcess,
    end_all,
    end_in_words,
)
from tests import REPOSITORY
from tests.server import eventually, state


def shell(line: str, **options: str) -> ChildProcess:
    return ChildProcess(["/bin/sh", "-c", line], output="captured", **options)  # type: ignore[arg-type]


def number_in(path: Path) -> int:
    eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """Group, signal, and the state of the group's first, of every signal sent."""
    sent: list[tuple[int, int, str]] = []
    killpg = os.killpg

    def recorded(group: int, number: int) -> None:
        sent.append((group, number, state(group)))
        killpg(group, number)

    monkeypatch.setattr("precompute.workers.process.os.killpg", recorded)
    return sent


# ---- how it ended


@pytest.mark.parametrize(
    ("line", "status", "how"),
    [
        ("exit 0", 0, "exited with status 0"),
        ("exit 3", 3, "exited with status 3"),
        ("kill -9 $$", -9, "was ended by signal 9 (SIGKILL), as by a system that is out of memory"),
        ("kill -40 $$", -40, "was ended by signal 40"),
    ],
)
def test_how_it_ended(line: str, status: int, how: str) -> None:
    child = shell(line)
    assert child.wait(20)
    assert (child.status, child.how_it_ended(), end_in_words(status)) == (status, how, how)
    said = shell(f"echo 'precompute: no room' >&2; {line}")
    assert said.wait(20)
    assert said.how_it_ended() == how + ": no room" * (status > 0)


def test_what_goes_on_has_no_status_and_is_waited_for_until_the_timeout() -> None:
    child = shell("sleep 60")
    began = time.monotonic()
    assert not child.wait(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert (child.ended(), child.status) == (False, None)
    end_all([child], 5)
    assert child.status == -signal.SIGTERM


def test_what_cannot_be_started_is_an_error_and_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        ChildProcess([str(tmp_path / "nothing")], output="captured")
    assert os.listdir("/proc/self/fd") == before


def test_it_has_a_session_of_its_own_an_empty_stdin_and_its_environment(tmp_path: Path) -> None:
    child = ChildProcess(
        ["/bin/sh", "-c", f"cat > {tmp_path}/in; echo $WHO > {tmp_path}/who; sleep 60"],
        environment={"WHO": "me"},
    )
    eventually(lambda: (tmp_path / "who").exists() and (tmp_path / "who").read_text() == "me\n")
    assert (tmp_path / "in").read_text() == ""
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    end_all([child], 5)


NICER = """
import os, threading, time
from pathlib import Path
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
from precompute.workers.process import be_nicer
for by in (2, 3):
    be_nicer(by)
group = Path("/proc/self/autogroup")
print(*(os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")))
print(group.read_text().split()[-1] if group.exists() else 5, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="threads with priorities of their own, and sessions that share cores, are Linux's",
)
def test_a_nicer_process_is_so_with_all_its_threads_and_to_other_sessions() -> None:
    child = ChildProcess([sys.executable, "-c", NICER], output="piped")
    stdin, stdout = child.pipes()
    with stdin, stdout:
        # Arrow may have threads, too
        assert {int(nice) for nice in stdout.read().split()} == {min(19, os.nice(0) + 5)}
    assert child.wait(10)


# ---- its end


def test_what_ignores_sigterm_is_killed_after_the_grace() -> None:
    deaf = shell("trap '' TERM; echo deaf >&2; while :; do sleep 0.05; done")
    heeding = shell("trap 'exit 7' TERM; while :; do sleep 0.05; done")
    time.sleep(0.3)
    began = time.monotonic()
    end_all([deaf, heeding], 0.5)
    assert 0.5 <= time.monotonic() - began < 5
    assert (deaf.status, heeding.status) == (-signal.SIGKILL, 7)
    assert deaf.last_words() == "deaf"


@pytest.mark.parametrize("how", ["ends", "is killed", "is ended"])
def test_what_it_started_ends_with_it(how: str, tmp_path: Path) -> None:
    """Also where it ended before: its group is killed while its number is its own."""
    deaf = f"(trap '' TERM; sleep 60) & echo $! > {tmp_path}/grandchild"
    child = shell(f"{deaf}; {'' if how == 'ends' else 'sleep 60'}")
    grandchild = number_in(tmp_path / "grandchild")
    if how == "is killed":
        os.kill(child.pid, signal.SIGKILL)
    if how == "is ended":
        end_all([child], 5)
    assert child.wait(20)
    eventually(lambda: state(grandchild) in ("", "Z"))


def test_one_that_is_gone_is_not_signalled_for_its_number_may_be_anothers(
    signalled: list[tuple[int, int, str]],
) -> None:
    child = shell("exit 0")
    eventually(lambda: state(child.pid) == "Z")
    child.signal(signal.SIGTERM)
    assert child.ended()
    assert signalled == [(child.pid, signal.SIGTERM, "Z"), (child.pid, signal.SIGKILL, "Z")]
    child.signal(signal.SIGKILL)
    end_all([child], 5)
    assert child.ended()
    assert len(signalled) == 2


def test_one_that_somebody_else_reaped_has_ended_and_is_not_signalled(
    signalled: list[tuple[int, int, str]],
) -> None:
    child = shell("exit 5")
    os.waitpid(child.pid, 0)
    assert child.wait(20)
    assert (child.status, signalled) == (0, [])


def test_one_that_cannot_be_killed_is_left_behind_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child, killpg = shell("sleep 60"), os.killpg
    monkeypatch.setattr("precompute.workers.process.os.killpg", lambda group, number: None)
    end_all([child], 0.1, 0.1)
    assert (child.status, child.how_it_ended()) == (None, "cannot be killed")
    assert f"process {child.pid} cannot be killed: a driver may hold it" in caplog.text
    killpg(child.pid, signal.SIGKILL)
    assert child.wait(20)


# ---- its last words


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        ("captured", "sys.stderr.write('one\\ntwo\\n \\n\\n')", "two"),
        ("piped", "sys.stderr.write('no end of line')", "no end of line"),
        (
            "captured",
            "sys.stderr.buffer.write(b'before\\n\\xff in the \\xc3 way')",
            "� in the � way",
        ),
        ("piped", "[print('line', n, file=sys.stderr) for n in range(50_000)]", "line 49999"),
        *((output, "print('nothing of this')", "") for output in ("captured", "piped")),
    ],
)
def test_its_last_words_are_the_last_line_that_says_something(
    output: process_module.Output, code: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    child = ChildProcess([sys.executable, "-c", f"import sys; {code}"], output=output)
    assert child.wait(20)
    assert child.last_words() == child.last_words() == words
    if output == "piped":
        for pipe in child.pipes():
            pipe.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.rstrip().endswith(words) if output == "piped" else err == ""


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), ValueError("closed")])
def test_what_it_says_is_taken_where_ours_cannot_be_written(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise error

    monkeypatch.setattr(sys, "stderr", Full())
    code = "import sys; [print('line', n, file=sys.stderr, flush=True) for n in range(30_000)]"
    child = ChildProcess([sys.executable, "-c", code], output="piped")
    assert child.wait(20)
    assert (child.status, child.last_words()) == (0, "line 29999")
    for pipe in child.pipes():
        pipe.close()


def test_its_pipes_go_both_ways(capfd: pytest.CaptureFixture[str]) -> None:
    child = ChildProcess(["/bin/sh", "-c", "tr a-z A-Z; echo done >&2"], output="piped")
    stdin, stdout = child.pipes()
    with stdin:
        stdin.write(b"hello")
    with stdout:
        assert stdout.read() == b"HELLO"
    assert child.wait(20)
    assert (child.last_words(), capfd.readouterr().err) == ("done", "done\n")


def test_what_holds_stderr_open_and_left_the_group_keeps_nobody_waiting(tmp_path: Path) -> None:
    left = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 60'"
    line = f"{left} & while [ ! -s {tmp_path}/pid ]; do sleep 0.02; done; echo bye >&2"
    child = ChildProcess(["/bin/sh", "-c", line], output="piped")
    for pipe in child.pipes():
        pipe.close()
    assert child.wait(20)
    began = time.monotonic()
    assert child.last_words() == "bye"
    assert time.monotonic() - began < 10
    os.kill(number_in(tmp_path / "pid"), signal.SIGKILL)
    eventually(
        lambda: not any(thread.name == f"stderr of {child.pid}" for thread in threading.enumerate())
    )


OUTLIVED = """
import sys, time
from precompute.workers.process import ChildProcess
ChildProcess(["/bin/sh", "-c", f"echo $$ > {sys.argv[1]}/pid; while [ ! -e {sys.argv[1]}/go ]; do sleep 0.05; done; \
echo one >&2; echo two; touch {sys.argv[1]}/wrote; sleep 60"], output="captured")
time.sleep(60)
"""


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[int]:
    """Pid of a child whose parent was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", OUTLIVED, str(tmp_path)], cwd=REPOSITORY
    ) as parent:
        pid = number_in(tmp_path / "pid")
        parent.kill()
    yield pid
    if state(pid) not in ("", "Z"):
        os.kill(pid, signal.SIGKILL)


def test_a_child_that_outlives_us_can_still_write(orphan: int, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    eventually(lambda: (tmp_path / "wrote").exists())
    assert state(orphan) in ("S", "R", "D")
