"""Folders of `torch.distributed.checkpoint`, one for each step that was saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state


class Progress:
    """How far the job is.

    Attributes:
        epoch: That is being trained.
        step: Steps trained, in all epochs.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From them."""
        self.epoch, self.step = state["epoch"], state["step"]


def save(folder: Path, state: dict[str, Any], step: int) -> None:
    """Saves what has `state_dict`, each rank its part. Collective."""
    save_state(state, checkpoint_id=folder / f"step-{step:06}")


def load(found: Path, state: dict[str, Any]) -> None:
    """Loads it into what has `load_state_dict`, on any number of ranks. Collective."""
    load_state(state, checkpoint_id=found)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, the same on all ranks: its metadata come last. Collective."""
    found: list[Path | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:  # looks for all: another rank's view of the disk may lag
        whole = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        found = [max((path for path in whole if (path / ".metadata").exists()), default=None)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]
