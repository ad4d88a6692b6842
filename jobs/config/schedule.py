"""Schedule: the ``schedule`` and ``runs`` sections of ``project.yaml``. When each view runs, and what becomes of a run that was missed or failed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from precompute.jobs.config.cron import check_cron
from precompute.jobs.config.section import Duration, Name, Section, did_you_mean
from precompute.store.errors import ConfigError

CatchUp = Literal["latest", "all", "none"]


class RunsConfig(Section):
    """How scheduled runs are caught up on, retried and ended; a view's schedule may say otherwise."""

    catch_up: CatchUp = Field(default="latest", description="which of the times that were missed are run for")
    retries: int = Field(default=3, ge=0, le=20, description="how often a run that failed or was killed is tried again")
    retry_after: Duration = Field(default=60.0, description="wait before the first retry; twice as long before each further one")
    deadline: Duration = Field(default=6 * 3600.0, gt=0, description="a run that takes longer is killed")


def _names(value: Any) -> Any:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class ScheduleConfig(Section):
    """When a view runs; what is left out is as in ``runs``."""

    at: str | None = Field(default=None, description="five cron fields")
    after: Annotated[list[Name] | None, BeforeValidator(_names, json_schema_input_type=str | list[str] | None)] = Field(
        default=None, description="views; runs when a new snapshot of one of them is live"
    )
    catch_up: CatchUp | None = None
    retries: int | None = Field(default=None, ge=0, le=20)
    retry_after: Duration | None = None
    deadline: Duration | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_of_both(self) -> ScheduleConfig:
        if (self.at is None) == (self.after is None):
            raise ValueError("write one of both: at, five cron fields, or after, the views it runs after")
        if self.after == []:
            raise ValueError("after: names no view; write after: [view]")
        return self


def _schedule(value: Any) -> Any:
    """The short forms, spelled out."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise ValueError("write a string, five cron fields or 'after <view>', or the keys at or after")
    parents = after(value)
    if parents == []:
        raise ValueError("names no view; write 'after <view>'")
    return {"at": value} if parents is None else {"after": parents}


When = Annotated[ScheduleConfig, BeforeValidator(_schedule, json_schema_input_type=str | ScheduleConfig)]


def after(when: str) -> list[str] | None:
    """The views of an ``after a, b`` schedule; None for a cron line."""
    if not when.startswith("after "):
        return None
    return [name.strip() for name in when.removeprefix("after ").split(",") if name.strip()]


@dataclass(frozen=True, slots=True)
class Schedule:
    """When one view runs, spelled out. Either ``cron`` is set or ``parents``; durations in seconds."""

    when: str
    """For people: the cron line, or ``after a, b``."""
    cron: str | None
    timezone: str
    parents: tuple[str, ...]
    catch_up: CatchUp
    retries: int
    retry_after_s: float
    deadline_s: float


def spelled_out(schedule: Mapping[str, ScheduleConfig], runs: RunsConfig, timezone: str) -> dict[str, Schedule]:
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


def check_schedules(schedules: Mapping[str, Schedule], views: Collection[str], project_file: Path) -> None:
    """Refuse what only shows when all are seen together.

    Raises:
        ConfigError: of no view, no cron line, after a view that is not scheduled, or after itself.
    """
    for name, schedule in schedules.items():
        where = f"{project_file}: schedule.{name}: {schedule.when!r}"
        if name not in views:
            raise ConfigError(f"{where}: no such view{did_you_mean(name, views)}")
        if schedule.cron is not None:
            try:
                check_cron(schedule.cron, schedule.timezone)
            except ValueError as exc:
                raise ConfigError(f"{where}: {exc}") from exc
        for parent in schedule.parents:
            if parent not in schedules:
                raise ConfigError(f"{where}: {parent!r} is not scheduled itself{did_you_mean(parent, schedules)}")
    for name in schedules:
        _check_circle(schedules, (name,), project_file)


def _check_circle(schedules: Mapping[str, Schedule], path: tuple[str, ...], project_file: Path) -> None:
    """Raises:
    ConfigError: a view runs after one of ``path``, each of which runs after the next.
    """
    for parent in schedules[path[-1]].parents:
        if parent in path:
            raise ConfigError(
                f"{project_file}: schedule: {' after '.join((*path, parent))} goes round in a circle; give one of them a cron line"
            )
        _check_circle(schedules, (*path, parent), project_file)
