"""Service: features of several views under one name, joined to one row for each entity. Serving and
training read this one definition.

The configuration builds it; who has none, such as a script, may write one down in Python.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import pyarrow as pa

from precompute.store.answers.answer import Answer
from precompute.store.answers.plan import ANSWER_FIELDS, AnswerPlan
from precompute.store.disk.record import plain, record_of
from precompute.store.errors import (
    ConfigError,
    OnlineStoreError,
    OtherFormatError,
    PrecomputeError,
    RequestError,
    did_you_mean,
)
from precompute.store.feature_view import NAME, FeatureView
from precompute.store.keys import join_key, key_columns, shown_key
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.times import AnswerSource, Reason, Status
from precompute.store.wire.lookup_options import (
    MAX_DEADLINE_MS,
    MAX_KEYS,
    CacheControl,
    LookupOptions,
)

MAX_VIEWS = 32
"""Views of one service at most, as many as ``POST /v1/lookup`` takes lookups; with the most rows of
a request it bounds what one may cost."""
PART_FIELDS = ("status", "source", "reason", "computed_at", "age_s")
"""What is said of every view beside its features: what they are, where they came from, why they are
missing, when they were computed, how old they are."""


def column_of(view: str, name: str) -> str:
    """The column of a view's feature, or of what is said of the view, in a joined row:
    ``user_profile__age``."""
    return f"{view}__{name}"


@dataclass(frozen=True, slots=True, eq=False)
class ServicePart:
    """What a service takes of one view.

    ``max_age_s``: rows older than this count as missing. ``defaults``: feature → value that stands
    in where the row is missing, which its status says all the same.
    """

    view: str
    features: tuple[str, ...]
    max_age_s: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def known(self, view: FeatureView) -> tuple[str, ...]:
        """Those of its features that the view has, as it is live."""
        there = view.feature_names
        return tuple(name for name in self.features if name in there)


@dataclass(frozen=True, eq=False)
class Service:
    """A named set of features: frozen, no I/O.

    Args:
        name: of the service.
        entity: the columns that a request brings for each row; the key of each view is some of
            them, under their own names.
        parts: what it takes of each view, in the order of the answer.
        max_age_s: of the parts that have none of their own.
        deadline_ms: of a request that names none; without it each view's own holds.

    Raises:
        ConfigError: a name is not valid or stands twice, two columns of a row would have one name,
            there are too many views, or a default or the deadline does not fit; says which.
    """

    name: str
    entity: tuple[str, ...]
    parts: tuple[ServicePart, ...]
    max_age_s: float | None = None
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        names = [
            self.name,
            *self.entity,
            *(name for part in self.parts for name in (part.view, *part.features)),
        ]
        for name in names:
            if not NAME.match(name):
                raise ConfigError(
                    f"{name!r} is no name: it has lower-case letters, digits and _, starts with a"
                    " letter, and is at most 63 long"
                )
        if (
            not self.entity
            or not 0 < len(self.parts) <= MAX_VIEWS
            or not all(part.features for part in self.parts)
        ):
            raise ConfigError(
                f"a service has an entity, 1 to {MAX_VIEWS} views, and features of each;"
                f" {self.name!r} has {len(self.parts)} views"
            )
        if len({part.view for part in self.parts}) < len(self.parts):
            raise ConfigError(
                f"service {self.name!r} names a view twice: put its features together"
            )
        twice, count = Counter(self.columns).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"service {self.name!r} has two columns {twice!r} in its rows")
        for part in self.parts:
            for name in part.defaults:
                if name not in part.features:
                    raise ConfigError(
                        f"defaults: {name!r} is no feature that {self.name!r} takes of {part.view}"
                    )
        if self.deadline_ms is not None and not 0 <= self.deadline_ms <= MAX_DEADLINE_MS:
            raise ConfigError(
                f"deadline: at most {MAX_DEADLINE_MS / 1000:g} s, got {self.deadline_ms / 1000:g}"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a joined row: the entity's, then of each view its status and the like, and
        its features; without what stands behind its misses adds."""
        of_views = (
            column_of(part.view, name)
            for part in self.parts
            for name in (*PART_FIELDS, *part.features)
        )
        return (*self.entity, *of_views)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the whole definition, its version: what is served and what was trained
        with are one where theirs are equal."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def version(self) -> str:
        """Name and fingerprint, shortened: ``recommend@1c62b1d36a2f``."""
        return f"{self.name}@{self.fingerprint[:12]}"

    def to_json(self) -> dict[str, Any]:
        """A plain dict that :meth:`from_json` reads back to an equal service."""
        names = ("name", "entity", "parts", "max_age_s", "deadline_ms")
        body: dict[str, Any] = plain({name: getattr(self, name) for name in names})
        return body

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Service:
        """The service that :meth:`to_json` wrote."""
        return record_of(cls, data)

    def oldest_s(self, part: ServicePart, max_age_s: float | None = None) -> float | None:
        """The largest age of a row of a part that counts, by the part, else the service, and by the
        request; None: the view's own limits hold alone."""
        own = self.max_age_s if part.max_age_s is None else part.max_age_s
        return max_age_s if own is None else own if max_age_s is None else min(own, max_age_s)

    def describe(self) -> dict[str, Any]:
        """What callers may know of it: its version, what a request brings, and what it gets."""
        views = {
            part.view: {"features": list(part.features), "max_age_s": self.oldest_s(part)}
            for part in self.parts
        }
        return {
            "service": self.name,
            "version": self.fingerprint,
            "entity": list(self.entity),
            "views": views,
            "deadline_ms": self.deadline_ms,
        }


class EntityRows:
    """The rows that a request wants of a service: the values of its entity's columns, checked.

    Args:
        service: whose entity they are.
        entities: column → values, a dict or a table of pyarrow, pandas or polars: 1 to
            :data:`MAX_KEYS` rows.

    Raises:
        RequestError: a column is missing or of another length, there is one that is not the
            entity's, or there are too many rows.
    """

    def __init__(self, service: Service, entities: Any) -> None:
        wanted, self._values = ", ".join(service.entity), key_columns(entities)
        for name in [*self._values, *service.entity]:
            if name not in service.entity or name not in self._values:
                what = "is none of them" if name in self._values else "is missing"
                raise RequestError(
                    f"service {service.name!r} takes the entity columns {wanted}: {name[:80]!r}"
                    f" {what}",
                    code="bad_entities",
                )
        counts = {name: len(values) for name, values in self._values.items()}
        self.count = counts[service.entity[0]]
        if set(counts.values()) != {self.count}:
            shown = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise RequestError(
                f"the entity columns are of different lengths: {shown}", code="bad_entities"
            )
        if not 0 < self.count <= MAX_KEYS:
            code = "too_many_keys" if self.count else "no_keys"
            raise RequestError(
                f"a request has 1 to {MAX_KEYS} rows, got {self.count}",
                status=413 if self.count else 400,
                code=code,
            )
        self.texts: dict[str, list[str]] = {}
        """Column → of each row its value's text, or what is shown of one that is none; in the
        service's order."""
        for name in service.entity:
            values = self._values[name]
            self.texts[name], self._values[name] = _texts(values)
        self._keys: dict[tuple[str, ...], list[Any]] = {}

    def has(self, entity: tuple[str, ...]) -> bool:
        """Whether a view's key is among the columns."""
        return all(name in self._values for name in entity)

    def keys(self, entity: tuple[str, ...]) -> list[Any]:
        """The keys of a view, one a row: the text of each, and what was brought for one that is
        none, which a lookup calls a bad key."""
        if len(entity) == 1:
            return self._values[entity[0]]
        keys = self._keys.get(entity)
        if keys is None:
            rows = zip(*(self._values[name] for name in entity), strict=True)
            keys = self._keys[entity] = [_joined(list(row), entity) for row in rows]
        return keys


def _texts(values: list[Any]) -> tuple[list[str], list[Any]]:
    """What is shown of values; and their texts, what is none left as it is."""
    try:
        # the common case, in a few µs: nothing but texts, and no half of a surrogate pair among
        # them
        "".join(values).encode()
        return values, values
    except (TypeError, UnicodeEncodeError):
        if set(map(type, values)) == {int} and min(values) >= -(2**63) and max(values) < 2**64:
            # as quick, for the other common case
            texts = list(map(str, values))
            return texts, texts
        shown, keys = [], []
    for value in values:
        key = _joined([value], ("key",))
        keys.append(key if isinstance(key, str) else value)
        shown.append(key if isinstance(key, str) else shown_key(value))
    return shown, keys


def _joined(parts: list[Any], entity: tuple[str, ...]) -> Any:
    try:
        return join_key(parts, entity)
    except RequestError:
        return parts


# ---- Service answer: what a service's views answered for the rows of one request, joined to
# one row for each entity.


_SAID = dict(ANSWER_FIELDS[1 : 1 + len(PART_FIELDS)])
"""Column → its type, of those that a joined row has of every view: :data:`PART_FIELDS`, which are
the first that an answer has behind its key."""
assert tuple(_SAID) == PART_FIELDS


@dataclass(frozen=True, slots=True)
class Refused:
    """A view that could not be answered at all: all its rows are missing for ``reason``, and
    ``problem`` says more (a member of the answer's ``views``)."""

    reason: Reason
    problem: Any
    error: PrecomputeError

    @classmethod
    def by(cls, error: PrecomputeError) -> Refused:
        """What an error made of it; ``problem`` is its text.

        Raises:
            RequestError: this very error, where all of the request is too much, or its inputs are
                wrong, and not one view.
        """
        if isinstance(error, OtherFormatError):
            reason = Reason.OTHER_FORMAT
        elif not isinstance(error, RequestError):
            reason = Reason.STORE_UNAVAILABLE
        elif error.status == 413 or error.code in ("bad_inputs", "no_fallback"):
            raise error
        else:
            reason = Reason.SHED if error.status == 503 else Reason(error.code)
        return cls(reason, str(error), error)


class Lookups(Protocol):
    """What answers lookups: :class:`precompute.store.answers.lookup.Lookup`."""

    @property
    def online(self) -> OnlineStore:
        """The store it reads."""

    def last(self, view: str) -> Pointer | None:
        """What was live when it last read rows of a view."""

    def begin(
        self,
        view: str,
        keys: Sequence[Any],
        options: LookupOptions,
        *,
        cache_control: CacheControl | None,
        columnar: bool,
        admit: Callable[[AnswerPlan, FoundRows], None],
        part: ServicePart,
    ) -> Answer:
        """The lookup of a view, its rows perhaps in flight."""


class _RekeyedError(RequestError):
    """Rows were read by another key than the view has, as it is live: ``entity`` is that."""

    def __init__(self, entity: tuple[str, ...]) -> None:
        super().__init__(
            "the view is published with another key just now; try again", status=503, code="busy"
        )
        self.entity = entity


@dataclass(slots=True)
class ServiceAnswer:
    """The answer of one request, some rows perhaps still in flight.

    ``options.inputs`` are by view: view → key → input column → value. ``parts`` are the views', in
    the service's order, as :meth:`begin` began them, or why one is refused.
    """

    service: Service
    entities: EntityRows
    options: LookupOptions
    parts: list[Answer | Refused] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.options.check()
        there = [part.view for part in self.service.parts]
        for view in self.options.inputs or ():
            if view not in there:
                raise RequestError(
                    "inputs of a service are by view, {view: {key: {column: value}}}:"
                    f" service {self.service.name!r} has no view {str(view)[:80]!r} (it has:"
                    f" {', '.join(there)}){did_you_mean(str(view)[:80], there)}",
                    code="bad_inputs",
                )

    def begin(
        self,
        lookup: Lookups,
        part: ServicePart,
        cache_control: CacheControl | None = None,
        admit: Callable[[AnswerPlan, FoundRows], None] | None = None,
    ) -> Answer:
        """A view's share, as :meth:`precompute.store.answers.lookup.Lookup.begin`: its rows are all
        read under one pointer.

        Raises:
            RequestError: no such view is live, or its key is not among the entity's columns.
            OnlineStoreError: the store cannot be read.
        """
        entity = self.service.entity
        if len(entity) > 1:
            # by the key that it had last; which it has is known with the rows
            pointer = (
                lookup.online.known(part.view)
                or lookup.last(part.view)
                or lookup.online.live(part.view)
            )
            entity = entity[:1] if pointer is None else pointer.view.entity
        try:
            return self._begin(lookup, part, entity, cache_control, admit)
        except _RekeyedError as exc:
            return self._begin(lookup, part, exc.entity, cache_control, admit)

    def _begin(
        self,
        lookup: Lookups,
        part: ServicePart,
        entity: tuple[str, ...],
        cache_control: CacheControl | None,
        admit: Callable[[AnswerPlan, FoundRows], None] | None,
    ) -> Answer:
        def admitted(plan: AnswerPlan, found: FoundRows) -> None:
            if plan.view.entity != entity:
                self._check_entity(part.view, plan.view.entity)
                raise _RekeyedError(plan.view.entity)
            if admit is not None:
                admit(plan, found)

        self._check_entity(part.view, entity)
        keys, options = self.entities.keys(entity), self._options_of(part)
        return lookup.begin(
            part.view,
            keys,
            options,
            cache_control=cache_control,
            columnar=True,
            admit=admitted,
            part=part,
        )

    def _options_of(self, part: ServicePart) -> LookupOptions:
        """The options of one view's lookup, with what is left of the one deadline."""
        options, oldest_s = self.options, self.service.oldest_s(part, self.options.max_age_s)
        if options.inputs is not None:
            options = options._replace(inputs=options.inputs.get(part.view))
        deadline_ms = (
            self.service.deadline_ms if options.deadline_ms is None else options.deadline_ms
        )
        if deadline_ms is None and oldest_s is None:
            return options
        left_ms = (
            None
            if deadline_ms is None
            else max(0.0, deadline_ms - (time.monotonic() - self.began) * 1e3)
        )
        return options._replace(max_age_s=oldest_s, deadline_ms=left_ms)

    def _check_entity(self, view: str, entity: tuple[str, ...]) -> None:
        if not self.entities.has(entity):
            raise RequestError(
                f"view {view!r} has the key {', '.join(entity)}, and service {self.service.name!r}"
                f" the entity {', '.join(self.service.entity)}",
                code=Reason.OTHER_ENTITY,
            )

    def wait(self) -> None:
        """Wait for the rows in flight, of all views until the one deadline, and judge all by what
        time it is then."""
        for i, answer in enumerate(self.parts):
            if isinstance(answer, Answer):
                try:
                    answer.wait()
                except PrecomputeError as exc:
                    self.parts[i] = Refused.by(exc)
        self.check()
        self.judge_again()

    def check(self) -> None:
        """Raise the store's error where no view is answered.

        Raises:
            OnlineStoreError, OtherFormatError: of one view at least the store could not be read.
        """
        refused = [part.error for part in self.parts if isinstance(part, Refused)]
        failed = [
            error for error in refused if isinstance(error, (OnlineStoreError, OtherFormatError))
        ]
        if failed and len(refused) == len(self.parts):
            raise failed[0]

    def judge_again(self) -> None:
        """Judge all rows by what time it is now: the first may have been read long before the
        last."""
        for answer in self.parts:
            if isinstance(answer, Answer):
                answer.judge_again()

    def views(self) -> dict[str, Any]:
        """View → what all its rows share: snapshot, model and TTL, and the features that it has
        not, which are null; or the problem that it has."""
        answers = zip(self.service.parts, self.parts, strict=True)
        return {
            part.view: (
                {"problem": answer.problem}
                if isinstance(answer, Refused)
                else shared_of(part, answer.plan)
            )
            for part, answer in answers
        }

    def table(self) -> pa.Table:
        """The joined rows as Arrow, with :attr:`Service.columns`; the entity's are text. A feature
        of a view that is refused is its default, or null without a type."""
        rows = self.entities.count
        arrays = [pa.array(self.entities.texts[name], pa.string()) for name in self.service.entity]
        for part, answer in zip(self.service.parts, self.parts, strict=True):
            arrays += (
                _refused_columns(part, answer, rows)
                if isinstance(answer, Refused)
                else _columns(part, answer)
            )
        plans = tuple(answer.plan for answer in self.parts if isinstance(answer, Answer))
        if len(plans) == len(self.parts):
            return pa.Table.from_arrays(arrays, schema=_schema(self.service, plans))
        names = [
            name
            for part, answer in zip(self.service.parts, self.parts, strict=True)
            for name in _names(part, answer)
        ]
        fields = zip([*self.service.entity, *names], (array.type for array in arrays), strict=True)
        return pa.Table.from_arrays(
            arrays, schema=pa.schema(list(fields), _metadata(self.service, self.views()))
        )


@lru_cache(1024)
def shared_of(part: ServicePart, plan: AnswerPlan) -> dict[str, Any]:
    """What all rows of a view share, as JSON has it."""
    pointer, there = plan.pointer, plan.features or ()
    shared: dict[str, Any] = {
        "snapshot": pointer.snapshot,
        "model": pointer.model,
        "ttl_s": float(plan.view.ttl_s),
    }
    shared |= {} if plan.miss_model == pointer.model else {"miss_model": plan.miss_model}
    if plan.base64:
        shared["base64"] = plan.base64
    if unknown := [name for name in part.features if name not in there]:
        shared["unknown_features"] = unknown
    return shared


def _names(part: ServicePart, answer: Answer | Refused) -> list[str]:
    more = () if isinstance(answer, Refused) else answer.plan.more_fields
    return [
        column_of(part.view, name)
        for name in (*PART_FIELDS, *(name for name, _ in more), *part.features)
    ]


def _columns(part: ServicePart, answer: Answer) -> list[pa.Array]:
    columns, plan = answer.columns(), answer.plan
    said = columns[: len(_SAID)] + columns[len(ANSWER_FIELDS) - 1 : plan.own_columns - 1]
    features = columns[plan.own_columns - 1 :]
    there = plan.features or ()
    if len(there) == len(part.features):
        return said + features
    return said + [
        features[there.index(name)] if name in there else pa.nulls(len(answer.keys))
        for name in part.features
    ]


def _refused_columns(part: ServicePart, answer: Refused, rows: int) -> list[pa.Array]:
    said = {
        "status": str(Status.MISSING),
        "reason": str(answer.reason),
        "source": refused_source(part),
    }
    columns = [pa.array([said.get(name)] * rows, kind) for name, kind in _SAID.items()]
    return columns + [pa.array([part.defaults.get(name)] * rows) for name in part.features]


def refused_source(part: ServicePart) -> str | None:
    """Where the features of a view that is refused come from: the service's defaults, or
    nowhere."""
    return str(AnswerSource.DEFAULT) if part.defaults else None


@lru_cache(256)
def _schema(service: Service, plans: tuple[AnswerPlan, ...]) -> pa.Schema:
    fields, views = [(name, pa.string()) for name in service.entity], {}
    for part, plan in zip(service.parts, plans, strict=True):
        views[part.view], there = shared_of(part, plan), plan.features or ()
        kinds = [
            (name, plan.schema.field(name).type if name in there else pa.null())
            for name in part.features
        ]
        fields += [
            (column_of(part.view, name), kind)
            for name, kind in (*_SAID.items(), *plan.more_fields, *kinds)
        ]
    return pa.schema(fields, _metadata(service, views))


def _metadata(service: Service, views: Mapping[str, Any]) -> dict[str, str]:
    return {"service": service.name, "version": service.fingerprint, "views": json.dumps(views)}
