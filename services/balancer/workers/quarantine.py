"""Sessions whose rounds end their processes get no plans for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_MAX_SESSIONS = 4096  # that are remembered
_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 60.0


class Quarantine:
    """Backs off: from half a second after the first death, four times as long after each, up to a minute."""

    def __init__(self) -> None:
        self._strikes: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def strike(self, now: float, session: Hashable) -> float:
        """A round of the session has ended its process; returns for how many seconds it gets no plan."""
        strikes = self._strikes.pop(session, (0, 0.0))[0] + 1
        pause = min(_LONGEST_SECONDS, _FIRST_SECONDS * 4.0 ** min(strikes - 1, 8))
        self._strikes[session] = (strikes, now + pause)
        if len(self._strikes) > _MAX_SESSIONS:
            self._strikes.popitem(last=False)
        return pause

    def remaining(self, now: float, session: Hashable) -> float:
        """Seconds until the session gets a plan again; 0 if it does."""
        return max(0.0, self._strikes.get(session, (0, 0.0))[1] - now)

    def strikes(self, session: Hashable) -> int:
        """Deaths that are held against the session."""
        return self._strikes.get(session, (0, 0.0))[0]

    def forgive(self, session: Hashable) -> None:
        """A round of the session got its plan: one death less is held against it."""
        if session in self._strikes:
            strikes, until = self._strikes[session]
            if strikes > 1:
                self._strikes[session] = (strikes - 1, until)
            else:
                del self._strikes[session]
