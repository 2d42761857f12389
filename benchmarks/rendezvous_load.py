"""Ranks for the rendezvous benchmark: many streams in one process, messages encoded beforehand.

Each rank, or each node, has a connection of its own. All processes start a round together; each reports when its own
ranks began and when the last of them had its answer, by the clock that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

import grpc
import numpy as np
from trainer_client.balancing.service.joining import join_submits

from evenkeel.protocol import balancer_pb2 as pb

METHOD = "/evenkeel.balancer.v1.BalancerService/Balance"
WARM_UP_ROUNDS = 5
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a process of ranks does.

    Attributes:
        port: Of the server.
        ranks: The ranks that live in this process.
        world_size: Of the job.
        samples: Per rank and round.
        fields: Jagged fields of a sample.
        rounds: Measured rounds.
        node_size: Ranks per host.
        seed: Of the lengths.
        ranks_per_stream: Ranks that share a stream and a connection.
        job: Name of the job.
    """

    port: int
    ranks: range
    world_size: int
    samples: int
    fields: int
    rounds: int
    node_size: int
    seed: int
    ranks_per_stream: int = 1
    job: str = "benchmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a process's part of each round began and ended, and what one rank sent and received on average.

    Attributes:
        began: (rounds,) seconds.
        ended: (rounds,) seconds.
        sent_bytes: Per rank and round.
        received_bytes: Per rank and round.
        balanced: Answers that carried a plan, of the last round.
    """

    began: list[float]
    ended: list[float]
    sent_bytes: float
    received_bytes: float
    balanced: int


def join_message(load: Load, ranks: range) -> pb.Join:
    """What a stream begins with."""
    fields = [pb.Field(path=f"field{i}", dtype="int64", kind=pb.Field.KIND_JAGGED) for i in range(load.fields)]
    return pb.Join(
        protocol_versions=[1],
        job=load.job,
        run_id="benchmark",
        world_size=load.world_size,
        rank=ranks[0],
        ranks=ranks if load.ranks_per_stream > 1 else (),
        node=f"node{ranks[0] // load.node_size}",
        schema=pb.Schema(hash=b"benchmark", fields=fields),
    )


def join_bytes(load: Load, ranks: range) -> bytes:
    """The first message of a stream."""
    return pb.BalanceRequest(join=join_message(load, ranks)).SerializeToString()


def draw_lengths(rng: np.random.Generator, samples: int, fields: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """(samples, fields) log-normal lengths, mean about 200, at most 8192."""
    base = np.clip(rng.lognormal(4.8, 1.0, samples), 1, 8192)
    return np.maximum(1, base[:, None] * rng.uniform(0.5, 1.0, (samples, fields))).astype("<u4")


def costs_of(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Work of a sample in a width-1024 HSTU, in units of its linear part: L + L²/5120."""
    longest = lengths.max(axis=1).astype(np.int64)
    return np.asarray(longest + longest * longest // 5120, np.int64)


def submit_message(load: Load, rank: int) -> pb.Submit:
    """The rank's submission without the number of its round."""
    lengths = draw_lengths(np.random.default_rng([load.seed, rank]), load.samples, load.fields)
    return pb.Submit(
        num_samples=load.samples,
        costs_i64=costs_of(lengths).astype("<i8").tobytes(),
        lengths=lengths.tobytes(),
        timeout_ms=60_000,
        rank=rank if load.ranks_per_stream > 1 else 0,
    )


def submit_body(load: Load, rank: int) -> bytes:
    """The same, serialised."""
    return submit_message(load, rank).SerializeToString()


def stream_body(load: Load, ranks: range) -> bytes:
    """What the ranks of a stream submit, without the number of the round: a Submit, or a SubmitNode of several."""
    if load.ranks_per_stream == 1:
        return submit_body(load, ranks[0])
    (node,), _ = join_submits([submit_message(load, rank) for rank in ranks], join_message(load, ranks))
    return node.SerializeToString()


def stream_request(body: bytes, round_number: int, *, of_node: bool) -> bytes:
    """The request that submits it to a round."""
    part = b"\x08" + _varint(round_number) + body
    return _tagged(3, _tagged(2, part)) if of_node else _tagged(2, part)


def request_bytes(bodies: list[bytes], round_number: int, *, grouped: bool) -> bytes:
    """The request that submits bodies to a round: one as a Submit, several as a SubmitGroup."""
    submits = [b"\x08" + _varint(round_number) + body for body in bodies]
    if not grouped:
        return _tagged(2, submits[0])
    return _tagged(3, b"".join(_tagged(1, submit) for submit in submits))


def _tagged(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


async def run_ranks(load: Load, barrier: Barrier) -> Timing:
    """Opens the streams, then goes through the rounds with the other processes."""
    size = load.ranks_per_stream
    streams = [load.ranks[i : i + size] for i in range(0, len(load.ranks), size)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{load.port}", options=_OPTIONS) for _ in streams]
    calls = [channel.stream_stream(METHOD)() for channel in channels]
    bodies = [stream_body(load, ranks) for ranks in streams]

    async def exchange(call: Any, request: bytes) -> bytes:
        await call.write(request)
        return await call.read()  # type: ignore[no-any-return]

    received = 0

    async def take_round(call: Any, request: bytes) -> list[pb.Answer | pb.AnswerNode]:
        """The answer to the ranks of a stream; none from the echo."""
        answer = await exchange(call, request)
        nonlocal received
        received += len(answer)
        if answer.startswith(b"\0"):
            return []
        response = pb.BalanceResponse.FromString(answer)
        return [response.answer] if size == 1 else [*response.answers.nodes, *response.answers.answers]

    for begin in range(0, len(calls), 64):
        part = range(begin, min(begin + 64, len(calls)))
        await asyncio.gather(*(exchange(calls[i], join_bytes(load, streams[i])) for i in part))
    began, ended = [], []
    requests: list[bytes] = []
    answers: list[list[pb.Answer | pb.AnswerNode]] = []
    for round_number in range(WARM_UP_ROUNDS + load.rounds):
        requests = [stream_request(body, round_number, of_node=size > 1) for body in bodies]
        await asyncio.to_thread(barrier.wait)
        received = 0
        started = time.monotonic()
        answers = await asyncio.gather(*(take_round(c, r) for c, r in zip(calls, requests, strict=True)))
        if round_number >= WARM_UP_ROUNDS:
            began.append(started)
            ended.append(time.monotonic())
    await asyncio.gather(*(call.done_writing() for call in calls))
    await asyncio.gather(*(channel.close() for channel in channels))
    of_ranks = [answer for of_stream in answers for answer in of_stream]
    with_plan = [one for one in of_ranks if one.decision.outcome == pb.Decision.OUTCOME_BALANCED]
    without = [one for one in of_ranks if one.decision.outcome != pb.Decision.OUTCOME_BALANCED]
    if without:
        print(f"{len(without)} answers without a plan, such as {str(without[0])[:400]!r}", file=sys.stderr)
    return Timing(
        began=began,
        ended=ended,
        sent_bytes=sum(map(len, requests)) / len(load.ranks),
        received_bytes=received / len(load.ranks),
        balanced=sum(len(one.ranks) // 4 if isinstance(one, pb.AnswerNode) else 1 for one in with_plan),
    )


def rank_process(load: Load, barrier: Barrier, results: Queue[Timing]) -> None:
    """Entry point of a process of ranks."""
    results.put(asyncio.run(run_ranks(load, barrier)))


def echo_process(reply_bytes: int, ports: Queue[int]) -> None:
    """Entry point of the floor: a server that answers each message at once with one of the size of a decision."""

    async def serve() -> None:
        reply = bytes(reply_bytes)

        async def echo(_requests: object, context: Any) -> None:
            while await context.read() is not grpc.aio.EOF:
                await context.write(reply)

        handlers = {"Balance": grpc.stream_stream_rpc_method_handler(echo)}
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("evenkeel.balancer.v1.BalancerService", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ports.put(port)
        await server.wait_for_termination()

    asyncio.run(serve())
