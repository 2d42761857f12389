"""One rank of the convergence benchmark; `benchmarks.convergence` starts it by torchrun."""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.convergence import add_workload
from benchmarks.gpus import own_gpu
from examples.datasets import ClickOptions, LogNormalLengths, Predictions, draw_clicks, read_histories, split_last
from examples.hstu.attention import choose_kernel
from examples.hstu.model import ModelOptions
from examples.hstu.training import Run, Trainer
from trainer_client.balancing import BalanceOptions, Balancer
from trainer_client.balancing.sampling import GlobalBatchSampler, OrderedBatchSampler, TokenBudgetSampler
from trainer_client.embedding.routing import DIST_TYPES

TEST_BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", required=True, help="setting:seed")
    add_workload(parser)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available() if options.device is None else options.device == "cuda"
    device = own_gpu() if on_gpu else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    train, test, best = read(options)
    model = make_model(options, train, device)
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "ranks": dist.get_world_size(),
        "options": {
            key: value.name if isinstance(value, Path) else value
            for key, value in vars(options).items()
            if key not in ("result", "runs")
        },
        "samples": len(train),
        "tests": len(test),
        "best_auc": best,
        "runs": [],
    }
    for setting, seed in (run.split(":") for run in options.runs):
        results["runs"].append(train_once(setting, int(seed), options, model, device, train, test))
        if dist.get_rank() == 0:
            last = results["runs"][-1]
            print(f"finished {setting}, seed {seed}: AUC {last['auc'][-1]:.4f}, {last['seconds']:.1f} s", flush=True)
            options.result.write_text(json.dumps(results))  # after each run, so that one that is stopped leaves some
    dist.barrier()
    dist.destroy_process_group()


def read(options: argparse.Namespace) -> tuple[Predictions, Predictions, float | None]:
    """Training and test samples, and the best AUC of the test if it is known."""
    if options.data is not None:
        train, test = split_last(
            read_histories(options.data), per_user=options.per_user, max_history=options.max_history
        )
        return train, test, None
    lengths = LogNormalLengths(mean=options.mean_length, sigma=options.sigma, minimum=3, maximum=options.max_history)
    clicks = draw_clicks(ClickOptions(num_users=options.users, num_items=options.items, lengths=lengths))
    train, test = split_last(clicks.histories, per_user=options.per_user, max_history=options.max_history)
    return train, test, area(clicks.probabilities[test.events], clicks.histories.liked[test.events])


def make_model(options: argparse.Namespace, train: Predictions, device: torch.device) -> ModelOptions:
    """The shape that flags and data ask for."""
    data = train.histories
    context = data.context.shape[1]
    return ModelOptions(
        num_layers=options.layers,
        width=options.width,
        num_heads=options.heads,
        head_dim=options.head_dim,
        embedding_dim=options.embedding_dim,
        num_items=data.num_items,
        num_actions=int(data.actions.max(initial=0)) + 1,
        num_context=context,
        num_context_values=int(data.context.max(initial=0)) + 1,
        max_tokens=2 * options.max_history + context + 1,
        kernel=choose_kernel("auto", device, 1),
    )


def train_once(
    setting: str,
    seed: int,
    options: argparse.Namespace,
    model: ModelOptions,
    device: torch.device,
    train: Predictions,
    test: Predictions,
) -> dict[str, Any]:
    """Trains from new weights; collective.

    Returns:
        Curves by the samples trained so far: `loss` of each step, `auc` and `test_loss` of each test.
    """
    routed = setting in DIST_TYPES
    trainer = Trainer(
        model, device, learning_rate=options.learning_rate, seed=seed, storage="routed" if routed else "local",
        dist_type=setting if routed else "continuous",  # type: ignore[arg-type]
    )  # fmt: skip
    sampler = make_sampler(setting, seed, options, train, model)
    loaded = []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loaded += [train.batch(indices) for indices in sampler]
    batches = [batch.pin_memory() for batch in loaded] if device.type == "cuda" else loaded
    size = options.window if setting == "window" else 1
    length = size * math.ceil(len(batches) / options.evaluations / size)
    samples, auc, test_loss = [0], *([value] for value in evaluate(trainer, test))
    runs: list[Run] = []
    begun = time.perf_counter()
    with Balancer.off() if setting == "off" else Balancer.embedded(options=BalanceOptions(window=size)) as balancer:
        for first in range(0, len(batches), length):
            runs.append(trainer.run(batches[first : first + length], balancer))
            samples.append(samples[-1] + sum(report.samples for report in runs[-1].reports))
            for curve, value in zip((auc, test_loss), evaluate(trainer, test), strict=True):
                curve.append(value)
    seconds = time.perf_counter() - begun
    reports = [report for run in runs for report in run.reports]
    return {
        "setting": setting,
        "seed": seed,
        "seconds": seconds,
        "tested_after": samples,
        "auc": auc,
        "test_loss": test_loss,
        "step_samples": [report.samples for report in reports],
        "loss": [round(loss, 5) for run in runs for loss in run.losses.tolist()],
        "imbalance_before": float(np.mean([report.imbalance_before for report in reports])),
        "imbalance": float(np.mean([report.imbalance for report in reports])),
        "moved_share": float(np.mean([report.moved_share for report in reports])),
        "balanced_steps": float(np.mean([report.mode.value != "identity" for report in reports])),
        **follow([batch.sample for batch in batches], [numbers for run in runs for numbers in run.samples]),
    }


def make_sampler(
    setting: str, seed: int, options: argparse.Namespace, train: Predictions, model: ModelOptions
) -> OrderedBatchSampler:
    """Batches of a fixed count, or of a budget of tokens that is as much in the mean."""
    count = options.batch_size * dist.get_world_size()
    if setting != "token_budget":
        return GlobalBatchSampler(train, global_batch_size=count, seed=seed, drop_last=True)
    tokens = (2 if model.interleaved else 1) * train.num_history + 1 + model.num_context
    budget = count * float(tokens.mean())
    return TokenBudgetSampler(train, budget=budget, costs=tokens, seed=seed, drop_last=True)


def evaluate(trainer: Trainer, test: Predictions) -> tuple[float, float]:
    """AUC and log loss of the test, over all ranks; as many tests are left out as the ranks cannot share evenly."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = np.arange(rank, len(test) - len(test) % ranks, ranks)
    mine = mine[np.argsort(test.num_history[mine], kind="stable")]  # batches of like lengths take less memory
    logits, labels = [], []
    for first in range(0, len(mine), TEST_BATCH):
        batch = test.batch(mine[first : first + TEST_BATCH])
        logits.append(trainer.predict(batch).cpu())
        labels.append(batch.labels)
    gathered = gather((torch.cat(logits).double().numpy(), torch.cat(labels).numpy() > 0))
    scores, liked = (np.concatenate([part[which] for part in gathered]) for which in (0, 1))
    return area(scores, liked), float(np.logaddexp(0.0, np.where(liked, -scores, scores)).mean())


def area(scores: NDArray[np.float64], liked: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: how often a liked one has the higher score, ties counted half; NaN without both."""
    positive, negative = int(liked.sum()), int((~liked).sum())
    if not positive or not negative:
        return math.nan
    wins = float(rankdata(scores)[liked].sum()) - positive * (positive + 1) / 2
    return wins / positive / negative


def follow(loaded: list[torch.Tensor], trained: list[torch.Tensor]) -> dict[str, float]:
    """Where samples went: those not trained as often as loaded, and the share trained in another step."""
    by_rank = gather((loaded, trained))
    before, after = (
        [np.concatenate(step) for step in zip(*(part[k] for part in by_rank), strict=True)] for k in (0, 1)
    )
    (before_ids, before_counts), (after_ids, after_counts) = (
        np.unique(np.concatenate(steps), return_counts=True) for steps in (before, after)
    )
    same = np.array_equal(before_ids, after_ids)
    lost = int((before_counts != after_counts).sum()) if same else len(np.setxor1d(before_ids, after_ids))
    stayed = sum(np.isin(there, here).sum() for here, there in zip(before, after, strict=True))
    return {"lost": lost, "other_step_share": 1 - float(stayed) / max(sum(map(len, after)), 1)}


def gather(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    main()
