"""Waiting for what comes by itself."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    read: Callable[[], T], seconds: float = 60.0, *, but: type[Exception] | tuple[type[Exception], ...] = ()
) -> T:
    """What is read, as soon as it is something true; errors of some kinds mean that it is not there yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := read():
                return found
            assert time.monotonic() < deadline, f"after {seconds:g} s it is still {found!r}"
        except but:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)
