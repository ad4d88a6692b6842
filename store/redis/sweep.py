"""Sweep: the rows of dropped generations go, a few keys at a time, from a server that others use too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from store.redis.link import Link, packed
from store.redis.replies import Refused, refusal

SCANNED_KEYS = 1000
"""Looked at between two pauses: a third of a millisecond of the server's time."""
SWEEP_S = 10.0
"""For one such step."""


def scanned(link: Link, prefix: bytes, doing: str) -> Iterator[list[bytes]]:
    """The keys that begin with a prefix, a few at a time, some of them twice; the server has as long for others as it takes for this."""
    cursor = b"0"
    while True:
        started = time.monotonic()
        ((cursor, keys),) = link.ask(packed(("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", SCANNED_KEYS)), 1, doing, SWEEP_S)
        yield keys
        if cursor == b"0":
            return
        time.sleep(time.monotonic() - started)


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
    for keys in scanned(link, prefix, doing):
        numbers = {number for key in keys if (number := key[len(prefix) :].partition(b":")[0]).isdigit()}
        going = {number for number in numbers if unwanted(int(number))}
        gone = [key for key in keys if key[len(prefix) :].partition(b":")[0] in going] if going else []
        if gone:
            commands = [("UNLINK", key) for key in gone] if cluster else [("UNLINK", *gone)]
            for reply in link.replies(packed(*commands), len(commands), doing, SWEEP_S):
                if isinstance(reply, Refused) and reply.code not in ("MOVED", "ASK"):
                    # a key that has moved is found on the server that has it now
                    raise refusal(link.where, doing, reply)
