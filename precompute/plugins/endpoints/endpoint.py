"""Endpoint: requests to an OpenAI-compatible service, within its rates and the run's budget,
retried where that may help. For one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from precompute.model import Unanswered
from precompute.plugins.endpoints.envelope import (
    Failure,
    NoEnvelopeError,
    body_of,
    envelope_of,
    failure_in,
    failure_of,
    plain_body,
)
from precompute.plugins.endpoints.transport import LostError, Reply, Transport
from precompute.store.errors import ConfigError, ModelError

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pause between tries, in s: at random up to the first, then up to twice as much each time."""
DOWN_AFTER = 8
"""Requests given up one after the other, none answered in between, after which the endpoint is to
blame, and not the rows."""
SHOWN = 200
"""Characters of what an endpoint says that are shown."""
BURST_S = 1.0
"""Seconds of a rate that may be used at once."""


class BadAnswer(Exception):
    """An input that has no answer, or none that fits: its row is a bad one. ``content`` is what was
    answered and paid, where anything was."""

    def __init__(self, reason: str, content: bytes | None = None) -> None:
        # half a surrogate pair, which an endpoint may quote, is no text that a file takes
        super().__init__(reason.encode(errors="backslashreplace").decode())
        self.content = content


class NoAnswer(BadAnswer, Unanswered):
    """An input that nothing was answered to, as often as it was sent; nothing was paid."""


def base_url(url: Any) -> str:
    """An endpoint's URL without a slash at its end.

    Raises:
        ConfigError: it is none, or holds what is secret.
    """
    try:
        parts = urlsplit(str(url))
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed:
        raise ConfigError(
            f"url is {str(url)!r:.200}: give the API's base, as in http://localhost:8000/v1"
        )
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"the url of host {parts.hostname!r} has a user, a password, a query or a fragment (not"
            " shown here): a key comes from the environment alone, api_key_env: NAME"
        )
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/embeddings"):
        if path.endswith(ending):
            raise ConfigError(
                f"url ends in {ending}: give the API's base without it:"
                f" {parts.scheme}://{parts.netloc}{path.removesuffix(ending)}"
            )
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"


def key_from(variable: str | None) -> str:
    """An API key from the environment; empty without a variable.

    Raises:
        ConfigError: it is not set, or no line of visible ASCII characters.
    """
    if variable is None:
        return ""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(variable)):
        raise ConfigError(
            "api_key_env is no name of an environment variable (it is not shown here): name the"
            " variable that holds the key, not the key"
        )
    key = os.environ.get(str(variable), "").strip()
    if not key:
        raise ConfigError(f"api_key_env: the environment has no {variable}: export {variable}=…")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"api_key_env: {variable} is no line of visible ASCII characters (it is not shown here)"
        )
    return key


@dataclass(slots=True)
class Rate:
    """How much may be sent a minute; None for any amount."""

    per_minute: float | None
    _next: float = 0.0

    def wait_s(self, amount: float) -> float:
        """How long to wait before so much more is sent, which is counted from now on."""
        if self.per_minute is None:
            return 0.0
        now = time.monotonic()
        start = max(self._next, now - BURST_S)
        self._next = start + amount * 60 / self.per_minute
        return max(0.0, start - now)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much an endpoint is sent at most, and how long its failures are waited out."""

    in_flight: int = 64
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    timeout_s: float = 60.0
    """Timeout of one request."""
    tries: int = 5
    """Tries of a request that fails: an error of the service, no answer in time, a lost
    connection."""
    patience_s: float = 600.0
    """How long an endpoint is waited for that answers nothing but to wait."""
    answer_tries: int = 1
    """Tries of an input whose answer does not fit; each is paid."""

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Limits:
        """Those of a view's arguments, and the others as they are.

        Raises:
            ConfigError: another name, or a value out of bounds.
        """
        known = {field.name for field in fields(cls)}
        if given is not None and (not isinstance(given, Mapping) or not set(given) <= known):
            raise ConfigError(
                f"limits is {given!r:.200}: it takes {', '.join(sorted(known))}, as in limits:"
                " {in_flight: 64}"
            )
        for name, value in (given or {}).items():
            whole = name in ("in_flight", "tries", "answer_tries")
            if value is None and name.endswith("minute"):
                continue
            kind = int if whole else (int, float)
            if (
                not isinstance(value, kind)
                or isinstance(value, bool)
                or not 0 < value < (4097 if whole else float("inf"))
            ):
                raise ConfigError(
                    f"limits.{name} is {value!r}: give a"
                    f" {'whole number from 1 to 4096' if whole else 'number above 0'}"
                )
        return cls(**(given or {}))


# ---- What a run's requests have cost and may cost, in tokens and money.


BYTES_A_TOKEN = 3
"""Bytes of a token, about, for the estimate where an endpoint reports nothing or what cannot be
true: English has 4 to 5, code 3."""
MOST_BYTES_A_TOKEN = 16
"""Fewer tokens than that many bytes each are no tokenizer's, but for runs of white space."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many, in and out."""

    input: int = 0
    output: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.input + other.input, self.output + other.output)

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(self.input - other.input, self.output - other.output)

    @property
    def count(self) -> int:
        """Both."""
        return self.input + self.output


def credible(claimed: Any, size_bytes: int, most: int | None) -> int | None:
    """The number of tokens that an endpoint says a text had, if it can be true.

    Args:
        claimed: what it says, of any type.
        size_bytes: of the text in UTF-8: no token is less than a byte.
        most: how many there can be at most; None where that is not known.
    """
    if not isinstance(claimed, int) or isinstance(claimed, bool):
        return None
    return (
        claimed
        if -(-size_bytes // MOST_BYTES_A_TOKEN) <= claimed and (most is None or claimed <= most)
        else None
    )


def paid_in(envelope: Any, most: Tokens) -> Tokens | None:
    """What an envelope without an answer says was used, if it can be true; None where it says
    nothing of it."""
    usage = envelope.get("usage") if isinstance(envelope, Mapping) else None
    if not isinstance(usage, Mapping):
        return None
    return Tokens(
        credible(usage.get("prompt_tokens"), 0, most.input) or 0,
        credible(usage.get("completion_tokens"), 0, most.output) or 0,
    )


def estimated(size_bytes: int) -> int:
    """Tokens of a text, about."""
    return -(-size_bytes // BYTES_A_TOKEN)


class Spending:
    """Counts what one process spends, and lets a request be sent only when the budget allows the
    most that it can cost. For one event loop.

    Args:
        budget: ``tokens`` (in and out together) and ``money``; without either there is no limit.
        price: money for a million tokens: ``input`` and ``output``.

    Raises:
        ConfigError: other keys, no numbers, or money without a price.
    """

    def __init__(self, budget: Mapping[str, Any] | None, price: Mapping[str, Any] | None) -> None:
        limits = _numbers("budget", budget, ("tokens", "money"))
        prices = _numbers("price", price, ("input", "output"))
        self._most_tokens, self._most_money = limits.get("tokens"), limits.get("money")
        if self._most_money is not None and not prices:
            raise ConfigError(
                "budget.money without a price: add price: {input: …, output: …}, money for a"
                " million tokens"
            )
        self._price = prices
        self.used = Tokens()
        self.taken_over = Tokens()
        """What of it was spent by a run that was killed, and that this one goes on with."""
        self.estimates = 0
        """How many answers' tokens were estimated."""
        self._reserved = Tokens()
        self._in_flight = 0
        self._changed = asyncio.Event()

    def money(self, tokens: Tokens) -> float:
        """What they cost."""
        return (
            tokens.input * self._price.get("input", 0.0)
            + tokens.output * self._price.get("output", 0.0)
        ) / 1e6

    @property
    def limited(self) -> bool:
        """Whether there is a budget."""
        return self._most_tokens is not None or self._most_money is not None

    async def reserve(self, most: Tokens) -> None:
        """Reserve the cost of a request, and wait until the budget has it; :meth:`settle` must
        follow.

        Raises:
            ModelError: the budget does not allow it, and nothing is in flight that could turn out
                cheaper.
        """
        while self._beyond(self.used + self._reserved + most):
            if not self._in_flight:
                raise ModelError(self._spent(most))
            self._changed.clear()
            await self._changed.wait()
        self._reserved += most
        self._in_flight += 1

    def settle(self, most: Tokens, used: Tokens) -> None:
        """Note the true cost of a reserved request."""
        self._reserved -= most
        self._in_flight -= 1
        self.used += used
        self._changed.set()

    def take_over(self, used: Tokens) -> None:
        """Count what a killed run has spent."""
        self.taken_over += used
        self.used += used

    def _beyond(self, tokens: Tokens) -> bool:
        if self._most_tokens is not None and tokens.count > self._most_tokens:
            return True
        return self._most_money is not None and self.money(tokens) > self._most_money

    def _spent(self, most: Tokens) -> str:
        if self._most_tokens is not None and (self.used + most).count > self._most_tokens:
            limit = f"{self._most_tokens:,.0f} tokens"
            used = f"{self.used.count:,}"
            next_one = f"{most.count:,} tokens"
        else:
            limit = f"{self._most_money:g} (money)"
            used = f"{self.money(self.used):.4g}"
            next_one = f"{self.money(most):.4g}"
        if self.taken_over.count:
            used += f" (with {self.taken_over.count:,} tokens of a run before, which was killed)"
        return (
            f"the run's budget of {limit} is spent: {used} are used, and the next request may take"
            f" {next_one}"
        )


def _numbers(
    name: str, given: Mapping[str, Any] | None, known: tuple[str, ...]
) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise ConfigError(
            f"{name} is {given!r}: it takes {' and '.join(known)}, as in {name}: {{{known[0]}:"
            " 1000000}"
        )
    for key, value in given.items():
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 <= value < float("inf")
        ):
            raise ConfigError(f"{name}.{key} is {value!r}: give a number from 0")
    return dict(given)


# ---- Requests


@dataclass(slots=True)
class Counts:
    """What was sent and came back."""

    requests: int = 0
    answers: int = 0
    heard: int = 0
    """Requests that it answered, or refused for what was in them: it is there."""
    cached: int = 0
    retries: int = 0
    refused: int = 0
    """Answers of 429, or of 503 while nothing else was answered."""


class Endpoint:
    """Sends requests and reads their envelopes; an empty ``key`` is none."""

    def __init__(self, url: str, key: str, limits: Limits, spending: Spending) -> None:
        self.counts = Counts()
        self.limits = limits
        self._url, self._key, self.spending = url, key, spending
        self._transport = Transport(url, [("Authorization", f"Bearer {key}")] if key else [])
        self._slots = asyncio.Semaphore(limits.in_flight)
        self._requests = Rate(limits.requests_per_minute)
        self._tokens = Rate(limits.tokens_per_minute)
        self._held_until = 0.0
        self._refused_since: float | None = None
        self._given_up = 0
        self._stopped: ModelError | None = None
        self._stopping = asyncio.Event()

    def stop(self, why: ModelError | None) -> None:
        """Send nothing more until this is called with None; what waits to be sent raises it."""
        self._stopped = why
        if why is None:
            self._stopping.clear()
        else:
            self._stopping.set()

    async def request(
        self,
        path: str,
        body: Mapping[str, Any],
        most: Tokens,
        read: Callable[[Any], tuple[Tokens, T | BadAnswer]],
        unanswered: bool = False,
    ) -> T:
        """One request, tried again where that may help.

        Args:
            most: what it may cost.
            read: envelope → (tokens used, what is returned, or what is wrong with it); raises
                ValueError for one that is none.
            unanswered: whether it had no answer in an earlier run, for which the endpoint was not
                to blame.

        Raises:
            BadAnswer: this request has no answer.
            ModelError: the endpoint, or the run's budget, has none for any.
        """
        content, tries, began = body_of(body), 0, time.monotonic()
        # what is answered meanwhile shows that the endpoint is there
        answered_before = -1 if unanswered else self.counts.answers
        refused_at: int | None = None
        while True:
            async with self._slots:
                await self._turn(most)
                outcome = await self._send(path, content, most, read)
            if not isinstance(outcome, _Failed):
                self._given_up, self._refused_since = 0, None
                self.counts.heard += 1
                if isinstance(outcome, BadAnswer):
                    raise outcome
                return outcome
            self.counts.retries += 1
            refused_at = self.counts.answers if refused_at is None else refused_at
            others_answered = refused_at != self.counts.answers
            if outcome.hold_s is not None and not (outcome.may_be_its_own and others_answered):
                try:
                    self._hold(outcome, outcome.hold_s)
                except ModelError:
                    if not others_answered:
                        raise
                    waited = f"{time.monotonic() - began:.0f} s"
                    raise self._giving_up(outcome, waited, answered_before) from None
                continue
            tries += 1
            if tries >= self.limits.tries:
                raise self._giving_up(outcome, f"{tries} tries", answered_before)
            await self._sleep(_pause_s(tries))

    async def _turn(self, most: Tokens) -> None:
        """Wait until it may be sent; the budget has it reserved then."""
        self._check_stopped()
        await self.spending.reserve(most)
        try:
            await self._sleep(
                max(
                    self._requests.wait_s(1),
                    self._tokens.wait_s(estimated(most.input) + most.output),
                )
            )
            while (wait_s := self._held_until - time.monotonic()) > 0:
                await self._sleep(wait_s)
            self._check_stopped()
        except BaseException:
            self.spending.settle(most, Tokens())
            raise

    async def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stopping.wait()
        self._check_stopped()

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    async def _send(
        self,
        path: str,
        content: bytes,
        most: Tokens,
        read: Callable[[Any], tuple[Tokens, T | BadAnswer]],
    ) -> T | BadAnswer | _Failed:
        """What was answered; the budget is settled then."""
        # what may have been computed may be billed: it counts in full, until it is known
        used = most
        self.counts.requests += 1
        try:
            reply = await self._transport.post(path, content, self.limits.timeout_s)
            if reply.status != 200:
                used = Tokens()
                failure = _failure(reply)
                return self._refused(failure, f"answered {reply.status}")
            envelope = envelope_of(
                plain_body(reply.body, reply.headers.get("content-encoding", ""))
            )
            if (found := failure_in(envelope)) is not None:
                used = paid_in(envelope, most) or Tokens()
                return self._refused(
                    _with_wait(found, reply),
                    f"answered 200 with an error in it that counts as {found.status}",
                )
            used = paid_in(envelope, most) or most
            used, answer = read(envelope)
            # one that was cut off on its way is paid for and cannot be cached
            self.counts.answers += 1
            return answer
        except NoEnvelopeError as exc:
            if exc.page:
                used = Tokens()
            reason = f"its answer cannot be read: {self._shown(str(exc))}"
            if exc.of_all:
                raise ModelError(f"{self._url}: {reason}") from exc
            return _Failed(reason)
        except (ValueError, RecursionError) as exc:
            return _Failed(f"its answer cannot be read: {self._shown(str(exc))}")
        except LostError as exc:
            if not exc.sent:
                used = Tokens()
            return _Failed(str(exc), connected=exc.sent)
        finally:
            self.spending.settle(most, used)

    def _refused(self, failure: Failure, answered: str) -> BadAnswer | _Failed:
        """Raises:
        ModelError: it is no request's fault, and will not pass.
        """
        status, words = failure.status, self._shown(failure.said)
        said = f"{answered} ({words})" if words else answered
        where = f"{self._url} {said}"
        if status in (401, 403) and not failure.input_refused:
            how = (
                "the key in the variable that api_key_env names"
                if self._key
                else "api_key_env: NAME of a variable with the key"
            )
            raise ModelError(f"{where}: it wants another key; set {how}")
        if status in (402, 404, 405) or status < 400 or (status == 429 and failure.quota):
            raise ModelError(f"{where}: check url, model and account")
        if status == 429:
            return _Failed(said, failure.wait_s or 0.0)
        if status in (503, 529) or (failure.loading and status >= 500):
            return _Failed(said, failure.wait_s or 0.0, may_be_its_own=failure.wait_s is None)
        if status >= 500 or status in (408, 409, 425):
            return _Failed(said)
        return BadAnswer(f"the endpoint {said}")

    def _hold(self, refusal: _Failed, wanted_s: float) -> None:
        """Send nothing for as long as it says; where it does not say, longer each time.

        Raises:
            ModelError: that is longer than the patience there is.
        """
        self.counts.refused += 1
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        hold_s = wanted_s or max(_pause_s(1), min(LONGEST_PAUSE_S, now - self._refused_since))
        if now + hold_s - self._refused_since > self.limits.patience_s:
            waited = (
                f"nothing was answered for {now - self._refused_since:.0f} s, and it is to wait for"
                f" {hold_s:.0f} s more"
            )
            raise ModelError(
                f"{self._url} {refusal}: {waited}, beyond patience_s ({self.limits.patience_s:g})."
                " Run again later, or change limits: a longer patience_s, fewer in_flight or"
                " requests_per_minute"
            )
        # they do not all come back at once
        self._held_until = max(self._held_until, now + hold_s + random.uniform(0, 0.1 * hold_s))  # noqa: S311

    def _giving_up(self, outcome: _Failed, after: str, answered_before: int) -> Exception:
        if answered_before == self.counts.answers:
            self._given_up += 1
        if self._given_up >= DOWN_AFTER or not outcome.connected:
            return ModelError(f"no answer from {self._url}: {outcome}, the last of {after}")
        return NoAnswer(f"no answer in {after}: {outcome}")

    def _shown(self, text: str) -> str:
        text = text.replace(self._key, "***") if self._key else text
        return "".join(c if c.isprintable() else " " for c in text[: 2 * SHOWN]).strip()[:SHOWN]

    async def aclose(self) -> None:
        """Close its connections."""
        await self._transport.aclose()


@dataclass(frozen=True, slots=True)
class _Failed:
    """No answer for now, and why; ``hold_s`` is how long to send nothing, 0 where it does not
    say. ``may_be_its_own`` is whether it is the request's own fault where others are answered."""

    reason: str
    hold_s: float | None = None
    connected: bool = True
    may_be_its_own: bool = False

    def __str__(self) -> str:
        return self.reason


def _failure(reply: Reply) -> Failure:
    """The failure that an answer of another status than 200 says."""
    stated: Any = ""
    try:
        body = plain_body(reply.body, reply.headers.get("content-encoding", ""))
        stated = body[:10_000].decode(errors="replace")
        found = envelope_of(body)
        # OpenAI's, vLLM's and TGI's ways to say it
        is_object = isinstance(found, dict)
        stated = (found.get("error") or found.get("errors") or found) if is_object else found
    except NoEnvelopeError as exc:
        stated = str(exc) if exc.page else stated
    return _with_wait(failure_of(stated, reply.status), reply)


def _with_wait(failure: Failure, reply: Reply) -> Failure:
    """The failure, with the time to wait that the answer's head has, if it has one."""
    wait_s = _retry_after_s(reply)
    return failure if wait_s is None else replace(failure, wait_s=wait_s)


def _pause_s(tries: int) -> float:
    longest_s: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (tries - 1))
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311


def _time_of(date: str) -> float | None:
    """Seconds since the epoch; None of what is no date."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _retry_after_s(reply: Reply) -> float | None:
    """Seconds to wait, by an answer: as a number, or as a date, measured from the answer's own
    Date."""
    value = reply.headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        until, now = _time_of(value), _time_of(reply.headers.get("date", ""))
        if until is None:
            return None
        seconds = until - (time.time() if now is None else now)
    return max(0.0, seconds) if seconds < float("inf") else None
