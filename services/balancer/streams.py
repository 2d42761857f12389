"""Streams of ranks: reads their messages, hands them to the hub as there is time for them, writes the answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import grpc
import structlog
from google.protobuf.message import DecodeError

from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.access import Guard
from services.balancer.effects import Answer
from services.balancer.encoding import error_message
from services.balancer.hub import Hub, Member
from services.balancer.joins import read_ranks
from services.balancer.loop_turns import LoopTurns
from services.balancer.mailboxes import StreamMailbox
from services.balancer.refusals import Code, Refusal, RefusedError, out_of_memory, shorten
from services.balancer.requests import OversizedError, read_request
from services.balancer.shares import Account, Holder, Shares
from services.balancer.submissions import Joining
from services.balancer.validation import read_node, read_submission, read_unfollowed

log = structlog.get_logger(__name__)

STREAM_BYTES = 1 << 16
"""What a stream may take of the process's memory without anybody looking: its buffers, and a small message."""

_RANK_BYTES = 100
_REFUSAL_SECONDS = 2.0
_BREAK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What streams may do.

    Attributes:
        instance: This incarnation of the balancer.
        max_streams: Streams at a time.
        max_message_bytes: Of one message.
        max_backlog: Answers that a stream may leave untaken before it is no longer read.
        join_timeout: Seconds from a stream's start to its Join.
    """

    instance: int
    max_streams: int
    max_message_bytes: int
    max_backlog: int = 64
    join_timeout: float = 10.0


@dataclass(slots=True)
class _Stream:
    """What is known of a stream that has joined."""

    context: Guard
    mailbox: StreamMailbox
    memory: Account
    holder: Holder
    member: Member
    ranks: frozenset[int]


class Streams:
    """The open streams.

    Attributes:
        slots: How many there may be.
    """

    def __init__(
        self,
        hub: Hub,
        turns: LoopTurns,
        options: StreamOptions,
        *,
        read_join: Callable[[pb.Join], Joining],
        joined: Callable[[int], pb.Joined],
    ) -> None:
        """Starts without any.

        Args:
            hub: The rounds.
            turns: Who may use the event loop.
            options: What streams may do.
            read_join: Checks a Join.
            joined: Answers one, in a version of the protocol.
        """
        self._hub, self._turns, self._options = hub, turns, options
        self._read_join, self._joined = read_join, joined
        self._open: set[StreamMailbox] = set()
        self.slots = Shares(options.max_streams)

    @property
    def mailboxes(self) -> frozenset[StreamMailbox]:
        """The outgoing sides of the open streams."""
        return frozenset(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def close(self, refusal: Refusal) -> None:
        """Ends every stream with an error, after the answers that it is owed already."""
        for mailbox in self._open:
            mailbox.close(refusal)

    def quiet(self, seconds: float) -> tuple[str, list[StreamMailbox]]:
        """The caller with most streams that brought no message for so long, and those streams."""
        before = self._hub.now - seconds
        callers: dict[str, list[StreamMailbox]] = {}
        for mailbox in self._open:
            if mailbox.heard_at < before and not mailbox.is_closed:
                callers.setdefault(mailbox.holder[0], []).append(mailbox)
        return max(callers.items(), key=lambda one: len(one[1]), default=("", []))

    async def serve(self, _requests: object, context: Guard) -> None:
        """The stream of one rank, or of all ranks of a node."""
        holder = (context.caller.name, "")
        if not self.slots.take(holder):
            await self._turn_away(context, _too_many_streams(self._options.max_streams, self.slots.held(holder[0])))
            return
        memory = Account(self._hub.registry.memory, holder)
        try:
            if memory.take(STREAM_BYTES):
                await self._write(context, memory)
            else:
                await self._turn_away(context, replace(out_of_memory("another stream"), fatal=True))
        finally:
            memory.close()
            self.slots.give(holder)

    async def _turn_away(self, context: Guard, refusal: Refusal) -> None:
        # A client that is still writing its Join when the stream ends would not get to read why.
        with contextlib.suppress(TimeoutError, RefusedError):
            await asyncio.wait_for(context.read(), min(_REFUSAL_SECONDS, self._options.join_timeout))
        refused = pb.BalanceResponse(error=error_message(refusal)).SerializeToString()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.write(refused), _REFUSAL_SECONDS)

    async def _write(self, context: Guard, memory: Account) -> None:
        task = asyncio.current_task()
        assert task is not None
        mailbox = StreamMailbox(self._options.instance, self._options.max_message_bytes)
        mailbox.holder = (context.caller.name, "")
        # A client that does not take its last message is not waited for.
        mailbox.when_closed(lambda: task.get_loop().call_later(_REFUSAL_SECONDS, task.cancel))
        context.when_withdrawn(mailbox.close)
        self._open.add(mailbox)
        reader = asyncio.create_task(self._read(context, mailbox, memory))
        try:
            while await mailbox.wait():
                holder = mailbox.holder
                began = await self._turns.begin(holder)
                try:
                    message = mailbox.take(partial(self._turns.is_over, began))
                finally:
                    self._turns.end(holder, began)
                if len(message) <= STREAM_BYTES:
                    await context.write(message)
                elif memory.take(len(message)):
                    await context.write(message)
                    memory.give(len(message))
                else:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, out_of_memory("an answer").message)
        finally:
            self._open.discard(mailbox)
            mailbox.end()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, context: Guard, mailbox: StreamMailbox, memory: Account) -> None:
        stream: _Stream | None = None
        finished = False
        try:
            stream = await self._await_join(context, mailbox, memory)
            while (data := await self._next_request(context, mailbox)) is not None:
                await self._take(stream, data)
        except RefusedError as error:
            mailbox.close(error.refusal)
        except OversizedError as error:
            mailbox.close(replace(_UNREADABLE, value=str(error), remedy="send what the protocol asks for, no more"))
        except DecodeError:
            mailbox.close(_UNREADABLE)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("stream failed", caller=context.caller.name)
            remedy = "connect again, and report this error with the server's log"
            value = f"{type(error).__name__}: {error}"
            mailbox.close(Refusal(code=Code.INTERNAL, field="server", value=value, remedy=remedy, fatal=True))
        else:
            # Of a connection that breaks, the end of the requests comes a moment before the word that it broke.
            await asyncio.sleep(_BREAK_SECONDS)
            finished = not context.is_over
            mailbox.finish()
            await asyncio.get_running_loop().create_future()  # waiters leave only when the stream has ended
        finally:
            if stream is not None:
                self._hub.leave(stream.member, finished=tuple(stream.ranks) if finished else ())

    async def _await_join(self, context: Guard, mailbox: StreamMailbox, memory: Account) -> _Stream:
        timeout = self._options.join_timeout
        try:
            data = await asyncio.wait_for(context.read(), timeout)
        except TimeoutError:
            raise RefusedError(_not_joined(f"nothing within {timeout:.3g} s")) from None
        if data is None:
            raise RefusedError(_not_joined("nothing"))
        caller = context.caller.name
        async with self._turns.taken((caller, "")):
            message = read_request(data, max_fields=self._hub.registry.limits.max_fields).said
            if not isinstance(message, pb.Join):
                raise RefusedError(_not_joined("no Join" if message is None else "a submission"))
            context.authorize(message.job)
        async with self._turns.taken((caller, "")):
            ranks = read_ranks(message) if message.ranks else ()
            try:
                joining = replace(self._read_join(message), ranks=ranks, caller=caller)
            except RefusedError as error:  # a version or an option that this balancer lacks: the job goes on without it
                job = shorten(message.job)
                log.warning("join refused", job=job, rank=message.rank, caller=caller, reason=error.refusal.message)
                raise
            if not memory.take(_RANK_BYTES * len(joining.all_ranks)):
                raise RefusedError(replace(out_of_memory("the ranks of a stream"), fatal=True))
        async with self._turns.taken((caller, joining.key.job)):
            member = self._hub.join(joining, mailbox)
            if isinstance(member, Refusal):
                raise RefusedError(member)
        if message.ranks:
            mailbox.group()
        mailbox.send(pb.BalanceResponse(joined=self._joined(joining.protocol_version)))
        mailbox.holder = (caller, joining.key.job)
        return _Stream(context, mailbox, memory, mailbox.holder, member, frozenset(joining.all_ranks))

    async def _next_request(self, context: Guard, mailbox: StreamMailbox) -> bytes | None:
        while mailbox.backlog >= self._options.max_backlog:
            await mailbox.taken()
        data = await context.read()
        mailbox.heard_at = self._hub.now
        return data

    async def _take(self, stream: _Stream, data: bytes) -> None:
        """Takes the submissions of a message, as many at a time as the loop has time for."""
        turns, most = self._turns, max(self._options.max_backlog, 2 * len(stream.ranks))
        rounds = 2 * self._hub.registry.limits.max_rounds_ahead  # of which some may be decided already
        if len(data) > STREAM_BYTES and not stream.memory.take(len(data)):
            raise RefusedError(replace(out_of_memory(f"a message of {len(data)} bytes"), fatal=True))
        began: float | None = await turns.begin(stream.holder)
        count = 0
        try:
            messages, told = read_request(data, max_fields=self._hub.registry.limits.max_fields)
            if told is not None and 0 in stream.ranks:
                self._hub.told(stream.member, told.agreed, read_unfollowed(told))
            if isinstance(messages, pb.Elsewhere):
                self._hub.elsewhere(stream.member)
                return
            if messages is None or isinstance(messages, pb.Join):
                raise RefusedError(_not_submitted("nothing" if messages is None else "join"))
            for message in messages:
                count += (len(message.ranks) // 4 or len(stream.ranks)) if isinstance(message, pb.SubmitNode) else 1
                if count > rounds * len(stream.ranks):
                    raise RefusedError(_too_many_submissions(rounds * len(stream.ranks), len(stream.ranks)))
                if began is None:
                    while stream.mailbox.backlog >= most:
                        await stream.mailbox.taken()
                    began = await turns.begin(stream.holder)
                self._take_submit(stream, message)
                if turns.is_over(began):
                    turns.end(stream.holder, began)
                    began = None
        finally:
            turns.end(stream.holder, began)
            if len(data) > STREAM_BYTES:
                stream.memory.give(len(data))
        stream.context.charge(count / len(stream.ranks) - 1)

    def _take_submit(self, stream: _Stream, message: pb.Submit | pb.SubmitNode) -> None:
        joining, mailbox, limits = stream.member.joining, stream.mailbox, self._hub.registry.limits
        ranks, number = joining.all_ranks, message.round
        submission, refused = None, list[tuple[tuple[int, ...], Refusal]]()
        try:
            if isinstance(message, pb.SubmitNode):
                mailbox.by_node = True
                submission, refused = read_node(message, ranks, joining.terms, limits)
            else:
                if len(ranks) > 1:  # the stream of one rank need not name it
                    ranks = (message.rank,)
                if ranks[0] not in stream.ranks:
                    raise RefusedError(_other_rank(message.rank))
                submission = read_submission(message, joining.terms, limits, ranks[0])
        except RefusedError as error:
            refused = [(ranks, error.refusal)]
        for of_ranks, refusal in refused:
            mailbox.deliver(Answer(mailbox, number, of_ranks, refusal))
        if submission is not None:
            mailbox.expect(number, submission.ranks)
            self._hub.submit(stream.member, number, submission)


_UNREADABLE = Refusal(
    code=Code.INVALID_ARGUMENT,
    field="request",
    value="no message of evenkeel.balancer.v1",
    remedy="send BalanceRequest messages, encoded by protocol buffers",
    fatal=True,
)


def _other_rank(rank: int) -> Refusal:
    return Refusal(
        code=Code.INVALID_ARGUMENT,
        field="rank",
        value=str(rank),
        remedy="submit for the ranks of the stream's Join only",
    )


def _not_joined(said: str) -> Refusal:
    return Refusal(
        code=Code.NOT_JOINED, field="request", value=said, remedy="send a Join as the first message", fatal=True
    )


def _not_submitted(said: str) -> Refusal:
    return Refusal(
        code=Code.INVALID_ARGUMENT,
        field="request",
        value=said,
        remedy="send one Join at the start of a stream, then Submit only",
        fatal=True,
    )


def _too_many_submissions(limit: int, ranks: int) -> Refusal:
    return Refusal(
        code=Code.LIMIT_EXCEEDED,
        field="submits",
        value=f"more than {limit} in a message of {ranks} ranks",
        remedy="send each rank's submission to a round once (twice max_rounds_ahead rounds may be undecided)",
        fatal=True,
    )


def _too_many_streams(limit: int, held: int) -> Refusal:
    return Refusal(
        code=Code.LIMIT_EXCEEDED,
        field="max_streams",
        value=f"{limit}, of which this caller has {held}, as many as are left to it",
        remedy="use another balancer, or raise the server's max_streams",
        fatal=True,
    )
