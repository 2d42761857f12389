import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_client.embedding.routing import (
    Routing,
    as_routing,
    block_size,
    continuous,
    hash_roundrobin,
    owners,
    roundrobin,
    route,
)
from trainer_client.embedding.routing.ownership import fmix64

RANKS = st.sampled_from([1, 2, 3, 5, 7, 8, 64, 100, 255, 256, 1000, 1024, 4095, 4096])
KEYS = st.integers(-(2**63), 2**63 - 1)
ROUTINGS = st.one_of(
    st.just(continuous()), st.just(roundrobin()), st.builds(hash_roundrobin, st.integers(0, 2**64 - 1))
)


def test_fmix64_gives_the_published_values() -> None:
    assert fmix64(0) == 0
    assert fmix64(1) == 0xB456BCFC34C2CB2C
    assert fmix64(2) == 0x3ABF2A20650683E7


@given(st.lists(KEYS, min_size=1, max_size=30), ROUTINGS, RANKS, st.integers(1, 2**63 - 1))
def test_tensor_routing_equals_arithmetic_on_integers(
    keys: list[int], routing: Routing, world_size: int, block: int
) -> None:
    owner, sent = route(torch.tensor(keys), routing, world_size=world_size, block_size=block)
    assert owner.tolist() == [routing.owner(key, world_size=world_size, block_size=block) for key in keys]
    for key, index in zip(keys, sent.tolist(), strict=True):
        unsigned = key % 2**64
        if routing.dist_type != "continuous":
            assert index == key
        elif unsigned < block * world_size:
            assert index % 2**64 == unsigned % block
        else:
            assert index % 2**64 == unsigned // world_size


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=30), ROUTINGS, RANKS, st.integers(1, 2**31))
def test_a_key_has_one_owner_whatever_its_dtype(keys: list[int], routing: Routing, world_size: int, block: int) -> None:
    wide = torch.tensor(keys)
    expected = owners(wide, routing, world_size=world_size, block_size=block)
    for other in (wide.to(torch.int32), wide.view(torch.uint64)):
        assert torch.equal(owners(other, routing, world_size=world_size, block_size=block), expected)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16, 48, 64, 100, 256, 1000, 1024])
def test_keys_in_steps_of_the_ranks_spread_evenly_under_the_hash(world_size: int) -> None:
    keys = torch.arange(max(50_000, 1000 * world_size)) * world_size
    assert owners(keys, roundrobin(), world_size=world_size).unique().numel() == 1
    counts = torch.bincount(owners(keys, hash_roundrobin(), world_size=world_size), minlength=world_size).double()
    assert float((counts.max() - counts.min()) / counts.mean()) < 0.30
    assert float(counts.max() / counts.min()) < 1.50


@pytest.mark.parametrize("world_size", [8, 256, 1024])
def test_a_seed_makes_the_owner_independent_of_the_table_hash(world_size: int) -> None:
    keys = torch.arange(400_000)
    table = owners(keys, hash_roundrobin(), world_size=world_size)  # the bucket of a table hashed by fmix64
    for seed, whole in ((0, False), (1, True), (2**63, True), (123456789, True)):
        mine = owners(keys, hash_roundrobin(seed), world_size=world_size) == 3
        reached = table[mine].unique().numel()
        assert (reached > world_size * 0.25) if whole else reached == 1, seed


def test_ownership_are_named_and_checked() -> None:
    assert as_routing("hash_roundrobin") == hash_roundrobin(0)
    assert str(hash_roundrobin(3)) == "hash_roundrobin(seed=3)"
    assert [continuous().code, roundrobin().code, hash_roundrobin().code] == [0, 1, 2]
    assert block_size(10, 4) == 3
    for arguments, message in (
        ({"dist_type": "other"}, "'other'"),
        ({"dist_type": "roundrobin", "seed": 1}, "no hash"),
        ({"dist_type": "hash_roundrobin", "seed": -1}, "seed is -1"),
        ({"dist_type": "hash_roundrobin", "seed": 2**64}, "seed is 18446744073709551616"),
    ):
        with pytest.raises(ValueError, match=message):
            Routing(**arguments)  # type: ignore[arg-type]
    for other in ("other", ["roundrobin"], None):
        with pytest.raises(ValueError, match="choose one of continuous, roundrobin"):
            as_routing(other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float32"):
        owners(torch.ones(2), roundrobin(), world_size=2)
