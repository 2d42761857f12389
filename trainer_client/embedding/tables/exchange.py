"""All2All of rows between ranks, with gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, by: float) -> Tensor:
        ctx.by = by
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.by, None


def divide_gradient(rows: Tensor, by: float) -> Tensor:
    """The same rows; their gradient is divided."""
    result: Tensor = _DivideGradient.apply(rows, by) if by != 1 else rows  # type: ignore[no-untyped-call]
    return result


def differentiable_all_to_all(
    rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """As `all_to_all`; the gradient travels back the same way."""
    result: Tensor = _AllToAll.apply(rows, receive, send, group)  # type: ignore[no-untyped-call]
    return result


def exchange_counts(counts: Tensor, group: dist.ProcessGroup | None) -> tuple[list[list[int]], list[list[int]]]:
    """Tells every rank how many keys of each feature it will get, and whether this rank has failed.

    Args:
        counts: (ranks x features + 1): keys of each feature for each rank; at last 1 if this rank has failed, else 0.
        group: The process group.

    Returns:
        What each rank gets from here and what comes from each, in the same form; read by the host, which waits once.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    both = torch.stack([counts, received]).tolist()
    return both[0], both[1]
