"""Random programs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.programs.language import (
    BalancerPlan,
    Barrier,
    Close,
    Cost,
    Drop,
    Kind,
    Layout,
    LoaderPlan,
    Loop,
    Manual,
    ModelPlan,
    Program,
    Resume,
    Statement,
    Use,
)

MAX_STEPS = 6


_KINDS: dict[Kind, int] = {"embedded": 45, "off": 8, "service": 25, "faulty": 12, "gone": 10}
_COSTS: dict[Cost, int] = {"square": 35, "float": 20, "tokens": 15, "zero": 7, "list": 5, "bfloat16": 5, "half": 3}
_COSTS |= {"huge": 5, "bad": 5}
_STATEMENTS = {"loop": 60, "zip": 6, "manual": 10, "close": 7, "drop": 7, "resume": 6, "barrier": 4}


def draw(seed: int, ranks: tuple[int, int]) -> Program:
    """The program of a seed, for so many ranks at least and at most."""
    return _Draw(random.Random(seed), ranks).program(seed)


class _Draw:
    def __init__(self, rng: random.Random, ranks: tuple[int, int]) -> None:
        self.rng = rng
        self.processes = rng.randint(*ranks)
        self.peers = 2 if self.processes % 2 == 0 and rng.random() < 0.15 else 1
        self.ranks = self.processes // self.peers  # with data of their own

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def weigh(self, shares: Mapping[Any, int]) -> Any:
        """One of the keys, as likely as its share."""
        return self.rng.choices(list(shares), list(shares.values()))[0]

    def program(self, seed: int) -> Program:
        balancers = tuple(self.balancer() for _ in range(self.weigh({1: 70, 2: 25, 3: 5})))
        loaders: list[LoaderPlan] = []
        for number in range(self.weigh({1: 45, 2: 40, 3: 15})):
            loaders.append(self.loader(number, loaders, balancers))
        model = self.model() if self.peers == 1 and self.chance(0.4) else None
        statements = self.statements(loaders, len(balancers), model)
        return Program(
            seed=seed, ranks=self.processes, peers=self.peers, balancers=balancers, loaders=tuple(loaders), model=model,
            statements=statements, closes=self.chance(0.7),
        )  # fmt: skip

    def balancer(self) -> BalancerPlan:
        return BalancerPlan(
            kind=self.weigh(_KINDS),
            window=self.weigh({1: 70, 2: 20, 3: 10}),
            depth=self.weigh({1: 20, 2: 55, 3: 15, 5: 10}),
            counts="free" if self.chance(0.3) else "equal",
            strategy=self.weigh({"minimal_move": 80, "karmarkar_karp": 10, "lpt": 10}),
            speeds=self.chance(0.15),
            caps=self.weigh({"none": 84, "wide": 8, "tight": 4, "narrow": 4}),
            min_samples=self.weigh({0: 75, 1: 20, 2: 5}),
            split=self.weigh({"": 75, "last": 13, "first": 6, "all": 6}),
        )

    def loader(self, number: int, others: Sequence[LoaderPlan], balancers: Sequence[BalancerPlan]) -> LoaderPlan:
        rng = self.rng
        layouts: list[Layout] = ["plain", "nested", "dense", "flat", "parted", "jagged", "keyed"]
        plan = LoaderPlan(
            balancer=rng.randrange(len(balancers)),
            name=f"loader{number}",
            layout=rng.choice(layouts),
            source=self.weigh({"list": 55, "generator": 35, "workers": 10}),
            sizes=self.sizes(),
            rotates=self.chance(0.3),
            changing=self.chance(0.15),
            cost=self.weigh(_COSTS),
            memory=self.chance(0.2),
        )
        if balancers[plan.balancer].window == 1 and self.chance(0.15):
            plan = replace(plan, drop_last=True)
        if self.chance(0.08):
            at = rng.randrange(MAX_STEPS)
            plan = replace(
                plan,
                fails=tuple(rng.choice([at, at, None, at + 1]) for _ in range(self.ranks)),
                fails_in=rng.choice(["source", "cost"]),
                source="generator",  # the others read everything as they begin
            )
        if others and self.chance(0.12):  # the same stream, mostly of like batches
            other = rng.choice(others)
            layout = other.layout if self.chance(0.7) else plan.layout
            plan = replace(
                plan,
                balancer=other.balancer,
                name=other.name,
                layout=layout,
                changing=other.changing,
                drop_last=other.drop_last,
            )
        if balancers[plan.balancer].split:  # which asks for a sequence, and what its positions cost
            tight = balancers[plan.balancer].caps == "tight"
            plan = replace(plan, layout="parted", cost="tokens", fails_in="source", memory=plan.memory or tight)
        return plan

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Samples of each batch of each rank."""
        rng = self.rng
        most = rng.choice([2, 4, 6])
        num_steps = rng.choices(range(MAX_STEPS + 1), [2, 8, 15, 20, 20, 20, 15])[0]
        style = self.weigh({"even": 30, "uneven": 40, "sparse": 15, "one": 12, "empty": 3})
        rows = []
        for rank in range(self.ranks):
            match style:
                case "even":
                    row = [most] * num_steps
                case "uneven":
                    row = [rng.randint(0, most) for _ in range(rng.randint(0, num_steps))]
                case "sparse":
                    row = [rng.choice([0, 0, 0, 1]) for _ in range(num_steps)]
                case "one":
                    row = [rng.randint(1, most) for _ in range(num_steps if rank == 0 else 0)]
                case _:
                    row = []
            rows.append(tuple(row))
        return tuple(rows)

    def model(self) -> ModelPlan:
        rng = self.rng
        modes = ["continuous", "roundrobin", "hash_roundrobin"]
        return ModelPlan(
            wrap=self.weigh({"hand": 30, "ddp": 40, "fsdp2": 30}),
            optimizer=rng.choice(["sgd", "momentum", "adagrad", "adam", "rmsprop"]),
            routings=tuple(rng.choice(modes) for _ in range(rng.randint(1, 3))),
            pooling=rng.choice(["none", "sum", "mean"]),
            deduplicate=self.chance(0.4),
        )

    # ------------------------------------------------------------------ statements

    def statements(
        self, loaders: Sequence[LoaderPlan], num_balancers: int, model: ModelPlan | None
    ) -> tuple[Statement, ...]:
        rng = self.rng
        found: list[Statement] = []
        uneven = self.chance(0.3)  # ranks may leave loops at different steps in this program
        for _ in range(rng.randint(1, 5)):
            match self.weigh(_STATEMENTS):
                case "loop":
                    found.append(self.loop((rng.randrange(len(loaders)),), loaders, model, uneven=uneven))
                    if self.chance(0.35):
                        found.append(found[-1])  # another epoch
                case "zip" if len(loaders) > 1:
                    # One that fails comes last: else ranks whose other loader has gone on are in different loops.
                    first, second = sorted(rng.sample(range(len(loaders)), 2), key=lambda one: bool(loaders[one].fails))
                    if not (loaders[first].fails or _same_stream(loaders[first], loaders[second])):
                        found.append(self.loop((first, second), loaders, model, uneven=uneven, inner=False))
                case "manual":
                    number = rng.randrange(len(loaders))
                    if not loaders[number].fails:
                        found.append(Manual(loader=number, lag=rng.choice([0, 1, 1, 2]), until_none=self.chance(0.4)))
                case "close":
                    found.append(Close(balancer=rng.randrange(num_balancers)))
                case "drop":
                    found.append(Drop(balancer=rng.randrange(num_balancers)))
                case "resume" if model is not None:
                    found.append(Resume(how=rng.choice(["checkpoint", "checkpoint", "state_dict"])))
                case "barrier":
                    found.append(Barrier())
        if not any(isinstance(statement, Loop | Manual) for statement in found):
            found.append(self.loop((rng.randrange(len(loaders)),), loaders, model, uneven=uneven))
        return tuple(found)

    def loop(
        self,
        numbers: tuple[int, ...],
        loaders: Sequence[LoaderPlan],
        model: ModelPlan | None,
        *,
        uneven: bool,
        inner: bool = True,
    ) -> Loop:
        rng = self.rng
        use: Use = "look"
        if model is not None and not any(loaders[number].fails for number in numbers):
            use = self.weigh({"look": 20, "evaluate": 20, "train": 60})
        stops: tuple[int | None, ...] = ()
        if self.chance(0.45):
            at = rng.randint(1, MAX_STEPS - 1)
            stops = (at,) * self.ranks
            if uneven and use == "look":  # the model's own collectives need the same steps on all ranks
                stops = tuple(rng.choice([at, at, at + 1, max(1, at - 1), at + 3, None]) for _ in range(self.ranks))
        nested: list[tuple[int, Statement]] = []
        # What is nested must be reached by all ranks, as it meets them all.
        inner = inner and len(loaders) > 1 and not any(loaders[number].fails for number in numbers)
        while inner and self.chance(0.25) and len(nested) < 2:
            most = min((stop for stop in stops if stop is not None), default=MAX_STEPS)
            other = rng.randrange(len(loaders))
            if not _same_stream(loaders[other], loaders[numbers[0]]):
                found = self.loop((other,), loaders, model, uneven=uneven, inner=False)
                nested.append((rng.randrange(most), found))
        leaves = {"break": 60, "raise": 25} | ({"keep": 15} if len(set(stops)) < 2 else {})
        return Loop(
            loaders=numbers, stops=stops, leave=self.weigh(leaves),
            use=use, inner=tuple(sorted(nested, key=lambda one: one[0])),
        )  # fmt: skip


def _same_stream(one: LoaderPlan, other: LoaderPlan) -> bool:
    return (one.balancer, one.name) == (other.balancer, other.name)
