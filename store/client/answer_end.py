"""Answer end: where an answer ends in what a connection brings. What comes behind it belongs to no request, and would be taken for the answer to the next one."""

from __future__ import annotations

from collections.abc import Generator


class AnswerEnd:
    """Follows the bytes of one connection, answer by answer, through HTTP/1.1's framing (RFC 9112 §6): httpcore2 leaves what it read beyond an answer to the next
    one, and tells nobody. 2 µs an answer."""

    def __init__(self) -> None:
        self._unread = b""
        self._reader: Generator[None] | None = None

    def begin(self) -> None:
        """A request is sent; its answer is next."""
        self._reader = self._answer()
        next(self._reader)

    def feed(self, data: bytes) -> None:
        """What was read."""
        self._unread += data
        if self._reader is not None:
            try:
                self._reader.send(None)
            except StopIteration:
                self._reader = None
            except (ValueError, IndexError):
                # no HTTP, which httpcore2 refuses: it has no end
                self._reader = self._skip(2**62)
                next(self._reader)

    @property
    def reusable(self) -> bool:
        """Whether the last answer has come to its end, and nothing came behind it."""
        return self._reader is None and not self._unread

    def _answer(self) -> Generator[None]:
        yield
        status = 100
        while 100 <= status < 200:
            lines = (yield from self._until(b"\r\n\r\n")).split(b"\r\n")
            status = int(lines[0].split(b" ", 2)[1])
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        if status in (204, 304):
            return
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            while size := int((yield from self._until(b"\r\n")).partition(b";")[0], 16):
                yield from self._skip(size + 2)
            while (yield from self._until(b"\r\n")):
                pass
        else:
            # without a length it lasts as long as the connection
            yield from self._skip(int(fields.get(b"content-length", 2**62)))

    def _until(self, end: bytes) -> Generator[None, None, bytes]:
        while (at := self._unread.find(end)) < 0:
            yield
        found, self._unread = self._unread[:at], self._unread[at + len(end) :]
        return found

    def _skip(self, size: int) -> Generator[None]:
        while size > len(self._unread):
            size -= len(self._unread)
            self._unread = b""
            yield
        self._unread = self._unread[size:]
