"""Clock: times as they are written and read, ISO 8601 in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache


def utc_now() -> str:
    """Now, ISO 8601 in UTC with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@lru_cache(4096)
def parsed_time(text: str | None) -> datetime | None:
    """A time that was written, in UTC; None where there is none, or none that can be read."""
    try:
        at = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def doubled_s(first_s: float, doublings: int, longest_s: float) -> float:
    """What is waited before something is tried again: ``first_s``, twice as long each time, at most ``longest_s``, however often that was."""
    # 2 ** 1024 is no float any more: what fails every half minute comes there in nine hours
    return min(longest_s, first_s * 2.0 ** min(doublings, 64))


def duration(seconds: float | None) -> str:
    """``42 s``, ``7 min``, ``26 h``, ``7.5 d``; a dash for None."""
    if seconds is None:
        return "–"
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"
