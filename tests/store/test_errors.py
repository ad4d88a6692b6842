"""One tree of errors, which the module's own picture shows as it is."""

from __future__ import annotations

import inspect
import re

import pytest

from precompute.store import errors
from precompute.store.errors import (
    ConflictError,
    NoAnswerError,
    OnlineStoreError,
    PrecomputeError,
    RequestError,
    SourceError,
    UnreadableError,
    did_you_mean,
    nearest_or_all,
)

ALL = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


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
        SourceError,
        UnreadableError,
    }


def test_a_request_error_carries_a_status_and_a_word_for_programs() -> None:
    plain, full = RequestError("no"), RequestError("no", status=404, code="unknown_view")
    assert (plain.status, plain.code, full.status, full.code) == (
        400,
        "bad_request",
        404,
        "unknown_view",
    )


@pytest.mark.parametrize(
    ("name", "names", "end"),
    [
        ("tll", ["name", "ttl"], "; did you mean 'ttl'?"),
        ("TOP_K", ["two_tower", "top_k"], "; did you mean 'top_k'?"),
        ("xyz", ["b", "a"], " (there are: b, a)"),
        (
            "xyz",
            [f"view{n}" for n in range(21)],
            f" (there are: {', '.join(f'view{n}' for n in range(20))}, …)",
        ),
        ("xyz", [], ""),
    ],
)
def test_an_unknown_name_has_the_nearest_or_all_there_are(
    name: str, names: list[str], end: str
) -> None:
    assert nearest_or_all(name, names) == end
    assert did_you_mean(name, names) == (end if end.startswith(";") else "")
