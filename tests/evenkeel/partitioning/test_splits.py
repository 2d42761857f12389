"""What the parts of samples have of each field, against a reading value by value."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.partitioning.splits import ALL, FIRST, LAST, Cuts, part_lengths, part_ranges


def cuts_of(items: list[list[int]]) -> Cuts:
    """Cuts of samples of which each is told by the first items of its parts."""
    return Cuts(
        samples=np.repeat(np.arange(len(items)), [len(one) for one in items]),
        begins=np.array([begin for one in items for begin in one], np.int64),
    )


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
    begins, ends = part_ranges(table, cuts_of(items), np.array(roles))
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
    np.testing.assert_array_equal(part_lengths(table, cuts_of(items), np.array(roles)), ends - begins)
