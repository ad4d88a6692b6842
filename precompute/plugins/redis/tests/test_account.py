"""Account over Redis: what stands beside the pointer, and a window over rows without files."""

from __future__ import annotations

import pytest

from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rollback import reconcile
from precompute.plugins.redis.tests.rig import flip_field, garble, on_meta
from precompute.store.account import checker
from precompute.store.account.account import read_account, write_account
from precompute.store.account.checker import check_live
from precompute.store.disk.record import replace
from tests.fixtures import MakeProject
from tests.jobs.test_account import INDEXED, ROWS, project, rows
from tests.scene import Scene

__all__ = ["project"]


@pytest.mark.parametrize("name", ["epoch", "owner", "live"])
@pytest.mark.parametrize("online", ["redis"], indirect=True)
def test_a_bit_of_what_stands_beside_the_pointer_in_redis_is_nobodys_act(
    project: Scene, name: str, make_project: MakeProject
) -> None:
    on_meta(flip_field(name))(project)
    (told,) = project.status()["attention"]
    assert told.startswith(f"field {name} of precompute:{{numbers}}:meta in Redis is ")
    # who publishes goes by the pointer, which has a seal
    project = make_project(rows(3), project={"online": project.online}, view=INDEXED)
    assert (project.run().snapshot, project.status()["attention"]) == (3, [])
    on_meta(flip_field(name))(project)
    assert reconcile(project, "numbers", Silent()) is not None
    assert (project.status()["attention"], project.served(range(ROWS))[0]) == ([], 3)


@pytest.mark.parametrize("online", ["redis"], indirect=True)
def test_a_window_moves_over_all_rows(project: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not whole is read at every look, until it is."""
    monkeypatch.setattr(checker, "SAMPLE_ROWS", 0)
    with project.online_store() as online:

        def looked() -> tuple[int, int, list[str]]:
            # of no time there is always enough for one row group
            account = check_live(project.store, online, budget_s=-1.0)
            return account.turn.rows, account.turn.file, account.trouble

        assert check_live(project.store, online, share=1.0).turn.before_us
        # both segments lie in a file each
        assert [looked() for _ in range(4)] == [(38, 0, []), (40, 1, []), (0, 0, []), (38, 0, [])]
        # of another base it begins again
        notes, account = (
            project.store.leases,
            read_account(project.store.leases, "numbers"),
        )
        write_account(notes, replace(account, turn=replace(account.turn, base="99-00000000")))
        assert looked() == (38, 0, [])
        garble(project, 1)
        assert [looked() for _ in range(2)] == [(40, 1, []), (0, 0, [])]
        (told,) = looked()[2]
        assert told.startswith(
            "1 of 40 rows of view 'numbers' are missing or damaged in the online store, that of key "
        )
        assert looked()[2] == [told]
        garble(project, 1)
        assert looked()[2] == []
