"""Where pieces are placed is what a plain program of the same rules says."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning.splits.cutting import place_pieces


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[float], list[float], list[int]]:
    """Order, homes and counts of samples, times of their pieces, room and nodes of ranks; with many equals."""
    nodes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=12))
    counts = draw(st.lists(st.integers(2, min(5, len(nodes))), min_size=1, max_size=5))
    homes = draw(st.lists(st.integers(0, len(nodes) - 1), min_size=len(counts), max_size=len(counts)))
    times = draw(st.lists(st.integers(0, 6).map(float), min_size=sum(counts), max_size=sum(counts)))
    room = draw(st.lists(st.integers(-4, 9).map(float), min_size=len(nodes), max_size=len(nodes)))
    return (
        draw(st.permutations(range(len(counts)))),
        homes,
        counts,
        times,
        room,
        np.unique(nodes, return_inverse=True)[1].tolist(),
    )


def placed_plainly(
    order: list[int],
    homes: list[int],
    counts: list[int],
    times: list[float],
    room: list[float],
    nodes: list[int],
    full: float,
) -> list[int]:
    room, rooms, firsts = list(room), np.bincount(nodes, room), np.cumsum([0, *counts])
    placed, first_pieces = [-1] * len(times), []

    def place(sample: int, piece: int, node: int, taken: list[int]) -> None:
        def most(ranks: list[int]) -> int | None:
            wanted = [(rooms[nodes[rank]], -nodes[rank], room[rank], rank == homes[sample], -rank) for rank in ranks]
            return -max(wanted)[-1] if wanted else None

        free = [rank for rank in range(len(room)) if rank not in taken]
        inside = most([rank for rank in free if nodes[rank] == node])
        placed[piece] = inside  # type: ignore[call-overload]
        if inside is None or (full * times[piece] and room[inside] < full * times[piece]):
            outside = most([rank for rank in free if inside is None or room[rank] > room[inside]])
            placed[piece] = inside if outside is None else outside
        room[placed[piece]] -= times[piece]

    for sample in order:
        first, last = firsts[sample], firsts[sample + 1]
        large = np.bincount(nodes) >= counts[sample]
        node = min(range(len(rooms)), key=lambda one: (not large[one], -rooms[one], one != nodes[homes[sample]], one))
        for piece in range(last - 1, first, -1):
            place(sample, piece, node, placed[piece + 1 : last])
            node = nodes[placed[piece]]
            rooms[node] -= times[piece]
        rooms[node] -= times[first]
        first_pieces.append((-times[first], sample, node))
    for _, sample, node in sorted(first_pieces, key=lambda one: one[:2]):
        place(sample, firsts[sample], node, placed[firsts[sample] + 1 : firsts[sample + 1]])
    return placed


@settings(deadline=None, max_examples=200)
@given(placements(), st.sampled_from([0.0, 0.5, 1.0]))
def test_pieces_go_where_the_rules_say(
    placement: tuple[list[int], list[int], list[int], list[float], list[float], list[int]], full: float
) -> None:
    order, homes, counts, times, room, nodes = placement
    found = place_pieces(
        np.array(order), np.array(homes), np.cumsum([0, *counts]), np.array(times), np.ones(len(room)), np.array(room),
        np.array(nodes), np.bincount(nodes), full,
    )  # fmt: skip
    assert found.tolist() == placed_plainly(*placement, full)
