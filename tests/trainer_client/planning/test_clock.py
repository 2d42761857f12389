"""Plans are trained on Gloo ranks here as by GPUs elsewhere; the quickest stays."""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding

from benchmarks.harness.ranks import run_ranks
from evenkeel.placement import (
    InvalidInputError,
    Mode,
    Optimizer,
    PlanRequest,
    Runtime,
    Sharding,
    Step,
    Table,
    Topology,
    plan,
)
from evenkeel.placement.calibration import StepSample, TablePart, correction_factors, measured_samples
from evenkeel.placement.plan_file import MeasuredPlan, loads
from evenkeel.placement.request import with_time
from evenkeel.plan_requests import unpacked, with_measured
from tests.trainer_client.planning.test_model import Model, batches, keys_of
from trainer_client.planning import load_sharding_plan, plan_model
from trainer_client.planning.clock import contenders
from trainer_client.planning.collective import run_on_ranks
from trainer_client.planning.measuring import STEPS, measure_steps, scaled

CPU = torch.device("cpu")
WORKSPACE = 2 << 30


def _request(hbm_bytes: int = 12_000_000, ranks: int = 1, **step: float) -> PlanRequest:
    tables = tuple(
        Table(
            name=f"t{index}",
            rows=20_000 * (index + 1),
            dim=16,
            ids_per_sample=3.0,
            features=1 + index % 2,
            pooled=index % 3 != 0,
            weighted=index == 4,
            group="deep.bags",
            optimizer=Optimizer.ROWWISE_ADAGRAD,
        )
        for index in range(5)
    )
    return PlanRequest(
        tables=tables,
        topology=Topology(ranks=ranks, hbm_bytes=WORKSPACE + hbm_bytes, host_bytes=1 << 34),
        runtime=Runtime.TORCHREC,
        step=Step(samples_per_rank=32, **step),  # type: ignore[arg-type]
    )


def test_contenders_are_those_of_a_minute_and_all_of_them_fit() -> None:
    request = _request()
    first = plan(request)
    found = contenders(request, first)
    assert found["plan"] is first
    assert {"all cached alike", "all in host memory", "by lookups per byte"} <= found.keys()
    assert "all in HBM" not in found
    for made in found.values():
        assert made.hbm.used_bytes <= request.topology.hbm_budget
        assert (made.seconds or 0.0) >= (first.bound_seconds or 0.0), "all are priced by the same profile"
    alike = found["all cached alike"].placements
    assert {placed.mode for placed in alike} == {Mode.CACHING}
    assert max(placed.ratio for placed in alike) - min(placed.ratio for placed in alike) < 1e-6
    dense = [placed.mode for placed in found["by lookups per byte"].placements]
    assert Mode.HBM_ONLY in dense
    assert len(set(dense)) == 2
    roomy = _request(1 << 30)
    assert {placed.mode for placed in contenders(roomy, plan(roomy))["plan"].placements} == {Mode.HBM_ONLY}


def test_contenders_that_cannot_be_made_are_left_out() -> None:
    table = Table(name="t", rows=1000, dim=100, pooled=True)
    request = replace(_request(ranks=2), tables=(table,))
    first = plan(request)
    halves = [ShardMetadata([0, 50 * rank], [1000, 50], f"rank:{rank}/cpu") for rank in range(2)]
    cut = ParameterSharding("column_wise", "fused", [0, 1], EnumerableShardingSpec(halves))
    assert "TorchRec's planner" not in contenders(request, first, {"t": cut}), "FBGEMM takes no parts of 50"
    many = tuple(replace(table, name=f"t{index}") for index in range(100))
    assert contenders(with_time(replace(request, tables=many), 0.01), first) == {"plan": first}


def _clocked(rank: int, folder: Path) -> None:
    model = Model()
    planned = plan_model(model, batches(seed=1000 * rank) if rank == 0 else None, clock=0.2, dense_ms=0.5)
    told: list[object] = [None, None]
    dist.all_gather_object(told, (planned.plan, planned.measured))
    assert told[0] == told[1]
    assert sum(one.chosen for one in planned.measured) == 1
    assert "ms a step" in str(planned)
    planned.save(folder / f"{rank}.json")
    parallel = DistributedModelParallel(model, device=CPU, plan=planned.sharding_plan)
    parallel(keys_of(rank)).backward()
    assert load_sharding_plan(folder / f"{rank}.json", Model(), device="cpu") == planned.sharding_plan
    assert loads((folder / f"{rank}.json").read_text()).measured == planned.measured
    with pytest.raises(InvalidInputError, match="clock: is no time"):
        plan_model(Model(), clock=0.0)


def test_a_model_is_planned_by_the_clock_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _clocked, tmp_path)


def test_the_clock_needs_the_ranks_of_the_plan_and_torchrec() -> None:
    with pytest.raises(InvalidInputError, match=r"topology.ranks: is not the 1 that are here"):
        plan_model(Model(), topology="h200x8", clock=1.0, device="cpu")
    machines = Topology(ranks=1, hbm_bytes=8 << 30)
    with pytest.raises(InvalidInputError, match="runtime: is not run by the clock"):
        plan_model(Model(), topology=machines, runtime=Runtime.DYNAMICEMB, clock=1.0, device="cpu")
    assert plan_model(Model(), topology=machines, clock=0.1, device="cpu").measured
    assert not dist.is_initialized()


def test_a_plan_file_corrects_the_profile_that_it_was_planned_with() -> None:
    request = _request()
    value, measured = unpacked(
        {"format": "evenkeel-plan", "request": {"tables": []}, "measured": []}, topology="h200x1"
    )
    assert (value["hardware"], measured) == ("h200", ())
    slow = MeasuredPlan(name="plan", step_s=1.0, kernels_s=3e-3, predicted={"HOST_ONLY": 1e-3})
    corrected = with_measured(request, (slow,))
    before, after = (each.profile.costs(Runtime.TORCHREC) for each in (request, corrected))
    assert 2 < after.host_factor / before.host_factor <= 3
    assert after.miss_factor == before.miss_factor


@pytest.mark.parametrize("factors", [{"HBM_ONLY": 2.0, "CACHING": 0.5}, {"HBM_ONLY": 1.0, "CACHING": 3.0}])
def test_measured_plans_correct_each_mode_towards_what_they_took(factors: dict[str, float]) -> None:
    mixes = [{"HBM_ONLY": 1e-3}, {"CACHING": 2e-3}, {"HBM_ONLY": 5e-4, "CACHING": 1e-3}]
    measured = [
        MeasuredPlan(
            name=str(index),
            step_s=1.0,
            kernels_s=sum(seconds * factors[mode] for mode, seconds in parts.items()),
            predicted=parts,
        )
        for index, parts in enumerate(mixes)
    ]
    found = correction_factors(measured)
    for mode, factor in factors.items():
        assert found[mode] == pytest.approx(factor, rel=0.1)
    assert correction_factors([]) == {}


MIXED = StepSample(
    name="mixed",
    samples=16,
    optimizer=Optimizer.SGD,
    parts=(
        TablePart(count=2, rows=600, dim=8),
        TablePart(count=2, rows=600, dim=8, mode=Mode.CACHING, ratio=0.5, ids=3),
        TablePart(count=1, rows=600, dim=8, mode=Mode.HOST_ONLY, sharding=Sharding.TABLE_WISE),
        TablePart(count=1, rows=600, dim=8, ids=5, pooled=False),
    ),
)


def _measure(_: int) -> list[dict[str, Any]]:
    return measure_steps([MIXED], torch.device("cpu"), seconds=0.1)


def test_ranks_measure_a_step_and_its_host_part_and_agree_on_them() -> None:
    first, second = run_ranks(2, _measure)
    assert first == second
    (sample,) = measured_samples(first)
    assert (sample.ranks, sample.parts) == (2, MIXED.parts)
    assert sample.seconds > 0
    assert first[0]["host_s"] > 0
    assert first[0]["kernels_s"] is None, "a CPU has no kernels of its own time"


def test_ranks_that_fail_say_why() -> None:
    with pytest.raises(RuntimeError, match=r"^index failed on 1 ranks: TypeError: 'torch.device' object cannot be"):
        run_on_ranks(operator.index, 1, "cpu")


def test_samples_are_made_smaller_to_try_the_way() -> None:
    small = scaled(STEPS, 0.001)
    assert [sample.name for sample in small] == [sample.name for sample in STEPS]
    assert all(part.rows <= 4096 for sample in small for part in sample.parts)
    assert scaled(STEPS, 1.0) == list(STEPS)
