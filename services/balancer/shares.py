"""What callers share: sessions, streams, memory. None may hold more than is left free, so there is room for the next.

A caller alone can take half of everything, two a third each: whoever comes later always finds as much as the greediest
holds. No quota needs to be set, and none goes unused.
"""

from __future__ import annotations

import weakref
from collections import deque

Holder = tuple[str, str]
"""A caller and its job."""


class Shares:
    """A good of which there is only so much.

    Attributes:
        total: How much there is.
        used: How much is held.
        refused: How often there was not enough.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.refused = 0
        self._callers: dict[str, int] = {}
        self._jobs: dict[Holder, int] = {}
        self._returned: deque[tuple[Holder, int]] = deque()
        self._entrusted: set[weakref.ref[object]] = set()

    def take(self, holder: Holder, amount: int = 1) -> bool:
        """Takes `amount` for a job of a caller, if then neither holds more than was free for it."""
        self._settle()
        caller = holder[0]
        free, of_caller, of_job = self.total - self.used, self._callers.get(caller, 0), self._jobs.get(holder, 0)
        if of_caller + amount > free or (holder[1] and of_job + amount > free - of_caller):
            self.refused += 1
            return False
        self.force(holder, amount)
        return True

    def force(self, holder: Holder, amount: int) -> None:
        """Takes `amount` also where there is not enough: what is there already must be counted."""
        self.used += amount
        self._callers[holder[0]] = self._callers.get(holder[0], 0) + amount
        self._jobs[holder] = self._jobs.get(holder, 0) + amount

    def give(self, holder: Holder, amount: int = 1) -> None:
        """Gives back what was taken."""
        if not amount:
            return
        self.used -= amount
        _subtract(self._callers, holder[0], amount)
        _subtract(self._jobs, holder, amount)

    def give_later(self, holder: Holder, amount: int) -> None:
        """The same from any thread, and from finalisers, which may run in the middle of anything."""
        self._returned.append((holder, amount))

    def give_with(self, thing: object, holder: Holder, amount: int) -> None:
        """Gives back what was taken when nothing holds the thing any more."""

        def gone(reference: weakref.ref[object]) -> None:
            self._entrusted.discard(reference)
            self.give_later(holder, amount)

        self._entrusted.add(weakref.ref(thing, gone))

    def held(self, caller: str) -> int:
        """What a caller holds."""
        self._settle()
        return self._callers.get(caller, 0)

    @property
    def largest(self) -> int:
        """What the greediest caller holds."""
        return max(list(self._callers.values()), default=0)

    def _settle(self) -> None:
        while self._returned:
            self.give(*self._returned.popleft())


class Account:
    """What one session, stream or call holds of a good, to be given back together.

    Attributes:
        held: How much.
    """

    __slots__ = ("_holder", "_shares", "held")

    def __init__(self, shares: Shares | None = None, holder: Holder = ("", "")) -> None:
        """Opens an account.

        Args:
            shares: The good; None: as much as anybody wants.
            holder: Who holds it.
        """
        self._shares = shares
        self._holder = holder
        self.held = 0

    def take(self, amount: int) -> bool:
        """Takes more, if there is enough."""
        if self._shares is not None and not self._shares.take(self._holder, amount):
            return False
        self.held += amount
        return True

    def force(self, amount: int) -> None:
        """Takes more in any case."""
        self.held += amount
        if self._shares is not None:
            self._shares.force(self._holder, amount)

    def give(self, amount: int) -> None:
        """Gives some back."""
        self.held -= amount
        if self._shares is not None:
            self._shares.give(self._holder, amount)

    def entrust(self, thing: object, amount: int) -> None:
        """Hands a part of it to a thing, which gives it back when nothing holds the thing any more."""
        self.held -= amount
        if self._shares is not None:
            self._shares.give_with(thing, self._holder, amount)

    def close(self) -> None:
        """Gives all of it back."""
        self.give(self.held)


def _subtract(held: dict[str, int] | dict[Holder, int], key: str | Holder, amount: int) -> None:
    left = held[key] - amount  # type: ignore[index]
    if left:
        held[key] = left  # type: ignore[index]
    else:
        del held[key]  # type: ignore[arg-type]
