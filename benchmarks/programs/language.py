"""Programs as values: what a user could have written, to be drawn, printed, shortened and run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

Kind = Literal["embedded", "off", "service", "faulty", "gone"]
Layout = Literal["plain", "nested", "dense", "jagged", "keyed", "flat", "parted"]
Source = Literal["list", "generator", "workers"]
Cost = Literal["square", "float", "bfloat16", "half", "zero", "list", "huge", "bad", "tokens"]
Leave = Literal["break", "raise", "keep"]
Use = Literal["look", "evaluate", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerPlan:
    """A `Balancer`.

    Attributes:
        kind: `faulty` is a service behind a relay that loses, holds, forges and cuts; at `gone` there is none.
        window, depth, counts, strategy: Its options.
        speeds: Whether the ranks' speeds differ.
        caps: Memory caps: none, some that can be met, some that a large sample does not, or some that nothing does.
        min_samples: That each rank trains at least.
        split: Samples may lie on several ranks; which part of one gets the tags, which are not cut. Empty: none may.
    """

    kind: Kind = "embedded"
    window: int = 1
    depth: int = 2
    counts: Literal["equal", "free"] = "equal"
    strategy: Literal["minimal_move", "karmarkar_karp", "lpt"] = "minimal_move"
    speeds: bool = False
    caps: Literal["none", "wide", "tight", "narrow"] = "none"
    min_samples: int = 0
    split: Literal["", "last", "first", "all"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """A `BalancedLoader` and the data in it.

    Attributes:
        balancer: Number of its balancer.
        name: The stream's name.
        layout: What a batch looks like.
        source: What the batches come from; `workers` is a `DataLoader` with worker processes.
        sizes: Samples of each batch of each rank.
        rotates: In the next epoch a rank gets what the rank after it had.
        fails: Which batch of each rank raises an error of the user's, in every epoch; None: none does.
        fails_in: Where it raises.
        changing: The rows of one field have another shape in every round.
        cost: What a sample costs.
        memory: Whether the loader has a memory function of its own.
        drop_last: Whether it drops global batches with too few samples; only without windows.
    """

    balancer: int = 0
    name: str = "train"
    layout: Layout = "plain"
    source: Source = "list"
    sizes: tuple[tuple[int, ...], ...] = ()
    rotates: bool = False
    fails: tuple[int | None, ...] = ()
    fails_in: Literal["source", "cost"] = "source"
    changing: bool = False
    cost: Cost = "square"
    memory: bool = False
    drop_last: bool = False

    def sizes_in(self, epoch: int, rank: int) -> tuple[int, ...]:
        """Samples of each of a rank's batches in an epoch."""
        return self.sizes[(rank + epoch) % len(self.sizes) if self.rotates else rank]

    def failure(self, epoch: int, rank: int) -> int | None:
        """Which of a rank's batches raises in an epoch, if it gets there."""
        at = self.fails[rank] if self.fails else None
        return at if at is not None and at < len(self.sizes_in(epoch, rank)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A model with tables and dense parameters.

    Attributes:
        wrap: What averages the gradients of the dense parameters; `hand` is an all-reduce in the program.
        optimizer: One for all parameters.
        routings: A table each.
        pooling: Of the tables.
        deduplicate: Whether distinct keys travel once.
    """

    wrap: Literal["hand", "ddp", "fsdp2"] = "hand"
    optimizer: Literal["sgd", "momentum", "adagrad", "adam", "rmsprop"] = "sgd"
    routings: tuple[str, ...] = ("roundrobin",)
    pooling: Literal["none", "sum", "mean"] = "sum"
    deduplicate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """`for batch in loader`.

    Attributes:
        loaders: One, or several that are zipped.
        stops: After how many batches each rank leaves, by rank of the data; None: never.
        leave: How: by `break`, by an error that is caught around the loop, or by keeping the iterator, unfinished
            (on all ranks at the same step, as it says nothing to the others).
        use: What is done with a batch; `train` and `evaluate` use the model.
        inner: Statements in the loop, each before the batch of a number is used.
    """

    loaders: tuple[int, ...]
    stops: tuple[int | None, ...] = ()
    leave: Leave = "break"
    use: Use = "look"
    inner: tuple[tuple[int, Statement], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manual:
    """A loop of `submit` and `redistribute`, so many batches apart.

    Attributes:
        loader: Whose data.
        lag: Batches between.
        until_none: Ranks without data left submit None until all get None; else they submit empty batches.
    """

    loader: int
    lag: int = 1
    until_none: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """`balancer.close()`; the next use opens it anew."""

    balancer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The balancer and its loaders are forgotten without `close`; the next use makes others of the same names."""

    balancer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The model and its optimizer are saved, made anew and loaded.

    Attributes:
        how: `checkpoint`: tables by `embedding.checkpoint`, the rest by its state; `state_dict`: everything by it.
    """

    how: Literal["checkpoint", "state_dict"] = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """A collective of the user's own."""


Statement = Loop | Manual | Close | Drop | Resume | Barrier


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that all ranks run.

    Attributes:
        seed: It was drawn from.
        ranks: How many processes.
        peers: How many ranks in a row train the same batches, as with tensor parallelism.
        balancers, loaders, model: What it has.
        statements: What it does, in order.
        closes: Whether it closes its balancers at the end.
    """

    seed: int
    ranks: int
    peers: int = 1
    balancers: tuple[BalancerPlan, ...] = ()
    loaders: tuple[LoaderPlan, ...] = ()
    model: ModelPlan | None = None
    statements: tuple[Statement, ...] = ()
    closes: bool = True

    @property
    def data_ranks(self) -> int:
        """Ranks with data of their own."""
        return self.ranks // self.peers

    def rounds(self, loader: int, *, manual: bool = False) -> list[int]:
        """Which of a loader's global batches are trained, in order."""
        plan = self.loaders[loader]
        found = []
        for number in range(max(map(len, plan.sizes), default=0)):
            sizes = [row[number] for row in plan.sizes if number < len(row)]
            enough = self.data_ranks * max(1, self.balancers[plan.balancer].min_samples)
            if plan.drop_last and not manual and sum(sizes) < enough:
                if len(sizes) < len(plan.sizes):
                    break
                continue
            found.append(number)
        return found

    def walk(self) -> Iterator[tuple[tuple[int, ...], Statement]]:
        """All statements with their places, outer before inner."""
        yield from _walk(self.statements, ())


def _walk(statements: Sequence[Statement], path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Statement]]:
    for number, statement in enumerate(statements):
        yield (*path, number), statement
        if isinstance(statement, Loop):
            yield from _walk([inner for _, inner in statement.inner], (*path, number))


def leaves_unevenly(statement: Statement) -> bool:
    """Whether ranks leave the loop after different numbers of batches."""
    return isinstance(statement, Loop) and len(set(statement.stops)) > 1


def listing(program: Program) -> str:
    """The program as text, near to the Python that it stands for."""
    lines = [f"# seed {program.seed}, {program.ranks} ranks"]
    if program.peers > 1:
        lines.append(f"mesh = init_device_mesh(device, ({program.data_ranks}, {program.peers}), ('dp', 'tp'))")
    lines += [f"balancer{i} = {_call(plan, 'Balancer')}" for i, plan in enumerate(program.balancers)]
    lines += [f"loader{i} = {_call(plan, 'Loader')}" for i, plan in enumerate(program.loaders)]
    if program.model is not None:
        lines.append(f"model = {_call(program.model, 'Model')}")
    lines += _lines(program.statements, 0)
    lines.append("close all" if program.closes else "# ends without close")
    return "\n".join(lines)


def _call(plan: Any, name: str) -> str:
    """The plan with what differs from its defaults."""
    shown = []
    for part in fields(plan):
        value = getattr(plan, part.name)
        if part.default is MISSING or value != part.default:
            shown.append(f"{part.name}={value!r}")
    return f"{name}({', '.join(shown)})"


def _lines(statements: Sequence[Statement], depth: int) -> list[str]:
    lines = []
    pad = "    " * depth
    for statement in statements:
        if not isinstance(statement, Loop):
            lines.append(f"{pad}{_call(statement, type(statement).__name__)}")
            continue
        names = ", ".join(f"loader{number}" for number in statement.loaders)
        lines.append(f"{pad}for batch in {names if len(statement.loaders) == 1 else f'zip({names})'}:")
        for step, inner in statement.inner:
            lines += [f"{pad}    if step == {step}:", *_lines([inner], depth + 2)]
        lines.append(f"{pad}    {statement.use}(batch)")
        if any(stop is not None for stop in statement.stops):
            how = {"break": "break", "raise": "raise UserError  # caught around the loop", "keep": "keep the iterator"}
            lines.append(f"{pad}    if step + 1 == {list(statement.stops)}[rank]: {how[statement.leave]}")
    return lines
