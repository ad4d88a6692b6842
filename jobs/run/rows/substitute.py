"""Substitute: the contract of another model that computes a view's misses in its model's stead,
which a power brings by a view's key; the run opens it, tries it and has it judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from precompute.jobs.run.rows.open_model import OpenModel
from precompute.sources.source import Source
from precompute.store.doors import VIEW_KEYS
from precompute.store.feature_view import FeatureView, Substitute


class Agreed(NamedTuple):
    """How a substitute agrees with the model in one feature: the ``value``, the ``least`` that it
    must be, whether it ``passed``, and all of it in words."""

    feature: str
    value: float
    least: float
    passed: bool
    message: str


class Comparison(NamedTuple):
    """What came of rows of a snapshot that a substitute computed: how many it was given, how many
    of them it rejected, and that in words; and how the others agree with the model's, by feature:
    nothing of too few rows."""

    given: int
    rejected: int = 0
    message: str = ""
    agreed: Sequence[Agreed] = ()


class OpenSubstitute(Protocol):
    """A view's substitute, as its files are now."""

    @property
    def use(self) -> Substitute:
        """What makes it, as a manifest records it: paths start from the project's folder, wherever
        that lies. Its agreement is what was measured when it was made."""

    def check_approximates(self, fingerprint: str) -> None:
        """Refuse one that is made for another model.

        Args:
            fingerprint: of the view's model now.

        Raises:
            ConfigError: it is.
        """

    def check_fits(self, opened: OpenModel, source: Source) -> None:
        """Try it on the first rows of the source.

        Raises:
            ConfigError, ModelError: it cannot be made, or computes none of them.
        """

    def compare_rows(self, opened: OpenModel, source: Source, sample: pa.Table) -> Comparison:
        """Compute rows of a snapshot by it.

        Args:
            opened: the view.
            source: of the view, loaded.
            sample: some rows of the snapshot, drawn by chance, with a column ``key``.

        Raises:
            SourceError, ModelError, ConfigError: something cannot be read or computed.
        """

    def words(self) -> str:
        """What it is, and what it promises, for people."""


def substitute_of(view: FeatureView, folder: Path) -> OpenSubstitute | None:
    """What computes a view's misses in its model's stead; None where that does itself.

    Args:
        folder: of the project, absolute.

    Raises:
        ConfigError: it is not there, is not of this view, or what brings it is not installed.
    """
    if view.misses_by is None:
        return None
    found: OpenSubstitute = VIEW_KEYS.open(view.misses_by).substitute(view, folder)
    return found
