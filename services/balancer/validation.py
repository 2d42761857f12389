"""From the wire's messages to checked values, or a refusal that names field, value and remedy."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.delays import MOST as MOST_LATE
from evenkeel.partitioning.delays import Cause, Delay
from evenkeel.partitioning.divisible import MOST, WIDTH, check_table
from evenkeel.partitioning.ranges import MAX_TOTAL, share_of_total
from evenkeel.partitioning.samples import RoundSamples
from evenkeel.partitioning.speeds import ALL_EQUAL, LOWEST, LearnedSpeeds, Straggler
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.checks import F8, I8, U4, read_array
from services.balancer.checks import refused as wrong
from services.balancer.decisions import Decision, Reason, unfollowed
from services.balancer.limits import Limits
from services.balancer.refusals import Code, Refusal, RefusedError, shorten
from services.balancer.submissions import Submission, Terms

_MAX_TRACEPARENT = 64
_U8 = np.dtype("<u8")
_LENGTHS = (np.dtype("<u1"), np.dtype("<u2"), U4)
_INTEGERS = (*_LENGTHS, I8)
_NONE: dict[int, str] = {}
_U32 = struct.Struct("<I")
_DOUBLE, _DOUBLE_BITS = struct.Struct("<d"), struct.Struct("<Q")
_CAUSES = frozenset(map(int, Cause))
_MOST_CAUSES = 16  # that a newer client may know


class _Said(NamedTuple):
    """What a message says about a round, of one rank or of several: arrays of one after another."""

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    costs_name: str
    costs: bytes
    memory: bytes
    sizes: bytes
    lengths: bytes
    batch_sizes: bytes
    divisible: bytes
    num_divisible: tuple[int, ...]
    integers: Sequence[np.dtype[Any]]  # types that they may have, each of a width of its own
    held: bytes


_REASONS = frozenset(map(int, Reason))
_MOST_TOLD = 64  # rounds, and ranks of each, that one message tells of

Refused = list[tuple[tuple[int, ...], Refusal]]
"""Whom there is something wrong with, and what."""


def read_submission(message: pb.Submit, terms: Terms, limits: Limits, rank: int | None = None) -> Submission:
    """Checks a rank's part in a round.

    Args:
        message: What it says.
        terms: Of its session.
        limits: Of the balancer.
        rank: Whose it is; None: as the message says.

    Raises:
        RefusedError: If something about it is wrong; concerns this round of this rank only.
    """
    n, sizes = message.num_samples, message.batch_sizes
    if len(sizes) > terms.window:
        raise _wrong_batches(sizes, terms, n)
    is_float = message.WhichOneof("costs") == "costs_f64"
    said = _Said(
        ranks=(message.rank if rank is None else rank,),
        counts=(n,),
        costs_name="costs_f64" if is_float else "costs_i64",
        costs=message.costs_f64 if is_float else message.costs_i64,
        memory=message.memory,
        sizes=message.sizes,
        lengths=message.lengths,
        batch_sizes=np.array([*sizes, *[0] * (terms.window - len(sizes))], U4).tobytes() if sizes else b"",
        divisible=message.divisible,
        num_divisible=(len(message.divisible) // (WIDTH * F8.itemsize),) if message.divisible else (),
        integers=(I8,),
        held=_U32.pack(message.held) if message.held else b"",
    )
    traceparents = (message.traceparent,) if message.traceparent else ()
    found, refused = _read(said, message, traceparents, terms, limits)
    if found is None:
        raise RefusedError(refused[0][1])
    return found


def read_node(
    message: pb.SubmitNode, ranks: tuple[int, ...], terms: Terms, limits: Limits
) -> tuple[Submission | None, Refused]:
    """Checks the parts of several ranks: what is right of them, and whose are wrong, with the reason.

    Args:
        message: What they say.
        ranks: Those of the stream.
        terms: Of their session.
        limits: Of the balancer.

    Raises:
        RefusedError: If they cannot be told apart; concerns this round of all ranks of the message.
    """
    if message.ranks:
        named = tuple(read_array(message.ranks, min(len(message.ranks) // 4, len(ranks)), "ranks", (U4,)).tolist())
        if len(set(named)) != len(named) or not set(ranks).issuperset(named):
            raise wrong("ranks", shorten(named[:16]), "name ranks of the stream's Join, each once", fatal=False)
        ranks = named
    counts = read_array(message.num_samples, len(ranks), "num_samples", (U4,)).tolist()
    tables, traceparents = message.num_divisible, message.traceparents
    if len(traceparents) not in (0, len(ranks)):
        said = f"{len(traceparents)} texts"
        raise wrong("traceparents", said, f"state one for each of {len(ranks)} ranks", fatal=False)
    is_float = message.WhichOneof("costs") == "costs_f64"
    return _read(
        _Said(
            ranks=ranks,
            counts=tuple(counts),
            costs_name="costs_f64" if is_float else "costs_int",
            costs=message.costs_f64 if is_float else message.costs_int,
            memory=message.memory,
            sizes=message.sizes,
            lengths=message.lengths,
            batch_sizes=message.batch_sizes,
            divisible=message.divisible,
            num_divisible=tuple(read_array(tables, len(ranks), "num_divisible", (U4,)).tolist()) if tables else (),
            integers=_INTEGERS,
            held=message.held,
        ),
        message,
        traceparents,
        terms,
        limits,
    )


def read_unfollowed(message: pb.Told) -> dict[int, Decision]:
    """What ranks did instead of what was decided, by round; a reason of a newer client is none in particular."""
    found = {}
    for one in message.unfollowed[:_MOST_TOLD]:
        reason = Reason(one.reason) if one.reason in _REASONS else Reason.NOT_FOLLOWED
        found[one.round] = unfollowed(reason, tuple(one.ranks[:_MOST_TOLD]), by_ranks=one.by_ranks)
    return found


def _read(
    said: _Said, message: pb.Submit | pb.SubmitNode, traceparents: Sequence[str], terms: Terms, limits: Limits
) -> tuple[Submission | None, Refused]:
    counts, n, most = said.counts, sum(said.counts), max(said.counts, default=0)
    refused: dict[int, Refusal] = {}  # by place
    if most > limits.max_samples_per_rank:
        for at, count in enumerate(counts):
            if count > limits.max_samples_per_rank:
                refused[at] = wrong(
                    "num_samples", _of_rank(count, said, at),
                    f"submit at most {limits.max_samples_per_rank}, or raise the server's max_samples_per_rank",
                    code=Code.LIMIT_EXCEEDED, fatal=False,
                ).refusal  # fmt: skip
        if len(refused) == len(counts):
            return None, [((said.ranks[at],), refusal) for at, refusal in refused.items()]
    share, is_float = share_of_total(terms.world_size), said.costs_name == "costs_f64"
    costs = read_array(said.costs, n, said.costs_name, (F8,) if is_float else said.integers)
    _check_amounts(costs, said, said.costs_name, share, refused)
    memory = sizes = divisible = None
    if said.memory:
        memory = read_array(said.memory, n, "memory", (F8,))
        _check_amounts(memory, said, "memory", share, refused)
    elif terms.options.memory_caps and n:
        raise wrong("memory", "empty", "submit each sample's memory: the session has memory_caps", fatal=False)
    if said.sizes:
        sizes = read_array(said.sizes, n, "sizes", said.integers)
        _check_amounts(sizes, said, "sizes", share, refused)
    lengths = read_array(
        said.lengths, n * terms.num_jagged, "lengths", _LENGTHS if said.integers is _INTEGERS else (U4,)
    )
    if said.batch_sizes:
        table = read_array(said.batch_sizes, len(counts) * terms.window, "batch_sizes", (U4,))
        batch_sizes = table.reshape(-1, terms.window).astype(np.int64)
        for at, total in enumerate(batch_sizes.sum(axis=1).tolist()):
            if total != counts[at]:
                refused.setdefault(at, _wrong_batches(batch_sizes[at].tolist(), terms, counts[at]).refusal)
    else:
        batch_sizes = np.array(counts, np.int64).reshape(-1, 1)
        if terms.window > 1:
            batch_sizes = np.pad(batch_sizes, ((0, 0), (0, terms.window - 1)))
    if said.divisible or any(said.num_divisible):
        divisible = _read_divisible(said, costs, terms, refused)
    learned = ALL_EQUAL
    if 0 in said.ranks and message.HasField("learned"):
        try:
            learned = _read_learned(message.learned, terms.world_size)
        except RefusedError as error:
            refused.setdefault(said.ranks.index(0), error.refusal)
    held = None
    if said.held:
        held = read_array(said.held, len(counts), "held", (U4,)) * 1e-6
    traced = _NONE
    if traceparents:
        named = zip(said.ranks, traceparents, strict=True)
        traced = {rank: text for rank, text in named if 0 < len(text) <= _MAX_TRACEPARENT}
    timeout = message.timeout_ms / 1e3 if message.timeout_ms else limits.round_timeout
    submission = Submission(
        ranks=said.ranks,
        samples=RoundSamples(
            batch_sizes=batch_sizes,
            costs=costs,
            lengths=lengths.reshape(n, terms.num_jagged),
            sizes=sizes,
            memory=memory,
            divisible=divisible,
        ),
        timeout=min(timeout, limits.max_round_timeout),
        traceparents=traced,
        learned=learned,
        held=held,
    )
    if not refused:
        return submission, []
    good = [rank for at, rank in enumerate(said.ranks) if at not in refused]
    return (submission.of(good) if good else None), [((said.ranks[at],), one) for at, one in refused.items()]


def _of_rank(value: object, said: _Said, at: int) -> str:
    """A value that is wrong; where a message is of several ranks, with whose it is."""
    return str(value) if len(said.ranks) == 1 else f"{value} on rank {said.ranks[at]}"


def _wrong_batches(sizes: Sequence[int], terms: Terms, n: int) -> RefusedError:
    remedy = f"state up to {terms.window} sizes that add up to num_samples, {n}"
    return wrong("batch_sizes", shorten(list(sizes[:16])), remedy, fatal=False)


def _read_divisible(said: _Said, costs: NDArray[Any], terms: Terms, refused: dict[int, Refusal]) -> NDArray[np.float64]:
    """(m, WIDTH) the samples that may be split, numbered among those of all ranks of the message."""
    if terms.options.split is None or not any(role > 0 for role in terms.roles):
        raise wrong(
            "divisible", f"{len(said.divisible)} bytes",
            "leave it empty: the session has no options.split or no schema.roles", fatal=False,
        )  # fmt: skip
    most, begin, first, tables = MOST * terms.window, 0, 0, []
    rows = read_array(said.divisible, sum(said.num_divisible) * WIDTH, "divisible", (F8,)).reshape(-1, WIDTH)
    for at, (count, samples) in enumerate(zip(said.num_divisible, said.counts, strict=True)):
        table, own = rows[begin : begin + count], costs[first : first + samples]
        begin += count
        problem, remedy = f"{count} samples", f"offer at most {most} samples"
        if count <= most:
            problem, remedy = check_table(table, own).strip(), "describe samples as the costs do"
        if problem:
            refusal = wrong("divisible", _of_rank(problem, said, at), remedy, fatal=False).refusal
            refused.setdefault(at, refusal)
            table = table[:0]  # whose samples may be other ranks'
        tables.append(table + np.eye(1, WIDTH) * first)
        first += samples
    return np.concatenate(tables)


def _read_learned(message: pb.LearnedSpeeds, world_size: int) -> LearnedSpeeds:
    for name, most in (("stragglers", 1), ("delays", _MOST_CAUSES)):
        if len(getattr(message, name)) > most * world_size:
            said = f"{len(getattr(message, name))} of {world_size} ranks"
            raise wrong(f"learned.{name}", said, "name every slow rank once, with each cause", fatal=False)
    before, slow = -1, []
    for at, one in enumerate(message.stragglers):
        if not before < one.rank < world_size:
            remedy = f"name ranks below the world size, {world_size}, ascending"
            raise wrong(f"learned.stragglers[{at}].rank", one.rank, remedy, fatal=False)
        if not LOWEST <= one.speed <= 1:
            raise wrong(f"learned.stragglers[{at}].speed", one.speed, f"use {LOWEST:g} to 1", fatal=False)
        before = one.rank
        slow.append(Straggler(rank=one.rank, speed=one.speed, since=one.since))
    if not 0 <= message.fixed <= MAX_TOTAL:
        raise wrong("learned.fixed", message.fixed, f"use units of cost, 0 to {MAX_TOTAL:.3g}", fatal=False)
    return LearnedSpeeds(stragglers=tuple(slow), fixed=message.fixed, delays=_read_delays(message.delays, world_size))


def _read_delays(message: Sequence[pb.Delay], world_size: int) -> tuple[Delay, ...]:
    before, late = (-1, 0), []
    for at, one in enumerate(message):
        if one.cause not in _CAUSES:
            continue  # of a newer client
        if not (before < (one.rank, one.cause) and one.rank < world_size):
            remedy = f"name ranks below the world size, {world_size}, ascending, each cause once"
            raise wrong(f"learned.delays[{at}].rank", one.rank, remedy, fatal=False)
        if not 0 <= one.share <= MOST_LATE:
            raise wrong(f"learned.delays[{at}].share", one.share, f"use 0 to {MOST_LATE:g}", fatal=False)
        before = one.rank, one.cause
        late.append(Delay(rank=one.rank, cause=Cause(one.cause), share=one.share, since=one.since))
    return tuple(late)


def _check_amounts(values: NDArray[Any], said: _Said, name: str, limit: float, refused: dict[int, Refusal]) -> None:
    """Finite and not negative, with a sum a rank that leaves room for all others'."""
    if not values.size:
        return
    # As unsigned integers, amounts of either type are ordered as they are, with all that is negative, infinite or NaN
    # above: one pass tells that every amount is good and their sums small.
    each = limit / max(said.counts)
    most = _DOUBLE_BITS.unpack(_DOUBLE.pack(each))[0] if values.dtype == F8 else int(each)
    if values.itemsize < 8:
        if most >> 8 * values.itemsize or int(np.maximum.reduce(values)) <= most:
            return
    elif int(np.maximum.reduce(values.view(_U8))) <= most:
        return
    begin = 0
    for at, count in enumerate(said.counts):
        own, begin = values[begin : begin + count], begin + count
        bad, remedy = np.flatnonzero(~((own >= 0) & (own <= limit))), f"keep the sum below {limit:.3g}"
        where, value = name, f"{own.sum(dtype=np.float64):.6g} in sum"
        if bad.size:
            where, value = f"{name}[{bad[0]}]", str(own[bad[0]])
            remedy = f"use finite numbers from 0 to {limit:.3g}"
        elif own.sum(dtype=np.float64) <= limit:
            continue
        refused.setdefault(at, wrong(where, _of_rank(value, said, at), remedy, fatal=False).refusal)
