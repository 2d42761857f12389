"""The registered operator `evenkeel::block_bucketize`: CPU and CUDA kernels and the fake kernel for tracing."""

from typing import Any

import torch
from torch import Tensor

from trainer_client.embedding.routing import cpu

Outputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]

_library = torch.library.Library("evenkeel", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "block_bucketize(Tensor lengths, Tensor indices, Tensor block_sizes, SymInt num_ranks, int[] modes, int[] mixes, "
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
    num_ranks: int,
    _modes: list[int],
    _mixes: list[int],
    weights: Tensor | None = None,
    positions: bool = False,
    permutation: bool = True,
    _batch_sizes: Tensor | None = None,
) -> Outputs:
    return (
        lengths.new_empty(num_ranks * lengths.numel()),
        indices.new_empty(indices.numel()),
        weights.new_empty(weights.numel()) if weights is not None else None,
        indices.new_empty(indices.numel()) if positions else None,
        indices.new_empty(indices.numel()) if permutation else None,
    )


_library.impl("block_bucketize", cpu.block_bucketize, "CPU")  # type: ignore[no-untyped-call]
_library.impl("block_bucketize", _cuda, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("evenkeel::block_bucketize", _fake, lib=_library)
