"""Gates: the sections ``accuracy`` and ``gates`` of a view: what a new snapshot must look like to
be published."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from precompute.jobs.config.section import Name, Section
from precompute.store.errors import ConfigError, did_you_mean


class RowErrorConfig(Section):
    """How far rows may be from float32, each relative to its size (vectors, lists of floats) or to
    the feature's spread (scores); null is the default of its type."""

    median: float | None = Field(default=None, ge=0)
    """most error of half the rows; by default √(2 − 2 cosine)"""
    bound: float | None = Field(default=None, ge=0)
    """a row off by more is one of the `share`; by default twice that"""
    share: float | None = Field(default=None, ge=0, le=1)
    """largest share of rows beyond `bound`; by default 0.001"""
    worst: float | None = Field(default=None, ge=0)
    """most error of any row seen; by default five times the median's"""


class AccuracyConfig(Section):
    """How near to float32 another precision or back end must come: on a sample of the view's own
    rows before a run, and on rows drawn during it."""

    cosine: float = Field(default=0.999, gt=0, le=1)
    """least mean cosine of vectors; for scores, least Spearman rank correlation"""
    recall_at_10: float = Field(default=0.985, ge=0, le=1)
    """least share of each row's 10 nearest that stay the same; of lists, least overlap"""
    rows: RowErrorConfig = RowErrorConfig()
    """each row's own error, of vectors, scores and lists of them"""
    features: dict[Name, RowErrorConfig] = Field(default={})
    """the same of one feature, of whatever type"""


Share = Annotated[float, Field(ge=0, le=1)]


Factor = Annotated[float, Field(gt=0)]


class TableGates(Section):
    """Gates that know the view: each is a factor of its limits (2: twice as far); null switches it
    off."""

    first: Factor | None = 1.0
    """bounds of first rows: one vector for a fifth of them, dead dimensions, one list for most"""
    null: Factor | None = 1.0
    """nulls, empty values, zero vectors, beside the view's own nights"""
    constant: Factor | None = 1.0
    """one value, list or vector for more rows than ever, beside the view's own nights"""
    shape: Factor | None = 1.0
    """what values are like (quantiles, lengths, shares), beside the view's own nights"""
    computed: Factor | None = 1.0
    """the rows that a run computed, beside those that are live"""
    moved: Factor | None = 1.0
    """how far rows are from the live ones of the same keys, beside the view's own nights"""
    anchor: Factor | None = 1.0
    """how far rows are from those of some nights ago: a little each night is much"""
    never: Factor | None = 1.0
    """a share that was neither 0 nor 1 for a week, and is"""


class FeatureGates(TableGates):
    """The gates of one feature, in place of the view's; and its own bounds, on the rows that are
    looked at."""

    range: tuple[float, float] | None = None
    """least and largest number"""
    values: list[str | int | bool] | None = None
    """all values there may be"""
    distinct: tuple[float, float] | None = None
    """least and largest number of different values"""
    unique: bool = False
    """no value is there twice"""
    null_share: Share | None = None
    """largest share of nulls"""


class GatesConfig(TableGates):
    """What a new snapshot must look like to be published; null switches one off."""

    rows: Factor | None = 1.0
    """how many rows there are beside what is live: 0.65 to 1.6 times as many, of fewer than 500 0.4
    to 2.5; a factor of these limits. Of the live keys half may be gone"""
    coverage: Share | Literal["auto"] | None = "auto"
    """least share of source rows with a value; auto is 1 - max_rejected"""
    rejected: Share | Literal["auto"] | None = "auto"
    """largest share of rejected rows; auto is max_rejected"""
    contract: bool | None = True
    """refuses a feature that is gone or has another type or dimension, another entity column or
    index metric; added features pass"""
    finite: Share | None = 0.0
    """largest share of rows with a NaN or infinity"""
    packed: Share | None = 0.95
    """of a vector with `packed`: least share of each sampled row's 10 nearest that stay the same as
    the online store keeps them"""
    parity: Share | None = 0.05
    """largest share of sampled rows that the fallback, or a batch of other rows, computes
    differently"""
    features: dict[Name, FeatureGates] = Field(default={})
    """gates and bounds of one feature"""


COMPUTING_GATES = ("accuracy", "batch")
"""The gates that judge while rows are computed: by the view's ``accuracy``; and whether a row is
the same among other rows, by ``gates.parity``."""
GATES = (
    "library",
    *COMPUTING_GATES,
    *(name for name in GatesConfig.model_fields if name != "features"),
    "bounds",
)
"""Every gate's name."""


def check_gates(names: Collection[str], option: str) -> Collection[str]:
    """``names`` themselves, as ``option`` has them.

    Raises:
        ConfigError: there is no gate of such a name.
    """
    for name in names:
        if name not in GATES:
            known = f"{', '.join(GATES)}{did_you_mean(name, GATES)}"
            raise ConfigError(f"{option} {name}: there is no such gate; it is one of {known}")
    return names
