"""Endpoints: rows answered by a service: what it answers is checked, cached, counted and paid once,
and what is wrong with it is one bad row."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import gc
import gzip
import json
import re
import socket
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import uvloop

from precompute.engine.rows import Outcome
from precompute.engine.runner import Runner, compute
from precompute.plugins.endpoints import endpoint as endpoint_module
from precompute.plugins.endpoints.chat import ChatEndpoint
from precompute.plugins.endpoints.embedding import EmbeddingEndpoint
from precompute.plugins.endpoints.session import NAME, AnswerCache
from precompute.plugins.endpoints.tests.stand_in import (
    Answer,
    Behaviour,
    StandIn,
    chat,
    embeddings,
    length_label,
    vector_of,
)
from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import Feature, FeatureView

SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["long", "short"]}, "score": {"type": "number"}},
    "required": ["label"],
}
LABELS = FeatureView(
    "labels",
    ("id",),
    (Feature("label", "string"), Feature("score", "float64")),
    ttl_s=86400,
    stale_for_s=0,
)
TEXTS = FeatureView("texts", ("id",), (Feature("text", "string"),), ttl_s=86400, stale_for_s=0)
VECTORS = FeatureView(
    "vectors", ("id",), (Feature("embedding", "float32", 4),), ttl_s=86400, stale_for_s=0
)
KEY = "sk-very-secret-0123"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Nobody waits for long, and what was open is closed."""
    monkeypatch.setattr(endpoint_module, "FIRST_PAUSE_S", 0.01)
    yield
    gc.collect()


@pytest.fixture
def labels(tmp_path: Path) -> Callable[..., ChatEndpoint]:
    """Makes a model of labels that sends to a stand-in."""

    def make(stand_in: StandIn, **args: Any) -> ChatEndpoint:
        args = {
            "model": "small",
            "prompt": "Label: {text}",
            "schema": SCHEMA,
            "cache": str(tmp_path / "answers"),
        } | args
        return ChatEndpoint(stand_in.url, **args)

    return make


def again(model: Any, view: FeatureView, batch: pa.RecordBatch) -> Outcome:
    """Compute as a run that tries what was rejected once more."""
    return Runner(model, view, search=False, again=True).compute(batch)


def rows(*texts: Any) -> pa.RecordBatch:
    return pa.record_batch({"text": pa.array(texts, pa.string())})


def computed(outcome: Outcome) -> dict[int, dict[str, Any]]:
    return dict(zip(outcome.rows.tolist(), outcome.features.to_pylist(), strict=True))


def scripted(behave: dict[str, Any]) -> Behaviour:
    """Answers by the end of the text; a list is a turn for each time it comes."""

    def answer(text: str, seen: int) -> Answer | None:
        found = next((given for end, given in behave.items() if text.endswith(end)), None)
        if isinstance(found, list):
            found = found[seen] if seen < len(found) else None
        return found if found is None or isinstance(found, Answer) else Answer(found)

    return answer


WRONG: dict[str, tuple[Any, str]] = {
    "half": (chat('{"label": "lo'), "the answer is no JSON"),
    "other schema": (
        chat({"label": "medium", "score": 1}),
        'label: "medium" is not one of "long" or "short"',
    ),
    "no object": (chat([1, 2]), 'is not of type "object"'),
    "missing": (chat({"score": 1}), '"label" is a required property'),
    "not finite": (chat('{"label": "long", "score": NaN}'), "NaN is no number"),
    "deep": (chat("[" * 100_000), "the answer is no JSON"),
    "empty": (chat("  "), "the answer is empty"),
    "nothing": (chat(None), "the answer is empty"),
    "cut": (chat('{"label": "long"', ended="length"), "raise max_tokens"),
    "refused": (chat(None, refusal="I must not"), "the model refuses: I must not"),
    "filtered": (chat("x", ended="content_filter"), "the model refuses: content_filter"),
    "too long": (
        Answer({"error": {"message": "maximum context length is 512"}}, 400),
        "answered 400 (maximum context length is 512)",
    ),
    "echo": (
        Answer({"error": f"bad \x1b[31m{KEY} " + "x" * 1000}, 422),
        "answered 422 (bad  [31m*** xxx",
    ),
}
"""What is answered, and what its row's rejection says of it."""


def test_what_is_wrong_with_an_answer_is_one_bad_row(
    labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_KEY", KEY)
    with StandIn(
        behave=scripted({name: answer for name, (answer, _) in WRONG.items()})
    ) as stand_in:
        model = labels(stand_in, api_key_env="STAND_IN_KEY", limits={"in_flight": 12})
        texts = [text for name in WRONG for text in (name, f"{name}, then a good one")]
        outcome = compute(model, LABELS, rows(*texts, None, " \n"))
    good = {
        2 * i + 1: length_label(f"Label: {name}, then a good one") for i, name in enumerate(WRONG)
    }
    assert computed(outcome) == good
    rejected = {r.row: (r.stage, r.error) for r in outcome.rejections}
    assert sorted(rejected) == [*range(0, 2 * len(WRONG), 2), 2 * len(WRONG), 2 * len(WRONG) + 1]
    for i, (name, (_, reason)) in enumerate(WRONG.items()):
        stage, error = rejected[2 * i]
        assert stage == "model", name
        assert reason in error, name
        assert KEY not in error
        assert len(error) < 600
    assert rejected[2 * len(WRONG)] == ("input", "text is null")
    assert rejected[2 * len(WRONG) + 1] == ("input", "text is empty")
    # halves of a batch are looked through for the bad row, and nothing is sent for that
    assert set(stand_in.seen.values()) == {1}
    assert all(headers["authorization"] == f"Bearer {KEY}" for headers in stand_in.headers)


GOOD = {
    "in Markdown": chat('```json\n{"label": "long", "score": 1}\n```'),
    "in chunks": Answer(chat({"label": "long", "score": 1}), framed="chunks"),
    "until the end": Answer(chat({"label": "long", "score": 1}), framed="end"),
    "closed": Answer(chat({"label": "long", "score": 1}), headers={"Connection": "close"}),
    "once lost": [Answer("", cut=0), chat({"label": "long", "score": 1})],
    "a misfit": [chat("{"), chat({"label": "long", "score": 1})],
    "half a body": [
        Answer(chat({"label": "long", "score": 1}), cut=40),
        chat({"label": "long", "score": 1}),
    ],
    "half an envelope": [Answer('{"choices": [{"mess'), chat({"label": "long", "score": 1})],
    "no envelope": [Answer('{"hello": 1}'), Answer("[]"), chat({"label": "long", "score": 1})],
    "broken": [Answer("oops", 500), Answer("<html>", 502), chat({"label": "long", "score": 1})],
    "slow": [Answer("", delay_s=30), chat({"label": "long", "score": 1})],
    "busy": [
        Answer("", 429, {"Retry-After": "0.05"}),
        Answer("", 429),
        chat({"label": "long", "score": 1}),
    ],
    "until a time": [
        Answer("", 429, {"Retry-After": formatdate(0, usegmt=True)}),
        chat({"label": "long", "score": 1}),
    ],
    "until a time by another clock": [
        Answer("", 429, dict.fromkeys(("Date", "Retry-After"), formatdate(4e9, usegmt=True))),
        chat({"label": "long", "score": 1}),
    ],
    "loading": [Answer("", 503, {"retry-after": "0.01"})] * 7
    + [chat({"label": "long", "score": 1})],
}
"""What comes to a good answer, after a while."""


@pytest.mark.parametrize("loop", [asyncio, uvloop])
def test_what_may_pass_is_tried_again(
    labels: Any, monkeypatch: pytest.MonkeyPatch, loop: Any
) -> None:
    monkeypatch.setattr(
        "precompute.plugins.endpoints.session.asyncio.new_event_loop", loop.new_event_loop
    )
    with StandIn(behave=scripted(GOOD)) as stand_in:
        limits = {"timeout_s": 0.3, "answer_tries": 2}
        outcome = compute(labels(stand_in, limits=limits), LABELS, rows(*GOOD))
        assert outcome.rejections == []
        assert computed(outcome) == {i: {"label": "long", "score": 1} for i in range(len(GOOD))}
        assert {text.removeprefix("Label: "): seen for text, seen in stand_in.seen.items()} == {
            name: len(answers) if isinstance(answers, list) else 1 for name, answers in GOOD.items()
        }


USAGE = {"prompt_tokens": 20, "completion_tokens": 9}
GOOD_ONE = {"label": "long", "score": 1}
ONE = json.dumps(GOOD_ONE)


def message(content: Any = None, **fields: Any) -> Answer:
    """A good completion whose message has these fields."""
    choice = {"message": {"role": "assistant", "content": content, **fields}}
    return Answer({"choices": [{"index": 0, "finish_reason": "stop"} | choice], "usage": USAGE})


def error(paid: bool = False, **fields: Any) -> Answer:
    """An error in a 200; ``paid`` though it was."""
    return Answer(fields | ({"usage": USAGE} if paid else {}))


def choice(error: Any, **fields: Any) -> Answer:
    """An error in the choice of a 200."""
    found = {"index": 0, "error": error, "message": {"role": "assistant", "content": ""}}
    return Answer({"choices": [found | fields], "usage": USAGE})


def zipped(answer: Answer, coding: str, body: bytes | None = None) -> Answer:
    """As a proxy sends it."""
    plain = json.dumps(answer.body).encode()
    bare = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    made = {
        "gzip": gzip.compress(plain),
        "x-gzip": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "bare": bare.compress(plain) + bare.flush(),
        "deflate, gzip": gzip.compress(zlib.compress(plain)),
    }
    name = "deflate" if coding == "bare" else coding
    return Answer(made[coding] if body is None else body, headers={"Content-Encoding": name})


def call(arguments: Any, *more: Any) -> dict[str, Any]:
    functions = [{"name": "answer", "arguments": one} for one in (arguments, *more)]
    return {"tool_calls": [{"type": "function", "function": one} for one in functions]}


LATER = {"retry_after": 0.02}
FAIL = [
    # as OpenAI, OpenRouter, litellm
    error(error={"message": "Provider returned error", "code": 429, "metadata": LATER}),
    error(error={"message": "slow down", "code": "429"}),
    error(error={"message": "slow down", "type": "requests", "code": "rate_limit_exceeded"}),
    error(error={"code": 502, "message": "", "metadata": {"raw": "x", "provider_name": "Y"}}),
    error(error={"message": "The server had an error", "type": "server_error", "code": None}),
]
GOOD_MESSAGE = message(ONE)
KINDS: dict[str, tuple[list[Answer], Any, int]] = {
    # an error in a 200 that passes
    **{f"error {i}": ([one, GOOD_MESSAGE], GOOD_ONE, 1) for i, one in enumerate(FAIL)},
    "error in the choice": (
        [choice({"code": 429, "message": "busy"}), choice({"code": 502}), GOOD_MESSAGE],
        GOOD_ONE,
        3,
    ),
    "finished by an error": ([choice(None, finish_reason="error"), GOOD_MESSAGE], GOOD_ONE, 2),
    "paid error": ([error(paid=True, error={"code": 500}), GOOD_MESSAGE], GOOD_ONE, 2),
    "error in words": ([error(error="Model is overloaded"), GOOD_MESSAGE], GOOD_ONE, 1),
    "error of TGI": (
        [error(error="Model is overloaded", error_type="overloaded"), GOOD_MESSAGE],
        GOOD_ONE,
        1,
    ),
    "detail": ([error(detail="Too Many Requests"), GOOD_MESSAGE], GOOD_ONE, 1),
    "old vLLM": (
        [error(object="error", message="no", type="InternalServerError", code=500), GOOD_MESSAGE],
        GOOD_ONE,
        1,
    ),
    "FastChat": ([error(object="error", message="x", code=42903), GOOD_MESSAGE], GOOD_ONE, 1),
    "Cloudflare": (
        [
            error(success=False, result=None, errors=[{"code": 3040, "message": "Capacity"}]),
            GOOD_MESSAGE,
        ],
        GOOD_ONE,
        1,
    ),
    "Google": (
        [
            error(
                error={
                    "code": 429,
                    "status": "RESOURCE_EXHAUSTED",
                    "details": [{"@type": "RetryInfo", "retryDelay": "0.01s"}],
                }
            ),
            GOOD_MESSAGE,
        ],
        GOOD_ONE,
        1,
    ),
    "events": (
        [
            Answer(': ping\n\nevent: error\ndata: {"error": {"code": 503}}\n\ndata: [DONE]\n'),
            GOOD_MESSAGE,
        ],
        GOOD_ONE,
        1,
    ),
    "no error": ([Answer({**GOOD_MESSAGE.body, "error": None, "detail": ""})], GOOD_ONE, 1),
    # an error in a 200 that is the row's
    "refused in a 200": (
        [error(error={"code": 400, "message": "maximum context length is 512"})],
        "answered 200 with an error in it that counts as 400 (maximum context length is 512)",
        0,
    ),
    "too long by name": ([error(error={"code": "context_length_exceeded"})], "counts as 400", 0),
    "too long for FastChat": ([error(object="error", code=40303, message="x")], "as 400", 0),
    "a field": (
        [error(detail=[{"loc": ["body", "n"], "msg": "not an int", "type": "int"}])],
        "counts as 422 (body.n: not an int)",
        0,
    ),
    "flagged": (
        [error(error={"code": 403, "message": "flagged", "metadata": {"reasons": ["violence"]}})],
        "counts as 403 (flagged)",
        0,
    ),
    # thoughts
    "thoughts": ([message(f"<think>\nit is {{}}\n</think>\n\n{ONE}")], GOOD_ONE, 1),
    "thoughts up to a tag": ([message(f"It is long.\n</think>\n{ONE}")], GOOD_ONE, 1),
    "thoughts and a fence": ([message(f"<thinking>x</thinking>```json\n{ONE}\n```")], GOOD_ONE, 1),
    "channels": (
        [
            message(
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
                f" <|constrain|>json<|message|>{ONE}<|return|>"
            )
        ],
        GOOD_ONE,
        1,
    ),
    "thoughts without end": ([message("<think>\nso it goes on")], "raise max_tokens", 1),
    "thoughts alone": ([message("<think>x</think> \n")], "the answer is empty behind", 1),
    # other forms of a message
    "parts": (
        [
            message(
                [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": ONE[:9]},
                    {"type": "output_text", "text": ONE[9:]},
                ]
            )
        ],
        GOOD_ONE,
        1,
    ),
    "texts": ([message([ONE[:5], ONE[5:]])], GOOD_ONE, 1),
    "one part": ([message({"type": "text", "text": {"value": ONE}})], GOOD_ONE, 1),
    "an object": ([message(GOOD_ONE)], GOOD_ONE, 1),
    "a picture": ([message([{"type": "image_url"}])], "a part of type 'image_url', which", 1),
    "a part that refuses": ([message([{"type": "refusal", "refusal": "no"}])], "refuses: no", 1),
    "a number": ([message(3)], "content is 3, which is no text", 1),
    "reasoning": ([message(None, reasoning_content=ONE)], GOOD_ONE, 1),
    "reasoning alone": ([message(None, reasoning="It is long")], "thoughts alone", 1),
    "reasoning beside": ([message(ONE, reasoning_content='{"label": "short"}')], GOOD_ONE, 1),
    "a call": ([message(None, **call(ONE))], GOOD_ONE, 1),
    "a call of an object": ([message("", **call(GOOD_ONE))], GOOD_ONE, 1),
    "an old call": ([message(None, function_call={"arguments": ONE})], GOOD_ONE, 1),
    "two calls": ([message(None, **call(ONE, ONE))], "2 calls of tools", 1),
    "a call of something else": ([message(None, **call('{"x": 1}'))], "a required property", 1),
    "no choice": ([Answer({"choices": [], "usage": USAGE})], "the answer is empty", 1),
    "cut": ([Answer(chat(ONE, USAGE, ended="MAX_TOKENS"))], "raise max_tokens", 1),
    "filtered": ([Answer(chat("", USAGE, ended="SAFETY"))], "the model refuses: safety", 1),
    "half a surrogate": ([message(ONE + "\ud83d")], "has half a surrogate pair", 1),
    "half a surrogate in JSON": ([message('{"label": "\\ud83d"}')], "surrogates not allowed", 1),
    # on the way
    **{f"by {c}": ([zipped(GOOD_MESSAGE, c)], GOOD_ONE, 1) for c in ("gzip", "x-gzip", "deflate")},
    **{f"by {c}": ([zipped(GOOD_MESSAGE, c)], GOOD_ONE, 1) for c in ("bare", "deflate, gzip")},
    "BOM": ([Answer(b"\xef\xbb\xbf" + json.dumps(GOOD_MESSAGE.body).encode())], GOOD_ONE, 1),
    "UTF-16": ([Answer(json.dumps(GOOD_MESSAGE.body).encode("utf-16"))], GOOD_ONE, 1),
    "a zipped refusal": (
        [dataclasses.replace(zipped(error(error="too long"), "gzip"), status=413)],
        "answered 413 (too long)",
        0,
    ),
    "a page": ([Answer("<!DOCTYPE html><title>Sign in</title>"), GOOD_MESSAGE], GOOD_ONE, 1),
    # the service comes up
    "loading": ([Answer({"error": {"message": "Loading model", "code": 503}}, 503)] * 5, None, 1),
    "loading, Ollama": (
        [Answer({"error": "llm server loading model"}, 500)] * 5,
        None,
        1,
    ),
    "loading, in a 200": (
        [error(error="Model x is currently loading", estimated_time=0.01)] * 5,
        None,
        1,
    ),
}
"""What is answered to a row, one after the other and then as it should be; its value, or what is
said of it; and how many of these answers were paid."""


@pytest.mark.parametrize("name", KINDS)
def test_a_service_that_misbehaves_is_understood_or_costs_one_row(labels: Any, name: str) -> None:
    """It is paid once for each answer, and nothing is sent again that need not be."""
    answers, wanted, paid = KINDS[name]
    lasts = wanted is None
    script = [*answers, GOOD_MESSAGE] if lasts else answers
    rejected = isinstance(wanted, str)

    def behave(text: str, seen: int) -> Answer | None:
        if not text.endswith("odd"):
            # while it loads nobody has an answer
            return message({"label": "short"}) if not lasts or seen == 1 else script[0]
        return script[seen] if seen < len(script) else GOOD_MESSAGE

    def others(model: ChatEndpoint) -> int:
        return model.figures()["input_tokens"] - 20 * 2

    with StandIn(behave=behave) as stand_in:
        batch = rows("a", "odd", "b") if not lasts else rows("odd")
        good = {i: {"label": "short", "score": None} for i in (0, 2)} if not lasts else {}
        at, first = (0, labels(stand_in)) if lasts else (1, labels(stand_in))
        outcome = compute(first, LABELS, batch)
        assert computed(outcome) == good | ({} if rejected else {at: wanted or GOOD_ONE})
        assert [r.row for r in outcome.rejections] == ([at] if rejected else [])
        for rejection in outcome.rejections:
            assert wanted in rejection.error
        assert stand_in.seen["Label: odd"] == len(script)
        assert first.figures()["input_tokens"] == 20 * (paid + len(good))
        assert first.figures()["output_tokens"] <= 12 * (paid + len(good)) + 8
        # nobody pays twice, and what an endpoint refused to compute costs nothing
        second = labels(stand_in)
        if rejected and paid:
            later = compute(second, LABELS, batch).rejections
            assert [r.row for r in later] == [r.row for r in outcome.rejections]
            for before, now in zip(outcome.rejections, later, strict=True):
                what, hint, _ = before.error.partition(" (run --retry-rejected sends it once more")
                assert now.error.startswith(what)
                assert hint
                assert "run --retry-rejected sends it once more" in now.error
            assert second.figures()["requests"] == 0
        third = labels(stand_in)
        assert computed(again(third, LABELS, batch)) == good | {
            at: wanted if not rejected and wanted else GOOD_ONE
        }
        assert third.figures()["requests"] == (1 if rejected else 0)


ENDS: dict[str, tuple[Answer, str]] = {
    "no key in a 200": (
        error(error={"code": 401, "message": "No auth credentials found"}),
        "counts as 401 (No auth credentials found): it wants another key",
    ),
    "no money in a 200": (error(error={"code": "insufficient_quota"}), "url, model and account"),
    "no such model in a 200": (error(object="error", code=40301, message="x"), "counts as 404"),
    "Brotli": (
        zipped(GOOD_MESSAGE, "br", b"\x0b\x02"),
        "it has Content-Encoding br, which is not read here (gzip and deflate are)",
    ),
    "always loading": (
        Answer({"error": {"message": "Loading model"}}, 503),
        "beyond patience_s (0.2)",
    ),
    "always busy": (error(error={"code": 429, "message": "busy"}), "beyond patience_s (0.2)"),
    "always an error": (error(error={"message": "what"}), "as 502 (what), the last of 2 tries"),
    "always a page": (Answer("<html><title>Down</title>"), "it is a web page (Down)"),
    "damaged gzip": (zipped(GOOD_MESSAGE, "gzip", b"\x1f\x8b..."), "damaged gzip"),
    "cut gzip": (
        zipped(GOOD_MESSAGE, "gzip", gzip.compress(b"x" * 999)[:-9]),
        "its gzip is cut",
    ),
    "a stream": (
        Answer('data: {"choices": [{"delta": {"content": "x"}}]}\n\ndata: [DONE]\n\n'),
        "it is a stream of events, which was not asked for: params: {stream: false}",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_service_that_has_no_answers_is_said_to_have_none(labels: Any, name: str) -> None:
    answer, said = ENDS[name]
    with StandIn(behave=lambda text, seen: answer) as stand_in:
        model = labels(stand_in, limits={"tries": 2, "patience_s": 0.2})
        with pytest.raises(ModelError) as raised:
            compute(model, LABELS, rows(*map(str, range(16))))
    assert said in str(raised.value)
    assert stand_in.url in str(raised.value)
    is_paid = name in ("Brotli", "damaged gzip", "cut gzip", "a stream")
    assert (model.figures()["input_tokens"] > 0) == is_paid


THOUGHTS = {
    "<think>a</think>b": "b",
    "\n<THINK>\na\n</THINK>\n\nb\n": "b",
    "<think></think><think>a</think>b <think>c</think>": "b <think>c</think>",
    "<think>a <think>b</think> c</think>d": "d",
    "<reasoning>a</reasoning>b": "b",
    "<seed:think>a</seed:think>b": "b",
    "[THINK]a[/THINK]b": "b",
    "◁think▷a◁/think▷b": "b",
    "a\n</think>\n\nb": "b",
    "a.</think>b": "b",
    "</think>b": "b",
    "analysisWe need it.assistantfinalb": "b",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b": "b",
    "<|channel|>final<|message|>b<|end|>": "b",
    # these begin with no thoughts
    "It writes <think>a</think> before b": "It writes <think>a</think> before b",
    "The tag `</think>` ends it": "The tag `</think>` ends it",
    "write </think> there": "write </think> there",
    "an analysis of <|channel|>": "an analysis of <|channel|>",
    "<thinkpad> is no tag": "<thinkpad> is no tag",
    "analysis of b": "analysis of b",
    "<think>a": None,
    "<|channel|>analysis<|message|>a": None,
    "<|start|>assistant<|channel|>commentary to=f<|message|>{}<|call|>": None,
}
"""An answer, and what of it is published."""


def test_thoughts_that_an_answer_begins_with_are_no_part_of_it(labels: Any) -> None:
    answers = list(THOUGHTS)
    with StandIn(behave=lambda text, seen: message(answers[int(text)])) as stand_in:
        model = labels(stand_in, schema=None, prompt="{text}")
        outcome = compute(model, TEXTS, rows(*map(str, range(len(answers)))))
    assert {answers[i]: row["text"] for i, row in computed(outcome).items()} == {
        answer: text for answer, text in THOUGHTS.items() if text is not None
    }
    assert all("the answer is thoughts alone" in r.error for r in outcome.rejections)


def test_a_call_is_no_text(labels: Any) -> None:
    with StandIn(behave=lambda text, seen: message(None, **call("{}"))) as stand_in:
        outcome = compute(labels(stand_in, schema=None), TEXTS, rows("a"))
    assert "a call of the tool 'answer' and no text" in outcome.rejections[0].error


def test_what_is_no_text_is_not_sent(labels: Any, tmp_path: Path) -> None:
    """Half a surrogate pair, as JSON may bring it into a prompt."""
    with StandIn() as stand_in:
        outcome = compute(labels(stand_in, prompt="\ud83d {text}"), LABELS, rows("a"))
        assert outcome.rejections[0].stage == "input"
        assert "half a surrogate pair at character 0" in outcome.rejections[0].error
        assert stand_in.requests == []


def test_rows_that_never_have_an_answer_fail_no_run(labels: Any) -> None:
    """However many there are, and though nothing else is sent, as by a second run."""
    texts = [f"{i} {'never' if i % 3 else 'good'}" for i in range(36)]
    never = {i for i in range(36) if i % 3}
    with StandIn(
        behave=lambda text, seen: Answer("", 500) if text.endswith("never") else None
    ) as stand_in:
        limits = {"tries": 2, "in_flight": 36}
        for requests in (36 + len(never), 2 * len(never), 2 * len(never)):
            model = labels(stand_in, limits=limits)
            outcome = compute(model, LABELS, rows(*texts))
            assert {r.row for r in outcome.rejections} == never
            assert "no answer in 2 tries: answered 500" in outcome.rejections[0].error
            assert model.figures()["requests"] == requests
        # others that have none are the endpoint's fault
        with pytest.raises(ModelError, match="the last of 2 tries"):
            compute(
                labels(stand_in, limits=limits),
                LABELS,
                rows(*[f"{i} never" for i in range(99, 119)]),
            )


def test_a_row_that_is_refused_while_others_are_answered_is_a_bad_row(labels: Any) -> None:
    """By a proxy that says 503 where its service fails at the row, or 429 where it is too large for
    a minute."""
    for answer in (Answer("", 503), error(error={"code": 429})):
        with StandIn(
            delay_s=0.002,
            behave=lambda text, seen: answer if text == "Label: odd" else None,  # noqa: B023
        ) as stand_in:
            model = labels(stand_in, limits={"in_flight": 2, "patience_s": 0.3, "tries": 2})
            texts = [f"{answer.status} {i}" for i in range(100)]
            outcome = compute(model, LABELS, rows("odd", *texts))
        assert [r.row for r in outcome.rejections] == [0]
        assert len(outcome.rows) == 100


FATAL = {
    "another key": (
        Answer({"error": {"message": f"Incorrect API key provided: {KEY}"}}, 401),
        "answered 401 (Incorrect API key provided: ***)",
    ),
    "no such model": (
        Answer({"error": {"message": "The model `small` does not exist"}}, 404),
        "does not exist",
    ),
    "moved": (Answer("", 308, {"Location": "http://elsewhere/"}), "answered 308"),
    "no money": (
        Answer({"error": {"code": "insufficient_quota", "message": "You exceeded"}}, 429),
        "You exceeded",
    ),
    "for hours": (
        Answer("", 429, {"Retry-After": "7200"}),
        "it is to wait for 7200 s more, beyond patience_s (600)",
    ),
    "broken": (Answer("", 500), "answered 500, the last of 5 tries"),
}


@pytest.mark.parametrize("name", FATAL)
def test_what_will_not_pass_ends_the_run(
    labels: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    answer, said = FATAL[name]
    monkeypatch.setenv("STAND_IN_KEY", KEY)
    with StandIn(behave=lambda text, seen: answer) as stand_in:
        with pytest.raises(ModelError) as raised:
            compute(
                labels(stand_in, api_key_env="STAND_IN_KEY"),
                LABELS,
                rows(*(f"{i}" for i in range(40))),
            )
        assert said in str(raised.value)
        assert stand_in.url in str(raised.value)
        assert KEY not in str(raised.value)


def test_requests_that_are_given_up_here_and_there_are_bad_rows(labels: Any) -> None:
    """However many: what is answered in between says that the endpoint is there."""
    with StandIn(
        behave=lambda text, seen: Answer("", 500) if text[-1] in "369" else None
    ) as stand_in:
        model = labels(stand_in, limits={"tries": 1, "in_flight": 1})
        outcome = compute(model, LABELS, rows(*map(str, range(60))))
    assert {r.row for r in outcome.rejections} == {i for i in range(60) if i % 10 in (3, 6, 9)}


def test_an_endpoint_that_is_not_there_ends_the_run(labels: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        stand_in = StandIn()
        stand_in.port = taken.getsockname()[1]
        with pytest.raises(
            ModelError,
            match=r"no answer from http://127.0.0.1:.*Connect call failed.*the last of 2 tries$",
        ):
            compute(labels(stand_in, limits={"tries": 2}), LABELS, rows("a"))


def test_a_session_may_end_in_the_thread_that_writes_its_cache(
    labels: Callable[..., ChatEndpoint],
) -> None:
    """Where garbage is collected just then."""
    with StandIn() as stand_in:
        held = [labels(stand_in)]
        assert not compute(held[0], LABELS, rows("a")).rejections

        def let_go() -> None:
            held.clear()
            gc.collect()

        writer = held[0]._session._writer
        writer.submit(let_go).result()
        for thread in threading.enumerate():
            if thread.name == "endpoint closes":
                thread.join()
    with pytest.raises(RuntimeError, match="after shutdown"):
        writer.submit(print)


def test_each_input_is_sent_once_and_no_more_at_once_than_allowed(labels: Any) -> None:
    texts = [f"number {i % 500}" for i in range(1500)]
    with StandIn(delay_s=0.005) as stand_in:
        model = labels(stand_in, limits={"in_flight": 8})
        windows, done = [rows(*texts[:700]), rows(*texts[700:])], dict[int, dict[str, Any]]()
        for _, piece in Runner(model, LABELS).stream(windows):
            done |= {
                700 * piece.window + row: features for row, features in computed(piece).items()
            }
        assert done == dict(enumerate(length_label(f"Label: {text}") for text in texts))
        assert set(stand_in.seen.values()) == {1}
        assert stand_in.most_in_flight == 8
        # another process, or another day
        again = labels(stand_in)
        assert computed(compute(again, LABELS, rows(*texts[:500]))) == computed(
            compute(model, LABELS, rows(*texts[:500]))
        )
        assert (
            len(stand_in.requests),
            again.figures()["from_cache"],
            again.figures()["requests"],
        ) == (500, 500, 0)


def test_a_connection_that_was_idle_for_long_is_not_used_again(
    labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandIn() as stand_in:
        model = labels(stand_in)
        for text, idle_s, connections in (("a", 30.0, 1), ("b", 30.0, 1), ("c", 0.0, 2)):
            monkeypatch.setattr("precompute.plugins.endpoints.transport.IDLE_S", idle_s)
            assert computed(compute(model, LABELS, rows(text)))
            assert stand_in.connections == connections


def test_what_is_damaged_is_sent_for_again_and_what_misfits_may_be(
    labels: Any, tmp_path: Path
) -> None:
    half = {"half": [chat("{"), chat("{"), chat({"label": "long", "score": 7})]}
    with StandIn(behave=scripted(half)) as stand_in:
        outcomes = [
            compute(labels(stand_in, limits={"answer_tries": tries}), LABELS, rows("a", "half"))
            for tries in (1, 1, 2, 2)
        ]
        assert [len(outcome.rejections) for outcome in outcomes] == [1, 1, 1, 1]
        assert stand_in.seen == {"Label: a": 1, "Label: half": 2}
        gc.collect()
        with sqlite3.connect(tmp_path / "answers" / NAME) as file:
            file.execute(
                "UPDATE answers SET answer = CAST(replace(answer, 'short', 'long') AS BLOB) WHERE wrong IS NULL"
            )
        file.close()
        outcome = compute(labels(stand_in, limits={"answer_tries": 3}), LABELS, rows("a", "half"))
        assert computed(outcome) == {0: length_label("Label: a"), 1: {"label": "long", "score": 7}}
        assert stand_in.seen == {"Label: a": 2, "Label: half": 3}


@pytest.mark.parametrize("what", ["no folder", "no database"])
def test_nothing_is_sent_where_no_answer_can_be_cached(
    labels: Any, tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "answers"
    if what == "no folder":
        folder.write_text("")
    else:
        folder.mkdir()
        (folder / NAME).write_text(
            "nothing that SQLite knows, and long enough to be looked at" * 100
        )
    with StandIn() as stand_in:
        with pytest.raises(ModelError, match="cannot be opened"):
            compute(labels(stand_in), LABELS, rows("a"))
        assert stand_in.requests == []


USAGES: list[tuple[Any, bool]] = [
    ({"prompt_tokens": 12, "completion_tokens": 9}, True),
    (None, False),
    ("many", False),
    ({"prompt_tokens": 0, "completion_tokens": 0}, False),
    ({"prompt_tokens": -5, "completion_tokens": 9}, False),
    ({"prompt_tokens": "12", "completion_tokens": True}, False),
    ({"prompt_tokens": 10**12, "completion_tokens": 9}, False),
    ({"prompt_tokens": 12, "completion_tokens": 10**9}, False),
]
"""What an endpoint says of its tokens, and whether it can be true."""


@pytest.mark.parametrize(("usage", "credible"), USAGES)
def test_tokens_are_counted_whatever_the_endpoint_says(
    labels: Any, usage: Any, credible: bool
) -> None:
    with StandIn(
        behave=lambda text, seen: Answer(chat(length_label(text), usage=usage))
    ) as stand_in:
        model = labels(stand_in, price={"input": 2, "output": 10})
        assert len(computed(compute(model, LABELS, rows("something")))) == 1
    figures = model.figures()
    assert figures["estimated_usage"] == (0 if credible else 1)
    # "Label: something" has 16 bytes and its answer 34
    assert 12 <= figures["input_tokens"] <= 80
    assert 9 <= figures["output_tokens"] <= 12
    assert figures["money"] == pytest.approx(
        (2 * figures["input_tokens"] + 10 * figures["output_tokens"]) / 1e6, abs=1e-6
    )


BUDGETS = [
    ({"tokens": 2000}, None, r"budget of 2,000 tokens is spent: 1,\d\d\d are used"),
    ({"money": 0.01}, {"input": 10.0}, r"budget of 0.01 \(money\) is spent: 0.00\d+ are used"),
]


def attempt(model: ChatEndpoint, batch: pa.RecordBatch) -> Outcome | ModelError:
    try:
        return compute(model, LABELS, batch)
    except ModelError as exc:
        return exc


@pytest.mark.parametrize(("budget", "price", "said"), BUDGETS)
def test_a_budget_that_is_spent_ends_the_run_and_the_next_one_goes_on(
    labels: Any, budget: Any, price: Any, said: str
) -> None:
    batch = rows(*(f"number {i}" for i in range(200)))
    with StandIn(delay_s=0.002) as stand_in:
        runs = 0
        while True:
            model, runs = labels(stand_in, budget=budget, price=price, max_tokens=50), runs + 1
            outcome, figures = attempt(model, batch), model.figures()
            assert figures["input_tokens"] + figures["output_tokens"] <= budget.get("tokens", 10**9)
            assert figures["money"] <= budget.get("money", 0)
            if isinstance(outcome, Outcome):
                break
            assert re.search(said, str(outcome))
            assert f"{figures['answers']} answers of this run are cached" in str(outcome)
        assert runs > 2
        assert len(computed(outcome)) == 200
        assert set(stand_in.seen.values()) == {1}


def test_a_budget_counts_all_that_is_sent(labels: Any) -> None:
    """Tools, too, which an honest endpoint bills; what it refused costs nothing."""
    tools = [{"type": "function", "function": {"name": "look", "description": "x" * 3_000}}]
    billed = chat(length_label(""), usage={"prompt_tokens": 900, "completion_tokens": 9})
    with StandIn(
        behave=lambda text, seen: Answer(
            *(("", 429) if seen == 0 and text[-1] in "05" else (billed,))
        )
    ) as stand_in:
        model = labels(
            stand_in,
            budget={"tokens": 20_000},
            max_tokens=50,
            params={"tools": tools},
            limits={"in_flight": 1},
        )
        assert isinstance(attempt(model, rows(*map(str, range(40)))), ModelError)
        figures = model.figures()
        assert 900 < figures["input_tokens"] == 900 * figures["answers"] <= 20_000
        assert figures["refused"] > 1
        assert figures["estimated_usage"] == 0


def test_an_answer_expires_as_the_view_said_that_paid_it(
    labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandIn() as stand_in:
        compute(labels(stand_in, cache_days=365), LABELS, rows("long"))
        compute(labels(stand_in, cache_days=30), LABELS, rows("short"))
        day = time.time() + 40 * 86400
        monkeypatch.setattr("precompute.plugins.endpoints.session.time.time", lambda: day)
        for days in (30, 365):
            compute(labels(stand_in, cache_days=days), LABELS, rows("long", "short"))
        assert stand_in.seen == {"Label: long": 1, "Label: short": 2}


def test_a_clock_that_is_years_ahead_costs_nothing_once_it_is_right(
    labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandIn() as stand_in:
        compute(labels(stand_in), LABELS, rows("a"))
        with monkeypatch.context() as ahead:
            ahead.setattr("precompute.plugins.endpoints.session.time.time", lambda: 4e9)
            # the second is opened with one that has not expired
            for text in ("b", "c"):
                compute(labels(stand_in), LABELS, rows(text))
        compute(labels(stand_in), LABELS, rows("a", "b", "c"))
        assert stand_in.seen == {"Label: a": 1, "Label: b": 1, "Label: c": 1}


def test_a_bad_hour_of_an_endpoint_is_over_in_an_hour(
    labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered with nothing is sent once more then, and not before."""
    with StandIn(behave=scripted({"a": [chat("")]})) as stand_in:
        outcomes = [compute(labels(stand_in), LABELS, rows("a")) for _ in range(2)]
        assert [outcome.rejections[0].error for outcome in outcomes] == [
            "BadAnswer: the answer is empty (run --retry-rejected sends it once more, or at once limits: {answer_tries: 2})"
        ] * 2
        assert stand_in.seen == {"Label: a": 1}
        later = time.time() + 3700
        monkeypatch.setattr("precompute.plugins.endpoints.session.time.time", lambda: later)
        assert computed(compute(labels(stand_in), LABELS, rows("a"))) == {
            0: length_label("Label: a")
        }


def test_a_half_that_was_answered_is_cached_though_the_other_ends_the_run(tmp_path: Path) -> None:
    def behave(text: str, seen: int) -> Answer | None:
        # 400 for all 16 texts, an answer for the first half, then no money
        return {
            "0": (Answer({"error": "no"}, 400), None)[min(seen, 1)],
            "8": Answer({"error": "pay"}, (400, 402)[min(seen, 1)]),
        }.get(text)

    batch = rows(*map(str, range(16)))
    with StandIn(behave=behave) as stand_in:
        model = EmbeddingEndpoint(stand_in.url, "small", cache=str(tmp_path))
        with pytest.raises(ModelError, match="8 answers of this run are cached"):
            compute(model, VECTORS, batch)
        again = EmbeddingEndpoint(stand_in.url, "small", cache=str(tmp_path))
        with pytest.raises(ModelError):
            compute(again, VECTORS, batch)
        assert again.figures()["from_cache"] == 8


def test_a_summary_is_the_whole_answer(labels: Any) -> None:
    with StandIn(behave=lambda text, seen: Answer(chat(f" About {text}\n"))) as stand_in:
        model = labels(
            stand_in,
            schema=None,
            system="Be brief.",
            params={"temperature": None, "seed": 1, "max_tokens": 99},
        )
        assert computed(compute(model, TEXTS, rows("dogs", "größer 猫"))) == {
            0: {"text": "About Label: dogs"},
            1: {"text": "About Label: größer 猫"},
        }
    assert stand_in.requests[0] == {
        "model": "small",
        "max_tokens": 99,
        "seed": 1,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Label: dogs"},
        ],
    }


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        (SCHEMA, False),
        (SCHEMA | {"additionalProperties": False}, False),
        (SCHEMA | {"required": ["score", "label"]}, False),
        (SCHEMA | {"additionalProperties": False, "required": ["score", "label"]}, True),
    ],
)
def test_a_schema_is_sent_and_strict_where_it_is_closed(
    labels: Any, schema: dict[str, Any], strict: bool
) -> None:
    with StandIn() as stand_in:
        assert compute(labels(stand_in, schema=schema), LABELS, rows("a")).done == 1
    wanted = {"name": "answer", "schema": schema, "strict": strict}
    assert stand_in.requests[0]["response_format"] == {"type": "json_schema", "json_schema": wanted}


def test_a_prompt_has_columns_of_any_type_and_braces(labels: Any) -> None:
    batch = pa.record_batch(
        {
            "n": [1, None, 3],
            "when": pa.array([0, 1, 2], pa.date32()),
            "raw": [b"caf\xc3\xa9", b"x", b"\xff"],
        }
    )
    with StandIn() as stand_in:
        outcome = compute(labels(stand_in, prompt="{{{n}}} of {when}: {raw}"), LABELS, batch)
        assert list(stand_in.seen) == ["{1} of 1970-01-01: café"]
        assert [r.error for r in outcome.rejections] == [
            "n is null",
            "raw is not UTF-8: invalid start byte at byte 0",
        ]


def test_a_rate_spreads_requests_over_the_minute() -> None:
    rate = endpoint_module.Rate(6)
    assert [round(rate.wait_s(1)) for _ in range(4)] == [0, 9, 19, 29]
    assert round(rate.wait_s(0.5)) == 39
    assert round(rate.wait_s(1)) == 44
    assert endpoint_module.Rate(None).wait_s(10**9) == 0


def embedder(stand_in: StandIn, folder: Path, **args: Any) -> EmbeddingEndpoint:
    return EmbeddingEndpoint(stand_in.url, "small", cache=str(folder), **args)


def test_embeddings_are_those_of_their_texts_and_a_bad_text_is_one_bad_row(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(37)] + ["too long", "text 3"]
    with StandIn(behave=scripted({"too long": Answer("too long", 413)})) as stand_in:
        model = embedder(stand_in, tmp_path)
        outcome = compute(model, VECTORS, rows(*texts))
        assert computed(outcome) == {
            i: {"embedding": vector_of(text)} for i, text in enumerate(texts) if text != "too long"
        }
        assert [(r.row, r.error) for r in outcome.rejections] == [
            (
                37,
                "BadAnswer: the endpoint answered 413 (too long) (run --retry-rejected sends it"
                " once more)",
            )
        ]
        assert [len(body["input"]) for body in stand_in.requests[:2]] == [16, 16]
        queries = embedder(
            stand_in, tmp_path, prompt="passage: ", query_prompt="query: "
        ).for_queries()
        assert computed(compute(queries, VECTORS, rows("cats"))) == {
            0: {"embedding": vector_of("query: cats")}
        }
        assert queries.for_queries() is queries


@dataclass(frozen=True)
class Odd:
    """How a service answers some texts, ``bad`` among them: each item of its list is made of the
    text's number and vector, and the list of them is ``changed``."""

    item: Callable[[int, list[float]], Any] = lambda i, vector: {"index": i, "embedding": vector}
    changed: Callable[[list[Any]], list[Any]] = lambda items: items
    lost: int | None = None
    """Rows without a value: the bad one alone, or its request's; None for none."""
    said: str = ""


def _of_bad(embedding: Any) -> Callable[[int, list[float]], Any]:
    """The seventh text, the bad one, has this embedding."""
    return lambda i, vector: {"index": i, "embedding": embedding if i == 6 else vector}


def _numbered(number: Callable[[int], Any]) -> Callable[[int, list[float]], Any]:
    return lambda i, vector: {"index": number(i), "embedding": vector}


NO_LIST = "the embedding is no list of numbers"
ODD = {
    "no index": Odd(lambda i, vector: {"embedding": vector}),
    "index null": Odd(_numbered(lambda i: None)),
    "index in texts": Odd(_numbered(str), lambda items: items[::-1]),
    "out of order": Odd(changed=lambda items: items[3:] + items[:3]),
    "whole numbers": Odd(lambda i, vector: {"index": i, "embedding": list(map(int, vector))}),
    "in base64": Odd(
        lambda i, v: {"index": i, "embedding": base64.b64encode(struct.pack("<4f", *v)).decode()}
    ),
    "one missing": Odd(changed=lambda items: items[:6] + items[7:], lost=1, said="none for this"),
    "the last missing": Odd(changed=lambda items: items[:-1], lost=10, said="without a gap"),
    "numbered anew": Odd(
        changed=lambda items: [it | {"index": i} for i, it in enumerate(items[:6] + items[7:])],
        lost=10,
        said="9 embeddings for 10 texts, numbered without a gap",
    ),
    "from 1": Odd(_numbered(lambda i: i + 1), lost=10, said="the index 10 of 10 texts, from 0"),
    "negative": Odd(_numbered(lambda i: i - 1), lost=10, said="the index -1 of 10 texts"),
    "all 0": Odd(_numbered(lambda i: 0), lost=10, said="10 embeddings for 10 texts, two of"),
    "twice": Odd(changed=lambda items: items * 2, lost=10, said="20 embeddings for 10 texts, two"),
    "index in words": Odd(_numbered(lambda i: f"#{i}"), lost=10, said="index '#0', which is no"),
    "some without index": Odd(_numbered(lambda i: i or None), lost=10, said="index None, which is"),
    "no index, one short": Odd(
        lambda i, vector: {"embedding": vector},
        lambda items: items[1:],
        lost=10,
        said="9 embeddings without an index for 10 texts (texts_per_request: 1 may help",
    ),
    "no index, one more": Odd(
        lambda i, vector: {"embedding": vector},
        lambda items: [*items, items[0]],
        lost=10,
        said="11 embeddings without an index",
    ),
    "nothing": Odd(changed=lambda items: [], lost=10, said="0 embeddings without an index"),
    "a hole": Odd(_of_bad([1.0, None, 2.0, 3.0]), lost=1, said=NO_LIST),
    "text": Odd(_of_bad("no base64!"), lost=1, said=NO_LIST),
    "null": Odd(_of_bad(None), lost=1, said=NO_LIST),
    "no number": Odd(_of_bad([]), lost=1, said=NO_LIST),
    "lists in it": Odd(_of_bad([[1.0, 2.0, 3.0, 4.0]]), lost=1, said=NO_LIST),
    "NaN": Odd(_of_bad([1.0, float("nan"), 2.0, 3.0]), lost=1, said="not finite"),
    "too large": Odd(_of_bad([1e300, 0.0, 0.0, 0.0]), lost=1, said="not finite"),
    "too whole": Odd(_of_bad([2**24 + 1, 0, 0, 0]), lost=1, said="float32 does not hold"),
    "all zeros": Odd(_of_bad([0.0] * 4), lost=1, said="the embedding is all zeros"),
    "another length": Odd(_of_bad([1.0, 2.0]), lost=1, said="declared as a vector of 4"),
}


@pytest.mark.parametrize("name", ODD)
def test_of_a_list_of_embeddings_each_is_its_texts_or_none_is_kept(
    tmp_path: Path, name: str
) -> None:
    """Nothing is sent twice for that; once the service is mended what was lost is sent again where
    the run asks for it, and nothing else."""
    odd, texts = ODD[name], [f"text {i}" for i in range(22)]
    texts[16] = "bad"

    def behave(inputs: list[str]) -> Any:
        items = [odd.item(i, vector_of(text)) for i, text in enumerate(inputs)]
        tokens = {"prompt_tokens": 9 * len(inputs)}
        return {"data": odd.changed(items) if "bad" in inputs else items, "usage": tokens}

    def model() -> EmbeddingEndpoint:
        return embedder(stand_in, tmp_path, texts_per_request=10)

    # requests of 10, of 10 with the bad one as the seventh, and of 2
    good = {i: {"embedding": vector_of(text)} for i, text in enumerate(texts)}
    lost = {None: set[int](), 1: {16}, 10: set(range(10, 20))}[odd.lost]
    with StandIn(
        behave=lambda text, seen: Answer(behave) if text == "bad" or odd.lost is None else None
    ) as stand_in:
        first = model()
        outcome = compute(first, VECTORS, rows(*texts))
        assert computed(outcome) == {i: row for i, row in good.items() if i not in lost}
        assert {rejected.row for rejected in outcome.rejections} == lost
        assert all(odd.said in rejected.error for rejected in outcome.rejections)
        assert first.figures()["requests"] == 3
        assert stand_in.seen == dict.fromkeys(texts, 1)
        stand_in.behave = lambda text, seen: None
        # one that does not ask for it pays for nothing
        assert len(compute(model(), VECTORS, rows(*texts)).rejections) == len(lost)
        assert stand_in.seen.total() == len(texts)
        assert computed(again(model(), VECTORS, rows(*texts))) == good
        assert stand_in.seen == {text: 2 if i in lost else 1 for i, text in enumerate(texts)}
        assert computed(again(model(), VECTORS, rows(*texts))) == good
        assert stand_in.seen.total() == len(texts) + len(lost)


def vectors_of(dtype: str, dim: int = 4) -> FeatureView:
    return dataclasses.replace(VECTORS, features=(Feature("embedding", dtype, dim),))


def scores_of(dtype: str) -> FeatureView:
    return dataclasses.replace(LABELS, features=(Feature("score", dtype),))


REFUSED_BY_VIEW: dict[str, tuple[FeatureView, Any]] = {
    "a length": (VECTORS, [1.0, 2.0, 3.0]),
    "out of int8": (vectors_of("int8"), [300, 1, 2, 3]),
    "a fraction in int8": (vectors_of("int8"), [0.5, 1, 2, 3]),
    "out of float16": (vectors_of("float16"), [1e6, 1, 2, 3]),
    "a number's fraction": (scores_of("int32"), 1.5),
    "a number too large": (scores_of("int8"), 300),
    "a number for a text": (scores_of("string"), 3),
}
"""A view, and what is good JSON of the service and none of its values."""


@pytest.mark.parametrize("name", REFUSED_BY_VIEW)
def test_what_the_view_does_not_accept_is_kept_for_an_hour(
    labels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    view, value = REFUSED_BY_VIEW[name]
    is_vector = view.features[0].dim is not None
    fine = [1, 2, 3, 4] if is_vector else "x" if view.features[0].dtype == "string" else 1

    def behave(inputs: list[str]) -> Any:
        made = [value if text.endswith("bad") and not mended else fine for text in inputs]
        if not is_vector:
            return chat({"label": "long", "score": made[0]})
        return {"data": [{"index": i, "embedding": one} for i, one in enumerate(made)]}

    def model() -> Any:
        schema = {"type": "object", "properties": {"label": {}, "score": {}}}
        return embedder(stand_in, tmp_path) if is_vector else labels(stand_in, schema=schema)

    batch, mended = rows("a", "bad", "bad", "c"), False
    with StandIn(behave=lambda text, seen: Answer(behave)) as stand_in:
        for _ in range(2):
            outcome = compute(model(), view, batch)
            assert [(r.row, r.stage in ("misfit", "output")) for r in outcome.rejections] == [
                (1, True),
                (2, True),
            ]
            assert all(
                r.error.endswith(" (run --retry-rejected sends it once more)")
                for r in outcome.rejections
            )
            assert stand_in.seen.total() == 3
        # the service is as bad as before: each text of the run is sent once more, and once
        assert len(again(model(), view, batch).rejections) == 2
        assert stand_in.seen.total() == 4
        mended = True
        assert len(again(model(), view, batch).rows) == 4
        assert stand_in.seen.total() == 5
        mended = False
        later = rows("other bad")
        assert len(compute(model(), view, later).rejections) == 1
        mended, day = True, time.time() + 3700
        monkeypatch.setattr("precompute.plugins.endpoints.session.time.time", lambda: day)
        assert len(compute(model(), view, later).rows) == 1
        assert stand_in.seen.total() == 7


def test_a_mistake_of_the_view_costs_no_answer_that_was_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another dimension than the service's: all are refused; once it is corrected they are
    there, and stay."""
    batch = rows("a", "b", "c")
    with StandIn() as stand_in:
        mistaken = vectors_of("float32", 3)
        assert len(compute(embedder(stand_in, tmp_path), mistaken, batch).rejections) == 3
        good = {i: {"embedding": vector_of(text)} for i, text in enumerate("abc")}
        assert computed(compute(embedder(stand_in, tmp_path), VECTORS, batch)) == good
        # a view that others' answers do not fit pays for none of them
        assert len(compute(embedder(stand_in, tmp_path), mistaken, batch).rejections) == 3
        gc.collect()
        later = time.time() + 3700
        monkeypatch.setattr("precompute.plugins.endpoints.session.time.time", lambda: later)
        assert computed(compute(embedder(stand_in, tmp_path), VECTORS, batch)) == good
        assert stand_in.seen == {"a": 1, "b": 1, "c": 1}


def test_what_the_view_does_not_accept_is_tried_as_often_as_the_view_says(tmp_path: Path) -> None:
    # the first is zeros, the second a fraction
    first = [[0] * 4, [1.5] * 4, [2] * 4]
    later = [[7] * 4, [7] * 4]

    def behave(text: str, seen: int) -> Answer:
        made = later if seen else first
        return Answer({"data": [{"index": i, "embedding": one} for i, one in enumerate(made)]})

    with StandIn(behave=behave) as stand_in:
        model = embedder(stand_in, tmp_path, limits={"answer_tries": 2})
        batch, narrow = rows("a", "b", "c"), vectors_of("int16")
        assert computed(compute(model, narrow, batch)) == {
            0: {"embedding": [7] * 4},
            1: {"embedding": [7] * 4},
            2: {"embedding": [2] * 4},
        }
        assert stand_in.seen == {"a": 2, "b": 2, "c": 1}


def test_of_answers_that_come_together_each_is_judged_alone(
    labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several batches, committed at once: half of them do not fit the schema at first."""
    put = AnswerCache.put

    def slowly(self: AnswerCache, answers: Any) -> None:
        # as a disk does
        time.sleep(0.01)
        put(self, answers)

    monkeypatch.setattr(AnswerCache, "put", slowly)
    texts = [f"{'good' if i % 2 else 'bad'} {i}" for i in range(300)]
    with StandIn(
        delay_s=0.001,
        behave=lambda text, seen: Answer(chat("{")) if "bad" in text and not seen else None,
    ) as stand_in:
        model = labels(stand_in, limits={"answer_tries": 2})
        done = dict[int, dict[str, Any]]()
        for _, piece in Runner(model, LABELS).stream([rows(*texts)]):
            assert piece.rejections == []
            done |= computed(piece)
        assert done == dict(enumerate(length_label(f"Label: {text}") for text in texts))
        assert stand_in.seen == {f"Label: {text}": 1 + ("bad" in text) for text in texts}
        # no batch was looked through for a bad row
        assert model.figures()["from_cache"] == 0


def test_an_answer_that_another_view_accepts_is_not_lost_to_no_answer(tmp_path: Path) -> None:
    with StandIn() as stand_in:
        compute(embedder(stand_in, tmp_path), VECTORS, rows("a"))
        stand_in.behave = lambda text, seen: Answer("", 500)
        other = embedder(stand_in, tmp_path, limits={"tries": 1})
        assert len(again(other, vectors_of("float32", 3), rows("a")).rejections) == 1
        assert stand_in.seen == {"a": 2}
        assert len(compute(embedder(stand_in, tmp_path), VECTORS, rows("a")).rows) == 1
        assert stand_in.seen == {"a": 2}


def test_one_embedding_for_many_texts_is_sent_for_again(tmp_path: Path) -> None:
    """As of a service that is broken, which a gate finds in the whole run: what several texts have
    in common is used, and sent again where the run asks for it; nothing else is."""
    texts = [f"{'same' if i % 2 else 'own'} {i}" for i in range(20)]

    def behave(inputs: list[str]) -> Any:
        return embeddings([text if text.startswith("own") else "x" for text in inputs])

    with StandIn(behave=lambda text, seen: Answer(behave)) as stand_in:
        for run in (compute, again):
            outcome = run(embedder(stand_in, tmp_path), VECTORS, rows(*texts))
            same = {"embedding": vector_of("x")}
            assert computed(outcome) == {
                i: same if i % 2 else {"embedding": vector_of(text)} for i, text in enumerate(texts)
            }
        assert stand_in.seen == {text: 1 + i % 2 for i, text in enumerate(texts)}
        stand_in.behave = lambda text, seen: None
        assert computed(compute(embedder(stand_in, tmp_path), VECTORS, rows(*texts)))[1] == same
        good = {i: {"embedding": vector_of(text)} for i, text in enumerate(texts)}
        for _ in range(2):
            assert computed(again(embedder(stand_in, tmp_path), VECTORS, rows(*texts))) == good
        assert stand_in.seen == {text: 1 + i % 2 * 2 for i, text in enumerate(texts)}


def test_vectors_of_two_models_are_not_mixed(tmp_path: Path) -> None:
    def behave(inputs: list[str]) -> Any:
        return embeddings(inputs) | {"model": name}

    def run(*texts: str, **args: Any) -> Outcome:
        return compute(embedder(stand_in, tmp_path, **args), VECTORS, rows(*texts))

    name = "small-v1"
    with StandIn(behave=lambda text, seen: Answer(behave)) as stand_in:
        assert len(run("a", "b").rows) == 2
        name = "small-v2"
        for _ in range(2):
            # in another run, too
            with pytest.raises(ModelError, match=r"calls its model 'small-v2' now, and 'small-v1'"):
                run("a", "c")
        assert len(run("a", "c", served_as=["small-v2"]).rows) == 2
        assert stand_in.seen == {"a": 1, "b": 1, "c": 3}


def test_embeddings_in_base64_are_the_same(tmp_path: Path) -> None:
    packed = base64.b64encode(struct.pack("<4f", 1, 2, 3, 0.1)).decode()
    with StandIn(
        behave=lambda text, seen: Answer({"data": [{"index": 0, "embedding": packed}]})
    ) as stand_in:
        outcome = compute(
            embedder(stand_in, tmp_path, params={"encoding_format": "base64", "dimensions": 4}),
            VECTORS,
            rows("a"),
        )
        assert computed(outcome) == {
            0: {"embedding": np.array([1, 2, 3, 0.1], np.float32).tolist()}
        }
        assert stand_in.requests == [
            {"model": "small", "input": ["a"], "encoding_format": "base64", "dimensions": 4}
        ]


CHAT: dict[str, Any] = {
    "url": "http://host:1/v1",
    "model": "m",
    "prompt": "{text}",
    "schema": SCHEMA,
}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"url": "host:1"}, "url is 'host:1'"),
    ({"url": "http://me:secret@host/v1"}, "a key comes from the environment alone"),
    ({"url": "http://host/v1?key=secret"}, "a key comes from the environment alone"),
    ({"url": "http://host/v1/chat/completions"}, "give the API's base without it: http://host/v1"),
    ({"model": ""}, "model is ''"),
    ({"api_key_env": "NO_SUCH_KEY"}, "the environment has no NO_SUCH_KEY"),
    (
        {"api_key_env": "sk-secret"},
        "api_key_env is no name of an environment variable (it is not shown here)",
    ),
    ({"prompt": "Which genre?"}, "names no column"),
    ({"prompt": "{text!r:>10}"}, "the name of a column and nothing else"),
    ({"prompt": "{text"}, "expected '}'"),
    ({"schema": {"type": "array"}}, "give a JSON Schema of an object"),
    (
        {"schema": {"type": "object", "properties": {"a": {"type": "txt"}}}},
        "schema is no JSON Schema",
    ),
    (
        {"schema": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/a.json"}}}},
        "Retrieval is disabled",
    ),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"limits": {"in_flights": 3}}, "it takes answer_tries, in_flight, "),
    ({"limits": {"in_flight": 0}}, "limits.in_flight is 0"),
    ({"limits": {"timeout_s": float("nan")}}, "limits.timeout_s is nan"),
    ({"budget": {"euros": 3}}, "it takes tokens and money"),
    ({"budget": {"money": 3}}, "budget.money without a price"),
    ({"budget": {"tokens": -1}}, "budget.tokens is -1"),
    ({"cache_days": 0}, "cache_days is 0"),
    ({"cache_days": float("inf")}, "cache_days is inf: give a number above 0, up to 36500"),
]


@pytest.mark.parametrize(("args", "said"), MISTAKES)
def test_a_mistake_is_reported_before_anything_is_sent(
    args: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, ModelError)) as raised:
        compute(
            load_model("chat_endpoint", {**CHAT, "cache": str(tmp_path), **args}), LABELS, rows("a")
        )
    assert said in str(raised.value)
    assert "secret" not in str(raised.value)


def test_the_fingerprint_is_of_what_makes_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat_of(**args: Any) -> str:
        return load_model("chat_endpoint", {**CHAT, **args}).fingerprint()

    monkeypatch.setenv("STAND_IN_KEY", KEY)
    same: list[dict[str, Any]] = [
        {"url": "http://HOST:1/v1/"},
        {"api_key_env": "STAND_IN_KEY"},
        {"limits": {"in_flight": 3}},
        {"budget": {"tokens": 1}},
        {"cache": str(tmp_path)},
        {"params": {"temperature": 0}},
    ]
    others: list[dict[str, Any]] = [
        {},
        {"url": "http://host:2/v1"},
        {"model": "n"},
        {"prompt": "{text}."},
        {"system": "x"},
        {"schema": {**SCHEMA, "required": []}},
        {"schema": None},
        {"max_tokens": 3},
        {"params": {"temperature": 1}},
        {"params": {"response_format": None}},
        {"params": {"response_format": None}, "schema": {**SCHEMA, "required": []}},
    ]
    assert {chat_of(**args) for args in same} == {chat_of()}
    assert len({chat_of(**args) for args in others}) == len(others)
    own: list[dict[str, Any]] = [
        {},
        {"prompt": "a"},
        {"query_prompt": "a"},
        {"column": "title"},
        {"params": {"dimensions": 3}},
    ]
    embedding: dict[str, Any] = {"url": "http://host/v1", "model": "m"}
    assert len(
        {load_model("embedding_endpoint", embedding | args).fingerprint() for args in own}
    ) == len(own)
