"""A round in flight on one rank: from the submission of its costs to what all ranks agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.ranges import share_of_total
from evenkeel.partitioning.rounds import RankPlan
from evenkeel.partitioning.samples import RankSamples
from evenkeel.partitioning.split_options import SplitOptions
from evenkeel.partitioning.splits import SplitSample
from trainer_client.balancing.agreement import Mode, Reason, Verdict
from trainer_client.balancing.batches import FlatBatch, Schema
from trainer_client.balancing.batches.shared import Said
from trainer_client.balancing.dividing import check_divides, divisible_samples
from trainer_client.balancing.peers import Twin
from trainer_client.balancing.positions import Plain
from trainer_client.balancing.report import RoundReport
from trainer_client.balancing.resume import Resumed
from trainer_client.balancing.speeds import Measured
from trainer_client.balancing.telling import NAMES
from trainer_client.balancing.tracing import RoundTrace

Cost = Callable[[Any], Any]
"""From a batch to one number for each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a round came to on this rank.

    Attributes:
        verdict: What all ranks do.
        plan: Which of the own samples go where, and in which batch of the window.
        reports: One per batch; as many as any rank has in the window. None after the end of a pass.
        template: An empty batch of the round's schema, for ranks without samples; None if no rank has had any batch.
        window: What states within the window tell of it; None where it is one batch.
    """

    verdict: Verdict
    plan: RankPlan
    reports: tuple[RoundReport, ...]
    template: FlatBatch | None
    window: Plain | None = None

    @classmethod
    def of_end(cls, verdict: Verdict) -> Outcome:
        """That of a round which does not take place, as its pass has ended."""
        return cls(verdict=verdict, plan=RankPlan(steps=None, slices=()), reports=(), template=None)

    @property
    def batches(self) -> Sequence[int]:
        """The batches of the window that are trained, in order."""
        return range(len(self.reports)) if self.verdict.batches is None else self.verdict.batches

    @property
    def ended(self) -> bool:
        """Whether the pass is over on all ranks."""
        return self.verdict.mode is Mode.END

    @property
    def report(self) -> RoundReport:
        """The report of the round's first batch."""
        return self.reports[0]

    def splits_in(self, batch: int) -> tuple[SplitSample, ...]:
        """The split samples of a batch, of all ranks."""
        return self.plan.splits[batch] if self.plan.splits else ()


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A submitted round.

    Attributes:
        round: Round number in its stream.
        pass_number: Which pass over the stream's batches it is of.
        samples: This rank's.
        flats: Its batches, flattened, until all of them have begun to move.
        schema: What they look like.
        exhausted: This rank's data has ended.
        drop_last: Whether a global batch with too few samples for all ranks is dropped.
        problem: Why the costs cannot be used; empty if they can.
        asked: The service was asked.
        twin: What the ranks that train the same batches must have submitted too; None without such ranks.
        resumed: From where this rank goes on in the pass that the round begins; None: from its beginning.
        deadline: Until when to wait for the service, `time.monotonic` seconds.
        shared: What the shared values of its first batch are; () without samples.
        started: Batches whose move has begun.
        future: Resolves to the outcome when all ranks have agreed.
        trace: The round's spans; None when it is not traced.
        measured: Where the times of its stream's batches are noted.
        unasked: Nobody has asked for its `splits`.
    """

    round: int
    pass_number: int
    samples: RankSamples
    flats: tuple[FlatBatch, ...]
    schema: Schema
    exhausted: bool
    drop_last: bool
    problem: str
    asked: bool
    deadline: float
    twin: Twin | None = None
    resumed: Resumed | None = None
    shared: Said = ()
    started: int = 0
    future: Future[Outcome] = field(default_factory=Future)
    trace: RoundTrace | None = None
    measured: Measured = field(default_factory=Measured)
    unasked: bool = True

    @property
    def report(self) -> RoundReport:
        """What balancing did for the batch, which has been redistributed; its `loss_scale` is that of the batch.

        Raises:
            RuntimeError: If it has not been, or the loops of all ranks were over.
        """
        outcome = self._known("report")
        if outcome.ended:
            raise RuntimeError("the loops of all ranks were over before this batch, of which there is no report")
        return outcome.report

    @property
    def splits(self) -> tuple[SplitSample, ...]:
        """Samples that lie on several ranks, those of all ranks; of a batch that has been redistributed."""
        self.unasked = False
        return self._known("splits").splits_in(0)

    def took(self, seconds: float) -> None:
        """Notes how long this rank's own computation of the batch took; see `BalancedLoader.took`."""
        self.measured.add(self.report.timed_load, seconds)

    def _known(self, what: str) -> Outcome:
        if not self.future.done():
            raise RuntimeError(f"{what} is known when the batch has been redistributed; ask for it after that")
        return self.future.result()

    def outcome(self, name: str, patience: float) -> Outcome:
        """What all ranks agreed on; waits for it.

        Args:
            name: The loader's name.
            patience: Seconds to wait at most.

        Raises:
            RuntimeError: If the process group failed, or what else ended the agreement.
            TimeoutError: If it did not come in time.
        """
        exposed = self.trace is not None and not self.future.done()
        since = time.time_ns() if exposed else 0
        try:
            return self.future.result(patience)
        except TimeoutError:
            if self.future.done():
                raise
            raise TimeoutError(
                f"{name}: the ranks did not agree on round {self.round} in time; a rank whose data has ended goes on "
                "with submit(None), and one that leaves its loop calls leave()"
            ) from None
        finally:
            if exposed and self.trace is not None:
                self.trace.part("exposed wait", since)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """This rank has left its loop.

    Attributes:
        pass_number: The pass.
        taken: Batches that the loop had got.
        out_of_turn: It took them in another order than it submitted them.
    """

    pass_number: int
    taken: int
    out_of_turn: bool


def nothing_to_do() -> Ticket:
    """The ticket of a loop that is over before it has begun, as no rank has had any batch."""
    nothing = RankSamples(costs=np.zeros(0, np.int64), lengths=np.zeros((0, 0), np.int64), sizes=np.zeros(0, np.int64))
    ticket = Ticket(
        round=0, pass_number=-1, samples=nothing, flats=(), schema=Schema(fields=()), exhausted=True, drop_last=False,
        problem="", asked=False, deadline=0.0,
    )  # fmt: skip
    ticket.future.set_result(Outcome.of_end(Verdict(mode=Mode.END, reason=Reason.NONE)))
    return ticket


def read_costs(
    values: Any, num_samples: int, *, what: str = "cost", world_size: int = 1
) -> tuple[NDArray[np.int64] | NDArray[np.float64], str]:
    """A user's costs as int64 or float64, and what is wrong with them.

    A cost is a prediction: a bad one must not end a run. The round then stays unbalanced on all ranks, with a warning.

    Args:
        values: Numbers of any integer or floating type: an array, a tensor on the host, a list.
        num_samples: Samples of the batch.
        what: What the numbers are, for messages.
        world_size: Ranks among which the sum of all costs is shared; it must stay below 2^62, to be exact.

    Returns:
        (n,) costs, zeros where there is a problem, and the problem (empty: none).

    Raises:
        ValueError: If there is not one number for each sample, or the numbers are on a device.
    """
    device = getattr(values, "device", None)
    if device is not None and getattr(device, "type", "cpu") != "cpu":
        raise ValueError(
            f"{what} returned a tensor on {device}; compute it from the host's batch, "
            "so that nothing waits for the device"
        )
    if isinstance(values, torch.Tensor):
        values = values.detach()
        if values.is_floating_point():
            values = values.double()  # numpy knows no bfloat16
    try:
        array: NDArray[Any] = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} returned {type(values).__name__}, which is no list of numbers ({error}); return a tensor or an "
            "array with one number for each sample"
        ) from None
    if array.shape != (num_samples,):
        raise ValueError(
            f"{what} returned shape {array.shape} for {num_samples} samples; return one number for each sample"
        )
    if array.dtype.kind in "biu":
        if array.dtype == np.uint64 and num_samples and int(array.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"{what} {int(array.max())} exceeds int64; use float64")
        array = array.astype(np.int64)
    elif array.dtype.kind == "f":
        array = array.astype(np.float64)
    elif num_samples == 0:
        array = np.zeros(0, dtype=np.int64)
    else:
        raise ValueError(f"{what} returned {array.dtype} values; return integers or floating-point numbers")
    bad = np.flatnonzero(~np.isfinite(array) | (array < 0))
    if len(bad):
        problem = (
            f"{what} of sample {bad[0]} is {array[bad[0]]}; all must be finite and at least 0 ({len(bad)} are not)"
        )
        return np.zeros(num_samples, dtype=np.int64), problem
    total, limit = float(array.sum(dtype=np.float64)), share_of_total(world_size)
    if total > limit:
        problem = f"{what} adds up to {total:.4g}; all of a rank's must stay below {limit:.4g}: use larger units"
        return np.zeros(num_samples, dtype=np.int64), problem
    return array, ""


def read_round(
    name: str,
    batches: Sequence[Any],
    flats: Sequence[FlatBatch],
    *,
    began: FlatBatch | None,
    cost: Cost,
    memory: Cost | None,
    caps: Sequence[float] | None,
    split: SplitOptions | None,
    shares: int,
) -> tuple[RankSamples, str]:
    """What a rank knows of its own samples of a round, and why its costs cannot be used (empty: they can).

    What all ranks' batches must have in common, the ranks check when they agree.

    Args:
        name: The loader's name.
        batches: The batches, on the host.
        flats: The same, flattened.
        began: What the stream began with, where a service reads the lengths of as many fields; None: none does.
        cost: From a batch to the predicted work of each sample.
        memory: From a batch to what each sample adds to the memory caps; None: its bytes.
        caps: The memory caps, if there are any.
        split: When samples are split; None: never.
        shares: Ranks times batches among which the sum of all costs is shared.

    Raises:
        ValueError: If there is not one number for each sample, the batches' fields differ, or samples are to be split
            and nothing says where.
    """
    _check_fields(name, flats, began)
    if split is not None:
        for flat in flats:
            check_divides(cost, flat)
    costs, memories, tables, problem, begin = [], [], [], "", 0
    for batch, flat in zip(batches, flats, strict=True):
        values, its_problem = read_costs(cost(batch), flat.num_samples, world_size=shares)
        flat.check_unchanged("cost")
        costs.append(values)
        problem = problem or its_problem
        if caps is not None:
            held, its_problem = (
                (flat.sizes, "")
                if memory is None
                else read_costs(memory(batch), flat.num_samples, what="memory", world_size=shares)
            )
            flat.check_unchanged("memory")
            memories.append(held.astype(np.float64))
            problem = problem or its_problem
        if split is not None and not problem and flat.num_samples:
            table = divisible_samples(
                cost, batch, flat, values, memory=memories[-1] if memories else None,
                largest_cap=max(caps) if caps is not None else float("inf"),
            )  # fmt: skip
            if table is not None:
                table[:, 0] += begin
                tables.append(table)
        begin += flat.num_samples
    # a batch without samples may be of other fields, as an empty list tells nothing of what it would hold
    lengths = [flat.lengths for flat in flats if flat.num_samples] or [(began or flats[0]).empty().lengths]
    first = next((flat for flat in flats if flat.num_samples), began or flats[0])
    samples = RankSamples(
        costs=_joined(costs),
        lengths=_joined(lengths),
        sizes=_joined([flat.sizes for flat in flats]),
        memory=_joined(memories) if memories else None,
        batch_sizes=tuple(flat.num_samples for flat in flats),
        divisible=_joined(tables) if tables and not problem else None,
        roles=None if split is None else roles_of(first),
    )
    return samples, problem


def roles_of(flat: FlatBatch) -> NDArray[np.int64] | None:
    """(jagged columns,) what each is to a sample in parts; None where no sequence is declared."""
    return np.array(flat.structure.roles, np.int64) if flat.structure.roles else None


def _check_fields(name: str, flats: Sequence[FlatBatch], began: FlatBatch | None) -> None:
    first = next((flat for flat in flats if flat.num_samples), flats[0])
    for flat in flats:
        if flat.num_samples and flat.schema is not first.schema and flat.schema.hash != first.schema.hash:
            raise ValueError(
                "batches of one window differ, so that their samples cannot change places: "
                f"{first.schema.diff(flat.schema, own='one', others='another')}; use window=1, or pad them alike"
            )
    if began is not None and first.num_samples and first.num_jagged != began.num_jagged:
        raise ValueError(
            f"{name!r} began with batches of other fields: "
            f"{began.schema.diff(first.schema, own='the first', others='this one')}; {NAMES}"
        )


def read_nothing(template: FlatBatch, cost_dtype: np.dtype[Any], *, capped: bool, splits: bool = False) -> RankSamples:
    """The round of a rank without samples.

    Args:
        template: An empty batch.
        cost_dtype: Of this rank's costs.
        capped: Whether there are memory caps.
        splits: Whether samples may be split.
    """
    return RankSamples(
        costs=np.zeros(0, dtype=cost_dtype),
        lengths=template.lengths,
        sizes=template.sizes,
        memory=np.zeros(0, dtype=np.float64) if capped else None,
        roles=roles_of(template) if splits else None,
    )


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
