"""Redistribution by one All2All of packed bytes: the values of all fields and, behind them, the lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.batches.structure import LENGTHS_DTYPE
from trainer_client.balancing.redistribution.copying import copy, piece_bytes
from trainer_client.balancing.redistribution.fields import FieldTable
from trainer_client.balancing.redistribution.moves import Amounts, describe, measure

# Below this, one kernel for samples that leave and that stay is faster than a second one beside the All2All.
OVERLAP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where a rank's samples will be.

    Attributes:
        fields: The fields, the lengths as the last one.
        amounts: The sizes of all buffers.
        tensors: Those of the batch to come, empty.
    """

    fields: FieldTable
    amounts: Amounts
    tensors: list[torch.Tensor]


def prepare(flat: FlatBatch, piece: Slice, world_size: int, device: torch.device) -> Landing:
    """Sizes, and memory for the result, of the device's current stream."""
    fields = FieldTable.of(flat.structure.leaves, LENGTHS_DTYPE.itemsize * flat.num_jagged)
    amounts = measure(piece, flat.lengths, fields, world_size, piece_bytes(device))
    tensors = flat.make_room(amounts.num_samples, amounts.totals, device)
    return Landing(fields=fields, amounts=amounts, tensors=tensors)


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
    lengths, num_jagged = flat.lengths, flat.num_jagged
    amounts = landing.amounts
    sent_splits, received_splits = amounts.sent_bytes.tolist(), amounts.received_bytes.tolist()
    table = torch.empty((amounts.num_samples, num_jagged), dtype=LENGTHS_DTYPE, device=device)
    buffers = torch.empty(sum(sent_splits) + sum(received_splits), dtype=torch.uint8, device=device)
    sent, received = buffers[: sum(sent_splits)], buffers[sum(sent_splits) :]

    # One buffer describes everything to the device, by one copy: own lengths, and what to copy where.
    begin = (lengths.size + 3) // 4 * 2  # in words of 8 bytes, a multiple of 16
    num_words = begin + amounts.num_words
    on_host = torch.empty(num_words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    words = on_host.numpy()
    words.view(np.int32)[: lengths.size] = lengths.reshape(-1)
    described = on_host if device.type == "cpu" else torch.empty_like(on_host, device=device)
    moves = describe(
        words[begin:], amounts, piece, lengths, landing.fields, flat.totals,
        _addresses([*flat.tensors, described]), _addresses([*landing.tensors, table]),
        sent.data_ptr(), received.data_ptr(),
        most=piece_bytes(device), join=amounts.kept_bytes < OVERLAP_BYTES,
    )  # fmt: skip
    if device.type != "cpu":
        used = begin + moves.num_words
        described[:used].copy_(on_host[:used], non_blocking=True)  # while the stream's other work is still going on
    if stream is not None and after is not None:
        stream.wait_stream(after)
    handle = 0 if stream is None else stream.cuda_stream
    jobs = described[begin:]

    copy(jobs, moves.pack, handle)
    work: Any = dist.all_to_all_single(received, sent, received_splits, sent_splits, group=group, async_op=True)
    copy(jobs, moves.keep, handle, beside=True)  # samples that stay are copied while the others travel

    def finish() -> FlatBatch:
        work.wait()
        copy(jobs, moves.unpack, handle)
        _ = sent, flat  # alive until here: kernels read them by address
        host_lengths = None
        if device.type == "cpu":
            host_lengths = table.to(torch.int64).numpy()
            _check(piece, host_lengths)
        return flat.rebuild(
            landing.tensors,
            num_samples=amounts.num_samples,
            totals=amounts.totals,
            lengths=host_lengths,
            lengths_tensor=table.t().contiguous(),
        )

    return finish


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
