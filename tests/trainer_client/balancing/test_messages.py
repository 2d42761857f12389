"""Contributions and directives: what is written is read, whatever it is; who decides what from it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.partitioning.rounds import RankSamples, RoundOptions
from evenkeel.partitioning.stages import plan_round, slice_round
from trainer_client.balancing import directive
from trainer_client.balancing.contribution import Contribution, Contributions, Extras, Measure, State
from trainer_client.balancing.decide import Decision, Rules, decide
from trainer_client.balancing.directive import Directive, pack_directives, read_directive
from trainer_client.balancing.report import Mode, Reason

NUMBERS = st.integers(0, 2**40)


@st.composite
def samples_of_ranks(draw: st.DrawFn) -> list[RankSamples]:
    ranks, fields_, batches = draw(st.integers(1, 4)), draw(st.integers(0, 2)), draw(st.integers(1, 2))
    with_memory, with_users, drawn = draw(st.booleans()), draw(st.booleans()), []
    for _ in range(ranks):
        sizes = tuple(draw(st.lists(st.integers(0, 3), min_size=batches, max_size=batches)))
        n = sum(sizes)
        dtype = np.float64 if draw(st.booleans()) else np.int64

        def numbers(count: int, most: int) -> list[int]:
            return draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

        drawn.append(
            RankSamples(
                costs=np.array(numbers(n, 2**40), dtype),
                sizes=np.array(numbers(n, 2**40), np.int64),
                lengths=np.array(numbers(n * fields_, 2**31), np.int64).reshape(n, fields_),
                batch_sizes=sizes,
                memory=np.array(numbers(n, 2**40), np.float64) if with_memory else None,
                users=np.array(numbers(n, 2**32 - 1), np.uint32) if with_users else None,
            )
        )
    return drawn


@given(
    samples_of_ranks(),
    st.lists(
        st.fixed_dictionaries(
            {
                "state": st.sampled_from(State),
                "schema": NUMBERS,
                "shared": NUMBERS,
                "copy": NUMBERS,
                "drop_last": st.booleans(),
                "invalid": st.booleans(),
                "taken": NUMBERS,
                "out_of_order": st.booleans(),
                "measured": st.builds(Measure, *[st.floats(0, 1e9)] * 5),
                "extras": st.builds(Extras, problem=st.text(max_size=9)),
            }
        ),
        min_size=4,
        max_size=4,
    ),
)
def test_contributions_are_read_as_they_were_written(samples: list[RankSamples], more: list[dict[str, Any]]) -> None:
    written = [Contribution(samples=one, **rest) for one, rest in zip(samples, more, strict=False)]
    read = Contributions.of(written)
    joined = read.samples()
    assert joined.costs.tolist() == [cost for one in samples for cost in one.costs.tolist()]
    assert joined.moving_sizes.tolist() == [size for one in samples for size in one.moving_sizes.tolist()]
    assert joined.batch_sizes.tolist() == [list(one.batch_sizes) for one in samples]
    if joined.lengths.size:
        assert joined.lengths.tolist() == [row for one in samples for row in one.lengths.tolist()]
    users = None if samples[0].users is None else [one for each in samples for one in each.users.tolist()]  # type: ignore[union-attr]
    assert (None if joined.users is None else joined.users.tolist()) == users
    memories = None if samples[0].memory is None else [one for each in samples for one in each.memory.tolist()]  # type: ignore[union-attr]
    assert (None if joined.memory is None else joined.memory.tolist()) == memories
    for rank, one in enumerate(written):
        header = read.headers[rank]
        for name in ("state", "schema", "shared", "copy", "taken"):
            assert header[name] == getattr(one, name)
        assert tuple(header["measured"]) == one.measured
        extras = read.extras.get(rank, Extras())
        assert all(getattr(extras, each.name) == getattr(one.extras, each.name) for each in fields(Extras))


@given(samples_of_ranks(), st.booleans(), st.booleans())
def test_directives_are_read_as_they_were_written(samples: list[RankSamples], spread: bool, last: bool) -> None:
    gathered = Contributions.of([Contribution(samples=one, schema=1) for one in samples]).samples()
    options = RoundOptions(move_price=0.0, counts="free")
    plan = plan_round(gathered, options.spreading() if spread else options)
    slices = slice_round(plan, gathered)
    decision = Decision(mode=Mode.EMBEDDED, reason=Reason.NO_SERVICE, last=last)
    alike = directive.Extras(decision=decision, world_size=len(samples), figures=plan.batches, wait_seconds=0.5)
    table = pack_directives(alike, home_loads=plan.loads_before, loads=plan.loads_after, plan=plan, slices=slices)
    for rank, own in enumerate(samples):
        read = read_directive(table[rank], number=5, rank=rank, samples=own)
        assert read.decision == decision
        for batch, (one, wanted) in enumerate(zip(read.plan.slices, slices.batches_of(rank), strict=True)):
            for name in ("destinations", "sources", "source_counts", "source_totals"):
                assert getattr(one, name).tolist() == getattr(wanted, name).tolist(), name
            report = read.reports[batch]
            assert report.own_load == plan.loads_after[batch, rank]
            assert report.home_load == plan.loads_before[batch, rank]
            assert report.own_samples == wanted.source_counts.sum()
            assert (report.round, report.batch, report.wait_seconds) == (5, batch, 0.5)
        assert read.plan.figures == plan.batches


def test_a_directive_without_a_plan_leaves_every_sample_at_home() -> None:
    error = ValueError("why")
    for decision in (Decision(mode=Mode.END, error=error), Decision(mode=Mode.END, reason=Reason.LEFT, ranks=(1,))):
        row = pack_directives(directive.Extras(decision=decision, world_size=2))[1]
        read = read_directive(row, number=0, rank=1, samples=Contribution().samples)
        assert isinstance(read, Directive)
        assert read.ended
        assert (read.decision, str(read.decision.error)) == (decision, str(decision.error))


def one(state: State = State.DATA, count: int = 1, **more: Any) -> Contribution:
    samples = RankSamples(
        costs=np.full(count, 7), lengths=np.full((count, 1), 3), sizes=np.full(count, 3), batch_sizes=(count,)
    )
    return Contribution(state=state, samples=samples, **{"schema": 1, **more})


NOTHING_LEFT = Contribution(state=State.EXHAUSTED)


def test_a_pass_ends_with_all_data_or_with_the_first_rank_that_leaves() -> None:
    rules = Rules(name="train")
    for ranks, ends in (
        ([one(), NOTHING_LEFT], False), ([NOTHING_LEFT] * 2, True), ([NOTHING_LEFT, one(count=0)], False),
        ([one(), one(State.LEFT, 0)], True),
    ):  # fmt: skip
        assert decide(Contributions.of(ranks), rules).ends is ends
    left = Contribution(state=State.LEFT, taken=4, extras=Extras(problem="OSError: gone"))
    decision = decide(Contributions.of([one(), left]), rules)
    assert (decision.reason, decision.ranks, decision.taken, decision.problem) == (
        Reason.LEFT, (1,), 4, "OSError: gone"
    )  # fmt: skip
    disorder = Contribution(state=State.LEFT, out_of_order=True)
    assert "rank 1 redistributes a batch out of turn" in str(decide(Contributions.of([one(), disorder]), rules).error)


def test_schemas_that_differ_are_told_by_ranks_beside_one_without_samples() -> None:
    lines = {1: ("id: int64",), 2: ("id: int32",)}
    rules = Rules(name="train", schema_lines=lambda number: lines[number])
    error = decide(Contributions.of([one(), NOTHING_LEFT, one(schema=2)]), rules).error
    assert "rank 0 has id: int64; rank 2 has id: int32" in str(error)


@pytest.mark.parametrize(
    ("what", "words"), [("state", "has another batch"), ("count", "has 2 samples"), ("copy", "has other samples")]
)
def test_peers_that_hold_other_batches_are_named(what: str, words: str) -> None:
    other = {"state": one(State.NOTHING, copy=1), "count": one(count=2, copy=1), "copy": one(copy=2)}[what]
    rows = [one(copy=1).pack(), one(copy=1).pack(arrays=False), one(copy=1).pack(), other.pack(arrays=False)]
    table = np.zeros((4, max(map(len, rows))), np.uint8)
    for row, packed in zip(table, rows, strict=True):
        row[: len(packed)] = packed
    error = decide(Contributions(table, 2), Rules(name="train", peers=np.array([[0, 1], [2, 3]]))).error
    assert words in str(error)
    assert "rank 3" in str(error)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=4), st.integers(0, 3), st.booleans())
def test_no_rank_has_too_few_samples_or_the_batch_is_dropped(counts: list[int], least: int, drop_last: bool) -> None:
    ranks = [one(count=count, drop_last=drop_last) if count else one(count=0, drop_last=drop_last) for count in counts]
    decision = decide(Contributions.of(ranks), Rules(name="train", balance=False, min_samples=least))
    if drop_last and sum(counts) < max(1, least) * len(counts):
        assert decision.mode is Mode.DROP
    else:
        wanted = min(counts) < min(least, sum(counts) // len(counts))
        assert (decision.mode is Mode.SPREAD) is wanted


RANKS_OF_A_WINDOW = st.lists(
    st.tuples(st.sampled_from((State.DATA, State.EXHAUSTED)), st.lists(st.integers(0, 4), min_size=1, max_size=3)),
    min_size=1, max_size=3,
)  # fmt: skip


@given(RANKS_OF_A_WINDOW, st.integers(0, 2))
def test_a_window_keeps_its_batches_with_enough_samples_up_to_where_some_data_ended(
    drawn: list[tuple[State, list[int]]], least: int
) -> None:
    ranks = [
        replace(
            one(state, sum(sizes), drop_last=True), samples=replace(one(state, sum(sizes)).samples, batch_sizes=sizes)
        )
        for state, sizes in drawn
    ]
    loaded = [len(sizes) if state is State.DATA else 0 for state, sizes in drawn]
    kept, last = [], False
    for batch in range(max(1, *loaded)):
        total = sum(sizes[batch] for _, sizes in drawn if batch < len(sizes))
        if total >= max(1, least) * len(drawn):
            kept.append(batch)
        elif min(loaded) <= batch:
            last = True
            break
    decision = decide(Contributions.of(ranks), Rules(name="train", min_samples=least))
    if not sum(sum(sizes) for _, sizes in drawn) and not any(loaded):
        assert decision == Decision(mode=Mode.END)
    elif len(kept) == max(1, *loaded):
        assert decision == Decision(mode=Mode.EMBEDDED)
    elif kept:
        assert decision == Decision(mode=Mode.EMBEDDED, batches=tuple(kept), last=last)
    else:
        assert (decision.mode, decision.last) == (Mode.END if last else Mode.DROP, last)
