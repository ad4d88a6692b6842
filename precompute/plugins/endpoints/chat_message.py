"""Chat message: the text of an answer in a chat completion, in whichever form a service puts it
there, and the answer in that text, without the thoughts before it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CUT = frozenset({"length", "max_tokens", "model_length"})
"""Reasons to finish of an answer that has reached ``max_tokens``."""
FILTERED = frozenset(
    {"content_filter", "safety", "recitation", "blocklist", "prohibited_content", "refusal"}
)
"""Reasons to finish of an answer that was withheld."""

_TEXTS = frozenset({"text", "output_text"})
_THOUGHTS = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning_content", "thought"}
)


def refusal_of(message: Mapping[str, Any], ended: str) -> str | None:
    """Why the model answers nothing, where it says so; ``ended`` is its reason to finish."""
    parts = message.get("content")
    said = message.get("refusal") or next(
        (
            part.get("refusal") or part.get("text")
            for part in (parts if isinstance(parts, list) else ())
            if isinstance(part, Mapping) and part.get("type") == "refusal"
        ),
        None,
    )
    return str(said) if said else ended if ended in FILTERED else None


def text_of_message(message: Mapping[str, Any], *, in_json: bool) -> str:
    """The text of an answer: the content, or its parts that are text; where it is to be JSON, the
    arguments of a tool's call, too, or what stands where thoughts should.

    Args:
        message: of the first choice.
        in_json: whether a schema was sent, which is held against the answer.

    Raises:
        ValueError: there is none; its text says what there is.
    """
    content = message.get("content")
    if isinstance(content, Mapping):
        content = json.dumps(content) if in_json and "type" not in content else [content]
    text = _text_of_parts(content) if isinstance(content, list) else content
    if text is not None and not isinstance(text, str):
        raise ValueError(f"the answer's content is {json.dumps(text):.80}, which is no text")
    if text and text.strip():
        return text
    calls = _calls(message)
    if calls and not in_json:
        raise ValueError(
            f"the answer is a call of the tool {calls[0][0]!r:.80} and no text: leave tools out of"
            " params, or give a schema, whose answer a call's arguments may be"
        )
    if len(calls) > 1:
        raise ValueError(
            f"the answer has {len(calls)} calls of tools, of which one could be the answer: params:"
            " {parallel_tool_calls: false}"
        )
    if calls:
        return calls[0][1]
    thoughts = next(
        filter(None, (message.get(name) for name in ("reasoning_content", "reasoning"))), None
    )
    if thoughts is None:
        raise ValueError("the answer is empty")
    if in_json and isinstance(thoughts, str) and thoughts.strip().startswith(("{", "```")):
        # where a service takes for thoughts what a model that does not think has answered
        return thoughts
    raise ValueError(
        "the answer is thoughts alone (reasoning_content), and no content: raise max_tokens, or"
        " have the model think less: params: {reasoning_effort: low} or"
        " {chat_template_kwargs: {enable_thinking: false}}, whichever it knows"
    )


def _text_of_parts(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind in _THOUGHTS:
            continue
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, Mapping):
            text = text.get("value")
        if kind not in _TEXTS or not isinstance(text, str):
            raise ValueError(f"the answer has a part of type {kind!r:.40}, which is no text")
        texts.append(text)
    return "".join(texts)


def _calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The calls of tools: name, and arguments as JSON."""
    called = message.get("tool_calls") or []
    functions = [call.get("function") for call in called if isinstance(call, Mapping)]
    return [
        (str(one.get("name")), given if isinstance(given, str) else json.dumps(given))
        for one in [*functions, message.get("function_call")]
        if isinstance(one, Mapping) and (given := one.get("arguments")) is not None
    ]


# ---- thoughts


_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning", "seed:think")
_OPENING = re.compile(rf"\s*(?:<({'|'.join(_TAGS)})>|(\[THINK\])|(◁think▷))", re.IGNORECASE)
_CLOSING = re.compile(rf"</(?:{'|'.join(_TAGS)})>|\[/THINK\]|◁/think▷", re.IGNORECASE)
_CHANNELS = re.compile(r"\s*(?:<\|start\|>|<\|channel\|>)")
_FINAL = re.compile(r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_FINAL_ENDS = re.compile(r"<\|(?:return|end|call|start)\|>")
_CHANNELS_WITHOUT_MARKS = re.compile(r"\s*(?:analysis|commentary).*?assistantfinal(.*)", re.DOTALL)
_ALONE = (
    "the answer is thoughts alone, which do not end: raise max_tokens, or have the model think less"
)


def answer_in(text: str) -> str:
    """The answer in a text, without the thoughts that it begins with: between tags
    (``<think>…</think>``); up to a closing tag, whose opening one the prompt's template has; or in
    the channels of Harmony. What is mentioned further on stays.

    Raises:
        ValueError: there are thoughts alone.
    """
    if _CHANNELS.match(text):
        final = list(_FINAL.finditer(text))
        if not final:
            raise ValueError(f"{_ALONE} (no final channel)")
        return _FINAL_ENDS.split(text[final[-1].end() :], maxsplit=1)[0].strip()
    if (unmarked := _CHANNELS_WITHOUT_MARKS.fullmatch(text)) is not None:
        return unmarked[1].strip()
    while (opening := _OPENING.match(text)) is not None:
        closing = _CLOSING.search(text, opening.end())
        if closing is None:
            raise ValueError(_ALONE)
        text = text[closing.end() :]
    closing = _CLOSING.search(text)
    if closing is not None and _ends_thoughts(text, closing):
        text = text[closing.end() :]
    return text.strip()


def _ends_thoughts(text: str, closing: re.Match[str]) -> bool:
    """Whether a closing tag that no opening one is before ends thoughts, and is not mentioned in a
    sentence, between quotes or spaces."""
    before, after = text[: closing.start()], text[closing.end() :]
    if re.search(rf"<(?:{'|'.join(_TAGS)})>|\[THINK\]|◁think▷", before, re.IGNORECASE):
        return False
    return before[-1:] not in tuple(" \t`'\"“‘«(") or not after.partition("\n")[0].strip()
