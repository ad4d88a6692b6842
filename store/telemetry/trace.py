"""Trace: which traced request a piece of work is for, so that what other threads and processes do for it comes under it. Where nothing is traced there is none."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import NamedTuple

TRACE: ContextVar[str | None] = ContextVar("trace", default=None)
"""``traceparent`` (W3C Trace Context) of the request that is worked on."""


class Asked(NamedTuple):
    """For which request something was asked, and when (ns since 1970)."""

    trace: str
    at_ns: int

    @classmethod
    def now(cls) -> Asked | None:
        """For the request that is worked on; None where it is not traced."""
        trace = TRACE.get()
        return None if trace is None else cls(trace, time.time_ns())
