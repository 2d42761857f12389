"""The messages of `PlanRound`: a round's samples and its plan, as bytes and back.

The proto says how arrays are laid out. What is read has been checked: what is wrong raises `InvalidMessage`, whatever
the bytes are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.delays import MOST as MOST_DELAY
from evenkeel.partitioning.delays import Cause, Delay
from evenkeel.partitioning.problem import MAX_SUM, MAX_TOTAL, MEMORY_CAPS, MOVE_PRICE, SPEEDS, TOLERANCE, Range
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundPlan, RoundSamples
from evenkeel.partitioning.speeds import Straggler
from evenkeel.partitioning.splits import MOST as MOST_DIVISIBLE
from evenkeel.partitioning.splits import (
    PIECE_WIDTH,
    WIDTH,
    RoundParts,
    SplitOptions,
    check_splits,
    check_table,
    read_splits,
    samples_of_parts,
)
from evenkeel.protocol import balancer_pb2 as pb

MAX_TEXT = 256
"""Characters of a name, and of `RunFacts.last_trouble`."""
DEFAULT_STRATEGY = "minimal_move"

_COUNTS = {pb.COUNTS_UNSPECIFIED: "equal", pb.COUNTS_EQUAL: "equal", pb.COUNTS_FREE: "free"}
_COUNTS_ON_WIRE = {"equal": pb.COUNTS_EQUAL, "free": pb.COUNTS_FREE}
_I4, _I8, _U2, _U4, _F8 = (np.dtype(code) for code in ("<i4", "<i8", "<u2", "<u4", "<f8"))
_NUMBERS = Range(0.0, sys.float_info.max)
_CAUSES = frozenset(map(int, Cause))
_SHOWN = 80  # characters of a value in an error


class InvalidMessage(ValueError):  # noqa: N818
    """A message cannot be used.

    Attributes:
        field: Name of the field, as in the proto.
        value: What is wrong with it.
        remedy: What to do instead.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, str(value)[:_SHOWN], remedy
        super().__init__(f"{field} is {self.value}; {remedy}")

    def __reduce__(self) -> tuple[type[InvalidMessage], tuple[str, str, str]]:
        return type(self), (self.field, self.value, self.remedy)


class LimitExceeded(InvalidMessage):
    """A message asks for more than a limit of the balancer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """How large a round may be.

    Attributes:
        max_ranks: Ranks.
        max_samples: Samples of all ranks.
        max_batches: Batches of the round.
    """

    max_ranks: int = 4096
    max_samples: int = 1 << 22
    max_batches: int = 64


@dataclass(frozen=True, kw_only=True)
class RoundNames:
    """Which round of which run of which job.

    Attributes:
        job: Name of the job.
        group: The ranks that balance together.
        loader: A stream of batches of the group, with rounds of its own.
        run_id: Of the launcher, or drawn by the lead.
        restart_count: How often the launcher has restarted the run.
        round: Number of the round.
        client_version: For people to read.
    """

    job: str
    group: str = ""
    loader: str = ""
    run_id: str = ""
    restart_count: int = 0
    round: int = 0
    client_version: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the lead has seen since the run began, for people to read: no plan depends on it.

    Attributes:
        rounds_by_lead: Rounds that the lead planned by itself: no answer, or too late.
        rounds_unbalanced: Rounds in which every sample stayed at home.
        last_trouble: Why the latest round was not served; empty: none.
        stragglers: Ranks that compute more slowly than the median one.
        delays: Ranks whose batches come later than the others'.
        step_seconds: Median time of a step's computation, of the ranks that measure it; 0: unknown.
    """

    rounds_by_lead: int = 0
    rounds_unbalanced: int = 0
    last_trouble: str = ""
    stragglers: tuple[Straggler, ...] = ()
    delays: tuple[Delay, ...] = ()
    step_seconds: float = 0.0


# ---------------------------------------------------------------------------------------------------- the request


def write_request(samples: RoundSamples, options: RoundOptions, names: RoundNames, facts: RunFacts) -> bytes:
    """The bytes of a `PlanRoundRequest`.

    Args:
        samples: Of all ranks; their lengths are not sent.
        options: How they are partitioned; a round that stays at home needs no plan.
        names: Which round it is.
        facts: For people to read; texts are cut where they are too long.
    """
    assert not options.stay
    costs = samples.costs
    message = pb.PlanRoundRequest(
        **_fields_of(RoundNames, names),
        ranks=samples.num_ranks,
        batches=samples.num_batches,
        batch_sizes=_bytes(samples.batch_sizes, _U4),
        sizes=_least_bytes(samples.moving_sizes, _U4, _I8),
        options=_write_options(options),
        facts=_write_facts(facts),
    )
    if costs.dtype.kind == "f":
        message.costs_f64 = _bytes(costs, _F8)
    else:
        message.costs_int = _least_bytes(costs, _U4, _I8)
    if options.memory_caps:
        assert samples.memory is not None
        message.memory = _bytes(samples.memory, _F8)
    if samples.users is not None:
        message.users = _bytes(samples.users, _U4)
    if samples.nodes is not None:
        message.nodes = _bytes(samples.nodes, _I4)
    if options.split is not None and samples.divisible is not None:
        message.divisible = _bytes(samples.divisible, _F8)
    return message.SerializeToString()


def read_request(
    data: bytes, limits: RoundLimits | None = None
) -> tuple[RoundNames, RoundSamples, RoundOptions, RunFacts]:
    """What `write_request` was given, but for the lengths, which are of no field.

    Raises:
        InvalidMessage: If the bytes are no request, or something in it is wrong; `LimitExceeded` if it is too large.
    """
    message = _parsed(pb.PlanRoundRequest, data)
    for name in ("job", "group", "loader", "run_id", "client_version", "options.strategy", "facts.last_trouble"):
        _check_text(name, attrgetter(name)(message))
    if not message.job:
        raise InvalidMessage("job", "empty", "name the training job")
    samples = _read_samples(message, limits or RoundLimits())
    options, facts = _read_options(message, samples.num_ranks), _read_facts(message.facts, samples.num_ranks)
    return RoundNames(**_fields_of(RoundNames, message)), samples, options, facts


def _write_options(options: RoundOptions) -> pb.PlanOptions:
    split = options.split
    return pb.PlanOptions(
        strategy=options.strategy,
        counts=_COUNTS_ON_WIRE[options.counts],
        tolerance=options.tolerance,
        move_price=options.move_price,
        min_samples=options.min_samples,
        speeds=_bytes(options.speeds, _F8),
        memory_caps=_bytes(options.memory_caps, _F8),
        split=None if split is None else pb.Split(**_fields_of(SplitOptions, split)),
    )


def _write_facts(facts: RunFacts) -> pb.RunFacts:
    shown = (char if char.isprintable() else " " for char in facts.last_trouble[:MAX_TEXT])
    written: dict[str, Any] = {
        "last_trouble": "".join(shown),
        "stragglers": [pb.Straggler(**_fields_of(Straggler, one)) for one in facts.stragglers],
        "delays": [pb.Delay(**_fields_of(Delay, one)) for one in facts.delays],
    }
    return pb.RunFacts(**_fields_of(RunFacts, facts) | written)


def _read_samples(message: pb.PlanRoundRequest, limits: RoundLimits) -> RoundSamples:
    ranks, batches = message.ranks, message.batches
    for name, count, most in (("ranks", ranks, limits.max_ranks), ("batches", batches, limits.max_batches)):
        if count < 1:
            raise InvalidMessage(name, count, "send at least 1")
        if count > most:
            raise LimitExceeded(name, count, f"use at most {most}, or raise the balancer's max_{name}")
    batch_sizes = _array(message, "batch_sizes", ranks * batches, _U4).astype(np.int64).reshape(ranks, batches)
    n = int(batch_sizes.sum())
    if n > limits.max_samples:
        raise LimitExceeded(
            "batch_sizes", f"{n} samples", f"use at most {limits.max_samples}, or raise the balancer's max_samples"
        )
    if message.WhichOneof("costs") == "costs_f64":
        costs = _amounts(message, "costs_f64", n, _F8)
    else:
        costs = _amounts(message, "costs_int", n, _U4, _I8)
    has_memory, on_wire = message.memory or message.options.memory_caps, Range(0, (1 << 31) - 1)
    return RoundSamples(
        batch_sizes=batch_sizes,
        costs=costs,
        lengths=np.empty((n, 0), np.uint32),
        sizes=_amounts(message, "sizes", n, _U4, _I8) if message.sizes else np.zeros(n, np.int64),
        memory=_amounts(message, "memory", n, _F8) if has_memory else None,
        users=_array(message, "users", n, _U4) if message.users else None,
        nodes=_array(message, "nodes", ranks, _I4, allowed=on_wire) if message.nodes else None,
        divisible=_read_divisible(message, costs, batch_sizes) if message.divisible else None,
    )


def _read_divisible(
    message: pb.PlanRoundRequest, costs: NDArray[Any], batch_sizes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The samples that may be split, of each rank so many as it may offer."""
    ranks, batches = batch_sizes.shape
    count = len(message.divisible) // (WIDTH * _F8.itemsize)
    table = _array(message, "divisible", count * WIDTH, _F8).reshape(count, WIDTH)
    with np.errstate(all="ignore"):  # of numbers that are refused
        place, _, wrong = check_table(table, costs).partition(" ")
    if wrong:
        raise InvalidMessage(f"divisible{place}", f"wrong: it {wrong}", "describe samples as the costs do")
    homes = np.repeat(np.arange(ranks), batch_sizes.sum(axis=1))
    offered = np.bincount(homes[table[:, 0].astype(np.int64)], minlength=ranks)
    most = MOST_DIVISIBLE * batches
    if offered.max() > most:
        rank = int(offered.argmax())
        raise InvalidMessage("divisible", f"{offered[rank]} samples of rank {rank}", f"offer at most {most} of a rank")
    return table


def _read_options(message: pb.PlanRoundRequest, ranks: int) -> RoundOptions:
    options, split = message.options, None
    if options.counts not in _COUNTS:
        raise InvalidMessage("options.counts", options.counts, "use COUNTS_EQUAL or COUNTS_FREE")
    for name, allowed in (("tolerance", TOLERANCE), ("move_price", MOVE_PRICE)):
        value = getattr(options, name)
        if not allowed.holds(value):
            raise InvalidMessage(f"options.{name}", value, f"use {allowed}")
    if options.HasField("split"):
        prices = _fields_of(SplitOptions, options.split)
        try:
            split = SplitOptions(**prices)
        except ValueError as error:
            raise InvalidMessage("options.split", prices, str(error)) from None
    speeds, caps = (
        tuple(_array(message, f"options.{name}", ranks, _F8, allowed=allowed).tolist() if sent else ())
        for name, sent, allowed in (
            ("speeds", options.speeds, SPEEDS),
            ("memory_caps", options.memory_caps, MEMORY_CAPS),
        )
    )
    return RoundOptions(
        strategy=options.strategy or DEFAULT_STRATEGY,
        counts=_COUNTS[options.counts],
        tolerance=options.tolerance,
        move_price=options.move_price,
        speeds=speeds,
        memory_caps=caps,
        min_samples=options.min_samples,
        split=split,
    )


def _read_facts(facts: pb.RunFacts, ranks: int) -> RunFacts:
    for name, most, figure, largest in (("stragglers", 1, "speed", 1.0), ("delays", len(Cause), "share", MOST_DELAY)):
        rows: Sequence[Any] = getattr(facts, name)
        if len(rows) > most * ranks:
            raise InvalidMessage(f"facts.{name}", f"{len(rows)} of {ranks} ranks", "name a rank once, with each cause")
        for at, one in enumerate(rows):
            if one.rank >= ranks:
                raise InvalidMessage(f"facts.{name}[{at}].rank", one.rank, f"name ranks below {ranks}")
            if not 0 <= getattr(one, figure) <= largest:
                raise InvalidMessage(f"facts.{name}[{at}].{figure}", getattr(one, figure), f"use 0 to {largest:g}")
    if not _NUMBERS.holds(facts.step_seconds):
        raise InvalidMessage("facts.step_seconds", facts.step_seconds, "use seconds, 0 or more")
    read = {
        "stragglers": tuple(Straggler(**_fields_of(Straggler, one)) for one in facts.stragglers),
        "delays": tuple(
            Delay(**_fields_of(Delay, one) | {"cause": Cause(one.cause)})
            for one in facts.delays
            if one.cause in _CAUSES  # others are of a newer client
        ),
    }
    return RunFacts(**_fields_of(RunFacts, facts) | read)


# --------------------------------------------------------------------------------------------------- the response


def write_response(plan: RoundPlan) -> bytes:
    """The bytes of a `PlanRoundResponse`."""
    message = pb.PlanRoundResponse(
        destinations=_least_bytes(plan.destinations, _U2, _I4),
        batches=b"" if plan.steps is None else _least_bytes(plan.steps, _U2, _I4),
        loads_before=_bytes(plan.loads_before, _F8),
        loads_after=_bytes(plan.loads_after, _F8),
        figures=[pb.BatchFigures(**_fields_of(Figures, one)) for one in plan.batches],
        seconds=plan.seconds,
    )
    if plan.parts is not None:
        message.part_samples = _bytes(plan.parts.samples, _I8)
        message.part_begins = _bytes(plan.parts.begins, _I8)
        message.pieces = _bytes(plan.parts.pieces, _I8)
    return message.SerializeToString()


def read_response(data: bytes, samples: RoundSamples) -> RoundPlan:
    """The plan that was written, checked to be one of these samples.

    Raises:
        InvalidMessage: If the bytes are no response, or do not fit the samples.
    """
    message = _parsed(pb.PlanRoundResponse, data)
    ranks, batches, n = samples.num_ranks, samples.num_batches, len(samples.costs)
    count = len(message.part_samples) // _I8.itemsize if message.part_samples else n
    destinations = _array(message, "destinations", count, _U2, _I4, allowed=Range(0, ranks - 1))
    steps = None
    if batches > 1 or message.batches:
        steps = _array(message, "batches", count if batches > 1 else 0, _U2, _I4, allowed=Range(0, batches - 1))
    parts = _read_parts(message, samples, destinations, steps) if message.part_samples else None
    before, after = (
        _array(message, name, batches * ranks, _F8, allowed=_NUMBERS).reshape(batches, ranks)
        for name in ("loads_before", "loads_after")
    )
    if len(message.figures) != batches:
        raise InvalidMessage("figures", f"{len(message.figures)} batches", f"send those of {batches}")
    figures = tuple(Figures(**_fields_of(Figures, one)) for one in message.figures)
    _check_range("figures", np.array([list(_fields_of(Figures, one).values()) for one in figures]), _NUMBERS)
    of, away = _counted(samples, destinations, steps, parts)
    for batch, one in enumerate(figures):  # by which ranks take a batch for empty, or for one that stays at home
        for name, number in ("samples", of[batch]), ("moved_samples", away[batch]):
            if getattr(one, name) != number:
                raise InvalidMessage(f"figures[{batch}].{name}", getattr(one, name), f"send {number}, as the plan has")
    if not _NUMBERS.holds(message.seconds):
        raise InvalidMessage("seconds", message.seconds, "send seconds, 0 or more")
    return RoundPlan(
        destinations=destinations,
        steps=steps,
        parts=parts,
        loads_before=before,
        loads_after=after,
        batches=figures,
        seconds=message.seconds,
    )


def _counted(
    samples: RoundSamples,
    destinations: NDArray[np.int32],
    steps: NDArray[np.int32] | None,
    parts: RoundParts | None,
) -> tuple[list[int], list[int]]:
    """How many samples each batch has, and how many of them, or of their parts, change rank."""
    homes = samples.homes if parts is None else samples.homes[samples_of_parts(parts.begins)]
    away = destinations != homes
    if steps is None:
        return [len(samples.costs)], [int(np.count_nonzero(away))]
    first = steps if parts is None else steps[parts.begins == 0]
    of, moved = (np.bincount(which, minlength=samples.num_batches).tolist() for which in (first, steps[away]))
    return of, moved


def _read_parts(
    message: pb.PlanRoundResponse,
    samples: RoundSamples,
    destinations: NDArray[np.int32],
    steps: NDArray[np.int32] | None,
) -> RoundParts:
    """The parts, checked to be all samples in order, with the pieces of those that are split."""
    count, total = destinations.size, len(samples.costs)
    numbers, begins = (_array(message, name, count, _I8) for name in ("part_samples", "part_begins"))
    first = begins == 0
    of = np.cumsum(first) - 1
    if not first[0] or int(of[-1]) + 1 != total or (np.diff(begins)[~first[1:]] <= 0).any():
        raise InvalidMessage("part_begins", f"of {int(first.sum())} samples", f"cut {total} samples, ascending")
    rows = len(message.pieces) // (PIECE_WIDTH * _I8.itemsize)
    pieces = _array(message, "pieces", rows * PIECE_WIDTH, _I8).reshape(rows, PIECE_WIDTH)
    try:
        parts = samples.parts(begins, destinations, steps)
    except ValueError:
        raise InvalidMessage("part_begins", "of samples that may not be split", "leave those whole") from None
    try:
        for batch in read_splits(pieces, samples.num_batches):
            check_splits(batch, samples.num_ranks)
    except ValueError as error:
        raise InvalidMessage("pieces", "no pieces of samples", str(error)) from None
    if not np.array_equal(numbers, parts.samples):
        raise InvalidMessage("part_samples", "other samples", "number those of each home from 0")
    if not np.array_equal(pieces, parts.pieces):
        raise InvalidMessage("pieces", "others than the parts", "send the positions, ranks and arrival of each part")
    return parts


# ------------------------------------------------------------------------------------------------- what both share


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.name
        raise InvalidMessage("message", f"{len(data)} bytes that are no {name}", "send one") from None


def _fields_of(kind: Any, values: Any) -> dict[str, Any]:
    """By name what a dataclass has, of one or of a message with the same fields."""
    return {name: getattr(values, name) for name in kind.__dataclass_fields__}  # `fields` takes as long again


def _bytes(values: ArrayLike, dtype: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(values, dtype).tobytes()


def _least_bytes(values: NDArray[Any], small: np.dtype[Any], large: np.dtype[Any]) -> bytes:
    """The bytes of whole numbers, 0 or more, in the smaller type if it holds them."""
    fits = not values.size or int(values.max()) < 1 << 8 * small.itemsize
    return _bytes(values, small if fits else large)


def _array(message: Any, name: str, count: int, *dtypes: np.dtype[Any], allowed: Range | None = None) -> NDArray[Any]:
    """(count,) the elements of a field, of the last of the types that its length may tell, in memory of its own."""
    data = attrgetter(name)(message)
    sent = next((dtype for dtype in dtypes if len(data) == count * dtype.itemsize), None)
    if sent is None:
        size = dtypes[-1].itemsize
        raise InvalidMessage(
            name, f"{len(data)} bytes", f"send {count} elements of {size} bytes, {count * size} in all"
        )
    values = np.frombuffer(data, sent).astype(dtypes[-1])  # a copy: what follows may write to it
    if allowed is not None:
        _check_range(name, values, allowed)
    return values


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise LimitExceeded(name, f"{len(text)} characters", f"use at most {MAX_TEXT}")
    if not text.isprintable():  # it is shown in terminals, logs and pages
        raise InvalidMessage(name, ascii(text), "use printable characters only")


def _check_range(name: str, values: NDArray[Any], allowed: Range) -> None:
    """Refuses numbers that are not allowed, NaN among them."""
    if values.size and not (allowed.least <= values.min() and values.max() <= allowed.most):
        at = int(np.flatnonzero(~((values >= allowed.least) & (values <= allowed.most)).ravel())[0])
        raise InvalidMessage(f"{name}[{at}]", values.ravel()[at], f"use numbers from {allowed}")


def _amounts(message: Any, name: str, count: int, *dtypes: np.dtype[Any]) -> NDArray[Any]:
    """Finite numbers, 0 or more, whose sum is exact as an integer, or far from the largest float64."""
    most = MAX_SUM if dtypes[-1].kind == "f" else MAX_TOTAL - 1
    values = _array(message, name, count, *dtypes, allowed=Range(0, most))
    if values.size and float(values.max()) * values.size > most and sum(values.tolist()) > most:
        raise InvalidMessage(name, f"{sum(values.tolist()):g} in sum", f"scale them, so that it is at most {most:g}")
    return values
