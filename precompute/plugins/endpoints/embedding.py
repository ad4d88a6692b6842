"""Embedding endpoint: text → embedding, by an endpoint's ``/embeddings``, several texts a
request."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.model import Features, Verbatim, digest
from precompute.plugins.endpoints.endpoint import BadAnswer, Tokens, credible, estimated
from precompute.plugins.endpoints.endpoint_model import EndpointModel, text_of
from precompute.plugins.endpoints.session import Input
from precompute.store.errors import ConfigError, ModelError

CODE_VERSION = 1
"""Raised with each change of the values that this code computes; part of the fingerprint."""

PATH = "/embeddings"

TEXT_TOKENS = 16
"""Tokens that an endpoint may put around each text."""


class EmbeddingEndpoint(EndpointModel):
    """Embeds one text column. An embedding of zeros alone is none.

    Args:
        url, model, params, api_key_env, limits, budget, price, cache, cache_days: as of
            :class:`EndpointModel`.
        column: the source's text column.
        output: name of the feature.
        prompt: put before every text.
        query_prompt: put before a text that is searched by.
        texts_per_request: how many at most.
        served_as: further names by which the endpoint may call the very same model.

    Raises:
        ConfigError: an argument is out of bounds.
    """

    differ = True

    def __init__(
        self,
        url: str,
        model: str,
        column: str = "text",
        output: str = "embedding",
        prompt: str = "",
        query_prompt: str = "",
        texts_per_request: int = 16,
        served_as: Sequence[str] = (),
        params: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        limits: Mapping[str, Any] | None = None,
        budget: Mapping[str, Any] | None = None,
        price: Mapping[str, Any] | None = None,
        cache: str | None = None,
        cache_days: float = 90,
    ) -> None:
        super().__init__(
            url,
            model,
            params,
            api_key_env,
            limits,
            budget,
            price,
            cache,
            cache_days,
            texts_per_request,
        )
        self._column = column
        self._output = output
        self._prompt = prompt
        self._query_prompt = query_prompt
        self._prefix = prompt
        if isinstance(served_as, str) or not all(isinstance(name, str) for name in served_as):
            raise ConfigError(f"served_as is {served_as!r:.200}: give a list of names")
        self._served_as = frozenset(served_as)
        self._served = dict[bytes, str]()
        body = {"model": model, "encoding_format": "float", **(params or {})}
        self._body = {name: value for name, value in body.items() if value is not None}
        self._recipe = json.dumps(
            [CODE_VERSION, self.url, PATH, self._body], sort_keys=True, default=str
        )

    def for_queries(self) -> EmbeddingEndpoint:
        """The same endpoint, with the query's prompt; connections, rates, budget and cache are
        shared."""
        if self._prefix == self._query_prompt:
            return self
        other = copy.copy(self)
        other._prefix = self._query_prompt
        return other

    @property
    def recipe(self) -> str:
        return self._recipe

    def fingerprint(self) -> str:
        prompts = Verbatim({"document": self._prompt, "query": self._query_prompt})
        return digest(
            code=CODE_VERSION,
            recipe=Verbatim(self._recipe),
            prompts=prompts,
            column=self._column,
            output=self._output,
        )

    @property
    def gives(self) -> tuple[str]:
        return (self._output,)

    def reads(self) -> tuple[str]:
        return (self._column,)

    def texts(self, batch: pa.RecordBatch) -> list[str]:
        return [self._prefix + text_of(value) for value in batch.column(self._column).to_pylist()]

    async def answers(
        self, inputs: Sequence[Input]
    ) -> Mapping[bytes, bytes | BadAnswer | ModelError]:
        """The answers to some texts, in one request; where it has no answer for all, the texts are
        sent again by halves, until the bad one stands alone."""
        body = {**self._body, "input": [one.text for one in inputs]}
        size_bytes = sum(len(one.text.encode(errors="replace")) for one in inputs)
        most = Tokens(size_bytes + TEXT_TOKENS * len(inputs))
        unanswered = all(one.unanswered for one in inputs)
        try:
            vectors = await self.endpoint.request(
                PATH,
                body,
                most,
                lambda envelope: self._read(envelope, len(inputs), size_bytes),
                unanswered,
            )
        except BadAnswer as exc:
            # what was answered was paid for, and would be the same
            if len(inputs) == 1 or exc.content is not None:
                return dict.fromkeys([one.key for one in inputs], exc)
            middle = len(inputs) // 2
            first = await self.answers(inputs[:middle])
            try:
                return {**first, **await self.answers(inputs[middle:])}
            except ModelError as exc:
                # the first half is paid
                return {**first, **dict.fromkeys([one.key for one in inputs[middle:]], exc)}
        return {one.key: vector for one, vector in zip(inputs, vectors, strict=True)}

    def _read(
        self, envelope: Any, count: int, size_bytes: int
    ) -> tuple[Tokens, list[bytes | BadAnswer] | BadAnswer]:
        try:
            data, usage = envelope["data"], envelope.get("usage")
            items = [(one.get("index"), one["embedding"]) for one in data]
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"it is no list of embeddings: {json.dumps(envelope)[:200]}") from exc
        claimed = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        tokens = credible(claimed, size_bytes, size_bytes + 16 * TEXT_TOKENS * count)
        if tokens is None:
            self.spending.estimates += 1
        used = Tokens(estimated(size_bytes) + TEXT_TOKENS * count if tokens is None else tokens)
        self._check_name(envelope.get("model"))
        try:
            found = _by_number(items, count)
        except ValueError as exc:
            return used, BadAnswer(f"{exc} ({ONE_BY_ONE})", b"")
        return used, [
            _vector(found[number])
            if number in found
            else BadAnswer(
                f"{len(found)} embeddings for {count} texts, and none for this ({ONE_BY_ONE})", b""
            )
            for number in range(count)
        ]

    def _check_name(self, name: Any) -> None:
        """Raises:
        ModelError: the endpoint answers by another model than before, in this run or another.
        """
        if not isinstance(name, str) or not name or name in self._served_as:
            return
        key = hashlib.sha256(f"model\n{self._recipe}".encode()).digest()
        # the same for copies of this
        if key not in self._served:
            noted = self._session.noted(key)
            self._served[key] = name if noted is None else noted.decode()
            self._session.note(key, name.encode(errors="replace"))
        if name != (before := self._served[key]):
            raise ModelError(
                f"{self.url} calls its model {name!r:.100} now, and {before!r:.100} when it was"
                " asked first: vectors of two models cannot be compared, so nothing more is asked."
                " Have it serve one, and name that, with its version, in model: all rows are"
                " computed by it then. Where both names are of the very same model: served_as:"
                f" [{before}, {name}]"
            )

    def features(self, contents: Sequence[bytes]) -> Features:
        return {self._output: [np.frombuffer(content, "<f4") for content in contents]}


ONE_BY_ONE = "texts_per_request: 1 may help, if the service answers in an order of its own"
"""What helps where it cannot be known which text an embedding is of."""


def _by_number(items: Sequence[tuple[Any, Any]], count: int) -> dict[int, Any]:
    """The embeddings by the numbers of their texts, of which some may have none.

    Args:
        items: ``index`` and embedding of each, as they came.
        count: how many texts were sent.

    Raises:
        ValueError: it cannot be known which text each is of.
    """
    if all(index is None for index, _ in items):
        # in the order that they were sent in, as services do that number nothing
        if len(items) != count:
            raise ValueError(f"{len(items)} embeddings without an index for {count} texts")
        return {number: vector for number, (_, vector) in enumerate(items)}
    found = dict[int, Any]()
    for index, vector in items:
        number = int(index) if isinstance(index, str) and index.isdecimal() else index
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"an embedding has the index {index!r:.40}, which is no number")
        if not 0 <= number < count:
            raise ValueError(f"an embedding has the index {number} of {count} texts, from 0")
        if number in found:
            raise ValueError(
                f"{len(items)} embeddings for {count} texts, two of the index {number}"
            )
        found[number] = vector
    if len(found) < count and max(found, default=-1) < len(found):
        # numbered anew, maybe, after one of the texts was left out
        raise ValueError(f"{len(found)} embeddings for {count} texts, numbered without a gap")
    return found


def _vector(value: Any) -> bytes | BadAnswer:
    """The vector of numbers, or of base64 of float32 in little-endian order, as it is cached; or
    what is wrong with it: it is neither, empty, not finite, or zeros alone."""
    try:
        made = (
            np.frombuffer(base64.b64decode(value, validate=True), "<f4")
            if isinstance(value, str)
            else np.asarray(value)
        )
        if made.ndim != 1 or not len(made) or made.dtype.kind not in "fiu":
            raise ValueError(f"{str(value)[:100]}")
        with np.errstate(over="ignore"):
            vector = made.astype("<f4")
    except (ValueError, TypeError) as exc:
        return BadAnswer(f"the embedding is no list of numbers: {str(exc)[:200]}", b"")
    if not np.isfinite(vector).all():
        return BadAnswer("the embedding has numbers that are not finite", b"")
    if not vector.any():
        return BadAnswer("the embedding is all zeros", b"")
    if made.dtype.kind in "iu" and (vector.astype(np.float64) != made).any():
        return BadAnswer("the embedding has whole numbers that float32 does not hold", b"")
    return vector.tobytes()
