"""Longest first (longest processing time) as a strategy."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.fitting import fit_memory
from evenkeel.partitioning.problem import Problem
from evenkeel.partitioning.starts import longest_first


def lpt(problem: Problem) -> NDArray[np.int32]:
    """Longest first onto the least loaded rank with room."""
    start = longest_first(problem)
    return start if problem.terms.memory.size == 0 else fit_memory(problem, start)
