"""Redistribution by gathering all batches on all ranks and keeping what is wanted.

It takes world-size times the memory and waits for the device, since the sizes of all batches are exchanged first. It is
a stand-in of ours for libraries that move batches so, and a second opinion in tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.references.blocks import lay_out
from evenkeel.partitioning.slices import Slice
from trainer_client.balancing import redistribution
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.redistribution import Pending
from trainer_client.balancing.redistribution.copies import FieldTable, describe_samples
from trainer_client.balancing.redistribution.copying import copy_described, piece_bytes

# renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start(
    flat: FlatBatch, piece: Slice, *, group: dist.ProcessGroup | None, device: torch.device | str | None = None
) -> Pending:
    """What `redistribution.start` does, by gathering; on CUDA on a stream of its own."""
    if group is None:
        return redistribution.start(flat, piece, group=None, device=device)
    where = torch.device(device) if device is not None else flat.device
    assert where is not None
    world_size = dist.get_world_size(group)
    if where.type != "cuda":
        result = gather_and_select(flat.to(where).plain(), piece, group, world_size)
        return Pending(lambda: result)
    side, flat = _stream(), flat.plain()
    on_device = flat.device is not None and flat.device.type == "cuda"
    with torch.cuda.stream(side):
        moved = flat if on_device else flat.pin_memory().to(where, non_blocking=True)
        side.wait_stream(torch.cuda.current_stream(where))
        result = gather_and_select(moved, piece, group, world_size)
        _ = result.lengths_tensor
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(side)
    for tensor in flat.tensors if on_device else ():
        tensor.record_stream(side)
    return Pending(lambda: result, event)


def redistribute(flat: FlatBatch, piece: Slice, *, group: dist.ProcessGroup | None) -> FlatBatch:
    """What `redistribution.redistribute` does, by gathering."""
    return start(flat, piece, group=group).wait()


@contextmanager
def by_gathering() -> Iterator[None]:
    """Rounds of balancers that are used in the block gather where they would exchange."""
    with mock.patch("trainer_client.balancing.stream.start_moving", start):
        yield


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def gather_and_select(flat: FlatBatch, piece: Slice, group: dist.ProcessGroup | None, world_size: int) -> FlatBatch:
    """The batch that this rank trains; the same as by `exchange`.

    Args:
        flat: The rank's batch, its tensors contiguous and on one device.
        piece: Its slice of the plan.
        group: The ranks of the plan.
        world_size: Their number.

    Raises:
        RuntimeError: If the batches gathered are not those that the slice announces.
    """
    device = flat.device
    assert device is not None
    fields = FieldTable.of(flat.structure.leaves)
    sums = np.concatenate([[flat.num_samples], flat.totals])
    sizes = _gather(torch.from_numpy(sums), group, world_size, device)
    counts, totals = sizes[:, 0].copy(), sizes[:, 1:].copy()
    blocks = lay_out(fields, counts, totals)

    described = np.zeros((int(counts.max()), 1 + flat.num_jagged), dtype=np.int32)
    described[: flat.num_samples, 0] = piece.destinations
    described[: flat.num_samples, 1:] = flat.lengths
    tables = _gather(torch.from_numpy(described), group, world_size, device)

    own = lay_out(fields, sums[None, :1].ravel(), flat.totals[None, :])
    packed = torch.empty(int(blocks.block_bytes.max()), dtype=torch.uint8, device=device)
    begin = np.array([0, flat.num_samples])
    copies, job = describe_samples(
        np.arange(flat.num_samples), begin, flat.lengths, begin, fields,
        fields.addresses(flat.tensors, flat.totals)[None], packed.data_ptr() + own.offsets[0], flat.totals,
        most=piece_bytes(device),
    )  # fmt: skip
    copy_described(copies, job, device)
    gathered = torch.empty(world_size * packed.numel(), dtype=torch.uint8, device=device)
    all_gather(gathered, packed, group=group)

    chosen = [np.flatnonzero(tables[source, : counts[source], 0] == piece.rank) for source in range(world_size)]
    picked = [tables[source, chosen[source], 1:].astype(np.int64) for source in range(world_size)]
    lengths = np.concatenate(picked)
    _check(piece, chosen, picked)
    new_totals = lengths.sum(axis=0)
    tensors = flat.make_room(len(lengths), new_totals, device)
    # every block of the gathered buffer begins at a multiple of the largest one, its own offsets at 0
    begins = gathered.data_ptr() + packed.numel() * np.arange(world_size)
    copies, job = describe_samples(
        np.concatenate(chosen),
        np.cumsum([0, *(samples.size for samples in chosen)]),
        np.concatenate([tables[source, :count, 1:] for source, count in enumerate(counts)]).astype(np.int64),
        np.cumsum([0, *counts]),
        fields,
        begins[:, None] + blocks.offsets - blocks.offsets[:, :1],
        fields.addresses(tensors, new_totals),
        new_totals,
        most=piece_bytes(device),
    )
    copy_described(copies, job, device)
    return flat.rebuild(tensors, num_samples=len(lengths), totals=new_totals, lengths=lengths)


def _gather(
    own: torch.Tensor, group: dist.ProcessGroup | None, world_size: int, device: torch.device
) -> NDArray[np.int64]:
    """(world_size, *shape) on the host; waits for the device."""
    result = torch.empty((world_size * own.shape[0], *own.shape[1:]), dtype=own.dtype, device=device)
    all_gather(result, own.to(device), group=group)
    table: NDArray[np.int64] = result.cpu().numpy().reshape(world_size, *own.shape)
    return table


def _check(piece: Slice, chosen: list[NDArray[np.int64]], picked: list[NDArray[np.int64]]) -> None:
    announced = dict(zip(piece.sources.tolist(), piece.source_counts.tolist(), strict=True))
    for source, samples in enumerate(chosen):
        totals = picked[source].sum(axis=0)
        expected = piece.source_totals[piece.sources == source].sum(axis=0)
        if samples.size != announced.get(source, 0) or not np.array_equal(totals, expected):
            raise RuntimeError(
                f"rank {source} has {samples.size} samples of lengths {totals.tolist()} for rank {piece.rank}, but "
                f"the plan announces {announced.get(source, 0)} of {expected.tolist()}: "
                "the ranks do not hold the same plan"
            )
