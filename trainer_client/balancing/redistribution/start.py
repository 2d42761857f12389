"""The public way in: start a redistribution, wait for it later."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist

from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.redistribution.exchange import exchange, prepare
from trainer_client.balancing.redistribution.pending import Pending


def redistribute(
    flat: FlatBatch,
    piece: Slice,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device | str | None = None,
    stream: torch.cuda.Stream | None = None,
) -> FlatBatch:
    """Moves every sample to its destination and gives the batch that this rank trains; see `start`."""
    return start(flat, piece, group=group, device=device, stream=stream).wait()


def start(
    flat: FlatBatch,
    piece: Slice,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device | str | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Pending:
    """Begins to move samples. Collective: all ranks of `group` call it for the same plan, in the same order.

    The result holds exactly the bytes of the samples that the plan assigns to this rank,
    sorted by (home, index at home).
    On CUDA the host never waits for the device.

    Args:
        flat: The rank's batch, with the lengths on the host.
        piece: The rank's slice of the plan.
        group: The ranks of the plan; None if nothing moves, which needs no collective.
        device: Where the result shall be; default: where `flat` is. Gloo moves host tensors, NCCL CUDA tensors.
        stream: CUDA stream for all of it; default: one that this library keeps per device.

    Returns:
        The redistribution in flight.

    Raises:
        ValueError: If the slice does not fit the batch or the group.
    """
    found = flat.device
    where = torch.device(device) if device is not None else found
    world_size = 1 if group is None else dist.get_world_size(group)
    _check(flat, piece, group, world_size)
    if where is None or where.type != "cuda":
        flat = (flat if where is None else flat.to(where)).plain()
        if world_size > 1 and where is not None:
            return Pending(exchange(flat, piece, group, prepare(flat, piece, world_size, where), where))
        return Pending(lambda: flat)
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    side = stream if stream is not None else _side_stream(where)
    current = torch.cuda.current_stream(where)
    on_device = found is not None and found.type == "cuda"
    flat = (flat.to(where) if on_device else flat).plain()
    landing = prepare(flat, piece, world_size, where) if world_size > 1 else None
    with torch.cuda.stream(side):
        # From memory that is not pinned the host would wait for the copies, and so for work queued before them.
        moved = flat if on_device else flat.pin_memory().to(where, non_blocking=True)
        # Collectives come after the model's that are queued by now, on all ranks alike.
        if landing is not None:
            result = exchange(moved, piece, group, landing, where, side, after=current)()
        else:
            side.wait_stream(current)
            result = moved
        _ = result.lengths_tensor  # built here, so that its copy to the device is before the event
        read = result if result.needs_host else None
        if read is not None:
            result = read.read_back()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(side)
    if landing is not None:
        return Pending(lambda: result, event, home=current, held=flat if on_device else None, read=read)
    if on_device:
        for tensor in flat.tensors:
            tensor.record_stream(side)
    return Pending(lambda: result, event, read=read)


def _check(flat: FlatBatch, piece: Slice, group: dist.ProcessGroup | None, world_size: int) -> None:
    if piece.destinations.shape != (flat.num_samples,):
        raise ValueError(
            f"the slice is for {piece.destinations.size} samples, the batch has {flat.num_samples}; "
            "pass the batch for which the plan was made"
        )
    if piece.source_totals.shape != (piece.sources.size, flat.num_jagged):
        raise ValueError(
            f"the slice has totals of shape {piece.source_totals.shape}; this batch needs "
            f"({piece.sources.size}, {flat.num_jagged}), one column per jagged field"
        )
    if group is None:
        if piece.destinations.size and (piece.destinations != piece.rank).any():
            raise ValueError("the slice moves samples, but group is None; pass the process group of the plan's ranks")
        return
    if dist.get_rank(group) != piece.rank:
        raise ValueError(f"the slice is that of rank {piece.rank}, this is rank {dist.get_rank(group)} of the group")
    ranks = [*piece.destinations.tolist(), *piece.sources.tolist()]
    if ranks and not (min(ranks) >= 0 and max(ranks) < world_size):
        raise ValueError(f"the slice names ranks {min(ranks)} to {max(ranks)}, the group has 0 to {world_size - 1}")


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """High priority: short copies and sends overtake the kernels of a training step, which wait for the next batch."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
