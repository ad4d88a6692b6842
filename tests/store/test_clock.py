from __future__ import annotations

import pytest

from precompute.store.times import doubled_s


@pytest.mark.parametrize(
    ("doublings", "expected"),
    [
        (-1, 0.05),
        (0, 0.1),
        (1, 0.2),
        (8, 25.6),
        (9, 30.0),
        (1023, 30.0),
        (1100, 30.0),
        (10**6, 30.0),
    ],
)
def test_what_fails_for_ever_is_waited_for_no_longer_than_the_longest(
    doublings: int, expected: float
) -> None:
    assert doubled_s(0.1, doublings, 30.0) == expected
