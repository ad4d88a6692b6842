"""Errors: every error that is raised on purpose, as one small tree. Foreign exceptions (duckdb,
pyarrow, OSError) are translated at the seam that imports the library, always ``from exc``. A
message says what went wrong, with which value, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


class PrecomputeError(Exception):
    """Base of everything raised on purpose; ``str(error)`` is a message for the operator. The
    command line ends with 1, but for those that name another exit status.

    PrecomputeError
    ├── ConfigError
    ├── SourceError
    │   ├── MissingFileError
    │   └── OverMemoryError
    ├── ModelError
    ├── RejectedError
    ├── GateError
    ├── SnapshotError
    ├── UnreadableError
    │   └── OtherFormatError
    ├── ConflictError
    │   └── FencedError
    ├── OnlineStoreError
    │   ├── DamagedPointerError
    │   ├── RowsLostError
    │   └── NoAnswerError
    │       ├── DeadlineError
    │       └── OverloadedError
    ├── VectorIndexError
    └── RequestError
        ├── DeniedError
        └── MissingRowError
    """


class ConfigError(PrecomputeError):
    """The configuration is wrong: names file, key, value and remedy. Exit status 2."""


class SourceError(PrecomputeError):
    """The source failed: its files, its rows or its keys."""


class MissingFileError(SourceError):
    """A file that the source names is not there: of a wrong name, or late. Exit status 2."""


class OverMemoryError(SourceError):
    """A source takes more memory than ``memory_mb`` allows; the message says what to set."""


class ModelError(PrecomputeError):
    """The model could not be loaded, or returned something other than its view declares."""


class RejectedError(PrecomputeError):
    """More rows were rejected than the view allows, or one bad row under ``bad_rows: fail``; the
    snapshot was not committed. Exit status 3."""


class GateError(PrecomputeError):
    """A gate refused to publish a snapshot; it is committed, and can be published by accepting the
    gate by name. Exit status 3."""


class SnapshotError(PrecomputeError):
    """A snapshot is missing, incomplete or damaged."""


class UnreadableError(PrecomputeError):
    """A file or record cannot be read now: this process is short of rights, handles, threads or
    memory, or the disk or object store gives no answer. Nothing is known of it, so nothing is
    decided by it: it is not damaged, and not missing."""


class OtherFormatError(UnreadableError):
    """A record or file is whole, and of a format that this version does not read, or it needs what
    this version does not know. It stays as it is: nothing takes its place, and what it may name
    stays, too."""


class ConflictError(PrecomputeError):
    """A compare-and-swap lost, or another run holds the view's lease."""


class FencedError(ConflictError):
    """A writer that slept past its lease: another one took over, and its writes are refused."""


class OnlineStoreError(PrecomputeError):
    """The online store cannot be reached or refused a command."""


class DamagedPointerError(OnlineStoreError):
    """What the online store holds as a view's pointer cannot be read; publishing the view rewrites
    it."""


class RowsLostError(OnlineStoreError):
    """The online store answers, and does not have what was loaded into it: rows, or a segment,
    are gone or damaged. ``segments`` are the names of those at fault; None where that is not
    known."""

    def __init__(self, message: str, segments: frozenset[str] | None = None) -> None:
        super().__init__(message)
        self.segments = segments


class NoAnswerError(OnlineStoreError):
    """The client: no answer came from the lookup service, or none that can be read. The message
    names the server."""


class DeadlineError(NoAnswerError):
    """The client: no answer within the time given for the whole call, retries included."""


class OverloadedError(NoAnswerError):
    """The client: the service refuses for now (HTTP 429, 503). ``retry_after_s`` is the wait that
    it names; None where it does not."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class VectorIndexError(PrecomputeError):
    """The vector index is missing, damaged or cannot take this query."""


class RequestError(PrecomputeError):
    """A request that cannot be answered as requested.

    ``status`` is the HTTP status, ``code`` a stable word for programs: ``unknown_view``,
    ``unknown_feature``, ``bad_key``, ``too_many_keys``, ``bad_request`` …
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "bad_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class DeniedError(RequestError):
    """The client: the service wants a token, or the one that was shown does not allow this (HTTP
    401, 403)."""


class MissingRowError(RequestError):
    """The client: the one row that was requested is missing; ``code`` is the reason, as in a row of
    a batch."""


MOST_NAMED, MOST_COMPARED = 20, 10_000
"""Names that a message lists at most, and of how many the nearest is looked for."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about a name that is unknown: the nearest of those there are, if one is
    near."""
    near = nearest(name, islice(names, MOST_COMPARED))
    return "" if near is None else f"; did you mean {near!r}?"


def nearest_or_all(name: str, names: Iterable[str]) -> str:
    """The same; and where none is near, all there are, or the first few."""
    known = list(islice(names, MOST_COMPARED))
    listed = ", ".join([*known[:MOST_NAMED], *(["…"] if len(known) > MOST_NAMED else [])])
    return did_you_mean(name, known) or (f" (there are: {listed})" if listed else "")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of the names that is most like ``name``, capitals or not; None where none is like
    it."""
    # only a message needs it
    from difflib import get_close_matches

    plain = {known.lower(): known for known in names}
    near = get_close_matches(name.lower(), plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else None
