"""Keys: which student computes a view's misses: ``fallback.model`` of a view's file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from precompute.jobs.config.open_section import Keys
from precompute.plugins.students.misses import KEY, StudentMisses
from precompute.store.feature_view import FeatureView


class StudentKeys(Keys):
    """A student behind a view's misses."""

    model: str | None = None
    """in the model's stead for misses: the folder of a student that `precompute optimize` made,
    from the project's folder; answers say so"""

    def spec(self) -> Mapping[str, Any]:
        return {} if self.model is None else {KEY: self.model}

    def columns(self) -> Collection[str]:
        return [column.name for column in StudentMisses.columns if self.model is not None]

    def misses_by(self) -> str | None:
        return None if self.model is None else KEY

    @classmethod
    def substitute(cls, view: FeatureView, folder: Path) -> Any:
        from precompute.plugins.students.open_student import OpenStudent

        return OpenStudent.of(view, folder)
