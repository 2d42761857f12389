"""Evenkeel behind the shufflers of recsys-examples, through the same calls as its pipelines make."""

import re
import sys
from dataclasses import dataclass, field, make_dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.ranks import run_ranks
from trainer_client.balancing import BalanceOptions, Balancer
from trainer_client.balancing.adapters.recsys_examples import EvenkeelShuffling, evenkeel_shuffler, register_shufflers
from trainer_client.balancing.batches import BatchError

SIZE = 6


@dataclass
class Batch:
    """With the fields of their `HSTUBatch`."""

    features: KeyedJaggedTensor
    batch_size: int
    feature_to_max_seqlen: dict[str, int]
    contextual_feature_names: list[str] = field(default_factory=list)
    labels: KeyedJaggedTensor | None = None
    actual_batch_size: int | None = None
    item_feature_name: str = "item"
    num_candidates: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.batch_size > 0
        if self.actual_batch_size is None:
            self.actual_batch_size = self.batch_size


class Shuffler:
    """What is used of their `HASTUBalancedBatchShuffler`: constructor arguments, and the workloads."""

    def __init__(self, num_heads: int = 1, action_interleaved: bool = True) -> None:
        self.scale = num_heads * (2 if action_interleaved else 1)

    def get_workloads(self, batch: Batch) -> torch.Tensor:
        lengths = batch.features[batch.item_feature_name].lengths()
        return self.scale * (lengths**2 + 10 * lengths)


def make_batch(rank: int, step: int, real: int = SIZE) -> Batch:
    draw = np.random.default_rng([rank, step])
    lengths = torch.zeros(SIZE, dtype=torch.int64)
    lengths[:real] = torch.from_numpy(draw.integers(1, 40, real))
    total = int(lengths.sum())
    first = 10_000 * rank + 1_000 * step
    labels = KeyedJaggedTensor(["label"], torch.arange(first, first + total), lengths=lengths)
    features = KeyedJaggedTensor(
        ["item", "action"],
        torch.arange(first, first + 2 * total),
        lengths=lengths.repeat(2),
        weights=torch.arange(first, first + 2 * total).double(),
    )
    return Batch(
        features=features,
        batch_size=SIZE,
        feature_to_max_seqlen={"item": 40},
        labels=labels,
        actual_batch_size=real,
        num_candidates=torch.arange(first, first + 2 * SIZE),  # two a sample, flat
    )


def rows(batch: Batch) -> list[tuple[Any, ...]]:
    """Each real sample with all that belongs to it."""
    assert batch.actual_batch_size is not None
    items, actions, labels = batch.features["item"], batch.features["action"], batch.labels["label"]
    dense = batch.num_candidates[: 2 * batch.actual_batch_size].view(-1, 2).tolist()
    found = []
    for sample in range(batch.actual_batch_size):
        parts = []
        for jagged in (items, actions, labels):
            begin, end = jagged.offsets()[sample], jagged.offsets()[sample + 1]
            parts.append(tuple(jagged.values()[begin:end].tolist()))
        begin, end = items.offsets()[sample], items.offsets()[sample + 1]
        found.append((*parts, tuple(items.weights()[begin:end].tolist()), tuple(dense[sample])))
    return found


def everything(results: list[dict[str, Any]], which: str) -> list[Any]:
    return sorted(chain.from_iterable(each[which] for each in results))


def shuffle_steps(rank: int, reals: list[list[int]]) -> list[dict[str, Any]]:
    """Two batches in flight, as with their prefetching pipeline."""
    kind = evenkeel_shuffler(Shuffler)
    shuffler = kind(num_heads=2, action_interleaved=False)
    assert shuffler.scale == 2
    results, waiting = [], []
    for step, real in enumerate(reals):
        batch = make_batch(rank, step, real[rank])
        waiting.append((batch, shuffler.start_shuffle_async(batch, dist.group.WORLD)))
        if len(waiting) == 2 or step == len(reals) - 1:
            for before, handle in waiting:
                after = shuffler.finish_shuffle(before, handle, dist.group.WORLD)
                results.append(
                    {
                        "before": rows(before),
                        "after": rows(after),
                        "sizes": (after.batch_size, after.actual_batch_size),
                        "lengths": after.features.lengths().numel(),
                        "dense": tuple(after.num_candidates.shape),
                        "kept": (after.feature_to_max_seqlen, after.item_feature_name),
                        "mode": shuffler.report.mode.value,
                        "load": float(shuffler.get_workloads(after).sum()),
                        "home_load": float(shuffler.get_workloads(before).sum()),
                    }
                )
            waiting = []
    shuffler.close()
    return results


@pytest.mark.parametrize("reals", [[[SIZE, SIZE]] * 4, [[SIZE, 2], [1, SIZE], [SIZE, 0], [3, 3]]])
def test_batches_are_spread_whole_and_filled_up_again(reals: list[list[int]]) -> None:
    ranks = run_ranks(2, shuffle_steps, reals)
    for step, real in enumerate(reals):
        one = [rank[step] for rank in ranks]
        assert {each["mode"] for each in one} == {"embedded"}
        assert everything(one, "before") == everything(one, "after")
        counts = [each["sizes"][1] for each in one]
        assert sum(counts) == sum(real)
        assert max(counts) - min(counts) <= 1
        assert all(each["sizes"][0] == SIZE for each in one)
        assert all(each["lengths"] == 2 * SIZE for each in one)  # as theirs: jagged fields are filled up, ...
        assert [each["dense"] for each in one] == [(2 * count,) for count in counts]  # ... dense ones are not
        assert all(each["kept"] == ({"item": 40}, "item") for each in one)
    after, before = (sum(max(one) for one in zip(*([each[key] for each in rank] for rank in ranks), strict=True))
                     for key in ("load", "home_load"))  # fmt: skip
    assert after < before


def shuffle_at_once(rank: int) -> tuple[list[Any], list[int], list[int], int]:
    shuffler = evenkeel_shuffler(Shuffler, options=BalanceOptions(tolerance=0.0))()
    batch = make_batch(rank, 0)
    plain = shuffler.shuffle(batch, dist.group.WORLD)
    shuffled, indices, workloads = shuffler.shuffle(batch, return_indices=True, return_workloads=True)
    assert rows(plain) == rows(shuffled)
    return rows(shuffled), indices.tolist(), workloads.tolist(), int(shuffler.get_workloads(batch).sum())


def test_positions_and_workloads_on_request() -> None:
    found = run_ranks(2, shuffle_at_once)
    everything = [row for rank in range(2) for row in rows(make_batch(rank, 0))]
    for got, indices, workloads, total in found:
        assert [everything[index] for index in indices] == got
        assert sum(workloads) == total
    assert sorted(found[0][1] + found[1][1]) == list(range(2 * SIZE))


def leave_early(rank: int) -> str:
    balancer = Balancer.embedded()
    shuffler = evenkeel_shuffler(Shuffler, balancer=balancer)()
    for step in range(2):
        batch = make_batch(rank, step)
        if rank == 1 and step == 1:
            balancer.leave()
            return ""
        handle = shuffler.start_shuffle_async(batch)
        if step == 0:
            shuffler.finish_shuffle(batch, handle)
            continue
        with pytest.raises(RuntimeError, match="a rank has left its own") as caught:
            shuffler.finish_shuffle(batch, handle)
    return str(caught.value)


def test_the_end_is_told_where_a_rank_has_left() -> None:
    assert "'train'" in run_ranks(2, leave_early)[0]


def test_bad_workloads_and_fields_are_told_by_name() -> None:
    class Short(Shuffler):
        def get_workloads(self, batch: Batch) -> torch.Tensor:
            return super().get_workloads(batch)[:-1]

    with pytest.raises(BatchError, match=r"get_workloads returned shape \(5,\); give one for each of 6"):
        evenkeel_shuffler(Short)().start_shuffle_async(make_batch(0, 0))
    batch = make_batch(0, 0)
    batch.num_candidates = torch.zeros(SIZE + 1)
    with pytest.raises(BatchError, match=r"'num_candidates' has shape \(7,\)"):
        evenkeel_shuffler(Shuffler)().start_shuffle_async(batch)
    with pytest.raises(ValueError, match="give one of them"):
        evenkeel_shuffler(Shuffler, balancer=Balancer.off(), options=BalanceOptions())


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Any]]:
    """A registry with the methods and the refusals of theirs."""
    registered: dict[str, type[Any]] = {}

    def register(name: str, kind: type[Any]) -> None:
        if name in registered:
            raise ValueError(f"{name} is registered")
        registered[name] = kind

    factory = make_dataclass("BatchShufflerFactory", [])
    factory.register = staticmethod(register)
    factory.unregister = staticmethod(registered.pop)
    factory.create = staticmethod(lambda name, **arguments: registered[name](**arguments))
    factory.list_available = staticmethod(lambda: dict(registered))
    for name in ("commons", "commons.distributed", "commons.distributed.batch_shuffler_factory"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["commons.distributed.batch_shuffler_factory"].BatchShufflerFactory = factory
    return registered


def test_twins_are_registered_beside_theirs_or_in_their_place(registry: dict[str, type[Any]]) -> None:
    registry["identity"] = object
    with pytest.raises(RuntimeError, match="no batch shuffler is registered; first import"):
        register_shufflers()
    registry["hstu"] = Shuffler
    assert register_shufflers() == ("evenkeel_hstu",)
    assert registry["hstu"] is Shuffler
    assert issubclass(registry["evenkeel_hstu"], Shuffler)
    assert issubclass(registry["evenkeel_hstu"], EvenkeelShuffling)
    assert register_shufflers(replace=True) == ("evenkeel_hstu", "hstu")
    assert issubclass(registry["hstu"], EvenkeelShuffling)
    assert register_shufflers(replace=True) == ("evenkeel_hstu", "hstu")  # again changes nothing
    assert registry["identity"] is object


def test_the_page_says_what_works(registry: dict[str, type[Any]]) -> None:
    page = (Path(__file__).parents[4] / "docs/train/recsys_examples.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    from commons.distributed.batch_shuffler_factory import BatchShufflerFactory

    class HSTU(Shuffler):
        def __init__(self, num_heads: int, head_dim: int, action_interleaved: bool) -> None:
            super().__init__(num_heads * head_dim, action_interleaved)

    registry["hstu"] = HSTU
    names: dict[str, Any] = {"BatchShufflerFactory": BatchShufflerFactory}
    exec(code, names)
    assert isinstance(names["batch_shuffler"], EvenkeelShuffling)
    assert names["batch_shuffler"].scale == 4 * 256 * 2
    assert names["batch_shuffler"].options.tolerance == 0.0005
    assert registry["hstu"] is HSTU


def test_importing_one_module_puts_evenkeel_everywhere(registry: dict[str, type[Any]]) -> None:
    registry["hstu"] = Shuffler
    sys.modules.pop("trainer_client.balancing.adapters.recsys_examples.everywhere", None)
    __import__("trainer_client.balancing.adapters.recsys_examples.everywhere")
    assert issubclass(registry["hstu"], EvenkeelShuffling)
    assert registry["hstu"](num_heads=3).scale == 6
