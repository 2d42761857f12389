"""Checkpoints of routed tables that load under any routing and number of ranks."""

from trainer_client.embedding.checkpoint.convert import Conversion, convert, open_checkpoint
from trainer_client.embedding.checkpoint.live import load, save
from trainer_client.embedding.checkpoint.record import (
    Checkpoint,
    CheckpointError,
    RoutingMismatchError,
    TableRecord,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Conversion",
    "RoutingMismatchError",
    "TableRecord",
    "convert",
    "load",
    "open_checkpoint",
    "save",
]
