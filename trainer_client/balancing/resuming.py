"""Rounds that go on from states: what is left of a window that was trained in part."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from evenkeel.partitioning.rounds import RoundPlan
from trainer_client.balancing.errors import ResumeError
from trainer_client.balancing.lead import Round, Stage
from trainer_client.balancing.report import Reason


class Resuming(Stage):
    """Plans what is left of a window as it was planned before, and notes what a later state needs for that."""

    def __init__(self, window: int) -> None:
        self._window = window  # batches of one

    def begin(self, round_: Round) -> None:
        """Plans with the speeds that the plan of before followed."""
        first = round_.contributions.extras.get(0)
        if first is not None and first.resumed is not None and first.resumed.window is not None:
            round_.window = first.resumed.window
            round_.options = replace(round_.options, speeds=tuple(round_.window["speeds"]))

    def finish(self, round_: Round) -> None:
        """Leaves out the batches that have been trained.

        Raises:
            ResumeError: If the window is divided otherwise now.
        """
        digest = _digest(round_.plan)
        if (window := round_.window) is not None:
            if digest != window["digest"]:
                raise ResumeError(
                    "the window that the state was taken in is divided otherwise now; go on with the same data, costs, "
                    "options and version of evenkeel, from a state between windows, or with load_state_dict(…, "
                    "repeat_window=True), which trains the whole window again"
                )
            assert round_.samples is not None
            batches = round_.decision.batches
            batches = tuple(range(round_.samples.num_batches)) if batches is None else batches
            round_.decision = replace(round_.decision, batches=batches[window["done"] :], resumed=True)
        round_.extras.window = {
            "size": self._window,
            "digest": digest,
            "speeds": list(round_.options.speeds),
            "plain": round_.decision.reason is Reason.COMPILING,
        }


def _digest(plan: RoundPlan | None) -> str:
    """Names a plan; empty: every sample stays where it was loaded."""
    if plan is None:
        return ""
    digest = hashlib.blake2b(plan.destinations.astype("<i4").tobytes(), digest_size=8)
    if plan.steps is not None:
        digest.update(plan.steps.astype("<i4").tobytes())
    if plan.parts is not None:
        digest.update(plan.parts.begins.astype("<i8").tobytes())
    return digest.hexdigest()
