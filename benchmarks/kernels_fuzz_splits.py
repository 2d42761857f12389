"""Instances of partitions whose samples may be split, and what must hold of every answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError, partition
from evenkeel.partitioning.divisible import Divisible, check_table
from evenkeel.partitioning.ranges import share_of_total
from evenkeel.partitioning.spans import SpanCosts
from evenkeel.partitioning.split_options import SplitOptions
from evenkeel.partitioning.split_partition import SplitPartition
from evenkeel.partitioning.splitting import split_partition


def _positions(rng: np.random.Generator, n: int) -> NDArray[np.int64]:
    kind = int(rng.integers(4))
    if kind == 0:
        return rng.integers(0, 4, n)
    if kind == 1:
        return np.where(rng.random(n) < 0.2, rng.integers(1, 1 << 40, n), rng.integers(0, 50, n))
    return np.clip(rng.lognormal(5, 2, n), 0, 1e9).astype(np.int64)


def _spans(rng: np.random.Generator, n: int, num_ranks: int) -> SpanCosts:
    """Of n samples whose costs add up to what a rank may submit at most."""
    positions = _positions(rng, n)
    context = rng.integers(0, 4, n) if rng.random() < 0.5 else np.zeros(n, np.int64)
    candidates = rng.integers(0, 9, n) if rng.random() < 0.5 else np.zeros(n, np.int64)
    total = positions + context + candidates
    scale = 10.0 ** rng.uniform(-9, 9)
    how: dict[str, Any] = {
        "context": context,
        "candidates": candidates,
        "per_position": scale * rng.integers(0, 9),
        "per_pair": scale * rng.integers(0, 3),
        "targets": np.minimum(rng.integers(0, 5, n), total),
        "per_target": scale * rng.integers(0, 2),
        "fixed": scale * rng.integers(0, 2),
        "head": context + rng.integers(0, 3, n) if rng.random() < 0.5 else 0,
        "granule": rng.integers(1, 5, n),
    }
    spans = SpanCosts.of(total, **how)
    most = float(spans.whole.sum()) / (share_of_total(num_ranks) / 2)
    if most > 1:
        how |= {name: how[name] / most for name in ("per_position", "per_pair", "per_target", "fixed")}
    return SpanCosts.of(total, **how)


def check_split(rng: np.random.Generator) -> str:
    """One instance: every position once, at cuts that are allowed, within caps, and in less time than whole."""
    n, num_ranks = int(rng.integers(1, 40)), int(rng.integers(2, 20))
    spans = _spans(rng, n, num_ranks)
    homes = rng.integers(0, num_ranks, n).astype(np.int32)
    options: dict[str, Any] = {"counts": "free" if rng.random() < 0.5 else "equal", "sizes": spans.positions}
    if rng.random() < 0.3:
        options["speeds"] = 10.0 ** rng.uniform(-3, 3, num_ranks)
    if rng.random() < 0.3:
        options["nodes"] = rng.integers(0, 4, num_ranks)
    if rng.random() < 0.3:
        options["memory"] = spans.positions
        mean = float(spans.positions.sum()) / num_ranks
        options["memory_caps"] = mean * rng.uniform(0.5, 4) * np.ones(num_ranks) + 1
    which = np.flatnonzero(rng.random(n) < 0.8)
    divisible = Divisible(samples=which, first_items=spans.head[which], spans=spans.take(which))
    assert check_table(divisible.table, spans.whole) == ""
    prices = np.where(rng.random(3) < 0.5, 0.0, 10.0 ** rng.uniform(-20, 20, 3)).tolist()
    above, fixed = float(rng.choice([0.0, 0.05, 1.0])), prices[2]
    split = SplitOptions(above=above, within=prices[0], between=prices[1], fixed=fixed)
    try:
        found: Any = partition(spans.whole, homes, num_ranks, **options)
    except PartitionError as error:
        found = error
    plan = split_partition(found, spans.whole, homes, num_ranks, divisible, split, options)
    if plan is None:
        return "whole"
    _check(plan, spans, set(which.tolist()), options, num_ranks)
    if not isinstance(found, PartitionError):
        speeds = np.ones(num_ranks) if found.speeds is None else found.speeds
        assert plan.time < float((found.loads / speeds).max()), "a plan that takes longer"
    return "split"


def _check(plan: SplitPartition, spans: SpanCosts, which: set[int], options: dict[str, Any], num_ranks: int) -> None:
    covered = np.zeros(len(spans))
    places = set()
    held = np.zeros(num_ranks)
    for sample, begin, end, rank in zip(
        plan.samples.tolist(), plan.begins.tolist(), plan.ends.tolist(), plan.ranks.tolist(), strict=True
    ):
        assert 0 <= rank < num_ranks, "a rank that there is not"
        assert (sample, rank) not in places, "two parts of a sample on a rank"
        places.add((sample, rank))
        assert begin == covered[sample], "positions that are missing or come twice"
        covered[sample] = end if end else spans.positions[sample]
        assert not end or (end > begin and sample in which), "a part of nothing, or of what may not be split"
        if begin:
            cut = (begin - spans.first_cut[sample]) / spans.granule[sample]
            assert 0 <= cut < spans.num_cuts[sample], "a cut outside of the history"
            assert cut % 1 == 0, "a cut inside of an item"
        held[rank] += (end - begin) if end else spans.positions[sample]
    assert (covered == spans.positions).all(), "positions that nobody has"
    total = float(spans.whole.sum())
    assert abs(float(plan.loads.sum()) - total) <= 1e-6 * total, "loads that are not those of the samples"
    assert np.isfinite(plan.exchange).all(), "an exchange that has no price"
    if "memory_caps" in options:
        assert (held <= options["memory_caps"] * (1 + 1e-6)).all(), "a cap that is exceeded"
