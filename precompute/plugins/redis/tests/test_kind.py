"""The URLs of a Redis: which stores they lead to, and how they are told."""

from __future__ import annotations

import contextlib

import pytest

from precompute.plugins.redis.kind import KIND
from precompute.plugins.redis.miss_cache import MissCacheRedis
from precompute.plugins.redis.store import RedisStore
from precompute.store.doors import ONLINE
from precompute.store.errors import ConfigError
from precompute.store.online.miss_cache import MissCacheLimits
from precompute.store.online.url import FORMS, open_miss_cache, open_online_store, table_folder

URLS = [
    "redis://:hunter2@127.0.0.1:1/0",
    "rediss://127.0.0.1:1/0",
    "unix:///nowhere/redis.sock?db=0",
    "redis+cluster://127.0.0.1:1,127.0.0.1:2",
    "rediss+cluster://127.0.0.1:1",
]


@pytest.mark.parametrize("url", URLS)
def test_every_form_leads_to_a_store_and_its_cache(url: str) -> None:
    scheme = url.partition(":")[0]
    assert (table_folder(url), ONLINE.open(scheme), ONLINE.what(scheme) in FORMS) == (
        None,
        KIND,
        True,
    )
    with contextlib.closing(open_online_store(url)) as store:
        assert isinstance(store, RedisStore)
    with contextlib.closing(open_miss_cache(url, MissCacheLimits())) as cache:
        assert isinstance(cache, MissCacheRedis)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (
            "redsi://:hunter2@host:6379/0?a=hunter2",
            "'redsi://…@host:6379/0' {}; did you mean 'redis'?",
        ),
        ("redis:host", "'redis:host' {}"),
        ("unix:./socket", "'unix:./socket' {}"),
    ],
)
def test_what_is_no_such_url_is_told_without_a_password(url: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        table_folder(url)
    why = "names no online store: write table:./folder or redis://host:6379/0"
    assert str(refused.value) == f"online: {told.format(why)}"
