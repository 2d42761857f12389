"""How far a loop over a balanced loader is: what it has been handed, and the window that it is in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trainer_client.balancing.batches import FlatBatch, Schema
from trainer_client.balancing.half_windows import HalfWindow
from trainer_client.balancing.places import Place
from trainer_client.balancing.tickets import Outcome, Ticket


@dataclass(frozen=True, slots=True)
class Position:
    """What has been handed over: where the loader was, the batches of this pass, what is left of a window.

    Of the window that is to come, or left, also the schema, or its fields; None: this rank has no sample of it.
    """

    source: Place | None = None
    batches: int = 0
    half: HalfWindow | Callable[[], HalfWindow] | None = None
    fields: Schema | tuple[str, ...] | None = None


@dataclass(slots=True)
class Window:
    """A window that is in flight, with those of its batches that have not been started yet, once that is known."""

    ticket: Ticket
    flats: tuple[FlatBatch, ...]
    begin: Place | None
    end: Place
    batches: deque[int] = field(default_factory=deque)
    known: HalfWindow | None = None

    def half(self, outcome: Outcome, left: tuple[int, ...], size: int) -> HalfWindow:
        """What is known of it with batches left; the arrays are made once."""
        if self.known is None:
            self.known = HalfWindow.of(self.ticket.samples, outcome, left, size=size)
        return replace(self.known, left=left)

    @property
    def left(self) -> int:
        """Batches to come."""
        return len(self.batches)
