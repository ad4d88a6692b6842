"""What a backfill is: what was asked for, its partitions, and the file that tells how far it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from store.clock import utc_now
from store.errors import ConfigError, SnapshotError
from store.offline.view_store import ViewStore
from store.record import Record, field, read_record

Reprocess = Literal["missing", "failed", "stale", "all"]


class Options(Record, frozen=True):
    """What was asked for; ``first`` and ``last`` are moments (ISO 8601) in the first and last partition of the range."""

    first: str
    last: str
    reprocess: Reprocess = "missing"
    check_inputs: bool = False
    full: bool = False
    max_active: int = 1
    backwards: bool = False
    publish: bool = True


class Item(Record):
    """One partition of a backfill.

    ``state``: pending · running · done · failed · refused (too many rows rejected, or a gate refuses it) · cancelled. ``started_at`` when its process
    was begun, ``seconds`` from there to the end; ``rows`` of the source, ``written`` of them computed; ``error`` why it is not done.
    """

    partition: str
    why: str
    state: str = "pending"
    run: str | None = None
    snapshot: int | None = None
    rows: int | None = None
    written: int | None = None
    started_at: str | None = None
    seconds: float | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """The partition's start."""
        return self.partition.partition("/")[0]


class Backfill(Record):
    """A backfill as its file tells it.

    ``status``: running · done · failed (a partition is not done, or publishing failed) · cancelled. ``published`` is the snapshot it made live,
    ``not_published`` why it made none live.
    """

    id: str
    view: str
    options: Options
    items: list[Item]
    status: str = "running"
    created_at: str = field(default_factory=utc_now)
    finished_at: str | None = None
    published: int | None = None
    not_published: str | None = None
    signal: int | None = None
    """What cancelled it."""

    def count(self, *states: str) -> int:
        """Partitions in one of these states."""
        return sum(item.state in states for item in self.items)

    @property
    def only_refused(self) -> bool:
        """Whether nothing is wrong but that rows or gates refused some partitions."""
        return self.status == "failed" and self.count("refused") > 0 and self.count("done", "refused") == len(self.items)


def backfills(store: ViewStore) -> list[str]:
    """Ids of a view's backfills, the newest first."""
    return sorted((path.stem for path in backfill_folder(store).glob("[0-9]*.json")), reverse=True)


def read_backfill(store: ViewStore, id: str) -> Backfill:
    """What a backfill's file tells.

    Raises:
        ConfigError: there is none of that id.
        SnapshotError: it is damaged or cannot be read.
    """
    path = backfill_folder(store) / f"{id}.json"
    ids = backfills(store)
    if id not in ids:
        raise ConfigError(f"view {store.name!r} has no backfill {id!r} (the newest: {', '.join(ids[:3]) or 'none'})")
    try:
        return read_record(Backfill, path.read_bytes())
    except OSError as exc:
        raise SnapshotError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise SnapshotError(f"{path} is damaged ({exc}); remove it, and backfill the range anew") from exc


def backfill_folder(store: ViewStore) -> Path:
    """Where a view's backfills keep their files."""
    return store.folder / "backfills"


def lease_name(id: str) -> str:
    """Name of the lease that the process of a backfill holds."""
    return f"backfill-{id}"
