"""What the server has in memory that the processes of the tests are forked from: see `tests.zygote`."""

import gc

import services.balancer  # before gRPC, as in its own process: it says how much gRPC logs

# isort: split
import grpc.aio  # noqa: F401
import pytest  # noqa: F401
import torch.distributed  # noqa: F401

import services.balancer.server
import services.planner.app  # noqa: F401
import trainer_client.balancing.costs  # noqa: F401
from evenkeel import partitioning
from trainer_client.balancing import redistribution

partitioning.warm_up()
redistribution.warm_up()
gc.collect()
gc.freeze()
