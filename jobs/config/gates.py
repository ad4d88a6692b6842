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


class GatesConfig(Section):
    """What a new snapshot must look like to be published; null switches one off."""

    rows: float | None = Field(default=0.2, ge=0)
    """largest share by which the row count may differ from the live one's; of the live keys half
    may be gone, or as many where it is more; of a new partition, by which rows may be lost"""
    coverage: Share | Literal["auto"] | None = "auto"
    """least share of source rows with a value; auto is 1 - max_rejected"""
    rejected: Share | Literal["auto"] | None = "auto"
    """largest share of rejected rows; auto is max_rejected"""
    contract: bool | None = True
    """refuses a feature that is gone or has another type or dimension, another entity column or
    index metric; added features pass"""
    empty: Share | None = 0.5
    """largest share of a feature's values that are null, an empty text or an empty list"""
    constant: Share | None = 0.999
    """largest share of a feature's values, or of its lists, that are the same"""
    shift: Share | None = 0.15
    """largest shift of a feature's values since the live snapshot, by the same model: of the share
    below any number or length, or, of labels and items, of the shares of the commonest"""
    mass: Share | None = 0.05
    """largest change of the share of nulls, empty values or zeros since the live snapshot, by the
    same model"""
    agreement: float | None = Field(default=0.5, ge=-1, le=1)
    """least agreement with the live rows of the same keys, by the same model, beyond chance: rank
    correlation of scores, Cohen's kappa of labels, overlap and order of lists by rank"""
    finite: float | None = Field(default=0.0, ge=0, le=1)
    """largest share of rows with a NaN or infinity"""
    zero: float | None = Field(default=0.01, ge=0, le=1)
    """largest share of vectors that are all zeros"""
    norm: float | None = Field(default=0.5, ge=0)
    """largest relative change of the mean norm since the live snapshot"""
    duplicates: float | None = Field(default=0.5, ge=0, le=1)
    """largest share of sampled vectors equal to another one"""
    drift: float | None = Field(default=0.8, ge=-1, le=1)
    """least mean cosine to the live snapshot's vectors of the same keys, by the same model"""
    moved: float | None = Field(default=0.2, ge=0, le=1)
    """largest share of vectors and scores that lie further than moved_by from the live ones, of
    labels and texts that are others, by the same model"""
    moved_by: float = Field(default=0.45, gt=0, le=2)
    """a distance, as a share of the longer vector's length (0.45 is a cosine of 0.9 between vectors
    of one length), of scores of their spread"""
    packed: float | None = Field(default=0.95, ge=0, le=1)
    """of a vector with `packed`: least share of each sampled row's 10 nearest that stay the same as
    the online store keeps them"""
    parity: float | None = Field(default=0.05, ge=0, le=1)
    """largest share of sampled rows that the fallback, or a batch of other rows, computes
    differently"""
    golden: Share | None = 0.0
    """largest share of up to 64 unchanged rows of the live snapshot that come out otherwise,
    computed again among the rows of the run, by the same model"""


COMPUTING_GATES = ("accuracy", "batch", "golden")
"""The gates that judge while rows are computed: by the view's ``accuracy``; whether a row is the
same among other rows, by ``gates.parity``; and whether unchanged rows come out as they are
stored."""
GATES = (
    "library",
    *COMPUTING_GATES,
    *(name for name in GatesConfig.model_fields if name not in ("moved_by", *COMPUTING_GATES)),
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
