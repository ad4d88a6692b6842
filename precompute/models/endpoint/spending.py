"""Spending: what a run's requests to an endpoint have cost and may cost, in tokens and money."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precompute.store.errors import ConfigError, ModelError

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
