"""What positions cost, against the costs of single positions, counted one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenkeel.partitioning.splits import SpanCosts


@st.composite
def one_sample(draw: st.DrawFn) -> SpanCosts:
    context, history, candidates = draw(st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(0, 5)))
    positions = context + history + candidates
    numbers = st.integers(0, 9)
    return SpanCosts.of(
        [positions],
        context=context,
        candidates=candidates,
        per_position=draw(numbers),
        per_pair=draw(numbers),
        targets=draw(st.integers(0, positions)),
        per_target=draw(numbers),
        fixed=draw(numbers),
        head=draw(st.integers(0, 6)),
        granule=draw(st.integers(1, 3)),
    )


def counted(sample: SpanCosts) -> list[float]:
    """Cost of each position."""
    context, candidates, end = (int(each[0]) for each in (sample.context, sample.candidates, sample.positions))
    history = end - candidates
    costs = []
    for query in range(end):
        seen = sum(
            key == query or (key < history and (key < query or query < context)) for key in range(end)
        )  # a candidate sees no other
        target = sample.per_target[0] if query >= end - sample.targets[0] else 0.0
        costs.append(float(sample.per_position[0] + sample.per_pair[0] * seen + target))
    return costs


@given(sample=one_sample(), data=st.data())
def test_spans_cost_what_their_positions_cost(sample: SpanCosts, data: st.DataObject) -> None:
    costs, end = counted(sample), int(sample.positions[0])
    begin = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(begin, end))
    last = sample.fixed[0] if stop == end else 0.0
    assert sample.of_spans(begin, stop)[0] == sum(costs[begin:stop]) + last
    assert sample.whole[0] == sum(costs) + sample.fixed[0]


@given(sample=one_sample())
def test_cuts_are_items_apart_and_keep_the_tail(sample: SpanCosts) -> None:
    first, step, count = int(sample.first_cut[0]), int(sample.granule[0]), int(sample.num_cuts[0])
    last = sample.positions[0] - max(sample.candidates[0], sample.targets[0], 1)
    assert count == 0 or first + step * (count - 1) <= last
    assert first + step * count > last


def test_many_samples_at_once() -> None:
    samples = SpanCosts.of([3, 10, 0], per_position=[1, 2, 3], per_pair=1, fixed=[0, 5, 7])
    assert samples.whole.tolist() == [3 + 6, 20 + 55 + 5, 7]
    assert samples.of_spans([0, 4, 0], [2, 10, 0]).tolist() == [2 + 3, 12 + 45 + 5, 7]
    assert samples.take([1, 0]).whole.tolist() == [80, 9]
    assert samples.num_cuts.tolist() == [2, 9, 0]
    assert len(samples) == 3
