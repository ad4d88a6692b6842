"""A recommendation service over precomputed rows: it keeps its own deadline, says how fresh its
answer is, and always has one.

    uvicorn service:app --port 8000
    curl 'http://127.0.0.1:8000/recommendations/ada?n=3&recent=8'

What it asks, in this order, within one budget of time: the user's own list, ranked ahead of time (a
user who signed up since is ranked now, by the same model); what is near the film watched last; the
films that most people like, which are in its memory. The last needs no server, so it is never
without an answer.
"""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import numpy as np

from precompute import AsyncClient, OnlineStoreError, RequestError
from precompute.store.client.tables import arrays

DATA = Path(__file__).parent / "project"
BUDGET_S = 0.1
"""For all that one answer asks."""
MODEL_MS = 40
"""Of it, for a user's list that has to be computed now."""
OLDEST_S = 3 * 86400
"""An older list is worth less than one made of what was watched last."""


@dataclass(frozen=True)
class Answer:
    """``films`` by id, the best first; ``source`` where they come from: ``personal``, ``similar``
    or ``popular``; of the first, ``age_s`` and ``status``."""

    films: list[int]
    source: str
    age_s: float | None = None
    status: str | None = None
    why: str | None = None
    """Why it is not personal."""


class Recommender:
    """Asks the lookup service; what may go wrong there is an answer of another kind here.

    Args:
        client: of the lookup service.
        data: the folder of ``films.csv`` and ``users.csv``.
    """

    def __init__(self, client: AsyncClient, data: Path = DATA) -> None:
        self.client = client
        with (data / "films.csv").open(encoding="utf-8") as file:
            self.titles = {int(row["film_id"]): row["title"] for row in csv.DictReader(file)}
        with (data / "users.csv").open(encoding="utf-8") as file:
            liked = Counter(
                int(film) for row in csv.DictReader(file) for film in row["liked"].split()
            )
        self.popular = [film for film, _ in liked.most_common()]

    async def recommend(self, user: str, n: int, recent: int | None = None) -> Answer:
        """``n`` films for a user, who watched ``recent`` just now. Never raises for what the lookup
        service does."""
        deadline = time.monotonic() + BUDGET_S
        try:
            answer = await self._personal(user, recent, deadline)
        except (OnlineStoreError, RequestError) as exc:
            # not there, too old, too slow, too busy, or gone: all the same to who waits for films
            why = exc.code if isinstance(exc, RequestError) else type(exc).__name__
            answer = await self._without_user(recent, deadline, why)
        return Answer(answer.films[:n], answer.source, answer.age_s, answer.status, answer.why)

    async def _personal(self, user: str, recent: int | None, deadline: float) -> Answer:
        row = await self.client.row(
            "user_favourites",
            user,
            features=["films"],
            deadline_ms=MODEL_MS,
            max_age_s=OLDEST_S,
            timeout_s=left_s(deadline),
        )
        assert row.features is not None
        films = list(row.features["films"])
        if recent is not None:
            films = await self._nearest_first(films, recent, deadline)
        return Answer(films, "personal", row.age_s, row.status)

    async def _nearest_first(self, films: list[int], recent: int, deadline: float) -> list[int]:
        """The same films, the nearest to the one watched last before the others; in their own order
        where there is no time for it."""
        try:
            table = await self.client.get(
                "film_vector", [recent, *films], fallback=False, timeout_s=left_s(deadline)
            )
        except (OnlineStoreError, RequestError):
            return films
        vectors = arrays(table)["vector"]
        near = np.nan_to_num(vectors[1:] @ vectors[0], nan=-1.0)
        return [films[i] for i in np.argsort(-near, kind="stable")]

    async def _without_user(self, recent: int | None, deadline: float, why: str) -> Answer:
        if recent is not None and left_s(deadline) > 0:
            try:
                found = await self.client.search(
                    "film_vector", key=recent, k=20, timeout_s=left_s(deadline)
                )
                return Answer([int(row.key) for row in found.rows], "similar", why=why)
            except (OnlineStoreError, RequestError):
                pass
        return Answer(self.popular, "popular", why=why)


def left_s(deadline: float) -> float:
    """Seconds until a time of ``time.monotonic``, at least none."""
    return max(0.0, deadline - time.monotonic())


class App:
    """``GET /recommendations/{user}?n=10&recent=8``, as ASGI."""

    def __init__(self, url: str | None = None, data: Path = DATA) -> None:
        self._url, self._data = url, data

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        status, body = await self._answer(scope)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def _live(self, receive: Any, send: Any) -> None:
        """From start to end of the server: one client, whose connections all requests share."""
        await receive()
        url = self._url or os.environ.get("PRECOMPUTE_URL", "http://127.0.0.1:8080")
        # a token, where the service wants one, comes from the environment
        async with AsyncClient(url, BUDGET_S, token=os.environ.get("PRECOMPUTE_TOKEN")) as client:
            self.recommender = Recommender(client, self._data)
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: MutableMapping[str, Any]) -> tuple[int, dict[str, Any]]:
        before, _, user = scope["raw_path"].decode("latin-1").rpartition("/")
        query = {
            name: values[0]
            for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()
        }
        n, recent = query.get("n", "10"), query.get("recent")
        if scope["method"] != "GET" or before != "/recommendations" or not user:
            return 404, {"detail": "GET /recommendations/{user}?n=10&recent=8"}
        if not (re.fullmatch("[1-9][0-9]?|100", n) and re.fullmatch("[0-9]{1,18}", recent or "0")):
            return 400, {"detail": "n is 1 to 100, recent a film's id"}
        answer = await self.recommender.recommend(
            unquote(user), int(n), None if recent is None else int(recent)
        )
        films = [
            {"film_id": film, "title": self.recommender.titles.get(film)} for film in answer.films
        ]
        told = {
            "source": answer.source,
            "status": answer.status,
            "age_s": answer.age_s,
            "why": answer.why,
        }
        return 200, {"user": unquote(user), "films": films, **told}


app = App()
