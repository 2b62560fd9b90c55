"""Checks of single values of a config; each names the key, what was given and what is expected."""

import math
from collections.abc import Iterable
from typing import Any


def check_whole(name: str, value: Any, low: int = 1) -> None:
    """A whole number of at least ``low``.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        expected = "a positive whole number" if low == 1 else f"a whole number of at least {low}"
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_number(name: str, value: Any, *, positive: bool = False, high: float = math.inf) -> None:
    """A finite number of at least 0 (above 0 if ``positive``) and at most ``high``.

    Raises:
        ValueError: it is none.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not 0 <= value <= high or (positive and value == 0):
        expected = "a positive number" if positive else "a number of at least 0"
        limit = f" and at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{name} must be {expected}{limit}, got {value!r}")


def check_switch(name: str, value: Any) -> None:
    """True or false.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """One of ``choices``.

    Raises:
        ValueError: it is none of them.
    """
    if value not in list(choices):
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
