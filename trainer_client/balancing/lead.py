"""The lead of a stream: what rank 0 of the ranks that balance together knows, and how it makes a round of it.

`begin` decides what a round does and asks the service for its plan; `finish` takes the service's answer, or plans here
when the lead's own loop comes for the batch first. Whatever is learned or broken stays here.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.api import evenness
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundPlan, plan_round, slice_round
from evenkeel.partitioning.samples import RoundSamples
from evenkeel.partitioning.slices import Slices
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, planned_speeds
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.contribution import Bytes, Contributions, schema_number
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.decide import Decision, Rules, decide, spread
from trainer_client.balancing.directive import NO_NOTES, Notes, Round, set_room
from trainer_client.balancing.errors import ResumeError
from trainer_client.balancing.kernels import Kernels
from trainer_client.balancing.learning import CostLearner, SpeedLearner
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.reading import roles_of
from trainer_client.balancing.report import Counters, Mode, Reason

if TYPE_CHECKING:  # which needs grpcio
    from trainer_client.balancing.asking import Asker, Call

logger = logging.getLogger(__name__)

GRACE = 2e-3
"""Seconds for which a wanted batch waits for an answer that is on its way, or as long as planning here takes."""
_MOST_SCHEMAS = 64  # that are remembered; a stream's batches have one, or some widths of padding
_ROOM = 1 << 10  # bytes that rooms of gathers and scatters are multiples of


@dataclass(slots=True, kw_only=True)
class Open:
    """A round that has begun.

    Attributes:
        number: Of the round.
        decision: What all ranks do, as far as the contributions tell.
        samples: Of all ranks; None where the round does not take place.
        options: How to plan it.
        call: Of the service; None: it is not asked.
        reason: Why not.
        notes: What the directives tell beside the plan.
        resumed: What a state keeps of the window that the ranks go on in; None: the window is new.
        room_up: Bytes of a contribution, from `depth` rounds later on.
    """

    number: int
    decision: Decision
    samples: RoundSamples | None = None
    options: RoundOptions
    call: Call | None = None
    reason: Reason = Reason.NO_SERVICE
    notes: Notes = NO_NOTES
    resumed: dict[str, object] | None = None
    room_up: int = 0


class Lead:
    """Makes rounds of contributions; `begin` and `finish` are called by one thread each, in the order of rounds."""

    def __init__(
        self,
        name: str,
        *,
        options: BalanceOptions,
        balance: bool,
        nodes: Sequence[str],
        template: FlatBatch,
        counters: Counters,
        asker: Callable[[Callable[[], None]], Asker] | None = None,
        kernels: Kernels | None = None,
        peers: NDArray[np.int64] | None = None,
        learns: Callable[[], LearnedCost | None] = lambda: None,
    ) -> None:
        """Knows nothing of any round yet.

        Args:
            name: The loader's.
            options: How to balance.
            balance: False: every sample stays at home.
            nodes: The host of each rank.
            template: An empty batch.
            counters: Of the stream.
            asker: Makes the way to the service, given what wakes the lead; None: there is no service.
            kernels: That plans need; None: nothing is planned.
            peers: (ranks, peers) the job's rank of each that trains copies; None: there are none.
            learns: The lead's own learned cost, if its loader has one.
        """
        self.world_size = len(nodes)
        self._name, self._options = name, options
        self._balance, self._counters, self._kernels, self._learns = balance, counters, kernels, learns
        order = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        self._nodes = np.array([order[node] for node in nodes], np.int32) if len(order) > 1 else None
        self._peers, self._roles = peers, roles_of(template) if options.split is not None else None
        self._speeds = SpeedLearner(name, nodes=nodes, speeds=options.speeds) if options.learn_speeds else None
        self._costs = CostLearner(name, self.world_size)
        self._templates: dict[int, FlatBatch] = {schema_number(template.schema): template}
        self._schema = schema_number(template.schema)
        self._changed = threading.Condition()
        self._wanted = -1
        self._asker = None if asker is None else asker(self._wake)
        self._grace = GRACE
        self._unplanned = 0
        self._by_lead = 0
        self._room_up = self._room_down = _ROOM

    @property
    def breaker_closed(self) -> bool:
        """Whether the service, if there is one, is asked in each round."""
        return self._asker is None or self._asker.breaker.closed

    def want(self, number: int) -> None:
        """The lead's own loop has come for the batches of a round: what is not planned by now is planned here."""
        with self._changed:
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends what is under way."""
        self.want(1 << 62)
        if self._asker is not None:
            self._asker.close()

    # ------------------------------------------------------------------ the beginning of a round

    def begin(self, number: int, said: Contributions) -> Open:
        """Decides what a round does, and asks for its plan."""
        try:
            return self._begin(number, said)
        except Exception as error:  # of a cost's fit, say: all ranks hear of it, and nobody waits
            logger.exception("%s: round %d could not be decided", self._name, number)
            options = self._options.of_rounds
            return Open(number=number, decision=_failed(error), options=options, room_up=self._room_up)

    def _begin(self, number: int, said: Contributions) -> Open:
        options = self._options
        count = max(1, int(said.headers["num_batches"].max()))
        rules = Rules(
            name=self._name, balance=self._balance, min_samples=options.min_samples,
            num_batches=count, peers=self._peers,
        )  # fmt: skip
        decision = decide(said, rules, {key: one.schema.lines for key, one in self._templates.items()})
        round_ = Open(number=number, decision=decision, options=options.of_rounds, room_up=self._up_room(said))
        if decision.error is not None or decision.reason is Reason.LEFT:
            return round_
        extras = said.with_extras()
        for one in extras.values():
            if one.template is not None:
                self._remember(one.template)
        fit_changed = False
        if self.world_size > 1:
            if self._speeds is not None:
                self._speeds.note(number, said.measured)
            fit_changed = self._costs.note(number, self._learns(), extras)
        round_.notes = Notes(
            learned=self._learned, template=self._new_template(said), fit=(self._costs.fit,) if fit_changed else None
        )
        if decision.mode is Mode.END:
            return round_
        if decision.reason is Reason.INVALID_COSTS:
            ranks = ", ".join(map(str, decision.ranks))
            self._say_unplanned(number, decision.problem or f"the costs of rank(s) {ranks} cannot be used")
        round_.samples = samples = replace(said.samples(count, self._nodes), roles=self._roles)
        resumed = extras[0].resumed if 0 in extras else None
        round_.resumed = None if resumed is None else resumed.window
        if decision.mode is Mode.SPREAD:
            round_.options = options.of_rounds.spreading()
        elif decision.mode is Mode.EMBEDDED and self.world_size == 1:
            round_.decision = self._alone(number, decision, samples)
        elif decision.mode is Mode.EMBEDDED:
            self._prepare(round_, samples)
        return round_

    @property
    def _learned(self) -> LearnedSpeeds:
        return ALL_EQUAL if self._speeds is None else self._speeds.learned

    def _prepare(self, round_: Open, samples: RoundSamples) -> None:
        """Chooses the speeds to plan with, and asks the service."""
        if round_.resumed is not None:  # by what the plan of before followed
            speeds: Sequence[float] = round_.resumed["speeds"]  # type: ignore[assignment]
            round_.options = replace(round_.options, speeds=tuple(speeds))
        elif learned := round_.notes.learned:
            homes = np.repeat(np.arange(self.world_size), samples.counts_at_home)
            loads = np.bincount(homes, samples.costs, self.world_size).tolist()
            planned = planned_speeds(round_.options.speeds, learned, loads, samples.num_batches)
            assert planned is not None
            round_.options = replace(round_.options, speeds=tuple(planned.tolist()))
        if self._asker is None or (round_.resumed is not None and round_.resumed["plain"]):
            return
        round_.call = self._asker.ask(
            round_.number, samples, round_.options, learned=round_.notes.learned, rounds_by_lead=self._by_lead,
            rounds_unbalanced=self._unplanned,
            step_seconds=0.0 if self._speeds is None else self._speeds.step_seconds,
        )  # fmt: skip
        round_.reason = Reason.NO_DECISION if round_.call is not None else Reason.NOT_ASKED

    def _alone(self, number: int, decision: Decision, samples: RoundSamples) -> Decision:
        """What one rank does: it keeps its samples, also where they exceed its memory cap."""
        caps, memory = self._options.memory_caps, samples.memory
        if caps is not None and memory is not None:
            steps = np.zeros(memory.size, np.int64) if samples.steps is None else samples.steps
            most = float(np.bincount(steps, memory, samples.num_batches).max(initial=0.0))
            if most > caps[0]:
                why = f"its batch takes {most:g} of memory, the cap of the only rank is {caps[0]:g}"
                self._say_unplanned(number, why)
                return replace(decision, mode=Mode.IDENTITY, reason=Reason.PARTITION_FAILED)
        return replace(decision, mode=Mode.IDENTITY)

    # ------------------------------------------------------------------ its end

    def directives(self, round_: Open) -> Bytes:
        """(ranks, width) what all ranks are sent of a round: of a plan, or of why there is none."""
        try:
            table = self.finish(round_).pack()
        except Exception as error:
            logger.exception("%s: round %d could not be planned", self._name, round_.number)
            table = Round(decision=_failed(error), world_size=self.world_size, room_up=round_.room_up).pack()
        self._room_down = _room(self._room_down, table.shape[1])
        set_room(table, self._room_down)
        return table

    def finish(self, round_: Open) -> Round:
        """Plans a round, or takes the service's plan, and cuts it for the ranks."""
        began = time.perf_counter()
        served = None if round_.call is None else self._answer(round_)
        waited = time.perf_counter() - began
        decision, samples = round_.decision, round_.samples
        if samples is None:
            return Round(
                decision=decision, world_size=self.world_size, notes=round_.notes, room_up=round_.room_up
            )  # fmt: skip
        plan, slices = served, None if served is None else slice_round(served, samples)
        if served is not None:
            decision = replace(decision, mode=Mode.SERVICE)
        elif decision.mode in (Mode.EMBEDDED, Mode.SPREAD):
            decision, plan, slices = self._plan(round_, decision, samples)
        if round_.resumed is not None and decision.error is None:
            decision = _checked(decision, round_.resumed, plan)
        if decision.mode is Mode.EMBEDDED:
            self._by_lead += 1
        if self._asker is not None:
            self._counters.breaker_changes = self._asker.changes
        return self._rounded(round_, decision, samples, plan, slices, waited)

    def _answer(self, round_: Open) -> RoundPlan | None:
        """The service's plan, if it comes before the lead's loop wants the batch, or just after."""
        call, asker = round_.call, self._asker
        assert call is not None
        assert asker is not None
        with self._changed:
            self._changed.wait_for(lambda: call.done or self._wanted >= round_.number)
            self._changed.wait_for(lambda: call.done, self._grace)
        plan, round_.reason = asker.answer(call)
        return plan

    def _plan(
        self, round_: Open, decision: Decision, samples: RoundSamples
    ) -> tuple[Decision, RoundPlan | None, Slices | None]:
        """The lead's own plan; where there is none, samples stay, as far as `min_samples` lets them."""
        began = time.perf_counter()
        plain = self._plainly(round_)
        options = replace(round_.options, strategy="plain", split=None) if plain else round_.options
        if decision.mode is Mode.EMBEDDED:
            try:
                plan = plan_round(samples, options)
            except PartitionError as error:
                self._say_unplanned(round_.number, str(error))
                stays = replace(decision, mode=Mode.IDENTITY, reason=Reason.PARTITION_FAILED)
                decision = spread(stays, samples.batch_sizes, self._options.min_samples)
                round_.options = options = options.spreading()
            else:
                slices = slice_round(plan, samples, compiled=not plain)
                if plain:
                    return replace(decision, reason=Reason.COMPILING), plan, slices
                self._grace = max(GRACE, time.perf_counter() - began)
                return replace(decision, reason=round_.reason), plan, slices
        if decision.mode is Mode.SPREAD:
            plan = plan_round(samples, options)
            return decision, plan, slice_round(plan, samples, compiled=not plain)
        return decision, None, None

    def _plainly(self, round_: Open) -> bool:
        """Whether to plan without kernels, which are being compiled; a resumed window is planned as it was before."""
        kernels = self._kernels
        if round_.resumed is not None and not round_.resumed["plain"]:
            if kernels is not None:
                kernels.wait()
            return False
        if round_.resumed is not None:
            return True
        return kernels is not None and not kernels.ready

    def _rounded(
        self,
        round_: Open,
        decision: Decision,
        samples: RoundSamples,
        plan: RoundPlan | None,
        slices: Slices | None,
        waited: float,
    ) -> Round:
        if plan is None:
            loads = _home_loads(samples)
            known = decision.reason is not Reason.INVALID_COSTS
            figures = _figures_as_loaded(
                loads if known else np.full_like(loads, np.nan), samples, round_.options.speeds
            )
            before = after = loads if known else _only_known(loads, decision.ranks)
        else:
            figures, before, after = plan.batches, plan.loads_before, plan.loads_after
        notes = round_.notes
        if plan is not None and plan.parts is not None:
            notes = replace(notes, pieces=plan.parts.pieces)
        if self._options.window > 1:
            window = {
                "size": self._options.window, "last": decision.last, "digest": digest_of(plan),
                "speeds": list(round_.options.speeds), "plain": decision.reason is Reason.COMPILING,
            }  # fmt: skip
            notes = replace(notes, window=window)
        return Round(
            decision=decision, world_size=self.world_size, figures=figures, home_loads=before, loads=after, plan=plan,
            slices=slices, wait_seconds=waited, notes=notes, room_up=round_.room_up,
        )  # fmt: skip

    # ------------------------------------------------------------------ small things

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _up_room(self, said: Contributions) -> int:
        """Bytes that contributions are given from now on: what the largest has needed, and some more."""
        self._room_up = _room(self._room_up, int(said.headers["size"].max()))
        return self._room_up

    def _remember(self, template: FlatBatch) -> None:
        if len(self._templates) >= _MOST_SCHEMAS:
            self._templates.pop(next(iter(self._templates)))
        self._templates[schema_number(template.schema)] = template

    def _new_template(self, said: Contributions) -> FlatBatch | None:
        """An empty batch of the round's schema, where it is another one than in the round before."""
        holders = np.flatnonzero(said.headers["num_samples"])
        if not holders.size or int(said.headers["schema"][holders[0]]) == self._schema:
            return None
        self._schema = int(said.headers["schema"][holders[0]])
        template = self._templates[self._schema]
        self._roles = roles_of(template) if self._options.split is not None else None
        return template

    def _say_unplanned(self, number: int, why: str) -> None:
        """Said of the first, second, fourth, eighth…, as it may be every round."""
        self._unplanned += 1
        if self._unplanned.bit_count() == 1:
            text = "round %d of %s stays unbalanced (%d so far): %s"
            logger.warning(text, number, self._name, self._unplanned, why)


def _failed(error: Exception) -> Decision:
    text = f"the lead (rank 0) could not make a round: {type(error).__name__}: {error}"
    return Decision(mode=Mode.END, error=RuntimeError(text))


def _room(room: int, needed: int) -> int:
    return room if needed <= room else -(-needed * 5 // 4 // _ROOM) * _ROOM


def digest_of(plan: RoundPlan | None) -> str:
    """Names a plan; empty: every sample stays where it was loaded."""
    if plan is None:
        return ""
    digest = hashlib.blake2b(plan.destinations.astype("<i4").tobytes(), digest_size=8)
    if plan.steps is not None:
        digest.update(plan.steps.astype("<i4").tobytes())
    if plan.parts is not None:
        digest.update(plan.parts.begins.astype("<i8").tobytes())
    return digest.hexdigest()


def _checked(decision: Decision, resumed: dict[str, object], plan: RoundPlan | None) -> Decision:
    """The decision for what is left of a window that was trained in part, if the plan is the one of before."""
    if digest_of(plan) != resumed["digest"]:
        error = ResumeError(
            "the window that the state was taken in is divided otherwise now; go on with the same data, costs, options "
            "and version of evenkeel, from a state between windows, or with load_state_dict(…, repeat_window=True), "
            "which trains the whole window again"
        )
        return Decision(mode=Mode.END, error=error)
    left: Sequence[int] = resumed["left"]  # type: ignore[assignment]
    return replace(decision, batches=tuple(left), last=bool(resumed["last"]), resumed=True)


def _home_loads(samples: RoundSamples) -> NDArray[np.float64]:
    """(batches, ranks) summed cost as loaded."""
    count, ranks = samples.num_batches, samples.num_ranks
    places = np.repeat(np.arange(ranks * count), samples.batch_sizes.ravel())
    loads = np.bincount(places, samples.costs, ranks * count).astype(np.float64, copy=False)
    return loads.reshape(ranks, count).T


def _only_known(loads: NDArray[np.float64], unknown: Sequence[int]) -> NDArray[np.float64]:
    known = loads.copy()
    known[:, list(unknown)] = np.nan
    return known


def _figures_as_loaded(
    loads: NDArray[np.float64], samples: RoundSamples, speeds: Sequence[float]
) -> tuple[Figures, ...]:
    """Those of batches that nobody has planned, with the bound of free counts, which holds for all counts."""
    figures, rates = [], np.array(speeds) if speeds else None
    places = np.zeros(len(samples.costs), np.int64) if samples.steps is None else samples.steps
    sizes = np.bincount(places, samples.moving_sizes, samples.num_batches)
    for batch, (row, size) in enumerate(zip(loads, sizes.tolist(), strict=True)):
        largest, even = evenness(row, rates)
        heaviest = float(samples.costs[places == batch].max(initial=0))
        mean = float(row.mean())
        total, fastest = (float(len(row)), 1.0) if rates is None else (float(rates.sum()), float(rates.max()))
        figures.append(
            Figures(
                mean_load=mean, max_load_before=largest, max_load_after=largest, imbalance_before=even,
                imbalance_after=even, lower_bound=max(mean * len(row) / total, heaviest / fastest),
                samples=int(samples.batch_sizes[:, batch].sum()), moved_samples=0, size=int(size), moved_size=0,
                moved_size_between_nodes=0,
            )
        )  # fmt: skip
    return tuple(figures)
