"""A job to look at: ranks in threads that speak the wire, one of them known to load late, with a gap in its rounds."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import grpc
import numpy as np

from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc

SAMPLES = 64
GAP = (10, 15)
"""Rounds that do not come to the balancer, as when the ranks' breaker is open: the first, and the next that comes."""


class WatchedJob:
    """Ranks that go through rounds until the block ends.

    Attributes:
        decided: Rounds that rank 0 got an answer for.
    """

    def __init__(
        self, address: str, job: str, *, ranks: int = 4, late: int = 2, token: str | None = None, pause: float = 0.02
    ) -> None:
        assert late < ranks
        self.decided = 0
        self._address, self._job, self._size, self._late, self._pause = address, job, ranks, late, pause
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._stop, self._ends_at = threading.Event(), 1 << 60
        self._threads = [threading.Thread(target=self._rank, args=(rank,), daemon=True) for rank in range(ranks)]

    def __enter__(self) -> WatchedJob:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _rank(self, rank: int) -> None:
        draw = np.random.default_rng([rank, self._size])
        delay = pb.Delay(rank=self._late, cause=pb.Delay.CAUSE_LOADING, share=0.5, since=3)
        learned = None if rank else pb.LearnedSpeeds(delays=[delay])
        outbox: SimpleQueue[pb.BalanceRequest | None] = SimpleQueue()
        schema = pb.Schema(hash=b"12345678", fields=[pb.Field(path="x", dtype="int64", kind=pb.Field.KIND_JAGGED)])
        outbox.put(
            pb.BalanceRequest(
                join=pb.Join(
                    protocol_versions=[1], job=self._job, group="default", loader="train", run_id="run-7",
                    world_size=self._size, rank=rank, node=f"gpu{rank * 2 // self._size:02}", schema=schema,
                )
            )
        )  # fmt: skip
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self._address, options=options) as channel:
            call = pb_grpc.BalancerServiceStub(channel).Balance(iter(outbox.get, None), metadata=self._metadata)
            answers = iter(call)
            assert next(answers).WhichOneof("response") == "joined"
            number = 0
            while number < self._ends_at:
                if rank == 0 and self._stop.is_set():
                    self._ends_at = number + 1  # the others are at this round, or before it
                time.sleep(self._pause + (2 * self._pause if rank == self._late else 0.0))
                costs = np.exp(draw.normal(4.0, 1.1, SAMPLES)).astype("<i8")
                outbox.put(
                    pb.BalanceRequest(
                        submit=pb.Submit(
                            round=number, num_samples=SAMPLES, costs_i64=costs.tobytes(),
                            lengths=costs.astype("<u4").tobytes(), timeout_ms=10_000, learned=learned,
                        )
                    )
                )  # fmt: skip
                next(answers)
                if rank == 0:
                    self.decided += 1
                number = GAP[1] if number + 1 == GAP[0] else number + 1
            outbox.put(None)
            for _ in answers:
                pass
