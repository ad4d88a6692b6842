"""Answer size: an estimate of an answer's bytes, made before a value is read or computed; and the
memory that all answers of a worker share."""

from __future__ import annotations

from functools import lru_cache

from precompute.store.answers.plan import AnswerPlan
from precompute.store.errors import RequestError
from precompute.store.feature_view import SCALAR_TYPES
from precompute.store.online.found_rows import FoundRows, PackedKeys

MAX_ANSWER_BYTES = 64 * 2**20
"""Of one answer, unless configured."""
LARGE_BYTES, LARGE_ARROW_BYTES = 256 * 1024, 2 * 2**20
"""An answer of more is made and sent piece by piece: what takes longer than a millisecond or two to
make."""
_IN_HAND = 4
"""Largest answers that are being sent at a time."""

_JSON_FRAME_BYTES, _ARROW_FRAME_BYTES = 330, 160
"""Of a row beside key and features: status, times, the model's fingerprint; and their names in
JSON."""
_DIGITS = {
    "float16": 9,
    "float32": 13,
    "float64": 22,
    "int8": 5,
    "int16": 7,
    "int32": 12,
    "int64": 21,
    "bool": 6,
}
"""Characters of a number in JSON with its comma, about; of floats: most have no exponent."""


@lru_cache(256)
def _row_bytes(plan: AnswerPlan, as_arrow: bool) -> int:
    """Bytes of a row's fixed part and its frame."""
    total = _ARROW_FRAME_BYTES if as_arrow else _JSON_FRAME_BYTES
    for feature in plan.wanted:
        count = 1 if feature.dim is None else feature.dim
        if feature.dtype == "string" or feature.max_items is not None:
            total += len(feature.name) + 8
        elif as_arrow:
            total += count * ((SCALAR_TYPES[feature.dtype].bit_width + 7) // 8)
        elif feature.name in plan.base64:
            total += (
                len(feature.name)
                + 5
                + (count * SCALAR_TYPES[feature.dtype].bit_width // 8 + 2) // 3 * 4
            )
        else:
            total += len(feature.name) + 5 + count * _DIGITS[feature.dtype]
    return total


def answer_bytes(plan: AnswerPlan, found: FoundRows, as_arrow: bool) -> int:
    """The size of an answer with the rows that were found, about."""
    rows = len(found)
    variable = (
        0 if plan.codec.exact else max(0, found.packed.size_bytes - rows * plan.codec.fixed_bytes)
    )
    keys = (
        found.keys.packed.size_bytes
        if isinstance(found.keys, PackedKeys)
        else sum(map(len, found.keys))
    )
    # text takes its bytes, numbers of a list two to three times theirs as digits
    return rows * _row_bytes(plan, as_arrow) + keys + variable * (1 if as_arrow else 2)


class Measure:
    """What one request will be answered with, added up over its views.

    Args:
        limit: bytes of the whole answer.
        as_arrow: its form.
    """

    def __init__(self, limit: int, as_arrow: bool = False) -> None:
        self.total = 0
        self._limit, self.as_arrow = limit, as_arrow

    @property
    def is_large(self) -> bool:
        """Whether the answer is to be made and sent piece by piece."""
        return self.total > (LARGE_ARROW_BYTES if self.as_arrow else LARGE_BYTES)

    def add(self, plan: AnswerPlan, found: FoundRows) -> None:
        """Take what is about to be answered into account.

        Raises:
            RequestError: 413, with the figure.
        """
        total = self.total + answer_bytes(plan, found, self.as_arrow)
        if total > self._limit:
            raise RequestError(
                f"the answer would have about {total:,} bytes, at most {self._limit:,} are sent:"
                " ask for fewer keys or features, or for Arrow",
                status=413,
                code="answer_too_large",
            )
        self.total = total


class Room:
    """What the large answers that are being sent may take together.

    Args:
        answer_bytes: of one answer at most.
    """

    def __init__(self, answer_bytes: int) -> None:
        self._left = _IN_HAND * answer_bytes

    def take(self, size_bytes: int) -> None:
        """Take memory before an answer is sent; :meth:`give` it back after.

        Raises:
            RequestError: 503, others take it all.
        """
        if size_bytes > self._left:
            raise RequestError(
                "answers of many bytes are being sent to others; try again", status=503, code="busy"
            )
        self._left -= size_bytes

    def give(self, size_bytes: int) -> None:
        """Give memory back after an answer was sent, or could not be."""
        self._left += size_bytes
