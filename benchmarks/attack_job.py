"""The job beside the attacks: 64 ranks on 8 nodes that go through rounds at a steady pace, and note each.

`python -m benchmarks.attack_job PORT FILE ROUNDS_PER_SECOND [CERTIFICATES]` appends a line a round: when it began, the
seconds to its last answer, and how many ranks got a plan.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from benchmarks.rendezvous_load import METHOD, Load, join_bytes, request_bytes, submit_body
from evenkeel.protocol import balancer_pb2 as pb

RANKS = 64
NODE = 8
TOKEN = "token-of-the-honest-job-0123456789abcdef"
_TIMEOUT_SECONDS = 30.0


def open_channel(port: int, folder: Path | None) -> grpc.aio.Channel:
    """A connection of its own, with the client's certificate of a folder."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if folder is None:
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
    files = [(folder / name).read_bytes() for name in ("server-ca.pem", "client-key.pem", "client.pem")]
    return grpc.aio.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(*files), options=options)


async def run(port: int, path: Path, pace: float, folder: Path | None) -> None:
    """Goes on until killed; a stream that ends is opened again."""
    load = Load(
        port=port, ranks=range(RANKS), world_size=RANKS, samples=128, fields=2, rounds=0, node_size=NODE, seed=1,
        ranks_per_stream=NODE, job="honest",
    )  # fmt: skip
    nodes = [range(begin, begin + NODE) for begin in range(0, RANKS, NODE)]
    bodies = [[submit_body(load, rank) for rank in ranks] for ranks in nodes]
    channels = [open_channel(port, folder) for _ in nodes]
    calls = [channel.stream_stream(METHOD)(metadata=(("authorization", f"Bearer {TOKEN}"),)) for channel in channels]
    for call, ranks in zip(calls, nodes, strict=True):
        await call.write(join_bytes(load, ranks))
        await call.read()

    async def take_part(call: Any, node: int, number: int) -> int:
        await call.write(request_bytes(bodies[node], number, grouped=True))
        answers, balanced = 0, 0
        while answers < NODE:
            data = await asyncio.wait_for(call.read(), _TIMEOUT_SECONDS)
            response = pb.BalanceResponse.FromString(data)
            if response.WhichOneof("response") != "answers":
                raise RuntimeError(f"instead of answers: {response}")
            answers += len(response.answers.answers)
            balanced += sum(one.decision.outcome == 1 for one in response.answers.answers)
        return balanced

    with path.open("a") as file:
        number, next_at = 0, time.monotonic()
        while True:
            began = time.monotonic()
            parts = await asyncio.gather(*(take_part(call, node, number) for node, call in enumerate(calls)))
            file.write(f"{began} {time.monotonic() - began} {sum(parts)}\n")
            file.flush()
            number += 1
            next_at = max(next_at + 1 / pace, time.monotonic())
            await asyncio.sleep(next_at - time.monotonic())


if __name__ == "__main__":
    certificates = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    asyncio.run(run(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), certificates))
