"""What the ranks of programs are forked with: everything imported, all kernels loaded."""

import gc
from pathlib import Path

import torch.distributed.fsdp  # noqa: F401

import benchmarks.programs.rank  # noqa: F401
from evenkeel import partitioning
from trainer_client.balancing import redistribution
from trainer_client.embedding import routing

# FBGEMM's build for GPUs initialises CUDA, which no forked process can use then.
if not Path("/dev/nvidiactl").exists():
    import torchrec  # noqa: F401

partitioning.warm_up()
redistribution.warm_up()
routing.warm_up()
gc.collect()
gc.freeze()
