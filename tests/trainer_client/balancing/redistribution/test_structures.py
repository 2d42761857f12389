"""Random batches on real ranks: what each gets is what its samples make, or all are told that their batches differ."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.trainer_client.balancing.redistribution.pool import GlooRanks, group_of
from tests.trainer_client.balancing.redistribution.structures import run_program

WORLD = 4  # all ranks of the pool; some have no samples in some programs


def run(seed: int) -> str:
    """In a rank: one program."""
    return run_program(seed, WORLD, group_of(WORLD))


@settings(max_examples=12, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_every_rank_gets_what_its_samples_make(ranks: GlooRanks, seed: int) -> None:
    assert ranks.call(run, [(seed,)] * WORLD) == [""] * WORLD


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_rank_alone_gets_what_its_samples_make(seed: int) -> None:
    assert run_program(seed, 1, None) == ""
