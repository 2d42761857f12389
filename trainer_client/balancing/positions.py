"""How far a loop over a balanced loader is: what it has been handed, and the window that it is in."""

from __future__ import annotations

import base64
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import RankPlan
from evenkeel.partitioning.samples import RankSamples
from trainer_client.balancing.options import MAX_WINDOW

if TYPE_CHECKING:  # which carry what is here
    from evenkeel.partitioning.splits import SplitSample
    from trainer_client.balancing.batches import FlatBatch
    from trainer_client.balancing.places import Place
    from trainer_client.balancing.redistribution import Pending
    from trainer_client.balancing.report import RoundReport
    from trainer_client.balancing.tickets import Ticket

Plain = dict[str, Any]
"""Strings, numbers, lists and dicts, as states are made of; who has made one leaves it as it is."""


@dataclass(slots=True)
class Position:
    """What has been handed over: where the loader was, the batches of this pass, what is left of a window.

    Attributes:
        source: Where the loader was before the first window that was not wholly handed over.
        batches: Of this pass.
        window: That window, if some of it was, as `plain_window` made it; None between two windows.
        left: Its batches that were not.
        fields: Of the window to come, or left, as `Schema.constant_lines`; empty: this rank has no sample of it.
    """

    source: Place | None = None
    batches: int = 0
    window: Plain | None = None
    left: list[int] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)


class Moving(NamedTuple):
    """A batch on its way to the loop."""

    pending: Pending
    report: RoundReport
    splits: tuple[SplitSample, ...]
    position: Position


@dataclass(slots=True)
class Window:
    """A window that is in flight, with those of its batches that have not been started yet, once that is known."""

    ticket: Ticket
    flats: tuple[FlatBatch, ...]
    begin: Place | None
    end: Place
    batches: deque[int] = field(default_factory=deque)

    @property
    def left(self) -> int:
        """Batches to come."""
        return len(self.batches)


def plain_window(samples: RankSamples, plan: RankPlan, *, size: int, last: bool) -> Plain:
    """What a state tells of a window that is handed over in part, but for what is left of it.

    Args:
        samples: This rank's.
        plan: That all ranks agreed on.
        size: Batches of a window.
        last: The pass ends with this one.
    """
    steps = _as_loaded(samples.sizes_by_batch) if plan.steps is None else plan.steps.astype(np.uint8)
    ranks = np.concatenate([plan.ranks_in(batch) for batch in range(len(plan.slices))]).astype("<u2")
    packed = zlib.compress(steps.tobytes() + ranks.tobytes(), 1)  # most stay at home, in their batch
    return {
        "size": size, "last": last, "batch_sizes": list(samples.sizes_by_batch) if len(samples) else [],
        "plan": base64.b64encode(packed).decode(), "lengths": _checksum(samples),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HalfWindow:
    """A window that was handed over in part, as one rank's state tells it.

    Attributes:
        size: Batches that all of a window have room for.
        left: Which of them have not been handed over, in order.
        last: The pass ends with this window.
        batch_sizes: Samples that this rank loaded for each of its batches.
        steps: (n,) uint8, the batch that trains each of its samples.
        ranks: (n,) uint16, the rank that trains it.
        lengths: Checksum of the samples' lengths, by which they are known again.
        plain: The state that it was read from.
    """

    size: int
    left: tuple[int, ...]
    last: bool
    batch_sizes: tuple[int, ...]
    steps: NDArray[np.uint8]
    ranks: NDArray[np.uint16]
    lengths: int
    plain: Plain

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

    @classmethod
    def from_state(cls, state: Plain, world_size: int) -> HalfWindow:
        """Reads what `plain_window` made, with `left`.

        Args:
            state: That.
            world_size: Of the job that it is of.

        Raises:
            ValueError: If it is something else.
        """
        sizes, left = tuple(map(int, state["batch_sizes"])), tuple(map(int, state["left"]))
        packed = zlib.decompress(base64.b64decode(state["plan"], validate=True))
        count, size = sum(sizes), int(state["size"])
        fits = len(packed) == 3 * count and min(sizes, default=0) >= 0 and len(sizes) <= size <= MAX_WINDOW
        steps = np.frombuffer(packed, np.uint8, count if fits else 0)
        destinations = np.frombuffer(packed, "<u2", offset=count if fits else len(packed))
        fits &= steps.max(initial=0) < size and destinations.max(initial=0) < world_size
        if not fits or not left or list(left) != sorted({*left} & {*range(size)}):
            raise ValueError(
                f"the window's plan does not fit {size} batches of {list(sizes)} samples, {list(left)} left"
            )
        ranks = np.empty(count, np.uint16)
        ranks[np.argsort(steps, kind="stable")] = destinations
        return cls(
            size=size, left=left, last=bool(state["last"]), batch_sizes=sizes, steps=steps, ranks=ranks,
            lengths=int(state["lengths"]), plain={name: value for name, value in state.items() if name != "left"},
        )  # fmt: skip


def _as_loaded(sizes: Sequence[int]) -> NDArray[np.uint8]:
    return np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)


def _checksum(samples: RankSamples) -> int:
    return zlib.crc32(np.ascontiguousarray(samples.lengths, dtype=np.int64).tobytes())
