"""Copies pieces of fields in a device's memory, in one kernel launch."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files

import torch

from trainer_client.balancing.redistribution.copies import Job
from trainer_client.cuda.nvrtc import Module

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
