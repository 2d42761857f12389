"""Small inputs for the tests of the balancer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness.plans import said
from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.partitioning.samples import RankSamples
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.submissions import Joining, SessionKey, Submission, Terms

KEY = SessionKey("job", "group", "train")


def terms(world_size: int = 3, **changes: Any) -> Terms:
    return Terms(world_size=world_size, num_jagged=changes.pop("num_jagged", 1), **changes)


def joining(rank: int, world_size: int = 3, **changes: Any) -> Joining:
    defaults: dict[str, Any] = {
        "key": KEY, "run_id": "run", "restart_count": 0, "rank": rank, "node": "", "terms": terms(world_size)
    }  # fmt: skip
    return Joining(**{**defaults, **changes})


def submission(
    *costs: float, rank: int = 0, window: int = 1, timeout: float = 10.0, dtype: Any = np.int64, **changes: Any
) -> Submission:
    more = {name: changes.pop(name) for name in ("sizes", "memory", "batch_sizes") if name in changes}
    lengths = changes.pop("lengths", np.ones((len(costs), 1), np.uint32))
    samples = RankSamples(costs=np.array(costs, dtype), lengths=lengths, **more)
    return said(samples, rank, window=window, timeout=timeout, **changes)


def node(*ranks: int, costs: Sequence[float] = (1,), **changes: Any) -> Submission:
    """What ranks of a node say together, all the same."""
    own = RankSamples(costs=np.array(costs, np.int64), lengths=np.ones((len(costs), 1), np.uint32))
    return said([own] * len(ranks), *ranks, **{"timeout": 10.0, **changes})


def options(**changes: Any) -> RoundOptions:
    return RoundOptions(**changes)


def join_message(rank: int = 0, /, world_size: int = 2, **changes: Any) -> pb.Join:
    message = pb.Join(
        protocol_versions=[1],
        job="job",
        group="group",
        loader="train",
        run_id="run",
        world_size=world_size,
        rank=rank,
        schema=pb.Schema(hash=b"schema", fields=[pb.Field(path="ids", dtype="int64", kind=pb.Field.KIND_JAGGED)]),
    )
    for name, value in changes.items():
        if isinstance(value, (pb.PartitionOptions, pb.Schema)):
            getattr(message, name).CopyFrom(value)
        elif isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def submit_message(round_number: int, costs: list[float], *, timeout_ms: int = 10_000, **changes: Any) -> pb.Submit:
    n = len(costs)
    defaults: dict[str, Any] = {
        "costs_i64": np.array(costs, "<i8").tobytes(),
        "lengths": np.arange(1, n + 1, dtype="<u4").tobytes(),
    }
    if "costs_f64" in changes:
        del defaults["costs_i64"]
    return pb.Submit(round=round_number, num_samples=n, timeout_ms=timeout_ms, **{**defaults, **changes})
