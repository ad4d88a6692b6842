"""Precompute: what its users import. Everything here is public and loaded when it is first used;
every other module is private."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from precompute.model import Model, digest
    from precompute.plugins.notebook.open_project import OpenProject as OpenProject
    from precompute.store.answers.lookup import Lookup
    from precompute.store.answers.service import Service, ServicePart
    from precompute.store.client import AsyncClient, Client, Tls, ViewLookupRequest
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
        OtherFormatError,
        OverloadedError,
        PrecomputeError,
        RejectedError,
        RequestError,
        RowsLostError,
        SnapshotError,
        SourceError,
        UnreadableError,
        VectorIndexError,
    )

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
    "OtherFormatError",
    "OverloadedError",
    "PrecomputeError",
    "RejectedError",
    "RequestError",
    "RowsLostError",
    "Service",
    "ServicePart",
    "SnapshotError",
    "SourceError",
    "Tls",
    "UnreadableError",
    "VectorIndexError",
    "ViewLookupRequest",
    "digest",
    "open",
    "services",
]

_OF_A_PLUG_IN = "OpenProject"
"""Public, but not of ``__all__``: ``from precompute import *`` goes on where it is not here."""

_MODULES = {
    "AsyncClient": "precompute.store.client",
    "Client": "precompute.store.client",
    "Tls": "precompute.store.client",
    "ViewLookupRequest": "precompute.store.client",
    "Lookup": "precompute.store.answers.lookup",
    "Service": "precompute.store.answers.service",
    "ServicePart": "precompute.store.answers.service",
    "Model": "precompute.model",
    "digest": "precompute.model",
}


def open(project: "str | Path") -> "OpenProject":
    """A project, to run its views, look rows up and search them from Python: see
    :class:`precompute.plugins.notebook.open_project.OpenProject`.

    Where there is no project but its online store, :meth:`precompute.Lookup.open` reads that, and
    :class:`precompute.Client` reads from a server.

    Args:
        project: its folder, or the ``project.yaml`` in it.

    Raises:
        ConfigError: there is no project, its configuration is wrong, or what it needs is not
            installed.
    """
    from precompute.store.doors import NAMES
    from precompute.store.errors import ConfigError

    scheme = str(project).partition(":")[0]
    if scheme == "table" or "://" in str(project):
        raise ConfigError(
            f"{scheme}: … is no project's folder: precompute.Lookup.open(url, root=…) reads an"
            " online store, precompute.Client(url) reads from a server"
        )
    try:
        opened: type[OpenProject] = NAMES.open("precompute.OpenProject")
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] == "precompute":
            raise
        raise ConfigError(
            f"{exc.name} is not installed: a project is opened with pip install"
            " 'precompute-store[cpu]', or [gpu]; precompute.Client reads from a server"
        ) from exc
    return opened(project)


def services(folder: "str | Path") -> "dict[str, Service]":
    """The services of a project's folder by their names, for a lookup or a training set; to name
    one that is not there, or whose file is wrong, raises what is wrong with it.

    Raises:
        ConfigError: there is no project, or its ``project.yaml`` is wrong.
    """
    from precompute.jobs.config.project import Project
    from precompute.jobs.config.serve import Services

    project = Project(folder)
    return Services(project.services, project.service)


def __getattr__(name: str) -> Any:
    """What is public, from where it is: a client loads no more than it needs."""
    if name not in (*__all__, _OF_A_PLUG_IN):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == _OF_A_PLUG_IN:
            return import_module("precompute.store.doors").NAMES.open(f"precompute.{name}")
        return getattr(import_module(_MODULES.get(name, "precompute.store.errors")), name)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] == "precompute":
            raise
        raise ModuleNotFoundError(
            f"{exc.name} is not installed: precompute.{name} comes with pip install"
            " 'precompute-store[cpu]', or [gpu]; precompute.Client reads from a server",
            name=exc.name,
        ) from exc
