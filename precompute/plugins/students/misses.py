"""Misses: what rows say that a student computed in the model's stead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import pyarrow as pa

from precompute.store.answers.fallback import Column, Computed
from precompute.store.answers.misses import MissTools, Rest
from precompute.store.online.online_store import Pointer

KEY = "fallback.model"
"""Of a view's file and record, which keeps the folder of the student, as configured."""


class StudentMisses:
    """Has all misses computed by what is live, and the rows say so: a
    :class:`precompute.store.answers.misses.SubstituteMisses`."""

    columns: ClassVar[Sequence[Column]] = (
        Column(
            "approximates",
            pa.string(),
            "of a row that a student computed: the fingerprint of the model that it stands in for",
        ),
        Column(
            "agreement",
            pa.float64(),
            "of such a row: how well the student agreed with that model when the view was"
            " published, from 0 to 1 (a correlation from -1), of the feature where it is lowest",
        ),
    )

    def __init__(self, tools: MissTools) -> None:
        pass

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        oldest_s: float | None,
        rest: Rest,
    ) -> list[Future[Computed]]:
        """As :meth:`precompute.store.answers.misses.MissHandler.submit`."""
        return rest(keys, inputs)

    def close(self) -> None:
        """Nothing is left."""

    @staticmethod
    def says(pointer: Pointer) -> Mapping[str, Any]:
        """Whose stead the student stands in, and how well."""
        assert pointer.substitute is not None
        return {"approximates": pointer.model, "agreement": pointer.substitute.least}

    @staticmethod
    def words(spec: str) -> str:
        """What answers misses then, for people."""
        return f"the student {spec}"
