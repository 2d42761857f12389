"""A rank of the benchmark of giants: its trainer and balancers, and steps that are timed."""

from __future__ import annotations

import argparse
import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.giants_gpu_data import TimedCost
from evenkeel.partitioning.splits import STEP_SECONDS, SplitSample
from examples.datasets import SequenceBatch
from examples.hstu.attention import Attention, choose_kernel
from examples.hstu.model import ModelOptions
from examples.hstu.training import Trainer
from trainer_client.balancing import BalancedLoader, BalanceOptions, Balancer, SplitOptions
from trainer_client.observing.measurement import StepTimer

EXCHANGE_RATE = 130e9  # bytes a second and rank, as steps saw it on two H200 (`benchmarks.giants_prices`)
WINDOW = 8
LONGEST = 131_072 + 64


class Bench:
    """The model on this rank, and what has been measured."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        """Builds the model; collective."""
        self.options, self.device = options, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.scale = 128 if options.quick else 1
        self.results: dict[str, Any] = {}
        self._began = time.monotonic()
        self._balancers: dict[str, Balancer] = {}
        self.model = self._model_options("softmax")
        self.trainer = Trainer(self.model, device, learning_rate=1e-4, split=True)
        self.cost: TimedCost | None = None

    def _model_options(self, attention: Attention) -> ModelOptions:
        size: dict[str, Any] = {"max_tokens": LONGEST}
        if self.options.quick:
            size = {"num_layers": 2, "width": 32, "num_heads": 2, "head_dim": 16, "max_tokens": 8192, "num_items": 500}
        kernel = choose_kernel("auto", self.device, 1, attention=attention, split=True)
        return ModelOptions(kernel=kernel, compile=self.device.type == "cuda", **size)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def has_time(self) -> bool:
        """Whether something more may begin, on all ranks alike."""
        answer = [self.seconds < self.options.seconds]
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        return bool(answer[0])

    def say(self, text: str) -> None:
        """To the console, by rank 0."""
        if self.rank == 0:
            print(f"[{self.seconds:5.0f} s] {text}", flush=True)

    def part(self, name: str, run: Callable[[Bench], Any]) -> None:
        """Runs a part, unless time is over; what it raises is noted, and the next part runs."""
        if not self.has_time():
            self.results.setdefault("left_out", []).append(name)
            self.write()
            return
        self.say(name)
        found, error = None, ""
        try:
            found = run(self)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
            traceback.print_exc()
        errors = self.gather(error)
        if found is not None and not any(errors):
            self.results[name] = found
        if any(errors):
            self.results.setdefault("errors", {})[name] = errors
        self.write()

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def write(self) -> None:
        """All that has been measured, by rank 0."""
        if self.rank == 0 and self.options.json:
            self.options.json.write_text(json.dumps(self.results, indent=1) + "\n")

    def balancer(self, setting: str) -> Balancer:
        """The balancer of a setting."""
        if setting in ("off", "even"):
            return self._balancers.setdefault("off", Balancer.off())
        if setting not in self._balancers:
            split = None
            if setting == "split":
                split = SplitOptions(above=0.02, within=self.exchange_price(), fixed=1e3 * STEP_SECONDS)
            window = WINDOW if setting == "window" else 1
            choices = BalanceOptions(counts="free", split=split, window=window, timeout=timedelta(seconds=60))
            self._balancers[setting] = Balancer.embedded(job=setting, options=choices)
        return self._balancers[setting]

    def exchange_price(self) -> float:
        """Milliseconds that a position's keys and values take, and their gradients back, in all layers."""
        model = self.model
        number = 2 if self.device.type == "cuda" else 4
        values = 2 * model.num_heads * model.head_dim * number * model.num_layers * 2
        return 1e3 * values / EXCHANGE_RATE

    def loader(self, batches: Iterable[SequenceBatch], setting: str, name: str) -> BalancedLoader[SequenceBatch]:
        """The batches, balanced."""
        assert self.cost is not None
        return BalancedLoader(
            list(batches), self.balancer(setting), cost=self.cost, memory=self.model.tokens(),
            spec=SequenceBatch.spec(), device=self.device, name=name,
        )  # fmt: skip

    def run(self, loader: BalancedLoader[SequenceBatch], trainer: Trainer | None = None) -> dict[str, Any]:
        """Trains; milliseconds between steps, from the first batch to the end, and what was split."""
        trainer = trainer or self.trainer
        timer = StepTimer(self.device)
        marks, modes, split = [], [], []
        self.wait()
        for batch in loader:
            marks.append(self.mark())
            timer.batch_ready()
            pieces = trainer.pieces(loader.splits)
            trainer._step(batch, loader.loss_scale, timer, pieces)
            timer.end_step()
            modes.append(loader.report.mode.value)
            split.append(loader.splits)
        marks.append(self.mark())
        self.wait()
        timer.close()
        times = [between(*pair) for pair in itertools.pairwise(marks)]
        return {"ms": times, "modes": sorted(set(modes)), **sum_up(split, self)}

    def mark(self) -> Any:
        """A point of time, on the device's stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        """Until all ranks have done all that they have queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()


def between(first: Any, second: Any) -> float:
    """Milliseconds between two marks of a device."""
    return 1e3 * (second - first) if isinstance(first, float) else float(first.elapsed_time(second))


def sum_up(steps: list[tuple[SplitSample, ...]], bench: Bench) -> dict[str, Any]:
    """Split samples, their pieces, and what travels beside the least that must."""
    model = bench.model
    number = 2 if bench.device.type == "cuda" else 4
    position = 2 * model.num_heads * model.head_dim * number * model.num_layers * 2  # forward, and gradients backward
    sent = least = 0
    for sample in (sample for splits in steps for sample in splits):
        for index, piece in enumerate(sample.pieces):
            others = {later.rank for later in sample.pieces[index + 1 :]} - {piece.rank}
            sent += sample.num_keys(index) * len(others)
            least += min(piece.begin, len(sample) - sample.num_candidates)
    samples = [[(piece.rank, len(piece)) for piece in sample.pieces] for sample in (steps[-1] if steps else ())]
    return {
        "split_samples": sum(map(len, steps)) / max(len(steps), 1), "last_split": samples,
        "exchanged_bytes": sent * position / max(len(steps), 1), "exchanged_over_least": sent / least if least else 1.0,
    }  # fmt: skip
