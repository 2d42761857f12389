import itertools

import pytest
import torch
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.sharding import rw_sharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainer_client.embedding.routing import bucketize_kjt, hash_roundrobin, report, torchrec_uses_evenkeel
from trainer_client.embedding.routing.skew import lower_bound


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


@pytest.mark.parametrize(
    ("variable", "weighted", "positions", "permutation"), list(itertools.product([False, True], repeat=4))
)
def test_is_a_drop_in_for_torchrecs_input_distribution(
    variable: bool, weighted: bool, positions: bool, permutation: bool
) -> None:
    kjt, blocks = make_kjt(variable=variable, weighted=weighted), torch.tensor([25, 10, 40])
    theirs, their_permutation = bucketize_kjt_before_all2all(
        kjt, 4, blocks, output_permute=permutation, bucketize_pos=positions
    )
    ours, permuted = bucketize_kjt(kjt, 4, blocks, "continuous", permutation=permutation, positions=positions)
    assert ours.keys() == theirs.keys()
    assert ours.stride_per_key_per_rank() == theirs.stride_per_key_per_rank()
    pairs = [(ours.values(), theirs.values()), (ours.lengths(), theirs.lengths()), (permuted, their_permutation)]
    for mine, other in [*pairs, (ours.weights_or_none(), theirs.weights_or_none())]:
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine, other)


def test_torchrecs_row_wise_sharding_uses_it_inside_the_block_only() -> None:
    kjt, blocks = make_kjt(variable=False, weighted=True), torch.tensor([25, 10, 40])
    before = rw_sharding.bucketize_kjt_before_all2all
    expected, permutation = before(kjt, 4, blocks, output_permute=True)
    with torchrec_uses_evenkeel():
        assert rw_sharding.bucketize_kjt_before_all2all is not before
        for arguments in ({}, {"keep_original_indices": True}):
            ours, permuted = rw_sharding.bucketize_kjt_before_all2all(kjt, 4, blocks, output_permute=True, **arguments)
            if not arguments:
                assert torch.equal(ours.values(), expected.values())
            assert torch.equal(ours.lengths(), expected.lengths())
            assert torch.equal(permuted, permutation)
    assert rw_sharding.bucketize_kjt_before_all2all is before


def test_report_tells_skew_of_routing_from_skew_of_keys() -> None:
    keys = torch.arange(1000) * 8
    kjt = KeyedJaggedTensor(keys=["f"], values=keys, lengths=torch.tensor([1000]))
    bad, good = report(kjt, world_size=8), report(kjt, world_size=8, routing=hash_roundrobin())
    assert bad.max_over_mean == 8
    assert bad.best_max_over_mean == 1
    assert good.max_over_mean < 1.3
    hot = KeyedJaggedTensor(
        keys=["f"], values=torch.cat([keys, keys.new_full((1000,), -5)]), lengths=torch.tensor([2000])
    )
    found = report(hot, world_size=8, routing=hash_roundrobin())
    assert found.best_max_over_mean == 1000 / 250
    assert (found.hottest[0].key, found.hottest[0].count) == (-5, 1000)
    assert "no routing can do better than 4.000" in str(found)
    empty = KeyedJaggedTensor(keys=["f"], values=keys[:0], lengths=torch.tensor([0]))
    assert report(empty, world_size=3).max_over_mean == 0


def test_the_lower_bound_is_met_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        counts = torch.randint(1, 9, (6,), generator=generator)
        numbers = counts.tolist()
        best = min(
            max(sum(count for count, owner in zip(numbers, choice, strict=True) if owner == rank) for rank in range(3))
            for choice in itertools.product(range(3), repeat=6)
        )
        assert lower_bound(counts, 3) <= best
    assert lower_bound(torch.tensor([4, 4, 4, 4]), 3) == 8
