"""A heap of ranks, the one of greatest weight on top; of equal ones the lowest rank, so that ties break alike."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import step


@step
def sink(heap: NDArray[np.int64], size: int, i: int, weights: NDArray[np.float64]) -> None:
    """Let the rank at place `i` sink to where it belongs, after its weight has fallen."""
    if i >= size:
        return
    rank = heap[i]
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size:
            x, y = heap[child], heap[child + 1]
            if weights[y] > weights[x] or (weights[y] == weights[x] and y < x):
                child += 1
        other = heap[child]
        if weights[rank] > weights[other] or (weights[rank] == weights[other] and rank < other):
            break
        heap[i] = other
        i = child
    heap[i] = rank


@step
def push(heap: NDArray[np.int64], size: int, rank: int, weights: NDArray[np.float64]) -> None:
    """Add a rank to a heap of `size` ranks."""
    place = size
    while place > 0:
        other = heap[(place - 1) // 2]
        if weights[other] > weights[rank] or (weights[other] == weights[rank] and other < rank):
            break
        heap[place] = other
        place = (place - 1) // 2
    heap[place] = rank
