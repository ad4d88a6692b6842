"""Replies: what a Redis server refuses, in this project's errors."""

from __future__ import annotations

import re

from precompute.store.errors import OnlineStoreError

_IN_SCRIPT = re.compile(r": -([A-Z]+) ")
"""How Redis 6.2 tells it; 7 tells it as outside of scripts."""


class Refused(Exception):
    """An error reply. ``code`` is its first word, as in ``OOM command not allowed``."""

    @property
    def code(self) -> str:
        """The first word; of what happened in a script, that of the command that it ran."""
        said = str(self)
        inner = _IN_SCRIPT.search(said) if said.startswith("ERR Error running script") else None
        return inner[1] if inner else said.partition(" ")[0]


class Lost(Exception):
    """A connection that could not be made, was cut, or did not answer in time; ``late`` says which
    of these it was."""

    def __init__(self, words: str, *, late: bool = False) -> None:
        super().__init__(words)
        self.late = late


PASSING = frozenset({"LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "BUSY"})
"""Refusals that go by: the server starts, a slot moves, a replica takes over, a script runs."""
MOVING = PASSING | {"MOVED", "ASK", "READONLY"}
"""Refusals after which a cluster is looked at again, or what they name, and queried again."""


def words(error: BaseException) -> str:
    """What an error says, printable and short."""
    shown = "".join(c if c.isprintable() else "?" for c in str(error))
    return shown if len(shown) <= 200 else shown[:197] + "..."


class NoAnswer(OnlineStoreError):
    """A server that cannot be reached."""


class Full(OnlineStoreError):
    """A server without room."""


def no_answer(where: str, doing: str, said: str) -> NoAnswer:
    """The error of a server that cannot be reached."""
    return NoAnswer(f"Redis at {where} does not answer, could not {doing}: is it running? ({said})")


def refusal(where: str, doing: str, refused: Refused) -> OnlineStoreError:
    """An error reply, with what to do about it."""
    said = words(refused)
    match refused.code:
        case "OOM":
            return Full(
                f"Redis at {where} is full, could not {doing}: raise maxmemory or drop data"
                f" ({said})"
            )
        case "WRONGPASS" | "NOAUTH":
            text = (
                f"Redis at {where} refuses this user or password, could not {doing}: set the right"
                f" one, as in PRECOMPUTE_ONLINE=redis://:password@host:6379/0 ({said})"
            )
        case "NOPERM":
            text = (
                f"Redis at {where} does not let this user {doing}: give it the rights that"
                f" docs/redis.md lists ({said})"
            )
        case "READONLY":
            text = (
                f"Redis at {where} is a read-only replica, could not {doing}: name its master"
                f" ({said})"
            )
        case "MOVED" | "ASK" | "CROSSSLOT":
            text = (
                f"Redis at {where} is part of a cluster, could not {doing}: write"
                f" redis+cluster://host:6379 ({said})"
            )
        case "MISCONF":
            text = (
                f"Redis at {where} cannot save its data and takes no writes, could not {doing}: see"
                f" its log ({said})"
            )
        case "LOADING" | "BUSY":
            text = f"Redis at {where} is busy, could not {doing}: wait, or see its log ({said})"
        case "CLUSTERDOWN" | "TRYAGAIN" | "MASTERDOWN":
            text = (
                f"Redis at {where} has lost a node or moves its slots, could not {doing}: wait, or"
                f" see CLUSTER INFO ({said})"
            )
        case _:
            text = f"Redis at {where} refused, could not {doing}: {said}"
    return OnlineStoreError(text)
