"""Endpoint model: a model whose rows an OpenAI-compatible service answers, in the stages that the
engine overlaps."""

from __future__ import annotations

import copy
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.model import Features, Judge, Prepared, absolute_path
from precompute.plugins.endpoints.endpoint import (
    BadAnswer,
    Endpoint,
    Limits,
    Spending,
    base_url,
    key_from,
)
from precompute.plugins.endpoints.session import ONCE_MORE, Asking, Input, Session
from precompute.store.errors import ConfigError, ModelError


def text_of(value: Any) -> str:
    """A value as text: bytes hold UTF-8."""
    return value.decode() if isinstance(value, bytes) else str(value)


# ---- the model


CACHE = "var/answers"
"""Folder of the cache in the project's, where a view names no other."""
MOST_DAYS = 36_500
"""A hundred years; SQLite has no time that is much later."""
LAUNCHED = 16
"""Batches under way at once, each a quarter of what is in flight: one slow answer leaves the others
three times as many to go on with."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The :class:`precompute.model.ComputeDevice` of a model that computes on another machine:
    nothing is taken here."""

    name: str = "endpoint"
    depth: int = LAUNCHED

    def free_bytes(self) -> int:
        return 2**40

    def peak_bytes(self, reset: bool = False) -> int:
        return 0

    def release(self) -> None:
        """There is nothing to give back."""

    def threads(self) -> int:
        return 1

    def compute_with(self, threads: int) -> None:
        """It computes elsewhere."""

    def peak_flops(self) -> float:
        """Unknown."""
        return 0.0


class EndpointModel(ABC):
    """A :class:`precompute.model.StagedModel` whose rows are answered by an endpoint.

    Args:
        url: the API's base, as ``http://localhost:8000/v1``.
        model: its name there.
        params: fields of the request's body beside ours, or in their place; null leaves one out.
        api_key_env: the environment variable that holds the API key; by default none is sent.
        limits: as of :class:`Limits`: how much at once, how often, how long.
        budget, price: as of :class:`precompute.plugins.endpoints.endpoint.Spending`, for one run.
        cache: folder of the answers; by default :data:`CACHE` in the project's folder.
        cache_days: how long an answer is stored.
        group: inputs of one request.

    Raises:
        ConfigError: one of them is out of bounds, or the key is not in the environment.
    """

    cost_unit = "rows"
    in_run_process = True
    """Its rates and its budget are counted in one process."""
    once_more = ONCE_MORE
    differ = False
    """Whether different inputs have different answers, as a rule."""

    def __init__(
        self,
        url: str,
        model: str,
        params: Mapping[str, Any] | None,
        api_key_env: str | None,
        limits: Mapping[str, Any] | None,
        budget: Mapping[str, Any] | None,
        price: Mapping[str, Any] | None,
        cache: str | None,
        cache_days: float,
        group: int,
    ) -> None:
        self.url = base_url(url)
        if not isinstance(model, str) or not model:
            raise ConfigError(f"model is {model!r}: give its name at the endpoint")
        if params is not None and not isinstance(params, Mapping):
            raise ConfigError(
                f"params is {params!r:.200}: give fields of the request, as in params:"
                " {temperature: 0}"
            )
        if not isinstance(cache_days, int | float) or not 0 < cache_days <= MOST_DAYS:
            raise ConfigError(
                f"cache_days is {cache_days!r}: give a number above 0, up to {MOST_DAYS}"
            )
        if not isinstance(group, int) or isinstance(group, bool) or not 1 <= group <= 2048:
            raise ConfigError(f"texts_per_request is {group!r}: give a whole number from 1 to 2048")
        bounds, self.spending = Limits.of(limits), Spending(budget, price)
        self.endpoint = Endpoint(self.url, key_from(api_key_env), bounds, self.spending)
        folder = absolute_path(CACHE if cache is None else cache).absolute()
        self._session = Session(self.endpoint, folder, cache_days, group, self.differ)
        self._asking = Asking()
        # a batch is small, so that a bad row of it is soon found
        self.start_cost = self.max_cost = group * -(-bounds.in_flight // 4)
        self.device = Elsewhere()

    @property
    def answered(self) -> int:
        """Requests that the endpoint has answered so far, or refused for what was in them."""
        return self.endpoint.counts.heard

    def judged_by(self, judge: Judge, *, in_run: bool = False, again: bool = False) -> Self:
        """The same model for one view: connections, rates, budget and cache are shared."""

        def accepts(contents: Sequence[bytes]) -> list[str | None]:
            # all at once, where all fit
            if not contents or self._against(judge, contents) is None:
                return [None] * len(contents)
            return [self._against(judge, [content]) for content in contents]

        bill = hashlib.sha256(f"spent\n{self.recipe}".encode()).digest()
        other = copy.copy(self)
        other._asking = Asking(accepts, time.time() if again else 0.0, bill if in_run else None)
        return other

    def _against(self, judge: Judge, contents: Sequence[bytes]) -> str | None:
        try:
            return judge(self.features(contents), len(contents))
        except ValueError as exc:
            # what an earlier version took for an answer
            return str(exc)

    @property
    @abstractmethod
    def recipe(self) -> str:
        """All that is sent with every input, but for what is secret."""

    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The source's columns that are sent."""

    @abstractmethod
    def texts(self, batch: pa.RecordBatch) -> list[str]:
        """What each row sends."""

    @abstractmethod
    async def answers(
        self, inputs: Sequence[Input]
    ) -> Mapping[bytes, bytes | BadAnswer | ModelError]:
        """What the endpoint answers to the inputs of one request, by key: as it is cached, where it
        is an answer; whether the view accepts it is not known."""

    @abstractmethod
    def features(self, contents: Sequence[bytes]) -> Features:
        """Features of rows with these answers."""

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        """Rows with a null in one of the columns, with bytes that are no UTF-8, or with white space
        alone in all of them."""
        columns, bad, blank = self.reads(), dict[int, str](), [True] * batch.num_rows
        for name in columns:
            for row, value in enumerate(batch.column(name).to_pylist()):
                if value is None or value != value:
                    bad.setdefault(row, f"{name} is {'null' if value is None else 'NaN'}")
                    continue
                try:
                    blank[row] &= not text_of(value).strip()
                except UnicodeDecodeError as exc:
                    bad.setdefault(row, f"{name} is not UTF-8: {exc.reason} at byte {exc.start}")
        empty = f"{' and '.join(columns)} {'is' if len(columns) == 1 else 'are'} empty"
        return {row: empty for row, is_blank in enumerate(blank) if is_blank} | bad

    def figures(self) -> dict[str, Any]:
        """What was sent, came back and was spent, for the run's report."""
        counts, spending = self.endpoint.counts, self.spending
        return {
            "requests": counts.requests,
            "answers": counts.answers,
            "from_cache": counts.cached,
            "retries": counts.retries,
            "refused": counts.refused,
            "input_tokens": spending.used.input,
            "output_tokens": spending.used.output,
            "estimated_usage": spending.estimates,
            "money": round(spending.money(spending.used), 6),
        }

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """What each row sends, and its hash."""
        begun = hashlib.sha256(f"{self.recipe}\n".encode())
        inputs, bad = [], dict[int, str]()
        for row, text in enumerate(self.texts(batch)):
            key = begun.copy()
            try:
                key.update(text.encode())
            except UnicodeEncodeError as exc:
                bad[row] = (
                    f"what is sent has half a surrogate pair at character {exc.start}, which is no"
                    " text and cannot be sent"
                )
            inputs.append(Input(key.digest(), text))
        return Prepared(np.ones(batch.num_rows, np.int64), inputs, bad)

    def inputs(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> list[Input]:
        return [prepared.payload[row] for row in rows.tolist()]

    def launch(self, inputs: list[Input]) -> Future[list[bytes | BaseException]]:
        """Send what is not answered yet.

        Raises:
            ModelError: the answers' cache cannot be opened.
        """
        return self._session.contents(inputs, self.answers, self._asking)

    def land(self, launched: Future[list[bytes | BaseException]]) -> Features:
        """Features of a batch.

        Raises:
            ModelError: endpoint or budget have no answers for any more rows; what is in flight was
                waited for, and cached.
            BadAnswer: of one of the rows, the first.
        """
        outcomes = launched.result()
        for outcome in outcomes:
            if isinstance(outcome, ModelError):
                self._session.stop(outcome)
                raise ModelError(f"{outcome}{self._cached()}") from outcome
        for outcome in outcomes:
            if not isinstance(outcome, bytes):
                raise outcome
        return self.features([outcome for outcome in outcomes if isinstance(outcome, bytes)])

    def _cached(self) -> str:
        answers = self._session.committed
        return (
            f". {answers:,} answers of this run are cached: the next one pays for none of them"
            " again"
            if answers
            else ""
        )

    def compute(self, batch: pa.RecordBatch) -> Features:
        return self.land(self.launch(self.inputs(self.prepare(batch), np.arange(batch.num_rows))))

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        return 0.0
