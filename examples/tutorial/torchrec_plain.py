"""A plain loop over sharded tables: TorchRec's TrainPipelineSparseDist."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from examples.tutorial.tables import WIDTH, Batches, make_tables, shard
from examples.tutorial.telling import tell


class Model(nn.Module):
    """Sharded tables, a dense layer, the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = make_tables()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, batch: Any) -> Any:
        """The loss, and what `tell` wants."""
        logits = self.score(self.tables(batch.features)["history"]).squeeze(-1)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (batch.features["history"].lengths(), loss.detach())


dist.init_process_group("gloo")
torch.manual_seed(0)
model, optimizer = shard(Model())
pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
batches = iter(Batches())
step = 0
while True:
    try:
        tokens, loss = pipeline.progress(batches)
    except StopIteration:
        break
    tell(step, tokens, loss)
    step += 1

dist.destroy_process_group()
