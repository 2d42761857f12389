"""Where a search starts: the homes, or the sets that a constructive method makes, on the ranks that suit them best."""

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.differencing import difference_equal_counts, difference_free_counts
from evenkeel.partitioning.greedy import place_longest_first
from evenkeel.partitioning.groups import Groups, everyone
from evenkeel.partitioning.matching import match_sets
from evenkeel.partitioning.problem import Problem

SKEW = 1.5  # a home whose load is this many times its limit sheds samples in bulk before single ones are looked at


def kinds_of_ranks(problem: Problem) -> NDArray[np.int32]:
    """(num_ranks,) equal numbers for ranks that can exchange their whole sets."""
    terms = problem.terms
    counts = terms.most if problem.num_fuller < 0 else np.zeros_like(terms.most)
    if problem.interchangeable and int(counts.min()) == int(counts.max()):
        return np.zeros(problem.num_ranks, np.int32)
    columns = [counts.astype(np.float64), terms.speeds, *([terms.caps] if terms.caps.size else [])]
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int32)


def match_home(
    problem: Problem, sets: NDArray[np.int32], kinds: NDArray[np.int32], set_kinds: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Turn sets into destinations."""
    terms = problem.terms
    ranks = match_sets(sets, set_kinds, kinds, terms.homes, terms.sizes, terms.nodes)
    return ranks[sets]


def differenced(problem: Problem) -> NDArray[np.int32]:
    """Karmarkar-Karp's sets; with unequal ranks, larger sets go to faster ranks."""
    terms, num_ranks = problem.terms, problem.num_ranks
    method = difference_free_counts if problem.free else difference_equal_counts
    sets = method(terms.costs, problem.order, num_ranks)
    kinds = kinds_of_ranks(problem)
    if int(kinds.max()) == 0:
        return match_home(problem, sets, kinds, kinds)
    sums, counts = np.zeros(num_ranks, np.int64), np.bincount(sets, minlength=num_ranks)
    np.add.at(sums, sets, terms.costs)
    if problem.num_fuller >= 0 or problem.free:
        counts = np.zeros(num_ranks, np.int64)
        wanted = counts
    else:
        wanted = terms.most
    caps = terms.caps if terms.caps.size else np.zeros(num_ranks)
    set_order = np.lexsort((-sums, counts))
    rank_order = np.lexsort((-caps, -terms.speeds, wanted))
    set_kinds = np.empty(num_ranks, np.int32)
    set_kinds[set_order] = kinds[rank_order]
    return match_home(problem, sets, kinds, set_kinds)


def place_in_groups(
    problem: Problem,
    items: NDArray[np.int32],
    item_begin: NDArray[np.int64],
    groups: Groups,
    counts: NDArray[np.int64],
    most: NDArray[np.int64],
    num_fuller: int,
    destinations: NDArray[np.int32],
) -> None:
    """Place each group's items, ascending by cost, onto its ranks beside what `destinations` gives them already."""
    terms = problem.terms
    loads, used = np.zeros(problem.num_ranks, np.int64), np.zeros(problem.num_ranks, np.int64)
    if items.size < destinations.size:
        placed = np.flatnonzero(destinations >= 0)
        np.add.at(loads, destinations[placed], terms.costs[placed])
        if terms.memory.size:
            np.add.at(used, destinations[placed], terms.memory[placed])
    speeds = terms.speeds[:0] if bool((terms.speeds == terms.speeds[0]).all()) else terms.speeds
    place_longest_first(
        items, item_begin, *groups, terms.costs, terms.memory, speeds,
        loads, used, terms.caps, counts, most, num_fuller, destinations,
    )  # fmt: skip


def longest_first(problem: Problem) -> NDArray[np.int32]:
    """Samples in descending order of cost, each onto the least loaded rank with room."""
    terms, num_ranks = problem.terms, problem.num_ranks
    destinations = np.full(terms.costs.size, -1, np.int32)
    counts, begin = np.zeros(num_ranks, np.int64), np.array([0, destinations.size])
    groups = everyone(num_ranks)
    place_in_groups(problem, problem.order, begin, groups, counts, terms.most, problem.num_fuller, destinations)
    kinds = kinds_of_ranks(problem)
    return match_home(problem, destinations, kinds, kinds)


@kernel
def spill(order: NDArray[np.int32], keep: NDArray[np.int64], destinations: NDArray[np.int32]) -> None:
    """Take from ranks that hold more than `keep`, evenly over their sorted costs; what leaves becomes -1."""
    num_ranks = keep.size
    counts, seen = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for rank in destinations:
        if rank >= 0:
            counts[rank] += 1
    for i in order:
        rank = destinations[i]
        if rank >= 0 and counts[rank] > keep[rank]:
            surplus = counts[rank] - keep[rank]
            before = seen[rank] * surplus // counts[rank]
            seen[rank] += 1
            if seen[rank] * surplus // counts[rank] > before:
                destinations[i] = -1


def kept_at_home(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many of its own samples each rank may keep at the start, and how many samples it may then hold.

    Counts may force some to leave; with free counts, gross overload does.
    """
    terms, counts = problem.terms, problem.home_counts
    if problem.free:
        keep = counts.copy()
        over = problem.home_loads > SKEW * terms.limits
        keep[over] = (counts[over] * (terms.limits[over] / problem.home_loads[over])).astype(np.int64)
        return keep, terms.most
    keep = terms.fewest.copy()
    fuller = np.argsort(-counts, kind="stable")[: max(problem.num_fuller, 0)]
    keep[fuller] = terms.most[fuller]
    return keep, keep


def at_home(problem: Problem) -> NDArray[np.int32]:
    """The homes, after whatever had to leave went where the load is least."""
    destinations = problem.terms.homes.copy()
    if problem.terms.most is problem.home_counts:  # the homes are as even as counts get
        return destinations
    keep, most = kept_at_home(problem)
    if bool((problem.home_counts <= keep).all()):
        return destinations
    spill(problem.order, keep, destinations)
    pool = problem.order[destinations[problem.order] < 0]
    counts = np.minimum(problem.home_counts, keep)
    place_in_groups(
        problem, pool, np.array([0, pool.size]), everyone(problem.num_ranks), counts, most, -1, destinations
    )
    return destinations
