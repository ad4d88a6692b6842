"""Serve: what is served, and how: the section ``serve`` of ``project.yaml`` (where the HTTP API
listens, who may call it, and how much), and ``services/<service>.yaml`` (which features of which
views belong together, for serving and for training)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from precompute.jobs.config.open_section import OpenSection
from precompute.jobs.config.section import Duration, Name, Section, checked, read_yaml
from precompute.store.answers.service import MAX_VIEWS, Service, ServicePart
from precompute.store.doors import PROJECT_KEYS
from precompute.store.errors import ConfigError, did_you_mean
from precompute.store.http.encoding.caching import MAX_CACHE_BYTES, Caching
from precompute.store.http.guard.limits import Limits
from precompute.store.online.miss_cache import MissCacheLimits
from precompute.store.wire.bodies import MAX_BODY_BYTES
from precompute.store.wire.lookup_options import MAX_DEADLINE_MS

if TYPE_CHECKING:
    from precompute.jobs.config.view import ViewConfig

_DEFAULT = Limits()
_KEPT = MissCacheLimits()
MOST_WORKERS = 64
"""Processes that answer."""
_ADDRESS = re.compile(r"\A(unix:.+|\[?[0-9A-Za-z.:_-]+\]?:(?P<port>\d{1,5}))\Z")
_MOST_PORT = 65_535

_HOST = re.compile(r"\A[0-9A-Za-z_-]+(\.[0-9A-Za-z_-]+)*\Z")


def _host(name: str) -> str:
    if not _HOST.match(name):
        raise ValueError("write a host's name or address, without a port")
    return name.lower()


Host = Annotated[str, AfterValidator(_host)]
"""A name without a port."""


class TlsConfig(Section):
    """TLS by files in PEM; new ones are taken up within a second, without a restart."""

    cert: str
    """the server's certificate, and those between it and its root"""
    key: str
    """its private key, without a password"""
    client_ca: str | None = None
    """certificates that sign clients': who has none is not let in (mTLS); a change needs a
    restart"""


class LimitsConfig(Section):
    """What one client may ask, and how long it may take; of each worker where numbers and bytes of
    all clients together are meant."""

    headers_bytes: int = Field(default=_DEFAULT.headers_bytes, ge=256)
    """of a request's head (431)"""
    url_bytes: int = Field(default=_DEFAULT.url_bytes, ge=64)
    """of its path and query (414)"""
    body_bytes: int = Field(default=_DEFAULT.body_bytes, ge=64, le=MAX_BODY_BYTES)
    """of its body (413)"""
    bodies_bytes: int = Field(default=_DEFAULT.bodies_bytes, ge=64)
    """of all bodies that are not answered yet (503)"""
    answer_bytes: int = Field(default=_DEFAULT.answer_bytes, ge=1024)
    """of an answer, judged before it is made (413)"""
    unsent_bytes: int = Field(default=_DEFAULT.unsent_bytes, ge=2**16)
    """of all answers that wait for their clients; who holds the most is cut"""
    connections: int = Field(default=_DEFAULT.connections, ge=1, le=100_000)
    """open at once; beyond, an idle one makes room, or 503"""
    connections_per_client: int | None = Field(default=_DEFAULT.connections_per_client, ge=1)
    """of one address, of IPv6 a /64; none: not counted, as behind a proxy"""
    pipelined: int = Field(default=_DEFAULT.pipelined, ge=1, le=1000)
    """requests of a connection that wait for the one before"""
    header_time: Duration = Field(default=_DEFAULT.header_s, gt=0)
    """for a request's head"""
    body_time: Duration = Field(default=_DEFAULT.body_s, gt=0)
    """for its body"""
    idle_time: Duration = Field(default=_DEFAULT.idle_s, gt=0)
    """between an answer and the next request"""
    write_time: Duration = Field(default=_DEFAULT.write_s, gt=0)
    """for a client to take an answer, and 1 s for each MiB"""

    def limits(self) -> Limits:
        """These limits as a value: what is a ``time`` here, is in seconds there."""
        return Limits(**{name.replace("_time", "_s"): value for name, value in self})


class ModelsConfig(Section):
    """The processes that compute misses, one for each model that is live."""

    grace: Duration = Field(default=5.0, gt=0)
    """how much longer a model may be at one batch than its views' `fallback.deadline` for each row,
    or ten times its own pace, before its process is replaced"""
    memory_mb: int | None = Field(default=None, ge=64)
    """of such a process, past which it is replaced; by default half of the machine's"""


class MissCacheConfig(Section):
    """Computed misses that are cached beside the online store, of each view."""

    rows: int = Field(default=_KEPT.rows, ge=1)
    """at most"""
    size_bytes: int = Field(default=_KEPT.size_bytes, ge=4096)
    """at most"""


class ServeConfig(OpenSection):
    """The HTTP API."""

    door = PROJECT_KEYS
    within = "serve"

    bind: str = "127.0.0.1:8080"
    """host:port, or unix:./api.sock; others than this machine reach it only with `tokens` or
    `tls.client_ca`"""
    hosts: list[Host] = Field(default=[])
    """names that a server without `tokens` and `tls` is addressed by, as a proxy on this machine
    passes them on; addresses and localhost need none"""
    workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    """processes that answer, over one socket"""
    admin: str | None = None
    """an address of its own for /metrics and the page, as `bind`; none: they are served beside the
    rest, to `admin` tokens"""
    tokens: str | None = None
    """file of the tokens that open the API, made by `precompute token`; none: anyone who reaches it
    may ask"""
    tls: TlsConfig | None = None
    """TLS; none: plain HTTP"""
    limits: LimitsConfig = LimitsConfig()
    models: ModelsConfig = ModelsConfig()
    miss_cache: MissCacheConfig = MissCacheConfig()
    cache_mb: int = Field(default=MAX_CACHE_BYTES // 2**20, ge=0)
    """of the encoded rows that each worker keeps in memory; 0: none"""
    shared_max_age: Duration | None = Field(default=None, ge=0)
    """how long caches in between, shared ones too, may answer with a single row before they ask
    again, and so serve what a rollback took back; none: 60 s, in a caller's own cache alone"""
    access_log: str | None = None
    """file that gets a line of JSON for each request, or - for the standard error"""
    server_timing: bool = False
    """answers say what took how long (Server-Timing)"""

    @field_validator("bind", "admin")
    @classmethod
    def _address(cls, bind: str | None) -> str | None:
        found = None if bind is None else _ADDRESS.match(bind)
        if bind is not None and found is None:
            raise ValueError("write host:port, such as 127.0.0.1:8080, or unix:./api.sock")
        if found is not None and int(found["port"] or 0) > _MOST_PORT:
            raise ValueError(f"a port is at most {_MOST_PORT}")
        return bind

    def caching(self) -> Caching:
        """What caches in between may do with single rows."""
        return (
            Caching()
            if self.shared_max_age is None
            else Caching(int(self.shared_max_age), shared=True)
        )

    def tokens_file(self, home: Path) -> Path | None:
        """The file of tokens, from the project's folder."""
        return None if self.tokens is None else home / self.tokens


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
