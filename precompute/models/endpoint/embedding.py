"""Embedding endpoint: text → embedding, by an endpoint's ``/embeddings``, several texts a
request."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.model import Features, Verbatim, digest
from precompute.models.endpoint.endpoint import BadAnswer, Tokens, credible, estimated
from precompute.models.endpoint.endpoint_model import EndpointModel, text_of
from precompute.models.endpoint.session import Input
from precompute.store.errors import ModelError

CODE_VERSION = 1
"""Raised with each change of the values that this code computes; part of the fingerprint."""

PATH = "/embeddings"

TEXT_TOKENS = 16
"""Tokens that an endpoint may put around each text."""


class EmbeddingEndpoint(EndpointModel):
    """Embeds one text column.

    Args:
        url, model, params, api_key_env, limits, budget, price, cache, cache_days: as of
            :class:`EndpointModel`.
        column: the source's text column.
        output: name of the feature.
        prompt: put before every text.
        query_prompt: put before a text that is searched by.
        texts_per_request: how many at most.

    Raises:
        ConfigError: an argument is out of bounds.
    """

    def __init__(
        self,
        url: str,
        model: str,
        column: str = "text",
        output: str = "embedding",
        prompt: str = "",
        query_prompt: str = "",
        texts_per_request: int = 16,
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
        try:
            vectors = await self.endpoint.request(
                PATH, body, most, lambda envelope: self._read(envelope, len(inputs), size_bytes)
            )
        except BadAnswer as exc:
            if len(inputs) == 1:
                return {inputs[0].key: exc}
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
    ) -> tuple[Tokens, list[bytes] | BadAnswer]:
        try:
            data, usage = envelope["data"], envelope.get("usage")
            found = {int(one["index"]): one["embedding"] for one in data}
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"it is no list of embeddings: {json.dumps(envelope)[:200]}") from exc
        claimed = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        tokens = credible(claimed, size_bytes, size_bytes + 16 * TEXT_TOKENS * count)
        if tokens is None:
            self.spending.estimates += 1
        used = Tokens(estimated(size_bytes) + TEXT_TOKENS * count if tokens is None else tokens)
        if len(data) != count or set(found) != set(range(count)):
            return used, BadAnswer(
                f"{len(data)} embeddings of the numbers {sorted(found)[:5]}… for {count} texts", b""
            )
        try:
            return used, [_vector(found[number]).tobytes() for number in range(count)]
        except (ValueError, TypeError) as exc:
            return used, BadAnswer(f"the embedding is no list of numbers: {str(exc)[:200]}", b"")

    def features(self, contents: Sequence[bytes]) -> Features:
        return {self._output: [np.frombuffer(content, "<f4") for content in contents]}


def _vector(value: Any) -> npt.NDArray[np.float32]:
    """The vector of numbers, or of base64 of float32 in little-endian order.

    Raises:
        ValueError, TypeError: it is neither, empty, or not finite.
    """
    made = (
        np.frombuffer(base64.b64decode(value, validate=True), "<f4")
        if isinstance(value, str)
        else np.asarray(value)
    )
    if made.ndim != 1 or not len(made) or made.dtype.kind not in "fiu":
        raise ValueError(f"{str(value)[:100]}")
    with np.errstate(over="ignore"):
        made = made.astype("<f4")
    if not np.isfinite(made).all():
        raise ValueError("it has numbers that are not finite")
    return made
