"""What positions cost, counted one by one, and what the parts of samples have of each field, value by value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.partitioning.splits import ALL, FIRST, LAST, SpanCosts, SplitOptions, part_lengths, part_ranges


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


@st.composite
def parted(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Lengths, the parts' first items, and the fields' roles."""
    items = draw(st.lists(st.lists(st.integers(1, 9), max_size=3, unique=True).map(sorted), max_size=4))
    roles = draw(st.lists(st.sampled_from([LAST, FIRST, ALL, 1, 2, 3]), min_size=1, max_size=4))
    lengths = [[draw(st.integers(0, 12)) for _ in roles] for _ in items]
    return lengths, [[0, *cuts] for cuts in items], roles


@given(case=parted())
def test_parts_have_each_value_where_its_item_is(case: tuple[list[list[int]], list[list[int]], list[int]]) -> None:
    lengths, items, roles = case
    table = np.array(lengths, np.uint32).reshape(-1, len(roles))
    cuts = np.array([begin for one in items for begin in one], np.int64)
    begins, ends = part_ranges(table, cuts, np.array(roles))
    part = 0
    for sample, firsts in enumerate(items):
        for number, first in enumerate(firsts):
            beyond = firsts[number + 1] if number + 1 < len(firsts) else 1000
            for field, role in enumerate(roles):
                values = range(lengths[sample][field])
                if role > 0:
                    expected = [value for value in values if first <= value // role < beyond]
                elif role == ALL or (role == FIRST and number == 0) or (role == LAST and beyond == 1000):
                    expected = list(values)
                else:
                    expected = []
                assert list(range(begins[part, field], ends[part, field])) == expected
            part += 1
    assert part == len(begins)
    np.testing.assert_array_equal(part_lengths(table, cuts, np.array(roles)), ends - begins)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"above": -1}, r"split.above is -1; use a share of an even division, 0 to 1000"),
        ({"within": float("nan")}, r"split.within is nan; use units of cost, 0 to 1e\+100"),
        ({"between": "fast"}, r"split.between is 'fast'; use units of cost"),
        ({"fixed": -1.0}, r"split.fixed is -1.0; use units of cost, 0 to"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitOptions(**changes)
