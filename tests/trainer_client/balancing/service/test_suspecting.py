"""A stream that is given up after a missed round, beside one that is under way to another balancer."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence

from trainer_client.balancing.service import join_request
from trainer_client.balancing.service.outages import Cause
from trainer_client.balancing.service.uplink import Uplink

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.relay import Relay
from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.protocol import balancer_pb2 as pb
from tests.trainer_client.balancing.service.test_node import wait_until
from trainer_client.balancing.opening import SessionName

SECONDS = 120.0


class Quiet:
    """A rank that only wants to be joined."""

    def answered(self, answers: Sequence[pb.Answer]) -> None: ...
    def joined(self, epoch: int) -> None: ...
    def lost(self, trouble: str) -> None: ...
    def noted(self, trouble: str, cause: Cause | None = None) -> None: ...


def test_who_suspects_a_joining_spares_the_next_one_that_is_under_way() -> None:
    session = SessionName(
        job=uuid.uuid4().hex, group="default", loader="train", run_id="run", restart_count=0, opening=0
    )
    join = join_request(
        session, world_size=1, rank=0, node="node", options=RoundOptions(), schema_hash=b"", schema_fields=[]
    )
    begun: list[int] = []
    goes_on = threading.Event()

    def hold(rank: int) -> None:
        begun.append(rank)
        goes_on.wait(SECONDS)

    flags = ("--drain-seconds", "60", "--grace-seconds", "100")
    with running_balancer(*flags) as leaving, running_balancer() as other, Relay(leaving.port) as relay:
        uplink = Uplink(relay.address, join, Quiet(), join_timeout=SECONDS)
        stopping = threading.Thread(target=leaving.stop)
        try:
            uplink.start()
            wait_until(lambda: uplink.ready)
            relay.target, relay.joins = other.port, hold
            stopping.start()
            wait_until(lambda: len(begun) == 1)  # the balancer leaves, and another one is being joined
            assert (uplink.ready, uplink.epoch) == (True, 1)
            uplink.suspect(1)
            assert not uplink.ready
            goes_on.set()
            wait_until(lambda: uplink.ready)
            assert (len(begun), uplink.epoch) == (1, 2)
            uplink.suspect(1)  # of a follower that has not heard of it yet
            assert uplink.ready
        finally:
            goes_on.set()
            uplink.close()
            stopping.join()
