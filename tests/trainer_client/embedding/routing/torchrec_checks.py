"""TorchRec's row-wise sharded modules with and without Evenkeel's bucketize; needs GPUs, TorchRec and FBGEMM.

`torchrun --nproc-per-node 2 -m tests.trainer_client.embedding.routing.torchrec_checks`
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainer_client.embedding.routing import torchrec_uses_evenkeel

FEATURES = ("a", "b", "c")


def make_batch(rank: int, step: int, device: torch.device) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 9, (3 * 64,), generator=generator)
    values = torch.randint(0, 1000, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths).to(device)


def run(pooled: bool, adapter: bool, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(1)
    kind = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    tables = [kind(name=f"t{f}", embedding_dim=16, num_embeddings=1000, feature_names=[f]) for f in FEATURES]
    module: Any = (
        torchrec.EmbeddingBagCollection(tables=tables, device=device)
        if pooled
        else torchrec.EmbeddingCollection(tables=tables, device=device)
    )
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0)
    sharder: Any = EmbeddingBagCollectionSharder() if pooled else EmbeddingCollectionSharder()
    ranks = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module, {f"t{f}": row_wise() for f in FEATURES}, sharder, local_size=ranks, world_size=ranks, device_type="cuda"
    )
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), device)
    seen = []
    for step in range(3):
        batch = make_batch(dist.get_rank(), step, device)
        if adapter:
            with torchrec_uses_evenkeel():
                result = sharded(batch).wait()
        else:
            result = sharded(batch).wait()
        values = result.values() if pooled else torch.cat([result[f].values() for f in FEATURES])
        values.square().sum().backward()
        seen.append(values.detach().clone())
    return seen


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for pooled in (True, False):
        without, with_it = run(pooled, False, device), run(pooled, True, device)
        assert all(torch.equal(a, b) for a, b in zip(without, with_it, strict=True))
        assert float(without[0].abs().sum()) > 0
        if dist.get_rank() == 0:
            print("EmbeddingBagCollection" if pooled else "EmbeddingCollection", "row-wise: identical with Evenkeel")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
