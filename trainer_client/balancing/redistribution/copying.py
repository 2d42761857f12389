"""Copying wherever the memory is, on a device in one kernel launch; one batch of samples picked from several."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.preparing import KernelSet, ready
from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.redistribution.copies import WHOLE, FieldTable, Job, copy_on_host, describe_samples
from trainer_client.nvrtc import Module

PIECE_BYTES = 4096  # one warp each: enough of them to fill a device from a few MiB on
_KERNEL = "copy_pieces"
_THREADS = 256
# Collectives need whole multiprocessors: a kernel beside them fills half of the device, which keeps its memory busy.
_THREADS_BESIDE = 1024
_Parameters = ctypes.c_int64 * (1 + len(Job._fields))


def source() -> str:
    """The CUDA source."""
    return files("trainer_client.balancing.redistribution").joinpath("kernels", "copy_pieces.cu").read_text()


@cache
def _module(device: int) -> tuple[Module, int]:
    return Module(source(), [_KERNEL], {}, device), torch.cuda.get_device_properties(device).multi_processor_count


def load(device: torch.device) -> None:
    """Compiles the kernel, or reads it from the disk cache, and loads it on a device."""
    with torch.cuda.device(device):
        _module(torch.cuda.current_device())


def copy_on_device(words: torch.Tensor, job: Job, stream: int, *, beside: bool = False) -> None:
    """Copies on a stream of the current device.

    Args:
        words: The description, on the device; aligned to 16 bytes.
        job: The job in it.
        stream: The stream's handle.
        beside: Leave half of the device to kernels that are launched later, as those of a collective.
    """
    if not job.items:
        return
    module, multiprocessors = _module(words.device.index)
    threads = _THREADS_BESIDE if beside else _THREADS
    blocks = -(-32 * job.items // threads)
    module.launch(
        _KERNEL,
        blocks=min(blocks, multiprocessors // 2) if beside else blocks,
        threads=threads,
        shared=0,
        stream=stream,
        parameters=_Parameters(words.data_ptr(), *job),
    )


def piece_bytes(device: torch.device) -> int:
    """Bytes above which a piece is cut for the device."""
    return PIECE_BYTES if device.type == "cuda" else WHOLE


def copy(words: torch.Tensor, job: Job, stream: int = 0, *, beside: bool = False) -> None:
    """Copies on a stream of the current device, if the description is there, or on the host.

    Args:
        words: The description.
        job: The job in it.
        stream: The stream's handle.
        beside: Whether kernels that are launched later shall find room.
    """
    if words.is_cuda:
        copy_on_device(words, job, stream, beside=beside)
    else:
        copy_on_host(words.numpy(), job)


def copy_described(words: NDArray[np.int64], job: Job, device: torch.device) -> None:
    """The same for a description on the host, on the current stream; the host does not wait for its copy."""
    described = torch.from_numpy(words)
    if device.type != "cuda":
        copy(described, job)
        return
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        copy(described.pin_memory().to(device, non_blocking=True), job, stream)


def warm_up(device: torch.device | str | None = None) -> None:
    """Compiles the kernels of the host and of a CUDA device, or loads them from caches, so that no training step does.

    Args:
        device: Where batches will be; None for the host only.
    """
    ready([KERNELS])
    load_on_device(device)


def load_on_device(device: torch.device | str | None) -> None:
    """The part of a CUDA device alone; nothing for others."""
    if device is not None and torch.device(device).type == "cuda":
        load(torch.device(device))


def load_on_host() -> None:
    """Calls every kernel of the host once."""
    from trainer_client.balancing.redistribution.copies import FieldTable
    from trainer_client.balancing.redistribution.moves import describe, measure

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
    words = np.zeros(amounts.num_words, dtype=np.int64)
    places = fields.first_rows(nothing, nothing)
    describe(words, amounts, nowhere, table, fields, places, places, 0, 0, most=WHOLE, join=True)
    described = describe_samples(nothing, begin, table, begin, fields, np.zeros((1, 0), np.int64), nothing, most=WHOLE)
    copy_described(*described, torch.device("cpu"))


KERNELS = KernelSet(sources=Path(__file__).parent, load=f"{__name__}:load_on_host", parts=(f"{__name__}:load_on_host",))


def pick(batches: Sequence[FlatBatch], chosen: Sequence[NDArray[np.int64]]) -> FlatBatch:
    """The chosen samples of several batches, batch after batch.

    Args:
        batches: Batches of one schema, on one device, with the lengths on the host.
        chosen: For each batch the samples wanted, as indices in ascending order.

    Returns:
        The batch; one that is wanted whole and alone is returned as it is.
    """
    whole = [i for i, samples in enumerate(chosen) if samples.size]
    if len(whole) == 1 and chosen[whole[0]].size == batches[whole[0]].num_samples:
        return batches[whole[0]]
    template = batches[0]
    device = next((batch.device for batch in batches if batch.device is not None), torch.device("cpu"))
    if template.structure.on_host:
        batches = [batch.to(device) for batch in batches]
    fields = FieldTable.of(template.structure.leaves)
    lengths = np.concatenate([batch.lengths[samples] for batch, samples in zip(batches, chosen, strict=True)])
    totals = lengths.sum(axis=0)
    tensors = template.make_room(len(lengths), totals, device)
    # alive until the copies are queued: kernels read them by address
    sources = [batch.plain() for batch in batches]
    words, job = describe_samples(
        np.concatenate(chosen).astype(np.int64),
        np.cumsum([0, *(samples.size for samples in chosen)]),
        np.concatenate([batch.lengths for batch in batches]),
        np.cumsum([0, *(batch.num_samples for batch in batches)]),
        fields,
        np.stack([fields.addresses(own.tensors, batch.totals) for own, batch in zip(sources, batches, strict=True)]),
        fields.addresses(tensors, totals),
        most=piece_bytes(device),
    )
    copy_described(words, job, device)
    return template.rebuild(tensors, num_samples=len(lengths), totals=totals, lengths=lengths)
