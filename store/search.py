"""Search: the vector indexes of what is live, and what is searched by."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from store.answer import MAX_DEADLINE_S
from store.errors import RequestError, VectorIndexError
from store.fallback import Fallback, Miss, check_inputs
from store.freshness import Reason
from store.online.online_store import Pointer
from store.online.vector_index import VectorIndex


class Indexes:
    """The index of each view's live snapshot, opened when it is first searched.

    Args:
        root: the offline store's root, where the files are; None where nothing is searched.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._opened: dict[str, tuple[tuple[int, str], VectorIndex]] = {}
        self._lock = threading.Lock()

    def of(self, pointer: Pointer) -> VectorIndex:
        """The index that was published with a pointer.

        Raises:
            RequestError: the view has none.
            VectorIndexError: it is missing or damaged.
        """
        if pointer.index is None:
            raise RequestError(
                f"view {pointer.view.name!r} has no vector index: add `index: {{on: <vector feature>}}` to it", code="no_index"
            )
        if self.root is None:
            raise VectorIndexError("searching needs the offline store's root: open the lookup with root=…")
        with self._lock:
            publishing, index = self._opened.get(pointer.view.name, (None, None))
            if index is None or publishing != pointer.publishing:
                index = VectorIndex(self.root / pointer.index)
                self._opened[pointer.view.name] = (pointer.publishing, index)
            return index


def searched_vector(row: Mapping[str, Any], pointer: Pointer, key: Any) -> Sequence[float]:
    """The vector of a row, looked up for its neighbours.

    Raises:
        RequestError: 404, the row is missing or its vector null.
    """
    view = pointer.view
    assert view.index is not None
    if row["features"] is None:
        reason = row.get("reason", Reason.UNKNOWN_ENTITY)
        raise RequestError(f"key {key!r} of view {view.name!r} has no vector to search by: {reason}", status=404, code=reason)
    vector: Sequence[float] | None = row["features"][view.index.on]
    if vector is None:
        raise RequestError(
            f"key {key!r} of view {view.name!r} has no vector to search by: it is null, since the model could not take the row's input",
            status=404,
            code="null_vector",
        )
    return vector


def embedded(
    fallback: Fallback | None, pointer: Pointer, inputs: Mapping[str, Any], deadline_ms: float | None
) -> Sequence[float]:
    """The vector that the model makes of inputs now.

    Raises:
        RequestError: there is no model here, it was too slow, or it cannot take the inputs.
    """
    view = pointer.view
    assert view.index is not None
    if fallback is None or not view.fallback:
        raise RequestError(
            f"view {view.name!r} has no fallback here, so it cannot embed inputs: send a key or a vector", code="no_fallback"
        )
    check_inputs(pointer, inputs)
    wait_s = view.fallback_deadline_s if deadline_ms is None else min(deadline_ms / 1000, MAX_DEADLINE_S)
    deadline = time.monotonic() + wait_s
    future = fallback.submit(pointer, ["query"], {"query": inputs}, deadline, query=True)[0]
    try:
        features = future.result(timeout=wait_s).features
    except TimeoutError as exc:
        raise RequestError(f"the model did not answer within {wait_s * 1000:.0f} ms", status=504, code=Reason.DEADLINE) from exc
    except Miss as exc:
        status = {Reason.DEADLINE: 504, Reason.SHED: 503}.get(exc.reason, 422)
        raise RequestError(f"the inputs could not be embedded: {exc}", status=status, code=exc.reason) from exc
    vector: Sequence[float] | None = features.column(view.index.on)[0].as_py()
    if vector is None:
        raise RequestError(
            "the inputs could not be embedded: the model cannot take them, so that their vector is null",
            status=422,
            code=Reason.MODEL_ERROR,
        )
    return vector
