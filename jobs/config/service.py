"""Service: ``services/<service>.yaml``: which features of which views belong together, for serving
and for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from precompute.jobs.config.section import Duration, Name, Section, checked, read_yaml
from precompute.store.answers.service import MAX_VIEWS, Service, ServicePart
from precompute.store.errors import ConfigError, did_you_mean
from precompute.store.wire.lookup_options import MAX_DEADLINE_MS

if TYPE_CHECKING:
    from precompute.jobs.config.view import ViewConfig


class PartConfig(Section):
    """What is taken of one view; a plain list is its features."""

    features: list[Name] = Field(min_length=1, max_length=512)
    """those that are taken, in this order"""
    max_age: Duration | None = Field(default=None, gt=0)
    """older rows of this view count as missing"""
    defaults: dict[Name, Any] = Field(default={})
    """feature → value that stands in where the row is missing"""


Part = Annotated[
    PartConfig,
    BeforeValidator(
        lambda v: {"features": v} if isinstance(v, list) else v,
        json_schema_input_type=PartConfig | list[str],
    ),
]


class ServiceConfig(Section):
    """``services/<service>.yaml``: features of several views, joined to one row for each entity."""

    name: Name
    """the file's name"""
    entity: list[Name] = Field(min_length=1, max_length=8)
    """columns that a request brings for each row; the key of each view is some of them"""
    views: dict[Name, Part] = Field(min_length=1, max_length=MAX_VIEWS)
    """view → the features that are taken of it"""
    max_age: Duration | None = Field(default=None, gt=0)
    """older rows count as missing, of the views that have no limit of their own here"""
    deadline: Duration | None = Field(default=None, le=MAX_DEADLINE_MS / 1000)
    """how long a request that names no deadline waits for models, all views together; by default
    each view's own"""

    def service(self) -> Service:
        """The service as the other rooms know it.

        Raises:
            ConfigError: a name stands twice.
        """
        parts = tuple(
            ServicePart(name, tuple(part.features), part.max_age, part.defaults)
            for name, part in self.views.items()
        )
        deadline_ms = None if self.deadline is None else self.deadline * 1000
        return Service(self.name, tuple(self.entity), parts, self.max_age, deadline_ms)


def read_service(path: Path) -> Service:
    """The service in a file.

    Raises:
        ConfigError: every mistake in it, with file and key.
    """
    config = checked(ServiceConfig, read_yaml(path), path, {})
    if config.name != path.stem:
        raise ConfigError(
            f"{path}: name: {config.name!r} differs from the file's name; call the file"
            f" services/{config.name}.yaml"
        )
    try:
        return config.service()
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def fitted(service: Service, views: Mapping[str, ViewConfig]) -> Service:
    """A service without defaults that fit no feature as its view is configured: they stand in while
    the view is not live, too, and no types are known."""
    parts = [
        replace(
            part,
            defaults={
                n: v
                for n, v in part.defaults.items()
                if part.view not in views or _fits(views[part.view], n, v)
            },
        )
        for part in service.parts
    ]
    return (
        replace(service, parts=tuple(parts))
        if any(part.defaults for part in service.parts)
        else service
    )


class Services(dict[str, Service]):
    """The services of a project whose files are right, by their names; any other name raises what
    is wrong with it.

    Args:
        read: name → each that has a file, or what is wrong with that.
        named: one by its name, or raises.
    """

    def __init__(
        self, read: Mapping[str, Service | ConfigError], named: Callable[[str], Service]
    ) -> None:
        super().__init__({name: one for name, one in read.items() if isinstance(one, Service)})
        self._named = named

    def __missing__(self, name: str) -> Service:
        return self._named(name)


def mistakes(
    service: Service, views: Mapping[str, ViewConfig], names: list[str], path: Path
) -> list[str]:
    """Where a service does not fit the views as they are configured, a line each with file and key.
    It is served all the same: what it names and is not there, is missing.

    Args:
        service: that was read.
        views: those whose file is right.
        names: of all that have one.
        path: of the service's file.
    """
    lines = []
    for part in service.parts:
        where, view = f"{path}: views.{part.view}", views.get(part.view)
        if view is None:
            if part.view not in names:
                lines.append(
                    f"{where}: no such view{did_you_mean(part.view, names)} (there are:"
                    f" {', '.join(names)})"
                )
            continue
        key = view.feature_view().entity
        if other := [column for column in key if column not in service.entity]:
            lines.append(
                f"{where}: its key is {', '.join(key)}, and {other[0]!r} is not in `entity`"
                f" ({', '.join(service.entity)})"
            )
        for name in part.features:
            if name not in view.features:
                lines.append(
                    f"{where}.features: it has no feature"
                    f" {name!r}{did_you_mean(name, view.features)}"
                )
        for name, value in part.defaults.items():
            if name in view.features and not _fits(view, name, value):
                lines.append(
                    f"{where}.defaults.{name}: {value!r} is no {view.features[name].dtype} as the"
                    " view declares it"
                )
    return lines


def _fits(view: ViewConfig, name: str, value: Any) -> bool:
    # only a service with defaults needs Arrow here
    from precompute.store.answers.plan import fits

    return fits(view.feature_view(), name, value)
