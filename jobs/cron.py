"""Cron lines, with cron's meaning: which moments a line names. The seam to APScheduler's triggers, which read two things in another way:

- a day of the week by number: cron counts from Sunday = 0, APScheduler from Monday = 0. Numbers become names here.
- both a day of the month and a day of the week: cron fires when either matches, APScheduler when both do.

A trigger is only asked about wall clock times; which moments these are is worked out here. Where the clocks change, as in Debian's cron:

- a line with fixed hours (``30 2 * * *``) fires once for each of its wall clock times: at the first of two moments that have it, and, when
  no moment has it since the clocks jumped over it, right after the jump. A daily line so fires exactly once on every day.
- a line with a star for the hour (``*/15 * * * *``) fires whenever a clock on the wall shows one of its times.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")
_ORDER = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TICK = timedelta(microseconds=1)
_DAY = timedelta(days=1)


def fire_times(line: str, timezone: str, after: datetime, until: datetime | None = None) -> Iterator[datetime]:
    """When a line fires, in order.

    Args:
        line: five cron fields: minute, hour, day of month, month, day of week.
        timezone: whose wall clock counts.
        after: aware; not included.
        until: aware; included. Without it there is no end.

    Yields:
        aware datetimes in UTC.

    Raises:
        ValueError: not a cron line, or no such time zone.
    """
    zone, trigger, fixed = check_timezone(timezone), _trigger(line), not line.split()[1].startswith("*")
    after, last = after.astimezone(UTC), None if until is None else until.astimezone(UTC)
    start, end, offset = _stretch(zone, after)
    before = _offset(zone, start - _TICK)
    asked, at = None, None
    while last is None or start <= last:
        wall = max(start, after + _TICK) + offset
        if fixed and offset < before:
            wall = max(wall, start + before)  # the times shown twice fired when they were shown first
        if asked is None or at is None or not asked <= wall <= at:  # else it is known from the stretch before
            asked, at = wall, _next(trigger, wall)
        if fixed and offset > before and start > after and (last is None or start <= last):
            skipped = _next(trigger, start + before)
            if skipped is not None and skipped < start + offset and at != start + offset:
                yield start
        while at is not None and at - offset < end and (last is None or at - offset <= last):
            yield at - offset
            asked, at = at + _TICK, _next(trigger, at + _TICK)
        if at is None:
            return
        start, end, before, offset = end, _next_change(zone, end), offset, _offset(zone, end)


def last_fire(line: str, timezone: str, after: datetime, until: datetime) -> datetime | None:
    """The last moment a line fires, ``after`` excluded and ``until`` included (both aware); None when there is none. In UTC.

    Raises:
        ValueError: not a cron line, or no such time zone.
    """
    end, length = until, timedelta(hours=1)
    while end > after:  # backwards in ever longer steps: a month has 43,200 minutes, and the last one is wanted
        start = max(after, end - length)
        found = deque(fire_times(line, timezone, start, end), maxlen=1)
        if found:
            return found[0]
        end, length = start, 2 * length
    return None


def _stretch(zone: ZoneInfo, at: datetime) -> tuple[datetime, datetime, timedelta]:
    """The time around ``at`` in which the zone's clocks were not changed: start (included; two days before at most), end, UTC offset."""
    start = end = at - 2 * _DAY
    while end <= at:
        start, end = end, _next_change(zone, end)
    return start, end, _offset(zone, start)


def _next_change(zone: ZoneInfo, at: datetime) -> datetime:
    """When the clocks change next after ``at``, or a day on when they do not until then."""
    offset, end = _offset(zone, at), at + _DAY
    if _offset(zone, end) == offset:
        return end
    while end - at > _TICK:
        middle = at + (end - at) / 2
        at, end = (middle, end) if _offset(zone, middle) == offset else (at, middle)
    return end


def _offset(zone: ZoneInfo, at: datetime) -> timedelta:
    offset = at.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def _next(trigger: BaseTrigger, wall: datetime) -> datetime | None:
    """The first wall clock time from ``wall`` on that a trigger names; both are written as if they were UTC."""
    found: datetime | None = trigger.get_next_fire_time(None, wall)
    return found


@lru_cache(256)
def _trigger(line: str) -> BaseTrigger:
    """A line's trigger over wall clock times.

    Raises:
        ValueError: not a cron line.
    """
    fields = line.split()
    if len(fields) != 5:
        raise ValueError("write five cron fields (minute hour day month weekday), such as '0 2 * * *', or 'after <view>'")
    minute, hour, day, month, weekday = fields
    for field in (minute, hour, day):
        if not re.fullmatch(r"[\d*/,-]+", field):
            raise ValueError(f"not a cron line: {field!r} is no number, range, list or step")
    weekday_starred = weekday.startswith("*")
    weekday = _named_days(weekday)

    def trigger(day: str, weekday: str) -> BaseTrigger:
        try:
            return CronTrigger(minute=minute, hour=hour, day=day, month=month.lower(), day_of_week=weekday, timezone=UTC)
        except ValueError as exc:
            raise ValueError(f"not a cron line: {exc}") from exc

    # crontab(5): the two day fields are alternatives unless one of them starts with a star
    both = not day.startswith("*") and not weekday_starred
    return OrTrigger([trigger(day, "*"), trigger("*", weekday)]) if both else trigger(day, weekday)


def check_timezone(name: str) -> ZoneInfo:
    """The time zone of that name.

    Raises:
        ValueError: there is none.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise ValueError(f"no time zone {name!r}; write one such as Europe/Berlin") from exc


def check_cron(line: str, timezone: str) -> None:
    """Raises:
    ValueError: not a cron line, or one that never fires.
    """
    check_timezone(timezone)
    if _next(_trigger(line), datetime.now(UTC)) is None:
        raise ValueError("this cron line never fires")


def _named_days(field: str) -> str:
    """``0-2,5`` (cron: Sunday to Tuesday, and Friday) → ``sun,mon,tue,fri``; names and ``*`` stay."""
    if field == "*":
        return field
    days: list[str] = []
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, dash, last = span.partition("-")
        if dash and not last:
            raise ValueError(f"not a cron line: {field!r} has a range without an end")
        if span == "*":
            first, last = "0", "6"
        elif not last:
            last = "6" if step else first
        try:
            start, end = _day_number(first), _day_number(last)
            if end < start:
                end += 7 if end == 0 else 0
            if end < start:
                raise ValueError
            days += [_DAYS[n % 7] for n in range(start, end + 1, int(step) if step else 1)]
        except (ValueError, IndexError) as exc:
            raise ValueError(f"not a cron line: {field!r} is no day of the week; 0 and 7 are Sunday, or write mon-fri") from exc
    return ",".join(sorted(set(days), key=_ORDER.index))


def _day_number(text: str) -> int:
    if text.isdigit() and int(text) <= 7:
        return int(text)
    if text.lower() in _DAYS:
        return _DAYS.index(text.lower())
    raise ValueError(text)
