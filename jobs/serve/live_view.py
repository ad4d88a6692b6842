"""Live view: a view opened as its live snapshot was computed, to compute single rows with the same
source and model.

It is opened from the live pointer, since the configuration on disk may have changed; files of this
machine must confirm what it runs. Its model must have the snapshot's fingerprint, or it is refused:
two fingerprints are two spaces, and never mix.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from precompute.engine.rows import with_null_rows
from precompute.engine.runner import Runner
from precompute.jobs.config.project import Project
from precompute.jobs.run.rows.open_view import OpenView, open_view
from precompute.jobs.run.rows.substitute import substitute_of
from precompute.model import Model, QueryModel, ReadingModel, starting_from
from precompute.model_code import code_changes
from precompute.registry import LoadedModel, fingerprint_of, load_with_fingerprint
from precompute.sources.cached_source import CachedSource
from precompute.store.answers.fallback import Computed, Miss, unpacked_view
from precompute.store.disk.record import plain
from precompute.store.errors import ConfigError, PrecomputeError, SourceError
from precompute.store.feature_view import CHUNK, NAME, FeatureView, Substitute
from precompute.store.http.telemetry.instruments import Caller
from precompute.store.keys import split_key
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import Packed
from precompute.store.online.online_store import Pointer
from precompute.store.times import Partition, Reason
from precompute.techniques.table import REFERENCE

log = logging.getLogger(__name__)

REFUSED_S = 30.0
"""How long a view is refused without loading its model again, once that was found not to be the
live snapshot's: loading takes seconds."""


class RequestedRow(NamedTuple):
    """A requested row: key text, the input columns' values when they came with the request,
    what is live for the caller, and whose trace it is in."""

    key: str
    values: Mapping[str, Any] | None
    pointer: Pointer
    caller: Caller | None = None


class LiveView(NamedTuple):
    """A view as one publishing of it was computed, and how its rows are packed; what it is searched
    by has a codec of its own."""

    view: OpenView
    codec: RowCodec
    query_codec: RowCodec
    batch_key: Hashable
    """Equal for two views whose rows the model can compute in one call."""
    cached: CachedSource
    runner: Runner
    pointer: Pointer

    @classmethod
    def of(cls, view: OpenView, pointer: Pointer) -> LiveView:
        """The view that was opened for a pointer."""
        features, schema = view.view.features, view.source.schema
        inputs = tuple(zip(schema.names, map(str, schema.types), strict=True))
        batch_key = (id(view.model), view.variant, features, view.view.definition.bad_rows, inputs)
        cached = view.source.cached()
        # begins to read it
        cached.rows([])
        codec, query_codec = RowCodec(view.view), RowCodec(unpacked_view(view.view))
        runner = Runner(view.model, view.view, search=False)
        return cls(view, codec, query_codec, batch_key, cached, runner, pointer)

    @property
    def reads_key(self) -> bool:
        """Whether the model may read the key, or the key says which chunk of a text is meant, so
        that equal inputs under two keys may give two rows."""
        model, view = self.view.model, self.view.view
        return (
            not isinstance(model, ReadingModel)
            or view.definition.chunk is not None
            or not set(view.entity).isdisjoint(model.reads())
        )

    def rows_of(
        self, requests: Mapping[int, RequestedRow], results: list[Computed | Exception]
    ) -> list[InputRows]:
        """The input rows of requests by their numbers, as far as there are any; inputs that do not
        fit go into ``results`` as misses."""
        found = self._source_rows(requests)
        for i, request in requests.items():
            if request.values is not None:
                try:
                    row = self._given_row(request.key, request.values)
                    if row is None:
                        results[i] = Miss(Reason.UNKNOWN_ENTITY)
                    else:
                        found.append(InputRows(self, [i], row))
                except (pa.ArrowException, ValueError, TypeError, OverflowError) as exc:
                    # its message has the values, which are often a person's
                    results[i] = Miss(
                        Reason.MODEL_ERROR,
                        f"the inputs do not fit the source's columns ({type(exc).__name__})",
                    )
        return found

    def _source_rows(self, requests: Mapping[int, RequestedRow]) -> list[InputRows]:
        """The rows of the requests that came without inputs, as far as the source has them."""
        number = {one.key: i for i, one in requests.items() if one.values is None and one.key}
        if not number:
            return []
        rows = self.cached.rows(list(number))
        if rows is None:
            try:
                rows = self.view.source.rows(list(number))
            except SourceError:
                # a file may have been replaced between its footer and its rows
                rows = self.view.source.rows(list(number))
        if not rows.num_rows:
            return []
        numbers = [number[key] for key in rows.column("key").to_pylist()]
        return [InputRows(self, numbers, rows.drop_columns(["key"]))]

    def _given_row(self, key: str, inputs: Mapping[str, Any]) -> pa.Table | None:
        """One source row from a request; None where its text has no such chunk: the entity's
        columns from the key, null for every input that was not given."""
        source, entity = self.view.source, self.view.view.entity
        values: dict[str, Any] = dict(inputs)
        for name, text in zip(entity, split_key(key, entity), strict=False):
            integer = pa.types.is_integer(source.schema.field(name).type)
            values[name] = (int(text) if text.lstrip("-").isdigit() else None) if integer else text
        chunk = self.view.view.definition.chunk
        # a search has no key, and its text is one query
        if chunk is not None and key and isinstance(values.get(chunk.column), str):
            piece = source.piece(values[chunk.column], values.get(CHUNK) or 0)
            if piece is None:
                return None
            values[chunk.column] = piece
        columns = [pa.array([_of_json(values.get(f.name), f.type)], f.type) for f in source.schema]
        return pa.Table.from_arrays(columns, schema=source.schema)


class InputRows(NamedTuple):
    """Requests by their numbers, and a source row for each."""

    opened: LiveView
    numbers: list[int]
    rows: pa.Table


def _of_json(value: Any, kind: pa.DataType) -> Any:
    """An input as its column takes it: bytes are base64 in JSON."""
    binary = isinstance(value, str) and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
    return base64.b64decode(value, validate=True) if binary else value


def compute(
    input_rows: Sequence[InputRows],
    query: bool,
    requests: Sequence[RequestedRow],
    results: list[Computed | Exception],
) -> None:
    """Compute rows of views with one ``batch_key`` in one call, into ``results``: what the model
    makes of them or, for a ``query``, the vectors that are searched by."""
    opened = input_rows[0].opened
    view, model, runner = opened.view.view, opened.view.model, opened.runner
    if query and isinstance(model, QueryModel):
        runner = Runner(model.for_queries(), view, search=False)
    numbers = [i for each in input_rows for i in each.numbers]
    batch = pa.concat_tables([each.rows for each in input_rows]).combine_chunks().to_batches()[0]
    done = with_null_rows(view, runner.compute(batch, lanes=runner.lanes_for(batch.num_rows)))
    now_us = time.time_ns() // 1000
    computed = [numbers[row] for row in done.rows.tolist()]
    if computed:
        hashes = kernels.hashes(Packed.of([requests[i].key.encode() for i in computed]))
        codec = opened.query_codec if query else opened.codec
        snapshots = np.array([requests[i].pointer.snapshot for i in computed])
        rows = codec.encode(done.features, hashes, np.full(len(computed), now_us), snapshots)
        for j, i in enumerate(computed):
            results[i] = Computed(rows.at(j), now_us)
    for rejection in done.rejections:
        results[numbers[rejection.row]] = Miss(Reason.MODEL_ERROR, rejection.error)


class Opener:
    """Opens views as they are live; those of one model share it.

    Args:
        store: where the snapshots are that the views read.
        folder: of the project: where relative paths and modules of what is live are.
        memory_mb: DuckDB's memory, for each view.
    """

    def __init__(self, store: OfflineStore, folder: Path, memory_mb: int) -> None:
        self._store, self._folder, self._memory_mb = store, folder, memory_mb
        self._models: dict[str, LoadedModel] = {}
        self.refused: dict[tuple[str, tuple[int, str]], tuple[float, str]] = {}
        """View's publishing whose model was loaded and was not the live snapshot's → when that was
        (monotonic), and what it was refused with."""

    def open(self, pointer: Pointer) -> OpenView:
        """Open the view as its live snapshot was computed, with the model converted.

        Raises:
            PrecomputeError: the model on disk is not the live snapshot's, or was found not to be
                within the last :data:`REFUSED_S`; or no file of ours names it.
        """
        publishing, now = (pointer.view.name, pointer.publishing), time.monotonic()
        refused_at, refusal = self.refused.get(publishing, (-REFUSED_S, ""))
        if refusal and now < refused_at + REFUSED_S:
            raise PrecomputeError(refusal)
        check_confirmed(pointer, self._store, self._folder)
        # a shared model may be older than the files it was loaded from
        for _ in range(2):
            opened = open_view(
                pointer.miss_view,
                self._store,
                self._folder,
                pinned=pointer.inputs,
                snapshot=pointer.snapshot,
                partition=None if pointer.partition is None else Partition.parse(pointer.partition),
                memory_mb=self._memory_mb,
                load=self._load,
            )
            if opened.fingerprint == pointer.miss_model:
                self.refused.pop(publishing, None)
                try:
                    if opened.variant != REFERENCE and opened.source.head(1).num_rows:
                        opened.convert()
                except BaseException:
                    opened.source.close()
                    raise
                self._tell_other_code(pointer, opened)
                return opened
            opened.source.close()
            # where its fingerprint() does not read the files, _load would not see that they changed
            self._models = {
                key: loaded
                for key, loaded in self._models.items()
                if loaded.model is not opened.model
            }
        by = None if pointer.in_stead is None else pointer.view.misses_by
        which = "model" if by is None else f"{by} {pointer.view.powers[by]}"
        refusal = (
            f"the {which} on disk has fingerprint {opened.fingerprint[:12]}, the live snapshot"
            f" {pointer.miss_model[:12]}: run `precompute run {pointer.view.name}` so that both"
            " agree"
        )
        now = time.monotonic()
        recent = {w: (at, why) for w, (at, why) in self.refused.items() if now < at + REFUSED_S}
        self.refused = recent | {publishing: (now, refusal)}
        raise PrecomputeError(refusal)

    def _tell_other_code(self, pointer: Pointer, opened: OpenView) -> None:
        """Log that this host's code of the model is not the code that computed what is live, under
        the same fingerprint. It is no refusal: a harmless change would take all misses away until
        the next run that computes rows, which compares unchanged ones."""
        if pointer.in_stead is not None:
            return
        # what cannot be read here is told by others
        with contextlib.suppress(PrecomputeError):
            live = self._store.view(pointer.view.name).snapshot(pointer.snapshot)
            if changes := code_changes(live.code, opened.code()):
                log.warning(
                    "view %r: this host's code of the model differs from what computed snapshot %d"
                    " (%s), under the same fingerprint: if its values differ, so do misses from"
                    " rows; the next run that computes rows compares 64 of them",
                    pointer.view.name,
                    pointer.snapshot,
                    changes,
                )

    def _load(self, use: str, args: Mapping[str, Any], precision: str) -> LoadedModel:
        """Load a model, or take the one another view loaded from the same files with the same
        arguments and precision; tables are never shared."""
        if any(isinstance(v, pa.Table) for v in args.values()):
            return load_with_fingerprint(use, args, self._folder)
        key = json.dumps([use, args, precision], sort_keys=True, default=str)
        loaded = self._models.get(key)
        if loaded is None or self._fingerprint(loaded.model, use) != loaded.fingerprint:
            loaded = self._models[key] = load_with_fingerprint(use, args, self._folder)
        return loaded

    def _fingerprint(self, model: Model, use: str) -> str:
        with starting_from(self._folder):
            return fingerprint_of(model, use)


def check_confirmed(pointer: Pointer, offline: OfflineStore, folder: Path) -> None:
    """Refuse a pointer whose SQL or model no file of this machine confirms: else who can write to
    the online store could have any SQL run, and any class made.

    It must agree with the manifest of the snapshot that it names, or with the view's file as it is
    now; its substitute with that manifest, or with what the view's file names.

    Args:
        pointer: of what is live.
        offline: where this machine has manifests, if it has any.
        folder: the project's.

    Raises:
        ConfigError: it agrees with none; says what to do.
    """
    name, executed = pointer.view.name, _executed_parts(pointer.view)
    other = None if pointer.in_stead is None else plain(pointer.in_stead.model)
    if NAME.match(name) and any(
        _executed_parts(view) == executed and other in (None, of and plain(of.model))
        for view, of in _definitions_here(pointer, offline, folder)
    ):
        return
    raise ConfigError(
        f"view {name[:64]!r}: its pointer names SQL or a model that neither the manifest of"
        f" snapshot {pointer.snapshot} under {offline.root} nor {folder / 'views'} names, so that"
        " nothing is computed for it: give this machine the root or the view's file as it was"
        " published, or run the view; where nobody published that, somebody else writes to the"
        " online store"
    )


def _definitions_here(
    pointer: Pointer, offline: OfflineStore, folder: Path
) -> Iterator[tuple[FeatureView, Substitute | None]]:
    # a machine that only serves may have one of them, or none
    with contextlib.suppress(PrecomputeError):
        snapshot = offline.view(pointer.view.name).snapshot(pointer.snapshot)
        yield snapshot.view, snapshot.substitute
    with contextlib.suppress(PrecomputeError):
        view = Project(folder).view(pointer.view.name).feature_view()
        found = substitute_of(view, folder) if pointer.in_stead is not None else None
        yield view, None if found is None else found.use


def _executed_parts(view: FeatureView) -> str:
    """The parts of a view that say what is executed, as JSON."""
    definition = view.to_json()
    return json.dumps(
        [definition["entity"], definition["features"], definition["definition"]], sort_keys=True
    )
