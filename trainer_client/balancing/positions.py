"""How far a loop over a balanced loader is: what it has been handed, and the window that it is in."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.samples import RankSamples

if TYPE_CHECKING:  # which carry what is here
    from trainer_client.balancing.batches import FlatBatch, Schema
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HalfWindow:
    """A window that was handed over in part, as one rank knows it.

    Attributes:
        size: Batches that all of a window have room for.
        left: Which of them have not been handed over, in order.
        last: The pass ends with this window.
        batch_sizes: Samples that this rank loaded for each of its batches.
        steps: (n,) uint8, the batch that trains each of its samples.
        ranks: (n,) uint16, the rank that trains it.
        lengths: Checksum of the samples' lengths, by which they are known again.
    """

    size: int
    left: tuple[int, ...]
    last: bool
    batch_sizes: tuple[int, ...]
    steps: NDArray[np.uint8]
    ranks: NDArray[np.uint16]
    lengths: int

    @classmethod
    def of(cls, samples: RankSamples, outcome: Outcome, left: Sequence[int], *, size: int) -> HalfWindow:
        """That of a round.

        Args:
            samples: This rank's.
            outcome: What all ranks agreed on.
            left: Batches that have not been handed over.
            size: Batches of a window.
        """
        steps = outcome.plan.steps
        if steps is None:
            sizes = samples.sizes_by_batch
            steps = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        batch = steps.astype(np.uint8)  # which NumPy sorts in a third of the time
        ranks = np.empty(len(samples), np.uint16)
        ranks[np.argsort(batch, kind="stable")] = np.concatenate([piece.destinations for piece in outcome.plan.slices])
        return cls(
            size=size,
            left=tuple(left),
            last=outcome.verdict.last,
            batch_sizes=samples.sizes_by_batch if len(samples) else (),
            steps=batch,
            ranks=ranks,
            lengths=_checksum(samples),
        )

    @property
    def given(self) -> NDArray[np.int64]:
        """(n,) batch and rank of each sample in one number, as `RankSamples.given`."""
        return self.steps.astype(np.int64) << 32 | self.ranks.astype(np.int64)

    @property
    def trained(self) -> list[NDArray[np.bool_]]:
        """Per batch as loaded, which of its samples have been handed over, wherever they were trained."""
        begins = np.cumsum((0, *self.batch_sizes))
        done = ~np.isin(self.steps, np.array(self.left, np.uint8))
        return [done[begins[batch] : begins[batch + 1]] for batch in range(len(self.batch_sizes))]

    def differs(self, samples: RankSamples) -> str:
        """How the samples that were read again are not those of before; empty if they are."""
        sizes = samples.sizes_by_batch if len(samples) else ()
        if sizes != self.batch_sizes:
            return f"its loader gave batches of {list(sizes)} samples where they had {list(self.batch_sizes)} before"
        if _checksum(samples) != self.lengths:
            return "its loader gave samples of other lengths than before"
        return ""

    def to_state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "size": self.size, "left": list(self.left), "last": self.last, "batch_sizes": list(self.batch_sizes),
            "steps": self.steps.tobytes(), "ranks": self.ranks.astype("<u2").tobytes(), "lengths": self.lengths,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> HalfWindow:
        """Reads what `to_state` wrote."""
        return cls(
            size=int(state["size"]),
            left=tuple(map(int, state["left"])),
            last=bool(state["last"]),
            batch_sizes=tuple(map(int, state["batch_sizes"])),
            steps=np.frombuffer(state["steps"], np.uint8),
            ranks=np.frombuffer(state["ranks"], "<u2").astype(np.uint16),
            lengths=int(state["lengths"]),
        )


def _checksum(samples: RankSamples) -> int:
    return zlib.crc32(np.ascontiguousarray(samples.lengths, dtype=np.int64).tobytes())
