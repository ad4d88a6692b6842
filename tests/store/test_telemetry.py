"""What a server's processes count: together, across their deaths, and as Prometheus reads it."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from precompute.store.errors import PrecomputeError
from precompute.store.http.metrics import exposition
from precompute.store.http.telemetry.instruments import (
    BREAKER_OPEN,
    BUCKETS,
    FALLBACK_QUEUE,
    INSTRUMENTS,
    LIVE_SNAPSHOT,
    MAX_SLOTS,
    PROBLEMS,
    ROWS,
    STAGE_SECONDS,
    Batches,
    Instrument,
    Kind,
    Meter,
)
from tests import REPOSITORY, asgi
from tests.asgi import Samples


def samples(meter: Meter, **looked_up: float) -> Samples:
    now: Mapping[Instrument, Mapping[tuple[str, ...], float]] = {
        LIVE_SNAPSHOT: {(view,): value for view, value in looked_up.items()}
    }
    return asgi.samples(exposition(meter, now))


def test_a_histogram_counts_up_to_the_end_of_a_bucket_and_beyond_the_last() -> None:
    meter = Meter()
    timer = meter.timer(STAGE_SECONDS, "read")
    for seconds in (0.0, 25e-6, 26e-6, 60.0, 61.0):
        timer.observe(seconds)
    told = samples(meter)
    counts = [
        told["precompute_stage_seconds_bucket", (("le", edge), ("stage", "read"))]
        for edge in [*map(str, BUCKETS), "+Inf"]
    ]
    assert counts == [2.0] + [3.0] * (len(BUCKETS) - 2) + [4.0, 5.0]
    assert told["precompute_stage_seconds_count", (("stage", "read"),)] == 5
    assert told["precompute_stage_seconds_sum", (("stage", "read"),)] == pytest.approx(121.000051)


@pytest.mark.parametrize("shared", [False, True])
def test_every_instrument_is_shown_under_its_name_with_its_labels(
    tmp_path: Path, shared: bool
) -> None:
    meter = Meter(tmp_path if shared else None)
    for i, instrument in enumerate(INSTRUMENTS):
        labels = [f'"{i}\n\\é' for _ in instrument.labels]
        if instrument.kind is Kind.HISTOGRAM:
            meter.timer(instrument, *labels).observe(i)
        elif instrument.kind is Kind.COUNTER:
            meter.counter(instrument, *labels).add(i)
        else:
            meter.gauge(instrument, *labels).set(-i)
    told = samples(meter)
    for i, instrument in enumerate(INSTRUMENTS):
        suffix = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_sum"}.get(instrument.kind, "")
        expected = tuple((name, f'"{i}\n\\é') for name in sorted(instrument.labels))
        value = told[instrument.name + suffix, expected]
        assert value == (-i if instrument.kind in (Kind.GAUGE, Kind.HIGHEST) else i)


def test_what_is_looked_up_stands_in_place_of_what_was_counted() -> None:
    meter = Meter()
    meter.gauge(LIVE_SNAPSHOT, "gone").set(1)
    told = samples(meter, numbers=3)
    assert {key: value for key, value in told.items() if "snapshot" in key[0]} == {
        ("precompute_view_live_snapshot", (("view", "numbers"),)): 3.0
    }


KILLED = """
import os, signal, sys
from pathlib import Path
from precompute.store.http.telemetry.instruments import FALLBACK_QUEUE, PROBLEMS, STAGE_SECONDS, Meter
meter = Meter(Path(sys.argv[1]), "worker-1")
meter.counter(PROBLEMS, "shed").add(5)
meter.counter(PROBLEMS, "expired").add(1)
meter.gauge(FALLBACK_QUEUE, "numbers").set(7)
meter.timer(STAGE_SECONDS, "read").observe(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_any_process_shows_what_all_counted_the_killed_too(tmp_path: Path) -> None:
    own = Meter(tmp_path, "worker-0")
    own.counter(PROBLEMS, "shed").add(2)
    own.gauge(FALLBACK_QUEUE, "numbers").set(1)
    own.gauge(BREAKER_OPEN, "numbers").set(1)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPOSITORY, timeout=60)
    # read last
    third = Meter(tmp_path, "worker-9")
    third.gauge(BREAKER_OPEN, "numbers").set(0)

    def told() -> dict[str, float]:
        found = samples(third)
        return {
            "shed": found["precompute_problems_total", (("code", "shed"),)],
            "expired": found["precompute_problems_total", (("code", "expired"),)],
            "queue": found["precompute_fallback_queue_rows", (("view", "numbers"),)],
            "reads": found["precompute_stage_seconds_count", (("stage", "read"),)],
            "breaker": found["precompute_breaker_open", (("view", "numbers"),)],
        }

    assert told() == {"shed": 12, "expired": 2, "queue": 8, "reads": 2, "breaker": 1}
    # restarted: counters go on, and it has nothing in hand
    again = Meter(tmp_path, "worker-1")
    assert told() == {"shed": 12, "expired": 2, "queue": 1, "reads": 2, "breaker": 1}
    again.counter(PROBLEMS, "shed").add(1)
    again.counter(PROBLEMS, "damaged").add(1)
    assert told()["shed"] == 13


def test_a_series_whose_line_was_cut_by_a_kill_begins_again(tmp_path: Path) -> None:
    meter = Meter(tmp_path, "worker-0")
    meter.counter(PROBLEMS, "shed").add(3)
    meter.close()
    keys = tmp_path / "worker-0.keys"
    whole = keys.read_bytes()
    for cut in range(1, len(whole)):
        keys.write_bytes(whole + whole[:cut])
        again = Meter(tmp_path, "worker-0")
        again.counter(PROBLEMS, "damaged").add(1)
        told = samples(again)
        again.close()
        assert told["precompute_problems_total", (("code", "shed"),)] == 3
        assert told["precompute_problems_total", (("code", "damaged"),)] == cut


def test_threads_lose_no_count() -> None:
    meter = Meter()
    start = threading.Barrier(8)

    def count() -> None:
        start.wait()
        for i in range(2000):
            meter.counter(ROWS, "numbers", "fresh", "store", "").add()
            meter.timer(STAGE_SECONDS, f"stage{i % 50}").observe(0.5)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = samples(meter)
    assert meter.counter(ROWS, "numbers", "fresh", "store", "").value == 16_000
    assert {
        told["precompute_stage_seconds_count", (("stage", f"stage{i}"),)] for i in range(50)
    } == {320}


def test_more_series_than_there_is_room_for_are_left_out_and_harm_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 1 << 12
    monkeypatch.setattr("precompute.store.http.telemetry.instruments.MAX_SLOTS", room)
    meter = Meter(tmp_path, "worker-0")
    fits = room // 21
    for i in range(fits + 20):
        meter.timer(STAGE_SECONDS, str(i)).observe(i)
    meter.counter(PROBLEMS, "late").add(9)
    told = samples(meter)
    sums = [value for (name, _), value in told.items() if name == "precompute_stage_seconds_sum"]
    assert sorted(sums) == list(range(len(sums)))
    assert fits - 10 < len(sums) < fits


def test_a_process_knows_its_memory_and_its_open_files() -> None:
    meter = Meter(process="worker-3")
    meter.process_figures()
    told = samples(meter)
    assert 1e7 < told["precompute_process_resident_bytes", (("process", "worker-3"),)] < 1e11
    assert 3 <= told["precompute_process_open_files", (("process", "worker-3"),)] < 1e5


def test_a_folder_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PrecomputeError, match="metrics cannot be stored in /nowhere"):
        Meter(Path("/nowhere"))


@contextmanager
def limited(kind: int, to: int) -> Iterator[None]:
    """A limit of this process's, meanwhile."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (to, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def test_a_file_is_allocated_before_it_is_written(tmp_path: Path) -> None:
    """What is written to a hole of a mapped file ends the process where the disk is full by
    then."""
    Meter(tmp_path, "worker-0").close()
    assert (tmp_path / "worker-0.values").stat().st_blocks * 512 >= 8 * MAX_SLOTS
    with (
        limited(resource.RLIMIT_FSIZE, 4096),
        pytest.raises(PrecomputeError, match="metrics cannot be stored"),
    ):
        Meter(tmp_path, "worker-1")


def test_a_full_disk_costs_a_series_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meter, keys = Meter(tmp_path, "worker-0"), tmp_path / "worker-0.keys"
    meter.counter(PROBLEMS, "shed").add()
    line = keys.stat().st_size
    # of the next line no byte fits, or some of them
    for size in (line, line + 20):
        with limited(resource.RLIMIT_FSIZE, size):
            meter.counter(PROBLEMS, f"busy {size}").add()
    meter.counter(PROBLEMS, "late").add()
    assert [message[:22] for message in caplog.messages] == ["not all is counted unt"]
    meter.close()
    again = Meter(tmp_path, "worker-0")
    assert {labels: value for (name, labels), value in samples(again).items() if value} == {
        (("code", code),): 1.0 for code in ("shed", "late")
    }


def test_a_clock_that_is_set_back_takes_nothing_off_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, times = Meter(), iter([2 * 10**18, 10**18, 10**18])
    monkeypatch.setattr("time.time_ns", lambda: next(times))
    with Batches(meter).model(["numbers"], []):
        pass
    told = samples(meter)
    assert 0 <= told["precompute_model_seconds_sum", (("view", "numbers"),)] < 60


def test_without_a_file_to_open_a_process_reports_what_it_last_knew() -> None:
    meter = Meter(process="worker-3")
    meter.process_figures()
    before = samples(meter)
    with limited(resource.RLIMIT_NOFILE, 3):
        meter.process_figures()
    assert samples(meter) == before
