"""Contributions and directives: what is written is read, whatever it is; who decides what from it."""

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.refinements import plan_round, slice_round
from evenkeel.partitioning.rounds import Figures, RankSamples, RoundOptions
from evenkeel.partitioning.splits import WIDTH, samples_of_parts
from tests.evenkeel.partitioning.instances import round_of
from tests.evenkeel.partitioning.test_same_everywhere import draw_round
from trainer_client.balancing.batches import flatten
from trainer_client.balancing.contribution import Contribution, Contributions, Extras, Measure, State
from trainer_client.balancing.decide import Decision, Rules, decide
from trainer_client.balancing.directive import Broadcast, Directive, pack_directives, read_directive
from trainer_client.balancing.report import Mode, Reason
from trainer_client.balancing.resume import Resumed

NUMBERS = st.integers(0, 2**40)


@st.composite
def samples_of_ranks(draw: st.DrawFn) -> list[RankSamples]:
    ranks, fields_ = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    with_memory, with_users, drawn = draw(st.booleans()), draw(st.booleans()), []
    for _ in range(ranks):
        sizes = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
        n = sum(sizes)
        dtype = np.float64 if draw(st.booleans()) else np.int64

        def numbers(count: int, most: int) -> list[int]:
            return draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

        width = fields_ if n or draw(st.booleans()) else 0  # a rank that never had a sample knows of no fields
        parts = sorted(draw(st.sets(st.integers(0, n - 1)))) if n else []
        drawn.append(
            RankSamples(
                divisible=np.array([[part] + [7.5] * (WIDTH - 1) for part in parts]) if parts else None,
                costs=np.array(numbers(n, 2**40), dtype),
                sizes=np.array(numbers(n, 2**40), np.int64),
                lengths=np.array(numbers(n * width, 2**31), np.int64).reshape(n, width),
                batch_sizes=sizes,
                memory=np.array(numbers(n, 2**40), np.float64) if with_memory and (n or draw(st.booleans())) else None,
                users=np.array(numbers(n, 2**32 - 1), np.uint32) if with_users and (n or draw(st.booleans())) else None,
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
def test_contributions_are_read_as_written(samples: list[RankSamples], more: list[dict[str, Any]]) -> None:
    written = [Contribution(samples=one, **rest) for one, rest in zip(samples, more, strict=False)]
    read = Contributions.of(written)
    joined = read.samples()
    assert joined.costs.tolist() == [cost for one in samples for cost in one.costs.tolist()]
    assert joined.moving_sizes.tolist() == [size for one in samples for size in one.moving_sizes.tolist()]
    width = max(len(one.batch_sizes) for one in samples)
    assert joined.batch_sizes.tolist() == [[*one.batch_sizes, 0, 0][:width] for one in samples]
    floats = any(len(one) and one.costs.dtype.kind == "f" for one in samples)
    assert joined.costs.dtype.kind == ("f" if floats else "i")
    firsts = np.cumsum([0, *map(len, samples)])
    parts = [
        first + one.divisible[:, 0] for first, one in zip(firsts, samples, strict=False) if one.divisible is not None
    ]
    assert (joined.divisible is not None) == bool(parts)
    if joined.divisible is not None:
        assert joined.divisible[:, 0].tolist() == np.concatenate(parts).tolist()
        assert (joined.divisible[:, 1:] == 7.5).all()
    if any(map(len, samples)):
        assert joined.lengths.tolist() == [row for one in samples for row in one.lengths.tolist()]
    if any(one.users is not None for one in samples):  # then all that have samples name them
        assert joined.users.tolist() == [user for one in samples if one.users is not None for user in one.users]
    else:
        assert joined.users is None
    memories = [one.memory for one in samples if one.memory is not None]  # of all that have samples, or of none
    assert (joined.memory is None) == (not memories)
    assert joined.memory is None or joined.memory.tolist() == np.concatenate(memories).tolist()
    for rank, one in enumerate(written):
        header = read.headers[rank]
        for name in ("state", "schema", "shared", "copy", "taken"):
            assert header[name] == getattr(one, name)
        assert tuple(header["measured"]) == one.measured
        extras = read.extras.get(rank, Extras())
        assert all(getattr(extras, each.name) == getattr(one.extras, each.name) for each in fields(Extras))


@given(samples_of_ranks(), st.booleans(), st.booleans(), st.none() | st.integers(0, 99))
def test_directives_are_read_as_written(
    samples: list[RankSamples], spread: bool, last: bool, regrouped: int | None
) -> None:
    samples = [replace(one, divisible=None) for one in samples]
    gathered = Contributions.of([Contribution(samples=one, schema=1) for one in samples]).samples()
    options = RoundOptions(move_price=0.0, counts="free")
    plan = plan_round(gathered, options.spreading() if spread else options)
    if regrouped is not None:  # samples of a window change their batch
        draw = np.random.default_rng(regrouped)
        plan = replace(plan, steps=draw.integers(0, gathered.num_batches, len(gathered.costs)).astype(np.int32))
    slices = slice_round(plan, gathered)
    decision = Decision(mode=Mode.EMBEDDED, reason=Reason.NO_SERVICE, last=last)
    alike = Broadcast(decision=decision, world_size=len(samples), wait_seconds=0.5)
    table = pack_directives(alike, plan=plan, slices=slices)
    for rank in range(len(samples)):
        read = read_directive(table[rank], number=5, rank=rank)
        assert read.decision == decision
        assert read.batches == tuple(range(len(plan.batches)))
        assert read.moves == any(figures.moved_samples > 0 for figures in plan.batches)
        begin, end = slices.home_begin[rank : rank + 2]
        steps = None if slices.steps is None else slices.steps[begin:end].tolist()
        assert (None if read.plan.steps is None else read.plan.steps.tolist()) == steps
        for batch, (one, wanted) in enumerate(zip(read.plan.slices, slices.batches_of(rank), strict=True)):
            for name in ("destinations", "sources", "source_counts", "source_totals"):
                assert getattr(one, name).tolist() == getattr(wanted, name).tolist(), name
            report = read.reports[batch]
            assert report.own_load == plan.loads_after[batch, rank]
            assert report.home_load == plan.loads_before[batch, rank]
            assert report.own_samples == wanted.source_counts.sum()
            assert (report.round, report.batch, report.wait_seconds) == (5, batch, 0.5)
            assert {each.name: getattr(report, each.name) for each in fields(Figures)} == vars(plan.batches[batch])
    home = plan_round(gathered, options.spreading())
    stays = Broadcast(decision=Decision(mode=Mode.IDENTITY, batches=(0,)), world_size=len(samples))
    table = pack_directives(stays, plan=home, slices=slice_round(home, gathered, compiled=False))
    for rank in range(len(samples)):
        read = read_directive(table[rank], number=0, rank=rank)
        assert read.batches == (0,)
        assert not read.moves
        assert all((one.destinations == rank).all() for one in read.plan.slices)
        assert [one.own_samples for one in read.reports] == gathered.batch_sizes[rank].tolist()
        assert all(one.home_load == one.own_load for one in read.reports)
        assert {one.source_totals.shape[1] for one in read.plan.slices} == {gathered.lengths.shape[1]}


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_reads_what_its_samples_are_cut_into(seed: int) -> None:
    samples, options = round_of(**draw_round(np.random.default_rng(seed), "splits"))
    try:
        plan = plan_round(samples, options)
    except PartitionError:
        return
    slices = slice_round(plan, replace(samples, roles=np.zeros(0, np.int64)))
    pieces = None if plan.parts is None else plan.parts.pieces
    alike = Broadcast(decision=Decision(mode=Mode.EMBEDDED), world_size=samples.num_ranks, pieces=pieces)
    table = pack_directives(alike, plan=plan, slices=slices)
    for rank, (begin, end) in enumerate(pairwise(slices.home_begin.tolist())):
        read = read_directive(table[rank], number=0, rank=rank)
        for batch in range(samples.num_batches):
            cuts, parts = read.plan.cuts_in(batch), np.arange(begin, end)
            if slices.steps is not None:
                parts = parts[slices.steps[parts] == batch]
            assert read.plan.slices[batch].destinations.tolist() == slices.destinations[parts].tolist()
            begins = [0] * len(parts) if plan.parts is None else plan.parts.begins[parts].tolist()
            assert ([0] * len(parts) if cuts is None else cuts.tolist()) == begins
            if cuts is not None and plan.parts is not None:
                _, numbers = np.unique(plan.parts.samples[parts], return_inverse=True)
                assert samples_of_parts(cuts).tolist() == numbers.tolist()


def test_a_directive_without_a_plan_leaves_every_sample_at_home() -> None:
    error = ValueError("why")
    for decision in (Decision(mode=Mode.END, error=error), Decision(mode=Mode.END, reason=Reason.LEFT, ranks=(1,))):
        row = pack_directives(Broadcast(decision=decision, world_size=2))[1]
        read = read_directive(row, number=0, rank=1)
        assert isinstance(read, Directive)
        assert read.ended
        assert not read.reports
        assert (read.decision, str(read.decision.error)) == (decision, str(decision.error))


def one(state: State = State.DATA, count: int = 1, **more: Any) -> Contribution:
    samples = RankSamples(
        costs=np.full(count, 7), lengths=np.full((count, 1), 3), sizes=np.full(count, 3), batch_sizes=(count,)
    )
    return Contribution(**{"state": state, "samples": samples, "schema": 1, **more})


NOTHING_LEFT = Contribution(state=State.EXHAUSTED)


def test_nothing_is_said_by_default() -> None:
    assert [name for name, value in vars(Decision(mode=Mode.END)).items() if value] == ["mode", "reason"]
    (row,) = pack_directives(Broadcast())
    assert read_directive(row, number=0, rank=0).ended
    header = Contributions.of([Contribution()]).headers[0]
    assert [name for name in header.dtype.names if np.any(header[name])] == ["size"]


def with_peers(rows: list[list[Contribution]]) -> Contributions:
    """Of ranks and their peers, who send headers alone."""
    packed = [each.pack(arrays=not peer) for row in rows for peer, each in enumerate(row)]
    table = np.zeros((len(packed), max(map(len, packed))), np.uint8)
    for row, of_one in zip(table, packed, strict=True):
        row[: len(of_one)] = of_one
    return Contributions(table, len(rows[0]))


ONES = st.fixed_dictionaries(
    {
        "state": st.sampled_from((State.DATA, State.DATA, State.EXHAUSTED, State.LEFT)), "count": st.integers(0, 2),
        "invalid": st.booleans(), "taken": st.integers(0, 9), "out_of_order": st.booleans(),
        "extras": st.builds(Extras, problem=st.sampled_from(("", "why"))),
    }
)  # fmt: skip


@given(st.lists(st.tuples(ONES, ONES), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_rank_that_left_ends_the_pass_and_wrong_costs_leave_samples_at_home(
    drawn: list[tuple[dict[str, Any], dict[str, Any]]], peers: bool, balance: bool
) -> None:
    """Peers hold what their rank holds, unless they have left."""
    pairs = [(own, peer if peers and peer["state"] is State.LEFT else own)[: 1 + peers] for own, peer in drawn]
    decision = decide(with_peers([[one(**each) for each in pair] for pair in pairs]), Rules(name="", balance=balance))
    left = [rank for rank, pair in enumerate(pairs) if any(each["state"] is State.LEFT for each in pair)]
    wrong = tuple(rank for rank, (own, *_) in enumerate(pairs) if own["invalid"])
    if left:
        first = next(each for each in pairs[left[0]] if each["state"] is State.LEFT)
        problem = first["extras"].problem if first is pairs[left[0]][0] else ""
        wanted = Decision(
            mode=Mode.END, reason=Reason.LEFT, ranks=tuple(left), taken=first["taken"], problem=problem
        )  # fmt: skip
        disordered = [
            rank for rank in left
            if any(each["state"] is State.LEFT and each["out_of_order"] for each in pairs[rank])
        ]  # fmt: skip
        told = f"rank {disordered[0]} redistributes a batch out of turn" if disordered else "None"
        assert str(decision.error).startswith(told)
    elif all(own["state"] is State.EXHAUSTED for own, *_ in pairs) and not any(own["count"] for own, *_ in pairs):
        wanted = Decision(mode=Mode.END)
    elif not balance:
        wanted = Decision(mode=Mode.IDENTITY, reason=Reason.NO_SERVICE)
    elif wrong:
        problem = pairs[wrong[0]][0]["extras"].problem
        wanted = Decision(mode=Mode.IDENTITY, reason=Reason.INVALID_COSTS, ranks=wrong, problem=problem)
    else:
        wanted = Decision(mode=Mode.EMBEDDED)
    assert decision == wanted


def sharing(digest: int, *values: tuple[str, str]) -> Contribution:
    return one(shared=digest, extras=Extras(shared=values))


def test_a_rank_without_samples_makes_no_floats_of_the_costs_of_others() -> None:
    nothing = replace(one(count=0).samples, costs=np.zeros(0), lengths=np.zeros((0, 3)))
    joined = Contributions.of([Contribution(samples=nothing), one()]).samples()
    assert (joined.costs.dtype, joined.costs.tolist(), joined.lengths.tolist()) == (np.int64, [7], [[3]])


def naming_users(count: int = 1) -> Contribution:
    samples = one(count=count).samples
    return one(count=count, samples=replace(samples, users=np.zeros(count, np.uint32)))


def going_on(*lines: str, problem: str = "") -> Contribution:
    return one(extras=Extras(resumed=Resumed(lines=lines, problem=problem)))


LINES = {1: ("id: int64",), 2: ("id: int32",)}
OTHER_FIELDS = flatten({"x": torch.zeros(1)}).empty()
COPIED = [one(copy=1)] * 2
ERRORS: list[tuple[list[list[Contribution]], str]] = [
    ([[one()], [NOTHING_LEFT], [one(schema=2)]], "rank 0 has id: int64; rank 2 has id: int32"),
    ([[one()], [one(schema=3, extras=Extras(template=OTHER_FIELDS))]], "rank 0 has id: int64; rank 1 has no id"),
    ([[sharing(7, ("t", "1"))], [sharing(0)], [sharing(8, ("t", "2"))]], "'t' is 1 on rank 0, 2 on rank 2"),
    ([[sharing(7, ("t", "1"))], [sharing(8)]], "'t' is 1 on rank 0, None on rank 1"),
    ([[sharing(7, ("s", "0"), ("t", "1"))], [sharing(8, ("s", "0"), ("t", "2"))]], "'t' is 1 on rank 0, 2 on rank 1"),
    ([[going_on("epoch 1")], [going_on("epoch 2")]], "rank 0: epoch 1; rank 1: epoch 2"),
    ([[going_on("epoch 1")], [one()]], "rank 1: no state was loaded"),
    ([[one()], [going_on(problem="it is too old")]], "rank 1 cannot go on with the loader 'train': it is too old"),
    ([[sharing(7)], [sharing(8, ("t", "2"))]], "shared values differ between ranks; give loaders"),
    ([[one()], [naming_users(0)], [naming_users()]], "users is given on rank 2 and not on rank 0"),
    ([COPIED, [one(copy=1), one(State.NOTHING, copy=1)]], "rank 3 has another batch where rank 2 has none"),
    ([COPIED, [one(copy=1), one(State.EXHAUSTED, 0, copy=1)]], "rank 3 has no batch where rank 2 has one"),
    ([COPIED, [one(copy=1), one(count=2, copy=1)]], "rank 3 has 2 samples where rank 2 has 1"),
    ([COPIED, [one(copy=1), one(schema=2, copy=1)]], "rank 3 has batches of other fields or dtypes than rank 2"),
    ([COPIED, [one(copy=1), one(copy=2)]], "in round 5 rank 3 has other samples than rank 2"),
]


@pytest.mark.parametrize(("ranks", "words"), ERRORS)
def test_ranks_that_do_not_fit_are_the_error_of_all(ranks: list[list[Contribution]], words: str) -> None:
    rules = Rules(name="train", peers=[[0, 1], [2, 3]], schema_lines=LINES.__getitem__)
    decision = decide(with_peers(ranks), rules, 5)
    assert decision.mode is Mode.END
    assert words in str(decision.error)


def test_what_is_no_mistake_is_none() -> None:
    fine = [[one(shared=7), one(), one(count=0, shared=8, schema=2)], [naming_users(), NOTHING_LEFT], COPIED]
    for ranks in fine:
        assert decide(Contributions.of(ranks), Rules(name="train")) == Decision(mode=Mode.EMBEDDED)


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
