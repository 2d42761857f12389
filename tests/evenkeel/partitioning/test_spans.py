"""What positions cost, against the costs of single positions, counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.partitioning.spans import SpanCosts


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


@given(sample=one_sample(), data=st.data())
def test_cuts_are_as_near_as_may_be(sample: SpanCosts, data: st.DataObject) -> None:
    first, step, count = int(sample.first_cut[0]), int(sample.granule[0]), int(sample.num_cuts[0])
    places = [first + step * number for number in range(count)]
    tail = max(sample.candidates[0], sample.targets[0], 1)
    assert all(place <= sample.positions[0] - tail for place in places)
    assert first + step * count > sample.positions[0] - tail
    wanted = sorted(data.draw(st.lists(st.floats(0, float(sample.whole[0])), max_size=min(count, 4))))
    cuts = sample.cut_at(0, wanted).tolist()
    assert len(cuts) == len(wanted)
    assert set(cuts) <= set(places)
    assert cuts == sorted(set(cuts))
    if len(wanted) == 1:
        nearest = min(abs(sample.before(place)[0] - wanted[0]) for place in places)
        assert abs(sample.before(cuts[0])[0] - wanted[0]) == pytest.approx(nearest)


def test_many_samples_at_once() -> None:
    samples = SpanCosts.of([3, 10, 0], per_position=[1, 2, 3], per_pair=1, fixed=[0, 5, 7])
    assert samples.whole.tolist() == [3 + 6, 20 + 55 + 5, 7]
    assert samples.of_spans([0, 4, 0], [2, 10, 0]).tolist() == [2 + 3, 12 + 45 + 5, 7]
    assert samples.take([1, 0]).whole.tolist() == [80, 9]
    assert samples.num_cuts.tolist() == [2, 9, 0]
    assert len(samples) == 3
    assert np.array_equal(samples.cut_at(1, [20.0, 20.0]), [4, 5])
