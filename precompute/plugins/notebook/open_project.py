"""Open project: ``precompute.open``, a project from Python, a notebook or a script: run views, look
rows up, search, read history and status."""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.jobs.config.project import Project
from precompute.jobs.config.section import parse_time
from precompute.plugins.notebook.rows import Ran, Rows, Shown, counted
from precompute.store.answers.fallback import no_fallback
from precompute.store.answers.lookup import Lookup
from precompute.store.answers.plan import ANSWER_FIELDS, AnswerPlan
from precompute.store.answers.service import Service
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    OnlineStoreError,
    PrecomputeError,
    RequestError,
)
from precompute.store.feature_view import FeatureView
from precompute.store.keys import is_table, key_columns, key_list
from precompute.store.online.url import open_online_store
from precompute.store.times import shown_time
from precompute.store.wire.lookup_options import MAX_KEYS, LookupOptions, check_features

FILE = "project.yaml"
DEADLINE_MS = 60_000
"""Deadline of the model, where none is named: it is loaded first."""

_SAME = ("source", "reason", "computed_at", "ttl_s", "snapshot", "model")
"""Columns of an answer that are not shown; ``reason`` is where a row is missing."""
_STATUS_SHOWN = (
    "view",
    "status",
    "age_s",
    "ttl_s",
    "snapshot",
    "rows",
    "coverage",
    "online",
    "next_due",
)


class OpenProject:
    """A project's folder, opened by :func:`precompute.open`. Share it between threads; close it at
    the end, or use it as a context manager.

    The configuration is read again by every call that needs it, so that a view edited meanwhile is
    run as it is now; what is looked up is what is live.

    Args:
        project: the folder with ``project.yaml``, or that file.

    Raises:
        ConfigError: there is none, or it is wrong: file, key, value and remedy.
    """

    def __init__(self, project: str | Path) -> None:
        path = Path(project).expanduser()
        if path.name == FILE and not path.is_dir():
            path = path.parent
        elif path.is_file():
            raise ConfigError(
                f"{path}: a project is a folder with {FILE}; give that folder, or its {FILE}"
            )
        self.folder = path.absolute()
        self._stack, self._lock = contextlib.ExitStack(), threading.Lock()
        # a notebook closes nothing: without it DuckDB reports 40 lines of leaks as Python ends
        weakref.finalize(self, self._stack.close)
        self._plain: Lookup | None = None
        self._answering: Lookup | None = None
        self._project()

    @property
    def views(self) -> list[str]:
        """Names of the views that have a file, sorted."""
        return list(self._project().names)

    def run(
        self,
        view: str,
        *,
        frame: Any = None,
        full: bool = False,
        retry_rejected: bool = False,
        accept: Collection[str] = (),
        expect: Collection[str] = (),
        partition: str | datetime | None = None,
        progress: bool = True,
    ) -> Ran:
        """Materialize a view and publish it, as ``precompute run``, in this process; killed at any
        moment it leaves what is live as it was, and the next run goes on.

        Args:
            view: its name.
            frame: the rows, of a view with ``source: {frame: [columns]}``, all of them each time:
                those with the content they had are not computed again, and those that are not there
                any more are removed. A DataFrame of pandas or polars, a ``pyarrow.Table``, a list
                of rows, a mapping of columns.
            full: compute every row, changed or not.
            retry_rejected: compute rejected rows again, though their input is the same.
            accept: names of gates whose refusal is accepted.
            expect: gates that a change is announced for, of ``shape``, ``computed``, ``moved``,
                ``anchor``, ``never`` and ``rows``: they warn this time, and refuse nothing.
            partition: the one that contains this time, UTC; the latest that is over by default.
            progress: a bar on stderr where that is a terminal, else a line now and then.

        Raises:
            ConfigError: the view is not there, its file is wrong, or it takes a frame and none was
                given.
            SourceError, ModelError: the source or the frame, or the model, failed.
            RejectedError, GateError: too many rows were rejected, or a gate refused: nothing was
                published.
            ConflictError: another run of the view is going on.
        """
        from precompute.jobs.config.gates import check_announced, check_gates
        from precompute.jobs.run.command_process import progress_for
        from precompute.jobs.run.rows.plan import RunOptions
        from precompute.jobs.run.run_view import run_view

        project = self._project()
        options = RunOptions(
            frame=frame,
            full=full,
            retry_rejected=retry_rejected,
            accept=check_gates([accept] if isinstance(accept, str) else accept, "accept"),
            expect=check_announced([expect] if isinstance(expect, str) else expect, "expect"),
            partition=(
                None
                if partition is None
                else project.view(view).partition_of(_time(partition), "partition")
            ),
        )
        return Ran(run_view(project, view, progress_for(not progress), options))

    def lookup(
        self,
        view: str,
        keys: Any,
        *,
        features: Sequence[str] | None = None,
        fallback: bool | None = None,
        inputs: Mapping[Any, Mapping[str, Any]] | None = None,
        max_age_s: float | None = None,
        deadline_ms: float | None = None,
    ) -> Rows:
        """The rows of ``keys``, in their order, each with its status and age, then its features.

        Args:
            view: of a published view.
            keys: one text or integer, or any number of them, of a list, a Series or an array; lists
                of these for an entity of several columns. Of a DataFrame the columns that the
                entity has.
            features: which, in which order; all by default.
            fallback: whether the view's model is loaded, once, and computes what is missing; by
                default where ``inputs`` are given.
            inputs: key → input column → value: computes, by the fallback, an entity that the source
                does not know.
            max_age_s: rows older than this count as missing.
            deadline_ms: how long to wait for the model; a minute by default.

        Raises:
            RequestError: there is no such view or feature, the view has no fallback, or the keys
                are none.
            OnlineStoreError: the view was never published, or the online store does not answer.
        """
        pointer = self._published(view)
        wanted, compute = _keys(keys, pointer.view), bool(inputs) if fallback is None else fallback
        if compute and not pointer.view.fallback:
            raise no_fallback(pointer.view)
        options = LookupOptions(
            features,
            compute,
            DEADLINE_MS if deadline_ms is None else deadline_ms,
            max_age_s,
            inputs,
        )
        lookup, tables, notes = self._lookup(compute), list[pa.Table](), list[str]()
        for i in range(0, len(wanted), MAX_KEYS):
            answer = lookup.begin(view, wanted[i : i + MAX_KEYS], options, columnar=True)
            answer.wait()
            tables.append(answer.table())
            notes += answer.hints(lambda key: f"history({view!r}, {key!r})")
        if not tables:
            check_features(pointer.view, features or ())
            tables = [
                AnswerPlan(
                    pointer, None if features is None else tuple(features)
                ).schema.empty_table()
            ]
        if any(table.schema != tables[0].schema for table in tables):
            raise ConflictError(
                f"view {view!r} was published with other features meanwhile: look up once more"
            )
        table = pa.concat_tables(tables)
        missing = table.num_rows - table.column("reason").null_count
        hidden = [name for name in _SAME if name != "reason" or not missing]
        return Rows(
            table,
            f"{view}: {counted(table.num_rows, 'row')}"
            + (f", {missing:,} of them missing" if missing else ""),
            hidden=hidden,
            notes=notes[:3],
        )

    def service(
        self,
        name: str,
        entities: Any,
        *,
        fallback: bool | None = None,
        inputs: Mapping[str, Mapping[Any, Mapping[str, Any]]] | None = None,
        max_age_s: float | None = None,
    ) -> Rows:
        """The features of a feature service, several views joined to one row for each entity, each
        view with its status and age.

        Args:
            name: of a file in ``services/``.
            entities: column of the service's entity → values, a dict or a table of up to 1,000
                rows.
            fallback: whether the views' models are loaded, once, and compute what is missing; by
                default where ``inputs`` are given.
            inputs: view → its key → input column → value, as of :meth:`lookup`.
            max_age_s: rows older than this count as missing.

        Raises:
            ConfigError: the service's file is wrong, or there is none.
            RequestError: the entities do not fit it.
            OnlineStoreError: the online store does not answer for any of its views.
        """
        service, compute = (
            self._project().service(name),
            bool(inputs) if fallback is None else fallback,
        )
        table = self._lookup(compute).service(
            service,
            entities,
            fallback=compute,
            deadline_ms=DEADLINE_MS,
            max_age_s=max_age_s,
            inputs=inputs,
        )
        return Rows(table, f"{name}: {counted(table.num_rows, 'row')}")

    def search(
        self,
        view: str,
        *,
        key: Any = None,
        text: str | None = None,
        vector: Sequence[float] | None = None,
        inputs: Mapping[str, Any] | None = None,
        k: int = 10,
        filter: Mapping[str, Any] | None = None,
        only: Iterable[Any] | None = None,
        exclude: Iterable[Any] = (),
        features: Sequence[str] | None = None,
    ) -> Rows:
        """The ``k`` nearest rows of a view's vector index, the best first, by exactly one of
        ``key``, ``text``, ``vector`` and ``inputs``; the others as of
        :meth:`precompute.store.answers.lookup.Lookup.search`. A text goes in the one input column
        that takes texts, and the model embeds it now.

        Args:
            features: those returned with each row; by default all that are no vectors. One that
                is called ``score`` is the column ``features.score``.

        Raises:
            RequestError: the view is not searchable, or a bad argument.
            OnlineStoreError: the view was never published, or the online store does not answer.
        """
        pointer = self._published(view)
        names = (
            [f.name for f in pointer.view.features if f.dim is None]
            if features is None
            else list(features)
        )
        near = self._lookup(inputs is not None or text is not None).search(
            view,
            key=key,
            text=text,
            vector=vector,
            inputs=inputs,
            k=k,
            filter=filter,
            only=only,
            exclude=exclude,
            features=names,
            deadline_ms=DEADLINE_MS,
        )
        table = _neighbours(near["rows"], pointer.view, names)
        return Rows(
            table, f"{view}: the {len(near['rows'])} nearest by {near['metric']}", hidden=_SAME
        )

    def history(self, view: str, key: Any = None, *, at: str | datetime | None = None) -> Rows:
        """History: the view's snapshots, the newest first; with ``key``, the versions of that row,
        with when each was served and what made it; with ``at``, all rows that a lookup at that time
        (UTC) would have been answered from the store.

        Raises:
            ConfigError: there is no such view.
            RequestError: no snapshot that is retained ever had the key.
            SnapshotError: nothing is retained of that time, or a file is missing or damaged.
        """
        if key is not None and at is not None:
            raise RequestError("history takes a key, or a time, and not both")
        from precompute.store.history import explain, read

        project = self._project()
        if at is not None:
            when = _time(at)
            return Rows(
                read(project.stored(view), as_of=when),
                f"{view} as of {shown_time(when)}",
                hidden=["input_hash"],
            )
        if key is not None:
            past = explain(project.stored(view), key, memory_mb=project.settings.memory_mb)
            versions = [_version(version) for version in past.versions]
            notes = [
                f"rejected by run {one.run}, stage {one.stage}: {one.error}"
                for one in past.rejections
            ]
            shown = f"{view} {past.key}: {counted(len(versions), 'version')}"
            return Rows.of(
                versions,
                shown,
                notes=notes,
                hidden=["input_hash", "run", "removed_at", "removed_in", "partition"],
            )
        from precompute.jobs.ops.retention import list_snapshots

        snapshots = list_snapshots(project, view)
        empty = [
            name
            for name in (snapshots[0] if snapshots else ())
            if all(one[name] in (None, [], False) for one in snapshots)
        ]
        return Rows.of(snapshots, f"{view}: {counted(len(snapshots), 'snapshot')}", hidden=empty)

    def get_historical_features(
        self,
        frame: Any,
        views: str | Sequence[str] | Mapping[str, Sequence[str]] = (),
        *,
        service: str | Service | None = None,
        timestamp: str = "event_timestamp",
        max_age_s: float | None = None,
        values: str = "served",
    ) -> Rows:
        """A training set: the frame's rows, each with the features that a lookup at its time would
        have been answered, as :func:`precompute.store.history.get_historical_features`.

        Args:
            frame: any that :meth:`run` takes, with the keys of every view and the times, with a
                time zone.
            views: names, for all features; or name → features.
            service: the features of its views, in place of ``views``: its name, or one that is
                written in Python.
            timestamp: the column of the times.
            max_age_s: values older than this at the row's time are null.
            values: ``served``, or ``best_known``.

        Raises:
            ConfigError: there is no such service.
            SourceError: that is no frame.
            RequestError, SnapshotError: as that function.
        """
        from precompute.sources.frame import arrow_table
        from precompute.store.history import get_historical_features
        from precompute.store.history.gaps import Gaps

        project = self._project()
        if not views and service is None:
            raise RequestError("no features are named: give views, or a service")
        of = project.service(service) if isinstance(service, str) else service
        named = [views] if isinstance(views, str) else views
        for name in named if of is None else [part.view for part in of.parts]:
            project.stored(name)
        table = get_historical_features(
            project.offline,
            arrow_table(frame),
            named,
            service=of,
            timestamp=timestamp,
            max_age_s=max_age_s,
            values=values,  # type: ignore[arg-type]  # checked there
            memory_mb=project.settings.memory_mb,
        )
        gaps = json.loads((table.schema.metadata or {}).get(b"gaps", b"{}"))
        return Rows(
            table,
            f"{', '.join(named) if of is None else of.name} at each row's {timestamp}",
            notes=[f"{view}: {Gaps(**lacking)}" for view, lacking in gaps.items()],
        )

    def status(self) -> Rows:
        """Each view's live snapshot, its age against the TTL, and what needs attention, as
        ``precompute status --json`` has it.

        Raises:
            ConfigError: the project's file is wrong.
        """
        from precompute.jobs.ops.status import notes, project_status

        lines = project_status(self._project())
        words = [
            f"{line['view']}: {'; '.join(line['attention'])}" for line in lines if line["attention"]
        ]
        words += [f"{line['view']}: {note}" for line in lines for note in notes(line)]
        hidden = [name for line in lines for name in line if name not in _STATUS_SHOWN]
        return Rows.of(
            lines, f"{self.folder.name}: {counted(len(lines), 'view')}", hidden=hidden, notes=words
        )

    def close(self) -> None:
        """Close the online store, and the models that were loaded; any later call opens them
        again."""
        with self._lock:
            self._stack.close()
            self._plain = self._answering = None

    def __enter__(self) -> OpenProject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return self._shown().as_text()

    def _repr_html_(self) -> str:
        return self._shown().as_html()

    # ---- what lies behind

    def _project(self) -> Project:
        return Project(self.folder)

    def _lookup(self, fallback: bool = False) -> Lookup:
        with self._lock:
            return self._opened(fallback)

    def _opened(self, fallback: bool) -> Lookup:
        if self._plain is None:
            project = self._project()
            self._plain = Lookup(open_online_store(project.online), project.root)
            self._stack.callback(self._plain.close)
        if not fallback:
            return self._plain
        if self._answering is None:
            from precompute.jobs.serve.fallback import ViewFallback

            project = self._project()
            behind = ViewFallback(project.offline, project.home)
            self._stack.callback(behind.close)
            self._answering = Lookup(self._plain.online, project.root, behind)
        return self._answering

    def _published(self, view: str) -> Any:
        """The view's pointer.

        Raises:
            ConfigError: there is no such view.
            OnlineStoreError: it was never published.
        """
        pointer = self._lookup().online.live(view)
        if pointer is None:
            lost = self._lookup().is_lost(view)
            self._project().named(view)
            todo = f"precompute reconcile {view}" if lost else f"run({view!r})"
            raise OnlineStoreError(
                f"view {view!r} is not"
                f" {'in the online store any more' if lost else 'published yet'}: {todo}"
            )
        return pointer

    def _shown(self) -> Shown:
        """Caption, head, rows and notes: what is configured, what is live of it, what is wrong.
        Nothing is raised: a notebook calls it to show the project."""
        caption, notes = f"Precompute project {self.folder.name} ({self.folder})", list[str]()
        try:
            project = self._project()
        except PrecomputeError as exc:
            return Shown(caption, [], [], [str(exc)])
        try:
            lookup = self._lookup()
            live, absent = {line["view"]: line for line in lookup.views()}, "not published"
        except PrecomputeError as exc:
            live, absent = {}, "unknown"
            notes.append(str(exc))
        head = ["view", "key", "features", "status", "age_s", "ttl_s", "rows", "search"]
        rows = list[list[Any]]()
        for name in sorted({*project.names, *live}):
            line = live.get(name)
            if name in project.broken:
                notes.append(str(project.broken[name]))
            rows.append([name, *_view_cells(project, name, line, absent)])
        return Shown(f"{caption}: {counted(len(project.names), 'view')}", head, rows, notes)


def _keys(keys: Any, view: FeatureView) -> list[Any]:
    """The keys of a lookup: one, a list of them, or the entity's columns of a table.

    Raises:
        RequestError: none of these, or a column is missing.
    """
    if isinstance(keys, (str, int)):
        return [keys]
    if not is_table(keys):
        return key_list(keys)
    columns = key_columns(keys)
    for name in view.entity:
        if name not in columns:
            raise RequestError(
                f"keys are a DataFrame without the column {name!r}, the key of view {view.name!r}"
                f" is {', '.join(view.entity)} (it has: {', '.join(columns)}): rename its column,"
                " or give frame[column]"
            )
    return (
        key_list(columns[view.entity[0]])
        if len(view.entity) == 1
        else list(zip(*map(columns.get, view.entity), strict=True))
    )


def _view_cells(
    project: Project, name: str, line: Mapping[str, Any] | None, absent: str
) -> list[Any]:
    if line is not None:
        kinds = [
            f"{f['name']} {f['dtype']}" + (f"[{f['dim']}]" if f.get("dim") else "")
            for f in line["features"]
        ]
        status = "expired" if line["status"] == "missing" else line["status"]
        ages = [line[name] for name in ("age_s", "ttl_s", "rows")]
        found = "yes" if line["searchable"] else ""
        return [", ".join(line["entity"]), ", ".join(kinds), status, *ages, found]
    if name in project.broken:
        return [None, None, "its file is wrong", None, None, None, ""]
    view = project.views[name].feature_view()
    entity, features = ", ".join(view.entity), ", ".join(view.feature_names)
    return [entity, features, absent, None, view.ttl_s, None, ""]


def _neighbours(
    rows: Sequence[Mapping[str, Any]], view: FeatureView, features: Sequence[str]
) -> pa.Table:
    """What a search found, a column for each feature; one that is called ``score`` is
    ``features.score``, beside the search's own."""
    names = dict(ANSWER_FIELDS)
    fields = [("key", names["key"]), ("score", pa.float64())]
    fields += [(name, kind) for name, kind in ANSWER_FIELDS if name not in ("key", "reason")]
    columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in fields}
    for name in features:
        column = f"features.{name}" if name in columns else name
        columns[column] = pa.array(
            [row["features"][name] for row in rows], view.feature(name).arrow_type
        )
    return pa.table(columns)


def _version(version: Any) -> dict[str, Any]:
    """A version of a row as a flat dict: what it is, then its features."""
    state = (
        "live"
        if version.live
        else version.void or ("removed" if version.removed_in is not None else "replaced")
    )
    facts = {
        "snapshot": version.snapshot,
        "state": state,
        "computed_at": version.computed_at,
        "model": version.model,
        "served_from": version.served[0][0] if version.served else None,
        "served_until": version.served[-1][1] if version.served else None,
    }
    others = ("run", "partition", "input_hash", "removed_in", "removed_at")
    return facts | {name: getattr(version, name) for name in others} | dict(version.features)


def _time(at: str | datetime) -> datetime:
    try:
        return parse_time(at.isoformat() if isinstance(at, datetime) else at).astimezone(UTC)
    except ValueError as exc:
        raise RequestError(f"{at!r}: {exc}") from exc
