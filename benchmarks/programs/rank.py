"""One rank of the programs: a process that runs one after another, as told."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.programs import language as lang
from benchmarks.programs.data import (
    Source,
    UserError,
    build,
    build_parts,
    cost_of,
    counts_of,
    equal,
    ids_of,
    memory_of,
    parts_of,
    spec_of,
    split_id,
    width_at,
)
from benchmarks.programs.training import Training
from evenkeel.partitioning.splits import SplitSample
from trainer_client import BalancedLoader, BalanceOptions, Balancer, RoundReport, SplitOptions
from trainer_client.balancing import asking

GROUP_SECONDS = 12.0  # after which a collective fails
SERVICE_SECONDS = 20.0
FAULTY_SECONDS = 0.25
# How long a lead that wants a batch waits for an answer: long, so that it is the service's plans that are tested.
GRACE_SECONDS = {"service": 5.0, "faulty": 0.1}
MANUAL = -100  # at the end of a path: a loop of the program's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a program runs in.

    Attributes:
        job: A name that no other program has.
        addresses: Of the service, by kind of balancer.
        folder: Shared by the ranks, for checkpoints.
        device: Where batches are trained.
    """

    job: str
    addresses: dict[str, str]
    folder: Path
    device: str


@dataclass(slots=True, kw_only=True)
class Step:
    """A batch that a rank got.

    Attributes:
        path: The statement's place, and which of its loaders.
        loader, epoch, number: Which batch it was to be: of this loader, its iteration, and the number in it.
        ids: The samples, in order; of one that lies on several ranks, where its last part is.
        parts: Of those that do: sample, first item, and the one after the last.
        intact: Whether every field is that of these samples.
        mode, reason, samples: Of the report.
        use: What was done with it.
        loss, gradients: This rank's loss, and the averaged gradient of the dense part.
    """

    path: tuple[int, ...]
    loader: int
    epoch: int
    number: int
    ids: list[int]
    intact: bool
    mode: str
    reason: str
    samples: int
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    use: str = "look"
    loss: float = 0.0
    gradients: list[float] = field(default_factory=list)


class Runner:
    """Runs one program on one rank."""

    def __init__(self, program: lang.Program, rank: int, setting: Setting) -> None:
        self.program, self.rank, self.setting = program, rank // program.peers, setting
        self.device = torch.device(setting.device)
        self.steps: list[Step] = []
        self.training: Training | None = None
        self._balancers: dict[int, Balancer] = {}
        self._loaders: dict[int, BalancedLoader[Any]] = {}
        self._sources = {
            number: Source(plan, number, self.rank, program.balancers[plan.balancer].window)
            for number, plan in enumerate(program.loaders)
        }
        self._kept: list[tuple[set[int], Any]] = []
        self._costs = [cost_of(plan) for plan in program.loaders]
        self._mesh: Any = None  # made by `run`

    def run(self) -> dict[str, Any]:
        """Runs the program to its end; returns what this rank got."""
        if self.program.peers > 1:
            shape = (self.program.data_ranks, self.program.peers)
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp"))
        if self.program.model is not None:
            self.training = Training(self.program.model, self.device)
        for number, statement in enumerate(self.program.statements):
            self._run(statement, (number,))
        end = None if self.training is None else self.training.end()
        if self.program.closes:
            for balancer in self._balancers.values():
                balancer.close()
        self._kept.clear()
        self._loaders.clear()
        self._balancers.clear()
        return {"steps": self.steps, "end": end}

    def _run(self, statement: lang.Statement, path: tuple[int, ...]) -> None:
        match statement:
            case lang.Loop():
                self._loop(statement, path)
            case lang.Manual():
                self._manual(statement, path)
            case lang.Close(balancer=number):
                self._balancer(number).close()
            case lang.Drop(balancer=number):
                self._drop(number)
            case lang.Resume(how=how):
                assert self.training is not None
                self.training = self.training.resume(how, self.setting.folder / "-".join(map(str, path)))
            case lang.Barrier():
                dist.barrier()

    # ------------------------------------------------------------------ balancers and loaders

    def _balancer(self, number: int) -> Balancer:
        if number not in self._balancers:
            self._balancers[number] = self._make(number)
        return self._balancers[number]

    def _make(self, number: int) -> Balancer:
        plan, ranks = self.program.balancers[number], self.program.data_ranks
        options = BalanceOptions(
            window=plan.window, depth=plan.depth, counts=plan.counts,
            strategy=plan.strategy, min_samples=plan.min_samples,
            speeds=[1.0, 0.3, 2.5, 1.0][:ranks] if plan.speeds else None,
            memory_caps={"none": None, "wide": [1e6] * ranks, "tight": [36.0] * ranks, "narrow": [1.0] * ranks}[
                plan.caps
            ],
            split=SplitOptions(above=0.02, within=0.1, fixed=0.5) if plan.split else None,
            timeout=timedelta(seconds=SERVICE_SECONDS if plan.kind == "service" else FAULTY_SECONDS),
            group_timeout=timedelta(seconds=GROUP_SECONDS),
        )  # fmt: skip
        among = None if self._mesh is None else self._mesh["dp"]
        if plan.kind == "off":
            return Balancer.off(options=options, process_group=among)
        name = f"{self.setting.job}-{number}"
        if plan.kind == "embedded":
            return Balancer.embedded(job=name, options=options, process_group=among)
        return Balancer.connect(self.setting.addresses[plan.kind], job=name, options=options, process_group=among)

    def _loader(self, number: int) -> BalancedLoader[Any]:
        if number not in self._loaders:
            plan = self.program.loaders[number]
            self._loaders[number] = BalancedLoader(
                self._sources[number],
                self._balancer(plan.balancer),
                cost=self._costs[number],
                memory=memory_of if plan.memory else None,
                spec=spec_of(plan, self.program.balancers[plan.balancer]),
                device=None if self.device.type == "cpu" else self.device,
                name=plan.name,
                drop_last=plan.drop_last,
            )
        return self._loaders[number]

    def _drop(self, number: int) -> None:
        mine = {i for i, plan in enumerate(self.program.loaders) if plan.balancer == number}
        self._kept = [(loaders, kept) for loaders, kept in self._kept if not loaders & mine]
        for loader in mine:
            self._loaders.pop(loader, None)
        self._balancers.pop(number, None)
        gc.collect()

    # ------------------------------------------------------------------ loops

    def _loop(self, loop: lang.Loop, path: tuple[int, ...]) -> None:
        with contextlib.suppress(UserError):
            self._iterate(loop, path, [iter(self._loader(number)) for number in loop.loaders])

    def _iterate(self, loop: lang.Loop, path: tuple[int, ...], iterators: list[Iterator[Any]]) -> None:
        stop = loop.stops[self.rank] if loop.stops else None
        epochs: list[int] = []
        for number, batches in enumerate(zip(*iterators, strict=False)):
            reports = [self._loader(loader).report for loader in loop.loaders]
            scales = [self._loader(loader).loss_scale for loader in loop.loaders]
            splits = [self._loader(loader).splits for loader in loop.loaders]
            if not epochs:
                epochs = [self._sources[loader].epochs - 1 for loader in loop.loaders]
            for inner, (at, statement) in enumerate(loop.inner):
                if at == number:
                    self._run(statement, (*path, inner))
            for index, loader in enumerate(loop.loaders):
                step = self._note(
                    (*path, -1 - index), loader, epochs[index], number, batches[index], reports[index], splits[index]
                )
                self._use(loop.use, step, scales[index])
            if stop is not None and number + 1 >= stop:
                if loop.leave == "raise":
                    raise UserError
                if loop.leave == "keep":
                    self._kept.append((set(loop.loaders), iterators))
                return

    def _use(self, use: str, step: Step, scale: float) -> None:
        step.use = use
        if use == "look":
            return
        assert self.training is not None
        ids = torch.tensor(step.ids, dtype=torch.int64, device=self.device)
        if use == "train":
            step.loss, step.gradients = self.training.step(ids, scale)
        else:
            step.loss = self.training.evaluate(ids, scale)

    def _manual(self, manual: lang.Manual, path: tuple[int, ...]) -> None:
        plan = self.program.loaders[manual.loader]
        balancer, source = self._balancer(plan.balancer), self._sources[manual.loader]
        spec = spec_of(plan, self.program.balancers[plan.balancer])
        batches = iter(source)
        epoch = source.epochs - 1
        num_steps = max(len(plan.sizes_in(epoch, rank)) for rank in range(self.program.data_ranks))
        waiting: deque[Any] = deque()
        window = self.program.balancers[plan.balancer].window
        device = None if self.device.type == "cpu" else self.device
        for number in itertools.count():
            if manual.until_none or number < num_steps:
                nothing = torch.zeros(0, dtype=torch.int64)
                empty = None if manual.until_none else build(plan.layout, nothing, width_at(plan, number, window))
                batch = next(batches, empty)
                ticket = balancer.submit(batch, cost=self._costs[manual.loader], spec=spec, loader=plan.name)
                waiting.append((batch, ticket))
            if number >= manual.lag:
                if not waiting:
                    break
                batch, ticket = waiting.popleft()
                moved = balancer.redistribute(batch, ticket, spec=spec, device=device, loader=plan.name)
                if moved is None:
                    break
                report = ticket.report
                self._note((*path, MANUAL), manual.loader, epoch, number - manual.lag, moved, report, ticket.splits)

    def _note(
        self, path: tuple[int, ...], loader: int, epoch: int, number: int, batch: Any, report: RoundReport,
        splits: tuple[SplitSample, ...],
    ) -> Step:  # fmt: skip
        ids = ids_of(batch).cpu()
        plan = self.program.loaders[loader]
        rounds = self.program.rounds(loader, manual=path[-1] == MANUAL)
        home_step = split_id(int(ids[0]))[3] if len(ids) else rounds[number] if number < len(rounds) else number
        window = self.program.balancers[plan.balancer].window
        # Of a round of empty batches only, a rank without one cannot know the shape.
        is_known = report.samples > 0 or home_step < len(plan.sizes_in(epoch, self.rank))
        width = width_at(plan, home_step, window)
        told = {
            piece.sequence: (piece.begin, piece.end)
            for sample in splits
            for piece in sample.pieces
            if piece.rank == self.rank
        }
        parts: list[tuple[int, int, int]] = []
        if plan.layout == "parted":
            begins, ends = (each.cpu() for each in parts_of(batch))
            expected = build_parts(ids, begins, ends, self.program.balancers[plan.balancer].split, width)
            last = ends == counts_of(ids)
            cut = torch.nonzero((begins > 0) | ~last)[:, 0].tolist()
            parts = [(int(ids[row]), int(begins[row]), int(ends[row])) for row in cut]
            agrees = told == {row: part[1:] for row, part in zip(cut, parts, strict=True)}
            agrees = agrees and bool((ids.diff() > 0).all())  # all sequences are in order, and no two of one sample
            ids = ids[last]
        else:
            expected, agrees = build(plan.layout, ids, width), not told  # on the host, as it was: GPUs divide otherwise
        step = Step(
            path=path, loader=loader, epoch=epoch, number=number, ids=ids.tolist(), parts=parts,
            intact=not is_known or (equal(batch, expected) and agrees),
            mode=report.mode.value, reason=report.reason.value, samples=report.samples,
        )  # fmt: skip
        self.steps.append(step)
        return step


# ---------------------------------------------------------------------- the process


def serve(rank: int, end: Connection, port: int, backend: str, log: Path, stacks: Path) -> None:
    """Runs what comes through the pipe until it closes; a program that fails is the last."""
    os.setsid()  # what it starts ends with it
    with log.open("ab") as written:
        for number in (1, 2):
            os.dup2(written.fileno(), number)
    faulthandler.enable()
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with stacks.open("w") as file:
        while True:
            end.send("ready")
            try:
                number, program, setting = end.recv()
            except EOFError:
                os._exit(0)  # nothing of a program holds up the end
            faulthandler.dump_traceback_later(GROUP_SECONDS + 2.0, repeat=False, file=file)
            answer = _run_one(rank, program, setting, PrefixStore(str(number), store), backend)
            faulthandler.cancel_dump_traceback_later()
            end.send(answer)
            with contextlib.suppress(EOFError):
                end.recv()  # connections stay until the others are heard, and nothing of the next program comes early
                continue
            os._exit(0)


def _run_one(rank: int, program: lang.Program, setting: Setting, store: Store, backend: str) -> dict[str, Any]:
    asking.GRACE = max(GRACE_SECONDS.get(plan.kind, 0.002) for plan in program.balancers)
    try:
        on_gpu = backend == "nccl"
        if on_gpu:
            torch.cuda.set_device(torch.device(setting.device))
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=program.ranks,
            timeout=timedelta(seconds=GROUP_SECONDS),
            # Bound to a device, PyTorch 2.11 splits it for meshes, and crashes where a dimension has one rank.
            device_id=torch.device(setting.device) if on_gpu and program.peers == 1 else None,
        )  # fmt: skip
        answer = Runner(program, rank, setting).run()
        gc.collect()
        answer["leaked"] = _threads_left()
        dist.destroy_process_group()
    except BaseException as error:
        kind = type(error)
        return {
            "error": f"{kind.__module__}.{kind.__qualname__}",
            "message": str(error),
            "trace": traceback.format_exc(),
        }
    return answer


def _threads_left(patience: float = 8.0) -> list[str]:
    """Names of the library's threads that outlive their balancers."""
    deadline = time.monotonic() + patience
    while True:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("evenkeel")]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.01)
