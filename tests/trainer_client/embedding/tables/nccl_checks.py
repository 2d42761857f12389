"""The collection over NCCL against one process holding the whole tables.

`torchrun --nproc-per-node 2 -m tests.trainer_client.embedding.tables.nccl_checks`
"""

import os

import torch
import torch.distributed as dist

from tests.trainer_client.embedding.tables.wrapped import WRAPPERS, train_wrapped


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for name in WRAPPERS:
        train_wrapped(name, dist.get_rank(), dist.get_world_size(), device, 2e-3)
    if dist.get_rank() == 0:
        print("the collection over NCCL equals one process holding the whole tables, under", ", ".join(WRAPPERS))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
