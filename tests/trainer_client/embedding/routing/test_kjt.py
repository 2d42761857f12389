import itertools
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.sharding import rw_sharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainer_client.embedding.routing import (
    Routing,
    as_routing,
    block_size,
    bucketize_kjt,
    continuous,
    hash_roundrobin,
    owners,
    report,
    roundrobin,
    route,
    torchrec_uses_evenkeel,
)
from trainer_client.embedding.routing.ownership import as_int64, fmix64, fmix64_of
from trainer_client.embedding.routing.skew import feature_skew, lower_bound

Sent = tuple[KeyedJaggedTensor, torch.Tensor | None]
RANKS = st.sampled_from([1, 2, 3, 5, 7, 8, 64, 100, 255, 256, 1000, 1024, 4095, 4096])
KEYS = st.integers(-(2**63), 2**63 - 1)
ROUTINGS = st.one_of(
    st.just(continuous()), st.just(roundrobin()), st.builds(hash_roundrobin, st.integers(0, 2**64 - 1))
)


def make_kjt(*, variable: bool, weighted: bool, seed: int = 0) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    strides = [[3], [0], [5]] if variable else None
    lengths = torch.randint(0, 6, (8 if variable else 12,), generator=generator)
    total = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.randint(0, 100, (total,), generator=generator),
        lengths=lengths,
        weights=torch.rand(total, generator=generator) if weighted else None,
        stride_per_key_per_rank=strides,
    )


def assert_alike(ours: Sent, theirs: Sent) -> None:
    (mine, permuted), (other, expected) = ours, theirs
    assert mine.keys() == other.keys()
    assert mine.stride_per_key_per_rank() == other.stride_per_key_per_rank()
    pairs = [(mine.values(), other.values()), (mine.lengths(), other.lengths()), (permuted, expected)]
    for one, another in [*pairs, (mine.weights_or_none(), other.weights_or_none())]:
        assert (one is None) == (another is None)
        assert one is None or torch.equal(one, another)


@pytest.mark.parametrize(
    ("variable", "weighted", "positions", "permutation"), list(itertools.product([False, True], repeat=4))
)
def test_is_a_drop_in_for_torchrecs_input_distribution(
    variable: bool, weighted: bool, positions: bool, permutation: bool
) -> None:
    kjt, blocks = make_kjt(variable=variable, weighted=weighted), torch.tensor([25, 10, 40])
    assert_alike(
        bucketize_kjt(kjt, 4, blocks, "continuous", permutation=permutation, positions=positions),
        bucketize_kjt_before_all2all(kjt, 4, blocks, output_permute=permutation, bucketize_pos=positions),
    )
    assert_alike(bucketize_kjt(kjt, 4, blocks, "continuous"), bucketize_kjt_before_all2all(kjt, 4, blocks))
    assert bucketize_kjt(KeyedJaggedTensor.empty(), 4, [])[0].keys() == []  # TorchRec's, whose keys are floats


def test_torchrecs_row_wise_sharding_uses_it_inside_the_block_only() -> None:
    kjt, blocks = make_kjt(variable=False, weighted=True), torch.tensor([25, 10, 40])
    before = rw_sharding.bucketize_kjt_before_all2all
    with torchrec_uses_evenkeel():
        inside = rw_sharding.bucketize_kjt_before_all2all
        names = "output_permute", "bucketize_pos", "keep_original_indices"
        for option in [{name: value} for name in names for value in (False, True)]:
            assert_alike(inside(kjt, 4, blocks, **option), before(kjt, 4, blocks, **option))
            ours = option != {"keep_original_indices": True}
            with pytest.raises(ValueError, match="world_size is 4097") if ours else nullcontext():
                inside(kjt, 4097, blocks, **option)
    assert rw_sharding.bucketize_kjt_before_all2all is before


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_the_lower_bound_is_that_of_pigeons_and_holes(counts: list[int], world_size: int) -> None:
    heaviest = sorted(counts, reverse=True)
    pigeons = [
        sum(heaviest[j * world_size - j : j * world_size + 1]) for j in range((len(counts) - 1) // world_size + 1)
    ]
    assert lower_bound(torch.tensor(counts), world_size) == max(sum(counts) / world_size, *pigeons)


BLOCKS = (3, 5)
KEYS_OF_FEATURES = st.tuples(*[st.lists(st.integers(-5, 9), max_size=12)] * 2)


@given(KEYS_OF_FEATURES, st.integers(1, 4), st.tuples(ROUTINGS, ROUTINGS), st.integers(0, 4))
def test_a_report_counts_keys_by_their_owners(
    keys: tuple[list[int], list[int]], world_size: int, routings: tuple[Routing, Routing], top: int
) -> None:
    values = torch.tensor([*keys[0], *keys[1]], dtype=torch.int64)
    kjt = KeyedJaggedTensor(["a", "b"], values, lengths=torch.tensor([len(one) for one in keys]))
    loads = [
        [
            [routing.owner(key, world_size=world_size, block_size=block) for key in one].count(rank)
            for rank in range(world_size)
        ]
        for one, routing, block in zip(keys, routings, BLOCKS, strict=True)
    ]
    both, total = [sum(of_rank) for of_rank in zip(*loads, strict=True)], sum(map(len, keys))
    found = report(kjt, world_size=world_size, routing=routings, block_sizes=BLOCKS, top=top)
    assert found.keys_per_rank == tuple(both)
    assert found.max_over_mean == (max(both) * world_size / total if total else 0)
    alike = [
        report(kjt, world_size=world_size, routing=one, block_sizes=BLOCKS) for one in (routings[0], routings[:1] * 2)
    ]
    assert alike[0] == alike[1]
    assert len(alike[0].hottest) == min(5, len({*keys[0]}) + len({*keys[1]}))
    counts = Counter((name, key) for name, one in zip("ab", keys, strict=True) for key in one)
    least = lower_bound(torch.tensor([*counts.values()]), world_size) if total else 0.0
    assert found.best_max_over_mean == pytest.approx(least * world_size / max(total, 1))
    figures = min(both), max(both), found.max_over_mean, found.best_max_over_mean
    told = "keys per rank {:,} to {:,}, max/mean {:.3f} (no routing can do better than {:.3f})".format(*figures)
    assert str(found) == "".join([told, *(f"\n  {hot.feature} {hot.key}: {hot.count:,}" for hot in found.hottest)])
    assert [hot.count for hot in found.hottest] == sorted(counts.values(), reverse=True)[:top]
    assert all(counts[hot.feature, hot.key] == hot.count for hot in found.hottest)
    of_features = feature_skew(kjt, world_size=world_size, routing=routings, block_sizes=BLOCKS)
    assert of_features == {
        name: max(load) * world_size / len(one) for name, one, load in zip("ab", keys, loads, strict=True) if one
    }
    with pytest.raises(ValueError, match="block_sizes is None"):
        bucketize_kjt(kjt, world_size, None, "continuous")
    with pytest.raises(ValueError, match="3 routings for 2 features; give one, or one per feature"):
        report(kjt, world_size=world_size, routing=["roundrobin"] * 3)
    with pytest.raises(ValueError, match="1 block sizes for 2 features; give one each"):
        report(kjt, world_size=world_size, block_sizes=[1])


def test_fmix64_gives_the_published_values() -> None:
    assert fmix64(0) == 0
    assert fmix64(1) == 0xB456BCFC34C2CB2C
    assert fmix64(2) == 0x3ABF2A20650683E7


@given(st.lists(KEYS, min_size=1, max_size=30), ROUTINGS, RANKS, st.integers(1, 2**63 - 1))
def test_tensor_routing_equals_arithmetic_on_integers(
    keys: list[int], routing: Routing, world_size: int, block: int
) -> None:
    owner, sent = route(torch.tensor(keys), routing, world_size=world_size, block_size=block)
    without_block = [routing.owner(key, world_size=world_size) for key in keys]
    for wide in (torch.tensor(keys), torch.tensor(keys).view(torch.uint64)):
        assert as_int64(wide).tolist() == keys
        assert owners(wide, routing, world_size=world_size).tolist() == without_block
    assert [key % 2**64 for key in fmix64_of(torch.tensor(keys)).tolist()] == [fmix64(key) for key in keys]
    assert route(torch.tensor(keys), routing, world_size=world_size)[0].tolist() == without_block
    assert owner.tolist() == [routing.owner(key, world_size=world_size, block_size=block) for key in keys]
    for key, index in zip(keys, sent.tolist(), strict=True):
        unsigned = key % 2**64
        if routing.dist_type != "continuous":
            assert index == key
        elif unsigned < block * world_size:
            assert index % 2**64 == unsigned % block
        else:
            assert index % 2**64 == unsigned // world_size


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
    assert [str(hash_roundrobin(seed)) for seed in (0, 3)] == ["hash_roundrobin", "hash_roundrobin(seed=3)"]
    assert [continuous().code, roundrobin().code, hash_roundrobin().code] == [0, 1, 2]
    assert block_size(10, 4) == 3
    for arguments, message in (
        ({"dist_type": "other"}, "'other'"),
        ({"dist_type": "roundrobin", "seed": 1}, "no hash"),
        ({"dist_type": "hash_roundrobin", "seed": -1}, "seed is -1"),
        ({"dist_type": "hash_roundrobin", "seed": 1.5}, "seed is 1.5"),
        ({"dist_type": "hash_roundrobin", "seed": 2**64}, "seed is 18446744073709551616"),
    ):
        with pytest.raises(ValueError, match=message):
            Routing(**arguments)  # type: ignore[arg-type]
    for other in ("other", ["roundrobin"], None):
        with pytest.raises(ValueError, match="choose one of continuous, roundrobin"):
            owners(torch.zeros(1, dtype=torch.int64), other, world_size=2)  # type: ignore[arg-type]
    for refusing in (as_int64, partial(owners, routing=roundrobin(), world_size=2)):
        with pytest.raises(ValueError, match="float32"):
            refusing(torch.ones(2))
