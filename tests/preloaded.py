"""What the server has in memory that the processes of the tests are forked from: see `benchmarks.harness.zygote`."""

import gc
import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is imported, as in a balancer's own process

# isort: split
import accelerate  # noqa: F401
import grpc.aio  # noqa: F401
import lightning.pytorch  # noqa: F401
import pytest  # noqa: F401
import torchrec.distributed.train_pipeline  # noqa: F401

import services.balancer.server
import services.planner.app  # noqa: F401
import trainer_client.balancing.costs  # noqa: F401
from evenkeel import partitioning
from trainer_client.balancing import redistribution

partitioning.warm_up()
redistribution.warm_up()
gc.collect()
gc.freeze()
