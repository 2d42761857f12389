"""Which rank should train which sample: pure functions over numpy arrays."""

from evenkeel.partitioning.api import Partition, partition
from evenkeel.partitioning.problem import ImpossiblePartitionError, PartitionError, PartitionNotFoundError
from evenkeel.partitioning.registry import strategies
from evenkeel.partitioning.slices import Slice, Slices, slice_plan
from evenkeel.partitioning.warming import warm_up

__all__ = [
    "ImpossiblePartitionError",
    "Partition",
    "PartitionError",
    "PartitionNotFoundError",
    "Slice",
    "Slices",
    "partition",
    "slice_plan",
    "strategies",
    "warm_up",
]
