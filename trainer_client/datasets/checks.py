"""Checks of parameters, whose errors name field, value and remedy."""

from __future__ import annotations

import math
from numbers import Integral, Real


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
        if isinstance(value, bool) or not isinstance(value, Integral) or value < smallest:
            raise ValueError(f"{name} is {value!r}; use a whole number of at least {smallest}")


def check_number(field: str, value: object, *, above: float | None = None, least: float | None = None) -> None:
    """Checks that a value is a finite number that is large enough.

    Raises:
        ValueError: If it is not.
    """
    bound = f"above {above:g}" if above is not None else f"of at least {least:g}" if least is not None else ""
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not math.isfinite(value)
        or (above is not None and value <= above)
        or (least is not None and value < least)
    ):
        raise ValueError(f"{field} is {value!r}; use a finite number {bound}".rstrip())
