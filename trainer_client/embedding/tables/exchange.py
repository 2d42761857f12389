"""All2All of rows between ranks, with gradients, over a communicator for that alone.

Errors of one rank are raised by all of them in the same step: else the others would wait for it until their timeout.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_client.process_groups import make_group, timeout_of

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def exchange_group(parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The communicator on which all collections of a process group exchange keys and rows.

    The first call for a group is collective: every rank of the group makes it.
    """
    group = parent if parent is not None else dist.group.WORLD
    assert group is not None
    if group not in _made:
        _made[group] = make_group(dist.get_process_group_ranks(group), str(dist.get_backend(group)), timeout_of(group))
    return _made[group]


class Status:
    """Whether any rank has failed so far, on its way to all of them while the host goes on."""

    def __init__(self, problem: Exception | None, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Starts the reduction. Collective."""
        self._problem, self._group = problem, group
        self._failed = torch.tensor([int(problem is not None)], dtype=torch.int32, device=device)
        self._work: Any = dist.all_reduce(self._failed, dist.ReduceOp.MAX, group=group, async_op=True)

    def check(self) -> None:
        """Raises on all ranks if one has failed."""
        self._work.wait()
        if int(self._failed):
            raise_together(self._problem, self._group)


def raise_together(problem: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raises the error of the first rank that has one, on all ranks, which know that there is one. Collective."""
    errors: list[Any] = [None] * dist.get_world_size(group)
    local = None if problem is None else (isinstance(problem, ValueError), f"{type(problem).__name__}: {problem}")
    dist.all_gather_object(errors, local, group=group)
    rank, (is_value, text) = next((rank, each) for rank, each in enumerate(errors) if each is not None)
    if is_value:
        raise ValueError(f"rank {rank}: {text.removeprefix('ValueError: ')}") from problem
    raise RuntimeError(f"rank {rank}: {text}") from problem


def cut(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Views of consecutive stretches of a tensor."""
    return tuple(tensor.split(list(sizes), dim))  # type: ignore[no-untyped-call]


def all_to_all(rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Sends `send[r]` rows to each rank r, in order, and receives `receive[r]` rows from it."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.splits = receive, send, group
        return all_to_all(rows, receive, send, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        receive, send, group = ctx.splits
        return differentiable_all_to_all(gradients[0], send, receive, group), None, None, None


def differentiable_all_to_all(
    rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """As `all_to_all`; the gradient travels back the same way."""
    result: Tensor = _AllToAll.apply(rows, receive, send, group)  # type: ignore[no-untyped-call]
    return result


def exchange_counts(counts: Tensor, group: dist.ProcessGroup | None) -> tuple[list[list[int]], list[list[int]]]:
    """Tells every rank how many keys of each feature it will get, and whether this rank has failed."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    both = torch.stack([counts, received]).tolist()
    return both[0], both[1]
