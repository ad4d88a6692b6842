"""Chat endpoint: a prompt with a row's columns in it → labels, scores or a summary, by chat
completions, whose answers are held against a JSON Schema."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.model import Features, Verbatim, ViewTemplate, digest
from precompute.plugins.endpoints.chat_message import CUT, answer_in, refusal_of, text_of_message
from precompute.plugins.endpoints.endpoint import BadAnswer, Tokens, credible, estimated
from precompute.plugins.endpoints.endpoint_model import EndpointModel, text_of
from precompute.plugins.endpoints.session import ONCE_MORE, Input
from precompute.store.errors import ConfigError


class AnswerSchema:
    """The schema of an object, whose properties are features.

    Args:
        schema: with ``type: object`` and ``properties``; ``$ref`` within itself alone.

    Raises:
        ConfigError: it is no such schema, or the extra is not installed.
    """

    def __init__(self, schema: Any) -> None:
        try:
            import jsonschema_rs
        except ImportError as exc:
            raise ConfigError(
                'schema needs jsonschema-rs: pip install "precompute-store[endpoint]"'
            ) from exc
        if (
            not isinstance(schema, Mapping)
            or schema.get("type") != "object"
            or not isinstance(schema.get("properties"), Mapping)
        ):
            raise ConfigError(
                f"schema is {schema!r:.200}: give a JSON Schema of an object, as in schema: {{type:"
                " object, properties: {label: {enum: [a, b]}}, required: [label]}"
            )
        self.properties = tuple(map(str, schema["properties"]))
        try:
            self._validator = jsonschema_rs.validator_for(
                json.loads(json.dumps(schema)), offline=True
            )
        except (ValueError, TypeError) as exc:
            raise ConfigError(
                f"schema is no JSON Schema: {str(exc).partition(chr(10))[0]:.300}"
            ) from exc

    def wrong(self, value: Any) -> str | None:
        """What does not fit of a value, in few words; None where it fits."""
        error = next(self._validator.iter_errors(value), None)
        if error is None:
            return None
        where = ".".join(map(str, error.instance_path))
        return f"{where + ': ' if where else ''}{error.message:.200}"


# ---- the model


CODE_VERSION = 2
"""Raised with each change of the values that this code computes; part of the fingerprint."""
SENT_VERSION = 1
"""Raised with each change of what this code sends, which answers are cached by: they are stored as
they came, and what is read out of them may change without a request."""

TEMPLATE_TOKENS = 64
"""Tokens that an endpoint may put around a prompt's texts."""

PATH = "/chat/completions"
ANSWER_TRIES = f"{ONCE_MORE}, or at once limits: {{answer_tries: 2}}"
"""What helps against an answer that came of a bad hour."""


def _prompt(columns: Sequence[str]) -> dict[str, str]:
    return {"prompt": "\n".join(f"{name}: {{{name}}}" for name in columns)}


class ChatEndpoint(EndpointModel):
    """Sends one prompt for each row.

    With a ``schema`` the answer is JSON, checked against it, and each of its properties is a
    feature that a view may name; without one the whole answer is the feature ``output``.

    Args:
        url, model, params, api_key_env, limits, budget, price, cache, cache_days: as of
            :class:`EndpointModel`.
        prompt: with columns as ``{title}``; ``{{`` is a brace.
        system: the system message before it.
        schema: of the answer.
        output: name of the feature without one.
        max_tokens: of an answer; one that is cut there is none.

    Raises:
        ConfigError: an argument is out of bounds.
    """

    template = ViewTemplate(
        Path(__file__).with_name("templates") / "chat_endpoint.yaml",
        "label",
        "in the prompt",
        _prompt,
        (
            "url and model in the view are examples: put in those of your service, and its key in"
            " the environment, before `precompute validate`",
        ),
    )

    def __init__(
        self,
        url: str,
        model: str,
        prompt: str,
        system: str = "",
        schema: Mapping[str, Any] | None = None,
        output: str = "text",
        max_tokens: int = 256,
        params: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        limits: Mapping[str, Any] | None = None,
        budget: Mapping[str, Any] | None = None,
        price: Mapping[str, Any] | None = None,
        cache: str | None = None,
        cache_days: float = 90,
    ) -> None:
        super().__init__(
            url, model, params, api_key_env, limits, budget, price, cache, cache_days, group=1
        )
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens!r}: give a whole number from 1")
        self._parts = _parts(prompt)
        self._columns = tuple(
            dict.fromkeys(column for _, column in self._parts if column is not None)
        )
        self._schema = None if schema is None else AnswerSchema(schema)
        self._output, self._prompt, self._system = output, prompt, system
        body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        if schema is not None:
            # OpenAI takes no open schema as a strict one
            closed = schema.get("additionalProperties") is False and set(
                schema.get("required", ())
            ) == set(schema["properties"])
            wanted = {"name": "answer", "schema": schema, "strict": closed}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        self._body = {
            name: value for name, value in (body | dict(params or {})).items() if value is not None
        }
        most = self._body.get("max_completion_tokens", self._body.get("max_tokens"))
        self._most_output = most if isinstance(most, int) else None
        # tools, documents and, for some, the schema are part of the prompt, and billed
        self._own_tokens = TEMPLATE_TOKENS + len(json.dumps(self._body, default=str).encode())
        sent = [SENT_VERSION, self.url, PATH, self._system, self._body, schema]
        self._recipe = json.dumps(sent, sort_keys=True, default=str)

    @property
    def recipe(self) -> str:
        return self._recipe

    def fingerprint(self) -> str:
        return digest(
            code=CODE_VERSION,
            recipe=Verbatim(self._recipe),
            prompt=Verbatim(self._prompt),
            output=self._output,
        )

    @property
    def gives(self) -> tuple[str, ...]:
        return (self._output,) if self._schema is None else tuple(self._schema.properties)

    def reads(self) -> tuple[str, ...]:
        return self._columns

    def texts(self, batch: pa.RecordBatch) -> list[str]:
        columns = {
            name: [text_of(value) for value in batch.column(name).to_pylist()]
            for name in self._columns
        }
        return [
            "".join(
                text if column is None else text + columns[column][row]
                for text, column in self._parts
            )
            for row in range(batch.num_rows)
        ]

    async def answers(self, inputs: Sequence[Input]) -> Mapping[bytes, bytes | BadAnswer]:
        """The answer to the one input."""
        (one,) = inputs
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {**self._body, "messages": [*system, {"role": "user", "content": one.text}]}
        prompt_bytes = len(one.text.encode(errors="replace")) + len(
            self._system.encode(errors="replace")
        )
        most = Tokens(prompt_bytes + self._own_tokens, self._most_output or 0)
        try:
            content = await self.endpoint.request(
                PATH,
                body,
                most,
                lambda envelope: self._read(envelope, prompt_bytes),
                one.unanswered,
            )
        except BadAnswer as exc:
            return {one.key: exc}
        return {one.key: content}

    def _read(self, envelope: Any, prompt_bytes: int) -> tuple[Tokens, bytes | BadAnswer]:
        try:
            choice = (envelope["choices"] or [{"message": {}}])[0]
            message, ended = choice["message"], str(choice.get("finish_reason")).lower()
            message.get("content")
            usage = envelope.get("usage")
        except (KeyError, IndexError, TypeError, AttributeError) as exc:
            raise ValueError(f"it is no chat completion: {json.dumps(envelope)[:200]}") from exc
        wrong, text = None, ""
        try:
            text = text_of_message(message, in_json=self._schema is not None)
        except ValueError as exc:
            wrong = f"{exc} ({ANSWER_TRIES})"
        content = text.encode(errors="replace")
        used = self._used(usage if isinstance(usage, dict) else {}, prompt_bytes, len(content))
        if ended in CUT:
            return used, BadAnswer(
                f"the answer was cut after {used.output} tokens: raise max_tokens", content
            )
        if (refusal := refusal_of(message, ended)) is not None:
            return used, BadAnswer(f"the model refuses: {refusal[:200]}", content)
        if wrong is not None:
            return used, BadAnswer(wrong, content)
        try:
            text.encode()
            self._value(content)
        except UnicodeEncodeError as exc:
            half = (
                f"the answer has half a surrogate pair at character {exc.start}, which is no text"
            )
            return used, BadAnswer(f"{half} ({ANSWER_TRIES})", content)
        except ValueError as exc:
            return used, BadAnswer(f"{exc} ({ANSWER_TRIES})", content)
        return used, content

    def _used(self, usage: Mapping[str, Any], prompt_bytes: int, answer_bytes: int) -> Tokens:
        """What the endpoint says was used, where that can be true, else what is likely."""
        prompt = credible(
            usage.get("prompt_tokens"), prompt_bytes, prompt_bytes + 16 * self._own_tokens
        )
        answer = credible(usage.get("completion_tokens"), answer_bytes, self._most_output)
        if prompt is None or answer is None:
            self.spending.estimates += 1
        return Tokens(
            estimated(prompt_bytes) + TEMPLATE_TOKENS if prompt is None else prompt,
            estimated(answer_bytes) if answer is None else answer,
        )

    def _value(self, content: bytes) -> Any:
        text = answer_in(content.decode())
        if not text:
            raise ValueError("the answer is empty behind its thoughts")
        if self._schema is None:
            return text
        # models that know no response_format put it into a block of Markdown
        fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text, parse_constant=_refuse)
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"the answer is no JSON: {exc}: {text[:100]!r}") from exc
        if (wrong := self._schema.wrong(value)) is not None:
            raise ValueError(f"the answer does not fit the schema: {wrong}")
        return value

    def features(self, contents: Sequence[bytes]) -> Features:
        values = [self._value(content) for content in contents]
        if self._schema is None:
            return {self._output: values}
        return {name: [value.get(name) for value in values] for name in self._schema.properties}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _parts(prompt: Any) -> list[tuple[str, str | None]]:
    """A prompt as (text, the column behind it).

    Raises:
        ConfigError: it names no column, or more than a name stands between braces.
    """
    example = "as in prompt: 'Which genre is {title}?'; a brace itself is {{ or }}"
    if not isinstance(prompt, str):
        raise ConfigError(f"prompt is {prompt!r:.200}: give a text with columns, {example}")
    try:
        parsed = list(string.Formatter().parse(prompt))
    except ValueError as exc:
        raise ConfigError(f"prompt {prompt[:200]!r}: {exc}: write a column {example}") from exc
    for _, column, form, conversion in parsed:
        if column is not None and (not column or form or conversion):
            raise ConfigError(
                f"prompt {prompt[:200]!r}: write the name of a column and nothing else between"
                f" braces, {example}"
            )
    if all(column is None for _, column, _, _ in parsed):
        raise ConfigError(
            f"prompt {prompt[:200]!r} names no column, so that all rows would be alike: name one,"
            f" {example}"
        )
    return [(text, column) for text, column, _, _ in parsed]
