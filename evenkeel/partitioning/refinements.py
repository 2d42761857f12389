"""How a round is planned, by the balancer and by the lead: each batch is partitioned, then what a partition cannot do.

A refinement takes the plan of a batch from the one before it, or why there is none within the memory caps, and returns
a better one, or what it was given. It is listed with what tells whether a round asks for it. Without its line here,
rounds are planned without what it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from evenkeel.partitioning.rounds import Found, RoundOptions, RoundPlan, RoundSamples, partition_batches
from evenkeel.partitioning.slices import Slices, slices_of
from evenkeel.partitioning.split_search import split_heavy
from evenkeel.partitioning.splits import part_lengths, samples_of_parts
from evenkeel.partitioning.users import gather_users
from evenkeel.partitioning.windows import gather_heavy

Refinement: TypeAlias = Callable[[RoundSamples, RoundOptions, Found], Found]
REFINEMENTS: tuple[tuple[Refinement, Callable[[RoundSamples, RoundOptions], bool]], ...] = (
    (split_heavy, lambda samples, options: options.split is not None and samples.divisible is not None),
    (gather_users, lambda samples, _: samples.users is not None),
)


def plan_round(samples: RoundSamples, options: RoundOptions) -> RoundPlan:
    """Decides which rank trains which sample of a round.

    The same arguments give the same plan on every machine; only `seconds` differs.

    Raises:
        PartitionError: If no assignment within the memory caps was found.
        ValueError: If an argument is wrong; the message names it and its remedy.
    """
    began = time.perf_counter()
    batches = partition_batches(samples, options)
    batches = gather_heavy(samples, options, batches) if samples.steps is not None else batches
    for refine, is_asked in REFINEMENTS:
        if is_asked(samples, options):
            pairs = zip(batches.samples, batches.plans, strict=True)
            batches = batches._replace(plans=[refine(one, options, found) for one, found in pairs])
    return replace(batches.joined(samples), seconds=time.perf_counter() - began)


def slice_round(plan: RoundPlan, samples: RoundSamples, *, compiled: bool = True) -> Slices:
    """Cuts a plan into what each rank needs; the samples are those that it was made of, with their lengths."""
    counts, lengths = samples.counts_at_home, samples.lengths
    if plan.parts is not None:
        assert samples.roles is not None
        lengths = part_lengths(lengths, plan.parts.begins, samples.roles)
        of = samples_of_parts(plan.parts.begins)
        counts = np.bincount(samples.homes[of], minlength=samples.num_ranks)
    return slices_of(plan.destinations, counts, lengths, plan.steps, samples.num_batches, compiled=compiled)
