"""Random instances at the ends of what may be asked, each a function of its number; and rounds of plain lists."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.problem import MAX_SUM, MAX_TOTAL, share_of_total
from evenkeel.partitioning.rounds import RoundOptions, RoundSamples
from evenkeel.partitioning.splits import SpanCosts, SplitOptions, check_table, table_of

Rng = np.random.Generator
STRATEGIES = ("minimal_move", "minimal_move", "karmarkar_karp", "lpt", "plain")
_OF_OPTIONS = ("strategy", "counts", "tolerance", "move_price", "min_samples", "stay", "split")


def round_of(
    costs: Any,
    homes: Any,
    num_ranks: int,
    *,
    steps: Any = None,
    num_steps: int = 1,
    divisible: Any = None,
    **given: Any,
) -> tuple[RoundSamples, RoundOptions]:
    """A round as `partition` would be asked for it: samples ascend by home, then by batch."""
    steps = np.zeros(len(homes), int) if steps is None else np.asarray(steps)
    places = np.asarray(homes, np.int64) * num_steps + steps
    assert (np.diff(places) >= 0).all()
    sizes, memory, nodes, users = (given.get(name) for name in ("sizes", "memory", "nodes", "users"))
    samples = RoundSamples(
        batch_sizes=np.bincount(places, minlength=num_ranks * num_steps).reshape(num_ranks, num_steps),
        costs=np.asarray(costs),
        lengths=np.zeros((len(places), 0), np.int64),
        sizes=np.asarray(costs if sizes is None else sizes),
        memory=None if memory is None else np.asarray(memory, np.float64),
        users=None if users is None else np.asarray(users, np.uint32),
        nodes=None if nodes is None else np.asarray(nodes, np.int32),
        divisible=divisible,
    )
    options = RoundOptions(
        speeds=tuple(np.asarray(given.get("speeds", ()), np.float64).tolist()),
        memory_caps=tuple(np.asarray(given.get("memory_caps", ()), np.float64).tolist()),
        **{name: given[name] for name in _OF_OPTIONS if name in given},
    )
    return samples, options


def one_of(rng: Rng, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def draw_shape(rng: Rng) -> tuple[int, int]:
    """Samples and ranks: mostly tiny, some ordinary, few that reach what only many ranks or samples reach."""
    limits = ((0.7, 7, 1, 5), (0.96, 30, 1, 12), (0.998, 300, 1, 33), (2, 3000, 90, 140))
    kind = rng.random()
    _, n, least, most = next(each for each in limits if kind < each[0])
    return int(rng.integers(n)), int(rng.integers(least, most))


def draw_amounts(rng: Rng, n: int) -> NDArray[Any]:
    """(n,) numbers, int64 or float64, whose sum is allowed."""
    most, giant = (MAX_TOTAL - 1) // max(n, 1), rng.random(n)
    giant[: min(n, 1)] = 10.0 ** rng.uniform(0, 290)
    return one_of(
        rng,
        np.zeros(n, one_of(rng, np.int64, np.float64)),
        np.full(n, rng.integers(1, 100)),
        rng.integers(0, 4, n),
        rng.integers(0, 10**6, n),
        np.where(rng.random(n) < 0.7, most, rng.integers(0, most + 1, n)).astype(np.int64),  # as large as may be
        rng.lognormal(4, 2, n).astype(np.int64) ** 2,
        rng.lognormal(4, 2, n),
        np.minimum(10.0 ** rng.uniform(-323, 300, n), MAX_SUM / max(n, 1) / 2),  # over all of float64
        np.where(rng.random(n) < 0.2, 0.0, 5e-324 * rng.integers(1, 9, n)),
        rng.permutation(giant),  # one outweighs all others
        rng.integers(0, 1000, n) * 0.1,
    )


def draw_homes(rng: Rng, n: int, num_ranks: int) -> NDArray[np.int32]:
    few = rng.integers(0, num_ranks, 2)
    kinds = (
        np.arange(n) * num_ranks // max(n, 1), np.full(n, few[0]), few[rng.integers(0, 2, n)],
        rng.integers(0, num_ranks, n),
    )  # fmt: skip
    return np.sort(one_of(rng, *kinds)).astype(np.int32)


def draw_options(rng: Rng, costs: NDArray[Any], homes: NDArray[np.int32], num_ranks: int) -> dict[str, Any]:
    """Each option given or not, at all scales."""
    n = costs.size
    given: dict[str, Any] = {"strategy": one_of(rng, *STRATEGIES), "counts": one_of(rng, "equal", "free")}
    given["tolerance"] = one_of(rng, 0.0, 1e-15, 1e-3, 1e-3, 0.05, 1.0)
    given["move_price"] = one_of(rng, 0.0, 0.01, 0.01, 0.1, 30.0)
    given["min_samples"] = one_of(rng, 0, 0, 0, 1, 3)
    if rng.random() < 0.4:
        given["speeds"] = one_of(
            rng,
            np.full(num_ranks, one_of(rng, 1e-6, 0.1, 1.0, 1e6)),
            np.clip(10.0 ** rng.uniform(-6, 6, num_ranks), 1e-6, 1e6),
            rng.choice([0.5, 1.0, 3.0], num_ranks),
            rng.choice([1e-6, 0.1, 0.5, 1.0, 1.0 + 1e-15, 3.0, 1e6], num_ranks),
        )
    if rng.random() < 0.4:
        given["nodes"] = rng.integers(0, one_of(rng, 1, 2, 3, num_ranks), num_ranks) * one_of(rng, 1, 10**6)
    if rng.random() < 0.4:
        given["sizes"] = draw_amounts(rng, n)
    if rng.random() < 0.35:
        given["memory"], used = draw_amounts(rng, n), np.zeros(num_ranks)
        held = one_of(rng, rng.permutation(homes), rng.integers(0, num_ranks, n))
        np.add.at(used, held, given["memory"])
        given["memory_caps"] = one_of(
            rng,
            used,  # exactly what an assignment needs
            np.full(num_ranks, float(used.max(initial=0.0)) * rng.uniform(0.5, 1.5)),
            np.where(rng.random(num_ranks) < 0.5, np.inf, used),
            np.where(rng.random(num_ranks) < 0.3, 0.0, 10.0 ** rng.uniform(-300, 300, num_ranks)),
        )
        given["is_possible"] = given["counts"] == "free" and bool((used <= given["memory_caps"]).all())
    return given


def draw_split(rng: Rng) -> tuple[SpanCosts, NDArray[np.int32], int, dict[str, Any]]:
    """Samples of which some may be split: what their positions cost, homes, ranks, and further arguments of a round."""
    n, num_ranks = int(rng.integers(1, 40)), int(rng.integers(2, 20))
    positions = one_of(rng, rng.integers(0, 4, n), np.clip(rng.lognormal(5, 2, n), 0, 1e9).astype(np.int64),
                     np.where(rng.random(n) < 0.2, rng.integers(1, 1 << 40, n), rng.integers(0, 50, n)))  # fmt: skip
    context, candidates = rng.integers(0, one_of(rng, 1, 4), n), rng.integers(0, one_of(rng, 1, 9), n)
    total, scale = positions + context + candidates, 10.0 ** rng.uniform(-9, 9)
    how: dict[str, Any] = {name: scale * rng.integers(0, 5) for name in ("per_position", "per_pair", "fixed")}
    shape = {"context": context, "candidates": candidates, "granule": rng.integers(1, 5, n)}
    most = float(SpanCosts.of(total, **how, **shape).whole.sum()) / (share_of_total(num_ranks) / 2)
    spans = SpanCosts.of(total, **{name: value / max(most, 1.0) for name, value in how.items()}, **shape)
    homes = np.sort(rng.integers(0, num_ranks, n)).astype(np.int32)
    options: dict[str, Any] = {"counts": one_of(rng, "free", "equal"), "sizes": spans.positions}
    options["min_samples"] = one_of(rng, 0, 0, 1, 2)
    if rng.random() < 0.3:
        options["speeds"] = 10.0 ** rng.uniform(-3, 3, num_ranks)
    if rng.random() < 0.3:
        options["nodes"] = rng.integers(0, 4, num_ranks)
    if rng.random() < 0.3:
        mean = float(spans.positions.sum()) / num_ranks
        options |= {
            "memory": spans.positions,
            "memory_caps": mean * rng.uniform(0.5, 4, one_of(rng, (1,), (num_ranks,))) + np.ones(num_ranks),
        }
    which = np.flatnonzero(rng.random(n) < 0.8)
    divisible = table_of(spans.take(which), which, spans.head[which])
    assert check_table(divisible, spans.whole) == ""
    scaled = one_of(rng, 10.0 ** rng.uniform(-20, 20, 3), float(spans.whole.mean()) * 10.0 ** rng.uniform(-5, 0, 3))
    prices = np.where(rng.random(3) < 0.5, 0.0, scaled).tolist()
    split = SplitOptions(above=one_of(rng, 0.0, 0.05, 1.0), within=prices[0], between=prices[1], fixed=prices[2])
    return spans, homes, num_ranks, options | {"divisible": divisible, "split": split}
