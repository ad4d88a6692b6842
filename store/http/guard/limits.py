"""Limits: how much one client may request of a server, and how long a request may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a connection, and all of a worker's together, may take: bytes, numbers, and seconds
    (``_s``).

    ``header_s`` is from a request's first byte, or the connection's, to the end of its head;
    ``body_s`` from there to the end of its body; ``idle_s`` from an answer to the next request.
    ``bodies_bytes`` is what all bodies together may have that no route has answered: beyond, the
    request that brings more is refused. An answer must leave within ``write_s`` and a second for
    each MiB of it. ``unsent_bytes`` is what all answers together may hold that their clients have
    not taken: beyond, the connection that holds the most is cut.
    """

    headers_bytes: int = 16 * 2**10
    url_bytes: int = 8 * 2**10
    body_bytes: int = 4 * 2**20
    bodies_bytes: int = 256 * 2**20
    answer_bytes: int = 64 * 2**20
    unsent_bytes: int = 256 * 2**20
    connections: int = 1000
    connections_per_client: int | None = None
    pipelined: int = 16
    header_s: float = 10.0
    body_s: float = 30.0
    idle_s: float = 75.0
    write_s: float = 30.0

    @property
    def tick_s(self) -> float:
        """How often times are looked at: often enough that the shortest is observed a quarter, and
        twice a second at least."""
        return max(0.01, min(0.5, min(self.header_s, self.body_s, self.idle_s, self.write_s) / 4))
