"""Random rounds for the tests of the wire and of the balancer."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning.delays import Cause, Delay
from evenkeel.partitioning.rounds import RoundOptions, RoundSamples
from evenkeel.partitioning.speeds import Straggler
from evenkeel.partitioning.splits import ALL, FIRST, LAST, SpanCosts, SplitOptions, check_table, table_of
from evenkeel.protocol.plan_round import RoundNames, RunFacts, write_request

ROLES = np.array([1, 2, LAST, FIRST, ALL])
HEAD, GRANULE = 3, 2  # of a sequence whose items are two positions, behind three contextual ones


@dataclass(frozen=True)
class Round:
    """What the lead asks of the balancer."""

    samples: RoundSamples
    options: RoundOptions
    names: RoundNames
    facts: RunFacts


def request_of(one: Round) -> bytes:
    return write_request(one.samples, one.options, one.names, one.facts)


def make_round(
    ranks: int = 3,
    batch: int = 4,
    *,
    seed: int = 0,
    batches: int = 1,
    fields: int = 4,
    names: RoundNames | None = None,
    facts: RunFacts | None = None,
    **options: Any,
) -> Round:
    """A round of ranks with as many samples each, some of them long."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(6, 1.2, (ranks * batches * batch, fields))), 1, 8192).astype(np.uint32)
    longest = lengths[:, 0].astype(np.int64)
    samples = RoundSamples(
        batch_sizes=np.full((ranks, batches), batch, np.int64), costs=longest**2 + 1024 * longest, lengths=lengths
    )
    return Round(samples, RoundOptions(**options), names or RoundNames(job="job"), facts or RunFacts())


def split_samples(items: NDArray[np.int64], batch_sizes: NDArray[np.int64], rng: np.random.Generator) -> RoundSamples:
    """Samples of so many items, of which the long ones may be split."""
    spans = SpanCosts.of(HEAD + GRANULE * items, context=HEAD, per_position=20, per_pair=1, granule=GRANULE)
    heavy = np.flatnonzero(items > 60)
    divisible = table_of(spans.take(heavy), heavy, np.full(heavy.size, float(HEAD)))
    assert check_table(divisible, spans.whole) == ""
    return RoundSamples(
        batch_sizes=batch_sizes,
        costs=spans.whole,
        lengths=np.column_stack([items, 2 * items, rng.integers(0, 5, (items.size, 3))]).astype(np.uint32),
        divisible=divisible,
        roles=ROLES,
    )


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    """Of a few ranks and batches, with and without nodes, speeds, memory caps, fractions, giants that may be split."""
    num_ranks, num_batches = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch_sizes = rng.integers(0, 6, (num_ranks, num_batches))
    n = int(batch_sizes.sum())
    items = np.where(rng.random(n) < draw(st.floats(0, 0.4)), rng.integers(61, 800, n), rng.integers(0, 60, n))
    whole = split_samples(items, batch_sizes, rng)
    splits, capped = draw(st.booleans()), draw(st.booleans())
    samples = replace(
        whole,
        costs=whole.costs if splits or draw(st.booleans()) else whole.costs.astype(np.int64),
        sizes=rng.integers(0, draw(st.sampled_from([100, 1 << 33])), n) if draw(st.booleans()) else None,
        memory=items.astype(np.float64) if capped else None,
        users=rng.integers(0, 9, n).astype(np.uint32) if n and draw(st.booleans()) else None,
        nodes=np.arange(num_ranks, dtype=np.int32) // 2 if num_ranks > 2 and draw(st.booleans()) else None,
        divisible=whole.divisible if splits and len(whole.divisible) else None,
        roles=ROLES if splits else None,
    )
    options = RoundOptions(
        strategy=draw(st.sampled_from(["minimal_move", "lpt"])),
        counts=draw(st.sampled_from(["equal", "free"])),
        tolerance=draw(st.sampled_from([0.0, 0.01, 1.0])),
        move_price=draw(st.sampled_from([0.0, 0.02])),
        min_samples=draw(st.integers(0, 2)),
        speeds=tuple(rng.uniform(0.5, 2, num_ranks).tolist()) if draw(st.booleans()) else (),
        memory_caps=(900.0,) * num_ranks if capped else (),
        split=SplitOptions(
            above=draw(st.sampled_from([0.0, 0.1])),
            within=draw(st.sampled_from([0.0, 5.0])),
            fixed=draw(st.sampled_from([0.0, 30_000.0])),
        )
        if splits
        else None,
    )
    rank, counts = st.integers(0, num_ranks - 1), st.integers(0, 2**63)
    names = draw(
        st.builds(
            RoundNames,
            job=st.text("ab/é", min_size=1),
            group=st.text("ab"),
            loader=st.text("ab"),
            run_id=st.text("ab"),
            restart_count=st.integers(0, 2**32 - 1),
            round=counts,
            client_version=st.just("0.2.0"),
        )
    )
    facts = RunFacts(
        rounds_by_lead=draw(counts),
        rounds_unbalanced=draw(counts),
        last_trouble=draw(st.text("ab ", max_size=9)),
        stragglers=tuple(Straggler(rank=draw(rank), speed=0.5, since=at) for at in range(draw(st.integers(0, 1)))),
        delays=tuple(
            Delay(rank=draw(rank), cause=cause, share=0.25, since=3) for cause in draw(st.sets(st.sampled_from(Cause)))
        ),
        step_seconds=draw(st.floats(0, 1e6)),
    )
    return Round(samples, options, names, facts)
