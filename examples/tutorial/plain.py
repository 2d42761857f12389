"""A plain loop: DistributedDataParallel over users whose histories differ in length."""

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from examples.demo.histories import Histories
from examples.tutorial.ranker import Ranker
from examples.tutorial.telling import tell

dist.init_process_group("gloo")
torch.manual_seed(0)
batches = Histories(rank=dist.get_rank(), steps=5, batch_size=8, max_length=256)
model = DistributedDataParallel(Ranker(width=16, num_layers=1, num_heads=2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step, batch in enumerate(batches):
    logits = model(batch["items"], batch["num_items"])
    loss = binary_cross_entropy_with_logits(logits, batch["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(step, batch["num_items"], loss)

dist.destroy_process_group()
