"""What the shuffler of recsys-examples needs of GPUs, on CPU ranks: to compare results there, never times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


@contextmanager
def stand_ins() -> Iterator[None]:
    """In the block, Gloo gathers and exchanges tensors of different sizes, and marks for profilers do nothing."""
    import fbgemm_gpu  # noqa: F401  # brings the operator that is replaced

    with ExitStack() as stack:
        for where, name, what in (
            ("torch.cuda", "current_device", lambda: torch.device("cpu")),
            ("torch.cuda.nvtx", "range_push", lambda _: None),
            ("torch.cuda.nvtx", "range_pop", lambda: None),
            ("torch.distributed", "all_gather", _all_gather),
            ("torch.distributed", "all_to_all", _all_to_all),
        ):
            stack.enter_context(mock.patch(f"{where}.{name}", what))
        stack.enter_context(mock.patch.object(torch.ops.fbgemm, "keyed_jagged_index_select_dim1", _select))
        yield


def _select(
    values: torch.Tensor,
    lengths: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    batch_size: int,
    weights: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """FBGEMM's operator, which has no CPU kernel."""
    where = (torch.arange(lengths.numel() // batch_size)[:, None] * batch_size + indices[None, :]).reshape(-1)
    chosen = lengths[where]
    ends = torch.cumsum(chosen, 0)
    rows = torch.arange(int(chosen.sum())) + torch.repeat_interleave(offsets[:-1][where] - (ends - chosen), chosen)
    return [values[rows], chosen, *([] if weights is None else [weights[rows]])]


_gather = dist.all_gather


def _all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
    most = max(output.numel() for output in outputs)
    padded = [output.new_empty(most) for output in outputs]
    _gather(padded, torch.cat([own.reshape(-1), own.new_empty(most - own.numel())]), group=group)
    for output, got in zip(outputs, padded, strict=True):
        output.copy_(got[: output.numel()].view_as(output))


def _all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None) -> None:
    sent = torch.cat([each.reshape(-1) for each in inputs])
    got = sent.new_empty(sum(each.numel() for each in outputs))
    dist.all_to_all_single(
        got, sent, [each.numel() for each in outputs], [each.numel() for each in inputs], group=group
    )
    begin = 0
    for output in outputs:
        output.copy_(got[begin : begin + output.numel()].view_as(output))
        begin += output.numel()
