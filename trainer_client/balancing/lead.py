"""The lead of a stream: rank 0 of the ranks that balance together makes directives of the contributions of all.

`begin` decides what a round does, as soon as all have contributed; `directives` ends it. Between the two the round goes
through stages (`stages.py`), whose state nobody else knows. A round that was under way when its pass ended is begun and
never ended: what ranks are to hear is put into directives when these are made.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.refinements import plan_round, slice_round
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan, RoundSamples
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.contribution import Contributions, schema_number
from trainer_client.balancing.decide import NAMES, Decision, Rules, decide, spread
from trainer_client.balancing.directive import END, Broadcast, pack_directives
from trainer_client.balancing.errors import ResumeError, SchemaMismatchError
from trainer_client.balancing.groups import Bytes
from trainer_client.balancing.kernels import Kernels
from trainer_client.balancing.report import Mode, Reason

logger = logging.getLogger(__name__)

_MOST_SCHEMAS = 64  # that are remembered; a stream's batches have one, or some widths of padding


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    """A round on its way through the stages."""

    number: int
    contributions: Contributions
    decision: Decision  # what all ranks do, as far as it is known
    options: RoundOptions  # how to plan it
    samples: RoundSamples | None = None  # of all ranks; None: the round does not take place
    template: FlatBatch | None = None  # of its batches; None: no rank has samples
    plain: bool = False  # it is planned by a plain heuristic, without kernels
    call: Any = None  # of the service, under way
    asked: float = 0.0  # when that began, `time.perf_counter` seconds
    reason: Reason = Reason.NO_SERVICE  # why the lead plans
    plan: RoundPlan | None = None
    step_seconds: float = 0.0  # median of a step's computation, for people to see
    broadcast: Broadcast = field(default_factory=Broadcast)

    def abandon(self) -> None:
        """It does not take place, as its pass is over: nobody waits for its plan."""
        if self.call is not None:
            self.call.cancel()


class Stage:
    """A capability of rounds. One that does nothing at one of the two moments leaves it out."""

    def begin(self, round_: Round) -> None:
        """All have contributed; in the order of the stages."""

    def finish(self, round_: Round) -> None:
        """The round is planned: in the reverse order, so stages before `Planning` come after it."""

    def want(self, number: int) -> None:
        """The lead's own loop waits for a round."""

    def close(self) -> None:
        """No more rounds come."""


class Templates:
    """Empty batches of the schemas of a stream's rounds.

    Attributes:
        sent: The one that all ranks have.
    """

    def __init__(self, name: str, first: FlatBatch) -> None:
        self.sent = first
        self._name = name  # the loader's
        self._by_number = {schema_number(first.schema): first}
        # of the first round with samples: what has none tells little of its fields
        self._first: FlatBatch | None = None

    def lines(self, number: int) -> Sequence[str]:
        """A readable line per field of a schema."""
        return self._by_number[number].schema.lines if number in self._by_number else ()

    def of_round(self, contributions: Contributions) -> FlatBatch | None:
        """The empty batch of a round, of the jagged fields that the stream began with; None: no rank has samples."""
        for extras in contributions.extras.values():
            if extras.template is not None:
                self._keep(extras.template)
        if not (number := contributions.schema):
            return None
        template = self._by_number[number]
        self._keep(template)
        self._first = template if self._first is None else self._first
        if template.structure.columns != self._first.structure.columns:
            difference = self._first.schema.diff(template.schema, own="the first", others="this one")
            raise SchemaMismatchError(f"{self._name!r} began with batches of other fields: {difference}; {NAMES}")
        return template

    def _keep(self, template: FlatBatch) -> None:
        """The latest is forgotten last: a rank that sends none means that of a round shortly before."""
        number = schema_number(template.schema)
        self._by_number.pop(number, None)
        self._by_number[number] = template
        if len(self._by_number) > _MOST_SCHEMAS:
            del self._by_number[next(iter(self._by_number))]


class Lead:
    """Makes rounds; `begin` and `directives` are called by one thread each, in the order of rounds."""

    def __init__(
        self,
        rules: Rules,
        options: RoundOptions,
        *,
        templates: Templates,
        nodes: Sequence[str],  # the hosts of the ranks
        stages: Sequence[Stage],
    ) -> None:
        self.world_size = len(nodes)
        self._rules, self._options, self._templates, self._stages = rules, options, templates, stages
        hosts = {host: number for number, host in enumerate(dict.fromkeys(nodes))}
        self._nodes = np.array([hosts[host] for host in nodes], np.int32) if len(hosts) > 1 else None

    def want(self, number: int) -> None:
        """The lead's own loop has come for the batches of a round: what is not planned by now is planned here."""
        for stage in self._stages:
            stage.want(number)

    def close(self) -> None:
        """Ends what is under way."""
        for stage in self._stages:
            stage.close()

    def begin(self, number: int, contributions: Contributions) -> Round:
        """Decides what a round does, and asks for its plan."""
        round_ = Round(
            number=number, contributions=contributions, decision=END, options=self._options,
            broadcast=Broadcast(world_size=self.world_size),
        )  # fmt: skip
        try:
            round_.decision = decision = decide(contributions, self._rules, number)
            if decision.error is None and decision.reason is not Reason.LEFT:
                if decision.mode is not Mode.END:
                    round_.samples = contributions.samples(self._nodes)
                round_.template = self._templates.of_round(contributions)
                for stage in self._stages:
                    stage.begin(round_)
        except Exception as error:  # of a cost's fit, say: all ranks hear of it, and nobody waits
            round_.decision, round_.samples = self._failed(number, error), None
        return round_

    def directives(self, round_: Round) -> Bytes:
        """(ranks, width) what all ranks are sent of a round."""
        broadcast, slices = round_.broadcast, None
        try:
            if round_.samples is not None:
                if round_.template is not None and round_.template is not self._templates.sent:
                    broadcast.template = round_.template
                for stage in reversed(self._stages):
                    stage.finish(round_)
                if round_.plan is not None:
                    slices = slice_round(round_.plan, round_.samples, compiled=not round_.plain)
            broadcast.decision = round_.decision
            table = pack_directives(broadcast, plan=round_.plan, slices=slices)
            self._templates.sent = broadcast.template or self._templates.sent
        except Exception as error:
            return pack_directives(Broadcast(decision=self._failed(round_.number, error), world_size=self.world_size))
        return table

    def _failed(self, number: int, error: Exception) -> Decision:
        if not isinstance(error, ResumeError | SchemaMismatchError):
            logger.error("%s: round %d could not be made", self._rules.name, number, exc_info=error)
            error = RuntimeError(f"the lead (rank 0) could not make a round: {type(error).__name__}: {error}")
        return Decision(mode=Mode.END, error=error)


class Planning(Stage):
    """Plans what no service has planned."""

    def __init__(self, name: str, kernels: Kernels | None) -> None:
        self._name, self._kernels = name, kernels
        self._unplanned = 0

    def finish(self, round_: Round) -> None:
        """Gives a round its plan; says why, where nothing is balanced that should be."""
        samples = round_.samples
        assert samples is not None
        if round_.plan is None and round_.decision.mode is Mode.EMBEDDED:
            self._plan(round_, samples)
        if round_.plan is None:  # samples stay, but for those that ranks with too few need
            least = round_.options.min_samples if round_.decision.mode is Mode.SPREAD else 0
            round_.options = replace(round_.options.spreading(), min_samples=least)
            round_.plan, round_.plain = replace(plan_round(samples, round_.options), seconds=0.0), True
        decision = round_.decision
        if decision.reason in (Reason.INVALID_COSTS, Reason.PARTITION_FAILED):
            self._say_unplanned(round_.number, decision)
        if decision.reason is Reason.INVALID_COSTS and decision.mode is Mode.IDENTITY:
            round_.plan = _without_loads(round_.plan, decision.ranks)

    def _plan(self, round_: Round, samples: RoundSamples) -> None:
        decision, alone = round_.decision, samples.num_ranks == 1
        if self._kernels is not None and not round_.plain:
            if self._kernels.ready:
                self._kernels = None
            else:
                round_.plain = True
        if alone:  # samples stay; an error where they exceed the memory cap
            round_.plain = True
        if round_.plain:
            round_.options = replace(round_.options, strategy="plain", split=None, stay=alone)
        try:
            round_.plan = plan_round(samples, round_.options)
        except PartitionError as error:
            stays = Decision(
                mode=Mode.IDENTITY, reason=Reason.PARTITION_FAILED, problem=str(error), batches=decision.batches,
                last=decision.last,
            )  # fmt: skip
            round_.decision = spread(stays, samples.batch_sizes, round_.options.min_samples)
            return
        if alone:
            round_.decision = replace(decision, mode=Mode.IDENTITY)
        else:
            round_.decision = replace(decision, reason=Reason.COMPILING if round_.plain else round_.reason)

    def _say_unplanned(self, number: int, decision: Decision) -> None:
        """Said of the first, second, fourth, eighth…, as it may be every round."""
        self._unplanned += 1
        if self._unplanned.bit_count() == 1:
            why = decision.problem
            if decision.reason is Reason.INVALID_COSTS:
                of = f"the costs of rank(s) {', '.join(map(str, decision.ranks))} cannot be used"
                why = f"{of}: {why}" if why else of
            text = "round %d of %s stays unbalanced (%d so far): %s"
            logger.warning(text, number, self._name, self._unplanned, why)


def _without_loads(plan: RoundPlan, ranks: Sequence[int]) -> RoundPlan:
    """The plan of a round in which the costs of some ranks are unknown, and so how even it is."""
    loads = plan.loads_before.copy()
    loads[:, list(ranks)] = np.nan
    figures = tuple(
        replace(
            one, mean_load=np.nan, max_load_before=np.nan, max_load_after=np.nan, imbalance_before=np.nan,
            imbalance_after=np.nan, lower_bound=np.nan,
        )
        for one in plan.batches
    )  # fmt: skip
    return replace(plan, loads_before=loads, loads_after=loads, batches=figures)
