"""The argument list of FBGEMM's operator over Evenkeel's kernels."""

from collections.abc import Sequence

from torch import Tensor

from trainer_client.embedding.routing.bucketize import Bucketized, block_bucketize
from trainer_client.embedding.routing.modes import RoutingLike


def block_bucketize_sparse_features(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,  # noqa: N803
    block_bucketize_pos: Sequence[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
    *,
    routing: RoutingLike | Sequence[RoutingLike] = "continuous",
) -> Bucketized:
    """Drop-in for `torch.ops.fbgemm.block_bucketize_sparse_features`.

    Args:
        lengths: As in `block_bucketize`, like every argument not named here.
        indices: As in `block_bucketize`.
        bucketize_pos: Return positions.
        sequence: Return the permutation.
        block_sizes: (features): rows a rank.
        my_size: Number of ranks.
        weights: Carried along.
        batch_size_per_feature: Rows of each feature where they differ.
        max_B: Not needed.
        block_bucketize_pos: Uneven blocks; not supported.
        keep_orig_idx: Send keys instead of rows; not supported with `continuous`, what the other modes always do.
        total_num_blocks: Two-level blocks; not supported.
        keep_orig_idx_per_feature: Not supported.
        routing: A mode or one per feature, beyond FBGEMM's arguments.

    Raises:
        ValueError: If an argument that is not supported is given.
    """
    for name, value in (
        ("block_bucketize_pos", block_bucketize_pos),
        ("total_num_blocks", total_num_blocks),
        ("keep_orig_idx_per_feature", keep_orig_idx_per_feature),
        ("keep_orig_idx", True if keep_orig_idx and routing == "continuous" else None),
    ):
        if value is not None:
            raise ValueError(
                f"{name} is given, which Evenkeel's bucketize does not have; call FBGEMM's operator for it"
            )
    del max_B
    return block_bucketize(
        lengths, indices, block_sizes, my_size, routing, weights=weights, positions=bucketize_pos, permutation=sequence,
        batch_sizes=batch_size_per_feature,
    )  # fmt: skip
