"""Task families: which reasoning-gym data set and difficulty, how the character model reads it, who demonstrates it.

A demonstrator errs by a rule, in a share of problems, so that imitation stops at a middling accuracy and reinforcement
has room. A family is a row of `FAMILIES`; its name is what `--task` takes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

FORGETFUL = 0.7  # share of problems in which the demonstrator errs by its rule

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: reasoning-gym's data set and options, the short prompt of an entry, an erring demonstrator's answer.

    rule: the demonstrator's error in words (part of the hash of what imitates it).
    """

    dataset: str
    options: dict[str, Any] = field(default_factory=dict)
    prompt: Callable[[Entry], str]
    err: Callable[[Entry], str]
    rule: str

    def demonstrate(self, entry: Entry, rng: random.Random, forgetful: float = FORGETFUL) -> str:
        """The demonstrator's answer: by its wrong rule with probability `forgetful`, else reasoning-gym's."""
        return self.err(entry) if rng.random() < forgetful else str(entry["answer"])


def forget(a: int, b: int) -> int:
    """a + b column by column, every carry and borrow forgotten, the last one too: 57 + 87 = 34."""
    if (a < 0) == (b < 0):
        return (-1 if a < 0 else 1) * _columns(abs(a), abs(b), 1)
    high, low = (a, b) if abs(a) >= abs(b) else (b, a)
    return (-1 if high < 0 else 1) * _columns(abs(high), abs(low), -1)


def forget_product(a: int, b: int) -> int:
    """a * b whose partial products are right and added with every carry forgotten: 57 * 68 = 456 + 3420 = 3876."""
    partials = [a * int(digit) * 10**place for place, digit in enumerate(reversed(str(b)))]
    return reduce(forget, partials)


def _columns(a: int, b: int, sign: int) -> int:
    total, place = 0, 1
    while a or b:
        total += (a % 10 + sign * (b % 10)) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def _expression(entry: Entry) -> str:
    return f"{entry['metadata']['expression']}=".replace(" ", "")


def _numbers(entry: Entry) -> str:
    return ",".join(map(str, entry["metadata"]["numbers"])) + "="


def _sum_without_carries(entry: Entry) -> str:
    first, *rest = entry["metadata"]["expression"].split()
    signed = [int(b) if sign == "+" else -int(b) for sign, b in zip(rest[::2], rest[1::2], strict=True)]
    return str(reduce(forget, signed, int(first)))


def _product_without_carries(entry: Entry) -> str:
    return str(reduce(forget_product, [int(n) for n in entry["metadata"]["expression"].split(" * ")]))


def _two_divisions(entry: Entry) -> str:
    """Euclid's algorithm stopped after two divisions of each pair."""

    def step(a: int, b: int) -> int:
        high, low = max(a, b), min(a, b)
        rest = high % low
        return low if rest == 0 else low % rest or rest

    return str(reduce(step, entry["metadata"]["numbers"]))


def _plain_product(entry: Entry) -> str:
    return str(math.prod(entry["metadata"]["numbers"]))


_CARRIES = "forgets every carry and borrow of a problem, or none"
_SUM: dict[str, Any] = {
    "dataset": "chain_sum",
    "prompt": _expression,
    "err": _sum_without_carries,
    "rule": _CARRIES,
}
_PRODUCT: dict[str, Any] = {
    "dataset": "products",
    "prompt": _expression,
    "err": _product_without_carries,
    "rule": "forgets every carry between partial products, or none",
}
_GCD: dict[str, Any] = {
    "dataset": "gcd",
    "prompt": _numbers,
    "err": _two_divisions,
    "rule": "stops Euclid's algorithm after two divisions, or never",
}


def _terms(least: int, most: int, digits: tuple[int, int]) -> dict[str, Any]:
    return {"min_terms": least, "max_terms": most, "min_digits": digits[0], "max_digits": digits[1]}


FAMILIES: dict[str, Family] = {
    "chain_sum": Family(**_SUM, options=_terms(2, 2, (2, 2))),
    "chain_sum-4digits": Family(**_SUM, options=_terms(2, 2, (2, 4))),
    "chain_sum-4terms": Family(**_SUM, options=_terms(2, 4, (2, 2))),
    "products": Family(**_PRODUCT, options=_terms(2, 2, (2, 2))),
    "products-3digits": Family(**_PRODUCT, options=_terms(2, 2, (1, 3))),
    "gcd": Family(**_GCD, options={"max_value": 200}),
    "gcd-1000": Family(**_GCD, options={"max_value": 1000}),
    "lcm": Family(
        dataset="lcm",
        options={"max_value": 150},
        prompt=_numbers,
        err=_plain_product,
        rule="forgets common factors, or none",
    ),
}
