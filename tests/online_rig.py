"""Online rig: what tests do to an online store behind its back. A power with a store of its own
brings its rig, ``RIG`` in ``rig.py`` of its tests: where it is here, tests of the core run over
that store as over table files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import pytest

from precompute.store.doors import FOLDER, GROUP, KNOWN
from tests.scene import Scene


class OnlineRig(ABC):
    """One kind of online store that is not table files."""

    name: ClassVar[str]
    """Its power's folder, and the parameter of tests that run over it."""
    url: ClassVar[str]
    """The fixture of a URL whose store is empty."""
    apart: ClassVar[str]
    """The fixture of a function of a small number, for the time of all tests: the URL of a store
    that other numbers, and :attr:`url`, have nothing to do with."""
    contract: ClassVar[Mapping[str, Sequence[str]]]
    """Each way in which it is held to the contract → fixtures, the last of them a URL."""
    damages: ClassVar[Mapping[str, Callable[[Scene], object]]]
    """What may happen to what is online of ``numbers``, which is live as two segments, 1 and 2,
    and is healed from the root; one is called ``rows``."""
    removal: ClassVar[tuple[Any, str]]
    """The function by which it removes rows: its module, and its name."""
    known_s: ClassVar[float] = 0.0
    """How long a reader may answer what was live before."""

    @abstractmethod
    def oldest(self) -> AbstractContextManager[str]:
        """The URL of an empty store of the oldest version that is promised, while it is open."""

    @abstractmethod
    def contents(self, url: str) -> Any:
        """All that the store holds."""

    @abstractmethod
    def restore(self, url: str, contents: Any) -> None:
        """Make it hold what :meth:`contents` found, and nothing else; nothing at all of None."""

    @abstractmethod
    def lose(self, url: str, view: str, number: int) -> None:
        """The rows of a segment are gone, by its number, and what says that they are there is
        not."""

    @abstractmethod
    def put(self, url: str, view: str, number: int, key: bytes, row: bytes | None) -> None:
        """Write a row of a segment behind the store's back; None removes it."""

    @abstractmethod
    def check_tidy(self, url: str, view: str, numbers: Collection[int]) -> None:
        """Assert that nothing is left there of segments of other numbers, nor of what was under
        way."""


@cache
def rigs() -> Mapping[str, OnlineRig]:
    """Name → rig, of each power that is here."""
    powers = dict.fromkeys(way.power for way in KNOWN["online"].values())
    found: list[OnlineRig] = [
        import_module(f"{GROUP}.{power}.tests.rig").RIG
        for power in powers
        if (FOLDER / power / "tests" / "rig.py").is_file()
    ]
    return {rig.name: rig for rig in found}


KINDS = ["table", *rigs()]
"""Parameters of tests that run over every online store that is here."""


def rig_of(url: str) -> OnlineRig | None:
    """The rig for what a URL names; None of table files, and of a power that is not here."""
    way = KNOWN["online"].get(url.partition(":")[0])
    return None if way is None else rigs().get(way.power)


def rigged(url: str) -> OnlineRig:
    """As :func:`rig_of`, of what is no table files."""
    rig = rig_of(url)
    assert rig is not None, url
    return rig


def url_of(request: pytest.FixtureRequest, kind: str, table: str) -> str:
    """The URL of an empty store of one of :data:`KINDS`; ``table``, of table files."""
    return table if kind == "table" else str(request.getfixturevalue(rigs()[kind].url))
