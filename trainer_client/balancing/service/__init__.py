"""The rank's way to the balancer service: a stream of its own, or one for all ranks of its node."""

import os

# Read by gRPC when it is imported. Its fork handlers do nothing for a process whose streams are open, as a rank's are
# while a DataLoader forks workers, and now and then they end the worker.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from evenkeel.credentials import Credentials
from trainer_client.balancing.service.connection import Connection
from trainer_client.balancing.service.messages import ServiceDecision, join_request
from trainer_client.balancing.service.node import NodeSeat

__all__ = ["Connection", "Credentials", "NodeSeat", "ServiceDecision", "join_request"]
