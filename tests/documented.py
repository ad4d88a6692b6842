"""Documented: whether the OpenAPI document tells of an answer; held for each that any test gets of
the API."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from precompute.store.http.openapi import openapi_document


@cache
def _operations() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    paths = openapi_document()["paths"]
    # a key of several columns is several segments
    return [
        (re.compile(re.sub(r"\{key\}", ".+", re.sub(r"\{view\}", "[^/]*", path))), paths[path])
        for path in paths
    ]


def check_documented(method: str, path: str, status: int) -> None:
    """A status that an operation of the document may answer with; of what is no operation (a path
    that is none, another method) nothing is asked."""
    bare = path.partition("?")[0]
    for pattern, methods in _operations():
        if pattern.fullmatch(bare) and method.lower() in methods:
            assert str(status) in methods[method.lower()]["responses"], (
                f"{method} {bare} answered {status}, which no document tells"
            )
