"""What all ranks do in a round, errors among it: a pure function of what they contributed, run on the lead alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from trainer_client.balancing.batches.schema import Schema, remedy
from trainer_client.balancing.contribution import DROP_LAST, INVALID, OUT_OF_ORDER, USERS, Contributions, State
from trainer_client.balancing.errors import PeersDifferError, SchemaMismatchError, out_of_order
from trainer_client.balancing.report import Mode, Reason
from trainer_client.balancing.resume import check_resumed

NAMES = "give loaders of different batches different names (BalancedLoader(name=…))"


@dataclass(frozen=True, kw_only=True)  # without slots: it is pickled in half the time
class Decision:
    """What all ranks do in a round."""

    mode: Mode  # `Mode.EMBEDDED` for a round to be planned: by the lead, unless an answer makes it `Mode.SERVICE`
    reason: Reason = Reason.NONE
    ranks: tuple[int, ...] = ()  # that the reason is about
    taken: int = 0  # with `Reason.LEFT`, batches that the first of the ranks had got
    problem: str = ""  # with `Reason.LEFT`, what made it leave; with `Reason.INVALID_COSTS`, what is wrong with them
    batches: tuple[int, ...] | None = None  # of the round, that are trained; None: all
    last: bool = False  # the pass ends with this round
    done: int = 0  # first batches of the round, which were trained before the state that the ranks go on from
    error: Exception | None = field(default=None, compare=False)  # which all ranks raise, and which ends the pass

    @property
    def ends(self) -> bool:
        """Whether the pass is over after this round."""
        return self.last or self.mode is Mode.END


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decisions follow, beside the contributions."""

    name: str  # of the loader
    balance: bool = True  # False: every sample stays at home
    min_samples: int = 0  # of each rank at least, while a batch has as many for all
    peers: Sequence[Sequence[int]] = ()  # (ranks, peers) the job's rank of each, where there are any; for errors
    schema_lines: Callable[[int], Sequence[str]] = lambda _: ()  # of schemas by number, a line per field; for errors


def decide(contributions: Contributions, rules: Rules, number: int = 0) -> Decision:
    """From the contributions of all ranks to a round to what they do; errors of the program are part of it."""
    if (left := _left(contributions)) is not None:
        return left
    try:
        _check(contributions, rules, number)
    except ValueError as error:
        return Decision(mode=Mode.END, error=error)
    ended = contributions.headers["state"] == State.EXHAUSTED
    if ended.all() and not contributions.with_samples:
        return Decision(mode=Mode.END)
    decision = Decision(mode=Mode.EMBEDDED)
    if not rules.balance:
        decision = Decision(mode=Mode.IDENTITY, reason=Reason.NO_SERVICE)
    elif contributions.flags & INVALID:
        ranks = tuple(np.flatnonzero(contributions.flag(INVALID)).tolist())
        problem = contributions.extras[ranks[0]].problem if ranks[0] in contributions.extras else ""
        decision = Decision(mode=Mode.IDENTITY, reason=Reason.INVALID_COSTS, ranks=ranks, problem=problem)
    if contributions.flags & DROP_LAST:
        decision = _drop_last(decision, contributions, rules)
    return spread(decision, contributions.batch_sizes, rules.min_samples)


def _check(contributions: Contributions, rules: Rules, number: int) -> None:
    """Raises errors of the program, which all ranks will raise alike."""
    _check_copies(contributions, rules.peers, number)
    extras = contributions.extras
    if any(one.resumed is not None for one in extras.values()):
        check_resumed(
            rules.name, [extras[rank].resumed if rank in extras else None for rank in range(len(contributions))]
        )
    if _differ(contributions, "schema"):
        raise _schemas_differ(contributions, rules.schema_lines)
    if _differ(contributions, "shared"):
        raise _shared_values_differ(contributions)
    if not contributions.flags & USERS:
        return
    named, ranks = contributions.flag(USERS), np.array(contributions.with_samples, np.int64)
    if named[ranks].any() and not named[ranks].all():
        raise ValueError(
            f"users is given on rank {ranks[named[ranks]][0]} and not on rank {ranks[~named[ranks]][0]}; give it to "
            f"the loaders of all ranks or of none; {NAMES}"
        )


def _differ(contributions: Contributions, name: str) -> bool:
    """Whether ranks that have samples differ in what a number of their headers names; 0 is none."""
    numbers = contributions.headers[name]
    numbers = numbers[(contributions.headers["num_samples"] > 0) & (numbers > 0)]
    return numbers.size > 0 and bool((numbers != numbers[0]).any())


def _left(contributions: Contributions) -> Decision | None:
    """The end, where a rank or one of its peers has left its loop."""
    copies = contributions.copies
    away = copies["state"] == State.LEFT
    if not away.any():
        return None
    ranks = tuple(np.flatnonzero(away.any(axis=1)).tolist())
    first = int(away[ranks[0]].argmax())
    disordered = np.flatnonzero((away & (copies["flags"] & OUT_OF_ORDER > 0)).any(axis=1))
    extras = contributions.extras.get(ranks[0])
    return Decision(
        mode=Mode.END, reason=Reason.LEFT, ranks=ranks, taken=int(copies["taken"][ranks[0], first]),
        problem="" if extras is None or first else extras.problem,
        error=out_of_order(int(disordered[0])) if disordered.size else None,
    )  # fmt: skip


def _drop_last(decision: Decision, contributions: Contributions, rules: Rules) -> Decision:
    """The decision without batches that have too few samples; where some rank's data has ended, the pass ends there."""
    least, sizes = max(1, rules.min_samples) * len(contributions), contributions.batch_sizes.sum(axis=0)
    num_loaded = contributions.headers["num_batches"].astype(np.int64)
    num_loaded[contributions.headers["state"] == State.EXHAUSTED] = 0
    count = max(1, int(num_loaded.max()))
    enough: list[int] = []
    last = False
    for batch in range(count):
        if int(sizes[batch]) >= least:
            enough.append(batch)
        elif (num_loaded <= batch).any():
            last = True
            break
    if len(enough) == count:
        return decision
    if enough:
        return replace(decision, batches=tuple(enough), last=last)
    mode = Mode.END if last else Mode.DROP
    return Decision(mode=mode, reason=Reason.TOO_FEW_SAMPLES, batches=(), last=last)


def spread(decision: Decision, batch_sizes: NDArray[np.int64], min_samples: int) -> Decision:
    """The decision, or the one under which no rank has too few samples where every sample would stay at home."""
    if decision.mode is not Mode.IDENTITY or not min_samples:
        return decision
    ranks, count = batch_sizes.shape
    for batch in range(count) if decision.batches is None else decision.batches:
        sizes = batch_sizes[:, batch]
        if int(sizes.min()) < min(min_samples, int(sizes.sum()) // ranks):
            return replace(decision, mode=Mode.SPREAD)
    return decision


def _check_copies(contributions: Contributions, ranks: Sequence[Sequence[int]], number: int) -> None:
    """Checks that peers hold the same batches; `ranks` (ranks, peers) are the job's of those that do."""
    copies = contributions.copies
    facts = ("state", "num_samples", "schema", "copy")
    differs = np.any([copies[name] != copies[name][:, :1] for name in facts], axis=0)
    if not differs.any():
        return
    rank, peer = np.argwhere(differs)[0].tolist()
    first, second = ranks[rank][0], ranks[rank][peer]
    leader, other = copies[rank, 0], copies[rank, peer]
    if other["state"] != leader["state"]:
        ended, more = ("has no", "has one") if other["state"] == State.EXHAUSTED else ("has another", "has none")
        what = f"{ended} batch where rank {first} {more}"
    elif other["num_samples"] != leader["num_samples"]:
        what = f"has {other['num_samples']} samples where rank {first} has {leader['num_samples']}"
    elif other["schema"] != leader["schema"]:
        what = f"has batches of other fields or dtypes than rank {first}"
    else:
        what = f"has other samples than rank {first}"
    raise PeersDifferError(
        f"in round {number} rank {second} {what}, and the two were said to train the same batches (by peers, or by a "
        "dimension of the mesh that is not process_group's); let them load the same samples in the same order, as by "
        "mesh['dp'].get_local_rank(); if they train different ones, balance over them too, or pass "
        "process_group=mesh['dp'].get_group()"
    )


def _schemas_differ(contributions: Contributions, lines_of: Callable[[int], Sequence[str]]) -> SchemaMismatchError:
    """The error of ranks whose batches have other fields; `lines_of` knows those of earlier schemas."""
    ranks, numbers = contributions.with_samples, contributions.headers["schema"]
    first, other = ranks[0], next(rank for rank in ranks if numbers[rank] != numbers[ranks[0]])
    schemas = []
    for rank in (first, other):
        extras = contributions.extras.get(rank)
        template = None if extras is None else extras.template
        lines = lines_of(int(numbers[rank])) if template is None else template.schema.lines
        schemas.append(Schema(lines=tuple(lines)))
    one, another = schemas
    difference = one.diff(another, own=f"rank {first}", others=f"rank {other}").replace("\n", "; ")
    return SchemaMismatchError(
        f"batches differ between ranks: {difference}; {remedy(one.lines, another.lines)}; {NAMES}"
    )


def _shared_values_differ(contributions: Contributions) -> SchemaMismatchError:
    """The error of ranks whose samples share other values."""
    extras, digests = contributions.extras, contributions.headers["shared"]
    ranks = [rank for rank in contributions.with_samples if digests[rank]]
    values = [(rank, dict(extras[rank].shared) if rank in extras else {}) for rank in ranks]
    first_rank, first = values[0]
    for rank, one in values[1:]:
        for path, value in first.items():
            if one.get(path) != value:
                return SchemaMismatchError(
                    f"shared values differ between ranks: {path!r} is {value} on rank {first_rank}, {one.get(path)} on "
                    f"rank {rank}; samples of all ranks are trained with it: give all ranks the same value, or declare "
                    "it in derived, with the function that gives it, if it follows from the samples or is each rank's "
                    "own"
                )
    return SchemaMismatchError(f"shared values differ between ranks; {NAMES}")
