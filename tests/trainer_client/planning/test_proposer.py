from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from trainer_client.planning import ExactProposer


def _model(tables: int, scale: int = 1) -> torch.nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=(32, 64, 128)[i % 3],
            num_embeddings=scale * 100_000 * (1 + (i * i) % 17),
            feature_names=[f"f{i}"],
        )
        for i in range(tables)
    ]
    return torch.nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))


def _plan(model: torch.nn.Module, hbm: int, proposer: Any, ranks: int = 4) -> tuple[Any, float]:
    topology = Topology(world_size=ranks, compute_device="cuda", hbm_cap=hbm, ddr_cap=2**40)
    planner = EmbeddingShardingPlanner(topology=topology, proposer=proposer)
    sharders: Any = [EmbeddingBagCollectionSharder()]
    found = planner.plan(model, sharders)
    best = planner._best_plan
    assert best is not None
    return found, float(planner._perf_model.rate(plan=best))


@pytest.mark.parametrize("hbm", [2**31, 2**33])
def test_plans_are_at_least_as_good_as_torchrecs_and_near_the_bound(hbm: int) -> None:
    proposer = ExactProposer()
    found, rating = _plan(_model(12), hbm, [proposer])
    _, theirs = _plan(_model(12), hbm, None)
    assert rating <= theirs * 1.001
    assert 0 < proposer.lower_bound <= rating * (1 + 1e-9)
    assert rating <= proposer.lower_bound * 1.1
    assert len(found.plan["0"]) == 12


def test_it_can_be_used_again_and_repeats_itself() -> None:
    proposer = ExactProposer()
    first = _plan(_model(6), 2**32, [proposer])
    _plan(_model(3), 2**32, [proposer])
    again = _plan(_model(6), 2**32, [proposer])
    assert first[1] == again[1]
    assert str(first[0]) == str(again[0])


def test_nothing_that_fits_ends_the_search() -> None:
    topology = Topology(world_size=2, compute_device="cuda", hbm_cap=2**22, ddr_cap=2**22)
    planner = EmbeddingShardingPlanner(topology=topology, proposer=[ExactProposer()])
    sharders: Any = [EmbeddingBagCollectionSharder()]
    with pytest.raises(PlannerError):
        planner.plan(_model(4, scale=100), sharders)


def test_an_empty_search_space_proposes_nothing() -> None:
    proposer = ExactProposer()
    proposer.load([])
    assert proposer.propose() is None


@pytest.mark.parametrize(("tables", "hbm"), [(7, 2**30), (9, 3 * 2**29)])
def test_no_plan_of_torchrecs_own_proposers_is_better(tables: int, hbm: int) -> None:
    model = _model(tables, scale=4)
    _, rating = _plan(model, hbm, [ExactProposer()])
    for own in (None, [DynamicProgrammingProposer()]):
        assert rating <= _plan(model, hbm, own)[1] * (1 + 1e-9)


def test_its_own_proposals_and_those_of_others_are_bounded() -> None:
    model = _model(5)
    topology = Topology(world_size=4, compute_device="cuda", hbm_cap=2**31, ddr_cap=2**40)
    planner = EmbeddingShardingPlanner(topology=topology, proposer=[ExactProposer(proposals=3, others=0)])
    sharders: Any = [EmbeddingBagCollectionSharder()]
    planner.plan(model, sharders)
    assert 1 <= planner._num_proposals <= 3


def test_what_cannot_be_the_best_plan_is_not_placed() -> None:
    ranks, floors = 4, []

    class Watched(ExactProposer):
        def propose(self) -> list[Any] | None:
            proposal = super().propose()
            if proposal is not None and self._topology is not None:
                times = [shard.perf.total for option in proposal for shard in option.shards]
                floors.append((max(sum(times) / ranks, *times), self._best))
            return proposal

    _plan(_model(7, scale=4), 2**30, [Watched()], ranks)
    assert len(floors) > 1
    assert all(floor < best for floor, best in floors)
