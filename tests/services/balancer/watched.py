"""A job to look at: a lead that asks for plans of random rounds, one of whose ranks is known to load late."""

from __future__ import annotations

import threading
import time

import numpy as np

from benchmarks.harness.authorities import channel
from evenkeel.partitioning.delays import Cause, Delay
from evenkeel.partitioning.rounds import RoundOptions, RoundSamples
from evenkeel.partitioning.speeds import Straggler
from evenkeel.protocol.plan_round import RoundNames, RunFacts, write_request

SAMPLES = 64
STEP_SECONDS = 0.1
TROUBLE = "no answer when the batch was wanted"


class WatchedJob:
    """Goes through rounds until the block ends, every fifth of which the lead says it has planned by itself.

    Attributes:
        planned: Rounds that were planned.
    """

    def __init__(
        self, address: str, job: str, *, ranks: int = 4, late: int = 2, slow: int | None = None,
        token: str | None = None, pause: float = 0.02,
    ) -> None:  # fmt: skip
        assert late < ranks
        self.planned = 0
        self._address, self._job, self._ranks, self._pause = address, job, ranks, pause
        self._delays = (Delay(rank=late, cause=Cause.LOADING, share=0.5, since=3),)
        self._stragglers = () if slow is None else (Straggler(rank=slow, speed=0.8, since=5),)
        self._metadata = [("evenkeel-job", job), *([("authorization", f"Bearer {token}")] if token else [])]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> WatchedJob:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        draw = np.random.default_rng(self._ranks)
        with channel(self._address, None) as opened:
            call = opened.unary_unary("/evenkeel.balancer.v2.BalancerService/PlanRound")
            number = 0
            while not self._stop.is_set():
                costs = np.exp(draw.normal(4.0, 1.1, self._ranks * SAMPLES)).astype(np.int64)
                samples = RoundSamples(
                    batch_sizes=np.full((self._ranks, 1), SAMPLES, np.int64), costs=costs,
                    lengths=costs[:, None].astype(np.uint32),
                )  # fmt: skip
                facts = RunFacts(
                    rounds_by_lead=number // 5, last_trouble=TROUBLE, stragglers=self._stragglers, delays=self._delays,
                    step_seconds=STEP_SECONDS,
                )  # fmt: skip
                names = RoundNames(
                    job=self._job, group="default", loader="train", run_id="run-7", round=number, client_version="2.0"
                )
                if number % 5 != 4:
                    call(write_request(samples, RoundOptions(), names, facts), timeout=60, metadata=self._metadata)
                    self.planned += 1
                number += 1
                time.sleep(self._pause)
