"""What lies in a golden root for Redis is read by the oldest version that is promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.make import HERE
from tests.golden.project import answers, doubles, run
from tests.golden.test_golden import opened


@pytest.mark.parametrize(
    "packed", sorted(HERE.glob("format-*/redis.tar.xz")), ids=lambda path: path.parent.name
)
def test_the_oldest_redis_answers_as_it_did(
    packed: Path, oldest_redis_url: str, tmp_path: Path
) -> None:
    scene, expected = opened(packed, tmp_path, oldest_redis_url)
    assert json.loads(json.dumps(answers(scene))) == expected
    rows = doubles(scene, "numbers") | {7: 700.0}
    assert run(scene, "numbers", rows) == "published"
    assert doubles(scene, "numbers") == rows
