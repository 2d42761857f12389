"""The gRPC edge: what is registered with gRPC, and the unary calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import grpc
from google.protobuf.message import DecodeError

from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from services.balancer.access import Guard, denied
from services.balancer.encoding import error_message, limits_message, statistics_message
from services.balancer.hub import Hub, Member
from services.balancer.joins import PROTOCOL_VERSIONS, read_join
from services.balancer.loop_turns import LoopTurns
from services.balancer.mailboxes import CallMailbox
from services.balancer.refusals import Refusal, RefusedError, out_of_memory
from services.balancer.requests import read_round_message
from services.balancer.shares import Account, Holder, Shares
from services.balancer.streams import StreamOptions, Streams
from services.balancer.submissions import Joining
from services.balancer.validation import read_submission
from services.balancer.views import Views, as_json

_CALL_BYTES = 1 << 14
_DEADLINE_SECONDS = 0.05
_SESSIONS_AT_ONCE = 64
_SMALL_REQUEST_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeOptions:
    """What the edge needs to know beside the hub.

    Attributes:
        version: The software's version.
        strategies: Names of the strategies that it knows.
        default_strategy: For sessions that name none.
        streams: What streams may do.
        max_calls: Unary calls at a time.
    """

    version: str
    strategies: tuple[str, ...]
    default_strategy: str
    streams: StreamOptions
    max_calls: int = 512

    @property
    def instance(self) -> int:
        """This incarnation of the balancer."""
        return self.streams.instance


def add_to_server(servicer: BalancerServicer, server: grpc.aio.Server) -> None:
    """Registers the service as the generated function does, but that streams and rounds come and go as bytes."""
    methods = {
        "Balance": grpc.stream_stream_rpc_method_handler(servicer.streams.serve, None, None),
        "BalanceRound": grpc.unary_unary_rpc_method_handler(
            servicer.BalanceRound, None, pb.BalanceRoundResponse.SerializeToString
        ),
        "GetSessionStats": grpc.unary_unary_rpc_method_handler(
            servicer.GetSessionStats,
            lambda data: pb.GetSessionStatsRequest.FromString(_small(data)),
            pb.GetSessionStatsResponse.SerializeToString,
        ),
        "GetServerInfo": grpc.unary_unary_rpc_method_handler(
            servicer.GetServerInfo,
            lambda data: pb.GetServerInfoRequest.FromString(_small(data)),
            pb.GetServerInfoResponse.SerializeToString,
        ),
    }
    service = pb.DESCRIPTOR.services_by_name["BalancerService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))


class BalancerServicer(pb_grpc.BalancerServiceServicer):
    """Implements `evenkeel.balancer.v1.BalancerService`; `Balance`, its stream, is `Streams.serve`.

    Attributes:
        slots: How many streams there may be.
        calls: How many unary calls there may be.
        turns: Who may use the event loop.
        streams: Those that are open.
    """

    def __init__(self, hub: Hub, options: EdgeOptions, views: Views) -> None:
        self._hub = hub
        self._views = views
        self._options = options
        self.calls = Shares(options.max_calls)
        self.turns = LoopTurns()
        self.streams = Streams(hub, self.turns, options.streams, read_join=self._read_join, joined=self._joined)

    async def BalanceRound(  # noqa: N802
        self, request: bytes, context: Guard
    ) -> pb.BalanceRoundResponse:
        """One rank's part in one round."""
        await _require_deadline(context)
        holder = (context.caller.name, "")
        memory = Account(self._hub.registry.memory, holder)
        if not self.calls.take(holder):
            held = self.calls.held(holder[0])
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{held} calls of this caller are under way, as many as are left to it: use a stream, or call later",
            )
        try:
            if not memory.take(_CALL_BYTES + 2 * len(request)):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, out_of_memory("another call").message)
            return await self._balance_round(request, context, holder)
        finally:
            memory.close()
            self.calls.give(holder)

    async def GetSessionStats(  # noqa: N802
        self, request: pb.GetSessionStatsRequest, context: Guard
    ) -> pb.GetSessionStatsResponse:
        """Statistics of the sessions that match and that the caller may see."""
        await _require_deadline(context)
        registry, watch = self._hub.registry, pb.GetSessionStatsRequest.Watch
        if request.watch == watch.WATCH_ALL and not request.job:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "watch is WATCH_ALL, and no job is named: name one")
        response, nbytes = pb.GetSessionStatsResponse(), 0
        for number, session in enumerate(list(registry)):
            if number % _SESSIONS_AT_ONCE == _SESSIONS_AT_ONCE - 1:
                await asyncio.sleep(0)
            key = session.id.key
            if context.caller.allows(key.job) and all(
                wanted in ("", name)
                for wanted, name in ((request.job, key.job), (request.group, key.group), (request.loader, key.loader))
            ):
                message = statistics_message(session, self._hub.now, registry.num_members(session.id))
                if request.watch == watch.WATCH_ROW:
                    message.watch = as_json(self._views.row(session))
                elif request.watch == watch.WATCH_ALL:  # off the loop: other jobs' rounds go on
                    message.watch = await asyncio.to_thread(lambda one: as_json(self._views.document(one)), session)
                nbytes += message.ByteSize() + 8
                if nbytes > self._options.streams.max_message_bytes:
                    await context.abort(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"the statistics of {len(registry.sessions)} sessions exceed max_message_bytes, "
                        f"{self._options.streams.max_message_bytes}: ask for one job",
                    )
                response.sessions.append(message)
        return response

    async def GetServerInfo(  # noqa: N802
        self, _request: pb.GetServerInfoRequest, context: Guard
    ) -> pb.GetServerInfoResponse:
        """Versions, instance and limits."""
        await _require_deadline(context)
        options, registry = self._options, self._hub.registry
        return pb.GetServerInfoResponse(
            protocol_versions=PROTOCOL_VERSIONS,
            instance=options.instance,
            server_version=options.version,
            limits=limits_message(registry.limits, options.streams.max_message_bytes),
            draining=registry.draining,
            sessions=len(registry.sessions),
            streams=len(self.streams),
            strategies=options.strategies,
        )

    # ------------------------------------------------------------------ inside

    async def _balance_round(self, data: bytes, context: Guard, holder: Holder) -> pb.BalanceRoundResponse:
        mailbox = CallMailbox(self._options.instance)
        context.when_withdrawn(mailbox.close)
        response, round_number = pb.BalanceRoundResponse(), 0
        member: Member | None = None
        began: float | None = await self.turns.begin(holder)
        try:
            request = read_round_message(data, max_fields=self._hub.registry.limits.max_fields)
            round_number = request.submit.round
            if not context.caller.allows(request.join.job):
                await denied(context, request.join.job)
            joining = replace(self._read_join(request.join), caller=holder[0])
            admitted = self._hub.join(joining, mailbox)
            if isinstance(admitted, Refusal):
                raise RefusedError(admitted)
            member = admitted
            response.joined.CopyFrom(self._joined(joining.protocol_version))
            submission = read_submission(request.submit, joining.terms, self._hub.registry.limits, joining.rank)
            self._hub.submit(member, round_number, submission)
            self.turns.end(holder, began)
            began = None
            # A call that ends by itself costs less than one that gRPC cancels, and says why.
            left = context.time_remaining()
            done, _ = await asyncio.wait({mailbox.answer}, timeout=max(0.0, left - min(_DEADLINE_SECONDS, left / 20)))
            if not done:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the round was not decided within the deadline")
            response.answer.CopyFrom(mailbox.answer.result())
        except RefusedError as error:
            response.answer.error.CopyFrom(error_message(error.refusal))
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this call's type")
        finally:
            self.turns.end(holder, began)
            if member is not None:
                self._hub.leave(member, call=True)
        response.answer.round = round_number
        return response

    def _read_join(self, message: pb.Join) -> Joining:
        return read_join(message, self._hub.registry.limits, self._options.strategies, self._options.default_strategy)

    def _joined(self, protocol_version: int) -> pb.Joined:
        return pb.Joined(
            protocol_version=protocol_version,
            instance=self._options.instance,
            server_version=self._options.version,
            limits=limits_message(self._hub.registry.limits, self._options.streams.max_message_bytes),
            takes_nodes=True,
        )


async def _require_deadline(context: Guard) -> None:
    if context.time_remaining() is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "set a deadline on this call: it has none")


def _small(data: bytes) -> bytes:
    if len(data) > _SMALL_REQUEST_BYTES:
        raise DecodeError(f"{len(data)} bytes where a few names are asked for")
    return data
