"""One tree of errors, which the module's own picture shows as it is."""

from __future__ import annotations

import inspect
import re

import pytest

from precompute.store import errors
from precompute.store.errors import ConflictError, NoAnswerError, OnlineStoreError, PrecomputeError, RequestError, SnapshotError

ALL = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}


@pytest.mark.parametrize("kind", ALL.values(), ids=ALL.keys())
def test_every_error_is_one_the_operator_or_caller_can_act_on(kind: type[Exception]) -> None:
    assert issubclass(kind, PrecomputeError)
    assert str(kind("what went wrong")) == "what went wrong"


def test_the_picture_of_the_tree_names_every_error() -> None:
    assert errors.PrecomputeError.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+)", errors.PrecomputeError.__doc__)
    assert sorted([*drawn, "PrecomputeError"]) == sorted(ALL)
    assert {kind.__base__ for name, kind in ALL.items() if name in drawn} == {
        PrecomputeError,
        ConflictError,
        OnlineStoreError,
        NoAnswerError,
        RequestError,
        SnapshotError,
    }


def test_a_request_error_carries_a_status_and_a_word_for_programs() -> None:
    plain, full = RequestError("no"), RequestError("no", status=404, code="unknown_view")
    assert (plain.status, plain.code, full.status, full.code) == (400, "bad_request", 404, "unknown_view")
