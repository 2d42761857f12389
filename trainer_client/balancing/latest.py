"""What a loop may ask of the batch that it was given last, and whether it asks at the right time."""

from __future__ import annotations

import logging
from functools import cache

from evenkeel.partitioning.splits import SplitSample
from trainer_client.balancing.report import RoundReport

logger = logging.getLogger(__name__)


class Latest:
    """The batch that a loop was given last."""

    def __init__(self, name: str) -> None:
        """Nothing yet, of the loader of this name."""
        self._name = name
        self._report: RoundReport | None = None
        self._splits: tuple[SplitSample, ...] = ()
        self._unasked = False  # nobody has asked for its splits
        self._given = self._asked = 0  # batches, and times that a scale was asked for, since scales were last asked for
        self._differ = False  # the scales of these batches
        self._warned = False

    def give(self, report: RoundReport, splits: tuple[SplitSample, ...]) -> None:
        """A batch is yielded."""
        if self._asked:
            self._given, self._asked, self._differ = 0, 0, False
        self._differ |= self._given > 0 and self._report is not None and self._report.loss_scale != report.loss_scale
        self._given += 1
        self._report, self._splits, self._unasked = report, splits, bool(splits)

    @property
    def report(self) -> RoundReport:
        """What balancing did for it."""
        if self._report is None:
            raise RuntimeError("no batch has been yielded yet; report tells about the latest batch")
        return self._report

    @property
    def splits(self) -> tuple[SplitSample, ...]:
        """Samples of it that lie on several ranks."""
        self._unasked = False
        return self._splits

    def weighed(self) -> RoundReport:
        """Its report, for its loss scale.

        Says so, once, where a loop fetches several batches and then asks once for each: it trains all but the last with
        the scale of another batch. Loops that skip batches, or ask several times for one, do not look like that.
        """
        report = self.report
        self._asked += 1
        if 1 < self._asked == self._given and self._differ and not self._warned:
            self._warned = True
            logger.error(
                "%s: the loss scale was asked for %d times after %d batches had been fetched: each time it was that of "
                "the last of them, %g, so gradients are wrong; who fetches batches ahead, as transformers' Trainer "
                "where it accumulates gradients, takes balanced_batches(loader), in which each batch brings its own "
                "scale (docs/train/loop.md)", self._name, self._asked, self._asked, report.loss_scale,
            )  # fmt: skip
        return report

    def leave(self) -> None:
        """The loop goes on to the next one."""
        if self._unasked:
            warn_of_unasked_splits(self._name)


class OfLatest:
    """What a loader tells of the batch that it yielded last."""

    _latest: Latest

    @property
    def report(self) -> RoundReport:
        """What balancing did for the batch that was yielded last."""
        return self._latest.report

    @property
    def splits(self) -> tuple[SplitSample, ...]:
        """Samples of the batch that was yielded last that lie on several ranks, those of all ranks; mostly none.

        See `BalanceOptions.split`, and `PieceGroup.pieces` of `trainer_client.attention`, which takes them.
        """
        return self._latest.splits

    @property
    def loss_scale(self) -> float:
        """World size over the samples of the global batch: the factor for a loss that is a sum over samples.

        It is that of the batch that was yielded last: what fetches batches ahead takes `balanced_batches(loader)`.
        """
        return self._latest.weighed().loss_scale

    @property
    def mean_loss_scale(self) -> float:
        """The factor for a loss that is a mean over this rank's samples; see `RoundReport.mean_loss_scale`."""
        return self._latest.weighed().mean_loss_scale


@cache
def warn_of_unasked_splits(name: str) -> None:
    """Once a process for each loader: a loop that does not ask for them trains every step so."""
    logger.warning(
        "%s: some samples of a batch lay on several ranks (BalanceOptions.split), but the loop went on to the next one "
        "without having asked for its splits: a model that takes pieces for whole samples computes other losses and "
        "gradients; give it PieceGroup.pieces(loader.splits), or leave split out, as for evaluation by a balancer of "
        "its own (docs/train/giants.md)", name,
    )  # fmt: skip
