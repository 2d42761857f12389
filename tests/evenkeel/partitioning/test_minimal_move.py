from typing import Any

import numpy as np
import pytest

from evenkeel.partitioning import partition

LENGTHS = {
    "uniform": lambda rng, n: rng.integers(1, 4097, n),
    "lognormal": lambda rng, n: np.clip(rng.lognormal(6, 1, n), 1, 4096).astype(np.int64),
    "zipf": lambda rng, n: rng.choice(4096, n, p=_POWER / _POWER.sum()) + 1,
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.1, rng.integers(3000, 4000, n), rng.integers(50, 150, n)),
    "heaped": lambda rng, n: np.minimum(rng.zipf(1.2, n), 4096),
    "zeros": lambda rng, n: np.where(rng.random(n) < 0.8, 0, rng.integers(1, 4000, n)),
}
_POWER = np.arange(1.0, 4097.0) ** -1.2


@pytest.mark.parametrize("lengths", sorted(LENGTHS))
@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (64, 32), (32, 128)])
@pytest.mark.parametrize("linear", [1024, 0])
def test_it_balances_every_kind_of_batch(lengths: str, shape: tuple[int, int], linear: int) -> None:
    """Also heavy samples of one length on many ranks: the bound that these raise lies just above the plain one."""
    num_ranks, samples = shape
    for seed in range(2):
        values = LENGTHS[lengths](np.random.default_rng(seed), num_ranks * samples)
        costs, homes = values * values + linear * values, np.repeat(np.arange(num_ranks), samples)
        others, own = (
            [partition(costs, homes, num_ranks, strategy=name, sizes=values, move_price=0) for name in names]
            for names in (("karmarkar_karp", "lpt"), ("minimal_move",))
        )
        best, over = (min(float(one.loads.max()) / one.lower_bound for one in parts) for parts in (others, own))
        assert over <= max(best * 1.001, 1.001) * (1 + 1e-12)
        assert over <= 1.002 * (1 + 1e-12) or best > 1.002


def test_only_what_a_node_has_too_much_of_leaves_it() -> None:
    lengths = np.clip(np.random.default_rng(5).lognormal(6, 1, 32 * 64), 1, 4096).astype(np.int64)
    homes, nodes = np.repeat(np.arange(32), 64), np.arange(32) // 8
    blind = partition(lengths, homes, 32, sizes=lengths)
    crossing = lengths[nodes[blind.destinations] != nodes[homes]].sum()
    crosses, of_least = _crosses(lengths, 32)
    assert crosses < 0.6 * crossing
    assert of_least < 1.2


@pytest.mark.parametrize("seed", [254, 262, 313])
def test_a_node_whose_ranks_end_uneven_is_searched_on_inside(seed: int) -> None:
    """Else three times as much would leave it."""
    assert _crosses(np.random.default_rng(seed).integers(1, 4097, 128), 16)[1] < 1.3


def _crosses(lengths: Any, num_ranks: int) -> tuple[float, float]:
    """What changes node, of eight ranks each, and how many times the least that must."""
    homes, nodes = np.repeat(np.arange(num_ranks), lengths.size // num_ranks), np.arange(num_ranks) // 8
    result = partition(lengths, homes, num_ranks, sizes=lengths, nodes=nodes)
    assert result.imbalance <= 1.001
    loads = np.bincount(nodes[homes], weights=lengths)
    least = np.maximum(loads - 8 * 1.001 * result.lower_bound, 0).sum()
    assert least <= result.moved_size_between_nodes
    return result.moved_size_between_nodes, result.moved_size_between_nodes / least


@pytest.mark.parametrize("homes", [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 2, 2, 3, 3], [0, 1, 1, 1, 2, 2, 2, 3]])
def test_overload_inside_a_node_stays_inside_it(homes: list[int]) -> None:
    """Each node has what it can carry: its slow rank gives to its fast one, however overloaded it is."""
    result = partition([5] * 8, homes, 4, speeds=[3, 1, 1, 3], nodes=[0, 0, 1, 1], counts="free")
    assert result.loads.tolist() == [15, 5, 5, 15]
    assert result.moved_size_between_nodes == 0


def test_all_samples_on_one_rank_are_spread() -> None:
    costs = np.random.default_rng(6).integers(1, 1000, 20_000)
    for counts in ("equal", "free"):
        result = partition(costs, np.zeros(20_000, np.int32), 16, counts=counts)
        assert result.imbalance <= 1.001
        assert result.moved_samples <= 20_000 * 15 // 16 + 50


def time_of(part: Any, move_price: float) -> float:
    """Load and moves in multiples of the bound, computed from the answer alone."""
    load = float(part.loads.max()) / part.lower_bound if part.lower_bound else 1.0
    return load + (move_price * part.moved_size / part.size if part.size else 0.0)


@pytest.mark.parametrize(("lengths", "shape", "seed"), [("heaped", (8, 32), 1001), ("heaped", (16, 32), 1105)])
def test_the_last_promille_is_not_worth_all_bytes(lengths: str, shape: tuple[int, int], seed: int) -> None:
    num_ranks, samples = shape
    values = np.minimum(np.random.default_rng(seed).zipf(1.2, num_ranks * samples), 4096)
    costs, homes = values * values // 64 + 8 * values, np.repeat(np.arange(num_ranks), samples)
    parts = {price: partition(costs, homes, num_ranks, sizes=values, move_price=price) for price in (0.0, 0.01, 0.5)}
    assert parts[0.0].moved_size > 2 * parts[0.01].moved_size
    assert parts[0.01].imbalance < parts[0.0].imbalance * 1.004
    for price, part in parts.items():
        assert all(time_of(part, price) <= time_of(other, price) * (1 + 1e-3) for other in parts.values())


def test_what_is_nearly_even_stays_where_it_is() -> None:
    homes = np.repeat(np.arange(2), 8)
    costs = np.array([1000 + 6 * (i < 8) for i in range(16)])
    assert partition(costs, homes, 2, tolerance=0.0, move_price=0.0).moved_samples == 8
    assert partition(costs, homes, 2, tolerance=0.0, move_price=0.01).moved_samples == 0


def test_no_more_moves_than_what_heavy_samples_allow_needs() -> None:
    held, samples = (5, 4, 3, 1), 8  # one rank must keep four of these thirteen, so the others may as well
    costs = np.concatenate([[1000] * heavy + [10 + i for i in range(samples - heavy)] for heavy in held])
    homes = np.repeat(np.arange(4, dtype=np.int32), samples)
    result = partition(costs, homes, 4)
    assert result.loads.max() < 4100
    assert (costs[result.destinations != homes] == 1000).sum() == 1
