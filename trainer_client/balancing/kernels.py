"""The compiled kernels of a rank: loaded when the first stream opens, or compiled behind its first rounds."""

from __future__ import annotations

import logging
from functools import cache

import torch

from evenkeel import partitioning
from evenkeel.partitioning.preparing import PATIENCE, Preparation
from trainer_client.balancing import redistribution
from trainer_client.balancing.agreement import Mode, Reason, Verdict

logger = logging.getLogger(__name__)


@cache
def _preparation() -> Preparation:
    return Preparation([partitioning.KERNELS, redistribution.KERNELS])


class Kernels:
    """What a stream knows of the kernels, of its own rank and of all.

    Args:
        name: The stream's.
        rank: This rank; the first one tells for all.
        device: Where batches will be.
        wait: Compile before the first round: a batch as loaded might exceed a memory cap, have too few samples, or be
            one that a resumed run has to divide as before.
    """

    def __init__(self, name: str, rank: int, device: torch.device | str | None, *, wait: bool) -> None:
        self._name = name
        self._tells = rank == 0
        self._elsewhere = False  # at the latest agreement, some rank was compiling
        redistribution.load_on_device(device)
        self._preparation = _preparation()
        if wait and not self._preparation.ready:
            logger.warning("%s: compiling kernels for this machine; `evenkeel warm-up` does it ahead of time", name)
            self._preparation.wait(2 * PATIENCE)

    @property
    def compiling(self) -> bool:
        """Whether this rank can neither partition nor move samples yet."""
        return not self._preparation.ready

    def learn(self, round_number: int, verdict: Verdict) -> None:
        """Takes note of a round's outcome; says once when kernels are compiled, and once when they are ready."""
        compiling = verdict.reason is Reason.COMPILING
        if verdict.mode is Mode.END or compiling is self._elsewhere:
            return
        self._elsewhere = compiling
        if not self._tells:
            return
        if compiling:
            ranks = ", ".join(map(str, verdict.ranks[:8])) + (", …" if len(verdict.ranks) > 8 else "")
            logger.warning(
                "%s: kernels are being compiled for this machine (ranks %s), as once after each installation; batches "
                "stay as loaded meanwhile, mostly for less than a minute. `evenkeel warm-up` does it ahead of time",
                self._name, ranks,
            )  # fmt: skip
        else:
            logger.warning("%s: kernels are ready on all ranks; balancing from round %d on", self._name, round_number)
