"""Sweep: the rows of dropped generations go, a few keys at a time, from a server that others use too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from store.redis.link import Command, Link, packed
from store.redis.replies import Refused, refusal

SCANNED_KEYS = 1000
"""Looked at between two pauses: a third of a millisecond of the server's time, and half of one for removing them."""
SWEEP_S = 10.0
"""For one such step."""


def scanned(link: Link, prefix: bytes, doing: str, gone: list[Command] | None = None) -> Iterator[list[bytes]]:
    """The keys that begin with a prefix, a few at a time, some of them twice; the server has half as long for others as it takes for this.

    Args:
        link: to the server.
        prefix: of the keys.
        doing: what for.
        gone: commands that are to be sent with the next look, and are taken from the list; what MOVED is found on the server that has it now.

    Raises:
        OnlineStoreError: no answer, or a command was refused.
    """
    cursor: bytes | None = b"0"
    gone = [] if gone is None else gone
    while cursor is not None or gone:
        look: list[Command] = [] if cursor is None else [("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", SCANNED_KEYS)]
        started = time.monotonic()
        replies = link.replies(packed(*gone, *look), len(gone) + len(look), doing, SWEEP_S)
        taken_s = time.monotonic() - started
        for reply in replies:
            if isinstance(reply, Refused) and ((look and reply is replies[-1]) or reply.code not in ("MOVED", "ASK")):
                raise refusal(link.where, doing, reply)
        gone.clear()
        if cursor is not None:
            cursor, keys = replies[-1]
            cursor = None if cursor == b"0" else cursor
            yield keys
        time.sleep(taken_s / 2)


def counted(links: Iterable[Link], prefix: bytes, doing: str) -> int:
    """How many keys of these servers begin with a prefix, each counted once."""
    hashes = [np.fromiter(map(hash, keys), np.int64, len(keys)) for link in links for keys in scanned(link, prefix, doing)]
    return len(np.unique(np.concatenate(hashes))) if hashes else 0


def sweep(link: Link, prefix: bytes, unwanted: Callable[[int], bool], doing: str, *, cluster: bool) -> None:
    """Remove the keys of some generations.

    Args:
        link: to the server.
        prefix: what the keys of the view's rows begin with; the generation's number and a colon follow.
        unwanted: whether a generation goes, by its number.
        doing: what for.
        cluster: whether each key has to be removed by a command of its own.

    Raises:
        OnlineStoreError: no answer, or a command was refused. What is gone is gone; do it again.
    """
    gone: list[Command] = []
    for keys in scanned(link, prefix, doing, gone):
        numbers = {number for key in keys if (number := key[len(prefix) :].partition(b":")[0]).isdigit()}
        going = {number for number in numbers if unwanted(int(number))}
        keys = [key for key in keys if key[len(prefix) :].partition(b":")[0] in going] if going else []
        if keys:
            gone += [("UNLINK", key) for key in keys] if cluster else [("UNLINK", *keys)]
