"""Keys: by which view a view's misses are looked into, and how near is near: ``semantic_cache`` of
a view's file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import Field

from precompute.jobs.config.open_section import Keys, Mistake
from precompute.jobs.config.section import Name, Section
from precompute.plugins.semantic.cache import KEY, SemanticCache, spec_of, why_no_semantic_cache
from precompute.store.errors import nearest_or_all
from precompute.store.feature_view import FeatureView


class SemanticCacheConfig(Section):
    """Answers a miss by the row of the entity whose input is nearest, if that is near enough; no
    model of this view is called then."""

    view: Name
    """of the same entity: embeds the same text cheaply, and has an index by cosine and a
    fallback"""
    threshold: float = Field(gt=0, le=1)
    """least cosine of the two inputs; `precompute thresholds` suggests one"""


class SemanticKeys(Keys):
    """A view's semantic cache."""

    semantic_cache: SemanticCacheConfig | None = None

    def mistake(
        self, view: FeatureView, names: Collection[str], views: Mapping[str, FeatureView]
    ) -> Mistake | None:
        if self.semantic_cache is None:
            return None
        by = self.semantic_cache.view
        why = _why_not(view, by, names, views)
        return None if why is None else Mistake((KEY, "view"), f"{by!r}: {why}")

    def spec(self) -> Mapping[str, Any]:
        return {} if self.semantic_cache is None else {KEY: self.semantic_cache.model_dump()}

    def columns(self) -> Collection[str]:
        return [column.name for column in SemanticCache.columns if self.semantic_cache is not None]


def _why_not(
    view: FeatureView, by: str, names: Collection[str], views: Mapping[str, FeatureView]
) -> str | None:
    """What is wrong with the view that a view's semantic cache names; None when nothing is, or that
    one's own file is wrong."""
    if by not in names:
        return f"no such view{nearest_or_all(by, names)}"
    if by not in views:
        return None
    seen, named = {by}, spec_of(views[by])
    while named is not None and named.view in views and named.view not in seen:
        if named.view == view.name:
            return "a circle: its own semantic cache leads back here"
        seen.add(named.view)
        named = spec_of(views[named.view])
    return why_no_semantic_cache(view, views[by])
