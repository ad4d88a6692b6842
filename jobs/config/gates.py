"""Gates: the sections ``accuracy`` and ``gates`` of a view: what a new snapshot must look like to
be published."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from precompute.jobs.config.announcement import ExpectConfig
from precompute.jobs.config.section import Name, Section, as_mistake
from precompute.store.errors import ConfigError, did_you_mean, nearest_or_all
from precompute.store.feature_view import Feature
from precompute.store.offline.snapshot import ANNOUNCED


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


def _ends(value: Any) -> Any:
    """Least and largest, as a file has them, in a list."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("write the least and the largest, as in [0, 100]")
    low, high = value
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        raise ValueError(f"{low:g} is more than {high:g}: write the least first")
    return low, high


Range = Annotated[
    tuple[float, float], BeforeValidator(_ends, json_schema_input_type=tuple[float, float])
]
Count = Annotated[int, Field(ge=0)]
Counts = Annotated[
    tuple[Count, Count], BeforeValidator(_ends, json_schema_input_type=tuple[Count, Count])
]


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

    range: Range | None = None
    """least and largest number"""
    values: list[str | int | bool] | None = Field(default=None, min_length=1)
    """all values there may be, of texts, whole numbers or truth values"""
    distinct: Counts | None = None
    """least and largest number of different values"""
    unique: bool = False
    """no value is there twice"""
    null_share: Share | None = None
    """largest share of nulls"""

    def misfits(self, feature: Feature) -> Iterator[tuple[str, str]]:
        """(bound, why a feature of this type cannot have it) of those that it was given."""
        of, is_float = feature.dtype, feature.dtype.startswith("float")
        own = f"{feature.name!r} is {'a float' if is_float else _KINDS.get(of, 'a whole number')}"
        for bound in ("range", "values", "distinct", "unique"):
            if not getattr(self, bound):
                continue
            if feature.dim is not None or feature.max_items is not None:
                kind = "vector" if feature.dim is not None else "list"
                yield bound, f"{feature.name!r} is a {kind}, and {bound} is of single values"
            elif bound == "range" and of in _KINDS:
                yield bound, f"{own}, and range is of numbers"
            elif bound == "values" and is_float:
                yield bound, f"{own}, which has no list of values: write range: [least, largest]"
        if is_float:
            return
        for value in self.values or ():
            if type(value) is not _TYPES.get(of, int):
                yield "values", f"{value!r} cannot be one, since {own}"


_KINDS = {"string": "a text", "bool": "true or false"}
_TYPES: dict[str, type] = {"string": str, "bool": bool}


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
    golden: Share | None = 0.0
    """largest share of up to 64 unchanged rows of the live snapshot that come out otherwise,
    computed again among the rows of the run, by the same model"""
    by: str | None = None
    """a feature of single values, or a column of the entity: a refusal says of which of its values
    the rows are at fault"""
    features: dict[Name, FeatureGates] = Field(default={})
    """gates and bounds of one feature"""
    expect: list[ExpectConfig] = Field(default=[])
    """changes that are expected"""

    def check_fits(self, features: Sequence[Feature], entity: Collection[str]) -> None:
        """Check what names features, or bounds them.

        Args:
            features: of the view.
            entity: its key's columns.

        Raises:
            ValueError: there is no such feature, column or gate, or a bound that the feature's type
                cannot have; it begins with the key.
        """
        known = {feature.name: feature for feature in features}
        for name, own in self.features.items():
            if name not in known:
                near = nearest_or_all(name, known)
                raise ValueError(f"gates.features.{name}: there is no feature {name!r}{near}")
            for bound, why in own.misfits(known[name]):
                raise ValueError(f"gates.features.{name}.{bound}: {why}")
        if self.by is not None:
            single = [f.name for f in features if f.dim is None and f.max_items is None]
            if self.by not in (*single, *entity):
                none = f"there is no feature or column of the entity {self.by!r}"
                kind = "is a list or vector, and rows are told apart by single values"
                words = f"{self.by!r} {kind}" if self.by in known else none
                raise ValueError(f"gates.by: {words}{nearest_or_all(self.by, [*single, *entity])}")
        for number, one in enumerate(self.expect):
            at = f"gates.expect.{number}"
            for name in one.features or ():
                if name not in known:
                    near = nearest_or_all(name, known)
                    raise ValueError(f"{at}.features: there is no feature {name!r}{near}")
            with as_mistake(f"{at}.gates: "):
                check_announced(one.gates or ())
            if one.features is not None and "rows" in (one.gates or ()):
                raise ValueError(
                    f"{at}.gates: rows judges no feature: announce it in an entry without features"
                )


COMPUTING_GATES = ("accuracy", "batch", "golden")
"""The gates that judge while rows are computed: by the view's ``accuracy``; whether a row is the
same among other rows, by ``gates.parity``; and whether unchanged rows come out as they are
stored."""
GATES = (
    "library",
    *COMPUTING_GATES,
    *(
        name
        for name in GatesConfig.model_fields
        if name not in ("by", "features", "expect", *COMPUTING_GATES)
    ),
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


def check_announced(names: Collection[str], option: str = "") -> tuple[str, ...]:
    """Gates that a change is announced for, each once, as ``option`` has them.

    Raises:
        ConfigError: there is no gate of such a name, or it is none that compares.
    """
    for name in names:
        if name in ANNOUNCED:
            continue
        given, known = f"{option} {name}".strip(), ", ".join(ANNOUNCED)
        if name not in GATES:
            near = did_you_mean(name, ANNOUNCED)
            raise ConfigError(f"{given}: there is no such gate; it is one of {known}{near}")
        raise ConfigError(
            f"{given}: {_STAYS.get(name, 'it judges rows by themselves')}, which no announcement"
            f" makes right, so it stays on any day; what can be announced is {known}. What it"
            f" refuses is published by --accept {name}"
        )
    return tuple(dict.fromkeys(names))


_STAYS = {
    "null": "a value that is lacking is of no use to readers",
    "constant": "one value for all is of no use to readers",
    "first": "it refuses what no model that works answers",
    "golden": "it computes rows again whose input is the same",
    "bounds": "it judges by the view's own bounds",
    "contract": "readers rely on names and types",
}
"""Why some gates stay on, whatever is announced."""
