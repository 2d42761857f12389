"""Batches of any nesting, taken apart into tensors whose rows belong to samples, and put together again.

One walk (`reading`) makes a tree of a batch's containers (`containers`) and a field of each value (`contents`), whose
kind follows from its type and what users declare (`spec`). A kind is a pair of functions, one reads and one builds:
rows, objects and values without samples are in `fields`, padded tensors in `padding`, TorchRec's and nested ones in
`jagged`. What follows from fields alone is found once for all batches that have the same ones (`structure`, with the
`schema` for other ranks and the `roles` of what is cut). With the lengths, which may have to come from a device
(`flatten`), the tensors are a `FlatBatch` (`flat`): its samples move, and it builds the batch again. What can be no
field is refused in its own terms (`refusals`); functions of users look into batches by path (`paths`).
"""

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
