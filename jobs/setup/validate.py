"""Validate: tries in seconds what a run of a view would need: its file, its SQL, its model over ten
rows, its index and its online store. Nothing is published."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from precompute.engine.runner import Runner
from precompute.jobs.config.project import Project
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.judge.library import compare_rows
from precompute.jobs.run.rows.open_view import OpenView, open_source, open_view
from precompute.jobs.run.rows.substitute import substitute_of
from precompute.jobs.run.run_view import check_index, check_online, contract_verdict
from precompute.model import ReadingModel
from precompute.own_library import own_library_of
from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.storage import storage_of
from precompute.store.errors import (
    ConfigError,
    GateError,
    MissingFileError,
    ModelError,
    PrecomputeError,
    SnapshotError,
    SourceError,
    UnreadableError,
    did_you_mean,
)
from precompute.store.feature_view import Feature
from precompute.store.online.url import shown_url
from precompute.store.times import Partition, partitions
from precompute.techniques.table import REFERENCE

ROWS = 10
"""Rows that are computed of each view."""
NEWEST, SPREAD = 16, 16
"""Partitions that are looked at for rows, at most: the newest, and as many spread over all before
them, where the data may have ended years ago."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a view: what was tried, whether it is as it should be, and what was found;
    ``bad_config`` where a file or value of the project is wrong."""

    view: str
    check: str
    ok: bool
    found: str
    bad_config: bool = False


def validate(project: Project, names: Sequence[str] = ()) -> Iterator[Check]:
    """Try views, one after the other, and where none is named the services, too; what depends on
    something that is wrong is not tried.

    Yields:
        each check once it is made.

    Raises:
        ConfigError: there is no view of such a name.
    """
    wanted = [project.named(name) for name in names] or project.names
    for name in wanted:
        yield from _of_view(project, name)
    for mistake in () if names else project.service_mistakes():
        yield Check("services", "configuration", False, mistake, True)


def _of_view(project: Project, name: str) -> Iterator[Check]:
    def tried(what: str, attempt: Callable[[], str]) -> Check:
        try:
            return Check(name, what, True, attempt())
        except PrecomputeError as exc:
            return Check(name, what, False, str(exc), isinstance(exc, ConfigError))

    yield (check := tried("configuration", lambda: _configured(project.view(name))))
    if not check.ok:
        return
    config, partition = project.view(name), None

    def read() -> str:
        nonlocal partition
        partition, found = _read(project, config)
        return found

    if waits := [
        other
        for other in config.inputs()
        if other in project.names and project.offline.view(other).log.live() is None
    ]:
        yield Check(
            name,
            "source",
            True,
            f"not tried: it reads live.{waits[0]}, which is not published yet: precompute run"
            f" {waits[0]} first",
        )
    else:
        yield (check := tried("source", read))
    if check.ok and not waits:
        yield tried("model", lambda: _computed(project, config, partition))
        if (by := config.feature_view().misses_by) is not None:
            yield tried(by, lambda: _substituted(project, config, partition))
    if config.index is not None:
        yield tried("index", lambda: _indexed(config))
    yield tried("contract", lambda: _contract(project, config))
    yield tried("root", lambda: _root(project.root))
    yield tried("online store", lambda: _online(project, name))


def _configured(config: ViewConfig) -> str:
    view = config.feature_view()
    features = view.features
    return (
        f"key {', '.join(view.entity)}; {', '.join(map(_described, features))}; model"
        f" {config.model.use}"
    )


def _described(feature: Feature) -> str:
    shape = (
        f"[{feature.dim}]"
        if feature.dim is not None
        else f"[up to {feature.max_items}]"
        if feature.max_items is not None
        else ""
    )
    return f"{feature.name} {feature.dtype}{shape}"


def _opened(project: Project, config: ViewConfig, partition: Partition | None) -> OpenView:
    return open_view(
        config.feature_view(),
        project.offline,
        project.home,
        partition=partition,
        memory_mb=project.settings.source_mb,
        load_mb=project.settings.memory_mb,
    )


def _read(project: Project, config: ViewConfig) -> tuple[Partition | None, str]:
    """The partition that is tried, the newest one with rows, and what was read of it."""
    tried = _partitions(config)
    missing: MissingFileError | None = None
    for number, partition in enumerate(tried):
        try:
            head = _head(project, config, partition)
        except MissingFileError as exc:
            # each partition may have files of its own
            if partition is None:
                raise
            missing = missing or exc
            continue
        columns = ", ".join(f"{field.name} {field.type}" for field in head.schema)
        rows = f"{head.num_rows} {'row' if head.num_rows == 1 else 'rows'} read"
        if head.num_rows:
            of = "" if partition is None else f" of partition {_day(partition)}"
            newer = f" (none in {number} newer ones that were looked at)" if number else ""
            return partition, f"{rows}{of}{newer}: {columns}"
    if missing is not None:
        raise missing
    if config.partition is None:
        raise SourceError(
            f"the source yields no rows (its columns: {columns}): a run would fail, and what is"
            " live stays"
        )
    first, last = min(filter(None, tried)), max(filter(None, tried))
    raise SourceError(
        f"no partition has rows, of {len(tried)} that were looked at, {_day(first)} to"
        f" {_day(last)} (columns: {columns}), so the model was not tried: see what the source's SQL"
        " does with $start and $end, and whether the data are there"
    )


def _head(project: Project, config: ViewConfig, partition: Partition | None) -> pa.Table:
    source, _ = open_source(
        config.feature_view(),
        project.offline,
        project.home,
        partition=partition,
        memory_mb=project.settings.source_mb,
        load_mb=project.settings.memory_mb,
    )
    with source:
        if config.source.updated_at is not None:
            source.check_time(config.source.updated_at, "source.updated_at")
        source.fit()
        return source.head(ROWS)


def _partitions(config: ViewConfig) -> list[Partition | None]:
    """Those to look at, in this order; None alone of a view without partitions."""
    own, latest = config.partition, config.partition_at(datetime.now(UTC))
    if own is None or latest is None:
        return [None]
    over = list(partitions(own.by, own.start, latest.end))[::-1]
    older = over[NEWEST:]
    step = (len(older) - 1) / (SPREAD - 1)
    spread = older if len(older) <= SPREAD else [older[round(n * step)] for n in range(SPREAD)]
    return [*over[:NEWEST], *spread]


def _day(partition: Partition) -> str:
    return str(partition).partition("/")[0].removesuffix("T00:00Z")


def _check_technique(opened: OpenView) -> None:
    """Have at hand what a run computes by; whether it suits the model, the run tells."""
    # torch takes a second to import
    from precompute.techniques.technique import technique

    try:
        technique(opened.variant)
    except ConfigError as exc:
        raise ConfigError(f"{opened.technique_place()}: {exc}") from exc


def _computed(project: Project, config: ViewConfig, partition: Partition | None) -> str:
    """What the model makes of the first rows, in float32."""
    began = time.monotonic()
    with _opened(project, config, partition) as opened:
        if opened.variant != REFERENCE:
            _check_technique(opened)
        head = opened.source.head(ROWS).combine_chunks()
        model = opened.model
        loaded_s = time.monotonic() - began
        if isinstance(model, ReadingModel):
            _check_reads(model.reads(), head)
        began = time.monotonic()
        try:
            done = Runner(model, config.feature_view()).compute(head.to_batches()[0])
        except ModelError as exc:
            raise ModelError(f"{exc}{opened.late_values(str(exc))}") from exc
        seconds = time.monotonic() - began
        own = own_library_of(model)
        memory_mb = project.settings.memory_mb
        library = None if own is None else compare_rows(opened, own, memory_mb)
        rejected = len(done.rejections)
        if rejected == head.num_rows:
            error = done.rejections[0].error
            raise ModelError(
                f"it computes none of the first {head.num_rows} rows: {done.rejections[0].stage}:"
                f" {error}{opened.late_values(error, of_all=True)}"
            )
    if library is not None and library.verdict == "differs":
        raise ModelError(
            f"it {library.said}: a run would be refused. Correct model.args, or write a model class"
            f" of your own; or, if this is as it should be: {config.accepting('library')}"
        )
    some = f"; {rejected} rejected ({done.rejections[0].error})" if rejected else ""
    some += (
        ""
        if opened.variant == REFERENCE
        else f"; in float32, where a run computes by {opened.variant}"
    )
    return (
        f"loaded in {loaded_s:.1f} s, {head.num_rows - rejected} of {head.num_rows} rows computed"
        f" in {seconds:.2f} s{some}{'' if library is None else f'; {library.said}'}"
    )


def _substituted(project: Project, config: ViewConfig, partition: Partition | None) -> str:
    """What another model makes of the first rows, which computes misses."""
    other = substitute_of(config.feature_view(), project.home)
    assert other is not None
    with _opened(project, config, partition) as opened:
        other.check_approximates(opened.fingerprint)
        other.check_fits(opened, opened.source)
    return other.words()


def _check_reads(wanted: Collection[str], head: pa.Table) -> None:
    """Raises:
    ConfigError: the source yields no such column.
    """
    for name in wanted:
        if name not in head.schema.names:
            raise ConfigError(
                f"the model reads a column {name!r}, which the source does not"
                f" yield{did_you_mean(name, head.schema.names)} (it yields:"
                f" {', '.join(head.schema.names)}): add it to source.sql, or name it with AS"
            )


def _indexed(config: ViewConfig) -> str:
    check_index(config)
    assert config.index is not None
    return (
        f"of {config.index.on} by {config.index.metric}, recall of at least"
        f" {config.index.recall_at_10:g}"
    )


def _contract(project: Project, config: ViewConfig) -> str:
    verdict = contract_verdict(config, project.offline.view(config.name))
    if verdict is not None and not verdict.passed:
        raise GateError(
            f"{verdict.message}. If this is as it should be: {config.accepting('contract')}"
        )
    if verdict is None:
        return (
            "nothing is live that could break"
            if config.gates.contract
            else "gates.contract is switched off"
        )
    return verdict.message


def _root(root: Path) -> str:
    storage = storage_of(root)
    try:
        storage.check_writable(root)
    except UnreadableError:
        raise
    except OSError as exc:
        raise SnapshotError(disk_message(root, exc)) from exc
    return f"{storage.shown(root)} can be written"


def _online(project: Project, name: str) -> str:
    check_online(project, name)
    return f"{shown_url(project.online)} is there, and can be written"
