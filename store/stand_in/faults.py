"""Faults: what goes wrong between a client and its stand-in, on order: answers that come late, and
errors in their place."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from precompute.store.api import wire
from precompute.store.client.attempts import Failure, Outcome
from precompute.store.client.calls import Reply
from precompute.store.errors import (
    ConfigError,
    DeadlineError,
    NoAnswerError,
    OnlineStoreError,
    OverloadedError,
    PrecomputeError,
    RequestError,
)


@dataclass(slots=True)
class Fault:
    """``error`` in place of the answer, or the answer so much later; the next ``times``, None for
    all; of requests of ``view``, None for all."""

    error: PrecomputeError | None = None
    delay_s: float = 0.0
    times: int | None = None
    view: str | None = None


class Faults:
    """The faults that are on order, the oldest first."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """One more.

        Raises:
            ConfigError: no request can come to that.
        """
        if fault.error is not None:
            outcome_of(fault.error)
        if fault.times is not None and fault.times < 1:
            raise ConfigError(f"times: {fault.times}: at least 1, or None for all requests to come")
        if not fault.delay_s >= 0:
            raise ConfigError(f"a delay is a number of seconds from 0, got {fault.delay_s!r}")
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        with self._lock:
            self._faults.clear()

    def next(self, views: list[str]) -> tuple[float, PrecomputeError | None]:
        """What becomes of a request of these views: how much later its answer comes, all delays
        together, and the oldest error."""
        delay_s, error = 0.0, None
        with self._lock:
            for fault in list(self._faults):
                if (fault.view is not None and fault.view not in views) or (
                    fault.error is not None and error is not None
                ):
                    continue
                delay_s += fault.delay_s
                error = fault.error if error is None else error
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        self._faults.remove(fault)
        return delay_s, error


def outcome_of(error: PrecomputeError) -> Outcome:
    """What a request came to, for the client to raise this error: the server's refusal, or no
    answer.

    Raises:
        ConfigError: the client raises no such error.
    """
    if isinstance(error, OverloadedError):
        # as RFC 9110 has it, in whole seconds
        wait = (
            []
            if error.retry_after_s is None
            else [(b"retry-after", b"%d" % max(0, round(error.retry_after_s)))]
        )
        return _problem(503, "busy", str(error), wait)
    if isinstance(error, NoAnswerError):
        return Failure(error, final=isinstance(error, DeadlineError))
    if type(error) is OnlineStoreError:
        return _problem(503, "store_unavailable", str(error))
    if isinstance(error, RequestError):
        return _problem(error.status, error.code, str(error))
    raise ConfigError(
        f"{type(error).__name__}: the client never raises it; it raises OnlineStoreError,"
        " NoAnswerError, DeadlineError, OverloadedError, RequestError, DeniedError"
    )


def _problem(
    status: int, code: str, detail: str, headers: list[tuple[bytes, bytes]] | None = None
) -> Reply:
    body = wire.Problem(wire.PROBLEM_URN + code, code.replace("_", " "), status, detail)
    return Reply(
        status, [(b"content-type", wire.PROBLEM.encode()), *(headers or [])], wire.encode(body)
    )
