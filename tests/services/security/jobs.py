"""A job whose lead asks for plans while others attack, or look on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc

from evenkeel.protocol.plan_round import RoundNames, RunFacts
from tests.evenkeel.protocol.rounds import make_round
from tests.services.balancer.calls import Lead

SECONDS = 60.0  # a starved machine is no attack


class RunningJob:
    """A lead in a thread that goes through rounds until the block ends.

    Attributes:
        rounds: That were planned.
        troubles: Everything else that happened.
        slowest: Seconds of the slowest round.
    """

    def __init__(
        self,
        connect: Callable[[], grpc.Channel],
        job: str = "victim",
        *,
        ranks: int = 2,
        pause: float = 0.01,
        facts: RunFacts | None = None,
    ) -> None:
        self.rounds, self.slowest = 0, 0.0
        self.troubles: list[str] = []
        self._names = RoundNames(job=job, group="default", loader="train", run_id="run", client_version="0.2.0")
        self._facts = facts or RunFacts()
        self._ranks, self._pause = ranks, pause
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

    def wait(self, rounds: int) -> None:
        """Returns when so many rounds were planned."""
        deadline = time.monotonic() + SECONDS
        while self.rounds < rounds:
            assert not self.troubles, self.troubles
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _run(self) -> None:
        lead = Lead(self._channel)
        while not self._stop.wait(self._pause):
            one = make_round(
                self._ranks, 32, seed=self.rounds, names=replace(self._names, round=self.rounds), facts=self._facts
            )
            began = time.monotonic()
            try:
                lead.plan(one, SECONDS)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
                self.troubles.append(str(error))
                return
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.rounds += 1


def eventually(call: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What a call returns as soon as it is not refused."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
