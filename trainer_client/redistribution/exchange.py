"""Redistribution by one All2All of packed bytes: the values of all fields and, behind them, the lengths."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenkeel.partitioning.slices import Slice
from trainer_client.batches import FlatBatch
from trainer_client.batches.flat import LENGTHS_DTYPE
from trainer_client.redistribution.copying import copy_table, piece_bytes
from trainer_client.redistribution.fields import FieldTable
from trainer_client.redistribution.moves import describe, measure, room

# Below this, one kernel for samples that leave and that stay is faster than a second one beside the All2All.
OVERLAP_BYTES = 4 << 20


def exchange(
    flat: FlatBatch,
    piece: Slice,
    group: dist.ProcessGroup | None,
    world_size: int,
    home: torch.cuda.Stream | None = None,
) -> Callable[[], FlatBatch]:
    """Packs and sends; the returned function receives and unpacks.

    On CUDA neither of the two waits for the device, and all work is on the current stream.

    Args:
        flat: The rank's batch, its tensors contiguous and on one device.
        piece: Its slice of the plan.
        group: The ranks of the plan.
        world_size: Their number.
        home: The stream whose memory the result's tensors are of; default: the current one.
    """
    device = flat.device
    assert device is not None
    lengths, num_jagged = flat.lengths, flat.num_jagged
    fields = FieldTable.of(flat.structure.leaves, LENGTHS_DTYPE.itemsize * num_jagged)
    amounts = measure(piece, lengths, fields, world_size)
    sent_splits, received_splits = amounts.sent_bytes.tolist(), amounts.received_bytes.tolist()
    leaf_rows = flat.leaf_rows(amounts.num_samples, amounts.totals)
    with nullcontext() if home is None else torch.cuda.stream(home):
        tensors = [
            tensor.new_empty((rows, *leaf.shape))
            for tensor, leaf, rows in zip(flat.tensors, flat.structure.leaves, leaf_rows, strict=True)
        ]
    if home is not None:
        torch.cuda.current_stream(device).wait_stream(home)  # for what still uses that memory
    table = torch.empty((amounts.num_samples, num_jagged), dtype=LENGTHS_DTYPE, device=device)
    sent = torch.empty(sum(sent_splits), dtype=torch.uint8, device=device)
    received = torch.empty(sum(received_splits), dtype=torch.uint8, device=device)

    # One buffer describes everything to the device, by one copy: own lengths, and the lists of what to copy where.
    most = piece_bytes(device)
    lists_begin = (lengths.size + 3) // 4 * 2  # in words of 8 bytes, a multiple of 16
    on_host = torch.empty(
        lists_begin + room(amounts, fields, most), dtype=torch.int64, pin_memory=device.type == "cuda"
    )
    words = on_host.numpy()
    words.view(np.int32)[: lengths.size] = lengths.reshape(-1)
    described = on_host if device.type == "cpu" else torch.empty_like(on_host, device=device)
    lists = describe(
        words[lists_begin:], amounts, piece, lengths, fields, flat.totals,
        _addresses([*flat.tensors, described]), _addresses([*tensors, table]), sent.data_ptr(), received.data_ptr(),
        most=most, join=amounts.kept_bytes < OVERLAP_BYTES,
    )  # fmt: skip
    if device.type != "cpu":
        used = lists_begin + lists[-1][0] + 3 * lists[-1][1]
        described[:used].copy_(on_host[:used], non_blocking=True)

    def copy(step: int) -> None:
        begin, count = lists[step]
        if count:
            copy_table(described[lists_begin + begin : lists_begin + begin + 3 * count].view(3, count))

    copy(0)
    work: Any = dist.all_to_all_single(received, sent, received_splits, sent_splits, group=group, async_op=True)
    copy(1)  # samples that stay are copied while the others travel

    def finish() -> FlatBatch:
        work.wait()
        copy(2)
        _ = sent, flat  # alive until here: kernels read them by address
        host_lengths = None
        if device.type == "cpu":
            host_lengths = table.to(torch.int64).numpy()
            _check(piece, host_lengths)
        return flat.rebuild(
            tensors,
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
