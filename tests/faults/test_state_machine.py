"""Any order of runs, changes, crashes, rollbacks, holds, collections, new models and clock jumps:
what is live is always one state, and the right one."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from precompute.store.disk import crashpoint
from precompute.store.disk.crashpoint import POINTS, InjectedError
from precompute.store.errors import GateError, SnapshotError
from tests.faults.harness import (
    Child,
    FaultScene,
    State,
    act,
    changed,
    check_everything,
    check_no_orphans,
    check_readers,
    check_snapshots,
    read_snapshot,
    small_chunks,
    state_of,
)
from tests.fixtures import MEMORY

ROWS = {key: key * 10 for key in range(24)}


class View(RuleBasedStateMachine):
    """One view and everything that can happen to it.

    ``live`` is the state readers must see: None while a crash left it open which of two it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.scene = FaultScene(self.folder / "project")
        self.scene.settings = {"notify": [], "retention": {"keep": 2, "grace": "0s"}}
        self.open: list[State] = []
        self.live: State | None = None
        self.jump_s = 0.0

    @initialize()
    def first(self) -> None:
        self.scene.write(ROWS)
        self.scene.run()
        self.live = self.scene.history[0]

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    # ---- what happens

    @rule(draw=st.data())
    def source_changes(self, draw: st.DataObject) -> None:
        keys = sorted(self.scene.rows)
        some = draw.draw(st.lists(st.sampled_from(keys), max_size=8, unique=True))
        gone = (
            draw.draw(st.lists(st.sampled_from(keys), max_size=3, unique=True))
            if len(keys) > 12
            else []
        )
        new = range(max(keys) + 1, max(keys) + 1 + draw.draw(st.integers(0, 5)))
        self.scene.write(
            changed(self.scene.rows, [key for key in some if key not in gone], new, gone)
        )

    @rule(back=st.integers(1, 4))
    def source_is_as_it_was(self, back: int) -> None:
        self.scene.write(dict(self.scene.history[-min(back, len(self.scene.history))][0]))

    @rule()
    def model_changes(self) -> None:
        self.scene.write(version=self.scene.version % 3 + 1)

    @rule(full=st.booleans())
    def run(self, full: bool) -> None:
        self.did("run", full=full)

    @rule(full=st.booleans(), point=st.sampled_from(POINTS), nth=st.integers(1, 3))
    def run_that_fails(self, full: bool, point: str, nth: int) -> None:
        crashpoint.arm(point, nth, "raise")
        try:
            self.did("run", full=full)
        finally:
            crashpoint.disarm()

    @rule(point=st.sampled_from(POINTS), mode=st.sampled_from(["kill", "torn"]))
    def run_that_is_killed(self, point: str, mode: str) -> None:
        ended = Child(self.scene, crash=(point, 1, mode)).ended()
        if ended.signal is None and ended.error is None:
            self.must_be(self.expected_of_a_run())
        else:
            self.may_be()

    @rule(hold=st.booleans(), point=st.sampled_from(["", "log.write", "log.link", "online.flip"]))
    def rollback(self, hold: bool, point: str) -> None:
        crashpoint.arm(point, 1, "raise")
        try:
            with small_chunks():
                act(self.scene, "rollback", hold=hold)
        except InjectedError:
            self.may_be()
            return
        except SnapshotError as exc:
            assert "to go back to" in str(exc) or "is live already" in str(exc), exc  # noqa: PT017
            return
        finally:
            crashpoint.disarm()
        self.must_be(self.state_of_live())

    @rule()
    def resume(self) -> None:
        if self.scene.store.log.readable_live() is not None:
            with small_chunks():
                self.scene.project().resume()
            self.must_be(self.state_of_live())

    @rule()
    def publish(self) -> None:
        self.did("publish")

    @rule()
    def gc(self) -> None:
        act(self.scene, "gc")

    @rule(jump_s=st.sampled_from([-7200.0, -10.0, 0.0, 10.0, 1800.0]))
    def clock_jumps(self, jump_s: float) -> None:
        self.jump_s = jump_s

    @precondition(lambda self: not self.scene.store.log.bad())
    @rule()
    def all_is_well(self) -> None:
        ref = self.scene.store.log.live()
        assert ref is not None
        if ref.held is None:
            self.did("run")
            check_everything(self.scene)
        else:
            check_no_orphans(self.scene)

    # ---- what must be so

    @invariant()
    def readers_see_one_state(self) -> None:
        if not self.scene.history:
            return
        found = check_readers(self.scene)
        if self.live is not None:
            assert found == self.live
        else:
            assert found in self.open
            self.live = found

    @invariant()
    def every_snapshot_is_one_state(self) -> None:
        check_snapshots(self.scene)

    # ---- helpers

    def did(self, what: str, **options: Any) -> None:
        """Do it under the clock as it is; the state that is live then is known, unless it
        failed."""
        expected = self.expected_of_a_run() if what == "run" else None
        real, real_ns, jump_s = time.time, time.time_ns, self.jump_s

        def clock() -> float:
            return real() + jump_s

        def clock_ns() -> int:
            return real_ns() + int(jump_s * 1e9)

        try:
            with (
                mock.patch("time.time", clock),
                mock.patch("time.time_ns", clock_ns),
                small_chunks(),
            ):
                act(self.scene, what, **options)
        except InjectedError:
            self.may_be()
        except GateError as exc:
            assert "marked bad" in str(exc)  # noqa: PT017
            self.may_be()  # a pointer that a crash left behind may have been mended
        else:
            self.must_be(self.state_of_live() if expected is None else expected)

    def expected_of_a_run(self) -> State | None:
        """What is live after a run that succeeds; None of a view that is held."""
        ref = self.scene.store.log.live()
        assert ref is not None
        return None if ref.held is not None else (self.scene.rows, self.scene.version)

    def state_of_live(self) -> State:
        """The state of the snapshot that the offline store calls live."""
        ref = self.scene.store.log.live()
        assert ref is not None
        return state_of(self.scene, read_snapshot(self.scene, ref.snapshot), "live")

    def must_be(self, state: State | None) -> None:
        """Readers see this from now on; None: what they saw before."""
        if state is not None:
            self.live = (dict(state[0]), state[1])

    def may_be(self) -> None:
        """It failed on the way: readers see what they saw, or what the offline store calls live
        now."""
        before = [] if self.live is None else [self.live]
        self.open, self.live = [*before, self.state_of_live()], None


View.TestCase.settings = settings(
    max_examples=6,
    stateful_step_count=16,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # an example that fails is short enough; shrinking it takes minutes
    suppress_health_check=list(HealthCheck),
)
TestView = View.TestCase
