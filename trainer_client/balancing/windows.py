"""Windows of several batches: that their fields are alike, and going on from a state that was taken within one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.errors import ResumeError
from trainer_client.balancing.kernels import Kernels
from trainer_client.balancing.lead import Round, Stage
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.report import Mode, Reason
from trainer_client.balancing.resume import REPEAT


def check_window(flats: Sequence[FlatBatch], options: BalanceOptions) -> None:
    """Checks that samples of a window's batches can change places: batches with samples have the same fields."""
    if len(flats) > options.window:
        raise ValueError(f"{len(flats)} batches for a window of {options.window}; set BalanceOptions.window")
    filled = [flat for flat in flats if flat.num_samples]
    for flat in filled:
        if flat.schema is not filled[0].schema and flat.schema.hash != filled[0].schema.hash:
            raise ValueError(
                "batches of one window differ, so that their samples cannot change places: "
                f"{filled[0].schema.diff(flat.schema, own='one', others='another')}; use window=1, or pad them alike"
            )


class WindowStates(Stage):
    """Lets states within a window know how it was planned, and plans such a window as it was planned before."""

    def __init__(self, size: int, kernels: Kernels | None) -> None:
        """For windows of so many batches; `kernels` are those that plans need."""
        self._size, self._kernels = size, kernels
        self._known: dict[int, dict[str, Any]] = {}  # windows to go on in, by round

    def begin(self, round_: Round) -> None:
        """Plans with the speeds and kernels that the plan of before followed, if windows have the size of before."""
        first = round_.contributions.extras.get(0)
        window = None if first is None or first.resumed is None else first.resumed.window
        if window is None:
            return
        if window["size"] != self._size:
            raise ResumeError(
                f"the state was taken within a window of {window['size']} batches, and this job has "
                f"window={self._size}; go on with BalanceOptions(window={window['size']}), {REPEAT}"
            )
        self._known[round_.number] = window
        round_.options = replace(round_.options, speeds=tuple(window["speeds"]))
        round_.plain = window["plain"]
        if not round_.plain and self._kernels is not None:
            self._kernels.wait()

    def finish(self, round_: Round) -> None:
        """Leaves out the batches that have been trained, if the window is divided as before."""
        if self._size == 1:
            return
        digest = _digest(round_)
        if (window := self._known.pop(round_.number, None)) is not None:
            if digest != window["digest"]:
                raise ResumeError(
                    "the window that the state was taken in is divided otherwise now; go on with the same data, costs, "
                    f"options and version of evenkeel, {REPEAT}"
                )
            assert round_.samples is not None
            batches = round_.decision.batches
            batches = tuple(range(round_.samples.num_batches)) if batches is None else batches
            done = batches[window["done"] - 1] + 1 if window["done"] else 0
            round_.decision = replace(round_.decision, batches=tuple(one for one in batches if one >= done), done=done)
        round_.broadcast.for_states = {
            "size": self._size,
            "digest": digest,
            "speeds": list(round_.options.speeds),
            "plain": round_.decision.reason is Reason.COMPILING,
        }


def _digest(round_: Round) -> str:
    """Names a round's plan; empty: every sample stays where it was loaded."""
    plan = round_.plan
    if plan is None or round_.decision.mode in (Mode.IDENTITY, Mode.DROP):
        return ""
    digest = hashlib.blake2b(plan.destinations.astype("<i4").tobytes(), digest_size=8)
    if plan.steps is not None:
        digest.update(plan.steps.astype("<i4").tobytes())
    if plan.parts is not None:
        digest.update(plan.parts.begins.astype("<i8").tobytes())
    return digest.hexdigest()
