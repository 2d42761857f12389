"""Moving samples between ranks: one All2All a batch, however many fields it has."""

from __future__ import annotations

import numpy as np
import torch

from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.redistribution.copies import WHOLE, FieldTable, copy, load_kernel
from trainer_client.balancing.redistribution.exchange import Pending, start
from trainer_client.balancing.redistribution.gathering import Samples, cut, describe_samples, pick
from trainer_client.balancing.redistribution.layout import describe, measure, num_words

__all__ = ["Pending", "cut", "load_on_device", "load_on_host", "pick", "start", "warm_up"]


def warm_up(device: torch.device | str | None = None) -> None:
    """Compiles the kernels of the host and of a CUDA device, if that is given, or loads them, so that no step does."""
    load_on_host()
    load_on_device(device)


def load_on_device(device: torch.device | str | None) -> None:
    """Compiles the kernel of a CUDA device, or reads it from the disk cache; nothing for others."""
    if device is not None and torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            load_kernel(torch.cuda.current_device())


def load_on_host() -> None:
    """Calls every kernel of the host once."""
    nothing, table = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
    nowhere, fields = Slice.staying(0, table), FieldTable.of(())
    amounts = measure(nowhere, table, fields, 1, WHOLE)
    words = np.zeros(num_words(amounts, fields), dtype=np.int64)
    addresses = fields.addresses([], nothing)
    describe(words, amounts, nowhere, table, fields, (addresses, addresses, 0, 0), most=WHOLE, join=True)
    samples = Samples((), table, nothing, nothing)
    copy(describe_samples([samples], fields, addresses[None], addresses, WHOLE), 0, None)
