"""The lead of a stream: rank 0 of the ranks that balance together makes directives of the contributions of all.

`begin` decides what a round does, as soon as all have contributed; `directives` ends it. Between the two the round goes
through stages (`stages.py`), whose state nobody else knows. A round that was under way when its pass ended is begun and
never ended: what ranks are to hear is put into directives when these are made.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import RoundOptions, RoundPlan, RoundSamples
from evenkeel.partitioning.slices import Slices
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.contribution import Bytes, Contributions
from trainer_client.balancing.decide import Decision, Rules, decide
from trainer_client.balancing.directive import END, NO_LOADS, Extras, pack_directives, set_room
from trainer_client.balancing.errors import ResumeError, SchemaMismatchError
from trainer_client.balancing.report import Mode, Reason
from trainer_client.balancing.schemas import Templates

logger = logging.getLogger(__name__)

_ROOM = 1 << 10  # bytes that rooms of gathers and scatters are multiples of


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    """A round on its way through the stages."""

    number: int
    contributions: Contributions
    decision: Decision  # what all ranks do, as far as it is known
    options: RoundOptions  # how to plan it
    samples: RoundSamples | None = None  # of all ranks; None: the round does not take place
    template: FlatBatch | None = None  # of its batches; None: no rank has samples
    plain: bool = False  # it is planned by a plain heuristic, without kernels
    call: Any = None  # of the service, under way
    reason: Reason = Reason.NO_SERVICE  # why the lead plans
    plan: RoundPlan | None = None
    slices: Slices | None = None
    home_loads: NDArray[np.float64] = field(default_factory=NO_LOADS.copy)  # (batches, ranks) as loaded
    loads: NDArray[np.float64] = field(default_factory=NO_LOADS.copy)  # (batches, ranks) as trained
    step_seconds: float = 0.0  # median of a step's computation, for people to see
    extras: Extras = field(default_factory=Extras)


class Stage:
    """A capability of rounds. One that does nothing at one of the two moments leaves it out."""

    def begin(self, round_: Round) -> None:
        """All have contributed; in the order of the stages."""

    def finish(self, round_: Round) -> None:
        """The round is planned; in the reverse order."""

    def want(self, number: int) -> None:
        """The lead's own loop waits for a round."""

    def close(self) -> None:
        """No more rounds come."""


class Lead:
    """Makes rounds; `begin` and `directives` are called by one thread each, in the order of rounds."""

    def __init__(
        self,
        rules: Rules,
        options: RoundOptions,
        *,
        templates: Templates,
        nodes: Sequence[str],  # the hosts of the ranks
        stages: Sequence[Stage],
    ) -> None:
        self.world_size = len(nodes)
        self._rules, self._options, self._templates, self._stages = rules, options, templates, stages
        hosts = {host: number for number, host in enumerate(dict.fromkeys(nodes))}
        self._nodes = np.array([hosts[host] for host in nodes], np.int32) if len(hosts) > 1 else None
        self._room_up = self._room_down = _ROOM

    def want(self, number: int) -> None:
        """The lead's own loop has come for the batches of a round: what is not planned by now is planned here."""
        for stage in self._stages:
            stage.want(number)

    def close(self) -> None:
        """Ends what is under way."""
        for stage in self._stages:
            stage.close()

    def begin(self, number: int, contributions: Contributions) -> Round:
        """Decides what a round does, and asks for its plan."""
        self._room_up = _room(self._room_up, int(contributions.headers["size"].max()))
        round_ = Round(
            number=number, contributions=contributions, decision=END, options=self._options,
            extras=Extras(world_size=self.world_size, room_up=self._room_up),
        )  # fmt: skip
        try:
            round_.decision = decision = decide(contributions, self._rules, number)
            if decision.error is None and decision.reason is not Reason.LEFT:
                if decision.mode is not Mode.END:
                    round_.samples = contributions.samples(self._nodes)
                round_.template = self._templates.of_round(contributions)
                for stage in self._stages:
                    stage.begin(round_)
        except Exception as error:  # of a cost's fit, say: all ranks hear of it, and nobody waits
            round_.decision, round_.samples = self._failed(number, error), None
        return round_

    def directives(self, round_: Round) -> Bytes:
        """(ranks, width) what all ranks are sent of a round."""
        try:
            if round_.samples is not None:
                if round_.template is not None and round_.template is not self._templates.sent:
                    round_.extras.template = round_.template
                for stage in reversed(self._stages):
                    stage.finish(round_)
            round_.extras.decision = round_.decision
            table = pack_directives(
                round_.extras, home_loads=round_.home_loads, loads=round_.loads, plan=round_.plan, slices=round_.slices
            )
            self._templates.sent = round_.extras.template or self._templates.sent
        except Exception as error:
            failed = self._failed(round_.number, error)
            table = pack_directives(Extras(decision=failed, world_size=self.world_size, room_up=round_.extras.room_up))
        self._room_down = _room(self._room_down, table.shape[1])
        set_room(table, self._room_down)
        return table

    def _failed(self, number: int, error: Exception) -> Decision:
        if not isinstance(error, ResumeError | SchemaMismatchError):
            logger.error("%s: round %d could not be made", self._rules.name, number, exc_info=error)
            error = RuntimeError(f"the lead (rank 0) could not make a round: {type(error).__name__}: {error}")
        return Decision(mode=Mode.END, error=error)


def _room(room: int, needed: int) -> int:
    return room if needed <= room else -(-needed * 5 // 4 // _ROOM) * _ROOM
