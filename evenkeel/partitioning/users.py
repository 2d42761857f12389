"""Users: samples of a user come to one rank, which looks up the keys that they share once.

Behind the plan of a round, and never at the price of load: every rank keeps its number of samples, and no rank gets
more to do than the fullest one of the plan has. The rows that a sample looks up count as what moving it takes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import evenness
from evenkeel.partitioning.compile import NONE, ZERO, kernel
from evenkeel.partitioning.local_search import everyone, exchange_from
from evenkeel.partitioning.lpt import place_in_groups
from evenkeel.partitioning.memory import by_memory, check_fits, with_caps
from evenkeel.partitioning.problem import (
    Arrays,
    Floats,
    Integers,
    PartitionError,
    Problem,
    Ranks,
    ascending_order,
    counts_and_loads,
    loads_of,
    make_problem,
    moved_sizes,
)
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundPlan, RoundSamples

# Of each rank's places, those that gathered samples may take: fewer where loads do not even out, which takes as many
# tries as there is time for. Many samples mostly even out at once.
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.25)
MANY = 1 << 13
ALONE = 1e-3  # of its size: what exchanging a sample takes that shares its rank with no other of its user


def gather_users(
    samples: RoundSamples, options: RoundOptions, found: RoundPlan | PartitionError
) -> RoundPlan | PartitionError:
    """The refinement: a plan in which samples of a user are on fewer ranks, in the batches in which that saves rows.

    Batches with samples in parts stay as they are, as do plans made without kernels.
    """
    if samples.users is None or options.stay or options.strategy == "plain" or isinstance(found, PartitionError):
        return found
    of = np.arange(len(samples)) if found.parts is None else np.cumsum(found.parts.begins == 0) - 1
    destinations, loads, batches = found.destinations.copy(), found.loads_after.copy(), list(found.batches)
    for batch, figures in enumerate(found.batches):
        own = slice(None) if found.steps is None else np.flatnonzero(found.steps == batch)
        if not figures.split_samples:
            better = _gather_batch(samples, options, of[own], destinations[own], figures)
            if better is not None:
                destinations[own], loads[batch], batches[batch] = better
    return replace(found, destinations=destinations, loads_after=loads, batches=tuple(batches))


def _gather_batch(
    samples: RoundSamples, options: RoundOptions, own: Integers, plan: Ranks, figures: Figures
) -> tuple[Ranks, NDArray[Any], Figures] | None:
    """The ranks of a batch's samples, their loads and the batch's figures; None where the plan is as good."""
    assert samples.users is not None
    users, num_ranks = samples.users[own].astype(np.int64), samples.num_ranks
    by_user = ascending_order(users)
    if not is_spread(users, by_user, plan):
        return None
    speeds = np.array(options.speeds) if options.speeds else None
    caps = np.array(options.memory_caps) if options.memory_caps else None
    memory = samples.memory[own] if caps is not None and samples.memory is not None else None
    problem = make_problem(
        samples.costs[own], samples.homes[own], num_ranks, sizes=samples.moving_sizes[own], counts="free",
        tolerance=options.tolerance, move_price=options.move_price, speeds=speeds, nodes=samples.nodes,
    )  # fmt: skip
    problem = with_caps(problem, memory, caps)
    given = problem.arrays
    counts, planned = counts_and_loads(given.costs, plan, num_ranks)
    longest = float((planned / given.speeds).max())
    limits = np.minimum(longest * given.speeds, float(planned.sum())).astype(np.int64)
    arrays = given._replace(fewest=counts, most=counts, limits=np.maximum(limits, planned))
    for share in SHARES[: 1 + MANY // users.size]:
        ranks, overload = _exchanged(problem, arrays, share, users, by_user, plan)
        if overload <= 0:
            break
    loads = loads_of(problem.costs, ranks, num_ranks)
    largest, imbalance = evenness(loads, None if speeds is None else given.speeds)
    rows, rows_before = (rows_looked_up(users, by_user, given.sizes, each, num_ranks) for each in (ranks, plan))
    if largest > figures.max_load_after or rows >= rows_before:
        return None
    _, moved, size, between = moved_sizes(given.sizes, given.homes, given.nodes, ranks)
    figures = replace(
        figures, max_load_after=largest, imbalance_after=imbalance, moved_samples=moved, moved_size=round(size),
        moved_size_between_nodes=round(between),
    )  # fmt: skip
    with suppress(PartitionError):
        check_fits(memory, caps, ranks)
        return ranks, loads, figures
    return None


def _exchanged(
    problem: Problem, arrays: Arrays, share: float, users: Integers, by_user: Ranks, plan: Ranks
) -> tuple[Ranks, float]:
    """The ranks of samples within limits, with users gathered in a share of each rank's places; the overload left."""
    places = arrays._replace(most=np.floor(share * arrays.most).astype(np.int64))
    start, sizes = gather(users, by_user, problem.order, places, plan)
    others = problem.order[start[problem.order] < 0]
    place_in_groups(problem, others, np.array([0, others.size]), everyone(problem.num_ranks), arrays.most, -1, start)
    # From here on what is gathered is at home: exchanges break up as little of it as they can.
    problem = replace(problem, arrays=arrays._replace(homes=start, sizes=sizes))
    if arrays.memory.size:
        start, _ = exchange_from(by_memory(problem), start, effort=1)
    ranks, overload = exchange_from(problem, start)
    return (ranks, overload) if overload <= 0 else exchange_from(problem, ranks, plain=False, effort=1)


@kernel
def is_spread(users: Integers, by_user: Ranks, ranks: Ranks) -> bool:
    """Whether samples of a user are on several ranks."""
    for x in range(1, by_user.size):
        a, b = by_user[x - 1], by_user[x]
        if users[a] == users[b] and ranks[a] != ranks[b]:
            return True
    return False


@kernel
def rows_looked_up(users: Integers, by_user: Ranks, sizes: Floats, ranks: Ranks, num_ranks: int) -> float:
    """Summed over the ranks: for each user with samples there the largest of these, as the others share its rows."""
    largest, latest, total, first = np.zeros(num_ranks), np.full(num_ranks, -1, np.int64), 0.0, ZERO
    for x in range(by_user.size):
        sample = by_user[x]
        if users[sample] != users[by_user[first]]:
            first = x
        rank = ranks[sample]
        if latest[rank] != first:
            latest[rank], largest[rank] = first, 0.0
        if sizes[sample] > largest[rank]:
            total += sizes[sample] - largest[rank]
            largest[rank] = sizes[sample]
    return total


@kernel
def gather(users: Integers, by_user: Ranks, by_cost: Ranks, arrays: Arrays, plan: Ranks) -> tuple[Ranks, Floats]:
    """(n,) the rank of each sample or -1 for any, and (n,) what taking it from there costs in rows.

    Users with the heaviest samples first, since these look up most: each goes to that of the ranks with samples of it
    that has room for most of them, of several to the one with most time left; what finds no room there to the next of
    its ranks. Samples that stay alone keep their rank of the plan where there is room beside those that were gathered.
    `arrays.most` are the samples of each rank, and `arrays.limits` their loads.
    """
    n, num_ranks = users.size, arrays.most.size
    costs, ranks, targets = np.empty(n, np.int64), np.empty(n, np.int64), np.full(n, -1, np.int32)  # by user
    begin, end, mean, num_users = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64), 0
    first, cost = 0, ZERO
    for x in range(n):
        costs[x], ranks[x] = arrays.costs[by_user[x]], plan[by_user[x]]
        cost += costs[x]
        if x + 1 == n or users[by_user[x + 1]] != users[by_user[x]]:
            if x > first:
                begin[num_users], end[num_users], mean[num_users] = first, x + 1, cost // (x + 1 - first)
                num_users += 1
            first, cost = x + 1, ZERO
    room, load = arrays.most.copy(), np.zeros(num_ranks, np.int64)
    present, head, following = np.empty(num_ranks, np.int64), np.full(num_ranks, -1), np.empty(n, np.int64)
    lightest_first = ascending_order(mean[:num_users])
    for i in range(num_users - 1, -1, -1):
        user = lightest_first[i]
        cost, left, waiting, num_present = mean[user], end[user] - begin[user], begin[user], 0
        for x in range(end[user] - 1, begin[user] - 1, -1):
            rank = ranks[x]
            if head[rank] < 0:
                present[num_present] = rank
                num_present += 1
            following[x], head[rank] = head[rank], x
        while left > 1:
            best, most, longest = NONE, 1, 0.0
            for y in range(num_present):
                rank = present[y]
                fits, slack = min(left, room[rank]), arrays.limits[rank] - load[rank]
                if fits * cost > slack:
                    fits = slack // cost
                if fits > most or (fits == most and fits > 1 and slack / arrays.speeds[rank] > longest):
                    best, most, longest = y, fits, slack / arrays.speeds[rank]
            if best < 0:
                break
            rank = present[best]
            left -= most
            room[rank] -= most
            at_home = head[rank]
            for _ in range(most):  # what is there already need not move
                while at_home >= 0 and targets[at_home] >= 0:
                    at_home = following[at_home]
                while targets[waiting] >= 0:
                    waiting += 1
                x = at_home if at_home >= 0 else waiting
                targets[x] = rank
                load[rank] += costs[x]
            num_present -= 1
            present[best], head[rank] = present[num_present], -1
        for y in range(num_present):
            head[present[y]] = -1
    gathered = np.empty(n, np.int32)
    for x in range(n):
        gathered[by_user[x]] = targets[x]
    sizes, alone, seen = arrays.sizes.copy(), np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for sample in range(n):
        if gathered[sample] < 0:
            alone[plan[sample]] += 1
            sizes[sample] *= ALONE
    for sample in by_cost:  # of too many, evenly over their sorted costs
        rank = plan[sample]
        if gathered[sample] < 0:
            kept = seen[rank] * room[rank] // alone[rank]
            seen[rank] += 1
            if room[rank] >= alone[rank] or seen[rank] * room[rank] // alone[rank] > kept:
                gathered[sample] = rank
    return gathered, sizes
