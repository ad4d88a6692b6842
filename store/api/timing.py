"""Timing: what an answer took, told to those who want to know it of each: its caller by a header, and who traces requests."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, auto

from precompute.store.api.reply import Reply
from precompute.store.api.request import Scope


class Timing(Flag):
    """Who is told; two may be."""

    NOT_TOLD = 0
    IN_HEADER = auto()
    """``Server-Timing``, in milliseconds."""
    IN_SCOPE = auto()
    """``scope["stages"]``: name → seconds, one after the other."""


def timed(scope: Scope, reply: Reply, stages: Mapping[str, float], seconds: float, told: Timing) -> Reply:
    """The reply, with what it took where that is wanted."""
    if Timing.IN_SCOPE in told:
        scope["stages"] = stages
    if Timing.IN_HEADER not in told:
        return reply
    parts = [f"{name};dur={took * 1e3:.3f}" for name, took in (*stages.items(), ("total", seconds))]
    return reply._replace(headers=[*reply.headers, (b"server-timing", ", ".join(parts).encode())])
