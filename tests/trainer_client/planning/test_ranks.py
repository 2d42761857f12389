"""Ranks that bring different things to a plan, or train what TorchRec leaves to an optimizer of the job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.harness.ranks import run_ranks
from evenkeel.placement import InvalidInputError, MissCurve, Sharding, Topology, Zipf
from trainer_client.planning import KeyStatistics, PlannedModel, plan_model

ROWS = 400


class _Model(nn.Module):
    def __init__(self, rows: int = ROWS, word: str = "word") -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name="item", num_embeddings=rows, embedding_dim=8, feature_names=["clicked", "bought"]),
            EmbeddingBagConfig(name="word", num_embeddings=ROWS, embedding_dim=8, feature_names=[word]),
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": 1.0})

    def forward(self, keys: KeyedJaggedTensor) -> torch.Tensor:
        loss: torch.Tensor = (self.bags(keys).values().sum(dim=1) - 1).square().mean()
        return loss


def _keys(seed: int, samples: int = 16, features: tuple[str, ...] = ("clicked", "bought", "word")) -> KeyedJaggedTensor:
    values = torch.randint(0, ROWS, (2 * samples * len(features),), generator=torch.Generator().manual_seed(seed))
    return KeyedJaggedTensor(keys=list(features), values=values, lengths=torch.full((samples * len(features),), 2))


def _batches(samples: int = 16, count: int = 40) -> Iterator[KeyedJaggedTensor]:
    return (_keys(seed, samples) for seed in range(count))


def _same(planned: PlannedModel) -> PlannedModel:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (planned.request, planned.plan, planned.notes))
    assert all(one == told[0] for one in told)
    return planned


def _bring(rank: int) -> None:
    alone = _same(plan_model(_Model(), _batches() if rank == 1 else None))
    assert "batches are those of rank 1 of 2: the others gave none" in alone.notes
    assert [table.ids_per_sample for table in alone.request.tables] == [4.0, 2.0]
    assert all(isinstance(table.access, MissCurve) for table in alone.request.tables)
    assert alone.request.step.samples_per_rank == 16
    statistics = KeyStatistics(_Model())
    for keys in _batches(count=80):
        statistics.observe(keys)
    both = _same(plan_model(_Model(), statistics if rank == 1 else _batches(count=80)))
    assert [table.ids_per_sample for table in both.request.tables] == [4.0, 2.0]
    assert not [note for note in both.notes if "batches" in note]

    for sizes in ((16, 160), (160, 16)):
        mixed = _same(plan_model(_Model(), _batches(sizes[rank], count=80)))
        assert mixed.request.step.samples_per_rank == 160
        assert "largest batches have 16 to 160 samples: all ranks are planned with the most" in mixed.notes
    said = _same(plan_model(_Model(), _batches(sizes[rank], count=80), samples_per_rank=32))
    assert said.request.step.samples_per_rank == 32
    assert not [note for note in said.notes if "batches" in note]

    with pytest.raises(InvalidInputError, match="item: of rank 1 of the group is not that of rank 0, which has 400 by"):
        plan_model(_Model(rows=ROWS + rank), _batches())
    with pytest.raises(InvalidInputError, match="max_batches: is no number of batches"):
        plan_model(_Model(), _batches(), max_batches=-1 if rank == 1 else None)
    with pytest.raises(InvalidInputError, match="samples_per_rank: is no number"):
        plan_model(_Model(), samples_per_rank="many" if rank == 0 else 16)  # type: ignore[arg-type]


def test_ranks_that_bring_different_things_plan_alike_or_fail_alike() -> None:
    run_ranks(2, _bring)


def _train(rank: int) -> None:
    model = _Model()
    planned = plan_model(model, _batches(count=80), sharding=(Sharding.DATA_PARALLEL,))
    (note,) = (note for note in planned.notes if "data-parallel" in note)
    assert "item, word" in note
    assert "in_backward_optimizer_filter(parallel.named_parameters())" in note
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=planned.sharding_plan)
    dense = Adam(dict(in_backward_optimizer_filter(parallel.named_parameters())).values())
    before = {name: value.detach().clone() for name, value in parallel.named_parameters()}
    assert len(before) == 2
    for step in range(3):
        dense.zero_grad()
        parallel(_keys(100 * rank + step)).backward()
        dense.step()
    for name, value in parallel.named_parameters():
        assert not torch.equal(value, before[name])
        every = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(every, value.detach().contiguous())
        assert torch.equal(*every), "ranks keep equal copies"


def test_the_lines_of_the_page_train_tables_that_are_data_parallel() -> None:
    run_ranks(2, _train)


MACHINES = Topology(ranks=1, hbm_bytes=8 << 30)


def test_features_that_no_batch_has_are_told_and_their_tables_not_planned_as_free() -> None:
    planned = plan_model(_Model(word="words"), _batches(), topology=MACHINES)
    assert [table.ids_per_sample for table in planned.request.tables] == [4.0, 1.0]
    assert planned.request.tables[1].access == Zipf()
    assert "nothing tells how keys of word are looked up: Zipf with exponent 1.05 is assumed" in planned.notes
    assert "no batch has feature words of table word; batches have features that no table takes: word" in planned.notes
    half = plan_model(_Model(), [_keys(seed, features=("clicked", "word")) for seed in range(40)], topology=MACHINES)
    assert [note for note in half.notes if "batch" in note] == ["no batch has feature bought of table item"]
    told = plan_model(_Model(word="words"), _batches(), topology=MACHINES, access={"word": Zipf()})
    assert not [note for note in told.notes if "batch" in note]


def test_a_table_of_which_batches_have_no_key_is_told() -> None:
    none = torch.zeros(48, dtype=torch.int64)
    none[:32] = 2
    keys = [
        KeyedJaggedTensor(["clicked", "bought", "word"], _keys(seed).values()[:64], lengths=none) for seed in range(40)
    ]
    planned = plan_model(_Model(), keys, topology=MACHINES)
    assert planned.request.tables[1].ids_per_sample == 0
    assert "batches have no key of word: planned as if nothing were ever looked up there" in planned.notes
