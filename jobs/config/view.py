"""View: ``views/<view>.yaml``: what is computed, from what, by which model, and the gates it must
pass to be published."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import pyarrow as pa
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from precompute.jobs.config.gates import AccuracyConfig, GatesConfig
from precompute.jobs.config.open_section import Keys, OpenSection
from precompute.jobs.config.section import Duration, Name, Section, as_mistake, parse_time
from precompute.registry import check_use
from precompute.sources.database import check_sql, parameters, referenced_views
from precompute.sources.frame import frame_sql
from precompute.store.answers.plan import default_row
from precompute.store.doors import TECHNIQUES, VIEW_KEYS
from precompute.store.errors import ConfigError, nearest_or_all
from precompute.store.feature_view import (
    CHUNK,
    RESERVED,
    ChunkSpec,
    Definition,
    Feature,
    FeatureView,
    IndexSpec,
    ModelUse,
)
from precompute.store.online.codec import RowCodec
from precompute.store.times import Partition, containing, duration
from precompute.techniques.table import BACKENDS, PRECISIONS, technique_name

if TYPE_CHECKING:
    Precision: TypeAlias = str
    Backend: TypeAlias = str
else:
    # of the table of techniques, whatever stands in it
    Precision, Backend = Literal["auto", *PRECISIONS], Literal["auto", *BACKENDS]


class SourceConfig(Section):
    """Where the rows come from."""

    sql: str = ""
    """one SELECT yielding the entity's columns and the model's inputs; live.<view> is a view's live
    snapshot"""
    frame: list[str] | None = Field(default=None, min_length=1)
    """in place of sql: columns of the DataFrame that each run is given, in Python:
    `precompute.open(…).run(view, frame=df)`"""
    updated_at: str | None = None
    """of the source: a date or timestamp (UTC) whose newest value tells its age; by default its
    files' modification times do"""
    max_age: Duration | None = None
    """past which status asks for attention; none by default"""

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if ("sql" in data) == ("frame" in data):
            raise ValueError(
                "write sql, or frame (the columns of a DataFrame that runs are given), and not "
                + ("both" if "sql" in data else "neither")
            )
        return data

    @field_validator("sql")
    @classmethod
    def _parses(cls, sql: str) -> str:
        with as_mistake():
            check_sql(sql)
        return sql


class ModelConfig(Section):
    """What turns rows into features."""

    use: str
    """a built-in (text_encoder, top_k, two_tower, …: docs/reference.md), or a class
    of yours as package.module:Class"""
    args: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments; {sql: SELECT …} becomes an Arrow table"""
    precision: Precision = "auto"
    """of the model's numbers; auto is what `precompute tune` picked, or fp32"""
    backend: Backend = "auto"
    """what computes the model; auto is what `precompute tune` picked, or the precision's first:
    eager, and openvino for int8"""

    @field_validator("use")
    @classmethod
    def _known(cls, use: str, info: ValidationInfo) -> str:
        with as_mistake():
            check_use(use, info.context)
        return use

    @field_validator("backend")
    @classmethod
    def _here(cls, backend: Backend, info: ValidationInfo) -> Backend:
        name = technique_name(info.data.get("precision", "auto"), backend)
        # a name that is none, the model's opening refuses with those that there are
        if TECHNIQUES.has(name) and not TECHNIQUES.is_here(name):
            raise ValueError(TECHNIQUES.absence(name))
        return backend


class FeatureConfig(Section):
    """One named output."""

    dtype: Literal[
        "float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool", "string"
    ]
    """of a value, or of each number of a vector or item of a list"""
    dim: int | None = Field(default=None, ge=1, le=65536)
    """length of a vector"""
    max_items: int | None = Field(default=None, ge=1, le=65536)
    """longest list, for a top-k list"""
    packed: Literal["int8", "binary"] | None = None
    """of a vector of float16 or float32: what the online store keeps of it, with a scale a row;
    readers get the dtype"""

    @model_validator(mode="after")
    def _one_shape(self) -> FeatureConfig:
        if self.dim is not None and self.max_items is not None:
            raise ValueError("dim (a vector) and max_items (a list) exclude each other")
        if self.dim is not None and self.dtype == "string":
            raise ValueError("a vector holds numbers; use max_items for a list of strings")
        if self.dtype == "bool" and (self.dim is not None or self.max_items is not None):
            raise ValueError("a vector or list of bool is not supported; use int8")
        vector_of = None if self.dim is None else self.dtype
        if self.packed is not None and vector_of not in ("float16", "float32"):
            raise ValueError(f"packed: {self.packed} is for vectors (dim) of float16 or float32")
        return self


class ChunkConfig(Section):
    """Cuts a column of long texts: each row of the source becomes rows of its key and the chunk's
    number, ``chunk``; a search answers with the best chunk of each."""

    column: str = "text"
    """of the source: the text that is cut"""
    tokens: int = Field(default=256, ge=8, le=1_000_000)
    """of a chunk at most, a model's special ones included"""
    overlap: int = Field(default=0, ge=0)
    """tokens that a chunk has in common with the one before, at most"""
    tokenizer: str | None = None
    """a tokenizer.json, or a folder that has one; by default the path of a text_encoder"""


class IndexConfig(Section):
    """Makes one vector feature searchable."""

    on: str
    """the feature: a vector of floats"""
    metric: Literal["cosine", "dot", "l2"] = "cosine"
    """what nearness is measured by"""
    recall_at_10: float = Field(default=0.95, gt=0, le=1)
    """least share of the 10 nearest that a search must find: measured while the index is built, on
    rows that nothing was chosen by; 1.0 compares with every row"""


class FallbackConfig(OpenSection):
    """Runs the model for a miss."""

    door = VIEW_KEYS
    within = "fallback"

    enabled: bool = False
    """whether a miss is computed"""
    deadline: Duration = 0.1
    """how long a lookup waits for the model"""
    keep: Duration = 600.0
    """how long a computed row is stored, for the snapshot it was computed under"""
    keep_missing: Duration = 30.0
    """how long it is remembered that the source has no such entity"""
    stale_if_error: Duration = 0.0
    """past ttl and stale_for: how long a row is still served, as stale, where the model or the
    online store fails"""
    default: dict[Name, Any] | None = None
    """feature → value: stands in for a row that is missing, and says so; those not named are
    null"""
    spare: Literal["auto"] | bool = "auto"
    """whether a second process of the model stands by, loaded, for when an input ends the one that
    serves; auto: where its memory is free three times over, and on no GPU"""

    @model_validator(mode="after")
    def _said(self) -> FallbackConfig:
        of_powers = {key.rpartition(".")[2] for keys in self.powers for key in keys.spec()}
        without = {"deadline", "keep", "keep_missing", "spare"} & self.model_fields_set
        own = sorted(without | of_powers)
        if own and "enabled" not in self.model_fields_set:
            raise ValueError(
                f"without `enabled` there is no fallback that {' and '.join(own)} could be of:"
                " write enabled: true, or enabled: false"
            )
        if of_powers and not self.enabled:
            key = min(of_powers)
            raise ValueError(
                f"{key}: no misses are computed: write enabled: true, or take {key} out"
            )
        return self


class PartitionConfig(Section):
    """Makes a view of intervals of data time: each run computes one, with ``$start`` and ``$end``
    bound in the SQL."""

    by: Literal["hour", "day", "week", "month"] = "day"
    """length of a partition; weeks start on Monday"""
    column: str | None = None
    """of the source: a date or timestamp (UTC) that must lie in the partition"""
    start: datetime
    """the first partition begins here, or contains it"""
    empty: Literal["keep", "publish", "fail"] = "keep"
    """of a partition without rows: done, and the rows that are live stay; done, and published like
    any other; or a failed run"""
    serve: Literal["newest", "all"] = "newest"
    """what is live: the rows of the newest partition alone; or of each key its row of the newest
    partition that has it"""
    keep: Duration | None = None
    """with serve: all, partitions that end longer than this before the newest one are served no
    more"""

    @field_validator("start", mode="before")
    @classmethod
    def _time(cls, start: Any) -> Any:
        at = parse_time(start)
        if not 1970 <= at.year <= 2200:
            raise ValueError("a partition begins between 1970 and 2200")
        return at


class ViewConfig(OpenSection):
    """``views/<view>.yaml``: what is computed."""

    door = VIEW_KEYS

    name: Name
    """as the file is called"""
    entity: list[Name] = Field(min_length=1, max_length=8)
    """columns of the key: text or integers"""
    source: SourceConfig
    chunk: ChunkConfig | None = None
    model: ModelConfig
    features: dict[Name, FeatureConfig] = Field(min_length=1, max_length=512)
    """what the model computes, by name"""
    ttl: Duration
    """how long a row is fresh after the run that computed it, or found its input unchanged"""
    stale_for: Duration = 7 * 86400.0
    """past ttl, still served, as stale"""
    index: IndexConfig | None = None
    fallback: FallbackConfig = FallbackConfig()
    accuracy: AccuracyConfig = AccuracyConfig()
    max_rejected: float = Field(default=0.01, ge=0, le=1)
    """share of rejected rows past which nothing is published"""
    # YAML reads a bare null as None
    bad_rows: Annotated[
        Literal["reject", "null", "fail"],
        BeforeValidator(
            lambda v: "null" if v is None else v,
            json_schema_input_type=Literal["reject", "null", "fail"] | None,
        ),
    ] = "reject"
    """rows the model declares unusable: set aside, written with every feature null, or the end of
    the run"""
    renew_unchanged: bool = True
    """rows whose input did not change are as fresh as the run that saw it; false computes them past
    ttl"""
    partition: PartitionConfig | None = None
    shards: int | None = Field(default=None, ge=1, le=65536)
    """pieces that workers compute a run's rows in (engine); null: the run itself, here"""
    gates: GatesConfig = GatesConfig()

    @property
    def powers(self) -> tuple[Keys, ...]:
        """The keys of powers that the file has, those of ``fallback`` last."""
        return (*super().powers, *self.fallback.powers)

    @field_validator("entity")
    @classmethod
    def _keys(cls, entity: list[str]) -> list[str]:
        for name in entity:
            if entity.count(name) > 1:
                raise ValueError(f"{name!r} is named twice")
            if name in RESERVED:
                raise ValueError(
                    f"{name!r} is the name of an answer's own column; rename it in the source with"
                    f" AS (taken: {', '.join(sorted(RESERVED))})"
                )
        return entity

    @model_validator(mode="after")
    def _fits(self) -> ViewConfig:
        taken = {*RESERVED, *self.entity}
        for name in self.features:
            if name in taken:
                raise ValueError(
                    f"features.{name}: {name!r} is the name of an answer's own column; call the"
                    f" feature something else (taken: {', '.join(sorted(taken))})"
                )
        self._check_powers()
        self._check_chunk()
        for name in self.accuracy.features:
            if name not in self.features:
                near = nearest_or_all(name, self.features)
                raise ValueError(f"accuracy.features.{name}: {name!r} is no feature{near}")
        self._check_default()
        self.gates.check_fits(self.feature_view().features, self.entity)
        self._check_frame()
        for name, query in model_queries(self.model.args).items():
            if not isinstance(query, str):
                raise ValueError(f"model.args.{name}.sql: {query!r} is no text: write one SELECT")
            with as_mistake(f"model.args.{name}.sql: "):
                check_sql(query)
            if self.partition is None and parameters(query):
                raise ValueError(
                    f"model.args.{name}.sql: takes ${min(parameters(query))}, which only a view"
                    " with a partition has"
                )
        if (wanted := parameters(self.sql)) and self.partition is None:
            raise ValueError(
                f"source.sql: takes ${min(wanted)}, which only a view with a partition has; add"
                " partition: {by: day, start: …}"
            )
        if self.partition is not None and not wanted:
            raise ValueError(
                "partition: the source's SQL names neither $start nor $end; bind them, as in WHERE"
                " day >= $start AND day < $end"
            )
        self._check_served()
        if self.index is not None:
            self._check_indexed(self.index.on)
        return self

    def _check_frame(self) -> None:
        columns = self.source.frame
        if columns is None:
            return
        if len(set(columns)) != len(columns):
            raise ValueError("source.frame: a column is named twice")
        if any(not name or "\0" in name for name in columns):
            raise ValueError("source.frame: a column has no name")
        for name in self.entity:
            if name not in columns:
                raise ValueError(
                    f"source.frame: lacks {name!r}, which the entity names: add it to the columns"
                )
        if self.partition is not None:
            why = "a frame has none; write its rows to files, and read them by sql"
            raise ValueError(f"partition: {why}")

    def _check_indexed(self, name: str) -> None:
        floats = {n: f for n, f in self.features.items() if f.dtype.startswith("float")}
        vectors = [n for n, f in floats.items() if f.dim is not None]
        if name in vectors:
            return
        if name not in self.features:
            near = nearest_or_all(name, vectors or self.features)
            raise ValueError(f"index.on: there is no feature {name!r}{near}")
        feature = self.features[name]
        one_or_many = "single value" if feature.max_items is None else "list"
        kind = one_or_many if feature.dim is None else "vector"
        instead = f"name one ({', '.join(vectors)})" if vectors else "no feature is one"
        raise ValueError(
            f"index.on: {name!r} is a {kind} of {feature.dtype}, and what is searched is a vector"
            f" of float16, float32 or float64: {instead}, or give it a dim"
        )

    def _check_served(self) -> None:
        partition = self.partition
        if partition is None:
            return
        if partition.serve == "newest":
            if partition.keep is not None:
                raise ValueError(
                    "partition.keep: only what serves all partitions lets go of old ones; add"
                    " serve: all"
                )
            return
        for name, query in model_queries(self.model.args).items():
            if bound := parameters(query):
                raise ValueError(
                    f"partition.serve: all: model.args.{name}.sql takes ${min(bound)}, so that each"
                    " partition has a model of its own, and rows of two models are never served as"
                    " one set"
                )
        if partition.keep is not None and self.ttl < partition.keep:
            raise ValueError(
                f"partition.keep: rows of {duration(partition.keep)} ago are to be served, and ttl"
                f" lets them expire after {duration(self.ttl)}: make ttl as long"
            )

    def _check_powers(self) -> None:
        """Whether what powers add to answers has names of its own, and one of them at most computes
        misses in the model's stead."""
        own = {*self.features, *self.entity}
        added, by = set[str](), ""
        for keys in self.powers:
            key = [*keys.spec(), *keys.known()][0]
            for name in sorted((own | added).intersection(keys.columns())):
                instead = "call the feature or key something else"
                raise ValueError(
                    f"{key}: answers have a column {name!r} of their own then;"
                    f" {instead if name in own else 'another key has it, too: take one out'}"
                )
            added.update(keys.columns())
            if by and keys.misses_by() is not None:
                raise ValueError(f"{key}: {by} computes misses in the model's stead: take one out")
            by = keys.misses_by() or by

    def _check_chunk(self) -> None:
        spec = self._chunk_spec()
        if spec is None:
            return
        if CHUNK in self.features or CHUNK in self.entity:
            raise ValueError(
                f"chunk: {CHUNK!r} is the name of a chunk's number; call the feature or key column"
                " something else"
            )
        if spec.overlap > spec.tokens // 2:
            raise ValueError(
                f"chunk.overlap: {spec.overlap} is more than half of {spec.tokens} tokens"
            )
        if not spec.tokenizer:
            raise ValueError(
                f"chunk.tokenizer: model {self.model.use!r} names none; name a tokenizer.json, or a"
                " folder that has one"
            )

    def _chunk_spec(self) -> ChunkSpec | None:
        if self.chunk is None:
            return None
        own = self.model.args.get("path") if self.model.use == "text_encoder" else None
        tokenizer = self.chunk.tokenizer or own or ""
        return ChunkSpec(self.chunk.column, self.chunk.tokens, self.chunk.overlap, tokenizer)

    def _check_default(self) -> None:
        for name in self.fallback.default or ():
            if name not in self.features:
                near = nearest_or_all(name, self.features)
                raise ValueError(f"fallback.default.{name}: there is no feature {name!r}{near}")
        view = self.feature_view()
        try:
            default_row(view, RowCodec(view))
        except (ValueError, TypeError, pa.ArrowException) as exc:
            of_feature = str(exc).partition(": ")[0] in self.features
            raise ValueError(f"fallback.default{'.' if of_feature else ': '}{exc}") from exc

    @property
    def sql(self) -> str:
        """The source's SQL; of a frame, that of its columns."""
        source = self.source
        return source.sql if source.frame is None else frame_sql(source.frame, self.name)

    def accepting(self, gate: str) -> str:
        """What to type for a run that accepts a gate's refusal."""
        in_python = f"precompute.open(…).run({self.name!r}, frame=df, accept=[{gate!r}])"
        return in_python if self.source.frame else f"precompute run {self.name} --accept {gate}"

    @property
    def serves_all(self) -> bool:
        """Whether all partitions are live at once."""
        return self.partition is not None and self.partition.serve == "all"

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
                f"view {self.name!r}: its first partition, of"
                f" {self.partition.start:%Y-%m-%dT%H:%MZ}, is not over yet"
            )
        return latest

    def partition_of(self, at: datetime, option: str) -> Partition:
        """The partition that contains a time (aware), which ``option`` names.

        Raises:
            ConfigError: the view has no partitions.
        """
        if self.partition is None:
            raise ConfigError(
                f"{option}: view {self.name!r} has none; add partition: {{by: day, start: …}} to it"
            )
        return containing(self.partition.by, at)

    def feature_view(self) -> FeatureView:
        """The view as the other rooms know it."""
        chunk = self._chunk_spec()
        return FeatureView(
            name=self.name,
            entity=(*self.entity, *(() if chunk is None else (CHUNK,))),
            features=tuple(
                Feature(n, f.dtype, f.dim, f.max_items, f.packed) for n, f in self.features.items()
            ),
            ttl_s=self.ttl,
            stale_for_s=self.stale_for,
            index=None if self.index is None else IndexSpec(**self.index.model_dump()),
            fallback=self.fallback.enabled,
            fallback_deadline_s=self.fallback.deadline,
            keep_s=self.fallback.keep,
            keep_missing_s=self.fallback.keep_missing,
            stale_if_error_s=self.fallback.stale_if_error,
            fallback_default=self.fallback.default,
            misses_by=next(filter(None, (keys.misses_by() for keys in self.powers)), None),
            definition=Definition(
                source=self.sql,
                model=ModelUse(**self.model.model_dump()),
                bad_rows=self.bad_rows,
                empty="publish" if self.partition and self.partition.empty == "publish" else "keep",
                chunk=chunk,
            ),
            powers={name: kept for keys in self.powers for name, kept in keys.spec().items()},
        )

    def inputs(self) -> list[str]:
        """Views whose live snapshot this one reads, in its source or its model's arguments."""
        return sorted(self.reads())

    def reads(self) -> dict[str, tuple[str, ...]]:
        """The same views, each with the key of the file under which it is read; the source's own
        comes first."""
        found: dict[str, tuple[str, ...]] = {}
        for name, sql in model_queries(self.model.args).items():
            found |= dict.fromkeys(referenced_views(sql), ("model", "args", name, "sql"))
        return found | dict.fromkeys(referenced_views(self.sql), ("source", "sql"))


def model_queries(args: Mapping[str, Any]) -> dict[str, str]:
    """The model arguments given as ``{sql: …}``: name → SQL."""
    return {k: v["sql"] for k, v in args.items() if isinstance(v, Mapping) and set(v) == {"sql"}}
