"""How long a stream that has ended waits before it is opened again."""

from __future__ import annotations

import random

FIRST_SECONDS = 0.1
REFUSED_SECONDS = 5.0  # longest pause after the service itself has said no
ATTEMPTS_PER_SECOND = 200  # of all streams together, about, while nobody answers
HERD_PER_SECOND = 2000  # opened together, about, once one of them has got through


class Backoff:
    """Pauses between attempts; the streams of a job share the work of finding out that the service is back.

    While nobody answers, pauses double from 0.1 s up to 0.5 s, and more with the number of streams (5 s at 1000), so
    that the first of many finds a service that has returned within some milliseconds, and any within 0.75 s (of up to
    100). The others hear of that in the next agreement (`encouraged`) and do not sit out their own pauses.
    """

    def __init__(self, num_streams: int) -> None:
        self._longest = min(max(0.5, num_streams / ATTEMPTS_PER_SECOND), REFUSED_SECONDS)
        self._herd_seconds = num_streams / HERD_PER_SECOND
        self._last = 0.0

    def after(self, *, joined: bool, refused: bool) -> float:
        """Seconds to wait after an attempt, with jitter.

        Args:
            joined: The stream had been joined before it ended.
            refused: The service answered that it does not want it.
        """
        longest = REFUSED_SECONDS if refused else self._longest
        self._last = FIRST_SECONDS if joined else min(2 * max(self._last, FIRST_SECONDS / 2), longest)
        return self._last * random.uniform(0.5, 1.5)

    def encouraged(self) -> float:
        """Seconds to wait instead when another rank has got through."""
        self._last = 0.0
        return random.uniform(0.0, self._herd_seconds)
