"""The loop of `plain`, balanced."""

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from examples.demo.histories import Histories
from examples.tutorial.ranker import Ranker
from examples.tutorial.telling import tell
from trainer_client import BalancedLoader, Balancer, BatchSpec, TokenCost

dist.init_process_group("gloo")
torch.manual_seed(0)
batches = Histories(rank=dist.get_rank(), steps=5, batch_size=8, max_length=256)
model = DistributedDataParallel(Ranker(width=16, num_layers=1, num_heads=2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

balancer = Balancer.from_env()
loader = BalancedLoader(
    batches,
    balancer,
    cost=TokenCost(tokens="num_items"),  # what a sample costs: here, its tokens
    spec=BatchSpec(rows_per_sample={"items": "num_items"}),  # `items` has as many rows a sample as `num_items` says
)
for step, batch in enumerate(loader):
    logits = model(batch["items"], batch["num_items"])
    loss = binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum") * loader.loss_scale
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(step, batch["num_items"], loss)

balancer.close()
dist.destroy_process_group()
