"""Compiled kernels: for plans, which the lead compiles beside its first rounds; for moves, before the first one."""

from __future__ import annotations

import logging
from functools import cache

from evenkeel import partitioning
from evenkeel.partitioning.compile import Preparation
from trainer_client.balancing.redistribution import load_on_host

logger = logging.getLogger(__name__)


@cache
def _preparation() -> Preparation:
    return Preparation(partitioning.warm_up)


@cache
def _moves() -> Preparation:
    return Preparation(load_on_host)


def prepare_moves() -> None:
    """Waits until moving samples compiles nothing, on every rank."""
    if not _moves().ready:
        logger.warning(
            "compiling the kernels that move samples, as once after each installation: the first batch waits, mostly "
            "for a minute or two. `evenkeel warm-up` does it ahead of time"
        )
    _moves().wait()


class Kernels:
    """What plans need on the lead, which a thread loads, and a process beside this one compiles where it must."""

    def __init__(self, name: str, *, wait: bool) -> None:
        """Begins to get them ready, and waits for them where no round may be planned without."""
        self._name, self._preparation, self._waited = name, _preparation(), False
        if wait:
            self.wait()

    @property
    def ready(self) -> bool:
        """Whether plans can be made by them; says once that they cannot, and once that they can again."""
        ready = self._preparation.ready
        if not ready and not self._waited:
            logger.warning(
                "%s: kernels are being compiled for this machine, as once after each installation; rank 0 plans by a "
                "plain heuristic meanwhile, mostly for less than a minute. `evenkeel warm-up` does it ahead of time",
                self._name,
            )  # fmt: skip
        elif ready and self._waited:
            logger.warning("%s: kernels are ready", self._name)
        self._waited = not ready
        return ready

    def wait(self) -> None:
        """Waits until they are ready."""
        if not self._preparation.ready:
            logger.warning(
                "%s: compiling kernels for this machine; `evenkeel warm-up` does it ahead of time", self._name
            )
            self._preparation.wait()
