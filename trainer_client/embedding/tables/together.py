"""Errors of one rank, raised by all of them in the same step: else the others would wait for it until their timeout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Status:
    """Whether any rank has failed so far, on its way to all of them while the host goes on."""

    def __init__(self, problem: Exception | None, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Starts to tell the others. Collective.

        Args:
            problem: This rank's error; None if it has none.
            device: Where the group's collectives take tensors.
            group: The ranks.
        """
        self._problem, self._group = problem, group
        self._failed = torch.tensor([int(problem is not None)], dtype=torch.int32, device=device)
        self._work: Any = dist.all_reduce(self._failed, dist.ReduceOp.MAX, group=group, async_op=True)

    def check(self) -> None:
        """Raises on all ranks if one has failed."""
        self._work.wait()
        if int(self._failed):
            raise_together(self._problem, self._group)


def raise_together(problem: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raises the error of the first rank that has one, on all ranks, which know that there is one. Collective.

    Args:
        problem: This rank's; None if it has none.
        group: The ranks.

    Raises:
        ValueError: If it was one.
        RuntimeError: If it was anything else.
    """
    told: list[Any] = [None] * dist.get_world_size(group)
    own = None if problem is None else (isinstance(problem, ValueError), f"{type(problem).__name__}: {problem}")
    dist.all_gather_object(told, own, group=group)
    rank, (is_value, text) = next((rank, each) for rank, each in enumerate(told) if each is not None)
    if is_value:
        raise ValueError(f"rank {rank}: {text.removeprefix('ValueError: ')}") from problem
    raise RuntimeError(f"rank {rank}: {text}") from problem
