"""The rank's way to the balancer service: a stream of its own, or one for all ranks of its node."""

import os

# gRPC takes no part in the forks of this process. Its fork handlers do nothing for a process whose streams are open, as
# a rank's are while a DataLoader forks workers, and now and then they end the worker. It reads the variable when it is
# imported and never again, so it is there only then.
if "GRPC_ENABLE_FORK_SUPPORT" not in os.environ:
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ["GRPC_ENABLE_FORK_SUPPORT"]

# isort: split
from evenkeel.credentials import Credentials
from trainer_client.balancing.service.connection import Connection
from trainer_client.balancing.service.messages import ServiceDecision, join_request
from trainer_client.balancing.service.node import NodeSeat

__all__ = ["Connection", "Credentials", "NodeSeat", "ServiceDecision", "join_request"]
