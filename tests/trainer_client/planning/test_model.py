from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.harness.ranks import run_ranks
from evenkeel.placement import InvalidInputError, MissCurve, Mode, Optimizer, Runtime, Sharding, Topology, Zipf
from trainer_client.planning import (
    KeyStatistics,
    PlannedModel,
    TorchRecPlanner,
    load_sharding_plan,
    machine,
    plan_model,
)

SAMPLES = 16
LENGTHS = {"clicked": 2, "bought": 1, "word": 5}


class Model(nn.Module):
    """A pooled table of two features, a table of sequences, and a dense part of 4,352 bytes."""

    def __init__(self, rows: int = 900, word: str = "word") -> None:
        super().__init__()
        bag = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=rows, feature_names=["clicked", "bought"])
        row = EmbeddingConfig(name="word", embedding_dim=32, num_embeddings=500, feature_names=[word])
        self.word = word
        self.bags = EmbeddingBagCollection(tables=[bag], device=torch.device("meta"))
        self.words = EmbeddingCollection(tables=[row], device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.words.parameters(), {"lr": 0.1})
        self.dense = nn.Linear(32, 33)

    def forward(self, keys: KeyedJaggedTensor) -> torch.Tensor:
        words = self.words(keys)[self.word].values()
        return self.bags(keys).values().sum() + self.dense(words).sum()


@dataclass
class _Batch:
    parts: dict[str, Any]


def keys_of(seed: int, samples: int = SAMPLES, features: tuple[str, ...] = tuple(LENGTHS)) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([LENGTHS[feature] for feature in features]).repeat_interleave(samples)
    values = (400 * torch.rand(int(lengths.sum()), generator=generator) ** 3).long()
    return KeyedJaggedTensor(keys=list(features), values=values, lengths=lengths)


def batches(count: int = 40, seed: int = 0, samples: int = SAMPLES) -> Iterator[_Batch]:
    return (_Batch({"label": torch.zeros(1), "deep": [(keys_of(seed + index, samples), 3)]}) for index in range(count))


def _run(rank: int, folder: Path) -> None:
    model = Model()
    planned = plan_model(model, batches(seed=1000 * rank), optimizer=Optimizer.ADAM)
    item, word = planned.request.tables
    assert (item.ids_per_sample, word.ids_per_sample) == (3.0, 5.0)
    assert (item.optimizer, word.optimizer) == (Optimizer.ADAM, Optimizer.ROWWISE_ADAGRAD)
    assert (item.pooled, word.pooled, item.group, word.group) == (True, False, "bags", "words")
    assert planned.request.step.samples_per_rank == SAMPLES
    assert planned.request.topology.ranks == 2
    told: list[Any] = [None, None]
    dist.all_gather_object(told, (planned.request, planned.plan))
    assert told[0] == told[1]
    planner = TorchRecPlanner(batches(seed=1000 * rank), optimizer=Optimizer.ADAM)
    found = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    assert found == planned.sharding_plan
    assert planner.planned is not None
    assert planner.planned.plan == planned.plan
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=found)
    parallel(keys_of(rank)).backward()
    planned.save(folder / f"plan-{rank}.json")
    assert load_sharding_plan(folder / f"plan-{rank}.json", Model(), device="cpu") == planned.sharding_plan
    with pytest.raises(InvalidInputError, match="holds no placements"):
        plan_model(Model(), topology=Topology(ranks=2, hbm_bytes=0, host_bytes=1 << 16))
    broken: Any = [{"keys": "none"}] if rank == 1 else batches(3)
    with pytest.raises(InvalidInputError, match="holds no KeyedJaggedTensor"):
        plan_model(Model(), broken)
    weighted = KeyedJaggedTensor(["a"], torch.tensor([1]), torch.tensor([1.0]))
    with pytest.raises(InvalidInputError, match=r"name what you give: lengths=… or offsets=…"):
        plan_model(Model(), [weighted])

    def lost() -> Iterator[_Batch]:
        yield from batches(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError if rank == 0 else RuntimeError, match="the disk is gone"):
        plan_model(Model(), lost() if rank == 0 else batches(3))
    with pytest.raises(InvalidInputError, match=r"topology.ranks: is not that of the group, which has 2"):
        plan_model(Model(), topology="h200x8")


def test_all_ranks_plan_alike_train_and_fail_alike(tmp_path: Path) -> None:
    run_ranks(2, _run, tmp_path)
    assert (tmp_path / "plan-0.json").read_text() == (tmp_path / "plan-1.json").read_text()


def test_a_plan_ahead_of_the_job_is_for_its_gpus() -> None:
    planned = plan_model(Model(), batches(), topology="h100x4", samples_per_rank=8, modes=(Mode.HOST_ONLY,))
    machines = planned.request.topology
    assert (machines.ranks, machines.hbm_reserved_fraction, planned.request.hardware) == (4, 0.15, "h100")
    assert machines.hbm_reserved_bytes == 4 * 4 * (32 * 33 + 33)
    assert planned.request.step.samples_per_rank == 8
    assert isinstance(planned.request.tables[0].access, MissCurve)
    assert planned.sharding_plan is not None
    shard = planned.sharding_plan.plan["words"]["word"].sharding_spec.shards[1]  # type: ignore[index,union-attr]
    assert str(shard.placement) == "rank:1/cuda:1"
    assert planned.constraints is not None
    assert planned.constraints["word"].compute_kernels == ["fused_uvm"]
    shown = str(planned)
    assert "0-3" in shown
    assert "note: the optimizer of item is assumed to be adam" in shown


def test_dynamicemb_is_planned_without_being_installed() -> None:
    planned = plan_model(Model(), topology="h200x2", runtime=Runtime.DYNAMICEMB)
    # Where there is room, a few keys are no reason to leave HBM.
    assert {placement.mode for placement in planned.plan.placements} == {Mode.HBM_ONLY}
    assert planned.sharding_plan is None
    assert planned.constraints is None
    assert "DynamicEmb is not installed here" in str(planned)


class _Unknown(torch.optim.SGD):
    pass


def _plan(model: nn.Module | None = None, *given: Any, **options: Any) -> PlannedModel:
    return plan_model(model or Model(), *given, **{"topology": "h200x2", **options})


def _plan_trained_by(optimizer: Any) -> PlannedModel:
    model = Model()
    apply_optimizer_in_backward(optimizer, model.bags.parameters(), {"lr": 0.1})
    return _plan(model)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _plan(nn.Linear(2, 2)), "has no embedding collection"),
        (lambda: _plan(Model(), []), "has no batch"),
        (lambda: TorchRecPlanner(runtime=Runtime.DYNAMICEMB, topology="h200x2").plan(Model()),
         r"runtime: has no sharding plan \(got 'dynamicemb'\)"),
        (lambda: _plan_trained_by(_Unknown), r"item.optimizer: is not planned for \(got '_Unknown'\)"),
        (lambda: _plan(samples_per_rank=0), "samples_per_rank"),
        (lambda: _plan(pooled=True), "pooled: is told by the model"),
        (lambda: _plan(data_type="float16"), "data_type: is told by the model"),
        (lambda: _plan(size=3), "size: is no field of a table .* use some of: .*admission_rows"),
        (lambda: _plan(max_batches=-1), "max_batches: is no number of batches"),
        (lambda: _plan(max_batches=2.5), "max_batches: is no number of batches"),
        *((lambda field=field: _plan(**{field: "lamb"}), rf"{field}: is unknown \(got 'lamb'\); use one of")
          for field in ("optimizer", "eviction", "sharding", "runtime")),
        (lambda: _plan(modes=["lamb"]), r"is unknown \(got 'lamb'\); use one of"),
        (lambda: plan_model(Model()), "does not divide the 1 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_named(
    make: Callable[[], object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InvalidInputError, match=said):
        make()


def test_names_are_as_good_as_members_and_numbers_may_be_round() -> None:
    named = plan_model(Model(), topology="h200x2", optimizer="sgd", runtime="torchrec", modes=["HBM_ONLY"])  # type: ignore[arg-type]
    same = plan_model(Model(), topology="h200x2", optimizer=Optimizer.SGD, modes=(Mode.HBM_ONLY,))
    assert (named.request, named.plan.placements) == (same.request, same.plan.placements)
    assert named.sharding_plan == same.sharding_plan is not None
    many = plan_model(Model(), samples_per_rank=4e3, topology="h200x8")  # type: ignore[arg-type]
    assert many.request.step.samples_per_rank == 4_000


def test_memory_of_the_host_is_that_of_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(machine, "_CGROUPS", (str(tmp_path / "none"), str(tmp_path / "max")))
    assert machine.host_bytes() == whole
    (tmp_path / "max").write_text("max\n")
    assert machine.host_bytes() == whole
    (tmp_path / "max").write_text("1073741824\n")
    assert machine.host_bytes() == 1 << 30
    assert plan_model(Model()).request.topology.host_bytes == 1 << 30


def test_a_job_on_more_ranks_than_plan_for_it_has_whole_steps_observed() -> None:
    planned = plan_model(Model(), batches(count=1_000), topology="h200x32/8", optimizer=Optimizer.SGD)
    assert isinstance(planned.request.tables[0].access, MissCurve)
    with pytest.raises(InvalidInputError, match=r"too few for steps of 512 samples \(got 40\)"):
        plan_model(Model(), batches(count=1_000), topology="h200x32/8", max_batches=40)


def _same(planned: PlannedModel) -> PlannedModel:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (planned.request, planned.plan, planned.notes))
    assert all(one == told[0] for one in told)
    return planned


def _bring(rank: int) -> None:
    alone = _same(plan_model(Model(), batches() if rank == 1 else None))
    assert "batches are those of rank 1 of 2: the others gave none" in alone.notes
    assert [table.ids_per_sample for table in alone.request.tables] == [3.0, 5.0]
    assert all(isinstance(table.access, MissCurve) for table in alone.request.tables)
    assert alone.request.step.samples_per_rank == 16
    statistics = KeyStatistics(Model())
    for seed in range(80):
        statistics.observe(keys_of(seed))
    both = _same(plan_model(Model(), statistics if rank == 1 else batches(80)))
    assert [table.ids_per_sample for table in both.request.tables] == [3.0, 5.0]
    assert not [note for note in both.notes if "batches" in note]

    for sizes in ((16, 160), (160, 16)):
        mixed = _same(plan_model(Model(), batches(80, samples=sizes[rank])))
        assert mixed.request.step.samples_per_rank == 160
        assert "largest batches have 16 to 160 samples: all ranks are planned with the most" in mixed.notes
    said = _same(plan_model(Model(), batches(80, samples=sizes[rank]), samples_per_rank=32))
    assert said.request.step.samples_per_rank == 32
    assert not [note for note in said.notes if "batches" in note]

    with pytest.raises(InvalidInputError, match="item: of rank 1 of the group is not that of rank 0, which has 900 by"):
        plan_model(Model(rows=900 + rank), batches())
    with pytest.raises(InvalidInputError, match="max_batches: is no number of batches"):
        plan_model(Model(), batches(), max_batches=-1 if rank == 1 else None)
    with pytest.raises(InvalidInputError, match="samples_per_rank: is not a whole number"):
        plan_model(Model(), samples_per_rank="many" if rank == 0 else 16)  # type: ignore[arg-type]


def test_ranks_that_bring_different_things_plan_alike_or_fail_alike() -> None:
    run_ranks(2, _bring)


def _train(rank: int) -> None:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=400, embedding_dim=8, feature_names=[feature])
        for name, feature in (("item", "clicked"), ("word", "word"))
    ]
    model = nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    planned = plan_model(model, batches(80), sharding=(Sharding.DATA_PARALLEL,))
    (note,) = (note for note in planned.notes if "data-parallel" in note)
    assert "item, word" in note
    assert "in_backward_optimizer_filter(parallel.named_parameters())" in note
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=planned.sharding_plan)
    dense = Adam(dict(in_backward_optimizer_filter(parallel.named_parameters())).values())
    before = {name: value.detach().clone() for name, value in parallel.named_parameters()}
    assert len(before) == 2
    for step in range(3):
        dense.zero_grad()
        (parallel(keys_of(100 * rank + step)).values().sum(dim=1) - 1).square().mean().backward()
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
    planned = plan_model(Model(word="words"), batches(), topology=MACHINES)
    assert [table.ids_per_sample for table in planned.request.tables] == [3.0, 1.0]
    assert planned.request.tables[1].access == Zipf()
    assert "nothing tells how keys of word are looked up: Zipf with exponent 1.05 is assumed" in planned.notes
    assert "no batch has feature words of table word; batches have features that no table takes: word" in planned.notes
    half = plan_model(Model(), [keys_of(seed, features=("clicked", "word")) for seed in range(40)], topology=MACHINES)
    assert [note for note in half.notes if "batch" in note] == ["no batch has feature bought of table item"]
    told = plan_model(Model(word="words"), batches(), topology=MACHINES, access={"word": Zipf()})
    assert not [note for note in told.notes if "batch" in note]


def test_a_table_of_which_batches_have_no_key_is_told() -> None:
    none = torch.zeros(48, dtype=torch.int64)
    none[:32] = 2
    keys = [
        KeyedJaggedTensor(["clicked", "bought", "word"], keys_of(seed).values()[:64], lengths=none)
        for seed in range(40)
    ]
    planned = plan_model(Model(), keys, topology=MACHINES)
    assert planned.request.tables[1].ids_per_sample == 0
    assert "batches have no key of word: planned as if nothing were ever looked up there" in planned.notes
