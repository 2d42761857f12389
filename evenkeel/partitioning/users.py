"""Users: samples of a user come to one rank, which looks up the keys that they share once.

Behind the plan of a round, and never at the price of load: every rank keeps its number of samples, and no rank gets
more to do than the fullest one of the plan has. The rows that a sample looks up count as what moving it takes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from evenkeel.partitioning.api import evenness
from evenkeel.partitioning.compile import NONE, ZERO, kernel
from evenkeel.partitioning.local_search import exchange_from
from evenkeel.partitioning.lpt import place, spill
from evenkeel.partitioning.memory import by_memory, check_fits, with_caps
from evenkeel.partitioning.problem import (
    Arrays,
    Floats,
    Integers,
    PartitionError,
    Problem,
    Ranks,
    ascending_order,
    largest_load,
    loads_of,
    make_problem,
    moved_sizes,
)
from evenkeel.partitioning.rounds import Found, RoundOptions, RoundSamples

# Of each rank's places, those that gathered samples may take: fewer where loads do not even out, which takes as many
# tries as there is time for. Many samples mostly even out at once.
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.25)
MANY = 1 << 13
ALONE = 1e-3  # of its size: what exchanging a sample takes that shares its rank with no other of its user


def gather_users(samples: RoundSamples, options: RoundOptions, found: Found) -> Found:
    """The refinement: a plan in which samples of a user are on fewer ranks, if that saves rows.

    A batch with samples in parts stays as it is, as do plans made without kernels.
    """
    assert samples.users is not None
    if options.stay or options.strategy == "plain" or isinstance(found, PartitionError):
        return found
    plan, users, num_ranks = found.destinations, samples.users.astype(np.int64), samples.num_ranks
    by_user = ascending_order(users)
    a, b = by_user[:-1], by_user[1:]
    if found.parts is not None or not ((users[a] == users[b]) & (plan[a] != plan[b])).any():
        return found
    speeds = np.array(options.speeds) if options.speeds else None
    caps = np.array(options.memory_caps) if options.memory_caps else None
    memory = None if caps is None else samples.memory
    problem = make_problem(
        samples.costs, samples.homes, num_ranks, sizes=samples.moving_sizes, counts="free",
        tolerance=options.tolerance, move_price=options.move_price, speeds=speeds, nodes=samples.nodes,
    )  # fmt: skip
    if memory is not None and caps is not None:
        problem = with_caps(problem, memory, caps)
    given = problem.arrays
    counts, planned = np.bincount(plan, minlength=num_ranks), loads_of(given.costs, plan, num_ranks)
    limits = np.minimum(largest_load(planned, given.speeds) * given.speeds, float(planned.sum())).astype(np.int64)
    arrays = given._replace(fewest=counts, most=counts, limits=np.maximum(limits, planned))
    for share in SHARES[: 1 + MANY // users.size]:
        ranks, overload = _exchanged(problem, arrays, share, users, by_user, plan)
        if overload <= 0:
            break
    loads = loads_of(problem.costs, ranks, num_ranks)
    largest, imbalance = evenness(loads, None if speeds is None else given.speeds)
    rows, rows_before = (rows_looked_up(users, by_user, given.sizes, each, num_ranks) for each in (ranks, plan))
    if largest > found.figures.max_load_after or rows >= rows_before:
        return found
    _, moved, size, between = moved_sizes(given.sizes, given.homes, given.nodes, ranks)
    figures = replace(
        found.figures, max_load_after=largest, imbalance_after=imbalance, moved_samples=moved, moved_size=round(size),
        moved_size_between_nodes=round(between),
    )  # fmt: skip
    with suppress(PartitionError):
        if memory is not None and caps is not None:
            check_fits(memory, caps, ranks)
        return replace(found, destinations=ranks, loads_after=loads[None].astype(np.float64), batches=(figures,))
    return found


def _exchanged(
    problem: Problem, arrays: Arrays, share: float, users: Integers, by_user: Ranks, plan: Ranks
) -> tuple[Ranks, float]:
    """The ranks of samples within limits, with users gathered in a share of each rank's places; the overload left."""
    places = arrays._replace(most=np.floor(share * arrays.most).astype(np.int64))
    gathered = gather(users, by_user, places, plan)
    alone = gathered < 0
    # These keep their rank of the plan where there is room beside those that were gathered.
    start, gathered_there = np.where(alone, plan, -1), np.bincount(gathered[~alone], minlength=places.most.size)
    spill(problem.order, places.most - gathered_there, start)
    start, sizes = np.where(alone, start, gathered), np.where(alone, ALONE * arrays.sizes, arrays.sizes)
    # From here on what is gathered is at home: exchanges break up as little of it as they can.
    problem = replace(problem, arrays=arrays._replace(homes=start, sizes=sizes))
    place(problem, start)
    if arrays.memory.size:
        start, _ = exchange_from(by_memory(problem), start, effort=1)
    ranks, overload = exchange_from(problem, start)
    return (ranks, overload) if overload <= 0 else exchange_from(problem, ranks, plain=False, effort=1)


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
def gather(users: Integers, by_user: Ranks, arrays: Arrays, plan: Ranks) -> Ranks:
    """(n,) the rank of each sample that is gathered with others of its user, or -1.

    Users with the heaviest samples first, since these look up most: each goes to that of the ranks with samples of it
    that has room for most of them, of several to the one with most time left; what finds no room there to the next of
    its ranks. `arrays.most` are the samples of each rank, and `arrays.limits` their loads.
    """
    n, gathered = users.size, np.full(users.size, -1, np.int32)
    room, load = arrays.most.copy(), np.zeros(arrays.most.size, np.int64)
    changes = np.flatnonzero(users[by_user[1:]] != users[by_user[:-1]]) + 1
    firsts, ends = np.append(np.zeros(1, np.int64), changes), np.append(changes, n)
    several = np.flatnonzero(ends - firsts > 1)
    below = np.append(np.zeros(1, np.int64), np.cumsum(arrays.costs[by_user]))
    mean = (below[ends] - below[firsts])[several] // (ends - firsts)[several]
    lightest_first = ascending_order(mean)
    for u in range(several.size - 1, -1, -1):
        user = lightest_first[u]
        own, cost = by_user[firsts[several[user]] : ends[several[user]]], mean[user]
        left = own.size
        while left > 1:
            best, most, longest = NONE, 1, 0.0
            for sample in own:
                if gathered[sample] >= 0:
                    continue
                rank = plan[sample]
                fits, slack = min(left, room[rank]), arrays.limits[rank] - load[rank]
                if fits * cost > slack:
                    fits = slack // cost
                if fits > most or (fits == most and fits > 1 and slack / arrays.speeds[rank] > longest):
                    best, most, longest = int(rank), fits, slack / arrays.speeds[rank]
            if best < 0:
                break
            for moves in (False, True):  # what is there already need not move
                for sample in own:
                    if most > 0 and gathered[sample] < 0 and (moves or plan[sample] == best):
                        gathered[sample] = best
                        load[best] += arrays.costs[sample]
                        room[best] -= 1
                        most -= 1
                        left -= 1
    return gathered
