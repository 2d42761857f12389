"""Every assignment of a small instance, until one is within the memory caps."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel


@kernel
def least_overflow(
    memory: NDArray[np.int64],
    caps: NDArray[np.int64],
    fewest: NDArray[np.int64],
    most: NDArray[np.int64],
    budget: int,
    known: int,
    best: NDArray[np.int32],
) -> tuple[int, bool]:
    """The least memory above the caps that any assignment has, by branch and bound.

    Args:
        memory: (n,) of the samples, descending.
        caps: (num_ranks,) memory of each rank.
        fewest: (num_ranks,) samples of each rank at least.
        most: (num_ranks,) samples of each rank at most.
        budget: Placements to try.
        known: Overflow of an assignment that is known.
        best: (n,) takes the ranks of a better one.

    Returns:
        The least overflow found, and whether that is proven to be the least there is. It ends at the first of 0.
    """
    n, num_ranks = memory.size, caps.size
    used, counts = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    ranks = np.full(n, -1, np.int32)
    over = np.zeros(n + 1, np.int64)  # overflow of the first i samples
    after = np.zeros(n + 1, np.int64)  # memory of the samples from i on
    for i in range(n - 1, -1, -1):
        after[i] = after[i + 1] + memory[i]
    owed = 0
    for r in range(num_ranks):
        owed += fewest[r]
    depth = 0
    while depth >= 0:
        rank = ranks[depth]
        if rank >= 0:  # take the sample back
            used[rank] -= memory[depth]
            counts[rank] -= 1
            owed += counts[rank] < fewest[rank]
        rank += 1
        while rank < num_ranks:
            budget -= 1
            total = over[depth] + max(0, used[rank] + memory[depth] - max(caps[rank], used[rank]))
            left = n - depth - 1
            fits = counts[rank] < most[rank] and total < known
            fits = fits and (counts[rank] < fewest[rank] or owed <= left)
            earlier = 0
            while fits and earlier < rank:  # a rank in the same state has been tried
                fits = not (
                    caps[earlier] == caps[rank]
                    and used[earlier] == used[rank]
                    and counts[earlier] == counts[rank]
                    and fewest[earlier] == fewest[rank]
                    and most[earlier] == most[rank]
                )
                earlier += 1
            if fits:
                room = 0
                for r in range(num_ranks):
                    held = used[r] + (memory[depth] if r == rank else 0)
                    room += max(0, caps[r] - held)
                fits = total + max(0, after[depth + 1] - room) < known
            if fits:
                break
            rank += 1
        if rank == num_ranks:
            ranks[depth] = -1
            depth -= 1
        elif budget < 0:
            return known, False
        else:
            ranks[depth] = rank
            owed -= counts[rank] < fewest[rank]
            counts[rank] += 1
            used[rank] += memory[depth]
            over[depth + 1] = total
            if depth + 1 < n:
                depth += 1
            else:
                known = total
                for i in range(n):
                    best[i] = ranks[i]
                if known <= 0:
                    return known, True
    return known, True
