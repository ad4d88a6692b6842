"""Own definition: whether this machine's own files say what the pointer of a view would have it
run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from precompute.jobs.config.project import Project
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.store.feature_view import NAME, FeatureView
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online.online_store import Pointer


def check_own(pointer: Pointer, offline: OfflineStore, folder: Path) -> None:
    """Refuse what nobody but the online store says: who may write there could have any SQL run, and
    any class made.

    A pointer's definition is believed where the manifest of the snapshot that it names says the
    same, or the view's own file as it is now.

    Args:
        pointer: of what is live.
        offline: where this machine has manifests, if it has any.
        folder: the project's.

    Raises:
        ConfigError: neither does; says what to do.
    """
    name, wanted = pointer.view.name, _run_by(pointer.view)
    if NAME.match(name) and any(_run_by(view) == wanted for view in _own(pointer, offline, folder)):
        return
    raise ConfigError(
        f"view {name[:64]!r}: its pointer names SQL or a model that neither the manifest of"
        f" snapshot {pointer.snapshot} under {offline.root} nor {folder / 'views'} names, so that"
        " nothing is computed for it: give this machine the root or the view's file as it was"
        " published, or run the view; where nobody published that, somebody else writes to the"
        " online store"
    )


def _own(pointer: Pointer, offline: OfflineStore, folder: Path) -> Iterator[FeatureView]:
    # a machine that only serves may have one of them, or none
    with contextlib.suppress(PrecomputeError):
        yield offline.view(pointer.view.name).snapshot(pointer.snapshot).view
    with contextlib.suppress(PrecomputeError):
        yield Project(folder).view(pointer.view.name).feature_view()


def _run_by(view: FeatureView) -> str:
    """All of a view that is run, or goes into what is."""
    definition = view.to_json()
    return json.dumps(
        [definition["entity"], definition["features"], definition["definition"]], sort_keys=True
    )
