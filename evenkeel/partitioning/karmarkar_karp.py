"""The largest differencing method as a strategy."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.exchanging import exchange_from
from evenkeel.partitioning.fitting import fit_memory
from evenkeel.partitioning.problem import Problem
from evenkeel.partitioning.starts import differenced


def karmarkar_karp(problem: Problem) -> NDArray[np.int32]:
    """The largest differencing method; it knows no speeds or caps, which exchanges then see to."""
    start = differenced(problem)
    if problem.interchangeable and problem.terms.memory.size == 0:
        return start
    return exchange_from(problem, fit_memory(problem, start), plain=True, effort=1)[0]
