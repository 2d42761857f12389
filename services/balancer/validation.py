"""From the wire's messages to checked values, or a refusal that names field, value and remedy."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.divisible import MOST, WIDTH, check_table
from evenkeel.partitioning.ranges import MAX_TOTAL, MEMORY_CAPS, MOVE_PRICE, SPEEDS, TOLERANCE, Range, share_of_total
from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.partitioning.samples import RankSamples
from evenkeel.partitioning.speeds import ALL_EQUAL, LOWEST, LearnedSpeeds, Straggler
from evenkeel.partitioning.split_options import SplitOptions
from evenkeel.partitioning.splits import ALL
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.limits import Limits
from services.balancer.refusals import Code, Refusal, RefusedError, shorten
from services.balancer.submissions import Joining, SessionKey, Submission, Terms

PROTOCOL_VERSIONS = (1,)

_MAX_TRACEPARENT = 64
_MOST_VERSIONS = 64
_F8, _I8, _U4, _U8 = np.dtype("<f8"), np.dtype("<i8"), np.dtype("<u4"), np.dtype("<u8")
_DOUBLE, _DOUBLE_BITS = struct.Struct("<d"), struct.Struct("<Q")
_COUNTS = {pb.COUNTS_UNSPECIFIED: "equal", pb.COUNTS_EQUAL: "equal", pb.COUNTS_FREE: "free"}
_KINDS = {kind.number: kind.name.removeprefix("KIND_").lower() for kind in pb.Field.Kind.DESCRIPTOR.values}


def read_join(message: pb.Join, limits: Limits, strategies: tuple[str, ...], default_strategy: str) -> Joining:
    """Checks a rank's introduction.

    Raises:
        RefusedError: If something about it is wrong; always fatal to the stream.
    """
    spoken = [version for version in PROTOCOL_VERSIONS if version in message.protocol_versions[:_MOST_VERSIONS]]
    if not spoken:
        raise _refused(
            "protocol_versions",
            list(message.protocol_versions[:8]),
            f"use a client that speaks one of {list(PROTOCOL_VERSIONS)}",
            code=Code.VERSION,
        )
    for name in ("job", "group", "loader", "run_id", "node"):
        text = getattr(message, name)
        if len(text) > limits.max_text:
            raise _refused(name, f"{len(text)} characters", f"use at most {limits.max_text}", code=Code.LIMIT_EXCEEDED)
    if not message.job:
        raise _refused("job", "empty", "name the training job")
    if message.world_size < 1:
        raise _refused("world_size", message.world_size, "state the number of ranks of the session")
    if message.world_size > limits.max_ranks:
        raise _refused(
            "world_size",
            message.world_size,
            f"use at most {limits.max_ranks} ranks, or raise the server's max_ranks",
            code=Code.LIMIT_EXCEEDED,
        )
    if message.rank >= message.world_size:
        raise _refused("rank", message.rank, f"use a rank below the world size, {message.world_size}")
    if message.window > limits.max_window:
        raise _refused(
            "window", message.window, f"use at most {limits.max_window} batches a round", code=Code.LIMIT_EXCEEDED
        )
    return Joining(
        key=SessionKey(message.job, message.group, message.loader),
        run_id=message.run_id,
        restart_count=message.restart_count,
        opening=message.opening,
        rank=message.rank,
        node=message.node,
        terms=_read_terms(message, limits, strategies, default_strategy),
        protocol_version=max(spoken),
    )


def read_ranks(message: pb.Join) -> tuple[int, ...]:
    """The ranks that a stream speaks for; its Join must have been checked.

    Raises:
        RefusedError: If they are no ranks, come twice, or lack the Join's own.
    """
    if len(message.ranks) > message.world_size:
        said = f"{len(message.ranks)} ranks of {message.world_size}"
        raise _refused("ranks", said, "name every rank of the stream once")
    ranks = tuple(message.ranks) or (message.rank,)
    for at, rank in enumerate(ranks):
        if rank >= message.world_size:
            raise _refused(f"ranks[{at}]", rank, f"use ranks below the world size, {message.world_size}")
    if len(set(ranks)) != len(ranks) or message.rank not in ranks:
        raise _refused("ranks", list(ranks[:16]), f"name every rank of the stream once, rank {message.rank} among them")
    return ranks


def read_submission(message: pb.Submit, terms: Terms, limits: Limits) -> Submission:
    """Checks a rank's part in a round.

    Raises:
        RefusedError: If something about it is wrong; concerns this round of this rank only.
    """
    n = message.num_samples
    if n > limits.max_samples_per_rank:
        raise _refused(
            "num_samples",
            n,
            f"submit at most {limits.max_samples_per_rank}, or raise the server's max_samples_per_rank",
            code=Code.LIMIT_EXCEEDED,
            fatal=False,
        )
    share = share_of_total(terms.world_size)
    costs: NDArray[np.int64] | NDArray[np.float64]
    if message.WhichOneof("costs") == "costs_f64":
        costs_bytes = message.costs_f64
        costs = _array(costs_bytes, _F8, n, "costs_f64")
        _check_amounts(costs, "costs_f64", share)
    else:
        costs_bytes = message.costs_i64
        costs = _array(costs_bytes, _I8, n, "costs_i64")
        _check_amounts(costs, "costs_i64", share)
    memory: NDArray[np.float64] | None = None
    memory_bytes, sizes_bytes = message.memory, message.sizes
    if memory_bytes:
        memory = _array(memory_bytes, _F8, n, "memory")
        _check_amounts(memory, "memory", share)
    elif terms.options.memory_caps and n:
        raise _refused("memory", "empty", "submit each sample's memory: the session has memory_caps", fatal=False)
    sizes: NDArray[np.int64] | None = None
    if sizes_bytes:
        sizes = _array(sizes_bytes, _I8, n, "sizes")
        _check_amounts(sizes, "sizes", share)
    lengths_bytes = message.lengths
    lengths = _array(lengths_bytes, _U4, n * terms.num_jagged, "lengths")
    batch_sizes = tuple(message.batch_sizes[: terms.window])
    if batch_sizes and (len(message.batch_sizes) > terms.window or sum(batch_sizes) != n):
        raise _refused(
            "batch_sizes",
            shorten(list(batch_sizes[:16])),
            f"state up to {terms.window} sizes that add up to num_samples, {n}",
            fatal=False,
        )
    divisible = _read_divisible(message.divisible, costs, terms) if message.divisible else None
    learned = ALL_EQUAL
    if not message.rank and message.HasField("learned"):
        learned = _read_learned(message.learned, terms.world_size)
    timeout_ms, exhausted, traceparent = message.timeout_ms, message.exhausted, message.traceparent
    timeout = timeout_ms / 1e3 if timeout_ms else limits.round_timeout
    return Submission(
        samples=RankSamples(
            costs=costs,
            lengths=lengths.reshape(n, terms.num_jagged),
            memory=memory,
            sizes=sizes,
            batch_sizes=batch_sizes,
            divisible=divisible,
        ),
        exhausted=exhausted,
        timeout=min(timeout, limits.max_round_timeout),
        traceparent=traceparent if len(traceparent) <= _MAX_TRACEPARENT else "",
        learned=learned,
        fingerprint=hash(
            (
                n,
                exhausted,
                costs.dtype.char,
                costs_bytes,
                lengths_bytes,
                memory_bytes,
                sizes_bytes,
                message.divisible,
                learned,
                *batch_sizes,
            )
        ),
    )


def _read_divisible(data: bytes, costs: NDArray[np.int64] | NDArray[np.float64], terms: Terms) -> NDArray[np.float64]:
    if terms.options.split is None or not any(role > 0 for role in terms.roles):
        raise _refused(
            "divisible", f"{len(data)} bytes", "leave it empty: the session has no options.split or no schema.roles",
            fatal=False,
        )  # fmt: skip
    most = MOST * terms.window
    if len(data) > most * WIDTH * _F8.itemsize:
        raise _refused("divisible", f"{len(data)} bytes", f"offer at most {most} samples", fatal=False)
    table = _array(data, _F8, len(data) // (WIDTH * _F8.itemsize) * WIDTH, "divisible").reshape(-1, WIDTH)
    problem = check_table(table, costs)
    if problem:
        raise _refused("divisible", problem.strip(), "describe samples as the costs do", fatal=False)
    return table


def _read_learned(message: pb.LearnedSpeeds, world_size: int) -> LearnedSpeeds:
    if len(message.stragglers) > world_size:
        said = f"{len(message.stragglers)} ranks of {world_size}"
        raise _refused("learned.stragglers", said, "name every slow rank once", fatal=False)
    before, slow = -1, []
    for at, one in enumerate(message.stragglers):
        if not before < one.rank < world_size:
            remedy = f"name ranks below the world size, {world_size}, ascending"
            raise _refused(f"learned.stragglers[{at}].rank", one.rank, remedy, fatal=False)
        if not LOWEST <= one.speed <= 1:
            raise _refused(f"learned.stragglers[{at}].speed", one.speed, f"use {LOWEST:g} to 1", fatal=False)
        before = one.rank
        slow.append(Straggler(rank=one.rank, speed=one.speed, since=one.since))
    if not 0 <= message.fixed <= MAX_TOTAL:
        raise _refused("learned.fixed", message.fixed, f"use units of cost, 0 to {MAX_TOTAL:.3g}", fatal=False)
    return LearnedSpeeds(stragglers=tuple(slow), fixed=message.fixed)


def _read_terms(message: pb.Join, limits: Limits, strategies: tuple[str, ...], default_strategy: str) -> Terms:
    schema = message.schema
    if len(schema.fields) > limits.max_fields:
        raise _refused(
            "schema.fields",
            f"{len(schema.fields)} fields",
            f"use at most {limits.max_fields}, or raise the server's max_fields",
            code=Code.LIMIT_EXCEEDED,
        )
    if len(schema.hash) > 64:
        raise _refused("schema.hash", f"{len(schema.hash)} bytes", "use at most 64")
    lines, num_jagged = [], 0
    for at, field in enumerate(schema.fields):
        path, dtype, kind, shape = field.path, field.dtype, field.kind, field.shape
        if len(path) > limits.max_text or len(dtype) > limits.max_text or len(shape) > 16:
            raise _refused(
                f"schema.fields[{at}]",
                f"a path of {len(path)}, a dtype of {len(dtype)} characters, {len(shape)} dimensions",
                f"use at most {limits.max_text} characters and 16 dimensions",
                code=Code.LIMIT_EXCEEDED,
            )
        lines.append(f"{path} {dtype} {_KINDS.get(kind) or kind} {list(shape) if shape else '[]'}")
        num_jagged += kind == pb.Field.KIND_JAGGED
    options = _read_options(message.options, message.world_size, strategies, default_strategy)
    roles = tuple(schema.roles[: limits.max_fields])
    if roles and (len(schema.roles) != num_jagged or min(roles) < ALL):
        raise _refused(
            "schema.roles",
            shorten(list(roles[:16])),
            f"give one of {ALL} or more for each of {num_jagged} jagged fields",
        )
    return Terms(
        world_size=message.world_size,
        window=max(1, message.window),
        options=options,
        schema_hash=schema.hash,
        schema=tuple(lines),
        num_jagged=num_jagged,
        roles=roles,
    )


def _read_options(
    options: pb.PartitionOptions, world_size: int, strategies: tuple[str, ...], default_strategy: str
) -> RoundOptions:
    strategy = options.strategy or default_strategy
    if strategy not in strategies:
        raise _refused("options.strategy", repr(shorten(strategy)), f"use one of {', '.join(strategies)}")
    if options.counts not in _COUNTS:
        raise _refused("options.counts", options.counts, "use COUNTS_EQUAL or COUNTS_FREE")
    if not TOLERANCE.holds(options.tolerance):
        raise _refused("options.tolerance", options.tolerance, f"use a share of the lower bound, {TOLERANCE}")
    if not MOVE_PRICE.holds(options.move_price):
        raise _refused("options.move_price", options.move_price, f"use a share of a step's time, {MOVE_PRICE}")
    split = None
    if options.HasField("split"):
        try:
            split = SplitOptions(above=options.split.above, within=options.split.within, between=options.split.between)
        except ValueError as error:
            raise _refused("options.split", shorten(str(error)), "use numbers in range") from error
    speeds = _per_rank(options.speeds, world_size, "options.speeds", SPEEDS)
    caps = _per_rank(options.memory_caps, world_size, "options.memory_caps", MEMORY_CAPS)
    return RoundOptions(
        strategy=strategy,
        counts=_COUNTS[options.counts],
        tolerance=options.tolerance if options.HasField("tolerance") else RoundOptions().tolerance,
        move_price=options.move_price if options.HasField("move_price") else RoundOptions().move_price,
        speeds=speeds,
        memory_caps=caps,
        min_samples=options.min_samples,
        split=split,
    )


def _per_rank(data: bytes, world_size: int, name: str, allowed: Range) -> tuple[float, ...]:
    if not data:
        return ()
    values = _array(data, _F8, world_size, name, fatal=True)
    for rank, value in enumerate(values.tolist()):
        if not allowed.holds(value):
            raise _refused(f"{name}[{rank}]", value, f"use numbers from {allowed}")
    return tuple(values.tolist())


def _array(data: bytes, dtype: np.dtype, count: int, name: str, *, fatal: bool = False) -> NDArray:  # type: ignore[type-arg]
    expected = count * dtype.itemsize
    if len(data) != expected:
        raise _refused(
            name,
            f"{len(data)} bytes",
            f"pack {count} little-endian elements of {dtype.itemsize} bytes, {expected} in all",
            fatal=fatal,
        )
    return np.frombuffer(data, dtype)


def _check_amounts(values: NDArray[np.int64] | NDArray[np.float64], name: str, limit: float) -> None:
    """Finite and not negative, with a sum that leaves room for all other ranks'."""
    if not values.size:
        return
    # As unsigned integers, amounts of either type are ordered as they are, with all that is negative, infinite or NaN
    # above: one pass tells that every amount is good and their sum small.
    each = limit / values.size
    most = _DOUBLE_BITS.unpack(_DOUBLE.pack(each))[0] if values.dtype == _F8 else int(each)
    if int(np.maximum.reduce(values.view(_U8))) <= most:
        return
    bad = np.flatnonzero(~((values >= 0) & (values <= limit)))
    if bad.size:
        at = int(bad[0])
        raise _refused(f"{name}[{at}]", values[at], f"use finite numbers from 0 to {limit:.3g}", fatal=False)
    total = values.sum(dtype=np.float64)
    if total > limit:
        raise _refused(name, f"{total:.6g} in sum", f"keep the sum below {limit:.3g}", fatal=False)


def _refused(
    field: str, value: object, remedy: str, *, code: Code = Code.INVALID_ARGUMENT, fatal: bool = True
) -> RefusedError:
    return RefusedError(Refusal(code=code, field=field, value=shorten(value), remedy=remedy, fatal=fatal))
