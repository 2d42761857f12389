"""Batches of any nesting, taken apart into tensors whose rows belong to samples, and put together again."""

from trainer_client.balancing.batches.flat import FlatBatch
from trainer_client.balancing.batches.flatten import Arriving, flatten, is_on_device
from trainer_client.balancing.batches.paths import lookup, read_lengths
from trainer_client.balancing.batches.schema import Schema
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, MaxLength, Padded

__all__ = [
    "Arriving",
    "BatchError",
    "BatchSpec",
    "FlatBatch",
    "MaxLength",
    "Padded",
    "Schema",
    "flatten",
    "is_on_device",
    "lookup",
    "read_lengths",
]
