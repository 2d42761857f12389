"""Writes lines for a program that must not wait for whoever reads them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from services.security.rates import Bucket, Buckets

_MAX_BYTES = 1 << 20
_CLOSE_SECONDS = 1.0


class BackgroundWriter:
    """A text stream whose lines another thread writes; when too many wait, they are left out and counted."""

    def __init__(self, stream: TextIO, *, max_bytes: int = _MAX_BYTES) -> None:
        """Starts the thread.

        Args:
            stream: Where the lines go in the end.
            max_bytes: Of lines that may wait.
        """
        self._stream = stream
        self._max_bytes = max_bytes
        self._lines: deque[str] = deque()
        self._bytes, self._lost = 0, 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Takes text to be written soon."""
        with self._changed:
            if self._bytes + len(text) > self._max_bytes:
                self._lost += 1
            else:
                self._lines.append(text)
                self._bytes += len(text)
                self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Waits for nothing: lines are written as soon as they can be."""

    def isatty(self) -> bool:
        """Whether a person reads along."""
        return self._stream.isatty()

    def close(self) -> None:
        """Writes what is left, within a second."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._lost and not self._closed:
                    self._changed.wait()
                text, lost = "".join(self._lines), self._lost
                self._lines.clear()
                self._bytes = len(text)  # until it is written: it still takes memory
                self._lost = 0
                if not text and not lost and self._closed:
                    return
            if lost:
                text += f"{lost} lines of the log were left out: they came faster than they could be written\n"
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more
                self._stream.write(text)
                self._stream.flush()
            with self._changed:
                self._bytes = sum(map(len, self._lines))


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
