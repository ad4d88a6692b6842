"""Stand-in: a local endpoint that speaks OpenAI's API, slow or faulty on order, and counts what it
is sent by input.

python -m precompute.plugins.endpoints.tests.stand_in SECONDS
    in a process of its own: prints its port, answers after so long, ends with its standard input
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What is answered: a status, headers and a body, bytes as they are, or what is to be called
    with the inputs to have it; ``cut`` ends the connection after so many
    bytes of it, ``delay_s`` is waited before, and ``framed`` is how it ends: by its length, in
    chunks, or by the connection's end."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    cut: int | None = None
    framed: str = "length"


def chat(
    content: Any, usage: Any = "honest", ended: str = "stop", prompt: str = "", **choice: Any
) -> dict[str, Any]:
    """A chat completion; ``content`` that is no text becomes JSON."""
    text = content if isinstance(content, str) or content is None else json.dumps(content)
    if usage == "honest":
        usage = {
            "prompt_tokens": len(prompt) // 4 + 8,
            "completion_tokens": len(text or "") // 4 + 1,
        }
    message = {"role": "assistant", "content": text, **choice}
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": ended}],
        "usage": usage,
    }


def vector_of(text: str) -> list[float]:
    """Four numbers that tell one text from another, in any direction."""
    return [float(byte) - 127 for byte in hashlib.sha256(text.encode()).digest()[:4]]


def embeddings(texts: list[str], usage: Any = None) -> dict[str, Any]:
    """What ``/embeddings`` answers, the last one first."""
    data = [
        {"object": "embedding", "index": i, "embedding": vector_of(text)}
        for i, text in enumerate(texts)
    ]
    return {
        "object": "list",
        "data": data[::-1],
        "usage": usage or {"prompt_tokens": sum(len(text) // 4 + 1 for text in texts)},
    }


Behaviour = Callable[[str, int], Answer | None]
"""(input, how often it was seen before) → what to answer; None for a good answer."""


def length_label(text: str) -> dict[str, Any]:
    """The good answer to a prompt."""
    return {"label": "long" if len(text) > 30 else "short", "score": len(text) / 100}


class StandIn:
    """Listens on a free port of this machine, in a thread of its own, within ``with``.

    Args:
        delay_s: before every answer.
        behave: what to answer instead of a good answer.
    """

    def __init__(self, delay_s: float = 0.0, behave: Behaviour = lambda text, seen: None) -> None:
        self.delay_s, self.behave = delay_s, behave
        self.seen, self.answered = Counter[str](), Counter[str]()
        """Inputs by how often they came, and by how often a whole answer was written."""
        self.requests = list[dict[str, Any]]()
        self.headers = list[dict[str, str]]()
        self.in_flight = self.most_in_flight = self.connections = 0

    @property
    def url(self) -> str:
        """The API's base."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> StandIn:
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _ended(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            try:
                while await self._exchange(reader, writer):
                    pass
            finally:
                writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append(body)
        self.headers.append(headers)
        inputs = [body["messages"][-1]["content"]] if "messages" in body else list(body["input"])
        given = [self.behave(text, self.seen[text]) for text in inputs]
        self.seen.update(inputs)
        answer = next((one for one in given if one is not None), None)
        if answer is None:
            good = (
                chat(length_label(inputs[0]), prompt=inputs[0])
                if "messages" in body
                else embeddings(inputs)
            )
            answer = Answer(good)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s + answer.delay_s)
        finally:
            self.in_flight -= 1
        made = answer.body(inputs) if callable(answer.body) else answer.body
        text = made if isinstance(made, (str, bytes)) else json.dumps(made)
        content = text if isinstance(text, bytes) else text.encode()
        length = {
            "length": [f"Content-Length: {len(content)}"],
            "chunks": ["Transfer-Encoding: chunked"],
            "end": [],
        }[answer.framed]
        lines = [
            f"HTTP/1.1 {answer.status} Stand-in",
            *length,
            *(f"{name}: {value}" for name, value in answer.headers.items()),
        ]
        if answer.framed == "chunks":
            content = b"%x\r\n%b\r\n3\r\n%b\r\n0\r\n\r\n" % (
                len(content) - 3,
                content[:-3],
                content[-3:],
            )
        writer.write("\r\n".join([*lines, "", ""]).encode() + content[: answer.cut])
        await writer.drain()
        if answer.cut is not None:
            return False
        self.answered.update(inputs)
        return answer.framed != "end"


@contextmanager
def _until_stdin_ends() -> Any:
    yield
    sys.stdin.read()


if __name__ == "__main__":
    with StandIn(delay_s=float(sys.argv[1])) as stand_in, _until_stdin_ends():
        print(stand_in.port, flush=True)
