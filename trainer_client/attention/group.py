"""The ranks that may share samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from evenkeel.partitioning.splits import SplitSample, check_splits
from trainer_client.attention.over_pieces import prepare
from trainer_client.attention.pieces import Pieces
from trainer_client.checks import is_whole
from trainer_client.process_groups import make_group, node_name, timeout_of


class PieceGroup:
    """Ranks that may share samples, with a communicator of their own for keys and values."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, max_ctas: int = 32) -> None:
        """Makes the communicator. Collective.

        Args:
            process_group: The data-parallel ranks; default: all. Without `torch.distributed` there is one rank.
            max_ctas: Blocks of the GPU that NCCL takes at most. More of them send faster, and are kept from the
                attention that a rank computes while it waits for another.

        Raises:
            ValueError: If `max_ctas` is no positive number.
        """
        if not is_whole(max_ctas) or max_ctas < 1:
            raise ValueError(f"max_ctas is {max_ctas!r}; give a whole number >= 1")
        prepare()
        self._group: dist.ProcessGroup | None = None
        self._rank, self._num_ranks, self._nodes = 0, 1, [0]
        if dist.is_available() and dist.is_initialized():
            self._rank, self._num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
            if self._num_ranks > 1:
                self._group, self._nodes = _connect(process_group, max_ctas)

    def pieces(self, samples: Sequence[SplitSample], *, contextual: bool = True) -> Pieces | None:
        """What this rank does in a step. Nothing is sent; every rank passes the same samples.

        Args:
            samples: All split samples of the step, of all ranks, as `BalancedLoader.splits` gives them; empty if there
                is none.
            contextual: Whether contextual positions see all of the history in this model, as in HSTU; False: they are
                causal like the rest, whatever the samples say.

        Returns:
            The rank's pieces, or None if it has none: then it sends and receives nothing in this step.

        Raises:
            ValueError: If a piece is on no rank of the group, or two are the same sequence.
        """
        samples = tuple(samples)
        check_splits(samples, self._num_ranks)
        if all(piece.rank != self._rank for sample in samples for piece in sample.pieces):
            return None
        if not contextual:
            samples = tuple(replace(sample, num_context=0) for sample in samples)
        return Pieces(samples, self._rank, self._group, self._nodes)


def _connect(parent: dist.ProcessGroup | None, max_ctas: int) -> tuple[dist.ProcessGroup, list[int]]:
    """A communicator of the same ranks, and the node of each, as a number. Collective."""
    whole = parent if parent is not None else dist.group.WORLD
    assert whole is not None
    backend = str(dist.get_backend(whole))
    options, timeout, device = None, timeout_of(whole), "cpu"
    if "nccl" in backend:
        options, device = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True), "cuda"  # sends come first
        options.config.max_ctas = max_ctas
        if timeout is not None:
            options._timeout = timeout
    group = make_group(dist.get_process_group_ranks(whole), backend, timeout, use="-pieces", options=options)
    # It also connects NCCL, which does so at the first collective, in which all of its ranks must take part.
    name = int.from_bytes(hashlib.blake2b(node_name().encode(), digest_size=7).digest())
    names = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(names, torch.tensor([name], device=device), group=group)
    return group, names.tolist()
