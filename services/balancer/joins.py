"""From a rank's introduction to checked values, or a refusal that names field, value and remedy."""

from __future__ import annotations

from evenkeel.partitioning.ranges import MEMORY_CAPS, MOVE_PRICE, SPEEDS, TOLERANCE, Range
from evenkeel.partitioning.rounds import RoundOptions
from evenkeel.partitioning.split_options import SplitOptions
from evenkeel.partitioning.splits import ALL
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.checks import F8, read_array, refused
from services.balancer.limits import Limits
from services.balancer.refusals import Code, shorten
from services.balancer.submissions import Joining, SessionKey, Terms

PROTOCOL_VERSIONS = (1,)

_MOST_VERSIONS = 64
_COUNTS = {pb.COUNTS_UNSPECIFIED: "equal", pb.COUNTS_EQUAL: "equal", pb.COUNTS_FREE: "free"}
_KINDS = {kind.number: kind.name.removeprefix("KIND_").lower() for kind in pb.Field.Kind.DESCRIPTOR.values}


def read_join(message: pb.Join, limits: Limits, strategies: tuple[str, ...], default_strategy: str) -> Joining:
    """Checks a rank's introduction.

    Raises:
        RefusedError: If something about it is wrong; always fatal to the stream.
    """
    spoken = [version for version in PROTOCOL_VERSIONS if version in message.protocol_versions[:_MOST_VERSIONS]]
    if not spoken:
        raise refused(
            "protocol_versions",
            list(message.protocol_versions[:8]),
            f"use a client that speaks one of {list(PROTOCOL_VERSIONS)}",
            code=Code.VERSION,
        )
    for name in ("job", "group", "loader", "run_id", "node"):
        text = getattr(message, name)
        if len(text) > limits.max_text:
            raise refused(name, f"{len(text)} characters", f"use at most {limits.max_text}", code=Code.LIMIT_EXCEEDED)
        if not text.isprintable():  # it is shown in terminals, logs and reports
            raise refused(name, ascii(text), "use printable characters only")
    if not message.job:
        raise refused("job", "empty", "name the training job")
    if message.world_size < 1:
        raise refused("world_size", message.world_size, "state the number of ranks of the session")
    if message.world_size > limits.max_ranks:
        raise refused(
            "world_size",
            message.world_size,
            f"use at most {limits.max_ranks} ranks, or raise the server's max_ranks",
            code=Code.LIMIT_EXCEEDED,
        )
    if message.rank >= message.world_size:
        raise refused("rank", message.rank, f"use a rank below the world size, {message.world_size}")
    if message.window > limits.max_window:
        raise refused(
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
        raise refused("ranks", said, "name every rank of the stream once")
    ranks = tuple(message.ranks) or (message.rank,)
    for at, rank in enumerate(ranks):
        if rank >= message.world_size:
            raise refused(f"ranks[{at}]", rank, f"use ranks below the world size, {message.world_size}")
    if len(set(ranks)) != len(ranks) or message.rank not in ranks:
        raise refused("ranks", list(ranks[:16]), f"name every rank of the stream once, rank {message.rank} among them")
    return ranks


def _read_terms(message: pb.Join, limits: Limits, strategies: tuple[str, ...], default_strategy: str) -> Terms:
    schema = message.schema
    if len(schema.fields) > limits.max_fields:
        raise refused(
            "schema.fields",
            f"{len(schema.fields)} fields",
            f"use at most {limits.max_fields}, or raise the server's max_fields",
            code=Code.LIMIT_EXCEEDED,
        )
    if len(schema.hash) > 64:
        raise refused("schema.hash", f"{len(schema.hash)} bytes", "use at most 64")
    lines, num_jagged = [], 0
    for at, field in enumerate(schema.fields):
        path, dtype, kind, shape = field.path, field.dtype, field.kind, field.shape
        if len(path) > limits.max_text or len(dtype) > limits.max_text or len(shape) > 16:
            raise refused(
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
        raise refused(
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
        raise refused("options.strategy", repr(shorten(strategy)), f"use one of {', '.join(strategies)}")
    if options.counts not in _COUNTS:
        raise refused("options.counts", options.counts, "use COUNTS_EQUAL or COUNTS_FREE")
    if not TOLERANCE.holds(options.tolerance):
        raise refused("options.tolerance", options.tolerance, f"use a share of the lower bound, {TOLERANCE}")
    if not MOVE_PRICE.holds(options.move_price):
        raise refused("options.move_price", options.move_price, f"use a share of a step's time, {MOVE_PRICE}")
    split = None
    if options.HasField("split"):
        try:
            told = options.split
            split = SplitOptions(above=told.above, within=told.within, between=told.between, fixed=told.fixed)
        except ValueError as error:
            raise refused("options.split", shorten(str(error)), "use numbers in range") from error
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
    values = read_array(data, world_size, name, (F8,), fatal=True)
    for rank, value in enumerate(values.tolist()):
        if not allowed.holds(value):
            raise refused(f"{name}[{rank}]", value, f"use numbers from {allowed}")
    return tuple(values.tolist())
