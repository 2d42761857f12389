"""One attempt at a stream to the balancer: what goes out on it, and what has become of it."""

from __future__ import annotations

import math
import os
from queue import SimpleQueue

import grpc

from evenkeel.protocol import balancer_pb2 as pb
from trainer_client.balancing.service.joining import join_submits

_SPARE_DESCRIPTORS = 16


class Attempt:
    """One attempt at a stream, from its Join to its end.

    Attributes:
        outbox: What goes out; None ends it in order.
        call: The stream's call, once it has begun.
        joined: The service has welcomed it.
        leaving: The balancer leaves, and another thread looks for another one.
        ends_at: The first round that goes elsewhere; infinity while the balancer has not said it.
        refused: The service has said no.
        given_up: What is wrong with it has been told.
        timed_out: It was not joined in time.
        max_message_bytes: What the service takes; 0 before it has said so.
        takes_nodes: The service takes the ranks of a node together.
        told: The last round of which the service has been told on it what the ranks did; -1 at first.
    """

    def __init__(self, join: pb.Join) -> None:
        self._join = join
        self.outbox: SimpleQueue[pb.BalanceRequest | None] = SimpleQueue()
        self.outbox.put(pb.BalanceRequest(join=join))
        self.call: grpc.Call | None = None
        self.joined = self.leaving = self.refused = self.given_up = self.timed_out = False
        self.ends_at = math.inf
        self.max_message_bytes = 0
        self.takes_nodes = False
        self.told = -1
        self._telling: pb.Told | None = None

    def tell(self, told: pb.Told | None) -> None:
        """Tells the service, with the next request or at the end, what the ranks did."""
        self._telling = told

    def tell_now(self) -> None:
        """Tells it at once, where there is anything to tell: no request may come for long."""
        if self._telling is not None:
            self._send(pb.BalanceRequest(submits=pb.SubmitGroup()))

    def end(self) -> None:
        """Ends the requests in order."""
        self.tell_now()
        self.outbox.put(None)

    def give_up(self) -> None:
        """Ends it at once."""
        self.given_up = True
        if self.call is not None:
            self.call.cancel()

    def put(self, messages: list[pb.Submit]) -> list[pb.Answer]:
        """Sends submissions in as few requests as the service's limit allows; answers those that exceed it alone."""
        if not self._join.ranks:
            return [one for message in messages for one in self._put([message])]
        return self._put(messages) if messages else []

    def _put(self, messages: list[pb.Submit]) -> list[pb.Answer]:
        request, most = self._request(messages), self.max_message_bytes
        if not most or request.ByteSize() <= most:
            self._send(request)
            return []
        if len(messages) > 1:
            half = len(messages) // 2
            return [*self._put(messages[:half]), *self._put(messages[half:])]
        (message,) = messages
        said = (
            f"round {message.round} takes {message.ByteSize()} bytes, the service at most {most}; submit fewer samples "
            "or fields, or raise the server's max_message_bytes"
        )
        error = pb.Error(field="max_message_bytes", message=said)
        return [pb.Answer(round=message.round, rank=message.rank, error=error)]

    def _send(self, request: pb.BalanceRequest) -> None:
        if self._telling is not None:
            request.told.CopyFrom(self._telling)
            self.told = max([self.told, *(one.round for one in self._telling.unfollowed)])
            self._telling = None
        self.outbox.put(request)

    def _request(self, messages: list[pb.Submit]) -> pb.BalanceRequest:
        if not self._join.ranks:
            return pb.BalanceRequest(submit=messages[0])
        if not self.takes_nodes:
            return pb.BalanceRequest(submits=pb.SubmitGroup(submits=messages))
        nodes, odd = join_submits(messages, self._join)
        return pb.BalanceRequest(submits=pb.SubmitGroup(submits=odd, nodes=nodes))


def require_descriptors() -> None:
    """Checks that a new channel can be had: gRPC ends the process when it finds no file descriptor for its own use.

    Raises:
        OSError: If the process is out of file descriptors.
    """
    spare: list[int] = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in spare:
            os.close(descriptor)
