"""Bucketize for TorchRec's KeyedJaggedTensor, and TorchRec's own row-wise sharding over it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer_client.embedding.routing.bucketize import block_bucketize
from trainer_client.embedding.routing.modes import RoutingLike


def bucketize_kjt(
    kjt: Any,
    num_ranks: int,
    block_sizes: Tensor | Sequence[int] | None,
    routing: RoutingLike | Sequence[RoutingLike] = "roundrobin",
    *,
    permutation: bool = False,
    positions: bool = False,
) -> tuple[Any, Tensor | None]:
    """Sorts a KeyedJaggedTensor's values by owner, as TorchRec's row-wise input distribution wants them.

    Args:
        kjt: The batch; features may differ in batch size.
        num_ranks: Ranks.
        block_sizes: Rows a rank of each feature's table; None if no feature is `continuous`.
        routing: A mode, or one per feature.
        permutation: Also return each input value's place in the result.
        positions: Put each value's place in its row where weights go, in place of the batch's own weights.

    Returns:
        A KeyedJaggedTensor of `num_ranks` times the features, rank after rank, and the permutation or None.

    Raises:
        ValueError: If `block_bucketize` would.
    """
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    variable = kjt.variable_stride_per_key()
    if block_sizes is None:
        block_sizes = [1] * len(kjt.keys())
    sent = block_bucketize(
        kjt.lengths().view(-1),
        kjt.values(),
        block_sizes,
        num_ranks,
        routing,
        weights=kjt.weights_or_none(),
        positions=positions,
        permutation=permutation,
        batch_sizes=kjt.stride_per_key() if variable else None,
    )
    bucketized = KeyedJaggedTensor(
        keys=list(kjt.keys()) * num_ranks,
        values=sent.indices,
        weights=sent.positions if positions else sent.weights,
        lengths=sent.lengths,
        stride=None if variable else kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() * num_ranks if variable else None,
    )
    return bucketized, sent.permutation


@contextmanager
def torchrec_uses_evenkeel() -> Iterator[None]:
    """Inside the block TorchRec's row-wise sharding (continuous) bucketizes with Evenkeel.

    Covers input distributions at the time they run. Calls with uneven or two-level blocks, which Evenkeel does not
    have, stay with FBGEMM.
    """
    from torchrec.distributed.sharding import rw_sharding, twrw_sharding

    theirs = rw_sharding.bucketize_kjt_before_all2all

    def ours(
        kjt: Any,
        num_buckets: int,
        block_sizes: Tensor,
        total_num_blocks: Tensor | None = None,
        output_permute: bool = False,
        bucketize_pos: bool = False,
        block_bucketize_row_pos: list[Tensor] | None = None,
        keep_original_indices: bool = False,
    ) -> tuple[Any, Tensor | None]:
        if total_num_blocks is not None or block_bucketize_row_pos is not None or keep_original_indices:
            kept: tuple[Any, Tensor | None] = theirs(
                kjt, num_buckets, block_sizes, total_num_blocks, output_permute, bucketize_pos,
                block_bucketize_row_pos, keep_original_indices,
            )  # fmt: skip
            return kept
        blocks = block_sizes.to(device=kjt.values().device, dtype=torch.int64)
        return bucketize_kjt(
            kjt, num_buckets, blocks, "continuous", permutation=output_permute, positions=bucketize_pos
        )

    modules = rw_sharding, twrw_sharding
    for module in modules:
        module.bucketize_kjt_before_all2all = ours
    try:
        yield
    finally:
        for module in modules:
            module.bucketize_kjt_before_all2all = theirs
