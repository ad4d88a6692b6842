"""Configuration: one ``project.yaml`` and a file per view, read once, checked whole, refused with file, key, value and remedy.

Every value can be overridden from the environment: ``PRECOMPUTE_`` and the path of keys joined with ``__``, in upper case
(``PRECOMPUTE_ONLINE``, ``PRECOMPUTE_SERVE__BIND``, ``PRECOMPUTE_VARS__DATA``, ``PRECOMPUTE_VIEWS__ITEM_EMBEDDING__TTL``). Secrets, such as the
password in a Redis URL, belong there and nowhere else. Relative paths start from the folder of ``project.yaml``, so that a cron job
finds the same data whatever its working directory; those of a view stay as they are written until it is opened. A model of the user's own may
live in that folder too. A mistake in a view's file is that view's: the others go on.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from jobs.config.cron import check_cron, check_timezone
from jobs.config.files import PREFIX, merged, overrides, read_yaml, substituted
from jobs.config.tuning_file import read_tuning, tuning_path
from precompute.registry import check_use
from precompute.sources.statement import check_sql, parameters, referenced_views
from store.errors import ConfigError
from store.feature_view import NAME, RESERVED, Definition, Feature, FeatureView, IndexSpec, ModelUse
from store.offline.view_store import OfflineStore, ViewStore
from store.partition import Partition, containing

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*$")


def parse_duration(value: Any) -> float:
    """``100ms``, ``30s``, ``15m``, ``26h``, ``7d`` or a number of seconds → seconds.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    match = _DURATION.match(str(value))
    if match is None or match[2] not in _UNITS:
        raise ValueError("write a number with a unit: 100ms, 30s, 15m, 26h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def parse_time(value: Any) -> datetime:
    """``2026-01-31``, ``2026-01-31 06:00`` or an ISO 8601 time, in UTC unless it says otherwise → aware datetime in UTC.

    Raises:
        ValueError: anything else.
    """
    try:
        at = datetime.fromisoformat(str(value))
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("write a date or time, such as 2026-01-31 or 2026-01-31T06:00Z") from None


Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=str | float)]


_Config = TypeVar("_Config", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SourceConfig(_Strict):
    """Where the rows come from."""

    sql: str = Field(
        description="one SELECT yielding the entity's columns and the model's inputs; live.<view> is a view's live snapshot"
    )
    updated_at: str | None = Field(
        default=None,
        description="of the source: a date or timestamp (UTC) whose newest value tells its age; by default its files' modification times do",
    )
    max_age: Duration | None = Field(default=None, description="past which status asks for attention; none by default")

    @field_validator("sql")
    @classmethod
    def _parses(cls, sql: str) -> str:
        try:
            check_sql(sql)
        except ConfigError as exc:
            raise ValueError(str(exc)) from exc
        return sql


class ModelConfig(_Strict):
    """What turns rows into features."""

    use: str = Field(description="text_encoder, two_tower, top_k, or a class of yours as package.module:Class")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments; {sql: SELECT …} becomes an Arrow table")
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = Field(
        default="auto", description="of the model's numbers; auto is what `precompute tune` picked, or fp32"
    )
    backend: Literal["auto", "eager", "onednn", "compile", "aoti", "onnx"] = Field(
        default="auto", description="what computes the model; auto is what `precompute tune` picked, or eager (onnx for int8)"
    )

    @field_validator("use")
    @classmethod
    def _known(cls, use: str, info: ValidationInfo) -> str:
        try:
            check_use(use, info.context)
        except ConfigError as exc:
            raise ValueError(str(exc)) from exc
        return use


class FeatureConfig(_Strict):
    """One named output."""

    dtype: Literal["float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool", "string"]
    dim: int | None = Field(default=None, ge=1, le=65536, description="length of a vector")
    max_items: int | None = Field(default=None, ge=1, le=65536, description="longest list, for a top-k list")

    @model_validator(mode="after")
    def _one_shape(self) -> FeatureConfig:
        if self.dim is not None and self.max_items is not None:
            raise ValueError("dim (a vector) and max_items (a list) exclude each other")
        if self.dim is not None and self.dtype == "string":
            raise ValueError("a vector holds numbers; use max_items for a list of strings")
        if self.dtype == "bool" and (self.dim is not None or self.max_items is not None):
            raise ValueError("a vector or list of bool is not supported; use int8")
        return self


class IndexConfig(_Strict):
    """Makes one vector feature searchable."""

    on: str
    metric: Literal["cosine", "dot", "l2"] = "cosine"
    recall_at_10: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="least share of the 10 nearest that a search must find; the index is exact and finds all, 1.0, whatever is asked",
    )


class FallbackConfig(_Strict):
    """Runs the model for a miss."""

    enabled: bool = False
    deadline: Duration = Field(default=0.1, description="how long a lookup waits for the model")


class AccuracyConfig(_Strict):
    """How near to float32 another precision or back end must come, on a sample of the view's own rows."""

    cosine: float = Field(
        default=0.999, gt=0, le=1, description="least mean cosine of vectors; for scores, least Spearman rank correlation"
    )
    recall_at_10: float = Field(default=0.985, ge=0, le=1, description="least share of each row's 10 nearest that stay the same")


class EngineConfig(_Strict):
    """What computes: the run's own process, or worker processes, one for each GPU where there are any."""

    workers: int | Literal["auto"] = Field(
        default="auto", description="processes of their own; 0 is none, auto one for each GPU from two on, and else none"
    )
    hang: Duration = Field(default=600.0, gt=0, description="a worker that finishes no batch for this long is replaced")

    @field_validator("workers")
    @classmethod
    def _some(cls, workers: int | str) -> int | str:
        if isinstance(workers, int) and not 0 <= workers <= 64:
            raise ValueError("from 0 to 64 processes, or auto")
        return workers


class PartitionConfig(_Strict):
    """Makes a view of intervals of data time: each run computes one, with ``$start`` and ``$end`` bound in the SQL."""

    by: Literal["hour", "day", "week", "month"] = "day"
    column: str | None = Field(
        default=None, description="of the source: a date or timestamp (UTC) that must lie in the partition"
    )
    start: datetime = Field(description="the first partition begins here, or contains it")
    empty: Literal["keep", "publish", "fail"] = Field(
        default="keep",
        description="of a partition without rows: done, and the rows that are live stay; done, and published like any other; or a failed run",
    )

    @field_validator("start", mode="before")
    @classmethod
    def _time(cls, start: Any) -> Any:
        at = parse_time(start)
        if not 1970 <= at.year <= 2200:
            raise ValueError("a partition begins between 1970 and 2200")
        return at


Share = Annotated[float, Field(ge=0, le=1)]


class GatesConfig(_Strict):
    """What a new snapshot must look like to be published; null switches one off."""

    rows: float | None = Field(
        default=0.2, ge=0, description="largest share by which the row count may differ from the live one's"
    )
    coverage: Share | Literal["auto"] | None = Field(
        default="auto", description="least share of source rows with a value; auto is 1 - max_rejected"
    )
    rejected: Share | Literal["auto"] | None = Field(
        default="auto", description="largest share of rejected rows; auto is max_rejected"
    )
    finite: float | None = Field(default=0.0, ge=0, le=1, description="largest share of rows with a NaN or infinity")
    zero: float | None = Field(default=0.01, ge=0, le=1, description="largest share of vectors that are all zeros")
    norm: float | None = Field(default=0.5, ge=0, description="largest relative change of the mean norm since the live snapshot")
    duplicates: float | None = Field(default=0.5, ge=0, le=1, description="largest share of sampled vectors equal to another one")
    drift: float | None = Field(
        default=0.8,
        ge=-1,
        le=1,
        description="least mean cosine to the live snapshot's vectors of the same keys, by the same model",
    )
    moved: float | None = Field(
        default=0.2,
        ge=0,
        le=1,
        description="largest share of vectors that lie further than moved_by from the live ones, by the same model",
    )
    moved_by: float = Field(
        default=0.45,
        gt=0,
        le=2,
        description="a distance, as a share of the longer vector's length: 0.45 is a cosine of 0.9 between vectors of one length",
    )
    rolled_back: float | None = Field(
        default=0.1,
        ge=0,
        le=1,
        description="largest share that may come again of the rows (key, input, recipe) that a snapshot computed which was rolled back from",
    )
    parity: float | None = Field(
        default=0.05, ge=0, le=1, description="largest share of sampled rows that the fallback computes differently"
    )


GATES = ("accuracy", *(name for name in GatesConfig.model_fields if name != "moved_by"))
"""Every gate's name; ``accuracy``, which judges a precision before it computes, has its limits in the view's ``accuracy``."""


def _name(value: str) -> str:
    if not NAME.match(value):
        raise ValueError("a name has lower-case letters, digits and _, starts with a letter, and is at most 63 long")
    return value


Name = Annotated[str, BeforeValidator(lambda v: _name(v) if isinstance(v, str) else v)]


class ViewConfig(_Strict):
    """``views/<view>.yaml``: what is computed."""

    name: Name
    entity: list[Name] = Field(min_length=1, max_length=8)
    source: SourceConfig
    model: ModelConfig
    features: dict[Name, FeatureConfig] = Field(min_length=1, max_length=512)
    ttl: Duration
    stale_for: Duration = Field(default=7 * 86400.0, description="past ttl, still served, as stale")
    index: IndexConfig | None = None
    fallback: FallbackConfig = FallbackConfig()
    accuracy: AccuracyConfig = AccuracyConfig()
    max_rejected: float = Field(default=0.01, ge=0, le=1, description="share of rejected rows past which nothing is published")
    bad_rows: Annotated[
        Literal["reject", "null", "fail"],
        BeforeValidator(lambda v: "null" if v is None else v, json_schema_input_type=Literal["reject", "null", "fail"] | None),
    ] = Field(
        default="reject",
        description="rows the model declares unusable: set aside, written with every feature null, or the end of the run",
    )  # YAML reads a bare null as None

    renew_unchanged: bool = Field(
        default=True,
        description="rows whose input did not change are as fresh as the run that saw it; false computes them past ttl",
    )
    partition: PartitionConfig | None = None
    gates: GatesConfig = GatesConfig()

    @field_validator("entity")
    @classmethod
    def _keys(cls, entity: list[str]) -> list[str]:
        for name in entity:
            if entity.count(name) > 1:
                raise ValueError(f"{name!r} is named twice")
            if name in RESERVED:
                raise ValueError(
                    f"{name!r} is the name of an answer's own column; rename it in the source with AS (taken: {', '.join(sorted(RESERVED))})"
                )
        return entity

    @model_validator(mode="after")
    def _fits(self) -> ViewConfig:
        taken = [name for name in self.features if name in RESERVED or name in self.entity]
        if taken:
            raise ValueError(
                f"features: {taken[0]!r} is the name of an answer's own column; call the feature something else "
                f"(taken: {', '.join(sorted({*RESERVED, *self.entity}))})"
            )
        wanted = parameters(self.source.sql)
        for name, query in model_queries(self.model.args).items():
            if not isinstance(query, str):
                raise ValueError(f"model.args.{name}.sql: {query!r} is no text: write one SELECT")
            try:
                check_sql(query)
            except ConfigError as exc:
                raise ValueError(f"model.args.{name}.sql: {exc}") from exc
            if self.partition is None and parameters(query):
                raise ValueError(
                    f"model.args.{name}.sql: takes ${min(parameters(query))}, which only a view with a partition has"
                )
        if self.partition is None and wanted:
            raise ValueError(
                f"source.sql: takes ${min(wanted)}, which only a view with a partition has; add partition: {{by: day, start: …}}"
            )
        if self.partition is not None and not wanted:
            raise ValueError(
                "partition: the source's SQL names neither $start nor $end; bind them, as in WHERE day >= $start AND day < $end"
            )
        if self.index is not None:
            indexed = self.features.get(self.index.on)
            if indexed is None or indexed.dim is None or not indexed.dtype.startswith("float"):
                raise ValueError(
                    f"index.on: {self.index.on!r} is no feature with a float dtype and a dim{_did_you_mean(self.index.on, self.features)}"
                )
        return self

    def partition_at(self, now: datetime) -> Partition | None:
        """The latest partition that is over at ``now`` (aware); None for a view that has none.

        Raises:
            ConfigError: not one is over yet.
        """
        if self.partition is None:
            return None
        current = containing(self.partition.by, now)
        latest = containing(self.partition.by, current.start - timedelta(microseconds=1))
        if latest.end <= self.partition.start:
            raise ConfigError(
                f"view {self.name!r}: its first partition, of {self.partition.start:%Y-%m-%d %H:%M}, is not over yet"
            )
        return latest

    def feature_view(self) -> FeatureView:
        """The view as the other rooms know it."""
        return FeatureView(
            name=self.name,
            entity=tuple(self.entity),
            features=tuple(Feature(n, f.dtype, f.dim, f.max_items) for n, f in self.features.items()),
            ttl_s=self.ttl,
            stale_for_s=self.stale_for,
            index=None if self.index is None else IndexSpec(self.index.on, self.index.metric, self.index.recall_at_10),
            fallback=self.fallback.enabled,
            fallback_deadline_s=self.fallback.deadline,
            definition=Definition(
                source=self.source.sql,
                model=ModelUse(**self.model.model_dump()),
                bad_rows=self.bad_rows,
                empty="publish" if self.partition is not None and self.partition.empty == "publish" else "keep",
            ),
        )

    def inputs(self) -> list[str]:
        """Views whose live snapshot this one reads, in its source or its model's arguments."""
        queries = [self.source.sql, *model_queries(self.model.args).values()]
        return sorted({name for sql in queries for name in referenced_views(sql)})


def model_queries(args: Mapping[str, Any]) -> dict[str, str]:
    """The model arguments given as ``{sql: …}``: name → SQL."""
    return {k: v["sql"] for k, v in args.items() if isinstance(v, Mapping) and set(v) == {"sql"}}


class RetentionConfig(_Strict):
    """Which snapshots ``gc`` keeps, beside the live one, the one before, pinned ones and what other views were computed from."""

    keep: int = Field(default=3, ge=1, description="the newest, of each view; of a partitioned one, the newest of each partition")
    grace: Duration = Field(default=86400.0, description="nothing younger is removed")


class ServeConfig(_Strict):
    """The HTTP API."""

    bind: str = Field(default="127.0.0.1:8080", description="host:port, or unix:./api.sock")

    @field_validator("bind")
    @classmethod
    def _address(cls, bind: str) -> str:
        if not re.match(r"\A(unix:.+|\[?[0-9A-Za-z.:_-]+\]?:\d{1,5})\Z", bind):
            raise ValueError("write host:port, such as 127.0.0.1:8080, or unix:./api.sock")
        return bind


CatchUp = Literal["latest", "all", "none"]


class RunsConfig(_Strict):
    """How scheduled runs are caught up on, retried and ended; a view's schedule may say otherwise."""

    catch_up: CatchUp = Field(default="latest", description="which of the times that were missed are run for")
    retries: int = Field(default=3, ge=0, le=20, description="how often a run that failed or was killed is tried again")
    retry_after: Duration = Field(default=60.0, description="wait before the first retry; twice as long before each further one")
    deadline: Duration = Field(default=6 * 3600.0, gt=0, description="a run that takes longer is killed")


def _names(value: Any) -> Any:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class ScheduleConfig(_Strict):
    """When a view runs; what is left out is as in ``runs``."""

    at: str | None = Field(default=None, description="five cron fields")
    after: Annotated[list[Name] | None, BeforeValidator(_names, json_schema_input_type=str | list[str] | None)] = Field(
        default=None, description="views; runs when a new snapshot of one of them is live"
    )
    catch_up: CatchUp | None = None
    retries: int | None = Field(default=None, ge=0, le=20)
    retry_after: Duration | None = None
    deadline: Duration | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_of_both(self) -> ScheduleConfig:
        if (self.at is None) == (self.after is None):
            raise ValueError("write one of both: at, five cron fields, or after, the views it runs after")
        if self.after == []:
            raise ValueError("after: names no view; write after: [view]")
        return self


def _schedule(value: Any) -> Any:
    """The short forms, spelled out."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise ValueError("write a string, five cron fields or 'after <view>', or the keys at or after")
    parents = after(value)
    if parents == []:
        raise ValueError("names no view; write 'after <view>'")
    return {"at": value} if parents is None else {"after": parents}


When = Annotated[ScheduleConfig, BeforeValidator(_schedule, json_schema_input_type=str | ScheduleConfig)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """When one view runs, spelled out. Either ``cron`` is set or ``parents``; durations in seconds."""

    when: str
    """For people: the cron line, or ``after a, b``."""
    cron: str | None
    timezone: str
    parents: tuple[str, ...]
    catch_up: CatchUp
    retries: int
    retry_after_s: float
    deadline_s: float


class ProjectConfig(_Strict):
    """``project.yaml``: where and when."""

    root: str = Field(description="folder of the offline store")
    online: str = Field(description="lmdb:./folder, redis://host:6379/0, rediss://… or unix:///socket")
    vars: dict[str, str] = Field(
        default_factory=dict, description="values for ${name} in the views; relative paths start with ./ or ../"
    )
    serve: ServeConfig = ServeConfig()
    schedule: dict[Name, When] = Field(
        default_factory=dict, description="view → five cron fields, 'after view[, view]', or either with options"
    )
    runs: RunsConfig = RunsConfig()
    engine: EngineConfig = EngineConfig()
    lease: Duration = Field(
        default=60.0, ge=1, description="how long a run or the scheduler may be silent before another one takes over"
    )
    timezone: str = Field(default="UTC", description="of the cron lines")
    retention: RetentionConfig = RetentionConfig()
    notify: list[str] = Field(
        default_factory=list, description="a command and its arguments, run after every publishing, refusal, failure and rollback"
    )
    memory_mb: int = Field(default=1024, ge=64, description="DuckDB's memory; it spills to disk beyond")

    @field_validator("timezone")
    @classmethod
    def _zone(cls, timezone: str) -> str:
        check_timezone(timezone)
        return timezone

    @field_validator("root")
    @classmethod
    def _folder(cls, root: str) -> str:
        if "://" in root:
            raise ValueError("object stores are not supported yet; give a folder")
        return root

    @field_validator("online")
    @classmethod
    def _store(cls, online: str) -> str:
        if not online.startswith(("lmdb:", "redis://", "rediss://", "unix://")) or online == "lmdb:":
            raise ValueError("write lmdb:./folder or redis://host:6379/0")
        return online


class Project:
    """A checked configuration.

    Args:
        folder: holds ``project.yaml`` and ``views/``.
        environment: overrides; the process's by default.

    ``folder`` is as given, and ``home`` the same, absolute. ``views`` are those whose file is right, and ``broken`` what is wrong with the others.

    Raises:
        ConfigError: every mistake found in ``project.yaml`` or the environment, each with file, key, value and remedy; or there is no view.
    """

    def __init__(self, folder: str | Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = Path(folder)
        self.home = self.folder.absolute()
        if not self.folder.is_dir():
            raise ConfigError(
                f"no folder {str(folder)!r}: give the one with project.yaml, as in `precompute -c configs/movielens status`"
            )
        over = overrides(os.environ if environment is None else environment)
        project_file = self.folder / "project.yaml"
        raw = read_yaml(project_file)
        view_overrides = over.pop("views", {})
        if not isinstance(view_overrides, dict):
            raise ConfigError(f"environment {PREFIX}VIEWS: name a view and a key, as in {PREFIX}VIEWS__ITEM_VECTOR__TTL=1h")
        self.settings = _validated(ProjectConfig, merged(raw, over), project_file, over)
        self.root = self.home / self.settings.root
        self.online = self._absolute_online(self.settings.online)
        self._vars = {name: {".": "./", "..": "../"}.get(value, value) for name, value in self.settings.vars.items()}
        self.views: dict[str, ViewConfig] = {}
        self.broken: dict[str, ConfigError] = {}
        self._models: dict[str, dict[str, Any]] = {}
        for path in sorted((self.folder / "views").glob("*.yaml")):
            try:
                self.views[path.stem] = self._read(path, view_overrides.pop(path.stem, {}))
            except ConfigError as exc:
                self.broken[path.stem] = exc
        if not self.views and not self.broken:
            raise ConfigError(f"{self.folder / 'views'}: no view there; add views/<name>.yaml (see 'a view' in the README)")
        if view_overrides:
            raise ConfigError(
                f"{PREFIX}VIEWS__{next(iter(view_overrides)).upper()}…: no such view{_did_you_mean(next(iter(view_overrides)), self.names)}"
            )
        self._check_references()
        self._check_schedule(project_file)

    @property
    def names(self) -> list[str]:
        """Of all views that have a file, right or not, sorted."""
        return sorted([*self.views, *self.broken])

    def _read(self, path: Path, changes: Any) -> ViewConfig:
        if not isinstance(changes, Mapping):
            raise ConfigError(f"environment {PREFIX}VIEWS__{path.stem.upper()}: name a key too, as in …__TTL=1h")
        written = merged(read_yaml(path), changes)
        data = substituted(written, self._vars, path)
        over = {"views": {path.stem: changes}}
        view = _validated(ViewConfig, data, path, over, ("views", path.stem), self.home)
        if view.name != path.stem:
            raise ConfigError(f"{path}: name: {view.name!r} differs from the file's name; call the file views/{view.name}.yaml")
        self._models[view.name] = {"use": view.model.use, "args": written["model"].get("args", {})}
        return self._tuned(view)

    def _tuned(self, view: ViewConfig) -> ViewConfig:
        """The view with ``precision: auto`` as its tuning file says; where that says what auto is anyway, the view as it is."""
        if (view.model.precision, view.model.backend) != ("auto", "auto"):
            return view
        tuning = read_tuning(self.folder, view.name, self._models[view.name])
        if tuning is None or (tuning["precision"], tuning["backend"]) == ("fp32", "eager"):
            return view
        chosen = {"precision": tuning["precision"], "backend": tuning["backend"]}
        try:
            model = ModelConfig.model_validate(view.model.model_dump() | chosen, context=self.home)
        except ValidationError as exc:
            path = tuning_path(self.folder, view.name)
            raise ConfigError(
                f"{path}: picked {chosen}, which is nothing this version knows; run `precompute tune` again"
            ) from exc
        return view.model_copy(update={"model": model})

    def model_as_written(self, name: str) -> Mapping[str, Any]:
        """``use`` and ``args`` of a view's model before ``${…}`` are filled in: the same on every machine."""
        return self._models[name]

    def view(self, name: str) -> ViewConfig:
        """One view's configuration.

        Raises:
            ConfigError: there is none of that name, or its file is wrong.
        """
        if name in self.broken:
            raise self.broken[name]
        return self.views[self.named(name)]

    def named(self, name: str, kept: Collection[str] = ()) -> str:
        """A view's name, for what needs no definition: one that has a file, right or wrong, or is among ``kept``.

        Raises:
            ConfigError: there is none of that name.
        """
        known = sorted({*self.names, *kept})
        if name not in known:
            raise ConfigError(
                f"no view {name!r} in {self.folder / 'views'}{_did_you_mean(name, known)} (there are: {', '.join(known)})"
            )
        return name

    @property
    def offline(self) -> OfflineStore:
        """Its offline store."""
        return OfflineStore(self.root)

    def stored(self, name: str) -> ViewStore:
        """What is kept of a view, which may be configured no more.

        Raises:
            ConfigError: it is neither configured, nor is there anything of it.
        """
        offline = self.offline
        return offline.view(self.named(name, offline.views()))

    def schedules(self) -> dict[str, Schedule]:
        """The schedule section, every view's options spelled out."""
        runs, found = self.settings.runs, {}
        for name, own in self.settings.schedule.items():
            parents = tuple(own.after or ())
            found[name] = Schedule(
                when=f"after {', '.join(parents)}" if own.at is None else own.at,
                cron=own.at,
                timezone=self.settings.timezone,
                parents=parents,
                catch_up=runs.catch_up if own.catch_up is None else own.catch_up,
                retries=runs.retries if own.retries is None else own.retries,
                retry_after_s=runs.retry_after if own.retry_after is None else own.retry_after,
                deadline_s=runs.deadline if own.deadline is None else own.deadline,
            )
        return found

    def _absolute_online(self, online: str) -> str:
        scheme, _, rest = online.partition(":")
        return f"lmdb:{(self.folder / rest).absolute()}" if scheme == "lmdb" else online

    def _check_references(self) -> None:
        for name, view in list(self.views.items()):
            for other in view.inputs():
                if other not in self.names:
                    self.broken[name] = ConfigError(
                        f"{self.folder / 'views' / name}.yaml: live.{other}: no such view{_did_you_mean(other, self.names)}"
                    )
                    self.views.pop(name, None)

    def _check_schedule(self, project_file: Path) -> None:
        schedules = self.schedules()
        for name, schedule in schedules.items():
            where = f"{project_file}: schedule.{name}: {schedule.when!r}"
            if name not in self.names:
                raise ConfigError(f"{where}: no such view{_did_you_mean(name, self.names)}")
            if schedule.cron is not None:
                try:
                    check_cron(schedule.cron, schedule.timezone)
                except ValueError as exc:
                    raise ConfigError(f"{where}: {exc}") from exc
            for parent in schedule.parents:
                if parent not in schedules:
                    raise ConfigError(f"{where}: {parent!r} is not scheduled itself{_did_you_mean(parent, schedules)}")
        self._check_cycle(project_file)

    def _check_cycle(self, project_file: Path) -> None:
        schedules = self.schedules()

        def walk(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                raise ConfigError(
                    f"{project_file}: schedule: {' after '.join((*path, name))} goes round in a circle; give one of them a cron line"
                )
            for parent in schedules[name].parents:
                walk(parent, (*path, name))

        for name in schedules:
            walk(name, ())


def after(when: str) -> list[str] | None:
    """The views of an ``after a, b`` schedule; None for a cron line."""
    if not when.startswith("after "):
        return None
    return [name.strip() for name in when.removeprefix("after ").split(",") if name.strip()]


def json_schemas() -> dict[str, Any]:
    """JSON Schemas of both files, for editors: ``{"project": …, "view": …}``."""
    return {"project": ProjectConfig.model_json_schema(), "view": ViewConfig.model_json_schema()}


def _validated(
    kind: type[_Config],
    data: Mapping[str, Any],
    path: Path,
    over: Mapping[str, Any],
    prefix: tuple[str, ...] = (),
    folder: Path | None = None,
) -> _Config:
    """``data`` as a checked configuration; ``over`` tells which of its values came from the environment, ``prefix`` under which keys; modules are
    looked for in ``folder`` first."""
    try:
        return kind.model_validate(data, context=folder)
    except ValidationError as exc:
        lines = [f"{_origin(path, (*prefix, *error['loc']), over)}{_message(kind, error)}" for error in exc.errors()]
        raise ConfigError("\n".join(lines)) from exc


def _origin(path: Path, location: tuple[int | str, ...], over: Mapping[str, Any]) -> str:
    """The file the value stands in, or the environment variable."""
    node: Any = over
    for part in location:
        node = node.get(part) if isinstance(node, Mapping) else None
    return f"{path}: " if node is None or node == {} else f"environment {PREFIX}{'__'.join(map(str, location)).upper()}: "


def _message(kind: type[BaseModel], error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"] if part != "[key]")
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key{_did_you_mean(str(error['loc'][-1]), _keys_at(kind, error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"{where}: missing; it has no default"
    if error["type"] == "literal_error":
        value = str(error["input"])
        allowed = re.findall(r"'([^']+)'", text)
        return f"{where}: {value!r} is not one of {', '.join(allowed)}{_did_you_mean(value, allowed)}"
    value = repr(error["input"])
    if where == "online":
        scheme, separator, rest = str(error["input"]).partition("?")[0].partition("//")
        value = repr(scheme + separator + rest.rpartition("@")[2])  # without what may be a password
    shown = "" if isinstance(error["input"], dict) else f" {value if len(value) <= 120 else value[:117] + '...'}:"
    return f"{where}{':' if where else ''}{shown} {text[0].lower() + text[1:] if text.startswith('Input') else text}".lstrip()


def _keys_at(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at a place in the file."""
    current: Any = kind
    for part in location:
        field = current.model_fields.get(str(part)) if isinstance(current, type) and issubclass(current, BaseModel) else None
        if field is None:
            continue  # a key of a mapping, such as a feature's name: its values' model was taken already
        models = [t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)]
        current = models[0] if models else None
    return list(current.model_fields) if current is not None else []


def _types(annotation: Any) -> Iterator[Any]:
    arguments = getattr(annotation, "__args__", None)
    if arguments is None:
        yield annotation
    else:
        for argument in arguments:
            yield from _types(argument)


def _did_you_mean(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
