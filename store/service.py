"""Service: features of several views under one name, joined to one row for each entity. Serving and
training read this one definition.

Frozen, no I/O. The configuration builds it; who has none, such as a notebook, may write one down in
Python.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from precompute.store.errors import ConfigError, RequestError
from precompute.store.feature_view import NAME, FeatureView
from precompute.store.key_text import join_key, key_columns, shown_key
from precompute.store.lookup_options import MAX_DEADLINE_MS, MAX_KEYS
from precompute.store.record import plain, record_of

MAX_VIEWS = 32
"""Of one service, as many as ``POST /v1/lookup`` takes lookups; with the most rows of a request it
bounds what one may cost."""
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
    """A named set of features.

    Args:
        name: of the service.
        entity: the columns that a request brings for each row; the key of each view is some of
            them, under their own names.
        parts: what it takes of each view, in the order of the answer.
        max_age_s: of the parts that have none of their own.
        deadline_ms: of a request that names none; without it each view's own holds.

    Raises:
        ConfigError: a name is none, stands twice, or two columns of a row would have one name; says
            which.
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
        """All of a joined row: the entity's, then of each view what is said of it, and its
        features."""
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
        """The largest age of a row of a part that counts, by the part, else the service, and by who
        asks; None: the view's own limits hold alone."""
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
