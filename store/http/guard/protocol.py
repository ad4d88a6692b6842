"""Protocol: uvicorn's HTTP/1.1, with limits on what a client sends and on how long it takes.

Times are looked at by :class:`precompute.store.http.guard.connections.Connections` a few times a
second, and here only written down: a timer for each request, as uvicorn has it for idle
connections, costs more.
"""

from __future__ import annotations

import asyncio
import math
import re
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from precompute.store.http.guard.connections import Connections, Wait, header_lines, last_words
from precompute.store.http.messages import RETRY_SOON, TRIED_AT_ONCE, Reply, Stream, problem

LINGER_BYTES, LINGER_HEAD_BYTES = 16 * 2**20, 2**18
"""Bytes of a refused request, for its body or for its head, that are read and thrown away so that
its sender comes to read why; one that sends more is cut off."""

LINGER_S = 2.0

_HEAD, _BODY, _ANSWER, _NEXT, _LAST_ANSWER, _ENDED, _GONE = Wait
"""A member takes longer to get at than a name of this file."""

_OVERDUE = {_HEAD: "header_time", _BODY: "body_time", _NEXT: "idle"}

FULL = problem(
    503, "too_many_connections", "the server has as many connections as it may have", [RETRY_SOON]
)
_TOO_MUCH = problem(
    503, "busy", "the server holds as many bodies of requests as it may; try again", [RETRY_SOON]
)
_NO_HOST = problem(
    400, "bad_host", "a request of HTTP/1.1 has one Host header, which names a host (RFC 9112 §3.2)"
)
_MALFORMED = problem(400, "bad_http", "this is not HTTP/1.1 as RFC 9112 has it")


_HOST = re.compile(rb"(\[[0-9A-Fa-f:.vV]+\]|[\w.~%!$&'()*+,;=-]*)(:\d*)?", re.ASCII)


@lru_cache(256)
def _is_host(value: bytes) -> bool:
    """Whether a Host header's value is one (RFC 3986 §3.2.2); of a target without a host it is
    empty."""
    return _HOST.fullmatch(value) is not None


class _Refused(Exception):
    """Ends the parsing of a request."""


class _Answered(RequestResponseCycle):
    """Stands for a request that is answered: nothing is stored of it."""

    def __init__(self) -> None:
        self.response_started = self.response_complete = True
        self.message_event = asyncio.Event()


_ANSWERED = _Answered()


class LimitedProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        all_connections: of this worker; they hold the limits.
        client: the address (of IPv6 its /64) that its connections are counted by; "" without one.
        config, server_state, app_state: as uvicorn gives them.
    """

    def __init__(
        self,
        all_connections: Connections,
        client: str,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._all, self._limits = all_connections, all_connections.limits
        self.client_address = client
        self._waits_for: Wait = _HEAD
        self.since = self._all.now
        """When it began to wait for what it waits for, by the loop's clock."""
        self.deadline = self.since + self._limits.header_s
        self.write_deadline = math.inf
        self.answered = 0
        self._refusal: Reply | None = None
        self.url = b""
        self.made = False
        """Whether its handshake is done."""
        self.made_room = False
        self._running: RequestResponseCycle | None = None
        """The request whose answer is being made; :attr:`cycle` is the newest, which may wait
        behind it."""
        self._held = 0
        """Bytes of bodies that its routes have not answered."""
        self._slow_since = 0.0
        """When the client first let the answer that is sent wait; 0 where it has not."""
        self._taken = self._untaken = 0
        """Bytes of it that it took all the same, and that it had yet to take when it last let it
        wait."""
        self._at_once = False
        """Whether one was answered at once of the requests that came with the last bytes: those
        behind it have a task each, one after the other, and between them other connections have
        their turn. 1,000 connections with 17 each would else have a single request wait for
        17,000."""
        self._whole: bytes | None = None
        """The body, as far as parsed, of a posted request that is not begun yet, since all of it is
        among the bytes that came last."""
        self._received = self._begun = self._head_bytes = self._body_bytes = self._thrown_away = 0

    # ---- reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let the connection in, unless there are too many."""
        super().connection_made(transport)
        self.made = True
        if not self._all.let_in(self):
            self._refuse(FULL, "full")

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection as closed."""
        self._waits_for = _GONE
        self._let_go()
        super().connection_lost(exc)
        self._all.gone(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Nothing follows: its client reads on, or is gone, which TCP shows alike. While an
        answer is due, the client is taken to be there a little longer."""
        if self._waits_for != _ANSWER or self.scheme != "http":
            # TLS has no half of a connection in asyncio
            return False
        self.cycle.keep_alive = False
        self._wait_for(_LAST_ANSWER)
        return True

    def data_received(self, data: bytes) -> None:
        """Parse bytes of requests."""
        self._received, self._at_once = len(data), False
        waited_for, begun, body_bytes = self._waits_for, self._begun, self._body_bytes
        if waited_for >= _ENDED:
            self._throw_away(len(data))
            return
        try:
            try:
                self.parser.feed_data(data)
            finally:
                if self._whole is not None:
                    self._begin()
        except httptools.HttpParserUpgrade:
            if self._waits_for != _ANSWER:
                # CONNECT, whose URL is none
                self._refuse(_MALFORMED, "bad_request")
                return
            # HTTP/1.1 is what there is: the request is answered, and what follows it is another
            # protocol's
            self._waits_for = _ENDED
            self.cycle.keep_alive = False
        except (httptools.HttpParserError, _Refused):
            refusal = self._refusal or _MALFORMED
            self._refuse(
                refusal, "bad_request" if refusal.status == HTTPStatus.BAD_REQUEST else "too_large"
            )
        else:
            waits_for = self._waits_for
            if waits_for == _ANSWER:
                self.deadline = math.inf
            elif waits_for != waited_for or self._begun != begun:
                # more of the same gains no time
                self._wait_for(waits_for)
            if waits_for == _HEAD and waited_for != _BODY and self._begun - begun <= 1:
                # the parser reports no header that is not complete, and holds its bytes
                self._count_head(len(data))
            elif (
                waits_for == waited_for == _BODY
                and self._begun == begun
                and self._body_bytes == body_bytes
            ):
                # what stands beside chunks, and what follows the last one, without end
                self._count_head(len(data))

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.headers_bytes + self._limits.url_bytes:
            if self._waits_for == _BODY and self.cycle.response_complete:
                self._throw_away(size)
            else:
                self._refuse(self._headers_too_large(), "too_large")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._begun += 1
        self._head_bytes = self._body_bytes = 0
        self._waits_for = _HEAD

    def on_url(self, url: bytes) -> None:
        """A part of it."""
        self.url += url
        if len(self.url) > self._limits.url_bytes:
            self._refusal = problem(
                414, "url_too_long", f"a URL has at most {self._limits.url_bytes} bytes"
            )
            raise _Refused

    def on_headers_complete(self) -> None:
        """Its head is there."""
        limits = self._limits
        # added up only where they may be too large
        may_be = self._head_bytes + self._received > limits.headers_bytes
        if (
            may_be
            and sum(len(name) + len(value) + 4 for name, value in self.headers)
            > limits.headers_bytes
        ):
            self._refusal = self._headers_too_large()
            raise _Refused
        hosts = [value for name, value in self.headers if name == b"host"]
        right = len(hosts) == 1 and _is_host(hosts[0])
        # of HTTP/1.0 it may be missing
        if not right and (hosts or self.parser.get_http_version() != "1.0"):
            self._refusal = _NO_HOST
            raise _Refused
        if len(self.pipeline) >= limits.pipelined:
            self._refusal = problem(
                429,
                "too_many_pipelined",
                f"at most {limits.pipelined} requests of a connection may wait",
            )
            raise _Refused
        if not self._answered_at_once():
            if self._comes_whole():
                self._whole = b""
            else:
                super().on_headers_complete()
        # what follows a body in chunks is none of a request's headers (RFC 9110 §6.5.1): it goes
        # where no code reads it
        self.headers = []
        self._waits_for, self._head_bytes = _BODY, 0

    def on_body(self, body: bytes) -> None:
        """A part of it."""
        self._body_bytes += len(body)
        self._head_bytes = 0
        if self._whole is not None:
            self._whole += body
            return
        if self.cycle.response_complete:
            if self._body_bytes > self._limits.body_bytes:
                self._throw_away(len(body))
            return
        if self._body_bytes > self._limits.body_bytes:
            self._refusal = problem(
                413, "body_too_large", f"a body has at most {self._limits.body_bytes} bytes"
            )
            raise _Refused
        self._take(body)

    def _take(self, body: bytes) -> None:
        self._held += len(body)
        self._all.bodies += len(body)
        if self._all.bodies > self._limits.bodies_bytes:
            self._refusal = _TOO_MUCH
            raise _Refused
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is there."""
        if self._whole is not None and not self._answered_whole(self._whole):
            self._begin()
        super().on_message_complete()
        self._waits_for = _NEXT if self.cycle.response_complete else _ANSWER

    def _wait_for(self, what: Wait) -> None:
        self._waits_for, self.since = what, self._all.now
        self.deadline = self.since + self._all.seconds[what]

    def _headers_too_large(self) -> Reply:
        return problem(
            431,
            "headers_too_large",
            f"a request's headers have at most {self._limits.headers_bytes} bytes",
        )

    # ---- answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _answered_at_once(self) -> bool:
        """Whether the request whose head is there was answered without a task; else its scope says
        to the application that this was tried."""
        at_once = self._all.at_once
        # in its turn; one of the bytes that came last, so that others have theirs; and an answer
        # that is not taken is waited for
        if at_once is None or self._at_once or self.flow.write_paused:
            return False
        if not (self.cycle is None or self.cycle.response_complete) or self.parser.should_upgrade():
            return False
        self._at_once = True
        scope, url = cast(dict[str, Any], self.scope), httptools.parse_url(self.url)
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["raw_path"], scope["query_string"] = url.path, url.query or b""
        reply = at_once(scope)
        if reply is None:
            scope[TRIED_AT_ONCE] = True
            return False
        self._answer(reply)
        return True

    def _comes_whole(self) -> bool:
        """Whether the request, which was posted and is not answered by its head, will be here whole
        when the bytes that came last are parsed."""
        scope = cast(dict[str, Any], self.scope)
        if (
            self._all.posted_at_once is None
            or TRIED_AT_ONCE not in scope
            or scope["method"] != "POST"
            or self.expect_100_continue
        ):
            return False
        # digits, else the parser had refused it
        size = next(
            (int(value[:10]) for name, value in self.headers if name == b"content-length"), None
        )
        return size is not None and size <= min(self._received, self._limits.body_bytes)

    def _answered_whole(self, body: bytes) -> bool:
        assert self._all.posted_at_once is not None
        reply = self._all.posted_at_once(cast(dict[str, Any], self.scope), body)
        if reply is None:
            return False
        self._whole = None
        self._answer(reply)
        return True

    def _begin(self) -> None:
        """Have what was not answered at once go the whole way, with what is there of its body."""
        body, self._whole = self._whole, None
        super().on_headers_complete()
        if body:
            self._take(body)

    def _answer(self, reply: Reply) -> None:
        assert not isinstance(reply.body, Stream)
        body = reply.body
        size = sum(map(len, body)) if isinstance(body, list) else len(body)
        keep_alive = self.parser.should_keep_alive() and self.parser.get_http_version() != "1.0"
        length = (
            b"" if reply.status == HTTPStatus.NOT_MODIFIED else b"content-length: %d\r\n" % size
        )
        head = (
            self._all.head(self.server_state.default_headers),
            header_lines(reply.headers),
            length,
        )
        close = b"" if keep_alive else b"connection: close\r\n"
        shown = (
            () if self.scope["method"] == "HEAD" else body if isinstance(body, list) else (body,)
        )
        self.transport.write(b"".join((STATUS_LINE[reply.status], *head, close, b"\r\n", *shown)))
        self.cycle, self._running = _ANSWERED, None
        if not keep_alive:
            self.transport.close()
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """An answer is made; the next request, if one waits, is begun."""
        self.server_state.total_requests += 1
        self.answered += 1
        self._slow_since = 0.0
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._send_refusal(self._refusal)
        elif self._waits_for == _ANSWER:
            self._wait_for(_NEXT)
        if self._held and not self.pipeline:
            self._all.bodies -= self._held
            self._held = 0

    def pause_writing(self) -> None:
        """The client does not take what it requested as fast as it is made."""
        super().pause_writing()
        if not self._slow_since:
            self._slow_since, self._taken = self._all.now, 0
        # of the whole answer: one that is sent piece by piece gains no time by taking each
        self._untaken = self.unsent
        most_s = self._limits.write_s + (self._taken + self._untaken) / 2**20
        self.write_deadline = min(
            self._slow_since + most_s, max(self._slow_since, self._all.ends_at) + self._all.most_s
        )
        self._all.slow(self)

    def resume_writing(self) -> None:
        """It took nearly all."""
        super().resume_writing()
        self._taken += self._untaken - self.unsent
        self.write_deadline = math.inf
        self._all.fast(self)

    @property
    def unsent(self) -> int:
        """Bytes that the client has not taken."""
        return self.transport.get_write_buffer_size()

    # ---- ending

    @property
    def idle(self) -> bool:
        """Whether no answer is lost when it is closed."""
        waits = self._waits_for in (_HEAD, _NEXT, _ENDED)
        return waits and not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    @property
    def answering(self) -> bool:
        """Whether a request of it, which is there whole, waits for the first byte of its answer."""
        return (
            self._running is not None
            and self._waits_for != _BODY
            and not self._running.response_started
        )

    def overdue(self) -> None:
        """Act on a deadline that passed: refuse with 408 a request that was under way, and
        close."""
        waits_for = self._waits_for
        if waits_for == _LAST_ANSWER and not self.answering:
            # shown by whether it is taken
            self.deadline = math.inf
        elif waits_for in (_LAST_ANSWER, _ENDED):
            self._abort()
        elif self.flow.read_paused:
            # by us: nothing could be sent
            self.deadline = self._all.now + self._limits.tick_s
        elif waits_for == _NEXT or (self.idle and not self.url):
            self._all.closed("idle" if waits_for == _NEXT else "header_time")
            self._end()
            self.transport.close()
        else:
            what = "head" if waits_for == _HEAD else "body"
            self._refuse(
                problem(408, "too_slow", f"the request's {what} took too long"), _OVERDUE[waits_for]
            )

    def make_room(self) -> None:
        """Close the connection in favour of another one."""
        self._all.closed("evicted")
        self.made_room = True
        self._end()
        self._waits_for = _GONE
        self.connections.discard(self)
        self.transport.close()

    def cut(self, why: str) -> None:
        """Close the connection at once, whatever is under way."""
        self._all.closed(why)
        self._end()
        self._abort()

    def _end(self) -> None:
        self._waits_for, self.deadline = _ENDED, math.inf

    def _abort(self) -> None:
        """Close at once; an answer under way is discarded from now on."""
        self._let_go()
        self.transport.abort()

    def _let_go(self) -> None:
        self._all.bodies -= self._held
        self._held = 0
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse(self, refusal: Reply, why: str) -> None:
        """Read no more requests; refuse this one once those before it are answered."""
        self._all.closed(why)
        refused_midway = self._waits_for == _BODY and not self.cycle.response_complete
        self._end()
        if refused_midway and self.pipeline:
            # its turn never comes
            self.pipeline.popleft()
            self._refusal = refusal
        elif refused_midway:
            # its route waits for the body, and learns that the client is gone
            self._let_go()
            if self.cycle.response_started:
                self.transport.abort()
            else:
                self._send_refusal(refusal)
        elif self.cycle is None or (self.cycle.response_complete and not self.pipeline):
            self._send_refusal(refusal)
        else:
            self._refusal = refusal

    def _send_refusal(self, refusal: Reply) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(last_words(refusal))
        self.deadline = self._all.now + LINGER_S
        self.flow.resume_reading()
        if self.scheme == "http" and self._all.has_room:
            # what it still sends is thrown away for a while: closed over unread bytes, a connection
            # is reset, and the answer lost
            self.transport.write_eof()
        else:
            self.transport.close()

    def _throw_away(self, size: int) -> None:
        self._thrown_away += size
        if self._thrown_away > (LINGER_BYTES if self._body_bytes else LINGER_HEAD_BYTES):
            self._abort()
