"""Search: the nearest rows of a view by key, vector or inputs, with their freshness; and the open
vector indexes of what is live."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from precompute.store.account.account import NOTES, note_sighting
from precompute.store.answers.answer import Answer
from precompute.store.answers.fallback import (
    Fallback,
    Miss,
    Waiting,
    check_inputs,
    no_fallback,
    unpacked_view,
)
from precompute.store.answers.plan import AnswerPlan
from precompute.store.disk.record import plain
from precompute.store.errors import RequestError, VectorIndexError
from precompute.store.feature_view import FeatureView, status_of
from precompute.store.keys import join_key, key_text, plain_key, split_key
from precompute.store.online.codec import RowCodec
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.online_store import Pointer
from precompute.store.times import AnswerSource, Reason, Status, as_datetime
from precompute.store.vectors.index_files import index_figures
from precompute.store.vectors.index_rows import RowFilter
from precompute.store.vectors.vector_index import Neighbours, VectorIndex
from precompute.store.wire.lookup_options import LookupOptions, SearchOptions, check_features


class Begin(Protocol):
    """:meth:`precompute.store.answers.lookup.Lookup.begin`."""

    def __call__(
        self,
        view: str,
        keys: Sequence[Any],
        options: LookupOptions = ...,
        *,
        admit: Callable[[AnswerPlan, FoundRows], None] | None = None,
    ) -> Answer: ...


class Searches:
    """Searches the views that are live, each by its own index, opened when it is first searched.

    Args:
        root: the offline store's root, where the indexes are; None where nothing is searched.
        live: a view's pointer; raises where there is none.
        begin: looks rows up.
        age_of: under a pointer, the age now (s) of a row that was computed at so many µs since
            1970.
    """

    def __init__(
        self,
        root: Path | None,
        live: Callable[[str], Pointer],
        begin: Begin,
        age_of: Callable[[Pointer], Callable[[int], float]],
    ) -> None:
        self.root = root
        self._live, self._begin, self._age_of = live, begin, age_of
        self._opened: dict[str, tuple[tuple[int, str], VectorIndex]] = {}
        self._about: dict[str, tuple[tuple[int, str], dict[str, Any] | None]] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        """View → what is held while its index is opened, which may take seconds."""

    def search(
        self,
        view: str,
        options: SearchOptions,
        fallback: Fallback | None,
        admit: Callable[[AnswerPlan, FoundRows], None] | None = None,
        waiting: Waiting | None = None,
    ) -> tuple[FeatureView, dict[str, Any]]:
        """The view, and what :meth:`precompute.store.answers.lookup.Lookup.search` gives;
        ``fallback`` embeds inputs, ``admit`` is as of
        :meth:`precompute.store.answers.lookup.Lookup.begin`, ``waiting`` records what the search
        waits for."""
        options.check()
        for _ in range(5):
            try:
                found = self._searched(view, options, fallback, admit, waiting or Waiting())
            except VectorIndexError:
                self._note(view)
                raise
            if found is not None:
                return found
        # five publishes within one search
        raise VectorIndexError(f"view {view!r} is being published over and over; search again")

    def _searched(
        self,
        view: str,
        options: SearchOptions,
        fallback: Fallback | None,
        admit: Callable[[AnswerPlan, FoundRows], None] | None,
        waiting: Waiting,
    ) -> tuple[FeatureView, dict[str, Any]] | None:
        """As :meth:`search`; None where another snapshot was published meanwhile."""
        pointer = self._live(view)
        index = self.index_of(pointer)
        check_features(pointer.view, options.features)
        _check_model(pointer, options.model)
        entity = pointer.view.entity
        chunked = pointer.view.definition.chunk is not None
        keys_of = partial(_chunks_of, index) if chunked else _keys_of
        exclude = keys_of(options.exclude, entity)
        only = None if options.only is None else keys_of(options.only, entity)
        where = None if options.filter is None else RowFilter(pointer.view, options.filter)
        if options.key is not None:
            exclude.add(key_text(options.key, entity))
        query = self._query(pointer, index, options, fallback, waiting)
        if query is None:
            return None
        if not chunked or (only is not None and len({_parent(key) for key in only}) == 1):
            found = index.search(query, options.k, exclude=exclude, only=only, where=where)
        else:
            own = None if options.key is None else _parent(key_text(options.key, entity))
            found = _best_chunks(
                partial(index.search, query, exclude=exclude, only=only, where=where),
                options.k,
                own,
            )
        rows = self._rows(pointer, found, options.features, admit)
        if rows is None:
            return None
        about = {
            "view": view,
            "snapshot": pointer.snapshot,
            "model": pointer.model,
            "metric": index.metric,
        }
        embedded = options.inputs is not None or options.text is not None
        other = pointer.in_stead
        if other is not None and embedded:
            about |= {
                "query_model": other.fingerprint,
                "agreement": other.least,
            }
        return pointer.view, about | {"rows": rows}

    def index_of(self, pointer: Pointer) -> VectorIndex:
        """The index that was published with a pointer. A base that stays under other changed rows
        is not opened again.

        Raises:
            RequestError: the view has none.
            VectorIndexError: it is missing, damaged, or of another model than the rows.
        """
        if pointer.index is None:
            raise RequestError(
                f"view {pointer.view.name!r} has no vector index: add `index: {{on: <vector"
                " feature>}` to it",
                code="no_index",
            )
        if self.root is None:
            raise VectorIndexError(
                "searching needs the offline store's root: open the lookup with root=…"
            )
        with self._locks[pointer.view.name]:
            publishing, index = self._opened.get(pointer.view.name, (None, None))
            if index is None or publishing != pointer.publishing:
                folders = (self.root / folder for folder in pointer.index_folders)
                try:
                    index = VectorIndex(*folders, opened=index)
                except VectorIndexError:
                    self._note(pointer.view.name)
                    raise
                if index.model != pointer.model:
                    raise VectorIndexError(
                        f"the vector index {pointer.index} is of model {index.model[:12]}, the rows"
                        f" of {pointer.model[:12]}: `precompute publish {pointer.view.name}"
                        " --reload` builds it again"
                    )
                self._opened[pointer.view.name] = (pointer.publishing, index)
            return index

    def opened(self) -> set[str]:
        """Views whose index is open."""
        return set(self._opened)

    def close(self, view: str) -> None:
        """Let go of a view's index; searches that have it go on."""
        self._opened.pop(view, None)

    def figures(self, pointer: Pointer) -> dict[str, Any] | None:
        """What was measured of a pointer's index, for people; None where there is none, or none
        that can be read."""
        if pointer.index is None or self.root is None:
            return None
        publishing, about = self._about.get(pointer.view.name, (None, None))
        if publishing != pointer.publishing or about is None:
            found = index_figures(self.root / pointer.index)
            about = None if found is None else plain(found)
            self._about[pointer.view.name] = (pointer.publishing, about)
        return about

    def _query(
        self,
        pointer: Pointer,
        index: VectorIndex,
        options: SearchOptions,
        fallback: Fallback | None,
        waiting: Waiting,
    ) -> npt.ArrayLike | None:
        """What is searched by: the vector given, or that of a row or of inputs; None when another
        snapshot was published before the row was read."""
        if options.vector is not None:
            return options.vector
        inputs = options.inputs if options.text is None else {text_column(pointer): options.text}
        if inputs is not None:
            return _embedded(fallback, pointer, inputs, options.deadline_ms, waiting)
        found = index.find(key_text(options.key, pointer.view.entity))
        if found is not None:
            if (
                status_of(pointer.view, self._age_of(pointer)(found.computed_at_us))
                is Status.MISSING
            ):
                raise _not_searchable(pointer, options.key, Reason.EXPIRED)
            return found.vector
        self._raise_missing(pointer, options.key)
        return None

    def _raise_missing(self, pointer: Pointer, key: Any) -> None:
        """Say why the index has no vector of a row: there is no such row, or its vector is null;
        None when another snapshot was published meanwhile.

        Raises:
            RequestError: 404, one of these.
            VectorIndexError: the row has a vector, and the index has it not.
        """
        view = pointer.view
        assert view.index is not None
        answer = self._begin(view.name, [key], LookupOptions([view.index.on], fallback=False))
        if answer.pointer.publishing != pointer.publishing:
            return
        row = answer.rows()[0]
        if row["features"] is None:
            raise _not_searchable(pointer, key, row["reason"], answer.row(0).detail)
        if row["features"][view.index.on] is None:
            raise RequestError(
                f"key {key!r} of view {view.name!r} has no vector to search by: it is null, since"
                " the model could not take the row's input",
                status=404,
                code="null_vector",
            )
        raise VectorIndexError(
            # without the key, which often names a person: this is logged
            f"the vector index {pointer.index} has no vector of a row that is live: `precompute"
            f" publish {view.name} --reload` builds it again"
        )

    def _note(self, view: str) -> None:
        """Note a sighting, so that the checker looks at the view soon."""
        if self.root is not None:
            note_sighting(self.root / view / NOTES)

    def _rows(
        self,
        pointer: Pointer,
        found: Neighbours,
        features: Sequence[str],
        admit: Callable[[AnswerPlan, FoundRows], None] | None,
    ) -> list[dict[str, Any]] | None:
        """The rows that an index found, with their scores and freshness, those that have expired
        left out; None when another snapshot was published before their features were read. Without
        features nothing is read: the index knows when each row was computed.
        """
        if not found.keys:
            return []
        if features:
            answer = self._begin(
                pointer.view.name, found.keys, LookupOptions(features, fallback=False), admit=admit
            )
            if answer.pointer.publishing != pointer.publishing:
                return None
            rows = zip(answer.rows(), found.scores, strict=True)
            return [
                {"key": row.pop("key"), "score": score, **row}
                for row, score in rows
                if row["status"] != Status.MISSING
            ]
        age_of, view, about = self._age_of(pointer), pointer.view, []
        for key, score, computed_at_us in zip(*found, strict=True):
            age_s = age_of(computed_at_us)
            status = status_of(view, age_s)
            if status is not Status.MISSING:
                row = {
                    "key": key,
                    "score": score,
                    "status": str(status),
                    "source": str(AnswerSource.STORE),
                    "computed_at": as_datetime(computed_at_us),
                    "age_s": age_s,
                    "ttl_s": view.ttl_s,
                    "snapshot": pointer.snapshot,
                    "model": pointer.model,
                    "features": {},
                }
                about.append(row)
        return about


CHUNKS_A_PARENT = 4
"""Rows looked for at first, for each long text (the parent of its chunks) that is wanted; then four
times as many, until there are enough."""


def _best_chunks(search: Callable[[int], Neighbours], k: int, own: str | None) -> Neighbours:
    """The nearest chunk of each of the ``k`` nearest long texts; ``own`` is left out."""
    wanted = CHUNKS_A_PARENT * k
    while True:
        found = search(wanted)
        best: dict[str, int] = {}
        for at, key in enumerate(found.keys):
            if (parent := _parent(key)) != own:
                best.setdefault(parent, at)
        if len(best) >= k or len(found.keys) < wanted:
            rows = list(best.values())[:k]
            keys, scores, times = found
            return Neighbours(
                [keys[row] for row in rows],
                [scores[row] for row in rows],
                [times[row] for row in rows],
            )
        wanted *= CHUNKS_A_PARENT


MOST_CHUNKS = 20_000
"""Chunks, at most, of all the long texts that a search names: each may be compared."""
_CHUNKS_AT_ONCE = 64
"""Numbers of a text's chunks that are looked for together. Where as many in a row are not there,
the text has no more; fewer are gaps, where chunks were rejected."""


def _keys_of(keys: Sequence[Any], entity: Sequence[str]) -> set[str]:
    return {key_text(key, entity) for key in keys}


def _chunks_of(index: VectorIndex, keys: Sequence[Any], entity: Sequence[str]) -> set[str]:
    """As :func:`_keys_of`, where a long text's key, which has no chunk's number, stands for all of
    its chunks.

    Raises:
        RequestError: no key, or 413: more than :data:`MOST_CHUNKS`.
    """
    plain = [plain_key(key) for key in keys]
    found = {key_text(key, entity) for key in plain if _is_chunk(key, entity)}
    texts = [
        split_key(key_text(key, entity[:-1]), entity[:-1])
        for key in plain
        if not _is_chunk(key, entity)
    ]
    left, first = [join_key([*parts, ""], entity) for parts in texts], 0
    while left:
        numbered = {
            text: [f"{text}{number}" for number in range(first, first + _CHUNKS_AT_ONCE)]
            for text in left
        }
        there = index.there(list(chain.from_iterable(numbered.values())))
        left, first = (
            [text for text in left if not there.isdisjoint(numbered[text])],
            first + _CHUNKS_AT_ONCE,
        )
        found |= there
        if len(found) > MOST_CHUNKS:
            raise RequestError(
                f"`only` and `exclude` name at most {MOST_CHUNKS:,} chunks each, and these texts"
                " have more: name fewer of them",
                status=413,
                code="too_many_keys",
            )
    return found


def _is_chunk(key: Any, entity: Sequence[str]) -> bool:
    """Whether a key names a chunk, and no long text: by its number of parts; a text of one column
    may have a / in it."""
    if isinstance(key, list):
        return len(key) != len(entity) - 1
    text, slash, number = str(key).rpartition("/")
    return bool(slash) and number.isdecimal() and text.count("/") == len(entity) - 2


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def _not_searchable(
    pointer: Pointer, key: Any, reason: Any, detail: str | None = None
) -> RequestError:
    status = 400 if reason == Reason.BAD_KEY else 404
    why = reason if detail is None else f"{reason}, {detail}"
    return RequestError(
        f"key {key!r} of view {pointer.view.name!r} has no vector to search by: {why}",
        status=status,
        code=reason,
    )


def _check_model(pointer: Pointer, model: str | None) -> None:
    if model is not None and model != pointer.model:
        raise RequestError(
            f"the vector is of model {str(model)[:12]!r}, view {pointer.view.name!r} of"
            f" {pointer.model[:12]!r}: embed it by the model that is live",
            status=409,
            code="other_model",
        )


_NOT_EMBEDDED = {
    Reason.DEADLINE: (504, "the model was too slow"),
    Reason.SHED: (503, "the model has too much in hand already"),
}


def _embedded(
    fallback: Fallback | None,
    pointer: Pointer,
    inputs: Mapping[str, Any],
    deadline_ms: float | None,
    waiting: Waiting,
) -> Sequence[float]:
    """The vector that the model makes of inputs now.

    Raises:
        RequestError: there is no model here, it was too slow, it failed, or it cannot take the
            inputs. What the model said, with its files and values, is the error's ``__cause__``,
            and in the log of the process that has the model: no caller over HTTP gets it.
        CancelledError: no caller waits for it any more.
    """
    view = pointer.view
    assert view.index is not None
    if fallback is None or not view.fallback:
        raise no_fallback(view)
    check_inputs(pointer, inputs)
    wait_s = view.fallback_deadline_s if deadline_ms is None else deadline_ms / 1000
    deadline = time.monotonic() + wait_s
    future = fallback.submit(pointer, ["query"], {"query": inputs}, deadline, query=True)[0]
    waiting.add(future, deadline)
    try:
        row = future.result(timeout=wait_s).row
    except TimeoutError as exc:
        raise RequestError(
            f"the model did not answer within {wait_s * 1000:.0f} ms",
            status=504,
            code=Reason.DEADLINE,
        ) from exc
    except Miss as exc:
        status, why = _NOT_EMBEDDED.get(
            exc.reason,
            (
                (422, "the model cannot take them")
                if exc.broken is False
                else (502, "the model failed")
            ),
        )
        raise RequestError(
            f"the inputs could not be embedded: {why}", status=status, code=exc.reason
        ) from exc
    vector: Sequence[float] | None = RowCodec(unpacked_view(view)).decode_one(row, [view.index.on])[
        1
    ][view.index.on]
    if vector is None:
        raise RequestError(
            "the inputs could not be embedded: the model cannot take them, so that their vector is"
            " null",
            status=422,
            code=Reason.MODEL_ERROR,
        )
    return vector


def takes_text(pointer: Pointer) -> bool:
    """Whether a view can be searched by a text: it has an index, a model that embeds, and one
    column that a text goes in."""
    return pointer.index is not None and pointer.view.fallback and len(_text_columns(pointer)) == 1


def _text_columns(pointer: Pointer) -> list[str]:
    """The text columns of the source; where there are several, the one alone that is cut into
    chunks or that a built-in model is configured to read."""
    texts = [column for column, kind in pointer.input_columns.items() if kind == "string"]
    chunk, model = pointer.view.definition.chunk, pointer.view.definition.model
    # `text` is what all of them read by default
    named = (
        chunk.column
        if chunk is not None
        else model.args.get("column", "text")
        if ":" not in model.use
        else None
    )
    return [named] if named in texts else texts


def text_column(pointer: Pointer) -> str:
    """The input column that a text is put in, to search by it.

    Raises:
        RequestError: there is none, or several.
    """
    texts = _text_columns(pointer)
    if len(texts) != 1:
        raise RequestError(
            f"a text needs a view with one text input column, {pointer.view.name!r} has"
            f" {texts or 'none'}: search by a key, or by inputs={{column: value}} (columns:"
            f" {', '.join(pointer.input_columns) or 'none'})"
        )
    return texts[0]
