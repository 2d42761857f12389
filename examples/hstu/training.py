"""A training loop: DDP, mixed precision, balancing, and measurement on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from examples.datasets import SequenceBatch
from examples.hstu.balance_log import BalanceLogger
from examples.hstu.budget import ActivationBudget
from examples.hstu.embeddings import Storage, make_embeddings, shard_by_torchrec
from examples.hstu.flops import AttentionWork
from examples.hstu.model import ModelOptions, Ranker, loss_of
from examples.hstu.perf import ModulePerf, PerfTracker
from trainer_client.attention import PieceGroup, Pieces, SplitSample
from trainer_client.balancing import BalancedLoader, Balancer, RoundReport
from trainer_client.balancing.costs import FitOptions, LearnedCost, SequenceTerms
from trainer_client.balancing.costs.base import Cost
from trainer_client.embedding.routing import DistType
from trainer_client.observing.measurement import StepTimer, StepTimes


@dataclass(slots=True, kw_only=True)
class Run:
    """What one rank saw of a run.

    Attributes:
        times: Phases of each step.
        reports: What balancing did in each step.
        tokens: Tokens that this rank trained in each step.
        flops: FLOPs of the layers for what this rank trained in each step.
        losses: (steps,) loss per sample of each step over all ranks.
        samples: Of each step the numbers of the samples that this rank trained, as `SequenceBatch.sample` has them.
        perf: Measured modules, if any.
        peak_bytes: Most device memory in use; 0 on CPUs.
        exposed_seconds: Waits of the training thread for the ranks' agreement.
    """

    times: list[StepTimes] = field(default_factory=list)
    reports: list[RoundReport] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    losses: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    samples: list[torch.Tensor] = field(default_factory=list)
    perf: list[ModulePerf] = field(default_factory=list)
    peak_bytes: int = 0
    exposed_seconds: float = 0.0


class Trainer:
    """A model on one rank, its optimizer, and steps over balanced batches."""

    def __init__(
        self,
        options: ModelOptions,
        device: torch.device,
        *,
        learning_rate: float = 1e-3,
        bf16: bool = True,
        track_layers: bool = False,
        seed: int = 0,
        storage: Storage = "local",
        dist_type: DistType = "continuous",
        plan_file: Path | None = None,
        activation_budget: int | None = None,
        split: bool = False,
    ) -> None:
        """Builds the model, the same on all ranks.

        Args:
            options: The model's shape.
            device: Of this rank.
            learning_rate: Of Adam.
            bf16: Mixed precision on GPUs.
            track_layers: Whether to measure each layer; takes time of the host.
            seed: Of the weights.
            storage: Where the item table lives.
            dist_type: Which rank owns an item, for sharded tables.
            plan_file: Placement of the tables, for TorchRec.
            activation_budget: Bytes that a step may keep for its backward pass; more is a `MemoryError`. Counting
                takes time of the host. Default: as much as there is.
            split: Samples may be in parts on several ranks, as the balancer's options say. Then it is collective.
        """
        torch.manual_seed(seed)
        self.options = options
        self.device = device
        self._pieces = PieceGroup() if split else None
        self._learning_rate = learning_rate
        embeddings = make_embeddings(
            options, storage, dist_type=dist_type, device=device, learning_rate=learning_rate, seed=seed
        )
        bare = Ranker(options, embeddings)
        if storage == "torchrec":
            self.model = shard_by_torchrec(bare, device, plan_file)
        else:
            self.model = _data_parallel(bare.to(device), device)
        self._initial = {name: value.clone() for name, value in bare.state_dict().items()} if storage == "local" else {}
        self._bare = bare
        self._storage = storage
        self._bf16 = bf16 and device.type == "cuda"
        self.track_layers = track_layers
        self.budget = None if activation_budget is None else ActivationBudget(activation_budget)
        self.optimizer = self._make_optimizer()

    def reset(self) -> None:
        """The initial weights and a fresh optimizer; for whole tables on each rank only."""
        if not self._initial:
            raise ValueError("the weights of sharded tables are not kept; make a new Trainer")
        self._bare.load_state_dict(self._initial)
        self.optimizer = self._make_optimizer()

    def state(self) -> dict[str, Any]:
        """A copy of weights and optimizer in the host's memory; for whole tables on each rank only."""
        if not self._initial:
            raise ValueError("the weights of sharded tables are not copied; save a checkpoint")
        held = {"model": self._bare.state_dict(), "optimizer": self.optimizer.state_dict()}
        state: dict[str, Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), held)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.dense_parameters(), lr=self._learning_rate, fused=self.device.type == "cuda")

    def dense_parameters(self) -> list[nn.Parameter]:
        """Parameters without an optimizer of their own: all but tables sharded by TorchRec."""
        # A sharded table's parameter is trained inside the backward pass and gets no gradient.
        return [
            parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and not (self._storage == "torchrec" and ".sharded." in f".{name}.")
        ]

    def run(
        self,
        batches: Iterable[SequenceBatch],
        balancer: Balancer,
        *,
        name: str = "train",
        log: BalanceLogger | None = None,
        cost: Cost | None = None,
    ) -> Run:
        """Trains on all batches of all ranks.

        Args:
            batches: This rank's.
            balancer: Its memory caps, if any, count tokens.
            name: Of the stream of batches.
            log: What balancing did, by step.
            cost: Of each sample; default: the model's FLOPs.
        """
        loader = BalancedLoader(
            batches,
            balancer,
            cost=cost or self.options.cost(),
            memory=self.options.tokens(),
            spec=SequenceBatch.spec(),
            device=self.device,
            name=name,
        )
        run = Run()
        sums: list[torch.Tensor] = []
        counts: list[tuple[torch.Tensor, torch.Tensor, Pieces | None]] = []  # on the device, read after the last step
        tracker = None
        self._bare.layers_apart = self.track_layers
        if self.track_layers:
            work = AttentionWork(
                num_heads=self.options.num_heads,
                head_dim=self.options.head_dim,
                weights=5 * self.options.width * self.options.num_heads * self.options.head_dim,
                candidates="num_candidates",
            )
            works = {f"*layers.{number}": work for number in range(self.options.num_layers)}
            tracker = PerfTracker(self.model, works, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            torch.cuda.synchronize(self.device)
        timer = StepTimer(self.device, loader=loader if isinstance(cost, LearnedCost) else None)
        timer.watch(self.dense_parameters())
        for batch in loader:
            timer.batch_ready()
            pieces = self.pieces(loader.splits)
            sums.append(self._step(batch, loader.loss_scale, timer, pieces))
            timer.end_step()
            run.reports.append(loader.report)
            run.tokens.append(self._count_tokens(batch, pieces))
            counts.append((batch.num_history, batch.num_candidates, pieces))
            run.samples.append(batch.sample)
            finished = timer.finished()
            run.times += finished
            if tracker is not None:
                tracker.step()
                run.perf += tracker.finished()
            _log(log, run, finished)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            run.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        finished = timer.finished()
        run.times += finished
        _log(log, run, finished)
        timer.close()
        if tracker is not None:
            run.perf += tracker.finished()
            tracker.close()
        run.losses = _mean_losses(sums, run.reports)
        run.samples = [numbers.cpu() for numbers in run.samples]
        run.flops = [self._flops(*step) for step in counts]
        run.exposed_seconds = loader.counters.exposed_seconds
        return run

    @torch.no_grad()
    def predict(self, batch: SequenceBatch) -> torch.Tensor:
        """(Σ candidates,) logits, float32 on this rank's device; all ranks call it together if tables are sharded."""
        with self._mixed():
            logits: torch.Tensor = self.model(batch.to(self.device))
        return logits.float()

    def learned_cost(self, options: FitOptions | None = None, *, prior: Cost | None = None) -> LearnedCost:
        """A cost that is learned from the times of steps, and is at first another one, by default the FLOPs."""
        history = ("num_history", "num_history") if self.options.interleaved else "num_history"
        terms = SequenceTerms(history=history, candidates="num_candidates", context=self.options.num_context)
        return LearnedCost(terms, prior=prior or self.options.cost(), options=options)

    def pieces(self, splits: Sequence[SplitSample]) -> Pieces | None:
        """This rank's pieces of a step's split samples; None without any."""
        # Contextual positions are causal here, as all of the sequence is.
        return None if self._pieces is None else self._pieces.pieces(splits, contextual=False)

    def _step(
        self, batch: SequenceBatch, loss_scale: float, timer: StepTimer, pieces: Pieces | None = None
    ) -> torch.Tensor:
        with self._mixed(), self.budget or nullcontext():
            logits = self.model(batch) if pieces is None else self.model(batch, pieces)
            loss = loss_of(logits, batch)
        self.optimizer.zero_grad(set_to_none=True)
        (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
        timer.gradients_ready()
        self.optimizer.step()
        return loss.detach()

    def _mixed(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self._bf16 else nullcontext()

    def _count_tokens(self, batch: SequenceBatch, pieces: Pieces | None) -> int:
        """Known from the shapes; nothing is read from the device."""
        stride = 2 if self.options.interleaved else 1
        context = batch.context.numel()
        if pieces is not None:
            context = self.options.num_context * len(pieces.beginnings(batch.size))
        return context + stride * batch.history.shape[0] + batch.candidates.shape[0]

    def _flops(self, num_history: torch.Tensor, num_candidates: torch.Tensor, pieces: Pieces | None) -> float:
        stride, context = 2 if self.options.interleaved else 1, self.options.num_context
        history, candidates = (count.cpu().numpy().astype(np.float64) for count in (num_history, num_candidates))
        cost = self.options.cost()
        flops = cost.flops(stride * history, candidates, float(context))
        if pieces is None:
            return float(flops.sum())
        whole, own = pieces.own  # of each piece here, the sample that it is of
        for sample, piece in zip(whole, own, strict=True):
            items = (len(sample) - context - sample.num_candidates) // stride
            spans = cost.spans(
                {"num_history": torch.tensor([items]), "num_candidates": torch.tensor([sample.num_candidates])}
            )
            flops[piece.sequence] = spans.of_spans(piece.begin, piece.end)[0]
        return float(flops.sum())


def _data_parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """DDP over all ranks; it leaves routed tables to their ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def _log(log: BalanceLogger | None, run: Run, finished: list[StepTimes]) -> None:
    """Steps are logged when their times are known, some steps later on GPUs."""
    if log is not None:
        for times in finished:
            log.log(times.step, run.reports[times.step], step_ms=times.total)


def _mean_losses(sums: list[torch.Tensor], reports: list[RoundReport]) -> torch.Tensor:
    """(steps,) loss per sample over all ranks."""
    if not sums:
        return torch.zeros(0)
    totals = torch.stack(sums).double()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(totals)
    samples = torch.tensor([max(report.samples, 1) for report in reports], dtype=torch.float64)
    return totals.cpu() / samples
