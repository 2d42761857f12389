"""All2All of rows between ranks, with gradients, over a communicator for that alone.

Errors of one rank are raised by all of them in the same step: else the others would wait for it until their timeout.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from trainer_client.process_groups import make_group, timeout_of

Collective = Callable[[Tensor], Tensor]
"""What ranks make of each other's rows."""

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


def start_telling(
    problem: Exception | None, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Tells all ranks whether any has failed, while the host goes on; what it gives raises that on all. Collective."""
    failed = torch.tensor([int(problem is not None)], dtype=torch.int32, device=device)
    work: Any = dist.all_reduce(failed, dist.ReduceOp.MAX, group=group, async_op=True)

    def check() -> None:
        work.wait()
        if int(failed):
            raise_together(problem, group)

    return check


def raise_together(problem: Exception | None, group: dist.ProcessGroup | None) -> NoReturn:
    """Raises the error of the first rank that has one, on all ranks, which know that there is one. Collective."""
    errors: list[Any] = [None] * dist.get_world_size(group)
    local = None if problem is None else (isinstance(problem, ValueError), f"{type(problem).__name__}: {problem}")
    dist.all_gather_object(errors, local, group=group)
    rank, (is_value, text) = next((rank, each) for rank, each in enumerate(errors) if each is not None)
    if is_value:
        raise ValueError(f"rank {rank}: {text.removeprefix('ValueError: ')}") from problem
    raise RuntimeError(f"rank {rank}: {text}") from problem


def all_to_all(rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Sends `send[r]` rows to each rank r, in order, and receives `receive[r]` rows from it."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


class _ThereAndBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Collective, back: Collective) -> Tensor:
        ctx.ways = there, back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        there, back = ctx.ways
        return there_and_back(gradients[0], back, there), None, None


def there_and_back(rows: Tensor, there: Collective, back: Collective) -> Tensor:
    """What a collective makes of rows. Gradients go through the one that brings them back, theirs there again."""
    result: Tensor = _ThereAndBack.apply(rows, there, back)  # type: ignore[no-untyped-call]
    return result


def differentiable_all_to_all(
    rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """As `all_to_all`; the gradient travels back the same way."""
    return there_and_back(
        rows,
        lambda values: all_to_all(values, receive, send, group),
        lambda gradients: all_to_all(gradients, send, receive, group),
    )


def exchange_counts(
    counts: Tensor, group: dist.ProcessGroup | None, problem: Exception | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Tells every rank how many keys of each column it will get. Raises on all ranks the problem that any has.

    Args:
        counts: (ranks x columns): keys for each rank.
        group: The ranks.
        problem: What has gone wrong on this rank.

    Returns:
        How many go to each rank, and how many come from it, by column.
    """
    sent = functional.pad(counts, (0, 1), value=int(problem is not None))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to_each, from_each = torch.stack([sent, received]).tolist()
    if any(row.pop() for row in from_each):
        raise_together(problem, group)
    return [row[:-1] for row in to_each], from_each
