"""What types of tables and weights of lookups are in TorchRec itself, and that plans know it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, data_type_to_sparse_type
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenkeel.placement import InvalidInputError, Mode, Optimizer, PlanRequest, Runtime, Topology
from evenkeel.placement.storage import torchrec_footprint
from tests.trainer_client.balancing.jobs import run_in_turn
from trainer_client.planning import describe_model, plan_model

ROWS, DIM, LENGTH, SAMPLES = 640, 16, 3, 4


def _bags(kind: DataType = DataType.FP32, *, weighted: bool = False) -> EmbeddingBagCollection:
    one = EmbeddingBagConfig(
        name="item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["item"], data_type=kind
    )
    return EmbeddingBagCollection(tables=[one], is_weighted=weighted, device=torch.device("cpu"))


class _Model(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, keys: KeyedJaggedTensor) -> torch.Tensor:
        found: torch.Tensor = self.bags(keys).values()
        return found


def _keys(seed: int, *, weighted: bool = False) -> KeyedJaggedTensor:
    source = torch.Generator().manual_seed(seed)
    return KeyedJaggedTensor(
        keys=["item"],
        values=torch.randint(0, ROWS, (SAMPLES * LENGTH,), generator=source),
        lengths=torch.full((SAMPLES,), LENGTH),
        weights=torch.rand(SAMPLES * LENGTH, generator=source) if weighted else None,
    )


def _request(bags: nn.Module, runtime: Runtime = Runtime.TORCHREC, **fields: Any) -> PlanRequest:
    tables = describe_model(_Model(bags), optimizer=Optimizer.ROWWISE_ADAGRAD, **fields)
    return PlanRequest(tables=tables, topology=Topology(ranks=2, hbm_bytes=8 << 30), runtime=runtime)


def _of_fbgemm(kind: DataType, place: EmbeddingLocation, sets: int = 0) -> SplitTableBatchedEmbeddingBagsCodegen:
    """The module that TorchRec makes for such a table on a GPU, which need not be there."""
    precision = data_type_to_sparse_type(kind)
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, place, ComputeDevice.CUDA)],
        weights_precision=precision,
        cache_precision=precision,
        cache_sets=sets,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        device=torch.device("meta"),
    )


@pytest.mark.parametrize("kind", [DataType.FP32, DataType.FP16])
def test_rows_and_caches_take_the_bytes_that_fbgemm_allocates(kind: DataType) -> None:
    (table,) = describe_model(_Model(_bags(kind)), optimizer=Optimizer.ROWWISE_ADAGRAD)
    hbm, held, rows = torchrec_footprint(table, Mode.CACHING, np.array([0.1]), ROWS, DIM, training=True)
    made = dict(_of_fbgemm(kind, EmbeddingLocation.MANAGED_CACHING, int(rows[0]) // 32).named_buffers())
    cache = made["lxu_cache_weights"]
    assert cache.shape[0] == rows[0]
    beside = sum(made[name].numel() * made[name].element_size() for name in ("lxu_cache_state", "lxu_state"))
    planned = cache.numel() * cache.element_size() + beside + ROWS * 8  # the map of rows, and the optimizer's state
    assert 0 <= int(hbm[0]) - planned <= 1 << 14
    host = made["weights_uvm"]
    assert 0 <= int(held[0]) - host.numel() * host.element_size() <= 4096


@pytest.mark.parametrize("runtime", list(Runtime))
@pytest.mark.parametrize("kind", [DataType.BF16, DataType.INT8])
def test_the_remedy_names_types_that_the_runtime_takes(kind: DataType, runtime: Runtime) -> None:
    taken = {"FP32", "FP16"} | ({"BF16"} if runtime is Runtime.DYNAMICEMB else set())
    given: dict[str, Any] = {"topology": "h200x2", "device": "cpu", "runtime": runtime, "eviction": "lfu"}
    if kind.name in taken:
        assert plan_model(_Model(_bags(kind)), **given).request.tables[0].data_type.value == "bfloat16"
        return
    with pytest.raises(InvalidInputError, match=r"^item\.data_type: ") as caught:
        plan_model(_Model(_bags(kind)), **given)
    remedy = caught.value.remedy.replace("float", "FP")
    advised, _, otherwise = remedy.partition(", or ")
    named = set(re.findall(r"FP\d+|BF16", advised))
    assert set() < named <= taken
    assert otherwise in ("BF16 with runtime dynamicemb", "plan with runtime dynamicemb")
    for name in named:
        plan_model(_Model(_bags(DataType[name])), **given)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _request(_bags(weighted=True), Runtime.DYNAMICEMB), "weighted: is not what DynamicEmb does"),
        (lambda: _request(_bags(), weighted=True), "weighted: is told by the model"),
    ],
)
def test_weights_that_would_do_something_else_are_refused(make: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        make()


def _run_types(rank: int) -> None:
    for kind, weighted in ((DataType.FP16, False), (DataType.FP32, True), (DataType.FP16, True)):
        torch.manual_seed(1)
        model = _Model(_bags(kind, weighted=weighted))
        batches = [_keys(20 * rank + seed, weighted=weighted) for seed in range(20)]
        planned = plan_model(model, batches, optimizer=Optimizer.ADAGRAD)
        (table,) = planned.request.tables
        assert (table.value_bytes, table.weighted) == (2 if kind is DataType.FP16 else 4, weighted)
        rows = model.bags.embedding_bags["item"].weight.detach().clone()  # type: ignore[index,union-attr]
        parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=planned.sharding_plan)
        shards = parallel.state_dict()["bags.embedding_bags.item.weight"].local_shards()
        assert {shard.tensor.dtype for shard in shards} == {rows.dtype}
        for shard in shards:
            first = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(rows[first : first + shard.tensor.shape[0]])
        out = parallel(batches[0])
        given = batches[0].weights() if weighted else torch.ones(SAMPLES * LENGTH)
        expected = (rows.float()[batches[0].values()] * given[:, None]).view(SAMPLES, LENGTH, DIM).sum(1)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
        out.sum().backward()


def _run_learned_weights(rank: int) -> None:
    torch.manual_seed(1)
    processor = PositionWeightedModule(max_feature_length=LENGTH)
    model = _Model(FeatureProcessedEmbeddingBagCollection(_bags(weighted=True), {"item": processor}))
    planned = plan_model(model, [_keys(20 * rank + seed) for seed in range(20)], optimizer=Optimizer.SGD)
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=planned.sharding_plan)
    parallel(_keys(rank)).sum().backward()
    gradients = [given.grad for name, given in parallel.named_parameters() if "position_weight" in name]
    assert [gradient is not None and bool(gradient.abs().sum() > 0) for gradient in gradients] == [True]
    assert planned.request.tables[0].group == "bags"


def _managed() -> ManagedCollisionEmbeddingBagCollection:
    bags = _bags()
    module = MCHManagedCollisionModule(
        zch_size=ROWS, device=torch.device("cpu"), eviction_policy=LFU_EvictionPolicy(), eviction_interval=2
    )
    return ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection({"item": module}, bags.embedding_bag_configs())
    )


class _Managed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = _managed()

    def forward(self, keys: KeyedJaggedTensor) -> torch.Tensor:
        found: torch.Tensor = self.bags(keys)[0].values()
        return found


def _run_managed(rank: int) -> None:
    model = _Managed()
    batches = [_keys(20 * rank + seed) for seed in range(20)]
    planned = plan_model(model, batches, optimizer=Optimizer.SGD, sharding=["table_wise", "row_wise"])
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=planned.sharding_plan)
    assert type(parallel.module.bags).__name__ == "ShardedManagedCollisionEmbeddingBagCollection"  # type: ignore[union-attr]
    for batch in batches[:3]:
        parallel(batch).sum().backward()


def test_types_weights_learned_weights_and_managed_collisions_train_by_their_plans() -> None:
    run_in_turn(2, (_run_types,), (_run_learned_weights,), (_run_managed,))
    with pytest.raises(InvalidInputError, match="sharding: is not what 'bags' does: managed collisions are by rows"):
        describe_model(_Managed(), sharding="table_wise")
