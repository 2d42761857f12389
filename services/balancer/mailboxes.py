"""Where answers wait until gRPC takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import Decision
from services.balancer.effects import Answer
from services.balancer.encoding import (
    answer_bytes,
    error_message,
    group_bytes,
    member_bytes,
    response_bytes,
)
from services.balancer.node_answers import node_bytes
from services.balancer.refusals import Refusal, too_large
from services.balancer.shares import Holder


class StreamMailbox:
    """The outgoing side of one stream; answers are encoded when they are written: the first leave before the last.

    Attributes:
        holder: Whose it is.
        heard_at: When the stream began or last brought a whole message, by the loop's clock.
        by_node: The client takes what its ranks are told as arrays.
    """

    def __init__(self, instance: int, max_message_bytes: int) -> None:
        self.holder: Holder = ("", "")
        self._most_bytes = max_message_bytes - _ENVELOPE_BYTES
        self.heard_at = asyncio.get_running_loop().time()
        self.by_node = False
        self._instance = instance
        self._outgoing: deque[pb.BalanceResponse | Answer] = deque()
        self._encoded = b""  # the first of them, which had no room in the message before
        self._changed: asyncio.Future[None] | None = None  # while `next` waits
        self._taken = asyncio.Event()
        self._awaited: dict[int, tuple[int, ...]] = {}  # by round, the ranks to which answers are owed
        self._ending = False
        self._closed = False
        self._grouped = False
        self._closing: Callable[[], asyncio.TimerHandle] | None = None
        self._linger: asyncio.TimerHandle | None = None

    def group(self) -> None:
        """From now on answers leave together, as the clients of several ranks expect."""
        self._grouped = True

    def expect(self, round_number: int, ranks: tuple[int, ...]) -> None:
        """Notes that answers are owed."""
        before = self._awaited.get(round_number)
        self._awaited[round_number] = ranks if before is None else tuple({*before, *ranks})

    def send(self, message: pb.BalanceResponse | Answer) -> None:
        """Queues a message."""
        if not self._closed:
            self._outgoing.append(message)
            self._wake()

    def deliver(self, answer: Answer) -> None:
        """Queues the answer to a round."""
        awaited = self._awaited.pop(answer.round, answer.ranks)
        if awaited != answer.ranks:
            left = set(awaited).difference(answer.ranks)
            if left:
                self._awaited[answer.round] = tuple(left)
        if self.by_node or len(answer.ranks) == 1:
            self.send(answer)
            return
        for rank in answer.ranks:
            self.send(Answer(answer.asker, answer.round, (rank,), answer.result))

    def leave(self, from_round: int | None) -> None:
        """Queues the word that the balancer leaves."""
        self.send(pb.BalanceResponse(leaving=pb.Leaving(from_round=from_round)))

    def close(self, refusal: Refusal) -> None:
        """Queues a last message."""
        if self._closed:
            return
        self.send(pb.BalanceResponse(error=error_message(refusal)))
        self._closed = True
        self._wake()
        if self._closing is not None:
            self._linger = self._closing()

    def when_closed(self, start_timer: Callable[[], asyncio.TimerHandle]) -> None:
        """Notes what to start when it is closed, and to stop when the stream has ended."""
        self._closing = start_timer

    def end(self) -> None:
        """The stream has ended: nothing is sent any more."""
        self._closed, self._closing = True, None
        self._outgoing.clear()
        self._encoded = b""
        if self._linger is not None:
            self._linger.cancel()

    def finish(self) -> None:
        """Ends the stream once every answer that is owed has been sent."""
        self._ending = True
        self._wake()

    @property
    def is_closed(self) -> bool:
        """Whether it ends with an error."""
        return self._closed

    @property
    def backlog(self) -> int:
        """Messages that the client has not taken yet."""
        return len(self._outgoing)

    async def wait(self) -> bool:
        """Returns when there is something to write, or with False at the end of the stream."""
        while not self._outgoing:
            if self._closed or (self._ending and not self._awaited):
                return False
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        return True

    def take(self, is_over: Callable[[], bool] = lambda: False) -> bytes:
        """The next message to write, serialised; answers go into it until `is_over`."""
        self._taken.set()
        first = self._outgoing[0]
        if not isinstance(first, Answer):
            self._outgoing.popleft()
            return first.SerializeToString()
        if not (self._grouped or self.by_node):
            self._outgoing.popleft()
            return self._encode(first)
        answers, room = list[bytes](), min(_GROUP_BYTES, self._most_bytes)
        while self._outgoing and isinstance(answer := self._outgoing[0], Answer) and not (answers and is_over()):
            encoded, self._encoded = self._encoded or self._encode(answer), b""
            if len(encoded) > room:
                if answers:
                    self._encoded = encoded
                    break
                if len(answer.ranks) > 1:
                    half = len(answer.ranks) // 2
                    self._outgoing[0] = answer._replace(ranks=answer.ranks[half:])
                    self._outgoing.appendleft(answer._replace(ranks=answer.ranks[:half]))
                    continue
            self._outgoing.popleft()
            answers.append(encoded)
            room -= len(encoded)
        return group_bytes(answers)

    async def taken(self) -> None:
        """Returns when a message has been taken."""
        self._taken.clear()
        await self._taken.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            if not self._changed.done():
                self._changed.set_result(None)
            self._changed = None

    def _encode(self, answer: Answer) -> bytes:
        """A message, or a part of a group; a refusal where that would be too large and cannot be divided."""
        number, ranks, result = answer.round, answer.ranks, answer.result
        if self.by_node and isinstance(result, Decision):
            encoded = node_bytes(self._instance, number, ranks, result)
        elif self._grouped or self.by_node:
            encoded = b"".join(member_bytes(self._instance, number, rank, result) for rank in ranks)
        else:
            encoded = response_bytes(answer_bytes(self._instance, number, ranks[0], result))
        if len(encoded) <= self._most_bytes or len(ranks) > 1 or isinstance(result, Refusal):
            return encoded
        return self._encode(answer._replace(result=too_large(len(encoded), self._most_bytes)))


class CallMailbox:
    """The one answer of a unary call."""

    def __init__(self, instance: int) -> None:
        self._instance = instance
        self.answer: asyncio.Future[pb.Answer] = asyncio.get_running_loop().create_future()

    def deliver(self, answer: Answer) -> None:
        """Hands the answer over."""
        if not self.answer.done():
            packed = answer_bytes(self._instance, answer.round, answer.ranks[0], answer.result)
            self.answer.set_result(pb.Answer.FromString(packed))

    def leave(self, from_round: int | None) -> None:
        """The next call finds another balancer by itself."""

    def close(self, refusal: Refusal) -> None:
        """Hands an error over instead."""
        if not self.answer.done():
            self.answer.set_result(pb.Answer(error=error_message(refusal)))


_GROUP_BYTES = 1 << 20
_ENVELOPE_BYTES = 16
