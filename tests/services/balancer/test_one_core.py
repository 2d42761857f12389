"""What a rank knows of a plan is the same from the balancer, over the wire, and from the ranks themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.plans import make_plan
from evenkeel.partitioning.rounds import FIGURES, RankPlan, RoundPlan, plan_round
from evenkeel.partitioning.samples import RankSamples
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, Straggler, planned_speeds
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import balanced
from services.balancer.effects import SessionId, StartPartition
from services.balancer.encoding import answer_bytes
from services.balancer.limits import Limits
from services.balancer.session import Session
from services.balancer.submissions import SessionKey, Submission, Terms
from services.balancer.validation import read_submission
from services.balancer.workers.arena import Arena, read_round, write_round
from trainer_client.balancing.embedded import balance_embedded
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.service.messages import read_decision, submit_request
from trainer_client.balancing.votes import (
    Vote,
    batch_votes,
    batches_keep_their_sizes,
    checksums_cancel,
    transfer_checksum,
)


class Gathered:
    """The ranks' groups after their all-gather, which gives every rank the same rows."""

    def __init__(self, rank: int, rows: list[bytes]) -> None:
        self.rank, self.world_size, self._rows = rank, len(rows), rows

    def gather_bytes(self, own: Any, sizes: list[int]) -> list[bytes]:
        assert bytes(own) == self._rows[self.rank]
        assert [len(row) for row in self._rows] == sizes
        return self._rows


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[RankSamples], BalanceOptions, tuple[str, ...]]:
    """Rounds of windows of one to four batches, some of them missing, short or with a giant."""
    num_ranks, window = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_fields, floats, most = draw(st.integers(0, 3)), draw(st.booleans()), draw(st.integers(1, 12))
    capped = draw(st.booleans())
    parts = []
    for rank in range(num_ranks):
        sizes = tuple(rng.integers(0, most, int(rng.integers(1, window + 1))).tolist())
        n = sum(sizes)
        costs: Any = rng.integers(0, 50, n)
        costs[rng.random(n) < 0.1] = 5_000
        if floats and rank % 2:  # integers and fractions meet
            costs = costs * 0.37
        parts.append(
            RankSamples(
                costs=costs, lengths=rng.integers(0, 9, (n, num_fields)), sizes=rng.integers(0, 99, n),
                memory=rng.uniform(0, 1, n) if capped else None, batch_sizes=sizes,
            )
        )  # fmt: skip
    options = BalanceOptions(
        strategy=draw(st.sampled_from(["minimal_move", "lpt", "karmarkar_karp"])),
        counts=draw(st.sampled_from(["equal", "free"])),
        window=window,
        min_samples=draw(st.integers(0, 1)),
        speeds=rng.uniform(0.5, 2.0, num_ranks).tolist() if draw(st.booleans()) else None,
        memory_caps=[1000.0] * num_ranks if capped else None,
    )
    nodes = tuple(f"node{rank // 2}" for rank in range(num_ranks)) if draw(st.booleans()) else ("",) * num_ranks
    return parts, options, nodes


@st.composite
def learned_speeds(draw: st.DrawFn, num_ranks: int) -> LearnedSpeeds:
    slow = draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks))
    return LearnedSpeeds(
        stragglers=tuple(Straggler(rank=r, speed=draw(st.floats(0.3, 1.0)), since=r) for r in sorted(slow)),
        fixed=draw(st.floats(0, 1e6)) if slow else 0.0,
    )


def from_the_service(
    parts: list[RankSamples], options: BalanceOptions, nodes: tuple[str, ...], learned: LearnedSpeeds = ALL_EQUAL
) -> list[RankPlan]:
    """What each rank reads of the balancer's answer, over the wire and back."""
    num_ranks, num_fields = len(parts), parts[0].lengths.shape[1]
    terms = Terms(world_size=num_ranks, window=options.window, options=options.of_rounds, num_jagged=num_fields)
    submissions: list[Submission] = []
    for rank, part in enumerate(parts):
        message = submit_request(0, rank, part, exhausted=False, timeout_ms=1000, learned=learned)
        submissions.append(read_submission(pb.Submit.FromString(message.SerializeToString()), terms, Limits()))
    plan = _plan_of(submissions, terms, nodes)
    assert isinstance(plan, RoundPlan)
    told = []
    for rank, part in enumerate(parts):
        answer = pb.Answer.FromString(answer_bytes(1, 0, rank, balanced(plan)))
        decision = read_decision(
            answer.decision, rank=rank, world_size=num_ranks, lengths=part.lengths, window=options.window
        )
        assert decision.plan is not None
        assert decision.digest == int.from_bytes(plan.digest[:8], "little")
        told.append(decision.plan)
    return told


def _plan_of(submissions: list[Submission], terms: Terms, nodes: tuple[str, ...]) -> Any:
    """The plan of what a session starts when all its ranks have come, as a worker reads it."""
    session = Session(0.0, SessionId(SessionKey("job", "", ""), "run", 0), terms, Limits())
    effects: list[Any] = []
    for rank, submission in enumerate(submissions):
        assert session.join(0.0, rank, nodes[rank], terms) is None
        effects += session.submit(0.0, 0, submission, rank)
    (start,) = [effect for effect in effects if isinstance(effect, StartPartition)]
    memory = Arena.create("one-core")
    samples, options, _ = read_round(memory, write_round(memory, start.inputs))
    assert options == replace(terms.options, learned=submissions[0].learned)
    plan = make_plan(start.inputs)
    assert isinstance(plan, RoundPlan)
    there = plan_round(samples, options)
    assert there.slices.destinations.tolist() == plan.slices.destinations.tolist()
    return plan


def from_the_ranks(
    parts: list[RankSamples], options: BalanceOptions, nodes: tuple[str, ...], **how: Any
) -> list[RankPlan]:
    """What each rank computes after the ranks have gathered what they know."""
    votes = [
        Vote(
            round=0, samples=len(part), costs_float=part.costs.dtype == np.float64,
            batches=batch_votes(part, [0] * options.window),
        )
        for part in parts
    ]  # fmt: skip
    as_float = any(vote.costs_float for vote in votes)
    rows = [part.rows(as_float=as_float, with_memory=options.memory_caps is not None).tobytes() for part in parts]
    order = {name: number for number, name in enumerate(dict.fromkeys(nodes))}
    numbers = np.array([order[name] for name in nodes], np.int32) if len(order) > 1 else None
    plans = []
    for rank, part in enumerate(parts):
        groups: Any = Gathered(rank, rows)
        plan = balance_embedded(part, votes, groups, options, numbers, **how)
        assert isinstance(plan, RankPlan)
        plans.append(plan)
    return plans


def check_conservation(parts: list[RankSamples], plans: list[RankPlan], options: BalanceOptions) -> None:
    """Every sample is trained once, by the rank that expects it, in a batch of the size that it had."""
    votes = []
    for rank, (part, plan) in enumerate(zip(parts, plans, strict=True)):
        assert len(plan.slices) == options.window
        assert sum(piece.destinations.size for piece in plan.slices) == len(part)
        checksum, received = 0, []
        for batch, piece in enumerate(plan.slices):
            assert piece.rank == rank
            assert len(plan.sent_in(part, batch)) == piece.destinations.size
            checksum += transfer_checksum(piece, plan.sent_in(part, batch), batch)
            received.append(int(piece.source_counts.sum()))
        vote = Vote(round=0, samples=len(part), checksum=checksum % 2**64, batches=batch_votes(part, received))
        votes.append(vote)
    assert checksums_cancel(votes)
    assert batches_keep_their_sizes(votes)


@settings(max_examples=150, deadline=None)
@given(rounds(), st.data())
def test_ranks_and_balancer_plan_alike_and_keep_every_sample(
    drawn: tuple[list[RankSamples], BalanceOptions, tuple[str, ...]], data: st.DataObject
) -> None:
    parts, options, _ = drawn
    learned = data.draw(learned_speeds(len(parts)))
    served, own = from_the_service(*drawn, learned=learned), from_the_ranks(*drawn, learned=learned)
    check_conservation(parts, served, options)
    for one, other in zip(served, own, strict=True):
        assert one.figures == other.figures
        assert one.loads == other.loads
        assert (one.steps is None) == (other.steps is None) == (options.window == 1)
        assert one.steps is None or other.steps is None or (one.steps == other.steps).all()
        for a, b in zip(one.slices, other.slices, strict=True):
            for name in ("destinations", "sources", "source_counts", "source_totals"):
                mine, others = getattr(a, name), getattr(b, name)
                assert mine.dtype == others.dtype
                assert mine.flags.writeable, "kernels are compiled for arrays that can be written to"
                assert others.flags.writeable
                np.testing.assert_array_equal(mine, others)
    planned = planned_speeds(
        options.of_rounds.speeds, learned, [float(part.costs.sum()) for part in parts], options.window
    )  # fmt: skip
    speeds = np.ones(len(parts)) if planned is None else planned
    for batch in range(options.window):
        loads = np.array([plan.loads[batch] for plan in own]) / speeds
        figures = own[0].figures[batch]
        assert figures.max_load_after == loads.max() >= figures.lower_bound * (1 - 1e-9)
        even = loads.max() / loads.mean() if loads.any() else 1.0
        np.testing.assert_allclose(figures.imbalance_after, even)


@settings(max_examples=60, deadline=None)
@given(rounds())
def test_spreading_moves_only_what_ranks_without_samples_need(
    drawn: tuple[list[RankSamples], BalanceOptions, tuple[str, ...]],
) -> None:
    parts, options, nodes = drawn
    options = replace(options, min_samples=1)
    plans = from_the_ranks(parts, options, nodes, stay=True)
    check_conservation(parts, plans, options)
    for batch in range(options.window):
        loaded = [len(part.costs[part.in_batch(batch)]) for part in parts]
        needed = sum(n == 0 for n in loaded) if sum(loaded) >= len(parts) else 0
        assert plans[0].figures[batch].moved_samples == needed


def test_staying_is_a_plan_without_figures() -> None:
    part = RankSamples(costs=np.ones(3), lengths=np.arange(6).reshape(3, 2), batch_sizes=(2, 1))
    plan = RankPlan.staying(5, part, 3)
    assert [piece.destinations.tolist() for piece in plan.slices] == [[5, 5], [5], []]
    assert [piece.source_totals.tolist() for piece in plan.slices] == [[[2, 4]], [[4, 5]], []]
    assert [piece.source_totals.shape for piece in plan.slices] == [(1, 2), (1, 2), (0, 2)]
    assert (plan.figures, plan.moved_samples) == ((), 0)


def test_the_wire_names_figures_as_the_core_does() -> None:
    on_the_wire = set(pb.Balance.DESCRIPTOR.fields_by_name)
    assert on_the_wire - {"own_load_before", "own_load_after", "partition_seconds"} == set(FIGURES)
