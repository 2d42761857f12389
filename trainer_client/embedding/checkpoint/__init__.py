"""Checkpoints of routed tables that load under any routing and number of ranks."""

from trainer_client.embedding.checkpoint.convert import Conversion, convert, open_checkpoint
from trainer_client.embedding.checkpoint.dynamicemb import dynamicemb_loads_by_owner
from trainer_client.embedding.checkpoint.live import load, save
from trainer_client.embedding.checkpoint.record import CheckpointError, RoutingMismatchError, TableRecord

__all__ = [
    "CheckpointError",
    "Conversion",
    "RoutingMismatchError",
    "TableRecord",
    "convert",
    "dynamicemb_loads_by_owner",
    "load",
    "open_checkpoint",
    "save",
]
