"""The same arguments give the same answer on every machine, compiled or not, as what other machines found says.

Whoever changes a search on purpose looks first at what `benchmarks/partitioning.py` says of it, then writes down what
is found now: `python -m tests.evenkeel.partitioning.test_same_everywhere`.
"""

import hashlib
from typing import Any

import numba
import numpy as np
import pytest

from evenkeel.partitioning import PartitionError, strategies
from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.splits import SpanCosts, SplitOptions, table_of
from tests.evenkeel.partitioning.instances import Rng, one_of, round_of

KNOWN = {
    "heavy": "542670ce4c5e 49208b4eedcc 29b2ad1ea056",
    "karmarkar_karp": "fcca6015e6bb 775a94cfd344 671cbf22e058",
    "lpt": "c678a84815d8 9a00652722fd e1987997a884",
    "minimal_move": "9c0362f09f31 7c004db84b7e 60c04bd95d7b",
    "plain": "7ba31a5bbdfd 3c926a3e7a39 a7e19e3e6c49",
    "splits": "103aea7d3872 e7b19df6d4d3 ad37a28c0c89",
}
BLOCKS = (range(20), range(20, 40), range(40, 200))  # the last one is for kernels, of which some search long


def draw_round(rng: Rng, kind: str) -> dict[str, Any]:
    """Arguments of `round_of` by integers alone: those of a generator, and no more, are the same on every machine."""
    if kind == "heavy":  # roots and quotients are the same, too: many samples for each rank, of which few are heavy
        roots = np.sqrt(rng.integers(1, 1 << 16, 2048))
        lengths = (1e6 / (roots * np.sqrt(roots))).astype(np.int64)
        num_ranks = one_of(rng, 8, 32, 64)
        return {
            "costs": lengths,
            "homes": np.arange(2048) * num_ranks // 2048,
            "num_ranks": num_ranks,
            "sizes": lengths,
        }
    n, num_ranks, num_steps = int(rng.integers(1, 60)), int(rng.integers(2, 9)), one_of(rng, 1, 1, 2, 3)
    homes = one_of(rng, np.arange(n) * num_ranks // n, np.sort(rng.integers(0, num_ranks, n)))
    steps = rng.integers(0, num_steps, n)
    lengths = rng.integers(0, one_of(rng, 3, 100, 5000), n) * np.where(rng.integers(0, 9, n) > 0, 1, one_of(rng, 1, 40))
    given: dict[str, Any] = {"homes": homes, "num_ranks": num_ranks, "num_steps": num_steps, "sizes": lengths}
    given |= {
        "steps": steps[np.lexsort((steps, homes))],
        "strategy": "minimal_move" if kind == "splits" else kind,
        "counts": one_of(rng, "equal", "free"),
        "stay": one_of(rng, *[False] * 9, True),
        "tolerance": one_of(rng, 0.0, 1e-3, 0.05),
        "move_price": one_of(rng, 0.0, 0.01, 0.5),
        "min_samples": one_of(rng, 0, 0, 2),
        "users": one_of(rng, None, None, rng.integers(0, 9, n)),
        "nodes": one_of(rng, None, rng.integers(0, 3, num_ranks), np.arange(num_ranks) // 3),
        "costs": one_of(rng, lengths, lengths**2 + 64 * lengths, lengths * 0.1, 100 + rng.integers(0, 2, n)),
        "speeds": one_of(rng, (), np.array([0.5, 1.0, 3.0])[rng.integers(0, 3, num_ranks)]),
    }
    if rng.integers(3) == 0:
        most = int(lengths.sum()) * int(rng.integers(8, 20)) // (8 * num_ranks) + 1
        given |= {"memory": lengths, "memory_caps": np.full(num_ranks, most)}
    if kind == "splits":
        how = {"context": 3, "per_position": 20, "per_pair": 1, "granule": 2}
        spans, which = SpanCosts.of(3 + 2 * lengths, **how), np.flatnonzero(lengths > np.median(lengths))
        given |= {
            "costs": spans.whole,
            "divisible": table_of(spans.take(which), which, spans.head[which]),
        }
        given["split"] = SplitOptions(
            above=one_of(rng, 0.0, 0.1), within=one_of(rng, 0.0, 5.0), fixed=one_of(rng, 0, 99)
        )
    return given


def digest(kind: str, block: int) -> str:
    """Of the answers to some rounds."""
    found = hashlib.sha256()
    for number in BLOCKS[block]:
        samples, options = round_of(**draw_round(np.random.default_rng(number), kind))
        try:
            plan = plan_round(samples, options)
        except PartitionError as error:
            found.update(repr(error).encode())
            continue
        pieces = plan.destinations if plan.parts is None else plan.parts.pieces
        for array in (plan.destinations, plan.steps, pieces):
            found.update(b"" if array is None else array.astype(np.int64).tobytes())
        found.update(repr([(one.lower_bound, one.max_load_after) for one in plan.batches]).encode())
    return found.hexdigest()[:12]


@pytest.mark.parametrize("block", range(len(BLOCKS)))
@pytest.mark.parametrize("kind", KNOWN)
def test_answers_are_those_of_other_machines(kind: str, block: int) -> None:
    if numba.config.DISABLE_JIT and (kind in ("splits", "heavy") or block == len(BLOCKS) - 1):
        pytest.skip("records of spans are for kernels alone, and many rounds take minutes")
    assert digest(kind, block) == KNOWN[kind].split()[block]
    assert {*strategies(), "splits", "heavy"} == KNOWN.keys()


if __name__ == "__main__":
    print({kind: " ".join(digest(kind, block) for block in range(len(BLOCKS))) for kind in KNOWN})
