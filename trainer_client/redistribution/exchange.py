"""Redistribution by All2All of packed bytes: the values of all fields and, behind them, the lengths.

One All2All, or two where there is so much to send that packing the second half of the fields beside the first one's
All2All saves more than another one costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenkeel.partitioning.slices import Slice
from trainer_client.batches import FlatBatch
from trainer_client.batches.flat import LENGTHS_DTYPE
from trainer_client.redistribution.copies import Ints
from trainer_client.redistribution.copying import copy, piece_bytes
from trainer_client.redistribution.fields import FieldTable
from trainer_client.redistribution.moves import Amounts, Moves, describe, measure

# Below this, one kernel for samples that leave and that stay is faster than a second one beside the All2All.
OVERLAP_BYTES = 4 << 20
# Sent by a rank in the mean, from which on two All2Alls are faster than one.
SPLIT_BYTES = 32 << 20


def num_parts(moved_bytes: float, world_size: int) -> int:
    """In how many All2Alls to send so many bytes, counted over all ranks."""
    return 2 if moved_bytes >= SPLIT_BYTES * world_size else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Fields that travel in one All2All.

    Attributes:
        fields: The fields.
        amounts: The sizes of its buffers.
    """

    fields: FieldTable
    amounts: Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where a rank's samples will be.

    Attributes:
        parts: All fields, the lengths as the last one.
        tensors: Those of the batch to come, empty.
        num_samples: Samples of that batch.
        totals: (num_jagged,) its values per jagged column.
    """

    parts: tuple[Part, ...]
    tensors: list[torch.Tensor]
    num_samples: int
    totals: Ints


class Transfer(NamedTuple):
    """A part on its way.

    Attributes:
        words: The description of its copies.
        moves: The copies.
        sent: The buffer to send.
        received: The buffer to receive.
        sent_splits: Bytes for each rank.
        received_splits: Bytes from each rank.
    """

    words: torch.Tensor
    moves: Moves
    sent: torch.Tensor
    received: torch.Tensor
    sent_splits: list[int]
    received_splits: list[int]


def prepare(flat: FlatBatch, piece: Slice, world_size: int, device: torch.device, parts: int = 1) -> Landing:
    """Sizes, and memory for the result, of the device's current stream; `parts` as `num_parts` gives it."""
    tables = FieldTable.parts(flat.structure.leaves, LENGTHS_DTYPE.itemsize * flat.num_jagged, parts)
    most = piece_bytes(device)
    found = tuple(
        Part(fields=fields, amounts=measure(piece, flat.lengths, fields, world_size, most)) for fields in tables
    )
    num_samples, totals = found[0].amounts.num_samples, found[0].amounts.totals
    tensors = flat.make_room(num_samples, totals, device)
    return Landing(parts=found, tensors=tensors, num_samples=num_samples, totals=totals)


def exchange(
    flat: FlatBatch,
    piece: Slice,
    group: dist.ProcessGroup | None,
    landing: Landing,
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    after: torch.cuda.Stream | None = None,
) -> Callable[[], FlatBatch]:
    """Packs and sends; the returned function receives and unpacks.

    On CUDA neither of the two waits for the device.

    Args:
        flat: The rank's batch, its tensors contiguous and on the device.
        piece: Its slice of the plan.
        group: The ranks of the plan.
        landing: What `prepare` made.
        device: Where the batch is.
        stream: The current stream, on CUDA.
        after: The stream whose work so far is waited for before the batch is read and the result written.
    """
    table = torch.empty((landing.num_samples, flat.num_jagged), dtype=LENGTHS_DTYPE, device=device)
    transfers = _describe_all(flat, piece, landing, table, device)
    if stream is not None and after is not None:
        stream.wait_stream(after)
    handle = 0 if stream is None else stream.cuda_stream

    works: list[Any] = []
    for part in transfers:
        copy(part.words, part.moves.pack, handle, beside=bool(works))  # the first has the device for itself
        works.append(
            dist.all_to_all_single(
                part.received, part.sent, part.received_splits, part.sent_splits, group=group, async_op=True
            )
        )
    for part in transfers:
        copy(part.words, part.moves.keep, handle, beside=True)  # samples that stay are copied while others travel

    def finish() -> FlatBatch:
        for number, (part, work) in enumerate(zip(transfers, works, strict=True)):
            work.wait()
            copy(part.words, part.moves.unpack, handle, beside=number + 1 < len(works))
        _ = flat  # alive until here, as `transfers`: kernels read them by address
        host_lengths = None
        if device.type == "cpu":
            host_lengths = table.to(torch.int64).numpy()
            _check(piece, host_lengths)
        return flat.rebuild(
            landing.tensors,
            num_samples=landing.num_samples,
            totals=landing.totals,
            lengths=host_lengths,
            lengths_tensor=table.t().contiguous(),
        )

    return finish


def _describe_all(
    flat: FlatBatch, piece: Slice, landing: Landing, table: torch.Tensor, device: torch.device
) -> list[Transfer]:
    """Buffers for all parts, and what to copy; on CUDA it is on its way while the stream's other work goes on."""
    lengths = flat.lengths
    sizes = [(part.amounts.sent_bytes.tolist(), part.amounts.received_bytes.tolist()) for part in landing.parts]
    buffers = torch.empty(
        sum(sum(sent) + sum(received) for sent, received in sizes), dtype=torch.uint8, device=device
    )  # fmt: skip

    # One buffer describes everything to the device, by one copy: own lengths, and what to copy where.
    begin = (lengths.size + 3) // 4 * 2  # in words of 8 bytes, a multiple of 16
    room = sum(part.amounts.num_words + 1 for part in landing.parts)
    on_host = torch.empty(begin + room, dtype=torch.int64, pin_memory=device.type == "cuda")
    words = on_host.numpy()
    words.view(np.int32)[: lengths.size] = lengths.reshape(-1)
    described = on_host if device.type == "cpu" else torch.empty_like(on_host, device=device)
    here, there = _addresses([*flat.tensors, described]), _addresses([*landing.tensors, table])
    most = piece_bytes(device)
    transfers = []
    at, place = 0, begin
    for part, (sent_splits, received_splits) in zip(landing.parts, sizes, strict=True):
        middle, end = at + sum(sent_splits), at + sum(sent_splits) + sum(received_splits)
        sent, received = buffers[at:middle], buffers[middle:end]
        moves = describe(
            words[place : place + part.amounts.num_words], part.amounts, piece, lengths, part.fields, flat.totals,
            here, there, sent.data_ptr(), received.data_ptr(), most=most, join=part.amounts.kept_bytes < OVERLAP_BYTES,
        )  # fmt: skip
        transfers.append(Transfer(described[place:], moves, sent, received, sent_splits, received_splits))
        at, place = end, place + (moves.num_words + 1) // 2 * 2
    if device.type != "cpu":
        described[:place].copy_(on_host[:place], non_blocking=True)
    return transfers


def _addresses(tensors: list[torch.Tensor]) -> NDArray[np.int64]:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def _check(piece: Slice, lengths: NDArray[np.int64]) -> None:
    """Compares what arrived on the host with what the slice announces; a device's lengths would have to be waited for.

    Raises:
        RuntimeError: If a rank sent other lengths.
    """
    begin = 0
    for source, count, announced in zip(piece.sources, piece.source_counts, piece.source_totals, strict=True):
        found = lengths[begin : begin + int(count)].sum(axis=0)
        begin += int(count)
        if not np.array_equal(found, announced):
            raise RuntimeError(
                f"rank {source} sent rank {piece.rank} samples of total lengths {found.tolist()}, but the plan "
                f"announces {announced.tolist()}: the ranks do not hold the same plan"
            )
