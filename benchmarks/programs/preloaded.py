"""What the ranks of programs are forked with: everything imported, all kernels loaded."""

import contextlib
import gc
from pathlib import Path

import torch.distributed.fsdp  # noqa: F401

import benchmarks.programs.rank  # noqa: F401
from evenkeel import partitioning
from trainer_client.balancing import redistribution
from trainer_client.embedding import routing

if not Path(
    "/dev/nvidiactl"
).exists():  # FBGEMM's build for GPUs initialises CUDA, which no forked process can use then
    with contextlib.suppress(ModuleNotFoundError):
        import torchrec  # noqa: F401
with contextlib.suppress(ModuleNotFoundError):
    import trainer_client.balancing.asking  # noqa: F401

partitioning.warm_up()
redistribution.warm_up()
routing.warm_up()
gc.collect()
gc.freeze()
