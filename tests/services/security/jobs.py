"""A job that trains while others attack: ranks in threads, speaking the wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np

from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc

TIMEOUT_MS = 10_000  # a starved machine is no attack


def join(job: str, rank: int = 0, world_size: int = 1, run_id: str = "run") -> pb.Join:
    return pb.Join(
        protocol_versions=[1], job=job, group="default", loader="train", run_id=run_id, world_size=world_size,
        rank=rank, node="node", schema=pb.Schema(hash=b"12345678", fields=[pb.Field(path="x", dtype="int64",
                                                                             kind=pb.Field.KIND_JAGGED)]),
    )  # fmt: skip


def submit(round_number: int, seed: int = 0, samples: int = 32) -> pb.Submit:
    lengths = np.random.default_rng([seed, round_number]).integers(1, 500, samples)
    return pb.Submit(
        round=round_number, num_samples=samples, costs_i64=lengths.astype("<i8").tobytes(),
        lengths=lengths.astype("<u4").tobytes(), timeout_ms=TIMEOUT_MS,
    )  # fmt: skip


class RunningJob:
    """Two ranks that go through rounds until stopped.

    Attributes:
        balanced: Rounds that each rank got a plan for.
        troubles: Everything else that happened.
        slowest: Seconds of the slowest round.
    """

    def __init__(self, connect: Callable[[], grpc.Channel], job: str = "victim", pause: float = 0.01) -> None:
        self.balanced = [0, 0]
        self.troubles: list[str] = []
        self.slowest = 0.0
        self._pause = pause
        self._stop = threading.Event()
        self._is_judged = False  # before, a starved machine may have cost this session a worker
        self._begun, self._lock = -1, threading.Lock()  # the latest round that a rank has begun
        self._channels = [connect() for _ in range(2)]
        self._threads = [threading.Thread(target=self._rank, args=(rank, job), daemon=True) for rank in range(2)]

    def __enter__(self) -> RunningJob:
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + 60
        while min(self.balanced) < 3 and time.monotonic() < deadline and not self.troubles:
            time.sleep(0.01)
        assert min(self.balanced) >= 3, self.troubles
        self._is_judged = True
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:  # ends its stream in order: the name must be free for the next test's job
            thread.join(30)
            assert not thread.is_alive(), "a rank does not end"
        for opened in self._channels:
            opened.close()

    def check(self, at_least: int) -> None:
        """Asserts that every round was balanced, and that there were enough of them."""
        assert self.troubles == []
        assert min(self.balanced) >= at_least, self.balanced

    def _goes_on(self, number: int) -> bool:
        """Whether a rank takes part in a round: not after the end, unless the other one waits for it there."""
        with self._lock:
            if self._stop.is_set() and number > self._begun:
                return False
            self._begun = max(self._begun, number)
            return True

    def _rank(self, rank: int, job: str) -> None:
        outbox: SimpleQueue[pb.BalanceRequest | None] = SimpleQueue()
        outbox.put(pb.BalanceRequest(join=join(job, rank, 2)))
        try:
            answers: Iterator[pb.BalanceResponse] = iter(
                pb_grpc.BalancerServiceStub(self._channels[rank]).Balance(iter(outbox.get, None))
            )
            first = next(answers)
            if first.WhichOneof("response") != "joined":
                self.troubles.append(f"rank {rank}: {first}")
                return
            number = 0
            while self._goes_on(number):
                started = time.monotonic()
                outbox.put(pb.BalanceRequest(submit=submit(number, seed=rank)))
                answer = next(answers)
                self.slowest = max(self.slowest, time.monotonic() - started)
                decision = answer.answer.decision
                if decision.outcome == pb.Decision.OUTCOME_BALANCED:
                    self.balanced[rank] += 1
                elif self._is_judged or decision.reason != pb.Decision.REASON_QUARANTINED:
                    if not self._stop.is_set():
                        self.troubles.append(f"rank {rank}, round {number}: {answer}")
                    return
                number += 1
                time.sleep(self._pause)
            outbox.put(None)
            for _ in answers:  # until the server has ended the stream, and with it this rank's part in the session
                pass
        except (grpc.RpcError, StopIteration, ValueError) as error:  # ValueError: the channel was closed
            if not self._stop.is_set():
                self.troubles.append(f"rank {rank}: {error}")
        finally:
            outbox.put(None)


def eventually(call: Any, seconds: float = 30.0) -> Any:
    """What a call returns as soon as it is not refused."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
