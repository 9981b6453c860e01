"""Writes out calculations in as much detail as a tiny model needs to be exact.

Sums, differences and exact quotients take one step. A product is split by the digits of its larger
factor: 23 * 4 = 80 + 12 = 92. Each function returns the text, which ends with the value.
"""

from __future__ import annotations

KNOWN_BY_HEART = 12  # largest factor of the multiplication table


def add(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}"


def add_three(a: int, b: int, c: int) -> str:
    return f"{a} + {b} + {c} = {a + b} + {c} = {a + b + c}"


def subtract(a: int, b: int) -> str:
    return f"{a} - {b} = {a - b}"


def divide(a: int, b: int) -> str:
    assert a % b == 0, f"{a} / {b} is not whole"
    return f"{a} / {b} = {a // b}"


def multiply(a: int, b: int) -> str:
    """Splits the larger factor into decimal parts, largest first, each times the other factor."""
    larger, smaller = (a, b) if a >= b else (b, a)
    text = f"{a} * {b} = "
    if larger <= KNOWN_BY_HEART or smaller <= 1:
        return text + str(a * b)
    if (
        larger < 100 <= smaller * 10
    ):  # two digits times two: splits the smaller, 24 * 15 = 240 + 120
        larger, smaller = smaller, larger
    digits = str(larger)
    parts = [
        int(digit) * 10 ** (len(digits) - 1 - place) * smaller
        for place, digit in enumerate(digits)
        if digit != "0"
    ]
    while len(parts) > 1:
        text += " + ".join(map(str, parts)) + " = "
        parts[:2] = [parts[0] + parts[1]]
    return text + str(a * b)


def divisors(value: int, lowest: int, highest: int) -> list[int]:
    """The numbers of a range that divide `value` into at least two parts of at least one each."""
    return [d for d in range(lowest, min(highest, value) + 1) if value % d == 0]
