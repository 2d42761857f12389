from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.packing import Shelves, improve_packing


def _shelves(seed: int, items: int = 5, options: int = 3, ranks: int = 2) -> Shelves:
    draw = np.random.default_rng(seed)
    size = draw.integers(4, 40, items).astype(np.float64)
    held = np.linspace(0.2, 1.0, options)
    hbm = np.ceil(size[:, None] * held)
    seconds = size[:, None] * (2.0 - held) * draw.uniform(0.5, 2, (items, 1))
    room = float(np.ceil(max(hbm.max(), 0.6 * hbm[:, -1].sum() / ranks)))
    return Shelves(seconds, hbm, np.tile(size[:, None], options), ranks, ranks, room, np.inf)


def _best(shelves: Shelves) -> float:
    """Every option of every item on every rank."""
    items, options = shelves.seconds.shape
    best = np.inf
    rows = np.arange(items)
    for where in itertools.product(range(shelves.ranks), repeat=items):
        rank = np.array(where)
        for choice in itertools.product(range(options), repeat=items):
            picked = np.array(choice)
            hbm = np.bincount(rank, weights=shelves.hbm[rows, picked], minlength=shelves.ranks)
            host = float(shelves.host[rows, picked].sum())
            if hbm.max() <= shelves.hbm_room and host <= shelves.host_room:
                load = np.bincount(rank, weights=shelves.seconds[rows, picked], minlength=shelves.ranks)
                best = min(best, float(load.max()))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_small_packings_are_near_the_best_there_is(seed: int) -> None:
    shelves = _shelves(seed)
    packed = improve_packing(shelves, np.arange(5) % 2, 0.0)
    assert packed is not None
    best = _best(shelves)
    assert best * (1 - 1e-9) <= packed.slowest <= best * 1.06
    rows = np.arange(5)
    hbm = np.bincount(packed.rank, weights=shelves.hbm[rows, packed.option], minlength=2)
    assert hbm.max() <= shelves.hbm_room + 1e-6
    load = np.bincount(packed.rank, weights=shelves.seconds[rows, packed.option], minlength=2)
    assert load.max() == pytest.approx(packed.slowest)


def test_a_start_that_does_not_fit_is_mended() -> None:
    shelves = _shelves(3)
    packed = improve_packing(shelves, np.zeros(5, dtype=np.int64), 0.0)
    assert packed is not None
    assert packed.slowest == pytest.approx(_best(shelves))


def test_memory_of_a_host_is_kept_or_nothing_is_found() -> None:
    shelves = _shelves(1)
    assert improve_packing(replace(shelves, host_room=1.0), np.arange(5) % 2, 0.0) is None


def test_the_search_stops_where_it_is_good_enough_or_told_to() -> None:
    shelves = _shelves(2, items=12, ranks=3)
    first = improve_packing(shelves, np.arange(12) % 3, np.inf)
    last = improve_packing(shelves, np.arange(12) % 3, 0.0)
    told = improve_packing(shelves, np.arange(12) % 3, 0.0, watch=Watch(Limits(time_limit_s=0)))
    assert first is not None
    assert last is not None
    assert told is not None
    assert last.slowest <= first.slowest <= told.slowest
