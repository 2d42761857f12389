"""A job whose lead asks for plans while others attack, or look on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import grpc

from evenkeel.partitioning.delays import Cause, Delay
from evenkeel.partitioning.speeds import Straggler
from evenkeel.protocol.plan_round import RoundNames, RunFacts
from tests.evenkeel.protocol.rounds import make_round
from tests.services.balancer.calls import Lead
from tests.waiting import until

SAMPLES = 32
SECONDS = 60.0  # a starved machine is no attack
TROUBLE = "no answer when the batch was wanted"


def watched(late: int, slow: int | None = None) -> RunFacts:
    """Facts of a job one of whose ranks loads late, and one of which may be slow."""
    return RunFacts(
        last_trouble=TROUBLE, step_seconds=0.1,
        stragglers=() if slow is None else (Straggler(rank=slow, speed=0.8, since=5),),
        delays=(Delay(rank=late, cause=Cause.LOADING, share=0.5, since=3),),
    )  # fmt: skip


class RunningJob:
    """A lead in a thread that goes through rounds until the block ends, every fifth of which it plans by itself.

    Attributes:
        planned: Rounds that were planned.
        troubles: Everything else that happened.
    """

    def __init__(
        self, connect: Callable[[], grpc.Channel], job: str = "victim", *, ranks: int = 2, facts: RunFacts | None = None
    ) -> None:
        self.planned = 0
        self.troubles: list[str] = []
        self._names = RoundNames(job=job, group="default", loader="train", run_id="run-7", client_version="0.2.0")
        self._ranks, self._facts = ranks, facts or RunFacts()
        self._channel = connect()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RunningJob:
        self._thread.start()
        self.wait(3)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(SECONDS)
        self._channel.close()
        assert not self._thread.is_alive()

    def wait(self, rounds: int) -> None:
        """Returns when so many rounds were planned."""
        until(lambda: self.troubles or self.planned >= rounds, SECONDS)
        assert not self.troubles, self.troubles

    def _run(self) -> None:
        lead, number = Lead(self._channel), 0
        while not self._stop.wait(0.01):
            names, facts = replace(self._names, round=number), replace(self._facts, rounds_by_lead=number // 5)
            try:
                if number % 5 != 4:
                    lead.plan(make_round(self._ranks, SAMPLES, seed=number, names=names, facts=facts), SECONDS)
                    self.planned += 1
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
                self.troubles.append(str(error))
                return
            number += 1
