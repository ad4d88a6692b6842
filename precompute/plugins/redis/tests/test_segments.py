"""Segments of random histories, served from Redis as they are from table files; one that is loaded
again holds what it held."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest
import redis

from precompute.plugins.redis.store import RedisStore
from precompute.plugins.redis.tests.rig import RIG
from tests.fixtures import MakeProject
from tests.jobs.test_segments import SNAPSHOTS, Served, World
from tests.scene import UNJUDGED


def held(client: redis.Redis, view: str, name: str) -> bytes:
    """What Redis holds of a segment: its rows, and the hashes of its keys."""
    hashes = client.hget(f"precompute:{{{view}}}:meta", f"hashes:{name}")
    assert hashes is None or isinstance(hashes, bytes)
    # but for the counter of their load
    prefix = f"precompute:{{}}{view}:{name.partition('-')[0]}."
    keys = [bytes(key) for key in client.scan_iter(match=f"{prefix}*", count=5000)]
    pipe = client.pipeline(transaction=False)
    for key in keys:
        pipe.dump(key)
    of = (key[len(prefix) :].partition(b":")[2] for key in keys)
    lines = sorted(zip(of, pipe.execute(), strict=True))
    return hashlib.sha256(repr(lines).encode()).digest() + (hashes or b"")


def test_every_snapshot_is_served_whatever_came_left_or_was_lost(
    tmp_path: Path, redis_url: str
) -> None:
    world = World(tmp_path, 1)
    with (
        contextlib.closing(RedisStore(redis_url)) as online,
        contextlib.closing(redis.Redis.from_url(redis_url)) as client,
    ):
        served = Served(
            world,
            online,
            lambda name: RIG.lose(redis_url, "made", int(name.partition("-")[0])),
            lambda name: held(client, "made", name),
        )
        for _ in range(SNAPSHOTS // 4):
            snapshot = world.run(None)
            served.step(snapshot)
    assert len(served.loaded) > len(set(served.loaded))


ROWS = 700


@pytest.mark.parametrize(("number", "dim"), [(1, 0), (2, 4)])
def test_a_damaged_segment_is_loaded_again_alone_as_it_was(
    make_project: MakeProject, redis_url: str, number: int, dim: int
) -> None:
    """In the buckets that its narrow rows lay in, or under a key for each row."""
    view: dict[str, Any] = {"gates": UNJUDGED | {"rows": None}}
    if not dim:
        view |= {"model": {"use": "tests.models:Doubler", "args": {"dim": 0}}}
        view |= {"features": {"double": {"dtype": "float64"}}}
    for changed in (0, 5):
        rows = [(i, i + 0.5 if i < changed else float(i)) for i in range(ROWS - changed)]
        project = make_project(rows, project={"online": redis_url}, view=view)
        project.run()
    names = project.pointer().segments
    assert len(names) == 2
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        before = [held(client, "numbers", name) for name in names]
        client.delete(min(client.scan_iter(f"precompute:{{}}numbers:{number}.*")))
        assert [held(client, "numbers", name) for name in names] != before
        assert project.cli("reconcile", "numbers") == 0
        report = project.store.runs.last()
        assert report is not None
        assert report.usage.loaded_rows == {1: ROWS, 2: 10}[number]
        assert [held(client, "numbers", name) for name in names] == before
    assert (project.pointer().segments, project.faults()) == (names, [])
