"""Preflight: what would keep a run from publishing, checked before its rows are computed: no index
library, a broken contract, an online store that cannot be reached or written. It takes
milliseconds, and the model hours."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Collection

from precompute.jobs.config.project import Project
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.judge.gates import served_snapshot
from precompute.jobs.run.judge.value_gates import Verdicts, judge_contract
from precompute.store.disk.storage import known_identity
from precompute.store.errors import ConfigError, GateError
from precompute.store.offline.snapshot import Verdict
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.url import open_online_store


def check_before(
    project: Project,
    name: str,
    partition: str | None = None,
    *,
    accept: Collection[str] = (),
    take_over: bool = False,
) -> None:
    """Check what a run of a view needs to publish. A run that will publish nothing, since the view
    is held or a newer partition is live, is not checked: it needs no online store.

    Args:
        project: the configuration.
        name: of the view.
        partition: that is to be computed, as manifests name it.
        accept: gates whose refusal is accepted.
        take_over: whether the view may be another project's.

    Raises:
        ConfigError: the index, or the Iceberg table, cannot be built here.
        GateError: the gate ``contract`` would refuse any result.
        OnlineStoreError, ConflictError: the online store cannot be reached or written, or the view
            is another project's.
    """
    config, store = project.view(name), project.offline.view(name)
    if Standing(store).why_stays(None if config.serves_all else partition) is not None:
        return
    check_index(config)
    check_table(project, name)
    if "contract" not in accept:
        verdict = contract_verdict(config, store)
        if verdict is not None and not verdict.passed:
            raise GateError(
                f"view {name!r}: nothing was computed, the live snapshot stays. contract:"
                f" {verdict.message}. If this is as it should be: {config.accepting('contract')}"
            )
    check_online(project, name, take_over=take_over)


def check_index(config: ViewConfig) -> None:
    """Raises:
    ConfigError: the view has an index, and what builds it is not installed.
    """
    if config.index is not None and importlib.util.find_spec("faiss") is None:
        raise ConfigError(
            f"view {config.name!r}: index: FAISS, which builds it, is not installed: pip install"
            " 'precompute-store[cpu]', or leave `index` out"
        )


def check_table(project: Project, name: str) -> None:
    """Raises:
    ConfigError: the view has an Iceberg table, and what writes it is not installed.
    """
    if name in project.settings.iceberg and importlib.util.find_spec("pyiceberg") is None:
        raise ConfigError(
            f"view {name!r}: iceberg: pyiceberg, which writes the table, is not installed: pip"
            " install 'precompute-store[iceberg]', or take the view out of `iceberg` in"
            " project.yaml"
        )


def contract_verdict(config: ViewConfig, store: ViewStore) -> Verdict | None:
    """The verdict of the gate ``contract`` on the view's configuration against what is live; None
    where nothing is live, or the gate is off."""
    served = served_snapshot(store)
    if served is None or not config.gates.contract:
        return None
    verdicts = Verdicts(config.gates, 0)
    judge_contract(config.feature_view(), served.view, verdicts)
    return verdicts.all[0]


def check_online(project: Project, name: str, *, take_over: bool = False) -> None:
    """Raises:
    OnlineStoreError, ConflictError: the online store cannot be reached or written, or the view is
        another project's.
    """
    with contextlib.closing(
        open_online_store(project.online, memory_mb=project.settings.load_mb)
    ) as online:
        # a root without an identity has published nothing there yet
        online.check_writable(
            name, "" if take_over else known_identity(project.root) or "without a name yet"
        )
