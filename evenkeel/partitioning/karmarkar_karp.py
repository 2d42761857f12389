"""The largest differencing method as a strategy."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.exchanging import exchange_from
from evenkeel.partitioning.fitting import fit_memory
from evenkeel.partitioning.problem import Problem
from evenkeel.partitioning.starts import differenced


def karmarkar_karp(problem: Problem) -> NDArray[np.int32]:
    """The largest differencing method; it knows no speeds or caps, which exchanges then see to."""
    return evened(problem, fit_memory(problem, differenced(problem)))


def evened(problem: Problem, start: NDArray[np.int32]) -> NDArray[np.int32]:
    """The method's sets, where ranks differ exchanged until they suit them."""
    if problem.interchangeable and problem.terms.memory.size == 0:
        return start
    return exchange_from(problem, start, plain=True, effort=1)[0]
