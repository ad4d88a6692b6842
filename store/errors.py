"""Every error this project raises on purpose, as one small tree. Foreign exceptions (duckdb, redis,
lmdb, pyarrow, OSError) are translated at the seam that imports the library, always ``from exc``. A
message says what went wrong, with which value, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


class PrecomputeError(Exception):
    """Base of everything raised on purpose; ``str(error)`` is a message for the operator.

    PrecomputeError                 something the operator or caller can act on ├── ConfigError
    a file, key or value of the configuration is wrong       (exit status 2) ├── SourceError
    the source cannot be read, or its rows cannot be used │   └── MissingFileError        a file
    that it names is not there                        (exit status 2) ├── ModelError
    the model cannot be loaded, or breaks its contract ├── RejectedError               too many rows
    rejected: nothing was published            (exit status 3) ├── GateError                   a
    gate refused to publish the snapshot                   (exit status 3) ├── SnapshotError
    a snapshot is missing, incomplete or damaged │   └── UnreadableError         a file of it cannot
    be read by this process, and may be whole ├── ConflictError               somebody else moved
    the pointer, or holds the lease │   └── FencedError             this process's lease was taken
    over while it slept ├── OnlineStoreError            the online store cannot be reached, or
    refused a command │   ├── DamagedPointerError     its pointer cannot be read; publishing mends
    it │   ├── RowsLostError           it answers, and has not what was loaded │   └── NoAnswerError
    of the client: no answer from the service, or none that can be read │       ├── DeadlineError
    none in the time that was given │       └── OverloadedError     it refuses for now; says for how
    long                       (HTTP 429, 503) ├── VectorIndexError            the vector index is
    missing, damaged or does not fit └── RequestError                a lookup or search that cannot
    be answered as requested     (HTTP 4xx)
        ├── DeniedError             of the client: no token, or not one for this            (HTTP
        401, 403) └── MissingRowError         of the client: the one row that was requested is
        missing
    """


class ConfigError(PrecomputeError):
    """The configuration is wrong: names the file, the key, the value and the remedy."""


class SourceError(PrecomputeError):
    """The source failed: its files, its rows or its keys."""


class MissingFileError(SourceError):
    """A file that the source names is not there: its name is wrong, or it is late."""


class ModelError(PrecomputeError):
    """The model could not be loaded, or returned something other than its view declares."""


class RejectedError(PrecomputeError):
    """More rows were rejected than the view allows, or one bad row under ``bad_rows: fail``; the
    snapshot was not committed."""


class GateError(PrecomputeError):
    """A gate refused to publish a snapshot; it is committed, and can be published by accepting the
    gate by name."""


class SnapshotError(PrecomputeError):
    """A snapshot is missing, incomplete or damaged."""


class UnreadableError(SnapshotError):
    """A file of a snapshot cannot be read by this process, which is short of rights, handles,
    threads or memory: nothing is known of the file."""


class ConflictError(PrecomputeError):
    """A compare-and-swap lost, or another run holds the view's lease."""


class FencedError(ConflictError):
    """A writer that slept past its lease: somebody else took over, and its writes are refused."""


class OnlineStoreError(PrecomputeError):
    """The online store cannot be reached or refused a command."""


class DamagedPointerError(OnlineStoreError):
    """What the online store holds as a view's pointer cannot be read; publishing the view rewrites
    it."""


class RowsLostError(OnlineStoreError):
    """The online store answers, and does not have what was loaded into it: rows, or a generation,
    are gone or damaged."""


class NoAnswerError(OnlineStoreError):
    """The client: no answer came from the lookup service, or none that can be read. The message
    names the server."""


class DeadlineError(NoAnswerError):
    """The client: no answer within the time given for the whole call, asking again included."""


class OverloadedError(NoAnswerError):
    """The client: the service refuses for now. ``retry_after_s`` is what it asks to wait; None
    where it does not say."""

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
    """The client: the service wants a token, or the one that was shown does not allow this."""


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
