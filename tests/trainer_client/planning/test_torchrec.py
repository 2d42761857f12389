from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig

from evenkeel.placement import (
    Eviction,
    InvalidInputError,
    Optimizer,
    PlanRequest,
    Runtime,
    Step,
    Table,
    Topology,
    Zipf,
    plan,
)
from evenkeel.placement.application import lines_to_paste
from evenkeel.placement.plan_file import PlanFile, dumps, loads
from tests.trainer_client.planning.models import Collections
from trainer_client.planning import (
    describe_configs,
    describe_model,
    dynamicemb_constraints,
    fused_params,
    parameter_constraints,
)


def _model() -> Collections:
    bags = [Table(name=f"bag_{i}", rows=101 + i, dim=16, pooled=True, group="bags") for i in range(3)]
    return Collections([*bags, Table(name="seq", rows=57, dim=8, group="rows")])


def _request(tables: tuple[Table, ...], ranks: int = 2, **topology: Any) -> PlanRequest:
    machines = Topology(ranks=ranks, **{"hbm_bytes": 7 << 29, **topology})
    return PlanRequest(tables=tables, topology=machines, runtime=Runtime.TORCHREC, step=Step(samples_per_rank=8))


def test_a_model_is_described_with_its_modules_as_groups() -> None:
    lookups, access = {"seq": 50.0}, {"bag_1": Zipf(exponent=2)}
    tables = describe_model(_model(), optimizer=Optimizer.SGD, ids_per_sample=lookups, access=access)
    assert [(t.name, t.rows, t.dim, t.group, t.pooled) for t in tables] == [
        ("bag_0", 101, 16, "bags", True),
        ("bag_1", 102, 16, "bags", True),
        ("bag_2", 103, 16, "bags", True),
        ("seq", 57, 8, "rows", False),
    ]
    assert tables[3].ids_per_sample == 50
    assert tables[1].access == Zipf(exponent=2)


def test_unknown_tables_and_types_are_refused() -> None:
    config = EmbeddingConfig(name="t", embedding_dim=8, num_embeddings=5, feature_names=["f"], data_type=DataType.INT4)
    with pytest.raises(InvalidInputError, match="data_type"):
        describe_configs([config])
    with pytest.raises(InvalidInputError, match="is no table"):
        describe_model(_model(), access={"nobody": Zipf()})


def _dynamicemb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of what DynamicEmb, which needs a GPU to be built, would be told."""
    record = types.SimpleNamespace
    names = ("DynamicEmbTableOptions", "DynamicEmbInitializerArgs", "FrequencyAdmissionStrategy", "KVCounter")
    library = types.ModuleType("dynamicemb")
    for name in names:
        setattr(library, name, record)
    library.DynamicEmbScoreStrategy = record(TIMESTAMP="ts", LFU="lfu")  # type: ignore[attr-defined]
    library.DynamicEmbInitializerMode = record(UNIFORM="uniform")  # type: ignore[attr-defined]
    planner = types.ModuleType("dynamicemb.planner")
    planner.DynamicEmbParameterConstraints = record  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dynamicemb", library)
    monkeypatch.setitem(sys.modules, "dynamicemb.planner", planner)


def test_dynamicemb_gets_memory_admission_scores_initialisers_optimizer_and_prefetching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = describe_model(_model(), optimizer=Optimizer.ROWWISE_ADAGRAD)
    first, *others = (replace(table, dist_type="continuous") for table in tables)
    first = replace(first, admission_rows=1000, admission_threshold=5, eviction=Eviction.LFU, score_words=2)
    others[0] = replace(others[0], admission_rows=1000, admission_threshold=5)
    step = Step(samples_per_rank=8, training=False, prefetch_depth=2)
    request = replace(_request((first, *others)), runtime=Runtime.DYNAMICEMB, step=step)
    found = plan(request)
    with pytest.raises(ModuleNotFoundError):
        dynamicemb_constraints(request, found)
    _dynamicemb(monkeypatch)
    pasted: dict[str, Any] = {}
    exec(lines_to_paste(request, found), pasted)
    assert pasted["constraints"] == dynamicemb_constraints(request, found)
    assert pasted["fused_params"] == fused_params(request)
    assert pasted["fused_params"]["optimizer"] is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    assert pasted["fused_params"]["prefetch_pipeline"] is True
    counted, plain = (pasted["constraints"][name].dynamicemb_options for name in ("bag_0", "seq"))
    both = (pasted["constraints"], dynamicemb_constraints(request, found))
    for told in both:  # DynamicEmb fuses tables only whose strategy is the same object
        assert told["bag_0"].dynamicemb_options.admit_strategy is told["bag_1"].dynamicemb_options.admit_strategy
    assert plain.dist_type == "continuous"
    assert counted.global_hbm_for_values == 2 * found.placements[0].hbm_value_bytes
    assert counted.score_strategy == ("ts", "lfu")
    assert plain.score_strategy == "ts"
    assert counted.admit_strategy.threshold == 5
    assert counted.admission_counter.capacity == 512  # of 1000 over 2 ranks, in buckets of 128
    assert not hasattr(plain, "admit_strategy")
    assert counted.initializer_args.upper == -counted.initializer_args.lower == 101**-0.5  # as TorchRec's tables begin
    assert counted.training is False
    own = dynamicemb_constraints(request, found, training=True, initializer_args=None)["seq"].dynamicemb_options
    assert (own.training, own.initializer_args) == (True, None)


def test_optimizers_that_differ_are_given_by_table() -> None:
    first, *others = describe_model(_model())
    request = _request((replace(first, optimizer=Optimizer.SGD), *others))
    pasted: dict[str, Any] = {}
    exec(lines_to_paste(request, plan(request)), pasted)
    optimizers = {name: params["optimizer"] for name, params in pasted["fused_params"].items()}
    assert optimizers["bag_0"] is EmbOptimType.EXACT_SGD
    assert optimizers["seq"] is EmbOptimType.ADAM
    with pytest.raises(InvalidInputError, match="a sharder takes one"):
        fused_params(request)


def test_plan_files_are_lossless_and_versioned() -> None:
    request = _request(describe_model(_model()))
    content = PlanFile(request=request, plan=plan(request))
    assert loads(dumps(content)) == content
    with pytest.raises(InvalidInputError, match="another version"):
        loads(dumps(content).replace('"version": 1', '"version": 99', 1))


@pytest.mark.parametrize("runtime", list(Runtime))
def test_a_plan_in_which_nothing_fits_says_so_when_it_is_applied(runtime: Runtime) -> None:
    request = replace(_request(describe_model(_model()), hbm_bytes=1 << 20, host_bytes=0), runtime=runtime)
    apply = parameter_constraints if runtime is Runtime.TORCHREC else dynamicemb_constraints
    said = r"plan\.status: holds no placements: .*HBM on every GPU.*give more memory"
    with pytest.raises(InvalidInputError, match=said):
        apply(request, plan(request))
