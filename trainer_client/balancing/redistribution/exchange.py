"""Redistribution by one All2All of packed bytes: the values of all fields and, behind them, the lengths.

`start` begins one, `Pending.wait` ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.batches.flat import LENGTHS_DTYPE
from trainer_client.balancing.groups import explained
from trainer_client.balancing.redistribution.copies import FieldTable, copy, piece_bytes
from trainer_client.balancing.redistribution.layout import KEEP, PACK, UNPACK, Amounts, describe, measure, num_words


class Pending:
    """What `start` returns; `wait` gives the batch.

    Its process must wait for every redistribution that it started, in the order of starting.
    """

    def __init__(
        self,
        finish: Callable[[], FlatBatch],
        event: torch.cuda.Event | None = None,  # when the device has the batch; None on the host
        *,
        home: torch.cuda.Stream | None = None,  # that was current at the start, if the result is of its memory
        source: FlatBatch | None = None,  # the batch as it was, if it is of the device's memory: read until the event
        read: FlatBatch | None = None,  # the result on the device, if parts of it are read back to the host
    ) -> None:
        self._finish: Callable[[], FlatBatch] | None = finish
        self._event, self._home, self._source, self._read = event, home, source, read
        self._result: FlatBatch | None = None

    def __del__(self) -> None:
        if self._result is None and self._event is not None and self._home is not None:
            with suppress(Exception):  # at the interpreter's end the device may be gone
                self._home.wait_event(self._event)  # never waited for: its memory must not be used again before

    @property
    def landed(self) -> bool:
        """Whether `wait` has given the batch."""
        return self._result is not None

    def wait(self) -> FlatBatch:
        """The batch that this rank trains.

        On CUDA it is ordered before later work of the current stream, and the host goes on at once; but it waits for
        the move if parts of the batch are read on the host: arrays, Python objects, `MaxLength`, padded tensors.

        Raises:
            RuntimeError: If the process group failed, or another rank sent what the slice does not announce.
        """
        if self._result is None:
            assert self._finish is not None
            result = self._finish()
            self._finish = None  # lets go of the buffers
            if self._event is not None:
                self._order(self._event, result)
                if self._read is not None:
                    self._event.synchronize()
            self._source = self._read = None
            self._result = result
        return self._result

    def _order(self, event: torch.cuda.Event, result: FlatBatch) -> None:
        """Orders the event before what comes, so that memory of both batches is used again only after it.

        The allocator gives freed memory to later work of the stream that it was allocated on. Memory of the home
        stream needs no `record_stream`, whose events cost the host more than the allocation, as long as that stream
        waits for the event before the memory is freed.
        """
        current = torch.cuda.current_stream(result.device)
        current.wait_event(event)
        at_home = self._home == current
        if self._home is not None and not at_home:
            self._home.wait_event(event)
        result.lengths_tensor.record_stream(current)
        if not at_home:
            for tensor in result.tensors:
                if tensor.is_cuda:
                    tensor.record_stream(current)


# Below this, one kernel for samples that leave and that stay is faster than a second one beside the All2All.
OVERLAP_BYTES = 4 << 20


def prepare(
    flat: FlatBatch, piece: Slice, world_size: int, device: torch.device
) -> tuple[FieldTable, Amounts, list[torch.Tensor]]:
    """The fields with the lengths as the last one, the sizes of all buffers, and memory for the result.

    The memory is the current stream's.
    """
    fields = FieldTable.of(flat.structure.leaves, LENGTHS_DTYPE.itemsize * flat.num_jagged)
    amounts = measure(piece, flat.lengths, fields, world_size, piece_bytes(device))
    return fields, amounts, flat.make_room(amounts.num_samples, amounts.totals, device)


def exchange(
    flat: FlatBatch,
    piece: Slice,
    group: dist.ProcessGroup | None,
    prepared: tuple[FieldTable, Amounts, list[torch.Tensor]],
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    after: torch.cuda.Stream | None = None,
) -> Callable[[], FlatBatch]:
    """Packs and sends; the returned function receives and unpacks. On CUDA neither of the two waits for the device.

    The batch is on the device, its tensors contiguous. On CUDA the current `stream` waits for the work of `after` so
    far before the batch is read and the result written.
    """
    fields, amounts, tensors = prepared
    lengths, is_host = flat.lengths, device.type == "cpu"
    sent_splits, received_splits = amounts.sent_bytes.tolist(), amounts.received_bytes.tolist()
    table = torch.empty((amounts.num_samples, flat.num_jagged), dtype=LENGTHS_DTYPE, device=device)
    buffers = torch.empty(sum(sent_splits) + sum(received_splits), dtype=torch.uint8, device=device)
    sent, received = buffers[: sum(sent_splits)], buffers[sum(sent_splits) :]

    # One buffer brings everything to the device, by one copy: own lengths, and what to copy where.
    begin = (lengths.size + 3) // 4 * 2  # in words of 8 bytes, a multiple of 16
    on_host = torch.empty(begin + num_words(amounts, fields), dtype=torch.int64, device="cpu", pin_memory=not is_host)
    words = on_host.numpy()
    words.view(np.int32)[: lengths.size] = lengths.reshape(-1)
    described = on_host if is_host else torch.empty_like(on_host, device=device)
    addresses = (
        fields.addresses([*flat.tensors, described], flat.totals), fields.addresses([*tensors, table], amounts.units),
        sent.data_ptr(), received.data_ptr(),
    )  # fmt: skip
    copies = describe(
        words[begin:], amounts, piece, lengths, fields, addresses, most=piece_bytes(device),
        join=amounts.kept_bytes < OVERLAP_BYTES,
    )  # fmt: skip
    if not is_host:
        used = begin + copies.words.size
        described[:used].copy_(on_host[:used], non_blocking=True)  # while the stream's other work is still going on
    if stream is not None and after is not None:
        stream.wait_stream(after)
    handle = 0 if stream is None else stream.cuda_stream
    on_device = None if is_host else described[begin:]

    copy(copies, PACK, on_device, handle)
    with explained():
        work: Any = dist.all_to_all_single(received, sent, received_splits, sent_splits, group=group, async_op=True)
    copy(copies, KEEP, on_device, handle, beside=True)  # samples that stay are copied while the others travel

    def finish() -> FlatBatch:
        with explained():
            work.wait()
        copy(copies, UNPACK, on_device, handle)
        _ = sent, flat  # alive until here: kernels read them by address
        host_lengths = table.to(torch.int64).numpy() if is_host else None
        if host_lengths is not None:
            _check(piece, host_lengths)
        return flat.rebuild(tensors, host_lengths, totals=amounts.totals, lengths_tensor=table.t().contiguous())

    return finish


def _check(piece: Slice, lengths: NDArray[np.int64]) -> None:
    """Compares what arrived on the host with what the slice announces; a device would have to be waited for."""
    begin = 0
    for source, count, announced in zip(piece.sources, piece.source_counts, piece.source_totals, strict=True):
        arrived = lengths[begin : begin + int(count)].sum(axis=0)
        begin += int(count)
        if not np.array_equal(arrived, announced):
            raise RuntimeError(
                f"rank {source} sent rank {piece.rank} samples of total lengths {arrived.tolist()}, but the plan "
                f"announces {announced.tolist()}: the ranks do not hold the same plan"
            )


def start(
    flat: FlatBatch,
    piece: Slice,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device | str | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Pending:
    """Begins to move samples. Collective: all ranks of `group` call it for the same plan, in the same order.

    The result holds exactly the bytes of the samples that the plan assigns to this rank, sorted by (home, index at
    home). On CUDA the host never waits for the device.

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
    source = flat.device
    where = torch.device(device) if device is not None else source
    world_size = 1 if group is None else dist.get_world_size(group)
    _check_fits(flat, piece, group, world_size)
    if where is None or where.type != "cuda":
        flat = (flat if where is None else flat.to(where)).plain()
        if world_size > 1 and where is not None:
            return Pending(exchange(flat, piece, group, prepare(flat, piece, world_size, where), where))
        return Pending(lambda: flat)
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    side = stream if stream is not None else _side_stream(where)
    current = torch.cuda.current_stream(where)
    on_device = source is not None and source.type == "cuda"
    flat = (flat.to(where) if on_device else flat).plain()
    prepared = prepare(flat, piece, world_size, where) if world_size > 1 else None
    with torch.cuda.stream(side):
        # From memory that is not pinned the host would wait for the copies, and so for work queued before them.
        moved = flat if on_device else flat.pin_memory().to(where, non_blocking=True)
        # Collectives come after the model's that are queued by now, on all ranks alike.
        if prepared is not None:
            result = exchange(moved, piece, group, prepared, where, side, after=current)()
        else:
            side.wait_stream(current)
            result = moved
        _ = result.lengths_tensor  # built here, so that its copy to the device is before the event
        read = result if result.needs_host else None
        if read is not None:
            result = read.read_back()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(side)
    if prepared is not None:
        return Pending(lambda: result, event, home=current, source=flat if on_device else None, read=read)
    if on_device:
        for tensor in flat.tensors:
            tensor.record_stream(side)
    return Pending(lambda: result, event, read=read)


def _check_fits(flat: FlatBatch, piece: Slice, group: dist.ProcessGroup | None, world_size: int) -> None:
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
