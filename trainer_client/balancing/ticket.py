"""A round in flight on one rank, as its loop sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evenkeel.partitioning.samples import RankSamples
from evenkeel.partitioning.splits import SplitSample
from trainer_client.balancing.batches import FlatBatch, Schema
from trainer_client.balancing.contribution import Contribution, State
from trainer_client.balancing.decide import Decision
from trainer_client.balancing.directive import Directive
from trainer_client.balancing.measured import Measured
from trainer_client.balancing.report import Mode, RoundReport
from trainer_client.balancing.rounds import Item


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A submitted round.

    Attributes:
        item: What this rank has contributed, and what becomes of it.
        flats: Its batches, flattened, until all of them have begun to move.
        schema: What they look like.
        started: Batches whose move has begun.
        measured: Where the times of its stream's batches are noted.
        unasked: Nobody has asked for its `splits`.
        seen: The loop has seen its directive.
    """

    item: Item
    flats: tuple[FlatBatch, ...]
    schema: Schema
    started: int = 0
    measured: Measured = field(default_factory=Measured)
    unasked: bool = True
    seen: bool = False

    @classmethod
    def of_nothing(cls) -> Ticket:
        """That of a loop which is over before it has begun, as no rank has had any batch."""
        item = Item(-1, Contribution(state=State.EXHAUSTED))
        item.future.set_result(Directive.of_end(Decision(mode=Mode.END)))
        return cls(item=item, flats=(), schema=Schema(fields=()))

    @property
    def samples(self) -> RankSamples:
        """This rank's."""
        return self.item.contribution.samples

    @property
    def exhausted(self) -> bool:
        """Whether this rank's data had ended."""
        return self.item.contribution.state is State.EXHAUSTED

    @property
    def report(self) -> RoundReport:
        """What balancing did for the batch, which has been redistributed; its `loss_scale` is that of the batch.

        Raises:
            RuntimeError: If it has not been, or the loops of all ranks were over.
        """
        directive = self._known("report")
        if directive.ended:
            raise RuntimeError("the loops of all ranks were over before this batch, of which there is no report")
        return directive.reports[0]

    @property
    def splits(self) -> tuple[SplitSample, ...]:
        """Samples that lie on several ranks, those of all ranks; of a batch that has been redistributed."""
        self.unasked = False
        return splits_in(self._known("splits"), 0)

    def took(self, seconds: float) -> None:
        """Notes how long this rank's own computation of the batch took; see `BalancedLoader.took`."""
        self.measured.add(self.report.timed_load, seconds)

    def _known(self, what: str) -> Directive:
        if not self.item.future.done():
            raise RuntimeError(f"{what} is known when the batch has been redistributed; ask for it after that")
        return self.item.future.result()


def batches_of(directive: Directive) -> Sequence[int]:
    """The batches of a round's window that are trained, in order."""
    batches = directive.decision.batches
    return range(len(directive.reports)) if batches is None else batches


def splits_in(directive: Directive, batch: int) -> tuple[SplitSample, ...]:
    """The split samples of a batch of a round, of all ranks."""
    return directive.plan.splits[batch] if directive.plan.splits else ()
