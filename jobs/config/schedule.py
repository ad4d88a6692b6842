"""Schedule: the ``schedule`` and ``runs`` sections of ``project.yaml``: when each view runs, and
what happens with a run that was missed or failed. A cron line is read with cron's meaning."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from cronsim import CronSim, CronSimError
from pydantic import BeforeValidator, Field, model_validator

from precompute.jobs.config.section import Duration, Name, Section, origin, place
from precompute.store.errors import ConfigError, did_you_mean, nearest_or_all

_FIELDS = (
    "minute",
    "hour",
    "day of the month",
    "month",
    "day of the week; 0 and 7 are Sunday, or write mon-fri",
)


def fire_times(
    line: str, timezone: str, after: datetime, until: datetime | None = None
) -> Iterator[datetime]:
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
    zone, line = check_timezone(timezone), _checked(line)
    last = None if until is None else until.astimezone(UTC)
    for wall in _wall_times(line, after.astimezone(zone)):
        at = wall.astimezone(UTC)
        if last is not None and at > last:
            return
        yield at


def last_fire(line: str, timezone: str, after: datetime, until: datetime) -> datetime | None:
    """The last moment a line fires, ``after`` excluded and ``until`` included (both aware); None
    when there is none. In UTC.

    Raises:
        ValueError: not a cron line, or no such time zone.
    """
    end, length = until, timedelta(hours=1)
    # backwards in ever longer steps: a month has 43,200 minutes, and the last one is wanted
    while end > after:
        start = max(after, end - length)
        latest = deque(fire_times(line, timezone, start, end), maxlen=1)
        if latest:
            return latest[0]
        end, length = start, 2 * length
    return None


def _wall_times(line: str, after: datetime) -> Iterator[datetime]:
    """When a checked line fires after a time, in the time's own zone."""
    try:
        return CronSim(line, after)
    except CronSimError:
        # every field is one, but no month of the line has such a day
        return iter(())


@lru_cache(256)
def _checked(line: str) -> str:
    """The line, written so that cronsim reads it as cron does.

    Raises:
        ValueError: not a cron line.
    """
    fields = line.lower().split()
    if len(fields) != 5:
        raise ValueError(
            "write five cron fields (minute hour day month weekday), such as '0 2 * * *', or 'after"
            " <view>'"
        )
    for field in fields[:3]:
        if not re.fullmatch(r"[0-9*/,-]+", field):
            raise ValueError(f"not a cron line: {field!r} is no number, range, list or step")
    # a day with a step and no end: to Saturday, not to the second Sunday; from a day to Sunday: to
    # the second one
    fields[4] = re.sub(r"(?<![-*\w])(\w+)/", r"\1-6/", fields[4])
    fields[4] = re.sub(r"([1-7]|mon|tue|wed|thu|fri|sat)-(0|sun)\b", r"\1-7", fields[4])
    # a step over one value is that value, not all that follow
    fields = [re.sub(r"\b(\w+)-\1/0*[1-9][0-9]*", r"\1", field) for field in fields]
    for number, (field, name) in enumerate(zip(fields, _FIELDS, strict=True)):
        alone = " ".join(field if number == other else "*" for other in range(5))
        try:
            # the last Friday (5L) and the second (5#2) are cronsim's, not cron's
            if number == 4 and re.search("[l#]", field):
                raise CronSimError
            CronSim(alone, datetime.now(UTC))
        except CronSimError as exc:
            raise ValueError(f"not a cron line: {line.split()[number]!r} is no {name}") from exc
    return " ".join(fields)


def check_timezone(name: str) -> ZoneInfo:
    """The time zone of that name.

    Raises:
        ValueError: there is none.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        near = did_you_mean(name, available_timezones())
        raise ValueError(f"no time zone {name!r}: write one such as Europe/Berlin{near}") from exc


def check_cron(line: str, timezone: str) -> None:
    """Raises:
    ValueError: not a cron line, or one that never fires.
    """
    check_timezone(timezone)
    if next(_wall_times(_checked(line), datetime.now(UTC)), None) is None:
        raise ValueError("this cron line never fires")


CatchUp = Literal["latest", "all", "none"]


class RunsConfig(Section):
    """How scheduled runs are caught up on, retried and ended; a view's schedule may say
    otherwise."""

    catch_up: CatchUp = "latest"
    """which of the times that were missed are run for"""
    retries: int = Field(default=3, ge=0, le=20)
    """how often a run that failed or was killed is tried again"""
    retry_after: Duration = 60.0
    """wait before the first retry; twice as long before each further one"""
    deadline: Duration = Field(default=6 * 3600.0, gt=0)
    """a run that takes longer is killed"""


def _names(value: Any) -> Any:
    return (
        [name.strip() for name in value.split(",") if name.strip()]
        if isinstance(value, str)
        else value
    )


class ScheduleConfig(Section):
    """When a view runs; what is left out is as in ``runs``."""

    at: str | None = None
    """five cron fields"""
    after: Annotated[
        list[Name] | None, BeforeValidator(_names, json_schema_input_type=str | list[str] | None)
    ] = None
    """views; runs when a new snapshot of one of them is live"""
    catch_up: CatchUp | None = None
    """as `runs.catch_up`, of this view"""
    retries: int | None = Field(default=None, ge=0, le=20)
    """as `runs.retries`"""
    retry_after: Duration | None = None
    """as `runs.retry_after`"""
    deadline: Duration | None = Field(default=None, gt=0)
    """as `runs.deadline`"""

    @model_validator(mode="after")
    def _one_of_both(self) -> ScheduleConfig:
        if (self.at is None) == (self.after is None):
            raise ValueError(
                "write one of both: at, five cron fields, or after, the views it runs after"
            )
        if self.after == []:
            raise ValueError("after: names no view; write after: [view]")
        return self


def _schedule(value: Any) -> Any:
    """The short forms, spelled out."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise ValueError(
            "write a string, five cron fields or 'after <view>', or the keys at or after"
        )
    parents = after(value)
    if parents == []:
        raise ValueError("names no view; write 'after <view>'")
    return {"at": value} if parents is None else {"after": parents}


When = Annotated[
    ScheduleConfig, BeforeValidator(_schedule, json_schema_input_type=str | ScheduleConfig)
]


def after(when: str) -> list[str] | None:
    """The views of an ``after a, b`` schedule; None for a cron line."""
    if not when.startswith("after "):
        return None
    return [name.strip() for name in when.removeprefix("after ").split(",") if name.strip()]


@dataclass(frozen=True, slots=True)
class Schedule:
    """When one view runs, spelled out. Either ``cron`` is set or ``parents``; durations in
    seconds."""

    when: str
    """When it runs, for people: the cron line, or ``after a, b``."""
    cron: str | None
    timezone: str
    parents: tuple[str, ...]
    catch_up: CatchUp
    retries: int
    retry_after_s: float
    deadline_s: float


def spelled_out(
    schedule: Mapping[str, ScheduleConfig], runs: RunsConfig, timezone: str
) -> dict[str, Schedule]:
    """The schedule section, with what a view leaves out as ``runs`` has it."""
    return {
        name: Schedule(
            when=f"after {', '.join(own.after or ())}" if own.at is None else own.at,
            cron=own.at,
            timezone=timezone,
            parents=tuple(own.after or ()),
            catch_up=runs.catch_up if own.catch_up is None else own.catch_up,
            retries=runs.retries if own.retries is None else own.retries,
            retry_after_s=runs.retry_after if own.retry_after is None else own.retry_after,
            deadline_s=runs.deadline if own.deadline is None else own.deadline,
        )
        for name, own in schedule.items()
    }


def check_schedules(
    schedules: Mapping[str, Schedule],
    views: Collection[str],
    project_file: Path,
    over: Mapping[str, Any],
) -> None:
    """Refuse what only shows when all are seen together; ``over`` are those of the values that came
    from the environment.

    Raises:
        ConfigError: of no view, no cron line, after a view that is not scheduled, or after itself.
    """
    for name, schedule in schedules.items():
        where = (
            f"{origin(project_file, ('schedule', name), over)}: schedule.{name}: {schedule.when!r}"
        )
        if name not in views:
            raise ConfigError(f"{where}: no such view{nearest_or_all(name, views)}")
        if schedule.cron is not None:
            try:
                check_cron(schedule.cron, schedule.timezone)
            except ValueError as exc:
                raise ConfigError(f"{where}: {exc}") from exc
        for parent in schedule.parents:
            if parent not in schedules:
                other = (
                    ": give it a line of its own"
                    if parent in views
                    else nearest_or_all(parent, views)
                )
                raise ConfigError(f"{where}: {parent!r} is not scheduled itself{other}")
    acyclic = set[str]()
    for name in schedules:
        _check_circle(schedules, (name,), acyclic, project_file)


def _check_circle(
    schedules: Mapping[str, Schedule],
    path: tuple[str, ...],
    acyclic: set[str],
    project_file: Path,
) -> None:
    """Follow the views that the last of ``path`` runs after, each but once: ``acyclic`` are those
    that were followed to the end, to which this one is added.

    Raises:
        ConfigError: a view runs after one of ``path``, each of which runs after the next.
    """
    for parent in schedules[path[-1]].parents:
        if parent in path:
            raise ConfigError(
                f"{place(project_file, ('schedule', parent))}: schedule:"
                f" {' after '.join((*path, parent))} goes round in a circle; give one of them a"
                " cron line"
            )
        if parent not in acyclic:
            _check_circle(schedules, (*path, parent), acyclic, project_file)
    acyclic.add(path[-1])
