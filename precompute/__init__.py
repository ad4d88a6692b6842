"""Precompute: what its users import. Everything here is public and loaded when it is first used; every other module is private."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from precompute.model import Model, digest
    from precompute.store.client import AsyncClient, Client, ViewLookupRequest
    from precompute.store.errors import (
        ConfigError,
        ConflictError,
        DeadlineError,
        DeniedError,
        GateError,
        MissingRowError,
        ModelError,
        NoAnswerError,
        OnlineStoreError,
        OverloadedError,
        PrecomputeError,
        RejectedError,
        RequestError,
        RowsLostError,
        SnapshotError,
        SourceError,
        VectorIndexError,
    )
    from precompute.store.lookup import Lookup
    from precompute.store.service import Service, ServicePart

__all__ = [
    "AsyncClient",
    "Client",
    "ConfigError",
    "ConflictError",
    "DeadlineError",
    "DeniedError",
    "GateError",
    "Lookup",
    "MissingRowError",
    "Model",
    "ModelError",
    "NoAnswerError",
    "OnlineStoreError",
    "OverloadedError",
    "PrecomputeError",
    "RejectedError",
    "RequestError",
    "RowsLostError",
    "Service",
    "ServicePart",
    "SnapshotError",
    "SourceError",
    "VectorIndexError",
    "ViewLookupRequest",
    "digest",
    "open",
    "services",
]

_MODULES = {
    "AsyncClient": "precompute.store.client",
    "Client": "precompute.store.client",
    "ViewLookupRequest": "precompute.store.client",
    "Lookup": "precompute.store.lookup",
    "Service": "precompute.store.service",
    "ServicePart": "precompute.store.service",
    "Model": "precompute.model",
    "digest": "precompute.model",
}


def open(online: str, root: "str | Path | None" = None) -> "Lookup":
    """A lookup over the store a URL names, as :meth:`precompute.store.lookup.Lookup.open`.

    Raises:
        ConfigError: the URL names no store.
    """
    from precompute.store.lookup import Lookup

    return Lookup.open(online, root)


def services(folder: "str | Path") -> "dict[str, Service]":
    """The services of a project's folder by their names, for a lookup or a training set.

    Raises:
        ConfigError: a file is wrong.
    """
    from precompute.jobs.config.project import Project

    project = Project(folder)
    return {name: project.service(name) for name in project.services}


def __getattr__(name: str) -> Any:
    """What is public, from where it is: a client loads no more than it needs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "precompute.store.errors")), name)
