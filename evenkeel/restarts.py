"""Restarts of a run: one number that grows with each of them, and what people read of it."""

from __future__ import annotations

from datetime import UTC, datetime

MAX_STARTS = 99_999
"""Restarts by a launcher that can be counted; a number beyond them is a clock's."""

_STARTS_OF_AGENT = 10_000  # restarts by torchrun that are told apart within one start by the launcher above it
_FIRST_CLOCK = (MAX_STARTS + 1) * _STARTS_OF_AGENT  # a second of the year 2001


def restart_number(starts: int, elastic: int = 0) -> int:
    """The number of a start, which a later one exceeds: torchrun counts from 0 again whenever it is started itself.

    Args:
        starts: Restarts by the launcher, 0 to `MAX_STARTS`.
        elastic: Restarts by torchrun below it.
    """
    return starts * _STARTS_OF_AGENT + min(elastic, _STARTS_OF_AGENT - 1)


def restart_text(number: int) -> str:
    """What was counted: `2`; `1.2` for torchrun's second restart in the first of the launcher above it; or a time."""
    if number >= _FIRST_CLOCK:
        return f"{datetime.fromtimestamp(number, UTC):%Y-%m-%d %H:%M:%S UTC}"
    starts, elastic = divmod(number, _STARTS_OF_AGENT)
    return f"{starts}.{elastic}" if starts and elastic else str(starts or elastic)
