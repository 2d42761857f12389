"""Copying wherever the memory is, on a device in one kernel launch; one batch of samples picked from several."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.batches.kinds import Leaf
from trainer_client.balancing.redistribution.copies import (
    WHOLE,
    Copies,
    FieldTable,
    Ints,
    Job,
    describe,
    describe_samples,
    measure,
    num_words,
)
from trainer_client.nvrtc import Module

PIECE_BYTES = 4096  # one warp each: enough of them to fill a device from a few MiB on
_KERNEL = "copy_pieces"
_THREADS = 256
# Collectives need whole multiprocessors: a kernel beside them fills half of the device, which keeps its memory busy.
_THREADS_BESIDE = 1024
_Parameters = ctypes.c_int64 * 10


# C's memcpy on plain addresses: index operations of torch cost an order of magnitude more for short rows
_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


@kernel
def _copy_on_host(
    unit_bytes: Ints, addresses: Ints, item_begin: Ints, first_piece: Ints, pieces: NDArray[np.int32],
    source: int, source_step: int, target: int, target_step: int,
) -> None:  # fmt: skip
    for field in range(unit_bytes.size):
        unit = unit_bytes[field]
        for i in range(item_begin[field + 1] - item_begin[field]):
            piece = pieces[first_piece[field] + i]
            since = addresses[source + piece[3] * source_step, field] + piece[0] * unit
            to = addresses[target + piece[3] * target_step, field] + piece[1] * unit
            _memcpy(to, since, piece[2] * unit)


def source() -> str:
    """The CUDA source."""
    return (Path(__file__).parent / "kernels" / "copy_pieces.cu").read_text()


@cache
def _module(device: int) -> tuple[Module, int]:
    return Module(source(), [_KERNEL], {}, device), torch.cuda.get_device_properties(device).multi_processor_count


def _copy_on_device(copies: Copies, job: Job, begin: int, stream: int, beside: bool) -> None:
    if not job.items:
        return
    module, multiprocessors = _module(torch.cuda.current_device())
    threads = _THREADS_BESIDE if beside else _THREADS
    blocks = -(-32 * job.items // threads)
    fields = copies.unit_bytes.size
    unit_bytes, addresses, item_begin, first_piece, pieces = (begin + 8 * words for words in copies.begins)
    module.launch(
        _KERNEL,
        blocks=min(blocks, multiprocessors // 2) if beside else blocks,
        threads=threads,
        shared=0,
        stream=stream,
        parameters=_Parameters(
            unit_bytes,
            item_begin + 8 * job.number * (fields + 1),
            first_piece + 8 * job.number * fields,
            addresses + 8 * job.source * fields,
            addresses + 8 * job.target * fields,
            pieces,
            job.items,
            fields,
            job.source_step * fields,
            job.target_step * fields,
        ),
    )


def piece_bytes(device: torch.device) -> int:
    """Bytes above which a piece is cut for the device."""
    return PIECE_BYTES if device.type == "cuda" else WHOLE


def copy(copies: Copies, job: Job, on_device: torch.Tensor | None, stream: int = 0, *, beside: bool = False) -> None:
    """Copies on a stream of the current device, which has `copies.words` aligned to 16 bytes, or on the host.

    `beside` leaves half of the device to kernels that are launched later, as those of a collective.
    """
    if on_device is None:
        _copy_on_host(
            copies.unit_bytes, copies.addresses, copies.item_begin[job.number], copies.first_piece[job.number],
            copies.pieces, job.source, job.source_step, job.target, job.target_step,
        )  # fmt: skip
    else:
        _copy_on_device(copies, job, on_device.data_ptr(), stream, beside)


class Samples(NamedTuple):
    """Some samples of a batch, by its contiguous tensors, with its lengths on the host."""

    tensors: Sequence[torch.Tensor]
    lengths: Ints  # (n, num_jagged)
    totals: Ints  # (num_jagged,) values of each column in the tensors
    chosen: Ints  # (m,)


def gather(leaves: tuple[Leaf, ...], batches: Sequence[Samples], totals: Ints) -> list[torch.Tensor]:
    """New tensors with the chosen samples of batches of one device, batch after batch, which have `totals` values.

    On a device the current stream copies, and the host does not wait.
    """
    count, device = sum(one.chosen.size for one in batches), batches[0].tensors[0].device
    rows = [leaf.rows * count if leaf.rows else int(totals[list(leaf.columns)].sum()) for leaf in leaves]
    like = zip(batches[0].tensors, rows, leaves, strict=True)
    tensors = [tensor.new_empty((number, *leaf.shape)) for tensor, number, leaf in like]
    fields = FieldTable.of(leaves)
    copies, job = describe_samples(
        np.concatenate([one.chosen for one in batches]).astype(np.int64),
        np.cumsum([0, *(one.chosen.size for one in batches)]),
        np.concatenate([one.lengths for one in batches]),
        np.cumsum([0, *(len(one.lengths) for one in batches)]),
        fields,
        np.stack([fields.addresses(one.tensors, one.totals) for one in batches]),
        fields.addresses(tensors, totals),
        totals,
        most=piece_bytes(device),
    )
    if device.type != "cuda":
        copy(copies, job, None)
        return tensors
    with torch.cuda.device(device):
        on_device = torch.from_numpy(copies.words).pin_memory().to(device, non_blocking=True)
        copy(copies, job, on_device, torch.cuda.current_stream(device).cuda_stream)
    return tensors


def warm_up(device: torch.device | str | None = None) -> None:
    """Compiles the kernels of the host and of a CUDA device, if that is given, or loads them, so that no step does."""
    load_on_host()
    load_on_device(device)


def load_on_device(device: torch.device | str | None) -> None:
    """Compiles the kernel of a CUDA device, or reads it from the disk cache; nothing for others."""
    if device is not None and torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            _module(torch.cuda.current_device())


def load_on_host() -> None:
    """Calls every kernel of the host once."""
    nothing = np.zeros(0, dtype=np.int64)
    table = np.zeros((0, 0), dtype=np.int64)
    begin = np.zeros(2, dtype=np.int64)
    nowhere = Slice(
        rank=0,
        destinations=np.zeros(0, dtype=np.int32),
        sources=np.zeros(0, dtype=np.int32),
        source_counts=np.zeros(0, dtype=np.int32),
        source_totals=table,
    )
    fields = FieldTable.of(())
    amounts = measure(nowhere, table, fields, 1, WHOLE)
    words = np.zeros(num_words(amounts, fields), dtype=np.int64)
    places = fields.addresses([], nothing)
    describe(words, amounts, nowhere, table, fields, (places, places, 0, 0), most=WHOLE, join=True)
    described = describe_samples(
        nothing, begin, table, begin, fields, np.zeros((1, 0), np.int64), nothing, nothing, most=WHOLE
    )
    copy(*described, None)


def pick(batches: Sequence[FlatBatch], chosen: Sequence[NDArray[np.int64]]) -> FlatBatch:
    """The chosen samples, ascending, of several batches of one schema and device, with lengths on the host.

    A batch that is wanted whole and alone is returned as it is.
    """
    whole = [i for i, samples in enumerate(chosen) if samples.size]
    if len(whole) == 1 and chosen[whole[0]].size == batches[whole[0]].num_samples:
        return batches[whole[0]]
    structure = batches[0].structure
    devices = [batch.device for batch in batches]  # refuses a batch on several
    if structure.on_host:
        device = next((device for device in devices if device is not None), torch.device("cpu"))
        batches = [batch.to(device) for batch in batches]
    lengths = np.concatenate([batch.lengths[samples] for batch, samples in zip(batches, chosen, strict=True)])
    totals = lengths.sum(axis=0)
    pairs = zip(batches, chosen, strict=True)
    sources = [Samples(batch.plain().tensors, batch.lengths, batch.totals, samples) for batch, samples in pairs]
    tensors = gather(structure.leaves, sources, totals) if structure.leaves else []
    return batches[0].rebuild(tensors, num_samples=len(lengths), totals=totals, lengths=lengths)
