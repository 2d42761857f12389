"""What all ranks do in a round: a pure function of what they said, which runs on the lead alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from trainer_client.balancing.batches.shared import Said
from trainer_client.balancing.batches.structure import remedy
from trainer_client.balancing.contribution import DROP_LAST, INVALID, OUT_OF_TURN, Contributions, Extras, State
from trainer_client.balancing.errors import PeersDifferError, SchemaMismatchError, out_of_turn
from trainer_client.balancing.report import Mode, Reason
from trainer_client.balancing.resume import check_resumed

NAMES = "give loaders of different batches different names (BalancedLoader(name=…))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all ranks do in a round.

    Attributes:
        mode: What; `Mode.EMBEDDED` for a round that is to be planned, whoever plans it.
        reason: Why.
        ranks: The ranks that the reason is about.
        taken: With `Reason.LEFT`, how many batches the first of the ranks had got when it left.
        problem: With `Reason.LEFT`, what made it leave; empty: nothing that it told of.
        batches: The batches of the window that are trained; None: all.
        last: The pass ends with this round.
        resumed: The batches are what was left of a window that has been trained in part.
        error: What all ranks raise, which ends the pass; None: nothing.
    """

    mode: Mode
    reason: Reason = Reason.NONE
    ranks: tuple[int, ...] = ()
    taken: int = 0
    problem: str = ""
    batches: tuple[int, ...] | None = None
    last: bool = False
    resumed: bool = False
    error: Exception | None = field(default=None, compare=False)

    @property
    def ends(self) -> bool:
        """Whether the pass is over after this round."""
        return self.last or self.mode is Mode.END


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decisions follow, beside the contributions.

    Attributes:
        name: The loader's.
        balance: False: every sample stays at home.
        min_samples: Of each rank at least, while a batch has as many for all.
        num_batches: Of a window.
        peers: (ranks, peers) the job's rank of each; for errors.
    """

    name: str
    balance: bool = True
    min_samples: int = 0
    num_batches: int = 1
    peers: NDArray[np.int64] | None = None


def decide(said: Contributions, rules: Rules, schemas: Mapping[int, Sequence[str]] | None = None) -> Decision:
    """From the contributions of all ranks to what all of them do.

    Args:
        said: By rank.
        rules: Of the stream.
        schemas: A readable line per field of each schema that contributions name without bringing a template of it.

    Returns:
        What all ranks do. Errors of the program are part of it, so that all ranks raise them alike.
    """
    left = _left(said)
    if left is not None:
        return left
    try:
        _check_copies(said, rules)
        extras = said.with_extras()
        if any(one.resumed is not None for one in extras.values()):
            check_resumed(rules.name, [extras[rank].resumed if rank in extras else None for rank in range(len(said))])
        _check_schemas(said, extras, schemas or {})
        _check_shared(said, extras)
    except ValueError as error:
        return Decision(mode=Mode.END, error=error)
    counts = said.headers["num_samples"]
    ended = said.headers["state"] == State.EXHAUSTED
    if ended.all() and not counts.any():
        return Decision(mode=Mode.END)
    decision = Decision(mode=Mode.EMBEDDED)
    if not rules.balance:
        decision = Decision(mode=Mode.IDENTITY, reason=Reason.NO_SERVICE)
    elif (invalid := said.flag(INVALID)).any():
        ranks = tuple(np.flatnonzero(invalid).tolist())
        problem = extras[ranks[0]].problem if ranks[0] in extras else ""
        decision = Decision(mode=Mode.IDENTITY, reason=Reason.INVALID_COSTS, ranks=ranks, problem=problem)
    if said.flag(DROP_LAST).any():
        decision = _drop(decision, said, rules)
    return spread(decision, said.batch_sizes(rules.num_batches), rules.min_samples)


def spread(decision: Decision, batch_sizes: NDArray[np.int64], min_samples: int) -> Decision:
    """The decision, or the one under which no rank has too few samples where every sample would stay at home.

    Args:
        decision: What the ranks would do.
        batch_sizes: (ranks, batches) samples as loaded.
        min_samples: Of each rank at least, while a batch has as many for all.
    """
    if decision.mode is not Mode.IDENTITY or not min_samples:
        return decision
    ranks, count = batch_sizes.shape
    for batch in range(count) if decision.batches is None else decision.batches:
        sizes = batch_sizes[:, batch]
        if int(sizes.min()) < min(min_samples, int(sizes.sum()) // ranks):
            return replace(decision, mode=Mode.SPREAD)
    return decision


def _left(said: Contributions) -> Decision | None:
    """The end, where a rank or one of its peers has left its loop."""
    away = said.copies["state"] == State.LEFT
    if not away.any():
        return None
    ranks = tuple(np.flatnonzero(away.any(axis=1)).tolist())
    first = int(away[ranks[0]].argmax())
    turns = (said.copies["flags"] & OUT_OF_TURN > 0) & away
    error = out_of_turn(int(np.flatnonzero(turns.any(axis=1))[0])) if turns.any() else None
    return Decision(
        mode=Mode.END, reason=Reason.LEFT, ranks=ranks, taken=int(said.copies["taken"][ranks[0], first]),
        problem=said.extras_of(ranks[0]).problem if first == 0 else "", error=error,
    )  # fmt: skip


def _drop(decision: Decision, said: Contributions, rules: Rules) -> Decision:
    """The decision without batches that have too few samples; where some rank's data has ended, the pass ends there."""
    least, sizes = max(1, rules.min_samples) * len(said), said.batch_sizes(rules.num_batches)
    num_loaded = said.headers["num_batches"].astype(np.int64)
    num_loaded[said.headers["state"] == State.EXHAUSTED] = 0
    count = max(1, int(num_loaded.max()))
    enough: list[int] = []
    last = False
    for batch in range(count):
        if int(sizes[:, batch].sum()) >= least:
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


def _check_schemas(said: Contributions, extras: Mapping[int, Extras], schemas: Mapping[int, Sequence[str]]) -> None:
    holders = np.flatnonzero(said.headers["num_samples"]).tolist()
    hashes = said.headers["schema"]
    other = next((rank for rank in holders if hashes[rank] != hashes[holders[0]]), None)
    if other is None:
        return
    lines = []
    for rank in (holders[0], other):
        template = extras[rank].template if rank in extras else None
        lines.append(schemas.get(int(hashes[rank]), ()) if template is None else template.schema.lines)
    raise mismatch(holders[0], lines[0], other, lines[1])


def mismatch(first: int, lines: Sequence[str], other: int, other_lines: Sequence[str]) -> SchemaMismatchError:
    """The error that shows how the batches of two ranks differ.

    Args:
        first: A rank.
        lines: One readable line per field of its batches.
        other: Another one.
        other_lines: Of its batches.
    """
    only_first = [line for line in lines if line not in other_lines]
    only_other = [line for line in other_lines if line not in lines]
    here, there = "; ".join(only_first), "; ".join(only_other)
    if here and there:
        both = f"rank {first} has {here}, rank {other} has {there}"
    elif here:
        both = f"rank {first} has {here}, which rank {other} lacks"
    elif there:
        both = f"rank {other} has {there}, which rank {first} lacks"
    else:
        both = f"ranks {first} and {other} have the same fields in another order"
    return SchemaMismatchError(f"batches differ between ranks: {both}; {remedy(only_first, only_other)}; {NAMES}")


def _check_shared(said: Contributions, extras: Mapping[int, Extras]) -> None:
    holders = np.flatnonzero((said.headers["num_samples"] > 0) & (said.headers["shared"] > 0)).tolist()
    if len({int(said.headers["shared"][rank]) for rank in holders}) < 2:
        return
    values: list[tuple[int, dict[str, str]]] = [(rank, dict(_shared_of(extras, rank))) for rank in holders]
    first_rank, first = values[0]
    for rank, one in values[1:]:
        for path, value in first.items():
            if one.get(path) != value:
                raise SchemaMismatchError(
                    f"shared values differ between ranks: {path!r} is {value} on rank {first_rank}, {one.get(path)} on "
                    f"rank {rank}; samples of all ranks are trained with it: give all ranks the same value, or declare "
                    "it in derived, with the function that gives it, if it follows from the samples or is each rank's "
                    "own"
                )
    raise SchemaMismatchError(f"shared values differ between ranks; {NAMES}")


def _shared_of(extras: Mapping[int, Extras], rank: int) -> Said:
    return extras[rank].shared if rank in extras else ()


def _check_copies(said: Contributions, rules: Rules) -> None:
    """Checks that ranks that are to train the same batches hold the same ones."""
    copies = said.copies
    facts = ("state", "num_samples", "schema", "copy")
    if copies.shape[1] == 1 or all((copies[name] == copies[name][:, :1]).all() for name in facts):
        return
    differs = np.any([copies[name] != copies[name][:, :1] for name in facts], axis=0)
    rank, peer = np.argwhere(differs)[0].tolist()
    leader, other = copies[rank, 0], copies[rank, peer]
    first, second = (rank, f"{rank}.{peer}") if rules.peers is None else (rules.peers[rank, 0], rules.peers[rank, peer])
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
        f"rank {second} {what}, and the two were said to train the same batches (by peers, or by a dimension of the "
        "mesh that is not process_group's); let them load the same samples in the same order, as by "
        "mesh['dp'].get_local_rank(); if they train different ones, balance over them too, or pass "
        "process_group=mesh['dp'].get_group()"
    )


def hash64(data: bytes) -> int:
    """64 bits that name some bytes, never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1
