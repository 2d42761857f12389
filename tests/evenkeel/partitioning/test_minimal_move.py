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
