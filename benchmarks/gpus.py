"""More ranks than GPUs: for what ranks do, not for how fast they do it."""

from __future__ import annotations

import os

import torch


def own_gpu() -> torch.device:
    """The GPU of this rank, by torchrun's variables; call it before anything else uses CUDA or NCCL.

    NCCL refuses two ranks on one GPU of a host. So where ranks outnumber GPUs, they are told to be on several hosts
    of as many GPUs each: NCCL sends by its sockets between them, and `LOCAL_RANK` counts within one.
    """
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        if int(os.environ["WORLD_SIZE"]) == ranks:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all on this machine, which may have no other network
        host, local = divmod(local, gpus)
        os.environ |= {"NCCL_HOSTID": f"host-{host}", "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(gpus)}
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
