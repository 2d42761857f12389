"""What a job of the search is, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

Data = Literal["sampler", "budget", "loader", "skip"]
Stop = Literal["kill_one", "kill_all", "raise", "terminate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledJob:
    """A job and what befalls it.

    Attributes:
        seed: From which it was drawn.
        data: How the loader's place is found: two samplers of the whole job, a loader with a state, skipping.
        samples: Of the data set.
        global_batch: Samples of a step, over all ranks.
        epochs: Over the data.
        window: Batches that are balanced together; 1 where the number of ranks changes.
        depth: Windows in flight.
        workers: Of each rank's `DataLoader`.
        balancer: Where plans come from.
        evaluate_every: Steps between two loops over a second loader, nested in the training loop; 0: none.
        save_every: Steps between two checkpoints.
        worlds: Ranks of each run, the last one for all further runs.
        stops: What ends each run, but the last.
    """

    seed: int
    data: Data
    samples: int
    global_batch: int
    epochs: int
    window: int
    depth: int
    workers: int
    balancer: Literal["embedded", "off"]
    evaluate_every: int
    save_every: int
    worlds: tuple[int, ...]
    stops: tuple[Stop, ...]

    @property
    def steps(self) -> int:
        """About how many steps it takes."""
        return -(-self.samples // self.global_batch) * self.epochs

    def world_size(self, run: int) -> int:
        """Ranks of a run."""
        return self.worlds[min(run, len(self.worlds) - 1)]

    @property
    def elastic(self) -> bool:
        """Whether the number of ranks changes, which changes sums of floating-point numbers."""
        return len(set(self.worlds)) > 1


def draw(seed: int, max_ranks: int) -> KilledJob:
    """A job."""
    pick = random.Random(seed)
    data: Data = pick.choices(get_args(Data), (4, 3, 2, 1))[0]
    stops = tuple(pick.choices(get_args(Stop), (4, 3, 2, 2), k=pick.randint(2, 6)))
    first = pick.randint(1, max_ranks)
    worlds: tuple[int, ...] = (first,)
    if data in ("sampler", "budget") and pick.random() < 0.6:
        worlds = (first, *(pick.randint(1, max_ranks) for _ in stops))
    global_batch = pick.randint(max(worlds), 8 * max(worlds))
    if len(worlds) == 1:
        global_batch -= global_batch % first  # a loader of each rank's own has as many samples on each
    samples = pick.randint(10, 25) * global_batch + pick.randrange(global_batch)
    if data == "skip":  # DistributedSampler repeats samples where they do not come out even
        samples -= samples % first
    return KilledJob(
        seed=seed,
        data=data,
        samples=samples,
        global_batch=global_batch,
        epochs=pick.randint(1, 3),
        window=pick.choice((1, 1, 2, 3, 5)) if len(set(worlds)) == 1 else 1,  # a window needs as many ranks as before
        depth=pick.randint(1, 3),
        workers=pick.choice((0, 0, 2)) if data != "loader" else 0,
        balancer=pick.choices(("embedded", "off"), (5, 1))[0],
        evaluate_every=pick.choice((0, 0, 7)),
        save_every=pick.choice((1, 2, 3, 5)),
        worlds=worlds,
        stops=stops,
    )
