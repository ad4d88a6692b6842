"""Keys: which views have an Iceberg table: ``iceberg`` of ``project.yaml``."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping

from pydantic import Field

from precompute.jobs.config.open_section import Keys, Mistake
from precompute.jobs.config.section import Name
from precompute.store.errors import ConfigError, nearest_or_all
from precompute.store.feature_view import FeatureView


class IcebergKeys(Keys):
    """Views with a table."""

    iceberg: list[Name] = Field(default_factory=list)
    """views whose snapshots are the versions of an Iceberg table, too, in <root>/<view>/iceberg"""

    def check(self, names: Collection[str]) -> Mistake | None:
        for name in self.iceberg:
            if name not in names:
                what = f"no such view {name!r}{nearest_or_all(name, names)}"
                return Mistake(("iceberg",), what)
        return None

    def mistake(
        self, view: FeatureView, names: Collection[str], views: Mapping[str, FeatureView]
    ) -> Mistake | None:
        if not self.wants(view.name):
            return None
        for feature in view.features:
            if feature.dtype == "float16":
                return Mistake(
                    ("features", feature.name),
                    "Iceberg has no float16: give it the dtype float32, or take the view out of"
                    " `iceberg` in project.yaml",
                )
        return None

    def preflight(self, view: FeatureView | None) -> None:
        if view is None or not self.wants(view.name):
            return
        if importlib.util.find_spec("pyiceberg") is None:
            raise ConfigError(
                f"view {view.name!r}: iceberg: pyiceberg, which writes the table, is not installed:"
                " pip install 'precompute-store[iceberg]', or take the view out of `iceberg` in"
                " project.yaml"
            )

    def wants(self, view: str) -> bool:
        return view in self.iceberg
