"""Spares the log of lines that strangers could fill it with."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from services.security.rates import Bucket, Buckets


class Sparing:
    """Drops lines about a caller (those with `caller`) of which there are too many; the next one tells how many."""

    def __init__(
        self, *, rate: float = 1.0, burst: float = 20.0, rate_of_all: float = 20.0, burst_of_all: float = 500.0
    ):
        """Makes a processor of structlog.

        Args:
            rate: Lines a second with the same event and caller.
            burst: The same at once.
            rate_of_all: Lines a second about callers.
            burst_of_all: The same at once.
        """
        self._buckets = Buckets(rate=rate, burst=burst, most=1024)
        self._all = Bucket.full(rate=rate_of_all, burst=burst_of_all, now=time.monotonic())
        self._left_out = 0
        self._lock = threading.Lock()

    def __call__(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        """Lets an event pass, or drops it."""
        caller = event.get("caller")
        if caller is None:
            return event
        now = time.monotonic()
        with self._lock:
            if not self._buckets.try_take(f"{event.get('event')} {caller}", now) or not self._all.try_take(now):
                self._left_out += 1
                raise structlog.DropEvent
            left_out, self._left_out = self._left_out, 0
        return {**event, "left_out": left_out} if left_out else event
