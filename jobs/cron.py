"""Cron lines, with cron's meaning. The seam to APScheduler's triggers, which read two things in another way:

- a day of the week by number: cron counts from Sunday = 0, APScheduler from Monday = 0. Numbers become names here.
- both a day of the month and a day of the week: cron fires when either matches, APScheduler when both do.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")
_ORDER = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def cron_trigger(line: str, timezone: str) -> BaseTrigger:
    """The trigger of five cron fields: minute, hour, day of month, month, day of week.

    Raises:
        ValueError: not a cron line, or no such time zone.
    """
    fields = line.split()
    if len(fields) != 5:
        raise ValueError("write five cron fields (minute hour day month weekday), such as '0 2 * * *', or 'after <view>'")
    zone = check_timezone(timezone)
    minute, hour, day, month, weekday = fields
    for field in (minute, hour, day):
        if not re.fullmatch(r"[\d*/,-]+", field):
            raise ValueError(f"not a cron line: {field!r} is no number, range, list or step")
    weekday_starred = weekday.startswith("*")
    weekday = _named_days(weekday)

    def trigger(day: str, weekday: str) -> BaseTrigger:
        try:
            return CronTrigger(minute=minute, hour=hour, day=day, month=month.lower(), day_of_week=weekday, timezone=zone)
        except ValueError as exc:
            raise ValueError(f"not a cron line: {exc}") from exc

    # crontab(5): the two day fields are alternatives unless one of them starts with a star
    both = not day.startswith("*") and not weekday_starred
    combined = OrTrigger([trigger(day, "*"), trigger("*", weekday)]) if both else trigger(day, weekday)
    return combined if hour.startswith("*") else _OnceADay(combined)


class _OnceADay(BaseTrigger):  # type: ignore[misc]
    """Where clocks are set back, a fixed hour comes twice; cron runs it once, APScheduler both times."""

    def __init__(self, trigger: BaseTrigger) -> None:
        self._trigger = trigger

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """The next time whose wall clock is another than the last one's."""
        at: datetime | None = self._trigger.get_next_fire_time(previous_fire_time, now)
        while at is not None and at.fold and at.utcoffset() != at.replace(fold=0).utcoffset():
            at = self._trigger.get_next_fire_time(at, (at.astimezone(UTC) + timedelta(seconds=1)).astimezone(at.tzinfo))
        return at


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
    trigger = cron_trigger(line, timezone)
    if trigger.get_next_fire_time(None, datetime.now(ZoneInfo(timezone))) is None:
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
