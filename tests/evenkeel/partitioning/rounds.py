"""Rounds of plain lists, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from evenkeel.partitioning.rounds import RoundOptions, RoundSamples

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
