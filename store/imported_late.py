"""Imported late: a library that is loaded with the first thing that is taken from it, since most commands take nothing."""

from __future__ import annotations

import importlib
from typing import Any


class ImportedLate:
    """Stands for a module until somebody needs it.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        # found without this method from now on
        setattr(self, attribute, value)
        return value
