"""Bucketize: put each index into the bucket of the rank that owns it, in one stable pass.

The operator `evenkeel::block_bucketize` has CPU and CUDA kernels and a fake kernel for tracing. Tensors, TorchRec's
KeyedJaggedTensor and its own row-wise sharding go through it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer_client.embedding.routing import cpu
from trainer_client.embedding.routing.ownership import RoutingLike, as_routing, as_routings, check_world_size

Outputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]

_library = torch.library.Library("evenkeel", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "block_bucketize(Tensor lengths, Tensor indices, Tensor block_sizes, SymInt world_size, int[] modes, int[] mixes, "
    "Tensor? weights=None, bool positions=False, bool permutation=True, Tensor? batch_sizes=None) "
    "-> (Tensor, Tensor, Tensor?, Tensor?, Tensor?)"
)


def _cuda(*arguments: Any) -> Outputs:
    from trainer_client.embedding.routing.cuda import block_bucketize

    return block_bucketize(*arguments)


def _fake(
    lengths: Tensor,
    indices: Tensor,
    _block_sizes: Tensor,
    world_size: int,
    _modes: list[int],
    _mixes: list[int],
    weights: Tensor | None = None,
    positions: bool = False,
    permutation: bool = True,
    _batch_sizes: Tensor | None = None,
) -> Outputs:
    return (
        lengths.new_empty(world_size * lengths.numel()),
        torch.empty_like(indices),
        torch.empty_like(weights) if weights is not None else None,
        torch.empty_like(indices) if positions else None,
        torch.empty_like(indices) if permutation else None,
    )


_library.impl("block_bucketize", cpu.block_bucketize, "CPU")  # type: ignore[no-untyped-call]
_library.impl("block_bucketize", _cuda, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("evenkeel::block_bucketize", _fake, lib=_library)


class Bucketized(NamedTuple):
    """Result of `block_bucketize`.

    Attributes:
        lengths: (world_size x rows): indices of each (rank, feature, row) cell, rank-major, in the dtype of the input.
        indices: (num_indices): what is sent, cell by cell, in the order of the input inside each cell.
        weights: (num_indices): the weights in the order of `indices`, if weights were given.
        positions: (num_indices): place of each of `indices` in its input row, if asked for.
        permutation: (num_indices): for each input index its place in `indices`, if asked for.
    """

    lengths: Tensor
    indices: Tensor
    weights: Tensor | None
    positions: Tensor | None
    permutation: Tensor | None


@lru_cache(maxsize=512)
def _cached(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    return _cached(values, device)


# What torch.compiler.assume_constant_result does; that imports the compiler, which takes 1.7 s.
_on_device._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _as_tensor(values: Tensor | Sequence[int] | None, like: Tensor) -> Tensor:
    if isinstance(values, Tensor):
        return values.to(device=like.device, dtype=torch.int64)
    tensor: Tensor = _on_device(tuple(values) if values is not None else (), like.device)
    return tensor


def _codes(routing: RoutingLike | Sequence[RoutingLike]) -> tuple[list[int], list[int], bool]:
    routings = as_routings(routing) or as_routings("roundrobin")
    if len(set(routings)) == 1:
        routings = routings[:1]
    return [r.code for r in routings], [r.mix for r in routings], any(r.code == 0 for r in routings)


def _check(
    lengths: Tensor, indices: Tensor, weights: Tensor | None, num_features: int, batch_sizes: Tensor | None, modes: int
) -> None:
    for name, tensor in (("lengths", lengths), ("indices", indices)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} have dtype {tensor.dtype}; use int32 or int64 (indices also uint64)")
        if tensor.dim() != 1:
            raise ValueError(f"{name} have shape {tuple(tensor.shape)}; flatten them to one dimension")
    if indices.device != lengths.device:
        raise ValueError(f"lengths are on {lengths.device} and indices on {indices.device}; move one of them")
    if weights is not None and (weights.numel() != indices.numel() or weights.dim() != 1):
        raise ValueError(f"weights have shape {tuple(weights.shape)}; give one for each of {indices.numel()} indices")
    if modes not in (1, num_features):
        raise ValueError(f"{modes} routings for {num_features} features; give one, or one per feature")
    if batch_sizes is None and num_features and lengths.numel() % num_features:
        raise ValueError(f"{lengths.numel()} lengths do not divide by {num_features} features; give batch_sizes")
    if batch_sizes is not None and batch_sizes.numel() != num_features:
        raise ValueError(f"batch_sizes has {batch_sizes.numel()} entries for {num_features} features; give one each")


def block_bucketize(
    lengths: Tensor,
    indices: Tensor,
    block_sizes: Tensor | Sequence[int] | None,
    world_size: int,
    routing: RoutingLike | Sequence[RoutingLike] = "roundrobin",
    *,
    weights: Tensor | None = None,
    positions: bool = False,
    permutation: bool = True,
    batch_sizes: Tensor | Sequence[int] | None = None,
) -> Bucketized:
    """Sorts indices by the rank that owns them, keeping their order inside each (rank, feature, row) cell.

    On CUDA nothing is copied from or to the host and the host does not wait, so the call can be captured in a CUDA
    graph (after one call outside of it, which loads the kernels). Sequences of `block_sizes` and `batch_sizes` are
    copied to the device once and remembered.

    Args:
        lengths: (features x batch): indices of each row, feature-major; int32 or int64.
        indices: (num_indices): keys, row after row; int32, int64 or uint64. A key has one owner whatever its dtype.
        block_sizes: (features): rows of each feature's table that a rank holds under `continuous`; None if no feature
            is routed so.
        world_size: 1 to 4096.
        routing: A routing, its name, or one of these per feature.
        weights: (num_indices): carried along.
        positions: Also return each index's place in its row.
        permutation: Also return each input index's place in the output.
        batch_sizes: (features): rows of each feature where they differ; they add up to the number of lengths.

    Returns:
        The bucketized batch; `positions` and `permutation` have the dtype of `indices` (int64 for uint64).

    Raises:
        ValueError: If a size, dtype or shape does not fit; on the CPU also if the lengths do not add up, or if a block
            has less than no rows.
    """
    check_world_size(world_size)
    modes, mixes, needs_blocks = _codes(routing)
    named = 1 if isinstance(routing, RoutingLike) else len(routing)
    if needs_blocks and block_sizes is None:
        raise ValueError("block_sizes is None, but continuous routing needs the rows a rank holds of each table")
    blocks = _as_tensor(block_sizes, indices)
    batches = _as_tensor(batch_sizes, indices) if batch_sizes is not None else None
    sized = blocks if block_sizes is not None else batches
    num_features = sized.numel() if sized is not None else named
    keys = indices.view(torch.int64) if indices.dtype == torch.uint64 else indices
    if num_features or lengths.numel():
        _check(lengths, keys, weights, num_features, batches, named)
    outputs = torch.ops.evenkeel.block_bucketize(
        lengths.contiguous(), keys.contiguous(), blocks, world_size, modes, mixes,
        weights.contiguous() if weights is not None else None, positions, permutation, batches,
    )  # fmt: skip
    result = Bucketized(*outputs)
    return result._replace(indices=result.indices.view(torch.uint64)) if indices.dtype == torch.uint64 else result


def route(keys: Tensor, routing: RoutingLike, *, world_size: int, block_size: int = 0) -> tuple[Tensor, Tensor]:
    """Owner of each key, and the index that is sent to it.

    Args:
        keys: Any shape; int32, int64 or uint64.
        routing: The table's.
        world_size: Ranks that share the table.
        block_size: Rows a rank under `continuous`, below 2**63; others ignore it.

    Returns:
        Owners as int64 and indices in the keys' dtype (the low half of an out-of-range quotient for int32), in the
        shape of `keys`.

    Raises:
        ValueError: If `world_size` or a dtype is out of range, or the routing is unknown.
    """
    flat = keys.reshape(-1)
    flat = flat.view(torch.int64) if keys.dtype == torch.uint64 else flat
    one_row = torch.tensor([flat.numel()], device=keys.device)
    sent = block_bucketize(one_row, flat, [block_size], world_size, as_routing(routing))
    assert sent.permutation is not None
    places = sent.permutation.to(torch.int64)
    owner = torch.searchsorted(sent.lengths.cumsum(0), places, right=True)
    return owner.view(keys.shape), sent.indices[places].view(keys.dtype).view(keys.shape)


def owners(keys: Tensor, routing: RoutingLike, *, world_size: int, block_size: int = 0) -> Tensor:
    """Rank that owns each key, as int64 in the shape of `keys`; see `route`."""
    return route(keys, routing, world_size=world_size, block_size=block_size)[0]


def bucketize_kjt(
    kjt: Any,
    world_size: int,
    block_sizes: Tensor | Sequence[int] | None,
    routing: RoutingLike | Sequence[RoutingLike] = "roundrobin",
    *,
    permutation: bool = False,
    positions: bool = False,
) -> tuple[Any, Tensor | None]:
    """Sorts a KeyedJaggedTensor's values by owner, as TorchRec's row-wise input distribution wants them.

    Args:
        kjt: The batch; features may differ in batch size.
        world_size: Ranks.
        block_sizes: Rows a rank of each feature's table; None if no feature is `continuous`.
        routing: One for all features, or one per feature.
        permutation: Also return each input value's place in the result.
        positions: Put each value's place in its row where weights go, in place of the batch's own weights.

    Returns:
        A KeyedJaggedTensor of `world_size` times the features, rank after rank, and the permutation or None.

    Raises:
        ValueError: If `block_bucketize` would.
    """
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    variable = kjt.variable_stride_per_key()
    sent = block_bucketize(
        kjt.lengths().view(-1),
        kjt.values(),
        block_sizes,
        world_size,
        routing,
        weights=kjt.weights_or_none(),
        positions=positions,
        permutation=permutation,
        batch_sizes=kjt.stride_per_key() if variable else None,
    )
    bucketized = KeyedJaggedTensor(
        keys=list(kjt.keys()) * world_size,
        values=sent.indices,
        weights=sent.positions if positions else sent.weights,
        lengths=sent.lengths,
        stride=None if variable else kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() * world_size if variable else None,
    )
    return bucketized, sent.permutation


@contextmanager
def torchrec_uses_evenkeel() -> Iterator[None]:
    """Inside the block TorchRec's row-wise sharding (continuous) bucketizes with Evenkeel.

    Covers input distributions at the time they run. Calls with uneven or two-level blocks, which Evenkeel does not
    have, stay with FBGEMM.
    """
    from torchrec.distributed.sharding import rw_sharding, twrw_sharding

    original = rw_sharding.bucketize_kjt_before_all2all

    def replacement(
        kjt: Any,
        num_buckets: int,
        block_sizes: Tensor,
        total_num_blocks: Tensor | None = None,
        output_permute: bool = False,
        bucketize_pos: bool = False,
        *others: Any,
        **named: Any,
    ) -> tuple[Any, Tensor | None]:
        special = (total_num_blocks, *others, *named.values())
        if any(option is not None and option is not False for option in special):
            result: tuple[Any, Tensor | None] = original(
                kjt, num_buckets, block_sizes, total_num_blocks, output_permute, bucketize_pos, *others, **named
            )
            return result
        blocks = block_sizes.to(device=kjt.values().device, dtype=torch.int64)
        return bucketize_kjt(
            kjt, num_buckets, blocks, "continuous", permutation=output_permute, positions=bucketize_pos
        )

    modules = rw_sharding, twrw_sharding
    for module in modules:
        module.bucketize_kjt_before_all2all = replacement
    try:
        yield
    finally:
        for module in modules:
            module.bucketize_kjt_before_all2all = original
