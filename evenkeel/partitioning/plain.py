"""Plans without compiled kernels, for as long as these are compiled: longest first, in plain Python and NumPy."""

from __future__ import annotations

import heapq

import numpy as np

from evenkeel.partitioning.errors import PartitionNotFoundError
from evenkeel.partitioning.exchange import Floats, Integers, Ranks
from evenkeel.partitioning.problem import Arithmetic, Problem


def plain_partition(problem: Problem) -> Ranks:
    """(n,) rank of each sample: the heaviest first onto the rank that is done first, of those with room for it.

    Counts and memory caps are respected. It takes 1 ms for 8 ranks of 128 samples, 0.2 s for 1,024. It moves nearly
    everything, and it calls no kernel.
    """
    destinations = _placed(problem, problem.order[::-1].tolist())
    if destinations is None:  # what takes most memory first
        by_memory = np.argsort(-problem.arrays.memory, kind="stable").tolist()
        destinations = _placed(problem, by_memory, by_room=True)
    if destinations is None:
        raise PartitionNotFoundError(
            "no assignment within memory_caps was found while kernels are compiled; raise memory_caps, let counts be "
            "'free', or wait until the other strategies can be used"
        )
    return destinations


def _placed(problem: Problem, samples: list[int], *, by_room: bool = False) -> Ranks | None:
    """The samples in this order, each on the rank with the least load over speed, or with most room for memory."""
    arrays, fuller = problem.arrays, problem.num_fuller
    costs, speeds, most = arrays.costs.tolist(), arrays.speeds.tolist(), arrays.most.tolist()
    memory = arrays.memory.tolist() if arrays.caps.size else [0] * len(costs)
    room = arrays.caps.tolist() if arrays.caps.size else [0] * len(most)
    load, counts, destinations = [0] * len(most), [0] * len(most), [0] * len(costs)
    heap = [(-room[rank] if by_room else 0.0, -speeds[rank], rank) for rank in range(len(most))]
    heapq.heapify(heap)
    for sample in samples:
        aside = []
        while heap:
            first = heap[0]
            rank = first[2]
            if counts[rank] < most[rank] - (fuller == 0) and memory[sample] <= room[rank]:
                break
            heapq.heappop(heap)
            if counts[rank] < most[rank] - (fuller == 0):
                aside.append(first)
        else:
            return None
        destinations[sample] = rank
        load[rank] += costs[sample]
        counts[rank] += 1
        room[rank] -= memory[sample]
        fuller -= fuller > 0 and counts[rank] == most[rank]
        heapq.heapreplace(heap, (-room[rank] if by_room else load[rank] / speeds[rank], first[1], rank))
        for other in aside:
            heapq.heappush(heap, other)
    return np.array(destinations, np.int32)


def _counts_and_loads(costs: Integers, ranks: Ranks, num_ranks: int) -> tuple[Integers, Integers]:
    loads = np.zeros(num_ranks, np.int64)
    np.add.at(loads, ranks, costs)
    return np.bincount(ranks, minlength=num_ranks), loads


def _bound(costs: Integers, order: Ranks, speeds: Floats, fewest: Integers, most: Integers) -> float:
    if not costs.size:
        return 0.0
    below = np.concatenate([[0], np.cumsum(costs[order])])
    alone = (below[-1] - below[-2] + below[np.maximum(fewest - 1, 0)]) / speeds
    return max(float(below[-1] / sum(speeds.tolist())), float(alone[most > 0].min()))


def _limits(costs: Integers, speeds: Floats, bound: float, tolerance: float) -> Integers:
    limits, total = np.maximum(np.floor(bound * (1.0 + tolerance) * speeds), np.ceil(bound * speeds)), int(costs.sum())
    below = limits < float(total)
    return np.where(below, np.where(below, limits, 0.0).astype(np.int64), total)


def _moved(sizes: Floats, homes: Ranks, nodes: Ranks, destinations: Ranks) -> tuple[float, int, float, float]:
    moved, far = destinations != homes, nodes[destinations] != nodes[homes]
    size, between = float(np.cumsum(sizes * moved)[-1:].sum()), float(np.cumsum(sizes * far)[-1:].sum())
    return float(np.cumsum(sizes)[-1:].sum()), int(np.count_nonzero(moved)), size, between


PLAIN = Arithmetic(
    ascending_order=lambda values: np.argsort(values, kind="stable").astype(np.int32),
    counts_and_loads=_counts_and_loads,
    bound_on_largest=_bound,
    limits=_limits,
    moved=_moved,
)
"""What makes a problem without compiled kernels."""
