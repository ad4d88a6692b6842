"""Contract: what readers of the live rows rely on is still there."""

from __future__ import annotations

from collections.abc import Sequence

from precompute.jobs.run.judge.verdicts import Verdicts
from precompute.store.feature_view import Feature, FeatureView


def judge_contract(view: FeatureView, live: FeatureView, verdicts: Verdicts) -> None:
    """The gate ``contract``: what readers of the live rows rely on is still there; a feature more
    does not matter to them."""
    broken = (
        []
        if view.entity == live.entity
        else [f"the key is {_names(view.entity)}, and was {_names(live.entity)}"]
    )
    for feature in live.features:
        if feature.name not in view.feature_names:
            broken.append(
                f"feature {feature.name!r} is gone (there are: {', '.join(view.feature_names)})"
            )
        elif _shape(view.feature(feature.name)) != _shape(feature):
            broken.append(
                f"feature {feature.name!r} is {_shape(view.feature(feature.name))}, and was"
                f" {_shape(feature)}"
            )
    if live.index is not None:
        now = None if view.index is None else (view.index.on, view.index.metric)
        if now != (live.index.on, live.index.metric):
            by = "was removed" if now is None else f"is of {now[0]} by {now[1]}"
            broken.append(f"the search {by}, and was of {live.index.on} by {live.index.metric}")
    message = (
        f"readers of {view.name} would break: {'; '.join(broken)}"
        if broken
        else "what readers rely on is there"
    )
    limit = 0.0 if verdicts.gates.contract else None
    verdicts.add("contract", float(len(broken)), limit, not broken, message)


def _names(entity: Sequence[str]) -> str:
    return f"[{', '.join(entity)}]"


def _shape(feature: Feature) -> str:
    if feature.dim is not None:
        return f"a vector of {feature.dim} {feature.dtype}"
    return feature.dtype if feature.max_items is None else f"a list of {feature.dtype}"
