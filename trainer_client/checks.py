"""Checks of parameters, whose errors name field, value and remedy."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; truth values are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number; truth values are none."""
    return not isinstance(value, bool) and (isinstance(value, Real) and math.isfinite(value))


def check_whole(options: object, **least: int) -> None:
    """Checks that fields are whole numbers that are not too small.

    Args:
        options: What has the fields.
        least: Smallest allowed value by field.

    Raises:
        ValueError: If one is not.
    """
    for name, smallest in least.items():
        value = getattr(options, name)
        if not is_whole(value) or value < smallest:
            raise ValueError(f"{name} is {value!r}; use a whole number of at least {smallest}")


def check_number(field: str, value: Any, *, above: float | None = None, least: float | None = None) -> None:
    """Checks that a value is a finite number that is large enough.

    Raises:
        ValueError: If it is not.
    """
    bound = f"above {above:g}" if above is not None else f"of at least {least:g}" if least is not None else ""
    if not is_number(value) or (above is not None and value <= above) or (least is not None and value < least):
        raise ValueError(f"{field} is {value!r}; use a finite number {bound}".rstrip())
